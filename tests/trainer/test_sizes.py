"""Samples of several sizes, and pictures that prompts bring, in whole runs on the toy Stable Diffusion 3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.run_files import metrics_of
from tests.trainer.test_loop import COMMON, trainer_of, weights_of
from unirl.cli.main import main
from unirl.config.errors import ConfigError, DataError
from unirl.config.load import load
from unirl.plan.preflight import preflight
from unirl.sde.schedule import SigmaSchedule
from unirl.trainer.loop import Trainer
from unirl.trainer.requests import RequestMaker
from unirl.types.facts import LatentFacts

WIDE, TALL = (32, 48), (48, 32)
SIZES = "data_source.sizes=[[32, 48], [48, 32]]"


def prompts(folder: Path, pictures: bool) -> Path:
    """Four prompts, of which three are wide where they bring pictures."""
    rows = []
    for i in range(4):
        row: dict[str, object] = {"prompt": f"prompt {i}", "prompt_id": f"p{i}"}
        if pictures:
            Image.new("RGB", (40, 60) if i == 0 else (60, 40)).save(folder / f"{i}.png")
            row["media_refs"] = [{"modality": "image", "role": "condition", "uri": f"{i}.png"}]
        rows.append(row)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Four steps of two sizes, by one process."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with trainer_of(folder, SIZES, "num_rollouts=4", "save_interval=2", "evaluation.eval_steps=4") as trainer:
        trainer.train()
    return folder


def with_facts(trainer: Trainer, **changes) -> RequestMaker:
    """The request maker of a trainer, with other facts about its model."""
    track = trainer.requests.tracks["image"]
    return RequestMaker(tracks={"image": replace(track, facts=replace(track.facts, **changes))})


def test_every_step_is_of_one_size_and_the_schedule_follows_it(tmp_path) -> None:
    with trainer_of(tmp_path, SIZES) as trainer:
        facts = trainer.policy.tracks["image"].facts
        assert isinstance(facts, LatentFacts)
        schedule = SigmaSchedule(dynamic="exponential", base_shift=0.5, max_shift=3.0, base_image_seq_len=1)
        trainer.requests = with_facts(trainer, schedule=schedule)
        seen = set()
        for step in range(8):
            drawn = trainer.data.take(2)
            [size] = {prompt.size for prompt in drawn}
            params = trainer.requests.training(drawn, step, trainer.publish(step)).tracks["image"].sampling
            assert (params.height, params.width) == size
            expected = schedule.sigmas(params.num_inference_steps, facts.image_seq_len(params))
            assert params.sigmas == tuple(expected.tolist())
            seen.add(size)
    assert seen == {WIDE, TALL}


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_bit_for_bit(finished, tmp_path) -> None:
    settings = (SIZES, "save_interval=2", "evaluation.eval_steps=4")
    for steps in (2, 4):
        with trainer_of(tmp_path, f"num_rollouts={steps}", *settings) as trainer:
            trainer.train()
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path, 4) == weights_of(finished, 4)


def test_an_evaluation_goes_size_by_size_and_holds_every_prompt(tmp_path) -> None:
    with trainer_of(tmp_path, SIZES, "evaluation.max_prompts=6", "evaluation.samples_per_prompt=2") as trainer:
        result = trainer.evaluate()
        held_out = trainer.data.eval_prompts(6)
        _, resp = trainer.evaluator.sample(held_out[:1])
        pixels = trainer.rollout.preview(resp.tracks["image"].decoded).pixels
    assert {prompt.size for prompt in held_out} == {WIDE, TALL}
    assert sorted(set(result.group_ids)) == sorted(prompt.group_id for prompt in held_out)
    assert len(result.rewards) == len(result.prompts) == len(result.facts) == 12
    assert result.media.pixels.shape == (12, 3, 48, 48)
    rows = [i for i, group in enumerate(result.group_ids) if group == held_out[0].group_id]
    height, width = pixels.shape[-2:]
    top, left = (48 - height) // 2, (48 - width) // 2
    assert torch.equal(result.media.pixels[rows][..., top : top + height, left : left + width], pixels)


def test_refilled_steps_stay_with_the_size_that_they_began_with(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("unirl.trainer.refill.informative_groups", lambda resp: [])  # every step makes all its draws
    with trainer_of(tmp_path, SIZES, "refill={max_draws: 3}", "num_rollouts=3") as trainer:
        data = trainer.data
        take, drawn = data.take, []
        monkeypatch.setattr(data, "take", lambda count, size=None: drawn.append(take(count, size)) or drawn[-1])
        trainer.train()
    sizes = [[prompt.size for prompt in prompts] for prompts in drawn]
    assert len(sizes) == 9 and all(sizes[i] == sizes[i - i % 3] for i in range(9))
    assert {size for some in sizes for size in some} == {WIDE, TALL}


def test_samples_of_a_finished_run_are_kept_by_size(finished, tmp_path, capsys) -> None:
    words = [word for i in range(12) for word in ("-p", f"prompt {i}")]
    assert main(["sample", str(finished), *words, "--count", "1", "--out", str(tmp_path)]) == 0
    assert sum(len([*(tmp_path / name).glob("p*.png")]) for name in ("32x48", "48x32")) == 12
    for name, size in (("32x48", (48, 32)), ("48x32", (32, 48))):
        with Image.open(tmp_path / name / "p00-s00.png") as picture:
            assert picture.size == size
    assert capsys.readouterr().out.count(" images ") == 2


def test_the_plan_names_every_size(capsys) -> None:
    assert main(["plan", "diffusion/sd3_trainside", "scale=toy", SIZES]) == 0
    assert "4 denoising steps at 32 x 48, 48 x 32; 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "code", "why"),
    [
        (
            "[[32, 40]]",
            2004,
            r"sizes=\[32, 40\]: sampling\.width=40 is not a positive multiple of 16.*Use 32",
        ),
        ("[[32, 48], [32, 48]]", 2004, "occurs once"),
        ("[[0, 48]]", 2004, "at least 1"),
        ("[[32, 48, 64]]", 2004, r"data_source\.sizes\[0\]|sizes\.0"),
    ],
)
def test_sizes_that_the_model_cannot_draw_are_refused_before_it_is_loaded(sizes, code, why) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        preflight(load("diffusion/sd3_trainside", [*COMMON, f"data_source.sizes={sizes}"]))
    assert caught.value.code == code


def test_text_has_no_size() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data_source\.sizes has 32 x 48 pixels, but the samples are texts\. Write ~data_source\.sizes",
    ) as caught:
        preflight(load("llm/quickstart", ["scale=toy", "data_source.sizes=[[32, 48]]"]))
    assert caught.value.code == 2020


def test_the_number_of_pictures_is_judged_by_check_and_before_a_run(tmp_path, capsys) -> None:
    file = prompts(tmp_path, pictures=True)
    for command in (["check"], ["data", "check", "--recipe"]):
        assert main([*command, "diffusion/sd3_trainside", "scale=toy", f"data_source.data_path={file}"]) == 4
        said = capsys.readouterr().err
        assert "prompts.jsonl:1: prompt 'p0' has 1 image" in said and "conditioned on text alone" in said
    with (
        pytest.raises(DataError, match=r"prompts\.jsonl:1: prompt 'p0' has 1 image"),
        trainer_of(tmp_path / "run", f"data_source.data_path={file}"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_request_carries_the_pictures_of_its_prompts(tmp_path, monkeypatch) -> None:
    file = prompts(tmp_path, pictures=True)
    monkeypatch.setattr("unirl.plan.prompts.known_facts", lambda config: None)
    with trainer_of(
        tmp_path / "run", f"data_source.data_path={file}", f"evaluation.data_path={file}", SIZES
    ) as trainer:
        with pytest.raises(DataError, match="prompt 'p0' has 1 image"):
            trainer.train()
        trainer.requests = with_facts(trainer, condition_images=(1, 1))
        some = trainer.data.take(2)
        for req, drawn in (
            (trainer.requests.training(some, 0, trainer.publish(0)), some),
            (trainer.requests.evaluation(held := trainer.data.eval_prompts(1), {"image": 0}), held),
        ):
            copies = len(req) // len(drawn)
            assert req.prompt_image_uris() == [(prompt.images[0].uri,) for prompt in drawn for _ in range(copies)]
        trainer.requests = with_facts(trainer, condition_images=(2, 3))
        with pytest.raises(DataError, match="takes 2 to 3 per prompt"):
            trainer.requests.training(some, 0, trainer.publish(0))
        assert trainer.data.orders[TALL].prompts_at(0, 1)[0].prompt_id == "p0"
