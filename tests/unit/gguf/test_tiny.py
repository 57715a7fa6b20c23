"""libllama loads and runs the tiny models, their vocabulary round-trips, and their greedy choices are no ties."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.native.vocabulary import Vocabulary
from tests.oracle import Oracle
from tests.tiny import write_llama
from tests.written import written_once

PROMPT = "<|im_start|>user\nWhat is the answer to the Question of 42 naïve foxes? 🦊<|im_end|>\n".encode()

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sentencepiece": {"vocab": "spm"},
    "pre gpt-2, tied": {"pre": "gpt-2", "tied": True},
    "f16, biases": {"dtype": "f16", "biases": True},
    "q8_0, linear": {"dtype": "q8_0", "rope_scaling": "linear"},
    "q4_K, yarn, tied": {"dtype": "q4_K", "rope_scaling": "yarn", "tied": True},
    "q4_0, frequencies": {"dtype": "q4_0", "rope_freqs": True, "n_layers": 3, "n_heads": 8, "n_kv_heads": 8},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_libllama_runs_it(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_llama(tmp_path / "tiny.gguf", **options)
    vocabulary = Vocabulary.load(str(path))
    assert vocabulary is not None
    with Oracle(path, n_ctx=256, n_threads=1, flash_attention=False) as model, closing(vocabulary):
        tokens = vocabulary.tokenize(PROMPT, add_special=True, parse_special=True)
        # SentencePiece vocabularies put a space in front of the text after each control token
        expected = PROMPT.replace(b"|>", b"|> ") if options.get("vocab") == "spm" else PROMPT
        assert expected in b"".join(vocabulary.piece(token, special=True) for token in tokens)
        assert len(tokens) < len(PROMPT)
        n = len(tokens)
        rows = [model.decode(tokens, range(n), [0] * n, range(n)).copy()]
        answer: list[int] = []
        for position in range(n, n + 24):
            answer.append(int(np.argmax(rows[-1][-1])))
            rows.append(model.decode(answer[-1:], [position], [0], [0]).copy())
        logits = np.concatenate(rows)
    best_two = np.sort(logits, axis=1)[:, -2:]
    assert np.isfinite(logits).all()
    assert 2 < logits.std() < 4
    assert (best_two[:, 1] - best_two[:, 0]).min() > 1e-3
    assert len(set(answer)) > 4


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    contents = [write_llama(tmp_path / f"{i}.gguf", seed=seed).read_bytes() for i, seed in enumerate([3, 3, 4])]
    assert contents[0] == contents[1] != contents[2]


def test_the_same_file_is_written_once_and_each_has_its_own(tmp_path: Path) -> None:
    calls: list[int] = []

    @written_once
    def write(path: str | Path, *, seed: int = 0) -> Path:
        calls.append(seed)
        Path(path).write_bytes(bytes([seed]) * 10)
        return Path(path)

    write(tmp_path / "a", seed=1).write_text("changed by a test")
    assert write(tmp_path / "b", seed=1).read_bytes() == write(str(tmp_path / "c"), seed=1).read_bytes() == bytes([1]) * 10
    assert write(tmp_path / "d", seed=2).read_bytes() == bytes([2]) * 10
    assert calls == [1, 2]
    for seed in range(3, 60):
        write(tmp_path / "e", seed=seed)
    assert write(tmp_path / "f", seed=1).read_bytes() == bytes([1]) * 10, "not all are kept"
    assert calls[-1] == 1
