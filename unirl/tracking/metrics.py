"""The names of all metrics and their meanings: one table, for the documents and for refusing what is not in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class MetricName:
    """One line of the table. `<word>` in a name stands for any word, such as a reward component."""

    name: str
    meaning: str

    @property
    def pattern(self) -> str:
        """A regular expression for the names that this line covers."""
        return re.sub(r"<\w+>", r"[\\w.+-]+", re.escape(self.name))


METRICS = (
    MetricName("rollout/reward_mean", "mean reward of the step's samples"),
    MetricName("rollout/reward_std", "population standard deviation of the rewards"),
    MetricName("rollout/reward_min", "smallest reward"),
    MetricName("rollout/reward_max", "largest reward"),
    MetricName("rollout/zero_std_group_ratio", "share of groups whose rewards are all equal: they teach nothing"),
    MetricName(
        "rollout/informative_group_ratio", "share of all drawn groups whose rewards differ, where refill looks for them"
    ),
    MetricName("rollout/filtered_group_ratio", "share of groups that a rule of advantage.select leaves out"),
    MetricName("rollout/selected_ratio", "share of scored samples that are trained"),
    MetricName("rollout/own_history_ratio", "share of samples measured by their prompt's own history of rewards"),
    MetricName("rollout/adv_abs_mean", "mean absolute advantage"),
    MetricName("rollout/adv_std", "standard deviation of the advantages"),
    MetricName("rollout/parity_absdiff_max", "largest |log-prob of the engine - replayed one|, nats; 0 when exact"),
    MetricName("rollout/parity_absdiff_mean", "mean |log-prob of the engine - replayed one| per token, nats"),
    MetricName("rollout/parity_kl", "estimate (k3) of KL(engine || replay) per token under the same weights, nats"),
    MetricName("rollout/response_len_<statistic>", "tokens per response"),
    MetricName("rollout/truncated_fraction", "share of responses cut at the length limit"),
    MetricName("rollout/staleness_<statistic>", "updates between sampling and training of a row"),
    MetricName("reward/<component>_mean", "mean of one reward component"),
    MetricName("reward/<component>_std", "standard deviation of one reward component"),
    MetricName("reward/<watched>_missing", "samples that a watched reward could not score"),
    MetricName("queue/reward_depth", "most parts of the step that waited for the reward when another came"),
    MetricName("queue/reward_wait", "seconds that the step waited for rewards after its last sample"),
    MetricName("queue/reward_latency", "mean seconds from a part's last sample to its scores"),
    MetricName("queue/reward_busy", "share of the time from the first part to the last score that the reward worked"),
    MetricName("train/loss", "loss per element, as differentiated"),
    MetricName("train/policy_loss", "surrogate part of the loss"),
    MetricName("train/kl_loss", "weighted divergence part of the loss"),
    MetricName("train/value_loss", "loss of the value head"),
    MetricName("train/<name>_loss", "another part of the loss"),
    MetricName("train/ratio_mean", "mean importance ratio pi_theta / pi_old; 1 at the first update"),
    MetricName("train/ratio_std", "standard deviation of the importance ratio"),
    MetricName("train/ratio_min", "smallest importance ratio"),
    MetricName("train/ratio_max", "largest importance ratio"),
    MetricName("train/clip_fraction", "share of elements whose ratio left the trust region"),
    MetricName("train/clip_fraction_high", "share clipped above"),
    MetricName("train/clip_fraction_low", "share clipped below"),
    MetricName("train/clip_range", "half width of the trust region in this step"),
    MetricName("train/approx_kl", "estimate of KL(pi_old || pi_theta), nats"),
    MetricName("train/kl", "divergence to the reference policy, nats"),
    MetricName("train/kl_step_<index>", "divergence to the reference policy at one denoising step, nats"),
    MetricName("train/kl_old", "exact divergence to the policy that sampled, nats"),
    MetricName("train/kl_old_max", "largest such divergence of one sample's step, nats"),
    MetricName("train/kl_<reference>", "divergence to a named policy, nats"),
    MetricName("train/kl_coef", "coefficient of the divergence in this step, schedule and feedback applied"),
    MetricName("train/log_ratio_step_<index>", "mean |log-ratio| at one denoising step, nats"),
    MetricName("train/velocity_mse", "mean squared difference to the reference's velocity"),
    MetricName("train/velocity_mse_<policy>", "mean squared difference to the velocity of another named policy"),
    MetricName("train/matching_error", "mean squared error of the velocity at noised samples"),
    MetricName("train/optimality", "mean probability that a sample counts as a good one; 1/2 is neutral"),
    MetricName("train/preference_accuracy", "share of pairs whose winner is preferred by more than by the reference"),
    MetricName("train/preference_margin", "how much more, in logits; 0 at first"),
    MetricName("train/sample_weight", "mean weight of a sample in weighted regression"),
    MetricName("train/reward_mean", "mean reward that the loss differentiated, of pictures that are not rounded"),
    MetricName("train/saturated_fraction", "share of samples above the reward's ceiling, which have no gradient"),
    MetricName("train/denoising_steps", "denoising steps that the loss took, where it may stop early"),
    MetricName("train/entropy", "entropy of the policy, nats; of tokens -log-prob, unless the loss reads it"),
    MetricName("train/mismatch_kl", "estimate of KL(engine || trainer) before the update, nats per token"),
    MetricName("train/mismatch_weight", "mean weight that corrects the engine's numerics; near 1"),
    MetricName("train/mismatch_cut", "share of tokens whose correction was bounded, or which were rejected"),
    MetricName("train/grad_norm", "norm of the gradient before clipping"),
    MetricName("train/lr", "learning rate of the last update"),
    MetricName("train/lr_<group>", "learning rate of one parameter group"),
    MetricName("train/updates", "optimizer updates done since the start of the run"),
    MetricName("train/skipped_updates", "updates skipped because loss or gradient was not finite"),
    MetricName("train/value_error_std", "standard deviation of what the value head leaves unexplained of the returns"),
    MetricName("train/return_std", "standard deviation of the returns"),
    MetricName("train/explained_variance", "share of the returns' variance that the value head explains; 1 is all"),
    MetricName("train/value_clip_fraction", "share of values that left the range around the old ones"),
    MetricName("train/value_grad_norm", "norm of the value head's gradient before clipping"),
    MetricName("eval/reward_mean", "mean reward on held-out prompts"),
    MetricName("eval/reward_std", "standard deviation of the reward on held-out prompts"),
    MetricName("eval/reward_stderr", "standard error of that mean, over prompts"),
    MetricName("eval/reward_min", "smallest reward on held-out prompts"),
    MetricName("eval/reward_max", "largest reward on held-out prompts"),
    MetricName("eval/avg@<n>", "share of right answers among n samples of a held-out prompt"),
    MetricName("eval/pass@<k>", "chance that of k samples of a held-out prompt one is right; unbiased, from all n"),
    MetricName("eval/maj@<n>", "share of held-out prompts whose most frequent answer of n samples is right"),
    MetricName("eval/unscored", "held-out samples that could not be scored and count nowhere"),
    MetricName("eval/<component>_mean", "mean of one reward component on held-out prompts"),
    MetricName("eval/<component>_std", "its standard deviation"),
    MetricName("env/return_<statistic>", "sum of rewards of an episode"),
    MetricName("env/length_<statistic>", "steps of an episode"),
    MetricName("env/success_once", "share of episodes that succeeded at any step"),
    MetricName("time/step", "wall time of the step, seconds"),
    MetricName("time/generate", "sampling, seconds"),
    MetricName("time/reward", "scoring, seconds"),
    MetricName("time/advantage", "credit, seconds"),
    MetricName("time/train", "optimizer updates with their anchor passes, seconds"),
    MetricName("time/sync", "weight transport, seconds"),
    MetricName("time/eval", "evaluation since the last line, seconds"),
    MetricName("time/checkpoint", "saving since the last line, seconds"),
    MetricName("sync/version", "updates that the sampling weights have seen"),
    MetricName("sync/bytes", "bytes of the transfer that brought the sampling weights"),
    MetricName("sync/canary_absdiff", "largest difference of the two sides' forward on a fixed input after a sync"),
    MetricName("samples/generated", "samples generated in the step"),
    MetricName("samples/scored", "samples scored"),
    MetricName("samples/dropped", "samples dropped, for any reason"),
    MetricName("samples/draws", "draws of prompts that the step made, where refill may make several"),
    MetricName("samples/padding", "samples of weight 0 that complete a step with too few informative groups"),
    MetricName("samples/tokens", "tokens generated in the step"),
    MetricName("throughput/samples_per_s", "samples per second of the whole step"),
    MetricName("throughput/tokens_per_s", "generated tokens per second of the whole step"),
    MetricName("throughput/generated_tokens_per_s", "generated tokens per second of sampling alone"),
    MetricName("mem/host_peak_gib", "largest resident memory of a process of the run so far, GiB"),
    MetricName("mem/device_peak_gib", "largest memory allocated on a device in the step, GiB"),
)

NOT_REPRODUCIBLE = ("time/", "throughput/", "mem/", "queue/")
"""Namespaces that differ between two runs of the same recipe; all others are bit-identical on one machine."""


def check_names(names: Iterable[str], tracks: tuple[str, ...] = ()) -> None:
    """Raises ValueError for a name that the table does not have. One of `tracks` may stand before it, with a slash."""
    for name in names:
        track, _, rest = name.partition("/")
        if not _matches(rest if track in tracks else name):
            raise ValueError(f"unknown metric {name!r}.{_nearest(name)} Add it with its meaning to tracking/metrics.py")


PAGE = """\
<!-- Written by a program, not by hand: .venv/bin/python -m unirl.tracking.metrics > docs/metrics.md -->
# What a run writes down, by name

A step's numbers are a line of `metrics.jsonl` and `metrics.csv`, an evaluation's a line of `eval_metrics.csv`; no other
name is accepted. `<word>` stands for a word, such as a reward's. Times are seconds, memory is GiB, log-probs are nats.
All but `time/`, `throughput/`, `mem/` and `queue/` are the same, bit for bit, in a run that was killed and resumed.
With several tracks, the track's name stands before what belongs to it: `text/rollout/reward_mean`. The other files of a
run are described in [unirl/tracking](../unirl/tracking/README.md).

"""


def page() -> str:
    """The page of the documents that lists every name."""
    return PAGE + markdown()


def markdown() -> str:
    """The table of all names."""
    lines = [f"| `{metric.name}` | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| metric | meaning |", "|---|---|", *lines]) + "\n"


@cache
def _matches(name: str) -> bool:
    return any(re.fullmatch(metric.pattern, name) for metric in METRICS)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


if __name__ == "__main__":
    print(page(), end="")
