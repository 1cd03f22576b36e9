"""One place that metrics, samples and events go to: the run directory's files, the console, and mirrors of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from unirl.tracking.console import Change, Console, accuracies, evaluation
from unirl.tracking.media import metrics_of_evaluation, read_samples, table_of_evaluation
from unirl.tracking.metrics import check_event, check_names
from unirl.tracking.mirrors import Mirror, Mirrors, RunInfo
from unirl.tracking.overview import draw_overview
from unirl.tracking.owner import OwnershipLostError, now
from unirl.tracking.record import RunRecord
from unirl.tracking.run_directory import RunDirectory, read_record, remark_of
from unirl.tracking.samples import Media, MirroredPage, SampleRow, SampleTable, pairs_of, write_manifest
from unirl.tracking.tables import CsvTable, JsonLines, finite, read_rows, replace_text
from unirl.tracking.timing import PhaseTimers, Spans, peak_memory
from unirl.types.evaluation import EvalResult
from unirl.types.protocols import State
from unirl.types.secrets import redacted


class Watcher(Protocol):
    """Shows what a run is doing."""

    def watching(self, status: Callable[[], str], /) -> AbstractContextManager[None]:
        """Within the block, shows `status()`."""


class Tracker:
    """Everything a run reports. `step` is the number of finished steps, so the first row is step 1."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        console: Console | None = None,
        mirrors: Sequence[Mirror] = (),
        about: RunInfo | None = None,
        tracks: tuple[str, ...] = (),
        keep_samples: int = 0,
        watcher: Watcher | None = None,
    ) -> None:
        """`about` is for the mirrors. `tracks`, when there are several, may stand before metric names.

        Args:
            keep_samples: number of folders of samples, and of evaluations beside the first one, that remain. 0: all.
            watcher: what shows the progress. None: the console, if there is one.
        """
        self.run = run
        self._keep_samples = keep_samples
        self.console = console
        self._watcher = watcher or console
        self.timers = PhaseTimers(Spans() if any(mirror.wants_spans for mirror in mirrors) else None)
        self.position = 0
        self.newest_evaluation: dict[str, float] = {}
        """Step and metrics of the newest evaluation of this process."""
        self._tracks = tracks
        about = about or RunInfo(root=run.root, project=run.identity.project, run_id=run.id)
        self._mirrors = Mirrors(mirrors, about, self._mirror_failed)
        self._recorded: dict[str, float] = {}
        self._metrics = JsonLines(run.metrics)
        self._table = CsvTable(run.root / "metrics.csv")
        self._eval_table = CsvTable(run.root / "eval_metrics.csv")
        self._ledger = JsonLines(run.root / "ledger.jsonl")
        self._events = JsonLines(run.root / "events.jsonl")
        self._cut_tables = (self._metrics, self._table, self._eval_table, self._ledger)
        self._remarked: set[str] = set()
        self._newest_samples: tuple[Path, Sequence[SampleRow]] = run.root, ()
        """The manifest of the newest stored samples, and its rows."""
        self._closed = False
        self._mirrors.open()
        self.event("run.start", argv=list(run.identity.argv))

    # One step

    def record(self, metrics: Mapping[str, float]) -> None:
        """Collects metrics of the current step; `log_step` writes them. Raises ValueError for unknown names."""
        check_names(metrics, self._tracks)
        self._recorded |= {name: float(value) for name, value in metrics.items()}

    def log_step(self, step: int) -> dict[str, float]:
        """Writes the recorded metrics, the times of the phases and the memory; returns them all.

        Recorded memory comes from other processes: the larger value is written.
        """
        if step <= self.position:
            raise ValueError(f"step {step} was logged after step {self.position}; call truncate when a run goes back")
        self.run.fence.check()
        clock = self.timers.take()
        memory = {name: max(gib, self._recorded.get(name, 0.0)) for name, gib in peak_memory().items()}
        metrics = self._recorded | clock | memory | self._throughput(clock)
        check_names(metrics, self._tracks)
        self._recorded = {}
        self.position = step
        self._metrics.append({"step": step, **metrics})
        self._table.append({"step": step, **metrics})
        self.event("step.end", step=step)
        if self.console:
            self.console.step(step, metrics)
        self._mirrors.each(lambda mirror: mirror.log(step, metrics))
        self._mirror_spans(step)
        return metrics

    def ledger(
        self,
        step: int,
        *,
        generated: int,
        scored: int,
        dropped: int = 0,
        pending: int = 0,
        reasons: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Writes what became of the samples of a step. Raises ValueError if one is missing.

        Args:
            reasons: number of dropped samples for each reason.
        """
        if generated != scored + dropped + pending or (reasons and sum(reasons.values()) != dropped):
            raise ValueError(
                f"samples of step {step} do not add up: generated {generated} != scored {scored} + dropped {dropped} "
                f"{dict(reasons) or ''} + pending {pending}"
            )
        self.run.fence.check()
        counts = {"generated": generated, "scored": scored, "dropped": dropped}
        self._ledger.append({"step": step, **counts, "pending": pending, "reasons": dict(reasons)})
        self.record({f"samples/{name}": count for name, count in counts.items()})

    def samples(self, step: int, table: SampleTable[Media]) -> Path:
        """Stores samples of a training step: media, facts and a page of all. Returns the path of the page."""
        folder = self.run.fresh_step_folder("samples", step)
        saved = replace(table, remark=remark_of(self.run.root)).saved(folder)
        self._remark(saved.media)
        self._newest_samples = folder / "manifest.jsonl", saved.rows
        write_manifest(saved.rows, folder / "manifest.jsonl")
        page = saved.media.page(saved, folder, f"samples of step {step}")
        saved.media.mirror(self._mirrors, MirroredPage(step, "samples", f"step {step}", page), saved.rows)
        self.run.prune_step_folders("samples", self._keep_samples)
        return page

    def add_series(self, series: Mapping[str, Mapping[str, tuple[float, ...]]]) -> None:
        """Adds values along the newest stored samples, by sample id, to their manifest."""
        self.run.fence.check()
        manifest, rows = self._newest_samples
        rows = [replace(row, series={**row.series, **series.get(row.sample_id, {})}) for row in rows]
        write_manifest(rows, manifest)
        self._newest_samples = manifest, rows

    def eval(self, step: int, result: EvalResult) -> Path:
        """Stores an evaluation: scores, media, a page of all, and a comparison with the first evaluation of the run.

        Returns the path of the page.
        """
        metrics = metrics_of_evaluation(result)
        check_names(metrics, self._tracks)
        folder = self.run.fresh_step_folder("eval", step)
        saved = replace(table_of_evaluation(result), remark=remark_of(self.run.root)).saved(folder)
        self._remark(saved.media)
        rows = [vars(row) for row in saved.rows]
        scores = {"step": step, "metrics": metrics, "samples": rows}
        replace_text(folder / "scores.json", json.dumps(finite(scores), indent=1, sort_keys=True) + "\n")
        title = f"evaluation after step {step}"
        page = saved.media.page(saved, folder, title)
        self._before_after(step, saved, folder)
        self.newest_evaluation = {"step": step, **metrics}
        self._eval_table.append(self.newest_evaluation)
        self.event("eval.end", step=step, **metrics)
        if self.console:
            self.console.note(f"eval after step {step}: {evaluation(metrics)}, {page}")
        self._mirrors.each(lambda mirror: mirror.log(step, metrics))
        saved.media.mirror(self._mirrors, MirroredPage(step, "eval", title, page), saved.rows)
        self.run.prune_step_folders("eval", self._keep_samples)
        return page

    # Words

    def event(self, name: str, **fields: object) -> None:
        """Appends to events.jsonl, which is never cut back. Raises ValueError for an unknown event."""
        check_event(name)
        shown = {key: redacted(value, key) for key, value in fields.items()}
        self._events.append({"t": now(), "v": 1, "ev": name, **shown})
        self._mirrors.tell(lambda mirror: mirror.event(name, shown))

    def note(self, text: str) -> None:
        """Shows one line on the console."""
        if self.console:
            self.console.note(text)

    def restarted(self, number: int, allowed: int, error: str, num_devices: int) -> None:
        """Shows that the run started again by itself, and records it as an event."""
        self.event("run.restart", restart=number, max=allowed, error=error, num_devices=num_devices)
        self.note(f"restart {number} of {allowed} (restarts.max), num_devices={num_devices}, after {error}")

    def choice(self, key: str, value: object, why: str) -> None:
        """Shows the value that a run chose for a setting `auto`, and writes it into run.json under `chosen`."""
        entry = {"value": value, "why": why}
        self.run.note(chosen={**read_record(self.run.root).get("chosen", {}), key: entry})
        if self.console:
            self.console.note(f"{key}=auto: {why}")

    def watching(self, status: Callable[[], str]) -> AbstractContextManager[None]:
        """Within the block, shows `status()`, what the run is doing."""
        return nullcontext() if self._watcher is None else self._watcher.watching(status)

    def probe(self, state: Callable[[], Mapping[str, float]]) -> None:
        """Gives mirrors a function that returns the present state of the run (`metrics.STATE`), from any thread."""
        self._mirrors.tell(lambda mirror: mirror.probe(state))

    def warn(self, text: str) -> None:
        """Shows a warning on the console and records it as an event."""
        self.event("warning", text=text)
        if self.console:
            self.console.warn(text)

    def summary(self, title: str, lines: Sequence[tuple[str, str]] = ()) -> None:
        """Prints how the rewards changed, from the files of the whole run, and where the newest pages are."""
        if self.console:
            changes = self.changes()
            overview = self._overview()
            remark = remark_of(self.run.root)
            lines = [*([("note", remark)] if remark else []), *lines]
            pages = [*self.pages(), *([] if overview is None else [("overview", str(overview))])]
            self.console.summary(title, changes, [*lines, *pages])

    def pages(self) -> list[tuple[str, str]]:
        """Where the samples of the newest step and evaluation are, for people to look at."""
        patterns = (
            ("samples", "samples/step-*"),
            ("evaluation", "eval/step-*"),
            ("before/after", "eval/step-*/before_after.*"),
        )
        newest = [(label, max(self.run.root.glob(pattern), default=None)) for label, pattern in patterns]
        return [(label, str(path)) for label, path in newest if path is not None]

    def changes(self) -> list[Change]:
        """First and last value of the rewards: of the evaluations if there were two, and of the steps.

        After evaluations, which show every component, the steps only show the whole reward.
        """
        self.flush()
        rows = list(read_rows(self.run.metrics))
        scores = RunRecord(self.run.root).evaluations
        if len(scores) < 2:
            return _changes(rows)
        return _changes(scores) + [change for change in _changes(rows) if change.name.startswith("rollout/")]

    # The life of a run

    def truncate(self, step: int) -> None:
        """Goes back to a checkpoint: removes everything about later steps from the files, except events."""
        self.run.fence.check()
        for table in self._cut_tables:
            table.cut(step)
        self.run.cut_step_folders(step)
        self.position = max(step, 0)
        if step > 0:
            self._mirrors.resume_after(step)
            self.event("run.resume", step=step)

    def flush(self) -> None:
        """Makes every row durable. Called at the end of a step, before its checkpoint."""
        self.run.fence.check()
        for table in (*self._cut_tables, self._events):
            table.sync()

    def finish(self, code: int = 0, reason: str = "") -> None:
        """Records how the run ended and closes everything. Further calls do nothing.

        Raises OwnershipLostError, with everything closed and nothing recorded, if another process took the run over.
        """
        if self._closed:
            return
        self._closed = True
        self.event("run.end", code=code, reason=reason)
        self._mirror_spans(self.position)
        self._mirrors.finish(code)
        if self.console:
            self.console.close()
        try:
            self.flush()
        finally:
            for table in (*self._cut_tables, self._events):
                table.close()
            self.run.close(code, reason)
        if self.console and code != 0:
            # The end is recorded by now. A picture that cannot be drawn must not hide the error that ended the run.
            with suppress(Exception):
                draw_overview(self.run.root)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the run, as failed (1) after an exception, unless `finish` was called before."""
        if error is None:
            self.finish()
            return
        # A full disk or a second writer may have ended the run; a second error must not hide the first.
        with suppress(OSError, OwnershipLostError):
            self.finish(1, f"{type(error).__name__}: {error}")

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.truncate(int(state["position"]))

    # Inside

    def _overview(self) -> Path | None:
        """Draws `overview.png` from the files of the run. A picture that cannot be drawn does not end a run."""
        try:
            return draw_overview(self.run.root)
        except Exception as error:  # whatever a damaged file or image of the run makes a library raise
            self.warn(f"overview.png was not drawn ({type(error).__name__}: {error})")
            return None

    def _throughput(self, clock: Mapping[str, float]) -> dict[str, float]:
        """Samples and tokens per second of the whole step, and tokens per second of sampling."""
        samples, tokens = self._recorded.get("samples/generated"), self._recorded.get("samples/tokens")
        step_s, generate_s = clock.get("time/step"), clock.get("time/generate")
        rates = {
            "throughput/samples_per_s": (samples, step_s),
            "throughput/tokens_per_s": (tokens, step_s),
            "throughput/generated_tokens_per_s": (tokens, generate_s),
        }
        return {name: count / seconds for name, (count, seconds) in rates.items() if count and seconds}

    def _remark(self, media: Media) -> None:
        """Shows each remark of the media once."""
        for text in media.remarks():
            if text not in self._remarked:
                self.warn(text)
            self._remarked.add(text)

    def _before_after(self, step: int, after: SampleTable[Media], folder: Path) -> None:
        first = min(self.run.root.glob("eval/step-*/scores.json"))
        if first.parent == folder:
            return
        scores = json.loads(first.read_text())
        before = read_samples(scores["samples"], first.parent)
        if not after.media.compares_with(before.media) or not _same_prompts(before, after):
            self.warn(f"no before/after page: {first.parent.name} has other prompts or another image size")
            return
        sides = (f"before (step {scores['step']})", f"after (step {step})")
        after.media.comparison(before, after, sides, folder)

    def _mirror_spans(self, step: int) -> None:
        if self.timers.spans is not None and (spans := self.timers.spans.take()):
            self._mirrors.tell(lambda mirror: mirror.spans(step, spans))

    def _mirror_failed(self, name: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self.event("mirror.failed", mirror=name, error=text)
        if self.console:
            self.console.warn(
                f"{name} failed and is switched off for the rest of this run ({text}). "
                f"Training continues, and all metrics are in {self.run.metrics}"
            )


def _same_prompts(before: SampleTable[Media], after: SampleTable[Media]) -> bool:
    with suppress(ValueError):
        return bool(pairs_of(before, after))
    return False


def _changes(rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """First and last value of the mean rewards and shares of right answers that the first and last row have."""
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    starts = ("rollout/reward_mean", "reward/", "eval/")
    means = [name for name in first if name.startswith(starts) and name.endswith("_mean") and name in last]
    shares = accuracies([name for name in first if name in last])
    names = [*shares, *sorted(means, key=lambda name: (not name.endswith("/reward_mean"), name))]
    spreads = {"eval/reward_mean": float(last["eval/reward_stderr"])} if "eval/reward_stderr" in last else {}
    return [Change(name, float(first[name]), float(last[name]), spreads.get(name)) for name in names]
