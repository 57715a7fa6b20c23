"""What a file says of its encoder of images, read alike from a projector's own file and from one that holds both parts.

A projector's own file, as llama.cpp writes it, is of the architecture ``clip`` and has keys ``clip.vision.*``. A model's file
that holds its encoder too, as the ancestor writes it, has ``<architecture>.vision.*``. So ``vision.patch_size`` means the
same in both, and ``v.`` and ``mm.`` begin the names of the tensors. Where a part has two names, the family that it belongs
to knows both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from puna.errors import FileFormatError
from puna.gguf.layers import MAX_LAYERS
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor

T = TypeVar("T", bound=Tensor)
Colour = tuple[float, float, float]  # one number for each of red, green and blue

HALF: Colour = (0.5, 0.5, 0.5)
CLIP_MEAN: Colour = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Colour = (0.26862954, 0.26130258, 0.27577711)

PROJECTOR = "clip"  # the architecture of a projector's own file

# Beyond what any encoder has; lists, memory and loops are made by these numbers.
MAX_WIDTH = 1 << 16  # of vectors
MAX_IMAGE_SIZE = 1 << 14
MAX_PATCH_SIZE = 1 << 8


class Activation(Enum):
    """What bends the values between the two matrices of a layer's feed-forward part."""

    GELU = "gelu"  # in the approximation by tanh
    GELU_ERF = "gelu_erf"
    GELU_QUICK = "gelu_quick"  # x * sigmoid(1.702 x)
    SILU = "silu"

    def __call__(self, x: T) -> T:
        match self:
            case Activation.GELU:
                return x.gelu()
            case Activation.GELU_ERF:
                return x.gelu_erf()
            case Activation.GELU_QUICK:
                return x.gelu_quick()
            case Activation.SILU:
                return x.silu()


class VisionMetadata:
    """Typed values within bounds. A key is given without the architecture; of several the first that is there is read.

    Errors of all methods: FileFormatError naming the key, when none is there and there is no default, or the value is of
    another kind or out of bounds.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.is_projector = file.architecture == PROJECTOR
        self._values = file.metadata

    @property
    def projector_type(self) -> str:
        """What a projector's own file calls its kind; empty in a model's file."""
        if not self.is_projector:
            return ""
        return self._values.string(self._key("vision.projector_type", "projector_type"), "mlp")

    def has(self, key: str) -> bool:
        return self._values.has(key)

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        key = self._key(*keys)
        value = self._values.integer(key) if default is None else self._values.integer(key, default)
        if not low <= value <= high:
            self._fail(key, f"is {value}, not from {low} to {high}")
        return value

    def number(self, *keys: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        """Bounds included, infinity not."""
        key = self._key(*keys)
        value = self._values.number(key) if default is None else self._values.number(key, default)
        if not (math.isfinite(value) and low <= value <= high):
            self._fail(key, f"is {value}, not from {low} to {high}")
        return value

    def boolean(self, *keys: str, default: bool | None = None) -> bool:
        key = self._key(*keys)
        return self._values.boolean(key) if default is None else self._values.boolean(key, default)

    def string(self, *keys: str, default: str | None = None) -> str:
        key = self._key(*keys)
        return self._values.string(key) if default is None else self._values.string(key, default)

    def integers(self, *keys: str, default: list[int] | None = None, low: int = 0, high: int = MAX_WIDTH) -> list[int]:
        """At most as many as a model may have layers."""
        key = self._key(*keys)
        if default is not None and not self._values.has(key):
            return default
        values = self._values.integers(key)
        if len(values) > MAX_LAYERS:
            self._fail(key, f"has {len(values)} items, more than {MAX_LAYERS}")
        for value in values:
            if not low <= value <= high:
                self._fail(key, f"has {value}, not from {low} to {high}")
        return values

    def colour(self, *keys: str, default: Colour | None = None) -> Colour:
        key = self._key(*keys)
        if default is not None and not self._values.has(key):
            return default
        values = self._values.numbers(key)
        if len(values) != 3 or not all(math.isfinite(value) for value in values):
            self._fail(key, "is not a finite number for each of red, green and blue")
        return values[0], values[1], values[2]

    def activation(self, default: Activation) -> Activation:
        """What a projector's own file says by ``use_gelu`` and ``use_silu``, neither being the quick one; else *default*."""
        if not self.is_projector:
            return default
        if self.boolean("use_gelu", default=False):
            if self.boolean("use_silu", default=False):
                self._fail("use_silu", "is true, and so is use_gelu")
            return Activation.GELU
        return Activation.SILU if self.boolean("use_silu", default=False) else Activation.GELU_QUICK

    def _key(self, *keys: str) -> str:
        return next((key for key in keys if self._values.has(key)), keys[0])

    def _fail(self, key: str, what: str) -> None:
        raise FileFormatError(f"{self.path}: key {self._values.full_key(key)!r} {what}")


@dataclass(frozen=True)
class VisionOptions:
    """What every encoder after the vision transformer has (Dosovitskiy et al. 2021)."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    head_dim: int
    patch_size: int
    image_size: int  # what it was trained with, or the most; its family knows which
    eps: float  # of norms
    mean: Colour  # of channels between 0 and 1
    std: Colour

    @classmethod
    def read(
        cls,
        meta: VisionMetadata,
        *,
        mean: Colour | None = None,
        std: Colour | None = None,
        eps: float | None = None,
        image_size: int | None = None,
        n_ff: int | None = None,
    ) -> VisionOptions:
        """With values for what a file of the family may leave out.

        Errors: FileFormatError.
        """
        n_embd = meta.integer("vision.embedding_length")
        n_heads = meta.integer("vision.attention.head_count")
        head_dim = meta.integer("vision.attention.key_length", "vision.attention.head_dim", default=n_embd // n_heads)
        if n_embd % n_heads and head_dim == n_embd // n_heads:
            raise FileFormatError(f"{meta.path}: vectors of {n_embd} cannot be split among {n_heads} heads")
        patch_size = meta.integer("vision.patch_size", high=MAX_PATCH_SIZE)
        image_size = meta.integer("vision.image_size", default=image_size, high=MAX_IMAGE_SIZE)
        if image_size < patch_size:
            raise FileFormatError(f"{meta.path}: images of {image_size} pixels are smaller than patches of {patch_size}")
        found_std = meta.colour("vision.image_std", default=std)
        if min(found_std) <= 0:
            raise FileFormatError(f"{meta.path}: vision.image_std {list(found_std)} is not above 0")
        return cls(
            n_layers=meta.integer("vision.block_count", high=MAX_LAYERS),
            n_embd=n_embd,
            n_ff=meta.integer("vision.feed_forward_length", default=n_ff, low=0 if n_ff == 0 else 1),
            n_heads=n_heads,
            head_dim=head_dim,
            patch_size=patch_size,
            image_size=image_size,
            eps=meta.number("vision.attention.layer_norm_epsilon", default=eps, high=1.0),
            mean=meta.colour("vision.image_mean", default=mean),
            std=found_std,
        )
