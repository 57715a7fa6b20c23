from __future__ import annotations

from puna.native.kernels.build import LIBRARY
from puna.native.kernels.library import Kernels

_BESIDE_TILES = b"avx512_bf16"

# Where there is no library the test says so itself.
_lacks = LIBRARY.exists() and not Kernels(str(LIBRARY)).puna_has_instructions(_BESIDE_TILES)
collect_ignore = ["test_emulated_tiles.py"] if _lacks else []
