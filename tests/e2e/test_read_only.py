"""A folder of models that may only be read, laid out by Ollama: models are listed and run from it, and nothing in it changes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.laid_out import model
from tests.patience import PATIENCE_S
from tests.ports import kept_free
from tests.tiny import write_llama

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of Linux
_LIBC = ctypes.CDLL(None, use_errno=True)

Puna = Callable[..., subprocess.CompletedProcess[str]]


def _heed_modes() -> None:
    """Have the modes of files hold for root as well, in what this process becomes."""
    if os.geteuid() == 0 and _LIBC.prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the right to pass over modes cannot be given up")


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "models"
    weights = Path(write_llama(tmp_path / "tiny.gguf", n_ctx=512)).read_bytes()
    params = '{"num_predict":4,"num_ctx":128,"temperature":0}'
    model(root, "registry.ollama.ai/library/tiny/latest", weights, params=params, template="{{ .Prompt }}", age_s=7200)
    for path in [*root.rglob("*"), root]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield root
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)


@pytest.fixture
def host() -> Iterator[str]:
    with kept_free() as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def puna(tmp_path: Path, models: Path, host: str) -> Puna:
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OLLAMA_", "PUNA_", "XDG_"))}
    env = {**kept, "HOME": str(home), "OLLAMA_MODELS": str(models), "OLLAMA_HOST": host}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "puna", *arguments]
        return subprocess.run(
            command,
            env=env,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=_heed_modes,
        )

    return run


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): b"" if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def test_models_are_run_from_a_folder_that_may_only_be_read(puna: Puna, models: Path) -> None:
    before = contents(models)
    listed = puna("list")
    assert listed.stdout.splitlines()[1].startswith("tiny:latest"), listed.stderr
    answer = puna("run", "tiny", "hello")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    for refused in (("cp", "tiny", "other"), ("rm", "tiny"), ("create", "new", "-f", "/dev/null")):
        done = puna(*refused)
        assert done.returncode == 1, refused
        assert done.stderr.startswith("Error: "), done.stderr
        assert "Traceback" not in done.stderr
    assert "could not be changed: Permission denied" in puna("rm", "tiny").stderr
    assert contents(models) == before
