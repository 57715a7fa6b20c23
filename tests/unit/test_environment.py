"""What child processes get of the environment: by list, and in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import uvloop

from puna import environment
from puna.llm.discovery import look
from puna.llm.early import SPARE_COMMAND
from puna.llm.runner import Runner, command_for
from puna.store.creating import quantise as quantising
from puna.store.sources.packages.pip import Pip
from tests.patience import wait_until

SECRETS = {
    "PUNA_API_KEYS": "secret",
    "PUNA_API_KEYS_FILE": "/secret",
    "OLLAMA_API_KEY": "secret",
    "OLLAMA_AUTH": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "DATABASE_URL": "secret",
    "GITHUB_TOKEN": "secret",
    "LLAMA_API_KEY": "secret",
    "SSH_AUTH_SOCK": "/secret",
}
COMMON = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "LD_LIBRARY_PATH": "/lib", "PYTHONSAFEPATH": "1"}
COMPUTING = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HIP_VISIBLE_DEVICES": "0",
    "HSA_OVERRIDE_GFX_VERSION_0": "9.0.0",
    "GGML_VK_VISIBLE_DEVICES": "0",
    "GPU_DEVICE_ORDINAL": "0",
    "OMP_NUM_THREADS": "2",
    "GOMP_SPINCOUNT": "1",
    "OLLAMA_NEW_ENGINE": "1",
}
PIP = {
    "PIP_TIMEOUT": "7",
    "PIP_RETRIES": "1",
    "http_proxy": "http://proxy",
    "HTTPS_PROXY": "http://proxy",
    "no_proxy": "localhost",
}


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **COMMON, **COMPUTING, **PIP}.items():
        monkeypatch.setenv(name, value)


def check(found: dict[str, str], wanted: dict[str, str]) -> None:
    assert not SECRETS.keys() & found.keys()
    assert {name: found.get(name) for name in wanted} == wanted
    assert {"PATH", "HOME"} & os.environ.keys() <= found.keys()


def test_what_computes_gets_what_computing_needs() -> None:
    check(environment.for_computing(), {**COMMON, **COMPUTING})
    assert not PIP.keys() & environment.for_computing().keys()


def test_pip_gets_its_settings_and_the_way_out() -> None:
    check(environment.for_pip(), {**COMMON, **PIP})
    assert not COMPUTING.keys() & environment.for_pip().keys()


@pytest.mark.parametrize("command", [command_for(Path("none.gguf")), SPARE_COMMAND], ids=["runner", "spare"])
def test_a_runner_gets_no_secrets(command: list[str]) -> None:
    async def scenario() -> dict[str, str]:
        runner = await Runner.start(command)
        try:
            return psutil.Process(runner.pid).environ()
        finally:
            await runner.close()

    check(uvloop.run(scenario()), {**COMMON, **COMPUTING})


WRITE_IT = "open({where}, 'w').write(chr(0).join(n + '=' + v for n, v in os.environ.items()))"


def teller(seen: Path) -> list[str]:
    return [sys.executable, "-c", f"import os\n{WRITE_IT.format(where=repr(str(seen)))}"]


def told(seen: Path) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in seen.read_text().split("\0"))


def test_the_search_for_devices_gets_no_secrets(tmp_path: Path) -> None:
    uvloop.run(look(teller(tmp_path / "seen")))
    check(told(tmp_path / "seen"), {**COMMON, **COMPUTING})


def test_the_quantiser_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "command_for", lambda *_: teller(tmp_path / "seen"))
    quantising.quantise(tmp_path / "a", tmp_path, "q8_0", lambda done, total: None)
    check(told(tmp_path / "seen"), {**COMMON, **COMPUTING})


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What ``python -m pip`` runs then."""
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(f"import os, time\n{code}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), *sys.path)))


def test_pip_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path / "fake", monkeypatch, WRITE_IT.format(where="os.environ['TMPDIR'] + '/seen'"))
    assert Pip(tmp_path, lambda done, total: None)._run(["index"], lambda done, total: None) is None
    check(told(tmp_path / "seen"), {**COMMON, **PIP})


def test_pip_and_its_folder_go_with_a_server_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    fake_pip(
        tmp_path / "fake", monkeypatch, "open(os.environ['TMPDIR'] + '/pid', 'w').write(f'{os.getpid()}.')\ntime.sleep(1000)"
    )
    ask = f"Pip(Path({str(work)!r}), lambda *_: None)._run([], lambda *_: None)"
    code = f"from pathlib import Path\nfrom puna.store.sources.packages.pip import Pip\n{ask}"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        wait_until(lambda: (work / "pid").exists() and (work / "pid").read_text().endswith("."))
        pip = psutil.Process(int((work / "pid").read_text()[:-1]))
        server.send_signal(signal.SIGKILL)
    try:
        wait_until(lambda: not pip.is_running() or pip.status() == psutil.STATUS_ZOMBIE)
        assert not work.exists()
    finally:
        if pip.is_running():
            pip.kill()
