"""The tables of all metrics and events with their meanings. The tracker refuses every name that is not in a table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache

METRICS: Mapping[str, str] = {
    "rollout/reward_mean": "mean reward of the step's samples",
    "rollout/reward_std": "population standard deviation of the rewards",
    "rollout/reward_min": "smallest reward",
    "rollout/reward_max": "largest reward",
    "rollout/zero_std_group_ratio": "share of groups whose rewards are all equal; they give no gradient",
    "rollout/informative_group_ratio": "share of all sampled groups whose rewards differ; only with `refill`",
    "rollout/filtered_group_ratio": "share of groups that `advantage.select` excludes",
    "rollout/selected_ratio": "share of scored samples that are trained",
    "rollout/kept_prompt_ratio": "share of samples drawn from the original prompt: the rewrite is empty or equal",
    "rollout/cut_rewrite_ratio": "share of samples whose rewrite is longer than the text encoder reads "
    "(`sampling.max_sequence_length`): its end has no effect",
    "rollout/own_history_ratio": "share of samples that are compared with earlier rewards of their own prompt",
    "rollout/adv_abs_mean": "mean absolute advantage",
    "rollout/parity_absdiff_max": "largest |log-prob of the engine - replayed log-prob|, nats; 0 when exact",
    "rollout/parity_absdiff_mean": "mean |log-prob of the engine - replayed log-prob| per token, nats",
    "rollout/parity_kl": "estimate (k3) of KL(engine || replay) per token under the same weights, nats",
    "rollout/staleness_mean": "mean number of updates between the weights that sampled and those that learn; only with "
    "`asynchronous`",
    "rollout/staleness_max": "largest number of updates between the weights that sampled and those that learn; only "
    "with `asynchronous`",
    "rollout/mixed_versions": "share of responses whose tokens come from the weights of several steps; with "
    "asynchronous.slice_tokens",
    "rollout/too_old": "samples older than asynchronous.max_staleness when their turn came, with order=free",
    "rollout/response_len_mean": "mean number of tokens in a response",
    "rollout/response_len_min": "number of tokens in the shortest response",
    "rollout/response_len_max": "number of tokens in the longest response",
    "rollout/truncated_fraction": "share of responses that stopped at the length limit",
    "rollout/skipped_blocks": "share of the calls of blocks that the step cache left out; only with "
    "`sampling.cache_threshold`",
    "reward/<component>_mean": "mean of one reward component",
    "reward/<component>_std": "population standard deviation of one reward component",
    "reward/<component>_missing": "samples that a logged-only reward could not score",
    "env/return": "mean return of the episodes: the sum of the rewards of the environment",
    "env/length": "mean number of steps of the environment in an episode",
    "env/success_once": "share of the episodes with a success, of those that report one; absent if none does",
    "env/episodes": "number of episodes; one that its row cut off counts only if its row has no other",
    "samples/env_steps": "steps of the environments",
    "queue/reward_depth": "largest number of sample batches that waited for the reward at once",
    "queue/reward_wait": "seconds that the step waited for rewards after its last sample",
    "queue/reward_latency": "mean seconds from the end of sampling of a batch to its scores",
    "queue/reward_busy": "share of the time from the first batch to the last score in which the reward worked",
    "queue/steps_ahead": "later steps that are generated, or are going to be, while the weights learn from this one",
    "queue/rollout_busy": "share of the step in which the engine sampled; only with `asynchronous`",
    "queue/train_busy": "share of the step in which the weights learned; only with `asynchronous`",
    "train/loss": "loss per element, as differentiated",
    "train/loss_rms": "root mean square of the loss over its elements: the size of a loss whose mean is near 0; not of "
    "losses on pairs or on the gradient of the reward",
    "train/loss_weight": "factor of the gradient of a track in a joint update; only with a `stack.balance` that is not "
    "fixed",
    "train/policy_loss": "policy term of the loss",
    "train/kl_loss": "weighted KL term of the loss",
    "train/velocity_loss": "weighted term that keeps the velocity near that of other policies",
    "train/entropy_loss": "weighted entropy bonus, as a term of the loss",
    "train/positive_loss": "NFT: prediction loss of the mixture for good samples, before weighting",
    "train/negative_loss": "NFT: prediction loss of the mixture for bad samples, before weighting",
    "train/critic_loss": "weighted loss of the value head, as a term of the loss",
    "train/value_loss": "loss of the value head",
    "train/ratio_mean": "mean importance ratio pi_theta / pi_old; 1 at the first update",
    "train/ratio_std": "standard deviation of the importance ratio",
    "train/ratio_min": "smallest importance ratio",
    "train/ratio_max": "largest importance ratio",
    "train/clip_fraction": "share of elements outside the trust region of the loss, whose page says how it is counted",
    "train/clip_fraction_high": "share of elements whose ratio is above the clip range",
    "train/clip_fraction_low": "share of elements whose ratio is below the clip range",
    "train/clip_range": "distance from ratio 1 to the lower end of the clip range in this step",
    "train/approx_kl": "estimate of KL(pi_old || pi_theta), nats",
    "train/kl": "KL divergence from the reference policy, nats",
    "train/kl_step_<index>": "KL divergence from the reference policy at one denoising step, nats",
    "train/kl_old": "exact KL divergence from the policy that sampled, nats",
    "train/kl_old_max": "largest such divergence of one sample at one step, nats",
    "train/kl_teacher": "estimate of KL(policy || teacher) on the policy's own tokens, nats",
    "train/kl_coef": "coefficient of the KL term in this step, after schedule and feedback",
    "train/log_ratio_step_<index>": "mean |log-ratio| at one denoising step, nats",
    "train/velocity_mse": "mean squared difference from the velocity of the reference policy",
    "train/velocity_mse_<policy>": "mean squared difference from the velocity of another named policy",
    "train/matching_error": "mean squared error of the velocity at noised samples",
    "train/optimality": "NFT: mean probability that a sample is a good one; 1/2 is neutral",
    "train/preference_accuracy": "share of pairs in which the policy prefers the chosen sample more than the reference",
    "train/preference_margin": "mean difference between these two preferences, in logits; 0 at the first update",
    "train/sample_weight": "mean weight of a sample in reward-weighted regression",
    "train/reward_mean": "mean reward that the loss differentiates; its images are not rounded to 8 bits",
    "train/saturated_fraction": "share of samples above the reward's ceiling, which have no gradient",
    "train/denoising_steps": "denoising steps that the loss ran; some losses stop early",
    "train/entropy": "mean entropy of the policy, nats; the mean of -log-prob where the loss has no entropy bonus",
    "train/mismatch_kl": "estimate (k3) of KL(engine || trainer) before the update, nats per token",
    "train/mismatch_weight": "mean weight that corrects for the engine's numerics; near 1",
    "train/mismatch_cut": "share of tokens whose correction was bounded or that were rejected",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/lr": "learning rate, mean over the updates of the step",
    "train/skipped_updates": "updates that were skipped because the loss or the gradient was not finite",
    "train/value_error_std": "standard deviation of return - value",
    "train/return_std": "standard deviation of the returns",
    "train/explained_variance": "share of the variance of the returns that the value head explains; at most 1",
    "train/value_clip_fraction": "share of values that left the clip range around the old values",
    "train/imitation_loss": "behaviour cloning: negative log-likelihood of demonstrated actions, nats; for a "
    "flow policy the flow-matching loss",
    "train/q_loss": "SAC, IQL: squared error of the critics, summed over them, halved",
    "train/actor_loss": "SAC: temperature x log-prob - Q of the policy's own actions; IQL: weighted imitation loss",
    "train/action_weight": "IQL: mean weight of the imitated actions, exp(beta x advantage), bounded",
    "train/alpha": "SAC: temperature, the weight of the entropy",
    "train/policy_entropy": "SAC: estimated entropy of the policy at replayed observations, nats",
    "train/q_mean": "SAC, IQL: mean value of replayed actions; rising without limit means divergence",
    "train/value_grad_norm": "norm of the value head's gradient before clipping",
    "train/replay_size": "transitions in the replay store of a worker",
    "train/replay_updates": "updates of the step: its new decisions x stack.updates_per_decision, 0 during warmup",
    "custom/<name>": "what an algorithm or advantage outside of this package reports",
    "eval/reward_mean": "mean reward on held-out prompts",
    "eval/reward_stderr": "standard error of that mean, over prompts",
    "eval/reward_min": "smallest reward on held-out prompts",
    "eval/reward_max": "largest reward on held-out prompts",
    "eval/avg@<n>": "share of right answers among n samples of a held-out prompt",
    "eval/pass@<k>": "probability that at least one of k samples is right; unbiased estimate from all n samples",
    "eval/maj@<n>": "share of held-out prompts whose most frequent answer among n samples is right",
    "eval/unscored": "held-out samples that could not be scored and that no mean includes",
    "eval/diversity": "how far apart the samples are: mean distance of two small images, or share of unequal "
    "three-letter pieces of two texts",
    "eval/fine_detail": "mean squared difference of the images from their 3 x 3 averages",
    "eval/<component>_mean": "mean of one reward component on held-out prompts",
    "time/step": "wall time of the step",
    "time/generate": "sampling",
    "time/reward": "scoring",
    "time/train": "optimizer updates with their anchor passes",
    "time/sync": "transfer of weights to the engine",
    "time/wait": "waiting for samples, only with `asynchronous`. Phases then overlap, and their times may add up to "
    "more than the step",
    "time/join": "sampling on the training devices while they wait, only with `asynchronous.elastic`",
    "time/eval": "evaluation since the previous line",
    "time/checkpoint": "saving since the previous line",
    "sync/version": "updates that the sampling weights have seen",
    "sync/bytes": "bytes that the last transfer of weights sent",
    "sync/canary_absdiff": "largest difference of the two sides' forward pass on a fixed input after a transfer",
    "samples/generated": "samples generated in the step",
    "samples/scored": "samples scored and not dropped",
    "samples/dropped": "samples dropped, for any reason",
    "samples/draws": "batches of prompts that were taken in the step; more than one only with `refill`",
    "samples/padding": "samples of weight 0 that complete the step when too few groups are informative",
    "samples/tokens": "tokens generated in the step",
    "throughput/samples_per_s": "samples per second of the whole step",
    "throughput/tokens_per_s": "generated tokens per second of the whole step",
    "throughput/generated_tokens_per_s": "generated tokens per second of sampling alone",
    "mem/host_peak_gib": "largest resident memory of a process of the run so far",
    "mem/device_peak_gib": "largest memory allocated on a device in the step",
}
"""Meaning of each metric. `<word>` in a name stands for any word, such as the name of a reward component."""

EVENTS: Mapping[str, str] = {
    "run.start": "the process started; `argv`",
    "run.resume": "the files were cut back to a checkpoint; `step`",
    "run.restart": "the run starts again from its newest checkpoint; `restart`, `max`, `error`, `num_devices`",
    "run.end": "the run ended; `code`, `reason`",
    "step.end": "a step was logged; `step`",
    "eval.end": "an evaluation was logged; `step` and its metrics",
    "ckpt.commit": "a checkpoint was published; `step`",
    "reward.error": "a reward could not score a sample; `reward`, `sample`, `why`",
    "group.drop": "a group was dropped; `group`, `reason`",
    "alarm.raise": "something looks wrong; `alarm`, `value`, and from the watchdog also `step`, `text`",
    "alarm.clear": "an alarm of the watchdog has ended; `alarm`, `step`",
    "mirror.failed": "a mirror failed and is off for the rest of the run; `mirror`, `error`",
    "warning": "a warning that the console showed; `text`",
}
"""Meaning and fields of each event in events.jsonl."""

STATE: Mapping[str, str] = {
    "workers": "workers that host roles; with runtime=local they are all in the driver's process",
    "silent_s": "seconds since the driver began its newest call, or saw progress of it",
    "phase/<name>": "1 for the phase that the run is in",
}
"""State of a run at any moment, which only live mirrors show."""

NOT_REPRODUCIBLE = ("time/", "throughput/", "mem/", "queue/")
"""Namespaces that differ between two runs of the same recipe; all others are bit-identical on one machine."""

PAGE = """\
<!-- Generated: .venv/bin/python -m unirl.tracking.metrics > docs/metrics.md -->
# Metrics and events of a run

