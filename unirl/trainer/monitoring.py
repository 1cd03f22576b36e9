"""Monitoring of a run: metrics, the ledger of samples, alarms, and samples kept for people to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from unirl.config.recipe import RecipeConfig
from unirl.distributed.weight_sync.base import SyncReport
from unirl.reward.failures import drop_reasons
from unirl.reward.service import root_rows
from unirl.tracking.samples import REWRITE, SampleRow, SampleTable, StepRewards
from unirl.tracking.timing import PhaseTimers
from unirl.train.parity import GAP_METRIC, ParityGate, parity_table
from unirl.trainer.refill import SelectedSamples
from unirl.trainer.saved_rollouts import ReadRows, save_rollout
from unirl.types.primitives import Decoded, Facts, Preview
from unirl.types.results import Metrics
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.rows import spread_rows

if TYPE_CHECKING:
    from unirl.tracking.tracker import Tracker


RUN_METRICS = ("rollout/reward_mean", "rollout/reward_std", "rollout/reward_min", "rollout/reward_max")
"""Metrics of the last track that describe the run as a whole."""
MOST_VALUES = 512
"""Values of a series that are stored with a sample."""
COMPONENTS = "reward/"
"""The beginning of the metrics of components."""
SKIPPED = "train/skipped_updates"


class ShowsSamples(Protocol):
    """The methods of a rollout engine that make its samples readable for people."""

    def preview(self, decoded: Decoded) -> Preview: ...

    def spell(self, rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]: ...


@dataclass
class Monitor:
    """Watches the steps of a run and reports to its tracker. It changes no sample and no weight."""

    tracker: Tracker
    config: RecipeConfig
    track: str
    """The name of the track that is scored."""
    has_several: bool
    """The run has several tracks."""
    learns_from_advantages: bool
    """Equal rewards teach the loss nothing, so they raise an alarm."""
    warned_of: set[str] = field(default_factory=set)
    """Subjects of warnings that are printed once."""
    shown: tuple[str, ...] = ()
    """The ids of the samples of the step that are in the run directory. Training reports the values along them."""

    def record(self, track: str, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one track. In a run with several tracks, each name begins with that of its track.

        Metrics with an empty `track` describe weights that tracks share. The rewards of the last track describe the run
        as a whole, so they are recorded once more without the name of the track. So are the components of each track; a
        component belongs to one track, so that what a track below records later does not replace another one.
        """
        if not self.has_several or not track:
            self.tracker.record(metrics)
            return
        self.tracker.record({f"{track}/{key}": value for key, value in metrics.items()})
        of_run = (*RUN_METRICS, COMPONENTS) if track == self.track else (COMPONENTS,)
        self.tracker.record({key: value for key, value in metrics.items() if key.startswith(of_run)})

    def account(self, done: int, req: RolloutReq, resp: RolloutResp, selected: SelectedSamples) -> None:
        """Record how many samples of a step are trained and why others are dropped: metrics, the ledger, and events.

        Args:
            done: the number of steps finished after this one.
        """
        for name, track in resp.tracks.items():
            self.record(name, {**track.segment.statistics(), **rewrite_metrics(req, resp, track)})
        track = resp.with_scores_above(self.track)
        reasons = {**drop_reasons(track), **selected.reasons}
        dropped = sum(reasons.values())
        made = len(track) + selected.num_replaced
        self.tracker.ledger(done, generated=made, scored=made - dropped, dropped=dropped, reasons=reasons)
        self.tracker.record(selected.metrics)
        for event, fields in reward_events(resp):
            self.tracker.event(event, **fields)
        self._watch_rewards(done, track)
        if selected.missing:
            self._warn_of_padding(selected.missing)

    def keep_samples(self, done: int, req: RolloutReq, resp: RolloutResp, engine: ShowsSamples) -> None:
        """Write a few scored samples of the step into the run directory, every `tracking.sample_steps` steps.

        The samples of the last step are always kept, unless `tracking.sample_steps` is 0.
        """
        every = self.config.tracking.sample_steps
        self.shown = ()
        if every and (done % every == 0 or done == self.config.num_rollouts):
            from unirl.tracking.media import media_of  # PIL, which a check of a recipe does without

            track = resp.with_scores_above(self.track)
            scored = scored_rows(track)
            roots = root_rows(req, resp, track)
            req, track = req.select([roots[row] for row in scored]), track.select(scored)
            assert track.decoded is not None and track.rewards is not None, "an engine decodes what it samples"
            step = StepRewards(len(track), float(track.rewards.double().mean()))
            chosen = spread_rows(req.group_ids, self.config.tracking.max_samples)
            media = media_of(engine.preview(track.decoded.select(chosen)))
            req, track = req.select(chosen), track.select(chosen)
            rows = spelled(sample_rows(req, track, self.track), track, engine)
            self.tracker.samples(done, SampleTable(rows, media, step))
            self.shown = tuple(row.sample_id for row in rows)

    def add_series(self, series: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Write values along the samples of the step that `keep_samples` wrote, by sample id."""
        if series:
            self.tracker.add_series({sample_id: bounded(values) for sample_id, values in series.items()})

    def keep_rows(self, done: int, resp: RolloutResp, read: ReadRows) -> None:
        """Write all rows of the step into the run directory, every `tracking.save_rollouts` steps."""
        every = self.config.tracking.save_rollouts
        if every and done % every == 0:
            save_rollout(self.tracker.run.root, done, resp, read)

    def judge_parity(self, gate: ParityGate, measured: Metrics) -> None:
        """Judge the importance ratio of every recorded log-prob, before the first update of this process.

        Raises:
            ParityError: 9002 when the engine and the trainer disagree by more than `parity.stop`.
        """
        warning = gate.judge(parity_table(measured))
        if warning is not None:
            self.tracker.warn(warning)

    def watch_parity(self, gate: ParityGate, metrics: Mapping[str, float]) -> None:
        """Raise an alarm if the first update of a later step measured a suspicious gap between the log-probs.

        The samples must come from the weights before that update, because only then the ratio should be 1.
        """
        gap = metrics.get(GAP_METRIC, 0.0)
        if gate.is_suspicious(gap):
            self.tracker.event("alarm.raise", alarm="parity", value=gap)

    def watch_updates(self, metrics: Mapping[str, float]) -> None:
        """Raise alarms if updates of a step were skipped, and about metrics that are not finite.

        Each is also a warning when it happens for the first time in this process.
        """
        skipped = metrics.get(SKIPPED, 0.0)
        if skipped:
            self.tracker.event("alarm.raise", alarm="update.skipped", value=skipped)
            self._warn_once(
                SKIPPED,
                f"{skipped:g} of {self.config.num_updates} updates of a step changed no weight: the loss or its "
                "gradient is not finite, or no row counts. stack.max_nonfinite_updates in a row that are not finite "
                "end the run",
            )
        for name, value in metrics.items():
            if not math.isfinite(value):
                self.tracker.event("alarm.raise", alarm="metric.nonfinite", value=name)
                self._warn_once(name, f"the metric {name} of a step is {value}")

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self.warned_of:
            self.tracker.warn(text)
        self.warned_of.add(subject)

    def summarize(self, steps: int) -> None:
        """Print the course of the rewards over the whole run, and the directory of its files."""
        run = self.tracker.run
        self.tracker.summary(f"{run.identity.recipe}: {steps} step{'s' * (steps != 1)}", [("run", str(run.root))])

    def _watch_rewards(self, done: int, track: RolloutTrack) -> None:
        """Raise an alarm if all rewards are equal. In the first step, also print a warning to check the reward."""
        assert track.rewards is not None
        rewards = track.rewards[track.weight > 0]
        if not self.learns_from_advantages or len(rewards) < 2 or not (rewards == rewards[0]).all():
            return
        value = float(rewards[0])
        self.tracker.event("alarm.raise", alarm="reward.constant", value=value)
        if done == 1:
            self.tracker.warn(
                f"all {len(track)} samples of the first step have the reward {value:g}, and equal rewards teach "
                "nothing: check what the reward reads (the keys of its metadata, its weights), and look at the samples"
            )

    def _warn_of_padding(self, missing: int) -> None:
        """Write an event in every call, and print a warning in the first call of this process."""
        self.tracker.event("alarm.raise", alarm="refill.short", value=missing)
        self._warn_once(
            "padding",
            f"{missing} of the {self.config.batch_size} groups of a step have equal rewards after "
            f"refill.max_draws={self.config.refill and self.config.refill.max_draws} draws: their samples count "
            "nowhere, and the update is made of the others. Prompts may be too easy or too hard for the policy: "
            "look at rollout/informative_group_ratio and samples/padding",
        )


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """The metrics of one publication of weights."""
    return {
        "sync/version": report.version,
        "sync/bytes": report.num_bytes,
        "sync/canary_absdiff": report.canary_absdiff,
    }


def staleness_metrics(behind: Tensor) -> dict[str, float]:
    """How far samples are behind the weights that they train, in updates.

    Args:
        behind: [B] int64, of each sample.
    """
    return {"rollout/staleness_mean": float(behind.double().mean()), "rollout/staleness_max": float(behind.max())}


def busy_shares(timers: PhaseTimers) -> dict[str, float]:
    """The share of a step in which the engine sampled, and in which the weights learned. They work at the same time."""
    step = max(timers.seconds("step"), 1e-9)
    roles = {"queue/rollout_busy": "generate", "queue/train_busy": "train"}
    return {name: min(timers.seconds(phase) / step, 1.0) for name, phase in roles.items()}


def reward_metrics(track: RolloutTrack) -> dict[str, float]:
    """Statistics of the rewards over the rows that have one, and of logged-only rewards over the rows they scored."""
    assert track.rewards is not None
    alive = track.weight > 0
    rewards = track.rewards[alive].double()
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
    }
    for name, scores in (track.component_rewards or {}).items():
        metrics |= _spread(name, scores[alive])
    for name, scores in (track.logged_rewards or {}).items():
        is_scored = scores.isfinite()
        metrics |= _spread(name, scores[is_scored]) if is_scored.any() else {}
        if not is_scored.all():
            metrics[f"reward/{name}_missing"] = float((~is_scored).sum())
    return metrics


def selection_metrics(scored: RolloutTrack, trained: RolloutTrack) -> dict[str, float]:
    """The share of the scored rows of a track that are trained."""
    num_scored = int((scored.weight > 0).sum())
    return {"rollout/selected_ratio": int((trained.weight > 0).sum()) / max(num_scored, 1)}


def _spread(name: str, scores: Tensor) -> dict[str, float]:
    scores = scores.double()
    return {f"reward/{name}_mean": float(scores.mean()), f"reward/{name}_std": float(scores.std(correction=0))}


def sample_rows(req: RolloutReq, track: RolloutTrack, name: str) -> tuple[SampleRow, ...]:
    """A record of each row of `track`, for the manifest and the contact sheet.

    Args:
        req: the row of the request that each row descends from.
        name: the name of the track.
    """
    assert track.rewards is not None and track.advantages is not None
    facts, prompts, image_uris = facts_of(req, track), req.prompts(), req.prompt_image_uris()
    components = {**(track.component_rewards or {}), **(track.logged_rewards or {})}
    series = track.segment.series()
    return tuple(
        SampleRow(
            sample_id=track.sample_ids[i],
            group_id=req.group_ids[i],
            prompt=prompts[i],
            images=image_uris[i],
            reward=float(track.rewards[i]),
            rewards={name: float(scores[i]) for name, scores in components.items()},
            advantage=float(track.advantages[i]),
            weight=float(track.weight[i]),
            weight_version=int(track.weight_version[i]),
            facts=facts[i],
            series=bounded(series[i]),
            track=name,
            parent_id=None if track.parent_ids is None else track.parent_ids[i],
        )
        for i in range(len(track))
    )


def spelled(rows: Sequence[SampleRow], track: RolloutTrack, engine: ShowsSamples) -> tuple[SampleRow, ...]:
    """The rows with the texts of their first MOST_VALUES tokens, if they are texts."""
    tokens = [row[:MOST_VALUES] for row in track.segment.written()]
    if not any(tokens):
        return tuple(rows)
    parts = zip(rows, engine.spell(tokens), track.segment.context(), strict=True)
    return tuple(
        replace(row, pieces=pieces, context=tuple(place for place in context if place < len(pieces)))
        for row, pieces, context in parts
    )


def bounded(series: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """The first MOST_VALUES values of each series. A series that is empty or not finite is left out."""
    first = {name: tuple(values[:MOST_VALUES]) for name, values in series.items()}
    return {name: values for name, values in first.items() if values and all(map(math.isfinite, values))}


def facts_of(req: RolloutReq, track: RolloutTrack) -> list[Facts]:
    """Facts about each row of a track, to be shown. They contain the rewritten prompt if it differs from the original.

    Args:
        req: the row of the request that each row descends from.
    """
    prompts = req.prompts()
    if track.parent_track is None or track.prompts is None:
        return list(track.segment.facts())
    rewrites = zip(track.segment.facts(), prompts, track.prompts, strict=True)
    return [{**facts, REWRITE: rewrite} if rewrite != prompt else facts for facts, prompt, rewrite in rewrites]


def rewrite_metrics(req: RolloutReq, resp: RolloutResp, track: RolloutTrack) -> dict[str, float]:
    """The share of samples of a child track that read the original prompt, and the share that read a cut rewrite.

    The result is empty for a root track.
    """
    if track.parent_track is None or track.prompts is None:
        return {}
    prompts = req.prompts()
    kept = [prompts[row] == text for row, text in zip(root_rows(req, resp, track), track.prompts, strict=True)]
    metrics = {"rollout/kept_prompt_ratio": sum(kept) / len(kept)}
    if track.cut_prompts is not None:
        metrics["rollout/cut_rewrite_ratio"] = sum(track.cut_prompts) / len(kept)
    return metrics


def scored_rows(track: RolloutTrack) -> list[int]:
    """The numbers of the rows that have a reward, trained or not."""
    assert track.rewards is not None
    return track.rewards.isfinite().nonzero().flatten().tolist()


def reward_events(resp: RolloutResp) -> Iterator[tuple[str, dict[str, str]]]:
    """Events about failed rewards: the first failure of each reward, and every group that was dropped."""
    reported: set[str] = set()
    dropped: dict[str, str] = {}
    for name, track in resp.tracks.items():
        for row, failures in enumerate(track.failures or ()):
            for failure in failures:
                if failure.reward not in reported:
                    reported.add(failure.reward)
                    sample = track.sample_ids[row]
                    yield "reward.error", {"reward": failure.reward, "sample": sample, "why": failure.why}
            if failures and track.weight[row] == 0:
                dropped.setdefault(resp.root_groups(name)[row], failures[0].reward)
    for group, reason in dropped.items():
        yield "group.drop", {"group": group, "reason": reason}
