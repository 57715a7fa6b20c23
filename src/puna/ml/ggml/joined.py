"""Matrices that multiply the same input, kept as one matrix: the rows of the first, then those of the second, ….

One product instead of several saves the library a round of its threads and a conversion of the input for each, which
is what small products consist of. The parts are asked for together and get their rows of the common product; nothing is
remembered between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.ml.ggml.tensor import GGMLTensor


class Part(GGMLTensor):
    """Some rows of a matrix: a weight to multiply with, together with the others or alone, and for nothing else."""

    __slots__ = ("_begin", "_shape", "_whole")

    def __init__(self, whole: GGMLTensor, begin: int, shape: tuple[int, int, int, int]) -> None:
        super().__init__(whole.address)
        self._whole = whole
        self._begin = begin
        self._shape = shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    def mul_mat(self, x: GGMLTensor) -> GGMLTensor:
        return self.multiply(x, [self])[0]

    def multiply(self, x: GGMLTensor, weights: Sequence[GGMLTensor], *, is_precise: bool = False) -> list[GGMLTensor]:
        if not all(isinstance(weight, Part) and weight._whole is self._whole for weight in weights):
            return super().multiply(x, weights, is_precise=is_precise)
        (product,) = self._whole.multiply(x, [self._whole], is_precise=is_precise)
        return [weight._rows_of(product) for weight in weights if isinstance(weight, Part)]

    def _rows_of(self, product: GGMLTensor) -> GGMLTensor:
        _, *lengths = product.shape
        return product.view((self._shape[1], *lengths), product.strides[1:], 4 * self._begin)


def parts_of(whole: GGMLTensor, shapes: Sequence[tuple[int, ...]]) -> list[GGMLTensor]:
    """Handles on the matrices [n_in, n_out] that lie one after another in *whole*."""
    parts: list[GGMLTensor] = []
    begin = 0
    for n_in, n_out in shapes:
        parts.append(Part(whole, begin, (n_in, n_out, 1, 1)))
        begin += n_out
    return parts
