"""What a projector file gives beside a model's, tried in a process of its own: libmtmd ends the process over much that may be
wrong with one.

The model is opened without its weights. Then a small picture is encoded, and pictures of many sizes are counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from puna.compat.failures import why, why_no_eyes
from puna.environment import for_computing
from puna.errors import LoadError, NotFound, PunaError, UnsupportedModel
from puna.native.decoder import Model
from puna.native.log import Line, captured
from puna.native.projector import MARKER, Medium, Projector

_LAST_WORDS = re.compile(r"(?<![\w-])([\w-]{1,100}\.(?:cpp|c|h):\d{1,9}: .{1,200})")

COMMAND = (sys.executable, "-m", "puna.compat.trial")
TIMEOUT_S = 300.0

# Width and height of pictures, of which one takes the most rows.
SIZES = ((4096, 4096), (4096, 2048), (2048, 4096), (4096, 1024), (1024, 4096), (1024, 1024), (512, 512), (64, 64))
TRIED = (96, 64)


class Facts(msgspec.Struct, frozen=True):
    sees: bool
    hears: bool
    sample_rate: int  # of sound; -1 where it hears none
    n_out: int
    has_axes: bool
    largest: tuple[int, int] = (0, 0)  # width and height of the picture with the most rows
    n_rows: int = 0  # of that picture
    n_tokens: int = 0  # that it takes in a prompt
    n_together: int = 1  # rows that must be computed in one step
    working_bytes: int = 0


def tried(text: str | Path, projector: str | Path) -> Facts:
    """Remembered until one of the files changes.

    Errors: UnsupportedModel where libmtmd refuses the projector or dies of it, LoadError where that takes too long.
    """
    return _tried(str(text), str(projector), _state(text), _state(projector))


def _state(path: str | Path) -> tuple[int, ...]:
    """Errors: NotFound."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(16)
def _tried(text: str, projector: str, *_states: tuple[int, ...]) -> Facts:
    return run(text, projector)


def run(text: str, projector: str, command: Sequence[str] = COMMAND) -> Facts:
    """In a process of its own, now. Errors: as tried."""
    try:
        done = subprocess.run(
            [*command, text, projector],
            env=for_computing(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"{projector}: libmtmd was still busy with it after {TIMEOUT_S:.0f} s") from error
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0:
        return msgspec.json.decode(said, type=Facts)
    if done.returncode == 1 and said:
        raise UnsupportedModel(f"{projector}: {json.loads(said)}")
    end = "" if done.returncode > 0 else f" (signal {-done.returncode})"
    # As ggml ends a process: where in its sources, and why.
    reason = next((found[1] for line in reversed(done.stderr.splitlines()) if (found := _LAST_WORDS.search(line))), "")
    raise UnsupportedModel(f"{projector}: libmtmd dies of it{end}{': ' if reason else ''}{reason}")


def try_out(text: str, projector: str) -> Facts:
    """Errors: PunaError."""
    with captured() as lines:
        model = Model.load(text, is_dry=True)
    if model is None:
        raise why(text, lines)
    with captured() as lines:
        opened = Projector.load(projector, model.address, n_threads=1)
    if opened is None:
        raise why_no_eyes(projector, lines)
    facts = Facts(opened.sees, opened.hears, opened.sample_rate, opened.n_out, opened.has_axes)
    facts = msgspec.structs.replace(facts, working_bytes=_working_bytes(lines))
    if opened.sees:
        facts = _seen(opened, facts)
    if opened.hears:
        _heard(opened)
    opened.close()
    model.close()
    return facts


def _working_bytes(lines: Sequence[Line]) -> int:
    """Of graphs, as libmtmd says when it plans the first."""
    found = (line.text.rpartition("compute buffer size =")[2].split() for line in lines if "compute buffer size" in line.text)
    return round(sum(float(words[0]) for words in found) * (1 << 20))


def _encode(projector: Projector, medium: Medium, what: str) -> None:
    chunks = projector.tokenize(MARKER, [medium])
    rows = [projector.encode(chunk) for chunk in chunks or () if chunk.kind != "text"]
    if not rows or any(row is None for row in rows):
        raise UnsupportedModel(f"libmtmd cannot encode {what} with it")


def _heard(projector: Projector) -> None:
    """A second of silence."""
    _encode(projector, Medium.audio(np.zeros(max(projector.sample_rate, 2), np.float32)), "a sound")


def _seen(projector: Projector, facts: Facts) -> Facts:
    width, height = TRIED
    _encode(projector, Medium.image(np.full((height, width, 3), 128, np.uint8)), "a picture")
    counted = list(_counted(projector))
    size, n_rows, n_tokens, _ = max(counted, key=lambda found: found[1])
    n_together = max(found[3] for found in counted)
    return msgspec.structs.replace(facts, largest=size, n_rows=n_rows, n_tokens=n_tokens, n_together=n_together)


def _counted(projector: Projector) -> Iterator[tuple[tuple[int, int], int, int, int]]:
    """Of each size: rows, tokens, and rows of the longest run that see each other."""
    for size in SIZES:
        chunks = projector.tokenize(MARKER, [Medium.blank(*size)]) or ()
        media = [chunk for chunk in chunks if chunk.kind != "text"]
        together = [chunk.n_tokens for chunk in media if projector.sees_both_ways(chunk)]
        yield size, sum(chunk.n_tokens for chunk in media), sum(chunk.n_tokens for chunk in chunks), max(together, default=1)


def main(arguments: Sequence[str]) -> int:
    try:
        facts = try_out(*arguments)
    except PunaError as error:
        print(json.dumps(str(error).removeprefix(f"{arguments[1]}: ")))
        return 1
    print(msgspec.json.encode(facts).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
