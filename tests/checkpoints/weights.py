"""The numbers of a tiny checkpoint: made from the names and shapes of its tensors alone, the same on every machine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoints.cases import Case

Floats = npt.NDArray[np.float32]

BRANCHES = ("o_proj", "out_proj", "down_proj", "output_linear", "c_proj", "w2", "fc2")  # what a layer adds is small


def random_weights(shapes: Mapping[str, list[int]], *, less_one: bool = False, short_queries: bool = False) -> dict[str, Floats]:
    """Of such size that hidden states keep theirs and logits are no ties; all can be held in 16 bits of either kind.

    *less_one*: norms are stored so. *short_queries*: their norms do what the attention does not, divide by sqrt(head).
    """
    found = {}
    for name, shape in shapes.items():
        random = np.random.default_rng([7, zlib.crc32(name.encode())])
        values = _values(name, tuple(shape), random, less_one).astype(np.float32)
        if short_queries and name.endswith("q_norm.weight"):
            values *= np.float32(shape[0] ** -0.5)
        found[name] = _to_eight_bits(values)
    return found


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator, less_one: bool) -> npt.NDArray[Any]:
    normal = random.standard_normal(shape)
    last = name.removesuffix(".weight").rpartition(".")[2]
    special: dict[str, npt.NDArray[Any]] = {
        "A_log": random.uniform(-3, 0, shape),
        "D": random.uniform(0.5, 1.5, shape),
        "layer_scalar": random.uniform(0.5, 1.0, shape),
        "per_expert_scale": random.uniform(0.5, 2.0, shape),
        "sinks": normal,
        "dt_bias": normal,
        "expert_bias": 0.2 * normal,
        "e_score_correction_bias": 0.2 * normal,
        "scale": 8 + 2 * normal,
    }
    if last in special:
        return special[last]
    if name.endswith("bias"):
        return np.asarray(0.2 * normal)
    if len(shape) == 1:
        has_one = not less_one or "linear_attn" in name
        return np.asarray(has_one + 0.3 * normal)
    if len(shape) >= 4:  # of patches
        return np.asarray(np.prod(shape[1:]) ** -0.5 * normal)
    if "embed" in name or "embd" in name:
        return normal
    fan_in = shape[-1] if len(shape) < 3 or "conv" in name else min(shape[1:])
    gain = 3.0 if last in ("lm_head", "router", "gate", "layer", "proj") else 0.7 if last in BRANCHES else 1.0
    return np.asarray(gain * fan_in**-0.5 * normal)


def picture(width: int, height: int) -> npt.NDArray[np.uint8]:
    """[height, width, 3]"""
    return np.random.default_rng([7, width, height]).integers(0, 256, (height, width, 3), np.uint8)


def _to_eight_bits(values: Floats) -> Floats:
    """Rounded to numbers that F16 and BF16 both have: eight bits of mantissa, no tiny ones."""
    bits = (values.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
    rounded = bits.astype(np.uint32).view(np.float32)
    return np.where(np.abs(rounded) < 2.0**-14, np.float32(0), rounded)


def e4m3_codes(values: Floats) -> npt.NDArray[np.int8]:
    """The nearest numbers of four bits of exponent and three of mantissa, up to 448."""
    codes = np.arange(127)  # of those that are not below 0
    exponent, mantissa = codes >> 3, codes & 7
    known = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    nearest = np.abs(np.abs(values)[..., None] - known).argmin(-1)
    return np.asarray((nearest | np.where(values < 0, 128, 0)).astype(np.uint8).view(np.int8))


def in_fp8(name: str, values: Floats, scales: str, block: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    """A matrix and its scales, one for all, for each row or for each block, named as they are published."""
    rows, columns = values.shape
    height, width = {"whole": (rows, columns), "row": (1, columns), "block": block}[scales]
    found = np.empty((-(-rows // height), -(-columns // width)), np.float32)
    spread = np.empty_like(values)
    for i, j in np.ndindex(*found.shape):
        part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        found[i, j] = spread[part] = np.float32(np.abs(values[part]).max() / 448)
    suffix = "_scale" if scales == "row" else "_scale_inv"
    both: dict[str, npt.NDArray[Any]] = {name: e4m3_codes(values / spread), name + suffix: found}
    if scales == "whole":
        both = {
            name: both[name],
            name + suffix: found.reshape(()),
            name.removesuffix("weight") + "activation_scale": found.reshape(()),
        }
    return both


def in_mxfp4(name: str, shape: tuple[int, ...]) -> dict[str, npt.NDArray[Any]]:
    """Random blocks of a tensor [n_experts, n_out, n_in], named as they are published."""
    random = np.random.default_rng([7, zlib.crc32(name.encode())])
    n_experts, n_out, n_in = shape
    blocks = random.integers(0, 256, (n_experts, n_out, n_in // 32, 16)).astype(np.uint8)
    scales = random.integers(121, 126, (n_experts, n_out, n_in // 32)).astype(np.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def in_few_bits(case: Case, name: str, values: Floats) -> dict[str, npt.NDArray[Any]]:
    """What the case publishes of a tensor in fewer than 16 bits; empty where it does not."""
    if case.blocks and name.endswith("_proj") and values.ndim == 3:  # stored the other way round in 16 bits
        n_experts, n_in, n_out = values.shape
        return in_mxfp4(name, (n_experts, n_out, n_in))
    if case.scales and values.ndim == 2 and "_proj" in name:
        height, width = case.config["quantization_config"].get("weight_block_size") or (0, 0)
        return in_fp8(name, values, case.scales, (height, width))
    return {}
