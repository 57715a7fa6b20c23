"""Which engine runs a file: the rule, the reply of /api/show, and what the command line prints of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from puna import settings
from puna.cli.model_card import model_card
from puna.engines import ARCHITECTURES, choose


def test_the_architecture_decides() -> None:
    assert [choose(name).engine for name in ARCHITECTURES] == ["puna"] * len(ARCHITECTURES)
    choice = choose("stablelm")
    assert (choice.engine, choice.is_forced) == ("compat", False)
    assert "stablelm" in choice.reason


@pytest.mark.parametrize(("value", "engine"), [("1", "puna"), ("true", "puna"), ("0", "compat"), ("false", "compat")])
def test_the_setting_decides_over_the_architecture(value: str, engine: str) -> None:
    new_engine = settings.load({"OLLAMA_NEW_ENGINE": value}).new_engine
    for architecture in ("llama", "stablelm"):
        choice = choose(architecture, new_engine)
        assert (choice.engine, choice.is_forced) == (engine, True)
        assert "OLLAMA_NEW_ENGINE" in choice.reason


def test_without_the_setting_nothing_is_forced() -> None:
    assert settings.load({}).new_engine is None
    assert settings.load({"OLLAMA_NEW_ENGINE": " "}).new_engine is None


def test_the_card_of_a_model_names_the_engine_and_the_reason() -> None:
    assert "compat (no other way)" in model_card({"engine": "compat", "engine_reason": "no other way"})
    assert "engine" not in model_card({"details": {"family": "llama"}})


def test_the_table_is_read_without_the_engine() -> None:
    code = "import sys, puna.engines; print([m for m in sys.modules if m.startswith('puna.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert loaded.stdout.strip() == "['puna.engines']"
