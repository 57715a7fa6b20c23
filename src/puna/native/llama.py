"""The functions, structs and constants of libllama that Puna uses (llama.h): vocabulary, and decoding."""

from __future__ import annotations

import ctypes
from functools import cache

from puna.native.fit import Structs, llama_misfits
from puna.native.library import Functions, opened

VOCAB_TYPE_NONE = 0
LOAD_MODE_AUTO, LOAD_MODE_NONE, LOAD_MODE_MMAP = -1, 0, 1
FLASH_ATTN_AUTO, FLASH_ATTN_DISABLED, FLASH_ATTN_ENABLED = -1, 0, 1
POOLING_TYPE_UNSPECIFIED, POOLING_TYPE_NONE, POOLING_TYPE_RANK = -1, 0, 4

_p, _i, _u, _f, _b, _z = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_float,
    ctypes.c_bool,
    ctypes.c_size_t,
)


class llama_model_params(ctypes.Structure):  # noqa: N801 - C names throughout this file
    _fields_ = [
        ("devices", _p),
        ("tensor_buft_overrides", _p),
        ("n_gpu_layers", _i),
        ("split_mode", _i),
        ("load_mode", _i),
        ("lazy_mode", _i),
        ("main_gpu", _i),
        ("tensor_split", _p),
        ("progress_callback", _p),
        ("progress_callback_user_data", _p),
        ("kv_overrides", _p),
        ("vocab_only", _b),
        ("check_tensors", _b),
        ("use_extra_bufts", _b),
        ("no_host", _b),
        ("no_alloc", _b),
        ("load_mtp", _b),
    ]


class llama_context_params(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("n_ctx", _u),
        ("n_batch", _u),
        ("n_ubatch", _u),
        ("n_seq_max", _u),
        ("n_rs_seq", _u),
        ("n_outputs_max", _u),
        ("n_outputs_max_per_seq", _u),
        ("n_threads", _i),
        ("n_threads_batch", _i),
        ("ctx_type", _i),
        ("rope_scaling_type", _i),
        ("pooling_type", _i),
        ("attention_type", _i),
        ("flash_attn_type", _i),
        ("rope_freq_base", _f),
        ("rope_freq_scale", _f),
        ("yarn_ext_factor", _f),
        ("yarn_attn_factor", _f),
        ("yarn_beta_fast", _f),
        ("yarn_beta_slow", _f),
        ("yarn_orig_ctx", _u),
        ("defrag_thold", _f),
        ("cb_eval", _p),
        ("cb_eval_user_data", _p),
        ("type_k", _i),
        ("type_v", _i),
        ("abort_callback", _p),
        ("abort_callback_data", _p),
        ("embeddings", _b),
        ("offload_kqv", _b),
        ("no_perf", _b),
        ("op_offload", _b),
        ("swa_full", _b),
        ("kv_unified", _b),
        ("samplers", _p),
        ("n_samplers", _z),
        ("ctx_other", _p),
    ]


class llama_batch(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("n_tokens", _i),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "llama_model_params": llama_model_params,
    "llama_context_params": llama_context_params,
    "llama_batch": llama_batch,
}


_before_abort = [field[0] for field in llama_context_params._fields_].index("abort_callback")


class _WithExpertsCache(ctypes.Structure):
    """llama_context_params since ggml 0.26."""

    _fields_ = [
        *llama_context_params._fields_[:_before_abort],
        ("moe_cache_size", _z),
        *llama_context_params._fields_[_before_abort:],
    ]


def structs_of(ggml_version: str) -> Structs:
    return STRUCTS if ggml_version == "0.25.3" else {**STRUCTS, "llama_context_params": _WithExpertsCache}


SHORT = {
    "llama_log_set": "v pp",
    "llama_model_default_params": "{llama_model_params} ",
    "llama_context_default_params": "{llama_context_params} ",
    "llama_model_get_vocab": "p p",
    "llama_model_n_ctx_train": "i p",
    "llama_model_n_embd": "i p",
    "llama_model_n_embd_inp": "i p",
    "llama_model_n_embd_out": "i p",
    "llama_model_n_cls_out": "u p",
    "llama_model_n_swa": "i p",
    "llama_model_rope_type": "i p",
    "llama_model_is_recurrent": "b p",
    "llama_model_is_hybrid": "b p",
    "llama_model_is_diffusion": "b p",
    "llama_model_has_encoder": "b p",
    "llama_model_has_decoder": "b p",
    "llama_n_ctx": "u p",
    "llama_vocab_type": "i p",
    "llama_vocab_n_tokens": "i p",
    "llama_vocab_is_eog": "b pi",
    "llama_vocab_is_control": "b pi",
    "llama_vocab_bos": "i p",
    "llama_vocab_eos": "i p",
    "llama_vocab_get_add_bos": "b p",
    "llama_vocab_get_add_eos": "b p",
    "llama_token_to_piece": "i pipiib",
    "llama_set_n_threads": "v pii",
    "llama_set_abort_callback": "v ppp",
    "llama_get_causal_attn": "b p",
    "llama_set_causal_attn": "v pb",
    "llama_get_memory": "p p",
    "llama_memory_clear": "v pb",
    "llama_memory_seq_rm": "b piii",
    "llama_memory_seq_cp": "v piiii",
    "llama_memory_seq_add": "v piiii",
    "llama_memory_seq_pos_min": "i pi",
    "llama_memory_seq_pos_max": "i pi",
    "llama_memory_can_shift": "b p",
    "llama_get_logits_ith": "p pi",
    "llama_get_embeddings_ith": "p pi",
    "llama_get_embeddings_seq": "p pi",
}

LONG = {
    "llama_backend_init": "v ",
    "llama_model_load_from_file": "p s{llama_model_params}",
    "llama_model_free": "v p",
    "llama_adapter_lora_init": "p ps",
    "llama_adapter_lora_free": "v p",
    "llama_set_adapters_lora": "i ppzp",
    "llama_init_from_model": "p p{llama_context_params}",
    "llama_free": "v p",
    "llama_tokenize": "i psipibb",
    "llama_batch_init": "{llama_batch} iii",
    "llama_batch_free": "v {llama_batch}",
    "llama_decode": "i p{llama_batch}",
    "llama_encode": "i p{llama_batch}",
    "llama_synchronize": "v p",
    "llama_get_logits": "p p",
    "llama_get_embeddings": "p p",
}


@cache
def llama() -> Functions:
    """The bound functions; opens the libraries on first use.

    Errors: NativeLibraryError where there is no library, or not what the tables say.
    """
    functions = opened().bind("llama", SHORT, LONG, structs_of(opened().version))
    for misfit in llama_misfits(functions):
        raise opened().misfit(misfit)
    return functions
