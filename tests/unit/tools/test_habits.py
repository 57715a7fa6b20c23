"""What guides those who report and contribute: it can be read by what reads it, and names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tools import check

from tests.documents import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form.keys() >= {"name", "description", "body"}
    assert {field["type"] for field in form["body"]} <= KINDS
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert all(field["attributes"]["label"] for field in form["body"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_names_documents_and_commands_that_exist(path: Path) -> None:
    text = path.read_text()
    assert all((ROOT / name).exists() for name in re.findall(r"docs/[\w/-]+\.md", text))
    from tools.manual import commands

    assert set(re.findall(r"`puna (\w+)", text)) <= set(commands())


def test_a_commit_is_checked_as_make_check_does() -> None:
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"  # nothing is downloaded
    hooks = {hook["id"]: hook for hook in repo["hooks"]}
    assert {*check.CHECKS, "made"} == set(hooks)
    for name, command in check.CHECKS.items():
        program, *_ = hooks[name]["entry"].split()
        assert program == f".venv/bin/{command[0]}"
        assert hooks[name]["language"] == "system"
    tests = [word for word in hooks["made"]["entry"].split() if word.endswith(".py")]
    assert tests
    assert all((ROOT / test).is_file() for test in tests)


def test_what_a_pull_request_is_asked_for_are_targets() -> None:
    text = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()
    targets = set(re.search(r"`make ([\w -]+)`", text)[1].split())  # type: ignore[index]  # it is there
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
