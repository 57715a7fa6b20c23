"""Where the images of a request stand in its prompt.

A template gets text alone: in it a marker stands for each image, made of chance, so that whatever people write stands for none.
The runner splits the prompt there.

Source: product description, "Images".
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from puna import wire
from puna.errors import BadRequest

_ANY_PLACE = "[img]"  # in a message's text: where its first image goes, the next in the next one
PLACE_IN_INPUT = "<__media__>"  # in what vectors are made of, as llama-server has it
_PLACE = re.compile(r"\[img-(\d{1,9})\]")  # in a raw prompt


class PlacedImages:
    """Those of one request, in order."""

    def __init__(self) -> None:
        self.images: list[wire.Image] = []
        self._key = secrets.token_hex(16)

    def _marker(self, data: bytes) -> str:
        marker = f"[img-{self._key}-{len(self.images)}]"
        self.images.append(wire.Image(marker=marker, data=data))
        return marker

    def within(self, text: str, images: Sequence[bytes]) -> tuple[str, list[str]]:
        """A message's text with its images, and their markers: in the places it names, the others in front."""
        markers = [self._marker(data) for data in images]
        # The text is cut before anything is put into it, so that no place is one that a marker brought.
        parts = text.split(_ANY_PLACE, len(markers))
        placed = parts[0]
        for marker, part in zip(markers, parts[1:], strict=False):
            placed += marker + part
        return "".join(markers[len(parts) - 1 :]) + placed, markers

    def in_input(self, text: str, images: Sequence[bytes]) -> str:
        """What a vector is made of, with its images where it says so. Errors: BadRequest where it has not a place for each."""
        if not images:
            return text
        first, *parts = text.split(PLACE_IN_INPUT)
        if len(parts) != len(images):
            raise BadRequest(f"prompt_string has {len(parts)} places ({PLACE_IN_INPUT}) for {len(images)} images")
        return first + "".join(self._marker(data) + part for data, part in zip(images, parts, strict=True))

    def in_raw(self, prompt: str, images: Sequence[bytes]) -> str:
        """A raw prompt with its images where it says ``[img-N]``, those that it does not name in front."""
        markers = [self._marker(data) for data in images]
        named = {int(found[1]) for found in _PLACE.finditer(prompt)}

        def marker(found: re.Match[str]) -> str:
            number = int(found[1])
            return markers[number] if number < len(markers) else found[0]

        rest = "".join(one for number, one in enumerate(markers) if number not in named)
        return rest + _PLACE.sub(marker, prompt)
