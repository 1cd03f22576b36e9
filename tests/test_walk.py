"""The way from the entrypoint to the loss, as AGENTS.md describes it: followed in a real step, not in a drawing."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from unirl import train_diffusion
from unirl.algorithms import diffusion_grpo

MOST_FILES = 9
PROCESS_BOUNDARY = "unirl/distributed/group/"
"""Carries a call to the process of its role. Roles are typed, so a reader who goes to a definition passes over it."""
COMMAND_LINE = "unirl/cli/"
"""Reads the arguments before `train` is called."""


@pytest.fixture(scope="module")
def files_on_the_way(tmp_path_factory) -> list[str]:
    """The files of the call stack at the moment when the loss is computed, outermost first."""
    stacks: list[list[str]] = []
    surrogate = diffusion_grpo.clipped_surrogate

    def recording(*args, **kwargs):
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        return surrogate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion_grpo, "clipped_surrogate", recording)
        run_dir = tmp_path_factory.mktemp("walk") / "run"
        settings = ["scale=toy", "num_rollouts=1", "evaluation.eval_steps=0", f"run.dir={run_dir}"]
        assert train_diffusion.main(["--config-name=diffusion/sd3_trainside", *settings]) == 0
    names = [str(Path(name).relative_to(ROOT)) for name in stacks[0] if Path(name).is_relative_to(ROOT / "unirl")]
    names = [name for name in names if not name.startswith((PROCESS_BOUNDARY, COMMAND_LINE))]
    return list(dict.fromkeys(names))


def documented() -> list[str]:
    """The files of the table in AGENTS.md, in its order."""
    text = (ROOT / "AGENTS.md").read_text()
    section = text[text.index("## From the entrypoint to the loss") :]
    return re.findall(r"^\| `(unirl/[\w/]+\.py)` \|", section, re.MULTILINE)


def test_the_call_stack_from_the_entrypoint_to_the_loss_has_few_files(files_on_the_way) -> None:
    assert files_on_the_way[0] == "unirl/train_diffusion.py"
    assert len(files_on_the_way) <= MOST_FILES, files_on_the_way


def test_the_documented_way_is_the_real_one(files_on_the_way) -> None:
    way = documented()
    assert len(way) <= MOST_FILES
    assert [name for name in way if name in files_on_the_way] == files_on_the_way
    # `assemble` returns before the loop runs, and the surrogate is where the stack ends.
    beside = {"unirl/trainer/assemble.py", "unirl/algorithms/shared/surrogate.py"}
    assert set(way) - set(files_on_the_way) <= beside
