"""Layers that attend to what an earlier layer of their kind has cached, and compute no keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence

from puna.errors import FileFormatError, MissingTensors
from puna.gguf.reader import GGUFFile


def donors(file: GGUFFile, kinds: Sequence[bool], default: int) -> list[int]:
    """Per layer, whose keys and values it uses: its own, or for the last layers those of the last one of its kind that has some.

    ``attention.shared_kv_layers`` says how many have none; *default* of them where it is missing. Errors: FileFormatError.
    """
    n_layers = len(kinds)
    n_shared = file.metadata.integer("attention.shared_kv_layers", default)
    own = n_layers - n_shared
    last = {kind: i for i, kind in enumerate(kinds[: max(own, 0)])}
    if not 1 <= own <= n_layers or any(kind not in last for kind in kinds[own:]):
        key = file.metadata.full_key("attention.shared_kv_layers")
        raise FileFormatError(f"{file.path}: {key} {n_shared} leaves some of {n_layers} layers without keys to attend to")
    return [i if i < own else last[kind] for i, kind in enumerate(kinds)]


def check_own_keys(donors: Sequence[int], has_keys: Sequence[bool]) -> None:
    """Errors: MissingTensors naming the layers that others, or they themselves, attend to and that make no keys."""
    missing = [f"blk.{i}.attn_k.weight" for i, donor in enumerate(donors) if donor == i and not has_keys[i]]
    if missing:
        raise MissingTensors(missing)
