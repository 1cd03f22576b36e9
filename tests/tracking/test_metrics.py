"""The tables of metrics and events agree with what the code emits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.source_tree import ROOT, Module, modules
from unirl.tracking.metrics import EVENTS, METRICS, check_event, check_names, is_metric, page, pattern

NAMESPACES = {
    "custom",
    "env",
    "rollout",
    "reward",
    "train",
    "eval",
    "time",
    "sync",
    "samples",
    "throughput",
    "mem",
    "queue",
}
READERS = {"unirl.tracking.metrics", "unirl.tracking.console", "unirl.trainer.watchdog"}
"""The tables themselves, and modules that only read metrics."""
READING_METHODS = {"get", "startswith", "endswith", "removeprefix", "glob", "match"}
FOR_OTHERS = {"custom/<name>"}
"""Rows for algorithms outside of this package."""


@cache
def emitted() -> frozenset[str]:
    """Every text in the code that looks like a metric and is not only read. Fields of f-strings become "word"."""
    texts = {text for module in modules().values() if module.name not in READERS for text in texts_of(module)}
    return frozenset(text for text in texts if re.fullmatch(rf"({'|'.join(NAMESPACES)})/[a-z][\w@]+", text))


def texts_of(module: Module) -> Iterator[str]:
    nodes = list(ast.walk(module.tree))
    skipped = {id(part) for node in nodes for expression in parts_to_skip(node) for part in ast.walk(expression)}
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from names_of_call(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_TIMER"):
            yield f"time/{ast.literal_eval(node.value)}"
        elif id(node) not in skipped and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif id(node) not in skipped and isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "word" for part in node.values)


def parts_to_skip(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that read a metric, and the pieces of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return list(node.values)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.slice]
    if isinstance(node, ast.Compare):
        return [node]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "step_metrics":
        return node.args[:1]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READING_METHODS:
        return list(node.args)
    return []


def names_of_call(call: ast.Call) -> Iterator[str]:
    """The metrics of `phase("train")`, `ledger(step, scored=8)` and `step_metrics("train/kl", ...)`.

    The f-strings in these functions do not show the names.
    """
    method = ast.unparse(call.func).rpartition(".")[2]
    if method == "phase" and isinstance(call.args[0], ast.Constant):
        yield f"time/{call.args[0].value}"
    if method == "step_metrics" and isinstance(call.args[0], ast.Constant):
        yield f"{call.args[0].value}_step_word"
    if method == "ledger":
        yield from (f"samples/{word.arg}" for word in call.keywords if word.arg in ("generated", "scored", "dropped"))


def emitted_events() -> set[str]:
    calls = [node for module in modules().values() for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    first = [call.args[0] for call in calls if call.args and ast.unparse(call.func).rpartition(".")[2] == "event"]
    yields = [
        node.value.elts[0]
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple)
    ]
    texts = {node.value for node in (*first, *yields) if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+\.[a-z]+|warning", text)}


def test_every_metric_that_the_code_emits_is_in_the_table():
    assert {"train/loss", "rollout/reward_mean", "eval/reward_stderr", "time/train", "samples/dropped"} <= emitted()
    concrete = {name for name in emitted() if "word" not in name}
    check_names(concrete)


def test_every_metric_of_the_table_has_an_emitter():
    """A row with a wildcard needs an f-string of its own, so that it covers no name that could be spelled out."""
    without = [row for row in METRICS if not any(re.fullmatch(pattern(row), name) for name in candidates(row))]
    assert set(without) == FOR_OTHERS


def candidates(row: str) -> list[str]:
    return [name for name in emitted() if ("<" in row) == ("word" in name)]


def test_every_event_of_the_table_has_an_emitter_and_the_reverse():
    assert emitted_events() == EVENTS.keys()


def test_every_name_has_a_known_namespace_and_a_meaning():
    assert {name.split("/")[0] for name in METRICS} == NAMESPACES
    assert all(len(meaning) > 3 for meaning in METRICS.values())


def test_names_with_a_word_of_the_user_are_known():
    check_names(["reward/ocr.v2_mean", "eval/shape_mean", "rollout/response_len_max", "train/velocity_mse_old"])


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown metric 'rollout/reward_mea'\. Did you mean 'rollout/reward_mean'"):
        check_names(["rollout/reward_mea"])
    for name in ("loss", "train/", "train/Loss!", "reward/a b_mean", "reward/_mean"):
        with pytest.raises(ValueError, match="unknown metric"):
            check_names([name])


def test_the_name_of_a_track_may_precede_a_metric_only_with_several_tracks():
    check_names(["image/train/loss"], tracks=("image", "ar"))
    assert not is_metric("image/train/loss")
    with pytest.raises(ValueError, match="unknown metric"):
        check_names(["image/train/loss"])


def test_unknown_events_are_refused_with_the_nearest():
    for name in EVENTS:
        check_event(name)
    with pytest.raises(ValueError, match=r"unknown event 'ckpt.comit'\. Did you mean 'ckpt.commit'"):
        check_event("ckpt.comit")


def test_the_documentation_page_is_generated_from_the_tables():
    text = page()
    assert all(f"`{name}`" in text for name in (*METRICS, *EVENTS))
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == text
