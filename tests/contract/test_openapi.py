"""The server's description of itself, and schemathesis, which believes it: whatever the description allows or forbids, no
request makes the server fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from puna.server.apis import openapi
from tests.contract.every_kind import DOCUMENTED, serving
from tests.contract.test_embed_routes import Serving
from tests.patience import PATIENCE_S

BRIEF = {"num_predict": 3, "num_ctx": 128}
MODELS = ["chat", "embedder", "ranker", "nope", "bad name!", ""]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("server"), BRIEF) as server:
        yield server


@pytest.fixture(scope="module")
def schema(live: Serving) -> Any:
    found = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    found.validate()
    return found


def test_every_route_is_described(live: Serving) -> None:
    described = live.client.get("/openapi.json").json()
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(openapi.operations(live.server.config.app.routes))  # type: ignore[union-attr]
    assert set(openapi._OPERATIONS) <= found, "what is described is there"
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["model"]
    assert chat["properties"]["options"]["properties"]["num_ctx"]["type"] == "integer"
    assert described["openapi"] == "3.1.0"


def aimed(case: Any, model: str) -> Any:
    """Mostly at models that exist, and never at anything beyond this machine or at what other tests need."""
    is_transfer = case.path in ("/api/pull", "/api/push")
    if case.path == "/api/search" and isinstance(case.body, dict):
        case.body["host"] = "127.0.0.1:9"
    if isinstance(case.body, dict) and (is_transfer or isinstance(case.body.get("model"), str)):
        case.body["model"] = "127.0.0.1:9/nobody/nothing" if is_transfer else model
        if case.path in ("/api/delete", "/api/create"):
            case.body["model"] = "scratch"
        case.body.pop("name", None)
    return case


ASKED = [
    pytest.param(*key, mode, id=f"{key[0]} {key[1]} {mode.value}")
    for key, operation in sorted(openapi._OPERATIONS.items())
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.body is not None  # of bytes and of paths all are as described
]


@pytest.mark.parametrize(("method", "path", "mode"), ASKED)
def test_no_request_makes_the_server_fail(live: Serving, schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = schema[path][method]

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from(MODELS))
    def ask(case: Any, model: str) -> None:
        case = aimed(case, model)
        response = case.call(base_url=live.url, timeout=PATIENCE_S)
        checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
        if response.status_code < 500 or not DOCUMENTED.match(_text(response)):
            checks.append(not_a_server_error)
        case.validate_response(response, checks=checks)

    ask()
    assert live.client.get("/api/version").status_code == 200


def _text(response: Any) -> str:
    error = response.json().get("error", "")
    return str(error["message"] if isinstance(error, dict) else error)
