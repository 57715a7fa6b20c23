"""Whether a device computes with a weight of some type that lies in some kind of memory."""

from __future__ import annotations

from collections.abc import Sequence

from puna.gguf.reader import TensorInfo
from puna.gguf.types import TensorType
from puna.ml.backend import Use
from puna.ml.ggml.devices import BufferType, Device
from puna.native import structs
from puna.native.ggml import TYPE_F32, TYPE_I32, ggml


def supports(scratch: int, device: Device, buffer_type: BufferType, info: TensorInfo, use: Use) -> bool:
    """*scratch*: a context for descriptions of tensors, emptied here."""
    g = ggml()
    g.ggml_reset(scratch)
    weight = g.ggml_new_tensor_4d(scratch, int(info.type), *four(info.shape))
    if use is Use.MATRIX:
        n_in, _, *batch = four(info.shape)
        other = g.ggml_new_tensor_4d(scratch, TYPE_F32, n_in, 512, *batch)
        node = g.ggml_mul_mat(scratch, weight, other)
    elif use is Use.EXPERTS:
        other = g.ggml_new_tensor_3d(scratch, TYPE_F32, info.shape[0], 1, 512)
        ids = g.ggml_new_tensor_2d(scratch, TYPE_I32, 1, 512)
        node = g.ggml_mul_mat_id(scratch, weight, other, ids)
    elif use is Use.ROWS:
        other = g.ggml_new_tensor_2d(scratch, TYPE_I32, 512, four(info.shape)[2])
        node = g.ggml_get_rows(scratch, weight, other)
    else:
        if info.type is not TensorType.F32:
            return buffer_type is device.plain
        other = g.ggml_new_tensor_4d(scratch, TYPE_F32, *four(info.shape))
        node = g.ggml_mul(scratch, other, weight)
    buffer = g.ggml_backend_buft_alloc_buffer(buffer_type.address, 0)
    structs.set_buffer(weight, buffer)
    supported = bool(g.ggml_backend_dev_supports_op(device.address, node))
    g.ggml_backend_buffer_free(buffer)
    return supported


def four(shape: Sequence[int]) -> tuple[int, int, int, int]:
    n0, n1, n2, n3 = (*shape, 1, 1, 1)[:4]
    return n0, n1, n2, n3
