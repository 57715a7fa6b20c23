"""Puna's own matrix products, where they were compiled: the library, its functions, and the instruction set they run with.

Rows of quantised matrices are packed when they are read; the functions whose names end in ``_node`` are computed by ggml's
threads inside its graphs (``ggml_custom_4d``). Knows nothing of models, nor of which matrices are worth packing.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any

from puna import settings
from puna.errors import NativeLibraryError
from puna.native.ggml import ggml_tensor
from puna.native.kernels.build import LIBRARY
from puna.native.kernels.race import Product, fastest
from puna.native.library import Functions
from puna.native.signature import declare

log = logging.getLogger(__name__)

VERSION = 11

# Of packed matrices, which all instruction sets read alike: another one when formats.h lays them out in another way.
LAYOUT = "1"

PLACE = "PUNA"  # beside the names of ggml's kinds of memory, that of matrices packed for these products

ATTENTION = "PUNA attention"  # the same for what its keys and values may be held as

# Which instruction set is used, for comparisons; without it the best that the processor has.
FORCED = "PUNA_KERNEL_INSTRUCTIONS"

# Instruction sets of which the later one may multiply faster: tiles and registers, and without dot products
# registers of 64 and of 32 bytes.
RIVALS = {"amx": "avx512_bf16", "avx512": "avx2"}

CHECKED = ("amx",)  # sets that are compared with the portable one before their first use

SHORT = {
    "puna_kernels_version": "i ",
    "puna_tensor_layout": "v p",
    "puna_instructions": "s i",
    "puna_has_instructions": "b s",
    "puna_use_instructions": "b s",
    "puna_use_both": "b ss",
    "puna_check_instructions": "b s",
    "puna_packed_bytes": "l ill",
    "puna_rounding": "i i",
    "puna_rounded_bytes": "l ill",
    "puna_matrix_new": "p ill",
    "puna_matrix_free": "v p",
    "puna_experts_new": "p iillli",
    "puna_experts_free": "v p",
    "puna_ordered_bytes": "l pl",
    "puna_linear_new": "p ppilifi",
    "puna_linear_free": "v p",
    "puna_normaliser_new": "p if",
    "puna_normaliser_free": "v p",
    "puna_can_attend": "b i",
    "puna_attention_new": "p lllllpbfffll",
    "puna_attention_floats": "l p",
    "puna_attention_free": "v p",
}

LONG = {
    "puna_pack": "v iplllp",
    "puna_unpack": "v ipllp",
    "puna_round": "v ipllp",
    "puna_multiply": "v ppplp",
    "puna_normalise": "v ppfpl",
    "puna_gate": "v ipppl",
    "puna_exercise": "l l",
    "puna_read": "L pl",
}

NODES = (
    *("puna_round_node", "puna_normalise_node", "puna_linear_node", "puna_column_linear_node", "puna_rows_node"),
    *("puna_order_node", "puna_experts_node", "puna_token_experts_node"),
    *("puna_attention_node", "puna_turn_node"),
)


class Kernels(Functions):
    """The library's functions under their own names, and the addresses of those that are nodes."""

    def __init__(self, path: str) -> None:
        try:
            short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
            for library, table in ((short, SHORT), (long, LONG)):
                for name, signature in table.items():
                    setattr(self, name, declare(getattr(library, name), signature, {}))
            self.nodes = {name: ctypes.cast(getattr(short, name), ctypes.c_void_p).value or 0 for name in NODES}
        except (OSError, AttributeError) as error:
            raise NativeLibraryError(f"the matrix products cannot be opened: {error}; compile them again: make") from error
        if self.puna_kernels_version() != VERSION or self._layout() != _expected_layout():
            raise NativeLibraryError(f"the matrix products in {path} are of another version; compile them again: make")
        self.refused: list[str] = []  # instruction sets that this processor says it has, and computes wrongly with
        self.instructions = self._select(settings.load().kernel_instructions)

    def linear(
        self, types: Sequence[int], n_rows: Sequence[int], n_in: int, gate: int = 0, eps: float = -1.0, output: int = -1
    ) -> int:
        """What the nodes of several products of one input are told, to be freed.

        A negative eps: no norm before them; a negative output: what is gated is not rounded.
        """
        n = len(types)
        of_types, of_rows = (ctypes.c_int32 * n)(*types), (ctypes.c_int64 * n)(*n_rows)
        return int(self.puna_linear_new(ctypes.addressof(of_types), ctypes.addressof(of_rows), n, n_in, gate, eps, output))

    def _layout(self) -> list[int]:
        found = (ctypes.c_int64 * 6)()
        self.puna_tensor_layout(ctypes.addressof(found))
        return list(found)

    def known(self) -> list[str]:
        """The instruction sets that were compiled, the best first."""
        names: list[str] = []
        while (name := self.puna_instructions(len(names))) is not None:
            names.append(name.decode())
        return names

    def available(self) -> list[str]:
        """Those that this processor has, and computes rightly with."""
        found = [name for name in self.known() if self.puna_has_instructions(name.encode())]
        for name in CHECKED:
            if name in found and name not in self.refused and not self.puna_check_instructions(name.encode()):
                self.refused.append(name)
                log.warning("this processor computes wrongly with its instructions %s, which are not used", name)
        return [name for name in found if name not in self.refused]

    def _select(self, wanted: str) -> str:
        """Errors: NativeLibraryError when this processor does not have what was asked for."""
        available = self.available()
        name = wanted or available[0]
        if name not in available:
            raise NativeLibraryError(f"{FORCED}={wanted}: this processor has {', '.join(available)}")
        self.use(name)
        rival = RIVALS.get(name, "")
        if not wanted and rival in available:
            with closing(Product(self)) as product:
                self.use_both(fastest([name, rival], self.use, product), name)
        return self.instructions

    def use(self, name: str) -> None:
        """Compute with this instruction set from now on, one of the available."""
        if not self.puna_use_instructions(name.encode()):
            raise ValueError(f"this processor does not have {name}")
        self.instructions = name

    def use_both(self, fast: str, settled: str) -> None:
        """The first for what has the same bits with both, so that a text does not hang on which of them was faster today."""
        if not self.puna_use_both(fast.encode(), settled.encode()):
            raise ValueError(f"this processor does not have {fast} and {settled}")
        self.instructions = fast


