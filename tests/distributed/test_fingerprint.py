"""Fingerprints are equal if and only if shape, dtype and bits are; buckets give back what was put in."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from unirl.config.errors import SyncError
from unirl.distributed.weight_sync import fingerprint as module
from unirl.distributed.weight_sync.base import Numerics, TensorInfo, TransferConfig, WeightLayout
from unirl.distributed.weight_sync.buckets import Bucket, fill, plan_buckets
from unirl.distributed.weight_sync.fingerprint import digest, fingerprint, fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
MASK = 2**64 - 1


def written_out(tensor: Tensor) -> int:
    """The definition, in Python's integers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raw += b"\0" * (-len(raw) % 8)
    total = 0
    for i in range(len(raw) // 8):
        z = (int.from_bytes(raw[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ z >> 29) * 0xBF58476D1CE4E5B9) & MASK
        total += (z ^ z >> 32) * 0x94D049BB133111EB
    return total & MASK


def sample(generator: random.Random) -> Tensor:
    shape = [generator.randint(1, 9) for _ in range(generator.randint(0, 3))]
    values = torch.tensor([generator.randint(-100, 100) for _ in range(torch.Size(shape).numel())])
    return values.view(shape).to(generator.choice(DTYPES))


@pytest.mark.parametrize("chunk_words", [1, 7, 1 << 15])
def test_it_is_the_sum_of_mixed_words_whatever_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk_words: int) -> None:
    monkeypatch.setattr(module, "CPU_WORDS", chunk_words)
    generator = random.Random(chunk_words)
    for _ in range(40):
        tensor = sample(generator)
        assert int(digest(tensor)) & MASK == written_out(tensor)


def test_equal_content_has_equal_fingerprints_however_it_is_laid_out() -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    strided = tensor.T.contiguous().T
    unaligned = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(6, 5)
    assert fingerprint(tensor) == fingerprint(strided) == fingerprint(unaligned) == fingerprint(tensor.clone())


def mutations(tensor: Tensor, generator: random.Random) -> list[Tensor]:
    """Copies that differ from `tensor` in bits, order, shape or dtype."""
    raw = tensor.reshape(-1).view(torch.uint8)
    changed = raw.clone()
    changed[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
    cut = raw.clone()
    cut[len(raw) // 2 :] = 0
    permuted = tensor.flatten()[torch.tensor(generator.sample(range(tensor.numel()), tensor.numel()))]
    shifted = tensor.flatten().roll(1)
    others = [changed.view(tensor.dtype), cut.view(tensor.dtype), permuted, shifted]
    same_shape = [other.view(tensor.shape) for other in others]
    return [*same_shape, tensor.mT.contiguous(), tensor.flatten(), tensor.view(torch.uint8), tensor[:-1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_are_equal_if_and_only_if_the_tensors_are(dtype: torch.dtype) -> None:
    generator = random.Random(0)
    for side in (2, 3, 8, 16):
        for _ in range(20):
            values = [generator.randint(0, 3) for _ in range(side * side)]
            tensor = torch.tensor(values).view(side, side).to(dtype)
            for other in mutations(tensor, generator):
                bits = tensor.dtype == other.dtype and tensor.shape == other.shape
                bits = bits and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
                assert (fingerprint(tensor) == fingerprint(other)) == bits


def test_a_square_matrix_is_told_from_its_transpose_also_when_differences_have_many_zero_bits() -> None:
    """bf16 values a power of two apart: a sum weighted by positions would cancel here."""
    tensor = torch.zeros(512, 512, dtype=torch.bfloat16)
    tensor[0, 384], tensor[384, 0] = 1.0, -1.0
    assert fingerprint(tensor) != fingerprint(tensor.T.contiguous())


def test_zero_tensors_and_empty_ones_are_told_apart_by_shape() -> None:
    prints = fingerprints((str(n), torch.zeros(n)) for n in range(4))
    assert len(set(prints.values())) == 4
    assert fingerprints([]) == {}


def test_the_source_may_change_once_its_fingerprint_is_asked_for() -> None:
    tensor = torch.ones(5)
    pending = module.PendingFingerprints()
    pending.add("a", tensor)
    tensor.zero_()
    assert pending.result()["a"] == fingerprint(torch.ones(5))


def layout_of(tensors: dict[str, Tensor]) -> WeightLayout:
    numerics = Numerics("cpu", 1, torch.float32, ())
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return WeightLayout("full", infos, None, numerics, has_engine_in_process=False)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 10_000])
def test_buckets_give_back_what_was_put_in_and_stay_within_their_size(bucket_bytes: int) -> None:
    generator = random.Random(bucket_bytes)
    tensors = {f"t{i}": sample(generator) for i in range(30)}
    config = TransferConfig({name: tensor.dtype for name, tensor in tensors.items()}, None, bucket_bytes)
    plans = plan_buckets(layout_of(tensors), config)
    stream = iter(tensors.items())
    result: dict[str, Tensor] = {}
    for number, plan in enumerate(plans):
        assert len(plan.entries) == 1 or plan.entries[-1].offset + plan.entries[-1].num_bytes <= bucket_bytes
        bucket = Bucket(0, "live", number, plan.entries, fill(plan, stream, torch.device("cpu")))
        assert bucket.data.numel() == plan.num_bytes
        result |= {entry.name: bucket.values(entry) for entry in plan.entries}
    assert list(result) == list(tensors)
    assert all(
        torch.equal(result[name], tensor) and result[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_a_cut_buffer_names_the_first_tensor_that_is_not_whole() -> None:
    tensors = {"whole": torch.ones(4), "cut": torch.ones(8)}
    [plan] = plan_buckets(layout_of(tensors), TransferConfig(dict.fromkeys(tensors, torch.float32), None, 1000))
    data = fill(plan, iter(tensors.items()), torch.device("cpu"))
    bucket = Bucket(3, "live", 0, plan.entries, data[: len(data) - 1])
    assert torch.equal(bucket.values(plan.entries[0]), torch.ones(4))
    with pytest.raises(SyncError, match="version 3 was cut short: 'cut' ends at byte 48, and 47 bytes arrived"):
        bucket.values(plan.entries[1])
