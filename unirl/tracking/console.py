"""What a person watching a run sees: a banner, a live bar or one plain line per step, and a summary.

Nothing from a user (prompts, names, paths) is interpreted as markup, and control characters never reach the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unirl.tracking.lines import Glyphs, duration, phases, printable, reward, sparkline, step_line, training


@dataclass(frozen=True, kw_only=True)
class Banner:
    """What is said before the first step: label and text of each line, in order."""

    title: str
    lines: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One metric at the start and at the end of a run."""

    name: str
    start: float
    end: float
    spread: float | None = None
    """Standard error of the end."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is said after the last step."""

    title: str
    changes: Sequence[Change] = ()
    lines: Sequence[tuple[str, str]] = ()


@dataclass
class Pace:
    """Steps and their times, for the estimate of what remains."""

    total: int
    clock: float = field(default_factory=time.monotonic)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=20))

    def mark(self, step_s: float | None) -> None:
        """A step ended; everything since the last one counts, evaluations and checkpoints too.

        `step_s`: the step's own time. It stands for the first step, before which models were loaded.
        """
        now = time.monotonic()
        self.recent.append(now - self.clock if self.recent or step_s is None else step_s)
        self.clock = now

    def remaining_s(self, step: int) -> float | None:
        """Seconds until the last step, from the mean of the last steps; None before the first."""
        return (self.total - step) * sum(self.recent) / len(self.recent) if self.recent else None


class Console:
    """Writes to one stream: live on a terminal, plain lines elsewhere (a file, CI, TERM=dumb)."""

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
        """Prints a line that is worth a person's time, such as an evaluation's result."""
        self._print(Text(printable(text)))

    def warn(self, text: str) -> None:
        """Prints a line that a person must not miss."""
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
    """Whether the stream is a terminal that can redraw, and nobody asked for plain lines."""
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
