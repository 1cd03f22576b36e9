"""Draws are a pure function of (seed, number of the draw)."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.errors import CheckpointError
from unirl.data.data_source import DefaultDataSource, MultimodalRLDataSource
from unirl.data.datasets import Prompt
from unirl.types.protocols import DataSource, Stateful


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.txt").write_text("\n".join(f"prompt {i}" for i in range(7)))
    (folder / "test.txt").write_text("\n".join(f"held out {i}" for i in range(5)))
    return folder


def source(files, **options) -> MultimodalRLDataSource:
    return MultimodalRLDataSource(data_path=str(files / "train.txt"), **options)


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_draws_do_not_depend_on_how_they_are_cut_into_batches(files, sizes, seed):
    cut, whole = source(files, seed=seed), source(files, seed=seed)
    drawn = [prompt for size in sizes for prompt in cut.take(size)]
    assert drawn == whole.prompts_at(0, sum(sizes))
    assert whole.cursors == {None: 0} and cut.cursors == {None: sum(sizes)}


def test_every_epoch_holds_every_prompt_once_in_another_order(files):
    data = source(files)
    epochs = [[prompt.prompt_id for prompt in data.prompts_at(7 * epoch, 7)] for epoch in range(20)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 15


def test_shuffle_is_uniform_over_positions(files):
    data = source(files)
    first = Counter(data.prompts_at(7 * epoch, 1)[0].prompt_id for epoch in range(1400))
    chi_square = sum((count - 200) ** 2 / 200 for count in first.values())
    assert len(first) == 7
    assert chi_square < 22.5  # 99.9 % quantile at 6 degrees of freedom


def test_batch_over_an_epoch_boundary_has_distinct_group_ids(files):
    batch = source(files).prompts_at(5, 14)
    assert {prompt.epoch for prompt in batch} == {0, 1, 2}
    assert len({prompt.group_id for prompt in batch}) == 14
    assert batch[0].group_id == f"{batch[0].prompt_id}@0"


def test_order_depends_on_the_seed_and_on_nothing_global(files):
    assert source(files, seed=1).prompts_at(0, 7) != source(files, seed=2).prompts_at(0, 7)
    assert source(files, seed=1).prompts_at(0, 7) == source(files, seed=1).prompts_at(0, 7)


def test_order_is_the_same_on_every_machine_and_version(files):
    drawn = [prompt.prompt_id for prompt in source(files, seed=42).prompts_at(7, 7)]
    assert drawn == sorted(drawn, key=lambda name: blake2b(f"42::order1:{name}".encode(), digest_size=16).hexdigest())


def test_unshuffled_source_follows_the_file(files):
    assert [prompt.text for prompt in source(files, shuffle=False).prompts_at(6, 2)] == ["prompt 6", "prompt 0"]


def test_evaluation_prompts_are_held_out_unshuffled_and_capped(files):
    held_out = source(files, eval_data_path=str(files / "test.txt"))
    assert [prompt.text for prompt in held_out.eval_prompts(2)] == ["held out 0", "held out 1"]
    assert len(held_out.eval_prompts()) == 5
    assert [prompt.text for prompt in source(files).eval_prompts(2)] == ["prompt 0", "prompt 1"]


def test_restored_source_continues_where_the_saved_one_stopped(files):
    saved, restored = source(files), source(files)
    saved.take(11)
    restored.load_state_dict(saved.state_dict())
    assert restored.take(9) == saved.take(9)


def test_state_of_other_data_or_another_seed_is_refused(files, tmp_path):
    state = source(files).state_dict()
    (tmp_path / "train.txt").write_text("\n".join(f"prompt {i}" for i in range(8)))
    for other in (source(tmp_path), source(files, seed=1), source(files, shuffle=False)):
        with pytest.raises(CheckpointError, match="the data changed since the checkpoint") as caught:
            other.load_state_dict(state)
        assert caught.value.code == 7002


def test_built_in_source_needs_no_file_and_keeps_the_contracts(files):
    for data in (DefaultDataSource(), source(files)):
        assert isinstance(data, Stateful)
        checked: DataSource[Prompt] = data
        assert len(checked.prompts_at(0, 3)) == len(checked.eval_prompts(3)) == 3


def test_impossible_draws_are_refused(files):
    for cursor, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="cursor must be >= 0 and count >= 1"):
            source(files).prompts_at(cursor, count)
