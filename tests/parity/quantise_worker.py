"""libllama's own quantiser in a process of its own: only a compiled library has it. Reads lines "source target number"."""

from __future__ import annotations

import ctypes
import sys

from puna.native.library import opened
from puna.native.log import route_to_logging


class Params(ctypes.Structure):
    """llama_model_quantize_params."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((name, ctypes.c_bool) for name in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure")),
        *((name, ctypes.c_bool) for name in ("keep_split", "dry_run")),
        *((name, ctypes.c_void_p) for name in ("imatrix", "kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
    ]


def main() -> None:
    route_to_logging()
    library = ctypes.CDLL(str(opened().paths["llama"]))
    library.llama_model_quantize_default_params.restype = Params
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    for line in sys.stdin:
        source, target, number = line.split()
        params = library.llama_model_quantize_default_params()
        params.ftype, params.nthread = int(number), 1
        status = library.llama_model_quantize(source.encode(), target.encode(), ctypes.addressof(params))
        if status != 0:
            sys.exit(f"libllama does not make {number} of {source}")


if __name__ == "__main__":
    main()
