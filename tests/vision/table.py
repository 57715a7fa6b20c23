"""The families that see, as the tests write them, and where libmtmd takes images otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from puna.vision.model import Pixels
from tests.vision import gemma3, idefics3, internvl, lfm2, llava, pixtral
from tests.vision.files import Encoder, Floats


def as_it_is(pixels: Pixels, _encoder: Encoder) -> Pixels:
    return pixels


def the_same(encoder: Encoder) -> Encoder:
    return encoder


def all_rows(ours: Floats, theirs: Floats, _encoder: Encoder) -> tuple[Floats, Floats]:
    return ours, theirs


@dataclass(frozen=True)
class Family:
    """*given*: what libmtmd is to be given for an image so that it takes the same pixels. *prompt*: what is around an image in
    a text for libmtmd so that the tokens are the same. *end_of_row*: a token that libmtmd has as a row. *file*: the encoder as
    libmtmd computes the same with. *shared*: the rows that both have.
    """

    write_text: Callable[..., Path]
    encoder: Callable[..., Encoder]
    variants: Mapping[str, dict[str, Any]]
    sizes: tuple[tuple[int, int], ...]
    save_as_one: Callable[[Encoder, Path, Path], Path] | None = None
    given: Callable[[Pixels, Encoder], Pixels] = as_it_is
    file: Callable[[Encoder], Encoder] = the_same
    shared: Callable[[Floats, Floats, Encoder], tuple[Floats, Floats]] = all_rows
    prompt: str = "{}"
    end_of_row: str = ""
    sees_both_ways: bool = False
    alone: tuple[str, ...] = ()  # variants that the ancestor has not


def _resized(pixels: Pixels, width: int, height: int, how: Image.Resampling) -> Pixels:
    rows = Image.fromarray(pixels).resize((width, pixels.shape[0]), how)
    return np.asarray(rows.resize((width, height), how))


def _square(pixels: Pixels, encoder: Encoder) -> Pixels:
    size = encoder.keys["vision.image_size"]
    return _resized(pixels, size, size, Image.Resampling.BILINEAR)


def _whole_cells(pixels: Pixels, encoder: Encoder) -> Pixels:
    height, width, _ = pixels.shape
    unit = encoder.keys["vision.patch_size"] * encoder.keys.get("vision.spatial_merge_size", 1)
    shrink = max(1.0, max(width, height) / encoder.keys["vision.image_size"])
    width, height = (-(-int(side / shrink) // unit) * unit for side in (width, height))
    return _resized(pixels, width, height, Image.Resampling.BICUBIC)


GEMMA3 = Family(
    write_text=gemma3.write_text,
    encoder=gemma3.encoder,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "names-of-older-files": {"swapped": True},
        "no-whole-patches": {"side": 8, "cell": 2, "patch": 15},
    },
    sizes=((168, 168), (300, 300), (40, 40), (640, 360), (20, 700)),
    save_as_one=gemma3.save_as_one,
    given=_square,
    prompt="\n\n{}\n\n",
    sees_both_ways=True,
    alone=("names-of-older-files",),
)

PIXTRAL = Family(
    write_text=pixtral.write_text,
    encoder=pixtral.encoder,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "nothing-merged": {"cell": 1, "biases": True, "act": "gelu"},
        "three-by-three": {"cell": 3},
    },
    sizes=((280, 280), (140, 252), (300, 200), (160, 101), (700, 400), (137, 263)),
    save_as_one=pixtral.save_as_one,
    given=_whole_cells,
    end_of_row="[IMG_BREAK]",
    alone=("nothing-merged",),
)

LFM2 = Family(
    write_text=lfm2.write_text,
    encoder=lfm2.encoder,
    variants={"f32": {}, "f16-no-norm": {"dtype": "f16", "norm": False}, "more-positions": {"side": 40}},
    # One piece: its own size, rounded, grown, shrunk. Then grids that the image fills as it is: libmtmd keeps proportions.
    sizes=((256, 256), (500, 300), (91, 40), (640, 700), (1536, 512), (1024, 1024)),
    save_as_one=lfm2.save_as_one,
)


def _squared(pixels: Pixels, encoder: Encoder) -> Pixels:
    """Where there are no tiles; those are libmtmd's, but for its rounding."""
    if "vision.image_grid_pinpoints" in encoder.keys:
        return pixels
    height, width, _ = pixels.shape
    side, size = max(width, height), encoder.keys["vision.image_size"]
    square = np.full((side, side, 3), (122, 116, 104), np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return _resized(square, size, size, Image.Resampling.BICUBIC)


LLAVA = Family(
    write_text=llava.write_text,
    encoder=llava.encoder,
    variants={
        "clip": {},
        "siglip": {"has_class": False, "post_norm": True, "act": "gelu", "swapped": False},
        "norms": {"norms": True, "dtype": "f16"},
        "several-layers": {"has_class": False, "features": [0, 2, 3], "act": "gelu"},
        "tiles": {"pinpoints": [84, 168, 168, 84, 168, 168, 252, 84]},
    },
    # Not of proportions that libmtmd, in single precision, rounds otherwise than was published.
    sizes=((84, 84), (60, 20), (300, 190), (50, 400), (700, 90)),
    given=_squared,
    file=llava.for_libmtmd,
    shared=llava.shared,
)

IDEFICS3 = Family(
    write_text=idefics3.write_text,
    encoder=idefics3.encoder,
    variants={
        "f32": {},
        "f16": {"dtype": "f16", "swapped": True},
        "two-by-two": {"cell": 2, "longest": 168},
    },
    sizes=((336, 336), (500, 300), (20, 90), (640, 100), (10, 300)),
)

INTERNVL = Family(
    write_text=internvl.write_text,
    encoder=internvl.encoder,
    variants={"f32": {}, "f16": {"dtype": "f16", "cell": 3}},
    # One tile, and grids that the image fills as it is.
    sizes=((84, 84), (60, 60), (168, 84), (252, 84), (168, 168)),
    file=internvl.for_libmtmd,
)

FAMILIES = {"gemma3": GEMMA3, "idefics3": IDEFICS3, "internvl": INTERNVL, "lfm2": LFM2, "llava": LLAVA, "pixtral": PIXTRAL}

CASES = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]
CASES_IN_ONE = [(name, variant) for name, variant in CASES if FAMILIES[name].save_as_one and variant not in FAMILIES[name].alone]
