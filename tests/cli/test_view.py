"""`unirl view`: the address that it prints, and bad input."""

import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.processes import process_of
from tests.recorded_runs import record
from unirl.cli.main import main
from unirl.cli.view import own_names, read_token


def test_the_printed_address_answers_until_a_signal(tmp_path):
    record(tmp_path / "runs/first", medium="text", steps=1)
    token = "t" * 20
    (tmp_path / "token").write_text(f"{token}\n")
    command = [sys.executable, "-m", "unirl.cli", "view", "--token-file", "token"]
    with process_of(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        address = urlsplit(process.stdout.readline().strip())
        assert (address.hostname, address.query) == ("127.0.0.1", f"token={token}")
        connection = HTTPConnection(address.hostname, address.port, timeout=20)
        connection.request("GET", "/api/runs", headers={"authorization": f"Bearer {token}"})
        assert b'"name":"first"' in connection.getresponse().read(2**16)
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["ELSEWHERE"], 4, "there is no folder"),
        (["--port", "65536"], 2, "--port 65536 is no port: give a number from 0 to 65535"),
        (["--port", "TAKEN"], 3, "cannot be used"),
        (["--token-file", "ELSEWHERE"], 4, "cannot be read"),
        (["--token-file", "SHORT"], 2, "must have at least 16 letters"),
        (["--token-file", "ODD"], 2, "must have at least 16 letters"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(tmp_path, monkeypatch, capsys, words, status, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("short")
    (tmp_path / "odd").write_text("a token with spaces and\nlines")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"ELSEWHERE": "elsewhere", "SHORT": "short", "ODD": "odd", "TAKEN": str(taken.getsockname()[1])}
        assert main(["view", *(places.get(word, word) for word in words)]) == status
    assert message in capsys.readouterr().err


def test_a_token_is_read_without_its_line_end(tmp_path):
    (tmp_path / "token").write_text("abcdefgh-ijkl_mnop\n")
    assert read_token(tmp_path / "token") == "abcdefgh-ijkl_mnop"


def test_only_a_viewer_that_others_can_reach_has_the_name_of_this_machine():
    assert own_names("127.0.0.1") == own_names("::1") == own_names("localhost") == []
    assert own_names("0.0.0.0") == ["0.0.0.0", socket.gethostname()]
