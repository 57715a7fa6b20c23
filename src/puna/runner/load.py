"""From load options to a model that runs: backend, weights, cache, working memory; and what each of them takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from puna.errors import BadRequest, FileFormatError, UnsupportedModel
from puna.kvcache.cache import Cache, Limits
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.model.model import Model
from puna.model.pooling import Encoder, Pooling, can_pool, pooling_of
from puna.model.registry import open_model
from puna.native import cpu
from puna.native.selftest import verdict
from puna.runner.embedding import MAX_TEXTS, PACKED_TOKENS
from puna.runner.step import Forward
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import LoadOptions, MemoryReport

log = logging.getLogger(__name__)

# Beside the sequences that run, as many keep the prefixes of requests that have ended; all share one pool of cells.
SEQUENCES_PER_REQUEST = 2

_CACHE_TYPES = {"f16": DType.F16, "q8_0": DType.Q8_0, "q4_0": DType.Q4_0}


@dataclass
class Loaded:
    """A model in memory and all it needs to run."""

    backend: GGMLBackend
    model: Model
    cache: Cache
    forward: Forward
    tokenizer: Tokenizer
    limits: Limits
    pooling: Pooling = Pooling.NONE  # NONE: it generates text

    @property
    def n_parallel(self) -> int:
        """Requests computed at once."""
        return self.limits.max_sequences // (1 if self.is_encoder else SEQUENCES_PER_REQUEST)

    @property
    def is_encoder(self) -> bool:
        return isinstance(self.model, Encoder)

    def close(self) -> None:
        self.forward.close()
        self.backend.close()
        self.tokenizer.close()


def n_threads(options: LoadOptions) -> int:
    """As asked for, else one per physical core that this process may use."""
    if options.n_threads > 0:
        return options.n_threads
    return cpu.threads(cpu.physical_cores(), cpu.usable_cores(), cpu.cgroup_limits().cpus)


def check(options: LoadOptions) -> None:
    """Errors: BadRequest naming the option."""
    for name, low, high in (
        ("n_ctx", 4, 1 << 24),
        ("n_parallel", 1, 256),
        ("n_pool", 0, 1 << 30),
        ("n_batch", 1, 1 << 16),
        ("n_threads", 0, 4096),
    ):
        value = getattr(options, name)
        if not low <= value <= high:
            raise BadRequest(f"{name} must be from {low} to {high}, not {value}")


def _open(path: Path, options: LoadOptions) -> tuple[GGMLBackend, Model, Cache, Limits, Forward]:
    check(options)
    facts = verdict()
    backend = GGMLBackend(
        path,
        n_threads=n_threads(options),
        layers=options.gpu_layers,
        use_mmap=options.use_mmap,
        allows=facts.allows,
        adapters=options.adapters,
    )
    try:
        facts.require_plain({kind.ggml_name for kind in backend.tensor_types})
        n_ctx = options.n_ctx
        trained = backend.file.metadata.integer("context_length", 0)
        if 0 < trained < n_ctx:
            log.warning("the model was trained for a context of %d tokens, not %d", trained, n_ctx)
            n_ctx = trained
        model = open_model(backend.file, backend, n_ctx)
        if pooling_of(backend.file) is not Pooling.NONE and not can_pool(model, pooling_of(backend.file)):
            what = "scores" if pooling_of(backend.file) is Pooling.RANK else "embeddings"
            raise UnsupportedModel(f"{path}: {what} of a {backend.file.architecture} model are not supported yet")
        limits = Limits(
            max_sequences=options.n_parallel * SEQUENCES_PER_REQUEST,
            n_ctx=n_ctx,
            n_batch=min(options.n_batch, n_ctx),
            n_pool=options.n_pool or n_ctx * options.n_parallel,
        )
        if isinstance(model, Encoder):
            limits = Limits(max(options.n_parallel, MAX_TEXTS), n_ctx, max(n_ctx, PACKED_TOKENS))
        cache = model.make_cache(backend, limits, _CACHE_TYPES[options.kv_cache_type])
        return backend, model, cache, limits, Forward(backend, model, cache, limits)
    except BaseException:
        backend.close()
        raise


def measure(path: Path, options: LoadOptions) -> MemoryReport:
    """What a load would take; nothing is allocated.

    Errors: as allocate.
    """
    backend, _, _, _, forward = _open(path, options)
    try:
        backend.measure()
        return backend.memory(backend.reserve_sizes(forward.plan_largest().ctx))
    finally:
        forward.close()
        backend.close()


def allocate(path: Path, options: LoadOptions) -> Loaded:
    """All memory, and the vocabulary; the weights are still to be read.

    Errors: OutOfMemory, UnsupportedModel, FileFormatError, MissingTensors, BadRequest.
    """
    backend, model, cache, limits, forward = _open(path, options)
    try:
        backend.allocate()
        forward.reserve()
        pooling = pooling_of(backend.file)
        tokenizer = Tokenizer(path)
        if tokenizer.n_tokens > model.n_vocab:
            # A token without an embedding would end the process inside the library.
            tokenizer.close()
            raise FileFormatError(f"{path}: {tokenizer.n_tokens} tokens in the vocabulary, {model.n_vocab} in token_embd.weight")
        return Loaded(backend, model, cache, forward, tokenizer, limits, pooling)
    except BaseException:
        forward.close()
        backend.close()
        raise


def read_weights(loaded: Loaded, progress: Callable[[float], None]) -> None:
    loaded.backend.load(progress)
