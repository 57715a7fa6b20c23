"""Kinds of quantised files: the names users give, and the numbers that files and libllama have for them.

Source: enum llama_ftype of llama.h. Kinds that need an importance matrix are left out.
"""

from __future__ import annotations

from puna.errors import PunaError

KINDS = {  # general.file_type by name, the usual ones first
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_K_M": 17,
    "Q5_K_S": 16,
    "Q5_1": 9,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K_S": 14,
    "Q4_1": 3,
    "Q4_0": 2,
    "IQ4_XS": 30,
    "IQ4_NL": 25,
    "Q3_K_L": 13,
    "Q3_K_M": 12,
    "Q3_K_S": 11,
    "Q2_K": 10,
}
_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def kind_named(text: str) -> str:
    """The proper name of a kind, written in any case; Q4_K stands for Q4_K_M.

    Errors: PunaError naming all kinds.
    """
    wanted = text.upper()
    found = _SHORT.get(wanted, wanted)
    if found not in KINDS:
        raise PunaError(f"unsupported quantization type {wanted[:40]} - supported types are {', '.join(KINDS)}")
    return found
