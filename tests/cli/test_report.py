"""`unirl report`: where it writes, and bad input."""

import pytest

from tests.recorded_runs import record
from unirl.cli.main import main


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return record(tmp_path_factory.mktemp("runs") / "my run", medium="text")


def test_the_report_is_written_into_the_run_or_where_it_is_asked_for(root, tmp_path, capsys):
    assert main(["report", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"{root / 'report.html'}   0.0")
    assert main(["report", str(root), "-o", str(tmp_path / "a.html"), "--max-mb", "1"]) == 0
    text = (tmp_path / "a.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert "answer 0 at 0.8 &lt;script&gt;" in text


def test_what_could_not_be_read_is_said_by_name(root, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    assert main(["report", str(bare)]) == 0
    shown = capsys.readouterr().err
    assert "metrics.jsonl: 1 of 2 lines are damaged, the first is line 2" in shown
    assert "run.json: there is no such file" in shown


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["ELSEWHERE"], 4, "is not the directory of a run: there is no such folder"),
        (["RUN", "--max-mb", "0"], 2, "--max-mb must be a positive number, got 0"),
        (["RUN", "--max-mb", "nan"], 2, "--max-mb must be a positive number, got nan"),
        (["RUN", "--max-mb", "0.01"], 2, "--max-mb 0.01 is too small: the page has"),
        (["RUN", "-o", "TMP"], 2, "is a folder. Name an HTML file"),
        (["RUN", "-o", "TMP/absent/a.html"], 2, "which is no folder. Name an HTML file"),
        ([], 2, "the following arguments are required: RUN"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(root, tmp_path, capsys, words, status, message):
    places = {"RUN": str(root), "ELSEWHERE": str(tmp_path / "elsewhere"), "TMP": str(tmp_path)}
    argv = [places.get(word, word).replace("TMP/", f"{tmp_path}/") for word in words]
    assert main(["report", *argv]) == status
    assert message in capsys.readouterr().err
