"""Prompts of texts and images, computed by Puna's forward pass without a runner, and by libmtmd and libllama."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import text_axes
from puna.vision.model import Pixels
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.puna_engine import PunaEngine
from tests.vision.encoding import Eyes

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Part = str | Pixels  # of a prompt


@dataclass
class Prompt:
    """As a batch has it: rows of images stand where *rows* says, each the number of one of *encoded*, or -1."""

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    encoded: list[Floats] = field(default_factory=list)
    axes: list[Ints] = field(default_factory=list)  # [4, n] of each part
    bidirectional: list[tuple[int, int]] = field(default_factory=list)
    n_positions: int = 0

    def add_text(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.rows += [-1] * len(tokens)
        self.axes.append(text_axes(np.arange(self.n_positions, self.n_positions + len(tokens), dtype=np.int32)))
        self.n_positions += len(tokens)

    def add_image(self, eyes: Eyes, pixels: Pixels) -> None:
        prepared = eyes.model.prepare(pixels)
        placed, begin, n_encoded = prepared.placed, len(self.tokens), sum(map(len, self.encoded))
        self.tokens += placed.tokens
        self.rows += [row if row < 0 else row + n_encoded for row in placed.rows]
        self.encoded.append(eyes.numbered(prepared))
        self.bidirectional += [(first + begin, end + begin) for first, end in placed.bidirectional]
        axes = text_axes(np.arange(len(placed.tokens), dtype=np.int32)) if placed.axes is None else placed.axes.copy()
        axes[:3] += self.n_positions
        self.axes.append(axes)
        self.n_positions += placed.n_positions or len(placed.tokens)

    @property
    def seen(self) -> list[int | None]:
        """The tokens; None where a row of an image stands."""
        return [token if row < 0 else None for token, row in zip(self.tokens, self.rows, strict=True)]


def prompt_of(eyes: Eyes, parts: Sequence[Part]) -> Prompt:
    made = Prompt()
    for i, part in enumerate(parts):
        if isinstance(part, str):
            made.add_text(eyes.tokenizer.encode(part, add_special=i == 0))
        else:
            made.add_image(eyes, part)
    return made


def computed(puna: PunaEngine, prompts: Sequence[Prompt], *, n_batch: int = 0, first: int = 0) -> Floats:
    """Logits after the last token of each, all in one batch or, of one, in batches of so many tokens, from *first* on."""
    sequences = np.concatenate([np.full(len(p.tokens), i) for i, p in enumerate(prompts)])
    positions = np.concatenate([np.arange(len(p.tokens)) for p in prompts])
    tokens = [token for p in prompts for token in p.tokens]
    axes = np.concatenate([part for p in prompts for part in p.axes], 1)
    firsts = np.cumsum([0, *(len(p.tokens) for p in prompts)])
    given = [(i + firsts[s], s, row) for s, p in enumerate(prompts) for i, row in enumerate(p.rows) if row >= 0]
    encoded = [np.concatenate(p.encoded) if p.encoded else np.empty((0, 0)) for p in prompts]
    seen = [(begin + firsts[s], end + firsts[s]) for s, p in enumerate(prompts) for begin, end in p.bidirectional]
    n = n_batch or len(tokens)
    logits = np.empty((0, puna.n_vocab), np.float32)
    for begin in range(first, len(tokens), n):
        end = min(begin + n, len(tokens))
        here = [(i - begin, encoded[s][row]) for i, s, row in given if begin <= i < end]
        logits = puna.decode(
            tokens[begin:end],
            positions[begin:end].tolist(),
            sequences[begin:end].tolist(),
            [int(i) - 1 - begin for i in firsts[1:] if begin < i <= end],
            embedded=([i for i, _ in here], np.stack([row for _, row in here])) if here else None,
            bidirectional=[(int(a) - begin, int(b) - begin) for a, b in seen if begin <= a < end],
            axes=axes[:, begin:end] if puna.model.has_axes else None,
        )
    return logits.copy()


def after(puna: PunaEngine, prompt: Prompt, answer: Sequence[int]) -> Floats:
    """Logits after a prompt and all of an answer to it, of which all but the last token have been computed."""
    if not answer:
        rows = computed(puna, [prompt])
    else:
        n = len(answer) - 1
        axes = text_axes(np.array([prompt.n_positions + n], np.int32)) if puna.model.has_axes else None
        rows = puna.decode(answer[-1:], [len(prompt.tokens) + n], [0], [0], axes=axes)
    last: Floats = rows[0].copy()
    return last


def answered(puna: PunaEngine, prompt: Prompt, count: int, never: Sequence[int] = ()) -> tuple[list[int], list[Floats]]:
    """The likeliest continuation of a prompt without some tokens, and the logits that each of its tokens is the largest of."""
    answer: list[int] = []
    rows: list[Floats] = []
    while len(answer) < count:
        rows.append(after(puna, prompt, answer).copy())
        rows[-1][list(never)] = -np.inf
        answer.append(int(rows[-1].argmax()))
    return answer, rows


def marked(parts: Sequence[Part], around: str = "{}") -> tuple[str, list[Pixels]]:
    """As libmtmd takes it; *around* an image stands what only Puna adds."""
    text = "".join(part if isinstance(part, str) else around.format(MARKER) for part in parts)
    return text, [part for part in parts if not isinstance(part, str)]


def placed_by_libmtmd(oracle: MtmdOracle, parts: Sequence[Part], around: str = "{}") -> tuple[list[int | None], Ints, int]:
    """The tokens of a prompt with None where a row stands, their places along the axes, and where what follows goes on."""
    seen: list[int | None] = []
    axes, position = [], 0
    for chunk in oracle.chunks(*marked(parts, around)):
        seen += chunk.tokens if chunk.kind == "text" else [None] * chunk.n_tokens
        own = chunk.positions(position) if oracle.has_axes else None
        axes.append(text_axes(np.arange(position, position + chunk.n_tokens, dtype=np.int32)) if own is None else own)
        position += chunk.n_positions
    return seen, np.concatenate(axes, 1), position


def decoded_backwards(oracle: MtmdOracle, prompt: Prompt) -> Floats:
    """Logits after the last token, by libllama with rows that see only earlier ones, whatever libmtmd would have."""
    batch = oracle.lib.llama_batch_init(len(prompt.tokens), oracle.n_out, 1)
    encoded, begin, logits = np.concatenate(prompt.encoded), 0, np.empty(0, np.float32)
    for is_row, group in groupby(prompt.rows, lambda row: row >= 0):
        rows = list(group)
        end = begin + len(rows)
        if not is_row:
            logits = oracle.decode(prompt.tokens[begin:end], range(begin, end), [0] * len(rows), [len(rows) - 1])[0]
        else:
            values = np.ascontiguousarray(encoded[rows])
            ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
            batch.n_tokens = len(rows)
            for i in range(len(rows)):
                batch.pos[i], batch.n_seq_id[i], batch.logits[i] = begin + i, 1, False
                batch.seq_id[i][0] = 0
            assert oracle.lib.llama_decode(oracle.ctx, batch) == 0
        begin = end
    oracle.lib.llama_batch_free(batch)
    return logits
