"""Whether the structs of this package's tables are those of the library that is open, asked through the library itself.

A prebuilt library brings no headers, and of a struct that is declared wrongly nothing fails where it is written: a switch is
read from the bytes of another. So tensors are made and described by the library's own functions, and parameters are those that
it calls its defaults; what is found in the declared fields must be that.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from typing import Any

Structs = Mapping[str, type[ctypes.Structure]]

_F16, _Q4_0 = 1, 2  # of enum ggml_type
_OBJECT_BYTES = 32  # what ggml keeps in front of every tensor (GGML_OBJECT_SIZE)
_FLAG_INPUT = 1

CONTEXT_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": _F16,
    "type_v": _F16,
    "abort_callback": None,
    "abort_callback_data": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}
MODEL_DEFAULTS: Mapping[str, Any] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}


MARKER = b"<__media__>"
MTMD_DEFAULTS: Mapping[str, Any] = {
    "use_gpu": True,
    "device": None,
    "print_timings": True,
    "n_threads": 4,
    "image_marker": None,
    "media_marker": MARKER,
    "flash_attn_type": -1,
    "warmup": True,
    "image_min_tokens": -1,
    "image_max_tokens": -1,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "batch_max_tokens": 1024,
    "progress_callback": None,
    "progress_callback_user_data": None,
}


def _differences(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for field, value in expected.items():
        if found[field] != value:
            yield f"{name}.{field} is {found[field]!r} and not {value!r}"


def _fields(value: ctypes.Structure) -> dict[str, Any]:
    return {item[0]: getattr(value, item[0]) for item in value._fields_}


def ggml_misfits(g: Any, structs: Structs) -> Iterator[str]:
    """What of ggml's structs is not as declared."""
    yield from _tensor_misfits(g, structs)
    traits = structs["ggml_type_traits"].from_address(g.ggml_get_type_traits(_Q4_0))
    found = {**_fields(traits), "to_float": bool(traits.to_float)}
    expected = {
        "type_name": g.ggml_type_name(_Q4_0),
        "blck_size": g.ggml_blck_size(_Q4_0),
        "type_size": g.ggml_type_size(_Q4_0),
        "is_quantized": True,
        "to_float": True,
    }
    yield from _differences("ggml_type_traits", found, expected)


def _tensor_misfits(g: Any, structs: Structs) -> Iterator[str]:
    kind = structs["ggml_tensor"]
    if g.ggml_tensor_overhead() != ctypes.sizeof(kind) + _OBJECT_BYTES:
        yield f"a ggml_tensor takes {g.ggml_tensor_overhead() - _OBJECT_BYTES} bytes and not {ctypes.sizeof(kind)}"
        return
    memory = ctypes.create_string_buffer(1 << 14)
    begin = ctypes.addressof(memory)
    context = g.ggml_init(structs["ggml_init_params"](len(memory), begin, False))
    try:
        one = g.ggml_new_tensor_4d(context, _F16, 2, 3, 4, 5)
        other = g.ggml_new_tensor_4d(context, _F16, 2, 3, 4, 5)
        view = _fields(kind.from_address(g.ggml_view_1d(context, one, 4, 8)))
        scaled = _fields(kind.from_address(g.ggml_scale(context, one, 2.5)))
        added = _fields(kind.from_address(g.ggml_add(context, one, other)))
        g.ggml_set_name(one, b"probe")
        g.ggml_set_input(one)
        found = _fields(kind.from_address(one))
    finally:
        g.ggml_free(context)
    found |= {"ne": list(found["ne"]), "nb": list(found["nb"]), "data": begin < (found["data"] or 0) < begin + len(memory)}
    found |= {"scaled by": list(scaled["op_params"])[:1], "scaled from": list(scaled["src"])[:2]}
    found |= {"added from": list(added["src"])[:3], "view of": (view["view_src"], view["view_offs"])}
    expected = {
        "type": _F16,
        "buffer": None,
        "ne": [2, 3, 4, 5],
        "nb": [2, 4, 12, 48],
        "op": 0,
        "flags": _FLAG_INPUT,
        "view_src": None,
        "view_offs": 0,
        "data": True,
        "name": b"probe",
        "extra": None,
        "scaled by": list(struct.unpack("=i", struct.pack("=f", 2.5))),
        "scaled from": [one, None],
        "added from": [one, other, None],
        "view of": (one, 8),
    }
    yield from _differences("ggml_tensor", found, expected)


def device_misfits(g: Any, device: int, props: ctypes.Structure) -> Iterator[str]:
    """Of what is known of a device; asking starts its driver."""
    g.ggml_backend_dev_get_props(device, ctypes.addressof(props))
    expected = {"name": g.ggml_backend_dev_name(device), "description": g.ggml_backend_dev_description(device)}
    yield from _differences("ggml_backend_dev_props", _fields(props), {**expected, "type": g.ggml_backend_dev_type(device)})


def llama_misfits(functions: Any) -> Iterator[str]:
    """What of libllama's structs is not as declared."""
    yield from _differences("llama_model_params", _fields(functions.llama_model_default_params()), MODEL_DEFAULTS)
    yield from _differences("llama_context_params", _fields(functions.llama_context_default_params()), CONTEXT_DEFAULTS)
    for embedding in (0, 8):
        batch = functions.llama_batch_init(2, embedding, 1)
        found = {name: value if name == "n_tokens" else bool(value) for name, value in _fields(batch).items()}
        functions.llama_batch_free(batch)
        expected = {"n_tokens": 0, "token": not embedding, "embd": bool(embedding)}
        yield from _differences("llama_batch", found, expected | dict.fromkeys(("pos", "n_seq_id", "seq_id", "logits"), True))


def mtmd_misfits(functions: Any) -> Iterator[str]:
    """What of libmtmd's parameters and pictures is not as declared. How a text is handed over cannot be asked without a model."""
    yield from _differences("mtmd_context_params", _fields(functions.mtmd_context_params_default()), MTMD_DEFAULTS)
    pixels = ctypes.create_string_buffer(3 * 2 * 5)
    bitmap = functions.mtmd_bitmap_init(2, 5, ctypes.addressof(pixels))
    found = {
        "nx": functions.mtmd_bitmap_get_nx(bitmap),
        "ny": functions.mtmd_bitmap_get_ny(bitmap),
        "n_bytes": functions.mtmd_bitmap_get_n_bytes(bitmap),
    }
    functions.mtmd_bitmap_free(bitmap)
    yield from _differences("mtmd_bitmap", found, {"nx": 2, "ny": 5, "n_bytes": 30})
