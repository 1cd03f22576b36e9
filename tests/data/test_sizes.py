"""Sizes: every prompt has the nearest, every step has one, and each is drawn as often as its share says."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from unirl.config.errors import CheckpointError
from unirl.data.data_source import MultimodalRLDataSource, PromptSource, by_size, nearest_size, next_due
from unirl.data.datasets import Prompt

WIDE, TALL, SQUARE = (480, 832), (832, 480), (624, 624)
SIZES = (WIDE, TALL, SQUARE)
SHAPES = {WIDE: (83, 48), TALL: (48, 83), SQUARE: (60, 60)}
"""Size to (width, height) of a picture of that shape."""


def write(folder: Path, shapes: list[tuple[int, int] | None], name: str = "p.jsonl") -> Path:
    """A prompt file with a picture (width, height), or none, for each line."""
    rows = []
    for i, shape in enumerate(shapes):
        refs = []
        if shape is not None:
            uri = f"{shape[0]}x{shape[1]}.png"
            Image.new("RGB", shape).save(folder / uri)
            refs = [{"modality": "image", "role": "condition", "uri": uri}]
        rows.append({"prompt": f"prompt {i}", "prompt_id": f"p{i}", "media_refs": refs})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Ten wide, five tall and two square pictures."""
    shapes = [SHAPES[WIDE]] * 10 + [SHAPES[TALL]] * 5 + [SHAPES[SQUARE]] * 2
    return write(tmp_path_factory.mktemp("data"), shapes)


def source(path: Path, **keys) -> MultimodalRLDataSource:
    return MultimodalRLDataSource(data_path=str(path), **({"sizes": SIZES} | keys))


class Held(PromptSource):
    """Ten wide prompts, five tall and two square ones, without any file."""

    def __init__(self, *, shuffle: bool = True, seed: int = 42) -> None:
        sizes = [WIDE] * 10 + [TALL] * 5 + [SQUARE] * 2
        prompts = [Prompt(text="a", prompt_id=f"p{i}", size=size) for i, size in enumerate(sizes)]
        super().__init__(prompts, shuffle=shuffle, seed=seed)

    def eval_prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        return []


@given(st.integers(1, 5000), st.integers(1, 5000), st.permutations(SIZES))
def test_the_nearest_size_is_the_one_of_the_nearest_aspect(height, width, sizes) -> None:
    result = nearest_size(height, width, sizes)
    distances = {size: abs(math.log((size[0] * width) / (size[1] * height))) for size in sizes}
    assert distances[result] <= min(distances.values()) + 1e-9
    assert nearest_size(width, height, [(w, h) for h, w in sizes]) == (result[1], result[0]) or height == width


def test_of_sizes_of_one_shape_that_of_the_nearest_area_is_taken() -> None:
    sizes = [(240, 416), (480, 832), (960, 1664)]
    assert nearest_size(400, 700, sizes) == (480, 832)
    assert nearest_size(1, 2, sizes) == (240, 416)


def test_a_prompt_has_the_size_of_its_first_image_and_else_one_by_its_id(tmp_path) -> None:
    path = write(tmp_path, [(83, 48), (30, 50), (7, 7), *[None] * 60])
    sizes = {prompt.prompt_id: prompt.size for prompt in source(path).prompts}
    assert [sizes[f"p{i}"] for i in range(3)] == [WIDE, TALL, SQUARE]
    spread = Counter(sizes[f"p{i}"] for i in range(3, 63))
    assert set(spread) == set(SIZES) and min(spread.values()) >= 10
    again = {prompt.prompt_id: prompt.size for prompt in source(path, seed=7, shuffle=False).prompts}
    assert again == sizes
    assert {prompt.size for prompt in source(path, sizes=()).prompts} == {None}


def test_recorded_samples_decide_the_size_where_no_condition_does(tmp_path) -> None:
    Image.new("RGB", SHAPES[TALL]).save(tmp_path / "a.png")
    refs = [{"modality": "image", "role": role, "uri": "a.png"} for role in ("chosen", "rejected")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "media_refs": refs}))
    (prompt,) = source(tmp_path / "p.jsonl", recorded=("chosen", "rejected")).prompts
    assert prompt.size == TALL


