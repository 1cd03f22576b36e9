"""Measures a workload: runs of `unirl train`, each in a process of its own, read back from their run directories."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.bench.probe import Machine
from unirl.bench.report import (
    BenchReport,
    Ceiling,
    Model,
    Parallelism,
    Protocol,
    Repeat,
    Software,
    Step,
    StepWork,
    Topology,
    figures_of,
)
from unirl.bench.workloads import WORKLOADS, Size
from unirl.config.errors import BenchmarkError, MemoryShortageError
from unirl.config.load import Recipe
from unirl.config.merge import get
from unirl.plan.machine import check_memory
from unirl.plan.placement import plan_of
from unirl.plan.sizes import RunSizes, sizes_of_policies
from unirl.plan.times import generate_work, train_work
from unirl.tracking.record import RunRecord
from unirl.types.device import DeviceKind

SHOWN_LINES = 12
"""Last lines of the output of a run that failed."""
NOT_PHASES = ("step", "eval", "checkpoint")
"""Entries of `time/` that are no part of a step."""

Train = Callable[[Sequence[str], Path], None]
"""Trains with the words of a command line after `unirl train`, into a run directory."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A workload at one size with one engine, and how often it is measured."""

    workload: str
    size: Size
    engine: str
    overrides: tuple[str, ...]
    protocol: Protocol

    @property
    def recipe(self) -> str:
        return WORKLOADS[self.workload].recipe(self.engine)

    @property
    def settings(self) -> list[str]:
        """The settings of the workload. Those of the command line come after them and win."""
        steps = self.protocol.warmup + self.protocol.steps
        return [*WORKLOADS[self.workload].words(self.size, self.engine), f"num_rollouts={steps}"]

    @property
    def words(self) -> list[str]:
        """The command line after `unirl train`, without the run directory."""
        return [self.recipe, *self.settings, *self.overrides]


def train_in_a_process(words: Sequence[str], root: Path) -> None:
    """`unirl train` in a process of its own, whose peak memory is that of this run alone.

    Raises:
        BenchmarkError: 9007 if the run fails.
    """
    command = [sys.executable, "-m", "unirl.cli", "train", *words, f"run.dir='{root}'"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        lines = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-SHOWN_LINES:])
        raise BenchmarkError(
            f"a run of the benchmark ended with status {done.returncode}: unirl train {' '.join(words)}\n{lines}"
        )


def refuse_excess(benchmark: Benchmark, recipe: Recipe, machine: Machine, warn: Callable[[str], None]) -> None:
    """Refuses a workload that this machine cannot hold, before anything is built.

    Raises:
        MemoryShortageError: 5002. The message says how much is needed, and where.
    """
    name, gib = machine.accelerator, machine.accelerator_gib
    if name is None:
        name, gib = "the main memory of this machine, which has no accelerator,", machine.main_memory_gib
    for sizes in sizes_of_policies(recipe).values():
        try:
            check_memory(sizes, DeviceKind(name=name, memory_gib=gib), warn)
        except MemoryShortageError as error:
            raise MemoryShortageError(
                f"the workload {benchmark.workload} at size {benchmark.size} does not fit this machine: {error}. "
                "Use --size toy, or a machine with more memory"
            ) from error


