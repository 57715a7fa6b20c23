"""Eyes for the simulated engine: an image is a few words, and each of its rows a number that says whose it is and which.

An image's file says ``WIDTH HEIGHT NUMBER``, with words behind that make it another file. It is encoded to WIDTH * HEIGHT rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.unit.runner.seeing import DIM, SeeingModel, digest
from tests.unit.runner.simulation import Asked, Simulation

from puna.errors import BadRequest
from puna.kvcache.batch import Batch
from puna.runner.tasks.completion import Completion
from puna.vision.model import Piece, Pixels, Placed, Prepared
from puna.wire import Image

BEGIN, END_OF_IMAGE, BREAK = 120, 121, 122  # tokens that nobody else writes
N_LAYERS = 6


def file(width: int, height: int, number: int, salt: str = "") -> bytes:
    return f"{width} {height} {number} {salt}".encode()


def row_number(number: int, row: int) -> int:
    """What the encoder makes of a row: nothing that a token is."""
    return 1000 + 500 * number + row


@dataclass
class FakeVision:
    """Rows of an image with breaks between them; all of it together and bidirectional, or each of its rows of its own."""

    is_causal: bool = False
    has_axes: bool = False
    is_cross_attended: bool = False
    n_pieces: int = 1
    n_layers: int = N_LAYERS
    n_out: int = 1
    n_prepared: int = 0

    def size(self, width: int, height: int) -> tuple[int, int]:
        if width > 30:
            raise BadRequest(f"{width} is too wide")
        return width * height, len(self._placed(width, height).tokens)

    def largest(self) -> tuple[int, int]:
        return 8, 8

    def _placed(self, width: int, height: int) -> Placed:
        n = width * height
        if self.is_cross_attended:
            return Placed([BEGIN], [0])
        tokens, rows = [BEGIN], [-1]
        for y in range(height):
            tokens += [0] * width + [BREAK if y < height - 1 else END_OF_IMAGE]
            rows += [*range(y * width, (y + 1) * width), -1]
        n_tokens = len(tokens)
        if self.is_causal:
            return Placed(tokens, rows)
        if not self.has_axes:
            return Placed(tokens, rows, together=[(0, n_tokens)], bidirectional=[(1, n_tokens - 1)])
        places = np.arange(n_tokens)
        axes = np.stack([np.zeros(n_tokens), places // (width + 1), places % (width + 1), np.zeros(n_tokens)]).astype(np.int32)
        return Placed(tokens, rows, axes=axes, n_positions=max(width, height) + 1 if n > 4 else 3)

    def prepare(self, pixels: Pixels) -> Prepared:
        self.n_prepared += 1
        height, width, _ = pixels.shape
        number = int(pixels[0, 0, 0])
        values = np.array([row_number(number, row) for row in range(width * height)], np.float32)[:, None]
        pieces = [Piece({"rows": np.ascontiguousarray(part)}) for part in np.array_split(values, self.n_pieces)]
        return Prepared(pieces, self._placed(width, height), width * height)

    def begin(self, *_: Any) -> Any: ...
    def layer(self, *_: Any) -> Any: ...
    def end(self, *_: Any) -> Any: ...
    def max_nodes(self) -> int:
        return 0


class FakeEncoder:
    """Each layer adds one to what it is given, and the end takes that away: all of them must have been there, once."""

    n_layers = N_LAYERS

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, int, int]] = []
        self.on_part: Callable[[], None] = lambda: None

    def run(self, piece: Piece, states: Any, begin: int, end: int) -> Any:
        self.on_part()
        rows = piece.arrays["rows"]
        self.parts.append((rows.tobytes(), begin, end))
        state = rows.copy() if states is None else states[0]
        assert (state == rows + begin).all(), "layers are left out or computed twice"
        state = state + (end - begin)
        return [state - N_LAYERS] if end == N_LAYERS else [state]

    def by_rows(self, piece: Piece) -> None:
        """As whole layers."""

    @property
    def n_layers_computed(self) -> int:
        return sum(end - begin for _, begin, end in self.parts)


class FakeDecoders:
    def __init__(self) -> None:
        self.n_read = 0
        self.may_read = threading.Event()
        self.may_read.set()

    def pixels(self, data: bytes) -> Pixels:
        self.may_read.wait()
        self.n_read += 1
        width, height, number, *_ = data.split()
        if int(number) > 200:
            raise BadRequest("it is broken")
        return np.full((int(height), int(width), 3), int(number), np.uint8)


class FakeHost:
    def abort(self) -> None:
        """Parts are short."""

    clear_abort = set_threads = close = abort


@dataclass
class FakeEyes:
    vision: FakeVision = field(default_factory=FakeVision)
    encoder: FakeEncoder = field(default_factory=FakeEncoder)
    decoders: FakeDecoders = field(default_factory=FakeDecoders)
    backend: FakeHost = field(default_factory=FakeHost)


class FakeHomes:
    """Rows as they come, of whoever has the sequence and as far as it was when they did."""

    most_rows = 1 << 20

    def __init__(self, of: Callable[[int], Completion]) -> None:
        self.parts: list[tuple[int, int]] = []  # sequence, rows
        self.in_steps: list[list[int]] = []  # sequences whose image comes with a step, by step
        self.on_part: Callable[[int], None] = lambda _n: None
        self._of = of
        self._kept: dict[int, tuple[Completion, int, list[Any]]] = {}

    def n_stored(self, sequence: int) -> int:
        request, n_computed, rows = self._kept.get(sequence, (None, 0, []))
        owner = self._of(sequence)
        return len(rows) if request is owner and n_computed == owner.n_computed else 0

    def store(self, sequence: int, rows: Any, begin: int) -> bool:
        assert begin == self.n_stored(sequence)
        owner = self._of(sequence)
        if not begin:
            self._kept[sequence] = owner, owner.n_computed, []
        self._kept[sequence][2].extend(rows)
        self.parts.append((sequence, len(rows)))
        self.on_part(len(rows))
        return True

    def take(self, sequence: int) -> Any:
        assert self.n_stored(sequence)
        return np.array(self._kept.pop(sequence)[2])


class ImageSeeingModel(SeeingModel):
    """Where an image's row stands, what it sees is the row."""

    of: Callable[[int], Completion]

    def __call__(self, batch: Batch) -> Any:
        tokens = batch.tokens.copy()
        if batch.embedded is not None:
            tokens[batch.embedded.rows] = batch.embedded.values[:, 0].astype(np.int32)
        self._check_axes(batch)
        self._check_looked_at(batch)
        return super().__call__(batch._replace(tokens=tokens))

    def _check_axes(self, batch: Batch) -> None:
        expected = np.zeros((4, batch.n_tokens), np.int32)
        for i, (sequence, index) in enumerate(zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True)):
            expected[:, i] = axes_of(self.of(sequence), index)
        if batch.axes is None:
            assert (expected[:3] == batch.positions).all(), "positions of text would not do"
        else:
            assert (batch.axes == expected).all(), "positions along axes"

    homes: FakeHomes

    def _check_looked_at(self, batch: Batch) -> None:
        """Images that are looked at are stored whole before the step of their token."""
        self.homes.in_steps.append([new.sequence for new in batch.encoded])
        for new in batch.encoded:
            image, *before = [one.image for one in reversed(self.of(new.sequence).images) if one.begin <= new.position]
            stored = self.homes.take(new.sequence)
            assert image.rows is not None
            assert len(stored) == new.n_rows
            assert (stored[-image.n_rows :] == image.rows).all()
            assert len(stored) == image.n_rows or any((stored[: one.n_rows] == one.rows).all() for one in before)
            first = batch.positions[batch.sequences == new.sequence][0]
            assert first == new.position, "a step begins with the image that comes with it"

    def _sees_beyond(self, sequence: int, wanted: Any, positions: Any) -> Any:
        seen = super()._sees_beyond(sequence, wanted, positions)
        for at in self.of(sequence).images:
            for begin, end in at.image.placed.bidirectional:
                low, high = at.begin + begin, at.begin + end
                rows, columns = (wanted >= low) & (wanted < high), (positions >= low) & (positions < high)
                seen |= rows[:, None] & columns
        return seen


