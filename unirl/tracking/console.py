"""The console output of a run: a banner, a live progress bar or plain lines per step, and a summary.

Text from users (prompts, names, paths) is never interpreted as markup, and control characters never reach the terminal.
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unirl.tracking.streams import LosableStream
from unirl.types.secrets import redact

MAX_COLUMNS = 240
"""Columns of the log file, and of an output that no terminal shows."""
REFRESH_S = 0.5
"""Seconds between two looks at the progress of a run."""
SILENCE_S = (1.0, 600.0)
"""Seconds after which progress is printed where lines cannot be rewritten: at the start of a run, and at most."""
MAX_COMPONENTS = 4
ACCURACIES = ("eval/avg@", "eval/pass@", "eval/maj@")
"""Prefixes of the metrics that are shares of right answers."""
TRAINING = {
    "train/clip_fraction": "clip={:.2f}",
    "train/kl": "kl={:.3f}",
    "rollout/zero_std_group_ratio": "zstd={:.2f}",
    "rollout/response_len_mean": "len={:.0f}",
    "rollout/truncated_fraction": "cut={:.2f}",
}
"""Metrics of a policy, and the form of each on the console."""
PHASES = {
    "time/step": "{:.1f}s",
    "time/generate": "gen={:.1f}",
    "time/reward": "rwd={:.1f}",
    "time/train": "trn={:.1f}",
    "time/sync": "syn={:.1f}",
    "throughput/samples_per_s": "{:.1f}/s",
    "throughput/tokens_per_s": "{:.0f}tok/s",
}
PLUS_MINUS = "\u00b1"
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII = str.maketrans(dict(zip(PLUS_MINUS + BARS, ("+-", *"_..-=**#"), strict=True)))
"""Substitutes for streams whose encoding has only ASCII."""


LEGEND = (
    "reward: mean +- standard deviation, then its components; "
    "ratio: new/old policy; clip: share of clipped ratios; kl: from the reference policy; "
    "zstd: share of groups with equal rewards; len: tokens of a response; cut: share of them at the limit; "
    "s: seconds, of gen generate, rwd reward, trn train, syn weight sync; "
    "/s: samples, tok/s: tokens per second; drop: samples without a reward; skip: skipped updates; "
    "mem: memory; eta: time left"
)
"""Meaning of each short name on the console lines of a step."""
INDENT = "  "
"""Columns before the name of a track in its row."""


def step_lines(
    clock: str, step: int, total: int, metrics: Mapping[str, float], eta_s: float | None, width: int = MAX_COLUMNS
) -> list[str]:
    """One step as lines of at most `width` columns: the step, and a row for each track if there are several.

    11:21:52 step 12/60 reward=0.412+-0.083 pickscore=0.41 | 3.1s gen=1.9 trn=0.7 20.6/s | eta 2m29s
      text  ratio=1.0000+-0.0000 clip=0.00 zstd=0.06 len=42 cut=0.12
      image ratio=1.0000+-0.0004 clip=0.00 zstd=0.06
    """
    return [step_line(clock, step, total, metrics, eta_s, width), *track_lines(metrics, width)]


def step_line(
    clock: str, step: int, total: int, metrics: Mapping[str, float], eta_s: float | None, width: int = MAX_COLUMNS
) -> str:
    """One step as one line of at most `width` columns. Parts whose metrics are absent, and that do not fit, are left
    out; the step and the time that is left never are. The reward, the time and the ratio are the last to go.

    11:21:52 step 12/60 reward=0.412+-0.083 shape=0.09 | ratio=1.0000 | 3.1s gen=1.9 trn=0.7 20.6/s | eta 2m29s
    """
    head = [f"{clock} step {step}/{total}"]
    eta = [] if eta_s is None else [f"eta {duration(eta_s)}"]
    policy, times, losses = training(metrics), formatted(metrics, PHASES), drops_and_memory(metrics)
    groups = [[*head, *reward(metrics).split()], policy.split(), times.split(), losses.split(), eta]
    return fitted(groups, width, first=(0, 4, 0, 2, 1))


def fitted(groups: Sequence[Sequence[str]], width: int, first: Sequence[int] = ()) -> str:
    """The words of groups on one line, with `|` between groups: the first words of all that fit, then the second ones.

    Args:
        first: groups whose next word is taken before all others, in this order.
    """
    taken = [0] * len(groups)

    def line() -> str:
        return " | ".join(" ".join(group[:count]) for group, count in zip(groups, taken, strict=True) if count)

    rounds = range(max(map(len, groups), default=0))
    for index in (*first, *(index for rank in rounds for index in range(len(groups)) if taken[index] <= rank)):
        if taken[index] < len(groups[index]):
            taken[index] += 1
            if len(line()) > width and sum(taken) > 1:
                taken[index] -= 1
    return line()


def reward(metrics: Mapping[str, float]) -> str:
    """`reward=0.412+-0.083 colour=0.55 shape=0.09`."""
    prefix, suffix = "reward/", "_mean"
    means = [name for name in metrics if name.startswith(prefix) and name.endswith(suffix)][:MAX_COMPONENTS]
    shown = [f"{name[len(prefix) : -len(suffix)]}={metrics[name]:.2f}" for name in means]
    return _join([_with_spread("reward", metrics, "rollout/reward", 3), *shown])


def training(metrics: Mapping[str, float]) -> str:
    """`ratio=1.0000+-0.0004 clip=0.00 kl=0.003 zstd=0.06`."""
    return _join([_with_spread("ratio", metrics, "train/ratio", 4), formatted(metrics, TRAINING)])


def track_lines(metrics: Mapping[str, float], width: int) -> list[str]:
    """A row for each track whose name precedes metrics, as in `image/train/ratio_mean`. Empty with a single track."""
    tracks = dict.fromkeys(name.partition("/")[0] for name in metrics if name.count("/") == 2)
    longest = max(map(len, tracks), default=0)
    lines = []
    for track in tracks:
        own = {name.removeprefix(f"{track}/"): value for name, value in metrics.items() if name.startswith(f"{track}/")}
        lines.append(fitted([[f"{INDENT}{track:<{longest}}", *training(own).split()]], width))
    return lines


def formatted(metrics: Mapping[str, float], formats: Mapping[str, str]) -> str:
    """The metrics that are present, each in its format, in the order of `formats`."""
    return _join(form.format(metrics[name]) for name, form in formats.items() if name in metrics)


def drops_and_memory(metrics: Mapping[str, float]) -> str:
    """`drop=0 skip=1 mem=1.2G`."""
    memory = "mem/device_peak_gib" if "mem/device_peak_gib" in metrics else "mem/host_peak_gib"
    skipped = {"train/skipped_updates": "skip={:.0f}"} if metrics.get("train/skipped_updates") else {}
    return formatted(metrics, {"samples/dropped": "drop={:.0f}", **skipped, memory: "mem={:.1f}G"})


def evaluation(metrics: Mapping[str, float]) -> str:
    """`reward 0.412 (standard error 0.031), avg@4 0.41, pass@4 0.72, maj@4 0.50`, each with the largest n or k."""
    rewards = f"reward {metrics['eval/reward_mean']:.3f} (standard error {metrics['eval/reward_stderr']:.3f})"
    return ", ".join([rewards, *(f"{name.removeprefix('eval/')} {metrics[name]:.2f}" for name in accuracies(metrics))])


def accuracies(names: Iterable[str]) -> list[str]:
    """The metrics that are shares of right answers, each with its largest n or k."""
    of_each = [[name for name in names if name.startswith(start)] for start in ACCURACIES]
    return [max(same, key=lambda name: int(name.rpartition("@")[2])) for same in of_each if same]


def duration(seconds: float) -> str:
    """`42s`, `2m29s`, `3h05m`, `2d04h`."""
    whole = max(round(seconds), 0)
    for unit, size, small, small_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small_size:02d}{small}"
    return f"{whole}s"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as bars scaled to their range. Values that are not finite are left out."""
    shown = [value for value in values[-width:] if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    top = len(BARS) - 1
    return "".join(BARS[round((value - low) / (high - low) * top) if high > low else 0] for value in shown)


def printable(text: str) -> str:
    """`text` on one line, without control characters, so that a prompt cannot move the cursor of a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _with_spread(label: str, metrics: Mapping[str, float], name: str, digits: int) -> str:
    mean, std = metrics.get(f"{name}_mean"), metrics.get(f"{name}_std")
    if mean is None:
        return ""
    return f"{label}={mean:.{digits}f}" + (f"{PLUS_MINUS}{std:.{digits}f}" if std is not None else "")


def _join(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def silence_allowed(elapsed_s: float) -> float:
    """Seconds without a line after which one about progress is due, `elapsed_s` after the start of a run.

    A run of a minute is never silent for long, and one of a week writes about three thousand such lines.
    """
    shortest, longest = SILENCE_S
    return min(max(shortest, elapsed_s / 300), longest)


@dataclass(frozen=True)
class Change:
    """One metric at the start and at the end of a run."""

    name: str
    start: float
    end: float
    spread: float | None = None
    """Standard error of `end`."""


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


def width_without_terminal(environ: Mapping[str, str]) -> int | None:
    """MAX_COLUMNS if no standard stream is a terminal and COLUMNS is not set, so that no metric is left out of a file.
    Otherwise None: rich reads the width of the terminal, which `| tee FILE` still shows."""
    has_terminal = any(os.isatty(descriptor) for descriptor in range(3))
    return None if has_terminal or "COLUMNS" in environ else MAX_COLUMNS


class Console:
    """Writes to a stream: a live display on a terminal, plain lines elsewhere (a file, CI, TERM=dumb).

    Every line also goes to a log file. When nobody reads the stream any more, the log file alone gets them.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        log: Path | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.total_steps = total_steps
        self.live_wanted = is_live(self.stream, environ)
        colour = "NO_COLOR" not in environ and self.live_wanted
        self._rich = RichConsole(
            file=cast(TextIO, LosableStream(self.stream)), markup=False, highlight=False, emoji=False, soft_wrap=True,
            force_terminal=self.live_wanted, no_color=not colour,
            width=width_without_terminal(environ), _environ=environ,
        )  # fmt: skip
        self._substitutes = {} if _has_unicode(self.stream.encoding) else ASCII
        self._pace = Pace(total_steps)
        self._rewards: list[float] = []
        self._live: Live | None = None
        self._has_ended = False
        """The end of the run is printed, so no progress may be shown below it."""
        self._panel_of_step: RenderableType = Text()
        self._start = self._written = time.monotonic()
        self._lock = threading.RLock()
        """Held while something is printed: progress is shown by a thread of its own."""
        self._log_file = None if log is None else log.open("a", encoding="utf-8", errors="backslashreplace")
        self._log = RichConsole(
            file=self._log_file or io.StringIO(), markup=False, highlight=False, emoji=False, soft_wrap=True,
            color_system=None, width=MAX_COLUMNS, _environ={},
        )  # fmt: skip

    def banner(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        """Prints the start of a run: a title, and lines that each have a label."""
        self._print(title, "bold")
        self._labelled(lines)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step."""
        self._pace.mark(metrics.get("time/step"))
        self._rewards.append(metrics.get("rollout/reward_mean", float("nan")))
        eta = self._pace.remaining_s(step)
        clock = time.strftime("%H:%M:%S")
        with self._lock:
            for line in step_lines(clock, step, self.total_steps, metrics, eta):
                self._log.print(self._text(line))
            if self.live_wanted:
                self._panel_of_step = self._panel(step, metrics, eta)
                self._show(self._panel_of_step)
            else:
                width = self._rich.width - (2 if self._substitutes else 0)  # a line has two spreads, "+-" in ASCII
                for line in step_lines(clock, step, self.total_steps, metrics, eta, width):
                    self._rich.print(self._text(line))
            self._written = time.monotonic()

    def progress(self, text: str) -> None:
        """Shows what a run is doing: in place on a terminal; elsewhere as a line, if there was none for long enough."""
        with self._lock:
            line = self._text(text, "dim")
            line.truncate(self._rich.width)
            if self.live_wanted:
                self._show(Group(self._panel_of_step, line))
                return
            now = time.monotonic()
            if now - self._written >= silence_allowed(now - self._start):
                self._rich.print(line)
                self._written = now

    @contextmanager
    def watching(self, status: Callable[[], str]) -> Iterator[None]:
        """Within the block, shows `status()` as progress. An empty status shows nothing."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(REFRESH_S):
                text = status()
                try:
                    with self._lock:
                        if text and not is_over.is_set() and not self._has_ended:
                            self.progress(text)
                except OSError:  # nobody can read the console any more; the run goes on
                    return

        thread = threading.Thread(target=watch, name="console-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def note(self, text: str) -> None:
        """Prints one line, such as the result of an evaluation."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._print("warning: " + text, "bold yellow")

    def summary(self, title: str, changes: Sequence[Change], lines: Sequence[tuple[str, str]]) -> None:
        """Ends the live display and prints the end of a run."""
        with self._lock:
            self._has_ended = True
            self._end_live()
        self._print(title, "bold")
        if changes:
            self._write(self._table(changes))
        self._labelled(lines)

    def close(self) -> None:
        """Ends the live display and the log; safe to call twice."""
        self._end_live()
        if self._log_file is not None:
            self._log_file.close()
            self._log.file = io.StringIO()

    def _end_live(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.update(self._panel_of_step, refresh=True)
                self._live.stop()
                self._live = None

    def _panel(self, step: int, metrics: Mapping[str, float], eta: float | None) -> Group:
        bar = Table.grid(padding=(0, 1))
        left = self._text(f"step {step}/{self.total_steps}", "bold")
        right = self._text(f"eta {duration(eta)}" if eta is not None else "", "dim")
        bar.add_row(
            left, ProgressBar(total=self.total_steps, completed=step, width=min(40, self._rich.width - 32)), right
        )
        width = self._rich.width
        curve = self._text(fitted([[sparkline(self._rewards, width // 3), *reward(metrics).split()]], width), "cyan")
        parts = (training(metrics), formatted(metrics, PHASES), drops_and_memory(metrics))
        details = fitted([part.split() for part in parts], width)
        tracks = [self._text(line, "dim") for line in track_lines(metrics, width)]
        return Group(bar, curve, self._text(details, "dim"), *tracks)

    def _show(self, panel: RenderableType) -> None:
        if self._live is None:
            self._live = Live(panel, console=self._rich, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(panel, refresh=True)

    def _table(self, changes: Sequence[Change]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("metric", "start", "end", "change"):
            table.add_column(heading, justify="left" if heading == "metric" else "right")
        for change in changes:
            spread = f" {PLUS_MINUS} {change.spread:.3f}" if change.spread is not None else ""
            numbers = (f"{change.start:.3f}", f"{change.end:.3f}{spread}", f"{change.end - change.start:+.3f}")
            table.add_row(*map(self._text, (change.name, *numbers)))
        return table

    def _labelled(self, lines: Sequence[tuple[str, str]]) -> None:
        width = max((len(label) for label, _ in lines), default=0)
        for label, text in lines:
            self._write(Text.assemble(self._text(f"{label:<{width}}  ", "dim"), self._text(text)))

    def _print(self, text: str, style: str = "") -> None:
        self._write(self._text(text, style))

    def _write(self, line: Text | Table) -> None:
        with self._lock:
            self._rich.print(line)
            self._log.print(line)
            self._written = time.monotonic()

    def _text(self, text: str, style: str = "") -> Text:
        """The text without control characters, and without characters that the stream cannot show."""
        return Text(printable(redact(text)).translate(self._substitutes), style=style)


def _has_unicode(encoding: str | None) -> bool:
    try:
        (PLUS_MINUS + BARS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_live(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Returns True if the stream is a terminal that can redraw and the environment does not ask for plain lines."""
    return stream.isatty() and environ.get("TERM", "") not in ("dumb", "unknown") and not environ.get("CI")
