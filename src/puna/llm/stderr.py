"""What a runner wrote before it died: keeps the end of its output and picks the line that names the cause."""

from __future__ import annotations

import re
from collections import deque

_TAIL_BYTES = 8 * 1024
_MAX_REASON = 500

# From the most to the least telling; harmless lines with "error" in them must not hide an assertion.
_CAUSES = (
    re.compile(r"GGML_ASSERT|GGML_ABORT|CUDA error|ROCm error|failed to allocate|out of memory", re.IGNORECASE),
    re.compile(r"^\s*[\w.]+(Error|Exception|Exit|Interrupt)\b"),  # the last line of a traceback
    re.compile(r"\b(fatal|panic|error|critical|failed)\b", re.IGNORECASE),
)


class Tail:
    """The last lines of a stream, up to 8 KiB."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._n_bytes = 0

    def add(self, line: str) -> None:
        line = line[-_TAIL_BYTES:]
        self._lines.append(line)
        self._n_bytes += len(line)
        while self._n_bytes > _TAIL_BYTES:
            self._n_bytes -= len(self._lines.popleft())

    @property
    def reason(self) -> str:
        """The line that most likely says why the process ended; empty if it said nothing."""
        lines = [line.strip() for line in self._lines if line.strip()]
        for cause in _CAUSES:
            for line in reversed(lines):
                if cause.search(line):
                    return line[:_MAX_REASON]
        return lines[-1][:_MAX_REASON] if lines else ""
