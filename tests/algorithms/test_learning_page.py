"""The page of three-seed runs holds the methods that its script runs, each with the share that it claims, reached."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_every_method_of_the_script_with_its_claim_reached():
    script = runpy.run_path(str(ROOT / "scripts" / "learning_table.py"))
    page = script["PAGE"].read_text()
    rows = re.findall(r"^\| (.+?) \| .+? \| .+? \| (\S+) \| (.+?) \| \S+ \|$", page, re.MULTILINE)
    sections = [script[name]() for name in ("gaussian", "mixture", "ring", "tokens")]
    trials = [trial for section in sections for trial in section.trials]
    assert [name for name, _, _ in rows if name != "method"] == [trial.method for trial in trials]
    for (_, worst, claim), trial in zip([row for row in rows if row[0] != "method"], trials, strict=True):
        assert claim == ("none" if trial.claim is None else f"{trial.claim:.2f}")
        assert trial.claim is None or float(worst) >= trial.claim
