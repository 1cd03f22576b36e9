"""`unirl quickstart [llm|vlm|pe|embodied]`: trains a built-in recipe on a CPU, and checks that it improved."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.cli.export import export
from unirl.cli.signals import stoppable_start
from unirl.cli.start import shown_start
from unirl.cli.train import train
from unirl.config.errors import NoImprovementError
from unirl.config.failures import Session
from unirl.tracking.record import RunRecord
from unirl.trainer.run_folder import continuation

RECIPE = "diffusion/quickstart"
PROMISES = {
    RECIPE: 0.15,
    "llm/quickstart": 0.2,
    "vlm/quickstart": 0.1,
    "pe/quickstart": 0.2,
    "embodied/quickstart": 50.0,
}
"""Smallest rise of the held-out reward for any seed, by recipe. Other recipes must not fall."""
NEUTRAL = ("sampling.seed=", "run.", "tracking.", "save_interval=", "keep_checkpoints=", "resume=")
"""Settings that do not affect the expected rise."""
EXAMPLES = (
    "unirl quickstart",
    "unirl quickstart llm",
    "unirl quickstart --seed 1 --out runs/second",
    "unirl quickstart num_rollouts=100 backend.optimizer_cfg.learning_rate=1e-3",
)


def run(argv: list[str], session: Session) -> int:
    parser = recipe_parser("quickstart", "Train a small built-in model on a CPU; takes minutes.", EXAMPLES)
    parser.usage = "unirl quickstart [DOMAIN or RECIPE] [key=value ...]"
    arguments = parse_recipe(parser, argv, default=RECIPE)
    recipe = recipe_of(arguments.recipe)
    with stoppable_start(session):
        train(replace(arguments, recipe=recipe), session)
    assert session.run_dir is not None
    scores = RunRecord(session.run_dir).evaluations
    with shown_start(Session(), "exporting"):
        exported = export(str(session.run_dir))
    for line in (report(scores), *exported):
        print(line)
    longer = f"num_rollouts={2 * len((session.run_dir / 'metrics.jsonl').read_text().splitlines())}"
    print(f"train on         {continuation(checked(recipe, [*arguments.overrides, longer]), session.run_dir)}")
    check_promise(recipe, scores, arguments.overrides)
    return 0


def recipe_of(word: str) -> str:
    """The recipe that `word` names. The name of a domain means its quick start."""
    return word if "/" in word or word.endswith(".yaml") else f"{word}/quickstart"


def report(scores: Sequence[Mapping[str, float]]) -> str:
    """The scores before and after. With the summary of the run and its exports, it fits one screen of 24 lines."""
    before, after = scores[0], scores[-1]
    spread = [f"{result['eval/reward_mean']:.3f} +- {result['eval/reward_stderr']:.3f}" for result in (before, after)]
    return f"held-out reward  {spread[0]} -> {spread[1]}   (mean +- standard error)"


def check_promise(recipe: str, scores: Sequence[Mapping[str, float]], overrides: Sequence[str]) -> None:
    """Raises DivergenceError (9003) when the recipe, as it is shipped, did not improve as it promises."""
    rise, promise = scores[-1]["eval/reward_mean"] - scores[0]["eval/reward_mean"], PROMISES.get(recipe, 0.0)
    if all(setting.lstrip("+").startswith(NEUTRAL) for setting in overrides) and rise < promise:
        raise NoImprovementError(
            f"the held-out reward rose by {rise:.3f}, and {recipe} promises at least {promise}: "
            "something is broken here. Please report it, with the output of `unirl env`"
        )
