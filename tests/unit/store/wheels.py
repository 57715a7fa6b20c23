"""Wheels made here, sound or broken in one chosen way."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    package: str = "tiny-model",
    version: str = "1.0",
    record: Mapping[str, str] | None = None,
    metadata: Mapping[str, bytes] | None = None,
) -> Path:
    """A wheel with these files; *record* replaces lines of RECORD, an empty line leaves the file out of it."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: missing\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{f"{info}/{key}": value for key, value in (metadata or {}).items()},
    }
    lines = {key: f"{key},{record_hash(content)},{len(content)}" for key, content in members.items()}
    lines |= record or {}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
        archive.writestr(f"{info}/RECORD", "\n".join(line for line in lines.values() if line) + f"\n{info}/RECORD,,\n")
    return path
