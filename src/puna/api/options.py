"""The ``options`` of generate and chat, which are also the parameters of a Modelfile: names, types and defaults.

Knows what a value must look like, not what it does.

Source: Ollama's REST API, "Shared request types".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from puna.errors import PunaError

log = logging.getLogger(__name__)


class OptionTypeError(PunaError):
    """An option of the wrong JSON type; Ollama answers it with status 500."""


@dataclass(frozen=True)
class Options:
    """Options of one request. None stands for "nobody asked": the server chooses."""

    # what a change of means loading the model again
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    use_mmap: bool | None = None
    num_thread: int | None = None
    # of this request alone
    num_keep: int = 4
    seed: int = -1
    num_predict: int = -1
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    temperature: float = 0.8
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False  # Puna's own: write no end-of-generation token, for benchmarks
    think_budget: int = -1  # Puna's own: tokens of thoughts at most, then the answer follows; below zero: no limit


_TYPES = {item.name: str(item.type).removesuffix(" | None") for item in fields(Options)}
_JSON_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list[str]": {"type": "array", "items": {"type": "string"}},
}
_DEPRECATED = frozenset(
    (
        "penalize_newline",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "use_mlock",
        "numa",
        "draft_num_predict",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
    )
)
_INT64 = 1 << 63


def json_schema() -> dict[str, Any]:
    """What the API's description says of options."""
    return {"type": "object", "properties": {name: _JSON_TYPES[kind] for name, kind in _TYPES.items()}}


def merge(*layers: Mapping[str, Any]) -> Options:
    """Options from layers of which a later one wins; unknown names are logged and nulls skipped.

    Stop sequences are the exception: a request's are added to those of the model, which its template needs.

    Errors: OptionTypeError naming the option and the type it must have.
    """
    values: dict[str, Any] = {}
    stop: list[str] = []
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            if name not in _TYPES:
                log.log(logging.DEBUG if name in _DEPRECATED else logging.WARNING, "invalid option provided: %r", name[:100])
            elif name == "stop":
                stop += _checked(name, value)
            else:
                values[name] = _checked(name, value)
    return Options(**values, stop=list(dict.fromkeys(stop)))


def _checked(name: str, value: Any) -> Any:
    kind = _TYPES[name]
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "list[str]":
        if not isinstance(value, list):
            raise OptionTypeError(f'option "{name}" must be of type array')
        if not all(isinstance(item, str) for item in value):
            raise OptionTypeError(f'option "{name}" must be of an array of strings')
        return value
    if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        return _number(name, value, kind)
    raise OptionTypeError(f'option "{name}" must be of type {_WIRE_NAMES[kind]}')


_WIRE_NAMES = {"int": "integer", "float": "float32", "bool": "boolean", "list[str]": "array"}


def _number(name: str, value: float, kind: str) -> float:
    if not -_INT64 <= value < _INT64 or not math.isfinite(value):
        raise OptionTypeError(f'option "{name}" must be of type {_WIRE_NAMES[kind]} (value out of range)')
    return int(value) if kind == "int" else float(value)
