"""A scorer that breaks its contract is refused by its class and line, all that is wrong at once, and the way out."""

import re

import pytest
import torch

from unirl.config.errors import InvalidScoreError, PluginError, RewardError
from unirl.reward.base import RewardScorer, single
from unirl.reward.combine import WeightedRewards
from unirl.reward.contract import check_scorer
from unirl.reward.scoring import checked_score, objective_of
from unirl.reward.service import RewardService
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, RewardRequest, RewardResponse, ScoringFailure

ROWS = RewardRequest(sample_ids=["a", "b", "c"], images=torch.rand(3, 3, 4, 4))
TOTAL = torch.tensor([0.0, 0.5, 1.0])
NAN = TOTAL * torch.nan


class Own(RewardScorer):
    reads = ("images",)

    def __init__(self, response=None, objective=None):
        self.response, self.own_objective = response, objective

    def score(self, request):
        return self.response

    def objective(self, images, prompts):
        return self.own_objective(images)


def answer(total=TOTAL, components=None, **fields):
    return RewardResponse(total=total, components={"own": TOTAL} if components is None else components, **fields)


LINE = Own.score.__code__.co_firstlineno


def refused(response) -> str:
    with pytest.raises(RewardError) as caught:
        checked_score(Own(response), ROWS, "Own")
    text = str(caught.value)
    assert caught.value.code == 6002
    assert f"your class {__name__}.Own, {__file__}:{LINE}: score returned " in text
    assert "3 samples, 'a' to 'c'" in text and "Contract of RewardScorer.score: " in text
    return text


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (None, "NoneType, not a RewardResponse"),
        (TOTAL, "Tensor, not a RewardResponse"),
        ({"total": TOTAL}, "dict, not a RewardResponse"),
        (answer([0.0, 0.5, 1.0]), "'total' as list, not a tensor"),
        (answer(TOTAL.numpy()), "'total' as ndarray, not a tensor"),
        (answer(TOTAL[:1]), r"'total' with the shape \[1\] instead of \[3\], one number per sample"),
        (answer(TOTAL[:, None]), r"'total' with the shape \[3, 1\] instead of \[3\]"),
        (answer(TOTAL.mean()), r"'total' with the shape \[\] instead of \[3\]"),
        (answer(components=[TOTAL]), "components as list, not a dict of a tensor by name"),
        (answer(components={"own": 1.0}), "'own' as float, not a tensor"),
        (answer(components={"own": TOTAL[:1]}), r"'own' with the shape \[1\]"),
        (answer(components={1: TOTAL}), "a component named 1, and a name becomes part of a metric"),
        (answer(logged_rewards=None), "logged_rewards as NoneType"),
        (answer(failures=["x"]), "failures that are not a dict of a tuple of ScoringFailure by number of the row"),
        (answer(failures={0: "x"}), "failures that are not"),
        (answer(failures={9: (ScoringFailure("own", "why"),)}), "failures that are not"),
        (answer(answers=5), "answers that are not a list of Answer or None"),
        (answer(answers=["a", "b", "c"]), "answers that are not"),
        (answer(answers=[Answer(right=True)]), "1 answers"),
    ],
)
def test_a_wrong_response_is_named(response, says):
    assert re.search(says, refused(response))


@pytest.mark.parametrize(
    ("total", "components", "also"),
    [
        (TOTAL[:1], {}, r"'total' with the shape \[1\].*no components: name each score"),
        (
            NAN,
            {},
            r"no components: name each score.*; 3 totals that are not finite",
        ),
        (TOTAL[:1], {"a b": TOTAL}, r"'total' with the shape \[1\].*'a b', and a name becomes part of a metric"),
    ],
)
def test_everything_that_is_wrong_is_named_at_once(total, components, also):
    assert re.search(also, refused(answer(total, components)))


def test_a_score_that_is_not_finite_is_named_beside_right_components():
    with pytest.raises(InvalidScoreError, match="gave nan to sample 'a'"):
        checked_score(Own(answer(NAN)), ROWS, "Own")


def test_a_right_response_passes():
    assert checked_score(Own(single("own", TOTAL)), ROWS, "Own").total.tolist() == [0.0, 0.5, 1.0]


# What a scorer declares


def declared(**attributes) -> RewardScorer:
    """A scorer of a class with these attributes."""
    return type("Mine", (RewardScorer,), {"score": Own.score, "__module__": __name__, **attributes})()


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        (
            {},
            r"it has no `reads`\. Write a tuple of columns, such as reads = \(\"images\", \"prompts\"\), of pro",
        ),
        ({"reads": ("image",)}, r"reads 'image', which is not a column .* Did you mean 'images'\? Write a tuple"),
        ({"reads": "images"}, r"its `reads` is 'images', and it must be a tuple"),
        ({"reads": None}, r"its `reads` is None, and it must be a tuple"),
        ({"reads": (1,)}, r"reads 1, which is not a column"),
        ({"reads": (), "capabilities": ("image",)}, r"its `capabilities` is \('image',\)\. Write capabilities = "),
        ({"reads": (), "capabilities": Capabilities(differentiable=True)}, r"differentiable=True and has no objective"),
        ({"reads": (), "parts": None}, r"its `parts` is None, and it must be a tuple of scorers"),
    ],
)
def test_a_wrong_declaration_is_named_with_the_way_out(attributes, says):
    scorer = declared(**attributes)
    for use in (
        lambda: check_scorer(scorer),
        lambda: RewardService(backend=scorer),
        lambda: WeightedRewards(scorers={"a": scorer}, weights={"a": 1.0}),
    ):
        with pytest.raises(PluginError, match=rf"your class {__name__}\.Mine.*{says}"):
            use()


# The gradient


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (
            lambda images: None,
            r"NoneType\. It must return a tensor of shape \[2\] with its gradient",
        ),
        (lambda images: images.mean(), r"a tensor of shape \[\]\. It must"),
        (lambda images: images.detach().flatten(1).mean(1), r"a tensor of shape \[2\] without a gradient\. It must"),
    ],
)
def test_a_wrong_objective_is_named(objective, says):
    with pytest.raises(RewardError, match=rf"your class \S+\.Own, \S+:\d+: objective returned {says}"):
        objective_of(Own(objective=objective), torch.rand(2, 3, 4, 4, requires_grad=True), ["", ""])


def test_an_objective_needs_no_gradient_where_none_is_asked_for():
    images = torch.rand(2, 3, 4, 4)
    assert objective_of(Own(objective=lambda x: x.flatten(1).mean(1)), images, ["", ""]).shape == (2,)
    with torch.no_grad():
        objective_of(Own(objective=lambda x: x.flatten(1).mean(1)), images.requires_grad_(), ["", ""])
