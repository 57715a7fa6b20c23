"""A prompt's beginning as short numbers: equal keys mean equal text up to there, and nobody reads the text from them.

Each whole block of a prompt has a key that is made of it and of the key before, so one key stands for all that precedes it.
They are of text, not of tokens: who routes has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from puna import wire
from puna.errors import BadRequest

BLOCK_BYTES = 64  # about sixteen tokens of English
MAX_KEYS = 2048  # of one prompt: what comes after so much text changes nothing about where it goes
KEY_BYTES = 8


def keys_of(request: wire.CompletionRequest, answer: str = "") -> list[int]:
    """Those of the prompt, and of what was answered behind it. Prompts of different salts have none in common."""
    text = request.prompt
    for image in request.images:
        text = text.replace(image.marker, blake2b(image.data, digest_size=16).hexdigest())
    return _chain((text + answer).encode("utf-8", "surrogatepass"), _seed(request))


def _seed(request: wire.CompletionRequest) -> bytes:
    """What stands before the text, and whose it is."""
    before = blake2b(request.salt.encode("utf-8", "surrogatepass"), digest_size=16)
    if request.context:
        before = blake2b(before.digest() + repr(request.context).encode(), digest_size=16)
    return before.digest()


def _chain(data: bytes, seed: bytes) -> list[int]:
    keys, last = [], seed
    for begin in range(0, min(len(data), MAX_KEYS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = blake2b(last + data[begin : begin + BLOCK_BYTES], digest_size=KEY_BYTES).digest()
        keys.append(int.from_bytes(last, "little"))
    return keys


def pack(keys: Iterable[int]) -> bytes:
    """Eight bytes for each."""
    return b"".join(key.to_bytes(KEY_BYTES, "little") for key in keys)


def unpack(data: bytes) -> list[int]:
    """Errors: BadRequest when it is no list of keys."""
    if len(data) % KEY_BYTES:
        raise BadRequest(f"{len(data)} bytes are no list of keys of {KEY_BYTES} bytes")
    return [int.from_bytes(data[begin : begin + KEY_BYTES], "little") for begin in range(0, len(data), KEY_BYTES)]


def n_leading(keys: Sequence[int], held: frozenset[int] | set[int]) -> int:
    """How many of the first keys are held, without a gap."""
    for number, key in enumerate(keys):
        if key not in held:
            return number
    return len(keys)


def n_common(keys: Sequence[int], others: Sequence[int]) -> int:
    """With how many keys both prompts begin."""
    return next((number for number, (a, b) in enumerate(zip(keys, others, strict=False)) if a != b), min(len(keys), len(others)))
