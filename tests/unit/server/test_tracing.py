"""What requests took, as a collector gets it: real exporter, real HTTP, and a collector that keeps what comes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from puna.server import tracing
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live

CLIENTS_TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[str]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.append(self.path)
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    named = {item.key: item.value.string_value for item in resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def values(span: Any) -> dict[str, Any]:
    return {
        item.key: item.value.int_value or item.value.string_value or [v.string_value for v in item.value.array_value.values]
        for item in span.attributes
    }


def test_a_generation_is_a_span_with_its_parts_below_it(tmp_path: Path) -> None:
    collector = Collector()
    with collector.running() as url:
        live = Live(tmp_path, otlp_endpoint=url)
        live.add("hello", cached_count=2)
        with live.running():
            headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01", "x-request-id": "mine"}
            reply = live.client.post("/api/chat", json={"model": "hello", "messages": HI, "stream": False}, headers=headers)
            assert reply.status_code == 200
        # The server has ended: what it had to say it has said.
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.services == {"puna"}
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"chat hello:latest", "queue", "prefill", "decode"}
    whole = by_name["chat hello:latest"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (CLIENTS_TRACE, CLIENTS_SPAN)
    found = values(whole)
    body = reply.json()
    assert found["gen_ai.usage.input_tokens"] == body["prompt_eval_count"]
    assert found["gen_ai.usage.output_tokens"] == body["eval_count"]
    assert (found["gen_ai.request.model"], found["puna.request_id"]) == ("hello:latest", "mine")
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert values(by_name["prefill"]) == {"puna.tokens": body["prompt_eval_count"], "puna.tokens_cached": 2}
    assert [event.name for event in whole.events] == ["model loaded"]
    parts = [by_name[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent_span_id for part in parts} == {whole.span_id}
    times = [whole.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert times == sorted(times)
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano


def test_an_error_is_one(tmp_path: Path) -> None:
    collector = Collector()
    with collector.running() as url:
        live = Live(tmp_path, otlp_endpoint=url)
        live.add("broken", fail_at_piece=1)
        with live.running():
            live.post("/api/chat", {"model": "broken", "messages": HI})
    whole = next(span for span in collector.spans if span.name == "chat broken:latest")
    assert (whole.status.code, whole.status.message) == (2, "error")
    assert not whole.parent_span_id


def test_a_collector_that_is_not_there_keeps_nobody_waiting(tmp_path: Path) -> None:
    live = Live(tmp_path, otlp_endpoint="http://127.0.0.1:1")
    live.add("hello")
    with live.running():
        assert live.post("/api/chat", {"model": "hello", "messages": HI}).status_code == 200


def test_without_the_packages_a_line_in_the_log_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing.open_tracing("http://127.0.0.1:4318") is None
    assert "pip install 'puna[traces]'" in caplog.text
    assert tracing.open_tracing("") is None
