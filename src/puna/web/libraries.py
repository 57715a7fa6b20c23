"""Fetch what the page takes from others: the versions and digests of package-lock.json, through npm, each as one module.

Uses the standard library only, so that the package's own build can run it before anything is installed:
``python -m puna.web.libraries`` does it by hand. What was fetched is kept in the user's cache folder under a key of the
lists; a build that finds it there needs neither npm nor a network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGET = FOLDER / "page" / "libraries"
LISTS = ("package.json", "package-lock.json")
TAKEN: Mapping[str, str] = {
    "marked.js": "marked/lib/marked.esm.js",
    "marked-license.txt": "marked/LICENSE",
    "purify.js": "dompurify/dist/purify.es.mjs",
    "purify-license.txt": "dompurify/LICENSE",
    "highlight.js": "@highlightjs/cdn-assets/es/highlight.min.js",
    "highlight-license.txt": "@highlightjs/cdn-assets/LICENSE",
}
OPTIONS = (
    *("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"),  # nothing of theirs runs here
    # Somebody waits for this. npm by itself tries for more than a minute where it is refused, and for many where nobody answers.
    *("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=1000", "--fetch-timeout=30000"),
)
TIMEOUT_S = 120


class FetchError(Exception):
    """npm's own words, or that there is none."""


def npm(environ: Mapping[str, str] = os.environ) -> str:
    """The program; also where Python packages put theirs. Empty where there is none."""
    beside = Path(sys.executable).parent
    return shutil.which("npm", path=environ.get("PATH", "")) or shutil.which("npm", path=str(beside)) or ""


def key() -> str:
    """The same key, the same files."""
    parts = [(FOLDER / name).read_bytes() for name in LISTS]
    return hashlib.sha256(b"\0".join([*parts, repr(sorted(TAKEN.items())).encode()])).hexdigest()[:20]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "web"


def fetch(target: Path = TARGET, cache: Path | None = None) -> Path:
    """The libraries in the folder *target*, from the cache or the network.

    Errors: FetchError, also where there is no npm.
    """
    kept = (cache or cache_folder()) / key()
    if not kept.is_dir():
        _install(kept)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(kept, target)
    return target


def _install(kept: Path) -> None:
    program = npm()
    if not program:
        raise FetchError("npm was not found")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="puna-web-", dir=kept.parent) as scratch:
        for name in LISTS:
            shutil.copyfile(FOLDER / name, Path(scratch) / name)
        _run([program, "ci", *OPTIONS], Path(scratch))
        chosen = Path(scratch) / "chosen"
        chosen.mkdir()
        for name, source in TAKEN.items():
            shutil.copyfile(Path(scratch) / "node_modules" / source, chosen / name)
        try:
            chosen.rename(kept)
        except OSError as error:
            if not kept.is_dir():  # else another build was faster
                raise FetchError(f"{kept}: {error}") from error


def _run(command: list[str], folder: Path) -> None:
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # npm looks for node there
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"npm: {error}") from error
    if done.returncode != 0:
        raise FetchError(f"npm ci\n{done.stdout}{done.stderr}".strip())


def main() -> int:
    try:
        print(fetch())
    except FetchError as error:
        print(f"the page's libraries were not fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
