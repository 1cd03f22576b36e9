"""No secret that a run is given reaches a file, the console or an error, whichever way it was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.load import load
from unirl.train.backend.signing import read_key
from unirl.trainer.run_folder import continuation
from unirl.types import secrets
from unirl.types.secrets import MASK, conceal, is_secret_name, redact, redacted, without_values

TYPED, NAMED, READ, HEADER = (f"canary{word}4f9a17c2" for word in ("one", "two", "three", "four"))
SETTINGS = [
    "diffusion/quickstart",
    "scale=toy",
    "num_rollouts=1",
    "tracking.sample_steps=1",
    "plugins=[tests]",
    "reward.backend._target_=tests.cli.keyed_reward.KeyedRewardScorer",
    f"reward.backend.phrase={TYPED}",
    f"reward.backend.api_key={NAMED}",
    "reward.backend.address='${oc.env:SERVICE_TOKEN}'",
    f"reward.backend.header='Bearer {HEADER}'",
]


@pytest.fixture(autouse=True)
def nothing_concealed(monkeypatch):
    monkeypatch.setattr(secrets, "_values", set())
    monkeypatch.setenv("SERVICE_TOKEN", READ)
    monkeypatch.chdir(ROOT)


def leaks(folder: Path) -> list[str]:
    """File and secret for each secret in a file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    canaries = (TYPED, NAMED, READ, HEADER)
    return [f"{path.name}: {each}" for path in files for each in canaries if each.encode() in path.read_bytes()]


def test_a_run_writes_and_prints_no_secret_and_is_continued_with_the_same_command(tmp_path, capfd):
    words = ["train", *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    assert main(words) == 0
    assert main([*words, "num_rollouts=2"]) == 0  # masked values are no change of the recipe
    printed = "".join(capfd.readouterr())
    assert leaks(tmp_path) == []
    assert [each for each in (TYPED, NAMED, READ, HEADER) if each in printed] == []
    assert "reward.backend.phrase=${oc.env:PHRASE}" in printed.replace("'", "")
    state = json.loads((tmp_path / "run/checkpoints/checkpoint-000002/trainer.json").read_text())
    block = state["recipe"]["reward"]["backend"]
    assert (block["phrase"], block["api_key"]) == (MASK, MASK)
    assert (block["address"], block["header"]) == ("${oc.env:SERVICE_TOKEN}", f"Bearer {MASK}")
    assert main(["eval", str(tmp_path / "run"), "plugins=[tests]"]) == 2
    assert "a run never writes secrets. Give the value again" in capfd.readouterr().err


def test_an_error_that_quotes_its_secrets_is_shown_and_recorded_without_them(tmp_path, capfd, monkeypatch):
    words = ["train", *SETTINGS, "reward.backend.fails=true", f"run.dir={tmp_path / 'run'}"]
    assert main([*words, "--debug"]) != 0
    printed = "".join(capfd.readouterr())
    assert "the service refused" in printed
    assert leaks(tmp_path) == [] and not any(each in printed for each in (TYPED, NAMED, READ, HEADER))
    assert MASK in json.loads((tmp_path / "run/run.json").read_text())["exit"]["reason"]


def test_the_command_that_continues_a_run_reads_secrets_from_variables(tmp_path):
    command = continuation(load(SETTINGS[0], SETTINGS[1:]), tmp_path)
    assert "reward.backend.api_key=${oc.env:API_KEY}" in command and "${oc.env:SERVICE_TOKEN}" in command
    assert "scale=toy" in command and NAMED not in command


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdef0123456789",
        "curl -H 'authorization: bearer abcdef0123456789'",
        "sent Basic dXNlcjpwYXNz0123456789== to it",
        "glpat-abcdef0123456789abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdef0123456789",
    ],
)
def test_headers_and_keys_of_services_are_masked(text):
    assert "0123456789" not in redact(text) and redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", ["basic settings of a run", "the bearer of a name", "api_key='${oc.env:API_KEY}'"])
def test_words_and_references_stay(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "words",
    [
        ["reward.backend.api_key=Hun,ter2Hunter2"],
        ["reward.backend.api_key Hunter2Hunter2"],
        ["checkpoint.copy_to=file:///tmp/cp?token=QqWw112233&sig=Hunter2Hunter2"],
    ],
)
def test_a_setting_that_is_written_wrongly_is_refused_without_its_secret(words, capsys):
    assert main(["check", "diffusion/quickstart", *words]) == 2
    assert "Hun" not in (said := capsys.readouterr().err) and "ter2" not in said and "QqWw" not in said


def test_parameters_of_an_address_are_masked():
    address = "https://a.blob.core.net/c?sv=2024&sig=Hunter2Hunter2&X-Amz-Signature=abcdef123 and s3://b?token=xyzxyz1"
    assert redact(address) == "https://a.blob.core.net/c?sv=2024&sig=***&X-Amz-Signature=*** and s3://b?token=***"


def test_an_instruction_with_a_placeholder_stays():
    text = "send the token of the service in the header Authorization: Bearer <token>"
    assert redact(text) == text


def test_a_known_value_is_masked_also_inside_json_and_below_any_key():
    conceal('quo"ted\\value')
    row = {"note": 'x quo"ted\\value y', "deep": [{"a": 'quo"ted\\value'}]}
    assert "ted" not in without_values(json.dumps(row)) and "ted" not in json.dumps(redacted(row))


@pytest.mark.parametrize("short", ["1", "toy", ""])
def test_short_values_are_not_replaced_everywhere(short):
    conceal(short)
    assert without_values("a 1 toy") == "a 1 toy"


def test_names_that_say_secret():
    names = {"reward.api_key": True, "HF_TOKEN": True, "SECRET": True, "max_new_tokens": False, "tokenizer": False}
    assert {name: is_secret_name(name) for name in names} == names


def test_the_key_that_signs_manifests_is_a_secret(monkeypatch):
    monkeypatch.setenv("MANIFESTS", "canary" * 8)
    read_key("env:MANIFESTS", "checkpoint.signing_key")
    assert without_values(f"it is {'canary' * 8}") == f"it is {MASK}"
