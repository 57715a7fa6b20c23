"""The files of the page, read into memory once: what is served is what was there then, and nothing else can be named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class File:
    content: bytes
    content_type: str
    tag: str  # another one, other content


@cache
def read(folder: Path = PAGE) -> Mapping[str, File]:
    """By path below the folder: ``index.html``, ``app/main.js``."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): _file(path) for path in paths}


def _file(path: Path) -> File:
    content = path.read_bytes()
    return File(content, TYPES[path.suffix], hashlib.sha256(content).hexdigest()[:16])
