"""Compiled blocks: few graphs for many sizes, the same values, and a warning when the limit of graphs is reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.loading import compiled
from unirl.models.loading.lora import choose_targets, inject_lora
from unirl.models.sd3.family import SD3Bundle
from unirl.types.conditions import TextEmbedCondition
from unirl.types.facts import LoraSpec

pytestmark = [
    pytest.mark.slow,  # the compiler takes seconds to import
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at all inputs
]


class Graphs:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.count += 1
        return module.forward


@pytest.fixture
def bundle() -> SD3Bundle:
    torch._dynamo.reset()
    bundle = SD3Bundle(path="toy", dtype="bf16", components=("transformer",))
    targets = choose_targets(bundle.trainable(), "model", bundle.facts.lora_targets)
    inject_lora(bundle.trainable(), LoraSpec(4, 8.0, targets), seed=0)
    return bundle


def velocity(bundle: SD3Bundle, batch: int, tokens: int, side: int = 4) -> Tensor:
    config, generator = bundle.configs.components["transformer"], torch.Generator().manual_seed(0)
    text = TextEmbedCondition(
        embeds=torch.randn(batch, tokens, config["joint_attention_dim"], generator=generator),
        pooled=torch.randn(batch, config["pooled_projection_dim"], generator=generator),
    )
    x = torch.randn(batch, bundle.facts.latent_channels, side, side, generator=generator)
    return bundle.stage().velocity(x, torch.full((batch,), 0.5), {"text": text}, bundle.facts.guidance)


def blocks_of(bundle: SD3Bundle) -> list[torch.nn.Module]:
    names = bundle.facts.block_class_names
    return [module for module in bundle.trainable().modules() if type(module).__name__ in names]


def test_other_sizes_need_no_further_graphs_and_give_the_same_values(bundle: SD3Bundle) -> None:
    sizes = ((4, 8, 4), (8, 8, 4), (8, 24, 4), (4, 16, 8), (12, 40, 8))
    plain = [velocity(bundle, *size) for size in sizes]
    graphs = Graphs()
    compiled.compile_blocks(blocks_of(bundle), graphs)
    for size, expected in zip(sizes, plain, strict=True):
        assert torch.equal(velocity(bundle, *size), expected)
        with torch.no_grad():
            assert torch.equal(velocity(bundle, *size), expected)
    # The two blocks of the toy differ: the last one has no output for the text. Each has a graph with gradients and
    # one without.
    assert graphs.count == 4


def test_the_limit_of_graphs_is_reported(bundle: SD3Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "GRAPH_LIMIT", 1)
    compiled.compile_blocks(blocks_of(bundle), Graphs())
    with pytest.warns(RuntimeWarning, match=r"torch\.compile made 1 graphs of .*forward.* compiles no more"):
        velocity(bundle, 4, 8)
