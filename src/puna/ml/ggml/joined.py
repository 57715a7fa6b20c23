"""Matrices that multiply the same input, kept as one matrix: the rows of the first, then those of the second, ….

One product instead of several saves the library a round of its threads and a conversion of the input for each, which
is what small products consist of. A part gives its rows of the common product; that is computed when the first part
asks for it and shared by the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.ml.ggml.tensor import GGMLTensor


class Whole:
    """The product that the parts share: of one input in one graph, for each part once."""

    def __init__(self, matrix: GGMLTensor) -> None:
        self.matrix = matrix
        self._input = (0, 0)  # graph and tensor
        self._product = GGMLTensor(0)
        self._served: set[int] = set()

    def product(self, x: GGMLTensor, part: int) -> GGMLTensor:
        # Graphs are built at the same addresses again and again: a part that asks twice is at the next product.
        if self._input != (x.graph, x.address) or part in self._served:
            self._product = self.matrix.mul_mat(x)
            self._input = (x.graph, x.address)
            self._served.clear()
        self._served.add(part)
        return self._product


class Part(GGMLTensor):
    """Some rows of a matrix, as a receiver of mul_mat and of nothing else."""

    __slots__ = ("_begin", "_shape", "_whole")

    def __init__(self, whole: Whole, begin: int, shape: tuple[int, int, int, int]) -> None:
        super().__init__(whole.matrix.address)
        self._whole = whole
        self._begin = begin
        self._shape = shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def mul_mat(self, x: GGMLTensor) -> GGMLTensor:
        product = self._whole.product(x, self._begin)
        _, *lengths = product.shape
        return product.view((self._shape[1], *lengths), product.strides[1:], 4 * self._begin)


def parts_of(whole: GGMLTensor, shapes: Sequence[tuple[int, ...]]) -> list[GGMLTensor]:
    """Handles on the matrices [n_in, n_out] that lie one after another in *whole*."""
    common, parts, begin = Whole(whole), [], 0
    for n_in, n_out in shapes:
        parts.append(Part(common, begin, (n_in, n_out, 1, 1)))
        begin += n_out
    return list(parts)
