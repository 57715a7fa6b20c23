"""A prompt's text and images as the tokens of a sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from puna.runner.images.image import Image
from puna.runner.images.in_sequence import ImageAt
from puna.runner.prefixes.key import Element
from puna.tokenizer.tokenizer import Tokenizer


class Tokens(NamedTuple):
    """Those of text, and those of images, which are told from all others by what they show."""

    tokens: list[int]
    images: list[ImageAt]


def tokens_of(text: str, tokenizer: Tokenizer, images: Mapping[str, Image] | None = None, context: Sequence[int] = ()) -> Tokens:
    """The text is cut where an image's marker stands; what the model puts around a text stands around all of it.

    *context* are tokens in front of the prompt, which has no special ones then.
    """
    if not images:
        return Tokens([*context, *tokenizer.encode(text, add_special=not context)], [])
    found = Tokens([*context], [])
    end = [] if context else special_around(tokenizer)[1]
    for number, part in enumerate(cut_at(text, list(images))):
        if number % 2:
            found.images.append(ImageAt(images[part], len(found.tokens)))
            found.tokens.extend(_elements(images[part]))
        elif number or context:
            found.tokens.extend(tokenizer.encode(part, add_special=False) if part else [])
        else:
            wrapped = tokenizer.encode(part)
            found.tokens.extend(wrapped[: len(wrapped) - len(end)])
    found.tokens.extend(end)
    return found


def special_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the model puts in front of a text and behind it."""
    plain, wrapped = tokenizer.encode("0", add_special=False), tokenizer.encode("0")
    n_added = len(wrapped) - len(plain)
    n_begin = next((n for n in range(n_added + 1) if wrapped[n : n + len(plain)] == plain), n_added)
    return wrapped[:n_begin], wrapped[n_begin + len(plain) :]


def cut_at(text: str, markers: Sequence[str]) -> list[str]:
    """Text, marker, text, and so on; text may be empty."""
    return re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]


def _elements(image: Image) -> list[int]:
    """Each of an image's tokens is told by the image and its place in it."""
    if image.elements is None:
        image.elements = [Element(token, source=(image.key.digest, place)) for place, token in enumerate(image.placed.tokens)]
    return image.elements


def said(tokens: Sequence[int], images: Sequence[ImageAt], *, is_cross_attended: bool = False) -> list[int]:
    """The tokens without those in whose place an image is seen: what was said, to penalties and to people."""
    hidden: set[int] = set()
    for at in images:
        rows = at.image.placed.rows
        hidden.update(at.begin + place for place, row in enumerate(rows) if row >= 0 or is_cross_attended)
    return [int(token) for index, token in enumerate(tokens) if index not in hidden] if images else list(tokens)
