"""Adapters: nothing at the start, a pure function of the seed, float32 whatever the base."""

import pytest
import torch

from tests.toy import ToyBundle
from unirl.config.errors import ConfigError
from unirl.models.loading.lora import adapter_names, inconsistent_adapters, initial_adapter_weight, inject_lora
from unirl.testing.toy import ToyDenoiser
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.types.facts import LoraSpec

ADAM = OptimizerConfig(learning_rate=1e-2)
X = (torch.ones(2, 3, 4, 4), torch.ones(2), torch.ones(2, 4))
NAMES = ["blocks.0.proj.lora_A.default.weight", "blocks.0.proj.lora_B.default.weight"]


def lora_backend(seed: int = 0, config: LoraConfig | None = None, **options: object) -> FSDPBackend:
    return FSDPBackend(ToyBundle(**options), seed, optimizer_cfg=ADAM, lora_cfg=config or LoraConfig(rank=4))  # type: ignore[arg-type]


def test_a_fresh_adapter_gives_the_base_output_bit_for_bit() -> None:
    assert torch.equal(ToyBundle().trainable()(*X), lora_backend().module(*X))


def test_only_adapters_are_trained_and_the_update_is_alpha_over_rank_b_a() -> None:
    backend = lora_backend(config=LoraConfig(rank=4, alpha=6.0))
    assert list(backend.trainable) == NAMES
    a, b = (backend.trainable[name] for name in NAMES)
    with torch.no_grad():
        b.normal_(generator=torch.Generator().manual_seed(0))
    folded = ToyBundle()
    with torch.no_grad():
        folded.denoiser().blocks[0].proj.weight.add_(6.0 / 4 * b @ a)
    assert torch.allclose(backend.module(*X), folded.trainable()(*X), atol=1e-5)


def test_initial_adapters_depend_on_the_seed_and_nothing_else() -> None:
    torch.manual_seed(1)
    first = lora_backend(3).gather()
    torch.manual_seed(2)
    second = lora_backend(3, blocks=2).gather()  # other adapters do not move this one
    assert all(torch.equal(first[name], second[name]) for name in NAMES)
    assert not torch.equal(first[NAMES[0]], lora_backend(4).gather()[NAMES[0]])
    blocks = [second[f"blocks.{i}.proj.lora_A.default.weight"] for i in (0, 1)]
    assert not torch.equal(*blocks)


def test_the_global_generator_is_not_touched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    lora_backend()
    assert torch.equal(torch.rand(3), expected)


def test_a_is_gaussian_with_std_one_over_rank_and_b_is_zero() -> None:
    backend = lora_backend(config=LoraConfig(rank=64), width=256)
    a, b = (backend.trainable[name].detach() for name in NAMES)
    assert float(a.std()) == pytest.approx(1 / 64, rel=0.03) and abs(float(a.mean())) < 1e-3
    assert not b.any()


def test_adapters_are_float32_masters_on_a_bf16_base() -> None:
    config = FSDPConfig(param_dtype="bf16")
    backend = FSDPBackend(ToyBundle(), optimizer_cfg=ADAM, lora_cfg=LoraConfig(rank=2), fsdp_cfg=config)
    dtypes = {p.requires_grad: p.dtype for p in backend.module.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        loss = backend.module(*X).float().square().mean()
    backend.backward(loss, last=True)
    assert not backend.step(1.0, loss).skipped
    assert backend.trainable[NAMES[1]].dtype == torch.float32


def test_full_training_of_a_bf16_bundle_keeps_float32_masters() -> None:
    bundle = ToyBundle()
    bundle.trainable().to(torch.bfloat16)
    backend = FSDPBackend(bundle, optimizer_cfg=ADAM)
    assert {p.dtype for p in backend.trainable.values()} == {torch.float32}


def test_targets_by_suffix_replace_the_models_own() -> None:
    backend = lora_backend(config=LoraConfig(rank=2, target_modules=("input_layer", "output_layer")))
    assert {name.split(".")[0] for name in backend.trainable} == {"input_layer", "output_layer"}


def test_a_target_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'output_layerr' is the end of no.*Did you mean 'output_layer'"):
        lora_backend(config=LoraConfig(rank=2, target_modules=("input_layer", "output_layerr")))


def test_a_second_adapter_is_refused() -> None:
    backend = lora_backend()
    with pytest.raises(ConfigError, match=r"already has adapters \(blocks.0.proj.lora_A.default.weight\)"):
        inject_lora(backend.module, LoraSpec(4, 8.0, ("input_layer",)), seed=0)


def test_adapters_of_a_module_without_storage_have_none_either() -> None:
    with torch.device("meta"):
        module = ToyDenoiser()
    inject_lora(module, LoraSpec(4, 8.0, ("proj",)), seed=0)
    assert adapter_names(module) == NAMES
    assert all(module.get_parameter(name).is_meta for name in NAMES)


def test_the_start_of_an_adapter_needs_no_module() -> None:
    live = lora_backend(3).gather()
    for name in NAMES:
        assert torch.equal(initial_adapter_weight(name, tuple(live[name].shape), rank=4, seed=3), live[name])


def test_adapters_that_would_not_act_as_said_are_told() -> None:
    module = lora_backend().module
    spec = LoraSpec(4, 64.0, ("proj",))
    assert inconsistent_adapters(module, spec) == []
    assert inconsistent_adapters(module, LoraSpec(4, 32.0, ("proj",))) == ["blocks.0.proj"]
    module.blocks[0].proj.enable_adapters(False)  # type: ignore[index, union-attr]
    assert inconsistent_adapters(module, spec) == ["blocks.0.proj"]


@pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0.0}])
def test_settings_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LoraConfig(**options)  # type: ignore[arg-type]