def axes_of(request: Completion, index: int) -> list[int]:
    """One token after another, as the family's description has it."""
    at_text = token = 0
    for at in request.images:
        if index < at.begin:
            break
        at_text += at.begin - token
        if index < at.end:
            own = at.image.placed.axes
            place = index - at.begin
            return [at_text + place] * 3 + [0] if own is None else [*(at_text + own[:3, place]).tolist(), int(own[3, place])]
        at_text += at.image.placed.n_positions or len(at.image.placed.tokens)
        token = at.end
    return [at_text + index - token] * 3 + [0]


def shown(request: Completion) -> list[int]:
    """What stands in a request's sequence: tokens of text, and numbers of rows."""
    found = [int(token) for token in request.tokens]
    for at in request.images:
        for place, row in enumerate(at.image.placed.rows):
            if row >= 0 and len(at.image.placed.tokens) > 1:
                found[at.begin + place] = row_number(number_of(at.image), row)
    return found


def number_of(image: Any) -> int:
    number: int = image.number
    return number


class SeeingSimulation(Simulation):
    """Requests with images; the marker of image i of a prompt is ``<i>``."""

    def __init__(self, kind: str = "full", *, eyes: FakeEyes | None = None, **options: Any) -> None:
        self.eyes = eyes or FakeEyes()
        self.homes = FakeHomes(lambda sequence: self._of(sequence).request)
        homes = self.homes if self.eyes.vision.is_cross_attended else None
        super().__init__(kind, eyes=self.eyes, homes=homes, seeing=ImageSeeingModel, **options)
        self.model.of, self.model.homes = lambda sequence: self._of(sequence).request, self.homes
        sight = self.loaded.sight
        assert sight is not None
        self.kept = sight.kept
        take = self.kept.take

        def noted(data: bytes, salt: str = "") -> Any:
            image: Any = take(data, salt)
            image.number = int(data.split()[2])
            return image

        self.kept.take = noted  # type: ignore[method-assign]

    def _history(self, sequence: int) -> Sequence[int]:
        return shown(self._of(sequence).request)

    def show(self, parts: Sequence[int | bytes], n_predict: int = 5, **fields: Any) -> Asked:
        """A prompt of tokens and of image files."""
        images: list[Image] = []
        words: list[str] = []
        for part in parts:
            if isinstance(part, bytes):
                images.append(Image(marker=f"<{len(images)}>", data=part))
                words.append(images[-1].marker)
            else:
                words.append(str(part))
        asked = self.ask([], n_predict, text=" ".join(words), images=images, **fields)
        asked.prompt = shown(asked.request)[: asked.request.n_prompt]
        return asked

    def alone(self, asked: Asked) -> list[int]:
        """The answer that follows from what is seen, without a shift."""
        content, answer = list(asked.prompt), list[int]()
        for _ in range(asked.n_predict):
            held = np.array(content, np.int64)
            answer.append(digest(held, np.arange(len(held))) % 128)
            content.append(answer[-1])
            if not answer[-1]:
                break
        return answer


def told(asked: Asked) -> list[int]:
    return [int(word) for word in asked.text.split()]


__all__ = ["DIM", "FakeEyes", "FakeVision", "SeeingSimulation", "file", "told"]
