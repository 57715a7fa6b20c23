"""The head of a cross encoder: from the first token's hidden state to how well a text answers a query.

A dense layer with tanh, as BERT's pooler and RoBERTa's classification head have it, where the file has one, then a
projection to one score per label; of several labels the first counts.

Source: Devlin et al. 2018; Liu et al. 2019; tensor names of GGUF files (``cls``, ``cls.output``).
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Use
from puna.ml.tensor import Tensor
from puna.model.pooling import Pooling, pooling_of
from puna.nn.declare import bind, gguf
from puna.nn.layers import Linear


@dataclass
class RankHead:
    output: Linear = gguf("cls.output", dims="embd labels")
    dense: Tensor | None = gguf("cls.weight", dims="embd embd", use=Use.MATRIX, optional=True)
    dense_bias: Tensor | None = gguf("cls.bias", dims="embd", use=Use.VECTOR, optional=True)

    @classmethod
    def read(cls, file: GGUFFile, backend: Backend, n_embd: int) -> RankHead | None:
        """None for a file whose pooling makes vectors.

        Errors: MissingTensors for a file that says it ranks and cannot; FileFormatError.
        """
        return bind(cls, backend, file, {}, {"embd": n_embd}) if pooling_of(file) is Pooling.RANK else None

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states [n_embd, n] to scores [n_labels, n]."""
        if self.dense is not None:
            x = self.dense.mul_mat(x)
            x = (x if self.dense_bias is None else x + self.dense_bias).tanh()
        return self.output(x)
