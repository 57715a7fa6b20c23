"""Every architecture of Puna's engine, with what is written about it and the tiny files it is tested with.

tools/models_table.py makes the table of docs/models.md of it.
"""

from __future__ import annotations

from tests.models import encoders, gemma, llama
from tests.models.row import Row

# By the name that files state, or a variety of it after a colon; run by the contract of tests/parity/test_architectures.py.
ROWS: dict[str, Row] = {
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "llama": llama.LLAMA,
    "llama:experts": llama.MIXTRAL,
}

# Those that embed, run by the contract of tests/parity/test_embeddings.py: models in which every token sees the whole text …
ENCODERS: dict[str, Row] = {
    "bert": encoders.BERT,
    "nomic-bert": encoders.NOMIC_BERT,
}

# … and varieties of generating models.
EMBEDDERS: dict[str, Row] = {
    "llama:embedding": llama.EMBEDDER,
}
