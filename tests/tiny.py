"""Tiny random-weight models of the llama architecture with a real small vocabulary, for parity tests against libllama.

The vocabulary is a byte-level BPE (``tokenizer.ggml.model`` gpt2) or a SentencePiece one (llama), trained here on a few
sentences, with the control tokens of ChatML. Weights are scaled so that hidden states keep unit size through the layers
and logits have a standard deviation of about 3: greedy choices are no ties.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter
from puna.native.library import opened
from tests.written import written_once

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types as GGUF numbers them

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun while the fox runs to the river "
    "hello world this is a small model that answers questions about the weather and the sea once upon a time there was "
    "a little girl who liked to read books and she said that reading is the best thing in the whole world you are a "
    "helpful assistant why is the sky blue because the air scatters blue light more than red light one two three four "
    "five six seven eight nine ten The answer is that I do not know but there are many things to learn What is it "
)


@dataclass(frozen=True)
class Vocabulary:
    model: str
    pre: str
    tokens: list[bytes]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[bytes] = field(default_factory=list)
    specials: dict[str, int] = field(default_factory=dict)  # by role: bos, eos, eot, unknown, padding
    add_bos: bool = True
    add_space_prefix: bool = True

    def add_to(self, writer: GGUFWriter) -> None:
        writer.add("tokenizer.ggml.model", self.model)
        writer.add("tokenizer.ggml.pre", self.pre)
        writer.add("tokenizer.ggml.tokens", self.tokens)
        writer.add("tokenizer.ggml.token_type", self.kinds, element=ValueType.INT32)
        if self.scores:
            writer.add("tokenizer.ggml.scores", self.scores)
        if self.merges:
            writer.add("tokenizer.ggml.merges", self.merges)
        for role, token in self.specials.items():
            writer.add(f"tokenizer.ggml.{role}_token_id", token, ValueType.UINT32)
        writer.add("tokenizer.ggml.add_bos_token", self.add_bos)
        if self.model == "llama":
            writer.add("tokenizer.ggml.add_space_prefix", self.add_space_prefix)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def _train_merges(words: Sequence[tuple[str, ...]], n_merges: int) -> list[tuple[str, str]]:
    """The most frequent adjacent pairs, merged one after the other; ties fall to the smaller pair."""
    counts = Counter(words)
    merges: list[tuple[str, str]] = []
    for _ in range(n_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in counts.items():
            merged[_apply(word, best)] += count
        counts = merged
    return merges


def _apply(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    position = 0
    while position < len(word):
        if word[position : position + 2] == pair:
            out.append(pair[0] + pair[1])
            position += 2
        else:
            out.append(word[position])
            position += 1
    return tuple(out)


@functools.cache
def bpe_vocabulary(pre: str = "llama-bpe", n_merges: int = 120) -> Vocabulary:
    """256 byte tokens, merges of them, then the control tokens."""
    characters = byte_characters()
    words = [tuple(characters[byte] for byte in f" {word}".encode()) for word in CORPUS.split()]
    merges = _train_merges(words, n_merges)
    tokens = characters + list(dict.fromkeys(a + b for a, b in merges))
    controls = ["<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>"]
    first = len(tokens)
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=[token.encode() for token in tokens + controls],
        kinds=[NORMAL] * len(tokens) + [CONTROL] * len(controls),
        merges=[f"{a} {b}".encode() for a, b in merges],
        specials={"bos": first + 1, "eos": first + 3, "eot": first + 3, "padding": first},
    )


@functools.cache
def spm_vocabulary(pre: str = "default", n_merges: int = 120) -> Vocabulary:
    """``<unk> <s> </s>``, 256 byte tokens, the characters of the corpus, merged pieces, then the control tokens."""
    words = [tuple("▁" + word) for word in CORPUS.split()]
    pieces = list(dict.fromkeys(a + b for a, b in _train_merges(words, n_merges)))
    characters = sorted({character for word in words for character in word} | set(".,!?'\""))
    specials = ["<unk>", "<s>", "</s>"]
    controls = ["<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters, *controls]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(characters)) + [CONTROL] * len(controls)
    n_scored = len(pieces) + len(characters)
    scores = [0.0] * 259 + [-float(rank) for rank in range(n_scored)] + [0.0] * len(controls)
    return Vocabulary(
        model="llama",
        pre=pre,
        tokens=[token.encode() for token in tokens],
        kinds=kinds,
        scores=scores,
        specials={"bos": 1, "eos": 2, "unknown": 0, "eot": len(tokens) - 1},
    )


@functools.cache
def wordpiece_vocabulary(n_merges: int = 120) -> Vocabulary:
    """The special tokens of BERT, pieces that begin a word (``▁the``), and pieces that go on."""
    words = [tuple("▁" + word.lower()) for word in CORPUS.split()]
    pieces = list(dict.fromkeys(a + b for a, b in _train_merges(words, n_merges)))
    letters = sorted({character for word in words for character in word[1:]} | set(".,!?'-0123456789"))
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*specials, *dict.fromkeys([*pieces, *letters, *("▁" + letter for letter in letters)])]
    return Vocabulary(
        model="bert",
        pre="default",
        tokens=[token.encode() for token in tokens],
        kinds=[CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - len(specials)),
        specials={"padding": 0, "unknown": 1, "cls": 2, "bos": 2, "seperator": 3, "eos": 3, "mask": 4},
    )


@functools.cache
def ggml_base() -> ctypes.CDLL:
    library = ctypes.CDLL(str(opened().paths["ggml-base"]))
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library


def quantize(values: np.ndarray[Any, Any], kind: TensorType) -> np.ndarray[Any, Any]:
    """Encode the rows of a matrix with ggml's own quantiser; returns the bytes."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    n_rows, n_columns = values.size // values.shape[-1], values.shape[-1]
    out = np.zeros(kind.n_bytes(values.size), dtype=np.uint8)
    # Some types are not made without weights of the columns.
    importance = np.ones(n_columns, np.float32)
    weights = importance.ctypes.data if ggml_base().ggml_quantize_requires_imatrix(kind) else None
    written = ggml_base().ggml_quantize_chunk(kind, values.ctypes.data, out.ctypes.data, 0, n_rows, n_columns, weights)
    assert written == out.size
    return out


