"""The newest metrics of a run over HTTP, in the text format that Prometheus reads.

    step, evaluation, event  ->  Readings  <- GET /metrics (a thread of the server)

Names follow https://prometheus.io/docs/practices/naming: base units (seconds, bytes), `_total` for counters, labels for
parts of one quantity. `docs/live.md` lists them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from unirl.tracking.metrics import meaning_of
from unirl.tracking.mirrors import Mirror, RunInfo
from unirl.tracking.tables import replace_text
from unirl.tracking.timing import GIB

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOOPBACK = "127.0.0.1"
TARGETS = "prometheus.json"
"""The file of the run directory that Prometheus' file-based service discovery reads (`file_sd_configs`)."""
POLL_S = 0.1
"""Seconds after which the server notices that it shall end."""
IDLE_S = 10.0
"""Seconds after which a silent connection is closed."""
WATCHDOG_FIELD = "text"
"""An alarm with this field is raised and cleared by the watchdog. Others are about one step."""


@dataclass(frozen=True)
class Rule:
    """A family of Prometheus that metrics of METRICS become."""

    family: str
    help: str
    scale: float = 1.0
    is_counter: bool = False
    """The value of each step is added."""


RULES: Mapping[str, tuple[Rule, ...]] = {
    r"time/(?P<phase>\w+)": (
        Rule("unirl_phase_seconds", "Wall time of each phase in the newest step; phase step is the whole step."),
        Rule("unirl_phase_seconds_total", "Wall time of each phase, summed over steps.", is_counter=True),
    ),
    r"samples/(?P<status>generated|scored|dropped)": (
        Rule("unirl_samples_total", "Samples by what became of them.", is_counter=True),
    ),
    r"samples/tokens": (Rule("unirl_tokens_total", "Generated tokens.", is_counter=True),),
    r"throughput/samples_per_s": (Rule("unirl_samples_per_second", "Samples of the newest step over its wall time."),),
    r"throughput/tokens_per_s": (Rule("unirl_tokens_per_second", "Tokens of the newest step over its wall time."),),
    r"throughput/generated_tokens_per_s": (
        Rule("unirl_generated_tokens_per_second", "Tokens of the newest step over the time of sampling."),
    ),
    r"reward/(?P<component>.+)_mean": (Rule("unirl_reward_component_mean", "Mean of a reward component in a step."),),
    r"reward/(?P<component>.+)_std": (
        Rule("unirl_reward_component_std", "Standard deviation of a reward component in a step."),
    ),
    r"reward/(?P<component>.+)_missing": (
        Rule("unirl_reward_component_missing", "Samples that a logged-only reward could not score."),
    ),
    r"rollout/reward_(?P<statistic>mean|std|min|max)": (Rule("unirl_reward", "Reward of the samples of a step."),),
    r"eval/reward_(?P<statistic>mean|stderr|min|max)": (Rule("unirl_eval_reward", "Reward on held-out prompts."),),
    r"eval/(?P<component>.+)_mean": (
        Rule("unirl_eval_component_mean", "Mean of a reward component on held-out prompts."),
    ),
    r"queue/reward_depth": (Rule("unirl_reward_queue_depth", "Most batches that waited for the reward at once."),),
    r"queue/reward_wait": (
        Rule("unirl_reward_queue_wait_seconds", "Wait for rewards after the last sample of a step."),
    ),
    r"queue/reward_latency": (
        Rule("unirl_reward_latency_seconds", "Mean time from the end of sampling of a batch to its scores."),
    ),
    r"queue/reward_busy": (Rule("unirl_reward_busy_ratio", "Share of the time in which the reward worked."),),
    r"sync/version": (Rule("unirl_weight_version", "Updates that the sampling weights have seen."),),
    r"sync/bytes": (
        Rule("unirl_weight_sync_bytes", "Bytes of the newest transfer of weights to the engine."),
        Rule("unirl_weight_sync_bytes_total", "Bytes of weights that were sent to the engine.", is_counter=True),
    ),
    r"mem/(?P<where>host|device)_peak_gib": (
        Rule("unirl_memory_peak_bytes", "Largest memory: host = of a process so far, device = in a step.", scale=GIB),
    ),
}
"""Families that gather metrics or change their unit, by the regular expression of the metrics. Groups become labels.

The first expression that fits is used. Every other metric becomes a gauge, `unirl_<namespace>_<name>`.
"""

LabelValues = tuple[tuple[str, str], ...]


@dataclass
class Family:
    """A family of values, one for each combination of labels."""

    help: str
    is_counter: bool
    values: dict[LabelValues, float]


