"""`unirl replay`: a step that is repeated has the bits that the run recorded, and what was changed is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.run_files import lines_of
from tests.trainer.test_loop import run
from unirl.cli.main import main
from unirl.config.errors import UnreadableFileError
from unirl.sde.guidance import Guidance
from unirl.sde.kernels import FlowSDEStrategy
from unirl.tracking.videos import STRIP_FRAMES
from unirl.trainer.monitoring import MOST_VALUES, bounded
from unirl.trainer.saved_rollouts import with_saved_rows
from unirl.types.batch import named_tensors, with_named_tensors
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

RUN = ("num_rollouts=3", "save_interval=2", "tracking.sample_steps=1", "tracking.max_samples=4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run(folder, *RUN)
    return folder


def latent_segment(latents: torch.Tensor) -> LatentSegment:
    """Trajectories of two rows with four stored positions."""
    return LatentSegment(
        latents=latents,
        indices=(0, 1, 2, 3),
        sde_indices=(0, 1, 2),
        sigmas=torch.linspace(1, 0, 4),
        logp=torch.zeros(2, 3),
        kernel=FlowSDEStrategy(),
        init_same_noise=False,
        guidance=Guidance(),
        anchors={},
        seed=0,
        step=0,
    )


def replay(root: Path, out: Path, capsys, *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["replay", str(root), "--out", str(out), "--json", *words])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("step", "start"), [(2, "the first weights"), (3, "checkpoint-000002")])
def test_a_repeated_step_has_all_bits_of_the_recorded_one(step, start, recorded, tmp_path, capsys) -> None:
    status, result = replay(recorded, tmp_path / "again", capsys, "--step", str(step))
    assert (status, result["differences"], result["start"]) == (0, [], start)
    assert result["samples"] == 4 and result["metrics"] > 10
    names = {name for row in lines_of(tmp_path / "again" / "metrics.jsonl") for name in row}
    assert ("train/grad_norm" in names) == (step == 2)  # the step before it was trained again, the step itself not
    rows = lines_of(tmp_path / "again" / "samples" / f"step-{step:06d}" / "manifest.jsonl")
    assert len(rows) > 4  # all samples of the step, not only those that the run kept


def test_a_stored_sample_has_the_sigma_and_the_log_prob_of_each_stochastic_step(with_rows) -> None:
    """As in the rows that the same step saved."""
    tensors = load_file(next((with_rows / "rollouts").iterdir()))
    [logp] = [tensor.tolist() for name, tensor in tensors.items() if name.endswith("segment.logp")]
    rows = lines_of(with_rows / "samples" / "step-000002" / "manifest.jsonl")
    assert rows and all(tuple(row["series"]["logp"]) in set(map(tuple, logp)) for row in rows)
    for row in rows:
        sigmas = row["series"]["sigma"]
        assert (
            len(sigmas) == len(logp[0]) and sigmas == sorted(sigmas, reverse=True) and 0 < sigmas[-1] < sigmas[0] <= 1
        )


def test_series_are_bounded_and_finite_and_leave_out_what_is_context_only() -> None:
    text = TextSegment(
        tokens=torch.arange(5),
        logp=torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]),
        loss_mask=torch.tensor([True, False, True, True, True]),
        offsets=torch.tensor([0, 3, 5]),
        finished=torch.ones(2, dtype=torch.bool),
        anchors={},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    assert text.series() == [{"logp": [-1.0, -3.0]}, {"logp": [-4.0, -5.0]}]
    assert (text.written(), text.context()) == ([[0, 1, 2], [3, 4]], [[1], []])
    assert bounded({"a": [1.0] * (MOST_VALUES + 1), "b": [1.0, float("nan")], "c": []}) == {"a": (1.0,) * MOST_VALUES}


def test_what_differs_is_named_and_the_status_says_so(recorded, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("unirl.cli.start.PERIOD_S", 0.001)
    changed = tmp_path / "changed"
    shutil.copytree(recorded, changed)
    table = changed / "metrics.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    rows[2]["rollout/reward_mean"] += 1e-12
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = changed / "samples" / "step-000003"
    manifest = lines_of(folder / "manifest.jsonl")
    (folder / manifest[0]["file"]).write_bytes((folder / manifest[1]["file"]).read_bytes())
    manifest[2]["reward"] = 0.5
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in manifest))
    status, result = replay(changed, tmp_path / "again", capsys, "--step", "3")
    assert status == 9
    assert [line.split(" was ")[0] for line in result["differences"]] == [
        "step 3: rollout/reward_mean",
        f"step 3: the file of {manifest[0]['sample_id']}",
        f"step 3: reward of {manifest[2]['sample_id']}",
    ]
    one = manifest[1]["sample_id"]
    capsys.readouterr()
    assert main(["replay", str(changed), "--step", "3", "--sample", one, "--out", str(tmp_path / "one")]) == 9
    shown = capsys.readouterr()
    assert f"sample   {one}: reward {manifest[1]['reward']:.6g}" in shown.out and "1 samples compared" in shown.out
    assert "error[9006]: step 3 is not what" in shown.err and "unirl: repeating: step 3 of 3, " in shown.err


def test_a_trace_shows_the_latents_of_each_stored_position(recorded, tmp_path, capsys) -> None:
    sample = lines_of(recorded / "samples" / "step-000003" / "manifest.jsonl")[1]["sample_id"]
    words = ("--step", "3", "--sample", sample, "--trace")
    status, result = replay(recorded, tmp_path / "again", capsys, *words)
    assert status == 0 and Path(result["trace"]).exists()
    [row] = lines_of(tmp_path / "again" / "trace" / "manifest.jsonl")
    [film] = (tmp_path / "again" / "trace").glob("*.webp")
    with Image.open(film) as file:
        assert file.n_frames == len(row["positions"].split(", ")) > 1
    assert ("shown" in row) == (file.n_frames > STRIP_FRAMES)


def test_a_picture_of_latents_is_grey_at_zero_and_ends_at_three_standard_deviations() -> None:
    values = torch.tensor([0.0, 3.0, -3.0, 30.0])
    latents = values.view(1, 4, 1, 1, 1).expand(2, 4, 16, 5, 3)
    trace = latent_segment(latents).trace()
    assert trace.offsets.tolist() == [0, 4, 8]
    assert trace.frames.shape == (8, 3, 95, 57)  # enlarged by 19 to at most 96
    assert [set(frame.flatten().tolist()) for frame in trace.frames[:4]] == [{128}, {255}, {0}, {255}]
    film = torch.stack([latents - 9, latents, latents - 9], dim=3)  # three frames, of which the middle one is shown
    assert torch.equal(latent_segment(film).trace().frames, trace.frames)
    with pytest.raises(ValueError, match=r"latents of the shape \(2, 4, 16\) are no images"):
        latent_segment(latents[..., 0, 0]).trace()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["RUN", "--step", "4"], 4, "recorded the steps 1 to 3. Name one of them"),
        (["RUN", "--step", "0"], 4, "recorded the steps 1 to 3. Name one of them"),
        (["RUN"], 2, "the following arguments are required: --step"),
        (
            ["BARE", "--step", "1"],
            4,
            "has no checkpoint, and a step is repeated with the recipe and the weights of one",
        ),
    ],
)
def test_bad_input_is_refused_with_the_way_out(recorded, tmp_path, capsys, words, status, message) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(recorded, bare, ignore=shutil.ignore_patterns("checkpoint-*"))
    places = {"RUN": str(recorded), "BARE": str(bare)}
    assert main(["replay", *(places.get(word, word) for word in words)]) == status
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def with_rows(tmp_path_factory) -> Path:
    """A run that kept the rows of its second and last step."""
    folder = tmp_path_factory.mktemp("rows") / "run"
    run(folder, "num_rollouts=2", "save_interval=1", "tracking.sample_steps=2", "tracking.save_rollouts=2")
    return folder


def test_a_step_that_is_trained_again_on_its_saved_rows_has_the_metrics_of_the_record(with_rows, tmp_path, capsys):
    status, result = replay(with_rows, tmp_path / "again", capsys, "--step", "2", "--train")
    assert (status, result["differences"], result["start"]) == (0, [], "checkpoint-000001")
    [row] = lines_of(tmp_path / "again" / "metrics.jsonl")
    recorded = {name: value for name, value in lines_of(with_rows / "metrics.jsonl")[1].items() if "train/" in name}
    assert "train/grad_norm" in recorded and recorded.items() - row.items() == {
        item for item in recorded.items() if item[0] == "time/train"
    }


def test_the_saved_rows_are_what_the_step_is_trained_on(with_rows, tmp_path, capsys) -> None:
    changed = shutil.copytree(with_rows, tmp_path / "changed")
    [file] = (changed / "rollouts").iterdir()
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith(".advantages")]
    save_file(tensors | {name: 2 * tensors[name]}, file)
    status, result = replay(changed, tmp_path / "again", capsys, "--step", "2", "--train")
    assert status == 9
    assert any(line.startswith("step 2: train/grad_norm") for line in result["differences"])
    assert not any("rollout/" in line for line in result["differences"])


def test_rows_that_are_absent_damaged_or_of_another_run_are_named(with_rows, tmp_path, capsys) -> None:
    assert main(["replay", str(with_rows), "--step", "1", "--train"]) == 4
    assert "kept no rows of step 1. It kept those of the steps 2" in capsys.readouterr().err
    changed = shutil.copytree(with_rows, tmp_path / "changed")
    [file] = (changed / "rollouts").iterdir()
    tensors = load_file(file)
    resp = RolloutResp({"image": rollout_track(3)})
    for content, reason in (
        (b"no tensors", "cannot be read"),
        (None, "has no rows of the track image"),
    ):
        file.write_bytes(content) if content else save_file({"x": tensors[min(tensors)]}, file)
        with pytest.raises(UnreadableFileError, match=reason):
            with_saved_rows(changed, 2, resp)
    save_file({"image.advantages": torch.zeros(2)}, file)
    with pytest.raises(UnreadableFileError, match="does not fit step 2"):
        with_saved_rows(changed, 2, resp)


def rollout_track(rows: int) -> RolloutTrack:
    segment = latent_segment(torch.zeros(2, 4, 3, 2, 2)).select([0] * rows)
    ids = [str(row) for row in range(rows)]
    return RolloutTrack(
        sample_ids=ids,
        group_ids=ids,
        conditions={},
        segment=segment,
        weight=torch.ones(rows),
        weight_version=torch.zeros(rows, dtype=torch.int64),
    )


def test_named_tensors_and_back_is_the_identity_on_every_tensor() -> None:
    track = rollout_track(3)
    random = {name: torch.rand(tensor.shape).to(tensor.dtype) for name, tensor in named_tensors(track, "t").items()}
    assert {"t.segment.latents", "t.segment.logp", "t.weight", "t.weight_version"} == set(random)
    filled = named_tensors(with_named_tensors(track, random, "t"), "t")
    assert filled.keys() == random.keys()
    assert all(torch.equal(filled[name], random[name]) for name in random)
