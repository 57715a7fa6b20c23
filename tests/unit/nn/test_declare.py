from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from puna.errors import FileFormatError, MissingTensors
from puna.gguf.types import TensorType
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

    def joined(self, names: list[str]) -> None:
        return None

    def low_rank(self, name: str, use: Use) -> tuple[()]:
        return ()


def bound(names: set[str]) -> Any:
    backend: Any = NamingBackend()
    file: Any = SimpleNamespace(path="m.gguf", tensors={name: SimpleNamespace(shape=(4,), type=TensorType.F32) for name in names})
    return bind(Weights, backend, file, {"layers": 2})


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


@dataclass
class ManyNames:
    norm: RMSNorm = gguf("ln1", alt="layer_norm1 attn_norm")
    factors: Any = gguf("first", alt="second third", use=Use.VECTOR, optional=True)


@pytest.mark.parametrize(
    ("names", "norm", "factors"),
    [
        ({"attn_norm.weight", "third"}, "attn_norm.weight", "third"),
        ({"attn_norm.weight", "layer_norm1.weight", "third", "second"}, "layer_norm1.weight", "second"),
        ({"attn_norm.weight", "layer_norm1.weight", "ln1.weight", "first", "second"}, "ln1.weight", "first"),
    ],
)
def test_of_several_names_the_first_that_is_there(names: set[str], norm: str, factors: str) -> None:
    backend: Any = NamingBackend()
    file: Any = SimpleNamespace(path="m.gguf", tensors={n: SimpleNamespace(shape=(4,), type=TensorType.F32) for n in names})
    weights: Any = bind(ManyNames, backend, file, {})
    assert (weights.norm.weight[0], weights.factors[0]) == (norm, factors)


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


@dataclass
class Pair:
    up: Linear = gguf("up", dims="embd 2*ff")
    down: Linear = gguf("down", dims="ff embd")


@dataclass
class Single:
    packed: Linear = gguf("packed", dims="embd 3*embd")


@dataclass
class Part:
    body: Pair | Single
    norm: RMSNorm = gguf("norm", dims="embd")


@dataclass
class Stack:
    parts: list[Part] = gguf("blk")


def shaped(shapes: dict[str, tuple[int, ...]], n: int = 1, kind: TensorType = TensorType.F32) -> Any:
    backend: Any = NamingBackend()
    tensors = {name: SimpleNamespace(shape=s, type=kind) for name, s in shapes.items()}
    file: Any = SimpleNamespace(path="m.gguf", tensors=tensors)
    return bind(Stack, backend, file, {"parts": n}, {"embd": 8})


PAIR: dict[str, tuple[int, ...]] = {
    "blk.0.up.weight": (8, 20),
    "blk.0.up.bias": (20,),
    "blk.0.down.weight": (10, 8),
    "blk.0.norm.weight": (8,),
}


def test_only_matrices_may_be_of_another_type_than_f32() -> None:
    """The library ends the process when it should multiply by another vector."""
    with pytest.raises(FileFormatError, match=r"m\.gguf: tensor blk\.0\.\S+ is F16, not F32"):
        shaped(PAIR, kind=TensorType.F16)


def test_the_file_decides_between_kinds_of_groups() -> None:
    assert isinstance(shaped(PAIR).parts[0].body, Pair)
    assert isinstance(shaped({"blk.0.packed.weight": (8, 24), "blk.0.norm.weight": (8,)}).parts[0].body, Single)


def test_an_axis_that_no_option_knows_has_one_length_in_a_layer_and_perhaps_another_in_the_next() -> None:
    second = {"blk.1.up.weight": (8, 12), "blk.1.down.weight": (6, 8), "blk.1.norm.weight": (8,)}
    assert len(shaped(PAIR | second, 2).parts) == 2
    with pytest.raises(FileFormatError, match=r"blk\.1\.down\.weight has the shape \[10, 8\].* calls for \[6, 8\]"):
        shaped(PAIR | second | {"blk.1.down.weight": (10, 8)}, 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.norm.weight", (9,)),
        ("blk.0.up.weight", (8, 21)),  # not a multiple of 2
        ("blk.0.up.weight", (8, 20, 2)),
        ("blk.0.up.bias", (8,)),
        ("blk.0.down.weight", (8, 10)),
        ("blk.0.up.weight", (160,)),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FileFormatError, match=r"m\.gguf: tensor blk\.0\.") as caught:
        shaped(PAIR | {name: shape})
    assert "calls for" in str(caught.value)
