"""EmbeddingGemma: Gemma 3 as an encoder, whose tokens see to both sides, and two dense layers behind the pooling.

The layers lie in folders of their own, as modules.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from puna.errors import UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.families.gemma import GEMMA3, check_gemma
from puna.gguf.convert.pooling import pooling
from puna.gguf.convert.table import Family, Line

_WIDE, _NARROW = "2_Dense", "3_Dense"
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")


class _Dense(msgspec.Struct, frozen=True):
    """config.json in a folder of a dense layer."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


def _dense(checkpoint: Checkpoint) -> tuple[_Dense, _Dense]:
    """Errors: UnsupportedModel where they are not two that fit together, linear and without biases."""
    names = [f"{folder}/config.json" for folder in (_WIDE, _NARROW)]
    wide, narrow = (checkpoint.decoded(name, _Dense) for name in names)
    for name, layer in zip(names, (wide, narrow), strict=True):
        if layer.bias or layer.activation_function not in _IDENTITY:
            raise UnsupportedModel(f"{name}: only a dense layer without bias and activation can be converted")
    if not 0 < wide.out_features == narrow.in_features < 1 << 24:
        raise UnsupportedModel(f"{names[1]}: in_features is {narrow.in_features}, but {_WIDE} gives {wide.out_features}")
    return wide, narrow


def _beside(checkpoint: Checkpoint) -> Mapping[str, Any]:
    wide, narrow = _dense(checkpoint)
    return {
        **pooling(checkpoint, ".Dense"),
        "dense_2_feat_in": wide.in_features,
        "dense_2_feat_out": wide.out_features,
        "dense_3_feat_in": narrow.in_features,
        "dense_3_feat_out": narrow.out_features,
    }


EMBEDDING_GEMMA: Family = replace(
    GEMMA3,
    architecture="gemma-embedding",
    ends=(
        *GEMMA3.ends,
        Line("dense_2", f"/{_WIDE}/linear", "wide embd"),
        Line("dense_3", f"/{_NARROW}/linear", "embd wide"),
    ),
    expects={**GEMMA3.expects, "use_bidirectional_attention": (True,)},
    check=lambda fields: check_gemma(fields, "gemma-embedding", 6, 0, 256.0),
    beside=_beside,
    known=lambda checkpoint: {"wide": _dense(checkpoint)[0].out_features},
    apart=(_WIDE, _NARROW),
)
