"""Rotary position options as GGUF files state them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions, SectionOrder, Sections

# llama.cpp's name and those of the ancestor's files.
SECTION_KEYS = ("rope.dimension_sections", "rope.mrope_section", "mrope_sections")


def rope_options(file: GGUFFile, *, n_dims: int, neox: bool = False) -> RopeOptions:
    """Read ``rope.*``; the meaning of each key is llama.cpp's.

    A stretch without a stated type is linear. YaRN's magnitude, 1 + 0.1 ln(factor), is applied by the tensor library.
    Errors: FileFormatError for values that no rotation can use.
    """
    meta = file.metadata
    kind = meta.string("rope.scaling.type", "linear")
    factor = meta.number("rope.scaling.factor", 0.0) or meta.number("rope.scale_linear", 0.0)
    ext_factor = meta.number("rope.scaling.yarn_ext_factor", -1.0)  # below 0: not stated
    base = meta.number("rope.freq_base", 10000.0)
    rotated = meta.integer("rope.dimension_count", n_dims)
    if not (math.isfinite(base) and base > 0 and math.isfinite(factor) and factor >= 0):
        raise FileFormatError(f"{file.path}: rope.freq_base {base} or rope.scaling.factor {factor} is not usable")
    if not 0 < rotated <= n_dims or rotated % 2:
        raise FileFormatError(f"{file.path}: rope.dimension_count {rotated} does not fit a head of {n_dims}")
    if kind not in ("linear", "yarn", "none", "longrope"):
        raise FileFormatError(f"{file.path}: rope.scaling.type {kind!r} is not known")
    return RopeOptions(
        n_dims=rotated,
        neox=neox,
        base=base,
        scale=1.0 / factor if factor and kind != "none" else 1.0,
        original_ctx=meta.integer("rope.scaling.original_context_length", meta.integer("context_length", 0)),
        ext_factor=(ext_factor if ext_factor >= 0 else 1.0) if kind == "yarn" else 0.0,
        attn_factor=meta.number("rope.scaling.attn_factor", 1.0),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def rope_sections(file: GGUFFile, order: SectionOrder, default: Sequence[int]) -> Sections:
    """How many pairs turn by each axis, of three or four; *default* where the file does not say.

    Errors: FileFormatError for what the tensor library would end the process for.
    """
    key = next((key for key in SECTION_KEYS if file.metadata.has(key)), "")
    stated = file.metadata.integers(key) if key else default
    time, height, width, other = (*stated, 0, 0, 0, 0)[:4]
    if not (3 <= len(stated) <= 4 and all(0 <= n < 1 << 20 for n in stated) and time + height + width):
        raise FileFormatError(f"{file.path}: {file.metadata.full_key(key)} {list(stated)[:8]} are no sections of a rotation")
    return Sections((time, height, width, other), order)
