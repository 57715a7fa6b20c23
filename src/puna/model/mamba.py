"""Mamba-2 layers as GGUF files state them."""

from __future__ import annotations

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.model.hybrid import state_sizes
from puna.nn.mamba2 import MambaShape


def mamba_shape(file: GGUFFile) -> MambaShape:
    """Read ``ssm.*``. The time step's rank is the number of heads.

    Errors: FileFormatError naming what does not fit.
    """
    keys = ("ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "ssm.conv_kernel")
    inner, d_state, n_heads, n_groups, conv = state_sizes(file, *keys)
    if conv < 2 or inner % n_heads or n_heads % n_groups or n_groups * d_state > 1 << 24:
        what = f"{inner} channels, {n_heads} heads, {n_groups} groups, {d_state} values of each channel, a convolution of {conv}"
        raise FileFormatError(f"{file.path}: {what} make no Mamba-2 layer ({file.architecture}.ssm.*)")
    return MambaShape(inner, d_state, n_heads, n_groups, conv)
