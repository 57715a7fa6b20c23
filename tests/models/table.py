"""Every architecture with a row that the contract of tests/parity/test_architectures.py runs."""

from __future__ import annotations

from tests.models import llama
from tests.models.row import Row

# By the name that files state, or a variety of it after a colon.
ROWS: dict[str, Row] = {
    "llama:experts": llama.MIXTRAL,
}