@given(count=st.integers(1, 7), steps=st.integers(1, 60), seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_step_has_one_size_and_each_keeps_to_its_share(count, steps, seed, shuffle) -> None:
    data = Held(seed=seed, shuffle=shuffle)
    drawn: Counter[tuple[int, int]] = Counter()
    for _ in range(steps):
        [size] = {prompt.size for prompt in data.take(count)}
        drawn[size] += count
    time = steps * count / 17
    for size, held in ((WIDE, 10), (TALL, 5), (SQUARE, 2)):
        assert abs(drawn[size] - time * held) <= 2 * count


@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=60), seed=st.integers(0, 3))
def test_every_prompt_of_a_size_is_drawn_once_per_epoch(counts, seed) -> None:
    data = Held(seed=seed)
    drawn = [prompt for count in counts for prompt in data.take(count)]
    assert len({prompt.group_id for prompt in drawn}) == len(drawn)
    for some in by_size(drawn):
        held = len(data.orders[some[0].size])
        for epoch in range(len(some) // held):
            ids = {prompt.prompt_id for prompt in some[epoch * held : (epoch + 1) * held]}
            assert len(ids) == held and {p.epoch for p in some if p.prompt_id in ids} >= {epoch}


def test_the_order_of_sizes_depends_on_the_seed_and_is_not_regular() -> None:
    def order(**keys) -> list[tuple[int, int] | None]:
        data = Held(**keys)
        return [data.take(1)[0].size for _ in range(170)]

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(seed=1)[:17] != order(seed=1)[17:34]
    assert order(shuffle=False, seed=1) == order(shuffle=False, seed=2)


@given(before=st.integers(0, 40), after=st.integers(1, 10), count=st.integers(1, 5))
def test_a_restored_source_continues_where_the_saved_one_stopped(before, after, count) -> None:
    saved, restored = Held(), Held()
    for _ in range(before):
        saved.take(count)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert [restored.take(count) for _ in range(after)] == [saved.take(count) for _ in range(after)]


def test_a_size_that_is_asked_for_is_drawn_and_others_stay_where_they_are() -> None:
    data = Held()
    first = data.take(2, TALL)
    assert data.take(2, TALL) == data.prompts_at(2, 2, TALL) and first == data.prompts_at(0, 2, TALL)
    assert data.cursors == {WIDE: 0, SQUARE: 0, TALL: 4}


def test_one_size_draws_what_no_size_draws(tmp_path) -> None:
    path = write(tmp_path, [(83, 48)] * 7)
    one, none = source(path, sizes=(WIDE,)), source(path, sizes=())
    for _ in range(5):
        assert [p.group_id for p in one.take(3)] == [p.group_id for p in none.take(3)]


def test_the_order_of_sizes_in_the_recipe_moves_no_draw_of_images(file) -> None:
    one, other = source(file), source(file, sizes=SIZES[::-1])
    for _ in range(20):
        assert one.take(2) == other.take(2)


def test_state_of_other_sizes_is_refused(file) -> None:
    state = source(file).state_dict()
    for sizes in ((), (WIDE, TALL), ((240, 416), TALL, SQUARE)):
        with pytest.raises(CheckpointError, match="images or sizes"):
            source(file, sizes=sizes).load_state_dict(state)


def test_held_out_and_other_prompts_are_sized_as_those_of_the_run(file, tmp_path) -> None:
    held_out = write(tmp_path, [(48, 83), (83, 48)], "q.jsonl")
    data = source(file, eval_data_path=str(held_out))
    assert [prompt.size for prompt in data.eval_prompts()] == [TALL, WIDE]
    unsized = source(held_out, sizes=()).eval_prompts()
    assert [prompt.size for prompt in data.sized(unsized)] == [TALL, WIDE]
    assert [prompt.size for prompt in source(file, sizes=()).sized(unsized)] == [None, None]


@given(
    held=st.lists(st.integers(1, 50), min_size=1, max_size=5), count=st.integers(1, 9), key=st.sampled_from([None, "k"])
)
def test_no_list_is_more_than_a_draw_ahead_of_or_behind_the_others(held, count, key) -> None:
    drawn = [0] * len(held)
    for _ in range(100):
        drawn[next_due(drawn, held, count, key)] += count
        ends = [(drawn[i] - count) / held[i] for i in range(len(held))]
        begins = [(drawn[i] + count) / held[i] for i in range(len(held))]
        assert max(ends) <= min(begins) + 1e-12
