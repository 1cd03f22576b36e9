"""Mistakes of a first hour, replayed as whole commands: exit status, message, and nothing left behind."""

import pytest

from tests.processes import run_python
from tests.source_tree import ROOT


@pytest.mark.slow
def test_every_mistake_of_the_first_hour_is_answered_as_its_row_says(tmp_path):
    status, output = run_python([str(ROOT / "scripts" / "first_hour.py")], tmp_path)
    assert status == 0, "\n".join(line for line in output.splitlines() if not line.startswith("ok "))
