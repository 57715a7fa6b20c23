"""What a model sees with, for whoever makes requests of messages: files in, images out that know how they stand in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from puna.errors import BadRequest, UnsupportedModel
from puna.runner.images.image import Image
from puna.runner.images.kept import KeptImages
from puna.vision.model import Listener, Pixels, Prepared, Preparer
from puna.vision.sound import is_sound, samples
from puna.wire import Image as ImageFile

ReadPixels = Callable[[bytes], Pixels]


class Sight:
    """Images of one model."""

    def __init__(self, vision: Preparer, read: ReadPixels, max_bytes: int, n_batch: int, n_vocab: int) -> None:
        """*n_batch*: tokens of a step at most; *n_vocab*: of the vocabulary.

        *max_bytes*: of the host's memory, for images that nobody has right now.
        """
        self.n_looked_at = vision.size(*vision.largest())[0] if vision.is_cross_attended else 0
        self._vision = vision
        self._read = read
        self._n_batch = n_batch
        self._n_vocab = n_vocab
        self.kept = KeptImages(self._prepare, max_bytes)

    def _prepare(self, data: bytes) -> Prepared:
        prepared = self._heard(data) if is_sound(data) else self._seen(data)
        n_most = max((end - begin for begin, end in prepared.placed.together), default=1)
        if n_most > self._n_batch:
            raise BadRequest(f"{n_most} tokens of it must be computed at once, a step has {self._n_batch} at most")
        if not all(0 <= token < self._n_vocab for token in prepared.placed.tokens):
            raise UnsupportedModel("the vocabulary lacks tokens that stand around images of this kind")
        return prepared

    def _seen(self, data: bytes) -> Prepared:
        pixels = self._read(data)
        height, width, _ = pixels.shape
        self._vision.size(width, height)
        return self._vision.prepare(pixels)

    def _heard(self, data: bytes) -> Prepared:
        if not isinstance(self._vision, Listener) or not self._vision.sample_rate:
            raise BadRequest("it is sound, and the model does not hear")
        return self._vision.prepare_sound(samples(data, self._vision.sample_rate))

    def take_all(self, files: Sequence[bytes], salt: str, n_ctx: int) -> list[Image]:
        """A request's images, which are its own until it gives each back.

        Errors: BadRequest with the number of the image that is no good, and why; Overloaded.
        """
        taken: list[Image] = []
        with ExitStack() as undo:
            for number, data in enumerate(files, start=1):
                try:
                    image = self.kept.take(data, salt)
                    undo.callback(self.kept.give_back, image)
                    if image.n_tokens > n_ctx:
                        raise BadRequest(f"it takes {image.n_tokens} tokens, the context has {n_ctx}")
                except BadRequest as error:
                    raise BadRequest(f"image {number}: {error}") from error
                taken.append(image)
            undo.pop_all()
        return taken

    def give_back_all(self, images: Sequence[Image]) -> None:
        for image in images:
            self.kept.give_back(image)


def by_marker(files: Sequence[ImageFile], images: Sequence[Image]) -> dict[str, Image]:
    return {file.marker: image for file, image in zip(files, images, strict=True)}
