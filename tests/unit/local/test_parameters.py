"""What a program may hand over as a request, and what it is told where that cannot be one."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from puna.errors import BadRequest
from puna.local.parameters import chat_request, generate_request, listed


def generate(prompt: Any = "x", **given: Any) -> dict[str, Any]:
    request = generate_request("m", prompt, given, -1)
    return {name: getattr(request, name) for name in ("prompt", "images", "logprobs", "top_logprobs", "options", "format")}


@pytest.mark.parametrize("prompt", [None, 5, b"x", ["x"]], ids=repr)
def test_a_prompt_is_text(prompt: object) -> None:
    with pytest.raises(TypeError, match=f"a prompt is a text, not {type(prompt).__name__}"):
        generate(prompt)


@pytest.mark.parametrize("messages", [None, 5, b"x", {"role": "user", "content": "x"}], ids=repr)
def test_a_conversation_is_a_text_or_a_list(messages: Any) -> None:
    with pytest.raises(TypeError, match=f"a conversation is a text or a list of messages, not {type(messages).__name__}"):
        chat_request("m", messages, {}, -1)


@pytest.mark.parametrize("message", ["x", ("user", "x"), None], ids=repr)
def test_a_message_is_a_mapping(message: Any) -> None:
    with pytest.raises(TypeError, match=f"a message is a mapping .* not {type(message).__name__}"):
        chat_request("m", [message], {}, -1)


def test_messages_may_be_any_mapping_in_anything_that_is_read_one_by_one() -> None:
    message = MappingProxyType({"role": "user", "content": "x"})
    request = chat_request("m", (each for each in [message, message]), {}, -1)  # type: ignore[arg-type]
    assert [each.content for each in request.messages] == ["x", "x"]


def test_one_text_is_no_list_of_its_characters() -> None:
    assert listed((letter for letter in "abc"), "prompts") == ["a", "b", "c"]
    with pytest.raises(TypeError, match="prompts must be a list, not str"):
        listed("abc", "prompts")
    with pytest.raises(TypeError, match="images must be a list, not str"):
        generate(images="abc")


def test_none_is_as_if_nothing_were_said() -> None:
    """As of who hands on what its own caller may have left out."""
    nothing = dict.fromkeys(("images", "logprobs", "format", "stop", "temperature", "seed", "system"))
    assert generate(**nothing) == generate()
    chat_request("m", "x", {"tools": None}, -1)


@pytest.mark.parametrize(
    ("given", "asked", "others"), [(True, True, 0), (0, True, 0), (3, True, 3), (False, None, None)], ids=repr
)
def test_logprobs_may_be_a_yes(given: Any, asked: bool | None, others: int | None) -> None:
    found = generate(logprobs=given)
    assert bool(found["logprobs"]) is bool(asked)
    assert (found["top_logprobs"] or 0) == (others or 0)


def test_numbers_and_mappings_of_other_libraries_are_numbers_and_mappings() -> None:
    found = generate(seed=np.int64(3), temperature=np.float32(0.5), format=MappingProxyType({"type": "object"}))
    assert (found["options"]["seed"], found["options"]["temperature"]) == (3, 0.5)
    assert found["format"] == {"type": "object"}


def test_one_text_may_stop_an_answer() -> None:
    assert generate(stop=".")["options"] == generate(stop=["."])["options"] == {"stop": ["."]}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_refused_in_words(value: float) -> None:
    with pytest.raises(BadRequest, match="nothing that a model could be sent: Out of range"):
        generate(temperature=value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temprature", "'temprature'; did you mean 'temperature'"),
        ("max_tokens", "'max_tokens'$"),
        ("system", "'system': in a conversation, system is part of the messages"),
        ("images", "'images': in a conversation, images are part of the messages"),
        ("raw", "'raw' here: it is one of generate"),
    ],
)
def test_a_keyword_that_there_is_none_of(name: str, says: str) -> None:
    with pytest.raises(TypeError, match=f"there is no parameter {says}"):
        chat_request("m", "x", {name: 1}, -1)


def test_an_image_is_bytes_or_a_file_or_base64(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    as_base64 = base64.b64encode(b"picture").decode()
    given = [b"picture", bytearray(b"picture"), memoryview(b"picture"), tmp_path / "a.png", as_base64]
    found = generate(images=given)["images"]
    assert len(found) == len(given)
    assert len({bytes(image) if not isinstance(image, str) else image for image in found}) == 1
    with pytest.raises(BadRequest, match=r"'photo\.png' is not base64; what names a file is a Path"):
        generate(images=["photo.png"])
    with pytest.raises(TypeError, match="an image is bytes, a Path, or base64, not int"):
        generate(images=[5])
