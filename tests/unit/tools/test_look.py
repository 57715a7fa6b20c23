from __future__ import annotations

from pathlib import Path

import pytest
from tools import look

from tests.tiny import write_gemma3, write_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "model.gguf", n_layers=2, n_embd=64, n_ff=64)


def test_the_graph_has_the_layers_operations_and_the_vocabulary_s_width(llama: Path) -> None:
    nodes = [line.split() for line in look.graph(llama, 3)]
    assert [int(node[0]) for node in nodes] == list(range(len(nodes)))
    operations = [node[1] for node in nodes]
    assert operations[0] == "GET_ROWS"
    assert operations.count("SET_ROWS") == 4  # keys and values, two layers
    assert operations.count("ROPE") == 4
    last = next(node for node in reversed(nodes) if node[1] in ("MUL_MAT", "CUSTOM"))  # ggml's product, or Puna's own
    assert int(last[2]) > 300  # logits


def test_more_tokens_are_wider_nodes(llama: Path) -> None:
    one, five = ([line.split() for line in look.graph(llama, n)] for n in (1, 5))
    turned = [next(node for node in nodes if node[1] == "ROPE") for nodes in (one, five)]
    assert [node[6] for node in turned] == ["1", "5"]


def test_the_cache_holds_the_prompt_and_the_answer(llama: Path) -> None:
    first, held = look.cache(llama, "once upon a time", 4)
    n_cells, n_free = (int(word) for word in first.split() if word.isdecimal())
    *_, last = held.split()
    assert n_cells - n_free == int(last) + 1 > 4
    assert held.startswith("  sequence 0: positions 0 to ")


def test_each_kind_of_layers_has_a_cache(tmp_path: Path) -> None:
    lines = list(look.cache(write_gemma3(tmp_path / "model.gguf"), "once upon a time", 2))
    assert sum("cells," in line for line in lines) == 2
    assert sum("sequence 0" in line for line in lines) == 2
