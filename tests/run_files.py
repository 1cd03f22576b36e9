"""What tests read in the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.tracking.metrics import NOT_REPRODUCIBLE


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a file that has one on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step, without those that differ between two runs of one recipe."""
    return [reproducible(row) for row in lines_of(folder / "metrics.jsonl")]


def reproducible(row: Mapping[str, Any]) -> dict[str, Any]:
    """Named numbers that depend on neither clock nor machine."""
    return {name: value for name, value in row.items() if not name.startswith(NOT_REPRODUCIBLE)}
