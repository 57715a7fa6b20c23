"""How a benchmark ends that is asked to."""

from __future__ import annotations

import signal


def interrupt_on_sigterm() -> None:
    """SIGTERM becomes KeyboardInterrupt, as an interrupt from the terminal is, so that what was started is ended on the way out.

    By default it would end this process at once, and leave its servers behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
