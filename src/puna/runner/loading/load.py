"""From load options to a model that runs: backend, weights, cache, working memory; and what each of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from puna.engines import Choice
from puna.errors import BadRequest, FileFormatError
from puna.host import usable_cores
from puna.kvcache.cache import RememberingCache, SavingCache, StepEndCache
from puna.model.pooling import Pooling
from puna.native import cpu
from puna.native.waits import waits
from puna.runner.images.sight import Sight
from puna.runner.loading.accounting import with_host
from puna.runner.loading.engines import SEQUENCES_PER_REQUEST, Files, Opened, open_file
from puna.runner.loading.eyes import with_eyes
from puna.runner.loading.model_file import ModelFile
from puna.runner.prefixes.host_cache import HostCache, spare_bytes
from puna.runner.scheduling.workload import Workload
from puna.runner.step.threads import Threads
from puna.runner.tasks.generation import Generation
from puna.runner.tasks.pooling import Embedding, Ranking
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import LoadOptions, MemoryReport


@dataclass
class Loaded(Opened):
    """A model in memory and all it needs to run."""

    tokenizer: Tokenizer
    threads: Threads | None = None  # None: always as many as were asked for
    image_cache_bytes: int = 0

    @cached_property
    def sight(self) -> Sight | None:
        """None where there are no eyes."""
        if self.eyes is None:
            return None
        return Sight(
            self.eyes.vision, self.eyes.decoders.pixels, self.image_cache_bytes, self.limits.n_batch, self.tokenizer.n_tokens
        )

    @property
    def n_parallel(self) -> int:
        """Requests computed at once."""
        return self.limits.max_sequences // (1 if self.is_encoder else SEQUENCES_PER_REQUEST)

    @cached_property
    def prompt_tail(self) -> int:
        """As puna.kvcache.cache.StepEndCache has it; 0 where steps may end anywhere."""
        return self.cache.prompt_tail if isinstance(self.cache, StepEndCache) else 0

    def host_cache(self, max_bytes: int) -> HostCache | None:
        """For prefixes that lose their place; None where they cannot be saved, or are never asked for again.

        Half of it is for what windows forget of prompts that have not lost theirs.
        """
        if not max_bytes or self.pooling is not Pooling.NONE or not isinstance(self.cache, SavingCache):
            return None
        if isinstance(self.cache, RememberingCache) and self.cache.forgets:
            self.cache.remember(max_bytes // 2, spare_bytes)
            max_bytes -= max_bytes // 2
        return HostCache(self.cache, max_bytes)

    @property
    def remembered_bytes(self) -> int:
        """Of the host's memory, taken by what windows have forgotten."""
        return self.cache.remembered_bytes if isinstance(self.cache, RememberingCache) else 0

    def workload(self) -> Workload[Any, Any]:
        """What the model is asked for."""
        tokenizer, n_ctx = self.tokenizer, self.limits.n_ctx
        if self.pooling is Pooling.RANK:
            return Ranking(tokenizer, n_ctx, self.backend.file, takes_whole_texts=self.is_encoder)
        if self.pooling is Pooling.NONE and not self.is_encoder:
            return Generation(tokenizer, n_ctx, self.sight, self.blindness)
        return Embedding(
            tokenizer,
            n_ctx,
            self.pooling,
            takes_whole_texts=self.is_encoder,
            sight=self.sight,
            blindness=self.blindness,
        )

    def memory(self) -> MemoryReport:
        report = self.backend.memory()
        return with_host(report if self.eyes is None else with_eyes(report, self.eyes.memory()), self)

    @contextmanager
    def paced(self, n_tokens: int) -> Iterator[None]:
        """Around a step: with as many threads as go well beside other processes, which wait for each other as is best there."""
        if self.threads is None:
            yield
            return
        if self.threads.has_changed():
            waits.shorten(self.threads.is_patient)
            self.backend.set_threads(self.threads.count)
            if self.eyes is not None:
                self.eyes.backend.set_threads(self.threads.count)
        began = time.monotonic()
        yield
        self.threads.note(n_tokens, time.monotonic() - began)


def n_threads(options: LoadOptions) -> int:
    """As asked for, though no more than there are cores, else one per physical core that this process may use."""
    if options.n_threads > 0:
        return min(options.n_threads, usable_cores())
    return cpu.threads(cpu.physical_cores(), usable_cores(), cpu.cgroup_limits().cpus)


def check(options: LoadOptions) -> None:
    """Errors: BadRequest naming the option."""
    for name, low, high in (
        ("n_ctx", 4, 1 << 24),
        ("n_parallel", 1, 256),
        ("n_pool", 0, 1 << 30),
        ("n_batch", 1, 1 << 16),
        ("n_threads", 0, 4096),
        ("host_cache_bytes", 0, 1 << 62),
        ("token_gap_s", 0, 1 << 30),
        ("image_cache_bytes", 0, 1 << 62),
    ):
        value = getattr(options, name)
        if not low <= value <= high:
            raise BadRequest(f"{name} must be from {low} to {high}, not {value}")
    if options.kv_cache_type != "f16" and not options.flash_attention:
        raise BadRequest(f"kv_cache_type {options.kv_cache_type} needs flash_attention")


def _opened(file: ModelFile, options: LoadOptions, new_engine: bool | None) -> Opened:
    head = file.head()
    beside = Files(file.projector(options.projector), file.tokenizer)
    return open_file(head, options, n_threads(options), new_engine, beside)


def measure(file: ModelFile, options: LoadOptions, new_engine: bool | None = None) -> tuple[MemoryReport, Choice]:
    """What a load would take, and the engine; nothing is allocated.

    Errors: as allocate.
    """
    check(options)
    opened = _opened(file, options, new_engine)
    try:
        return with_host(opened.measure(), opened), opened.choice
    finally:
        opened.close()


def allocate(file: ModelFile, options: LoadOptions, new_engine: bool | None = None) -> Loaded:
    """All memory, and the vocabulary; the weights are still to be read. The file must stay open as long as what is returned.

    Errors: OutOfMemory, UnsupportedModel, FileFormatError, MissingTensors, BadRequest, LoadError.
    """
    check(options)
    opened = _opened(file, options, new_engine)
    try:
        opened.allocate()
        tokenizer = file.tokenizer()
        if tokenizer.n_tokens > opened.n_vocab:
            # A token without an embedding would end the process inside the library.
            raise FileFormatError(
                f"{file.path}: {tokenizer.n_tokens} tokens in the vocabulary, {opened.n_vocab} in token_embd.weight"
            )
        threads = Threads(n_threads(options), usable_cores()) if options.n_threads == 0 else None
        return Loaded(**vars(opened), tokenizer=tokenizer, threads=threads, image_cache_bytes=options.image_cache_bytes)
    except BaseException:
        opened.close()
        raise


def read_weights(loaded: Loaded, progress: Callable[[float], None]) -> None:
    loaded.backend.load(progress)
    if loaded.eyes is not None:
        loaded.eyes.load(lambda _share: progress(1.0))
