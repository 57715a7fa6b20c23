"""The part of a model that sees, opened beside the part that reads: from the model's own file or from a projector's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from puna.errors import FileFormatError, LoadError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.ggml.backend import GGMLBackend
from puna.native.selftest import verdict
from puna.runner.images.graphs import GraphEncoder
from puna.runner.loading.libmtmd_eyes import LibmtmdEyes
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.images.decoders import Decoders
from puna.vision.metadata import PROJECTOR
from puna.vision.model import VisionModel
from puna.vision.registry import kind_of, open_vision
from puna.wire import DeviceLayers, DeviceMemory, LoadOptions, MemoryReport

log = logging.getLogger(__name__)


class Eyes:
    """A family's encoder, with memory of its own. Nothing is taken before allocate."""

    def __init__(self, vision: VisionModel, backend: GGMLBackend) -> None:
        self.vision = vision
        self.backend = backend
        self.decoders = Decoders()
        width, height = vision.largest()
        largest = vision.prepare(np.zeros((height, width, 3), np.uint8))
        self.encoder = GraphEncoder(backend, vision, largest)
        self.n_together = max((end - begin for begin, end in largest.placed.together), default=1)
        self.n_encoded = largest.n_rows if vision.is_cross_attended else 0
        arrays = [array for piece in largest.pieces for array in piece.arrays.values()]
        self._host_bytes = sum(array.nbytes for array in arrays) + 4 * largest.n_rows * vision.n_out + self.encoder.host_bytes

    def measure(self) -> MemoryReport:
        self.backend.measure()
        return self._with_host(self.backend.memory(self.encoder.reserve_sizes()))

    def allocate(self) -> None:
        """Errors: OutOfMemory."""
        self.backend.allocate()
        self.encoder.reserve()

    def memory(self) -> MemoryReport:
        return self._with_host(self.backend.memory())

    def _with_host(self, report: MemoryReport) -> MemoryReport:
        """With what the largest image takes before, between two parts, and after it is encoded."""
        return msgspec.structs.replace(report, host=report.host + self._host_bytes)

    def load(self, progress: Callable[[float], None]) -> None:
        self.backend.load(progress)

    def close(self) -> None:
        self.decoders.close()
        self.backend.close()


def sees(file: GGUFFile, projector: GGUFFile | None) -> bool:
    """Whether there is anything to see with, of whatever family."""
    return projector is not None or any(name.startswith("v.") for name in file.tensors)


def open_eyes(
    file: GGUFFile,
    projector: GGUFFile | None,
    tokenizer: Tokenizer,
    options: LoadOptions,
    n_threads: int,
    *,
    prefers_libmtmd: bool = False,
) -> Eyes | LibmtmdEyes:
    """Of the model *file*; *projector* is a file beside it, if there is one. The files must stay open as long as the eyes.

    A projector of llama.cpp's that Puna has no encoder for, or none that takes this file, goes to libmtmd; or the other way
    round where libmtmd is preferred.

    Errors: UnsupportedModel, FileFormatError, MissingTensors, LoadError.
    """

    def own() -> Eyes:
        return _own_eyes(file, projector, tokenizer, options, n_threads)

    if projector is None or projector.architecture != PROJECTOR:
        return own()
    theirs = partial(LibmtmdEyes, file, projector, options, n_threads)
    first, second = (theirs, own) if prefers_libmtmd else (own, theirs)
    try:
        return first()
    except (UnsupportedModel, FileFormatError) as error:
        try:
            eyes = second()
        except (UnsupportedModel, FileFormatError, LoadError) as other:
            raise UnsupportedModel(f"{error}; and also: {other}") from error
        log.info("images are encoded by %s: %s", "Puna" if prefers_libmtmd else "libmtmd", error)
        return eyes


def _own_eyes(file: GGUFFile, projector: GGUFFile | None, tokenizer: Tokenizer, options: LoadOptions, n_threads: int) -> Eyes:
    own = projector or file
    if kind_of(own) is None:
        raise UnsupportedModel(f"{own.path} holds no encoder of images")
    facts = verdict()
    facts.require_plain({tensor.type.ggml_name for tensor in own.tensors.values()})
    backend = GGMLBackend(own, n_threads=n_threads, use_mmap=options.use_mmap, allows=facts.allows)
    if options.projector_device:
        n_layers = backend.n_layers
        backend.close()
        layers = [DeviceLayers(device=options.projector_device, begin=0, end=n_layers + 1)]
        backend = GGMLBackend(own, n_threads=n_threads, layers=layers, use_mmap=options.use_mmap, allows=facts.allows)
    try:
        return Eyes(open_vision(own, backend, file, tokenizer), backend)
    except BaseException:
        backend.close()
        raise


def with_eyes(report: MemoryReport, eyes: MemoryReport) -> MemoryReport:
    """Both parts of a model, on whichever devices."""
    devices = {device.device: device for device in report.devices}
    n_layers = max((len(device.weights) for device in report.devices), default=1)
    for part in eyes.devices:
        known = devices.get(part.device)
        if known is None:
            known = DeviceMemory(device=part.device, weights=[0] * n_layers, cache=[0] * n_layers, graph=0, is_gpu=part.is_gpu)
        devices[part.device] = msgspec.structs.replace(known, projector=known.projector + part.total)
    return msgspec.structs.replace(
        report,
        devices=list(devices.values()),
        input_weights=report.input_weights + eyes.input_weights,
        mapped=report.mapped + eyes.mapped,
        host=report.host + eyes.host,
    )
