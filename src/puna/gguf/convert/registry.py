"""Which converter turns a published checkpoint into a GGUF file, by the class that its config.json names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import conversion
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, ignore
from puna.gguf.convert.conversion import Converted
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family

# The class that a checkpoint names, and where its family is described: the file in this folder, and the name in it.
FAMILIES: dict[str, str] = {
    "BertForMaskedLM": "bert:BERT",
    "BertModel": "bert:BERT",
    "Cohere2ForCausalLM": "cohere:COHERE2",
    "CohereForCausalLM": "cohere:COMMAND_R",
    "DeepseekV2ForCausalLM": "deepseek:DEEPSEEK2",
    "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK3",
    "FalconH1ForCausalLM": "falcon_h1:falcon_h1",
    "GemmaForCausalLM": "gemma:GEMMA",
    "Gemma2ForCausalLM": "gemma:GEMMA2",
    "Gemma3ForCausalLM": "gemma:GEMMA3",
    "Gemma3ForConditionalGeneration": "gemma3_eyes:GEMMA3",
    "Gemma3TextModel": "embedding_gemma:EMBEDDING_GEMMA",
    "Gemma3nForCausalLM": "gemma3n:GEMMA3N",
    "Gemma3nForConditionalGeneration": "gemma3n:GEMMA3N",
    "Gemma4ForCausalLM": "gemma4:GEMMA4",
    "Gemma4ForConditionalGeneration": "gemma4:GEMMA4",
    "Glm4ForCausalLM": "glm:GLM4",
    "Glm4MoeForCausalLM": "glm:GLM4MOE",
    "Glm4MoeLiteForCausalLM": "deepseek:GLM4MOELITE",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "GraniteForCausalLM": "granite:GRANITE",
    "GraniteMoeForCausalLM": "granite:GRANITEMOE",
    "GraniteMoeHybridForCausalLM": "granite:GRANITE_HYBRID",
    "GraniteMoeSharedForCausalLM": "granite:GRANITEMOE_SHARED",
    "Lfm2ForCausalLM": "lfm2:LFM2",
    "Lfm2MoeForCausalLM": "lfm2:LFM2MOE",
    "LlamaForCausalLM": "llama:LLAMA",
    "Llama4ForCausalLM": "llama4:LLAMA4",
    "Llama4ForConditionalGeneration": "llama4:LLAMA4",
    "Mamba2ForCausalLM": "mamba:MAMBA2",
    "Ministral3ForCausalLM": "mistral3:MISTRAL3",
    "Mistral3ForConditionalGeneration": "mistral3_eyes:MISTRAL3",
    "MistralForCausalLM": "llama:LLAMA",
    "MixtralForCausalLM": "llama:MIXTRAL",
    "ModernBertForMaskedLM": "modern_bert:MODERN_BERT",
    "ModernBertModel": "modern_bert:MODERN_BERT",
    "NemotronHForCausalLM": "mamba:nemotron",
    "NomicBertModel": "bert:NOMIC_BERT",
    "Olmo2ForCausalLM": "olmo:OLMO2",
    "Olmo3ForCausalLM": "olmo:OLMO3",
    "Phi3ForCausalLM": "phi3:PHI3",
    "Qwen2_5_VLForConditionalGeneration": "qwen25vl:QWEN25VL",
    "Qwen2ForCausalLM": "qwen:QWEN2",
    "Qwen2MoeForCausalLM": "qwen:QWEN2MOE",
    "Qwen3VLForConditionalGeneration": "qwen3vl:qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vl:qwen3vlmoe",
    "Qwen3ForCausalLM": "qwen:QWEN3",
    "Qwen3MoeForCausalLM": "qwen:QWEN3MOE",
    "Qwen3NextForCausalLM": "qwen3next:QWEN3NEXT",
    "Qwen3_5ForCausalLM": "qwen3next:QWEN35",
    "Qwen3_5ForConditionalGeneration": "qwen3next:QWEN35",
    "Qwen3_5MoeForCausalLM": "qwen3next:QWEN35MOE",
    "Qwen3_5MoeForConditionalGeneration": "qwen3next:QWEN35MOE",
    "Starcoder2ForCausalLM": "starcoder2:STARCODER2",
}


def convert(checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore, eyes: Path | None = None) -> Converted:
    """Write *target* from a checkpoint, and *eyes* where it sees, its family's can be converted, and anybody wants them.

    Errors: UnsupportedModel naming the architecture and those there are; FileFormatError naming file and tensor;
    whatever *on_bytes* raises.
    """
    name, stated = conversion.described(checkpoint)
    try:
        if name not in FAMILIES:
            raise UnsupportedModel(f'unsupported architecture "{name[:100]}"; supported: {", ".join(FAMILIES)}')
        return conversion.convert(_family(FAMILIES[name], Fields.of_text(stated, {})), checkpoint, target, on_bytes, eyes)
    except ValueError as error:  # the writer's: a value that GGUF has no room for
        raise FileFormatError(f"the checkpoint cannot be written as GGUF: {error}") from error


def _family(place: str, fields: Fields) -> Family:
    """Some families are made for a configuration."""
    file, _, name = place.partition(":")
    found: Family | Callable[[Fields], Family] = getattr(import_module(f"puna.gguf.convert.families.{file}"), name)
    return found if isinstance(found, Family) else found(fields)
