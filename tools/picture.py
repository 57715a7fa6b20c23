"""Draw which package imports which, as it is in the code: python -m tools.picture writes it into docs/structure.md.

An arrow is left out where others lead there as well; so what is drawn is what one has to know before reading a package.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- made by tools/picture.py -->\n", "<!-- end -->\n"

SHAPES = {True: "{name}[{name}/]", False: "{name}({name}.py)"}


def layers() -> list[list[str]]:
    """From the top down, as the contract in pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layered] = [contract for contract in contracts if contract["type"] == "layers" and contract["containers"] == ["puna"]]
    return [[name.strip() for name in layer.split("|")] for layer in layered["layers"]]


def imports(names: list[str]) -> dict[str, set[str]]:
    """Of each package those that some module of it imports."""
    graph = grimp.build_graph("puna", cache_dir=None)
    found: dict[str, set[str]] = {name: set() for name in names}
    for importer, imported in permutations(names, 2):
        if graph.direct_import_exists(importer=f"puna.{importer}", imported=f"puna.{imported}", as_packages=True):
            found[importer].add(imported)
    return found


def _reached(edges: Mapping[str, set[str]], begin: str) -> set[str]:
    found: set[str] = set()
    waiting = list(edges[begin])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges[name]
    return found


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that others stand for; there are no circles."""
    return {
        name: {target for target in targets if not any(target in _reached(edges, other) for other in targets - {target})}
        for name, targets in edges.items()
    }


def picture() -> str:
    rows = layers()
    names = [name for row in rows for name in row]
    lines = ["flowchart TD"]
    for number, row in enumerate(rows):
        shown = " ~~~ ".join(SHAPES[(ROOT / "src" / "puna" / name).is_dir()].format(name=name) for name in row)
        lines.append(f"  subgraph layer{number} [ ]\n    direction LR\n    {shown}\n  end")
    for name, targets in reduced(imports(names)).items():
        lines += [f"  {name} --> {target}" for target in sorted(targets, key=names.index)]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def written(document: str) -> str:
    """The document with the picture as it should be."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + picture() + "\n" + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
