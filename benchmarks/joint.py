"""Compares a joint update of the tracks of one network with the bare network passes that its losses need.

    OMP_NUM_THREADS=1 python benchmarks/joint.py [--pairs 10] [--cases bagel] [--clock wall|cpu] [--json out.json]

`train_tracks` of a recipe at toy scale, whose network is made wider so that a pass takes at least tens of milliseconds,
is compared with the network calls that it makes: on the same inputs, track by track, forward and backward of each, then
one gradient clip and one AdamW step. The rollout, which is sampled once, is not measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from harness import CLOCKS, Ratio, measuring, paired, show, write
from torch import Tensor, nn

from unirl.config.load import load
from unirl.models.bagel.family import BAGEL
from unirl.models.hunyuan_image3.family import HUNYUAN_IMAGE3
from unirl.models.loading.checkpoint import DiffusersFamily
from unirl.trainer.assemble import build_trainer
from unirl.trainer.learner import Learner
from unirl.types.rollout_resp import RolloutResp

NETWORK = "transformer"
WIDER: Mapping[str, dict[str, Any]] = {
    "bagel": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "hunyuan_image3": {
        "hidden_size": 128,
        "patch_embed_hidden_dim": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "moe_intermediate_size": [256, 256, 256],
    },
}
"""Sizes that replace those of the toys."""
FAMILIES: Mapping[str, DiffusersFamily] = {"bagel": BAGEL, "hunyuan_image3": HUNYUAN_IMAGE3}
SMALL = (
    *("scale=toy", "tracking.sample_steps=0", "tracking.mirrors=[]", "evaluation.eval_steps=0"),
    *("stack.micro_batch_size=8", "sampling.image.samples_per_prompt=2"),
)


@dataclass(frozen=True)
class Case:
    """A recipe, and the settings that differ from it."""

    name: str
    recipe: str
    family: str
    overrides: tuple[str, ...] = ()


BAGEL_JOINT, HI3_JOINT = "unified_model/bagel_think_joint", "unified_model/hi3_joint"
CASES = [
    Case("bagel", BAGEL_JOINT, "bagel"),
    Case("bagel, gradient_norm", BAGEL_JOINT, "bagel", ("stack.balance=gradient_norm",)),
    Case("bagel, uncertainty", BAGEL_JOINT, "bagel", ("stack.balance=uncertainty",)),
    Case("hunyuan_image3", HI3_JOINT, "hunyuan_image3", ("num_devices=1", "devices_per_node=null")),
]


@contextmanager
def rollout(case: Case) -> Iterator[tuple[Learner, RolloutResp]]:
    """Gives the policy of a recipe, and the scored and credited samples of its first step."""
    configs = FAMILIES[case.family].toys["toy"]
    configs.components[NETWORK].update(WIDER[case.family])
    with tempfile.TemporaryDirectory() as folder:
        recipe = load(case.recipe, [*SMALL, f"run.dir={folder}/run", *case.overrides])
        with build_trainer(recipe) as trainer:
            for track in trainer.policy.tracks.values():
                track.choose_micro_batch()
            yield trainer.policy, trainer.produce(0)


def tensors(outputs: object) -> Iterator[Tensor]:
    """Yields the tensors of the outputs of a network that have a gradient."""
    if isinstance(outputs, Tensor):
        yield from (outputs,) if outputs.requires_grad else ()
    for each in outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else ():
        yield from tensors(each)


def calls_of(network: nn.Module, work: Callable[[], object]) -> list[tuple[Any, Any]]:
    """Returns the arguments of all calls of the network with gradients."""
    calls: list[tuple[Any, Any]] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            calls.append((args, kwargs))

    with network.register_forward_pre_hook(record, with_kwargs=True):
        work()
    return calls


def bare_step(network: nn.Module, calls: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Returns a function with only the network passes, the gradient clip and the optimizer step of an update."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def step() -> None:
        for args, kwargs in calls:
            outputs = tensors(network(*args, **kwargs))
            torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(case: Case, pairs: int, clock: str) -> Ratio:
    """Measures the update of one case."""
    with rollout(case) as (policy, resp):
        assert policy.roles.shared_stack is not None
        train_tracks, now = policy.roles.shared_stack.train_tracks, {n: t.progress(0) for n, t in policy.tracks.items()}
        backend: Any = policy.roles.backend
        network = backend.group.role_here("backend").module

        def ours() -> None:
            train_tracks(resp, now)

        calls = calls_of(network, ours)
        shapes: dict[str, int | float | str] = {
            "parameters_m": round(sum(p.numel() for p in network.parameters()) / 1e6, 2),
            "passes": len(calls),
            "clock": clock,
        }
        for name, track in resp.tracks.items():
            shapes[f"{name}_rows"] = len(track)
        return paired(case.name, shapes, ours, bare_step(network, calls), pairs, CLOCKS[clock])


def main(pairs: int, clock: str, chosen: list[str], path: str | None) -> None:
    """Measures and reports the cases whose names contain one of the words in `chosen`; no words = all cases."""
    results: list[Ratio] = []
    for case in CASES:
        if not chosen or any(word in case.name for word in chosen):
            with redirect_stdout(StringIO()):  # the console of the run
                results.append(measure(case, pairs, clock))
            show(results[-1])
            if path:
                write(results, path)  # the results so far


if __name__ == "__main__":
    args = measuring(__doc__.splitlines()[0], pairs=10).parse_args()
    main(args.pairs, args.clock, args.cases, args.json)
