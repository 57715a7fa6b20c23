"""Six layers of each family's real shape, with random weights, in the mixture of types that llama.cpp calls Q4_K_M.

Sizes are from the published configurations. The vocabulary is cut to 32k tokens, so that the layers are what counts; where
a file would be larger than 1.5 GB, there are fewer experts or layers, and the row says so. A file is grown from the tiny one
that the tests write: the same tensors, with the lengths of their axes that the family's options have for the real sizes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.models.table import ROWS
from tests.tiny import quantize

from bench.models import add_vocabulary, cache_dir
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from puna.model.decoder import Decoder
from puna.model.registry import ARCHITECTURES
from puna.nn.declare import axes

N_VOCAB = 32768
_DISTINCT_ROWS = 256  # of each matrix

YARN: dict[str, Any] = {"rope.scaling.type": "yarn"}


@dataclass(frozen=True)
class Slice:
    model: str  # whose layers these are
    config: Mapping[str, Any]  # metadata of the family, over that of the tiny file
    n_layers: int = 6
    tiny: Mapping[str, Any] = field(default_factory=dict)  # how the tests are to write the file that it is grown from
    cls: str = ""  # the model's class, where the registry has a function
    note: str = ""


def sizes(n_embd: int, n_heads: int, n_kv_heads: int, n_ff: int, head_dim: int = 0, **more: Any) -> dict[str, Any]:
    head_dim = head_dim or n_embd // n_heads
    return {
        "embedding_length": n_embd,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "feed_forward_length": n_ff,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


# By the rows of tests/models/table.py.
SLICES: dict[str, Slice] = {
    "gemma": Slice("Gemma 7B", sizes(3072, 16, 16, 24576, 256)),
    "gemma2": Slice("Gemma 2 9B", sizes(3584, 16, 8, 14336, 256, attention__sliding_window=4096)),
    "gemma3": Slice(
        "Gemma 3 12B", sizes(3840, 16, 8, 15360, 256, attention__sliding_window=1024), cls="puna.model.arch.gemma3:Gemma3"
    ),
    "granite": Slice("Granite 3.3 8B", sizes(4096, 32, 8, 12800)),
    "granitemoe": Slice("Granite 3.1 3B-A800M", sizes(1536, 24, 8, 512, expert_count=40, expert_used_count=8)),
    "llama": Slice("Llama 3.1 8B", sizes(4096, 32, 8, 14336, rope__freq_base=5e5)),
    "llama:experts": Slice("Mixtral 8x7B", sizes(4096, 32, 8, 14336, expert_count=4), 3, note="3 layers, 4 experts instead of 8"),
    "mistral3": Slice("Ministral 3 8B", sizes(4096, 32, 8, 14336, 128, attention__temperature_scale=0.1)),
    "phi3": Slice("Phi-3.5 mini", sizes(3072, 32, 32, 8192)),
    "qwen2": Slice("Qwen 2.5 7B", sizes(3584, 28, 4, 18944, rope__freq_base=1e6)),
    "qwen2moe": Slice(
        "Qwen1.5-MoE A2.7B",
        sizes(
            2048,
            16,
            16,
            5632,
            expert_feed_forward_length=1408,
            expert_shared_feed_forward_length=5632,
            expert_count=30,
            expert_used_count=4,
        ),
        note="30 experts instead of 60",
    ),
    "qwen3": Slice("Qwen 3 8B", sizes(4096, 32, 8, 12288, 128, rope__freq_base=1e6)),
    "qwen3moe": Slice(
        "Qwen 3 30B-A3B",
        sizes(2048, 32, 4, 6144, 128, expert_feed_forward_length=768, expert_count=64, expert_used_count=8),
        note="64 experts instead of 128",
    ),
    "starcoder2": Slice("StarCoder 2 7B", sizes(4608, 36, 4, 18432)),
}


def path_of(name: str) -> Path:
    """The file, made on first use and kept for the next run."""
    slice = SLICES[name]
    digest = hashlib.sha256(f"{slice} {N_VOCAB}".encode()).hexdigest()[:8]
    folder = cache_dir() / "slices"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.replace(':', '-')}-{digest}.gguf"
    if not path.exists():
        print(f"making {path.name} with random weights, once", file=sys.stderr)
        with TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / "grown.gguf"
            grown(name, slice, Path(scratch)).write(part)
            part.rename(path)
    return path


def grown(name: str, slice: Slice, folder: Path) -> GGUFWriter:
    """*folder* is for files on the way."""
    tiny_path = ROWS[name].write(folder / "tiny.gguf", seed=0, **{"n_layers": slice.n_layers, **slice.tiny})
    with GGUFFile.open(tiny_path) as tiny:
        cls = _class_of(tiny.architecture, slice)
        lengths = _Lengths(tiny, cls, slice, folder / "metadata.gguf")
        writer = lengths.writer()
        add_vocabulary(writer, N_VOCAB)
        random = np.random.default_rng(1)
        n_layers = tiny.metadata.integer("block_count")
        for tensor, names in axes(cls.Weights, tiny, {"layers": n_layers}).items():
            shape = tuple(lengths.of(tensor, axis) for axis in names[: len(tiny.tensors[tensor].shape)])
            _add(writer, random, tensor, shape, n_layers)
    return writer


def _class_of(architecture: str, slice: Slice) -> type[Decoder[Any]]:
    module, _, name = (slice.cls or ARCHITECTURES[architecture]).partition(":")
    cls: type[Decoder[Any]] = getattr(import_module(module), name)
    return cls


class _Lengths:
    """The lengths of axes by their names, as the family's options and its metadata have them."""

    def __init__(self, tiny: GGUFFile, cls: type[Decoder[Any]], slice: Slice, scratch: Path) -> None:
        prefix = f"{tiny.architecture}."
        self._architecture = tiny.architecture
        self._stated = {k: v for k, v in tiny.metadata.items() if k.startswith(prefix)}
        self._stated |= {prefix + k: v for k, v in slice.config.items()} | {f"{prefix}vocab_size": N_VOCAB}
        self.writer().write(scratch)
        with GGUFFile.open(scratch) as file:
            self._options = cls.Options.read(file)
            meta = file.metadata
            n_ff = meta.integers("feed_forward_length", [0])[0]
            self._common: dict[str, int] = {
                "embd": self._options.n_embd,
                "pairs": self._options.rope.n_dims // 2,
                "vocab": N_VOCAB,
                "ff": n_ff,
                "ff_expert": meta.integer("expert_feed_forward_length", n_ff),
                "ff_shared": meta.integer("expert_shared_feed_forward_length", n_ff),
                "experts": meta.integer("expert_count", 0),
            }

    def writer(self) -> GGUFWriter:
        writer = GGUFWriter(self._architecture)
        writer.add("general.name", "random weights in real shapes")
        for key, value in self._stated.items():
            writer.add(key, value)
        return writer

    def of(self, tensor: str, axis: str) -> int:
        """Of ``ff``, ``2*ff`` or ``4``."""
        if axis.isdecimal():
            return int(axis)
        factor, _, base = axis.rpartition("*")
        parts = tensor.split(".")
        here: dict[str, int] = self._common | (self._options.dims(int(parts[1])) if parts[0] == "blk" else {})
        return int(factor or 1) * here[base]


