"""Learning curves of our control recipes beside those of Stable-Baselines3, at equal numbers of environment steps.

    python benchmarks/control.py --json benchmarks/control.json --tasks cartpole_ppo pendulum_sac --seeds 1 2 3
    python benchmarks/control.py --json benchmarks/control.json --tasks reacher_sac --systems unirl
    python benchmarks/control.py --json benchmarks/control.json --tasks --plot docs/images/control.png

Both systems have one thread, networks of the same sizes, the same discount, rates and batch sizes, and are judged by
the most likely actions on the same 16 starts, those of our evaluations. A run is a process of its own; its seconds are
those of training, without imports and evaluations. The file keeps the runs that it has; the script adds those that are
missing. Needs stable-baselines3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import machine  # noqa: E402
from unirl.config.evaluation import EvaluationConfig  # noqa: E402
from unirl.data.environment_starts import EnvironmentStarts  # noqa: E402
from unirl.envs.slots import Source  # noqa: E402
from unirl.models.policies.pipeline import start_seed  # noqa: E402
from unirl.sde.noise import NoiseSource  # noqa: E402
from unirl.tracking.curve import Series, below, beside, reward_curve  # noqa: E402

if TYPE_CHECKING:
    import gymnasium
    from PIL import Image

STARTS = 16


@dataclass(frozen=True)
class Task:
    """A task that both systems learn, with the settings of each."""

    id: str
    recipe: str
    steps_per_rollout: int
    """Environment steps of one step of our loop."""
    rollouts: int
    evaluations: int
    algorithm: str
    """The algorithm of Stable-Baselines3; empty if it has none."""
    theirs: Mapping[str, Any]
    """Its arguments."""
    overrides: tuple[str, ...] = ()
    environments: int = 1
    maker: str = "gymnasium:make"
    max_steps: int | None = None
    """The limit of an episode. None: that of the id."""
    network: Mapping[str, Any] = field(default_factory=dict)
    normalized: bool = False
    """Stable-Baselines3 normalizes observations and rewards, as our recipe does."""

    def make(self) -> gymnasium.Env[Any, Any]:
        """An environment for Stable-Baselines3."""
        return Source(id=self.id, maker=self.maker, max_steps=self.max_steps).make()

    @property
    def every(self) -> int:
        """Environment steps between two evaluations."""
        return self.rollouts // self.evaluations * self.steps_per_rollout


EPISODES = {"train_freq": (1, "episode"), "gradient_steps": -1}
"""An update for each environment step, after the episode, as in our loop."""
TASKS = {
    "cartpole_ppo": Task(
        "CartPole-v1", "embodied/cartpole_ppo", 2048, 40, 8, "PPO",
        {"learning_rate": 1e-3, "n_steps": 256, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.0},
        ("scheduler=constant",), environments=8, network={"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
    ),
    "pendulum_sac": Task(
        "Pendulum-v1", "embodied/pendulum_sac", 200, 40, 8, "SAC",
        {"learning_rate": 1e-3, "learning_starts": 200, **EPISODES},
        network={"net_arch": [256, 256]},
    ),
    "reacher_sac": Task(
        "Reacher-v5", "embodied/reacher_sac", 50, 200, 8, "SAC",
        {"learning_rate": 3e-4, "learning_starts": 1000, **EPISODES},
        network={"net_arch": [256, 256]},
    ),
    "halfcheetah_ppo": Task(
        "HalfCheetah-v5", "embodied/halfcheetah_ppo", 2000, 50, 5, "PPO",
        {"learning_rate": 3e-4, "n_steps": 1000, "batch_size": 64, "n_epochs": 10, "ent_coef": 0.0},
        environments=2, normalized=True,
        network={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "log_std_init": -0.5},
    ),
    "halfcheetah_sac": Task(
        "HalfCheetah-v5", "embodied/halfcheetah_sac", 1000, 50, 10, "SAC",
        {"learning_rate": 3e-4, "learning_starts": 999, **EPISODES},
        network={"net_arch": [256, 256]},
    ),
    "metaworld_reach_ppo": Task(
        "reach-v3", "embodied/metaworld_reach_ppo", 1600, 20, 5, "PPO",
        {"learning_rate": 3e-4, "n_steps": 100, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.0},
        environments=16, maker="unirl.envs.metaworld:make_task", max_steps=100,
        network={"net_arch": {"pi": [64, 64], "vf": [64, 64]}},
    ),
    "metaworld_reach_sac": Task(
        "reach-v3", "embodied/metaworld_reach_sac", 100, 200, 10, "SAC",
        {"learning_rate": 3e-4, "learning_starts": 999, **EPISODES},
        maker="unirl.envs.metaworld:make_task", max_steps=100,
        network={"net_arch": [256, 256]},
    ),
    "halfcheetah_crossq": Task("HalfCheetah-v5", "embodied/halfcheetah_crossq", 1000, 50, 10, "", {}),
}  # fmt: skip
Curve = list[tuple[int, float]]
"""Environment steps, and the mean return there."""


def start_seeds() -> list[int]:
    """The seeds of the starts of our evaluations."""
    noise = NoiseSource(EvaluationConfig().seed, "eval", 0)
    return [start_seed(noise, prompt.group_id) for prompt in EnvironmentStarts().eval_prompts(STARTS)]


def ours(task: Task, seed: int) -> tuple[Curve, float]:
    """The curve and the seconds of training of our recipe."""
    interval = task.rollouts // task.evaluations
    settings = [f"num_rollouts={task.rollouts}", f"evaluation.eval_steps={interval}", f"sampling.seed={seed}"]
    settings += [f"evaluation.max_prompts={STARTS}", "save_interval=0", "tracking.sample_steps=0"]
    settings += [word for word in task.overrides if word != "scheduler=constant"]
    if "scheduler=constant" in task.overrides:
        settings.append("~backend.scheduler_cfg")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "unirl.cli", "train", task.recipe, *settings, f"run.dir={run}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        scores = {int(path.parent.name.split("-")[1]): path for path in run.glob("eval/step-*/scores.json")}
        curve = [
            (step * task.steps_per_rollout, json.loads(scores[step].read_text())["metrics"]["eval/return_mean"])
            for step in sorted(scores)
        ]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return curve, sum(row["time/step"] for row in rows)


def theirs(task: Task, seed: int) -> tuple[Curve, float]:
    """The curve and the seconds of training of Stable-Baselines3. Call it in a process of its own."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    torch.set_num_threads(1)
    environments: VecEnv = make_vec_env(task.make, n_envs=task.environments, seed=seed)
    if task.normalized:
        environments = VecNormalize(environments)
    model = getattr(sb3, task.algorithm)(
        "MlpPolicy", environments, seed=seed, device="cpu", policy_kwargs=dict(task.network), **task.theirs
    )
    judge = task.make()

    def mean_return() -> float:
        total = 0.0
        for start in start_seeds():
            observation, _ = judge.reset(seed=start)
            over = False
            while not over:
                if isinstance(environments, VecNormalize):
                    observation = environments.normalize_obs(observation)
                action, _ = model.predict(observation, deterministic=True)
                observation, reward, terminated, truncated, _ = judge.step(action)
                total += float(reward)
                over = terminated or truncated
        return total / STARTS

    curve, seconds = [(0, mean_return())], 0.0
    for number in range(1, task.evaluations + 1):
        begun = time.perf_counter()
        model.learn(number * task.every - model.num_timesteps, reset_num_timesteps=False)
        seconds += time.perf_counter() - begun
        curve.append((model.num_timesteps, mean_return()))
    return curve, seconds


