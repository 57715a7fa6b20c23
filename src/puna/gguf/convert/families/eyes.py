"""What projectors' files have in common, as llama.cpp writes them, and what lies beside a model that sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.families.common import head
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import Rotation
from puna.gguf.convert.table import Change, Lengths, Line, Rows, Value, whole

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


def turned_by_axes(fields: Fields) -> dict[str, Any]:
    """Keys about positions of a language model whose pairs turn by time, height and width.

    Errors: FileFormatError for sections that are not all pairs.
    """
    rotation = Rotation(fields, head(fields), ())
    sections = [int(n) for n in rotation.options.numbers("mrope_section", length=3)]
    if sum(sections) != rotation.n_dims // 2 or min(sections) < 0:
        raise fields.wrong("mrope_section", sections, f"which are not {rotation.n_dims // 2} pairs")
    return {**rotation.keys(), "rope.dimension_sections": [*sections, 0]}


def _frame(number: int) -> Change:
    def cut(rows: Rows, lengths: Lengths) -> Rows:
        return rows[:, :, number]

    return cut


def frames(theirs: str) -> tuple[Line, ...]:
    """An embedding of patches of two frames of a film, each with a matrix of its own in GGUF."""
    dims, one = "embd 3 2 patch patch", "embd 3 patch patch"
    return tuple(
        Line(f"v.patch_embd.weight{suffix}", theirs, dims, _frame(i), one, whole=True, exact=True)
        for i, suffix in enumerate(("", ".1"))
    )
