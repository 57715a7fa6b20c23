from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.models.dialect import Translation
from tests.models.prenorm import WIDE_HEADS, write_prenorm
from tests.models.row import Row
from tests.tiny import write_gemma3

# Windows of 64, so that the prompts of the contract run over several. Flash attention sums F16 values, in another order
# where the engine has forgotten what libllama masks: an error of 4e-3 of the largest logit is met; a window of one key
# more or less gives 5e-2.
WORST = 4e-3

GEMMA = Row(
    models="Gemma 2B, 7B",
    attends="everything before",
    write=partial(write_prenorm, architecture="gemma", head_dim=128, tied=True, spm=True),
    variants={"f32": {}, "f16": {"dtype": "f16"}, "q8_0": {"dtype": "q8_0"}, "one-kv-head": {"n_kv_heads": 1}},
    worst=WIDE_HEADS,
)

GEMMA2 = Row(
    models="Gemma 2 2B, 9B, 27B",
    attends="a window and everything, in turn",
    write=partial(write_gemma3, architecture="gemma2", n_layers=5),
    variants={
        "f32": {},
        "f16-caps-that-bend": {"dtype": "f16", "logit_cap": 5.0, "metadata": {"gemma2.attn_logit_softcapping": 1.5}},
        "q8_0": {"dtype": "q8_0"},
        "no-flash-caps-that-bend": {"logit_cap": 5.0, "metadata": {"gemma2.attn_logit_softcapping": 1.5}},
    },
    worst=WORST,
    limits={"n_batch": 128},
)

GEMMA3 = Row(
    models="Gemma 3 270M to 27B",
    attends="a window; every sixth everything",
    write=write_gemma3,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "one-kv-head": {"n_kv_heads": 1, "head_dim": 32},
        "pattern-2": {"pattern": 2, "n_layers": 5},
        "rope-linear-cap": {"rope_factor": 8.0, "logit_cap": 5.0},
        "cache-q8_0": {},
    },
    worst=WORST,
    limits={"n_batch": 128},
)


def write_embedding_gemma(path: Path, *, pooling: int = 1, **options: Any) -> Path:
    stated = {"gemma-embedding.pooling_type": pooling, "tokenizer.ggml.add_eos_token": True}
    return write_gemma3(path, architecture="gemma-embedding", metadata=stated, window=16, **options)


EMBEDDING_GEMMA = Row(
    models="EmbeddingGemma (embeddings)",
    attends="half a window to either side; every sixth the whole text",
    write=write_embedding_gemma,
    variants={
        "mean": {},
        "last": {"pooling": 3},
        "f16-dense": {"dtype": "f16", "n_dense": 192},
        "q8_0": {"dtype": "q8_0"},
        "pattern-2": {"pattern": 2, "n_layers": 4},
    },
)


def write_gemma3_as_ancestor(path: Path, **options: Any) -> Path:
    file = Translation(write_gemma3(path, **options))
    file.values["rope.local.freq_base"] = file.values.pop("rope.freq_base_swa")
    file.values["rope.global.freq_base"] = file.values.pop("rope.freq_base")
    return file.save(path, "gemma3")


# The ancestor's window shows a row one key more; libllama's is followed.
GEMMA3_OF_ANCESTOR = Row(
    models="the same in files of the ancestor",
    attends=GEMMA3.attends,
    write=write_gemma3_as_ancestor,
    norm=write_gemma3,
    variants={"f32": {"metadata": {"gemma3.rope.freq_base_swa": 5000.0}}},
    worst=WORST,
    limits=GEMMA3.limits,
)


def write_embedding_gemma_as_ancestor(path: Path, **options: Any) -> Path:
    file = Translation(write_embedding_gemma(path, **options))
    file.rename({"dense_2": "dense.0", "dense_3": "dense.1"})
    return file.save(path, "gemma3")


# The ancestor computes it without any mask; libllama's windows are followed.
EMBEDDING_GEMMA_OF_ANCESTOR = Row(
    models="EmbeddingGemma in files of the ancestor",
    attends=EMBEDDING_GEMMA.attends,
    write=write_embedding_gemma_as_ancestor,
    norm=write_embedding_gemma,
    variants={"f32-dense": {"n_dense": 192}},
)
