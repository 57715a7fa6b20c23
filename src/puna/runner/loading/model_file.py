"""What was read of the model's file: its head and its vocabulary, kept from one step of a load to the next."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from puna.gguf.reader import GGUFFile
from puna.runner.loading.meanwhile import Meanwhile
from puna.tokenizer.tokenizer import Tokenizer


class ModelFile:
    """A load asks several times about one file; with a large vocabulary it takes a while to read. What is returned here
    stays open until the file is found to have changed, or until close. The vocabulary is read beside everything else of a load.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, ...] = ()
        self._head: GGUFFile | None = None
        self._tokenizer: Meanwhile[Tokenizer] | None = None
        self._projector: GGUFFile | None = None

    def head(self) -> GGUFFile:
        """As the file is now. To be called when nothing uses an earlier one any more.

        Errors: NotFound, FileFormatError.
        """
        state = self._seen()
        if self._head is None or state != self._state:
            self.close()
            # Looked at before it is read: if it changes in between, the next look tells.
            head = GGUFFile.open(self.path)
            try:
                self._tokenizer = Meanwhile(partial(Tokenizer, self.path, head), "vocabulary")
            except BaseException:
                head.close()
                raise
            self._state, self._head = state, head
        return self._head

    def tokenizer(self) -> Tokenizer:
        """Of the file that head has returned last.

        Errors: FileFormatError without a vocabulary.
        """
        assert self._tokenizer is not None, "there is a head first"
        return self._tokenizer.result()

    def projector(self, path: str) -> GGUFFile | None:
        """The file at this path, which stays open as long as the model's; None for none.

        Errors: NotFound, FileFormatError.
        """
        if self._projector is not None and self._projector.path != path:
            self._projector.close()
            self._projector = None
        if self._projector is None and path:
            self._projector = GGUFFile.open(path)
        return self._projector

    def _seen(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError:
            return ()  # opening it says why
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def close(self) -> None:
        if self._tokenizer is not None:  # first: it may still read the file
            self._tokenizer.discard(Tokenizer.close)
        if self._head is not None:
            self._head.close()
        if self._projector is not None:
            self._projector.close()
        self._state, self._head, self._projector, self._tokenizer = (), None, None, None
