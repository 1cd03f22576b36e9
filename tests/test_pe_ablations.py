"""The table of the ablations of prompt enhancement is made of the evaluations of its runs, between two comments."""

from __future__ import annotations

import pytest

from scripts.pe_ablations import BEGIN, END, PAGE, SHOWN, smallest_rise, table, with_table
from scripts.quickstart_table import run
from tests.source_tree import ROOT


def evaluation(step: int, reward: float, exact: float) -> dict[str, float]:
    return {"step": step, "eval/reward_mean": reward, "eval/reward_stderr": 0.02, "eval/exact_mean": exact}


REPORT = {
    "date": "2026-11-25",
    "commit": "abc1234",
    "cores": 2,
    "trials": [
        {"trained": "[ar]", "seed": 1, "evaluations": [evaluation(0, 0.4, 0.1), evaluation(24, 0.5, 0.2)]},
        {"trained": "[ar,diffusion]", "seed": 1, "evaluations": [evaluation(0, 0.4, 0.1), evaluation(24, 0.7, 0.3)]},
        {"trained": "[ar,diffusion]", "seed": 42, "evaluations": [evaluation(0, 0.4, 0.1), evaluation(24, 0.65, 0.4)]},
    ],
}


def test_the_table_has_a_row_for_each_run_both_policies_and_seed_42_first() -> None:
    rows = table(REPORT).splitlines()
    assert rows[0] == "| seed | trained | held-out reward before | after 24 steps | both attributes right |"
    assert rows[2:5] == [
        "| 42 | both | 0.400 +- 0.020 | 0.650 +- 0.020 | 0.100 -> 0.400 |",
        "| 1 | both | 0.400 +- 0.020 | 0.700 +- 0.020 | 0.100 -> 0.300 |",
        "| 1 | only the rewriter (`trained=[ar]`) | 0.400 +- 0.020 | 0.500 +- 0.020 | 0.100 -> 0.200 |",
    ]
    assert smallest_rise(REPORT) == pytest.approx(0.25)  # the run that trains the rewriter alone does not count


def test_the_page_changes_between_the_comments_alone_and_again_gives_the_same() -> None:
    page = PAGE.read_text(encoding="utf-8")
    changed = with_table(page, REPORT)
    assert changed.split(BEGIN)[0] == page.split(BEGIN)[0] and changed.split(END)[1] == page.split(END)[1]
    assert with_table(changed, REPORT) == changed != page


@pytest.mark.slow
def test_a_run_has_the_metrics_of_the_table(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = ["scale=toy", "num_rollouts=1", "trained=[ar]"]
    trial = run("pe/quickstart", 1, settings, tmp_path / "run", SHOWN)
    assert [set(each) for each in trial.evaluations] == [{"step", *SHOWN}] * 2
