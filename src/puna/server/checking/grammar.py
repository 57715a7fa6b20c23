"""What an answer must look like: from a request's fields to the grammar that the runner compiles.

Knows no grammar from inside; whether one can be followed, the runner says.
"""

from __future__ import annotations

import json

from puna.api.generate import ChatRequest, GenerateRequest
from puna.errors import BadRequest, PunaError
from puna.wire import Grammar


def grammar_of(request: ChatRequest | GenerateRequest) -> Grammar | None:
    """Errors: PunaError for a format that is neither "json" nor a schema; BadRequest for more than one of them."""
    grammars = [grammar for grammar in (_of_format(request), _regex(request), _lark(request)) if grammar is not None]
    if len(grammars) > 1:
        raise BadRequest("an answer can follow only one of format, regex and lark")
    return grammars[0] if grammars else None


def _of_format(request: ChatRequest | GenerateRequest) -> Grammar | None:
    value = request.format
    if value is None or value == "":
        return None
    if value == "json":
        return Grammar(kind="json")
    if isinstance(value, dict):
        return Grammar(kind="json_schema", text=json.dumps(value))
    raise PunaError(f'invalid format: {json.dumps(value)[:200]}; expected "json" or a valid JSON Schema object')


def _regex(request: ChatRequest | GenerateRequest) -> Grammar | None:
    return Grammar(kind="regex", text=request.regex) if request.regex else None


def _lark(request: ChatRequest | GenerateRequest) -> Grammar | None:
    return Grammar(kind="lark", text=request.lark) if request.lark else None
