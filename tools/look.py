"""Show what a model computes and what its cache holds: python -m tools.look graph FILE, python -m tools.look cache FILE TEXT.

For people who change the engine. Nothing of it is needed to run a model.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from puna.kvcache.cells import Cells
from puna.kvcache.layered import LayeredCache
from puna.ml.ggml.graph import GGMLContext
from puna.native import structs
from puna.native.ggml import ggml
from puna.native.log import route_to_logging
from puna.runner.engine import Engine
from puna.runner.loading.load import allocate
from puna.runner.loading.model_file import ModelFile
from puna.runner.step.forward import Forward
from puna.wire import CompletionReply, CompletionRequest, LoadOptions, LoadRequest, Piece


def graph(path: Path, n_tokens: int) -> Iterator[str]:
    """The nodes of a step of so many tokens, in the order in which they are computed: operation, shape, name."""
    route_to_logging()
    with closing(ModelFile(path)) as file, closing(allocate(file, LoadOptions(n_batch=n_tokens), True)) as loaded:
        assert isinstance(loaded.forward, Forward)
        context = loaded.forward.plan_largest().ctx
        assert isinstance(context, GGMLContext)
        for i in range(context.n_nodes):
            node = ggml().ggml_graph_node(context.graph, i)
            shape = " x ".join(map(str, structs.shape(node)))
            yield f"{i:5} {ggml().ggml_op_desc(node).decode():16} {shape:24} {ggml().ggml_get_name(node).decode()}"


def cache(path: Path, text: str, n_predict: int) -> Iterator[str]:
    """What each sequence holds after the text and an answer: its positions and its cells, for each kind of cache in it."""
    with closing(Engine(path, True)) as engine:
        reply = engine.load(LoadRequest(options=LoadOptions()))
        assert reply.success, reply.error
        over = threading.Event()

        def emit(said: CompletionReply) -> None:
            if not isinstance(said, Piece):
                over.set()

        engine.submit(CompletionRequest(prompt=text, n_predict=n_predict), emit)
        over.wait()
        for name, cells in _cells(engine.loop.model.cache):
            yield f"{name}: {cells.n_cells} cells, {cells.n_free} free"
            for sequence in range(cells.max_sequences):
                if cells.lengths[sequence]:
                    first, after = cells.firsts[sequence], cells.nexts[sequence]
                    begin, end = cells.begins[sequence], cells.ends[sequence]
                    yield f"  sequence {sequence}: positions {first} to {after - 1} in cells {begin} to {end - 1}"


def _cells(held: object) -> Iterator[tuple[str, Cells]]:
    """A cache may be made of several, each for some of the layers; one of states alone has no cells."""
    parts = held.parts if isinstance(held, LayeredCache) else [held]
    for part in parts:
        cells = getattr(part, "cells", None)
        if isinstance(cells, Cells):
            yield type(part).__name__, cells


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.look", description="Show a model's graph, or what is in its cache.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_graph = commands.add_parser("graph", help="the nodes of a step")
    of_graph.add_argument("model", type=Path)
    of_graph.add_argument("--tokens", type=int, default=1, help="of the step (default: %(default)s)")
    of_cache = commands.add_parser("cache", help="which cells hold what after a text and its answer")
    of_cache.add_argument("model", type=Path)
    of_cache.add_argument("text")
    of_cache.add_argument("--predict", type=int, default=8, help="tokens of the answer (default: %(default)s)")
    given = parser.parse_args()
    lines = graph(given.model, given.tokens) if given.command == "graph" else cache(given.model, given.text, given.predict)
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
