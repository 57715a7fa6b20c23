"""What people send: a screenshot of a browser's size, and a photo as phones write it, on its side with a note to turn it."""

from __future__ import annotations

from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SCREEN, PHOTO = (2560, 1440), (4000, 3000)  # the photo as it is stored; upright it is as high as it is wide here
_ORIENTATION, _TURNED = 0x0112, 6  # of EXIF: to be turned clockwise by a quarter


@cache
def screenshot() -> bytes:
    """PNG: windows over one another, lines of text, a table and a gradient."""
    image = Image.new("RGB", SCREEN, (36, 52, 71))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(22)
    for i, (left, top, right, bottom) in enumerate([(60, 50, 1500, 1100), (900, 300, 2480, 1380), (1700, 80, 2400, 700)]):
        draw.rectangle((left, top, right, bottom), (250 - 9 * i, 250 - 5 * i, 247), (20, 20, 24), 2)
        draw.rectangle((left, top, right, top + 40), (70 + 50 * i, 90, 160 - 30 * i))
        draw.text((left + 16, top + 8), f"Window {i + 1}: what the quick brown fox saw", (255, 255, 255), font)
        for line, y in enumerate(range(top + 60, bottom - 40, 31)):
            text = f"{line:03d}  The quick brown fox jumps over {line * line} lazy dogs; {'x' * (line % 7)} = {line / 7:.3f}"
            draw.text((left + 20, y), text[: (right - left) // 13], (15 + 3 * line, 20, 30 + 2 * line), font)
    for x in range(200, 1400):
        draw.line((x, 1150, x, 1300), (x % 256, (x // 5) % 256, 255 - x % 256))
    for x in range(120, 900, 40):
        draw.line((x, 1320, x + 20, 1420), (240, 220, 40), 1 + x % 3)
    return _written(image, "PNG")


@cache
def photo() -> bytes:
    """JPEG: a sky, hills, a sun, and a sign with words that stand upright once it is turned."""
    width, height = PHOTO[1], PHOTO[0]  # upright
    y, x = np.mgrid[:height:4, :width:4].astype(np.float32)
    hills = height * 0.55 + 180 * np.sin(x / 310) + 90 * np.sin(x / 97)
    colour = np.where(
        (y > hills)[..., None],
        np.stack([40 + 30 * np.sin(x / 23), 110 + 40 * np.cos(y / 31), 45 + 20 * np.sin((x + y) / 17)], -1),
        np.stack([120 + y / 40, 165 + y / 55, 235 - y / 60], -1),
    )
    image = Image.fromarray(colour.clip(0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    draw.ellipse((2100, 400, 2600, 900), (255, 236, 150))
    draw.rectangle((300, 2500, 1900, 3100), (238, 232, 220), (90, 60, 30), 24)
    draw.text((380, 2600), "FRESH BREAD\nopen till 18:30", (60, 30, 20), ImageFont.load_default(170))
    exif = Image.Exif()
    exif[_ORIENTATION] = _TURNED
    return _written(image.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=88, exif=exif)


def _written(image: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


SCENES = {"screenshot": screenshot, "photo": photo}
