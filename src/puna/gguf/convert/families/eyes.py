"""What projectors' files have in common, as llama.cpp writes them, and what lies beside a model that sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Value, whole

_FILE = "preprocessor_config.json"


def projects_to(fields: Fields) -> int:
    """How wide the language model is."""
    return fields.object("text").whole("hidden_size", high=1 << 20)


def sizes(projector: str, *, heads: str = "num_attention_heads", layers: str = "num_hidden_layers") -> Mapping[str, Value]:
    return {
        "has_vision_encoder": lambda fields: True,
        "projector_type": lambda fields: projector,
        "vision.embedding_length": whole("hidden_size", high=1 << 16),
        "vision.feed_forward_length": whole("intermediate_size", high=1 << 16),
        "vision.block_count": whole(layers, high=1024),
        "vision.attention.head_count": whole(heads, high=1 << 12),
        "vision.patch_size": whole("patch_size", high=256),
        "vision.projection_dim": projects_to,
    }


def lengths(*, heads: str = "num_attention_heads") -> Mapping[str, Value]:
    return {
        "embd": whole("hidden_size", high=1 << 16),
        "ff": whole("intermediate_size", high=1 << 16),
        "heads": whole(heads, high=1 << 12),
        "patch": whole("patch_size", high=256),
        "text": projects_to,
    }


Colours = tuple[list[float], list[float]]


def colours(usual: Colours) -> Callable[[Checkpoint], dict[str, Any]]:
    """By what channels are shifted and divided, in ``preprocessor_config.json`` or as all of the family's.

    Errors: FileFormatError; UnsupportedModel for what else is done to an image.
    """

    def read(checkpoint: Checkpoint) -> dict[str, Any]:
        fields = processor(checkpoint)
        found = [
            fields.numbers(name, length=3) if fields.has(name) else default
            for name, default in zip(("image_mean", "image_std"), usual, strict=True)
        ]
        for name in ("do_normalize", "do_rescale", "do_resize"):
            if not fields.flag(name, default=True):
                raise UnsupportedModel(f"{_FILE}: {name} is false; only images that are resized and normalised can be converted")
        return {"vision.image_mean": found[0], "vision.image_std": found[1]}

    return read


def processor(checkpoint: Checkpoint) -> Fields:
    return Fields(checkpoint.decoded(_FILE, dict[str, Any]) if checkpoint.has(_FILE) else {}, _FILE)


def only(*parts: str) -> str:
    """An expression for all tensors that are none of these parts'."""
    return rf"(?!(model\.)?({'|'.join(parts)})\.).*"