def run_of(name: str, system: str, seed: int) -> dict[str, Any]:
    """The record of one run."""
    if system == "unirl":
        curve, seconds = ours(TASKS[name], seed)
    else:
        words = [sys.executable, __file__, "--one", name, str(seed)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
        curve, seconds = json.loads(done.stdout.splitlines()[-1])
    return {"task": name, "system": system, "seed": seed, "curve": curve, "seconds": round(seconds, 1)}


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each task and system the mean return over seeds, with its standard error, at each evaluation."""
    rows = []
    for name, system in sorted({(run["task"], run["system"]) for run in runs}):
        own = [run for run in runs if (run["task"], run["system"]) == (name, system)]
        points = min(len(run["curve"]) for run in own)  # a run that was stopped has fewer
        returns = list(zip(*([value for _, value in run["curve"][:points]] for run in own), strict=True))
        error = [statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None for each in returns]
        rows.append(
            {
                "task": name,
                "system": system,
                "seeds": len(own),
                "steps": [steps for steps, _ in own[0]["curve"][:points]],
                "mean": [round(statistics.mean(each), 1) for each in returns],
                "standard_error": [None if each is None else round(each, 1) for each in error],
                "steps_per_s": round(statistics.mean(run["curve"][-1][0] / run["seconds"] for run in own), 1),
            }
        )
    return rows


PANELS = (
    ("cartpole_ppo",),
    ("halfcheetah_ppo",),
    ("halfcheetah_sac", "halfcheetah_crossq"),
    ("pendulum_sac",),
    ("reacher_sac",),
    ("metaworld_reach_ppo",),
    ("metaworld_reach_sac",),
)
"""The tasks of each diagram, of one environment."""
SYSTEMS = {"unirl": "UniRL", "sb3": "Stable-Baselines3"}
ALGORITHMS = {"ppo": "PPO", "sac": "SAC", "crossq": "CrossQ"}


def plot(runs: Sequence[Mapping[str, Any]]) -> Image.Image:
    """The mean returns over seeds, with a band of +- a standard error, two diagrams in a row."""
    rows, diagrams = summary(runs), []
    for tasks in PANELS:
        own = [
            row
            for task in tasks
            for system in SYSTEMS
            for row in rows
            if (row["task"], row["system"]) == (task, system)
        ]
        algorithms = [ALGORITHMS[row["task"].rpartition("_")[2]] for row in own]
        curves = [
            Series(f"{SYSTEMS[row['system']]} {algorithm}", row["steps"], row["mean"], row["standard_error"])
            for row, algorithm in zip(own, algorithms, strict=True)
        ]
        seeds = sorted({row["seeds"] for row in own})
        title = f"{TASKS[tasks[0]].id}, {' to '.join(map(str, seeds))} seeds"
        diagrams.append(reward_curve(curves, title, width=640, height=360, across="environment steps"))
    return below(*(beside(*diagrams[first : first + 2]) for first in range(0, len(diagrams), 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--systems", nargs="+", choices=["unirl", "sb3"], default=["unirl", "sb3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write the curves of the file to this PNG")
    parser.add_argument("--one", nargs=2, metavar=("TASK", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(theirs(TASKS[options.one[0]], int(options.one[1]))))
        return
    known = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    done = {(run["task"], run["system"], run["seed"]) for run in known}
    for name in options.tasks:
        for seed in options.seeds:
            for system in options.systems:
                if (name, system, seed) in done or (system == "sb3" and not TASKS[name].algorithm):
                    continue
                known.append(run_of(name, system, seed))
                print(json.dumps(known[-1]), flush=True)
                if options.json:
                    content = {"machine": machine(), "starts": STARTS, "summary": summary(known), "runs": known}
                    options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        plot(known).save(options.plot, optimize=True)
    for row in summary(known):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
