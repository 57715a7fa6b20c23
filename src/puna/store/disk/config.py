"""The configuration blob of a model: format, family, sizes, and what the server needs to know besides the layers.

Fields that other programs added are kept when a model is written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from puna.errors import FileFormatError

MAX_CONFIG_BYTES = 4 << 20


class ModelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What Ollama calls the image's configuration."""

    model_format: str = ""
    model_family: str = ""
    model_families: list[str] | None = None
    model_type: str = ""  # number of parameters, as people say it: 8.0B
    file_type: str = ""  # quantisation
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    remote_host: str = ""
    remote_model: str = ""
    capabilities: list[str] | None = None
    context_length: int = 0
    embedding_length: int = 0
    base_name: str = ""
    source: dict[str, str] | None = None  # Puna's own: which package a model came from


_KNOWN = frozenset(ModelConfig.__struct_fields__) | {"architecture", "os", "rootfs"}


def decode(content: bytes) -> tuple[ModelConfig, dict[str, Any]]:
    """A configuration and the fields not known here.

    Errors: FileFormatError naming the field.
    """
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
        present = {key: value for key, value in raw.items() if value is not None}
        config = msgspec.convert(present, type=ModelConfig)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"not a model configuration: {error}") from error
    return config, {key: value for key, value in raw.items() if key not in _KNOWN}


def encode(config: ModelConfig, extra: dict[str, Any], digests: Sequence[str]) -> bytes:
    """The blob's bytes; *digests* are those of the layers."""
    fields = msgspec.to_builtins(config)
    fields.setdefault("model_families", None)
    rootfs = {"type": "layers", "diff_ids": list(digests)}  # May 2026 Ollama expects it, August's ignores it
    return msgspec.json.encode({**extra, **fields, "architecture": "amd64", "os": "linux", "rootfs": rootfs})