Each step appends one line to `metrics.jsonl` and `metrics.csv`; each evaluation appends one line to `eval_metrics.csv`.
Any name outside of this table is an error. `<word>` stands for any word, such as the name of a reward component.
Times are seconds, memory is GiB, log-probs are nats.
A run that was killed and resumed logs the same values, bit for bit, except `time/`, `throughput/`, `mem/` and `queue/`.
With several tracks, the name of the track precedes the metric: `text/rollout/reward_mean`.
[unirl/tracking](../unirl/tracking/README.md) describes the other files of a run.

"""


def check_names(names: Iterable[str], tracks: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a metric that the table does not have. The name of a track and a slash may precede it."""
    for name in names:
        track, _, rest = name.partition("/")
        if not is_metric(rest if track in tracks else name):
            raise ValueError(f"unknown metric {name!r}.{_nearest(name, METRICS)} {_ADD}")


def check_event(name: str) -> None:
    """Raises ValueError for an event that the table does not have."""
    if name not in EVENTS:
        raise ValueError(f"unknown event {name!r}.{_nearest(name, EVENTS)} {_ADD}")


_ADD = "Code of your own reports custom/<name>. Names of this package have a meaning in unirl/tracking/metrics.py"


@cache
def is_metric(name: str) -> bool:
    """Whether the table has the name."""
    return any(re.fullmatch(pattern(row), name) for row in METRICS)


def meaning_of(name: str) -> str:
    """The meaning of a metric. Empty for a name that the table does not have."""
    return next((meaning for row, meaning in METRICS.items() if re.fullmatch(pattern(row), name)), "")


def pattern(row: str) -> str:
    """A regular expression for the names that one row of METRICS covers."""
    return re.sub(r"<\w+>", r"[\\w.+-]+", re.escape(row))


def _nearest(name: str, table: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, table, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


_BAR = r"\|"


def page() -> str:
    """The documentation page, as Markdown."""
    return (
        PAGE
        + _markdown("metric", METRICS)
        + "\n`events.jsonl` has one line per event:\n\n"
        + _markdown("event", EVENTS)
    )


def _markdown(heading: str, table: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {meaning.replace('|', _BAR)} |" for name, meaning in table.items()]
    return "\n".join([f"| {heading} | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
