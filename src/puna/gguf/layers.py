"""How many layers a model's file says it has, held against what a model may have: lists and memory are made by that number."""

from __future__ import annotations

from puna.errors import FileFormatError
from puna.gguf.metadata import Metadata

MAX_LAYERS = 2048


def n_stored_layers(metadata: Metadata) -> int:
    """Errors: FileFormatError naming key and number."""
    n_layers = metadata.integer("block_count")
    if not 1 <= n_layers <= MAX_LAYERS:
        key = metadata.full_key("block_count")
        raise FileFormatError(f"{metadata.path}: {key} {n_layers} is no number of layers; a model has from 1 to {MAX_LAYERS}")
    return n_layers
