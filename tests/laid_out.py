"""A folder of models as Ollama lays it out, written by hand: nothing of puna.store takes part."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

PREFIX = "application/vnd.ollama.image."
DAYS = 24 * 3600


def blob(root: Path, content: bytes, *, age_s: float = 0.0) -> str:
    """Returns the digest."""
    digest = hashlib.sha256(content).hexdigest()
    path = root / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age_s,) * 2)
    return f"sha256:{digest}"


def model(root: Path, path: str, weights: bytes, *, age_s: float = 0.0, **texts: str | bytes) -> list[str]:
    """A model at ``host/namespace/model/tag``; *texts* are its other layers by kind. Returns the digests of all its blobs."""
    layers = [("model", weights), *((kind, text.encode() if isinstance(text, str) else text) for kind, text in texts.items())]
    described: list[dict[str, Any]] = [
        {"mediaType": PREFIX + kind, "digest": blob(root, content, age_s=age_s), "size": len(content)} for kind, content in layers
    ]
    config = {
        "model_format": "gguf",
        "model_family": "llama",
        "model_families": ["llama"],
        "model_type": "1.2B",
        "file_type": "Q8_0",
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in described]},
    }
    content = json.dumps(config, separators=(",", ":")).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": blob(root, content, age_s=age_s),
            "size": len(content),
        },
        "layers": described,
    }
    file = root / "manifests" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(manifest, separators=(",", ":")))
    return [manifest["config"]["digest"], *(layer["digest"] for layer in described)]  # type: ignore[index]
