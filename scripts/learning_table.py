"""Trains every method of the learning tests on toys with known optima, with three seeds, and writes the rewards.

    OMP_NUM_THREADS=1 python scripts/learning_table.py            about 5 minutes on one core
    OMP_NUM_THREADS=1 python scripts/learning_table.py --only dpo --print

All numbers of docs/algorithms/learning.md come from this script. Exit status 1: a claim failed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.algorithms import (  # noqa: E402
    test_credit_learning,
    test_diffusion_ppo,
    test_drtune,
    test_forward_learning,
    test_learning,
    test_ring_learning,
    test_token_learning,
)
from tests.algorithms.flows import Method, Run, T  # noqa: E402
from tests.algorithms.toys import GAUSSIAN, MIXTURE, RING, Toy  # noqa: E402
from unirl.algorithms.diffusion_dppo import DiffusionDPPO  # noqa: E402
from unirl.algorithms.diffusion_rwr import DiffusionRWR  # noqa: E402
from unirl.algorithms.drtune import RewardBackprop  # noqa: E402

PAGE = ROOT / "docs" / "algorithms" / "learning.md"
SEEDS = (0, 1, 2)
OPENING = """\
<!-- Written by a script, not by hand: OMP_NUM_THREADS=1 .venv/bin/python scripts/learning_table.py -->
# What every method learns on toys with known optima

`OMP_NUM_THREADS=1 .venv/bin/python scripts/learning_table.py` writes this page. Methods and toys are those of
the tests in `tests/algorithms` (`toys.py`, `test_*learning.py`, `test_drtune.py`, `test_diffusion_ppo.py`).

Seeds {seeds} set the sampling noise and the initial weights of the trained network. `start` is the mean reward of the
first rollout, before any update; `end` the mean of the last five rollouts; `worst` the smallest
(end - start) / (optimum - start) of the three; `claim` the fraction that every seed must reach. `s` is the mean wall
time of a run; other work shared the machine.

{held} of {claimed} claims hold. Measured {date}: {machine}."""
CLOSING = """
## What the table does not show

Losses with a penalty towards a reference policy have a lower optimum, which has no closed form here:
[reference policy](reference_policy.md). Learning rates are those of the tests and constant, so a method below the
optimum may be oscillating around it. The toys show that a loss has the right sign and scale and finds the rewarded
samples; they do not rank methods. On the ring, the rows without a claim make two updates per
rollout: compare them with the rows of one update."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One method on one toy."""

    method: str
    run: Callable[[int], Run]
    """Runs the training for a seed, which sets sampling noise and initial weights."""
    optimum: float
    claim: float | None
    """Smallest fraction of the distance to the optimum that every seed must cover. None: shown without a claim."""


