"""What a person sees: live on a terminal, one plain line per step elsewhere, nothing interpreted."""

from __future__ import annotations

import io
import itertools
import re
import threading

import pytest

from unirl.tracking.console import (
    ASCII,
    BARS,
    LEGEND,
    Change,
    Console,
    Pace,
    duration,
    evaluation,
    is_live,
    sparkline,
    step_line,
    step_lines,
    width_without_terminal,
)

METRICS = {
    "rollout/reward_mean": 0.4123,
    "rollout/reward_std": 0.0831,
    "reward/color_mean": 0.55,
    "reward/color_std": 0.1,
    "reward/shape_mean": 0.09,
    "train/ratio_mean": 1.0,
    "train/ratio_std": 0.0004,
    "train/clip_fraction": 0.0,
    "train/kl": 0.003,
    "rollout/zero_std_group_ratio": 0.0625,
    "time/step": 3.1,
    "time/generate": 1.9,
    "time/reward": 0.4,
    "time/train": 0.7,
    "time/sync": 0.1,
    "throughput/samples_per_s": 20.6,
    "samples/dropped": 0.0,
    "mem/host_peak_gib": 1.2,
}
EVIL = "a [bold red]cat[/] :smile: \x1b[2J\x1b]0;title\x07 \u202e\nnew line"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_plain_line_has_the_documented_form():
    assert step_line("11:21:52", 12, 60, METRICS, 149.0) == (
        "11:21:52 step 12/60 reward=0.412\u00b10.083 color=0.55 shape=0.09"
        " | ratio=1.0000\u00b10.0004 clip=0.00 kl=0.003 zstd=0.06"
        " | 3.1s gen=1.9 rwd=0.4 trn=0.7 syn=0.1 20.6/s | drop=0 mem=1.2G | eta 2m29s"
    )


TEXT = METRICS | {
    "rollout/response_len_mean": 24.6,
    "rollout/truncated_fraction": 0.125,
    "throughput/tokens_per_s": 1761.4,
}


@pytest.mark.parametrize("metrics", [METRICS, TEXT], ids=["images", "text"])
@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_the_line_of_a_step_fits_and_always_has_step_reward_time_and_what_is_left(width, metrics):
    line = step_line("11:21:52", 12, 60, metrics, 149.0, width)
    assert len(line) <= width and line.endswith(" | eta 2m29s")
    assert line.startswith("11:21:52 step 12/60 reward=0.412\u00b10.083") and " | 3.1s" in line


