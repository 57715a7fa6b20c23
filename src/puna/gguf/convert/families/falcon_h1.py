"""Falcon-H1. The multipliers that config.json has beside the weights become part of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from puna.gguf.convert.families.common import ENDS, KEYS, LENGTHS, SILU, factors, rope, swiglu
from puna.gguf.convert.families.mamba import check_time_steps, mamba_keys, mamba_lengths, mamba_lines
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Change, Family, Lengths, Line, Rows

_SHAPE = {
    "heads": "mamba_n_heads",
    "head": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
    "conv": "mamba_d_conv",
}


def _times(factor: float | npt.NDArray[np.float32]) -> Change:
    """A factor of all numbers, or one for each row."""

    def change(rows: Rows, lengths: Lengths) -> Rows:
        return np.asarray(rows * (np.float32(factor) if isinstance(factor, float) else factor[:, None]))

    return change


def _scaled(line: Line, factor: float | npt.NDArray[np.float32]) -> Line:
    is_one = isinstance(factor, float) and factor == 1.0
    return line if is_one else replace(line, change=_times(factor), computes=True)


def _of_input(fields: Fields) -> npt.NDArray[np.float32]:
    """Of the rows of what goes into a state: the gate, x, b, c, and the time steps."""
    lengths = {name: value(fields) for name, value in mamba_lengths(_SHAPE).items()}
    inner, state = lengths["ssm_inner"], (lengths["ssm_channels"] - lengths["ssm_inner"]) // 2
    each = fields.numbers("ssm_multipliers", length=5) if fields.has("ssm_multipliers") else [1.0] * 5
    rows = np.repeat(np.array(each, np.float32), [inner, inner, state, state, lengths["ssm_heads"]])
    return np.asarray(rows * np.float32(fields.number("ssm_in_multiplier", default=1.0)))


def falcon_h1(fields: Fields) -> Family:
    """Errors: FileFormatError naming a field."""

    def factor(name: str) -> float:
        return fields.number(name, default=1.0)

    into, out = factor("attention_in_multiplier"), factor("attention_out_multiplier")
    gate, down = fields.numbers("mlp_multipliers", length=2) if fields.has("mlp_multipliers") else [1.0, 1.0]
    gate_line, up_line, down_line = swiglu("feed_forward.{}_proj")
    mamba = {line.ours: line for line in mamba_lines("mamba.")}
    mamba["ssm_in"] = _scaled(mamba["ssm_in"], _of_input(fields))
    if not fields.flag("mamba_rms_norm", default=False):
        del mamba["ssm_norm"]
    mamba["ssm_out"] = _scaled(mamba["ssm_out"], factor("ssm_out_multiplier"))
    return Family(
        architecture="falcon-h1",
        layer=(
            Line("attn_norm", "input_layernorm", "embd"),
            Line("ffn_norm", "pre_ff_layernorm.weight", "embd", whole=True),
            _scaled(Line("attn_q", "self_attn.q_proj", "q embd"), into),
            _scaled(Line("attn_k", "self_attn.k_proj", "k embd"), into * factor("key_multiplier")),
            _scaled(Line("attn_v", "self_attn.v_proj", "v embd"), into),
            _scaled(Line("attn_output", "self_attn.o_proj", "embd mixed"), out),
            *mamba.values(),
            _scaled(gate_line, gate),
            up_line,
            _scaled(down_line, down),
        ),
        ends=(
            _scaled(ENDS[0], factor("embedding_multiplier")),
            Line("output_norm", "final_layernorm", "embd"),
            _scaled(_head(fields), factor("lm_head_multiplier")),
        ),
        keys={**KEYS, **mamba_keys(_SHAPE)},
        lengths={**LENGTHS, **mamba_lengths(_SHAPE)},
        expects=SILU | {"mamba_norm_before_gate": (False,) if fields.get("mamba_rms_norm") else (True, False)},
        rope=rope(LINEAR, YARN),
        made=factors(LINEAR, YARN),
        check=check_time_steps,
    )


def _head(fields: Fields) -> Line:
    """With multipliers a tied head is another matrix than the table."""
    is_tied = fields.flag("tie_word_embeddings", default=False)
    return Line("output", "embed_tokens" if is_tied else "/lm_head", "vocab embd")
