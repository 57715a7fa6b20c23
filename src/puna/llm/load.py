"""From options and settings to what a runner is loaded with, and whether a loaded runner serves another request too.

Knows nothing of devices: which layers go where is decided elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from puna import host
from puna.api.options import Options
from puna.settings import FOREVER, Settings
from puna.wire import LoadOptions

log = logging.getLogger(__name__)

DEFAULT_N_CTX = 4096
AUTO_N_CTX = ((47 << 30, 262144), (23 << 30, 32768))  # where nobody asked for a context: from so many bytes of GPUs
DEFAULT_N_PARALLEL = 4
DEFAULT_N_BATCH = 512
MIN_N_CTX, MAX_N_CTX = 4, 1 << 24
MIN_N_CTX_WITH_IMAGES = 2048  # a few of them, and a question
MAX_N_BATCH = 1 << 13  # beyond it a step takes memory, and everybody else's time, for nothing
HOST_CACHE_SHARE = 16  # a part in so many of the host's memory is for each model's host cache
_KV_CACHE_TYPES = ("f16", "q8_0", "q4_0")


@dataclass(frozen=True)
class LoadRequirements:
    """What a request wants its runner to be loaded with."""

    options: LoadOptions
    explicit: frozenset[str] = frozenset()  # fields of the options that somebody asked for; the others are defaults
    num_gpu: int | None = None  # layers on GPUs; None: as many as fit
    main_gpu: int | None = None  # the GPU that comes first
    n_ctx_most: int | None = None  # the context may be larger, up to this, as memory allows; None: it is what was asked for

    def contexts(self, gpu_bytes: int) -> list[int]:
        """What to try in turn on GPUs with so much memory in all."""
        least = self.options.n_ctx
        if self.n_ctx_most is None or self.num_gpu == 0:
            return [least]
        fitting = [min(n_ctx, self.n_ctx_most) for n_bytes, n_ctx in AUTO_N_CTX if gpu_bytes >= n_bytes]
        return [n_ctx for n_ctx in dict.fromkeys(fitting) if n_ctx > least] + [least]

    def is_served_by(self, loaded: LoadOptions) -> bool:
        """Whether a runner that was loaded with *loaded* will do.

        A larger context serves a request for a smaller one, and defaults never force a reload.
        """
        if loaded.n_ctx < self.options.n_ctx or loaded.kv_cache_type != self.options.kv_cache_type:
            return False
        if loaded.flash_attention != self.options.flash_attention:
            return False
        if loaded.adapters != self.options.adapters:
            return False
        if self.options.projector not in ("", loaded.projector):
            return False  # one that sees serves those who ask for a model that only reads
        compared = self.explicit - {"n_ctx"}
        if self.options.n_batch == self.options.n_ctx < loaded.n_batch:
            compared -= {"n_batch"}  # a batch is never larger than the context: a smaller context alone explains the difference
        if self.options.use_mmap and loaded.use_mmap is None:
            compared -= {"use_mmap"}  # to read again what was small enough to be read would change nothing
        return all(getattr(loaded, name) == getattr(self.options, name) for name in compared)

    def n_ctx_in(self, n_ctx: int) -> int:
        """What a request may have of a loaded context: as much as it asked for, or all when it did not ask."""
        return min(self.options.n_ctx, n_ctx) if "n_ctx" in self.explicit else n_ctx

    def is_placed_by(self, loaded: LoadRequirements, n_gpus: int) -> bool:
        """Whether a runner that was loaded by those requirements lies where this one wants it, on a machine with so many GPUs."""
        if n_gpus > 0 and self.num_gpu is not None and self.num_gpu != loaded.num_gpu:
            return False
        return n_gpus < 2 or self.main_gpu is None or self.main_gpu == loaded.main_gpu


def load_requirements(
    options: Options,
    settings: Settings,
    *,
    n_ctx_train: int | None = None,
    max_parallel: int | None = None,
    adapters: Sequence[Path] = (),
    projector: Path | None = None,
    has_vision: bool = False,
) -> LoadRequirements:
    """Resolve the options that fix a runner's memory.

    *n_ctx_train* is the context length in the model's file, if it names one: a longer context is cut to it.
    *max_parallel* is for models that cannot compute several sequences at once.
    """
    least = MIN_N_CTX_WITH_IMAGES if has_vision else MIN_N_CTX
    n_ctx = min(max(options.num_ctx or settings.context_length or DEFAULT_N_CTX, least), MAX_N_CTX)
    if n_ctx_train and n_ctx > n_ctx_train:
        if options.num_ctx or settings.context_length:
            log.warning("a context of %d tokens is more than the model was trained for, using %d", n_ctx, n_ctx_train)
        n_ctx = n_ctx_train
    is_explicit = {
        "n_ctx": _is_positive(options.num_ctx),
        "n_batch": _is_positive(options.num_batch),
        "n_threads": _is_positive(options.num_thread),
        "use_mmap": options.use_mmap is not None,
    }
    n_parallel = settings.num_parallel or DEFAULT_N_PARALLEL
    load = LoadOptions(
        n_ctx=n_ctx,
        n_parallel=min(n_parallel, max_parallel or n_parallel),
        n_batch=min(max(options.num_batch or 0, 0) or DEFAULT_N_BATCH, n_ctx, MAX_N_BATCH),
        n_threads=min(max(options.num_thread or 0, 0), host.usable_cores()),  # with more, threads wait for one another
        kv_cache_type=kv_cache_type(settings),
        flash_attention=settings.flash_attention,
        host_cache_bytes=_default_host_cache() if settings.host_cache is None else settings.host_cache,
        token_gap_s=0.0 if settings.token_gap == FOREVER else settings.token_gap,
        build_ahead=settings.build_ahead,
        use_mmap=options.use_mmap,
        adapters=[str(path) for path in adapters],
        projector=str(projector or ""),
        image_cache_bytes=settings.image_cache if has_vision else 0,
        models=str(settings.models),
    )
    num_gpu = options.num_gpu if options.num_gpu is not None and options.num_gpu >= 0 else None
    explicit = frozenset(name for name, was_given in is_explicit.items() if was_given)
    is_automatic = not (options.num_ctx or settings.context_length)
    return LoadRequirements(load, explicit, num_gpu, options.main_gpu, n_ctx_train or MAX_N_CTX if is_automatic else None)


@cache
def _default_host_cache() -> int:
    return host.memory().total // HOST_CACHE_SHARE


def _is_positive(value: int | None) -> bool:
    return value is not None and value > 0


def kv_cache_type(settings: Settings) -> Literal["f16", "q8_0", "q4_0"]:
    if settings.kv_cache_type != "f16" and not settings.flash_attention:
        log.warning("OLLAMA_KV_CACHE_TYPE=%s needs OLLAMA_FLASH_ATTENTION, using f16", settings.kv_cache_type)
        return "f16"
    if settings.kv_cache_type in _KV_CACHE_TYPES:
        return cast(Literal["f16", "q8_0", "q4_0"], settings.kv_cache_type)
    log.warning("OLLAMA_KV_CACHE_TYPE=%r is not one of %s, using f16", settings.kv_cache_type, ", ".join(_KV_CACHE_TYPES))
    return "f16"
