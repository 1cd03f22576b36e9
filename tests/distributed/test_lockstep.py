"""Ranks that compute together on devices of different kinds are refused with both kinds and who has which."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unirl.config.errors import UnsupportedEnvironmentError
from unirl.distributed.group.lockstep import check_same_kind
from unirl.distributed.weight_sync.base import Numerics, ParamMapping, WeightLayout
from unirl.distributed.weight_sync.sync import _common
from unirl.testing.second_device import second_devices
from unirl.types.device import CPU, DeviceKind, accelerator, device_kind

H100 = DeviceKind(name="NVIDIA H100", memory_gib=79.6, capability=(9, 0), driver="580.65", torch="2.13.0")
A100 = DeviceKind(name="NVIDIA A100", memory_gib=79.3, capability=(8, 0), driver="580.65", torch="2.13.0")
PLACES = ("device 0 of a", "device 1 of a", "device 2 of b", "device 3 of b")


def check(*kinds: DeviceKind, allow_mixed: bool = False) -> None:
    check_same_kind("devices 0-3", dict(zip(PLACES, kinds, strict=True)), allow_mixed)


def test_two_kinds_are_refused_with_the_places_of_each_and_the_ways_out() -> None:
    with pytest.raises(UnsupportedEnvironmentError) as refused:
        check(H100, H100, A100, A100)
    message = str(refused.value)
    assert "NVIDIA H100, 79.6 GiB, compute capability 9.0, driver 580.65: device 0 of a, device 1 of a" in message
    assert "NVIDIA A100, 79.3 GiB, compute capability 8.0, driver 580.65: device 2 of b, device 3 of b" in message
    assert "placement=" in message and "allow_mixed_devices=true" in message and refused.value.code == 3002


@pytest.mark.parametrize(
    "change", [{"name": "NVIDIA H100 PCIe"}, {"memory_gib": 93.1}, {"capability": (9, 1)}, {"driver": "550.54"}]
)
def test_each_difference_alone_is_refused_unless_the_recipe_allows_it(change) -> None:
    other = replace(H100, **change)
    with pytest.raises(UnsupportedEnvironmentError, match="different devices"):
        check(H100, other, H100, H100)
    check(H100, other, H100, H100, allow_mixed=True)


def test_devices_of_one_kind_may_differ_by_some_pages_of_memory() -> None:
    check(H100, replace(H100, memory_gib=79.55), H100, H100)


def test_different_versions_of_torch_are_refused_also_where_devices_may_differ() -> None:
    with pytest.raises(UnsupportedEnvironmentError, match=r"torch 2.13.0: device 0 of a.*torch 2.12.0: device 3 of b"):
        check(H100, H100, H100, replace(H100, torch="2.12.0"), allow_mixed=True)


def test_the_kind_of_a_device_is_what_torch_says_of_it() -> None:
    assert device_kind(CPU) == DeviceKind(name="cpu", torch=torch.__version__)
    with second_devices() as devices:
        devices.memory = 24 * 2**30
        kind = device_kind(accelerator())
    assert (kind.name, kind.memory_gib, kind.capability) == ("emulated", 24.0, None)
    assert str(kind) == "emulated, 24.0 GiB"


def test_equal_bits_are_not_expected_of_an_engine_with_one_rank_unlike_the_trainer() -> None:
    same, other = (Numerics(device, 0, torch.float32, {}) for device in ("NVIDIA H100", "NVIDIA A100"))
    layout = WeightLayout("full", {}, None, same, has_engine_in_process=False)
    assert _common([ParamMapping({}, same), ParamMapping({}, other)], layout).numerics == other
    assert _common([ParamMapping({}, same), ParamMapping({}, same)], layout).numerics == same
