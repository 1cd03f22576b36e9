"""Noise is a pure function of its keys: no batch, order, chunk, thread or process changes a byte."""

import hashlib
import subprocess
import sys
import threading
import time
from itertools import islice

import pytest
import torch

from unirl.sde.noise import NoiseSource, key_seed, noise_ahead

SOURCE = NoiseSource(seed=42, purpose="r", step=3)
IDS = [f"cat@0:{j}" for j in range(6)]
SHAPE = (4, 8, 8)


def by_hand(key, shape, seed=42):
    digest = hashlib.blake2b(f"{seed}::{key}".encode(), digest_size=8).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") % 2**63))


def test_a_row_is_torch_randn_seeded_by_the_hash_of_its_key():
    noise = SOURCE.normal(IDS, "s2", SHAPE)
    assert noise.dtype == torch.float32 and noise.device.type == "cpu" and noise.shape == (6, *SHAPE)
    for id, row in zip(IDS, noise, strict=True):
        assert torch.equal(row, by_hand(f"r3:{id}:s2", SHAPE))


def test_a_seed_fits_into_63_bits():
    assert all(0 <= key_seed(seed, f"key {seed}") < 2**63 for seed in range(200))
    assert len({key_seed(seed, "key") for seed in range(200)}) == 200


def test_keys_name_purpose_step_id_and_what():
    assert SOURCE.key("cat@0:1", "x") == "r3:cat@0:1:x"
    assert NoiseSource(42, "eval", 3).key("cat@0:1", "s0") == "eval:cat@0:1:s0"


@pytest.mark.parametrize("draw", [NoiseSource.normal, NoiseSource.uniform])
def test_order_and_chunks_change_no_byte(draw):
    whole = draw(SOURCE, IDS, "x", SHAPE)
    assert torch.equal(draw(SOURCE, IDS[::-1], "x", SHAPE).flip(0), whole)
    for size in (1, 2, 4):
        parts = [draw(SOURCE, IDS[i : i + size], "x", SHAPE) for i in range(0, 6, size)]
        assert torch.equal(torch.cat(parts), whole)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    state, noise = torch.get_rng_state(), SOURCE.normal(IDS, "x", SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(SOURCE.normal(IDS, "x", SHAPE), noise)


def test_another_process_draws_the_same_bytes():
    script = (
        "from unirl.sde.noise import NoiseSource\n"
        "print(NoiseSource(42, 'r', 3).normal(['cat@0:1'], 'x', (16, 5)).numpy().tobytes().hex())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert result.stdout.strip() == SOURCE.normal(["cat@0:1"], "x", (16, 5)).numpy().tobytes().hex()


@pytest.mark.parametrize("other", [NoiseSource(43, "r", 3), NoiseSource(42, "r", 4), NoiseSource(42, "eval", 3)])
def test_seed_step_and_purpose_change_the_noise(other):
    assert not torch.equal(other.normal(IDS, "x", SHAPE), SOURCE.normal(IDS, "x", SHAPE))


def test_evaluation_draws_the_same_noise_at_every_step():
    first, later = NoiseSource(42, "eval", 0), NoiseSource(42, "eval", 99)
    assert torch.equal(first.normal(IDS, "x", SHAPE), later.normal(IDS, "x", SHAPE))


def test_one_id_for_all_siblings_gives_them_one_noise():
    noise = SOURCE.normal(["cat@0"] * 3, "x", SHAPE)
    assert torch.equal(noise[0], noise[1]) and torch.equal(noise[0], noise[2])


def test_draws_are_standard_normal_and_uniform_and_uncorrelated():
    normal = SOURCE.normal([str(i) for i in range(200)], "x", (1000,)).double()
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert (normal @ normal.T / 1000 - torch.eye(200)).abs().max() < 0.25
    uniform = SOURCE.uniform([str(i) for i in range(200)], "tok", (1000,)).double()
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005 and abs(uniform.var() - 1 / 12) < 0.002


def test_a_scalar_shape_and_no_ids_are_fine():
    assert SOURCE.uniform(IDS, "t0", ()).shape == (6,)
    assert SOURCE.normal([], "x", SHAPE).shape == (0, *SHAPE)


def test_an_unknown_purpose_is_refused():
    with pytest.raises(ValueError, match=r"NoiseSource\.purpose='train' must be one of: r, eval"):
        NoiseSource(42, "train", 0)


# --- drawn ahead ---


def ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("noise-ahead")]


def test_noise_drawn_ahead_has_the_bytes_of_noise_drawn_now():
    draws = ["s0", "s2", "s5"]
    with noise_ahead(SOURCE, IDS, draws, SHAPE) as ahead:
        result = list(islice(ahead, 10))
    assert len(result) == 3
    for what, noise in zip(draws, result, strict=True):
        assert torch.equal(noise, SOURCE.normal(IDS, what, SHAPE))


class Recording(NoiseSource):
    """Notes what is drawn, and fails where it is told to."""

    drawn: list[str]

    def normal(self, ids, what, shape):
        self.drawn.append(what)
        if what == "bad":
            raise RuntimeError("no noise today")
        return NoiseSource.normal(self, ids, what, shape)


@pytest.fixture
def recording():
    Recording.drawn = []
    return Recording(42, "r", 3)


def settled(drawn):
    time.sleep(0.05)
    return list(drawn)


def test_at_most_one_draw_is_ahead(recording):
    with noise_ahead(recording, IDS, ["s0", "s1", "s2"], SHAPE) as ahead:
        assert settled(recording.drawn) == ["s0"]
        next(ahead)
        assert settled(recording.drawn) == ["s0", "s1"]


def test_an_error_in_the_thread_reaches_the_one_who_asked(recording):
    with noise_ahead(recording, IDS, ["s0", "bad", "s2"], SHAPE) as ahead:
        assert next(ahead).shape == (6, *SHAPE)
        with pytest.raises(RuntimeError, match="no noise today"):
            next(ahead)
    assert ahead_threads() == []


def test_the_thread_ends_with_the_block_even_if_draws_are_left():
    with noise_ahead(SOURCE, IDS, [f"s{i}" for i in range(100)], SHAPE) as ahead:
        next(ahead)
        assert len(ahead_threads()) == 1
    assert ahead_threads() == []
    assert list(ahead) == []


def test_the_thread_ends_when_the_block_fails():
    with pytest.raises(KeyError), noise_ahead(SOURCE, IDS, ["s0", "s1"], SHAPE):
        raise KeyError
    assert ahead_threads() == []


def test_nothing_to_draw_is_fine():
    with noise_ahead(SOURCE, IDS, [], SHAPE) as ahead:
        assert list(ahead) == []
