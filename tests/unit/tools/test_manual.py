"""What is installed for man and for shells tells of every command and setting, and is as the code is now."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tools import manual

from puna.settings import ELSEWHERE, UNSUPPORTED, Settings

ROOT = Path(manual.__file__).resolve().parent.parent
PUNA = Path(sys.executable).with_name("puna")


def _help(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PUNA), "help", *words], capture_output=True, text=True, check=False)


def test_the_files_are_as_the_code_is_now() -> None:
    """`make docs` writes them."""
    assert {name: (ROOT / name).read_text() for name in manual.files()} == manual.files()


def test_nothing_else_is_installed() -> None:
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "share").rglob("*") if path.is_file()} == set(manual.files())


def test_the_page_names_every_command_option_and_setting() -> None:
    page = manual.man_page().replace("\\-", "-")
    sections = set(re.findall(r"^\.SS puna ([a-z-]+(?: [a-z]+)?)", page, re.MULTILINE))
    assert sections == set(manual.commands()) >= {"run", "serve", "doctor", "native build"}
    assert {"--keepalive VALUE", "--truncate, --no-truncate", "--json"} <= set(re.findall(r"^\.B (--.*)$", page, re.MULTILINE))
    assert "private-server" not in page
    named = set(re.findall(r"^\.B ([A-Z_]+)$", page, re.MULTILINE))
    assert {item.metadata["env"] for item in fields(Settings)} | {*ELSEWHERE} | {*UNSUPPORTED} <= named


@pytest.mark.parametrize(("text", "escaped"), [("a-b", "a\\-b"), ("\\d", "\\ed"), (".SH", "\\&.SH"), ("it's", "it\\(aqs")])
def test_no_text_becomes_a_command_of_roff(text: str, escaped: str) -> None:
    assert manual.roff(text) == escaped


def test_bash_completes_commands_with_the_installed_file(tmp_path: Path) -> None:
    file = tmp_path / "puna"
    file.write_text(manual.files()["share/bash-completion/completions/puna"])
    script = f"""
    PATH={PUNA.parent}:$PATH
    source {file}
    COMP_WORDS=(puna ser) COMP_CWORD=1
    _puna_completion puna
    echo "${{COMPREPLY[@]}}"
    complete -p puna
    """
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["serve", "complete -o default -F _puna_completion puna"]


def test_help_lists_topics_and_explains_each() -> None:
    listed = _help().stdout
    topics = re.findall(r"^  ([\w-]+)", listed, re.MULTILINE)
    assert set(topics) >= {*(name.split()[0] for name in manual.commands()), "environment", "files", "status"}
    assert "OLLAMA_KV_CACHE_TYPE" in _help("environment").stdout
    assert "~/.ollama/models" in _help("files").stdout
    assert "130" in _help("status").stdout
    assert _help("run").stdout.startswith("Usage: puna run [OPTIONS]")


def test_a_topic_that_does_not_exist() -> None:
    done = _help("weather")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no help on 'weather'" in done.stderr