class Readings:
    """The newest values of all families. Several threads may use it."""

    def __init__(self) -> None:
        self.run = ""
        """The id of the run, which every value has as a label."""
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}
        self._state: Callable[[], Mapping[str, float]] | None = None

    def set(self, family: str, text: str, value: float, **labels: str) -> None:
        """The newest value of a gauge."""
        with self._lock:
            self._family(family, text, False).values[tuple(sorted(labels.items()))] = value

    def add(self, family: str, text: str, value: float, **labels: str) -> None:
        """Raises a counter."""
        with self._lock:
            values, key = self._family(family, text, True).values, tuple(sorted(labels.items()))
            values[key] = values.get(key, 0.0) + value

    def probe(self, state: Callable[[], Mapping[str, float]]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """All families, for a registry of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._state is not None:
            self._read_state(self._state())
        with self._lock:
            families = {name: (family, dict(family.values)) for name, family in self._families.items()}
        for name, (family, values) in sorted(families.items()):
            names = sorted({label for labels in values for label, _ in labels})
            kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
            metric = kind(name, family.help, labels=["run", *names])
            for labels, value in values.items():
                metric.add_metric([self.run, *(dict(labels).get(label, "") for label in names)], value)
            yield metric

    def _read_state(self, state: Mapping[str, float]) -> None:
        with self._lock:
            self._families.pop("unirl_phase_active", None)  # a phase that has ended has no value
        for name, value in state.items():
            if name.startswith("phase/"):
                text = "1 for the phase that the run is in."
                self.set("unirl_phase_active", text, value, phase=name.removeprefix("phase/"))
        self.set("unirl_workers", "Workers that host roles.", state["workers"])
        text = "Time since the driver began its newest call, or saw progress of it."
        self.set("unirl_silent_seconds", text, state["silent_s"])

    def _family(self, name: str, text: str, is_counter: bool) -> Family:
        return self._families.setdefault(name, Family(text, is_counter, {}))


class PrometheusMirror(Mirror):
    """A server of `/metrics` on the loopback interface. It listens as soon as it is made, so a taken port is an error.

    It has a registry of its own, and draws no random numbers. A scrape reads values that the last step left.
    """

    name: ClassVar[str] = "prometheus"
    starts_with_run: ClassVar[bool] = True

    def __init__(self, port: int) -> None:
        """
        Args:
            port: 0 takes one that is free.

        Raises:
            OSError: if the port cannot be used.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        self.readings = Readings()
        registry = CollectorRegistry()
        registry.register(self.readings)
        ProcessCollector(registry=registry)
        self._server = make_server(LOOPBACK, port, make_wsgi_app(registry), _Server, _SilentHandler)
        self.port: int = self._server.server_port
        self.url = f"http://{LOOPBACK}:{self.port}/metrics"
        self._thread: threading.Thread | None = None
        self._targets: Path | None = None
        self._tracks: tuple[str, ...] = ()

    def start(self, about: RunInfo) -> None:
        self._tracks = about.tracks
        self.readings.run = about.run_id
        self.readings.set("unirl_run_info", "1, with the identity of the run.", 1, project=about.project)
        self.readings.set("unirl_start_timestamp_seconds", "When this process began the run.", time.time())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="prometheus", daemon=True
        )
        self._thread.start()
        self._targets = about.root / TARGETS
        replace_text(self._targets, json.dumps([{"targets": [f"{LOOPBACK}:{self.port}"]}]) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_step = any(name == "time/step" for name in metrics)
        if is_step:
            self.readings.add("unirl_steps_total", "Steps that this process finished.", 1)
            self.readings.set("unirl_step", "Steps that the run has finished.", step)
            self.readings.set("unirl_last_step_timestamp_seconds", "When the newest step ended.", time.time())
        for name, value in metrics.items():
            self._put(name, value)

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        self.readings.add("unirl_events_total", "Events of the run by name.", 1, event=name)
        if not name.startswith("alarm."):
            return
        alarm = str(fields["alarm"])
        is_raised = name == "alarm.raise"
        if is_raised:
            self.readings.add("unirl_alarms_total", "Alarms that were raised.", 1, alarm=alarm)
        if WATCHDOG_FIELD in fields or not is_raised:
            text = "1 while an alarm of the watchdog lasts, then 0."
            self.readings.set("unirl_alarm_active", text, float(is_raised), alarm=alarm)

    def probe(self, state: Callable[[], Mapping[str, float]]) -> None:
        self.readings.probe(state)

    def finish(self, code: int) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server, and removes the file that names its address. Further calls do nothing."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)

    def _put(self, name: str, value: float) -> None:
        first, _, rest = name.partition("/")
        track, metric = (first, rest) if first in self._tracks else ("", name)
        rules, labels = families_of(metric)
        for rule in rules:
            put = self.readings.add if rule.is_counter else self.readings.set
            put(rule.family, rule.help, value * rule.scale, **labels, **({"track": track} if track else {}))


@cache
def families_of(metric: str) -> tuple[tuple[Rule, ...], Mapping[str, str]]:
    """The families that a metric becomes, and its labels."""
    for pattern, rules in RULES.items():
        if match := re.fullmatch(pattern, metric):
            return rules, match.groupdict()
    family = "unirl_" + re.sub(r"\W", "_", metric.replace("@", "_at_"))
    return (Rule(family, meaning_of(metric)),), {}


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each request in a thread of its own, so that a slow client keeps nobody waiting."""

    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    """Writes no line for each request."""

    timeout = IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        pass
