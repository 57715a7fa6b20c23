"""The models that bench runs on: SmolLM2 from the package index, and a file of the shape of Llama 3.2 1B made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.tiny import bpe_vocabulary, quantize

from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter


def cache_dir() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "bench"
    root.mkdir(parents=True, exist_ok=True)
    return root


def smollm2() -> Path:
    """The starter model's file, pulled into a store of bench's own on first use."""
    from puna.store.store import Store

    root = cache_dir() / "models"
    environment = {**os.environ, "OLLAMA_MODELS": str(root), "OLLAMA_HOST": "127.0.0.1:1"}
    store = Store(root)
    if not any(m.name == "smollm2:135m" for m in store.list()):
        subprocess.run([sys.executable, "-m", "puna", "pull", "smollm2:135m"], check=True, env=environment)
    return Path(store.get("smollm2:135m").model_path)


# Llama 3.2 1B, from its published configuration.
N_LAYERS, N_EMBD, N_HEADS, N_KV_HEADS, N_FF, N_VOCAB = 16, 2048, 32, 8, 8192, 128256

# Distinct rows per matrix: enough that no two columns of a product repeat often, few enough to quantise in seconds.
_DISTINCT_ROWS = 512


def llama_1b(kind: TensorType | None = None, *, share: int = 1) -> Path:
    """Random weights of one type, or in the mixture that llama.cpp calls Q4_K_M; 0.8 GB and more, kept for the next run.

    *share*: one in so many of the layers, and of the tokens: a step takes as much less, in the same proportions.
    """
    of = "" if share == 1 else f"-1-in-{share}"
    path = cache_dir() / f"llama-1b-shape{of}-{'q4_k_m' if kind is None else kind.name.lower()}.gguf"
    if not path.exists():
        print(f"making {path.name} with random weights, once", file=sys.stderr)
        part = path.with_suffix(".part")
        _writer(kind, N_LAYERS // share, N_VOCAB // share).write(part)
        part.rename(path)
    return path


def _writer(kind: TensorType | None, n_layers: int, n_vocab: int) -> GGUFWriter:
    writer = GGUFWriter("llama")
    writer.add("general.name", "random weights in the shape of Llama 3.2 1B")
    for key, value in {
        "vocab_size": n_vocab,
        "context_length": 131072,
        "embedding_length": N_EMBD,
        "block_count": n_layers,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "rope.dimension_count": N_EMBD // N_HEADS,
    }.items():
        writer.add(f"llama.{key}", value)
    writer.add("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add("llama.rope.freq_base", 500000.0)
    add_vocabulary(writer, n_vocab)
    random = np.random.default_rng(1)

    def matrix(name: str, n_in: int, n_out: int, kind: TensorType) -> None:
        rows = random.standard_normal((_DISTINCT_ROWS, n_in), dtype=np.float32) / np.float32(np.sqrt(n_in))
        blocks = quantize(rows, kind).reshape(_DISTINCT_ROWS, -1)
        chosen = random.integers(0, _DISTINCT_ROWS, n_out)
        writer.add_raw_tensor(name, (n_in, n_out), kind, lambda: blocks[chosen].reshape(-1))

    plain = TensorType.Q4_K if kind is None else kind
    matrix("token_embd.weight", N_EMBD, n_vocab, TensorType.Q6_K if kind is None else kind)
    kv_width = N_EMBD // N_HEADS * N_KV_HEADS
    for i in range(n_layers):
        # The layers whose attn_v and ffn_down get more bits in Q4_K_M.
        is_finer = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        finer = TensorType.Q6_K if is_finer and kind is None else plain
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(N_EMBD, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(N_EMBD, np.float32))
        matrix(f"blk.{i}.attn_q.weight", N_EMBD, N_EMBD, plain)
        matrix(f"blk.{i}.attn_k.weight", N_EMBD, kv_width, plain)
        matrix(f"blk.{i}.attn_v.weight", N_EMBD, kv_width, finer)
        matrix(f"blk.{i}.attn_output.weight", N_EMBD, N_EMBD, plain)
        matrix(f"blk.{i}.ffn_gate.weight", N_EMBD, N_FF, plain)
        matrix(f"blk.{i}.ffn_up.weight", N_EMBD, N_FF, plain)
        matrix(f"blk.{i}.ffn_down.weight", N_FF, N_EMBD, finer)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    return writer


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    small = bpe_vocabulary()
    fill = n_vocab - len(small.tokens)
    writer.add("tokenizer.ggml.model", small.model)
    writer.add("tokenizer.ggml.pre", small.pre)
    writer.add("tokenizer.ggml.tokens", [*small.tokens, *(f"fill{i}".encode() for i in range(fill))])
    writer.add("tokenizer.ggml.token_type", [*small.kinds, *([1] * fill)], element=ValueType.INT32)
    writer.add("tokenizer.ggml.merges", small.merges)
    for role, token in small.specials.items():
        writer.add(f"tokenizer.ggml.{role}_token_id", token, ValueType.UINT32)
