"""Mistakes of a first hour are answered before a model is loaded: the thing, the value, the rule and the way out."""

import errno
import os
import shutil
import subprocess
import sys
import threading

import pytest
from safetensors import SafetensorError

from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.config.errors import CheckpointError, InvalidValueError
from unirl.config.failures import failure_of
from unirl.config.load import load
from unirl.distributed.group import ray_cluster
from unirl.plan.preflight import preflight
from unirl.train.backend.checkpoint import Checkpoint, still_there
from unirl.trainer.export import refuse_replacing, removed_if_unfinished
from unirl.trainer.run_folder import check_folder

RECIPE = "diffusion/sd3_trainside"
TOY = (RECIPE, "scale=toy")


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        (["backend.optimizer_cfg.learning_rate=inf"], 2, "learning_rate must be a finite number"),
        (["sampling.guidance_scale=inf"], 2, "guidance_scale must be a finite number"),
        (["stack.max_grad_norm=-1"], 2, "stack.max_grad_norm must be > 0, got -1"),
        (["backend.lora_cfg.target_modules=[to_kk]"], 2, "'to_kk' is the end of no linear layer's name"),
        (["batch_size=99999999999999999999"], 2, "more than 16777216 samples in one step"),
        (["sampling.samples_per_prompt=99999999999"], 2, "more than 16777216 samples in one step"),
        (["batch_size=1.5"], 2, "such as batch_size=1 or batch_size=2"),
        (["algorithm._target_=unirl.sde.kernels.FlowSDEStrategy"], 2, "is not a unirl.algorithms.base.StageAlgorithm"),
        (["run.dir="], 2, "run.dir is empty"),
        (["sampling.stepz=3"], 2, "Keys of sampling"),
        (["data_source.data_path=caf\u00e9 \u732b.txt"], 4, "caf\u00e9 \u732b.txt: there is no such file"),
        (["data_source.data_path=."], 4, "data_source.data_path=. is a folder: name a file in it, by"),
        (["data_source.data_path=/dev/null"], 4, "data_path=/dev/null is a pipe, a socket or a device. Give a regular"),
        (["checkpoint.copy_to=s3x://bucket"], 2, "copy_to=s3x://bucket is not a URL of fsspec. Did you mean 's3'?"),
        (["run.dir=runs/x (1)"], 2, "goes in quotes within quotes"),
        (["resume=nowhere"], 7, "nowhere: there is no such folder"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_no_run_can_have_is_refused_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, settings, status, said
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TOY, *settings]) == status
    shown = capsys.readouterr().err
    assert said in shown
    message = [line for line in shown.rstrip().splitlines() if not line.startswith("unirl: starting:")]
    assert len(message) <= 6
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_blank_or_another_alphabet_needs_no_quotes_within_quotes():
    for folder in ("my runs/first", "l\u00e4ufe/\u732b", "/tmp/a b"):
        assert load(RECIPE, ("scale=toy", f"run.dir={folder}")).config.run.dir == folder
    assert load(RECIPE, ("scale=toy", 'run.dir="quoted, as before"')).config.run.dir == "quoted, as before"


def test_a_variable_that_is_set_to_nothing_is_named(monkeypatch, capsys):
    monkeypatch.setenv("PRETRAINED_MODEL", "")
    assert main(["check", RECIPE]) == 2
    assert "the environment variable PRETRAINED_MODEL, which is set but empty" in capsys.readouterr().err
    assert main(["check", *TOY]) == 0


def test_unusual_values_get_a_notice():
    notices = preflight(load(RECIPE, ("bundle.path=toy", "stack.micro_batch_size=4096"))).notices
    assert any("stack.micro_batch_size=4096 is more than the" in notice for notice in notices)
    notices = preflight(load(RECIPE, ("scale=toy", "backend.optimizer_cfg.learning_rate=1e3"))).notices
    assert any("learning_rate=1000 is far above" in notice for notice in notices)


def test_a_clip_range_of_tokens_for_denoising_steps_is_a_notice():
    assert clip_notices(RECIPE, "0.2") and not clip_notices(RECIPE, "1e-3")
    assert not clip_notices("llm/quickstart", "0.2")


def clip_notices(recipe: str, clip_range: str) -> list[str]:
    checked = preflight(load(recipe, ("scale=toy", f"algorithm.clip_range={clip_range}")))
    return [notice for notice in checked.notices if "algorithm.clip_range=" in notice]
    assert preflight(load(RECIPE, ("scale=toy",))).notices == ()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["reward", "ping", "foo"], 2, "base_url must start with http:// or https://, like"),
        (["reward", "score", "-r", "pickscore", "--image", "x.png"], 2, "no --prompt is given"),
        (["eval", "nowhere"], 7, "nowhere: there is no such folder"),
        (["sample", "nowhere", "-p", "a cat"], 7, "nowhere: there is no such folder"),
        (["export", "nowhere"], 7, "nowhere: there is no such folder"),
        (["ckpt", "ls", "nowhere"], 7, "nowhere: there is no such folder"),
        (["ckpt", "verify", "nowhere"], 7, "nowhere: there is no such folder"),
        (["sample", "nowhere", "-p", "a cat", "--count", "0"], 2, "--count must be >= 1"),
        (["data", "check", "caf\udcc3\udca9.txt"], 2, "Set PYTHONUTF8=1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_on_the_command_line_is_named(tmp_path, monkeypatch, capsys, words, status, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) == status
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_repeated_prompts_are_counted_and_a_prompt_as_long_as_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "twice.txt").write_text("a cat\na dog\na cat\n")
    assert main(["data", "check", str(tmp_path / "twice.txt")]) == 0
    assert "1 occurs more than once" in capsys.readouterr().out
    (tmp_path / "long.txt").write_text("x" * 1_000_001)
    assert main(["data", "check", str(tmp_path / "long.txt")]) == 4
    assert "has 1,000,001 characters" in capsys.readouterr().err


