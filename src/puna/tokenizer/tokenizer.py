"""Text to tokens and back, with the vocabulary of a model file, through libllama (which reads only the vocabulary)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import nullcontext
from functools import cached_property, lru_cache
from pathlib import Path

from puna.errors import BadRequest, FileFormatError
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.native.vocabulary import Vocabulary

_ENDS = "tokenizer.ggml.eos_token_ids"


class EndTokens(Set[int]):
    """Tokens that end an answer: each is asked about by itself, until somebody wants them all and every token is."""

    def __init__(self, vocabulary: Vocabulary, stated: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stated = frozenset(stated)

    @cached_property
    def _all(self) -> frozenset[int]:
        return self._stated.union(self._vocabulary.end_of_generation())

    def __contains__(self, token: object) -> bool:
        return token in self._stated or (
            isinstance(token, int) and 0 <= token < self._vocabulary.n_tokens and self._vocabulary.ends(token)
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @classmethod
    def _from_iterable(cls, tokens: Iterable[int]) -> Set[int]:  # type: ignore[override]  # of what sets of them make
        return frozenset(tokens)


class Tokenizer:
    """Safe to use from several threads: the vocabulary never changes."""

    def __init__(self, path: str | Path, head: GGUFFile | None = None) -> None:
        """*head* is the same file, where somebody has opened it already."""
        v = Vocabulary.load(str(path))
        if v is None or v.n_tokens == 0:
            raise FileFormatError(f"{path}: the file has no vocabulary that can be used")
        self._vocabulary = v
        self.n_tokens: int = v.n_tokens
        self.bos: int = v.bos  # -1 when there is none
        self.adds_bos: bool = v.adds_bos
        self.end_tokens: Set[int] = EndTokens(v, _stated_ends(path, head, v.n_tokens))
        self._piece = lru_cache(maxsize=65536)(v.piece)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of the text.

        add_special: put the model's begin (and end) tokens around it. parse_special: text such as ``<|im_end|>`` becomes
        the control token it names. A text that begins with the begin token itself gets no second one.
        """
        tokens = self._vocabulary.tokenize(text.encode("utf-8", "replace"), add_special, parse_special)
        if add_special and self.adds_bos and tokens[:2] == [self.bos, self.bos]:
            del tokens[0]
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, perhaps part of a character; control tokens are empty unless *special*.

        Errors: BadRequest for a number outside the vocabulary.
        """
        if not 0 <= token < self.n_tokens:
            raise BadRequest(f"token {token} is not in the vocabulary of {self.n_tokens}")
        return self._piece(token, special)

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")

    def close(self) -> None:
        self._vocabulary.close()


def _stated_ends(path: str | Path, head: GGUFFile | None, n_tokens: int) -> Iterator[int]:
    """Tokens that end an answer beside the one that libllama reads: the ancestor's key for those of models with several."""
    with nullcontext(head) if head is not None else GGUFFile.open(path) as file:
        stated = file.metadata.get(_ENDS)
        yield from (
            token
            for token in (stated if isinstance(stated, LazyArray) else ())
            if isinstance(token, int) and 0 <= token < n_tokens
        )
