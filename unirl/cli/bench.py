"""`unirl bench [WORKLOAD]`: measures the training loop on fixed work. `unirl bench compare A B`: ratios."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from unirl.bench.comparison import FigureRatio, differences, incomparable, ratios
from unirl.bench.measuring import Benchmark, measure, refuse_excess
from unirl.bench.probe import probed
from unirl.bench.report import BenchReport, Protocol, read, write
from unirl.bench.workloads import TRAINSIDE, WORKLOADS, Size
from unirl.cli.arguments import Parser, run_verb, split_settings
from unirl.cli.check import checked
from unirl.cli.start import shown_start
from unirl.config.errors import ArgumentError, BenchmarkError, InvalidValueError, did_you_mean
from unirl.config.failures import Session
from unirl.tracking.paired import LEVEL
from unirl.tracking.streams import print_inert, say

EXAMPLES = (
    "unirl bench sd3_image",
    "unirl bench llm --repeats 5 --json before.json",
    "unirl bench wan22_video --size real --ceiling 790 --json real.json",
    "unirl bench sd3_image stack.micro_batch_size=4",
    "unirl bench compare before.json after.json",
)
DEFAULT = "sd3_image"
UNITS = {"samples_per_s": "1/s", "host_gib": "GiB", "device_gib": "GiB"}


def run(argv: list[str], session: Session) -> int:
    return run_verb("bench", argv if argv and argv[0] in VERBS else ["run", *argv], VERBS, EXAMPLES)


def bench(argv: Sequence[str]) -> int:
    parser = Parser(
        "bench",
        "Measure steps of `unirl train` on fixed work with random weights: samples per second, seconds by phase, "
        "peak memory, MFU. Each repeat is a process of its own.",
        EXAMPLES,
    )
    parser.usage = "unirl bench [WORKLOAD] [key=value ...] [options]"
    parser.add_argument("workload", nargs="?", default=DEFAULT, metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.option("--size", choices=("toy", "real"), help="default: real on an accelerator, toy on a CPU")
    parser.option("--engine", default=TRAINSIDE, help="the rollout engine (`unirl bench ls`); default: trainside")
    parser.option("--repeats", type=int, default=3, metavar="N", help="runs, each in a process of its own (default 3)")
    parser.option("--steps", type=int, default=3, metavar="N", help="steps of each repeat that count (default 3)")
    parser.option("--warmup", type=int, default=1, metavar="N", help="steps before those (default 1)")
    ceiling = "1e12 operations per second of a device, for MFU; default: measured with a large matrix product"
    parser.option("--ceiling", type=float, metavar="TFLOPS", help=ceiling)
    parser.option("--json", metavar="FILE", help="write the report here; its schema is unirl/bench/bench_schema.json")
    parser.option("--out", metavar="DIR", help="keep the run directories here")
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    _check(options.workload, options.engine)
    for name, least in (("repeats", 1), ("steps", 1), ("warmup", 0)):
        if vars(options)[name] < least:
            raise InvalidValueError(f"--{name} must be >= {least}, got {vars(options)[name]}")
    if options.ceiling is not None and not 0 < options.ceiling < math.inf:
        raise InvalidValueError(f"--ceiling {options.ceiling:g}: give 1e12 operations per second, more than 0")
    file = None if options.json is None else Path(options.json)
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InvalidValueError(f"--json {file} cannot be written: name a file in a folder that exists")
    report = _measured(options, tuple(overrides))
    print_inert("\n".join(lines(report)))
    if file is not None:
        write(report, file)
        print_inert(f"report     {file}")
    return 0


def _check(workload: str, engine: str) -> None:
    if workload not in WORKLOADS:
        raise ArgumentError(
            f"unirl bench: unknown workload '{workload}'.{did_you_mean(workload, [*WORKLOADS, *VERBS])} "
            f"Workloads: {', '.join(WORKLOADS)}"
        )
    engines = WORKLOADS[workload].recipes
    if engine not in engines:
        raise ArgumentError(f"--engine {engine}: the workload {workload} has {', '.join(engines)}")


def _measured(options: argparse.Namespace, overrides: tuple[str, ...]) -> BenchReport:
    """Checks the recipe and the memory, then measures."""
    with shown_start(Session(), "preparing"):
        machine = probed(None)
        size: Size = options.size or ("toy" if machine.accelerator is None else "real")
        protocol = Protocol(warmup=options.warmup, steps=options.steps, repeats=options.repeats)
        benchmark = Benchmark(
            workload=options.workload, size=size, engine=options.engine, overrides=overrides, protocol=protocol
        )
        recipe = checked(benchmark.recipe, benchmark.words[1:])
        if size == "real":
            refuse_excess(benchmark, recipe, machine, lambda text: say(f"unirl bench: {text}"))
        if options.ceiling is None:
            machine = probed(str(recipe.config.bundle.get("dtype", str)))
    say(f"unirl bench: {options.workload} at size {size}, engine {options.engine}")
    kept = None if options.out is None else Path(options.out)
    with tempfile.TemporaryDirectory(prefix="unirl-bench-") if kept is None else nullcontext(kept) as folder:
        return measure(
            benchmark,
            recipe,
            machine,
            Path(folder).resolve(),
            ceiling=options.ceiling,
            say=lambda line: say(f"unirl bench: {line}"),
        )


def lines(report: BenchReport) -> Iterator[str]:
    """A report for people."""
    machine, protocol, parameters = report.machine, report.protocol, sum(report.model.parameters.values())
    yield f"{report.workload} ({report.size}), engine {report.engine}: {report.recipe}"
    yield f"model      {report.model.path}, {report.model.dtype}, {parameters / 1e6:,.3g} M parameters, random weights"
    if machine.accelerator is None:
        yield f"machine    {machine.cpu}, {machine.cpus} CPUs, {report.environment.threads} threads per process"
    else:
        yield f"machine    {report.topology.num_devices} of {machine.accelerators} x {machine.accelerator}"
    yield f"a step     {report.work.prompts} prompts, {report.work.samples} samples"
    yield f"measured   {protocol.repeats} repeats of {protocol.steps} steps, each after {protocol.warmup} steps"
    if report.ceiling is not None:
        yield f"ceiling    {report.ceiling.tflops:.4g} TFLOP/s of one device ({report.ceiling.source})"
    yield ""
    yield f"{'figure':<16}{'median':>10}  {'MAD':>9}   unit  repeats"
    for name, figure in report.figures.items():
        values = " ".join(f"{value:.4g}" for value in figure.values)
        yield f"{name:<16}{figure.median:>10.4g}  {figure.spread:>9.2g}   {unit_of(name):<4}  {values}"


def unit_of(name: str) -> str:
    """The unit of a figure."""
    return UNITS.get(name, "" if name.startswith("mfu") else "s")


def compare(argv: Sequence[str]) -> int:
    about = (
        f"Compare two reports of one workload: ratios of B to A with {LEVEL:.0%} intervals over the repeats. Other "
        "work or another machine is refused."
    )
    parser = Parser("bench compare", about, EXAMPLES[-1:])
    parser.add_argument("before", metavar="A", help="a report of unirl bench --json")
    parser.add_argument("after", metavar="B")
    parser.option("--anyway", action="store_true", help="compare different work or machines, and say what differs")
    parser.option("--json", action="store_true", help="as JSON")
    options = parser.parse(argv)
    first, second = (read(Path(path)) for path in (options.before, options.after))
    unlike = incomparable(first, second)
    if unlike and not options.anyway:
        raise BenchmarkError(
            f"{options.before} and {options.after} did not measure the same work on the same kind of machine:\n"
            + "".join(f"  {each}\n" for each in unlike)
            + "--anyway compares them nevertheless"
        )
    rows, others = ratios(first, second), list(differences(first, second))
    if options.json:
        facts = [asdict(row) | {"ratio": row.ratio, "differs": row.differs} for row in rows]
        print(json.dumps({"level": LEVEL, "unlike": unlike, "differences": others, "figures": facts}, indent=1))
    else:
        print_inert("\n".join(comparison_lines(first, second, rows, unlike, others)))
    return 0


def comparison_lines(
    first: BenchReport, second: BenchReport, rows: Sequence[FigureRatio], unlike: Sequence[str], others: Sequence[str]
) -> Iterator[str]:
    """A comparison for people."""
    yield f"A  {first.workload} ({first.size}), engine {first.engine}, {first.created}"
    yield f"B  {second.workload} ({second.size}), engine {second.engine}, {second.created}"
    yield from (f"NOT COMPARABLE  {each}" for each in unlike)
    yield from (f"differs    {each}" for each in others)
    yield ""
    yield f"{'figure':<16}{'A':>10}{'B':>10}  {'B / A':>7}   {LEVEL:.0%} interval"
    for row in rows:
        interval = "none: it needs 2 repeats of each"
        if row.interval is not None:
            mark = "" if row.differs else "   contains 1"
            if row.name.startswith("mfu") and first.ceiling != second.ceiling:
                mark += "   without the difference of the ceilings"
            interval = f"[{row.interval.low:.3f}, {row.interval.high:.3f}]{mark}"
        yield f"{row.name:<16}{row.before:>10.4g}{row.after:>10.4g}  {row.ratio:>7.3f}   {interval}"


def list_all(argv: Sequence[str]) -> int:
    parser = Parser("bench ls", "List the workloads with their engines and recipes.", ("unirl bench ls",))
    parser.parse(argv)
    for name, workload in WORKLOADS.items():
        print(f"{name}\n   {workload.about}\n   real size: {workload.model}")
        for engine, recipe in workload.recipes.items():
            print(f"   --engine {engine:<10} {recipe}")
    return 0


VERBS = {"run": bench, "compare": compare, "ls": list_all}
