"""The functions, structs and constants of libmtmd that Puna uses (mtmd.h, mtmd-helper.h): pictures and sound for libllama."""

from __future__ import annotations

import ctypes
from functools import cache

from puna.native.fit import mtmd_misfits
from puna.native.library import Functions, opened

CHUNK_TYPE_TEXT, CHUNK_TYPE_IMAGE, CHUNK_TYPE_AUDIO = 0, 1, 2

_p, _i, _b, _z, _u = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_size_t, ctypes.c_uint32


class mtmd_context_params(ctypes.Structure):  # noqa: N801 - C names throughout this file
    _fields_ = [
        ("use_gpu", _b),
        ("device", _p),
        ("print_timings", _b),
        ("n_threads", _i),
        ("image_marker", _p),
        ("media_marker", ctypes.c_char_p),
        ("flash_attn_type", _i),
        ("warmup", _b),
        ("image_min_tokens", _i),
        ("image_max_tokens", _i),
        ("cb_eval", _p),
        ("cb_eval_user_data", _p),
        ("batch_max_tokens", _i),
        ("progress_callback", _p),
        ("progress_callback_user_data", _p),
    ]


class mtmd_input_text(ctypes.Structure):  # noqa: N801
    _fields_ = [("text", ctypes.c_char_p), ("text_len", _z), ("add_special", _b), ("parse_special", _b)]


class mtmd_decoder_pos(ctypes.Structure):  # noqa: N801
    _fields_ = [("t", _u), ("x", _u), ("y", _u), ("z", _u)]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "mtmd_context_params": mtmd_context_params,
    "mtmd_input_text": mtmd_input_text,
    "mtmd_decoder_pos": mtmd_decoder_pos,
}

SHORT = {
    "mtmd_default_marker": "s ",
    "mtmd_context_params_default": "{mtmd_context_params} ",
    "mtmd_decode_use_non_causal": "b pp",
    "mtmd_decode_use_mrope": "b p",
    "mtmd_support_vision": "b p",
    "mtmd_support_audio": "b p",
    "mtmd_get_audio_sample_rate": "i p",
    "mtmd_bitmap_get_nx": "u p",
    "mtmd_bitmap_get_ny": "u p",
    "mtmd_bitmap_is_audio": "b p",
    "mtmd_bitmap_get_n_bytes": "z p",
    "mtmd_bitmap_free": "v p",
    "mtmd_input_chunks_init": "p ",
    "mtmd_input_chunks_size": "z p",
    "mtmd_input_chunks_get": "p pz",
    "mtmd_input_chunks_free": "v p",
    "mtmd_input_chunk_get_type": "i p",
    "mtmd_input_chunk_get_tokens_text": "p pp",
    "mtmd_input_chunk_get_tokens_image": "p p",
    "mtmd_input_chunk_get_n_tokens": "z p",
    "mtmd_input_chunk_get_n_pos": "i p",
    "mtmd_get_output_embd": "p p",
    "mtmd_helper_image_get_decoder_pos": "v pip",
    # It hands the callback to libmtmd's other half as well.
    "mtmd_helper_log_set": "v pp",
}

LONG = {
    "mtmd_init_from_file": "p sp{mtmd_context_params}",
    "mtmd_free": "v p",
    "mtmd_bitmap_init": "p uup",
    "mtmd_bitmap_init_from_audio": "p zp",
    "mtmd_tokenize": "i ppppz",
    "mtmd_encode_chunk": "i pp",
    "mtmd_helper_eval_chunks": "i pppiiibp",
    "mtmd_helper_eval_chunk_single": "i pppiiibp",
}


@cache
def mtmd() -> Functions:
    """The bound functions; opens the library on first use.

    Errors: NativeLibraryError where there is none, or not what the tables say.
    """
    functions = opened().bind("mtmd", SHORT, LONG, STRUCTS)
    for misfit in mtmd_misfits(functions):
        raise opened().misfit(misfit)
    return functions
