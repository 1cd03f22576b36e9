"""The names of events in events.jsonl: an enumerated set, so that a reader can rely on it."""

from __future__ import annotations

import difflib

EVENTS = {
    "run.start": "the process began; argv",
    "run.resume": "files were cut back to a checkpoint; step",
    "run.end": "the run ended; code, reason",
    "plan.ok": "the recipe was checked and planned",
    "step.end": "a step was logged; step",
    "eval.end": "an evaluation was logged; step and metrics",
    "ckpt.begin": "a checkpoint is being written; step",
    "ckpt.commit": "a checkpoint was published; step",
    "ckpt.skip": "a damaged checkpoint was passed over; reason",
    "reward.error": "a scorer failed; reward, sample",
    "group.drop": "a group was dropped; reason",
    "update.skip": "an update was skipped because it was not finite; step",
    "alarm.raise": "something looks wrong; alarm, value",
    "alarm.clear": "it no longer does; alarm",
    "worker.lost": "a worker died; rank",
    "worker.restart": "a worker was started again; rank",
    "mirror.failed": "a mirror failed and is off; mirror, error",
    "warning": "something that a person must not miss; text",
}


def check_event(name: str) -> None:
    """Raises ValueError for an event that the table does not have."""
    if name not in EVENTS:
        close = difflib.get_close_matches(name, EVENTS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown event {name!r}.{hint} Add it with its meaning to tracking/events.py")
