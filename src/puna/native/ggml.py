"""The functions, structs and constants of ggml that Puna uses (ggml.h, ggml-backend.h, ggml-cpu.h, ggml-alloc.h)."""

from __future__ import annotations

import ctypes
from functools import cache

from puna.native.fit import ggml_misfits
from puna.native.library import Functions, opened

# enum ggml_type: those the engine itself creates or converts to; files may hold any (puna.gguf.types).
TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_I8, TYPE_I32, TYPE_I64, TYPE_BF16 = 0, 1, 2, 8, 24, 26, 27, 30
TYPE_COUNT = 43

STATUS_SUCCESS, STATUS_ABORTED = 0, 1
BUFFER_USAGE_WEIGHTS = 1
DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, DEVICE_TYPE_ACCEL = 0, 1, 2, 3
ROPE_TYPE_NORMAL, ROPE_TYPE_NEOX, ROPE_TYPE_MROPE, ROPE_TYPE_VISION, ROPE_TYPE_IMROPE = 0, 2, 8, 24, 40
PREC_F32 = 10
N_TASKS_MAX = -1  # as many tasks as there are threads
MAX_NAME = 64


class ggml_init_params(ctypes.Structure):  # noqa: N801 - C names throughout this file
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class ggml_tensor(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class ggml_type_traits(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    ]


class ggml_backend_dev_caps(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("async", ctypes.c_bool),
        ("host_buffer", ctypes.c_bool),
        ("buffer_from_host_ptr", ctypes.c_bool),
        ("events", ctypes.c_bool),
        ("mmap_support", ctypes.c_bool),
    ]


class ggml_backend_dev_props(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("device_id", ctypes.c_char_p),
        ("caps", ggml_backend_dev_caps),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ggml_init_params": ggml_init_params,
    "ggml_tensor": ggml_tensor,
    "ggml_type_traits": ggml_type_traits,
}

SHORT = {
    # library
    "ggml_version": "s ",
    "ggml_log_set": "v pp",
    "ggml_tensor_overhead": "z ",
    "ggml_graph_overhead_custom": "z zb",
    "ggml_type_name": "s i",
    "ggml_type_size": "z i",
    "ggml_blck_size": "l i",
    "ggml_row_size": "z il",
    "ggml_get_type_traits": "p i",
    "ggml_quantize_init": "v i",
    "ggml_quantize_requires_imatrix": "b i",
    # contexts and graphs
    "ggml_init": "p {ggml_init_params}",
    "ggml_free": "v p",
    "ggml_reset": "v p",
    "ggml_used_mem": "z p",
    "ggml_new_graph_custom": "p pzb",
    "ggml_build_forward_expand": "v pp",
    "ggml_graph_n_nodes": "i p",
    "ggml_graph_node": "p pi",
    "ggml_graph_clear": "v p",
    # tensors
    "ggml_new_tensor_1d": "p pil",
    "ggml_new_tensor_2d": "p pill",
    "ggml_new_tensor_3d": "p pilll",
    "ggml_new_tensor_4d": "p pillll",
    "ggml_dup_tensor": "p pp",
    "ggml_view_tensor": "p pp",
    "ggml_set_name": "p ps",
    "ggml_get_name": "s p",
    "ggml_op_desc": "s p",
    "ggml_set_input": "v p",
    "ggml_set_output": "v p",
    "ggml_nbytes": "z p",
    "ggml_nelements": "l p",
    "ggml_is_contiguous": "b p",
    # shape
    "ggml_reshape_1d": "p ppl",
    "ggml_reshape_2d": "p ppll",
    "ggml_reshape_3d": "p pplll",
    "ggml_reshape_4d": "p ppllll",
    "ggml_view_1d": "p pplz",
    "ggml_view_2d": "p ppllzz",
    "ggml_view_3d": "p pplllzzz",
    "ggml_view_4d": "p ppllllzzzz",
    "ggml_permute": "p ppiiii",
    "ggml_transpose": "p pp",
    "ggml_cont": "p pp",
    "ggml_cont_2d": "p ppll",
    "ggml_concat": "p pppi",
    "ggml_cast": "p ppi",
    "ggml_cpy": "p ppp",
    "ggml_repeat": "p ppp",
    # arithmetic
    "ggml_add": "p ppp",
    "ggml_sub": "p ppp",
    "ggml_mul": "p ppp",
    "ggml_div": "p ppp",
    "ggml_scale": "p ppf",
    "ggml_sqr": "p pp",
    "ggml_sqrt": "p pp",
    "ggml_sum_rows": "p pp",
    "ggml_clamp": "p ppff",
    "ggml_exp": "p pp",
    "ggml_log": "p pp",
    "ggml_floor": "p pp",
    "ggml_softplus": "p pp",
    "ggml_cumsum": "p pp",
    "ggml_repeat_4d": "p ppllll",
    "ggml_scale_bias": "p ppff",
    "ggml_add_id": "p pppp",
    "ggml_pad": "p ppiiii",
    # networks
    "ggml_rms_norm": "p ppf",
    "ggml_norm": "p ppf",
    "ggml_l2_norm": "p ppf",
    "ggml_mul_mat": "p ppp",
    "ggml_mul_mat_id": "p pppp",
    "ggml_silu": "p pp",
    "ggml_gelu": "p pp",
    "ggml_gelu_erf": "p pp",
    "ggml_gelu_quick": "p pp",
    "ggml_relu": "p pp",
    "ggml_sigmoid": "p pp",
    "ggml_tanh": "p pp",
    "ggml_swiglu": "p pp",
    "ggml_swiglu_split": "p ppp",
    "ggml_swiglu_oai": "p pppff",
    "ggml_geglu": "p pp",
    "ggml_geglu_split": "p ppp",
    "ggml_soft_max": "p pp",
    "ggml_soft_max_ext": "p pppff",
    "ggml_soft_max_add_sinks": "v pp",
    "ggml_rope_ext": "p ppppiiiffffff",
    "ggml_rope_set_offset": "p pi",
    "ggml_rope_multi": "p ppppipiiffffff",
    "ggml_flash_attn_ext": "p pppppfff",
    "ggml_flash_attn_ext_add_sinks": "v pp",
    "ggml_ssm_conv": "p ppp",
    "ggml_ssm_scan": "p ppppppppl",
    "ggml_gated_delta_net": "p pppppppl",
    "ggml_prec_set_acc": "b pi",
    "ggml_get_rows": "p ppp",
    "ggml_set_rows": "p pppp",
    "ggml_argsort_top_k": "p ppi",
    "ggml_custom_4d": "p pillllpipip",
    # devices, buffers, backends
    "ggml_backend_dev_count": "z ",
    "ggml_backend_dev_get": "p z",
    "ggml_backend_dev_by_type": "p i",
    "ggml_backend_dev_name": "s p",
    "ggml_backend_dev_description": "s p",
    "ggml_backend_dev_type": "i p",
    "ggml_backend_dev_memory": "v ppp",
    "ggml_backend_dev_get_props": "v pp",
    "ggml_backend_dev_backend_reg": "p p",
    "ggml_backend_dev_buffer_type": "p p",
    "ggml_backend_dev_supports_op": "b pp",
    "ggml_backend_dev_supports_buft": "b pp",
    "ggml_backend_reg_name": "s p",
    "ggml_backend_reg_get_proc_address": "p ps",
    "ggml_backend_reg_dev_count": "z p",
    "ggml_backend_reg_dev_get": "p pz",
    "ggml_backend_buft_name": "s p",
    "ggml_backend_buft_get_alignment": "z p",
    "ggml_backend_buft_get_alloc_size": "z pp",
    "ggml_backend_buft_is_host": "b p",
    "ggml_backend_buffer_get_base": "p p",
    "ggml_backend_buffer_get_size": "z p",
    "ggml_backend_buffer_get_type": "p p",
    "ggml_backend_buffer_is_host": "b p",
    "ggml_backend_buffer_set_usage": "v pi",
    "ggml_backend_cpu_buffer_type": "p ",
    "ggml_backend_cpu_buffer_from_ptr": "p pz",
    "ggml_backend_tensor_alloc": "i ppp",
    "ggml_backend_cpu_set_n_threads": "v pi",
    "ggml_backend_cpu_set_abort_callback": "v ppp",
    "ggml_backend_is_cpu": "b p",
    "ggml_backend_name": "s p",
    "ggml_backend_get_device": "p p",
    "ggml_backend_get_default_buffer_type": "p p",
    "ggml_backend_sched_new": "p ppizbb",
    "ggml_backend_sched_free": "v p",
    "ggml_backend_sched_reset": "v p",
    "ggml_backend_sched_alloc_graph": "b pp",
    "ggml_backend_sched_get_n_splits": "i p",
    "ggml_backend_sched_get_buffer_size": "z pp",
    "ggml_backend_sched_set_tensor_backend": "v ppp",
    "ggml_backend_alloc_ctx_tensors_from_buft_size": "z pp",
}

LONG = {
    "ggml_backend_dev_init": "p ps",
    "ggml_backend_free": "v p",
    "ggml_backend_alloc_ctx_tensors_from_buft": "p pp",
    "ggml_backend_buft_alloc_buffer": "p pz",
    "ggml_backend_buffer_free": "v p",
    "ggml_backend_buffer_clear": "v pc",
    "ggml_backend_tensor_set": "v ppzz",
    "ggml_backend_tensor_get": "v ppzz",
    "ggml_backend_sched_reserve": "b pp",
    "ggml_backend_sched_reserve_size": "v ppp",
    "ggml_backend_sched_graph_compute": "i pp",
    "ggml_backend_sched_synchronize": "v p",
    "ggml_backend_graph_compute": "i pp",
    "ggml_quantize_chunk": "z ipplllp",
    "ggml_validate_row_data": "b ipz",
}


@cache
def ggml() -> Functions:
    """The bound functions; opens the libraries on first use.

    Errors: NativeLibraryError where there is no library, or not what the tables say.
    """
    functions = opened().bind("ggml", SHORT, LONG, STRUCTS)
    for misfit in ggml_misfits(functions, STRUCTS):
        raise opened().misfit(misfit)
    return functions