def test_a_short_line_keeps_whole_words_of_every_group():
    assert step_line("11:21:52", 12, 60, METRICS, 149.0, 80) == (
        "11:21:52 step 12/60 reward=0.412\u00b10.083 | ratio=1.0000\u00b10.0004 | 3.1s | eta 2m29s"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("live", [True, False], ids=["terminal", "pipe"])
def test_no_line_that_is_shown_in_a_step_is_wider_than_the_terminal(width, live):
    stream = Terminal() if live else io.StringIO()
    console = Console(60, stream, {"TERM": "xterm", "COLUMNS": str(width), "LINES": "24"})
    for step in range(1, 61):
        console.step(step, TEXT)
    console._written = float("-inf")
    console.progress("generate: " + "denoising step 12/20 (3.1/s), " * 9)
    console.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width and any("denoising step 12/20" in line for line in lines)
    assert all("eta" in line for line in lines if "step 60/60" in line)


def test_a_file_gets_every_metric_of_a_step_unless_a_terminal_or_a_width_is_there(monkeypatch):
    monkeypatch.setattr("unirl.tracking.console.os.isatty", lambda descriptor: False)
    in_file, narrow = io.StringIO(), io.StringIO()
    Console(60, in_file, {}).step(12, METRICS)
    Console(60, narrow, {"COLUMNS": "80"}).step(12, METRICS)
    assert "drop=0 mem=1.2G" in in_file.getvalue() and len(in_file.getvalue().splitlines()) == 1
    assert len(narrow.getvalue()) <= 81
    monkeypatch.setattr("unirl.tracking.console.os.isatty", lambda descriptor: True)
    assert width_without_terminal({}) is None


def test_progress_in_a_pipe_is_frequent_at_first_and_rare_in_a_long_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("unirl.tracking.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(3, stream, {})
    times: list[float] = []
    while now[0] < 7 * 86400:
        now[0] += 0.5 if now[0] < 3600 else 30.0
        before = len(stream.getvalue())
        console.progress("train: micro-batch 3/48")
        times += [now[0]] * (len(stream.getvalue()) > before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gap for gap, at in zip(gaps, times, strict=False) if at < 450) <= 2.0
    assert max(gaps) <= 630.0 and len(times) < 3500


def test_a_step_is_a_sign_of_life_after_which_progress_waits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("unirl.tracking.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(3, stream, {})
    now[0] = 10.0
    console.step(1, METRICS)
    now[0] = 10.5
    console.progress("generate: sample 8/24")
    assert "sample 8/24" not in stream.getvalue()
    now[0] = 11.5
    console.progress("generate: sample 8/24")
    assert stream.getvalue().splitlines()[-1] == "generate: sample 8/24"


def test_progress_is_no_part_of_the_log_and_leaves_the_terminal_at_the_end(tmp_path):
    stream = Terminal()
    console = Console(3, stream, {"TERM": "xterm"}, tmp_path / "console.log")
    console.progress("load: loading libraries (module 312)")
    console.step(1, METRICS)
    console.progress("train: micro-batch 3/48")
    console.close()
    last = re.split(r"\x1b\[2K", stream.getvalue())[-1]
    assert "micro-batch" in stream.getvalue() and "micro-batch" not in last
    assert len((tmp_path / "console.log").read_text().splitlines()) == 1


def test_what_a_run_does_is_shown_while_it_does_it(monkeypatch):
    monkeypatch.setattr("unirl.tracking.console.REFRESH_S", 0.001)
    monkeypatch.setattr("unirl.tracking.console.SILENCE_S", (0.0, 0.0))
    stream, asked = io.StringIO(), threading.Event()

    def status() -> str:
        if stream.getvalue():
            asked.set()
        return "load: loading libraries (module 312)"

    with Console(3, stream, {}).watching(status):
        assert asked.wait(600.0)
    shown = stream.getvalue()
    assert set(shown.splitlines()) == {"load: loading libraries (module 312)"} and stream.getvalue() == shown


def test_a_line_of_text_says_how_long_responses_are_and_tokens_per_second():
    line = step_line("11:21:52", 12, 60, TEXT, 149.0)
    assert " zstd=0.06 len=25 cut=0.12 | " in line and " 20.6/s 1761tok/s | " in line


def of_track(name: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{name}/{key}": value for key, value in metrics.items() if key.startswith(("rollout/", "train/"))}


SEVERAL = {name: value for name, value in METRICS.items() if not name.startswith(("train/", "rollout/zero"))}
SEVERAL |= of_track("recaption", TEXT) | of_track("image", METRICS)
"""Metrics of a step with a track of texts and a track of images below it."""


@pytest.mark.parametrize("width", [80, 100])
def test_each_of_several_tracks_has_a_row_with_all_of_its_columns(width):
    head, *rows = step_lines("11:21:52", 12, 60, SEVERAL, 149.0, width)
    assert head.startswith("11:21:52 step 12/60 reward=0.412\u00b10.083 color=0.55") and head.endswith(" | eta 2m29s")
    assert rows == [
        "  recaption ratio=1.0000\u00b10.0004 clip=0.00 kl=0.003 zstd=0.06 len=25 cut=0.12",
        "  image     ratio=1.0000\u00b10.0004 clip=0.00 kl=0.003 zstd=0.06",
    ]
    assert max(map(len, [head, *rows])) <= width


@pytest.mark.parametrize("live", [True, False], ids=["terminal", "pipe"])
def test_the_console_and_the_log_show_the_rows_of_tracks(live, tmp_path):
    stream = Terminal() if live else io.StringIO()
    console = Console(60, stream, {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}, tmp_path / "console.log")
    console.step(1, SEVERAL)
    console.close()
    for text in (stream.getvalue(), (tmp_path / "console.log").read_text()):
        assert "  recaption ratio=1.0000" in text and "  image     ratio=1.0000" in text


def test_the_legend_explains_every_column():
    metrics = TEXT | {"train/skipped_updates": 1.0}
    line = step_line("11:21:52", 12, 60, metrics, 149.0)
    words = [word for word in line.split()[3:] if word != "|" and not word.startswith(("color", "shape", "2m29s"))]
    columns = [word.partition("=")[0] if "=" in word else word.lstrip("0123456789.") for word in words]
    assert {"reward", "kl", "len", "cut", "tok/s", "/s", "s", "drop", "skip", "mem", "eta"} <= set(columns)
    assert [column for column in columns if not re.search(rf"(?<![\w/]){column}[: ]", LEGEND)] == []


def test_an_evaluation_says_the_largest_number_of_each_share_of_right_answers():
    result = {"eval/reward_mean": 0.5, "eval/reward_stderr": 0.031, "eval/avg@16": 0.41, "eval/maj@16": 0.5}
    result |= {"eval/pass@1": 0.41, "eval/pass@16": 0.9, "eval/pass@2": 0.6}
    assert evaluation(result) == "reward 0.500 (standard error 0.031), avg@16 0.41, pass@16 0.90, maj@16 0.50"
    assert evaluation(dict(list(result.items())[:2])) == "reward 0.500 (standard error 0.031)"


def test_any_subset_of_metrics_gives_one_line_of_bounded_width():
    for size in range(4):
        for names in itertools.combinations(METRICS, size):
            line = step_line("11:21:52", 1, 9, {name: METRICS[name] for name in names}, None)
            assert line.translate(ASCII).isascii()
            assert not re.search(r"\|\s*\||\|\s*$|  ", line)
    wide = METRICS | {f"reward/{'x' * 90}{i}_mean": 1.0 for i in range(9)}
    assert len(step_line("11:21:52", 1, 9, wide, None)) <= 240


def test_stream_that_cannot_show_unicode_gets_ascii():
    class Latin(io.StringIO):
        encoding = "ascii"

    stream = Latin()
    Console(3, stream, {}).step(1, METRICS)
    assert stream.getvalue().isascii()
    assert "reward=0.412+-0.083" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (149, "2m29s"), (11100, "3h05m"), (187200, "2d04h")]
)
def test_durations_are_short_words(seconds, text):
    assert duration(seconds) == text


def test_sparkline_rises_with_the_values_and_skips_what_is_not_finite():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert sparkline([float("nan"), 1, 2]) == BARS[0] + BARS[-1]
    assert sparkline([]) == ""


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"CI": "1", "TERM": "xterm"}])
def test_terminals_that_cannot_redraw_and_ci_get_plain_lines(environ):
    assert not is_live(Terminal(), environ)
    stream = Terminal()
    Console(2, stream, environ).step(1, METRICS)
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_a_pipe_gets_one_line_per_step_without_any_escape():
    stream = io.StringIO()
    console = Console(3, stream, {"TERM": "xterm-256color"})
    for step in (1, 2, 3):
        console.step(step, METRICS)
    lines = stream.getvalue().splitlines()
    assert [re.match(r"\d\d:\d\d:\d\d (step \d/3) ", line)[1] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_bar_with_estimate_and_no_colour_on_request():
    stream, plain = Terminal(), Terminal()
    for target, environ in ((stream, {"TERM": "xterm"}), (plain, {"TERM": "xterm", "NO_COLOR": "1"})):
        console = Console(60, target, environ)
        console.step(1, METRICS)
        console.step(2, METRICS)
        console.close()
        console.close()
        assert "step 2/60" in target.getvalue()
        assert "eta" in target.getvalue()
    assert re.search(r"\x1b\[\d*;?3[0-9]", stream.getvalue())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain.getvalue())


