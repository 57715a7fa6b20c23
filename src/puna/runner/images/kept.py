"""The images that requests bring: each is read and prepared once, encoded once, and kept for a while when nobody has it any more.

Any thread may ask. The processes that read files, and the family's preparing, are somebody else's.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from puna.runner.images.image import Image, Key, Rows, key_of
from puna.vision.model import Prepared

log = logging.getLogger(__name__)

# Of images that nobody has, so many are known; and so many tokens of those without rows, of which is left how they stand.
MAX_KNOWN, MAX_KNOWN_TOKENS = 1024, 1 << 18

Prepare = Callable[[bytes], Prepared]
"""From a file to what the encoder takes. Errors: BadRequest saying what is wrong with the image."""


class KeptImages:
    """Those that requests still need, and beside them as many as fit *max_bytes*; those unused for longest go first."""

    def __init__(self, prepare: Prepare, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_encoded = 0
        self.n_reused = 0  # that a request found encoded, or in the hands of another
        self._prepare = prepare
        self._lock = threading.Lock()
        self._images: OrderedDict[Key, Image] = OrderedDict()  # those used last stand last
        self._under_way: dict[Key, Future[Image]] = {}
        self._preparer: ThreadPoolExecutor | None = None
        self._asked: dict[Key, Future[None]] = {}

    @property
    def n_bytes(self) -> int:
        with self._lock:
            return sum(image.n_bytes for image in self._images.values())

    @property
    def n_images(self) -> int:
        return len(self._images)

    def take(self, data: bytes, salt: str = "") -> Image:
        """An image that is the caller's until it gives it back; who brings one that another just brings waits for that.

        Errors: BadRequest saying what is wrong with it; Overloaded.
        """
        key = key_of(data, salt)
        with self._lock:
            image = self._images.get(key)
            if image is not None and image.problem is None:
                self.n_reused += image.rows is not None or image.n_holders > 0
                return self._held(image, data)
            waited, mine = self._under_way.get(key), Future[Image]()
            if waited is None:
                self._under_way[key] = mine
        if waited is not None:
            image = waited.result()
            with self._lock:
                self.n_reused += 1
                return self._held(image, data)
        try:
            image = Image(key, self._prepare(data))
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            self._images[key] = image
            self._held(image, data)
            self._spare_pieces(image)
        mine.set_result(image)
        return image

    def _held(self, image: Image, data: bytes) -> Image:
        self._images[image.key] = image  # it may have gone meanwhile
        self._images.move_to_end(image.key)
        image.n_holders += 1
        image.data = data
        return image

    def _spare_pieces(self, image: Image) -> None:
        """What waits to be encoded has the same bound, of its own: of more, only the files are kept, to be prepared again."""
        n_bytes = sum(one.n_bytes for one in self._images.values() if one.n_holders and one.rows is None)
        if n_bytes > max(self.max_bytes, 2 * image.n_bytes):
            image.pieces = None

    def give_back(self, image: Image) -> None:
        """Once for each time it was taken."""
        with self._lock:
            image.n_holders -= 1
            if not image.n_holders:
                image.data = b""
                if image.problem is not None and self._images.get(image.key) is image:
                    del self._images[image.key]
            self._shrink()

    def _shrink(self) -> None:
        free = [image for image in self._images.values() if not image.n_holders]
        n_bytes = sum(image.n_bytes for image in free)
        for number, image in enumerate(free):
            is_unknown = len(free) - number > MAX_KNOWN
            if n_bytes <= self.max_bytes and not is_unknown:
                break
            n_bytes -= image.n_bytes
            image.pieces = image.rows = image.elements = None
            if is_unknown:
                del self._images[image.key]
        n_tokens = 0
        for image in reversed([image for image in free if image.rows is None and image.pieces is None]):
            n_tokens += image.n_tokens
            if n_tokens > MAX_KNOWN_TOKENS:
                self._images.pop(image.key, None)

    def spare(self, past: Iterable[Image]) -> None:
        """Of more bytes than may be kept those rows go that no request needs from here on: of images that all are *past*, which
        come once for each place that they have. Who begins again has them encoded again.
        """
        n_past = Counter(id(image) for image in past)
        with self._lock:
            held = [image for image in self._images.values() if image.n_holders]
            n_bytes = sum(image.n_bytes for image in held)
            for image in held:
                if n_bytes <= self.max_bytes:
                    return
                if image.rows is not None and n_past[id(image)] >= image.n_holders:
                    n_bytes -= image.n_bytes
                    image.rows = None

    def encoded(self, image: Image, rows: Rows) -> None:
        """Its rows are there."""
        with self._lock:
            image.rows, image.pieces = rows, None
            self.n_encoded += 1

    def ask_for_pieces(self, image: Image) -> Future[None]:
        """Have an image that somebody has prepared again; where that fails, the image says why. One thread, the engine's."""
        asked = self._asked.get(image.key)
        if asked is None:
            if self._preparer is None:
                self._preparer = ThreadPoolExecutor(1, "prepare")
            asked = self._asked[image.key] = self._preparer.submit(self._prepare_again, image, image.data)
            asked.add_done_callback(lambda _: self._asked.pop(image.key, None))
        return asked

    def _prepare_again(self, image: Image, data: bytes) -> None:
        try:
            image.pieces = tuple(self._prepare(data).pieces)
        except BaseException as error:
            log.exception("an image could be prepared once, and not again")
            image.problem = error

    def close(self) -> None:
        if self._preparer is not None:
            self._preparer.shutdown(wait=False, cancel_futures=True)
