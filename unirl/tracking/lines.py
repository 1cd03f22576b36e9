"""The words of a step line: short, `key=value`, at most 200 columns, readable by a person and by grep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_COLUMNS = 200
PHASES = {"generate": "gen", "reward": "rwd", "train": "trn", "sync": "syn"}
MAX_COMPONENTS = 4
ACCURACIES = ("eval/avg@", "eval/pass@", "eval/maj@")
"""How the names of shares of right answers begin."""


@dataclass(frozen=True)
class Glyphs:
    """The characters that a stream can show."""

    plus_minus: str
    spark: str

    @staticmethod
    def of(encoding: str | None) -> Glyphs:
        """Those of Unicode where the stream's encoding has them, else of ASCII."""
        rich = Glyphs("\u00b1", "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588")
        try:
            (rich.plus_minus + rich.spark).encode(encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return Glyphs("+-", "_.-=*#")
        return rich


def step_line(
    clock: str, step: int, total: int, metrics: Mapping[str, float], eta_s: float | None, glyphs: Glyphs
) -> str:
    """One step in one line; parts whose metrics are absent are left out.

    11:21:52 step 12/60 reward=0.412+-0.083 shape=0.09 | ratio=1.0000 | 3.1s gen=1.9 trn=0.7 20.6/s | eta 2m29s
    """
    head = f"{clock} step {step}/{total} {reward(metrics, glyphs)}".rstrip()
    rest = [training(metrics, glyphs), phases(metrics), keeping(metrics)]
    if eta_s is not None:
        rest.append(f"eta {duration(eta_s)}")
    line = " | ".join(part for part in (head, *rest) if part)
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 3] + "..."


def reward(metrics: Mapping[str, float], glyphs: Glyphs) -> str:
    """`reward=0.412+-0.083 colour=0.55 shape=0.09`."""
    prefix, suffix = "reward/", "_mean"
    means = [name for name in metrics if name.startswith(prefix) and name.endswith(suffix)][:MAX_COMPONENTS]
    shown = [f"{printable(name[len(prefix) : -len(suffix)])}={metrics[name]:.2f}" for name in means]
    return _join([_with_spread("reward", metrics, "rollout/reward_mean", "rollout/reward_std", 3, glyphs), *shown])


def training(metrics: Mapping[str, float], glyphs: Glyphs) -> str:
    """`ratio=1.0000+-0.0004 clip=0.00 kl=0.003 zstd=0.06`."""
    return _join(
        [
            _with_spread("ratio", metrics, "train/ratio_mean", "train/ratio_std", 4, glyphs),
            _value("clip", metrics, "train/clip_fraction", 2),
            _value("kl", metrics, "train/kl", 3),
            _value("zstd", metrics, "rollout/zero_std_group_ratio", 2),
            _value("len", metrics, "rollout/response_len_mean", 0),
            _value("cut", metrics, "rollout/truncated_fraction", 2),
        ]
    )


def phases(metrics: Mapping[str, float]) -> str:
    """`3.1s gen=1.9 rwd=0.4 trn=0.7 syn=0.1 20.6/s 1650tok/s`."""
    total = [f"{metrics['time/step']:.1f}s"] if "time/step" in metrics else []
    parts = [_value(short, metrics, f"time/{name}", 1) for name, short in PHASES.items()]
    rate, tokens = metrics.get("throughput/samples_per_s"), metrics.get("throughput/tokens_per_s")
    rates = [f"{rate:.1f}/s" if rate is not None else "", f"{tokens:.0f}tok/s" if tokens is not None else ""]
    return _join([*total, *parts, *rates])


def keeping(metrics: Mapping[str, float]) -> str:
    """`drop=0 skip=1 mem=1.2G`."""
    skipped = metrics.get("train/skipped_updates", 0.0)
    memory = metrics.get("mem/device_peak_gib", metrics.get("mem/host_peak_gib"))
    return _join(
        [
            _value("drop", metrics, "samples/dropped", 0),
            f"skip={skipped:.0f}" if skipped else "",
            f"mem={memory:.1f}G" if memory is not None else "",
        ]
    )


def evaluation(metrics: Mapping[str, float]) -> str:
    """`reward 0.412 (standard error 0.031), avg@4 0.41, pass@4 0.72, maj@4 0.50`: of each the largest number."""
    found = f"reward {metrics['eval/reward_mean']:.3f} (standard error {metrics['eval/reward_stderr']:.3f})"
    of_each = [[name for name in metrics if name.startswith(start)] for start in ACCURACIES]
    shares = [max(names, key=lambda name: int(name.rpartition("@")[2])) for names in of_each if names]
    return ", ".join([found, *(f"{name.removeprefix('eval/')} {metrics[name]:.2f}" for name in shares)])


def duration(seconds: float) -> str:
    """`42s`, `2m29s`, `3h05m`, `2d04h`."""
    whole = max(round(seconds), 0)
    for unit, size, small, small_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small_size:02d}{small}"
    return f"{whole}s"


def sparkline(values: Sequence[float], glyphs: Glyphs, width: int = 40) -> str:
    """The finite ones of the last `width` values as bars between their least and their greatest."""
    shown = [value for value in values[-width:] if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((value - low) / (high - low) * top) if high > low else 0] for value in shown)


def printable(text: str) -> str:
    """`text` on one line, without control characters: what a prompt says cannot move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def _with_spread(label: str, metrics: Mapping[str, float], mean: str, std: str, digits: int, glyphs: Glyphs) -> str:
    if mean not in metrics:
        return ""
    spread = f"{glyphs.plus_minus}{metrics[std]:.{digits}f}" if std in metrics else ""
    return f"{label}={metrics[mean]:.{digits}f}{spread}"


def _value(label: str, metrics: Mapping[str, float], name: str, digits: int) -> str:
    return f"{label}={metrics[name]:.{digits}f}" if name in metrics else ""


def _join(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)
