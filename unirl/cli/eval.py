"""`unirl eval RUN`: scores a checkpoint on held-out prompts, with the evaluation settings of its run."""

import json

from unirl.cli.arguments import Parser, output_folder, split_settings
from unirl.cli.start import shown_start
from unirl.config.failures import Session
from unirl.config.secrets import refuse_masked
from unirl.tracking.console import evaluation
from unirl.tracking.media import metrics_of_evaluation
from unirl.trainer.assemble import build_trainer
from unirl.trainer.run_folder import check_weights, quiet_tracker, saved_run

EXAMPLES = (
    "unirl eval runs/unirl/first",
    "unirl eval runs/unirl/first/checkpoints/checkpoint-000050 --baseline",
    "unirl eval runs/unirl/first --prompts my_prompts.txt evaluation.samples_per_prompt=4",
)


def run(argv: list[str], session: Session) -> int:
    parser = Parser("eval", "Score a checkpoint on held-out prompts, with fixed seeds.", EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run directory (its newest checkpoint), or a checkpoint")
    parser.option("--prompts", metavar="FILE", help="a prompt file in place of the run's own")
    parser.option("--weights", choices=("live", "ema"), default="live", help="which weights (default live)")
    parser.option("--baseline", action="store_true", help="score the untrained model first, and show both side by side")
    parser.option("--out", metavar="DIR", help="default: RUN/evaluations/...")
    parser.option("--json", action="store_true", help="the scores as JSON, last on stdout")
    own, overrides = split_settings(argv, parser.takes_value)
    options = parser.parse(own)
    out = output_folder(options.run, "evaluations", options.out)
    block = {"weights": options.weights} | ({"data_path": options.prompts} if options.prompts else {})
    saved = saved_run(options.run, overrides, {"evaluation": block}, from_start=options.baseline)
    refuse_masked(saved.recipe.resolved())
    check_weights(saved, options.weights)
    with (
        shown_start(Session(), "evaluating") as shown,
        build_trainer(saved.recipe, session, tracker=quiet_tracker(saved, out, session.argv, shown)) as trainer,
    ):
        before = metrics_of_evaluation(trainer.evaluate()) if options.baseline else None
        trainer.state.load(saved.checkpoint)
        result = trainer.evaluate()
        folder = out / "eval" / f"step-{trainer.state.step:06d}"
    after = metrics_of_evaluation(result)
    if options.json:
        facts = {"step": saved.checkpoint.step, "folder": str(folder)}
        print(json.dumps(after | facts | ({} if before is None else {"before": before}), indent=1))
    elif before is None:
        print(f"held-out {evaluation(after)}   {folder}")
    else:
        print(f"before   {evaluation(before)}   (the untrained model)")
        print(f"after    {evaluation(after)}   ({saved.checkpoint.path.name})")
        for page in sorted(folder.glob("before_after.*")):
            print(f"pages    {page}")
    return 0
