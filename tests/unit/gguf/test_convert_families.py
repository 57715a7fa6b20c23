"""Of every family: nothing of a checkpoint may be missing, nor left over, and what GGUF takes for granted must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import FAMILIES, convert
from puna.gguf.reader import GGUFFile
from tests.checkpoints.cases import CASES
from tests.checkpoints.folder import tensors, write_case, write_tensors
from tests.hf import write_safetensors
from tests.thorough import first

Tensors = dict[str, npt.NDArray[Any]]


def converted(folder: Path) -> Path:
    convert(Checkpoint.of_folder(folder), folder / "out.gguf", eyes=folder / "eyes.gguf")
    return folder / "out.gguf"


def one_of_each(names: Iterator[str]) -> dict[str, str]:
    """A tensor of each kind: layers and experts are alike."""
    return {re.sub(r"\d+", "N", name): name for name in names}


@pytest.mark.parametrize("name", first(24, CASES))
def test_every_tensor_is_needed(name: str, tmp_path: Path) -> None:
    write_case(tmp_path, name)
    source = tensors(name)
    converted(tmp_path)
    for gone in one_of_each(iter(source)).values():
        if gone.endswith("activation_scale"):
            continue  # how a device may round; no weight
        write_tensors(tmp_path, {key: values for key, values in source.items() if key != gone})
        with pytest.raises((FileFormatError, UnsupportedModel), match=re.escape(gone.removeprefix("language_model."))):
            converted(tmp_path)


@pytest.mark.parametrize("name", first(8, CASES))
def test_every_tensor_has_its_shape(name: str, tmp_path: Path) -> None:
    write_case(tmp_path, name)
    source = tensors(name)
    for grown in one_of_each(iter(source)).values():
        if grown.endswith("activation_scale"):
            continue
        values = source[grown]
        larger = np.concatenate([values, values], -1) if values.ndim else np.stack([values, values])
        write_tensors(tmp_path, {**source, grown: larger})
        # A table may be longer or shorter than others say; then one of those is named.
        with pytest.raises((FileFormatError, UnsupportedModel), match="shape"):
            converted(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_no_tensor_is_left_over(name: str, tmp_path: Path) -> None:
    write_case(tmp_path, name)
    source = tensors(name)
    inner = next(key for key in source if re.search(r"layers\.0\.", key))
    for more in (re.sub(r"0\..*", "0.self_attn.gate_of_a_new_kind.weight", inner), re.sub(r"\.0\.", ".77.", inner), "new.weight"):
        write_tensors(tmp_path, {**source, more: np.zeros((2, 2), np.float16)})
        with pytest.raises(UnsupportedModel, match=f"{re.escape(more)} has no place in a"):
            converted(tmp_path)


TURNED: dict[str, tuple[dict[str, Any], str]] = {  # fields, and what is said of them
    "llama": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "mixtral": ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, not from 1 to 8"),
    "mistral3-yarn": ({"sliding_window": 128}, "sliding_window"),
    "phi3": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotation of type 'linear'"),
    "gemma": ({"hidden_activation": "silu"}, "hidden_activation"),
    "gemma2": ({"attn_logit_softcapping": None}, "attn_logit_softcapping is missing"),
    "gemma3": ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    "gemma3n": ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "gemma4": ({"layer_types": ["chunked_attention"] * 12}, "layer_types"),
    "qwen2": ({"use_sliding_window": True}, "use_sliding_window"),
    "qwen2moe": ({"norm_topk_prob": True}, "weights are not normalised"),
    "qwen3moe": ({"decoder_sparse_step": 2}, "experts in every layer"),
    "qwen3next": ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "qwen35": ({"linear_value_head_dim": 8}, "equally wide keys and values"),
    "gpt-oss": ({"swiglu_limit": 5.0}, "swiglu_limit"),
    "olmo2": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rotation of type 'llama3'"),
    "olmo3": ({"layer_types": ["full_attention"] * 4}, "not a list of 5"),
    "granite": ({"position_embedding_type": "alibi"}, "position_embedding_type"),
    "granitemoe": ({"position_embedding_type": "nope"}, "position_embedding_type"),
    "granite-hybrid": ({"layer_types": ["mamba", "attention", "rwkv"]}, "layer_types"),
    "command-r": ({"use_parallel_block": False}, "use_parallel_block"),
    "cohere2": ({"use_qk_norm": True}, "use_qk_norm"),
    "llama4": ({"no_rope_layers": [1, 1, 1, 1, 1]}, "no_rope_layers"),
    "glm4": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotation of type 'yarn'"),
    "glm4moe": ({"first_k_dense_replace": 4}, "first_k_dense_replace is 4, not from 0 to 3"),
    "glm4moelite": ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
    "lfm2": ({"conv_bias": True}, "conv_bias"),
    "lfm2moe": ({"norm_topk_prob": False}, "norm_topk_prob"),
    "deepseek2": ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "topk_method"),
    "deepseek3": ({"scoring_func": "softmax"}, "scoring_func"),
    "deepseek3-yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}},
        "YaRN with a magnitude",
    ),
    "starcoder2": ({"norm_type": "rms_norm"}, "norm_type"),
    "falcon-h1": ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    "nemotron-h": ({"hybrid_override_pattern": "M-*X-M"}, "hybrid_override_pattern"),
    "nemotron-h-experts": ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    "mamba2": ({"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
    "nomic-bert": ({"activation_function": "gelu"}, "activation_function"),
    "modern-bert": ({"layer_types": ["full_attention"] * 5}, "layer_types"),
    "embedding-gemma": ({"use_bidirectional_attention": False}, "use_bidirectional_attention"),
    "qwen3vlmoe": (
        {"text_config": CASES["qwen3vlmoe"].config["text_config"] | {"mlp_only_layers": [1]}},
        "experts in every layer",
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_what_gguf_takes_for_granted_must_hold(name: str, tmp_path: Path) -> None:
    changes, says = TURNED[name]
    write_case(tmp_path, name, **changes)
    with pytest.raises((FileFormatError, UnsupportedModel), match=f"config.json: .*{says}"):
        converted(tmp_path)


@pytest.mark.parametrize(
    ("place", "changes", "says"),
    [
        ("2_Dense", {"bias": True}, "without bias and activation"),
        ("3_Dense", {"activation_function": "torch.nn.modules.activation.Tanh"}, "without bias and activation"),
        ("3_Dense", {"in_features": 95}, "in_features is 95, but 2_Dense gives 96"),
    ],
)
def test_other_dense_layers_are_refused(place: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    stated = write_case(tmp_path, "embedding-gemma") / place / "config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | changes))
    with pytest.raises(UnsupportedModel, match=f"{place}/config.json: .*{says}"):
        converted(tmp_path)


def test_every_class_is_tried_or_another_spelling_of_one() -> None:
    """Classes that also see or hear have the same text part below another name."""
    tried = {case.model for case in CASES.values()} | {"BertModel", "BertForMaskedLM"}
    assert {FAMILIES[name] for name in FAMILIES if name not in tried} <= {FAMILIES[name] for name in tried} | {
        "gemma:GEMMA3_SEEING"
    }


def test_the_document_lists_every_class() -> None:
    text = (Path(__file__).parents[3] / "docs" / "folders.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    assert {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])} == set(FAMILIES)
    assert f"{len(FAMILIES)} classes" in (Path(__file__).parents[3] / "README.md").read_text()


SEEING = {  # the class, the case of its text part, where that stands, and where the head does
    "Gemma3ForConditionalGeneration": ("gemma3", "language_model.model.", "", "vision_tower.vision_model.head.probe"),
    "Gemma4ForConditionalGeneration": ("gemma4", "model.language_model.", "", "model.audio_tower.layers.0.norm.weight"),
    "Llama4ForConditionalGeneration": ("llama4", "language_model.model.", "language_model.", "vision_model.class_embedding"),
    "Mistral3ForConditionalGeneration": (
        "mistral3-yarn",
        "language_model.model.",
        "language_model.",
        "language_model.model.rotary_emb.inv_freq",
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen35", "model.language_model.", "", "model.visual.merger.norm.weight"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen35moe", "model.language_model.", "", "mtp.layers.0.input_layernorm.weight"),
}


@pytest.mark.parametrize("model", SEEING)
def test_what_reads_of_a_model_that_sees_is_the_same(model: str, tmp_path: Path) -> None:
    name, root, head, other = SEEING[model]
    plain = converted(write_case(tmp_path / "text", name))
    write_case(tmp_path / "both", name)
    named = {
        root + key.removeprefix("model.") if key.startswith("model.") else head + key: values
        for key, values in tensors(name).items()
    }
    write_safetensors(tmp_path / "both" / "model.safetensors", {**named, other: np.zeros(4, np.float16)})
    inner = {key: value for key, value in CASES[name].config.items() if key not in ("architectures", "tie_word_embeddings")}
    outer = {"architectures": [model], "text_config": inner, "tie_word_embeddings": CASES[name].config["tie_word_embeddings"]}
    (tmp_path / "both" / "config.json").write_text(json.dumps(outer))
    with GGUFFile.open(plain) as first, GGUFFile.open(converted(tmp_path / "both")) as second:
        assert dict(first.metadata.items()) == dict(second.metadata.items())
        assert {key: first.tensor_data(key) for key in first.tensors} == {key: second.tensor_data(key) for key in second.tensors}


def same(first: Path, second: Path) -> bool:
    """But for what names the class."""
    return first.read_bytes() == second.read_bytes()


def test_experts_in_one_tensor_are_the_same_experts(tmp_path: Path) -> None:
    plain = converted(write_case(tmp_path / "apart", "qwen35moe"))
    write_case(tmp_path / "stacked", "qwen35moe")
    source = tensors("qwen35moe")
    names = [name for name in source if ".experts." in name]
    found = {name: values for name, values in source.items() if name not in names}
    for layer in range(4):
        parts = {
            part: np.stack([source[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        }
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = parts["down"]
    write_safetensors(tmp_path / "stacked" / "model.safetensors", found)
    assert same(plain, converted(tmp_path / "stacked"))


def test_keys_that_a_layer_of_gemma_4_does_not_use_are_left_out(tmp_path: Path) -> None:
    plain = converted(write_case(tmp_path / "a", "gemma4"))
    write_case(tmp_path / "b", "gemma4")
    more = {f"model.layers.11.self_attn.{part}_proj.weight": np.zeros((64, 64), np.float16) for part in "kv"}
    write_safetensors(tmp_path / "b" / "model.safetensors", {**tensors("gemma4"), **more})
    assert same(plain, converted(tmp_path / "b"))


SPELLINGS: dict[str, tuple[dict[str, Any], list[str]]] = {  # other fields for the same, and those that they stand for
    "nomic-bert": (
        {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 96,
            "n_positions": 8192,
            "max_trained_positions": 512,
            "rotary_emb_base": 1000,
            "layer_norm_epsilon": 1e-12,
            "activation_function": "swiglu",
            "rotary_emb_interleaved": False,
            "rotary_scaling_factor": None,
        },
        ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings", "hidden_act"],
    ),
    "llama": ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, ["rope_theta"]),
    "gemma3": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        },
        ["rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"],
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96}, ["full_attn_idxs", "intermediate_size"]),
    "nemotron-h": (
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "attention_head_dim": 16},
        ["hybrid_override_pattern", "head_dim"],
    ),
    "cohere2": ({"layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]}, ["sliding_window_pattern"]),
    "mamba2": ({"time_step_limit": [0.0, float("inf")]}, []),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_is_said_otherwise_means_the_same(name: str, tmp_path: Path) -> None:
    fields, gone = SPELLINGS[name]
    changes: dict[str, Any] = {**dict.fromkeys(gone), **fields}
    plain = converted(write_case(tmp_path / "a", name))
    assert same(plain, converted(write_case(tmp_path / "b", name, **changes)))


def test_a_template_beside_a_processor_is_read(tmp_path: Path) -> None:
    write_case(tmp_path, "gemma3-eyes")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    with GGUFFile.open(converted(tmp_path)) as file:
        assert file.metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"


def test_how_sparse_layers_are_becomes_standard_deviations(tmp_path: Path) -> None:
    write_case(tmp_path, "gemma3n", activation_sparsity_pattern=None)
    with GGUFFile.open(converted(tmp_path)) as file:
        found = file.metadata.numbers("activation_sparsity_scale")
    np.testing.assert_allclose(found, [1.6448533535003662] * 10 + [0.0] * 12, rtol=1e-6)


def test_keys_that_a_layer_of_gemma_3n_does_not_use_come_along(tmp_path: Path) -> None:
    """Libllama wants them."""
    write_case(tmp_path, "gemma3n")
    source = tensors("gemma3n")
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    more = {f"model.layers.{i}.self_attn.{part}": source[f"model.layers.0.self_attn.{part}"] for i in (20, 21) for part in parts}
    write_tensors(tmp_path, {**source, **more})
    with GGUFFile.open(converted(tmp_path)) as file:
        assert {f"blk.{i}.{name}.weight" for i in (20, 21) for name in ("attn_k", "attn_v", "attn_k_norm")} <= set(file.tensors)
