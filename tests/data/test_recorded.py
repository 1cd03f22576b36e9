"""Prompts that bring their samples: pairs of images beside a prompt, read exactly, or refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from unirl.config.errors import DataError
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.images import check_counts
from unirl.testing.toy import toy_facts
from unirl.types.primitives import MediaRef

BOTH = ("chosen", "rejected")


def ref(role: str, uri: str) -> dict[str, str]:
    return {"modality": "image", "role": role, "uri": uri}


def line(prompt: str = "a cat", roles: tuple[str, ...] = BOTH, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "media_refs": [ref(role, f"{role}.png") for role in roles], **more}


def write(folder: Path, *lines: object) -> Path:
    for role in BOTH:
        (folder / f"{role}.png").touch()
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def source(path: Path, recorded: tuple[str, ...] = BOTH, **keys) -> MultimodalRLDataSource:
    return MultimodalRLDataSource(data_path=str(path), recorded=recorded, **keys)


def test_samples_of_a_prompt_are_its_images_in_the_order_of_the_roles(tmp_path) -> None:
    path = write(tmp_path, line(roles=("rejected", "chosen")), line("a dog"))
    for roles in (BOTH, BOTH[::-1], ("chosen",), ("rejected",)):
        for prompt in source(path, roles).prompts_at(0, 2):
            assert prompt.recorded == tuple(MediaRef("image", role, str(tmp_path / f"{role}.png")) for role in roles)


def test_a_condition_may_stand_beside_a_pair_and_is_what_a_text_model_refuses(tmp_path) -> None:
    pair = source(write(tmp_path, line())).prompts_at(0, 1)
    check_counts(pair, toy_facts())
    both = line()
    both["media_refs"].append(ref("condition", "c.png"))
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    (prompt,) = source(write(tmp_path, both)).prompts_at(0, 1)
    assert [entry.role for entry in prompt.recorded] == list(BOTH)
    with pytest.raises(DataError, match=r"has 1 image of role 'condition', and toy is conditioned on text alone"):
        check_counts([prompt], toy_facts())


@pytest.mark.parametrize(
    ("bad", "code", "why"),
    [
        (line(roles=("chosen",)), 4002, r"no image of role 'rejected', and data_source.recorded=\['chosen', "),
        ({"prompt": "a"}, 4002, "no image of role 'chosen'"),
        (line(roles=("chosen", "rejected", "rejected")), 4002, "2 media references of role 'rejected'"),
        (line(roles=("chosen", "best")), 4002, "modality 'image' and role 'best' is not supported; use"),
        ({"prompt": "a", "media_refs": [ref("chosen", "gone.png")]}, 4003, r"chosen image .*gone\.png is not a file"),
        ({"prompt": "a", "media_refs": [ref("chosen", "s3://b/a.png")]}, 4003, "files on this machine"),
        ({"prompt": "a", "media_refs": [ref("rejected", "x" * 5000)]}, 4003, "is not a file"),
        ({"prompt": "a", "media_refs": [ref("rejected", "../up.png")]}, 4003, "is outside the folder"),
        (line(metadata={"recorded": "1999"}), 4002, "the metadata key 'recorded'"),
    ],
)
def test_a_line_that_is_no_pair_is_refused_by_file_and_line(bad, code, why, tmp_path) -> None:
    path = write(tmp_path, line(), bad)
    with pytest.raises(DataError, match=why) as caught:
        source(path)
    assert caught.value.code == code and str(caught.value).startswith(f"{path}:2: ")


def test_images_that_nobody_would_look_at_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: .*recorded=\['chosen', 'rejected'\] to train on") as caught:
        source(write(tmp_path, {"prompt": "a"}, line()), ())
    assert caught.value.code == 4002


def test_held_out_prompts_need_no_images_and_training_prompts_serve_as_well(tmp_path) -> None:
    path = write(tmp_path, line(), line("a dog"))
    (tmp_path / "eval.txt").write_text("a bird\n")
    assert [prompt.text for prompt in source(path).eval_prompts()] == ["a cat", "a dog"]
    assert [p.text for p in source(path, eval_data_path=str(tmp_path / "eval.txt")).eval_prompts()] == ["a bird"]
    assert source(path, eval_data_path=str(path)).eval_prompts()[0].recorded == ()


def test_the_order_of_pairs_is_that_of_prompts_and_continues_at_the_cursor(tmp_path) -> None:
    path = write(tmp_path, *(line(f"prompt {i}") for i in range(7)))
    one, other = source(path), source(path)
    first = one.take(5)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.take(4) == one.take(4)
    assert sorted(p.text for p in first + source(path).prompts_at(5, 2)) == [f"prompt {i}" for i in range(7)]
