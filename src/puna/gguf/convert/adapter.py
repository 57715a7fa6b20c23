"""A LoRA adapter as the PEFT library stores it, to GGUF, for a model that is a GGUF file already.

Reads adapter_config.json and the tensors. Names, keys and the orientation of the matrices are llama.cpp's for adapters.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint, Tensors
from puna.gguf.convert.families.common import MATRICES
from puna.gguf.convert.fields import MAX_NUMBER
from puna.gguf.convert.table import paired
from puna.gguf.lora import TABLE
from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

Floats = npt.NDArray[np.float32]

CONFIG = "adapter_config.json"
# Architectures whose checkpoints name the matrices of a layer as Llama's do.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
_PAIRED = ("llama",)  # whose rotation turns neighbouring rows, where checkpoints keep the halves of a head apart

_OURS = {theirs: ours for ours, theirs in MATRICES.items()}
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.([a-z_.]+)\.lora_([AB])(?:\.default)?\.weight")
_HEAD = re.compile(r"lm_head\.lora_([AB])(?:\.default)?\.weight")
_TABLE = re.compile(r"model\.embed_tokens\.lora_embedding_([AB])(?:\.default)?")


class Config(msgspec.Struct, frozen=True):
    """The part of adapter_config.json that matters."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def check(self) -> None:
        """Errors: UnsupportedModel; FileFormatError."""
        if self.peft_type != "LORA" or self.use_dora or self.fan_in_fan_out or self.alpha_pattern:
            raise UnsupportedModel(f"{CONFIG}: only plain LoRA with one alpha can be converted")
        if self.use_rslora and self.rank_pattern:
            raise UnsupportedModel(f"{CONFIG}: rank-stabilised LoRA of several ranks cannot be converted")
        if not 1 <= self.r <= 1 << 16 or not abs(self.lora_alpha) < MAX_NUMBER:
            raise FileFormatError(f"{CONFIG}: r is {self.r}, lora_alpha {self.lora_alpha}")

    @property
    def alpha(self) -> float:
        """Over the rank it gives the scale."""
        return self.lora_alpha * math.sqrt(self.r) if self.use_rslora else self.lora_alpha


def convert(checkpoint: Checkpoint, model: GGUFFile, target: Path) -> None:
    """Write *target*; whether it fits the model in all else is for puna.gguf.lora to say.

    Errors: FileFormatError naming file and tensor; UnsupportedModel for what has no counterpart in GGUF.
    """
    config = checkpoint.decoded(CONFIG, Config)
    config.check()
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"adapters in safetensors files can be converted for {', '.join(ARCHITECTURES)}, not for {model.architecture!r}"
        )
    writer = GGUFWriter(model.architecture)
    writer.add("general.type", "adapter")
    writer.add("adapter.type", "lora")
    writer.add("adapter.lora.alpha", config.alpha, ValueType.FLOAT32)
    with checkpoint.tensors() as tensors:
        places = {name: _place(tensors, name) for name in tensors}
        if len(set(places.values())) < len(places):
            raise FileFormatError(f"{tensors.home(next(iter(tensors))).name}: two tensors for the same part of the adapter")
        for name, (weight, part) in places.items():
            file, stored = tensors.home(name), tensors.stored(name)
            if len(stored.shape) != 2 or not all(stored.shape):
                raise FileFormatError(f"{file.name}: tensor {name} has the shape {list(stored.shape)}")
            writer.add_tensor(f"{weight}.lora_{part.lower()}", _oriented(model, weight, part, file.floats(name)))
        writer.write(target)


def _place(tensors: Tensors, name: str) -> tuple[str, str]:
    """The weight that a tensor changes, by its name in GGUF, and which of the two matrices it is.

    Errors: UnsupportedModel naming the tensor.
    """
    inner = name.removeprefix("base_model.model.")
    if (found := _LAYER.fullmatch(inner)) and found[2] in _OURS:
        return f"blk.{int(found[1])}.{_OURS[found[2]]}.weight", found[3]
    if found := _HEAD.fullmatch(inner):
        return "output.weight", found[1]
    if found := _TABLE.fullmatch(inner):
        return TABLE, found[1]
    raise UnsupportedModel(f"{tensors.home(name).name}: tensor {name[:200]} is no part of an adapter that can be converted")


def _oriented(model: GGUFFile, weight: str, part: str, values: Floats) -> Floats:
    if weight == TABLE:
        return values.T if part == "A" else values
    kind = weight.split(".")[-2]
    if part == "A" or model.architecture not in _PAIRED or kind not in ("attn_q", "attn_k"):
        return values
    n_heads = _n_heads(model, "attention.head_count" if kind == "attn_q" else "attention.head_count_kv")
    if n_heads < 1 or len(values) % (2 * n_heads):
        raise FileFormatError(f"the adapter's change of {weight} has {len(values)} rows, which are no {n_heads} heads")
    return paired(n_heads, values)


def _n_heads(model: GGUFFile, key: str) -> int:
    """Errors: UnsupportedModel where it differs by layer."""
    counts = set(model.metadata.integers(key, model.metadata.integers("attention.head_count")))
    if len(counts) != 1:
        raise UnsupportedModel("adapters in safetensors files cannot be converted for a model whose layers have different heads")
    return counts.pop()
