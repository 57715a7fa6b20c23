"""A query and a text as one input: what a model reads that tells how well the two go together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from puna.errors import BadRequest, ContextOverflow
from puna.gguf.reader import GGUFFile
from puna.runner.tasks.inputs import Fitted
from puna.runner.tasks.prompt import special_around
from puna.tokenizer.tokenizer import Tokenizer

# In templates for ranking.
_CONTROL = re.compile(r"(<\|[^|<>]+\|>)")
_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class Pairs:
    """Texts as a cross encoder reads them: the query, what separates the two, the text; each with its special tokens.

    ``[CLS] query [SEP] text [SEP]`` of BERT and ``<s> query </s></s> text </s>`` of RoBERTa are both the query as the
    tokenizer wraps it, *separator*, and the text without what begins a text. Control tokens written in a text are text.
    """

    def __init__(self, query: str, tokenizer: Tokenizer, n_ctx: int, separator: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._begin, self._end = special_around(tokenizer)
        self._middle = [*self._end, *separator]
        self._query = self._plain(query)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def tokenize(self, text: str | list[int], index: int, truncate: bool) -> Fitted:
        """Errors: BadRequest for tokens in a text's place; ContextOverflow."""
        if not isinstance(text, str):
            raise BadRequest(f"input {index} must be a text, to be judged against a query")
        query, document = self._query, self._plain(text)
        room = self._n_ctx - len(self._begin) - len(self._middle) - len(self._end)
        n_cut = max(0, len(query) + len(document) - room)
        if n_cut:
            if not truncate or room < 2:
                raise ContextOverflow(self._n_ctx - room + len(query) + len(document), self._n_ctx)
            query = query[: max(room // 2, room - len(document))]
            document = document[: room - len(query)]
        return Fitted([*self._begin, *query, *self._middle, *document, *self._end], n_cut)


class TemplatedPairs:
    """Texts as a ranking decoder reads them: query and text in the template that its file has for that.

    Control tokens written in query or text are text.
    """

    def __init__(self, template: str, query: str, tokenizer: Tokenizer, n_ctx: int) -> None:
        self._parts = _CONTROL.split(template)  # every second one is a control token
        self._query = query
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx

    def _tokens(self, document: str) -> list[int]:
        texts = {"query": self._query, "document": document}
        tokens: list[int] = []
        for i, part in enumerate(self._parts):
            is_control = i % 2 == 1
            filled = part if is_control else _PLACEHOLDER.sub(lambda found: texts[found[1]], part)
            tokens += self._tokenizer.encode(filled, add_special=False, parse_special=is_control)
        return tokens

    def tokenize(self, text: str | list[int], index: int, truncate: bool) -> Fitted:
        """Errors: BadRequest for tokens in a text's place; ContextOverflow."""
        if not isinstance(text, str):
            raise BadRequest(f"input {index} must be a text, to be judged against a query")
        tokens = self._tokens(text)
        n_tokens = len(tokens)
        while len(tokens) > self._n_ctx:
            if not (truncate and text):
                raise ContextOverflow(len(tokens), self._n_ctx)
            # About as many characters fewer as there are tokens too many.
            text = text[: int(len(text) * self._n_ctx / len(tokens))]
            tokens = self._tokens(text)
        return Fitted(tokens, n_tokens - len(tokens))


def pair_separator(file: GGUFFile, tokenizer: Tokenizer) -> list[int]:
    """What stands between query and text beside the special tokens that end a text.

    A WordPiece tokenizer ends a text with the separator already; of the others the file says whether one comes on top.
    """
    meta = file.metadata
    token = meta.integer("tokenizer.ggml.seperator_token_id", -1)  # so spelt in the format
    is_asked = meta.boolean("tokenizer.ggml.add_sep_token", False) and meta.string("tokenizer.ggml.model", "") != "bert"
    return [token] if is_asked and 0 <= token < tokenizer.n_tokens else []
