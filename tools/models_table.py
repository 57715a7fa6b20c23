"""Write the table of docs/models.md from the rows of tests/models/table.py: python -m tools.models_table."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.models.row import Row
from tests.models.table import EMBEDDERS, ENCODERS, ROWS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by tools/models_table.py -->\n", "<!-- end -->\n"


def n_scenarios(test_file: str, fixture: str) -> int:
    """How many tests of the file run with every variant of a row."""
    functions = [node for node in ast.parse((ROOT / test_file).read_text()).body if isinstance(node, ast.FunctionDef)]
    tests = [f for f in functions if f.name.startswith("test_") and fixture in {a.arg for a in f.args.args}]
    return len(tests)


def table(groups: Mapping[tuple[str, str], Mapping[str, Row]]) -> str:
    """*groups* are rows by their contract: the file of its tests, and the name of the fixture that opens a variant."""
    lines, total = [], 0
    for (test_file, fixture), rows in groups.items():
        count = n_scenarios(test_file, fixture)
        for name, row in rows.items():
            architecture, _, variety = name.partition(":")
            n_files = len(row.variants)
            total += n_files * count
            shown = f"`{architecture}`" + (f", {variety}" if variety else "")
            lines.append((name, f"| {shown} | {row.models} | {row.attends} | {n_files} × {count} |\n"))
    header = "| Architecture | Models, for example | Layers attend to | Files × scenarios |\n|---|---|---|---|\n"
    n_architectures = len({name.partition(":")[0] for name, _ in lines})
    counted = f"\n{n_architectures} architectures, {total} comparisons.\n"
    return header + "".join(line for _, line in sorted(lines)) + counted


def written(document: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    groups = {
        ("tests/parity/test_architectures.py", "pair"): ROWS,
        ("tests/parity/test_embeddings.py", "encoder"): ENCODERS,
        ("tests/parity/test_embeddings.py", "decoder"): EMBEDDERS,
    }
    return before + BEGIN + "\n" + table(groups) + "\n" + END + after


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
