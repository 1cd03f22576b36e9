"""The metrics of a live run, read by a real Prometheus: their names, their values, and every query of the dashboard."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.run_files import lines_of
from tests.trainer.test_loop import run, trainer_of, weights_of
from unirl.config.errors import AddressError
from unirl.tracking.metrics import METRICS
from unirl.tracking.mirrors import RunInfo
from unirl.tracking.prometheus import PrometheusMirror
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.tracker import Tracker

pytest.importorskip("prometheus_client")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian, Ubuntu: apt-get install prometheus)",
)
DASHBOARD = json.loads((Path("unirl/tracking/grafana.json")).read_text())
QUERIES = sorted({target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]})
TOY = ("num_rollouts=2", "tracking.prometheus.port=0", "evaluation.eval_steps=2", "save_interval=1")
NOT_OF_TOY = ("tokens", "queue", "reward_latency", "reward_busy", "alarm", "train_kl", "phase_active")
"""Parts of the names of families that the toy run does not have. It makes images, scores them in one part, is healthy,
and has no phase after its last step."""


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read(2**20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def tracker_with_all_metrics(root: Path) -> Iterator[PrometheusMirror]:
    """A run that logged each metric of the table, and raised an alarm."""
    mirror = PrometheusMirror(0)
    about = RunInfo(root=root, project="demo", run_id="all")
    with Tracker(RunDirectory(root, RunIdentity(project="demo", recipe="r")), mirrors=[mirror], about=about) as tracker:
        tracker.probe(lambda: {"workers": 3.0, "silent_s": 0.5, "phase/train": 1.0})
        names = [name.replace("<component>", "text").replace("<", "").replace(">", "") for name in METRICS]
        tracker.record(dict.fromkeys(names, 2.5))
        tracker.event("alarm.raise", alarm="kl.runaway", value=1.0, step=1, text="it grows")
        with tracker.timers.phase("step"), tracker.timers.phase("generate"):
            time.sleep(0.01)
        tracker.log_step(1)
        yield mirror


class Prometheus:
    """A server of Debian's package that scrapes five times a second what lists of targets name."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.folder = folder

    @contextmanager
    def scraping(self, targets: list[Path]) -> Iterator[Prometheus]:
        found_at = [{"files": [str(path) for path in targets], "refresh_interval": "1s"}]
        job = {"job_name": "unirl", "scrape_interval": "200ms", "scrape_timeout": "200ms", "file_sd_configs": found_at}
        config = self.folder / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [job]}))
        words = ("prometheus", f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'data'}")
        server = subprocess.Popen(
            (*words, f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=error"),
            stdout=subprocess.DEVNULL,
        )
        try:
            yield self
        finally:
            server.terminate()
            server.wait(30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that answer a query."""
        try:
            answer = json.loads(get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read(1000).decode()}") from error
        return answer["data"]["result"]

    def await_series(self, expression: str) -> list[dict[str, Any]]:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                if series := self.query(expression):
                    return series
            except OSError:  # it starts
                pass
            time.sleep(0.1)
        raise AssertionError(f"no answer to {expression}")


def filled(query: str, run: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    return query.replace("$run", run).replace("$__rate_interval", "20s")


@needs_prometheus
def test_a_real_prometheus_scrapes_a_live_run_and_every_query_of_the_dashboard_answers(tmp_path) -> None:
    toy = tmp_path / "toy"
    (tmp_path / "server").mkdir()
    server = Prometheus(tmp_path / "server")
    targets = [toy / "prometheus.json", tmp_path / "all" / "prometheus.json"]
    with (
        server.scraping(targets),
        tracker_with_all_metrics(tmp_path / "all"),
        trainer_of(toy, *TOY) as trainer,
    ):
        server.await_series('unirl_run_info{run="toy"} and on (run) unirl_workers > 0')  # before its first step
        trainer.train()
        server.await_series('unirl_step{run="toy"} == 2')
        server.await_series('rate(unirl_steps_total{run="all"}[20s])')
        missing = [query for query in QUERIES if not server.query(filled(query, ".*"))]
        assert missing == []
        [alarms] = [query for query in QUERIES if query.startswith("sum by (run) (unirl_alarm_active")]
        counts = {each["metric"]["run"]: each["value"][1] for each in server.query(filled(alarms, ".*"))}
        assert counts == {"all": "1", "toy": "0"}  # without an alarm it is 0, not absent
        unanswered = [query for query in QUERIES if not server.query(filled(query, "toy"))]
        assert [query for query in unanswered if not any(part in query for part in NOT_OF_TOY)] == []
        last = lines_of(toy / "metrics.jsonl")[-1]

        def value(expression: str) -> float:
            [series] = server.query(expression)
            return float(series["value"][1])

        assert value('unirl_reward{run="toy", statistic="mean"}') == last["rollout/reward_mean"]
        assert value('unirl_phase_seconds{run="toy", phase="train"}') == last["time/train"]
        assert value('unirl_memory_peak_bytes{run="toy", where="host"}') == last["mem/host_peak_gib"] * 2**30
        assert value('unirl_steps_total{run="toy"}') == 2
        both = sum(row["samples/generated"] for row in lines_of(toy / "metrics.jsonl"))
        assert value('unirl_samples_total{run="toy", status="generated"}') == both
        runs = {series["metric"]["run"] for series in server.query("unirl_run_info")}
        assert runs == {"toy", "all"}
    assert not (toy / "prometheus.json").exists()


@needs_prometheus
def test_names_and_units_follow_the_conventions_as_promtool_judges_them(tmp_path) -> None:
    with tracker_with_all_metrics(tmp_path / "all") as mirror:
        text = get(mirror.url)
    judged = subprocess.run(("promtool", "check", "metrics"), input=text, capture_output=True, timeout=30)
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, b"")


def test_every_metric_of_the_table_is_served_with_its_meaning(tmp_path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with tracker_with_all_metrics(tmp_path / "all") as mirror:
        families = list(text_string_to_metric_families(get(mirror.url).decode()))
    [row] = lines_of(tmp_path / "all" / "metrics.jsonl")
    samples = [sample for family in families for sample in family.samples if family.name.startswith("unirl_")]
    assert all(family.documentation for family in families)
    assert len({(sample.name, tuple(sample.labels.items())) for sample in samples}) == len(samples)
    assert len(samples) >= len(row) + 8  # counters beside gauges, the state, the identity
    assert {sample.labels["run"] for sample in samples} == {"all"}


def test_watching_changes_no_bit_of_a_run(tmp_path) -> None:
    run(tmp_path / "unseen", "save_interval=1")
    stop: list[bool] = []
    with trainer_of(tmp_path / "seen", "save_interval=1", "tracking.prometheus.port=0") as trainer:
        [target] = json.loads((tmp_path / "seen" / "prometheus.json").read_text())
        reader = in_thread(lambda: get(f"http://{target['targets'][0]}/metrics"), stop)
        trainer.train()
        stop.append(True)
        reader.join()
    for step in (1, 2):
        assert weights_of(tmp_path / "seen", step) == weights_of(tmp_path / "unseen", step)


def in_thread(call: Callable[[], object], stop: list[bool]):
    """A thread that repeats a call until `stop` has an element."""
    from threading import Thread

    def repeat() -> None:
        while not stop:
            call()

    thread = Thread(target=repeat)
    thread.start()
    return thread


def test_a_port_in_use_is_refused_by_name_and_leaves_no_folder(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(AddressError, match=rf"prometheus.port={port} cannot be used: .*in use.*port=0"),
            trainer_of(tmp_path / "run", f"tracking.prometheus.port={port}"),
        ):
            pass
    assert not (tmp_path / "run").exists()


def test_the_server_listens_on_the_loopback_interface_alone_and_ends_with_the_run(tmp_path) -> None:
    with tracker_with_all_metrics(tmp_path / "all") as mirror:
        assert mirror._server.server_address[0] == "127.0.0.1"
        assert get(mirror.url)
    with pytest.raises(OSError, match="refused"):
        get(mirror.url)
