"""What attention is asked for: which rows see which keys and values, and how scores are made; not how it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from puna.ml.tensor import Tensor


@dataclass(frozen=True)
class AttentionRange:
    """What a range of a batch's rows attends to; they are n_sequences groups of n_rows rows each, one after another.

    Shapes: key and value [head_dim, m, n_kv_heads, n_sequences], mask F16 [m, n_rows, 1, n_sequences]: 0 where a row sees a
    cell and -inf where it does not, or what is added to the score. Without a mask each row sees all cells.
    """

    begin: int  # first row
    n_rows: int  # of each sequence
    n_sequences: int
    key: Tensor
    value: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Scoring:
    """From the product of a query and a key to the share of the key's value.

    A softcap c bends scores s = scale * q·k to c * tanh(s / c), then the mask is added. Sinks F32 [n_heads] are scores that
    take part in the softmax and stand for no key. With a max_bias the mask is multiplied by a slope of each head before it
    is added (Press et al. 2021).

    Keys may lie turned, so many channels together (puna.ml.backend.Context.turn), and then queries are turned as well; values,
    and then what is mixed of them is turned back.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    max_bias: float = 0.0
    key_turn: int = 0
    value_turn: int = 0
