"""The images of a rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence

from puna import wire


def in_text(text: str, images: Sequence[wire.Image]) -> list[wire.Image]:
    """Those that stand in a prompt."""
    return [image for image in images if image.marker in text]


def shown(text: str, images: Sequence[wire.Image]) -> str:
    """A prompt as a person may see it: with ``[img-0]``, ``[img-1]`` and so on, as Ollama writes them."""
    for number, image in enumerate(images):
        text = text.replace(image.marker, f"[img-{number}]")
    return text
