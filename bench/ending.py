"""How a benchmark ends that is asked to."""

from __future__ import annotations

import signal


def interrupt_on_sigterm() -> None:
    """SIGTERM becomes an interrupt, as from the terminal, so that what was started is ended on the way out.

    By default it would end this process at once, and leave its servers behind. An exception raised here might be swallowed by
    whatever callback of an event loop it met; an interrupt cancels the loop's task instead.
    """
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
