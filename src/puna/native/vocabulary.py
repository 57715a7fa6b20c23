"""The vocabulary of a model file, held by libllama."""

from __future__ import annotations

import ctypes

from puna.native.in_use import InUse
from puna.native.llama import llama

# What a vocabulary is read as where libllama does not know the file's architecture; vocabularies are the same in all.
ANY_ARCHITECTURE = b"llama"

_TEXT = 3  # of enum llama_model_kv_override_type


class _Value(ctypes.Union):
    _fields_ = (("number", ctypes.c_int64), ("text", ctypes.c_char * 128))


class _Override(ctypes.Structure):
    """A llama_model_kv_override: what a key of the file is taken to say."""

    _fields_ = (("tag", ctypes.c_int32), ("key", ctypes.c_char * 128), ("value", _Value))


class Vocabulary:
    """A model opened for its vocabulary only: no weights are read. Any thread may ask, and any may close it."""

    def __init__(self, model: int) -> None:
        library = llama()
        address = library.llama_model_get_vocab(model)
        self._vocab = InUse("a vocabulary", address, lambda _: library.llama_model_free(model))
        self.n_tokens: int = library.llama_vocab_n_tokens(address)
        self.bos: int = library.llama_vocab_bos(address)
        self.adds_bos: bool = library.llama_vocab_get_add_bos(address)

    @classmethod
    def load(cls, path: str) -> Vocabulary | None:
        """None when libllama cannot read the file; the reason is in the log."""
        library = llama()
        params = library.llama_model_default_params()
        params.vocab_only = True
        params.use_extra_bufts = False
        model = library.llama_model_load_from_file(path.encode(), params)
        if not model:  # the last of a list is empty
            overrides = (_Override * 2)(_Override(_TEXT, b"general.architecture", _Value(text=ANY_ARCHITECTURE)))
            params.kv_overrides = ctypes.addressof(overrides)
            model = library.llama_model_load_from_file(path.encode(), params)
        return cls(model) if model else None

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        library = llama()
        capacity = len(text) + 8
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            with self._vocab as vocab:
                count = library.llama_tokenize(
                    vocab, text, len(text), ctypes.addressof(tokens), capacity, add_special, parse_special
                )
            if count >= 0:
                return tokens[:count]
            capacity = -count  # the library says how many it needs

    def piece(self, token: int, special: bool) -> bytes:
        library = llama()
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            with self._vocab as vocab:
                count = library.llama_token_to_piece(vocab, token, ctypes.addressof(buffer), capacity, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count

    def ends(self, token: int) -> bool:
        """Whether it ends an answer; a token of the vocabulary, which the library does not check."""
        with self._vocab as vocab:
            return bool(llama().llama_vocab_is_eog(vocab, token))

    def end_of_generation(self) -> list[int]:
        library = llama()
        with self._vocab as vocab:
            return [t for t in range(self.n_tokens) if library.llama_vocab_is_eog(vocab, t)]

    def close(self) -> None:
        self._vocab.close()
