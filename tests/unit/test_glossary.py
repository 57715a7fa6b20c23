"""The glossary has the engine's settings and metrics, and words that were given up are gone from its code."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from puna.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "puna"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ENGINE = GLOSSARY.partition("\n## A request in the engine\n")[2]
HALF = ["runner", "kvcache", "model", "nn", "ml", "sample", "compat", "wire.py"]  # of the code, the engine's


def rows(text: str) -> list[list[str]]:
    """Of its table: word, meaning, where, formerly, settings and metrics."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def sources(*names: str) -> Iterator[Path]:
    for name in names:
        path = PACKAGE / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def metrics() -> set[str]:
    return {name for path in sources("server") for name in re.findall(r'"(puna_[a-z_]+)"', path.read_text())}


def engines_settings() -> set[str]:
    """The variables that a runner, or its load, depends on."""
    code = "\n".join(path.read_text() for path in sources("runner", "llm/load.py"))
    used = set(re.findall(r"\bsettings(?:\.load\(\))?\.([a-z_]+)", code))
    return {item.metadata["env"] for item in fields(Settings) if item.name in used - {"debug"}}


def named(text: str) -> set[str]:
    return set(re.findall(r"`((?:puna|PUNA|OLLAMA)_\w+)`", text))


def test_every_metric_and_every_setting_of_the_engine_belongs_to_a_word() -> None:
    known = metrics(), engines_settings()
    assert "puna_host_cache_bytes" in known[0]
    assert {"PUNA_HOST_CACHE", "PUNA_TOKEN_GAP", "OLLAMA_NEW_ENGINE"} <= known[1]
    assert not set().union(*known) - named(GLOSSARY)


def test_it_names_no_setting_or_metric_that_does_not_exist() -> None:
    assert not named(GLOSSARY) - metrics() - {item.metadata["env"] for item in fields(Settings)}


def test_its_words_stand_in_order_and_once() -> None:
    words = [row[0] for row in rows(ENGINE)]
    assert words == sorted(set(words), key=str.casefold)
    assert len(words) > 20


RETIRED = [row[3] for row in rows(ENGINE) if row[3]]


def parts_of_names(path: Path) -> set[str]:
    """ThisName and THIS_NAME as "this" and "name", and as "this name"."""
    with tokenize.open(path) as file:
        names = {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}
    words = [re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name) for name in names]
    found = {part.lower() for name in words for part in name}
    return found | {" ".join(pair).lower() for name in words for pair in pairwise(name)}


@pytest.mark.parametrize("word", RETIRED)
def test_a_word_that_was_given_up_names_nothing_any_more(word: str) -> None:
    assert [str(path) for path in sources(*HALF) if word in parts_of_names(path)] == []


def test_given_up_words_are_looked_for() -> None:
    assert {"attic", "reach", "tally", "foresight"} <= set(RETIRED)
    here = parts_of_names(Path(__file__))
    assert {"settings", "of names", "retired", "engine"} <= here
