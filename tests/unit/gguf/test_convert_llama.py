"""Checkpoints of decoders that lie or are incomplete, and the SentencePiece file that some of them bring."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.errors import FileFormatError, PunaError, UnsupportedModel
from puna.gguf.convert import sentencepiece
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.tokenizer.tokenizer import Tokenizer
from tests.hf import hf_config, hf_tensors, sentencepiece_file, tokenizer_json, write_checkpoint
from tests.tiny import Vocabulary, bpe_vocabulary, spm_vocabulary, write_llama

QUERY = "model.layers.0.self_attn.q_proj.weight"
SMALL: dict[str, Any] = {"n_layers": 1, "n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "n_ff": 64, "dtype": "f16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source") / "m.gguf", **SMALL)


def converted(
    folder: Path,
    source: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, npt.NDArray[Any] | None] | None = None,
    texts: dict[str, str] | None = None,
) -> Path:
    """The checkpoint of *source* with changes, converted; a tensor that is None is left out."""
    changed = {name: values for name, values in (hf_tensors(source) | (tensors or {})).items() if values is not None}
    write_checkpoint(folder, changed, hf_config(source) | (config or {}))
    for name, text in (texts or {}).items():
        (folder / name).write_text(text)
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return folder / "out.gguf"


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"architectures": ["T5Model"]}, UnsupportedModel, 'unsupported architecture "T5Model"; supported: .*LlamaForCausalLM'),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantized already"),
        ({"hidden_size": "big"}, FileFormatError, "config.json: hidden_size is big, not a whole number"),
        ({"hidden_size": -1}, FileFormatError, "hidden_size is -1"),
        ({"num_hidden_layers": 10**9}, FileFormatError, "num_hidden_layers is 1000000000, not from 1 to"),
        ({"num_hidden_layers": 2}, FileFormatError, "no tensor model.layers.1.input_layernorm.weight in model.safetensors"),
        ({"num_attention_heads": 0}, FileFormatError, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, FileFormatError, "cannot share 3"),
        ({"intermediate_size": 65}, FileFormatError, r"gate_proj.weight has the shape \[64, 32\], .* calls for \[65, 32\]"),
        ({"head_dim": 8}, FileFormatError, r"q_proj.weight has the shape \[32, 32\], .* calls for \[16, 32\]"),
        ({"rms_norm_eps": 0.0}, FileFormatError, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act is gelu; a llama can only be converted with silu"),
        ({"rope_theta": -1.0}, FileFormatError, "rope_theta is -1"),
        ({"rope_theta": 1e200}, FileFormatError, r"rope_theta is 1e\+200, not a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, FileFormatError, "config.json: "),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedModel, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, FileFormatError, "factor is x, not a number"),
        ({"rope_scaling": {"rope_type": "linear"}}, FileFormatError, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, FileFormatError, "low_freq_factor is missing"),
        ({"tie_word_embeddings": "yes"}, FileFormatError, "tie_word_embeddings is yes, neither true nor false"),
    ],
)
def test_a_configuration_that_does_not_fit(
    config: dict[str, Any], error: type[Exception], says: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        converted(tmp_path, source, config)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({QUERY: None}, f"no tensor {QUERY} in model.safetensors"),
        ({"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({"model.embed_tokens.weight": None}, "no tensor model.embed_tokens.weight"),
        ({"model.embed_tokens.weight": np.zeros((1 << 24, 0), np.float16)}, r"embed_tokens.weight has the shape \[16777216, 0\]"),
        ({"model.embed_tokens.weight": np.zeros(32, np.float16)}, r"has the shape \[32\]"),
        ({"model.embed_tokens.weight": np.zeros((9, 32), np.float16)}, "tokenizer.json: token .* the model has 9 embeddings"),
        ({QUERY: np.zeros((32, 32), np.int64)}, f"model.safetensors: tensor {QUERY} is of type I64, not of floating point"),
        ({QUERY: np.zeros((32, 32, 1), np.float16)}, r"has the shape \[32, 32, 1\]"),
        ({QUERY: np.full((32, 32), 1e6, np.float32)}, f"tensor {QUERY} has values that a 16-bit number cannot hold"),
        ({"model.layers.0.mlp.experts.0.w1.weight": np.zeros((2, 2), np.float16)}, "experts.0.w1.weight has no place in a llama"),
        ({"model.layers.1.input_layernorm.weight": np.zeros(32, np.float16)}, "has no place in a llama of 1 layers"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, npt.NDArray[Any] | None], says: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(tmp_path, source, tensors=tensors)


def test_what_old_checkpoints_carry_along_is_left_out(source: Path, tmp_path: Path) -> None:
    extra: dict[str, Any] = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    with GGUFFile.open(converted(tmp_path, source, tensors=extra)) as file:
        assert len(file.tensors) == 12


def tokenizer(**changes: Any) -> str:
    return json.dumps(tokenizer_json(bpe_vocabulary()) | changes)


def bpe(**changes: Any) -> str:
    return tokenizer(model=tokenizer_json(bpe_vocabulary())["model"] | changes)


@pytest.mark.parametrize(
    ("texts", "error", "says"),
    [
        ({"tokenizer.json": "["}, FileFormatError, "tokenizer.json: "),
        ({"tokenizer.json": "[" * 100_000}, FileFormatError, "tokenizer.json: "),
        ({"tokenizer.json": bpe(type="Unigram")}, UnsupportedModel, "'Unigram' cannot be converted, only BPE"),
        ({"tokenizer.json": bpe(byte_fallback=True)}, UnsupportedModel, "this pre_tokenizer is not known"),
        ({"tokenizer.json": bpe(merges=["a b c"])}, FileFormatError, "a merge that is no pair"),
        ({"tokenizer.json": bpe(merges=[["a"]])}, FileFormatError, "a merge that is no pair"),
        ({"tokenizer.json": bpe(vocab={"a": 10**9})}, FileFormatError, "number 1000000000, the model has"),
        ({"tokenizer.json": bpe(vocab={"a": -1})}, FileFormatError, "number -1"),
        ({"tokenizer.json": bpe(vocab={"a": 1, "b": 1})}, FileFormatError, "b'a' and b'b' have the same number 1"),
        ({"tokenizer.json": tokenizer(added_tokens=[{"id": 300, "content": "!"}])}, FileFormatError, "the same number|twice"),
        ({"tokenizer.json": tokenizer(pre_tokenizer={"type": "Whitespace"})}, UnsupportedModel, "not known: .*Whitespace"),
        ({"tokenizer.json": tokenizer(pre_tokenizer=None)}, UnsupportedModel, "pre_tokenizer is not known: null"),
        ({"tokenizer_config.json": '{"bos_token": 3}'}, FileFormatError, r"tokenizer_config.json: .*\$.bos_token"),
        ({"tokenizer.model": "no protocol buffer"}, FileFormatError, "tokenizer.model: no SentencePiece model"),
    ],
)
def test_a_tokenizer_that_does_not_fit(
    texts: dict[str, str], error: type[Exception], says: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        converted(tmp_path, source, texts=texts)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "add_prefix_space": False},
                ],
            },
            "smollm",
        ),
    ],
)
def test_ways_of_cutting_text_have_names(pre_tokenizer: dict[str, Any], name: str, source: Path, tmp_path: Path) -> None:
    with GGUFFile.open(converted(tmp_path, source, texts={"tokenizer.json": tokenizer(pre_tokenizer=pre_tokenizer)})) as file:
        assert file.metadata["tokenizer.ggml.pre"] == name


def test_rows_without_a_token_get_one_that_is_never_used(source: Path, tmp_path: Path) -> None:
    tensors = hf_tensors(source)
    n_tokens = len(bpe_vocabulary().tokens)
    larger: dict[str, Any] = {
        name: np.concatenate([tensors[name], np.zeros((5, 32), np.float16)])
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    path = converted(tmp_path, source, tensors=larger)
    with GGUFFile.open(path) as file:
        assert list(file.metadata["tokenizer.ggml.tokens"])[-1] == f"[PAD{n_tokens + 4}]"
        assert list(file.metadata["tokenizer.ggml.token_type"])[-5:] == [5] * 5
    opened = Tokenizer(path)
    assert opened.n_tokens == n_tokens + 5
    opened.close()


@pytest.mark.parametrize("adds_space_prefix", [True, False])
def test_a_sentencepiece_file_gives_the_same_tokens(tmp_path: Path, adds_space_prefix: bool) -> None:
    original = write_llama(tmp_path / "m.gguf", vocab="spm", **SMALL)
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(original), hf_config(original))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}')
    content = sentencepiece_file(spm_vocabulary(), adds_space_prefix=adds_space_prefix)
    (folder / "tokenizer.model").write_bytes(content)
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    with GGUFFile.open(folder / "out.gguf") as file, GGUFFile.open(original) as expected:
        for key in ("tokens", "scores", "token_type", "bos_token_id", "eos_token_id", "add_bos_token", "model", "pre"):
            assert file.metadata[f"tokenizer.ggml.{key}"] == expected.metadata[f"tokenizer.ggml.{key}"], key
        assert file.metadata["tokenizer.ggml.add_space_prefix"] is adds_space_prefix
    first, second = Tokenizer(original), Tokenizer(folder / "out.gguf")
    text = "the quick brown fox, Größe 🦊"
    assert (first.encode(text) == second.encode(text)) is adds_space_prefix
    assert len(second.encode(text)) > 5
    first.close()
    second.close()


def test_added_tokens_follow_the_pieces(tmp_path: Path) -> None:
    original = write_llama(tmp_path / "m.gguf", vocab="spm", **SMALL)
    whole = spm_vocabulary()
    pieces = Vocabulary("llama", "default", whole.tokens[:-2], whole.kinds[:-2], whole.scores[:-2])
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(original), hf_config(original, bos_token_id=1, eos_token_id=[2, 1]))
    n = len(whole.tokens)
    added = [{"id": n - 3, "content": whole.tokens[-3].decode(), "special": True}]
    added += [{"id": n - 2, "content": "<|im_start|>", "special": True}, {"id": n - 1, "content": "<|im_end|>", "special": False}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}, "added_tokens": added}))
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(pieces))
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    with GGUFFile.open(folder / "out.gguf") as file:
        assert list(file.metadata["tokenizer.ggml.tokens"])[-2:] == ["<|im_start|>", "<|im_end|>"]
        assert list(file.metadata["tokenizer.ggml.token_type"])[-3:] == [3, 3, 4]
        assert (file.metadata["tokenizer.ggml.bos_token_id"], file.metadata["tokenizer.ggml.eos_token_id"]) == (1, 2)


def test_a_unigram_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="kind 1"):
        sentencepiece.read(sentencepiece_file(spm_vocabulary(), kind=1), "tokenizer.model")


# Any JSON in place of any value of a checkpoint's texts.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("llama3"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value has values within it; of long lists and objects the first few."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [path, *(place for key, inner in items[:12] for place in places(inner, (*path, key)))]


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything that is read, and a stretch."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = hf_config(source, rope_scaling=scaling | {"original_max_position_embeddings": 256})
    return write_checkpoint(tmp_path_factory.mktemp("whole"), hf_tensors(source), config)


@given(st.data())
@settings(max_examples=100)
def test_any_json_is_refused_or_converted(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"]))
    content = json.loads((whole / name).read_text())
    *path, last = data.draw(st.sampled_from([place for place in places(content) if place]))
    inner = content
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(VALUES)
    folder = tmp_path_factory.mktemp("changed")
    (folder / name).write_text(json.dumps(content))
    checkpoint = Checkpoint({**Checkpoint.of_folder(whole).files, name: folder / name})
    with contextlib.suppress(PunaError):
        convert(checkpoint, folder / "out.gguf")
        GGUFFile.open(folder / "out.gguf").close()
    shutil.rmtree(folder)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(content: bytes) -> None:
    with contextlib.suppress(FileFormatError, UnsupportedModel):
        sentencepiece.read(content, "a")


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_a_damaged_sentencepiece_file_is_refused_or_read(at: int, bytes_instead: bytes) -> None:
    content = sentencepiece_file(spm_vocabulary())
    at = at * 7 % len(content)
    with contextlib.suppress(FileFormatError, UnsupportedModel):
        sentencepiece.read(content[:at] + bytes_instead + content[at + len(bytes_instead) :], "a")
