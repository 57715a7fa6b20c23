"""The images of a request, for whoever makes tasks of it: taken where the model sees, refused in words where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from puna import wire
from puna.errors import UnsupportedModel
from puna.runner.images.image import Image
from puna.runner.images.sight import Sight, by_marker


class Seen(NamedTuple):
    """A request's images by what stands for them in its prompt, and what to do when it has ended."""

    images: Mapping[str, Image]
    give_back: Callable[[], None]
    n_looked_at: int = 0  # as a task has it


NOTHING_SEEN = Seen({}, lambda: None)


class Seeing:
    """What a model of *n_ctx* tokens sees with, if anything."""

    def __init__(self, n_ctx: int, sight: Sight | None = None, blindness: str = "") -> None:
        """*blindness*: why a model that has eyes does not see."""
        self._n_ctx = n_ctx
        self._sight = sight
        self._blindness = blindness

    def take(self, files: Sequence[wire.Image], salt: str, n_ctx: int) -> Seen:
        """The images of a request whose prompt may have *n_ctx* tokens, or with 0 all that there are; its own until given back.

        Errors: UnsupportedModel where the model sees nothing; BadRequest naming the image that is none; Overloaded.
        """
        if not files:
            return NOTHING_SEEN
        sight = self._eyes()
        taken = sight.take_all([file.data for file in files], salt, self._context(n_ctx))
        return Seen(by_marker(files, taken), lambda: sight.give_back_all(taken), sight.n_looked_at)

    def n_tokens(self, request: wire.ImagesRequest) -> list[int]:
        """How many tokens each image takes in a prompt. Errors: as take."""
        sight = self._eyes()
        taken = sight.take_all(request.images, request.salt, self._context(request.n_ctx))
        sight.give_back_all(taken)
        return [image.n_tokens for image in taken]

    def _eyes(self) -> Sight:
        if self._sight is None:
            raise UnsupportedModel(f"images are not supported: {self._blindness or 'the model has nothing to see with'}")
        return self._sight

    def _context(self, n_ctx: int) -> int:
        return min(n_ctx or self._n_ctx, self._n_ctx)