def test_estimate_leaves_out_the_time_before_the_first_step(monkeypatch):
    clock = iter([100.0, 150.0, 154.0])
    monkeypatch.setattr("unirl.tracking.console.time.monotonic", lambda: next(clock))
    pace = Pace(total=12, clock=next(clock))
    pace.mark(2.0)
    assert pace.remaining_s(1) == 22.0
    pace.mark(2.0)
    assert pace.remaining_s(2) == 10 * (2.0 + 4.0) / 2


def test_live_display_shows_the_cursor_again():
    stream = Terminal()
    console = Console(2, stream, {"TERM": "xterm"})
    console.step(1, METRICS)
    console.close()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_text_of_users_is_neither_markup_nor_terminal_commands(stream):
    console = Console(2, stream, {"TERM": "xterm", "NO_COLOR": "1"})
    console.banner(EVIL, [(EVIL, EVIL)])
    console.note(EVIL)
    console.warn(EVIL)
    console.step(1, {f"reward/{EVIL}_mean": 1.0})
    console.summary(EVIL, [Change(name=EVIL, start=0, end=1)], [(EVIL, EVIL)])
    text = stream.getvalue()
    assert text.count("[bold red]cat[/] :smile:") >= 7
    assert "\x1b[2J" not in text
    assert "\x1b]0;" not in text
    assert "\u202e" not in text


def test_summary_shows_start_end_change_and_spread():
    stream = io.StringIO()
    change = Change(name="eval/reward_mean", start=0.633, end=0.859, spread=0.012)
    Console(2, stream, {}).summary("done", [change], [("export", "a/b")])
    assert re.search(r"eval/reward_mean +0\.633 +0\.859 (\S+) 0\.012 +\+0\.226", stream.getvalue())
    assert "export  a/b" in stream.getvalue()
