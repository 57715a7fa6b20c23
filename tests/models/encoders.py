"""Sentence encoders; the contract they are held to is that of tests/parity/test_embeddings.py."""

from __future__ import annotations

from functools import partial

from tests.models.row import Row
from tests.tiny import write_bert, write_modern_bert

BERT = Row(
    models="all-MiniLM, BGE, E5 (embeddings)",
    attends="the whole text",
    write=write_bert,
    # Pooling as GGUF numbers it.
    variants={
        "mean": {"pooling": 1},
        "cls": {"pooling": 2},
        "last": {"pooling": 3},
        "q8_0": {"pooling": 1, "dtype": "q8_0"},
        "f16-heads-of-64": {"pooling": 2, "dtype": "f16", "n_heads": 2},
    },
)

NOMIC_BERT = Row(
    models="nomic-embed-text (embeddings)",
    attends="the whole text",
    write=partial(write_bert, nomic=True),
    variants={"mean": {}, "q8_0": {"dtype": "q8_0", "n_heads": 2}},
)

MODERN_BERT = Row(
    models="ModernBERT, gte-modernbert, Granite Embedding R2 (embeddings)",
    attends="the whole text; two of three layers half a window to either side",
    write=write_modern_bert,
    variants={
        "mean": {},
        "cls": {"pooling": 2},
        "silu": {"activation": "silu"},
        "q8_0": {"dtype": "q8_0"},
        "f16-pattern-2": {"dtype": "f16", "period": 2, "n_heads": 2},
        "unstated": {"period": None, "local_base": None},
        "no-window": {"window": 0},
    },
)
