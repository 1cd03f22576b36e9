"""The one table of metric names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import unirl
from tests.source_tree import ROOT
from unirl.tracking.events import EVENTS, check_event
from unirl.tracking.metrics import METRICS, check_names, markdown, page

NAMESPACES = {"rollout", "reward", "train", "eval", "env", "time", "sync", "samples", "throughput", "mem", "queue"}
SOURCES = sorted(Path(unirl.__file__).parent.rglob("*.py"))


def logged_names() -> set[str]:
    """Every string in the package that looks like a metric, f-string fields replaced by a word."""
    names = set()
    for path in SOURCES:
        if "tracking" in path.parts:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
                names.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "word" for part in node.values]
                names.add("".join(map(str, parts)))
    return {name for name in names if re.fullmatch(rf"({'|'.join(NAMESPACES - {'reward'})})/[a-z][a-z0-9_]+", name)}


def test_every_metric_that_the_code_logs_is_in_the_table():
    names = logged_names()
    assert {"train/loss", "rollout/reward_mean", "eval/reward_stderr"} <= names
    check_names(names)


def test_every_name_has_a_namespace_of_the_design_and_a_meaning():
    assert {metric.name.split("/")[0] for metric in METRICS} == NAMESPACES
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(len(metric.meaning) > 3 for metric in METRICS)


def test_names_with_a_word_of_the_user_are_known():
    check_names(["reward/ocr.v2_mean", "eval/shape_std", "rollout/response_len_max", "train/kl_reference"])


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown metric 'rollout/reward_mea'\. Did you mean 'rollout/reward_mean'"):
        check_names(["rollout/reward_mea"])
    for name in ("loss", "train/", "train/Loss!", "reward/a b_mean", "reward/_mean"):
        with pytest.raises(ValueError, match="unknown metric"):
            check_names([name])


def test_track_prefix_is_known_only_with_several_tracks():
    check_names(["image/train/loss"], tracks=("image", "ar"))
    with pytest.raises(ValueError, match="unknown metric"):
        check_names(["image/train/loss"])


def test_table_for_the_documents_holds_every_name():
    assert all(f"`{metric.name}`" in markdown() for metric in METRICS)


def test_unknown_events_are_refused_with_the_nearest():
    for name in EVENTS:
        check_event(name)
    with pytest.raises(ValueError, match=r"unknown event 'ckpt.comit'\. Did you mean 'ckpt.commit'"):
        check_event("ckpt.comit")


def test_the_page_of_the_documents_is_the_table_as_it_is():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page()
