"""The part of a model that sees, computed by libmtmd: for projectors that Puna has no encoder for, whichever engine reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from puna.compat.eyes import LlamaEyes
from puna.compat.trial import tried
from puna.gguf.reader import GGUFFile
from puna.ml.ggml.devices import devices, join
from puna.vision.images.decoders import Decoders
from puna.wire import DeviceMemory, LoadOptions, MemoryReport

HOST = "CPU"


class _Whole:
    """In a backend's place, for an encoder that cannot be interrupted, nor be told anew how many threads it has."""

    def set_threads(self, n_threads: int) -> None: ...
    def abort(self) -> None: ...
    def clear_abort(self) -> None: ...


class LibmtmdEyes:
    """As puna.runner.loading.eyes.Eyes. What it takes is known from a trial in another process, which opened the same files;
    nothing is taken before load.
    """

    n_encoded = 0

    def __init__(self, file: GGUFFile, projector: GGUFFile, options: LoadOptions, n_threads: int) -> None:
        """Errors: UnsupportedModel, FileFormatError, LoadError."""
        self.vision = self.encoder = LlamaEyes(Path(file.path), Path(projector.path), tried(file.path, projector.path))
        self.decoders = Decoders()
        self.backend = _Whole()
        self.n_together = self.vision.facts.n_together
        self._n_threads = n_threads
        join([options.projector_device])
        self._device = next((device for device in devices() if device.name == options.projector_device), None)
        self._weight_bytes = sum(tensor.n_bytes for tensor in projector.tensors.values())

    def measure(self) -> MemoryReport:
        return self.memory()

    def memory(self) -> MemoryReport:
        """Of working memory what libmtmd plans for its first picture; others may take more. Of the host's, the largest picture
        before and after it is encoded.
        """
        facts = self.vision.facts
        width, height = facts.largest
        taken = DeviceMemory(
            device=self._device.name if self._device else HOST,
            weights=[self._weight_bytes],
            cache=[0],
            graph=facts.working_bytes,
            is_gpu=self._device is not None and not self._device.is_cpu,
        )
        return MemoryReport(devices=[taken], input_weights=0, mapped=0, host=3 * width * height + 4 * facts.n_rows * facts.n_out)

    def allocate(self) -> None:
        """Its memory is taken with its weights, by load."""

    def load(self, progress: Callable[[float], None]) -> None:
        """Errors: LoadError, OutOfMemory."""
        device = 0 if self._device is None or self._device.is_cpu else self._device.address
        self.vision.open(self._n_threads, device)
        progress(1.0)

    def close(self) -> None:
        self.decoders.close()
        self.vision.close()
