"""From a clone to the first answer on a machine that has neither compiler nor caches: ``python -m bench.fresh``.

The machine is this one seen through an overlay of its files in which compilers and build tools are missing, with an empty home
folder. Needs Linux and root, a package index, and room for a gigabyte in memory; nothing of this machine is changed.
``--with-compiler`` leaves the compilers in; ``--library FOLDER`` lends it the user's cache that holds a compiled library.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.facts import facts

ROOT = Path(__file__).resolve().parent.parent
# By whom and through whom this machine reaches others, and whose certificates it believes, as pip, npm and their libraries ask.
_NETWORK = re.compile(r"(PIP|SSL|NPM_CONFIG)_.*|NODE_EXTRA_CA_CERTS|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)
_TOOLS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c89|c99|cpp|clang|clang\+\+|cmake|ninja|ld|as)([-.0-9].*)?")
HOME = "home/newcomer"


def build_tools() -> list[Path]:
    folders = {Path(folder).resolve() for folder in os.environ["PATH"].split(os.pathsep) if folder}
    return [file for folder in sorted(folders) if folder.is_dir() for file in folder.iterdir() if _TOOLS.fullmatch(file.name)]


def network_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _NETWORK.fullmatch(name)}


def script(place: Path, target: str, *, keeps_compiler: bool, library: Path | None) -> str:
    """What a shell does in a namespace of mounts of its own."""
    root = place / "root"
    removed = [] if keeps_compiler else [root / tool.relative_to("/") for tool in build_tools()]
    home = root / HOME
    inside = [
        f"cd /{HOME}",
        f"git clone -q --no-hardlinks {shlex.quote(str(ROOT))} puna",
        "cd puna",
        f"echo compilers: $(command -v gcc g++ cc c++ clang cmake || echo none); exec make -s {target}",
    ]
    kept = shlex.join(f"{name}={value}" for name, value in network_settings().items())
    lines = [
        "set -e",
        f"mount -t tmpfs tmpfs {place}",
        f"mkdir {place}/upper {place}/work {root}",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={place}/upper,workdir={place}/work {root}",
        f"mount --rbind /dev {root}/dev",
        f"mount --rbind /proc {root}/proc",
        f"mount --rbind /sys {root}/sys",
        f"mount -t tmpfs tmpfs {root}/tmp",
        *(f"rm -f {shlex.quote(str(file))}" for file in removed),
        f"mkdir -p {home}/.cache/puna",
        *([f"cp -r {shlex.quote(str(library))}/native {home}/.cache/puna/"] if library else []),
        f"mkdir -p {root}/{ROOT.relative_to('/')}",
        f"exec chroot {root} env -i {kept} HOME=/{HOME} PATH={shlex.quote(os.environ['PATH'])} LANG=C.UTF-8 "
        f"GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' "
        f"timeout 1800 sh -c {shlex.quote(' && '.join(inside))}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default="run", help="of make (default: %(default)s)")
    parser.add_argument("--with-compiler", action="store_true")
    parser.add_argument("--library", type=Path, metavar="FOLDER", help="a user's cache folder of Puna with a compiled library")
    args = parser.parse_args()
    print(facts())
    with tempfile.TemporaryDirectory(prefix="puna-fresh-") as folder:
        text = script(Path(folder), args.target, keeps_compiler=args.with_compiler, library=args.library)
        begin, before = time.monotonic(), os.times().children_user + os.times().children_system
        done = subprocess.run(["unshare", "-m", "bash", "-c", text], stdin=subprocess.DEVNULL, check=False)
    elapsed, computed = time.monotonic() - begin, os.times().children_user + os.times().children_system - before
    print(f"make {args.target}: {elapsed:.1f} s, of them {computed:.1f} s of computing, exit status {done.returncode}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
