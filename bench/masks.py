"""What the mask of a prompt's step takes on the engine's thread: written in place, against every row compared with every cell.

Both fill the same memory, in turn; minima, since the machine is shared. The copy alone is the least that any way can take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from puna.kvcache.masks import F16, Positions, show
from puna.kvcache.span import Span

N_ROWS = 512
DEPTHS = (8192, 32768, 131072)


def compared(mask: F16, positions: Positions, held: Positions, span: Span) -> None:
    """The plain way: a mask of its own, then copied."""
    new = np.full(mask.shape, -np.inf, np.float16)
    seen = held <= positions[:, None]
    if span.is_bounded:
        seen &= held >= span.first(positions[:, None])
    np.copyto(new, 0, where=seen)
    mask[:] = new


def copied(mask: F16, source: F16) -> None:
    mask[:] = source


def race(ways: list[Callable[[], None]], turns: int) -> list[float]:
    """Seconds of each, at best."""
    best = [float("inf")] * len(ways)
    for _ in range(turns):
        for i, way in enumerate(ways):
            begin = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def measured(n_cells: int, span: Span, turns: int) -> list[float]:
    held: npt.NDArray[np.int32] = np.arange(n_cells, dtype=np.int32)
    positions = held[-N_ROWS:]
    mask, other = np.zeros((2, N_ROWS, n_cells), np.float16)
    show(mask, positions, held, span)
    compared(other, positions, held, span)
    assert (mask.view(np.uint16) == other.view(np.uint16)).all()
    return race(
        [
            lambda: compared(mask, positions, held, span),
            lambda: show(mask, positions, held, span),
            lambda: copied(mask, other),
        ],
        turns,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7, help="turns of each way, of which the best counts (default: %(default)s)")
    args = parser.parse_args()
    table = Table("cells", "window", "compared, ms", "in place, ms", "ratio", "a copy, ms", title=f"The mask of {N_ROWS} rows")
    for n_cells in DEPTHS:
        for window in (0, 1024):
            plain, new, copy = measured(n_cells, Span(window), args.turns)
            figures = [f"{1000 * s:.2f}" for s in (plain, new, copy)]
            table.add_row(f"{n_cells:,}", str(window or "-"), *figures[:2], f"{plain / new:.1f}", figures[2])
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
