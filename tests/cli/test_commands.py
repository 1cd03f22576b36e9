"""Commands that need no model: listings, checkpoints, the environment report, the doctor."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

from unirl.cli import env
from unirl.cli.doctor import CHECKS, Unfit
from unirl.cli.main import COMMANDS, main
from unirl.config.recipe_files import Card
from unirl.train.backend.checkpoint import CheckpointStore


@pytest.fixture
def run_dir(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=9)
    for step in (1, 2, 3):
        with store.stage(step) as folder:
            (folder / "state.txt").write_text(f"step {step}")
    return tmp_path


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A working directory with one recipe and its card."""
    folder = tmp_path / "examples" / "toys"
    folder.mkdir(parents=True)
    (folder / "ball.yaml").write_text("# @package _global_\nbatch_size: 7\n")
    (folder / "ball.card.yaml").write_text("status: toy\nresult: it rolls\n")
    monkeypatch.chdir(tmp_path)


def output(capsys, *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples_first(capsys, command):
    shown = output(capsys, command, "-h")
    assert shown.startswith(f"examples:\n  unirl {command}")


def test_check_says_that_the_server_of_an_engine_is_not_installed_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("UNIRL_ENGINES", str(tmp_path))
    for words, says in (([], "would be refused here: sglang is not installed"), (["rollout.program=fake"], "")):
        assert main(["check", "llm/quickstart", "rollout=sglang", *words]) == 0
        said = capsys.readouterr().err
        assert says in said and ("sglang" in said) == bool(says)


def test_recipes_are_listed_with_their_card(capsys, recipes):
    rows = {row["name"]: row for row in json.loads(output(capsys, "recipes", "ls", "--json"))}
    assert rows["toys/ball"]["status"] == "toy"
    assert "ball" in output(capsys, "recipes")


def test_the_table_of_recipes_fits_a_terminal_and_shows_what_a_run_lacks(capsys, monkeypatch):
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(len(line) for line in output(capsys, "recipes").splitlines()) <= columns
    lines = [" ".join(line.split()) for line in output(capsys, "recipes", "search", "quickstart").splitlines()]
    assert lines[lines.index("diffusion/") + 1] == "quickstart trained 0.496 -> 0.839 2026-11-25"
    assert "GRPO teaches a small Qwen3, which often forgets to carry, to add correctly" in lines
    assert "but constant rewards, 4 skipped updates" in lines
    assert not any("arXiv" in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "evidence"),
    [
        ({}, "untested"),
        ({"status": "toy", "gradient_norm": "0, 0.1", "reward_std": "0, 0.1"}, "toy"),
        (
            {"status": "toy", "gradient_norm": "0, 0", "reward_std": "0.000, 0.000", "skipped_updates": "3"},
            "toy, gradient norm 0, constant rewards, 3 skipped updates",
        ),
        ({"status": "trained", "reward": "0.1 -> 0.9 (seed 1); 0.1 -> 0.8 (seed 2)"}, "trained 0.1 -> 0.9"),
    ],
)
def test_the_evidence_of_a_card_names_runs_that_show_little(fields, evidence):
    assert Card(**fields).evidence == evidence


def test_config_show_doc_lists_keys_with_type_default_and_documentation(capsys):
    shown = output(capsys, "config", "show", "diffusion/quickstart", "--doc").splitlines()
    assert "sampling.height: int = 24 (default 512)" in shown
    assert "evaluation: block = EvaluationConfig" in shown
    assert shown[shown.index("num_rollouts: int (>= 1) = 44 (default 100)") + 1] == "    Steps of the loop."


def test_config_show_can_be_narrowed_to_a_block_or_a_key(capsys):
    show = ("config", "show", "diffusion/sd3_trainside")
    kernel = "sampling.kernel: Kernel = unirl.sde.kernels.FlowSDEStrategy (required)"
    assert output(capsys, *show, "sampling.kernel", "--doc").splitlines()[0] == kernel
    assert output(capsys, *show, "sampling.kernel").splitlines() == [
        "_target_: unirl.sde.kernels.FlowSDEStrategy",
        "eta: 0.7",
    ]
    assert output(capsys, *show, "batch_size", "batch_size=24") == "24\n"
    assert main([*show, "sampling.kernl"]) == 2
    assert "Did you mean 'sampling.kernel" in capsys.readouterr().err


def test_recipes_are_found_by_what_they_say(capsys, recipes):
    result = json.loads(output(capsys, "recipes", "search", "batch_size: 7", "toys/", "--json"))
    assert [row["name"] for row in result] == ["toys/ball"]


