"""How long a test waits for what must come. Only a failure takes so long: a test that passes does not depend on speed."""

from __future__ import annotations

import time
from collections.abc import Callable

# Of a machine with one core that others use as well.
PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
