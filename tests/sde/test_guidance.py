"""Each kind of guidance against its formula, written out on tokens."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unirl.sde.guidance import (
    EmbeddedGuidance,
    ExpertGuidance,
    Guidance,
    LineNormGuidance,
    NoGuidance,
    NormCorrectedGuidance,
    RenormGuidance,
)
from unirl.types.conditions import Conditions, LatentCondition, ScaleCondition, TextEmbedCondition

KINDS = (
    Guidance(),
    NormCorrectedGuidance(patch_size=2),
    LineNormGuidance(),
    EmbeddedGuidance(),
    ExpertGuidance(boundary=0.875),
    NoGuidance(),
    RenormGuidance(patch_size=2),
)
B, C, H, W = 4, 3, 4, 6


def text(fill: float) -> TextEmbedCondition:
    return TextEmbedCondition(embeds=torch.full((B, 2, 5), fill))


def network(x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    """Different in every branch, row by row."""
    said = conditions["text"]
    assert isinstance(said, TextEmbedCondition)
    return torch.sin(x * (1 + said.embeds.mean((1, 2))[:, None, None, None])) + sigma[:, None, None, None]


def inputs() -> tuple[Tensor, Tensor, Conditions]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, C, H, W, generator=generator)
    return x, torch.tensor([1.0, 0.875, 0.87, 0.1]), {"text": text(0.7), "negative_text": text(-0.4)}


def branches(x: Tensor, sigma: Tensor, conditions: Conditions) -> tuple[Tensor, Tensor]:
    return network(x, sigma, {"text": conditions["negative_text"]}), network(x, sigma, {"text": conditions["text"]})


def guided(guidance: Guidance, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    return guidance.velocity(network, x, sigma, guidance.feeds(conditions))


@pytest.mark.parametrize("passes", [1, 2])
def test_classic_guidance_extrapolates(passes: int) -> None:
    x, sigma, conditions = inputs()
    uncond, cond = branches(x, sigma, conditions)
    torch.testing.assert_close(
        guided(Guidance().at(3.0, passes=passes), x, sigma, conditions), uncond + 3.0 * (cond - uncond)
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_norm_corrected_guidance_keeps_the_norm_of_each_token(passes: int) -> None:
    x, sigma, conditions = inputs()
    guidance = NormCorrectedGuidance(patch_size=2).at(4.0, passes=passes)
    result = tokens(guided(guidance, x, sigma, conditions))
    uncond, cond = (tokens(v) for v in branches(x, sigma, conditions))
    combined = uncond + 4.0 * (cond - uncond)
    wanted = combined * (cond.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(result.norm(dim=-1), cond.norm(dim=-1))


@pytest.mark.parametrize("passes", [1, 2])
def test_line_norm_guidance_keeps_the_norm_of_each_line(passes: int) -> None:
    x, sigma, conditions = inputs()
    result = guided(LineNormGuidance().at(4.0, passes=passes), x, sigma, conditions)
    uncond, cond = branches(x, sigma, conditions)
    combined = uncond + 4.0 * (cond - uncond)
    torch.testing.assert_close(result.norm(dim=-1), cond.norm(dim=-1))
    torch.testing.assert_close(normalize(result, dim=-1), normalize(combined, dim=-1))


def tokens(v: Tensor) -> Tensor:
    """[B, L, 4 C] as a transformer of 2 x 2 patches packs [B, C, H, W]."""
    packed = v.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return packed.reshape(B, (H // 2) * (W // 2), 4 * C)


def test_each_expert_has_its_own_scale_by_level() -> None:
    x, sigma, conditions = inputs()
    result = guided(ExpertGuidance(boundary=0.875).at(4.0, 3.0), x, sigma, conditions)
    for row, scale in enumerate((4.0, 4.0, 3.0, 3.0)):
        alone = guided(Guidance().at(scale), x, sigma, conditions)
        assert torch.equal(result[row], alone[row])
    both = guided(ExpertGuidance(boundary=0.875).at(2.0), x, sigma, conditions)
    assert torch.equal(both, guided(Guidance().at(2.0), x, sigma, conditions))


@pytest.mark.parametrize("kind", ["global", "channel", "text_channel"])
@pytest.mark.parametrize("lowest", [0.0, 0.6])
def test_renormalised_guidance_is_the_published_one_within_its_interval(kind: Any, lowest: float) -> None:
    """On tokens [H W / 4, 4 C] of one sample, as BAGEL has them."""
    x, _, conditions = inputs()
    sigma = torch.tensor([0.9, 0.8, 0.4, 0.1])  # the interval excludes its lower end and includes its upper one
    guidance = RenormGuidance(patch_size=2, renorm=kind, renorm_min=lowest, interval=(0.4, 0.9)).at(4.0)
    result, *both = (tokens(v) for v in (guided(guidance, x, sigma, conditions), *branches(x, sigma, conditions)))
    shrunk = []
    for row, (uncond, cond) in enumerate(zip(*both, strict=True)):
        expected = cond
        if row < 2:
            combined = uncond + 4.0 * (cond - uncond)
            if kind == "global":
                ratio = torch.norm(cond) / (torch.norm(combined) + 1e-8)
            else:
                ratio = torch.norm(cond, dim=-1, keepdim=True) / (torch.norm(combined, dim=-1, keepdim=True) + 1e-8)
            expected = combined * ratio.clamp(min=lowest, max=1.0)
            shrunk.append(bool((ratio < 1).any()))
        torch.testing.assert_close(result[row], expected)
    assert shrunk == [True, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"renorm": "chanel"}, "cfg_renorm_type"),
        ({"renorm_min": 1.5}, r"cfg_renorm_min=1.5 must lie in \[0, 1\]"),
        ({"interval": (0.4, 0.4)}, r"cfg_interval=\[0.4, 0.4\] must be two increasing noise levels"),
    ],
)
def test_settings_of_renormalised_guidance_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RenormGuidance(patch_size=2, **settings)
    with pytest.raises(ValueError, match=r"guidance_scale=0.5: this model has no guidance below 1"):
        RenormGuidance(patch_size=2).at(0.5)


def test_one_expert_may_be_guided_alone() -> None:
    x, sigma, conditions = inputs()
    guidance = ExpertGuidance(boundary=0.875).at(1.0, 3.0)
    assert guidance.active
    _, cond = branches(x, sigma, conditions)
    torch.testing.assert_close(guided(guidance, x, sigma, conditions)[:2], cond[:2])


def test_an_embedded_scale_is_an_input_of_one_forward() -> None:
    _, _, conditions = inputs()
    guidance = EmbeddedGuidance().at(3.5)
    [feed] = guidance.feeds(conditions)
    scale = feed["guidance"]
    assert isinstance(scale, ScaleCondition) and scale.scale.tolist() == [3.5] * B
    assert sorted(feed) == ["guidance", "text"] and not guidance.active and guidance.off() == guidance


def test_a_model_that_was_distilled_for_no_guidance_refuses_some() -> None:
    assert NoGuidance().at(1.0) == NoGuidance()
    with pytest.raises(ValueError, match=r"guidance_scale=4: .*distilled.*Use guidance_scale=1"):
        NoGuidance().at(4.0)


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if not isinstance(k, ExpertGuidance)], ids=lambda k: type(k).__name__
)
def test_a_second_scale_is_for_two_experts(kind: Guidance) -> None:
    with pytest.raises(ValueError, match=r"guidance_scale_2=3 is for models with two experts"):
        kind.at(1.0, 3.0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: type(k).__name__)
def test_without_guidance_there_is_one_forward_of_the_conditional_branch(kind: Guidance) -> None:
    x, sigma, conditions = inputs()
    off = kind.at(1.0).off()
    assert not off.active and len(off.feeds(conditions)) == 1
    assert torch.equal(guided(off, x, sigma, conditions), branches(x, sigma, conditions)[1])


@pytest.mark.parametrize("passes", [1, 2])
def test_what_has_no_negative_twin_is_shown_to_both_branches(passes: int) -> None:
    _, _, conditions = inputs()
    frame: Any = LatentCondition(latents=torch.arange(float(B))[:, None])
    feeds = Guidance().at(2.0, passes=passes).feeds(conditions | {"image": frame})
    shown = torch.cat([feed["image"].latents for feed in feeds])  # type: ignore[attr-defined]
    assert shown.flatten().tolist() == [*range(B), *range(B)]


def test_an_unknown_branch_of_the_gradient_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"sampling.guidance_gradient='unconditional' must be one of: both, conditional"
    ):
        Guidance().with_gradient("unconditional")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: type(k).__name__)
def test_kinds_are_values(kind: Guidance) -> None:
    assert pickle.loads(pickle.dumps(kind)) == kind and kind.at(1.0) == kind


@pytest.mark.parametrize(
    ("guidance", "scales"),
    [
        (Guidance().at(4.0), [4.0, 4.0, 4.0, 4.0]),
        (ExpertGuidance(boundary=0.5).at(4.0, 3.0), [4.0, 4.0, 3.0, 3.0]),
        (RenormGuidance(patch_size=2, interval=(0.25, 0.5)).at(4.0), [1.0, 4.0, 1.0, 1.0]),
    ],
    ids=["classic", "experts", "interval"],
)
def test_the_scale_of_a_level_is_that_of_its_velocity(guidance: Any, scales: list[float]) -> None:
    """With v_cond = 1 and v_uncond = 0 the guided velocity is w, before the renormalisation that divides by it."""
    levels = [1.0, 0.5, 0.25, 0.1]
    assert [guidance.scale_at(level) for level in levels] == scales
    if not isinstance(guidance, RenormGuidance):
        zeros = torch.zeros(4, 1, 2, 2)
        guided = guidance.combine(zeros, zeros + 1, torch.tensor(levels))
        assert guided[:, 0, 0, 0].tolist() == scales
