"""The console output of a run: a banner, a live progress bar or one plain line per step, and a summary.

Text from users (prompts, names, paths) is never interpreted as markup, and control characters never reach the terminal.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

MAX_COLUMNS = 200
PHASES = {"generate": "gen", "reward": "rwd", "train": "trn", "sync": "syn"}
MAX_COMPONENTS = 4
ACCURACIES = ("eval/avg@", "eval/pass@", "eval/maj@")
"""Prefixes of the metrics that are shares of right answers."""


@dataclass(frozen=True)
class Glyphs:
    """Characters beyond letters that a stream can show."""

    plus_minus: str
    spark: str

    @staticmethod
    def of(encoding: str | None) -> Glyphs:
        """Unicode characters if the encoding of the stream has them, otherwise ASCII."""
        rich = Glyphs("\u00b1", "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588")
        try:
            (rich.plus_minus + rich.spark).encode(encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return Glyphs("+-", "_.-=*#")
        return rich


def step_line(
    clock: str, step: int, total: int, metrics: Mapping[str, float], eta_s: float | None, glyphs: Glyphs
) -> str:
    """One step as one line. Parts whose metrics are absent are left out.

    11:21:52 step 12/60 reward=0.412+-0.083 shape=0.09 | ratio=1.0000 | 3.1s gen=1.9 trn=0.7 20.6/s | eta 2m29s
    """
    head = f"{clock} step {step}/{total} {reward(metrics, glyphs)}".rstrip()
    rest = [training(metrics, glyphs), phases(metrics), drops_and_memory(metrics)]
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


def drops_and_memory(metrics: Mapping[str, float]) -> str:
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
    """`reward 0.412 (standard error 0.031), avg@4 0.41, pass@4 0.72, maj@4 0.50`, each with the largest n or k."""
    rewards = f"reward {metrics['eval/reward_mean']:.3f} (standard error {metrics['eval/reward_stderr']:.3f})"
    of_each = [[name for name in metrics if name.startswith(start)] for start in ACCURACIES]
    shares = [max(names, key=lambda name: int(name.rpartition("@")[2])) for names in of_each if names]
    return ", ".join([rewards, *(f"{name.removeprefix('eval/')} {metrics[name]:.2f}" for name in shares)])


def duration(seconds: float) -> str:
    """`42s`, `2m29s`, `3h05m`, `2d04h`."""
    whole = max(round(seconds), 0)
    for unit, size, small, small_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small_size:02d}{small}"
    return f"{whole}s"


def sparkline(values: Sequence[float], glyphs: Glyphs, width: int = 40) -> str:
    """The last `width` values as bars scaled to their range. Values that are not finite are left out."""
    shown = [value for value in values[-width:] if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((value - low) / (high - low) * top) if high > low else 0] for value in shown)


def printable(text: str) -> str:
    """`text` on one line, without control characters, so that a prompt cannot move the cursor of a terminal."""
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


@dataclass(frozen=True, kw_only=True)
class Banner:
    """The output before the first step: label and text of each line, in order."""

    title: str
    lines: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One metric at the start and at the end of a run."""

    name: str
    start: float
    end: float
    spread: float | None = None
    """Standard error of `end`."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The output after the last step."""

    title: str
    changes: Sequence[Change] = ()
    lines: Sequence[tuple[str, str]] = ()


@dataclass
class Pace:
    """Durations of the recent steps, to estimate the remaining time."""

    total: int
    clock: float = field(default_factory=time.monotonic)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def mark(self, step_s: float | None) -> None:
        """Records that a step ended. Evaluations and checkpoints since the previous step count too.

        Args:
            step_s: duration of the step itself. It is used for the first step, before which models were loaded.
        """
        now = time.monotonic()
        self.recent.append(now - self.clock if self.recent or step_s is None else step_s)
        self.clock = now

    def remaining_s(self, step: int) -> float | None:
        """Estimated seconds until the last step, from the mean of recent steps. None before the first step."""
        return (self.total - step) * sum(self.recent) / len(self.recent) if self.recent else None


class Console:
    """Writes to one stream: a live display on a terminal, plain lines elsewhere (a file, CI, TERM=dumb)."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.stream = stream or sys.stderr
        self.total_steps = total_steps
        self.live_wanted = is_live(self.stream, environ)
        self.glyphs = Glyphs.of(self.stream.encoding)
        colour = "NO_COLOR" not in environ and self.live_wanted
        self._rich = RichConsole(
            file=self.stream, markup=False, highlight=False, emoji=False, soft_wrap=True,
            force_terminal=self.live_wanted, no_color=not colour, _environ=environ,
        )  # fmt: skip
        self._pace = Pace(total_steps)
        self._rewards: list[float] = []
        self._live: Live | None = None

    def banner(self, banner: Banner) -> None:
        """Prints the start of a run."""
        self._print(Text(printable(banner.title), style="bold"))
        self._labelled(banner.lines)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step."""
        self._pace.mark(metrics.get("time/step"))
        self._rewards.append(metrics.get("rollout/reward_mean", float("nan")))
        eta = self._pace.remaining_s(step)
        if self.live_wanted:
            self._show(self._panel(step, metrics, eta))
        else:
            clock = time.strftime("%H:%M:%S")
            self._print(Text(step_line(clock, step, self.total_steps, metrics, eta, self.glyphs)))

    def note(self, text: str) -> None:
        """Prints one line, such as the result of an evaluation."""
        self._print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._print(Text("warning: " + printable(text), style="bold yellow"))

    def summary(self, summary: Summary) -> None:
        """Ends the live display and prints the end of a run."""
        self.close()
        self._print(Text(printable(summary.title), style="bold"))
        if summary.changes:
            self._print(_changes(summary.changes, self.glyphs))
        self._labelled(summary.lines)

    def close(self) -> None:
        """Ends the live display; safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self, step: int, metrics: Mapping[str, float], eta: float | None) -> Group:
        bar = Table.grid(padding=(0, 1))
        left = Text(f"step {step}/{self.total_steps}", style="bold")
        right = Text(f"eta {duration(eta)}" if eta is not None else "", style="dim")
        bar.add_row(left, ProgressBar(total=self.total_steps, completed=step, width=40), right)
        curve = Text(f"{sparkline(self._rewards, self.glyphs)} {reward(metrics, self.glyphs)}", style="cyan")
        details = " | ".join(part for part in (training(metrics, self.glyphs), phases(metrics)) if part)
        return Group(bar, curve, Text(details, style="dim"))

    def _show(self, panel: Group) -> None:
        if self._live is None:
            self._live = Live(panel, console=self._rich, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(panel, refresh=True)

    def _labelled(self, lines: Sequence[tuple[str, str]]) -> None:
        width = max((len(label) for label, _ in lines), default=0)
        for label, text in lines:
            self._print(Text.assemble((f"{printable(label):<{width}}  ", "dim"), printable(text)))

    def _print(self, what: Text | Table) -> None:
        self._rich.print(what)


def is_live(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Returns True if the stream is a terminal that can redraw and the environment does not ask for plain lines."""
    return stream.isatty() and environ.get("TERM", "") not in ("dumb", "unknown") and not environ.get("CI")


def _changes(changes: Sequence[Change], glyphs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("metric", "start", "end", "change"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for change in changes:
        spread = f" {glyphs.plus_minus} {change.spread:.3f}" if change.spread is not None else ""
        cells = (change.name, f"{change.start:.3f}", f"{change.end:.3f}{spread}", f"{change.end - change.start:+.3f}")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
