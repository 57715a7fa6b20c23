from __future__ import annotations

import logging
from typing import Any

import pytest

from puna.api.options import OptionTypeError
from puna.store.models import parameters


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_ctx": 4096.0, "temperature": 1, "stop": ["x"]}, {"num_ctx": 4096, "temperature": 1.0, "stop": ["x"]}),
        ({"seed": None}, {}),
        ({"low_vram": True}, {}),
        ({"mirostat": 1}, {"mirostat": 1}),
        ({"logit_bias": {"7": -1, "8": 2.5}}, {"logit_bias": {7: -1.0, 8: 2.5}}),
        ({"samplers": ["temp", "Top-K"]}, {"samplers": ["temperature", "top_k"]}),
    ],
)
def test_checked_values(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parameters.check(values) == expected


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("num_ctx", "4096", "integer"), ("temperature", True, "float32"), ("stop", "x", "array"), ("use_mmap", 1, "boolean")],
)
def test_wrong_types_are_named(name: str, value: Any, kind: str) -> None:
    with pytest.raises(OptionTypeError, match=f'^option "{name}" must be of type {kind}'):
        parameters.check({name: value})


def test_unknown_names_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parameters.check({"colour": 1}) == {}
    assert "colour" in caplog.text


def test_text_of_show() -> None:
    """One line per value, the name in 30 columns, strings as Go quotes them."""
    text = parameters.text(
        {"temperature": 0.2, "stop": ["</s>", 'a"\n\t\u200b'], "num_ctx": 4096, "top_p": 1.0, "use_mmap": True}
    )
    assert text.split("\n") == [
        "num_ctx                        4096",
        'stop                           "</s>"',
        'stop                           "a\\"\\n\\t\\u200b"',
        "temperature                    0.2",
        "top_p                          1",
        "use_mmap                       true",
    ]
