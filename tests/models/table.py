"""Every architecture of Puna's engine, with what is written about it and the tiny files it is tested with.

tools/models_table.py makes the table of docs/models.md of it.
"""

from __future__ import annotations

from tests.models import (
    cohere,
    deepseek2,
    encoders,
    gemma,
    gemma3n,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    mamba,
    mistral3,
    mllama,
    olmo2,
    phi3,
    qwen,
    qwen3next,
    starcoder2,
)
from tests.models.row import Row

# By the name that files state, or a variety of it after a colon; run by the contract of tests/parity/test_architectures.py.
ROWS: dict[str, Row] = {
    "cohere2": cohere.COHERE2,
    "command-r": cohere.COMMAND_R,
    "deepseek2": deepseek2.DEEPSEEK2,
    "falcon-h1": mamba.FALCON_H1,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma3:ancestor": gemma.GEMMA3_OF_ANCESTOR,
    "gemma3n": gemma3n.GEMMA3N,
    "gemma4": gemma4.GEMMA4,
    "glm4": glm4.GLM4,
    "glm4moe": glm4.GLM4MOE,
    "glm4moelite": deepseek2.LITE,
    "gpt-oss": gpt_oss.GPT_OSS,
    "granitehybrid": mamba.GRANITE_HYBRID,
    "lfm2": lfm2.LFM2,
    "lfm2:dialect": lfm2.LFM2_DIALECT,
    "lfm2moe": lfm2.LFM2_MOE,
    "granite": granite.GRANITE,
    "granitemoe": granite.GRANITEMOE,
    "gptoss": gpt_oss.GPTOSS,
    "llama": llama.LLAMA,
    "llama4": llama4.LLAMA4,
    "llama:experts": llama.MIXTRAL,
    "llama:multipliers": granite.LLAMA,
    "mamba2": mamba.MAMBA2,
    "mistral3": mistral3.MISTRAL3,
    "mistral3:ancestor": mistral3.ANCESTOR,
    "mllama": mllama.MLLAMA,
    "nemotron_h": mamba.NEMOTRON_H,
    "nemotron_h_moe": mamba.NEMOTRON_H_MOE,
    "olmo2": olmo2.OLMO2,
    "olmo2:windows": olmo2.OLMO3,
    "olmo3": olmo2.OLMO3_DIALECT,
    "phi3": phi3.PHI3,
    "qwen2": qwen.QWEN2,
    "qwen25vl": qwen.QWEN25VL,
    "qwen2moe": qwen.QWEN2MOE,
    "qwen2vl": qwen.QWEN2VL,
    "qwen3": qwen.QWEN3,
    "qwen3moe": qwen.QWEN3MOE,
    "qwen35": qwen3next.QWEN35,
    "qwen35:dialect": qwen3next.QWEN35_DIALECT,
    "qwen35moe": qwen3next.QWEN35_MOE,
    "qwen35moe:dialect": qwen3next.QWEN35_INTERLEAVED,
    "qwen3next": qwen3next.QWEN3NEXT,
    "qwen3vl": qwen.QWEN3VL,
    "qwen3vl:dialect": qwen.QWEN3VL_DIALECT,
    "qwen3vlmoe": qwen.QWEN3VLMOE,
    "starcoder2": starcoder2.STARCODER2,
}

# Those that embed, run by the contract of tests/parity/test_embeddings.py: models in which every token sees the whole text …
ENCODERS: dict[str, Row] = {
    "bert": encoders.BERT,
    "gemma-embedding": gemma.EMBEDDING_GEMMA,
    "gemma3:embedding": gemma.EMBEDDING_GEMMA_OF_ANCESTOR,
    "modern-bert": encoders.MODERN_BERT,
    "nomic-bert": encoders.NOMIC_BERT,
}

# … and varieties of generating models.
EMBEDDERS: dict[str, Row] = {
    "llama:embedding": llama.EMBEDDER,
    "qwen3:embedding": qwen.QWEN3_EMBEDDER,
}
