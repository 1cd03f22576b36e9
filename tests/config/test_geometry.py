"""Geometry: what divides what, said with its equation and with values that really are legal."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.errors import ConfigError
from unirl.config.load import load
from unirl.distributed.group.dispatch import rank_rows
from unirl.plan.geometry import KNOBS, Geometry, check_geometry, geometry_table, nearest_legal

COUNT = st.integers(1, 24)


def geometry(prompts=48, samples=16, devices=8, updates=2, micro=8, together=1, pairs=0):
    return Geometry(
        num_prompts=prompts,
        samples_per_prompt=samples,
        num_devices=devices,
        num_updates=updates,
        micro_batch_size=micro,
        rows_together=together,
        num_pairs=pairs,
    )


GEOMETRIES = st.builds(geometry, COUNT, COUNT, COUNT, COUNT, COUNT, st.integers(1, 4)) | st.builds(
    geometry, COUNT, COUNT, COUNT, COUNT, COUNT, st.just(2), st.integers(1, 5)
)


@given(GEOMETRIES)
def test_legal_means_that_cutting_the_rows_leaves_no_remainder(case):
    paired = 2 * min(case.num_pairs, case.samples_per_prompt // 2)
    rows = list(range(case.num_prompts * (paired if case.num_pairs else case.samples_per_prompt)))
    size = len(rows) // case.num_updates
    cut = [rows[u * size : (u + 1) * size] for u in range(case.num_updates)]
    shares = [update[d :: case.num_devices] for update in cut for d in range(case.num_devices)]
    even = sum(map(len, cut)) == len(rows) and len({len(share) for share in shares}) == 1
    if case.rows_together == 1:
        assert case.is_legal == even
    if case.num_pairs:
        whole = case.micro_batch_size % 2 == 0 and all(len(share) % 2 == 0 for share in shares)
        assert case.is_legal == (even and whole and case.samples_per_prompt >= 2)
    if case.is_legal:
        assert case.num_micros == -(-len(shares[0]) // case.micro_batch_size)


@given(GEOMETRIES)
def test_every_number_of_micro_batches_has_one_size_and_no_smaller_size_has_as_few(case):
    """The sizes among which `stack.micro_batch_size=auto` chooses."""
    if not case.is_legal:
        return
    rows, together = case.rows_per_device, case.rows_together
    counts = {size: -(-rows // size) for size in case.micro_sizes}
    assert case.micro_sizes == sorted(counts)
    assert (case.micro_sizes[0], case.micro_sizes[-1]) == (together, rows)
    for size, count in counts.items():
        assert size % together == 0
        assert size == together or -(-rows // (size - together)) > count


@given(GEOMETRIES)
def test_every_suggested_value_is_legal_and_none_is_nearer(case):
    for field in KNOBS:
        now = vars(case)[field]
        for value in nearest_legal(case, field):
            assert dataclasses.replace(case, **{field: value}).is_legal
            between = range(min(now, value) + 1, max(now, value))
            assert not any(dataclasses.replace(case, **{field: other}).is_legal for other in between)


@given(GEOMETRIES)
def test_an_illegal_geometry_always_offers_a_way_out_that_works(case):
    if case.is_legal:
        check_geometry(case)
        return
    with pytest.raises(ConfigError) as caught:
        check_geometry(case)
    assert caught.value.code == 2010
    advice = str(caught.value).partition(". Use ")[2]
    fields = {key: field for field, key in KNOBS.items()}
    offered = [(fields[key], values.split("|")) for key, values in re.findall(r"([\w.]+)=([\d|]+)", advice)]
    assert offered
    if advice.endswith(" together"):
        check_geometry(dataclasses.replace(case, **{field: int(value) for field, (value,) in offered}))
        return
    for field, values in offered:
        for value in values:
            check_geometry(dataclasses.replace(case, **{field: int(value)}))


@given(GEOMETRIES)
def test_no_rank_and_no_micro_batch_splits_rows_that_belong_together(case):
    if not case.is_legal:
        return
    for rows in rank_rows(case.num_trained, case.num_updates, case.num_devices):
        for start in range(0, len(rows), case.rows_per_device):  # one update's share
            share = rows[start : start + case.rows_per_device]
            for micro in range(0, len(share), case.micro_batch_size):
                held = share[micro : micro + case.micro_batch_size]
                bundles = [held[i : i + case.rows_together] for i in range(0, len(held), case.rows_together)]
                assert all(
                    [row // case.rows_together for row in bundle]
                    == [bundle[0] // case.rows_together] * case.rows_together
                    for bundle in bundles
                )


def test_the_error_shows_the_equation():
    with pytest.raises(ConfigError) as caught:
        check_geometry(geometry(updates=5))
    assert str(caught.value).startswith(
        "stack.num_updates_per_batch=5 does not divide the 96 samples each worker holds "
        "(batch_size 48 x samples_per_prompt 16 / num_devices 8). Use stack.num_updates_per_batch=4|6 or "
    )


@pytest.mark.parametrize("key", ["updates", "devices", "prompts", "together"])
def test_absurd_counts_are_answered_at_once(key):
    with pytest.raises(ConfigError):
        check_geometry(geometry(**({"prompts": 7, "updates": 10**9} | {key: 10**12 + 1})))


def test_where_the_devices_are_named_the_error_speaks_of_these():
    with pytest.raises(ConfigError) as caught:
        check_geometry(dataclasses.replace(geometry(devices=5), placed=True))
    assert "5 (placement.train), does not divide the 768 samples" in str(caught.value)
    assert "4|6 devices in placement.train" in str(caught.value)
    assert "num_devices=" not in str(caught.value)


def test_the_table_agrees_with_the_published_setting():
    """Flow-GRPO on SD3 draws 48 x 16 = 768 samples a step and updates twice on 384."""
    table = geometry_table(load("diffusion/sd3_dancegrpo", ["stack.micro_batch_size=8"]).config)
    assert (
        "48 prompts x 16 samples = 768 samples per step; 2 updates of 384 = 1 device x 48 micro-batches of 8" in table
    )
    assert "10 denoising steps at 512 x 512; 10000 steps, 20000 updates in all" in table


def test_the_table_says_what_a_loss_on_pairs_trains():
    dpo = "algorithm._target_=unirl.algorithms.diffusion_dpo.DiffusionDPO"
    table = geometry_table(load("diffusion/sd3_dancegrpo", [dpo, "algorithm.pairs_per_group=3"]).config)
    assert "= 768 samples per step, 288 of them trained, in pairs; 2 updates of 144 = 1 device x 144 rows, cut" in table


def test_the_table_says_when_the_last_micro_batch_is_smaller():
    table = geometry_table(load("diffusion/sd3_dancegrpo", ["stack.micro_batch_size=100"]).config)
    assert "4 micro-batches of 100 (the last of 84)" in table


def test_the_table_and_a_refusal_name_the_tracks_that_a_track_continues():
    recipe = load("unified_model/hi3_think")
    tables = [geometry_table(policy) for policy in recipe.policies.values()]
    assert "8 prompts x 2 samples = 16 samples per step" in tables[0]
    assert "8 prompts x 2 think x 2 samples = 32 samples per step" in tables[1]
    assert "8 prompts x 2 think x 2 recaption x 2 samples = 64 samples per step" in tables[2]
    image = load("unified_model/hi3_think", ["sampling.image.samples_per_prompt=1", "stack.num_updates_per_batch=3"])
    with pytest.raises(ConfigError) as caught:
        geometry_table(image.policies["image"])
    assert "(batch_size 8 x 2 think x 2 recaption x samples_per_prompt 1 " in str(caught.value)
