"""Models on GPUs, from the request to the answer: the search for devices, the layout, real runners, who leaves for whom.

The GPUs are synthetic (tests/synthetic_gpus.py says what that does not show); everything else is what serves requests.
Every GPU keeps 457 MiB for its driver; the sizes here are what lies above.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import uvloop

from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.runner import Runner
from puna.server.app import create_app
from puna.server.placing.scheduler import Scheduler
from puna.server.process.serve import make_server
from puna.settings import Address, Settings
from puna.store.store import Store
from tests.hostile_images import encoded, noise
from tests.patience import PATIENCE_S
from tests.tiny import write_llama
from tests.vision import gemma3

DRIVER_MIB = 457
COMMAND = [sys.executable, "-m", "tests.synthetic_gpus"]
ROOT = Path(__file__).parents[2]


class Place:
    """A server and what it says."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def ask(self, model: Path, *, keep_alive: Any = None, status: int = 200, **options: Any) -> str:
        fixed = {"num_ctx": 256, "num_batch": 64, "num_predict": 8, "temperature": 0, "ignore_eos": True}
        body = {"model": str(model), "prompt": "hello", "options": fixed | options, "stream": False, "keep_alive": keep_alive}
        response = self.client.post("/api/generate", json=body)
        assert response.status_code == status, response.text
        return str(response.json()["response" if status == 200 else "error"])

    def loaded(self) -> dict[str, tuple[int, int]]:
        """Bytes and those of them on GPUs, by file name."""
        models = self.client.get("/api/ps").json()["models"]
        return {Path(model["name"].removesuffix(":latest")).name: (model["size"], model["size_vram"]) for model in models}

    def share(self, model: Path) -> float:
        size, on_gpus = self.loaded()[model.name]
        return on_gpus / size


@contextmanager
def serving(folder: Path, gpus: str, *, engine: str = "1", **given: Any) -> Iterator[Place]:
    """With Puna's engine, or libllama when *engine* is "0". Runners are started as the server's launcher starts them."""
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    environ = {**os.environ, "SYNTHETIC_GPUS": gpus, "SYNTHETIC_GPUS_FOLDER": str(notes), "PYTHONPATH": str(ROOT)}
    environ["OLLAMA_NEW_ENGINE"] = engine

    async def start(path: Path, more: Mapping[str, str] = MappingProxyType({})) -> Runner:
        return await Runner.start([*COMMAND, "runner", "--channel", "--model", str(path)], environ={**environ, **more})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        settings = Settings(host=Address(port=port), models=folder / "models", num_parallel=1, **given)
        env = ["env", *(f"{name}={environ[name]}" for name in ("SYNTHETIC_GPUS", "SYNTHETIC_GPUS_FOLDER", "PYTHONPATH"))]
        machine = Machine([*env, *COMMAND, "discover"])
        launcher = Launcher(start=start, machine=machine, start_with=start)
        scheduler = Scheduler(settings, launcher.launch, machine)
        server = make_server(create_app(settings, Store(settings.models), scheduler, launcher), settings)
        thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            with httpx.Client(base_url=settings.host.url, timeout=PATIENCE_S) as client:
                yield Place(client)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def gpu(name: str, room_mib: int, *flags: str) -> str:
    return ":".join([name, str(DRIVER_MIB + room_mib), *flags])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of seven layers of 8 MiB each and a smaller output."""
    folder = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"n_layers": 7, "n_embd": 512, "n_heads": 8, "n_kv_heads": 2, "n_ff": 1024, "dtype": "f32"}
    return [write_llama(folder / f"{name}.gguf", seed=seed, **shape) for seed, name in enumerate(("a", "b"))]


@pytest.fixture(scope="module")
def answers(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the CPU."""
    with serving(tmp_path_factory.mktemp("cpu"), gpu("SIM0", 500)) as place:
        found = [place.ask(model, num_gpu=0) for model in models]
        assert [on_gpus for _, on_gpus in place.loaded().values()] == [0, 0]
        return found


def test_a_model_that_fits_is_on_the_gpu_in_full(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, gpu("SIM0", 300)) as place:
        assert place.ask(models[0]) == answers[0]
        assert place.share(models[0]) == 1.0


