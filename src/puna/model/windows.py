"""Models some of whose layers see only a sliding window, as GGUF files state it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.kvcache.causal import ALL
from puna.kvcache.span import Span
from puna.ml.tensor import RopeOptions
from puna.model.decoder import DecoderOptions


@dataclass(frozen=True)
class WindowedOptions(DecoderOptions):
    """``attention.sliding_window``, which layers it holds for, and their rotation. Without a window all see everything."""

    window: int = 0
    is_windowed: list[bool] = field(default_factory=list)  # per layer
    window_base: float = 0.0  # of the rotation in windowed layers

    period: ClassVar[int]  # one of so many layers sees everything, in files that do not say
    is_full_first: ClassVar[bool] = False  # it is the first of them, not the last
    default_window: ClassVar[int] = 0

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        window = file.metadata.integer("attention.sliding_window", cls.default_window)
        if not 0 <= window < 1 << 31:
            raise FileFormatError(f"{file.path}: attention.sliding_window {window} is not usable")
        is_windowed = windowed_layers(file, o.n_layers, cls.period, cls.is_full_first) if window else [False] * o.n_layers
        return replace(o, window=window, is_windowed=is_windowed, window_base=window_base(file, o.rope.base))

    def rope_of(self, layer: int) -> RopeOptions | None:
        return replace(self.rope, base=self.window_base) if self.is_windowed[layer] else self.rope

    def span(self, layer: int) -> Span:
        return Span(window=self.window) if self.is_windowed[layer] else ALL


def window_base(file: GGUFFile, default: float) -> float:
    """Of the rotation in layers with a window.

    Errors: FileFormatError for what no rotation can use.
    """
    base = file.metadata.number("rope.freq_base_swa", default)
    if not (math.isfinite(base) and base > 0):
        raise FileFormatError(f"{file.path}: rope.freq_base_swa {base} is not usable")
    return base


def windowed_layers(file: GGUFFile, n_layers: int, period: int, is_full_first: bool = False) -> list[bool]:
    """Per layer, whether it is windowed: as an array states it, or all but the last, or first, of each *period*, 0 for all.

    Errors: FileFormatError when ``attention.sliding_window_pattern`` does not fit.
    """
    meta, key = file.metadata, "attention.sliding_window_pattern"
    if isinstance(meta.get(meta.full_key(key)), LazyArray):
        return [bool(is_windowed) for is_windowed in meta.per_layer(key, n_layers)]
    period = meta.integer(key, period)
    if period < 0:
        raise FileFormatError(f"{file.path}: {meta.full_key(key)} {period} is no number of layers")
    return [not period or (i + (not is_full_first)) % period != 0 for i in range(n_layers)]
