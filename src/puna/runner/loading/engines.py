"""A model file opened by the engine that runs it: Puna's own, or libllama behind the same runner.

The rule is in puna.engines. A file that turns out to be nothing for Puna's engine, although its architecture is, goes to
libllama as well, unless OLLAMA_NEW_ENGINE says otherwise: it may have tensors of other names or in another arrangement, or
hold something that Puna's engine would pass over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from puna import settings
from puna.compat.model import LlamaModel
from puna.compat.model import Options as LlamaOptions
from puna.engines import Choice, choose
from puna.errors import FileFormatError, LoadError, MissingTensors, OutOfMemory, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Limits, Sequences
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.model.pooling import Encoder, Pooling, pooling_of
from puna.model.registry import open_model
from puna.native.kernels.library import PLACE, wanted
from puna.native.selftest import verdict
from puna.runner.images.homes import ImageHomes, homes_of
from puna.runner.loading.eyes import Eyes, open_eyes, sees, with_eyes
from puna.runner.loading.libmtmd_eyes import LibmtmdEyes
from puna.runner.scheduling.packing import MAX_TEXTS, PACKED_TOKENS
from puna.runner.step.forward import Compute, Forward
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import LoadOptions, MemoryReport

log = logging.getLogger(__name__)

# Beside the sequences that run, as many keep the prefixes of requests that have ended; all share one pool of cells.
SEQUENCES_PER_REQUEST = 2

# Rows of a step whose output a completion may ask for (Task.output_rows); memory for so many is measured and taken.
OUTPUTS_PER_SEQUENCE = 1

_CACHE_TYPES = {"f16": DType.F16, "q8_0": DType.Q8_0, "q4_0": DType.Q4_0}


class Host(Protocol):
    """What holds the model's memory."""

    file: GGUFFile

    def load(self, progress: Callable[[float], None]) -> None: ...
    def memory(self) -> MemoryReport: ...
    def set_threads(self, n_threads: int) -> None: ...
    def abort(self) -> None: ...
    def clear_abort(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Opened:
    """Nothing of it is in memory yet. *pooling* is what is left to do with the rows that a step gives."""

    choice: Choice
    backend: Host
    cache: Sequences
    forward: Compute
    limits: Limits
    n_vocab: int
    pooling: Pooling  # NONE: it generates text
    is_encoder: bool  # a text must be in one batch as a whole
    measure: Callable[[], MemoryReport]
    allocate: Callable[[], None]
    eyes: Eyes | LibmtmdEyes | None = field(default=None, kw_only=True)
    homes: ImageHomes | None = field(default=None, kw_only=True)  # of images, where cross attention looks at them
    blindness: str = field(default="", kw_only=True)  # why a model that has eyes cannot use them

    def close(self) -> None:
        self.forward.close()
        if self.eyes is not None:
            self.eyes.close()
        self.backend.close()


@dataclass(frozen=True)
class Files:
    """What a model is loaded from, beside its own file. Without a vocabulary nothing is seen."""

    projector: GGUFFile | None = None
    tokenizer: Callable[[], Tokenizer] | None = None


def open_file(
    file: GGUFFile, options: LoadOptions, n_threads: int, new_engine: bool | None = None, beside: Files | None = None
) -> Opened:
    """By the engine that is chosen, which the log names with the reason. The files must stay open as long as what is returned.

    A model whose eyes cannot be used is loaded all the same: it reads.

    Errors: UnsupportedModel, FileFormatError, MissingTensors, BadRequest, LoadError; OutOfMemory.
    """
    choice = choose(file.architecture, new_engine)
    refusal: UnsupportedModel | MissingTensors | None = None
    if choice.engine == "puna":
        try:
            return _logged(file, _open_with_puna(file, options, n_threads, choice, beside or Files()))
        except (UnsupportedModel, MissingTensors) as error:
            if choice.is_forced:
                raise
            refusal, choice = error, Choice("compat", str(error).removeprefix(f"{file.path}: "))
    try:
        return _logged(file, _open_with_libllama(file, options, n_threads, choice, beside or Files()))
    except (UnsupportedModel, FileFormatError, LoadError) as error:
        if isinstance(refusal, MissingTensors):
            raise refusal from None  # it names all that are missing, not only the first
        if refusal is None or isinstance(error, OutOfMemory):
            raise
        why = str(error).removeprefix(f"{file.path}: ")
        raise UnsupportedModel(f"{refusal}; libllama does not run the file either: {why}") from error


def _logged(file: GGUFFile, opened: Opened) -> Opened:
    name = {"puna": "Puna's engine", "compat": "libllama"}[opened.choice.engine]
    log.info("%s runs on %s: %s", Path(file.path).name, name, opened.choice.reason)
    return opened


def _limits(file: GGUFFile, options: LoadOptions, eyes: Eyes | LibmtmdEyes | None = None) -> Limits:
    """A step has room for the largest image whose tokens must be computed at once."""
    n_ctx = options.n_ctx
    trained = file.metadata.integer("context_length", 0)
    if 0 < trained < n_ctx:
        log.warning("the model was trained for a context of %d tokens, not %d", trained, n_ctx)
        n_ctx = trained
    return Limits(
        max_sequences=options.n_parallel * SEQUENCES_PER_REQUEST,
        n_ctx=n_ctx,
        n_batch=min(max(options.n_batch, eyes.n_together if eyes else 0), n_ctx),
        n_pool=options.n_pool or n_ctx * options.n_parallel,
        n_outputs=options.n_parallel * SEQUENCES_PER_REQUEST * OUTPUTS_PER_SEQUENCE,
        n_encoded=eyes.n_encoded if eyes else 0,
    )


def _limits_of_whole_texts(limits: Limits, options: LoadOptions) -> Limits:
    n_batch = max(limits.n_ctx, PACKED_TOKENS)
    return Limits(max(options.n_parallel, MAX_TEXTS), limits.n_ctx, n_batch, n_batch)


def _eyes(
    file: GGUFFile, options: LoadOptions, n_threads: int, beside: Files, *, prefers_libmtmd: bool = False
) -> tuple[Eyes | LibmtmdEyes | None, str]:
    """What the model sees with, or why it does not."""
    if beside.tokenizer is None or not sees(file, beside.projector):
        return None, ""
    try:
        tokenizer = beside.tokenizer()
        return open_eyes(file, beside.projector, tokenizer, options, n_threads, prefers_libmtmd=prefers_libmtmd), ""
    except OutOfMemory:
        raise
    except (UnsupportedModel, FileFormatError, LoadError) as error:
        log.warning("the model reads and does not see: %s", error)
        return None, str(error)


def _open_with_puna(file: GGUFFile, options: LoadOptions, n_threads: int, choice: Choice, beside: Files) -> Opened:
    facts = verdict()
    eyes, blindness = _eyes(file, options, n_threads, beside)
    backend = GGMLBackend(
        file,
        n_threads=n_threads,
        layers=options.gpu_layers,
        use_mmap=options.use_mmap,
        allows=facts.allows,
        adapters=options.adapters,
        flash_attention=options.flash_attention,
        kernels=wanted(),
        packed_cache_bytes=settings.load().packed_cache,
        models=Path(options.models) if options.models else None,
    )
    try:
        facts.require_plain({kind.ggml_name for kind in backend.tensor_types})
        limits = _limits(file, options, eyes)
        model = open_model(file, backend, limits.n_ctx)
        if eyes is not None and eyes.vision.n_out != model.n_embd:
            blindness = f"rows of its images have {eyes.vision.n_out} values, the model takes {model.n_embd}"
            eyes.close()
            eyes = None
            limits = _limits(file, options)
        if backend.instructions:
            log.info("quantised matrices are multiplied by Puna's own products (%s)", backend.instructions)
        pooling = pooling_of(file)
        if isinstance(model, Encoder):
            limits = _limits_of_whole_texts(limits, options)
        cache = model.make_cache(backend, limits, _CACHE_TYPES[options.kv_cache_type])
        forward = Forward(backend, model, cache, limits, builds_ahead=options.build_ahead)
        homes = homes_of(backend, model, cache, limits)
    except BaseException:
        backend.close()
        if eyes is not None:
            eyes.close()
        raise

    def measure() -> MemoryReport:
        backend.measure()
        report = backend.memory(_working_memory(backend, forward, homes))
        return report if eyes is None else with_eyes(report, eyes.measure())

    def allocate() -> None:
        backend.allocate()
        forward.reserve()
        if homes is not None:
            homes.reserve()
        if eyes is not None:
            eyes.allocate()

    return Opened(
        choice,
        backend,
        cache,
        forward,
        limits,
        model.n_vocab,
        pooling,
        isinstance(model, Encoder),
        measure,
        allocate,
        eyes=eyes,
        homes=homes,
        blindness=blindness,
    )


def _working_memory(backend: GGMLBackend, forward: Forward, homes: ImageHomes | None) -> list[int]:
    """By device."""
    sizes = [n * forward.n_places for n in backend.reserve_sizes(forward.plan_largest().ctx)]
    return sizes if homes is None else [n + more for n, more in zip(sizes, homes.reserve_sizes(), strict=True)]


def _open_with_libllama(file: GGUFFile, options: LoadOptions, n_threads: int, choice: Choice, beside: Files) -> Opened:
    facts = verdict()
    types = {tensor.type.ggml_name for tensor in file.tensors.values()}
    facts.require_plain(types)
    eyes, blindness = _eyes(file, options, n_threads, beside, prefers_libmtmd=True)
    limits = _limits(file, options, eyes)
    pooling = pooling_of(file)
    llama_options = LlamaOptions(
        n_threads=n_threads,
        cache_type=int(_CACHE_TYPES[options.kv_cache_type]),
        pooling=int(pooling),
        flash_attention=options.flash_attention,
        use_mmap=options.use_mmap is not False,
        use_repacking=all(facts.allows(kind, name) for kind in facts.buffer_types if kind != PLACE for name in types),
        layers=options.gpu_layers,
        adapters=options.adapters,
    )
    try:
        model = LlamaModel(file, limits, llama_options, whole_texts=_limits_of_whole_texts(limits, options))
    except BaseException:
        if eyes is not None:
            eyes.close()
        raise
    if eyes is not None and (model.sees_whole_text or eyes.vision.n_out != model.n_embd):
        blindness = f"rows of its images have {eyes.vision.n_out} values, and are not what the model takes"
        eyes.close()
        eyes = None
    if model.sees_whole_text and pooling not in (Pooling.NONE, Pooling.RANK):
        pooling = Pooling.CLS  # libllama has pooled: each row stands for its text

    def measure() -> MemoryReport:
        return model.memory() if eyes is None else with_eyes(model.memory(), eyes.measure())

    def allocate() -> None:
        model.check_free()
        if eyes is not None:
            eyes.allocate()

    return Opened(
        choice,
        model,
        model.cache,
        model.forward,
        model.limits,
        model.n_vocab,
        pooling,
        model.sees_whole_text,
        measure,
        allocate,
        eyes=eyes,
        blindness=blindness,
    )
