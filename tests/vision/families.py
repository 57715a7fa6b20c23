"""Families that see, with tiny files of each, for the contract of tests/parity/test_seeing.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from puna.vision.model import Pixels
from puna.vision.pixels import Filter, resized
from tests.vision import gemma3, gemma4, idefics3, lfm2, llama4, pixtral, qwen
from tests.vision.encoding import Floats
from tests.vision.files import Encoder

Size = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Family:
    """*alone* are sizes of images that neither engine resizes: wide, tall, small. Others are resized by *fit* before libmtmd
    gets them where its way is another than the published one.
    """

    write_text: Callable[[Path], Path]
    encoder: Callable[..., Encoder]
    save_as_one: Callable[[Encoder, Path, Path], Path] | None  # None: no program writes such files
    alone: Sequence[Size]
    fit: Filter
    # Where libmtmd departs from what was published: what of an image's rows, Puna's and its own, can be compared, and the tokens
    # that it leaves out. libllama is then given Puna's rows.
    comparable: Callable[[Floats, Floats], tuple[Floats, Floats]] | None = None
    left_out: Sequence[str] = ()
    as_rows: Sequence[str] = ()  # tokens that libmtmd has as rows
    around: str = "{}"  # what only Puna puts around an image, for libmtmd's text
    is_recurrent: bool = False  # resumes only where a step ended


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        write_text=gemma3.write_text,
        encoder=partial(gemma3.encoder, n_embd=96, n_ff=128),
        save_as_one=gemma3.save_as_one,
        alone=[(168, 168), (300, 300), (60, 60)],
        fit=Filter.BILINEAR,
        around="\n\n{}\n\n",
    ),
    "idefics3": Family(
        write_text=idefics3.write_text,
        encoder=partial(idefics3.encoder, longest=168),
        save_as_one=None,
        alone=[(300, 200), (50, 168), (84, 84)],
        fit=Filter.LANCZOS,
    ),
    "lfm2-vl": Family(
        write_text=lfm2.write_text,
        encoder=partial(lfm2.encoder, n_embd=96, n_ff=96),
        save_as_one=lfm2.save_as_one,
        alone=[(320, 256), (256, 384), (256, 256)],
        fit=Filter.BILINEAR,
        is_recurrent=True,
    ),
    "pixtral": Family(
        write_text=pixtral.write_text,
        encoder=partial(pixtral.encoder, head_dim=32, n_ff=96),
        save_as_one=pixtral.save_as_one,
        alone=[(280, 196), (112, 252), (140, 84)],
        fit=Filter.BICUBIC,
        comparable=pixtral.without_breaks,
        as_rows=["[IMG_BREAK]"],
    ),
    "gemma4": Family(
        write_text=gemma4.write_text,
        encoder=gemma4.encoder,
        save_as_one=gemma4.save_as_one,
        alone=[(640, 448), (288, 992), (544, 512)],
        fit=Filter.BICUBIC,
    ),
    "llama4": Family(
        write_text=llama4.write_text,
        encoder=llama4.encoder,
        save_as_one=llama4.save_as_one,
        alone=[(384, 384), (256, 256), (128, 128)],
        fit=Filter.BILINEAR,
        comparable=llama4.tiles,
        left_out=llama4.MARKS,
    ),
    "qwen2-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen2vl"),
        encoder=partial(qwen.encoder25, is_first=True),
        save_as_one=None,
        alone=[(280, 196), (112, 308), (84, 84)],
        fit=Filter.BICUBIC,
    ),
    "qwen2.5-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen2vl"),
        encoder=qwen.encoder25,
        save_as_one=qwen.save25_as_one,
        alone=[(280, 196), (112, 308), (84, 84)],
        fit=Filter.BICUBIC,
    ),
    "qwen3-vl": Family(
        write_text=partial(qwen.write_text, architecture="qwen3vl"),
        encoder=qwen.encoder3,
        save_as_one=qwen.save3_as_one,
        alone=[(320, 224), (128, 352), (96, 96)],
        fit=Filter.BICUBIC,
    ),
    "qwen3.5": Family(
        write_text=partial(qwen.write_text, architecture="qwen35"),
        encoder=partial(qwen.encoder3, deepstack=()),
        is_recurrent=True,
        save_as_one=partial(qwen.save3_as_one, architecture="qwen35"),
        alone=[(320, 224), (128, 352), (96, 96)],
        fit=Filter.BICUBIC,
    ),
    "qwen3-vl-moe": Family(
        write_text=partial(qwen.write_text, architecture="qwen3vlmoe"),
        encoder=qwen.encoder3,
        save_as_one=partial(qwen.save3_as_one, architecture="qwen3vlmoe"),
        alone=[(320, 224), (128, 352), (96, 96)],
        fit=Filter.BICUBIC,
    ),
}


def fitted(family: Family, pixels: Pixels, size: Size) -> Pixels:
    return resized(pixels, size, family.fit)
