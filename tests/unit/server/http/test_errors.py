from __future__ import annotations

import inspect

import pytest

from puna import errors
from puna.api.options import OptionTypeError
from puna.errors import PunaError
from puna.server.http.errors import STATUS, describe, native_body, openai_body, status_of

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PunaError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_status(kind: type[PunaError]) -> None:
    assert kind in STATUS
    assert 400 <= STATUS[kind] < 600


def test_an_error_from_elsewhere_has_its_parents_status() -> None:
    assert status_of(OptionTypeError("x")) == 500
    assert status_of(errors.ContextOverflow(10, 5)) == 400


def test_what_was_not_raised_on_purpose_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert describe(KeyError("secret")) == ("internal server error: KeyError", 500)
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (404, "not_found_error"), (500, "api_error"), (503, "api_error")]
)
def test_shapes(status: int, kind: str) -> None:
    assert native_body("no", status) == {"error": "no"}
    assert openai_body("no", status) == {"error": {"message": "no", "type": kind, "param": None, "code": None}}
