"""Adapters laid over a model's weights: their files, and their matrices in memory beside the weights they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from puna.errors import UnsupportedModel
from puna.gguf import lora
from puna.gguf.reader import GGUFFile
from puna.ml.backend import LowRank, Use
from puna.ml.ggml.weights import Weights

_NODES_PER_CHANGE = 4  # two products, the scale, the sum


class Adapters:
    """Ask for the changes of each weight, check that all were asked for, then allocate and load as with weights.

    Errors: NotFound; FileFormatError naming the adapter and the tensor that does not fit the model, from the constructor.
    """

    def __init__(self, paths: Sequence[str | Path], model: GGUFFile, place: Callable[[GGUFFile], Weights]) -> None:
        self._stack = ExitStack()
        self._changes: dict[str, list[tuple[lora.LowRank, Weights, GGUFFile]]] = {}
        self._asked: set[str] = set()
        self.files: list[GGUFFile] = []
        self.weights: list[Weights] = []
        try:
            for path in paths:
                file = self._stack.enter_context(GGUFFile.open(path))
                changes = lora.read_lora(file, model)
                weights = place(file)
                self._stack.callback(weights.close)
                self.files.append(file)
                self.weights.append(weights)
                for change in changes:
                    self._changes.setdefault(change.weight, []).append((change, weights, file))
        except BaseException:
            self._stack.close()
            raise

    @property
    def max_nodes(self) -> int:
        """How many nodes the adapters can add to a graph that uses every weight once."""
        return _NODES_PER_CHANGE * sum(len(changes) for changes in self._changes.values())

    def change(self, name: str) -> bool:
        """Whether any of them changes this weight."""
        return name in self._changes

    def of(self, name: str, use: Use) -> list[LowRank]:
        if (name == lora.TABLE) != (use is Use.ROWS):
            return []  # a head that is the embedding table again stays as it is: adapters change the two apart
        self._asked.add(name)
        up_use = Use.MATRIX if use is Use.ROWS else use
        return [
            LowRank(weights.tensor(c.down.name, use), weights.tensor(c.up.name, up_use), c.scale)
            for c, weights, _ in self._changes.get(name, ())
        ]

    def check(self) -> None:
        """Errors: UnsupportedModel naming what the adapters change but the model's arithmetic does not."""
        unused = [(name, changes[0][2]) for name, changes in self._changes.items() if name not in self._asked]
        if unused:
            name, file = unused[0]
            raise UnsupportedModel(f"adapter {file.path}: it changes {name!r}, which no adapter can change in such a model")

    def load(self) -> None:
        for weights in self.weights:
            weights.load(lambda _share: None)

    def close(self) -> None:
        self._stack.close()
