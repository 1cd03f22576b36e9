"""A recipe file cannot fill the memory by aliases, nor hide what a reference reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.config.compose import compose, resolve
from unirl.config.errors import ConfigError, InvalidValueError


def bomb(levels: int) -> str:
    """Each line repeats the one above it nine times: 9 ** levels values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("text", [bomb(12), "a: &a {b: *a}\n", "a: " + "[" * 150 + "]" * 150 + "\n"])
def test_a_file_of_a_few_lines_that_stands_for_too_many_values_is_refused_at_once(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"mine\.yaml: (with its aliases|not readable)"):
        compose(str(path))


def test_an_alias_that_repeats_a_little_is_read(tmp_path):
    path: Path = tmp_path / "mine.yaml"
    path.write_text("a: &a {b: 1}\nc: [*a, *a]\n")
    assert compose(str(path)).tree["c"] == [{"b": 1}, {"b": 1}]


@pytest.mark.parametrize("value", ["${a.${b}}", "${oc.env:${b}}", "x ${ oc.env:${b},1}", "${${b}}"])
def test_a_reference_inside_the_name_of_another_one_is_refused(value):
    with pytest.raises(ConfigError, match="reference inside the name of another one"):
        resolve({"b": "c", "a": {"c": "1"}, "d": value})


def test_the_default_of_a_variable_may_be_a_reference(monkeypatch):
    monkeypatch.delenv("UNSET_HERE", raising=False)
    assert resolve({"b": "c", "d": "${oc.env:UNSET_HERE,${b}}"})["d"] == "c"
