"""A whole server on a free port, in a thread: real routes, store and scheduler, and runners that follow a script."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from puna.llm.runner import Runner
from puna.server.app import create_app
from puna.server.placing.scheduler import Scheduler
from puna.server.process.connections import Connections
from puna.server.process.serve import make_server
from puna.settings import Address, Settings
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.patience import PATIENCE_S
from tests.tiny import write_llama
from tests.unit.llm.fake_machine import FakeMachine
from tests.unit.llm.scripted import events, fake_command, requests_to, write_script

GO_CHATML = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"


class Live:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        given = {"host": Address(port=self.port), "models": folder / "models", **settings}
        self.settings = replace(Settings(), **given)
        self.store = Store(self.settings.models)
        self.machine = FakeMachine()
        self.scheduler = Scheduler(self.settings, self._launch, self.machine)
        self.server = make_server(create_app(self.settings, self.store, self.scheduler), self.settings)
        self.scripts: dict[Path, Path] = {}
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> Connections:
        protocol: Any = self.server.config.http
        found: Connections = protocol.keywords["registry"]
        return found

    async def _launch(self, model_path: Path) -> Runner:
        return await Runner.start(fake_command(self.scripts[model_path]))

    def add(self, name: str, recipe: Recipe | None = None, *, template: str | None = GO_CHATML, **script: Any) -> Path:
        """A model with weights of its own, whose runner follows *script*; returns the script's path."""
        number = len(self.scripts)
        file = write_llama(self.folder / f"{number}.gguf", n_layers=1, n_embd=32, n_ff=32, metadata={"general.tag": str(number)})
        blob = self.store.blobs.import_file(file)
        base = recipe or Recipe()
        model = self.store.create(
            name, replace(base, files={"model.gguf": blob.digest}, template=base.template or template or "")
        )
        return self.follow(model.model_path, **script)

    def follow(self, model_path: Path | None, **script: Any) -> Path:
        assert model_path is not None
        path = write_script(self.folder, f"script{len(self.scripts)}", **script)
        self.scripts[model_path] = path
        return path

    def completions(self, script: Path) -> list[dict[str, Any]]:
        """What the runner was asked to complete."""
        return requests_to(script, "complete")

    def events(self, script: Path) -> list[list[Any]]:
        return events(script)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    @contextmanager
    def running(self) -> Iterator[Live]:
        thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        thread.start()
        try:
            yield self
        finally:
            self.client.close()
            self.server.should_exit = True
            thread.join(PATIENCE_S)
            self.listener.close()
        assert not thread.is_alive()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self.listener])
        assert not self.scheduler.models
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left
