"""`unirl quickstart`: the built-in recipe on a CPU, what became of it, and whether it kept its promise."""

import json
from collections.abc import Sequence
from pathlib import Path

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.failures import Session
from unirl.config.errors import DivergenceError

RECIPE = "diffusion/quickstart"
PROMISE = 0.15
"""The held-out reward rises at least by this much, for any seed."""
NEUTRAL = ("sampling.seed=", "run.", "tracking.", "save_interval=", "keep_checkpoints=", "resume=")
"""Settings that leave the promise as it is."""
EXAMPLES = (
    "unirl quickstart",
    "unirl quickstart --seed 1 --out runs/second",
    "unirl quickstart num_rollouts=100 backend.optimizer_cfg.learning_rate=1e-3",
)


def run(argv: list[str], session: Session) -> int:
    from unirl.cli.check import checked
    from unirl.cli.export import export
    from unirl.cli.train import train
    from unirl.trainer.run import continuation

    parser = recipe_parser("quickstart", "Train the small built-in model on a CPU; takes minutes.", EXAMPLES)
    parser.usage = "unirl quickstart [key=value ...]"
    arguments = parse_recipe(parser, argv, default=RECIPE)
    train(arguments.recipe, arguments.overrides, session)
    assert session.run_dir is not None
    scores = read_scores(session.run_dir)
    for line in (*report(session.run_dir, scores), *export(str(session.run_dir))):
        print(line)
    print(f"overview         {draw_overview(session.run_dir)}")
    longer = f"num_rollouts={2 * len(read_steps(session.run_dir))}"
    print(
        f"train on         {continuation(checked(arguments.recipe, [*arguments.overrides, longer]), session.run_dir)}"
    )
    check_promise(scores, arguments.overrides)
    return 0


def read_scores(root: Path) -> list[dict[str, float]]:
    """The metrics of every evaluation of a run, first to last."""
    return [json.loads(path.read_text())["metrics"] for path in sorted(root.glob("eval/step-*/scores.json"))]


def read_steps(root: Path) -> list[str]:
    """A line per finished step."""
    return (root / "metrics.jsonl").read_text().splitlines()


def report(root: Path, scores: Sequence[dict[str, float]]) -> list[str]:
    """What a person wants to know at the end."""
    before, after = scores[0], scores[-1]
    last = max(root.glob("eval/step-*"))
    spread = [f"{found['eval/reward_mean']:.3f} +- {found['eval/reward_stderr']:.3f}" for found in (before, after)]
    return [
        f"held-out reward  {spread[0]} -> {spread[1]}   (mean +- standard error over prompts)",
        f"before/after     {last / 'before_after.png'}",
        f"samples          {root / 'samples'}",
        f"metrics          {root / 'metrics.csv'}",
    ]


def draw_overview(root: Path) -> Path:
    """The last before/after sheet beside the reward curve of the run, as one picture."""
    from PIL import Image

    from unirl.tracking.curve import Series, beside, reward_curve
    from unirl.tracking.tables import read_rows

    rows = list(read_rows(root / "metrics.jsonl"))
    curve = Series(
        "reward, mean +- std over samples",
        [row["step"] for row in rows],
        [row["rollout/reward_mean"] for row in rows],
        [row["rollout/reward_std"] for row in rows],
    )
    path = root / "overview.png"
    with Image.open(max(root.glob("eval/step-*")) / "before_after.png") as pictures:
        beside(pictures.convert("RGB"), reward_curve([curve], "training reward")).save(path, optimize=True)
    return path


def check_promise(scores: Sequence[dict[str, float]], overrides: Sequence[str]) -> None:
    """Raises DivergenceError (9003) when the recipe, as it is shipped, did not improve as it promises."""
    rise = scores[-1]["eval/reward_mean"] - scores[0]["eval/reward_mean"]
    if all(setting.lstrip("+").startswith(NEUTRAL) for setting in overrides) and rise < PROMISE:
        raise DivergenceError(
            f"the held-out reward rose by {rise:.3f}, and the quick start promises at least {PROMISE}: "
            "something is broken here. Please report it, with the output of `unirl env`",
            code=9003,
        )