def test_what_a_model_sees_with_goes_to_the_gpu_as_well(tmp_path: Path) -> None:
    text = gemma3.write_text(tmp_path / "text.gguf", n_ctx=2048)
    projector = gemma3.encoder().save(tmp_path / "projector.gguf")
    image = base64.b64encode(encoded("PNG", noise(200, 100))).decode()
    seen: list[tuple[str, float]] = []
    for room in (300, 0):
        with serving(tmp_path, gpu("SIM0", room)) as place:
            body = {"model": str(text), "projector": str(projector), "images": [image], "prompt": "what is it", "raw": True}
            options = {"temperature": 0, "num_predict": 8, "ignore_eos": True}
            response = place.client.post("/api/generate", json={**body, "options": options, "stream": False})
            assert response.status_code == 200, response.text
            seen.append((response.json()["response"], place.share(text)))
    (on_gpu, share), (on_cpu, nothing) = seen
    assert on_gpu == on_cpu
    assert share > 0.85, "what is left on the host is the vocabulary, and images before and after they are encoded"
    assert nothing == 0


def test_an_integrated_gpu_takes_what_the_discrete_one_cannot(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, f"{gpu('SIM0', 300, 'i')},{gpu('SIM1', 40)}") as place:
        assert place.ask(models[0]) == answers[0]
        assert place.share(models[0]) == 1.0
        assert all(taken_on(tmp_path, name) > 10 << 20 for name in ("SIM0", "SIM1"))


