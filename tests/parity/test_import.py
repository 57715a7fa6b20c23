"""Checkpoints of Llama and its relatives, converted: the same model as before, and the model that the checkpoint defines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.tokenizer.tokenizer import Tokenizer
from tests.hf import (
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    Definition,
    GemmaDefinition,
    bfloat16,
    gemma_tensors,
    hf_config,
    hf_tensors,
    sentencepiece_file,
    write_checkpoint,
)
from tests.models.table import ROWS
from tests.oracle import Oracle
from tests.parity.test_llama import TOLERANCE, tokens
from tests.puna_engine import PunaEngine
from tests.tiny import spm_vocabulary, write_gemma3, write_llama

LENGTH = 60


def logits(engine: type[PunaEngine] | type[Oracle], path: Path) -> npt.NDArray[np.float32]:
    with engine(path, n_ctx=128) as opened:
        return opened.decode(tokens(LENGTH, 1, 300), range(LENGTH), [0] * LENGTH, range(LENGTH)).copy()


def converted(folder: Path) -> Path:
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return folder / "out.gguf"


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"biases": True}, {"n_kv_heads": 4}], ids=str)
def test_there_and_back_is_the_same_file(options: dict[str, Any], n_shards: int, tmp_path: Path) -> None:
    original = write_llama(tmp_path / "m.gguf", seed=7, dtype="f16", **options)
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(original), hf_config(original), n_shards=n_shards)
    back = converted(folder)
    with GGUFFile.open(original) as first, GGUFFile.open(back) as second:
        assert set(first.tensors) == set(second.tensors)
        for name, info in first.tensors.items():
            assert (info.shape, info.type) == (second.tensors[name].shape, second.tensors[name].type)
            assert first.tensor_data(name) == second.tensor_data(name), name
        missing = {key for key in first.metadata if key not in second.metadata} - {"general.name", "tokenizer.ggml.eot_token_id"}
        assert not missing
        for key in set(first.metadata) & set(second.metadata):
            assert first.metadata[key] == second.metadata[key], key
    assert (logits(PunaEngine, original) == logits(PunaEngine, back)).all()


def test_the_tokenizer_is_the_same(tmp_path: Path) -> None:
    original = write_llama(tmp_path / "m.gguf", seed=7, dtype="f16")
    back = converted(write_checkpoint(tmp_path / "hf", hf_tensors(original), hf_config(original)))
    first, second = Tokenizer(original), Tokenizer(back)
    for text in ("The quick brown fox, 12345 times!", "<|im_start|>user\nhello<|im_end|>", "Größe\r\n\t  naïve 🦊"):
        assert first.encode(text) == second.encode(text)
        assert second.decode(second.encode(text)[1:]) == text
    assert first.end_tokens == second.end_tokens
    first.close()
    second.close()


def random_heads(tensors: dict[str, npt.NDArray[Any]], config: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Norms of queries and keys for every layer."""
    random = np.random.default_rng(5)
    width = config["hidden_size"] // config["num_attention_heads"]
    for i in range(config["num_hidden_layers"]):
        for part in ("q_norm", "k_norm"):
            tensors[f"model.layers.{i}.self_attn.{part}.weight"] = (1 + 0.3 * random.standard_normal(width)).astype(np.float32)
    return tensors


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_result_computes_what_the_checkpoint_defines(architecture: str, stored: str, tmp_path: Path) -> None:
    is_qwen2, is_qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    source = write_llama(tmp_path / "m.gguf", seed=7, biases=is_qwen2, tied=is_qwen3)
    config = hf_config(source, architecture, head_dim=64)
    tensors = hf_tensors(source)
    if is_qwen2:  # the output has none there
        tensors = {name: values for name, values in tensors.items() if not name.endswith("o_proj.bias")}
    if is_qwen3:
        tensors = random_heads(tensors, config)
    if stored == "f16":
        tensors = {name: values.astype(np.float16) for name, values in tensors.items()}
    exact = tensors
    if stored == "bf16":
        tensors = {name: bfloat16(values) for name, values in tensors.items()}
        exact = {name: (values.astype(np.uint32) << 16).view(np.float32) for name, values in tensors.items()}
    pattern = QWEN2_PATTERN if "Qwen" in architecture else LLAMA3_PATTERN
    folder = write_checkpoint(tmp_path / "hf", tensors, config, pattern=pattern)
    expected = Definition(exact, config).logits(tokens(LENGTH, 1, 300))
    found = logits(Oracle, converted(folder))
    assert ((found - expected) ** 2).sum() <= TOLERANCE * (expected**2).sum()
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.95  # matrices of F32 were rounded to 16 bits
    if architecture == "LlamaForCausalLM":
        ours = logits(PunaEngine, folder / "out.gguf")
        assert ((ours - expected) ** 2).sum() <= TOLERANCE * (expected**2).sum()


MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 256,
        "head_dim": 96,
        "norm_topk_prob": True,
    },
}


