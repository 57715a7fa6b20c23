"""A case as a folder: the files that its publisher would upload."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoints.cases import CASES, Case
from tests.checkpoints.weights import in_few_bits, random_weights
from tests.hf import LLAMA3_PATTERN, added_token, bfloat16, sentencepiece_file, write_checkpoint
from tests.tiny import bpe_vocabulary, spm_vocabulary, wordpiece_vocabulary

VECTORS = Path(__file__).parent / "vectors"


@cache
def vectors(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return found


def expected(name: str) -> npt.NDArray[np.float64]:
    """Of ROWS every STRIDE-th logit, as the authors' program computes them; of an encoder of the one vector."""
    return np.array(vectors(name)["logits"], np.float64)


def stored(case: Case, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Exact: the numbers are such that 16 bits of either kind hold them."""
    if case.stored == "BF16":
        return bfloat16(values)
    return values.astype(np.float16 if case.stored == "F16" else np.float32)


def tensors(name: str) -> dict[str, npt.NDArray[Any]]:
    case = CASES[name]
    weights = random_weights(vectors(name)["shapes"], less_one=case.less_one, short_queries=case.short_queries)
    found: dict[str, npt.NDArray[Any]] = {}
    for tensor, values in weights.items():
        found |= in_few_bits(case, tensor, values) or {tensor: stored(case, values)}
    return found


def _add_tokens(folder: Path, case: Case) -> None:
    """Special tokens behind those of the vocabulary, of whichever kind."""
    first = len((spm_vocabulary() if case.words == "spm" else bpe_vocabulary()).tokens)
    added = [added_token(first + i, text) for i, text in enumerate(case.more)]
    content = {} if case.words == "spm" else json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = content.get("added_tokens", []) + added
    (folder / "tokenizer.json").write_text(json.dumps(content))


def seen(name: str) -> npt.NDArray[np.float64]:
    """The rows of the case's picture, as the authors' program computes them."""
    return np.array(vectors(name)["rows"], np.float64)


def write_case(folder: Path, name: str, *, n_shards: int = 1, **changes: Any) -> Path:
    """*changes* are fields of config.json."""
    case = CASES[name]
    write_checkpoint(folder, tensors(name), case.config | changes, pattern=LLAMA3_PATTERN, n_shards=n_shards)
    if case.more:
        _add_tokens(folder, case)
    elif case.words != "bpe":
        (folder / "tokenizer.json").unlink()
    if case.words == "spm":
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        (folder / "tokenizer.model").write_bytes(sentencepiece_file(spm_vocabulary()))
    if case.words == "wordpiece":
        pieces = [piece.decode() for piece in wordpiece_vocabulary().tokens]
        lines = [piece[1:] if piece.startswith("▁") else piece if piece.startswith("[") else f"##{piece}" for piece in pieces]
        (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    return folder
