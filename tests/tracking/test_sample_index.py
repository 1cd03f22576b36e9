"""The index of samples against a plain search over all rows."""

import json
import math
import random
import shutil
import time
from itertools import product

import pytest

from unirl.tracking.record import RunRecord
from unirl.tracking.sample_index import SampleIndex, SampleQuery

STEPS, PER_STEP = (1, 2, 3, 10), 20


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    draw = random.Random(0)
    for kind, step in product(("samples", "eval"), STEPS):
        rows = [
            {
                "sample_id": f"{kind}{step}:{i}", "group_id": f"g{i % 3}", "prompt": f"A {draw.choice('abc')} Kite",
                "reward": draw.choice(("nan", 0.5, draw.random())),
                "rewards": {"shape": draw.random()} if step > 1 else {"colour": 1.0},
            }
            for i in range(PER_STEP)
        ]  # fmt: skip
        folder = root / kind / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if kind == "eval":
            (folder / "scores.json").write_text(json.dumps({"samples": rows}))
    (root / "metrics.jsonl").write_text("")
    return root


def plain(root, query: SampleQuery) -> list[tuple[str, int, int]]:
    """The places of the samples that a query asks for, by the definition of each of its words."""
    run = RunRecord(root)
    found = []
    for kind, step in product(("samples", "eval"), STEPS):
        stored = run.samples(step) if kind == "samples" else run.evaluation(step)
        for number, row in enumerate(stored.rows):
            value = row.rewards.get(query.score, math.nan) if query.score else row.reward
            if (
                query.kind in (None, kind)
                and (query.first_step is None or step >= query.first_step)
                and (query.last_step is None or step <= query.last_step)
                and query.prompt.casefold() in row.prompt.casefold()
                and (query.low is None or value >= query.low)
                and (query.high is None or value <= query.high)
                and not (query.score and math.isnan(value))
            ):
                rank = {"newest": 0.0, "best": -value, "worst": value}[query.order]
                rank = math.inf if math.isnan(rank) else rank
                found.append((rank, -step, kind == "eval", number, (kind, step, number)))
    return [place for *_, place in sorted(found)]


@pytest.mark.parametrize(
    "query",
    [
        SampleQuery(),
        SampleQuery(kind="eval", order="best"),
        SampleQuery(order="worst", prompt="a B"),
        SampleQuery(first_step=2, last_step=3, low=0.4, high=0.9),
        SampleQuery(score="shape", order="best", low=0.2),
        SampleQuery(score="colour"),
        SampleQuery(score="absent"),
        SampleQuery(prompt="absent"),
    ],
)
def test_queries_find_what_a_plain_search_finds(root, query):
    run, index = RunRecord(root), SampleIndex()
    assert index.advance(run)
    shown = index.samples(run, index.find(query).tolist())
    assert [(each.kind, each.step, each.row) for each in shown] == plain(root, query)


def test_a_query_of_the_first_samples_does_not_change_while_more_are_read(root):
    run, index = RunRecord(root), SampleIndex()
    assert not index.advance(run, until=time.monotonic() - 1)
    size = len(index)
    before = index.find(SampleQuery(order="best"), size).tolist()
    calls = 1
    while not index.advance(run, until=time.monotonic() - 1):
        calls += 1
    assert calls == 2 * len(STEPS) - 1
    assert len(index) == 2 * len(STEPS) * PER_STEP > size
    assert index.find(SampleQuery(order="best"), size).tolist() == before


def test_steps_that_a_restart_removed_and_wrote_again_are_read_again(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "run")
    index = SampleIndex()
    index.advance(RunRecord(copy))
    shutil.rmtree(copy / "samples/step-000010")
    assert index.advance(RunRecord(copy))
    assert len(index) == (2 * len(STEPS) - 1) * PER_STEP
    manifest = copy / "samples/step-000003/manifest.jsonl"
    manifest.write_text(manifest.read_text().splitlines(keepends=True)[0])
    index.advance(RunRecord(copy))
    assert index.find(SampleQuery(kind="samples", first_step=3)).size == 1
    assert index.sample(RunRecord(copy), "samples", 3, 1) is None
    assert index.sample(RunRecord(copy), "samples", 10, 0) is None