@pytest.fixture(params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """A GGUF file of a mixture of experts, the tensors of its checkpoint, and its configuration."""
    row = ROWS["llama:experts" if request.param == "MixtralForCausalLM" else "qwen3moe"]
    source = row.write(tmp_path / "m.gguf", seed=3, dtype="f16")
    return source, hf_tensors(source), hf_config(source, request.param, **MIXTURES[request.param])


def test_mixtures_of_experts_compute_what_the_checkpoint_defines(
    mixture: tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]], tmp_path: Path
) -> None:
    source, tensors, config = mixture
    path = converted(write_checkpoint(tmp_path / "hf", tensors, config, n_shards=2))
    with GGUFFile.open(source) as first, GGUFFile.open(path) as second:
        assert set(first.tensors) == set(second.tensors)
        for name, info in first.tensors.items():
            assert (info.shape, info.type) == (second.tensors[name].shape, second.tensors[name].type)
            assert first.tensor_data(name) == second.tensor_data(name), name
    expected = Definition(tensors, config).logits(tokens(LENGTH, 1, 300))
    for engine in (PunaEngine, Oracle):
        found = logits(engine, path)
        assert ((found - expected) ** 2).sum() <= TOLERANCE * (expected**2).sum()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_local_experts": None, "num_experts": None}, "num_(local_)?experts is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, not from 1 to 8"),
        ({"norm_topk_prob": False}, "whose weights are normalised"),
        ({"mlp_only_layers": [0]}, "experts in every layer"),
        ({"moe_intermediate_size": 17}, r"has the shape .*, the configuration calls for \[17, 256\]"),
        ({"num_local_experts": 9, "num_experts": 9}, r"(gate|experts\.8\.\w+)\.weight"),
    ],
)
def test_a_mixture_of_another_build_is_refused(
    changes: dict[str, Any],
    says: str,
    mixture: tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]],
    tmp_path: Path,
) -> None:
    _, tensors, config = mixture
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(write_checkpoint(tmp_path / "hf", tensors, config | changes))


def llama3_factors(config: dict[str, Any], head_dim: int) -> npt.NDArray[np.float64]:
    """One frequency after the other, as Llama 3.1's authors define it."""
    scaling = config["rope_scaling"]
    long = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    short = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / head_dim)
        if wavelength < short:
            found.append(1.0)
        elif wavelength > long:
            found.append(scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(found)


def test_llama_3_stretches_frequencies(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf", seed=7)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = hf_config(source, rope_scaling=scaling)
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(source), config)
    path = converted(folder)
    factors = llama3_factors(config, 64)
    assert (factors == 1).any()
    assert (factors == 8).any()
    assert ((factors > 1) & (factors < 8)).any()
    with GGUFFile.open(path) as file:
        stored = np.frombuffer(file.tensor_data("rope_freqs.weight"), np.float32)
    np.testing.assert_allclose(stored, factors, rtol=1e-6)
    expected = Definition(hf_tensors(source), config).logits(tokens(LENGTH, 1, 300), factors)
    for engine in (PunaEngine, Oracle):
        found = logits(engine, path)
        assert ((found - expected) ** 2).sum() <= TOLERANCE * (expected**2).sum()


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ({"type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 30},
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 512,
                "scaling.yarn_beta_fast": 30.0,
            },
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, {}),
    ],
)
def test_other_stretches_become_metadata(scaling: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf")
    folder = write_checkpoint(tmp_path / "hf", hf_tensors(source), hf_config(source, rope_scaling=scaling))
    with GGUFFile.open(converted(folder)) as file:
        found = {key.removeprefix("llama.rope."): value for key, value in file.metadata.items() if ".rope.scaling." in key}
    assert found == keys


GEMMAS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # architecture, what the file has, what the configuration says
    "gemma2": ("Gemma2ForCausalLM", {"n_layers": 4}, {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3ForCausalLM", {"n_layers": 7}, {}),
    "gemma3-stretched": ("Gemma3ForCausalLM", {"n_layers": 7}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
}


@pytest.fixture(params=GEMMAS)
def gemma(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """A checkpoint's folder, its tensors and its configuration."""
    architecture, options, stated = GEMMAS[request.param]
    source = write_gemma3(tmp_path / "m.gguf", dtype="f16", architecture=request.param.partition("-")[0], window=32, **options)
    config = hf_config(source, architecture) | {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        **stated,
    }
    tensors = gemma_tensors(source)
    folder = write_checkpoint(tmp_path / "hf", tensors, config)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(spm_vocabulary()))
    return folder, tensors, config


def test_gemmas_compute_what_the_checkpoint_defines(
    gemma: tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]],
) -> None:
    """The text is longer than the window."""
    folder, tensors, config = gemma
    period = 2 if "Gemma2" in config["architectures"][0] else 6
    expected = GemmaDefinition(tensors, config | {"period": period}).logits(tokens(LENGTH, 1, 300))
    path = converted(folder)
    for engine in (PunaEngine, Oracle):
        found = logits(engine, path)
        assert ((found - expected) ** 2).sum() <= TOLERANCE * (expected**2).sum()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query_pre_attn_scalar": 256}, r"query_pre_attn_scalar is 256\.0; a gemma. can only be converted with 64"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types is"),
        ({"hidden_activation": "silu"}, "hidden_activation is silu"),
        ({"rope_local_base_freq": 5e3}, "rope_local_base_freq is 5000"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "a rotation of type 'yarn'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
    ],
)
def test_a_gemma_of_another_build_is_refused(
    changes: dict[str, Any],
    says: str,
    gemma: tuple[Path, dict[str, npt.NDArray[Any]], dict[str, Any]],
) -> None:
    folder, _, config = gemma
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(folder)
