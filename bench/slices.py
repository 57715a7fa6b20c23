"""Six layers of each family's real shape, with random weights, in the mixture of types that llama.cpp calls Q4_K_M.

Sizes are from the published configurations. The vocabulary is cut to 32k tokens, so that the layers are what counts; where
a file would be larger than 1.5 GB, or a run longer than a minute, there are fewer experts or layers, and the row says so. A
file is grown from the tiny one that the tests write: the same tensors, with the lengths of their axes that the family's
options have for the real sizes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.models.table import ENCODERS, ROWS
from tests.tiny import quantize

from bench.models import add_vocabulary, cache_dir
from puna.gguf.reader import GGUFFile, TensorInfo
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
    n_layers: int = 6  # 0: as many as the tiny file has
    tiny: Mapping[str, Any] = field(default_factory=dict)  # how the tests are to write the file that it is grown from
    cls: str = ""  # the model's class, where the registry has a function
    axes: Mapping[str, int] = field(default_factory=dict)  # that neither options nor metadata have
    row: str = ""  # that it is grown from, where a family has several slices
    note: str = ""


def sizes(
    n_embd: int, n_heads: int, n_kv_heads: int | list[int], n_ff: int | list[int], head_dim: int = 0, **more: Any
) -> dict[str, Any]:
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


def ssm(inner: int, state: int, n_heads: int, n_groups: int) -> dict[str, Any]:
    """Of Mamba-2, or of a delta net: the values' width, the keys' width, heads of values and of keys."""
    return {"ssm__inner_size": inner, "ssm__state_size": state, "ssm__time_step_rank": n_heads, "ssm__group_count": n_groups}


def experts(count: int, n_used: int, n_ff: int, n_ff_shared: int = 0) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": n_ff_shared} if n_ff_shared else {}
    return {"expert_count": count, "expert_used_count": n_used, "expert_feed_forward_length": n_ff, **shared}


def gemma4(n_embd: int, n_heads: int, n_kv_heads: list[int], n_ff: int, **more: Any) -> dict[str, Any]:
    """Heads are 512 wide in layers that see everything, 256 in the others."""
    narrow = {"attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256}
    return sizes(n_embd, n_heads, n_kv_heads, n_ff, 512, **more) | narrow


def only(kinds: str, kind: str, number: int) -> list[int]:
    """The number in layers of this kind, 0 in all others."""
    return [number if k == kind else 0 for k in kinds]


# Layers of hybrids: m Mamba-2, c a convolution, d a delta net, a attention, f only an MLP.
_NEMOTRON, _GRANITE, _LFM = "mfmfam", "mmmmma", "ccacca"

# By the rows of tests/models/table.py, or a variety of one after a colon; those of ENCODERS embed a text.
SLICES: dict[str, Slice] = {
    "bert": Slice("BGE large", sizes(1024, 16, 16, 4096, context_length=512), axes={"positions": 512, "segments": 2}),
    "cohere2": Slice("Command R7B", sizes(4096, 32, 8, 14336, attention__sliding_window=4096)),
    "command-r": Slice("Aya Expanse 8B", sizes(4096, 32, 8, 14336)),
    "deepseek2": Slice(
        "DeepSeek V2 Lite",
        {
            **sizes(2048, 16, 1, 10944, 576, **experts(36, 6, 1408), expert_shared_count=2, attention__kv_lora_rank=512),
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
        },
        tiny={"q_rank": 0, "bias": False},
        note="36 experts instead of 64",
    ),
    "falcon-h1": Slice("Falcon-H1 1.5B", sizes(2048, 8, 2, 4096, 128, **ssm(3072, 256, 48, 1)), 0),
    "gemma": Slice("Gemma 7B", sizes(3072, 16, 16, 24576, 256)),
    "gemma-embedding": Slice("EmbeddingGemma 300M", sizes(768, 3, 1, 1152, 256, attention__sliding_window=512)),
    "gemma2": Slice("Gemma 2 9B", sizes(3584, 16, 8, 14336, 256, attention__sliding_window=4096)),
    "gemma3": Slice(
        "Gemma 3 12B", sizes(3840, 16, 8, 15360, 256, attention__sliding_window=1024), cls="puna.model.arch.gemma3:Gemma3"
    ),
    "gemma3n": Slice(
        "Gemma 3n E4B",
        sizes(2048, 8, 2, 16384, 256, attention__sliding_window=512),
        axes={"laurel": 64},
    ),
    "gemma4": Slice(
        "Gemma 4 E4B",
        gemma4(2560, 8, [2] * 6, 10240, embedding_length_per_layer_input=256, attention__sliding_window=512),
        tiny={"n_shared": 3},
        note="every third layer sees everything instead of every sixth, half of them instead of 18 of 42 share keys",
    ),
    "gemma4:experts": Slice(
        "Gemma 4 26B-A4B",
        gemma4(2816, 16, [8, 8, 2, 8, 8, 2], 2112, **experts(32, 8, 704), attention__sliding_window=1024),
        tiny={"given": False, "n_shared": 0, "n_kv_wide": 2, "keys_as_values": True, "experts": "packed"},
        row="gemma4",
        note="32 experts instead of 128, every third layer sees everything instead of every sixth",
    ),
    "glm4": Slice("GLM-4 9B 0414", sizes(4096, 32, 2, 13696, 128) | {"rope.dimension_count": 64}),
    "glm4moe": Slice(
        "GLM-4.5 Air",
        sizes(4096, 96, 8, 10944, 128, **experts(12, 8, 1408)) | {"rope.dimension_count": 64},
        note="12 experts instead of 128",
    ),
    "gpt-oss": Slice(
        "gpt-oss 20B",
        sizes(2880, 64, 8, 2880, 64, **experts(8, 4, 2880), attention__sliding_window=128),
        2,
        tiny={"experts": "mxfp4"},
        note="2 layers, since libllama prefills no faster than 50 tokens a second through six; 8 experts instead of 32, in MXFP4",
    ),
    "granite": Slice("Granite 3.3 8B", sizes(4096, 32, 8, 12800)),
    "granitemoe": Slice("Granite 3.1 3B-A800M", sizes(1536, 24, 8, 512, expert_count=40, expert_used_count=8)),
    "granitehybrid": Slice(
        "Granite 4.0 H-Micro",
        sizes(2048, 32, only(_GRANITE, "a", 8), 8192, **ssm(4096, 128, 64, 1)),
        0,
        tiny={"kinds": _GRANITE},
    ),
    "lfm2": Slice("LFM2 1.2B", sizes(2048, 32, only(_LFM, "a", 8), 8192), 0, tiny={"kinds": _LFM}),
    "lfm2moe": Slice(
        "LFM2 8B-A1B",
        sizes(2048, 32, only(_LFM, "a", 8), 7168, **experts(32, 4, 1792)),
        0,
        tiny={"kinds": _LFM, "n_dense": 2},
    ),
    "llama": Slice("Llama 3.1 8B", sizes(4096, 32, 8, 14336, rope__freq_base=5e5)),
    "llama:experts": Slice("Mixtral 8x7B", sizes(4096, 32, 8, 14336, expert_count=3), 3, note="3 layers, 3 experts instead of 8"),
    "llama4": Slice(
        "Llama 4 Scout",
        sizes(5120, 40, 8, 16384, 128, **experts(2, 1, 8192)),
        4,
        note="4 layers, 2 experts instead of 16",
    ),
    "mamba2": Slice(
        "Mamba-2 2.7B",
        {"embedding_length": 2560} | {k.replace("__", "."): v for k, v in ssm(5120, 128, 80, 1).items()},
        0,
        note="3 layers",
    ),
    "mistral3": Slice("Ministral 3 8B", sizes(4096, 32, 8, 14336, 128, attention__temperature_scale=0.1)),
    "nemotron_h": Slice(
        "Nemotron-H 8B",
        sizes(4096, 32, only(_NEMOTRON, "a", 8), only(_NEMOTRON, "f", 21504), 128, **ssm(8192, 128, 128, 8)),
        0,
        tiny={"kinds": _NEMOTRON},
    ),
    "nemotron_h_moe": Slice(
        "Nemotron 3 Nano 30B-A3B",
        sizes(
            2688,
            32,
            only(_NEMOTRON, "a", 2),
            only(_NEMOTRON, "f", 1856),
            128,
            **ssm(4096, 128, 64, 8),
            **experts(48, 6, 1856, 3712),
        ),
        0,
        tiny={"kinds": _NEMOTRON, "n_experts": 8},
        note="48 experts instead of 128",
    ),
    "modern-bert": Slice("ModernBERT base", sizes(768, 12, 12, 1152, attention__sliding_window=128)),
    "nomic-bert": Slice("nomic-embed-text v1.5", sizes(768, 12, 12, 3072), axes={"segments": 2}),
    "olmo2": Slice("OLMo 2 7B", sizes(4096, 32, 32, 11008)),
    "olmo2:windows": Slice("OLMo 3 7B", sizes(4096, 32, 32, 11008, attention__sliding_window=4096)),
    "phi3": Slice("Phi-3.5 mini", sizes(3072, 32, 32, 8192)),
    "qwen2": Slice("Qwen 2.5 7B", sizes(3584, 28, 4, 18944, rope__freq_base=1e6)),
    "qwen2vl": Slice(
        "Qwen 2.5-VL 7B", sizes(3584, 28, 4, 18944, rope__freq_base=1e6) | {"rope.dimension_sections": [16, 24, 24, 0]}
    ),
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
    "qwen3vl": Slice(
        "Qwen 3-VL 8B",
        sizes(4096, 32, 8, 12288, 128, rope__freq_base=5e6)
        | {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": Slice(
        "Qwen 3-VL 30B-A3B",
        sizes(2048, 32, 4, 6144, 128, expert_feed_forward_length=768, expert_count=64, expert_used_count=8)
        | {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3},
        note="64 experts instead of 128",
    ),
    "qwen3moe": Slice(
        "Qwen 3 30B-A3B",
        sizes(2048, 32, 4, 6144, 128, expert_feed_forward_length=768, expert_count=64, expert_used_count=8),
        note="64 experts instead of 128",
    ),
    "qwen35": Slice(
        "Qwen 3.5 9B",
        sizes(4096, 16, 4, 12288, 256, **ssm(4096, 128, 32, 16))
        | {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]},
        0,
        tiny={"kinds": "dddadd", "n_heads": 8},
    ),
    "qwen35moe": Slice(
        "Qwen 3.5 35B-A3B",
        sizes(2048, 16, 2, 512, 256, **experts(64, 8, 512, 512), **ssm(4096, 128, 32, 16))
        | {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]},
        0,
        tiny={"kinds": "dddadd", "n_heads": 8},
        note="64 experts instead of 256",
    ),
    "qwen3next": Slice(
        "Qwen3-Next 80B-A3B",
        sizes(2048, 16, 2, 5120, 256, **experts(64, 10, 512, 512), **ssm(4096, 128, 32, 16)) | {"rope.dimension_count": 64},
        0,
        tiny={"kinds": "dddadd", "n_heads": 8},
        note="64 experts instead of 512",
    ),
    "starcoder2": Slice("StarCoder 2 7B", sizes(4608, 36, 4, 18432)),
}


def path_of(name: str, n_layers: int = 0) -> Path:
    """The file, made on first use and kept for the next run; with *n_layers* other than the table's number."""
    slice = replace(SLICES[name], n_layers=n_layers) if n_layers else SLICES[name]
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
    row = {**ROWS, **ENCODERS}[slice.row or name]
    plain = next(iter(row.variants.values()))
    counted = {"n_layers": slice.n_layers} if slice.n_layers else {}
    tiny_path = row.write(folder / "tiny.gguf", seed=0, **{**plain, **counted, **slice.tiny})
    with GGUFFile.open(tiny_path) as tiny:
        cls = _class_of(tiny.architecture, slice)
        lengths = _Lengths(tiny, cls, slice, folder / "metadata.gguf")
        writer = lengths.writer()
        add_vocabulary(writer, N_VOCAB)
        random = np.random.default_rng(1)
        n_layers = tiny.metadata.integer("block_count")
        for tensor, names in axes(cls.Weights, tiny, {"layers": n_layers}).items():
            shape = tuple(lengths.of(tensor, axis) for axis in names[: len(tiny.tensors[tensor].shape)])
            _add(writer, random, tensor, shape, _type_of(tiny.tensors[tensor], shape, n_layers))
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
        self._stated = {k: v for k, v in tiny.metadata.items() if k.startswith((prefix, "tokenizer.ggml.token_type_count"))}
        self._stated |= {prefix + k: v for k, v in slice.config.items()} | {f"{prefix}vocab_size": N_VOCAB}
        writer = self.writer()
        for name in tiny.tensors:  # some options depend on which there are
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write(scratch)
        with GGUFFile.open(scratch) as file:
            self._options = cls.Options.read(file)
            meta = file.metadata
            n_ff = max(meta.integers("feed_forward_length", [0]))
            n_ff_expert, n_shared = meta.integer("expert_feed_forward_length", n_ff), meta.integer("expert_shared_count", 1)
            self._common: dict[str, int] = {
                "vocab": N_VOCAB,
                "ff": n_ff,
                "ff_expert": n_ff_expert,
                "ff_shared": meta.integer("expert_shared_feed_forward_length", n_ff_expert * n_shared),
                "experts": meta.integer("expert_count", 0),
                **self._options.model_dims(),
                **slice.axes,
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


def _add(writer: GGUFWriter, random: np.random.Generator, name: str, shape: tuple[int, ...], kind: TensorType) -> None:
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


def _type_of(tiny: TensorInfo, shape: tuple[int, ...], n_layers: int) -> TensorType:
    name = tiny.name
    if tiny.type is TensorType.MXFP4:
        return tiny.type
    if (
        len(shape) == 1
        or shape[0] % 32
        or any(
            part in name for part in ("norm", "ffn_gate_inp", "ssm_a", "ssm_d", "conv", ".bias", "position_embd", "token_types")
        )
    ):
        return TensorType.F32
    if shape[0] % 256:
        return TensorType.Q8_0
    if name.startswith(("token_embd", "output.", "per_layer_token_embd")):
        return TensorType.Q6_K
    parts = name.split(".")
    if parts[0] != "blk" or parts[2].startswith(("altup", "laurel")):
        return TensorType.F16  # left out of quantising by llama.cpp
    # The layers whose attn_v and ffn_down get more bits in Q4_K_M.
    i, eighth = int(parts[1]), n_layers // 8
    is_finer = i < eighth or i >= 7 * n_layers // 8 or (i - eighth) % 3 == 2
    return TensorType.Q6_K if is_finer and parts[2].startswith(("attn_v", "ffn_down")) else TensorType.Q4_K
