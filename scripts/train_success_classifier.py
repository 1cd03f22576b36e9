"""Trains a classifier of images that show success in the environment of a recipe (`unirl.envs.success`).

    python scripts/train_success_classifier.py embodied/pixel_reach_ppo --out success.safetensors
    python scripts/train_success_classifier.py embodied/pixel_reach_ppo --measure success.safetensors

Random actions are taken until enough episodes have ended in success. All images of success are kept, and some of the
others. The table that is printed comes from other episodes. One minute of a CPU core for the toy environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unirl.config.build import build  # noqa: E402
from unirl.config.errors import ConfigError, DataError, UniRLError, report  # noqa: E402
from unirl.config.load import load  # noqa: E402
from unirl.envs.scored import frame_size  # noqa: E402
from unirl.envs.serve import environment_node  # noqa: E402
from unirl.envs.success import SuccessClassifier  # noqa: E402
from unirl.types.environments import DiscreteActions, Environment, EnvironmentSpaces, EpisodeStart  # noqa: E402

KEPT = 0.2
"""Share of the images without success that are kept."""
SLOTS = 64
MOST_STEPS = 2_000_000
"""Environment steps after which a task counts as one that random actions do not solve."""


@dataclass(frozen=True)
class Labelled:
    """Images, the numbers of their tasks, and whether they show success."""

    images: Tensor  # [N, 3, H, W] uint8
    tasks: Tensor  # [N] int64
    success: Tensor  # [N] bool

    @staticmethod
    def record(env: Environment, camera: str, tasks: Sequence[str], successes: int, seed: int) -> Labelled:
        """Random episodes of all tasks in turn, until `successes` of them have ended in success.

        Raises:
            DataError: random actions do not succeed.
        """
        generator = torch.Generator().manual_seed(seed)
        images, numbers, labels = [], [], []
        begun = found = steps = 0
        while found < successes:
            if steps > MOST_STEPS:
                raise DataError(
                    f"random actions succeeded {found} times in {steps} steps, and {successes} successes are wanted. "
                    "Ask for fewer (--successes), or label images of your own with SuccessClassifier.fit"
                )
            task = torch.arange(begun, begun + SLOTS) % len(tasks)
            starts = [
                EpisodeStart(seed=seed * 10**9 + begun + row, task=tasks[number])
                for row, number in enumerate(task.tolist())
            ]
            env.reset(range(SLOTS), starts)
            begun, alive = begun + SLOTS, torch.arange(SLOTS)
            while len(alive):
                step = env.step(alive.tolist(), random_actions(env.spaces, len(alive), generator))
                success = step.success > 0
                keep = success | (torch.rand(len(alive), generator=generator) < KEPT)
                images.append(step.observations[camera][keep].clone())
                numbers.append(task[alive][keep])
                labels.append(success[keep])
                found, steps = found + int(success.sum()), steps + len(alive)
                alive = alive[~(step.terminated | step.truncated)]
        return Labelled(torch.cat(images), torch.cat(numbers), torch.cat(labels))


def random_actions(spaces: EnvironmentSpaces, count: int, generator: torch.Generator) -> Tensor:
    """[count, ...] actions within the bounds."""
    if isinstance(spaces.actions, DiscreteActions):
        return torch.randint(spaces.actions.count, (count, *spaces.step_shape), generator=generator)
    return torch.rand(count, *spaces.step_shape, generator=generator) * 2 - 1


def table(found: Tensor, success: Tensor) -> list[str]:
    """Lines with precision and recall at some thresholds. `found` [N] are probabilities."""
    lines = [f"{len(success)} images, {int(success.sum())} of them with success", "threshold  precision  recall"]
    for threshold in (0.3, 0.5, 0.7, 0.9):
        said = found >= threshold
        right = float((said & success).sum())
        precision, recall = right / max(float(said.sum()), 1.0), right / max(float(success.sum()), 1.0)
        lines.append(f"{threshold:9.1f}  {precision:9.3f}  {recall:6.3f}")
    return lines


def run(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe whose pipeline.env is played, with the tasks of its data_source")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--camera", default="pixels", help="name of the observation with the images")
    parser.add_argument("--out", type=Path, help="file to write the classifier to")
    parser.add_argument("--measure", type=Path, help="file of a classifier that is only measured")
    parser.add_argument("--successes", type=int, default=2000, help="episodes of success to train on")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args(words)
    if (options.out is None) == (options.measure is None):
        raise ConfigError("give --out FILE to train a classifier, or --measure FILE to measure one")
    tasks = load(options.recipe, options.overrides).config.data_source.get("tasks", tuple) or ("",)
    env: Environment = build(environment_node(options.recipe, options.overrides))
    size = frame_size(env.spaces, options.camera, "pipeline.env")
    try:
        if options.out is not None:
            torch.manual_seed(options.seed)
            classifier = SuccessClassifier(size, tasks)
            data = Labelled.record(env, options.camera, tasks, options.successes, 2 * options.seed + 1)
            classifier.fit(data.images, data.tasks, data.success, updates=options.updates, seed=options.seed)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            classifier.write(options.out)
        held_out = Labelled.record(env, options.camera, tasks, max(options.successes // 4, 1), 2 * options.seed + 2)
    finally:
        env.close()
    classifier = SuccessClassifier.read(options.out or options.measure)
    told = [tasks[number] for number in held_out.tasks.tolist()]
    print("\n".join(table(classifier.probabilities(held_out.images, told), held_out.success)))


def main() -> int:
    try:
        run(sys.argv[1:])
    except UniRLError as error:
        print(report(error), file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