class RandomWeights:
    """Draws tensors and adds them to a file; matrices in *kind*, vectors always in F32."""

    def __init__(self, writer: GGUFWriter, seed: int, kind: TensorType) -> None:
        self.writer = writer
        self.random = np.random.default_rng(seed)
        self.kind = kind

    def matrix(self, name: str, n_out: int, n_in: int, std: float | None = None) -> None:
        """A matrix whose product with unit-sized input has unit-sized output, unless *std* says otherwise."""
        values = self.random.standard_normal((n_out, n_in), dtype=np.float32) * np.float32(std or 1 / math.sqrt(n_in))
        self.writer.add_raw_tensor(name, (n_in, n_out), self.kind, quantize(values, self.kind))

    def stack(self, name: str, n_experts: int, n_out: int, n_in: int, std: float | None = None) -> None:
        """A matrix of each expert."""
        values = self.random.standard_normal((n_experts, n_out, n_in), dtype=np.float32) * np.float32(std or 1 / math.sqrt(n_in))
        self.writer.add_raw_tensor(name, (n_in, n_out, n_experts), self.kind, quantize(values, self.kind))

    def bias_rows(self, name: str, n_experts: int, n: int) -> None:
        self.writer.add_tensor(name, (0.2 * self.random.standard_normal((n_experts, n))).astype(np.float32))

    def norm(self, name: str, n: int, *, random_signs: bool = False) -> None:
        values = 1 + 0.1 * self.random.standard_normal(n)
        if random_signs:
            values *= self.random.choice([-1.0, 1.0], n)
        self.writer.add_tensor(name, values.astype(np.float32))

    def bias(self, name: str, n: int) -> None:
        self.writer.add_tensor(name, (0.2 * self.random.standard_normal(n)).astype(np.float32))


