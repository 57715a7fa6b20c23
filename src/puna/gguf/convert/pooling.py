"""How a sentence encoder makes one vector of a text's, as sentence-transformers stores it beside the model."""

from __future__ import annotations

from typing import Any

import msgspec

from puna.errors import UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint

_MODULES = (".Transformer", ".Pooling", ".Normalize")  # all that a sentence encoder may consist of


class PoolingConfig(msgspec.Struct, frozen=True):
    """1_Pooling/config.json"""

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Module(msgspec.Struct, frozen=True):
    """One line of modules.json: what a sentence-transformers model consists of."""

    path: str
    type: str


def stated_pooling(checkpoint: Checkpoint) -> dict[str, Any]:
    """As pooling, of a decoder: one without a word about it generates text.

    Errors: as pooling.
    """
    return pooling(checkpoint) if checkpoint.has("modules.json") else {}


def pooling(checkpoint: Checkpoint, *others: str) -> dict[str, Any]:
    """The number GGUF has for it, by its key; a checkpoint without a word about it is pooled by the mean, as the field does.

    *others* are ends of modules that may stand beside it.
    Errors: UnsupportedModel.
    """
    name = "1_Pooling/config.json"
    if checkpoint.has("modules.json"):
        modules = checkpoint.decoded("modules.json", list[_Module])
        if not any(module.type.endswith(".Pooling") and module.path == "1_Pooling" for module in modules):
            raise UnsupportedModel("modules.json names no pooling in 1_Pooling")
        for module in modules:
            if not module.type.endswith((*_MODULES, *others)):
                raise UnsupportedModel(f"modules.json: a module {module.type[:100]} cannot be converted")
    elif not checkpoint.has(name):
        return {"pooling_type": 1}
    config = checkpoint.decoded(name, PoolingConfig)
    chosen = (config.pooling_mode_mean_tokens, config.pooling_mode_cls_token, config.pooling_mode_lasttoken)
    if sum(chosen) != 1:
        raise UnsupportedModel(f"{name}: of the poolings mean, first and last token exactly one can be converted")
    return {"pooling_type": 1 + chosen.index(True)}