def _add(writer: GGUFWriter, random: np.random.Generator, name: str, shape: tuple[int, ...], n_layers: int) -> None:
    kind = _type_of(name, shape, n_layers)
    if kind is TensorType.F32:
        # Norms as they are before training, recurrent decays below 0, everything else small.
        fill = 1.0 if name.endswith("norm.weight") or "rope_" in name else -1.0 if name.endswith("ssm_a") else None
        values = random.standard_normal(shape[::-1], dtype=np.float32) * np.float32(0.02)
        writer.add_tensor(name, values if fill is None else np.full(shape[::-1], fill, np.float32))
        return
    rows = random.standard_normal((_DISTINCT_ROWS, shape[0]), dtype=np.float32) / np.float32(np.sqrt(shape[0]))
    blocks = quantize(rows, kind).reshape(_DISTINCT_ROWS, -1)
    chosen = random.integers(0, _DISTINCT_ROWS, int(np.prod(shape[1:])))
    writer.add_raw_tensor(name, shape, kind, lambda: blocks[chosen].reshape(-1))


def _type_of(name: str, shape: tuple[int, ...], n_layers: int) -> TensorType:
    if (
        len(shape) == 1
        or shape[0] % 32
        or any(part in name for part in ("norm", "ffn_gate_inp", "ssm_a", "ssm_d", "conv", ".bias"))
    ):
        return TensorType.F32
    if shape[0] % 256:
        return TensorType.Q8_0
    if name.startswith(("token_embd", "output.")):
        return TensorType.Q6_K
    parts = name.split(".")
    # The layers whose attn_v and ffn_down get more bits in Q4_K_M.
    i, eighth = int(parts[1]), n_layers // 8
    is_finer = i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2
    return TensorType.Q6_K if is_finer and parts[2].startswith(("attn_v", "ffn_down")) else TensorType.Q4_K
