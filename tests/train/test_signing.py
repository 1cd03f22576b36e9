"""Signed manifests: whose key is accepted, and that nobody without it can make a checkpoint that counts."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from tests.train.test_checkpoint_store import save
from unirl.cli.main import main
from unirl.config.errors import InvalidValueError, ResumeError
from unirl.config.load import load
from unirl.train.backend.checkpoint import CheckpointStore, verify
from unirl.train.backend.manifest import MANIFEST, seal
from unirl.train.backend.remote import RemoteCheckpoints
from unirl.train.backend.signing import SIGNATURE, read_key
from unirl.trainer.assemble import build_trainer

KEY = b"0123456789abcdef"


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "checkpoints", key=KEY)
    save(store, 1)
    save(store, 2)
    return tmp_path / "checkpoints"


def test_the_signature_is_the_hmac_of_the_manifest(signed: Path) -> None:
    folder = signed / "checkpoint-000002"
    expected = hmac.digest(KEY, (folder / MANIFEST).read_bytes(), "sha256").hex()
    assert (folder / SIGNATURE).read_text() == expected + "\n"
    assert verify(folder) == verify(folder, key=KEY) == []


def test_a_checkpoint_that_was_changed_and_sealed_again_without_the_key_is_passed_over(signed: Path) -> None:
    forged = signed / "checkpoint-000002"
    file = next(path for path in forged.rglob("*") if path.is_file() and path.name not in (MANIFEST, SIGNATURE))
    file.write_bytes(b"weights of someone else")
    seal(forged, 2)
    assert verify(forged) == []  # the checksums alone cannot tell
    assert verify(forged, key=KEY) == [
        f"{SIGNATURE} does not fit: the manifest was changed, or signed with another key. Give the key of the run that "
        "saved it"
    ]
    point = CheckpointStore(signed, key=KEY).latest_valid()
    assert point.checkpoint is not None and point.checkpoint.step == 1
    assert "checkpoint-000002 was skipped" in str(point.skipped[0])
    (forged / SIGNATURE).unlink()
    assert verify(forged, key=KEY) == [
        f"{SIGNATURE} is missing: the checkpoint was saved without checkpoint.signing_key"
    ]


def test_every_bit_of_a_signature_counts_and_so_does_the_key(signed: Path) -> None:
    folder = signed / "checkpoint-000001"
    content = (folder / SIGNATURE).read_bytes()
    for at in range(len(content)):
        (folder / SIGNATURE).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert verify(folder, key=KEY)
    (folder / SIGNATURE).write_bytes(content)
    assert verify(folder, key=KEY) == [] and verify(folder, key=KEY + b"!")


def test_final_checkpoints_and_copies_carry_the_signature(signed: Path, tmp_path: Path) -> None:
    CheckpointStore(signed, key=KEY).publish_final(2)
    assert verify(signed / "checkpoint-final", key=KEY) == []
    copies = RemoteCheckpoints(f"file://{tmp_path}/copies")
    copies.copy(signed / "checkpoint-000002")
    assert verify(copies.fetch_newest(tmp_path / "cache"), key=KEY) == []


def test_a_key_comes_from_the_environment_or_a_file_of_the_owner_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", KEY.decode())
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    file.chmod(0o600)
    assert read_key("env:CHECKPOINT_KEY", "k") == read_key(str(file), "k") == KEY
    for mode in (0o640, 0o604, 0o666):
        file.chmod(mode)
        with pytest.raises(InvalidValueError, match=f"k={file}: the file has mode {mode:o}.*chmod 600"):
            read_key(str(file), "k")
    file.chmod(0o600)
    file.write_bytes(b"short")
    for source, why in (("env:NOBODY_SETS", "is not set"), (str(tmp_path / "no"), "cannot be"), (str(file), "5 bytes")):
        with pytest.raises(InvalidValueError, match=why):
            read_key(source, "k")


def test_the_command_checks_the_signature_and_reads_every_tensor(signed: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("CHECKPOINT_KEY", KEY.decode())
    folder = str(signed / "checkpoint-000002")
    assert main(["ckpt", "verify", folder, "--deep", "--key", "env:CHECKPOINT_KEY"]) == 0
    assert capsys.readouterr().out == f"{folder}: valid, every tensor read, signature valid\n"
    assert main(["ckpt", "verify", folder]) == 0
    assert capsys.readouterr().out == f"{folder}: valid, signature not checked (--key)\n"
    monkeypatch.setenv("CHECKPOINT_KEY", "another key of some length")
    assert main(["ckpt", "verify", folder, "--key", "env:CHECKPOINT_KEY"]) == 7
    assert "signed with another key" in capsys.readouterr().err


def run(folder: Path, *overrides: str) -> Path:
    """Run two steps of a toy, with a checkpoint after each, or continue to the number of steps in `overrides`."""
    words = ["scale=toy", "num_rollouts=2", "save_interval=1", "evaluation.eval_steps=0", "tracking.sample_steps=0"]
    with build_trainer(load("diffusion/sd3_trainside", [*words, f"run.dir={folder}", *overrides])) as trainer:
        trainer.train()
    return folder / "checkpoints"


def test_a_signed_run_is_continued_with_its_key_only_and_another_run_that_begins_from_it_is_warned(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CHECKPOINT_KEY", KEY.decode())
    key = "checkpoint.signing_key=env:CHECKPOINT_KEY"
    checkpoints = run(tmp_path / "run", key)
    last = checkpoints / "checkpoint-000002"
    assert verify(last, key=KEY) == []
    with pytest.raises(ResumeError, match=r"belongs to a run with signed checkpoints.*key of the run, or branch off"):
        run(tmp_path / "run", "num_rollouts=3")
    capsys.readouterr()
    other = run(tmp_path / "other", "num_rollouts=3", f"resume={last}")
    assert f"the signature of {last} is not checked" in capsys.readouterr().err
    assert not (other / "checkpoint-000003" / SIGNATURE).exists()
    for signature in checkpoints.glob(f"*/{SIGNATURE}"):
        signature.unlink()
    with pytest.raises(ResumeError, match="belongs to a run with signed checkpoints"):
        run(tmp_path / "run", "num_rollouts=3")
