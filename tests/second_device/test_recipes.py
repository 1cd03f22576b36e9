"""Recipes run a step on an emulated device, and the host waits for the device no more often than recorded.

The tests run recipes that cover what all recipes choose. `python -m tests.second_device.test_recipes [RECIPE ...]` runs
all of them, or some, and measures host_waits.json again. A number in it may only fall.
"""

import contextlib
import gc
import json
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.covering_recipes import COVERED, RECIPES
from unirl.config.load import load
from unirl.testing.emulated_streams import Devices
from unirl.testing.second_device import second_devices
from unirl.tracking.timing import PhaseTimers
from unirl.trainer.assemble import build_trainer

RECORD = Path(__file__).with_name("host_waits.json")
PHASES = ("sync", "generate", "reward", "train")


def train_a_step(recipe: str, folder: Path, *overrides: str) -> tuple[dict[str, int], dict[str, float]]:
    """Waits of the host in each phase of one step that stores no samples, and the metrics of that step."""
    settings = ("scale=toy", "num_rollouts=1", "evaluation.eval_steps=0", "tracking.mirrors=[]", f"run.dir={folder}")
    settings += ("tracking.sample_steps=0",)
    waits: dict[str, Counter[tuple[str, str]]] = {}
    with second_devices(count=4) as devices, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTimers, "phase", counting(PhaseTimers.phase, devices, waits))
        with build_trainer(load(recipe, [*settings, *overrides])) as trainer:
            trainer.train()
        del trainer
        gc.collect()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {phase: waits[phase].total() for phase in PHASES if phase in waits}, rows[-1]


def waits_of(recipe: str, folder: Path) -> tuple[dict[str, int], dict[str, float]]:
    """`train_a_step` with at most two samples per prompt, which takes less time than with four."""
    loaded = load(recipe, ["scale=toy"])
    if loaded.config.refill is not None:  # it would draw more often until two samples get different rewards
        return train_a_step(recipe, folder)
    few = [(policy.sampling.path, min(2, policy.samples_per_prompt)) for policy in loaded.policies.values()]
    return train_a_step(recipe, folder, *(f"{path}.samples_per_prompt={count}" for path, count in few))


def counting(phase, devices: Devices, waits: dict[str, Counter[tuple[str, str]]]):
    """`PhaseTimers.phase`, which also counts the waits of the blocks of each name in `waits`."""

    @contextlib.contextmanager
    def counted(self, name):
        before = Counter(devices.syncs)
        with phase(self, name):
            yield
            waits[name] = waits.get(name, Counter()) + (devices.syncs - before)

    return counted


def test_every_recipe_is_recorded():
    assert set(json.loads(RECORD.read_text())) == set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", COVERED)
def test_recipe_trains_on_a_device_and_waits_for_it_no_more_often_than_recorded(recipe, tmp_path):
    waits, metrics = waits_of(recipe, tmp_path / "run")
    recorded = json.loads(RECORD.read_text())[recipe]
    assert all(math.isfinite(value) for name, value in metrics.items() if "train/" in name)
    assert waits.keys() == recorded.keys()
    more = {phase: f"{n}, recorded {recorded[phase]}" for phase, n in waits.items() if n > recorded[phase]}
    assert not more, "the host waits for the device more often: keep the values on the device"


def main(recipes: list[str]) -> None:
    """Measure the waits of some recipes, or of all, and write them down."""
    record = json.loads(RECORD.read_text()) if recipes else {}
    for recipe in recipes or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            record[recipe] = waits_of(recipe, Path(folder, "run"))[0]
    lines = ",\n".join(f"  {json.dumps(recipe)}: {json.dumps(waits)}" for recipe, waits in sorted(record.items()))
    RECORD.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
