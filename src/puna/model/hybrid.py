"""Models some or all of whose layers have a recurrent state instead of attention, or beside it.

Which layers attend is stated in several ways, by writer: as layers without key/value heads, an interval, or a list. The
tensors always tell, so they decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.causal import CausalCache
from puna.kvcache.layered import LayeredCache
from puna.kvcache.recurrent import RecurrentCache
from puna.ml.backend import Backend
from puna.ml.tensor import DType
from puna.model.decoder import Decoder, DecoderOptions, OptionsT
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, RMSNorm


@dataclass(frozen=True)
class HybridOptions(DecoderOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        attends = [f"blk.{i}.attn_output.weight" in file.tensors for i in range(o.n_layers)]
        heads, kv_heads = (
            [n if has else 0 for n, has in zip(counts, attends, strict=True)] for counts in (o.n_heads, o.n_kv_heads)
        )
        return replace(o, n_heads=heads, n_kv_heads=kv_heads)


@dataclass
class HybridWeights:
    layers: list[Any] = gguf("blk")
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


def state_sizes(file: GGUFFile, *keys: str) -> list[int]:
    """The metadata's numbers under these keys, each from 1 on and small enough that no product of them overflows.

    Errors: FileFormatError naming key and value.
    """
    sizes = [file.metadata.integer(key) for key in keys]
    for key, size in zip(keys, sizes, strict=True):
        if not 1 <= size <= 1 << 20:
            raise FileFormatError(f"{file.path}: {file.metadata.full_key(key)} {size} is not usable")
    return sizes


class HybridDecoder(Decoder[OptionsT]):
    nodes_per_group = 16  # of a recurrent layer, for each group of sequences with equally many rows

    def states(self, layer: int) -> Mapping[str, int]:
        """The F32 values of each state of a sequence in this layer; empty: it has none."""
        raise NotImplementedError

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        recurrent = RecurrentCache(backend, limits, widths=[self.states(i) for i in range(o.n_layers)])
        if not any(o.n_kv_heads):
            return recurrent
        attention = super().make_cache(backend, limits, dtype)
        assert isinstance(attention, CausalCache | LayeredCache)
        choice = [0 if not n and self.states(i) else 1 for i, n in enumerate(o.n_kv_heads)]
        return LayeredCache([recurrent, attention], choice, limits.max_sequences)

    def max_nodes(self, limits: Limits) -> int:
        return super().max_nodes(limits) + self.options.n_layers * self.nodes_per_group * limits.max_sequences
