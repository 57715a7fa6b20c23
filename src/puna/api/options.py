"""The ``options`` of generate and chat, which are also the parameters of a Modelfile: names, types and defaults.

Knows what a value must look like, not what it does.

Source: Ollama's REST API, "Shared request types".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from puna.errors import BadRequest, PunaError

# Steps from logits to probabilities in their default order, and by what other names they are known.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
_OTHER_NAMES = {"typ_p": "typical_p", "typical": "typical_p", "temp": "temperature", "nucleus": "top_p"}

# The step that an option is about. It has no effect where the step is not done.
_STEPS = {
    **{name: name for name in ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "temperature")},
    **{name: "penalties" for name in ("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty")},
    **{name: "xtc" for name in ("xtc_probability", "xtc_threshold")},
    **{f"dry_{name}": "dry" for name in ("multiplier", "base", "allowed_length", "penalty_last_n", "sequence_breakers")},
}
_BESIDE_MIROSTAT = ("penalties", "dry", "temperature")  # the other steps cut, and that is what it does itself
_MAX_WARNINGS = 20


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
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    stop: list[str] = field(default_factory=list)
    # Puna's own, by llama.cpp's names where it has them
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    samplers: list[str] = field(default_factory=lambda: list(SAMPLERS))
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # generated before the answer may end by itself
    ignore_eos: bool = False  # write no end-of-generation token, for benchmarks
    think_budget: int = -1  # tokens of thinking at most, then the answer follows; below zero: no limit


# A request alone says what of these it wants; the others are decided when a model is loaded.
OF_REQUEST = frozenset(item.name for item in fields(Options)) - {
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread"),
}
_TYPES = {item.name: str(item.type).removesuffix(" | None") for item in fields(Options)}
_JSON_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list[str]": {"type": "array", "items": {"type": "string"}},
    "dict[int, float]": {"type": "object", "additionalProperties": {"type": "number"}},
}
DEPRECATED = frozenset(("penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "draft_num_predict"))
_INT64 = 1 << 63


def json_schema() -> dict[str, Any]:
    """What the API's description says of options."""
    return {"type": "object", "properties": {name: _JSON_TYPES[kind] for name, kind in _TYPES.items()}}


def merge(*layers: Mapping[str, Any]) -> Options:
    """Options from layers of which a later one wins; unknown names (see ``warnings``) and nulls are skipped.

    Stop sequences are the exception: a request's are added to those of the model, which its template needs.

    Errors: OptionTypeError naming the option and the type it must have; BadRequest for a value that has no meaning.
    """
    values: dict[str, Any] = {}
    stop: list[str] = []
    for layer in layers:
        for name, value in layer.items():
            if value is None or name not in _TYPES:
                continue
            if name == "stop":
                stop += _checked(name, value)
            else:
                values[name] = _checked(name, value)
    return Options(**values, stop=list(dict.fromkeys(stop)))


def warnings(options: Mapping[str, Any], *below: Mapping[str, Any]) -> list[str]:
    """What of these options has no effect when they are laid over others, and why. Errors: as ``merge``."""
    given = [name for name, value in options.items() if value is not None]
    found = [_unknown(name) for name in given if name not in _TYPES]
    merged = merge(*below, options)
    for name in given:
        step = _STEPS.get(name)
        if step is not None and merged.mirostat and step not in _BESIDE_MIROSTAT:
            found.append(f'option "{name}" has no effect: mirostat takes its place')
        elif step is not None and step not in merged.samplers and not (merged.mirostat and step == "temperature"):
            found.append(f'option "{name}" has no effect: {step} is not among samplers')
    return [*found[:_MAX_WARNINGS], f"and {len(found) - _MAX_WARNINGS} more"] if len(found) > _MAX_WARNINGS else found


def _unknown(name: str) -> str:
    why = "is not in use any more" if name in DEPRECATED else "is not known"
    return f"option {json.dumps(name[:100])} {why}, and has no effect"


def _checked(name: str, value: Any) -> Any:
    kind = _TYPES[name]
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "list[str]":
        if not isinstance(value, list):
            raise OptionTypeError(f'option "{name}" must be of type array')
        if not all(isinstance(item, str) for item in value):
            raise OptionTypeError(f'option "{name}" must be of an array of strings')
        return _samplers(value) if name == "samplers" else value
    if kind == "dict[int, float]":
        return _biases(name, value)
    if kind in ("int", "float") and isinstance(value, int | float) and not isinstance(value, bool):
        number = _number(name, value, kind)
        if name == "mirostat" and number not in (0, 1, 2):
            raise BadRequest(f"mirostat must be 0, 1 or 2, not {number}")
        return number
    raise OptionTypeError(f'option "{name}" must be of type {_WIRE_NAMES[kind]}')


def _samplers(names: list[str]) -> list[str]:
    found = [_OTHER_NAMES.get(name, name) for name in (given.lower().replace("-", "_") for given in names)]
    bad = next((given for given, name in zip(names, found, strict=True) if name not in SAMPLERS), None)
    if bad is not None:
        raise BadRequest(f"samplers: there is no {json.dumps(bad[:40])}, there are {', '.join(SAMPLERS)}")
    if len(set(found)) < len(found):
        raise BadRequest("samplers: each may be named once")
    return found


def _biases(name: str, value: Any) -> dict[int, float]:
    """From an object whose names are tokens' numbers."""
    if not isinstance(value, dict):
        raise OptionTypeError(f'option "{name}" must be of type object')
    found = {}
    for token, bias in value.items():
        if not str(token).isascii() or not str(token).isdecimal() or len(str(token)) > _MAX_DIGITS:
            raise BadRequest(f"{name}: {json.dumps(str(token)[:40])} is not the number of a token")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise OptionTypeError(f'option "{name}" must be of an object of numbers')
        found[int(token)] = float(_number(name, bias, "float"))
    return found


_MAX_DIGITS = 10  # of a token's number
_WIRE_NAMES = {"int": "integer", "float": "float32", "bool": "boolean"}


def _number(name: str, value: float, kind: str) -> float:
    if not -_INT64 <= value < _INT64 or not math.isfinite(value):
        raise OptionTypeError(f'option "{name}" must be of type {_WIRE_NAMES[kind]} (value out of range)')
    return int(value) if kind == "int" else float(value)
