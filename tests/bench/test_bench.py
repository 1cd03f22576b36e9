"""`unirl bench`: the figures of a report, the intervals of a comparison, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
from scipy.stats import ttest_ind

from unirl.bench import comparison, measuring, report
from unirl.bench.probe import Machine
from unirl.bench.report import Ceiling, Protocol, Repeat, Step
from unirl.bench.workloads import TRAINSIDE, WORKLOADS
from unirl.cli.check import checked
from unirl.cli.main import main
from unirl.config.errors import MemoryShortageError
from unirl.plan.sizes import sizes_of_policies

CPU = Machine(cpu="a processor", cpus=2, main_memory_gib=8.0, dtype="fp32", tflops=2.0)


def benchmark(workload="sd3_image", size="toy", engine=TRAINSIDE, **protocol):
    chosen = Protocol(**{"warmup": 1, "steps": 2, "repeats": 1, **protocol})
    return measuring.Benchmark(workload=workload, size=size, engine=engine, overrides=(), protocol=chosen)


def train_here(words, root):
    assert main(["train", *words, f"run.dir='{root}'"]) == 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A report of a real run of the smallest workload, in this process."""
    chosen = benchmark()
    recipe = checked(chosen.recipe, chosen.words[1:])
    folder = tmp_path_factory.mktemp("bench")
    return measuring.measure(chosen, recipe, CPU, folder, train=train_here), folder


def test_a_report_has_the_steps_after_the_warm_up_as_the_run_recorded_them(measured):
    result, folder = measured
    rows = [json.loads(line) for line in (folder / "repeat-01" / "metrics.jsonl").read_text().splitlines()]
    [repeat] = result.repeats
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [step.seconds for step in repeat.steps] == [row["time/step"] for row in rows[1:]]
    assert result.figures["train_s"].values == (pytest.approx((rows[1]["time/train"] + rows[2]["time/train"]) / 2),)
    assert all({"generate", "reward", "train", "sync"} <= set(step.phases) for step in repeat.steps)
    assert all(sum(step.phases.values()) <= step.seconds for step in repeat.steps)
    assert (result.work.prompts, result.work.samples, result.model.path) == (2, 8, "toy")
    assert result.parallelism.lora["rank"] == 4


def test_a_report_has_the_form_that_the_schema_describes(measured, tmp_path):
    assert json.loads(report.SCHEMA.read_text()) == report.schema(), "run python -m unirl.bench.report"
    report.write(measured[0], tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    jsonschema.Draft202012Validator.check_schema(report.schema())
    jsonschema.validate(content, report.schema())
    del content["repeats"][0]["steps"][0]["seconds"]
    with pytest.raises(jsonschema.ValidationError, match="seconds"):
        jsonschema.validate(content, report.schema())
    assert msgspec.to_builtins(report.read(tmp_path / "a.json")) == msgspec.to_builtins(measured[0])


def test_figures_are_sums_over_steps_and_mfu_is_operations_over_the_ceiling():
    steps = tuple(Step(seconds=s, samples=8, phases={"generate": s / 4, "train": s / 2}) for s in (1.0, 3.0))
    repeats = (Repeat(steps=steps, host_gib=2.0, device_gib=None),)
    flops = {"generate": 1e12, "train": 3e12}
    figures = report.figures_of(repeats, flops, Ceiling(tflops=4.0, source="given", dtype="bf16"))
    values = {name: figure.values[0] for name, figure in figures.items()}
    assert values == pytest.approx(
        {
            "samples_per_s": 16 / 4,
            "step_s": 2.0,
            "generate_s": 0.5,
            "train_s": 1.0,
            "host_gib": 2.0,
            "mfu": 4e12 / (2.0 * 4e12),
            "mfu_generate": 1e12 / (0.5 * 4e12),
            "mfu_train": 3e12 / (1.0 * 4e12),
        }
    )


def test_the_interval_of_a_ratio_is_that_of_welchs_test_on_logarithms():
    before, after = [1.0, 1.2, 0.9, 1.1], [2.0, 2.6, 2.2]
    exact = ttest_ind(np.log(after), np.log(before), equal_var=False).confidence_interval(0.95)
    result = comparison.ratio_interval(before, after)
    assert (result.low, result.high) == pytest.approx((np.exp(exact.low), np.exp(exact.high)))
    swapped = comparison.ratio_interval(after, before)
    assert (1 / swapped.high, 1 / swapped.low) == pytest.approx((result.low, result.high))


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    draws = np.exp(np.random.default_rng(0).normal([[0.0], [np.log(1.5)]], [[0.1], [0.3]], (600, 2, 5)))
    intervals = [comparison.ratio_interval(a.tolist(), b.tolist()) for a, b in draws]
    assert np.mean([each.low <= 1.5 <= each.high for each in intervals]) == pytest.approx(0.95, abs=0.03)


def test_one_repeat_gives_no_interval_and_equal_repeats_a_point():
    assert comparison.ratio_interval([1.0], [2.0, 2.1]) is None
    assert comparison.ratio_interval([2.0, 2.0], [4.0, 4.0]) == comparison.Interval(2.0, 2.0)


def compared(tmp_path, capsys, first, second, *words):
    for name, each in (("a", first), ("b", second)):
        report.write(each, tmp_path / name)
    status = main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), *words])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_reports_of_other_work_or_machines_are_refused_unless_asked_for(measured, tmp_path, capsys):
    result, _ = measured
    sampling = {**result.work.sampling, "height": 512}
    others = {
        "the workload: sd3_image and llm": replace(result, workload="llm"),
        "the processor: a processor and another": replace(result, machine=replace(CPU, cpu="another")),
        "sampling.height: 32 and 512": replace(result, work=replace(result.work, sampling=sampling)),
    }
    for reason, other in others.items():
        status, text = compared(tmp_path, capsys, result, other)
        assert (status, reason in text, "error[9007]" in text) == (9, True, True), text
        status, text = compared(tmp_path, capsys, result, other, "--anyway")
        assert (status, f"NOT COMPARABLE  {reason}" in text) == (0, True), text


