"""The head of a cross encoder: from the first token's hidden state to how well a text answers a query.

A dense layer with tanh, as BERT's pooler and RoBERTa's classification head have it, where the file has one, then a
projection to one score per label; of several labels the first counts.

Source: Devlin et al. 2018; Liu et al. 2019; tensor names of GGUF files (``cls``, ``cls.output``).
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.errors import MissingTensors
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Use
from puna.ml.tensor import Tensor
from puna.model.pooling import Pooling, pooling_of
from puna.model.shapes import check_shapes, table_shape

_DENSE, _OUTPUT = "cls", "cls.output"
MAX_NODES = 8


@dataclass(frozen=True)
class RankHead:
    output: Tensor
    output_bias: Tensor | None
    dense: Tensor | None
    dense_bias: Tensor | None

    @classmethod
    def read(cls, file: GGUFFile, backend: Backend, n_embd: int) -> RankHead | None:
        """None for a file whose pooling makes vectors.

        Errors: MissingTensors for a file that says it ranks and cannot; FileFormatError.
        """
        if pooling_of(file) is not Pooling.RANK:
            return None
        if f"{_OUTPUT}.weight" not in file.tensors:
            raise MissingTensors([f"{_OUTPUT}.weight"])
        output = table_shape(file, f"{_OUTPUT}.weight", n_embd)
        shapes = {f"{_OUTPUT}.weight": (n_embd, *output[1:]), f"{_OUTPUT}.bias": output[1:] or (1,)}
        check_shapes(file, shapes | {f"{_DENSE}.weight": (n_embd, n_embd), f"{_DENSE}.bias": (n_embd,)})

        def optional(name: str, use: Use) -> Tensor | None:
            return backend.tensor(name, use) if name in file.tensors else None

        return cls(
            backend.tensor(f"{_OUTPUT}.weight", Use.MATRIX),
            optional(f"{_OUTPUT}.bias", Use.VECTOR),
            optional(f"{_DENSE}.weight", Use.MATRIX),
            optional(f"{_DENSE}.bias", Use.VECTOR),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [n_embd, n] to scores [n_labels, n]."""
        if self.dense is not None:
            x = self.dense.mul_mat(x)
            x = (x if self.dense_bias is None else x + self.dense_bias).tanh()
        y = self.output.mul_mat(x)
        return y if self.output_bias is None else y + self.output_bias