def test_a_full_disk_is_named_whoever_reports_it():
    reason = f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"
    failures = [failure_of(error) for error in (OSError(errno.ENOSPC, "full", "x"), SafetensorError(reason))]
    assert [(failure.status, failure.is_bug) for failure in failures] == [(7, False)] * 2
    assert all(failure.message.startswith("error[7003]: the disk is full") for failure in failures)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_a_folder_that_cannot_be_written_is_named(number):
    failure = failure_of(OSError(number, os.strerror(number), "/there/heartbeat"))
    assert (failure.status, failure.is_bug) == (7, False)
    assert "/there/heartbeat" in failure.message and "run.dir, --out" in failure.message


def test_an_export_replaces_no_other_export_and_goes_into_no_file(tmp_path, monkeypatch):
    (tmp_path / "export/peft").mkdir(parents=True)
    with pytest.raises(InvalidValueError, match="already holds an export"):
        refuse_replacing([tmp_path / "export"])
    check_folder(tmp_path / "export")
    check_folder(tmp_path / "new/folder")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValueError, match="is a file, not a folder"):
        check_folder(tmp_path / "file")

    def refused(**where: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("unirl.trainer.run_folder.TemporaryFile", refused)
    with pytest.raises(InvalidValueError, match="cannot be written to"):
        check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_export_that_fails_leaves_no_part_of_itself(tmp_path):
    with pytest.raises(ZeroDivisionError), removed_if_unfinished(tmp_path / "new/peft"):
        (tmp_path / "new/peft").mkdir(parents=True)
        (tmp_path / "new/peft/part").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_named(tmp_path):
    checkpoint = Checkpoint(tmp_path / "checkpoint-000001", 1)
    checkpoint.path.mkdir()
    with pytest.raises(FileNotFoundError), still_there(checkpoint):
        (checkpoint.path / "trainer.json").read_text()
    with pytest.raises(CheckpointError, match="was removed while it was read"), still_there(checkpoint):
        shutil.rmtree(checkpoint.path)
        (checkpoint.path / "trainer.json").read_text()


def test_the_end_of_rays_control_process_ends_the_run_with_words_of_ours(monkeypatch, capsys):
    class Ended(Exception):
        pass

    def ended(status):
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(ray_cluster, "_is_shutting_down", threading.Event())  # a test before may have ended Ray
    child = os.posix_spawn("/bin/true", ["true"], {})
    with pytest.raises(Ended, match="10"):
        ray_cluster.end_without(child)
    assert "error[10001]: Ray's control process" in capsys.readouterr().err
    os.waitpid(child, 0)
    ray_cluster._is_shutting_down.set()
    child = os.posix_spawn("/bin/true", ["true"], {})
    ray_cluster.end_without(child)
    os.waitpid(child, 0)


def test_the_refusal_of_another_recipe_is_short(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    assert main(["train", *TOY, "num_rollouts=1", "evaluation.eval_steps=0", "--out", str(run)]) == 0
    before = sorted(path.name for path in run.iterdir())
    capsys.readouterr()
    assert main(["train", "diffusion/sd3_nft", "scale=toy", f"run.dir={run}"]) == 7
    shown = capsys.readouterr().err
    assert "another recipe (algorithm._target_:" in shown and "more): set these back" in shown
    assert len(shown) - 2 * len(str(run)) < 700
    assert sorted(path.name for path in run.iterdir()) == before
    for command in (["eval", str(run)], ["sample", str(run), "-p", "a cat"], ["export", str(run)]):
        assert main([*command, "--weights", "ema"]) == 2
        assert "--weights ema: the run keeps no such weights. It has live" in capsys.readouterr().err
    for file in run.glob("checkpoints/*/policy/optimizer.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["export", str(run)]) == 0  # which reads no state of the optimizer
    assert main(["eval", str(run)]) == 7
    assert "optimizer.safetensors is damaged (checksum differs)" in capsys.readouterr().err


WITHOUT_LIBRARIES = """
import sys
from unirl.cli.main import main
status = main(sys.argv[1:])
print([name for name in ("diffusers", "transformers", "peft", "scipy") if name in sys.modules])
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["check", "diffusion/quickstart"], 0),
        (["check", "pe/quickstart"], 0),
        (["check", "diffusion/quickstart", "backend.lora_cfg.target_modules=[to_kk]"], 2),
        (["train", "diffusion/sd3_trainside"], 4),
    ],
    ids=["quick start", "prompt enhancement", "mistyped layer", "absent model"],
)
def test_what_is_known_before_a_model_loads_is_answered_without_its_libraries(tmp_path, words, status) -> None:
    """They take seconds to import. The model of the last case is neither in the cache nor reachable."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environ.pop("PRETRAINED_MODEL", None)
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, *words]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "[]"), done.stderr
