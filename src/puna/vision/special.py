"""The tokens that a family puts around its images, by what they are called."""

from __future__ import annotations

from puna.errors import UnsupportedModel
from puna.tokenizer.tokenizer import Tokenizer

PLACEHOLDER = 0  # the token that stands where an image's row does; of what it means nothing is used


def special(tokenizer: Tokenizer, name: str) -> int:
    """The one token of this name.

    Errors: UnsupportedModel where the vocabulary has none, since the model cannot have been trained with images then.
    """
    found = tokenizer.encode(name, add_special=False)
    if len(found) != 1:
        raise UnsupportedModel(f"the vocabulary has no token {name}, which stands beside images")
    return found[0]
