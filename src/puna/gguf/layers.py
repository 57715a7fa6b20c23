"""How many layers a model's file says it has, held against what a model may have: lists and memory are made by that number."""

from __future__ import annotations

from puna.errors import FileFormatError
from puna.gguf.metadata import Metadata

MAX_LAYERS = 2048


def n_stored_layers(metadata: Metadata) -> int:
    """Of a projector's own file, its encoder's.

    Errors: FileFormatError naming key and number.
    """
    key = "block_count"
    if metadata.architecture == "clip" or not metadata.has(key):
        key = next((k for k in ("vision.block_count", "audio.block_count") if metadata.has(k)), key)
    n_layers = metadata.integer(key)
    if not 1 <= n_layers <= MAX_LAYERS:
        key = metadata.full_key(key)
        raise FileFormatError(f"{metadata.path}: {key} {n_layers} is no number of layers; a model has from 1 to {MAX_LAYERS}")
    return n_layers
