"""Runs that a tracker recorded without a model: images, texts or videos, with steps, evaluations and events."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from unirl.tracking.media import media_of
from unirl.tracking.run_directory import RunDirectory, RunIdentity
from unirl.tracking.samples import SampleRow, SampleTable
from unirl.tracking.tracker import Tracker
from unirl.types.batch import Batch
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import ImagePreviews, Texts, VideoPreviews

PROMPTS = ("a red circle", "a blue square", "a <b>bold</b> cross", "a green line")
ORIGINS = {"seed": {"source": "command line", "place": ""}, "num_rollouts": {"source": "recipe", "place": "r.yaml:2"}}
MEDIA = {
    "image": lambda n, level: ImagePreviews(pixels=torch.full((n, 3, 8, 8), round(255 * level), dtype=torch.uint8)),
    "text": lambda n, level: Texts(texts=[f"answer {i} at {level} <script>" for i in range(n)]),
    "video": lambda n, level: VideoPreviews(
        frames=(30 * torch.arange(4 * n) % 180 + round(50 * level)).byte()[:, None, None, None].expand(-1, 3, 8, 8),
        offsets=4 * torch.arange(n + 1),
        num_frames=torch.full((n,), 4),
        fps=8.0,
        height=8,
        width=8,
    ),
}


PIECES = ("<b>big</b>", " an\u202eswer", "\n", "tool says 7", "<|end|>")
ALONG = {
    "image": lambda i: {"series": {"logp": (-1.0, -0.5 * i), "sigma": (0.9, 0.6)}},
    "text": lambda i: {
        "series": {"logp": (-1.0, -0.5 * i, 0.0, -4.0), "log_ratio": (0.2, -0.1, 0.0, 0.05)},
        "pieces": PIECES,
        "context": (3,),
        "advantage": (-1.0, -0.5, 0.5, 1.0)[i],
    },
    "video": lambda i: {},
}
"""What is recorded of training sample i along its tokens or steps, by medium."""


def evaluation(level: float, media: Batch, prompts: tuple[str, ...] = PROMPTS) -> EvalResult:
    """Two samples per prompt. The reward of prompt p rises by `level` x (p + 1) / 10."""
    rewards = torch.tensor([0.1 * p + 0.02 * s + level * (p + 1) / 10 for p in range(len(prompts)) for s in (0, 1)])
    return EvalResult(
        sample_ids=tuple(f"e:{p}@0:{s}" for p in range(len(prompts)) for s in (0, 1)),
        group_ids=tuple(f"e:{p}@0" for p in range(len(prompts)) for _ in (0, 1)),
        prompts=tuple(prompt for prompt in prompts for _ in (0, 1)),
        rewards=rewards,
        components={"shape": rewards / 2},
        media=media,
        track="image",
    )


def record(
    root: Path,
    medium: str = "image",
    steps: int = 6,
    seed: int = 1,
    code: int | None = 0,
    prompts: tuple[str, ...] = PROMPTS,
    scale: str = "full",
) -> Path:
    """A run with an evaluation before the first and after the last step. Without a `code`, its process died."""
    identity = RunIdentity(
        project="p",
        recipe=f"demo/{medium}",
        argv=("train", f"seed={seed}", f"run.dir={root}", "--resume", "auto"),
        seed=seed,
        scale=scale,
    )
    run = RunDirectory(root, identity)
    run.write_config(
        f"num_rollouts: {steps}\nseed: {seed}\n", f"num_rollouts: {steps}\nseed: {seed}\nlr: 0.1\n", ORIGINS
    )
    tracker = Tracker(run)
    made = MEDIA[medium]
    tracker.eval(0, evaluation(0.0, made(2 * len(prompts), 0.2), prompts))
    for step in range(1, steps + 1):
        tracker.record({"rollout/reward_mean": step / 10, "rollout/reward_std": 0.1, "reward/shape_mean": step / 20})
        tracker.record({"time/step": 2.0, "time/generate": 1.5, "time/train": 0.5, "train/ratio_mean": 1.0})
        tracker.ledger(step, generated=8, scored=7, dropped=1, reasons={"not finite": 1})
        tracker.log_step(step)
    rows = tuple(
        SampleRow(
            sample_id=f"t:{i}",
            group_id="t",
            prompt=prompts[0],
            reward=i / 4,
            rewards={"shape": i / 8},
            **ALONG[medium](i),
        )
        for i in range(4)
    )
    tracker.samples(steps, SampleTable(rows, media_of(made(4, 0.5))))
    tracker.eval(steps, evaluation(1.0, made(2 * len(prompts), 0.8), prompts))
    tracker.warn("the reward looks odd")
    if code is not None:
        tracker.finish(code, "" if code == 0 else "ValueError: it broke")
        return root
    tracker.flush()
    close_tables(tracker)
    run._owner.release()
    return root


def act(root: Path, step: int = 6) -> list[dict]:
    """Makes three of the four training samples of a run of texts episodes of two tasks, and returns all four.

    The second task reports no success.
    """
    manifest = root / "samples" / f"step-{step:06d}" / "manifest.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    for i in range(3):
        rows[i]["facts"] = {"episodes": 1, "steps": 10 * (i + 1), "success": i == 1}
    del rows[2]["facts"]["success"]
    rows[2] |= {"prompt": "", "group_id": "start1@0"}
    rows[3]["facts"] = {"episodes": 1, "steps": "nan", "success": True}
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def close_tables(tracker: Tracker) -> None:
    """Closes the files of a tracker without a record of the end."""
    for table in (*tracker._cut_tables, tracker._events):
        table.close()
