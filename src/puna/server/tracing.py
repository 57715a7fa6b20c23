"""Traces of generations for OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT says who collects them.

Nothing is measured for them: when a generation has ended, its spans are made of what it took. The generation is one span,
with the client's as its parent where the request has a ``traceparent``; below it stand the wait (``queue``, which ends when
the prompt begins to be computed), ``prefill`` and ``decode``. Names of attributes are OpenTelemetry's for generative models
where it has them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from puna import __version__
from puna.server.records import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

_EXPORT_TIMEOUT_MS = 3000


class Tracing:
    """Spans are sent from a thread of the exporter's, in batches; where nobody takes them they are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "puna", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("puna", __version__)

    def record(self, record: Record) -> None:
        """Make the spans of a generation that has ended."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        offset = time.time_ns() - time.monotonic_ns()
        begin, end = record.began_ns + offset, record.ended_ns + offset
        parent = TraceContextTextMapPropagator().extract(dict(record.trace_headers))
        attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": record.model}
        if record.request_id:
            attributes["puna.request_id"] = record.request_id
        span = self._tracer.start_span(f"chat {record.model}", parent, trace.SpanKind.SERVER, attributes, start_time=begin)
        below = trace.set_span_in_context(span)

        def child(name: str, first: int, last: int, values: dict[str, int]) -> None:
            part = self._tracer.start_span(name, below, attributes=values, start_time=first)
            part.end(max(first, last))

        done = record.done
        if done is None:
            child("queue", begin, (record.placed_ns + offset) if record.placed_ns else end, {})
        else:
            first_token = max(end - done.eval_duration, begin)
            prompt = max(first_token - done.prompt_eval_duration, begin)
            counts = {"gen_ai.usage.input_tokens": done.prompt_eval_count, "gen_ai.usage.output_tokens": done.eval_count}
            span.set_attributes({**counts, "gen_ai.response.finish_reasons": [done.reason]})
            child("queue", begin, prompt, {})
            child(
                "prefill", prompt, first_token, {"puna.tokens": done.prompt_eval_count, "puna.tokens_cached": done.cached_count}
            )
            child("decode", first_token, end, {"puna.tokens": done.eval_count})
        if record.placed_ns:
            span.add_event("model loaded", timestamp=record.placed_ns + offset)
        if record.outcome != "ok":
            span.set_status(trace.Status(trace.StatusCode.ERROR, record.outcome))
        span.end(end)

    def close(self) -> None:
        """What has not been sent is, if that is possible at once."""
        self._provider.force_flush(_EXPORT_TIMEOUT_MS)
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing | None:
    """Over HTTP, to the paths that the protocol has below *endpoint*; None without one, or without the packages it takes."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces need what `pip install 'puna[traces]'` installs")
        return None
    log.info("traces go to %s", endpoint)
    return Tracing(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces"))
