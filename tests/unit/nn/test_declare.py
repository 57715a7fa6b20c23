from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from puna.errors import MissingTensors
from puna.ml.backend import Use
from puna.nn.declare import bind, gguf
from puna.nn.layers import Embedding, Linear, RMSNorm


@dataclass
class MLP:
    up: Linear = gguf("ffn_up")
    gate: Linear | None = gguf("ffn_gate", optional=True)


@dataclass
class Layer:
    mlp: MLP
    norm: RMSNorm = gguf("attn_norm")


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd")
    layers: list[Layer] = gguf("blk")
    output: Linear = gguf("output", alt="token_embd")
    factors: Any = gguf("rope_freqs.weight", use=Use.VECTOR, optional=True)


class NamingBackend:
    """Its tensors are their names and uses."""

    def tensor(self, name: str, use: Use) -> tuple[str, Use]:
        return name, use


def bound(names: set[str]) -> Any:
    backend: Any = NamingBackend()
    return bind(Weights, backend, names, {"layers": 2})


COMPLETE = {"token_embd.weight"} | {f"blk.{i}.{n}.weight" for i in range(2) for n in ("ffn_up", "ffn_gate", "attn_norm")}


def test_names_are_joined_from_the_declarations() -> None:
    weights = bound(COMPLETE | {"output.weight", "blk.1.ffn_up.bias", "rope_freqs.weight"})
    assert weights.layers[1].mlp.up.weight == ("blk.1.ffn_up.weight", Use.MATRIX)
    assert weights.layers[1].mlp.up.bias == ("blk.1.ffn_up.bias", Use.VECTOR)
    assert weights.layers[0].mlp.up.bias is None
    assert weights.layers[0].norm.weight == ("blk.0.attn_norm.weight", Use.VECTOR)
    assert weights.output.weight == ("output.weight", Use.MATRIX)
    assert weights.factors == ("rope_freqs.weight", Use.VECTOR)


def test_a_tied_head_is_the_embedding_used_as_a_matrix() -> None:
    weights = bound(COMPLETE)
    assert weights.output.weight == ("token_embd.weight", Use.MATRIX)
    assert weights.embedding.weight == ("token_embd.weight", Use.ROWS)
    assert weights.factors is None


def test_an_optional_group_that_is_missing_is_none() -> None:
    assert bound(COMPLETE - {"blk.0.ffn_gate.weight"}).layers[0].mlp.gate is None


def test_one_error_names_everything_that_is_missing() -> None:
    with pytest.raises(MissingTensors) as caught:
        bound({"blk.0.ffn_up.weight"})
    assert caught.value.names == [
        "token_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.1.ffn_up.weight",
        "blk.1.attn_norm.weight",
        "output.weight",
    ]


def test_half_of_an_optional_group_is_an_error() -> None:
    with pytest.raises(MissingTensors, match=r"blk\.0\.ffn_gate\.weight"):
        bound((COMPLETE - {"blk.0.ffn_gate.weight"}) | {"blk.0.ffn_gate.bias"})