def _expected_layout() -> list[int]:
    fields: list[Any] = [ggml_tensor.type, ggml_tensor.ne, ggml_tensor.nb, ggml_tensor.src, ggml_tensor.data]
    return [*(field.offset for field in fields), ctypes.sizeof(ggml_tensor)]


def is_compiled() -> bool:
    return LIBRARY.exists()


def is_usable() -> bool:
    """Whether they were compiled, and for this version of Puna."""
    try:
        kernels()
    except NativeLibraryError:
        return False
    return True


@cache
def kernels() -> Kernels:
    """Errors: NativeLibraryError where they were not compiled or cannot be used."""
    if not is_compiled():
        raise NativeLibraryError("the matrix products were not compiled: install a C++ compiler, then run make")
    return Kernels(str(LIBRARY))


def wanted(use: bool | None = None) -> Kernels | None:
    """The products if they are to be used: as *use* says, or else the setting PUNA_KERNELS.

    None where they are not wanted, and, after a line in the log, where they were not compiled.
    """
    if not (settings.load().kernels if use is None else use):
        return None
    try:
        return kernels()
    except NativeLibraryError as error:
        # As text: a record that is kept somewhere would keep the frames of the error, and with them the model that is loaded.
        log.warning("ggml multiplies all matrices: %s", str(error))
        return None


def in_words() -> str:
    """Which products the engine would use, for people."""
    if not settings.load().kernels:
        return "ggml's (PUNA_KERNELS is off)"
    try:
        own = kernels()
        refused = f"; this processor computes wrongly with {', '.join(own.refused)}" if own.refused else ""
        return f"Puna's own ({own.instructions}{refused})"
    except NativeLibraryError as error:
        return f"ggml's ({error})"