def test_a_search_without_result_is_a_usage_error(capsys, recipes):
    assert main(["recipes", "search", "no recipe says this"]) == 2


def test_a_recipe_is_shown_with_its_card(capsys, recipes):
    shown = output(capsys, "recipes", "show", "toys/ball")
    assert "# result: it rolls" in shown
    assert "batch_size: 7" in shown


def test_checkpoints_are_listed_newest_first_with_what_is_wrong(capsys, run_dir):
    (run_dir / "checkpoints" / "checkpoint-000002" / "state.txt").write_text("step 9")
    rows = json.loads(output(capsys, "ckpt", "ls", str(run_dir), "--json"))
    assert [row["step"] for row in rows] == [3, 2, 1]
    assert [bool(row["problems"]) for row in rows] == [False, True, False]


def test_verify_says_valid_or_exits_with_7(capsys, run_dir):
    path = run_dir / "checkpoints" / "checkpoint-000003"
    assert "valid" in output(capsys, "ckpt", "verify", str(path))
    (path / "state.txt").unlink()
    output(capsys, "ckpt", "verify", str(path), status=7)


def test_show_prints_the_manifest(capsys, run_dir):
    shown = json.loads(output(capsys, "ckpt", "show", str(run_dir / "checkpoints" / "checkpoint-000003")))
    assert (shown["step"], [entry["name"] for entry in shown["files"]]) == (3, ["state.txt"])


def test_prune_asks_for_yes_and_then_keeps_the_newest(capsys, run_dir, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    output(capsys, "ckpt", "prune", str(run_dir), "--keep", "1", status=2)
    assert len(CheckpointStore(run_dir / "checkpoints").checkpoints()) == 3
    output(capsys, "ckpt", "prune", str(run_dir), "--keep", "1", "--yes")
    assert [result.step for result in CheckpointStore(run_dir / "checkpoints").checkpoints()] == [3]


def test_prune_never_deletes_the_last(run_dir):
    assert main(["ckpt", "prune", str(run_dir), "--keep", "0", "--yes"]) == 2


@pytest.mark.parametrize("verb", ["ls", "verify", "show", "prune"])
def test_a_folder_that_is_not_there_exits_with_7(capsys, tmp_path, verb):
    assert main(["ckpt", verb, str(tmp_path / "nowhere")]) == 7


def test_the_report_shows_no_secret(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("UNIRL_SOMETHING", "canary-unlisted")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_PATH", "https://me:canary-password@host/" + str(tmp_path))
    shown = output(capsys, "env")
    assert "canary" not in shown
    assert str(tmp_path) not in shown
    assert "- HF_TOKEN: set (not shown)" in shown
    assert "https://***@host/" in shown


def test_the_report_is_the_same_facts_as_json(capsys):
    facts = json.loads(output(capsys, "env", "--json"))
    assert facts["packages"]["torch"] == env.installed("torch")


def test_the_doctor_exits_with_3_when_something_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("unirl.cli.doctor.installed", lambda name: None if name == "diffusers" else "1")
    rows = json.loads(output(capsys, "doctor", "--json", status=3))
    failed = {row["check"]: row["detail"] for row in rows if not row["ok"]}
    assert "missing: diffusers" in failed["packages"]


def test_the_doctor_accepts_a_torchvision_that_works_on_a_cpu_machine(monkeypatch):
    monkeypatch.setattr("unirl.cli.doctor.installed", lambda name: "1")
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    assert "CPU threads" in CHECKS["torch"]()


def test_the_doctor_refuses_a_torchvision_that_does_not_load(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("unirl.cli.doctor.installed", lambda name: "1")
    monkeypatch.setattr("unirl.cli.doctor.import_module", fail)
    with pytest.raises(Unfit, match=r"nms does not exist.*pip uninstall torchvision"):
        CHECKS["torch"]()


def test_the_doctor_checks_a_recipe(capsys, recipes):
    rows = json.loads(output(capsys, "doctor", "toys/ball", "--json", status=3))
    assert [row["detail"][:11] for row in rows if row["check"] == "recipe toys/ball"] == ["error[2003]"]


WITHOUT_LIBRARIES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "yaml", "hydra", "omegaconf", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from unirl.cli.doctor import CHECKS, Unfit
from unirl.cli.main import main
assert main(["--help"]) == 0
sys.exit(main(["train", "diffusion/quickstart"]))
"""


def test_help_works_without_any_library_and_train_names_what_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True, timeout=600)
    assert "usage: unirl COMMAND" in done.stdout
    assert done.stderr.startswith("error[3001]: the Python package '")
    assert done.returncode == 3
