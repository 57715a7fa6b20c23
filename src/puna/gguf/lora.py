"""LoRA adapters (Hu et al. 2021) as GGUF files hold them: pairs of thin matrices, each checked against the model's tensor.

Names, keys and the orientation of the matrices are those of llama.cpp's adapters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile, TensorInfo
from puna.gguf.types import TensorType

log = logging.getLogger(__name__)

TABLE = "token_embd.weight"  # looked up by row, so its pair is turned around
_PARTS = (".lora_a", ".lora_b")
_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)


@dataclass(frozen=True)
class LowRank:
    """A change of one tensor of rank r: the product of two matrices, times *scale*.

    Shapes in ggml's order, for a weight [n_in, n_out]: down [n_in, r], up [r, n_out]. Of a stack of experts both have a
    third axis. Of the embedding table [n_embd, n_vocab]: down [r, n_vocab], up [r, n_embd].
    """

    weight: str
    down: TensorInfo  # lora_a
    up: TensorInfo  # lora_b
    scale: float


def read_lora(adapter: GGUFFile, model: GGUFFile) -> list[LowRank]:
    """The changes that an adapter makes to a model, as its file orders them.

    The scale is alpha / r, or 1 where the file names no alpha.
    Errors: FileFormatError naming the adapter and the tensor when it is no adapter, or one for another model.
    """
    alpha = _check_kind(adapter, model)
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in adapter.tensors.items():
        weight, part = name[:-7], name[-7:]
        if name.endswith("_norm.weight"):
            log.warning("adapter %s: %s is not applied, as in llama.cpp", adapter.path, name)
            continue
        if part not in _PARTS:
            _fail(adapter, f"tensor {name!r} is no part of a low-rank pair: only .lora_a and .lora_b can be applied")
        if info.type not in _TYPES:
            _fail(adapter, f"tensor {name!r} is of type {info.type.name}; an adapter's may be {_one_of(_TYPES)}")
        found.setdefault(weight, {})[part] = info
    if not found:
        _fail(adapter, "it has no tensors")
    return [_pair(adapter, model, weight, parts, alpha) for weight, parts in found.items()]


def _check_kind(adapter: GGUFFile, model: GGUFFile) -> float:
    """Returns alpha."""
    meta = adapter.metadata
    kind, form = meta.string("general.type", "model"), meta.string("adapter.type", "lora")
    if kind != "adapter" or form != "lora":
        _fail(adapter, f"it is no LoRA adapter: general.type is {kind!r}, adapter.type {form!r}")
    if adapter.architecture != model.architecture:
        _fail(adapter, f"it was made for a model of architecture {adapter.architecture!r}, this one is {model.architecture!r}")
    if "adapter.alora.invocation_tokens" in meta:
        _fail(adapter, "it is to be applied only after certain tokens (aLoRA), which is not supported")
    alpha = meta.number("adapter.lora.alpha", 0.0)
    if not math.isfinite(alpha):
        _fail(adapter, f"adapter.lora.alpha is {alpha}")
    return alpha


def _pair(adapter: GGUFFile, model: GGUFFile, weight: str, parts: Mapping[str, TensorInfo], alpha: float) -> LowRank:
    missing = [weight + part for part in _PARTS if part not in parts]
    if missing:
        _fail(adapter, f"tensor {missing[0]!r} is missing from its pair")
    if weight not in model.tensors:
        _fail(adapter, f"it changes {weight!r}, which the model does not have; was it made for another model?")
    down, up = (parts[part] for part in _PARTS)
    base, rank = model.tensors[weight].shape, up.shape[0] if up.shape else 0
    if len(base) < 2:
        _fail(adapter, f"it changes {weight!r}, which is no matrix in the model")
    n_in, n_out, *stack = base
    wanted = ((rank, n_out), (rank, n_in)) if weight == TABLE else ((n_in, rank, *stack), (rank, n_out, *stack))
    for info, shape in zip((down, up), wanted, strict=True):
        if _trimmed(info.shape) != _trimmed(shape):
            _fail(
                adapter,
                f"tensor {info.name!r} has the shape {list(info.shape)}, but {list(shape)} would change {weight!r} of "
                f"{list(base)}; was it made for another model?",
            )
    return LowRank(weight, down, up, alpha / rank if alpha else 1.0)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones, which mean nothing."""
    end = len(shape)
    while end and shape[end - 1] == 1:
        end -= 1
    return shape[:end]


def _one_of(types: tuple[TensorType, ...]) -> str:
    return ", ".join(kind.name for kind in types)


def _fail(adapter: GGUFFile, what: str) -> NoReturn:
    raise FileFormatError(f"adapter {adapter.path}: {what}")
