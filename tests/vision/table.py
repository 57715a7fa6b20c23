"""The families that see, with tiny files of each, and where libmtmd's way with an image is another than the published one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from puna.vision.model import Pixels, Placed
from puna.vision.special import special
from tests.vision import gemma3, gemma4, idefics3, internvl, lfm2, llama4, llava, minicpmv, pixtral, qwen
from tests.vision.encoding import Eyes
from tests.vision.files import Encoder, Floats

Size = tuple[int, int]  # width, height


def as_it_is(pixels: Pixels, _encoder: Encoder) -> Pixels:
    return pixels


def the_same(encoder: Encoder) -> Encoder:
    return encoder


def all_rows(ours: Floats, theirs: Floats, _encoder: Encoder) -> tuple[Floats, Floats]:
    return ours, theirs


@dataclass(frozen=True)
class Family:
    write_text: Callable[..., Path]
    encoder: Callable[..., Encoder]
    alone: Sequence[Size]  # three that both engines take alike: wide, tall, small
    others: Sequence[Size] = ()  # that libmtmd takes alike once it is *given* what Puna makes of them
    given: Callable[[Pixels, Encoder], Pixels] = as_it_is
    variants: Mapping[str, dict[str, Any]] = field(default_factory=lambda: {"f32": {}})  # of the encoder; the first is plain
    save_as_one: Callable[[Encoder, Path, Path], Path] | None = None  # None: no program writes such files
    apart: Sequence[str] = ()  # variants that no program writes so
    file: Callable[[Encoder], Encoder] = the_same  # the encoder as libmtmd computes the same with
    # What of an image's rows, Puna's and libmtmd's, can be compared.
    shared: Callable[[Floats, Floats, Encoder], tuple[Floats, Floats]] = all_rows
    has_own_rows: bool = False  # libmtmd's are others, so that libllama is given Puna's
    left_out: Sequence[str] = ()  # tokens that libmtmd has not
    as_rows: Sequence[str] = ()  # tokens that libmtmd has as rows
    around: str = "{}"  # what only Puna puts around an image, for libmtmd's text
    sees_both_ways: bool = False
    is_recurrent: bool = False  # resumes only where a step ended

    def seen(self, eyes: Eyes, placed: Placed) -> list[int | None]:
        """The tokens of an image as libmtmd has them; None where a row stands."""
        left_out, as_rows = ([special(eyes.tokenizer, name) for name in names] for names in (self.left_out, self.as_rows))
        return [
            None if row >= 0 or token in as_rows else token
            for row, token in zip(placed.rows, placed.tokens, strict=True)
            if row >= 0 or token not in left_out
        ]

    def compared(self, eyes: Eyes, encoder: Encoder, pixels: Pixels, theirs: Floats) -> tuple[Floats, Floats]:
        """Of Puna's rows of an image and libmtmd's what both have."""
        placed = eyes.model.prepare(pixels).placed
        as_rows = [special(eyes.tokenizer, name) for name in self.as_rows]
        stated = [row >= 0 for row, token in zip(placed.rows, placed.tokens, strict=True) if row >= 0 or token in as_rows]
        if as_rows:
            assert len(stated) == len(theirs)
            theirs = theirs[stated]
        return self.shared(eyes.rows(pixels), theirs, encoder)


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


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        write_text=gemma3.write_text,
        encoder=partial(gemma3.encoder, n_embd=96, n_ff=128),
        variants={
            "f32": {},
            "f16": {"dtype": "f16", "n_embd": 72, "n_ff": 112},
            "names-of-older-files": {"swapped": True},
            "no-whole-patches": {"side": 8, "cell": 2, "patch": 15},
        },
        alone=[(168, 168), (300, 300), (60, 60)],
        others=[(40, 40), (640, 360), (20, 700)],
        given=_square,
        save_as_one=gemma3.save_as_one,
        apart=["names-of-older-files"],
        around="\n\n{}\n\n",
        sees_both_ways=True,
    ),
    "gemma4": Family(
        write_text=gemma4.write_text,
        encoder=gemma4.encoder,
        alone=[(640, 448), (288, 992), (544, 512)],
        save_as_one=gemma4.save_as_one,
        sees_both_ways=True,
    ),
    "idefics3": Family(
        write_text=idefics3.write_text,
        encoder=idefics3.encoder,
        variants={
            "f32": {},
            "f16": {"dtype": "f16", "swapped": True},
            "two-by-two": {"cell": 2, "longest": 168},
        },
        alone=[(300, 200), (50, 168), (84, 84)],
        others=[(336, 336), (500, 300), (20, 90), (640, 100), (10, 300)],
    ),
    "internvl": Family(
        write_text=internvl.write_text,
        encoder=internvl.encoder,
        variants={"f32": {}, "f16": {"dtype": "f16", "cell": 3}},
        # One tile, and grids that the image fills as it is.
        alone=[(168, 84), (84, 168), (84, 84)],
        others=[(60, 60), (252, 84), (168, 168)],
        file=internvl.for_libmtmd,
    ),
    "lfm2": Family(
        write_text=lfm2.write_text,
        encoder=partial(lfm2.encoder, n_embd=96, n_ff=96),
        variants={
            "f32": {},
            "f16-no-norm": {"dtype": "f16", "norm": False, "n_embd": 48, "n_ff": 80},
            "more-positions": {"side": 40},
        },
        # One piece: its own size, rounded, grown, shrunk. Then grids that the image fills as it is: libmtmd keeps proportions.
        alone=[(320, 256), (256, 384), (256, 256)],
        others=[(500, 300), (91, 40), (640, 700), (1536, 512), (1024, 1024)],
        save_as_one=lfm2.save_as_one,
        is_recurrent=True,
    ),
    "llama4": Family(
        write_text=llama4.write_text,
        encoder=llama4.encoder,
        alone=[(384, 384), (256, 256), (128, 128)],
        save_as_one=llama4.save_as_one,
        shared=llama4.tiles,
        has_own_rows=True,
        left_out=llama4.MARKS,
    ),
    "llava": Family(
        write_text=llava.write_text,
        encoder=partial(llava.encoder, n_embd=96, n_ff=128),
        variants={
            "clip": {"n_embd": 48, "n_ff": 80},
            "siglip": {"has_class": False, "post_norm": True, "act": "gelu", "swapped": False},
            "norms": {"norms": True, "dtype": "f16"},
            "several-layers": {"has_class": False, "features": [0, 2, 3], "act": "gelu"},
            "tiles": {"pinpoints": [84, 168, 168, 84, 168, 168, 252, 84]},
        },
        alone=[(84, 84), (168, 168), (252, 252)],
        # Not of proportions that libmtmd, in single precision, rounds otherwise than was published.
        others=[(60, 20), (300, 190), (50, 400), (700, 90)],
        given=_squared,
        file=llava.for_libmtmd,
        shared=llava.shared,
        has_own_rows=True,
    ),
    "minicpm-v": Family(
        write_text=minicpmv.write_text,
        encoder=minicpmv.encoder,
        variants={"f32": {}, "f16": {"dtype": "f16", "swapped": False, "n_queries": 7}, "2.5": {"version": 2}},
        # One piece, and slices that need not be resized, which are not always squares.
        alone=[(168, 84), (84, 168), (84, 84)],
        others=[(252, 84), (168, 168), (252, 252), (140, 294), (112, 350)],
    ),
    "pixtral": Family(
        write_text=pixtral.write_text,
        encoder=partial(pixtral.encoder, head_dim=32, n_ff=96),
        variants={
            "f32": {},
            "f16": {"dtype": "f16", "head_dim": 16, "n_ff": 80},
            "nothing-merged": {"cell": 1, "biases": True, "act": "gelu"},
            "three-by-three": {"cell": 3},
        },
        # Whole cells in all variants.
        alone=[(252, 168), (84, 252), (168, 84)],
        others=[(280, 280), (140, 252), (300, 200), (160, 101), (700, 400), (137, 263)],
        given=_whole_cells,
        save_as_one=pixtral.save_as_one,
        apart=["nothing-merged"],
        has_own_rows=True,  # those of [IMG_BREAK] are made of memory that nobody set
        as_rows=["[IMG_BREAK]"],
    ),
    "qwen2-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen2vl"),
        encoder=partial(qwen.encoder25, is_first=True),
        alone=[(280, 196), (112, 308), (84, 84)],
    ),
    "qwen2.5-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen2vl"),
        encoder=qwen.encoder25,
        alone=[(280, 196), (112, 308), (84, 84)],
        save_as_one=qwen.save25_as_one,
    ),
    "qwen3-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen3vl"),
        encoder=qwen.encoder3,
        alone=[(320, 224), (128, 352), (96, 96)],
        save_as_one=qwen.save3_as_one,
    ),
    "qwen3-vl-moe": Family(
        write_text=partial(qwen.write_text, architecture="qwen3vlmoe"),
        encoder=qwen.encoder3,
        alone=[(320, 224), (128, 352), (96, 96)],
        save_as_one=partial(qwen.save3_as_one, architecture="qwen3vlmoe"),
    ),
    "qwen3.5": Family(
        write_text=partial(qwen.write_text, architecture="qwen35"),
        encoder=partial(qwen.encoder3, deepstack=()),
        alone=[(320, 224), (128, 352), (96, 96)],
        save_as_one=partial(qwen.save3_as_one, architecture="qwen35"),
        is_recurrent=True,
    ),
}

CASES = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]
CASES_IN_ONE = [(name, variant) for name, variant in CASES if FAMILIES[name].save_as_one and variant not in FAMILIES[name].apart]
