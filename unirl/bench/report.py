"""The report of a benchmark: what ran, where, and every measured value. `bench_schema.json` is its JSON Schema."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from unirl.bench.probe import Machine
from unirl.bench.workloads import Size
from unirl.config.errors import DataError, NotFoundError
from unirl.tracking.record import Commit

SCHEMA = Path(__file__).parent / "bench_schema.json"
MAX_BYTES = 2**24
"""Bytes of a report that are read."""
SAMPLES_PER_S, STEP_S = "samples_per_s", "step_s"


@dataclass(frozen=True, kw_only=True)
class Software:
    """The versions and settings that the runs were made with."""

    platform: str
    threads: int | None
    """Threads of PyTorch in each process."""
    versions: Mapping[str, str]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, whose weights are random."""

    bundle: str
    path: str
    dtype: str
    parameters: Mapping[str, int]
    """Number of parameters by component. Empty if the bundle cannot say it."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices and what runs on them."""

    num_devices: int
    runtime: str
    placement: str


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How weights and work are divided. None or empty: the recipe does not set it."""

    lora: Mapping[str, Any] | None
    fsdp: Mapping[str, Any] | None
    topology: Mapping[str, Any] | None
    """Devices by kind of parallelism: dp, tp, pp, sp, ep, cp."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step. Reports whose work differs cannot be compared."""

    prompts: int
    samples: int
    sampling: Mapping[str, Any]
    """The settings of `sampling`."""
    flops: Mapping[str, float]
    """Operations of one device in a step by phase, as the plan counts them, without what is computed again. Empty for
    a language model, and if the bundle cannot say the sizes of its model."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The number of repeats, and of the steps in each of them."""

    warmup: int
    """Steps of each repeat before those that count."""
    steps: int
    """Steps of each repeat that count."""
    repeats: int
    """Runs, each in a process of its own."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The rate in relation to which MFU is given."""

    tflops: float
    """1e12 operations per second of one device."""
    source: Literal["measured", "given"]
    """The best of several large matrix products, or `--ceiling`."""
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One measured step."""

    seconds: float
    samples: int
    phases: Mapping[str, float]
    """Seconds by phase: generate, reward, train, sync, and others that the recipe has."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run."""

    steps: tuple[Step, ...]
    host_gib: float | None
    """Largest resident memory of the driver process, which also trains where the runtime is local."""
    device_gib: float | None
    """Largest allocation on a device."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One quantity: its value in each repeat."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The median absolute deviation from the median."""
        return statistics.median(abs(value - self.median) for value in self.values)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The content of a report."""

    schema_version: Literal[1] = 1
    created: str
    """UTC, ISO 8601."""
    workload: str
    size: Size
    engine: str
    recipe: str
    settings: tuple[str, ...]
    """The settings of the workload."""
    overrides: tuple[str, ...]
    """The settings of the command line."""
    commit: Commit | None
    machine: Machine
    environment: Software
    model: Model
    topology: Topology
    parallelism: Parallelism
    work: StepWork
    protocol: Protocol
    ceiling: Ceiling | None
    repeats: tuple[Repeat, ...]
    figures: Mapping[str, Figure]
    """By name, derived from `repeats`: `figures_of`."""


def figures_of(repeats: tuple[Repeat, ...], flops: Mapping[str, float], ceiling: Ceiling | None) -> dict[str, Figure]:
    """Samples per second, seconds of a step and of its phases, peak memory, and MFU where a ceiling is known.

    A repeat counts with the sums over its steps: samples / seconds, and seconds / steps.
    """
    rows = [_row(repeat, flops, ceiling) for repeat in repeats]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: Figure(values=tuple(row[name] for row in rows)) for name in names}


def _row(repeat: Repeat, flops: Mapping[str, float], ceiling: Ceiling | None) -> dict[str, float]:
    count, total = len(repeat.steps), sum(step.seconds for step in repeat.steps)
    row = {SAMPLES_PER_S: sum(step.samples for step in repeat.steps) / total, STEP_S: total / count}
    phases = dict.fromkeys(name for step in repeat.steps for name in step.phases)
    seconds = {name: sum(step.phases.get(name, 0.0) for step in repeat.steps) / count for name in phases}
    row |= {f"{name}_s": value for name, value in seconds.items()}
    memory = {"host_gib": repeat.host_gib, "device_gib": repeat.device_gib}
    row |= {name: gib for name, gib in memory.items() if gib is not None}
    if ceiling is not None and flops:
        rate = ceiling.tflops * 1e12
        row["mfu"] = sum(flops.values()) / (row[STEP_S] * rate)
        row |= {f"mfu_{name}": flops[name] / (seconds[name] * rate) for name in flops if seconds.get(name)}
    return row


def write(report: BenchReport, path: Path) -> None:
    """Writes a report as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read(path: Path) -> BenchReport:
    """Reads a report.

    Raises:
        NotFoundError: 4001 if there is no such file.
        DataError: 4002 if it is no report of this version.
    """
    if not path.is_file():
        raise NotFoundError(f"{path}: there is no such file. A report is written by unirl bench WORKLOAD --json FILE")
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=BenchReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no report of `unirl bench` ({error}). Its fields are described by {SCHEMA}"
        ) from error


def schema() -> dict[str, Any]:
    """The JSON Schema of a report. `python -m unirl.bench.report` prints it for bench_schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(BenchReport)}


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(schema()), indent=1).decode())
