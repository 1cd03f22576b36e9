"""Traces of the steps of a run for OpenTelemetry: one trace per step, with a span per phase and per call of a role.

    step
      sync      weight_sync.push
      generate  rollout.generate
      reward    reward.score_and_attach
      train     stack.train_track

Spans are the driver's view: a call begins when the driver makes it, and ends when the driver has its result.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from unirl.tracking.mirrors import Mirror, RunInfo
from unirl.tracking.timing import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import SpanContext

PATH = "/v1/traces"
"""The path of traces at an endpoint of OTLP over HTTP."""
EXPORT_S = 5.0
"""Seconds that the export of a batch may take, and that the end of a run waits for the last one."""


class CollectorError(RuntimeError):
    """The collector takes no spans."""


class OpenTelemetryMirror(Mirror):
    """Sends spans to a collector by OTLP over HTTP, from a thread of the SDK. A dead collector never delays a step.

    Trace ids are drawn from the operating system, so that Python's generator of random numbers does not move.
    """

    name: ClassVar[str] = "opentelemetry"
    wants_spans: ClassVar[bool] = True

    def __init__(self, endpoint: str) -> None:
        """
        Args:
            endpoint: such as `http://127.0.0.1:4318`, to which the path is added, or a URL with the path.
        """
        address = endpoint.rstrip("/")
        self.endpoint = address if address.endswith(PATH) else address + PATH
        self._has_failed = False
        """A batch was not taken. A thread of the SDK sets this."""
        self._earlier: dict[int, SpanContext] = {}
        """The spans of the previous step, by number. A call that outlasted its phase names one as its parent."""

    def make_exporter(self) -> SpanExporter:
        """The exporter of the SDK that sends the spans."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=self.endpoint, timeout=EXPORT_S)

    def start(self, about: RunInfo) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The tracker says once that the collector failed. The library would say so for every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        names = {"service.name": "unirl", "service.instance.id": about.run_id, "unirl.project": about.project}
        self._exporter = _watched(self.make_exporter(), self._note_failure)
        self._provider = TracerProvider(
            resource=Resource.create(names), id_generator=_system_ids(), shutdown_on_exit=False
        )
        self._processor = BatchSpanProcessor(self._exporter, export_timeout_millis=EXPORT_S * 1000)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("unirl")

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        from opentelemetry.trace import NonRecordingSpan, Status, StatusCode, set_span_in_context

        self._check()
        contexts: dict[int, SpanContext] = {}
        for span in sorted(spans, key=lambda span: span.number):  # a parent begins before its children
            parent = None if span.parent is None else contexts.get(span.parent) or self._earlier.get(span.parent)
            context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
            sent = self._tracer.start_span(
                span.name, context=context, attributes=_attributes(step, span), start_time=span.start_ns
            )
            if span.has_failed:
                sent.set_status(Status(StatusCode.ERROR))
            sent.end(span.end_ns)
            contexts[span.number] = sent.get_span_context()
        self._earlier = contexts

    def finish(self, code: int) -> None:
        self._processor.force_flush(int(EXPORT_S * 1000))
        self._provider.shutdown()
        self._check()

    def _note_failure(self) -> None:
        self._has_failed = True

    def _check(self) -> None:
        if self._has_failed:
            self._exporter.shutdown()
            self._provider.shutdown()
            raise CollectorError(f"the collector at {self.endpoint} takes no spans")


def _attributes(step: int, span: Span) -> Mapping[str, str | int]:
    attributes: dict[str, str | int] = {"unirl.step": step, "unirl.kind": span.kind}
    if span.kind == "call":
        role, _, method = span.name.rpartition(".")
        attributes |= {"unirl.role": role, "unirl.method": method}
    return attributes


def _system_ids() -> IdGenerator:
    """Ids from the random numbers of the operating system."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class SystemIds(IdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1  # 0 is no id

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    return SystemIds()


def _watched(inner: SpanExporter, note_failure: Callable[[], None]) -> SpanExporter:
    """An exporter that calls `note_failure` after a batch that was not taken."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class WatchedExporter(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = inner.export(spans)
            if result is not SpanExportResult.SUCCESS:
                note_failure()
            return result

        def shutdown(self) -> None:
            inner.shutdown()

    return WatchedExporter()
