"""What of this process's environment its child processes get: what they need, and no secret of anybody's.

A runner parses files from strangers, a quantiser runs native code over them, pip talks to other machines: none of them has
any business with the server's API keys or the user's credentials for other services.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_COMMON = frozenset(("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"))
_COMMON_PREFIXES = ("LC_", "PYTHON", "LD_", "DYLD_", "XDG_", "MALLOC_", "COVERAGE_")
# Of tensor libraries, drivers, and what computes in threads.
_COMPUTING_PREFIXES = (
    *("GGML_", "LLAMA_CPP_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "GPU_", "AMD_", "AMDGPU_", "VK_", "MESA_", "ZE_", "SYCL_", "ONEAPI_"),
    *("PUNA_", "OLLAMA_"),
)
_REACHING = frozenset(
    ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NETRC")
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")


def for_computing(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For runners, the search for devices, and the quantiser."""
    return {
        name: value
        for name, value in _of(environ).items()
        if name in _COMMON or (name.startswith((*_COMMON_PREFIXES, *_COMPUTING_PREFIXES)) and not _SECRET.search(name))
    }


def for_pip(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """With pip's own settings, which may hold credentials for an index, and the way through proxies."""
    return {
        name: value
        for name, value in _of(environ).items()
        if name in _COMMON
        or name.startswith("PIP_")
        or name.upper() in _REACHING
        or (name.startswith(_COMMON_PREFIXES) and not _SECRET.search(name))
    }


def _of(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ
