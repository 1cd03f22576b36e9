"""The experts of a mixture compute what a loop over tokens computes, without a wait of the host for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from unirl.models.hunyuan_image3.network import MoE
from unirl.models.language.experts import GROUP_MULTIPLE, ExpertRows
from unirl.models.loading.lora import inject_lora
from unirl.testing.second_device import second_devices
from unirl.types.facts import LoraSpec
from unirl.types.fp8 import Fp8Linear

NUM_EXPERTS, TOP_K, WIDTH, OUTPUTS = 6, 2, 16, 24
CONFIG = {
    "hidden_size": WIDTH,
    "moe_intermediate_size": 8,
    "num_experts": NUM_EXPERTS,
    "num_shared_expert": 1,
    "moe_topk": TOP_K,
}
UNUSED = 4
"""The expert that no token of `routed` has."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def routed(num_tokens: int) -> Tensor:
    """[N, k] different experts of each token, never `UNUSED`."""
    used = [expert for expert in range(NUM_EXPERTS) if expert != UNUSED]
    orders = [torch.randperm(len(used), generator=seeded(token))[:TOP_K] for token in range(num_tokens)]
    return torch.tensor(used)[torch.stack(orders)]


def layers(bias: bool = False, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    made = [nn.Linear(WIDTH, OUTPUTS, bias=bias).to(dtype) for _ in range(NUM_EXPERTS)]
    with torch.no_grad():
        for seed, layer in enumerate(made):
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=seeded(seed)))
    return made


def outputs_of(made: list[nn.Linear], x: Tensor, experts: Tensor) -> Tensor:
    """[N, k, D'] by the grouped product."""
    rows = ExpertRows.of(experts, len(made))
    return (
        rows.linear(made, x.index_select(0, rows.token))
        .index_select(0, rows.place.flatten())
        .unflatten(0, experts.shape)
    )


def mixture(seed: int = 0) -> MoE:
    layer = MoE(CONFIG, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=seeded(seed)))
            seed += 1
    return layer


def by_token(layer: MoE, x: Tensor) -> Tensor:
    """The equations of the mixture in float64, one token after another. The weights of each token sum to 1."""

    def mlp(module: nn.Module, row: Tensor) -> Tensor:
        up, gate = linear(row, module.get_parameter("gate_and_up_proj.weight").double()).chunk(2)
        return linear(up * silu(gate), module.get_parameter("down_proj.weight").double())

    results = []
    for row in x.double():
        gates = linear(row, layer.gate.wg.weight.double()).softmax(0)
        weights, best = gates.topk(TOP_K)
        parts = [w * mlp(layer.experts[e], row) for w, e in zip(weights / weights.sum(), best.tolist(), strict=True)]
        results.append(mlp(layer.shared_mlp, row) + torch.stack(parts).sum(0))
    return torch.stack(results)


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 33])
def test_each_expert_has_its_tokens_and_a_positive_multiple_of_rows(num_tokens: int) -> None:
    experts = routed(num_tokens)
    rows = ExpertRows.of(experts, NUM_EXPERTS)
    assert sum(rows.sizes) == len(rows.token) == int(rows.ends[-1])
    assert all(size > 0 and size % GROUP_MULTIPLE == 0 for size in rows.sizes)
    starts = [0, *rows.ends.tolist()]
    assert len(set(rows.place.flatten().tolist())) == num_tokens * TOP_K
    for token in range(num_tokens):
        for expert, place in zip(experts[token].tolist(), rows.place[token].tolist(), strict=True):
            assert starts[expert] <= place < starts[expert + 1] and rows.token[place] == token


def test_the_number_of_rows_is_that_of_the_tokens_alone() -> None:
    """Also where all tokens have the same experts, and where every expert has one row more than a multiple."""
    for experts in (
        routed(27),
        torch.tensor([[0, 1]]).expand(27, 2),
        torch.arange(54).remainder(6).unflatten(0, (27, 2)),
    ):
        assert len(ExpertRows.of(experts, NUM_EXPERTS).token) == 56 + GROUP_MULTIPLE * NUM_EXPERTS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_each_token_by_itself(dtype: torch.dtype, bias: bool) -> None:
    made, experts = layers(bias, dtype), routed(13)
    x = torch.randn(13, WIDTH, generator=seeded(9)).to(dtype).requires_grad_()
    seen = torch.randn(13, TOP_K, OUTPUTS, generator=seeded(10)).to(dtype)
    parameters = [parameter for layer in made for parameter in layer.parameters()]
    outputs = outputs_of(made, x, experts)
    gradients = torch.autograd.grad(outputs, [x, *parameters], seen)

    wide = [parameter.detach().double().requires_grad_() for parameter in [x, *parameters]]
    by_layer = list(zip(*[iter(wide[1:])] * (1 + bias), strict=True))
    expected = torch.stack(
        [torch.stack([linear(wide[0][n], *by_layer[e]) for e in row]) for n, row in enumerate(experts)]
    )
    wanted = torch.autograd.grad(expected, wide, seen.double(), allow_unused=True)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert ours.dtype == dtype
        theirs = torch.zeros_like(ours).double() if theirs is None else theirs  # the unused expert
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=4 * tolerance)
    unused = gradients[1 + UNUSED * (1 + bias)]
    assert not unused.any()


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    made, experts, x = layers(), routed(21), torch.randn(21, WIDTH, generator=seeded(9))
    whole = outputs_of(made, x, experts)
    for part in (slice(0, 1), slice(3, 12), slice(20, 21)):
        assert torch.equal(outputs_of(made, x[part], experts[part]), whole[part])
    order = torch.randperm(21, generator=seeded(1))
    assert torch.equal(outputs_of(made, x[order], experts[order]), whole[order])