@dataclass
class Row:
    """The results of all seeds of a trial."""

    trial: Trial
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The smallest (end - start) / (optimum - start) over the seeds."""
        optimum = self.trial.optimum
        return min((end - start) / (optimum - start) for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def holds(self) -> bool:
        return self.trial.claim is None or self.worst >= self.trial.claim

    def __str__(self) -> str:
        claim = (
            "none" if self.trial.claim is None else f"{self.trial.claim:.2f}" + ("" if self.holds else " **missed**")
        )
        cells = [self.trial.method, spread(self.starts), spread(self.ends), f"{self.worst:.2f}", claim]
        return "| " + " | ".join([*cells, f"{statistics.mean(self.seconds):.1f}"]) + " |"


def spread(numbers: list[float]) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    text: str
    trials: list[Trial]


def on_flow(toy: Toy, steps: int, claim: float | None, name: str, method: Method) -> Trial:
    run = lambda seed: toy.learn(method, steps, seed=seed, init=seed)  # noqa: E731
    return Trial(method=name, run=run, optimum=toy.optimum, claim=claim)


def by_gradient(toy: Toy, steps: int, claim: float, name: str, algorithm: RewardBackprop, updates: int) -> Trial:
    run = lambda seed: toy.learn_by_gradient(algorithm, steps, updates, seed=seed, init=seed)  # noqa: E731
    return Trial(method=name, run=run, optimum=toy.optimum, claim=claim)


def gaussian() -> Section:
    trial = partial(on_flow, GAUSSIAN, 40)
    trials = [
        trial(0.8, f"GRPO, kernel {name}", Method(algorithm=test_learning.grpo(), kernel=kernel))
        for name, kernel in test_learning.KERNELS.items()
    ]
    for name, algorithm in test_learning.TRUST_REGIONS.items():
        trials.append(trial(0.8, f"{name}, 4 updates", Method(algorithm=algorithm, num_updates=4)))
    for name, algorithm in test_diffusion_ppo.CRITICS.items():
        trials.append(trial(0.8, f"PPO, {name}", Method(algorithm=algorithm)))
    trials += [trial(0.8, f"GRPO, {name}", method) for name, method in test_credit_learning.METHODS.items()]
    trials += [trial(0.8, name, method) for name, method in test_forward_learning.METHODS.items()]
    for name, (algorithm, updates) in test_drtune.LEARNERS.items():
        trials.append(by_gradient(GAUSSIAN, 40, 0.9, name, algorithm, updates))
    alike = test_forward_learning.method(DiffusionRWR(temperature=1e6, times_per_forward=8))
    trials.append(trial(None, "control: rwr that sees no reward", alike))
    text = (
        "N(0, 1/4) in 8 dimensions, reward -mean (x0 - 1)^2, T 8, 4 prompts x 24 samples, 40 steps. "
        "Optimum 0, start -1.25."
    )
    return Section(title="Gaussian flow", text=text, trials=trials)


def mixture() -> Section:
    methods = {
        "grpo": test_learning.grpo(),
        "guard": test_learning.grpo(0.02, ratio="guard"),
        "dppo": DiffusionDPPO(kl_threshold=0.02, steps_per_forward=T - 1),
    }
    trials = [on_flow(MIXTURE, 40, 0.5, name, Method(algorithm=algorithm)) for name, algorithm in methods.items()]
    text = (
        f"Two modes at (+-1.5, 0), std 0.3, reward exp(-|x0 - m0|^2), 40 steps. Optimum 1, start {MIXTURE.start:.3f}."
    )
    return Section(title="Mixture of two modes", text=text, trials=trials)


def ring() -> Section:
    methods = test_ring_learning.METHODS
    trials = [on_flow(RING, 80, 0.5, name, method) for name, method in methods.items()]
    trials.append(by_gradient(RING, 80, 0.5, "DRTune", test_ring_learning.DRTUNE, 1))
    trials += [
        on_flow(RING, 80, None, f"{name}, 2 updates", replace(methods[name], num_updates=2))
        for name in ("grpo", "dppo", "ppo")
    ]
    text = (
        "Eight modes on a circle of radius 1.5, std 0.15, reward exp(-|x0 - m0|^2): a neighbour of m0 has a reward of "
        f"about a quarter, the others almost 0. 80 steps; "
        f"`grpo`, `dppo`, `ppo` with one update each. Optimum 1, start {RING.start:.3f}."
    )
    return Section(title="Ring of eight modes", text=text, trials=trials)


def tokens() -> Section:
    trials = [
        Trial(method=name, run=partial(test_token_learning.bandit, algorithm), optimum=1.0, claim=0.9)
        for name, algorithm in test_token_learning.METHODS.items()
    ]
    text = (
        "3 prompts x 16 samples of 3 tokens out of 4, one right token per prompt, reward the share of right tokens, 30 "
        "steps of 2 updates from a table of zeros (no seed in the weights). Optimum 1, start 0.25."
    )
    return Section(title="Token bandit", text=text, trials=trials)


def measured(trial: Trial) -> Row:
    row = Row(trial)
    for seed in SEEDS:
        torch.manual_seed(seed)
        began = time.perf_counter()
        run = trial.run(seed)
        row.seconds.append(time.perf_counter() - began)
        row.starts.append(run.rewards[0])
        row.ends.append(run.end)
    print(row, flush=True)
    return row


def page(sections: list[tuple[Section, list[Row]]]) -> Iterator[str]:
    claimed = [row for _, rows in sections for row in rows if row.trial.claim is not None]
    yield OPENING.format(
        seeds=", ".join(map(str, SEEDS)),
        held=sum(row.holds for row in claimed),
        claimed=len(claimed),
        date=date.today(),
        machine=machine(),
    )
    for section, rows in sections:
        yield f"\n## {section.title}\n\n{section.text}\n"
        yield "| method | start, by seed | end, by seed | worst | claim | s |\n|---|---|---|---|---|---|"
        yield from map(str, rows)
    yield CLOSING


def machine() -> str:
    python = f"Python {platform.python_version()}"
    return f"{processor()}, 1 thread, {platform.system()}, {python}, torch {torch.__version__}"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only methods whose name contains this")
    parser.add_argument("--print", action="store_true", help="print the table and do not write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sections = []
    for section in (gaussian(), mixture(), ring(), tokens()):
        chosen = [trial for trial in section.trials if args.only in trial.method]
        print(f"# {section.title}", flush=True)
        sections.append((section, [measured(trial) for trial in chosen]))
    if not (args.print or args.only):
        PAGE.write_text("\n".join(page(sections)) + "\n")
    return int(not all(row.holds for _, rows in sections for row in rows))


if __name__ == "__main__":
    sys.exit(main())
