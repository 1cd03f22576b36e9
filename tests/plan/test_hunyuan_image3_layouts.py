"""The page about HunyuanImage-3 has the peaks and the refusal that `unirl plan` prints."""

import re
from pathlib import Path

import pytest

from unirl.cli.main import main
from unirl.cli.plan import Total, run_on
from unirl.config.load import load
from unirl.plan.devices import device_named
from unirl.plan.fit import usable
from unirl.plan.sizes import sizes_of_policies

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "unified_models_hunyuan_image3.md").read_text(encoding="utf-8")
TABLE = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `hi3_") and "GiB" in line]
FACTORS = (1, 2, 4)
"""Of the devices and of the prompts of a recipe, in the columns of the table."""


def shown_peak(recipe: str, words: list[str], factor: int) -> str:
    """The peak of a plan, as a cell of the table has it."""
    own, (device, _) = load(recipe).config, device_named("h200")
    layout = [f"num_devices={own.num_devices * factor}", f"batch_size={own.batch_size * factor}"]
    sizes = sizes_of_policies(load(recipe, [*words, *layout]))
    total = Total({name: run_on(device, each) for name, each in sizes.items()}, device)
    gib, _ = total.peaks[total.largest]
    return f"{gib:.1f} GiB" if gib <= usable(device.memory_gib) else f"{gib:.1f} GiB, too much"


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0][:40])
def test_the_page_has_the_peaks_of_the_plan(row: list[str]) -> None:
    about, *cells = row
    recipe, *words = re.match(r"`([^`]+)`", about)[1].split()
    assert cells == [shown_peak(f"unified_model/{recipe}", words, factor) for factor in FACTORS]


def test_the_page_has_the_refusal_that_the_plan_prints(capsys) -> None:
    assert len(TABLE) == 5
    command, refusal = re.search(r"```\n\$ (unirl plan [^\n]+)\n(error.*?)```", PAGE, re.DOTALL).groups()
    assert main(command.split()[1:]) == 5
    assert capsys.readouterr().err.split() == refusal.split()
