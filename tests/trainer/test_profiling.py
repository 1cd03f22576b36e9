"""The block `profile`: the trace and the table of a step, against the times of its phases, and equal bits."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tests.run_files import lines_of, metrics_of
from tests.trainer.test_loop import run, weights_of
from unirl.config.errors import ConfigError


def test_a_profiled_step_has_a_trace_and_a_table_per_phase_and_the_same_bits(tmp_path) -> None:
    run(tmp_path / "plain")
    run(tmp_path / "seen", "profile.steps=[2]", "profile.operations=1000")
    assert metrics_of(tmp_path / "seen") == metrics_of(tmp_path / "plain")
    assert weights_of(tmp_path / "seen", 2) == weights_of(tmp_path / "plain", 2)
    folder = tmp_path / "seen" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.json.gz", "step-000002.md"]
    with gzip.open(folder / "step-000002.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"phase step", "phase generate", "phase reward", "phase train", "aten::addmm"} <= names
    text = (folder / "step-000002.md").read_text()
    phases = dict(re.findall(r"^## (\w+): ([\d.e-]+) s$", text, re.M))
    assert phases.keys() == {"sync", "generate", "reward", "train"}
    recorded = lines_of(tmp_path / "seen" / "metrics.jsonl")[1]
    for name, seconds in phases.items():
        # The range also covers what the profiler does at its first operation, longer on a busy machine.
        assert float(seconds) == pytest.approx(recorded[f"time/{name}"], rel=0.2, abs=0.1)
    for section in text.split("## ")[1:]:
        shares = [float(share) for share in re.findall(r"([\d.]+)% \|", section)]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 100.5  # own times of one thread do not overlap
        assert shares or section.startswith("sync")  # nothing moves to an engine that shares the weights
    assert "Backward" in text.split("## train")[1] and "Backward" not in text.split("## train")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile.steps=[1]", "runtime=ray", "num_devices=2"], "profile traces the process of the driver"),
        (["profile.steps=[0]"], "profile.steps"),
        (["profile.steps=[5]"], r"profile.steps=\[5\]: the run ends with step \d \(num_rollouts\)"),
    ],
)
def test_what_cannot_be_profiled_is_refused(words, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *words)
