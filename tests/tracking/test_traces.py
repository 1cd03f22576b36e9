"""Traces of a step: spans of phases and calls, as an exporter of the SDK keeps them and as a collector gets them."""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.run_files import lines_of
from tests.trainer.test_loop import trainer_of
from unirl.tracking.mirrors import Mirror
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.timing import Spans
from unirl.tracking.tracker import Tracker

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def test_a_span_knows_what_it_began_in_and_whether_it_failed() -> None:
    spans = Spans()
    with spans.span("step", "phase"):
        with spans.span("generate", "phase"):
            wait = spans.until_result("reward.score", lambda deadline_s: deadline_s * 2)
        with pytest.raises(ZeroDivisionError), spans.span("train", "phase"):
            raise ZeroDivisionError
        assert wait(3.0) == 6.0
    ended = {span.name: span for span in spans.take()}
    assert [ended[name].has_failed for name in ("step", "generate", "train", "reward.score")] == [0, 0, 1, 0]
    assert ended["generate"].parent == ended["train"].parent == ended["step"].number
    assert ended["reward.score"].parent == ended["generate"].number
    assert ended["reward.score"].end_ns > ended["train"].end_ns > ended["generate"].end_ns  # it outlasts its parent
    assert abs(ended["step"].start_ns - time.time_ns()) < 60e9
    assert spans.take() == []


def test_without_a_mirror_that_wants_them_no_spans_are_kept(tmp_path) -> None:
    with Tracker(RunDirectory(tmp_path / "r", RunIdentity(project="p", recipe="r")), mirrors=[Mirror()]) as tracker:
        assert tracker.timers.spans is None


def test_a_trace_of_a_step_has_its_phases_and_the_calls_of_roles(tmp_path, monkeypatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from unirl.tracking.traces import OpenTelemetryMirror

    kept = InMemorySpanExporter()
    monkeypatch.setattr(OpenTelemetryMirror, "make_exporter", lambda self: kept)
    with trainer_of(tmp_path / "run", "tracking.opentelemetry={}") as trainer:
        trainer.train()
        trainer.tracker.finish()
    spans = kept.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    steps = [span for span in spans if span.name == "step"]
    assert [(span.parent, span.attributes["unirl.step"]) for span in steps] == [(None, 1), (None, 2)]
    assert len({span.context.trace_id for span in steps}) == 2
    parents = {(span.name, names[span.parent.span_id]) for span in spans if span.parent is not None}
    assert {("sync", "step"), ("generate", "step"), ("reward", "step"), ("train", "step")} <= parents
    assert {("rollout.generate", "generate"), ("reward.score_and_attach", "reward")} <= parents
    assert ("checkpoint", "step") not in parents and "checkpoint" in names.values()
    call = next(span for span in spans if span.name == "rollout.generate")
    assert (call.attributes["unirl.role"], call.attributes["unirl.method"]) == ("rollout", "generate")
    # The same clock as time/*: a phase and its span differ by what the span's own bookkeeping costs.
    for row, step in zip(lines_of(tmp_path / "run" / "metrics.jsonl"), steps, strict=True):
        assert (step.end_time - step.start_time) / 1e9 == pytest.approx(row["time/step"], abs=0.01)
    assert steps[0].resource.attributes["service.instance.id"] == "run"


class Receiver(HTTPServer):
    """A collector of OTLP over HTTP that keeps what it receives."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[object] = []
        self.paths: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:  # the name that http.server calls
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.server.paths.add(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@contextmanager
def receiving(status: int = 200) -> Iterator[Receiver]:
    with Receiver(status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_ids_are_not_drawn_from_the_generator_of_python(tmp_path, monkeypatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from unirl.tracking.traces import OpenTelemetryMirror

    kept = InMemorySpanExporter()
    monkeypatch.setattr(OpenTelemetryMirror, "make_exporter", lambda self: kept)
    random.seed(7)
    drive(tmp_path / "r", "http://unused")
    assert random.random() == random.Random(7).random()
    assert len({span.context.trace_id for span in kept.get_finished_spans()}) == 2


def drive(root: Path, endpoint: str) -> None:
    """Two steps of a run with a trace."""
    from unirl.tracking.traces import OpenTelemetryMirror

    mirrors = [OpenTelemetryMirror(endpoint)]
    with Tracker(RunDirectory(root, RunIdentity(project="demo", recipe="r")), mirrors=mirrors) as tracker:
        for step in (1, 2):
            with tracker.timers.phase("step"), tracker.timers.phase("generate"):
                time.sleep(0.01)
            tracker.log_step(step)


def failures(root: Path) -> list[str]:
    return [row["error"] for row in lines_of(root / "events.jsonl") if row["ev"] == "mirror.failed"]


def test_a_collector_receives_the_spans_by_otlp_over_http(tmp_path) -> None:
    with receiving() as server:
        drive(tmp_path / "r", f"http://127.0.0.1:{server.server_port}/")
    assert server.paths == {"/v1/traces"}
    assert sorted(span.name for span in server.spans) == ["generate", "generate", "step", "step"]
    by_id = {span.span_id: span for span in server.spans}
    for span in server.spans:
        if span.name == "generate":
            parent = by_id[span.parent_span_id]
            assert (parent.name, parent.trace_id) == ("step", span.trace_id)
            assert parent.start_time_unix_nano <= span.start_time_unix_nano < span.end_time_unix_nano
            assert span.end_time_unix_nano - span.start_time_unix_nano >= 10e6
    assert failures(tmp_path / "r") == []


@pytest.mark.parametrize("is_there", [True, False], ids=["refuses", "is absent"])
def test_a_collector_that_takes_no_spans_is_reported_once_and_the_run_goes_on(is_there, tmp_path) -> None:
    begin = time.monotonic()
    if is_there:
        with receiving(status=400) as server:
            drive(tmp_path / "r", f"http://127.0.0.1:{server.server_port}")
    else:
        drive(tmp_path / "r", "http://127.0.0.1:9")
    [failure] = failures(tmp_path / "r")
    assert "takes no spans" in failure
    assert [row["step"] for row in lines_of(tmp_path / "r" / "metrics.jsonl")] == [1, 2]
    assert time.monotonic() - begin < 15


def test_an_endpoint_that_is_no_url_is_refused(tmp_path) -> None:
    from unirl.config.errors import ConfigError

    with (
        pytest.raises(ConfigError, match="endpoint must begin with http"),
        trainer_of(tmp_path / "run", "tracking.opentelemetry.endpoint=localhost:4318"),
    ):
        pass