def test_as_many_layers_as_were_asked_for(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    """Each number is another placement, so the model is loaded again; none asked for is none."""
    with serving(tmp_path, gpu("SIM0", 300)) as place:
        shares = []
        for num_gpu in (0, 2, 5, 7, 999):
            assert place.ask(models[0], num_gpu=num_gpu) == answers[0]
            shares.append(place.share(models[0]))
        assert shares == sorted(shares)
        assert shares[0] == 0
        assert 0.15 < shares[1] < 0.5 < shares[2] < shares[3] < shares[4] == 1


def test_what_does_not_fit_stays_on_the_cpu(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, gpu("SIM0", 40)) as place:
        assert place.ask(models[0]) == answers[0]
        assert 0.3 < place.share(models[0]) < 0.9


def test_a_model_is_spread_over_two_that_are_too_small_alone(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, f"{gpu('SIM0', 40)},{gpu('SIM1', 45)}") as place:
        assert place.ask(models[0]) == answers[0]
        assert place.share(models[0]) == 1.0


def test_spread_over_all_when_that_is_wanted(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, f"{gpu('SIM0', 300)},{gpu('SIM1', 300)}", sched_spread=True) as place:
        assert place.ask(models[0]) == answers[0]
        assert all(taken_on(tmp_path, name) > 10 << 20 for name in ("SIM0", "SIM1"))


def test_the_main_gpu_comes_first(models: list[Path], tmp_path: Path) -> None:
    with serving(tmp_path, f"{gpu('SIM0', 300)},{gpu('SIM1', 200)}") as place:
        place.ask(models[0], main_gpu=1)
        assert (taken_on(tmp_path, "SIM0"), taken_on(tmp_path, "SIM1") > 0) == (0, True)


def taken_on(folder: Path, device: str) -> int:
    """As the processes that live have noted."""
    return sum(int(note.read_text() or 0) for note in (folder / "notes").glob(f"{device}.*"))


def test_a_device_that_has_less_than_it_says_gets_less(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, gpu("SIM0", 300, "really=60")) as place:
        assert place.ask(models[0]) == answers[0]
        assert 0.1 < place.share(models[0]) < 1
        error = place.ask(models[0], num_gpu=999, status=500)
        assert re.search(r"memory layout cannot be allocated with num_gpu = 999: no memory for .* on SIM0", error)


def test_the_idle_model_leaves_the_gpu_for_the_next(models: list[Path], answers: list[str], tmp_path: Path) -> None:
    a, b = models
    with serving(tmp_path, gpu("SIM0", 90)) as place:
        for model, answer in ((a, answers[0]), (b, answers[1]), (a, answers[0])):
            assert place.ask(model) == answer
            assert set(place.loaded()) == {model.name}
            assert place.share(model) == 1.0


def test_a_pinned_model_keeps_its_place_and_the_next_takes_what_is_left(
    models: list[Path], answers: list[str], tmp_path: Path
) -> None:
    a, b = models
    with serving(tmp_path, gpu("SIM0", 105)) as place:
        place.ask(a, keep_alive=-1)
        assert place.ask(b) == answers[1]
        assert place.share(a) == 1.0
        assert 0 < place.share(b) < 1


def test_overhead_is_left_free(models: list[Path], tmp_path: Path) -> None:
    with serving(tmp_path, gpu("SIM0", 90), gpu_overhead=60 << 20) as place:
        place.ask(models[0])
        assert place.share(models[0]) < 0.6


@pytest.mark.parametrize(
    ("gpus", "options", "least", "most"),
    [
        (gpu("SIM0", 300), {}, 1.0, 1.0),
        (gpu("SIM0", 300), {"num_gpu": 0}, 0.0, 0.0),
        (gpu("SIM0", 300), {"num_gpu": 2}, 0.1, 0.3),
        (gpu("SIM0", 40), {}, 0.3, 0.9),
        (f"{gpu('SIM0', 40)},{gpu('SIM1', 45)}", {}, 1.0, 1.0),
    ],
)
def test_libllama_places_layers_as_it_is_told(
    models: list[Path], answers: list[str], tmp_path: Path, gpus: str, options: dict[str, int], least: float, most: float
) -> None:
    with serving(tmp_path, gpus, engine="0") as place:
        assert place.ask(models[0], **options) == answers[0]
        assert least <= place.share(models[0]) <= most
        on_gpus = place.loaded()[models[0].name][1] if most < 1 else 0
        assert most == 1.0 or sum(taken_on(tmp_path, name) for name in ("SIM0", "SIM1")) == pytest.approx(on_gpus, rel=0.01)


@pytest.mark.parametrize("where", ["start", "alloc", "write"])
def test_a_driver_that_crashes_costs_the_gpu_and_not_the_model(
    models: list[Path], answers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The second model does not crash again; who insists on the GPU is told why it cannot be."""
    with serving(tmp_path, gpu("SIM0", 300, f"crash={where}")) as place:
        for model, answer in zip(models, answers, strict=True):
            assert place.ask(model) == answer
            assert place.share(model) == 0
        crashes = [record.message for record in caplog.records if "crashed its runner" in record.message]
        assert len(crashes) == 1
        assert "on SIM0" in crashes[0]
        error = place.ask(models[0], num_gpu=3, status=500)
        assert re.search(r"stopped \(signal SIGABRT\): SIM error: an illegal memory access.*loaded onto SIM0", error)
        assert place.ask(models[1]) == answers[1]


def test_a_gpu_that_cannot_compute_costs_one_request(
    models: list[Path], answers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, gpu("SIM0", 300, "crash=compute")) as place:
        error = place.ask(models[0], status=500)
        assert re.search(r"stopped \(signal SIGABRT\): SIM error: an illegal memory access", error)
        assert place.ask(models[0]) == answers[0]
        assert place.share(models[0]) == 0
    assert "has crashed on SIM0 before it had answered anything" in caplog.text


def test_libllama_s_driver_may_crash_too(
    models: list[Path], answers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, gpu("SIM0", 300, "crash=start"), engine="0") as place:
        assert place.ask(models[0]) == answers[0]
        assert place.share(models[0]) == 0
    assert "on SIM0 has crashed its runner" in caplog.text


def test_a_driver_that_ends_every_process_costs_its_gpus_alone(
    models: list[Path], answers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Runners would open it, too, wherever their layers are. A library that needs no such driver is used as before."""
    with serving(tmp_path, f"{gpu('CUDA0', 300, 'library=CUDA', 'crash=open')},{gpu('SIM0', 90)}") as place:
        for model, answer in zip(models, answers, strict=True):
            assert place.ask(model) == answer
            assert set(place.loaded()) == {model.name}  # the free memory is asked for, so the other has left
            assert place.share(model) == 1.0
        assert (taken_on(tmp_path, "CUDA0"), taken_on(tmp_path, "SIM0") > 0) == (0, True)
    told = "GPUs of CUDA, ROCm and Vulkan are not used: the search for devices ended with signal 6: SIM error"
    assert told in caplog.text
    assert "is not known" not in caplog.text
