"""From free memory and a runner's measurements to a layout that is allocated: fit, place, fit again, commit.

``negotiate`` knows no process: it says what to try and is told what came of it. A layout changes what it is made from
(a GPU that gets layers needs working memory, too), so measuring and placing alternate until they agree.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from puna.errors import OutOfMemory
from puna.llm.layout import GPU, Demand, Layout, Policy, capacity, fits, n_requested, place
from puna.wire import LoadReply, MemoryReport

log = logging.getLogger(__name__)

_BACKOFF_STEP = 0.1  # of the room for layers
_GIB = 1 << 30


class NoRoomOnGPUs(OutOfMemory):
    """What is lacking is memory of GPUs; without this, the host's."""


@dataclass(frozen=True)
class Free:
    """What a load may take."""

    gpus: tuple[GPU, ...] = ()
    host: int | None = None  # bytes; None: unknown
    swap: int = 0  # bytes that the host has beyond, slow ones


@dataclass(frozen=True)
class Attempt:
    operation: Literal["fit", "commit"]
    layout: Layout


def negotiate(free: Free, policy: Policy) -> Generator[Attempt, LoadReply, LoadReply]:
    """Yields what to try; ends with the reply to the commit that succeeded.

    Errors: OutOfMemory with what is needed and what is free.
    """
    reply = yield Attempt("fit", Layout())
    if reply.memory is None:  # an engine that cannot tell: it finds out by trying
        reply = yield Attempt("commit", Layout())
        if not reply.success:
            raise OutOfMemory(reply.error or "there was not enough memory")
        return reply
    demand = Demand(()).after(reply.memory)
    measured = {Layout(): reply.memory}
    backoff = 0.0
    while True:
        layout, demand = yield from _stable(free.gpus, policy, demand, measured, backoff)
        _check_full(layout, free.gpus, policy, demand, backoff)
        _check_host(measured[layout], free, policy)
        reply = yield Attempt("commit", layout)
        if reply.success:
            return reply
        log.info("the layout could not be allocated: %s", reply.error)
        if not layout.parts:
            raise OutOfMemory(reply.error or "there was not enough memory")
        if policy.num_gpu is not None:
            raise NoRoomOnGPUs(
                f"memory layout cannot be allocated with num_gpu = {policy.num_gpu}: {reply.error}"
                f"{_listed(layout, free.gpus, demand)}; a smaller num_gpu or num_ctx needs less"
            )
        backoff += _BACKOFF_STEP
        while backoff <= 1 and place(free.gpus, demand, policy, backoff) == layout:
            backoff += _BACKOFF_STEP
        if backoff > 1:
            raise NoRoomOnGPUs(
                f"memory layout cannot be allocated: {reply.error}{_listed(layout, free.gpus, demand)}"
                "; a smaller num_ctx needs less"
            )


def _stable(
    gpus: Sequence[GPU], policy: Policy, demand: Demand, measured: dict[Layout, MemoryReport], backoff: float
) -> Generator[Attempt, LoadReply, tuple[Layout, Demand]]:
    """The layout that is made again from its own measurement, or the best that holds if they go round in circles."""
    sound: list[Layout] = []
    current = place(gpus, demand, policy, backoff)
    seen: set[Layout] = set()
    while current not in seen:
        seen.add(current)
        demand = yield from _measure(current, demand, measured)
        following = place(gpus, demand, policy, backoff)
        if fits(current, gpus, demand, policy, backoff):
            sound.append(current)
            if following.n_layers <= current.n_layers:
                return current, demand
        if following == current:
            return current, demand  # more than fits was asked for
        current = following
    if policy.num_gpu is not None and not policy.must_be_full:
        return current, (yield from _measure(current, demand, measured))
    # Layouts that each ask for another: between the best that holds and the largest that did not lies one to find.
    best = max(sound, key=lambda layout: layout.n_layers, default=Layout())
    for count in range(max(layout.n_layers for layout in seen) - 1, best.n_layers, -1):
        between = place(gpus, demand, replace(policy, num_gpu=count, must_be_full=True), backoff)
        if between.n_layers < count:
            continue
        known = yield from _measure(between, demand, measured)
        if fits(between, gpus, known, policy, backoff):
            return between, known
    return best, (yield from _measure(best, demand, measured))


def _measure(layout: Layout, demand: Demand, measured: dict[Layout, MemoryReport]) -> Generator[Attempt, LoadReply, Demand]:
    if layout not in measured:
        reply = yield Attempt("fit", layout)
        if reply.memory is None:
            raise OutOfMemory(reply.error or "the runner could not measure this layout")
        measured[layout] = reply.memory
    return demand.after(measured[layout])


def _check_full(layout: Layout, gpus: Sequence[GPU], policy: Policy, demand: Demand, backoff: float) -> None:
    n_layers = n_requested(demand, policy)
    if gpus and policy.must_be_full and layout.n_layers < n_layers:
        needed = sum(sorted(demand.layers, reverse=True)[:n_layers]) if n_layers < len(demand.layers) else sum(demand.layers)
        free = ", ".join(f"{gpu.name} {_size(capacity(gpu, demand, policy, backoff))}" for gpu in gpus)
        raise NoRoomOnGPUs(
            f"unable to load full model on GPU: {layout.n_layers} of {n_layers} layers fit; they need {_size(needed)}, "
            f"and there is room for {free}"
        )


def _check_host(memory: MemoryReport, free: Free, policy: Policy) -> None:
    """The host holds what is not on a GPU, and what is on an integrated one."""
    shares = {gpu.name for gpu in free.gpus if gpu.is_integrated}
    needed = memory.total - sum(d.total for d in memory.devices if d.is_gpu and d.device not in shares)
    if free.host is None or needed <= free.host:
        return
    available = free.host if policy.without_swap else free.host + free.swap
    if needed > available:
        cache = sum(sum(d.cache) for d in memory.devices)
        raise OutOfMemory(
            f"model requires more system memory ({_size(needed)}) than is available ({_size(available)}); "
            f"{_size(cache)} of it hold the context, so a smaller num_ctx or OLLAMA_NUM_PARALLEL needs less"
        )
    log.warning("the model needs %s, %s are free: it will be slow where it is swapped out", _size(needed), _size(free.host))


def _listed(layout: Layout, gpus: Sequence[GPU], demand: Demand) -> str:
    used = [gpu for gpu in gpus if layout.bytes_on(gpu.name, demand)]
    return "".join(
        f"; {_size(layout.bytes_on(gpu.name, demand) + demand.graph_on(gpu.name))} on {gpu.name}, {_size(gpu.free)} free"
        for gpu in used
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.1f} GiB" if n_bytes >= _GIB else f"{n_bytes / (1 << 20):.1f} MiB"
