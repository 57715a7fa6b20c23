"""What can be said of the documents' commands without running them; tests/e2e/test_documents.py runs them."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tools import manual

from puna.api.options import SAMPLERS
from tests.documents import DOCUMENTS, ROOT, Block, blocks, commands

SOURCES = sorted((ROOT / "src" / "puna").rglob("*.py"))

# Blocks that are not run say where what they do is tested, or what forbids it.
REASONS = re.compile(
    r"needs a Docker daemon|changes the machine|compiles for minutes|takes a compiler for GPUs|tests/(?:e2e|unit/server)/\w+\.py"
)


def _name(block: Block) -> str:
    return f"{block.document}:{block.line}"


@pytest.mark.parametrize("block", commands(), ids=_name)
def test_commands_can_be_read(block: Block) -> None:
    if block.language == "python":
        compile(block.text, _name(block), "exec")
    else:
        subprocess.run(["bash", "-n", "-c", block.text], check=True, capture_output=True)


def test_what_is_not_run_says_why() -> None:
    reasons = {_name(block): block.not_run for block in commands() if block.not_run}
    assert {name for name, reason in reasons.items() if not REASONS.search(reason)} == set()
    for reason in reasons.values():
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/]+\.py", reason))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_fence_is_closed_and_known(document: str) -> None:
    """Else a block would be passed over."""
    n_fences = len(re.findall(r"^```", (ROOT / document).read_text(), re.MULTILINE))
    assert n_fences == 2 * len(blocks(document))
    assert {block.language for block in blocks(document)} <= {"", "sh", "python", "json", "mermaid", "yaml"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target, heading in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)#?([^)]*)\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if heading and linked.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, heading


def test_every_document_is_found_from_the_first_page() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in listed} == set()
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


@cache
def _texts() -> list[str]:
    """All that the program may say: constants, and the constant parts of what is put together, with a gap between them."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _errors() -> list[str]:
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    return re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_commands_that_are_named_exist(document: str) -> None:
    named = set(re.findall(r"`puna ([a-z]+(?:-[a-z]+)*)", (ROOT / document).read_text()))
    assert named <= {*(name.split()[0] for name in manual.commands()), "runner", "discover"}


def test_each_sampling_step_is_explained() -> None:
    table = (ROOT / "docs" / "sampling.md").read_text().partition("## The order")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[: len(SAMPLERS)] == list(SAMPLERS)


def test_errors_are_told_apart() -> None:
    assert len(_errors()) == len(set(_errors())) >= 20


@pytest.mark.parametrize("error", _errors())
def test_the_program_says_what_the_page_explains(error: str) -> None:
    """… stands for what differs; the other words come in this order in one text."""
    parts = [re.escape(part) for part in error.split("…")]
    wanted = re.compile(".*".join(parts), re.DOTALL)
    assert any(wanted.search(text) for text in _texts()), error


def test_the_comparison_has_no_figures_but_those_that_were_measured() -> None:
    page = (ROOT / "docs" / "guides" / "comparison.md").read_text()
    measured = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    figures = re.findall(r"\b\d+\.\d+\b", page.partition("| Measured against")[2].partition("These ratios")[0])
    assert len(figures) >= 6
    assert {figure for figure in figures if figure not in measured} == set()


def test_pairs_of_tables_do_not_run_into_each_other() -> None:
    """A table needs an empty line before it, else it is text."""
    for document in DOCUMENTS:
        for before, line in pairwise((ROOT / document).read_text().splitlines()):
            if re.fullmatch(r"\|[-| :]+\|", line):
                assert before.startswith("|"), f"{document}: {before}"


def test_the_files_are_found() -> None:
    assert "README.md" in DOCUMENTS
    assert all(Path(ROOT / document).is_file() for document in DOCUMENTS)
