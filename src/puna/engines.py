"""Which of the two engines runs a model file, and why: Puna's own, or libllama behind the same runner.

Plain data and one rule. The server reads them too, to say what a model gets without loading the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["puna", "compat"]

# What Puna's engine runs, by the name that files state in general.architecture, and the class that does it.
ARCHITECTURES: dict[str, str] = {
    "bert": "puna.model.arch.bert:Bert",
    "cohere2": "puna.model.arch.cohere:Cohere2",
    "command-r": "puna.model.arch.cohere:CommandR",
    "deepseek2": "puna.model.arch.deepseek2:DeepSeek2",
    "falcon-h1": "puna.model.arch.falcon_h1:FalconH1",
    "gemma": "puna.model.arch.gemma:Gemma",
    "gemma2": "puna.model.arch.gemma2:Gemma2",
    "gemma3": "puna.model.arch.gemma3:open_gemma3",
    "gemma-embedding": "puna.model.arch.gemma3:EmbeddingGemma",
    "gemma3n": "puna.model.arch.gemma3n:Gemma3n",
    "gemma4": "puna.model.arch.gemma4:Gemma4",
    "glm4": "puna.model.arch.glm4:Glm4",
    "glm4moe": "puna.model.arch.glm4moe:Glm4MoE",
    "glm4moelite": "puna.model.arch.deepseek2:Glm4MoELite",
    "gpt-oss": "puna.model.arch.gpt_oss:GptOss",
    "gptoss": "puna.model.arch.gpt_oss:GptOss",
    "granitehybrid": "puna.model.arch.granite_hybrid:GraniteHybrid",
    "lfm2": "puna.model.arch.lfm2:Lfm2",
    "lfm2moe": "puna.model.arch.lfm2:Lfm2",
    "granite": "puna.model.arch.granite:Granite",
    "granitemoe": "puna.model.arch.granite:Granite",
    "llama": "puna.model.arch.llama:Llama",
    "llama4": "puna.model.arch.llama4:Llama4",
    "mamba2": "puna.model.arch.mamba2:Mamba2Model",
    "mistral3": "puna.model.arch.mistral3:Mistral3",
    "modern-bert": "puna.model.arch.modern_bert:ModernBert",
    "mllama": "puna.model.arch.mllama:MLlama",
    "nemotron_h": "puna.model.arch.nemotron_h:NemotronH",
    "nemotron_h_moe": "puna.model.arch.nemotron_h:NemotronH",
    "nomic-bert": "puna.model.arch.nomic_bert:NomicBert",
    "olmo2": "puna.model.arch.olmo2:Olmo2",
    "olmo3": "puna.model.arch.olmo2:Olmo2",
    "phi3": "puna.model.arch.phi3:Phi3",
    "qwen2": "puna.model.arch.qwen2:Qwen2",
    "qwen25vl": "puna.model.arch.qwen2vl:Qwen2VL",
    "qwen2moe": "puna.model.arch.qwen2moe:Qwen2MoE",
    "qwen2vl": "puna.model.arch.qwen2vl:Qwen2VL",
    "qwen3": "puna.model.arch.qwen3:Qwen3",
    "qwen3moe": "puna.model.arch.qwen3moe:Qwen3MoE",
    "qwen35": "puna.model.arch.qwen3next:Qwen35",
    "qwen35moe": "puna.model.arch.qwen3next:Qwen35",
    "qwen3next": "puna.model.arch.qwen3next:Qwen3Next",
    "qwen3vl": "puna.model.arch.qwen3vl:Qwen3VL",
    "qwen3vlmoe": "puna.model.arch.qwen3vl:Qwen3VLMoE",
    "starcoder2": "puna.model.arch.starcoder2:StarCoder2",
}

# For people whose model neither engine runs.
WHERE_LISTED = "docs/models.md lists what Puna's own engine supports"


@dataclass(frozen=True)
class Choice:
    engine: EngineName
    reason: str
    is_forced: bool = False  # then the other engine is no way out


def choose(architecture: str, new_engine: bool | None = None) -> Choice:
    """*new_engine* is the setting OLLAMA_NEW_ENGINE; None leaves the choice to what is supported."""
    if new_engine is not None:
        return Choice("puna" if new_engine else "compat", f"OLLAMA_NEW_ENGINE={int(new_engine)}", is_forced=True)
    if architecture in ARCHITECTURES:
        return Choice("puna", f"Puna's engine supports the architecture {architecture}")
    return Choice("compat", f"Puna's engine does not support the architecture {architecture}")
