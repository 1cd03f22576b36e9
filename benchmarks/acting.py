"""Rollouts of a policy in its environments against a bare loop of the same network calls and environment steps.

    python benchmarks/acting.py --clock cpu --json benchmarks/acting.json

The bare loop keeps only the newest observations; the rollout also records every decision, as training needs it.
`ratio` is our time over its time. Some minutes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.harness import CLOCKS, Ratio, measuring, paired, report
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.models.policies.bundle import CategoricalBundle, GaussianBundle, PolicyBundle
from unirl.models.policies.pipeline import PolicyPipeline
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.sampling import ActionSamplingParams

ROWS, DECISIONS = (16, 64), 200
BUNDLES: dict[str, Callable[[], PolicyBundle]] = {
    "CartPole-v1": lambda: CategoricalBundle(observations=4, actions=2),
    "HalfCheetah-v5": lambda: GaussianBundle(observations=17, actions=6),
}


def request(rows: int) -> RolloutReq:
    ids = [f"start{row}" for row in range(rows)]
    params = ActionSamplingParams(max_steps=DECISIONS, continuing=True)
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[""] * rows)},
        metadata=[{} for _ in ids],
        tracks={"action": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    )


def ours(id: str, bundle: PolicyBundle, rows: int) -> Callable[[], None]:
    pipeline = PolicyPipeline(bundle, env=GymnasiumEnvironment(id=id))
    req = request(rows)

    def run() -> None:
        pipeline.generate(req, rows)

    return run


def bare(id: str, bundle: PolicyBundle, rows: int) -> Callable[[], None]:
    import gymnasium

    environments = [gymnasium.make(id) for _ in range(rows)]
    policy = bundle.stage().policy
    draw = torch.randn if policy.noise == "normal" else torch.rand
    shape = environments[0].observation_space.shape

    @torch.no_grad()
    def run() -> None:
        observations = np.stack([each.reset(seed=row)[0] for row, each in enumerate(environments)]).astype(np.float32)
        noise = draw(DECISIONS, rows, *policy.noise_shape)
        for decision in range(DECISIONS):
            actions = policy({"state": torch.from_numpy(observations)}, noise=noise[decision])["actions"]
            given = actions.clamp(-1, 1).numpy() if actions.is_floating_point() else actions.tolist()
            observations = np.empty((rows, *shape), np.float32)
            for row, environment in enumerate(environments):
                observations[row], _, terminated, truncated, _ = environment.step(given[row])
                if terminated or truncated:
                    observations[row] = environment.reset(seed=decision + row)[0]

    return run


def main() -> None:
    options = measuring(__doc__ or "", pairs=9).parse_args()
    results: list[Ratio] = []
    for (id, make), rows in itertools.product(BUNDLES.items(), ROWS):
        bundle = make()
        shapes: dict[str, int | float | str] = {"rows": rows, "decisions": DECISIONS, "clock": options.clock}
        both = ours(id, bundle, rows), bare(id, bundle, rows)
        results.append(paired(id, shapes, *both, options.pairs, CLOCKS[options.clock]))
    report(results, options.json)


if __name__ == "__main__":
    main()
