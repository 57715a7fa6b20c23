"""End this process when the one that started it is gone, however it ended.

The parent keeps the other end of our standard input. The kernel closes it when the parent dies, also by SIGKILL, and we
read the end of file. Where standard input is a terminal, a file or /dev/null nobody is watched.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def exit_with_parent(
    fd: int = 0, on_end: Callable[[], None] | None = None, on_data: Callable[[bytes], None] = lambda _data: None
) -> bool:
    """Watch *fd* in a thread if it is a pipe (or a socket, which some parents use as one); whether it is watched.

    on_end is what to do at the end of file; by default the process ends at once, since an engine may be deep in a
    computation, and the kernel frees all it holds. on_data gets what comes before that, in pieces of any size.
    """
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # closed: nobody holds the other end
        return False
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    threading.Thread(target=_wait_for_end, args=(fd, on_end, on_data), name="parent-guard", daemon=True).start()
    return True


def _pass_on(data: bytes, on_data: Callable[[bytes], None]) -> None:
    try:
        on_data(data)
    except Exception:  # the end must be seen all the same
        log.exception("what the parent has written cannot be dealt with")


def _wait_for_end(fd: int, on_end: Callable[[], None] | None, on_data: Callable[[bytes], None]) -> None:
    try:
        while data := os.read(fd, 65536):
            _pass_on(data, on_data)
    except OSError:
        pass  # a reset connection is an end as well
    if on_end is None:
        os._exit(0)
    on_end()
