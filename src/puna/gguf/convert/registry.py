"""Which converter turns a published checkpoint into a GGUF file, by the class that its config.json names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, ignore

CONVERTERS = {
    "BertModel": "puna.gguf.convert.bert",
    "BertForMaskedLM": "puna.gguf.convert.bert",
    "Gemma2ForCausalLM": "puna.gguf.convert.gemma",
    "Gemma3ForCausalLM": "puna.gguf.convert.gemma",
    "LlamaForCausalLM": "puna.gguf.convert.llama",
    "MistralForCausalLM": "puna.gguf.convert.llama",
    "MixtralForCausalLM": "puna.gguf.convert.llama",
    "Qwen2ForCausalLM": "puna.gguf.convert.llama",
    "Qwen3ForCausalLM": "puna.gguf.convert.llama",
    "Qwen3MoeForCausalLM": "puna.gguf.convert.llama",
}


class _Config(msgspec.Struct, frozen=True):
    architectures: list[str] = []
    model_type: str = ""
    quantization_config: dict[str, Any] | None = None


def convert(checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore) -> None:
    """Write *target* from a checkpoint.

    Errors: UnsupportedModel naming the architecture and those there are; FileFormatError naming file and tensor;
    whatever *on_bytes* raises.
    """
    config = checkpoint.decoded("config.json", _Config)
    name = config.architectures[0] if config.architectures else config.model_type
    module = CONVERTERS.get(name)
    if module is None:
        raise UnsupportedModel(f'unsupported architecture "{name[:100]}"; supported: {", ".join(CONVERTERS)}')
    if config.quantization_config is not None:
        raise UnsupportedModel("config.json: the checkpoint is quantized already; import one in F16, BF16 or F32")
    try:
        import_module(module).convert(checkpoint, target, on_bytes)
    except ValueError as error:  # the writer's: a value that GGUF has no room for
        raise FileFormatError(f"the checkpoint cannot be written as GGUF: {error}") from error
