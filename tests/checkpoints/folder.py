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
from tests.hf import LLAMA3_PATTERN, added_token, bfloat16, sentencepiece_file, write_checkpoint, write_safetensors
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


def _add_modules(folder: Path, dense: dict[str, npt.NDArray[Any]]) -> None:
    """What sentence-transformers puts behind a model: a pooling, dense layers, a normalisation."""
    paths = ["", "1_Pooling", *(key.partition("/")[0] for key in dense), "4_Normalize"]
    modules = [{"path": path, "type": f"sentence_transformers.models.{path[2:] or 'Transformer'}"} for path in paths]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    for key, values in dense.items():
        path = key.partition("/")[0]
        (folder / path).mkdir()
        n_out, n_in = values.shape
        stated = {"in_features": n_in, "out_features": n_out, "bias": False}
        (folder / path / "config.json").write_text(
            json.dumps({**stated, "activation_function": "torch.nn.modules.linear.Identity"})
        )


def write_tensors(folder: Path, named: dict[str, npt.NDArray[Any]]) -> None:
    """Into one file, and one in each folder that the names begin with."""
    places: dict[str, dict[str, npt.NDArray[Any]]] = {"": {}, **{f"{path.name}/": {} for path in folder.glob("*_Dense")}}
    for key, values in named.items():
        place, slash, name = key.rpartition("/")
        places[place + slash][name] = values
    for place, inside in places.items():
        write_safetensors(folder / place / "model.safetensors", inside)


def seen(name: str) -> npt.NDArray[np.float64]:
    """The rows of the case's picture, as the authors' program computes them."""
    return np.array(vectors(name)["rows"], np.float64)


def write_case(folder: Path, name: str, *, n_shards: int = 1, **changes: Any) -> Path:
    """*changes* are fields of config.json."""
    case = CASES[name]
    made = tensors(name)
    inner = {key: values for key, values in made.items() if "/" not in key}
    write_checkpoint(folder, inner, case.config | changes, pattern=LLAMA3_PATTERN, n_shards=n_shards)
    if case.dense:
        _add_modules(folder, {key: values for key, values in made.items() if "/" in key})
        write_tensors(folder, made)
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