@written_once
def write_llama(
    path: str | Path,
    *,
    seed: int = 0,
    n_layers: int = 2,
    n_embd: int = 256,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 512,
    n_ctx: int = 2048,
    tied: bool = False,
    biases: bool = False,
    rope_freqs: bool = False,
    rope_base: float = 10000.0,
    rope_scaling: Literal["linear", "yarn"] | None = None,
    rope_factor: float = 4.0,
    dtype: str = "f32",
    chat_template: str | None = CHATML,
    vocab: Literal["bpe", "spm"] = "bpe",
    pre: str | None = None,
    logits_std: float = 3.0,
    n_padding: int = 0,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a model and return its path.

    *n_padding* rows of embeddings and head are beyond the vocabulary.
    *dtype* is any tensor type by name (``f32``, ``f16``, ``q8_0``, ``q4_K``, ...); K-quants need *n_embd* and *n_ff* to be
    multiples of 256. *metadata* adds keys or replaces none: a key that is there already is an error.
    """
    vocabulary = bpe_vocabulary(pre or "llama-bpe") if vocab == "bpe" else spm_vocabulary(pre or "default")
    writer = GGUFWriter("llama")
    head_dim = n_embd // n_heads
    writer.add("general.name", f"tiny llama {dtype} seed {seed}")
    numbers: dict[str, int] = {
        "vocab_size": len(vocabulary.tokens),
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "rope.dimension_count": head_dim,
    }
    for key, value in numbers.items():
        writer.add(f"llama.{key}", value)
    writer.add("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add("llama.rope.freq_base", rope_base)
    if rope_scaling is not None:
        writer.add("llama.rope.scaling.type", rope_scaling)
        writer.add("llama.rope.scaling.factor", rope_factor)
        writer.add("llama.rope.scaling.original_context_length", max(1, int(n_ctx / rope_factor)))
    vocabulary.add_to(writer)
    if chat_template is not None:
        writer.add("tokenizer.chat_template", chat_template)
    for key, value in (metadata or {}).items():
        writer.add(key, value)

    weights = RandomWeights(writer, seed, TensorType.from_name(dtype))
    n_vocab, kv_dim = len(vocabulary.tokens) + n_padding, head_dim * n_kv_heads
    weights.matrix("token_embd.weight", n_vocab, n_embd, std=logits_std / math.sqrt(n_embd))
    for layer in range(n_layers):
        prefix = f"blk.{layer}"
        weights.norm(f"{prefix}.attn_norm.weight", n_embd)
        for name, n_out in (("attn_q", n_embd), ("attn_k", kv_dim), ("attn_v", kv_dim), ("attn_output", n_embd)):
            gain = 2.0 if name == "attn_output" else 1.0  # attention averages unit-sized values into smaller ones
            weights.matrix(f"{prefix}.{name}.weight", n_out, n_embd, std=gain / math.sqrt(n_embd))
            if biases:
                weights.bias(f"{prefix}.{name}.bias", n_out)
        weights.norm(f"{prefix}.ffn_norm.weight", n_embd)
        weights.matrix(f"{prefix}.ffn_gate.weight", n_ff, n_embd)
        weights.matrix(f"{prefix}.ffn_up.weight", n_ff, n_embd)
        weights.matrix(f"{prefix}.ffn_down.weight", n_embd, n_ff, std=3 / math.sqrt(n_ff))
    # A tied head would mostly repeat the last token, whose embedding is still in the residual; random signs undo that.
    weights.norm("output_norm.weight", n_embd, random_signs=tied)
    if not tied:
        weights.matrix("output.weight", n_vocab, n_embd, std=logits_std / math.sqrt(n_embd))
    if rope_freqs:
        factors = np.linspace(1.0, 8.0, head_dim // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write(path)
    return Path(path)


RANK = 4  # the pooling of cross encoders


@written_once
def write_bert(
    path: str | Path,
    *,
    seed: int = 0,
    n_layers: int = 3,
    n_embd: int = 128,
    n_heads: int = 4,
    n_ff: int = 256,
    n_ctx: int = 128,
    n_positions: int | None = None,
    nomic: bool = False,
    pooling: int | None = 1,
    rank_dense: bool = True,
    rank_bias: bool = True,
    labels: list[str] | None = None,
    dtype: str = "f32",
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a sentence encoder, a BERT or a *nomic* one; *pooling* is the number GGUF files use, None writes none.

    With rank pooling it is a cross encoder: *rank_dense* for a layer before the projection to one score per label.
    """
    vocabulary = wordpiece_vocabulary()
    arch = "nomic-bert" if nomic else "bert"
    writer = GGUFWriter(arch)
    writer.add("general.name", f"tiny {arch} {dtype} seed {seed}")
    numbers: dict[str, int] = {
        "vocab_size": len(vocabulary.tokens),
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
    }
    if pooling is not None:
        numbers["pooling_type"] = pooling
    for key, value in numbers.items():
        writer.add(f"{arch}.{key}", value)
    writer.add(f"{arch}.attention.layer_norm_epsilon", 1e-12)
    writer.add(f"{arch}.attention.causal", False)
    if nomic:
        writer.add(f"{arch}.rope.freq_base", 1000.0)
    writer.add("tokenizer.ggml.token_type_count", 2)
    vocabulary.add_to(writer)
    if labels:
        writer.add(f"{arch}.classifier.output_labels", labels)
    for key, value in (metadata or {}).items():
        writer.add(key, value)

    weights = RandomWeights(writer, seed, TensorType.from_name(dtype))
    plain = RandomWeights(writer, seed + 1, TensorType.F32)
    weights.matrix("token_embd.weight", len(vocabulary.tokens), n_embd, std=1.0)
    if not nomic:
        plain.matrix("position_embd.weight", n_positions or n_ctx, n_embd, std=0.5)
    plain.matrix("token_types.weight", 2, n_embd, std=0.5)

    weights.norm("token_embd_norm.weight", n_embd)
    weights.bias("token_embd_norm.bias", n_embd)
    for layer in range(n_layers):
        _add_bert_layer(weights, f"blk.{layer}", n_embd, n_ff, nomic)
    if pooling == RANK:
        _add_rank_head(plain, n_embd, len(labels or [""]), dense=rank_dense, bias=rank_bias)
    writer.write(path)
    return Path(path)


def _add_rank_head(weights: RandomWeights, n_embd: int, n_labels: int, *, dense: bool, bias: bool) -> None:
    if dense:
        weights.matrix("cls.weight", n_embd, n_embd)
        weights.bias("cls.bias", n_embd)
    weights.matrix("cls.output.weight", n_labels, n_embd)
    if bias:
        weights.bias("cls.output.bias", n_labels)


def _add_bert_layer(weights: RandomWeights, prefix: str, n_embd: int, n_ff: int, nomic: bool) -> None:
    matrices = {"attn_output": (n_embd, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    if nomic:
        matrices |= {"attn_qkv": (3 * n_embd, n_embd), "ffn_gate": (n_ff, n_embd)}
    else:
        matrices |= {name: (n_embd, n_embd) for name in ("attn_q", "attn_k", "attn_v")}
    for name, (n_out, n_in) in matrices.items():
        gain = 2.0 if name == "attn_output" else 1.0
        weights.matrix(f"{prefix}.{name}.weight", n_out, n_in, std=gain / math.sqrt(n_in))
        if not nomic:
            weights.bias(f"{prefix}.{name}.bias", n_out)
    for name in ("attn_output_norm", "layer_output_norm"):
        weights.norm(f"{prefix}.{name}.weight", n_embd)
        weights.bias(f"{prefix}.{name}.bias", n_embd)


def write_modern_bert(
    path: str | Path,
    *,
    seed: int = 0,
    n_layers: int = 5,
    n_embd: int = 128,
    n_heads: int = 4,
    n_ff: int = 256,
    n_ctx: int = 128,
    window: int = 16,
    period: int | None = 3,
    local_base: float | None = 10000.0,
    activation: str = "",
    pooling: int = 1,
    dtype: str = "f32",
) -> Path:
    """Write a ModernBERT: the first layer without a norm before attention, every third seeing the whole text."""
    vocabulary = bpe_vocabulary()
    writer = GGUFWriter("modern-bert")
    writer.add("general.name", f"tiny modern-bert {dtype} seed {seed}")
    numbers: dict[str, int] = {
        "vocab_size": len(vocabulary.tokens),
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.sliding_window": window,
        "pooling_type": pooling,
    }
    if period is not None:
        numbers["attention.sliding_window_pattern"] = period
    for key, value in numbers.items():
        writer.add(f"modern-bert.{key}", value)
    writer.add("modern-bert.attention.layer_norm_epsilon", 1e-5)
    writer.add("modern-bert.attention.causal", False)
    writer.add("modern-bert.rope.freq_base", 160000.0)
    if local_base is not None:
        writer.add("modern-bert.rope.freq_base_swa", local_base)
    if activation:
        writer.add("modern-bert.hidden_activation", activation)
    vocabulary.add_to(writer)
    writer.add("tokenizer.ggml.add_eos_token", True)
    weights = RandomWeights(writer, seed, TensorType.from_name(dtype))
    weights.matrix("token_embd.weight", len(vocabulary.tokens), n_embd, std=1.0)
    weights.norm("token_embd_norm.weight", n_embd)
    for layer in range(n_layers):
        prefix = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm") if layer else ("ffn_norm",):
            weights.norm(f"{prefix}.{name}.weight", n_embd)
        weights.matrix(f"{prefix}.attn_qkv.weight", 3 * n_embd, n_embd)
        weights.matrix(f"{prefix}.attn_output.weight", n_embd, n_embd)
        weights.matrix(f"{prefix}.ffn_up.weight", 2 * n_ff, n_embd)
        weights.matrix(f"{prefix}.ffn_down.weight", n_embd, n_ff)
    weights.norm("output_norm.weight", n_embd, random_signs=True)
    writer.write(path)
    return Path(path)


def _add_gemma_layer(weights: RandomWeights, prefix: str, n_embd: int, n_ff: int, width: int, kv_width: int) -> None:
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        weights.norm(f"{prefix}.{name}.weight", n_embd)
    for name, n_out, n_in in (
        ("attn_q", width, n_embd),
        ("attn_k", kv_width, n_embd),
        ("attn_v", kv_width, n_embd),
        ("attn_output", n_embd, width),
        ("ffn_gate", n_ff, n_embd),
        ("ffn_up", n_ff, n_embd),
        ("ffn_down", n_embd, n_ff),
    ):
        weights.matrix(f"{prefix}.{name}.weight", n_out, n_in)


@written_once
def write_gemma3(
    path: str | Path,
    *,
    seed: int = 0,
    n_layers: int = 7,
    n_embd: int = 128,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    n_ff: int = 256,
    n_ctx: int = 2048,
    window: int = 64,
    pattern: int | None = None,
    logit_cap: float | None = None,
    rope_factor: float | None = None,
    dtype: str = "f32",
    logits_std: float = 3.0,
    metadata: dict[str, Any] | None = None,
    architecture: Literal["gemma2", "gemma3", "gemma-embedding"] = "gemma3",
    n_dense: int = 0,
) -> Path:
    """Write a Gemma 3 text model: windows with every sixth layer full, or every *pattern*-th; the head is tied.

    As *architecture* gemma2 it is a Gemma 2, without norms of queries and keys; with *n_dense* there are two dense layers
    after the last norm, so wide between them.
    """
    vocabulary = spm_vocabulary()
    writer = GGUFWriter(architecture)
    writer.add("general.name", f"tiny {architecture} {dtype} seed {seed}")
    numbers: dict[str, int] = {
        "vocab_size": len(vocabulary.tokens),
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": window,
    }
    if pattern is not None:
        numbers["attention.sliding_window_pattern"] = pattern
    for key, value in numbers.items():
        writer.add(f"{architecture}.{key}", value)
    writer.add(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add(f"{architecture}.rope.freq_base", 1000000.0)
    if rope_factor is not None:
        writer.add(f"{architecture}.rope.scaling.type", "linear")
        writer.add(f"{architecture}.rope.scaling.factor", rope_factor)
    if logit_cap is not None:
        writer.add(f"{architecture}.final_logit_softcapping", logit_cap)
    vocabulary.add_to(writer)
    for key, value in (metadata or {}).items():
        writer.add(key, value)

    weights = RandomWeights(writer, seed, TensorType.from_name(dtype))
    width, kv_width = n_heads * head_dim, n_kv_heads * head_dim
    weights.matrix("token_embd.weight", len(vocabulary.tokens), n_embd, std=logits_std / math.sqrt(n_embd))
    for layer in range(n_layers):
        _add_gemma_layer(weights, f"blk.{layer}", n_embd, n_ff, width, kv_width)
        for name in ("attn_q_norm", "attn_k_norm") if architecture != "gemma2" else ():
            weights.norm(f"blk.{layer}.{name}.weight", head_dim)
    weights.norm("output_norm.weight", n_embd, random_signs=True)
    if n_dense:
        writer.add(f"{architecture}.dense_2_feat_in", n_embd)
        writer.add(f"{architecture}.dense_2_feat_out", n_dense)
        writer.add(f"{architecture}.dense_3_feat_in", n_dense)
        writer.add(f"{architecture}.dense_3_feat_out", n_embd)
        weights.matrix("dense_2.weight", n_dense, n_embd)
        weights.matrix("dense_3.weight", n_embd, n_dense)
    writer.write(path)
    return Path(path)
