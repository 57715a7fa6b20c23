"""The numbers of a checkpoint's tensors, also of those that are published in fewer than 16 bits.

FP8: a matrix of E4M3 beside its scales, one for all of it, for each row, or for each block. MXFP4: blocks of 32 values of
four bits beside one exponent each; they stay as they are, in GGUF's order.
Source: the Open Compute Project's specifications of both; the names are those of DeepSeek's, Qwen's and OpenAI's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Tensors
from puna.gguf.convert.fields import Fields

Rows = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_SCALES = ("_scale_inv", "_scale")  # of a tensor, after its name
_OF_ACTIVATIONS = ("activation_scale", "input_scale")  # how a device may round what it multiplies with; not weights
_MXFP4_BLOCK = 32


@dataclass(frozen=True)
class Quantisation:
    """What config.json says of numbers in fewer than 16 bits."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale
    is_fp8: bool = False
    is_mxfp4: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Quantisation:
        """Errors: UnsupportedModel naming the method; FileFormatError."""
        stated = Fields(config).object("quantization_config")
        if not stated.values:
            return cls()
        method = stated.text("quant_method", default="none stated")
        if method == "mxfp4":
            return cls(is_mxfp4=True)
        if method == "fp8" and stated.text("fmt", default="e4m3") == "e4m3":
            block = stated.items("weight_block_size") if stated.has("weight_block_size") else None
            if block is None:
                return cls(is_fp8=True)
            sizes = Fields({"weight_block_size": block}).numbers("weight_block_size", length=2)
            if any(not 1 <= size <= 1 << 16 or size != int(size) for size in sizes):
                raise FileFormatError(f"config.json: weight_block_size is {str(block)[:60]}")
            return cls((int(sizes[0]), int(sizes[1])), is_fp8=True)
        if method == "compressed-tensors" and _is_plain_fp8(stated):
            return cls(is_fp8=True)
        raise UnsupportedModel(
            f"config.json: the checkpoint is quantized already, by {method[:60]!r} in a form that cannot be converted; "
            "FP8 (E4M3) and MXFP4 can; else import one in F16, BF16 or F32"
        )


def _is_plain_fp8(stated: Fields) -> bool:
    """Whether all weights are E4M3 with one scale for each matrix or row."""
    groups = stated.object("config_groups")
    weights = [groups.object(name).object("weights") for name in groups.values]
    return bool(weights) and all(
        w.get("num_bits") == 8 and w.get("type") == "float" and w.get("strategy") in ("tensor", "channel") for w in weights
    )


def _e4m3() -> Floats:
    """The value of each of the 256 codes: a sign, four bits of exponent, three of mantissa; no infinities, two NaNs."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where((codes & 127) == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3 = _e4m3()


class Weights:
    """The tensors of a checkpoint as numbers; which of its names were asked for is known in the end."""

    def __init__(self, tensors: Tensors, quantisation: Quantisation) -> None:
        self.tensors = tensors
        self.used: set[str] = set()
        self._quantisation = quantisation

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> str:
        """How the tensor is stored, by the format's word; it is used from now on.

        Errors: FileFormatError naming file and tensor when it is missing, of another shape, or not of floating point numbers.
        """
        file, stored = self.tensors.home(name), self.tensors.stored(name)
        self.used.add(name)
        if stored.shape != shape or not all(shape):
            raise FileFormatError(
                f"{file.name}: tensor {name} has the shape {list(stored.shape)}, the configuration calls for {list(shape)}"
            )
        if stored.dtype == "F8_E4M3" and self._quantisation.is_fp8:
            scale = self._scale(name)
            self.tensors.home(scale).check_floats(scale)
            self._repeats(scale, shape)
            beside = name.removesuffix("weight")
            self.used |= {scale} | {beside + other for other in _OF_ACTIVATIONS if beside + other in self.tensors}
        else:
            file.check_floats(name)
        return stored.dtype

    def take_blocks(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of this shape in MXFP4: ``name_blocks`` and ``name_scales``.

        Errors: as take.
        """
        *rows, width = shape
        n_blocks = width // _MXFP4_BLOCK
        for part, expected in (("blocks", (*rows, n_blocks, 16)), ("scales", (*rows, n_blocks))):
            full = f"{name}_{part}"
            stored = self.tensors.stored(full)
            if stored.dtype != "U8" or stored.shape != expected or width % _MXFP4_BLOCK:
                raise FileFormatError(
                    f"{self.tensors.home(full).name}: tensor {full} has the type {stored.dtype} and the shape "
                    f"{list(stored.shape)}, MXFP4 calls for U8 and {list(expected)}"
                )
            self.used.add(full)

    def raw(self, name: str) -> Rows:
        """The numbers as they are stored, those of BF16 as uint16."""
        return self.tensors.home(name).raw(name)

    def floats(self, name: str) -> Floats:
        """The numbers.

        Errors: FileFormatError for what is no number.
        """
        file, stored = self.tensors.home(name), self.tensors.stored(name)
        if stored.dtype != "F8_E4M3":
            return file.floats(name)
        values = _E4M3[file.raw(name)]
        if np.isnan(values).any():
            raise FileFormatError(f"{file.name}: tensor {name} has values that are no numbers")
        scale = self._scale(name)
        return self._scaled(values, self.tensors.home(scale).floats(scale), self._repeats(scale, stored.shape))

    def blocks(self, name: str) -> Rows:
        """What take_blocks took, as GGUF has it: bytes [..., n_blocks, 17], the exponent first, then the values.

        There the first half of a block is in the lower halves of its bytes; here neighbours share a byte.
        """
        packed, scales = (self.tensors.home(f"{name}_{part}").raw(f"{name}_{part}") for part in ("blocks", "scales"))
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], _MXFP4_BLOCK)
        halves = codes[..., :16] | codes[..., 16:] << 4
        return np.concatenate([scales[..., None], halves], -1)

    def _scale(self, name: str) -> str:
        found = next((name + suffix for suffix in _SCALES if name + suffix in self.tensors), None)
        if found is None:
            raise FileFormatError(
                f"{self.tensors.home(name).name}: tensor {name} is of type F8_E4M3, but there is no {name}_scale_inv"
            )
        return found

    def _repeats(self, scale: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns of a matrix share a scale; 0: all.

        Errors: FileFormatError naming the scales that do not fit.
        """
        stored = self.tensors.stored(scale).shape
        if len(shape) == 2:
            if int(np.prod(stored)) == 1:
                return 0, 0
            if stored in ((shape[0], 1), (shape[0],)):
                return 1, 0
            block = self._quantisation.block
            if block and stored == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
                return block
        raise FileFormatError(
            f"{self.tensors.home(scale).name}: tensor {scale} has the shape {list(stored)}, which fits no tensor of {list(shape)}"
        )

    def _scaled(self, values: Floats, scales: Floats, repeats: tuple[int, int]) -> Floats:
        rows, columns = values.shape
        scales = scales.reshape(scales.shape[0] if repeats[0] else 1, -1)
        for axis, (each, length) in enumerate(zip(repeats, (rows, columns), strict=True)):
            if each:
                scales = np.repeat(scales, each, axis).take(range(length), axis)
        return values * scales


def mxfp4_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the bytes that ``Weights.blocks`` gives for numbers of this shape."""
    *rows, width = shape
    return (*rows, width // _MXFP4_BLOCK, 17)
