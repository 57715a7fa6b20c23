"""Weights of a model that is being made: from a checkpoint, in another kind, under an adapter. Each result is a new blob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from puna.errors import FileFormatError, PunaError
from puna.gguf.join import join
from puna.gguf.lora import read_lora
from puna.gguf.reader import GGUFFile
from puna.store.creating.quantise import quantise
from puna.store.disk import space
from puna.store.disk.blobs import Blob, Blobs
from puna.store.disk.claims import Work
from puna.store.disk.scratch import scratch
from puna.store.disk.space import storing
from puna.store.models.details import read_details
from puna.store.progress import Progress, Report

UNQUANTIZED = ("F32", "F16", "BF16")
QUANTIZING = "0" * 19  # stands for a digest in progress lines, as in Ollama's: clients show a bar only where there is one


def convert_checkpoint(blobs: Blobs, work: Work, files: Mapping[str, Path], report: Report) -> tuple[Blob, Blob | None, str]:
    """A GGUF file from a checkpoint's files by their names in it, its projector's if it sees, and the kind to have the first
    in where nobody asks for another.

    Errors: FileFormatError naming file and tensor; UnsupportedModel.
    """
    from puna.gguf.convert.checkpoint import Checkpoint
    from puna.gguf.convert.registry import convert

    status = "converting model"
    report(Progress(status))
    n_bytes = sum(path.stat().st_size for path in files.values())
    with scratch(work, "convert-") as folder, storing(work.root, n_bytes):
        target = folder / "model.gguf"
        eyes = folder / "projector.gguf"
        found = convert(Checkpoint(files), target, _reporter(report, status), eyes)
        return _add(blobs, target, report), _add(blobs, eyes, report) if found.sees else None, found.kind


def join_parts(blobs: Blobs, work: Work, parts: Mapping[str, Path], report: Report) -> Blob:
    """A GGUF file of those that it was cut into, by their names.

    Errors: FileFormatError naming what is missing or does not belong there; DiskFull before anything is written.
    """
    status = "joining the parts of the model"
    report(Progress(status))
    n_bytes = sum(path.stat().st_size for path in parts.values())
    space.require(work.root, n_bytes)
    with ExitStack() as stack:
        files = [stack.enter_context(GGUFFile.open(path)) for path in parts.values()]
        folder = stack.enter_context(scratch(work, "join-"))
        stack.enter_context(storing(work.root, n_bytes))
        target = folder / "model.gguf"
        try:
            join(files, target, _reporter(report, status))
        except FileFormatError as error:
            raise FileFormatError(_renamed(str(error), parts)) from error
        return _add(blobs, target, report)


def _renamed(text: str, files: Mapping[str, Path]) -> str:
    for name, path in files.items():
        text = text.replace(str(path), name)
    return text


def convert_adapter(blobs: Blobs, work: Work, files: Mapping[str, Path], model: Path, report: Report) -> Blob:
    """A GGUF file from an adapter's files by their names, for the model in the file *model*.

    Errors: FileFormatError naming file and tensor; UnsupportedModel.
    """
    from puna.gguf.convert import adapter
    from puna.gguf.convert.checkpoint import Checkpoint

    report(Progress("converting adapter"))
    n_bytes = sum(path.stat().st_size for path in files.values())
    with scratch(work, "convert-") as folder, storing(work.root, n_bytes), GGUFFile.open(model) as base:
        target = folder / "adapter.gguf"
        adapter.convert(Checkpoint(files), base, target)
        check_adapter(next(name for name in files if name.lower().endswith(".safetensors")), target, model)
        return blobs.import_file(target, link=True)


def quantise_blob(blobs: Blobs, work: Work, digest: str, kind: str, report: Report) -> Blob | None:
    """A model's file in another kind; None when it is of that kind already.

    Errors: PunaError when it is quantised already, or cannot be.
    """
    source = blobs.path(digest)
    now = read_details(source).file_type
    if now == kind:
        return None
    if now not in (*UNQUANTIZED, "unknown"):
        raise PunaError("quantization is only supported for F16, BF16 and F32 models")
    status = f"quantizing {now} model to {kind}"
    report(Progress(status, QUANTIZING, source.stat().st_size, 0))
    with scratch(work, "quantise-") as folder:
        target = quantise(source, folder, kind, _reporter(report, status, QUANTIZING))
        report(Progress("verifying conversion"))
        with GGUFFile.open(target) as new, GGUFFile.open(source) as old:
            if _shapes(new) != _shapes(old):
                raise PunaError("the quantized model has other tensors than the model it was made from")
        return _add(blobs, target, report)


def check_adapter(name: str, path: Path, model: Path) -> None:
    """Errors: FileFormatError naming what of an adapter does not fit the model; *name* stands for its path."""
    with GGUFFile.open(path) as adapter, GGUFFile.open(model) as base:
        try:
            read_lora(adapter, base)
        except FileFormatError as error:
            raise FileFormatError(str(error).replace(str(path), name)) from error


def _add(blobs: Blobs, path: Path, report: Report) -> Blob:
    return blobs.import_file(path, link=True, on_bytes=_reporter(report, "hashing model"))


def _shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in file.tensors.items()}


def _reporter(report: Report, status: str, digest: str = "") -> Callable[[int, int], None]:
    return lambda done, total: report(Progress(status, digest, total, done))
