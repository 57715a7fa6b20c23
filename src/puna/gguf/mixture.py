"""Which type each tensor of a model gets in a quantised file: what suffers most from rounding gets more bits.

The choices are llama.cpp's, so that a kind of file means here what it means elsewhere; tests compare both on the same
models. Falcon, whose files llama.cpp mixes in another way, is mixed like all others. Knows names and shapes, no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from puna.gguf.metadata import Metadata
from puna.gguf.reader import GGUFFile, TensorInfo
from puna.gguf.types import TensorType

T = TensorType

# What most matrices of a kind of file are.
BASE: Mapping[str, TensorType] = MappingProxyType(
    {
        "F32": T.F32,
        "F16": T.F16,
        "BF16": T.BF16,
        "Q8_0": T.Q8_0,
        "Q6_K": T.Q6_K,
        "Q5_K_M": T.Q5_K,
        "Q5_K_S": T.Q5_K,
        "Q5_1": T.Q5_1,
        "Q5_0": T.Q5_0,
        "Q4_K_M": T.Q4_K,
        "Q4_K_S": T.Q4_K,
        "Q4_1": T.Q4_1,
        "Q4_0": T.Q4_0,
        "IQ4_XS": T.IQ4_XS,
        "IQ4_NL": T.IQ4_NL,
        "Q3_K_L": T.Q3_K,
        "Q3_K_M": T.Q3_K,
        "Q3_K_S": T.Q3_K,
        "Q2_K": T.Q2_K,
    }
)
# Where rows are no whole blocks: a type of about as many bits with shorter blocks.
_SHORTER = {T.IQ4_XS: T.IQ4_NL, T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0}
# Small or delicate matrices that stay as they are: routers, convolutions, positions, decays of recurrences.
_LEFT_ALONE = re.compile(
    r"_norm\.weight$|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj|^position_embd\.weight$"
    r"|^token_types\.weight$|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|attn_rel_b\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight"
    r"|\.position_embd|sam\.pos_embd|sam\.neck\.|sam\.net_|\.rel_pos|\.patch_embd|\.patch_merger|a\.rvq\.codebook|mm\.a\.code_embd"
)
_LAYER = re.compile(r"^blk\.(\d+)\.")
_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_LARGE_N_LAYERS = 80  # models of about 70e9 weights
_COARSE_WITH_EXPERTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")


def mixture(file: GGUFFile, kind: str) -> dict[str, TensorType]:
    """The type of every tensor, for one of puna.gguf.quantise.KINDS."""
    base = BASE[kind]
    model = _Model.of(file)
    chosen: dict[str, TensorType] = {}
    # In the order of layers, since the first and the last ones are treated better.
    for name in sorted(file.tensors, key=lambda name: (_layer_of(name), name)):
        tensor = file.tensors[name]
        if not _is_quantised(tensor):
            chosen[name] = tensor.type
        elif base.is_quantized:
            chosen[name] = _fitting(model.better(kind, base, tensor), tensor.shape[0])
        else:
            chosen[name] = base
    return {name: chosen[name] for name in file.tensors}


def _is_quantised(tensor: TensorInfo) -> bool:
    is_matrix = any(extent > 1 for extent in tensor.shape[1:])
    return is_matrix and tensor.name.endswith("weight") and not _LEFT_ALONE.search(tensor.name)


def _layer_of(name: str) -> int:
    found = _LAYER.match(name)
    return int(found.group(1)) if found else -1


def _fitting(kind: TensorType, width: int) -> TensorType:
    if width % kind.block_size:
        kind = _SHORTER.get(kind, kind)
    return T.F16 if width % kind.block_size else kind


def _deserves_more(index: int, count: int) -> bool:
    """The first and last eighths, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


@dataclass
class _Model:
    """What the choices depend on, and how many matrices of the counted kinds have had theirs."""

    n_layers: int
    n_experts: int
    n_sharing: int  # query heads for each head of keys and values, in the first layer
    n_values: int
    is_tied: bool
    value: int = 0
    down: int = 0

    @classmethod
    def of(cls, file: GGUFFile) -> _Model:
        heads = _first(file.metadata, "attention.head_count", 0)
        kv_heads = _first(file.metadata, "attention.head_count_kv", heads)
        return cls(
            n_layers=file.metadata.integer("block_count", 0),
            n_experts=file.metadata.integer("expert_count", 0),
            n_sharing=heads // kv_heads if kv_heads else 0,
            n_values=sum(bool(_VALUES.search(name)) for name in file.tensors),
            is_tied="output.weight" not in file.tensors,
        )

    def better(self, kind: str, base: TensorType, tensor: TensorInfo) -> TensorType:
        """The base, or what this tensor deserves more."""
        name = tensor.name
        if name == "output.weight" or (self.is_tied and name in _EMBEDDINGS):
            return T.Q8_0 if tensor.shape[0] % base.block_size or base is T.Q8_0 else T.Q6_K
        if name in _EMBEDDINGS:
            return base
        if _VALUES.search(name):
            self.value += 1
            return self._for_values(kind, base, self.value - 1)
        if "ffn_down" in name:
            self.down += 1
            return self._for_down(kind, base, _layer_of(name) if self.n_experts > 1 else self.down - 1)
        if "attn_output.weight" in name:
            return self._for_attention_output(kind, base)
        return T.Q8_0 if self.n_experts == 8 and "attn_k.weight" in name else base

    def _for_values(self, kind: str, base: TensorType, index: int) -> TensorType:
        found = base
        match kind:
            case "Q2_K":
                found = T.Q4_K if self.n_sharing >= 4 else T.Q3_K
            case "Q3_K_M":
                found = T.Q5_K if index < 2 else T.Q4_K
            case "Q3_K_L":
                found = T.Q5_K
            case "IQ4_NL" | "IQ4_XS" if self.n_sharing >= 4:
                found = T.Q5_K
            case "Q4_K_M" | "Q5_K_M" if _deserves_more(index, self.n_values):
                found = T.Q6_K
            case "Q4_K_S" if index < 4:
                found = T.Q5_K
        if self.n_experts == 8:  # small beside the experts
            return T.Q8_0
        is_large = self.n_layers == _LARGE_N_LAYERS and self.n_sharing > 1
        return T.Q5_K if is_large and found in (T.Q3_K, T.Q4_K) else found

    def _for_attention_output(self, kind: str, base: TensorType) -> TensorType:
        if self.n_experts == 8:
            return T.Q5_K if kind in _COARSE_WITH_EXPERTS else base
        return {"Q2_K": T.Q3_K, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K}.get(kind, base)

    def _for_down(self, kind: str, base: TensorType, index: int) -> TensorType:
        match kind:
            case "Q2_K":
                return T.Q3_K
            case "Q3_K_M":
                return T.Q5_K if index < self.n_layers // 16 else T.Q4_K
            case "Q3_K_L":
                return T.Q5_K
            case "Q4_K_M" | "Q5_K_M" if _deserves_more(index, self.n_layers):
                return T.Q6_K
            case "IQ4_NL" | "IQ4_XS" | "Q4_K_S" if index < self.n_layers // 8:
                return T.Q5_K
        return base


def _first(metadata: Metadata, key: str, default: int) -> int:
    return next(iter(metadata.integers(key, [default])), default)