def measure(
    benchmark: Benchmark,
    recipe: Recipe,
    machine: Machine,
    folder: Path,
    *,
    ceiling: float | None = None,
    train: Train = train_in_a_process,
    say: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Runs the benchmark and reports it.

    Args:
        recipe: the loaded recipe of `benchmark.words`.
        folder: gets a run directory per repeat.
        ceiling: 1e12 operations per second of one device. None: the measured rate of `machine`.
    """
    roots = []
    for number in range(1, benchmark.protocol.repeats + 1):
        roots.append(folder / f"repeat-{number:02d}")
        start = time.monotonic()
        train(benchmark.words, roots[-1])
        say(f"repeat {number} of {benchmark.protocol.repeats}: {time.monotonic() - start:.0f} s, start included")
    return report_of(benchmark, recipe, machine, [RunRecord(root) for root in roots], ceiling)


def report_of(
    benchmark: Benchmark, recipe: Recipe, machine: Machine, runs: Sequence[RunRecord], ceiling: float | None
) -> BenchReport:
    """The report of finished runs."""
    config, first = recipe.config, runs[0]
    facts = first.facts
    sizes = next(iter(sizes_of_policies(recipe).values())).run
    top = _ceiling(machine, ceiling)
    repeats = tuple(repeat_of(run, benchmark.protocol) for run in runs)
    flops = {} if sizes is None else flops_of(sizes)
    resolved = _mapping(first.files.yaml("config/resolved.yaml"))
    return BenchReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        workload=benchmark.workload,
        size=benchmark.size,
        engine=benchmark.engine,
        recipe=benchmark.recipe,
        settings=tuple(benchmark.settings),
        overrides=benchmark.overrides,
        commit=None if facts is None else facts.git,
        machine=machine,
        environment=_environment(first),
        model=Model(
            bundle=config.bundle.class_name,
            path=str(get(resolved, "bundle.path")),
            dtype=str(get(resolved, "bundle.dtype")),
            parameters={} if sizes is None else dict(sizes.estimate.parameters),
        ),
        topology=Topology(
            num_devices=config.num_devices,
            runtime=str(config.runtime_in_use),
            placement=plan_of(config).describe(),
        ),
        parallelism=Parallelism(
            lora=_block(resolved, "backend.lora_cfg"),
            fsdp=_block(resolved, "backend.fsdp_cfg"),
            topology=_block(resolved, "backend.topology"),
        ),
        work=StepWork(
            prompts=config.batch_size,
            samples=repeats[0].steps[0].samples,
            sampling=_block(resolved, "sampling") or {},
            flops=flops,
        ),
        protocol=benchmark.protocol,
        ceiling=top,
        repeats=repeats,
        figures=figures_of(repeats, flops, top),
    )


def repeat_of(run: RunRecord, protocol: Protocol) -> Repeat:
    """The steps of a run after its warm-up, and its peaks.

    Raises:
        BenchmarkError: 9007 if the run recorded fewer steps.
    """
    rows = [row for row in run.metrics.rows if row["step"] > protocol.warmup]
    if len(rows) < protocol.steps:
        raise BenchmarkError(
            f"{run.root} recorded {run.metrics.count} steps, and {protocol.warmup} + {protocol.steps} are needed. "
            f"Its output is {run.root / 'logs' / 'console.log'}"
        )
    return Repeat(
        steps=tuple(_step(row) for row in rows),
        host_gib=run.metrics.peaks.get("mem/host_peak_gib"),
        device_gib=run.metrics.peaks.get("mem/device_peak_gib"),
    )


def _step(row: Mapping[str, float]) -> Step:
    times = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
    return Step(
        seconds=times["step"],
        samples=round(row["samples/generated"]),
        phases={name: value for name, value in times.items() if name not in NOT_PHASES},
    )


def flops_of(sizes: RunSizes) -> dict[str, float]:
    """Operations of one device in a step by phase, without what is computed again.

    Empty for a language model: the plan counts prompts and responses at their largest lengths, not at those of the run.
    """
    if sizes.sizes.network.prompt_tokens:
        return {}
    works = {
        "generate": generate_work(sizes.sizes, sizes.settings),
        "train": train_work(sizes.sizes, sizes.settings),
    }
    return {name: work.useful_flops for name, work in works.items()}


def _ceiling(machine: Machine, given: float | None) -> Ceiling | None:
    if given is not None:
        return Ceiling(tflops=given, source="given", dtype=machine.dtype)
    return None if machine.tflops is None else Ceiling(tflops=machine.tflops, source="measured", dtype=machine.dtype)


def _environment(run: RunRecord) -> Software:
    threads = (run.files.json("run.json", dict) or {}).get("threads", {})
    count = threads.get("per_process") if isinstance(threads, dict) else None
    facts = run.environment
    return Software(
        platform=facts.get("machine", {}).get("platform", ""),
        threads=count if isinstance(count, int) else None,
        versions=dict(facts.get("versions", {})),
        variables=dict(facts.get("variables", {})),
    )


def _block(tree: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    block = get(dict(tree), path)
    return block if isinstance(block, dict) else None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
