"""A runner that is ready before anybody knows for which model.

It does all that takes time and is the same for every model, then waits until its parent writes ``{"model": FILE}``, one
line, into its standard input. From there on it is a runner like any other.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

log = logging.getLogger(__name__)


class NamedModel:
    """The model that the first line of a stream names."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._is_complete = threading.Event()

    def feed(self, data: bytes) -> None:
        """What follows the line is ignored."""
        if not self._is_complete.is_set():
            self._line += data
            if b"\n" in data:
                self._is_complete.set()

    def wait(self) -> Path:
        """Errors: ValueError when the line is no such message."""
        self._is_complete.wait()
        match json.loads(self._line.partition(b"\n")[0]):
            case {"model": str(name)}:
                return Path(name)
        raise ValueError(f"no model is named in {bytes(self._line[:100])!r}")


def prepare() -> None:
    """Import the engine, open the tensor library, and look at the self-test's verdict.

    What fails here fails again, and is told, when a model is loaded.
    """
    import numpy.random  # noqa: F401 - numpy itself would import it at the first draw

    import puna.model.arch.llama  # brings what all architectures share; what is another's own is soon imported
    import puna.runner.engine  # noqa: F401
    from puna.errors import PunaError
    from puna.native.ggml import ggml
    from puna.native.llama import llama
    from puna.native.selftest import verdict

    try:
        ggml()
        llama()
        verdict()
    except PunaError as error:
        log.warning("no model will run: %s", error)