def test_only_weights_that_are_trained_get_a_gradient() -> None:
    made = layers()
    for layer in made[1:]:
        layer.requires_grad_(False)
    outputs_of(made, torch.ones(5, WIDTH), torch.zeros(5, TOP_K, dtype=torch.int64)).sum().backward()
    assert made[0].weight.grad is not None and all(layer.weight.grad is None for layer in made[1:])


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_weights() -> None:
    made, experts, x = layers(), routed(13), torch.randn(13, WIDTH, generator=seeded(9))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = outputs_of(made, x, experts)
    assert torch.equal(outputs, outputs_of(layers(dtype=torch.bfloat16), x.bfloat16(), experts))
    outputs.float().sum().backward()
    assert made[0].weight.grad is not None and made[0].weight.grad.dtype == torch.float32


def test_rows_in_another_dtype_than_the_experts_are_refused() -> None:
    with pytest.raises(AssertionError, match="bfloat16 rows for experts in torch"):
        outputs_of(layers(), torch.ones(2, WIDTH, dtype=torch.bfloat16), routed(2))


def test_the_mixture_is_that_of_the_equations() -> None:
    layer, x = mixture(), torch.randn(19, WIDTH, generator=seeded(9))
    torch.testing.assert_close(layer(x).detach().double(), by_token(layer, x).detach(), rtol=1e-5, atol=1e-5)


def with_adapters(layer: MoE) -> None:
    inject_lora(layer, LoraSpec(4, 8.0, ("experts.1.gate_and_up_proj", "experts.5.down_proj")), seed=0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=seeded(len(name))))


def in_eight_bits(layer: MoE) -> None:
    for expert in layer.experts:
        for part in expert.children():
            assert isinstance(part, nn.Linear)
            Fp8Linear.convert(part)


def plain_weights(layer: MoE) -> MoE:
    """A mixture with the weights by which the layers of `layer` multiply."""
    result = mixture()
    for number in range(NUM_EXPERTS):
        for name in ("gate_and_up_proj", "down_proj"):
            path = f"experts.{number}.{name}"
            inputs = result.get_submodule(path).in_features
            weight = layer.get_submodule(path)(torch.eye(inputs)).T
            result.get_parameter(f"{path}.weight").data = weight.detach()
    return result


@pytest.mark.parametrize("change", [with_adapters, in_eight_bits])
def test_experts_that_compute_in_their_own_way_run_by_themselves(change: Callable[[MoE], None]) -> None:
    layer, x = mixture(), torch.randn(19, WIDTH, generator=seeded(9))
    before = layer(x)
    change(layer)
    assert float((layer(x) - before).detach().abs().max()) > 1e-2
    expected = by_token(plain_weights(layer), x)
    torch.testing.assert_close(layer(x).detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_adapters_of_experts_are_trained() -> None:
    layer = mixture()
    with_adapters(layer)
    layer(torch.randn(40, WIDTH, generator=seeded(9))).square().sum().backward()
    trained = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 and all(grad is not None and grad.any() for grad in trained.values())


def test_the_host_does_not_wait_and_the_device_has_the_bits_of_the_cpu() -> None:
    layer, x = mixture(), torch.randn(19, WIDTH, generator=seeded(9))
    expected = layer(x)
    expected.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    with second_devices() as devices:
        there, inputs = mixture().to("emulated:0"), x.to("emulated:0")
        devices.reset()
        outputs = there(inputs)
        outputs.square().sum().backward()
        assert not devices.syncs
        assert torch.equal(outputs.detach().cpu(), expected.detach())
        gradients = [parameter.grad.cpu() for parameter in there.parameters() if parameter.grad is not None]
    assert len(gradients) == len(wanted) == 3 + 2 * NUM_EXPERTS
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # the compiler takes seconds to import
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at all inputs
def test_a_compiled_mixture_has_the_values_of_the_plain_one() -> None:
    layer, x = mixture(), torch.randn(19, WIDTH, generator=seeded(9))
    compiled = torch.compile(layer, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
