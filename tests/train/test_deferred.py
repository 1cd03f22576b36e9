"""A module that was built without storage is filled shard by shard, to the bits of one that was loaded whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.toy import ToyBundle
from tests.train.ranks import run_ranks
from unirl.config.errors import DataError
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import EmaFullConfig, FSDPConfig, LoraConfig


def bundle_of(model: str, meta_init: bool) -> DiffusionBundle:
    if model == "toy":
        return ToyBundle(width=18, blocks=3, meta_init=meta_init)
    from unirl.models.sd3.family import SD3Bundle

    return SD3Bundle(components=(), path=model.removeprefix("sd3:"), dtype="bf16", meta_init=meta_init)


def start(model: str, lora: bool, meta_init: bool) -> dict[str, Any]:
    """Every tensor of a fresh backend."""
    bundle = bundle_of(model, meta_init)
    backend = FSDPBackend(
        bundle,
        seed=7,
        optimizer_cfg=OptimizerConfig(learning_rate=1e-2),
        lora_cfg=LoraConfig(rank=4) if lora else None,
        ema_cfg=EmaFullConfig(),
    )
    tensors = {name: backend.sharding.whole(p).float() for name, p in backend.sharding.parameters.items()}
    tensors |= {f"buffer {name}": buffer.float() for name, buffer in backend.module.named_buffers()}
    return tensors | {f"ema {name}": tensor for name, tensor in backend.gather("ema").items()}


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model", ["toy", "sd3:toy", "sd3:quickstart"])
def test_a_module_without_storage_starts_as_one_that_was_loaded(model: str, lora: bool) -> None:
    assert_equal(start(model, lora, meta_init=True), start(model, lora, meta_init=False))


@pytest.mark.parametrize("model", ["toy", pytest.param("sd3:quickstart", marks=pytest.mark.slow)])
def test_two_ranks_fill_their_shards_to_the_same_whole(model: str) -> None:
    first, second = run_ranks(2, start, model, True, True)
    assert_equal(first, second)
    whole = {name: tensor.detach().numpy() for name, tensor in start(model, True, meta_init=False).items()}
    assert_equal(first, whole)


class Incomplete(ToyBundle):
    def saved(self) -> Any:
        saved = super().saved()
        del saved.tensors["blocks.1.proj.weight"]
        saved.tensors["output_layer.bias"] = torch.zeros(3)
        return saved


def test_weights_that_a_checkpoint_lacks_are_named() -> None:
    with pytest.raises(DataError, match=r"1 weights of ToyDenoiser are missing.*blocks\.1\.proj\.weight"):
        FSDPBackend(
            Incomplete(blocks=2, meta_init=True),
            optimizer_cfg=OptimizerConfig(learning_rate=1.0),
            fsdp_cfg=FSDPConfig(),
            lora_cfg=LoraConfig(rank=2),
        )


def test_a_bundle_of_the_trained_module_alone_trains_and_refuses_the_rest() -> None:
    from unirl.models.sd3.family import SD3Bundle

    bundle = SD3Bundle(components=(), path="toy", dtype="fp32")
    assert set(bundle.modules) == {"transformer"}
    assert bundle.stage().facts is bundle.facts
    with pytest.raises(ValueError, match="without text_encoder, text_encoder_2, text_encoder_3"):
        bundle.text_encoder()
    with pytest.raises(ValueError, match="without vae"):
        bundle.decoder()
    with pytest.raises(ValueError, match="no component 'text'"):
        SD3Bundle(components=("text",), path="toy", dtype="fp32")
