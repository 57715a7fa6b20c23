"""Rotary positions as config.json describes them, to GGUF's keys and frequency factors (llama.cpp's)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import UnsupportedModel
from puna.gguf.convert.fields import Fields

Factors = Mapping[str, npt.NDArray[np.float32]]

PLAIN, LINEAR, YARN, LLAMA3, LONG = "default", "linear", "yarn", "llama3", "longrope"
_SAME = {"su": LONG, "dynamic": PLAIN, "mrope": PLAIN}  # dynamic scaling changes nothing within the trained length


class Rotation:
    """Of heads of *width* values, in a family that knows these *kinds* of stretching beside none."""

    def __init__(self, fields: Fields, width: int, kinds: Sequence[str] = (LINEAR, YARN), part: str = "") -> None:
        """*part* names the rotation of one kind of layers where config.json has several."""
        stated = fields.object("rope_parameters", "rope_scaling")
        if part and stated.has(part):
            stated = stated.object(part)
        self.options, self.fields = stated, fields
        self.base = stated.positive("rope_theta", default=fields.positive("rope_theta", default=10000.0))
        self.n_ctx = fields.whole("max_position_embeddings", high=1 << 31, default=1 << 31)
        share = stated.positive("partial_rotary_factor", default=fields.positive("partial_rotary_factor", default=1.0))
        self.n_dims = int(width * share)
        if not 0 < self.n_dims <= width or self.n_dims % 2:
            raise fields.wrong("partial_rotary_factor", share, f"which makes {self.n_dims} of {width} values rotate")
        kind = stated.get("rope_type", "type") or PLAIN
        self.kind = _SAME.get(str(kind), str(kind))
        if self.kind not in (PLAIN, *kinds):
            raise UnsupportedModel(
                f"{fields.file}: a rotation of type {str(kind)[:40]!r} cannot be converted for this architecture"
            )

    def keys(self) -> dict[str, Any]:
        """Metadata by key, without the architecture.

        Errors: FileFormatError naming the field; UnsupportedModel.
        """
        found: dict[str, Any] = {"rope.freq_base": self.base, "rope.dimension_count": self.n_dims}
        if self.kind == LINEAR:
            found |= {"rope.scaling.type": LINEAR, "rope.scaling.factor": self.factor}
        elif self.kind == YARN:
            found |= self.yarn()
            if (excess := self._magnitude() / self.plain_magnitude) != 1.0:
                found["rope.scaling.attn_factor"] = excess
        elif self.kind == LONG:
            found["rope.scaling.original_context_length"] = self.original
            found["rope.scaling.attn_factor"] = self._long_magnitude()
        return found

    def yarn(self) -> dict[str, Any]:
        """All about YaRN but its magnitude."""
        found: dict[str, Any] = {"rope.scaling.type": YARN, "rope.scaling.factor": self.factor}
        found["rope.scaling.original_context_length"] = self.original
        for name in ("beta_fast", "beta_slow"):
            if self.options.has(name):
                found[f"rope.scaling.yarn_{name}"] = self.options.positive(name)
        return found

    @property
    def factor(self) -> float:
        return self.options.positive("factor")

    @property
    def original(self) -> int:
        name = "original_max_position_embeddings"
        source = self.options if self.options.has(name) else self.fields
        return source.whole(name, default=self.n_ctx, high=1 << 31)

    @property
    def plain_magnitude(self) -> float:
        """That the tensor library multiplies a rotation by YaRN with."""
        return 1 + 0.1 * math.log(max(self.factor, 1.0))

    def _magnitude(self) -> float:
        if self.options.has("attention_factor"):
            return self.options.positive("attention_factor")
        if self.options.get("mscale") and self.options.get("mscale_all_dim"):
            one, all_dim = (
                1 + 0.1 * self.options.positive(name) * math.log(max(self.factor, 1.0)) for name in ("mscale", "mscale_all_dim")
            )
            return one / all_dim
        return self.plain_magnitude

    def _long_magnitude(self) -> float:
        if self.options.has("attention_factor"):
            return self.options.positive("attention_factor")
        stretch = self.options.positive("factor", default=self.n_ctx / self.original)
        return math.sqrt(1 + math.log(stretch) / math.log(self.original)) if stretch > 1 else 1.0

    def factors(self) -> Factors:
        """Tensors of what each frequency is divided by.

        Errors: FileFormatError naming the field.
        """
        if self.kind == LLAMA3:
            return {"rope_freqs.weight": self._llama3()}
        if self.kind == LONG:
            return {
                f"rope_factors_{name}.weight": np.array(
                    self.options.numbers(f"{name}_factor", length=self.n_dims // 2), np.float32
                )
                for name in ("long", "short")
            }
        return {}

    def _llama3(self) -> npt.NDArray[np.float32]:
        """Nothing for fast ones, the factor for slow ones, a blend between (Llama 3.1)."""
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (self.options.positive(name) for name in names)
        if high <= low:
            raise self.fields.wrong("high_freq_factor", high, f"which is not above low_freq_factor {low}")
        half = self.n_dims // 2
        wavelengths = 2 * math.pi * self.base ** (np.arange(half) / half)
        blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        return np.asarray(1 / ((1 - blend) / factor + blend), np.float32)


def stretched(
    width: Callable[[Fields], int], *kinds: str
) -> tuple[Callable[[Fields], dict[str, Any]], Callable[[Fields], Factors]]:
    """A family's keys about positions, and the tensors that belong to them."""
    return (
        lambda fields: Rotation(fields, width(fields), kinds).keys(),
        lambda fields: Rotation(fields, width(fields), kinds).factors(),
    )
