"""The options of a request, against what a runner is told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from puna import wire
from puna.api import options
from puna.api.options import Options, OptionTypeError, merge, warnings
from puna.errors import BadRequest


def test_names_and_defaults_are_the_runners() -> None:
    own = {item.name: getattr(Options(), item.name) for item in dataclasses.fields(Options)}
    told = msgspec.json.decode(msgspec.json.encode(wire.SamplingOptions()))
    assert told == {name: own[name] for name in told}
    assert options.SAMPLERS == wire.SAMPLERS


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"samplers": ["top_k", "magic"]}, BadRequest, 'samplers: there is no "magic", there are penalties, dry, '),
        ({"samplers": ["temp", "temperature"]}, BadRequest, "each may be named once"),
        ({"samplers": "top_k"}, OptionTypeError, 'option "samplers" must be of type array'),
        ({"mirostat": 3}, BadRequest, "mirostat must be 0, 1 or 2, not 3"),
        ({"logit_bias": [1]}, OptionTypeError, 'option "logit_bias" must be of type object'),
        ({"logit_bias": {"the": 1}}, BadRequest, 'logit_bias: "the" is not the number of a token'),
        ({"logit_bias": {"-1": 1}}, BadRequest, "is not the number of a token"),
        ({"logit_bias": {"1": "x"}}, OptionTypeError, "must be of an object of numbers"),
        ({"logit_bias": {"1": 1e300}}, OptionTypeError, "value out of range"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        merge(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"colour": 1}, ['option "colour" is not known, and has no effect']),
        ({"f16_kv": True, "top_k": None}, ['option "f16_kv" is not in use any more, and has no effect']),
        ({"mirostat": 2, "top_k": 5, "temperature": 1}, ['option "top_k" has no effect: mirostat takes its place']),
        ({"samplers": ["top_k"], "dry_base": 2}, ['option "dry_base" has no effect: dry is not among samplers']),
        ({"samplers": [], "mirostat": 1, "temperature": 2, "repeat_penalty": 2}, ["penalties is not among samplers"]),
        ({"samplers": ["min_p"], "min_p": 0.1}, []),
        ({"num_ctx": 1, "stop": ["a"], "min_tokens": 3}, []),
    ],
)
def test_what_does_nothing_is_said(given: dict[str, Any], says: list[str]) -> None:
    found = warnings(given)
    assert len(found) == len(says)
    assert all(expected in text for text, expected in zip(found, says, strict=True))


def test_a_flood_of_unknown_names_is_cut_short() -> None:
    found = warnings({f"{'x' * 1000}{i}": 1 for i in range(1000)})
    assert len(found) == 21
    assert all(len(text) < 200 for text in found)
    assert found[-1] == "and 980 more"
