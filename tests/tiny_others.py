"""Tiny random-weight models of architectures that only libllama runs here: one of each way to remember what came before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from tests.tiny import CHATML, RandomWeights, bpe_vocabulary

N_EMBD, N_HEADS, N_FF, N_CTX = 128, 4, 256, 1024
D_CONV, D_STATE, DT_RANK = 4, 16, 8

Write = Callable[..., Path]


def _begin(architecture: str, seed: int, n_layers: int, **numbers: int) -> tuple[GGUFWriter, RandomWeights, int]:
    """The file so far: metadata, vocabulary, embedding table."""
    vocabulary = bpe_vocabulary()
    n_vocab = len(vocabulary.tokens)
    writer = GGUFWriter(architecture)
    writer.add("general.name", f"tiny {architecture} seed {seed}")
    plain = {"vocab_size": n_vocab, "context_length": N_CTX, "embedding_length": N_EMBD, "block_count": n_layers}
    for key, value in (plain | numbers).items():
        writer.add(f"{architecture}.{key.replace('__', '.')}", value)
    vocabulary.add_to(writer)
    writer.add("tokenizer.chat_template", CHATML)
    weights = RandomWeights(writer, seed, TensorType.F32)
    weights.matrix("token_embd.weight", n_vocab, N_EMBD, std=3 / math.sqrt(N_EMBD))
    return writer, weights, n_vocab


def _add(weights: RandomWeights, prefix: str, matrices: Mapping[str, tuple[int, int]], biases: bool = False) -> None:
    for name, (n_out, n_in) in matrices.items():
        weights.matrix(f"{prefix}.{name}.weight", n_out, n_in, std=2 / math.sqrt(n_in))
        if biases:
            weights.bias(f"{prefix}.{name}.bias", n_out)


def _norm(weights: RandomWeights, name: str, n: int = N_EMBD, *, bias: bool = False, random_signs: bool = False) -> None:
    weights.norm(f"{name}.weight", n, random_signs=random_signs)
    if bias:
        weights.bias(f"{name}.bias", n)


def write_stablelm(path: str | Path, *, seed: int = 0, n_layers: int = 2) -> Path:
    """Rotary positions on part of each head, LayerNorm."""
    numbers = {"feed_forward_length": N_FF, "attention__head_count": N_HEADS, "attention__head_count_kv": 2}
    writer, weights, n_vocab = _begin("stablelm", seed, n_layers, **numbers, rope__dimension_count=N_EMBD // N_HEADS // 2)
    writer.add("stablelm.use_parallel_residual", False)
    writer.add("stablelm.attention.layer_norm_epsilon", 1e-5)
    for i in range(n_layers):
        prefix = f"blk.{i}"
        attention = {"attn_q": (N_EMBD, N_EMBD), "attn_k": (N_EMBD // 2, N_EMBD), "attn_v": (N_EMBD // 2, N_EMBD)}
        mlp = {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        _add(weights, prefix, {**attention, "attn_output": (N_EMBD, N_EMBD), **mlp})
        for name in ("attn_norm", "ffn_norm"):
            _norm(weights, f"{prefix}.{name}", bias=True)
    _norm(weights, "output_norm", bias=True)
    weights.matrix("output.weight", n_vocab, N_EMBD, std=3 / math.sqrt(N_EMBD))
    writer.write(path)
    return Path(path)


def write_gpt2(path: str | Path, *, seed: int = 0, n_layers: int = 2) -> Path:
    """Learned positions: as many as the context is long, and no row more."""
    numbers = {"feed_forward_length": N_FF, "attention__head_count": N_HEADS}
    writer, weights, _ = _begin("gpt2", seed, n_layers, **numbers)
    writer.add("gpt2.attention.layer_norm_epsilon", 1e-5)
    weights.matrix("position_embd.weight", N_CTX, N_EMBD, std=0.3)
    for i in range(n_layers):
        matrices = {"attn_qkv": (3 * N_EMBD, N_EMBD), "attn_output": (N_EMBD, N_EMBD)}
        _add(weights, f"blk.{i}", matrices | {"ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}, biases=True)
        for name in ("attn_norm", "ffn_norm"):
            _norm(weights, f"blk.{i}.{name}", bias=True)
    _norm(weights, "output_norm", bias=True, random_signs=True)  # the head is tied
    writer.write(path)
    return Path(path)


def _add_mamba(weights: RandomWeights, prefix: str, *, norms: bool) -> None:
    d_inner = 2 * N_EMBD
    _add(weights, prefix, {"ssm_in": (2 * d_inner, N_EMBD), "ssm_x": (DT_RANK + 2 * D_STATE, d_inner)})
    _add(weights, prefix, {"ssm_out": (N_EMBD, d_inner)})
    weights.matrix(f"{prefix}.ssm_conv1d.weight", d_inner, D_CONV)
    weights.bias(f"{prefix}.ssm_conv1d.bias", d_inner)
    weights.matrix(f"{prefix}.ssm_dt.weight", d_inner, DT_RANK)
    weights.bias(f"{prefix}.ssm_dt.bias", d_inner)
    decay = -np.exp(weights.random.uniform(-2, 0.5, (d_inner, D_STATE)))
    weights.writer.add_tensor(f"{prefix}.ssm_a", decay.astype(np.float32))
    weights.writer.add_tensor(f"{prefix}.ssm_d", np.ones(d_inner, np.float32))
    for name, width in (("ssm_dt_norm", DT_RANK), ("ssm_b_norm", D_STATE), ("ssm_c_norm", D_STATE)) if norms else ():
        weights.norm(f"{prefix}.{name}.weight", width)


def _ssm_numbers() -> dict[str, int]:
    sizes = {"conv_kernel": D_CONV, "inner_size": 2 * N_EMBD, "state_size": D_STATE, "time_step_rank": DT_RANK}
    return {f"ssm__{name}": size for name, size in sizes.items()}


def write_mamba(path: str | Path, *, seed: int = 0, n_layers: int = 2) -> Path:
    """Of each sequence only a state."""
    numbers = {"feed_forward_length": 0, "attention__head_count": 0}
    writer, weights, _ = _begin("mamba", seed, n_layers, **numbers, **_ssm_numbers())
    writer.add("mamba.attention.layer_norm_rms_epsilon", 1e-5)
    for i in range(n_layers):
        _norm(weights, f"blk.{i}.attn_norm")
        _add_mamba(weights, f"blk.{i}", norms=False)
    _norm(weights, "output_norm", random_signs=True)
    writer.write(path)
    return Path(path)


def write_jamba(path: str | Path, *, seed: int = 0, n_layers: int = 4) -> Path:
    """A state in most layers, keys and values of all tokens in every second."""
    numbers = {"feed_forward_length": N_FF, "attention__head_count": N_HEADS}
    writer, weights, _ = _begin("jamba", seed, n_layers, **numbers, **_ssm_numbers())
    writer.add("jamba.attention.head_count_kv", [2 if i % 2 else 0 for i in range(n_layers)])
    writer.add("jamba.attention.layer_norm_rms_epsilon", 1e-5)
    for i in range(n_layers):
        prefix = f"blk.{i}"
        for name in ("attn_norm", "ffn_norm"):
            _norm(weights, f"{prefix}.{name}")
        if i % 2:
            kv = (N_EMBD // 2, N_EMBD)
            _add(weights, prefix, {"attn_q": (N_EMBD, N_EMBD), "attn_k": kv, "attn_v": kv, "attn_output": (N_EMBD, N_EMBD)})
        else:
            _add_mamba(weights, prefix, norms=True)
        _add(weights, prefix, {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)})
    _norm(weights, "output_norm", random_signs=True)
    writer.write(path)
    return Path(path)


def write_t5encoder(path: str | Path, *, seed: int = 0, n_layers: int = 2, pooling: int = 1) -> Path:
    """An encoder alone, with positions as biases of the attention: for embeddings."""
    numbers = {"feed_forward_length": N_FF, "attention__head_count": N_HEADS, "attention__key_length": N_EMBD // N_HEADS}
    writer, weights, _ = _begin(
        "t5encoder", seed, n_layers, **numbers, attention__relative_buckets_count=32, pooling_type=pooling
    )
    writer.add("t5encoder.attention.layer_norm_rms_epsilon", 1e-5)
    for i in range(n_layers):
        matrices = {f"attn_{name}": (N_EMBD, N_EMBD) for name in ("q", "k", "v", "o")}
        matrices |= {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        _add(weights, f"enc.blk.{i}", matrices)
        for name in ("attn_norm", "ffn_norm"):
            _norm(weights, f"enc.blk.{i}.{name}")
        if i == 0:
            weights.matrix(f"enc.blk.{i}.attn_rel_b.weight", 32, N_HEADS, std=1.0)
    _norm(weights, "enc.output_norm")
    writer.write(path)
    return Path(path)


OTHERS: dict[str, Write] = {"stablelm": write_stablelm, "gpt2": write_gpt2, "mamba": write_mamba, "jamba": write_jamba}
