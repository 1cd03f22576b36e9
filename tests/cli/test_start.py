"""What a slow command shows before its first line."""

import importlib
import io
import sys
import threading

from unirl.cli import start
from unirl.cli.main import main
from unirl.config.failures import Session


class Stream(io.StringIO):
    """A stream that tells when something was written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.is_written.set()
        return super().write(text)


def shown(monkeypatch, tmp_path, is_terminal: bool) -> str:
    """What is shown while a module is imported, until the banner."""
    stream, session = Stream(is_terminal), Session()
    (tmp_path / "a_slow_library.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_slow_library", raising=False)
    monkeypatch.setattr("unirl.types.progress.IMPORTS.names", set())
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(start, "PERIOD_S", 0.01)
    with start.shown_start(session):
        importlib.import_module("a_slow_library")
        stream.is_written.clear()
        assert stream.is_written.wait(600.0)
        session.start()
        before = stream.getvalue()
        session.start()
    assert stream.getvalue() == before
    return before


def test_a_pipe_gets_lines_in_plain_words_without_names_of_modules(monkeypatch, tmp_path):
    lines = shown(monkeypatch, tmp_path, is_terminal=False).splitlines()
    assert lines[-1].startswith("unirl: starting: loading Python libraries (module 1)")


def test_a_terminal_gets_one_line_that_is_gone_before_the_banner(monkeypatch, tmp_path):
    text = shown(monkeypatch, tmp_path, is_terminal=True)
    assert "loading Python libraries (module 1)" in text and "\n" not in text and text.endswith(start.ERASE)


def test_commands_that_load_a_model_show_what_they_do(monkeypatch, capsys):
    monkeypatch.setattr(start, "PERIOD_S", 0.001)
    assert main(["doctor"]) in (0, 3)
    assert main(["fit", "diffusion/sd3_trainside", "scale=toy"]) == 0
    shown = capsys.readouterr().err
    assert "unirl: checking: " in shown and "unirl: fitting: " in shown
