"""Which layers of a model go to which GPU. Pure arithmetic on sizes that a runner has measured.

The layers on GPUs are the last ones of the model, each GPU holds neighbouring layers, and what is left at the front
stays on the CPU. The output counts as the layer after the last block; it stays behind first, since it is large and used
for few rows of a batch. Behaviour that is not obvious follows Ollama's engine of May 2026.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

from puna.wire import DeviceLayers, MemoryReport

_MIB = 1 << 20
# Working memory of the driver that no report contains. A worker on another machine keeps it back by itself.
_DRIVER_BYTES = {"Metal": 512 * _MIB, "MTL": 512 * _MIB, "RPC": 0}
_DEFAULT_DRIVER_BYTES = 457 * _MIB

# All subsets of so many GPUs are looked at; of more, only the largest ones together.
_EXACT_UP_TO = 8
_TIERS = ("discrete", "integrated", "remote")  # in the order in which they are filled
_BALANCE_STEPS = 20  # halvings of the share of each GPU's memory: to one part in a million


@dataclass(frozen=True)
class GPU:
    name: str
    library: str  # a model uses the GPUs of one library, and those of other machines
    free: int  # bytes
    is_integrated: bool = False  # its memory is the host's
    is_remote: bool = False  # on another machine

    @property
    def tier(self) -> str:
        return "remote" if self.is_remote else "integrated" if self.is_integrated else "discrete"

    @property
    def driver_bytes(self) -> int:
        return _DRIVER_BYTES.get(self.library, _DEFAULT_DRIVER_BYTES)


@dataclass(frozen=True)
class Policy:
    """What the request and the settings ask for."""

    num_gpu: int | None = None  # layers on GPUs; None: as many as fit
    main_gpu: int | None = None  # index of the GPU that comes first
    spread: bool = False  # over all GPUs, even if fewer would do
    overhead: int = 0  # bytes to leave free on each GPU
    must_be_full: bool = False  # nothing less than what was asked for: other models may still make room on GPUs
    without_swap: bool = False  # other models may still make room on the host


@dataclass(frozen=True)
class Demand:
    """Bytes that a model takes."""

    layers: tuple[int, ...]  # weights and cache of each block; the last entry is the output
    graph: Mapping[str, int] = field(default_factory=dict)  # working memory by GPU, where it is known
    projector: int = 0  # of what turns images into embeddings; it goes to one device

    @property
    def n_blocks(self) -> int:
        return len(self.layers) - 1

    def graph_on(self, gpu: str) -> int:
        """Where it was not measured, the largest that was."""
        return self.graph.get(gpu, max(self.graph.values(), default=0))

    def after(self, report: MemoryReport) -> Demand:
        """With the sizes of a newer measurement; graphs of GPUs that were not part of it stay as they were known."""
        sizes = [[w + c for w, c in zip(d.weights, d.cache, strict=True)] for d in report.devices]
        layers = tuple(map(sum, zip(*sizes, strict=True)))
        graph = {d.device: d.graph for d in report.devices if d.is_gpu and any(d.weights)}
        return Demand(layers, {**self.graph, **graph}, sum(d.projector for d in report.devices))


@dataclass(frozen=True)
class Layout:
    parts: tuple[DeviceLayers, ...] = ()  # in the order of the layers; what is missing is the CPU's
    projector: str = ""  # the GPU that holds it; empty: the CPU

    @property
    def n_layers(self) -> int:
        return sum(part.end - part.begin for part in self.parts)

    def bytes_on(self, gpu: str, demand: Demand) -> int:
        """Without the graph."""
        layers = sum(sum(demand.layers[part.begin : part.end]) for part in self.parts if part.device == gpu)
        return layers + (demand.projector if self.projector == gpu else 0)


def capacity(gpu: GPU, demand: Demand, policy: Policy, backoff: float = 0.0) -> int:
    """Bytes of layers that a GPU may hold. *backoff*, a share of them, is left for what nobody knows."""
    room = gpu.free - gpu.driver_bytes - policy.overhead - demand.graph_on(gpu.name)
    return max(0, int(room * (1 - backoff)))


def n_requested(demand: Demand, policy: Policy) -> int:
    n_all = len(demand.layers)
    return n_all if policy.num_gpu is None else min(policy.num_gpu, n_all)


def fits(layout: Layout, gpus: Sequence[GPU], demand: Demand, policy: Policy, backoff: float = 0.0) -> bool:
    """Whether no GPU holds more than it may."""
    return all(
        layout.bytes_on(gpu.name, demand) <= capacity(gpu, demand, policy, backoff)
        for gpu in gpus
        if layout.projector == gpu.name or any(part.device == gpu.name for part in layout.parts)
    )


def place(gpus: Sequence[GPU], demand: Demand, policy: Policy, backoff: float = 0.0) -> Layout:
    """As many layers as fit, or as were asked for, on the GPUs of the library that takes most, and on other machines' devices.

    A number of layers that was asked for is placed even where it does not fit, unless the model must be there in full.
    """
    if n_requested(demand, policy) == 0:
        return Layout()
    main = gpus[policy.main_gpu] if policy.main_gpu is not None and 0 <= policy.main_gpu < len(gpus) else None
    local = [main] if main and not main.is_remote else [gpu for gpu in gpus if not gpu.is_remote]
    best = Layout()
    for library in dict.fromkeys(gpu.library for gpu in local or gpus):
        usable = [gpu for gpu in gpus if gpu.is_remote or gpu.library == library]
        found = _place_on(usable, main, demand, policy, backoff)
        if found.n_layers > best.n_layers:
            best = found
    return best


def _place_on(gpus: Sequence[GPU], main: GPU | None, demand: Demand, policy: Policy, backoff: float) -> Layout:
    """Within one library."""
    is_forced = policy.num_gpu is not None
    # What was asked for is asked of all GPUs alike; else an integrated one only takes what discrete ones cannot, and
    # another machine what none here can.
    alike = is_forced or policy.spread
    first = sorted(gpus, key=lambda g: (g is not main, _TIERS.index(g.tier) if not alike else 0, -g.free, g.name))
    room = {gpu.name: capacity(gpu, demand, policy, backoff) for gpu in first}
    holder = next((gpu.name for gpu in first if demand.projector and room[gpu.name] >= demand.projector), "")
    if holder:
        room[holder] -= demand.projector
    tiers = [first] if alike else [[g for g in first if g.tier == tier] for tier in _TIERS]
    n = n_requested(demand, policy)
    stacks = [_Stack(demand.layers[:-1], n)]
    if n > demand.n_blocks:
        stacks.append(_Stack(demand.layers, n))
    found = [_fill(tiers, room, stack, spread=policy.spread) for stack in stacks]
    # Among equally many layers, those that take the most bytes off the CPU; where even those are equal, no output.
    taken = max(found, key=lambda parts: (_count(parts), sum(sum(demand.layers[p.begin : p.end]) for p in parts)))
    if is_forced and not policy.must_be_full and _count(taken) < n:
        taken = _fill(tiers, room, stacks[-1], spread=policy.spread, beyond=True)
    return Layout(tuple(sorted(taken, key=lambda part: part.begin)), holder if taken else "")


def _count(parts: Iterable[DeviceLayers]) -> int:
    return sum(part.end - part.begin for part in parts)


class _Stack:
    """Layers taken from the end, at most *n* of them."""

    def __init__(self, layers: Sequence[int], n: int) -> None:
        self.n_layers = len(layers)
        self.n = min(n, self.n_layers)
        self._sums = [0, *accumulate(reversed(layers))]  # bytes of the last 0, 1, 2, … layers

    def reach(self, taken: int, room: float) -> int:
        """How many are taken after a GPU with this room has taken its share from where the others stopped."""
        return max(taken, min(self.n, bisect_right(self._sums, self._sums[taken] + room) - 1))


def _fill(
    tiers: Sequence[Sequence[GPU]], room: Mapping[str, int], stack: _Stack, *, spread: bool, beyond: bool = False
) -> list[DeviceLayers]:
    parts: list[DeviceLayers] = []
    taken = 0
    for tier in tiers:
        names = [gpu.name for gpu in tier]
        if names and taken < stack.n:
            order = _choose(names, room, stack, taken, spread=spread or beyond)
            shares = _balance(order, room, stack, taken, beyond=beyond)
            for name, end in shares:
                if end > taken:
                    parts.append(DeviceLayers(device=name, begin=stack.n_layers - end, end=stack.n_layers - taken))
                    taken = end
    return parts


def _choose(names: Sequence[str], room: Mapping[str, int], stack: _Stack, taken: int, *, spread: bool) -> tuple[str, ...]:
    """The GPUs to use: those that hold the most layers, and of such sets the smallest; ties go to the first of *names*."""
    if spread:
        return tuple(names)
    n_best = _best_order(names, room, stack, taken)[0]
    for size in range(1, len(names)):
        groups: Iterable[tuple[str, ...]] = combinations(names, size)
        if len(names) > _EXACT_UP_TO:
            groups = [tuple(sorted(sorted(names, key=lambda name: -room[name])[:size], key=names.index))]
        for group in groups:
            if _best_order(group, room, stack, taken)[0] == n_best:
                return group
    return tuple(names)


def _best_order(
    names: Sequence[str], room: Mapping[str, float], stack: _Stack, taken: int
) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Layers taken when each of these GPUs is filled in turn, in the best order, and what each reaches.

    Layers differ in size, so the order matters. The best order of a set ends with one GPU that continues the best order
    of the others: whoever starts further along never ends earlier.
    """
    if len(names) > _EXACT_UP_TO:
        orders = (sorted(names, key=lambda name: -room[name]), sorted(names, key=lambda name: room[name]))
        return max((_in_turn(order, room, stack, taken) for order in orders), key=lambda found: found[0])
    best: list[tuple[int, tuple[tuple[str, int], ...]]] = [(taken, ())]
    for group in range(1, 1 << len(names)):
        found: tuple[int, tuple[tuple[str, int], ...]] = (-1, ())
        for i in range(len(names) - 1, -1, -1):  # the first of the names keeps the end of the model where orders are equal
            if group & (1 << i):
                before, steps = best[group & ~(1 << i)]
                end = stack.reach(before, room[names[i]])
                if end > found[0]:
                    found = (end, (*steps, (names[i], end)))
        best.append(found)
    return best[-1]


def _in_turn(
    order: Sequence[str], room: Mapping[str, float], stack: _Stack, taken: int
) -> tuple[int, tuple[tuple[str, int], ...]]:
    steps = []
    for name in order:
        taken = stack.reach(taken, room[name])
        steps.append((name, taken))
    return taken, tuple(steps)


def _balance(
    names: Sequence[str], room: Mapping[str, int], stack: _Stack, taken: int, *, beyond: bool
) -> tuple[tuple[str, int], ...]:
    """Fill all of them to the smallest equal share at which they hold as many layers as at full capacity.

    *beyond* capacity: the share grows until they hold all.
    """

    def at(share: float) -> tuple[int, tuple[tuple[str, int], ...]]:
        return _best_order(names, {name: (room[name] + beyond) * share for name in names}, stack, taken)

    high = 1.0
    if beyond:
        while at(high)[0] < stack.n:
            high *= 2
    n_best, best = at(high)
    if len(names) == 1:
        return best
    low = 0.0
    for _ in range(_BALANCE_STEPS):
        middle = (low + high) / 2
        count, steps = at(middle)
        if count == n_best:
            high, best = middle, steps
        else:
            low = middle
    return best
