"""Compares a rollout of two composed engines with the engines alone, and measures what the idle side leaves in memory.

    OMP_NUM_THREADS=1 python benchmarks/composed.py [--pairs 10] [--clock wall|cpu] [--json out.json]

Time: `ComposedRolloutEngine.generate` of the recipe of prompt enhancement at toy scale is compared with the same two
requests, given to the two engines one after the other: the rewrites, and the images of the rewrites. `trainside`
engines share the trained weights. `replica` engines have weights of their own, and one sleeps while the other works.
Memory: one step of the replica recipe runs on an emulated device (unirl/testing/second_device.py), which counts the
bytes of its tensors: before and after each engine sleeps, beside the bytes of the engine's own tensors, and when each
phase of the step is entered. After the first transfer of weights the device keeps 32 MiB of constants with which their
fingerprints are computed, and until a step ends its samples and the inputs of the canary.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import nn

from benchmarks.harness import CLOCKS, Ratio, machine, measuring, paired, show
from unirl.config.load import load
from unirl.rollout.engine.composed.engine import ComposedRolloutEngine
from unirl.testing.second_device import second_devices
from unirl.trainer.assemble import build_trainer
from unirl.trainer.loop import Trainer
from unirl.trainer.residency import Phases
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq

RECIPES = {"trainside": "pe/pe_trainside_pickscore", "replica": "pe/pe_sglang_full_pickscore"}
TRACKS = ("ar", "diffusion")
SETTINGS = (
    *("scale=toy", "tracking.sample_steps=0", "tracking.mirrors=[]", "evaluation.eval_steps=0"),
    *("rollout.pe_marker=null", "num_devices=1", "devices_per_node=null"),
)
LARGER = ("batch_size=4", "ar.sampling.max_new_tokens=32", "diffusion.sampling.num_inference_steps=8")


@contextmanager
def trainer_of(recipe: str, *overrides: str) -> Iterator[Trainer]:
    """Gives the trainer of a recipe in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(RECIPES[recipe], [*SETTINGS, *overrides, f"run.dir={folder}/run"])
        with build_trainer(loaded) as trainer:
            yield trainer


# Time


def requests_of(engine: ComposedRolloutEngine, req: RolloutReq) -> dict[str, RolloutReq]:
    """Returns the request that each engine gets in a rollout of both."""
    resp = engine.generate(req)
    drawn, branch = resp.tracks["diffusion"], req.tracks["diffusion"].branch
    assert drawn.parent_ids is not None
    rows = [row for row in range(len(req)) for _ in range(branch)]
    below = req.select(rows).replace(
        sample_ids=drawn.sample_ids,
        group_ids=drawn.parent_ids,
        primitives={"text": Texts(texts=list(drawn.prompts))},
        tracks={"diffusion": replace(req.tracks["diffusion"], parent=None, branch=1)},
    )
    return {"ar": req.replace(tracks={"ar": req.tracks["ar"]}), "diffusion": below}


def rollout(name: str, pairs: int, clock: str) -> Ratio:
    """Measures a rollout of both engines."""
    with trainer_of(name, *LARGER) as trainer:
        engine: Any = trainer.rollout
        req = trainer.requests.training(trainer.data.take(4), 0, trainer.publish(0))
        with trainer.phase("generate", "ar"):
            alone = requests_of(engine, req)

            def children() -> None:
                for track in TRACKS:
                    engine.turn(track)
                    engine.engines[track].generate(alone[track])

            shapes = {"rewrites": len(req), "images": len(alone["diffusion"]), "clock": clock}
            return paired(name, shapes, lambda: engine.generate(req), children, pairs, CLOCKS[clock])


# Memory


@dataclass
class Sleep:
    """The bytes of the device around the sleep of one engine while the other sleeps, too."""

    track: str
    engine_bytes: int
    """The bytes of its tensors."""
    awake_bytes: int
    asleep_bytes: int
    awake_again_bytes: int


@dataclass
class Resident:
    """The bytes of the device in one phase of a step."""

    phase: str
    track: str
    """The policy whose turn it is; empty = no single one."""
    parts: dict[str, list[str]]
    """The parts on the device, by policy."""
    before_bytes: int
    """At the end of the phase before."""
    entered_bytes: int
    """When the parts of this phase are there, and the others have left."""


def engine_of(trainer: Trainer, track: str) -> Any:
    """Returns the engine of a policy itself, in place of its handle."""
    [rollout] = [learner.roles.rollout for learner in trainer.learners if learner.track == track]
    handle: Any = rollout
    return handle.group.role_here(f"{track}.rollout")


def tensor_bytes(modules: Iterable[nn.Module]) -> int:
    """Returns the bytes of all parameters and buffers."""
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))


def sleeps(trainer: Trainer, allocated: Callable[[], int]) -> list[Sleep]:
    """Lets each engine sleep and wake up, while the other one sleeps."""
    engines = {track: engine_of(trainer, track) for track in TRACKS}
    results = []
    for track, engine in engines.items():
        trainer.phase.turn(track)
        sizes = [allocated()]
        for move in (engine.sleep, engine.wake_up):
            move()
            gc.collect()
            sizes.append(allocated())
        results.append(Sleep(track, tensor_bytes(engine.pipeline.bundle.modules.values()), *sizes))
    return results


@contextmanager
def watched_phases(allocated: Callable[[], int]) -> Iterator[list[Resident]]:
    """Gives a list that gets the bytes of each phase that is entered in the block."""
    entered: list[Resident] = []
    enter = Phases._enter

    def watched(phases: Phases, phase: str, track: str | None) -> None:
        gc.collect()
        before = allocated()
        enter(phases, phase, track)
        gc.collect()
        here = {name: sorted(each.here) for name, each in phases.residencies.items()}
        entered.append(Resident(phase, track or "", here, before, allocated()))

    Phases._enter = watched  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        Phases._enter = enter  # type: ignore[method-assign]


def memory() -> dict[str, list[dict[str, Any]]]:
    """Measures the bytes of the replica recipe on an emulated device."""
    with second_devices(count=1) as devices:

        def allocated() -> int:
            return devices.allocated[0]

        with trainer_of("replica", "num_rollouts=1") as trainer:
            with trainer.phase("generate", "ar"):
                moved = sleeps(trainer, allocated)
            with watched_phases(allocated) as entered:
                trainer.train()
    return {"sleep": [asdict(each) for each in moved], "phases": [asdict(each) for each in entered]}


def main(pairs: int, clock: str, path: str | None) -> None:
    """Measures time and memory, and reports both."""
    results: list[Ratio] = []
    for name in RECIPES:
        with redirect_stdout(StringIO()):  # the console of the run
            results.append(rollout(name, pairs, clock))
        show(results[-1])
    with redirect_stdout(StringIO()):
        measured = memory()
    for each in (*measured["sleep"], *measured["phases"]):
        print(each)
    if path:
        content = {"machine": machine(), "results": [asdict(each) for each in results], "memory": measured}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    args = measuring(__doc__.splitlines()[0], pairs=10).parse_args()
    main(args.pairs, args.clock, args.json)
