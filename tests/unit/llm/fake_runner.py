"""A runner without an engine: speaks puna.wire as the real one does, and behaves as its model file says.

The "model" is a JSON object with any of the fields of ``Script``. What happens is appended to ``<model>.events``, one
JSON array a line, so that tests see what reached the runner and when a request was cancelled. Started as
``python fake_runner.py --channel --model FILE``; uses the standard library alone, so that it starts fast.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Script:
    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo", " world"])
    echo: bool = False  # answer with the prompt instead of the pieces
    piece_delay_s: float = 0.0
    n_pieces: int = 0  # above zero: this many times "x " instead
    cached_count: int = 0
    load_asks: int = 0  # the load moves on when somebody asks how far it is, and has so many steps
    gate: str = ""  # a file: no answer begins before it is there
    together: int = 0  # nor before there are so many requests
    load_error: str = ""
    out_of_memory: bool = False
    needs: int = 1234  # bytes
    needs_per_token: int = 0  # more, for the cache
    layers: int = 1  # and the output; all but 4 bytes are theirs
    stall: bool = False  # load without ever making progress, and for ever
    n_ctx_train: int = 0
    start_noise: str = ""  # said instead of the greeting
    silent: bool = False  # never says anything
    exit_at_start: int = -1
    exit_at_load: int = -1
    crash_on: dict[str, int] = field(default_factory=dict)  # by device: the signal that ends it when layers go there
    crash_at: str = "fit"  # or commit, reading, completion
    crash_after: int = 0  # so many times that it might have
    stderr: str = ""  # written before dying
    die_at_piece: int = -1  # ends with SIGKILL before this piece
    hang_at_piece: int = -1  # says nothing more, yet lives and answers about its health
    lose_at_piece: int = -1  # no longer has a model from there on, and lives on
    drop_at_piece: int = -1  # closes the line to the server there, and lives on
    fail_at_piece: int = -1
    fail_status: int = 500
    fail_text: str = "the sky fell"
    stop_sequence: str = ""  # said to have ended the answer
    thinking_count: int = 0
    cache_cells: int = 0
    cache_used: int = 0
    host_cache_bytes: int = 0
    host_cache_entries: int = 0
    image_tokens: int = 1  # that each image takes
    occupancy: dict[str, Any] = field(default_factory=dict)  # said when asked for
    ignore_sigterm: bool = False


class FakeRunner:
    def __init__(self, model: Path) -> None:
        self.script = Script(**json.loads(model.read_text()))
        self.events = open(f"{model}.events", "a", buffering=1)  # noqa: SIM115 - lives as long as the process
        self.progress = 0.0
        self.ready = False
        self.n_ctx = 0
        self.active = 0
        self.n_asked = 0
        self.n_looks = 0
        self.steps = 0
        self.tokens = 0  # of answered prompts and their answers
        self.is_lost = False

    def note(self, *event: Any) -> None:
        print(json.dumps(event), file=self.events)

    def die(self) -> None:
        if self.script.stderr:
            print(self.script.stderr, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def serve(self) -> None:
        reader, self.line = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0)), limit=2**26)
        self.line.write((self.script.start_noise or "[]").encode() + b"\n")
        self.note("start", os.getpid())
        running: dict[int, asyncio.Task[None]] = {}
        while line := await reader.readline():
            command = json.loads(line)
            if command["type"] == "complete":
                self.note("complete", command["request"])
                running[command["id"]] = asyncio.create_task(self.complete(command["id"], command["request"]))
            elif command["type"] == "call":
                asyncio.create_task(self.ask(command["id"], command["path"], command["body"]))  # noqa: RUF006
            elif command["type"] == "cancel" and command["id"] in running:
                running[command["id"]].cancel()
        self.note("end of input")
        os._exit(0)

    def say(self, number: int, reply: dict[str, Any]) -> None:
        self.line.write(json.dumps([[number, reply]]).encode() + b"\n")

    async def ask(self, number: int, path: str, body: dict[str, Any]) -> None:
        if path not in ("/health", "/occupancy"):
            self.note(path, body)
        status, answer = await self.answer(path, body)
        is_found = status == 200
        self.say(number, {"type": "answer", "body": answer} if is_found else {"type": "failed", "status": status, **answer})

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/load":
                return await self.load(body)
            case "/health":
                answer = self.health()
            case "/occupancy":
                answer = self.script.occupancy
            case "/tokenize":
                answer = {"tokens": list(range(len(body["content"].split())))}
            case "/images":
                answer = {"n_tokens": [self.script.image_tokens] * len(body["images"])}
            case "/detokenize":
                answer = {"content": " ".join(map(str, body["tokens"]))}
            case _:
                return 404, {"error": f"no such path: {path}"}
        return 200, answer

    def health(self) -> dict[str, Any]:
        if self.script.load_asks and not self.ready:
            self.n_looks += 1
            self.progress = self.n_looks / self.script.load_asks
            self.ready = self.n_looks == self.script.load_asks
        status = "launched" if self.is_lost else "ready" if self.ready else "loading"
        found = {"status": status, "progress": self.progress, "active": self.active, "steps": self.steps}
        found["tokens"] = self.tokens
        names = ("cache_cells", "cache_used", "host_cache_bytes", "host_cache_entries")
        return found | {name: getattr(self.script, name) for name in names}

    async def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.script.exit_at_load >= 0:
            print(self.script.stderr, file=sys.stderr, flush=True)
            os._exit(self.script.exit_at_load)
        if self.script.load_error:
            return 200, {"success": False, "error": self.script.load_error}
        if self.script.out_of_memory:
            memory = {"devices": [], "input_weights": 10**12}
            return 200, {"success": False, "error": "model requires more system memory", "memory": memory}
        self.used = [part["device"] for part in body["options"]["gpu_layers"]]
        self.crash_if(body["operation"])
        memory = self.memory(body["options"])
        if body["operation"] == "fit":
            return 200, {"success": True, "memory": memory}
        self.n_ctx = body["options"]["n_ctx"]
        if self.script.n_ctx_train:
            self.n_ctx = min(self.n_ctx, self.script.n_ctx_train)
        if not self.script.stall and not self.script.load_asks:
            self.loading = asyncio.create_task(self.read_weights())
        return 200, {"success": True, "n_ctx": self.n_ctx, "engine": "puna", "memory": memory}

    def memory(self, options: dict[str, Any]) -> dict[str, Any]:
        """As much as the script says, on the devices that the layers were sent to."""
        n = self.script.layers + 1
        n_tokens = options["n_pool"] or options["n_ctx"] * options["n_parallel"]
        left = self.script.needs - 4 + self.script.needs_per_token * n_tokens
        weights = [left // n] * (n - 1) + [left - left // n * (n - 1)]
        devices: list[dict[str, Any]] = []
        for part in options["gpu_layers"]:
            taken = [size if part["begin"] <= i < part["end"] else 0 for i, size in enumerate(weights)]
            weights = [size - own for size, own in zip(weights, taken, strict=True)]
            devices.append({"device": part["device"], "weights": taken, "cache": [0] * n, "graph": 0, "is_gpu": True})
        devices.append({"device": "CPU", "weights": weights, "cache": [0] * n, "graph": 0})
        return {"devices": devices, "input_weights": 4}

    def crash_if(self, where: str) -> None:
        if where != self.script.crash_at:
            return
        self.script.crash_after -= 1
        for device in self.used:
            if device in self.script.crash_on and self.script.crash_after < 0:
                print(self.script.stderr, file=sys.stderr, flush=True)
                os.kill(os.getpid(), self.script.crash_on[device])

    async def read_weights(self) -> None:
        self.crash_if("reading")
        self.progress, self.ready = 1.0, True

    async def complete(self, number: int, body: dict[str, Any]) -> None:
        said = 0
        try:
            async for reply in self.replies(body):
                self.say(number, reply)
                said += 1
        except asyncio.CancelledError:
            self.note("cancelled", said)

    async def replies(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.crash_if("completion")
        self.n_asked += 1
        while self.n_asked < self.script.together or (self.script.gate and not Path(self.script.gate).exists()):
            await asyncio.sleep(0.01)
        pieces = [body["prompt"]] if self.script.echo else (["x "] * self.script.n_pieces or self.script.pieces)
        limit = body["n_predict"] if body["n_predict"] >= 0 else len(pieces)
        for number, piece in enumerate([*pieces[:limit], None]):
            if number == self.script.die_at_piece:
                self.die()
            if number == self.script.hang_at_piece:
                self.active += 1
                await asyncio.Event().wait()
            if number == self.script.lose_at_piece:
                self.is_lost = True
            if self.is_lost:
                yield {"type": "failed", "error": "model is not loaded", "status": 503, "lacks_model": True}
                return
            if number == self.script.drop_at_piece:
                socket.socket(fileno=os.dup(0)).shutdown(socket.SHUT_WR)
                await asyncio.Event().wait()
            if number == self.script.fail_at_piece:
                yield {"type": "failed", "error": self.script.fail_text, "status": self.script.fail_status}
                return
            if piece is None:
                yield self.done(body, min(limit, len(pieces)), "length" if limit < len(pieces) else "stop")
            else:
                yield {"type": "piece", "content": piece} | self.logprobs(piece, body)
                await asyncio.sleep(self.script.piece_delay_s)

    @staticmethod
    def logprobs(piece: str, body: dict[str, Any]) -> dict[str, Any]:
        """Every piece is one token, of logprob -1, and all alternatives are ``?``."""
        if not body.get("logprobs"):
            return {}
        top = [{"text": base64.b64encode(b"?").decode(), "logprob": -2.0}] * body.get("top_logprobs", 0)
        entry = {"text": base64.b64encode(piece.encode()).decode(), "logprob": -1.0}
        return {"logprobs": [entry | ({"top": top} if top else {})]}

    def done(self, body: dict[str, Any], n: int, reason: str) -> dict[str, Any]:
        n_prompt = len(body["prompt"].split()) + len(body["context"])
        tokens = list(range(n_prompt + n)) if body["return_tokens"] else []
        self.tokens += n_prompt + n
        return {
            "type": "done",
            "reason": reason,
            "prompt_eval_count": n_prompt,
            "cached_count": self.script.cached_count,
            "prompt_eval_duration": 1_000_000,
            "eval_count": n + 1,
            "eval_duration": 2_000_000,
            "tokens": tokens,
            "stop_sequence": self.script.stop_sequence,
            "thinking_count": self.script.thinking_count,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--channel", action="store_true")
    runner = FakeRunner(parser.parse_args().model)
    if runner.script.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if runner.script.silent:
        sys.stdin.buffer.read()
    elif runner.script.exit_at_start >= 0:
        print(runner.script.stderr, file=sys.stderr, flush=True)
        sys.exit(runner.script.exit_at_start)
    else:
        asyncio.run(runner.serve())


if __name__ == "__main__":
    main()