def test_a_comparison_shows_ratios_and_what_may_explain_them(measured, tmp_path, capsys):
    result, _ = measured
    figures = {name: report.Figure(values=(2 * f.values[0], 2 * f.values[0])) for name, f in result.figures.items()}
    other = replace(result, figures=figures, engine="sglang", overrides=("stack.micro_batch_size=4",))
    status, text = compared(tmp_path, capsys, result, other, "--json")
    facts = json.loads(text)
    assert (status, facts["unlike"]) == (0, [])
    assert {row["name"]: row["ratio"] for row in facts["figures"]}["step_s"] == pytest.approx(2)
    assert facts["differences"] == ["engine: trainside -> sglang", "settings: none -> stack.micro_batch_size=4"]
    assert "none: it needs 2 repeats of each" in compared(tmp_path, capsys, result, other)[1]
    ceiling = replace(result.ceiling, tflops=2 * result.ceiling.tflops)
    assert (
        "without the difference of the ceilings"
        in compared(tmp_path, capsys, other, replace(other, ceiling=ceiling))[1]
    )


def test_a_file_that_is_no_report_is_named(tmp_path, capsys):
    (tmp_path / "bad").write_text('{"schema_version": 1}')
    assert main(["bench", "compare", str(tmp_path / "bad"), str(tmp_path / "bad")]) == 4
    assert "is no report of `unirl bench`" in capsys.readouterr().err
    assert main(["bench", "compare", str(tmp_path / "none"), str(tmp_path / "bad")]) == 4
    assert main(["bench", "sd3_imag"]) == 2
    assert "Did you mean 'sd3_image'" in capsys.readouterr().err
    assert main(["bench", "sd3_image", "--engine", "vllm"]) == 2
    assert main(["bench", "sd3_image", "--repeats", "0"]) == 2


def test_real_size_is_refused_before_anything_is_built_and_says_what_it_needs():
    chosen = benchmark(size="real")
    recipe = checked(chosen.recipe, chosen.words[1:])
    with pytest.raises(MemoryShortageError, match=r"sd3_image at size real .* peak is 2\d\.\d GiB .* has 8\.0 GiB"):
        measuring.refuse_excess(chosen, recipe, CPU, print)
    warnings: list[str] = []
    measuring.refuse_excess(chosen, recipe, replace(CPU, accelerator="H", accelerator_gib=80.0), warnings.append)
    assert warnings == []


def test_the_prompts_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = benchmark()
    assert Path(checked(chosen.recipe, chosen.words[1:]).config.data_source.values["data_path"]).is_file()


@pytest.mark.parametrize("size", ["toy", "real"])
@pytest.mark.parametrize(("name", "engine"), [(name, each) for name, w in WORKLOADS.items() for each in w.recipes])
def test_every_workload_is_a_valid_recipe_of_its_model(name, engine, size):
    chosen = benchmark(name, size, engine)
    recipe = checked(chosen.recipe, chosen.words[1:])
    published = recipe.config.bundle.schema.owner.facts_of(WORKLOADS[name].model)
    [sizes] = sizes_of_policies(recipe).values()
    assert bool(measuring.flops_of(sizes.run)) == (name != "llm")
    if size == "real":
        assert recipe.config.bundle.schema.owner.facts_of(recipe.config.model_path) == published


def test_a_run_that_fails_ends_the_benchmark_with_its_last_lines(tmp_path):
    with pytest.raises(measuring.BenchmarkError, match="ended with status 2: unirl train no_such_recipe"):
        measuring.train_in_a_process(["no_such_recipe"], tmp_path)
