"""Checkpoints as Hugging Face's libraries store them, from the tiny GGUF files of tests.tiny, and their definition in numpy."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from tests.tiny import CHATML, CONTROL, Vocabulary, bpe_vocabulary

Floats = npt.NDArray[np.float64]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
EXPERT_NAMES = {  # {} stands for the expert
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",
    "int64": "I64",
    "int8": "F8_E4M3",
    "uint8": "U8",
}


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Arrays of uint16 stand for BF16, of int8 for F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": _DTYPES[values.dtype.name], "shape": list(values.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for values in tensors.values():
            file.write(values.tobytes())


def bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def hf_tensors(gguf: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a tiny model under the names and with the order of rows that a checkpoint has.

    A checkpoint of a llama keeps the even and the odd rows of a head apart: its rotation pairs row j with row j + head_dim / 2.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    with GGUFFile.open(gguf) as file:
        keys = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"} if file.architecture == "llama" else {}
        heads = {part: file.metadata.integer(key) for part, key in keys.items()}
        for name, info in file.tensors.items():
            dtype = {TensorType.F32: np.float32, TensorType.F16: np.float16}[info.type]
            values: npt.NDArray[Any] = np.frombuffer(file.tensor_data(name), dtype).reshape(info.shape[::-1]).copy()
            if name in TOP_NAMES:
                found[TOP_NAMES[name]] = values
                continue
            _, layer, part, kind = name.split(".")
            theirs = LAYER_NAMES.get(part) or EXPERT_NAMES[file.architecture][part]
            if values.ndim == 3:  # a stack of experts
                found |= {f"model.layers.{layer}.{theirs.format(e)}.{kind}": matrix.copy() for e, matrix in enumerate(values)}
                continue
            for head in np.split(values, heads[part]) if part in heads else ():
                head[:] = np.concatenate([head[0::2], head[1::2]])
            found[f"model.layers.{layer}.{theirs}.{kind}"] = values
    return found


def gemma_tensors(gguf: Path) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a tiny Gemma under the names that a checkpoint has; there norms are stored less one."""
    names = LAYER_NAMES | GEMMA_NAMES
    found: dict[str, npt.NDArray[Any]] = {}
    with GGUFFile.open(gguf) as file:
        for name, info in file.tensors.items():
            dtype = {TensorType.F32: np.float32, TensorType.F16: np.float16}[info.type]
            values: npt.NDArray[Any] = np.frombuffer(file.tensor_data(name), dtype).reshape(info.shape[::-1]).copy()
            values = values - np.float32(1) if values.ndim == 1 else values
            inner = name.split(".")
            found[TOP_NAMES.get(name) or f"model.layers.{inner[1]}.{names[inner[2]]}.weight"] = values
    return found


