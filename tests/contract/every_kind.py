"""A server with a model of each kind, all tiny: ``chat``, ``embedder``, ``ranker``; and what it may answer to nonsense."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from puna.store.recipe import Recipe
from tests.contract.test_embed_routes import Serving
from tests.tiny import RANK, write_bert, write_llama

# What Ollama answers with a status from 500 on although the request is to blame; what a model of another kind is asked;
# and what lies with a registry, here one that nobody runs.
DOCUMENTED = re.compile(
    r'option "\w+" must be |invalid format: |this model does not support (embeddings|ranking)|pull model manifest: '
    r"|unsupported quantization type |account unavailable|there was an error signing out|127\.0\.0\.1:9 cannot be reached"
)


@contextmanager
def serving(folder: Path, parameters: dict[str, Any]) -> Iterator[Serving]:
    """All models have these parameters."""
    server = Serving(folder, max_loaded_models=3)
    files = {
        "chat": write_llama(folder / "llama.gguf", n_layers=1, n_embd=64, n_ff=64),
        "embedder": write_bert(folder / "bert.gguf", n_layers=1, n_ctx=64),
        "ranker": write_bert(folder / "rank.gguf", n_layers=1, n_ctx=64, pooling=RANK),
    }
    for name, file in files.items():
        blob = server.store.blobs.import_file(file)
        server.store.create(name, Recipe(files={"model.gguf": blob.digest}, parameters=parameters))
    with server.running():
        yield server
