"""Configurations of tiny checkpoints, with the fields that published ones of the family have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

N_TOKENS = 420  # rows of the table; the vocabularies of tests.tiny have a few less
TOKENS = [(37 * i + i * i // 3) % 290 + 5 for i in range(40)]
ROWS = [0, 1, 9, 20, 38, 39]  # of the logits that are compared,
STRIDE = 4  # and every so many numbers of each

Stored = Literal["F32", "F16", "BF16"]


@dataclass(frozen=True)
class Case:
    model: str  # the class
    config: dict[str, Any]
    stored: Stored = "F16"
    less_one: bool = False  # norms
    short_queries: bool = False  # whose products with keys nothing divides
    words: Literal["bpe", "spm", "wordpiece"] = "bpe"
    tolerance: float = 2e-3  # of the norm of the difference, over that of the logits
    scales: Literal["", "block", "row", "whole"] = ""  # of matrices in FP8: what shares one
    blocks: bool = False  # experts in MXFP4
    pixels: tuple[int, int] = (0, 0)  # width and height of a picture that needs no resizing, of models that see
    more: tuple[str, ...] = ()  # special tokens beside those of the vocabulary
    dense: int = 0  # width between two dense layers, in folders of their own
    turned: tuple[str, ...] = ()  # ends of names of tensors that are published the other way round than the library saves them
    oracle: bool = True  # whether libllama knows it by such a file


def case(model: str, kind: str, options: dict[str, Any], **others: Any) -> Case:
    base = {
        "architectures": [model],
        "model_type": kind,
        "vocab_size": N_TOKENS,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return Case(model, {k: v for k, v in {**base, **options}.items() if v is not NONE}, **others)


ROUNDED = 5e-3  # where products are of numbers in BF16: what goes into them has eight bits too
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
NONE = object()  # a field that the family does not have
SILU = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
DELTA_NET = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
}
GEMMA = {
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
TURNS = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}


def yarn(factor: float = 8.0, original: int = 64, **others: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **others}


CASES: dict[str, Case] = {
    "llama": case("LlamaForCausalLM", "llama", SILU),
    "llama-biases-tied": case(
        "LlamaForCausalLM",
        "llama",
        SILU | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        stored="BF16",
        tolerance=ROUNDED,
    ),
    "llama-yarn-magnitude": case("LlamaForCausalLM", "llama", SILU | {"rope_scaling": yarn(attention_factor=1.3)}),
    "mistral": case("MistralForCausalLM", "mistral", SILU | {"head_dim": 32, "sliding_window": None}),
    "mixtral": case(
        "MixtralForCausalLM", "mixtral", SILU | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "mistral3-yarn": case(
        "Ministral3ForCausalLM",
        "ministral3",
        SILU
        | {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": yarn(
                16.0, 16, rope_theta=1e6, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1
            ),
        },
    ),
    "phi3": case("Phi3ForCausalLM", "phi3", SILU | {"sliding_window": None, "original_max_position_embeddings": 512}),
    "phi3-long": case(
        "Phi3ForCausalLM",
        "phi3",
        SILU
        | {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "hidden_size": 128,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [1.0 + 0.5 * i for i in range(12)],
            },
        },
    ),
    "gemma": case(
        "GemmaForCausalLM",
        "gemma",
        GEMMA | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0},
        less_one=True,
        words="spm",
    ),
    "gemma2": case(
        "Gemma2ForCausalLM",
        "gemma2",
        GEMMA
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 10000.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        less_one=True,
        words="spm",
    ),
    "gemma3": case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 6,
        },
        less_one=True,
        words="spm",
    ),
    "gemma3n": case(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        GEMMA
        | {
            "num_hidden_layers": 22,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_kv_shared_layers": 2,
            "layer_types": [*(["sliding_attention"] * 4 + ["full_attention"]) * 4, "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": N_TOKENS - 20,
            # Of a narrow MLP GGUF's arithmetic and the authors' find other thresholds: by n - 1 values and by n.
            "activation_sparsity_pattern": [0.0] * 22,
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
        },
        words="spm",
        short_queries=True,
        oracle=False,  # which wants keys also in layers that use others'
        tolerance=4e-3,  # of 22 layers
    ),
    "gemma4": case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        GEMMA
        | {
            "num_hidden_layers": 12,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_kv_shared_layers": 6,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": N_TOKENS,
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
        },
        tolerance=4e-3,  # of twelve layers
        short_queries=True,
        words="spm",
    ),
    "gemma4-experts": case(
        "Gemma4ForCausalLM",
        "gemma4_text",
        GEMMA
        | {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
        },
        short_queries=True,
        words="spm",
    ),
    "qwen2": case(
        "Qwen2ForCausalLM",
        "qwen2",
        SILU | {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 3, "rope_theta": 1e6},
    ),
    "qwen2-yarn": case(
        "Qwen2ForCausalLM",
        "qwen2",
        SILU | {"use_sliding_window": False, "rope_theta": 1e6, "rope_scaling": yarn(type="yarn")},
        stored="BF16",
        tolerance=ROUNDED,
    ),
    "qwen2moe": case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        SILU
        | EXPERTS
        | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": case("Qwen3ForCausalLM", "qwen3", SILU | {"head_dim": 32, "attention_bias": False, "use_sliding_window": False}),
    "qwen3-fp8": case(
        "Qwen3ForCausalLM",
        "qwen3",
        SILU
        | {"head_dim": 32, "quantization_config": {**FP8, "weight_block_size": [48, 32], "modules_to_not_convert": ["lm_head"]}},
        scales="block",
        stored="BF16",
        tolerance=ROUNDED,
    ),
    "mistral3-fp8": case(
        "Ministral3ForCausalLM",
        "ministral3",
        SILU
        | {
            "head_dim": 32,
            "rope_parameters": yarn(16.0, 16, rope_theta=1e6, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
            "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        },
        scales="whole",
    ),
    "llama-fp8": case(
        "LlamaForCausalLM",
        "llama",
        SILU
        | {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
                },
                "ignore": ["lm_head"],
            }
        },
        scales="row",
    ),
    "qwen3moe": case(
        "Qwen3MoeForCausalLM", "qwen3_moe", SILU | EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 1}
    ),
    "qwen3next": case(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        SILU
        | EXPERTS
        | DELTA_NET
        | {"shared_expert_intermediate_size": 64, "norm_topk_prob": True, "partial_rotary_factor": 0.25},
        less_one=True,
    ),
    "qwen35": case(
        "Qwen3_5ForCausalLM", "qwen3_5_text", SILU | DELTA_NET | {"rope_theta": NONE, "rope_parameters": TURNS}, less_one=True
    ),
    "qwen35moe": case(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        SILU | EXPERTS | DELTA_NET | {"rope_theta": NONE, "rope_parameters": TURNS, "shared_expert_intermediate_size": 64},
        less_one=True,
    ),
    "gpt-oss": case(
        "GptOssForCausalLM",
        "gpt_oss",
        SILU
        | {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 8,
            "rope_theta": 150000.0,
            "swiglu_limit": 7.0,
            "rope_scaling": yarn(32.0, 64, beta_fast=32.0, beta_slow=1.0),
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss-mxfp4": case(
        "GptOssForCausalLM",
        "gpt_oss",
        SILU
        | {
            "head_dim": 16,
            "num_local_experts": 8,
            "experts_per_token": 2,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 8,
            "rope_theta": 150000.0,
            "rope_scaling": yarn(32.0, 64, beta_fast=32.0, beta_slow=1.0),
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        },
        stored="BF16",
        blocks=True,
        tolerance=4e-2,  # for such matrices both engines round what they multiply with to eight bits
    ),
    "olmo2": case("Olmo2ForCausalLM", "olmo2", SILU | {"rope_theta": 5e5}),
    "olmo3": case(
        "Olmo3ForCausalLM",
        "olmo3",
        SILU
        | {
            "num_hidden_layers": 5,
            "rope_theta": 5e5,
            "sliding_window": 8,
            "rope_scaling": yarn(8.0, 64, beta_fast=32, beta_slow=1, attention_factor=1.2079441541679836),
        },
    ),
    "granite": case(
        "GraniteForCausalLM",
        "granite",
        SILU
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": case(
        "GraniteMoeForCausalLM",
        "granitemoe",
        SILU
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "granitemoe-shared": case(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        SILU | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48, "residual_multiplier": 0.4},
    ),
    "granite-hybrid": case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        SILU
        | MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "nope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
    "granite-hybrid-dense": case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        SILU
        | MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "command-r": case(
        "CohereForCausalLM",
        "cohere",
        {"hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "rope_theta": 8e6, "use_qk_norm": False},
    ),
    "command-r-norms": case(
        "CohereForCausalLM",
        "cohere",
        {
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "rope_theta": 8e6,
            "use_qk_norm": True,
            "num_hidden_layers": 2,
        },
        oracle=False,  # which has norms where there are 64 layers or more
    ),
    "cohere2": case(
        "Cohere2ForCausalLM",
        "cohere2",
        {
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.25,
            "rope_theta": 50000.0,
            "sliding_window": 8,
            "sliding_window_pattern": 4,
            "num_hidden_layers": 5,
        },
    ),
    "llama4": case(
        "Llama4ForCausalLM",
        "llama4_text",
        SILU
        | {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.5,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4": case("Glm4ForCausalLM", "glm4", SILU | {"head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4moe": case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        SILU
        | {
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4moelite": case(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        SILU
        | LATENT
        | {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "lfm2": case(
        "Lfm2ForCausalLM",
        "lfm2",
        {
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 32,
            "full_attn_idxs": [1],
        },
    ),
    "lfm2moe": case(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        EXPERTS
        | {
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
    ),
    "deepseek2": case(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        SILU
        | LATENT
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek3": case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SILU
        | LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek3-fp8": case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SILU
        | LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "quantization_config": {**FP8, "weight_block_size": [48, 32]},
        },
        scales="block",
    ),
    "deepseek3-yarn": case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SILU
        | LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "rope_scaling": yarn(40.0, 64, type="yarn", beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "starcoder2": case(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "rope_theta": 1e5, "sliding_window": None},
    ),
    "falcon-h1": case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        SILU
        | MAMBA
        | {
            "head_dim": 16,
            "mamba_d_ssm": 128,
            "mamba_n_groups": 2,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "rope_theta": 1e6,
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.4,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1],
            "mlp_multipliers": [0.8, 0.6],
        },
    ),
    "nemotron-h": case(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron-h-experts": case(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "ME*EM",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mamba2": case(
        "Mamba2ForCausalLM",
        "mamba2",
        {
            "num_attention_heads": NONE,
            "num_key_value_heads": NONE,
            "intermediate_size": NONE,
            "max_position_embeddings": NONE,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "silu",
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "nomic-bert": case(
        "NomicBertModel",
        "nomic_bert",
        {
            "num_key_value_heads": NONE,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-12,
            "type_vocab_size": 2,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        },
        words="wordpiece",
    ),
}

CASES["embedding-gemma"] = case(
    "Gemma3TextModel",
    "gemma3_text",
    CASES["gemma3"].config | {"architectures": ["Gemma3TextModel"], "rope_scaling": NONE, "use_bidirectional_attention": True},
    less_one=True,
    words="spm",
    dense=96,
)
CASES["modern-bert"] = case(
    "ModernBertModel",
    "modernbert",
    {
        "num_key_value_heads": NONE,
        "num_hidden_layers": 5,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 16,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
)
ENCODERS = ("nomic-bert", "embedding-gemma", "modern-bert")


def seeing(model: str, kind: str, text: dict[str, Any], vision: dict[str, Any], outer: dict[str, Any], **others: Any) -> Case:
    """A model of two parts, whose configuration is in two parts too."""
    inner = case(model, kind, text).config
    del inner["architectures"]
    ends = {name: inner[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return Case(model, {"architectures": [model], "text_config": inner, "vision_config": vision, **ends, **outer}, **others)


SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}

EYES: dict[str, Case] = {
    "gemma3-eyes": seeing(
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
        },
        SIGLIP,
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "image_token_index": 417,
            "boi_token_index": 417,
            "eoi_token_index": 418,
        },
        less_one=True,
        words="spm",
        pixels=(56, 56),
        more=("<start_of_image>", "<end_of_image>"),
    ),
    "qwen25vl": seeing(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl_text",
        SILU | {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "use_sliding_window": False},
        {
            "model_type": "qwen2_5_vl",
            "depth": 4,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 3,
            "patch_size": 14,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3],
            "window_size": 112,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "silu",
        },
        {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "image_token_id": 381, "vision_start_token_id": 380},
        pixels=(140, 112),
        more=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ),
    "qwen3vl": seeing(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        SILU
        | {
            "head_dim": 16,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        {
            "model_type": "qwen3_vl",
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 3,
            "patch_size": 16,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
        {"model_type": "qwen3_vl", "tie_word_embeddings": False, "image_token_id": 381, "vision_start_token_id": 380},
        pixels=(160, 128),
        more=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ),
    "qwen3vlmoe": seeing(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe_text",
        SILU
        | EXPERTS
        | {
            "moe_intermediate_size": 48,
            "head_dim": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        {
            "model_type": "qwen3_vl_moe",
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 3,
            "patch_size": 16,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
        {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "image_token_id": 381, "vision_start_token_id": 380},
        pixels=(160, 128),
        turned=("experts.gate_up_proj", "experts.down_proj"),
        more=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ),
    "mistral3-eyes": seeing(
        "Mistral3ForConditionalGeneration",
        "mistral",
        SILU | {"head_dim": 32, "sliding_window": None, "rope_theta": 1e6},
        {
            "model_type": "pixtral",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "head_dim": 16,
            "image_size": 280,
            "patch_size": 14,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
        },
        {
            "model_type": "mistral3",
            "spatial_merge_size": 2,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "image_token_index": 380,
            "tie_word_embeddings": False,
        },
        pixels=(112, 84),
        more=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
}
CASES |= EYES
