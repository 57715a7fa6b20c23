"""The container's and the service's descriptions agree with the project they start."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import manual, setup

from puna.settings import ELSEWHERE, Settings, load
from tests.unit.server.live import Live

ROOT = Path(setup.__file__).resolve().parent.parent
SYSTEMD = ROOT / "packaging" / "systemd"
SETTINGS = {item.metadata["env"] for item in fields(Settings)}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def _of(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def _ignored() -> list[str]:
    return [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def _environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(word.split("=", 1) for rest in _of(stage, "ENV") for word in shlex.split(rest))


def test_the_first_stage_has_all_that_a_build_needs() -> None:
    """What setup.py and pyproject.toml name, and what the wheel brings; and nothing that .dockerignore keeps back."""
    copied = {word for rest in _of(stages()[0], "COPY") for word in rest.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "setup.py", "src", "share", "constraints.txt", project["readme"], *project["license-files"]}
    assert copied == needed == set(_ignored())
    assert all((ROOT / name).exists() for name in copied)


def test_the_second_stage_has_no_compiler_and_takes_only_wheels() -> None:
    _, last = stages()
    assert all(rest.startswith("--from=build ") for rest in _of(last, "COPY"))
    installed = " ".join(_of(last, "RUN"))
    assert not re.search(r"\b(g\+\+|gcc|clang|make|build-essential)\b", installed)
    assert "--no-index" in installed


def test_the_image_runs_as_nobody_in_particular_with_a_place_for_models() -> None:
    _, last = stages()
    [user] = _of(last, "USER")
    made = " ".join(_of(last, "RUN"))
    assert f"useradd --uid 10001 --create-home --home-dir /home/{user} {user}" in made
    [volume] = _of(last, "VOLUME")
    environment = _environment(last)
    assert environment["OLLAMA_MODELS"] == volume
    assert f"--owner={user} --group={user} {volume}" in made  # a new volume takes its owner from the image
    assert set(environment) <= SETTINGS
    settings = load(environment)
    assert not settings.host.is_loopback  # from outside the container
    assert not settings.allow_no_keys  # who opens it to others says so
    assert _of(last, "EXPOSE") == [str(settings.host.port)]


def test_the_image_s_words_are_commands() -> None:
    _, last = stages()
    [entry], [words] = _of(last, "ENTRYPOINT"), _of(last, "CMD")
    assert json.loads(entry) == ["puna"]
    assert json.loads(words)[0] in manual.commands()


def _health_command() -> list[str]:
    _, last = stages()
    [check] = _of(last, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert isinstance(command, list)
    return [sys.executable, *command[1:]]


def _on(port: int) -> list[str]:
    return [word.replace("11434", str(port)) for word in _health_command()]


def test_the_health_check_tells_a_server_from_none(tmp_path: Path) -> None:
    live = Live(tmp_path)
    with live.running():
        assert subprocess.run(_on(live.port), check=False, capture_output=True).returncode == 0
    assert subprocess.run(_on(live.port), check=False, capture_output=True).returncode != 0


def test_the_python_of_the_image_is_one_that_the_project_takes() -> None:
    versions = {rest.split()[0] for rest in (stage[0][1] for stage in stages())}
    [version] = versions  # wheels of the first stage are for the Python of the second
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    found = re.fullmatch(r"python:3\.(\d+)-slim", version)
    assert found
    assert wanted.startswith(">=3.")
    assert int(found[1]) >= int(wanted.removeprefix(">=3."))


def _service() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["puna"]
    assert isinstance(found, dict)
    return found


def test_compose_opens_the_server_to_this_machine_alone() -> None:
    service = _service()
    assert service["ports"] == ["127.0.0.1:11434:11434"]
    assert set(service["environment"]) <= SETTINGS
    assert load(service["environment"]).allow_no_keys


def test_compose_keeps_the_models_and_can_write_where_the_server_does() -> None:
    service = _service()
    [volume] = service["volumes"]
    name, _, place = volume.partition(":")
    assert place == _environment(stages()[1])["OLLAMA_MODELS"]
    assert name in yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]
    assert service["read_only"]
    assert {entry.partition(":")[0] for entry in service["tmpfs"]} == {"/tmp", "/home/puna"}


def _unit(name: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names in units are case-sensitive
    unit.read_string(re.sub(r"^Environment=", "Environment1=", (SYSTEMD / name).read_text(), count=1, flags=re.MULTILINE))
    return unit


def test_the_service_starts_a_command_with_settings_that_exist() -> None:
    service = _unit("puna.service")["Service"]
    program, command = service["ExecStart"].split()
    assert Path(program).name == "puna"
    assert command in manual.commands()
    names = {word.partition("=")[0] for word in service["Environment1"].split()}
    assert names <= SETTINGS | set(ELSEWHERE) | {"HOME", "XDG_CACHE_HOME"}


def test_the_socket_is_where_clients_look() -> None:
    settings = Settings()
    assert _unit("puna.socket")["Socket"]["ListenStream"] == f"{settings.host.host}:{settings.host.port}"


@pytest.mark.thorough
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    puna = Path(sys.executable).with_name("puna")
    for name in ("puna.service", "puna.socket"):
        (tmp_path / name).write_text((SYSTEMD / name).read_text().replace("/usr/local/bin/puna", str(puna)))
    command = ["systemd-analyze", "verify", "--man=no", *(str(path) for path in sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
