"""What a model takes of the runner's own memory, beside what its engine reports: vocabulary, logits, conversions.

None of it can be asked for before it is there, so it is reckoned, with constants measured on libllama b0c1e57 (ggml
0.25.3) with eight vocabularies from 32,000 to 262,144 tokens. ``tests/e2e/test_memory.py`` compares the sum with what a
runner's process takes.
"""

from __future__ import annotations

import msgspec

from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.runner.loading.engines import Opened
from puna.wire import MemoryReport

# A vocabulary in libllama: tokens with their text, both ways, and pairs of tokens that become one.
_VOCABULARY_BYTES = 2_700_000  # whatever its size
_BYTES_PER_TOKEN, _BYTES_PER_MERGE = 229, 74
_BYTES_PER_UNMERGED_TOKEN = 76  # of vocabularies without merges


def with_host(report: MemoryReport, opened: Opened) -> MemoryReport:
    """The report, with what the process takes beside it."""
    file, limits = opened.backend.file, opened.limits
    host = _vocabulary(file) + _rows(file, limits.n_batch) + 4 * limits.max_outputs * opened.n_vocab
    return msgspec.structs.replace(report, host=report.host + host)


def _vocabulary(file: GGUFFile) -> int:
    n_tokens, n_merges = (len(file.metadata.get(f"tokenizer.ggml.{name}", ())) for name in ("tokens", "merges"))
    per_token = _BYTES_PER_TOKEN if n_merges else _BYTES_PER_UNMERGED_TOKEN
    return _VOCABULARY_BYTES + per_token * n_tokens + _BYTES_PER_MERGE * n_merges


def _rows(file: GGUFFile, n_batch: int) -> int:
    """A batch converted to the type that the widest matrix is multiplied with, which the CPU keeps from step to step."""
    widest = 0.0
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and not tensor.name.startswith("token_embd") and tensor.type is not TensorType.F32:
            per_value = 2.0 if tensor.type in (TensorType.F16, TensorType.BF16) else 1.125
            widest = max(widest, per_value * tensor.shape[0])
    return int(widest * n_batch)