def hf_config(gguf: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    with GGUFFile.open(gguf) as file:
        meta = file.metadata
        config = {
            "architectures": [architecture],
            "hidden_size": meta.integer("embedding_length"),
            "num_hidden_layers": meta.integer("block_count"),
            "num_attention_heads": meta.integer("attention.head_count"),
            "num_key_value_heads": meta.integer("attention.head_count_kv"),
            "intermediate_size": meta.integer("feed_forward_length"),
            "max_position_embeddings": meta.integer("context_length"),
            "rms_norm_eps": 1e-5,
            "rope_theta": meta.number("rope.freq_base"),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "torch_dtype": "float16",
        }
    return config | changes


def added_token(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def tokenizer_json(vocabulary: Vocabulary, pattern: str = LLAMA3_PATTERN) -> dict[str, Any]:
    texts, begin = [token.decode() for token in vocabulary.tokens], "<|begin|>"
    special = [i for i, kind in enumerate(vocabulary.kinds) if kind == CONTROL]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, texts[i]) for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
        },
        "post_processor": {
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {
                        "<|begin|>": {"id": "<|begin|>", "ids": [texts.index("<|begin|>")], "tokens": ["<|begin|>"]}
                    },
                },
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: i for i, text in enumerate(texts) if i not in special},
            "merges": [merge.decode() for merge in vocabulary.merges],
        },
    }


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def sentencepiece_file(vocabulary: Vocabulary, kind: int = 2, *, adds_space_prefix: bool = True) -> bytes:
    """What the SentencePiece library writes, in its fields that matter and one that does not."""
    content = b""
    for text, score, piece_kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.kinds, strict=True):
        piece = message(1, text) + b"\x15" + struct.pack("<f", score)
        content += message(1, piece if piece_kind == 1 else piece + b"\x18" + bytes([piece_kind]))
    trainer = message(1, b"corpus.txt") + b"\x18" + bytes([kind])
    normalizer = message(1, b"identity") + b"\x18" + bytes([adds_space_prefix])
    return content + message(2, trainer) + message(3, normalizer)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, npt.NDArray[Any]],
    config: Mapping[str, Any],
    *,
    pattern: str = LLAMA3_PATTERN,
    n_shards: int = 1,
) -> Path:
    """A folder as it is published: configuration, tokenizer, and the tensors in one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    for shard in range(n_shards):
        name = "model.safetensors" if n_shards == 1 else f"model-{shard + 1:05}-of-{n_shards:05}.safetensors"
        write_safetensors(folder / name, {key: tensors[key] for key in names[shard::n_shards]})
    tokenizer_config = {
        "bos_token": {"content": "<|begin|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    texts = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(bpe_vocabulary(), pattern),
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    return folder


class Definition:
    """The decoder that a checkpoint describes, one text at a time, in double precision."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[Any]], config: Mapping[str, Any]) -> None:
        self._tensors = {name: values.astype(np.float64) for name, values in tensors.items()}
        self._config = config

    def logits(self, tokens: list[int], factors: Floats | None = None) -> Floats:
        """[n_tokens, n_vocab]; *factors* divide the frequencies of the rotation."""
        config, table = self._config, self._tensors["model.embed_tokens.weight"]
        x = table[tokens]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self._attend(self._norm(x, f"{layer}input_layernorm.weight"), f"{layer}self_attn.", factors)
            y = self._norm(x, f"{layer}post_attention_layernorm.weight")
            x = x + self._mlp(y, layer)
        head = table if config["tie_word_embeddings"] else self._tensors["lm_head.weight"]
        return np.asarray(self._norm(x, "model.norm.weight") @ head.T)

    def _mlp(self, x: Floats, layer: str) -> Floats:
        for names in EXPERT_NAMES.values():
            if f"{layer}{names['ffn_gate_inp']}.weight" in self._tensors:
                return self._experts(x, layer, names)
        return self._gated(x, *(f"{layer}mlp.{part}_proj" for part in ("gate", "up", "down")))

    def _gated(self, x: Floats, gate: str, up: str, down: str) -> Floats:
        opened = self._linear(x, gate)
        return self._linear(np.asarray(opened / (1 + np.exp(-opened)) * self._linear(x, up)), down)

    def _experts(self, x: Floats, layer: str, names: Mapping[str, str]) -> Floats:
        """Each token through the experts that its router likes best, weighted by the softmax among them."""
        scores = self._linear(x, f"{layer}{names['ffn_gate_inp']}")
        rows = []
        for token, liked in zip(x, scores, strict=True):
            chosen = np.argsort(-liked)[: self._config["num_experts_per_tok"]]
            weights = np.exp(liked[chosen] - liked[chosen].max())
            parts = [[f"{layer}{names[f'ffn_{part}_exps'].format(e)}" for part in ("gate", "up", "down")] for e in chosen]
            outputs = [self._gated(token[None], *part)[0] for part in parts]
            rows.append((weights / weights.sum()) @ np.stack(outputs))
        return np.stack(rows)

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self._tensors[f"{name}.weight"].T
        return np.asarray(y + self._tensors.get(f"{name}.bias", 0.0))

    def _norm(self, x: Floats, name: str) -> Floats:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"])
        return np.asarray(x / size * self._tensors[name])

    def _attend(self, x: Floats, layer: str, factors: Floats | None) -> Floats:
        config = self._config
        n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        query, key, value = (
            self._linear(x, f"{layer}{part}_proj").reshape(len(x), heads, -1).transpose(1, 0, 2)
            for part, heads in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads))
        )
        if f"{layer}q_norm.weight" in self._tensors:
            query, key = self._norm(query, f"{layer}q_norm.weight"), self._norm(key, f"{layer}k_norm.weight")
        query, key = self._rotated(query, factors), self._rotated(key, factors)
        key, value = (np.repeat(part, n_heads // n_kv_heads, axis=0) for part in (key, value))
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        return self._linear(mixed.transpose(1, 0, 2).reshape(len(x), -1), f"{layer}o_proj")

    def _rotated(self, x: Floats, factors: Floats | None) -> Floats:
        return _turned(x, self._config["rope_theta"], 1.0 if factors is None else factors)


class GemmaDefinition(Definition):
    """Gemma 2 or 3: norms around attention and MLP, windows, and caps where the configuration has them."""

    def logits(self, tokens: list[int], factors: Floats | None = None) -> Floats:
        """[n_tokens, n_vocab]"""
        config, table = self._config, self._tensors["model.embed_tokens.weight"]
        x = table[tokens] * np.sqrt(config["hidden_size"])
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            is_full = (i + 1) % config["period"] == 0
            mixed = self._gemma_attend(self._norm(x, f"{layer}input_layernorm.weight"), f"{layer}self_attn.", is_full)
            x = x + self._norm(mixed, f"{layer}post_attention_layernorm.weight")
            y = self._norm(x, f"{layer}pre_feedforward_layernorm.weight")
            gate = self._linear(y, f"{layer}mlp.gate_proj")
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            y = self._linear(gelu * self._linear(y, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
            x = x + self._norm(y, f"{layer}post_feedforward_layernorm.weight")
        return _capped(np.asarray(self._norm(x, "model.norm.weight") @ table.T), config["final_logit_softcapping"])

    def _norm(self, x: Floats, name: str) -> Floats:
        size = np.sqrt((x**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"])
        return np.asarray(x / size * (1 + self._tensors[name]))

    def _gemma_attend(self, x: Floats, layer: str, is_full: bool) -> Floats:
        config = self._config
        n_heads, n_kv_heads, n = config["num_attention_heads"], config["num_key_value_heads"], len(x)
        query, key, value = (
            self._linear(x, f"{layer}{part}_proj").reshape(n, heads, -1).transpose(1, 0, 2)
            for part, heads in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads))
        )
        base, stretch = config["rope_theta"], (config["rope_scaling"] or {"factor": 1.0})["factor"]
        if f"{layer}q_norm.weight" in self._tensors:
            query, key = self._norm(query, f"{layer}q_norm.weight"), self._norm(key, f"{layer}k_norm.weight")
            base, stretch = (base, stretch) if is_full else (config["rope_local_base_freq"], 1.0)
        query, key = (_turned(part, base, stretch) for part in (query, key))
        key, value = (np.repeat(part, n_heads // n_kv_heads, axis=0) for part in (key, value))
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(config["query_pre_attn_scalar"])
        scores = _capped(scores, config["attn_logit_softcapping"])
        age = np.arange(n)[:, None] - np.arange(n)
        scores[:, (age < 0) | (not is_full and age >= config["sliding_window"])] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        return self._linear(mixed.transpose(1, 0, 2).reshape(n, -1), f"{layer}o_proj")


def _capped(values: Floats, cap: float | None) -> Floats:
    return values if cap is None else np.asarray(np.tanh(values / cap) * cap)


def _turned(x: Floats, base: float, stretch: float | Floats) -> Floats:
    """Rotated, with frequencies divided by *stretch*: each number of the first half of a head with the one at the same
    place in the second half.
    """
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / stretch * base ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sine, cosine = np.sin(angles), np.cos(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)
