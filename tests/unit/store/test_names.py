from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import InvalidName
from puna.store.disk.manifests import Manifests
from puna.store.names import Name

FIRST = string.ascii_letters + string.digits + "_"


def parts(others: str, max_others: int) -> st.SearchStrategy[str]:
    return st.builds(str.__add__, st.sampled_from(FIRST), st.text(FIRST + others, max_size=max_others))


NAMES = st.builds(
    Name,
    host=parts("-.:", 349),
    namespace=parts("-", 79),
    model=parts("-.", 79),
    tag=parts("-.", 79),
    scheme=st.sampled_from(["http", "https"]),
)


@pytest.mark.parametrize(
    ("text", "full", "display"),
    [
        ("llama3", "registry.ollama.ai/library/llama3:latest", "llama3:latest"),
        ("llama3:8b", "registry.ollama.ai/library/llama3:8b", "llama3:8b"),
        ("me/llama3", "registry.ollama.ai/me/llama3:latest", "me/llama3:latest"),
        ("hf.co/user/repo.gguf:Q4_K_M", "hf.co/user/repo.gguf:Q4_K_M", "hf.co/user/repo.gguf:Q4_K_M"),
        ("localhost:5000/a/b", "localhost:5000/a/b:latest", "localhost:5000/a/b:latest"),
        ("https://host/a/b:c", "host/a/b:c", "host/a/b:c"),
        ("Registry.Ollama.AI/Library/X", "Registry.Ollama.AI/Library/X:latest", "X:latest"),
    ],
)
def test_parts_are_read_from_the_right(text: str, full: str, display: str) -> None:
    name = Name.parse(text)
    assert name.full == full
    assert name.display == display


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "/",
        "x:",
        ":x",
        "/x",
        "a//x",
        "..",
        "../x",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../x",
        "..:..",
        "x:..",
        ".x",
        "-x",
        "x y",
        "x\0",
        "x\n",
        "x/y/z/w",
        "a.b/x",  # a namespace has no point
        "a/b\\c",
        "C:\\x",
        "C:/x:y",
        "x@sha256:" + "0" * 64,
        "ünïcode",
        "x:tag/y",
        "m" * 81,
        "x:" + "t" * 81,
        "n" * 81 + "/x",
        "h" * 351 + "/n/x",
        "x" * 10_000_000,
        "ftp://host/n/x",
        "://x",
        "%2e%2e/x",
    ],
)
def test_names_outside_the_grammar_are_refused(text: str) -> None:
    with pytest.raises(InvalidName, match=r"^invalid model name$"):
        Name.parse(text)


@given(NAMES)
def test_full_names_are_read_back(name: Name) -> None:
    assert Name.parse(f"{name.scheme}://{name.full}") == name


@given(NAMES)
def test_display_names_mean_the_same_model(name: Name) -> None:
    assert Name.parse(name.display).is_same(name)


@given(st.text(max_size=40) | st.text("./\\:-_aA0\0%~ ", max_size=20))
def test_a_name_never_leads_out_of_the_folder(text: str) -> None:
    """Whatever is typed is refused or gives a path exactly four levels below the manifests."""
    folder = Path("/store/manifests")
    try:
        path = Manifests(folder).path(Name.parse(text))
    except InvalidName:
        return
    assert path.parent.parent.parent.parent == folder
    assert ".." not in path.parts


@given(NAMES)
def test_case_does_not_tell_names_apart(name: Name) -> None:
    other = Name.parse(f"{name.scheme}://{name.full.swapcase()}")
    assert other.is_same(name)


def test_different_tags_are_different_models() -> None:
    assert not Name.parse("x:a").is_same(Name.parse("x:b"))
