"""Adapters compute in the dtype of the base: few launches, and gradients as precise as under autocast."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.family_cases import CASES, FamilyCase
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.norms import fuse_norms
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.loading.lora import AdapterCopies, adapted_layers, choose_targets, inject_lora, masters
from unirl.testing import family
from unirl.types.facts import LoraSpec

TEXTS = ("a red circle", "x")


class Launches(TorchDispatchMode):
    """Counts the operations that compute or copy. Views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.counts[func.overloadpacket.__name__] += not is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


def adapted(case: FamilyCase, dtype: str, *, copies: bool = True) -> DiffusionPipeline:
    """A toy with adapters that are not zero."""
    bundle_class, pipeline_class = case.classes()
    pipeline: DiffusionPipeline = pipeline_class(bundle_class(path=case.path, dtype=dtype))
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 6.0, choose_targets(network, "model", pipeline.facts.lora_targets)), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(network):
            b = masters(layer)[1]
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    if copies:
        AdapterCopies.attach(network)
    return pipeline


def velocity(pipeline: DiffusionPipeline, case: FamilyCase) -> Tensor:
    params = family.euler(case.sizes[0], case.scales[-1], case.max_sequence_length)
    image = ConditionImages.of(torch.full((1, 3, params.height, params.width), 0.5))
    images = [image] * len(TEXTS) if pipeline.facts.condition_images[0] else None
    conditions = pipeline.encode(TEXTS, params, images)
    shape = (len(TEXTS), *pipeline.facts.latent_shape(params))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    guidance = pipeline.facts.guidance_of(params)
    return pipeline.stage.velocity(x, torch.tensor([0.4, 0.8]), conditions, guidance)


def gradients(pipeline: DiffusionPipeline, case: FamilyCase) -> dict[str, Tensor]:
    """The gradients of all adapters, float64, with the base computed in the dtype of the pipeline."""
    network = pipeline.bundle.trainable()
    network.zero_grad()
    velocity(pipeline, case).square().sum().backward()
    assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
    return {name: p.grad.double() for name, p in network.named_parameters() if p.grad is not None}


def error(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of the exact ones."""
    gaps = [(ours[name] - gradient).square().sum() for name, gradient in exact.items()]
    return float(torch.stack(gaps).sum() / torch.stack([g.square().sum() for g in exact.values()]).sum()) ** 0.5


def as_float32(pipeline: DiffusionPipeline, case: FamilyCase) -> DiffusionPipeline:
    """A pipeline that computes in float32 on the rounded weights of a bf16 one."""
    exact = adapted(case, "fp32")
    exact.bundle.trainable().load_state_dict(pipeline.bundle.trainable().state_dict())
    return exact


FAST: Sequence[str] = ("sd3",)
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.name in FAST else pytest.mark.slow) for c in CASES],
)


@cases
def test_gradients_in_bf16_are_as_exact_as_under_autocast(case: FamilyCase) -> None:
    pipeline = adapted(case, "bf16")
    exact = gradients(as_float32(pipeline, case), case)
    ours = gradients(pipeline, case)
    pipeline.stage.needs_autocast = lambda: True
    under_autocast = gradients(pipeline, case)
    assert exact.keys() == ours.keys() == under_autocast.keys()
    assert 0 < error(ours, exact) < max(0.03, 1.5 * error(under_autocast, exact))


def test_copies_of_adapters_have_the_values_and_gradients_of_casts_in_every_layer() -> None:
    case = CASES[0]
    once, each = adapted(case, "bf16"), adapted(case, "bf16", copies=False)
    assert torch.equal(velocity(once, case), velocity(each, case))
    first, second = gradients(once, case), gradients(each, case)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_the_forward_is_that_of_peft_in_float32() -> None:
    case = CASES[0]
    pipeline = adapted(case, "fp32")
    ours = velocity(pipeline, case)
    for layer in adapted_layers(pipeline.bundle.trainable()):
        layer.__class__ = type(layer).__mro__[1]
    torch.testing.assert_close(ours, velocity(pipeline, case), rtol=1e-5, atol=1e-5)


def test_a_copied_module_runs_its_own_adapters() -> None:
    case = CASES[0]
    pipeline = adapted(case, "bf16")
    before = velocity(pipeline, case)
    other = copy.deepcopy(pipeline.bundle.trainable())
    with torch.no_grad():
        for layer in adapted_layers(other):
            masters(layer)[1].zero_()
    assert torch.equal(velocity(pipeline, case), before)
    assert not set(adapted_layers(other)) & set(adapted_layers(pipeline.bundle.trainable()))


def test_an_adapted_layer_of_a_block_costs_three_launches_and_no_cast() -> None:
    case = CASES[0]
    pipeline = adapted(case, "bf16")
    layers = adapted_layers(pipeline.bundle.trainable())
    block, counter = pipeline.bundle.trainable().get_submodule("transformer_blocks.0"), Launches()
    block.register_forward_pre_hook(lambda *_: counter.__enter__() and None)
    block.register_forward_hook(lambda *_: counter.__exit__(None, None, None))

    def launches() -> Counter[str]:
        counter.counts = Counter()
        with torch.no_grad():
            velocity(pipeline, case)
        return counter.counts

    ours = launches()
    for layer in layers:  # as peft and autocast run it
        layer.__class__ = type(layer).__mro__[1]
    pipeline.stage.needs_autocast = lambda: True
    before = launches()
    for layer in layers:
        layer.forward = layer.base_layer.forward
    pipeline.stage.needs_autocast = lambda: False
    base = launches()
    num_adapted = sum(layer in layers for layer in block.modules())
    assert ours["_to_copy"] == base["_to_copy"] < before["_to_copy"]
    assert ours.total() == base.total() + 3 * num_adapted
    assert before.total() > ours.total() + 3 * num_adapted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_have_the_values_of_diffusers(dtype: torch.dtype) -> None:
    from diffusers.models.normalization import RMSNorm

    norm, generator = RMSNorm(32, eps=1e-6), torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(32, generator=generator))
    norm.to(dtype)
    x = torch.randn(4, 3, 32, generator=generator).to(dtype)
    theirs = norm(x)
    fuse_norms(norm)
    assert torch.equal(norm(x), theirs) or dtype is torch.bfloat16
    torch.testing.assert_close(norm(x), theirs, rtol=2**-7, atol=1e-6)
    wide = x.float()
    assert torch.equal(norm(wide), RMSNorm.forward(norm, wide))
