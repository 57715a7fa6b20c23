"""Rotary positions as config.json describes them, to GGUF's keys and frequency factors (llama.cpp's)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.numbers import number, positive


@dataclass(frozen=True)
class Rotation:
    """*options* are ``rope_scaling`` or ``rope_parameters``; *theta* counts where they name none."""

    options: Mapping[str, Any]
    theta: float
    n_ctx: int  # that the model was trained for
    head_width: int

    @property
    def base(self) -> float:
        """Errors: FileFormatError."""
        base = number(self.options, "rope_theta", self.theta)
        if base <= 0:
            raise FileFormatError(f"config.json: rope_theta is {base}")
        return base

    @property
    def kind(self) -> str:
        """Errors: UnsupportedModel."""
        kind = self.options.get("rope_type", self.options.get("type", "default")) or "default"
        if kind not in ("default", "dynamic", "linear", "yarn", "llama3"):
            raise UnsupportedModel(f"config.json: a rotation of type {str(kind)[:40]!r} cannot be converted")
        # Dynamic scaling changes nothing within the length that the model was trained for.
        return "default" if kind == "dynamic" else str(kind)

    def keys(self) -> dict[str, Any]:
        """Metadata by key, without the architecture.

        Errors: FileFormatError naming the field; UnsupportedModel.
        """
        found: dict[str, Any] = {"rope.freq_base": self.base}
        kind, options = self.kind, self.options
        if kind not in ("linear", "yarn"):
            return found
        if kind == "yarn" and any(options.get(name) is not None for name in ("attention_factor", "mscale", "mscale_all_dim")):
            raise UnsupportedModel("config.json: YaRN with a magnitude of its own cannot be converted")
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": positive(options, "factor")}
        if kind == "yarn":
            original = {"original_max_position_embeddings": self.n_ctx, **options}
            length = positive(original, "original_max_position_embeddings")
            found["rope.scaling.original_context_length"] = int(length)
            for name in ("beta_fast", "beta_slow"):
                if options.get(name) is not None:
                    found[f"rope.scaling.yarn_{name}"] = positive(options, name)
        return found

    def frequency_factors(self) -> npt.NDArray[np.float32] | None:
        """What Llama 3.1 divides each frequency by: nothing for fast ones, the factor for slow ones, a blend between.

        Errors: FileFormatError naming the field.
        """
        if self.kind != "llama3":
            return None
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, original = (positive(self.options, name) for name in names)
        if high <= low:
            raise FileFormatError(f"config.json: high_freq_factor {high} is not above low_freq_factor {low}")
        half = self.head_width // 2
        wavelengths = 2 * math.pi * self.base ** (np.arange(half) / half)
        blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        return np.asarray(1 / ((1 - blend) / factor + blend), np.float32)
