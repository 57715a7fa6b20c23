"""libllama's quantiser: it reads a model file of 16 or 32 bits and writes another one."""

from __future__ import annotations

import ctypes
from pathlib import Path

from puna.native.llama import llama


def quantise(source: Path, target: Path, file_type: int, n_threads: int) -> bool:
    """Whether it worked; if not, the library's log has the reason. *file_type* is a number of enum llama_ftype.

    A model that is quantised already is refused.
    """
    library = llama()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, n_threads
    status: int = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.addressof(params))
    return status == 0
