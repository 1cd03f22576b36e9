"""No file of the service or of the rewards runs code from data, or reads from outside without an end."""

import ast
from pathlib import Path

import pytest
import reward_service

import unirl.reward
from tests.test_source_rules import offences

FOLDERS = [Path(package.__path__[0]) for package in (reward_service, unirl.reward)]
FILES = {
    f"{folder.name}/{path.relative_to(folder)}": path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted(folder.rglob("*.py"))
}
READERS = {"read", "readline", "readlines", "readall", "read_bytes", "body", "form", "json", "aread", "recv"}
"""Calls that read to the end when they are not told how much. `read_text` is for files that the user wrote."""


def unbounded_reads(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)[:60]}"
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in READERS and not call.args and not call.keywords
    ]


def test_the_files_are_there():
    assert {"reward_service/app.py", "reward_service/decoder.py", "reward/wire.py", "reward/remote.py"} <= FILES.keys()


def test_nothing_is_unpickled_or_evaluated():
    assert [f"{name} {offence}" for name, source in FILES.items() for offence in offences(source)] == []


def test_no_read_is_without_an_end():
    assert [f"{name} {found}" for name, source in FILES.items() for found in unbounded_reads(source)] == []


@pytest.mark.parametrize("line", ["await request.body()", "file.read()", "response.json()", "Path(p).read_bytes()"])
def test_the_rule_sees_an_unbounded_read(line):
    assert len(unbounded_reads(f"async def f():\n    {line}")) == 1
    assert unbounded_reads("file.read(10); file.read(limit + 1); msgspec.json.decode(body)") == []


def test_files_stay_under_600_lines_and_functions_under_100():
    functions = [
        (f"{name} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for name, source in FILES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for name, source in FILES.items() if source.count("\n") > 600 or not source.isascii()] == []
    assert [name for name, lines in functions if lines > 100] == []
