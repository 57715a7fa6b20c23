"""Which cells the rows of a batch see, written as attention reads it: 0 where one is seen, -inf elsewhere.

Of a long history nearly every cell is seen by all rows of a sequence or by none. Those are found once and copied to each row;
only the cells that some rows see and others do not, the batch's own and those that leave a window meanwhile, are compared.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from puna.kvcache.span import Span

F16 = npt.NDArray[np.float16]
Positions = npt.NDArray[np.int32]

HIDDEN = np.float16(-np.inf)

# Cells that are compared lie in a few stretches; where they are scattered over more, they are taken one by one.
_MAX_STRETCHES = 8


def show(mask: F16, positions: Positions, held: Positions, span: Span) -> None:
    """Write all of a mask [n_rows, n_cells], for rows at these positions and cells that hold these.

    A cell whose position is after all others, puna.kvcache.cells.END, is seen by none of them.
    """
    low, high = positions.min(), positions.max()
    is_seen = held <= low
    is_partly_seen = held <= high
    if span.is_bounded:
        is_partly_seen &= held >= span.first(int(low))
        is_seen &= held >= span.first(int(high))
    is_partly_seen &= ~is_seen
    mask[:] = np.where(is_seen, np.float16(0), HIDDEN)
    cells = np.flatnonzero(is_partly_seen)
    if not len(cells):
        return
    cuts = np.flatnonzero(np.diff(cells) != 1) + 1
    if len(cuts) >= _MAX_STRETCHES:
        mask[:, cells] = _compared(positions, held[cells], span)
        return
    for begin, end in pairwise([0, *cuts.tolist(), len(cells)]):
        stretch = slice(cells[begin], cells[end - 1] + 1)
        mask[:, stretch] = _compared(positions, held[stretch], span)


def _compared(positions: Positions, held: Positions, span: Span) -> F16:
    """Each row with each cell."""
    wanted = positions[:, None]
    seen = held <= wanted
    if span.is_bounded:
        seen &= held >= span.first(wanted)
    return np.where(seen, np.float16(0), HIDDEN)
