"""Keep what is typed ahead of the prompt off the screen, and unchanged until the prompt reads it.

Between two prompts a terminal would echo keys into the answer and turn Enter into a newline, which the line editor takes
for Ctrl-J. Ctrl-C keeps working throughout.
"""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

_IFLAG, _LFLAG, _CC = 0, 3, 6


@contextmanager
def quiet_input() -> Iterator[None]:
    """No echo, no line discipline on standard input, which must be a terminal."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[_IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    quiet[_LFLAG] &= ~(termios.ECHO | termios.ICANON)
    quiet[_CC][termios.VMIN], quiet[_CC][termios.VTIME] = 1, 0
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
