"""Checks of what a scorer declares and returns. A scorer may be the code of a user, so every value may be wrong.

The messages name the class with its file and line, all that is wrong with a response, and the contract.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unirl.config.errors import PluginError, RewardError, did_you_mean
from unirl.config.plugins import contract_of, definition, is_foreign
from unirl.reward.base import RewardScorer
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, RewardRequest, RewardResponse, ScoringFailure

COLUMNS = ("prompts", "images", "videos", "texts", "lengths", "episodes", "sources", "metadata")
"""The columns that a scorer may read."""
COMPONENT = re.compile(r"[\w.+-]+")
"""The name of a component, which is a word of a metric (unirl/tracking/metrics.py)."""
PLAIN_NAME = "use letters, digits, '_', '.', '+' and '-', without blanks"
READS = f'Write a tuple of columns, such as reads = ("images", "prompts"), of {", ".join(COLUMNS)}'


def check_scorer(scorer: RewardScorer) -> None:
    """Checks what a scorer declares. Raises PluginError (2031)."""
    cls = type(scorer)
    try:
        reads: object = scorer.reads
    except AttributeError as error:  # the class of the user has not set it
        raise PluginError(f"{definition(cls)}: it has no `reads`. {READS}") from error
    check_reads(cls, reads)
    check_capabilities(cls, scorer.capabilities)
    if not isinstance(scorer.parts, Sequence) or not all(isinstance(part, RewardScorer) for part in scorer.parts):
        raise PluginError(f"{definition(cls)}: its `parts` is {scorer.parts!r}, and it must be a tuple of scorers")


def check_reads(cls: type, reads: object) -> None:
    """The columns that a scorer reads must be a tuple of names of columns. Raises PluginError (2031)."""
    if not isinstance(reads, tuple):
        raise PluginError(f"{definition(cls)}: its `reads` is {reads!r}, and it must be a tuple. {READS}")
    for column in reads:
        if column not in COLUMNS:
            near = did_you_mean(column, COLUMNS) if isinstance(column, str) else ""
            raise PluginError(
                f"{definition(cls)} reads {column!r}, which is not a column of a reward request.{near} {READS}"
            )


def check_capabilities(cls: type[RewardScorer], capabilities: object) -> None:
    """The capabilities of a scorer must be `Capabilities`, and it has the gradient that they promise.

    Raises PluginError (2031).
    """
    if not isinstance(capabilities, Capabilities):
        raise PluginError(
            f"{definition(cls)}: its `capabilities` is {capabilities!r}. Write capabilities = "
            'Capabilities(modalities=("image",)), of unirl.types.protocols'
        )
    if capabilities.differentiable and cls.objective is RewardScorer.objective and is_foreign(cls):
        raise PluginError(
            f"{definition(cls)}: it declares differentiable=True and has no objective. Write one, or declare False"
            + "".join(f"\n  {line}" for line in contract_of(cls, "objective"))
        )


def check_constructor(cls: type, wired: Mapping[str, bool]) -> None:
    """A scorer may be given the device alone. Raises PluginError (2031) if its constructor needs more from the trainer.

    Args:
        wired: the positional parameters of the constructor, True for one without a default.
    """
    needed = [name for name, is_needed in wired.items() if is_needed and name != "device"]
    if needed:
        raise PluginError(
            f"{definition(cls, '__init__')}: its constructor takes {', '.join(needed)} by position, and a recipe sets "
            f"parameters by name. Write def __init__(self, *, {', '.join(needed)})"
        )


def check_response(scorer: RewardScorer, response: object, request: RewardRequest, name: str) -> None:
    """Raises RewardError (6002) unless a scorer returned finite columns of scores under names that metrics can have."""
    problems = list(_problems(response, request))
    if not problems:
        return
    lines = [
        f"reward {name!r}: {definition(type(scorer), 'score')}: score returned {'; '.join(problems)}",
        f"It was asked for {len(request)} samples, {request.sample_ids[0]!r} to {request.sample_ids[-1]!r}",
        *contract_of(type(scorer), "score"),
        "unirl.reward.base.single makes a response with one component",
    ]
    raise RewardError("\n  ".join(lines))


def _problems(response: object, request: RewardRequest) -> Iterator[str]:
    if not isinstance(response, RewardResponse):
        yield f"{type(response).__name__}, not a RewardResponse"
        return
    yield from _column_problems("total", response.total, request)
    fields: Mapping[str, object] = {"components": response.components, "logged_rewards": response.logged_rewards}
    for field, columns in fields.items():
        if not isinstance(columns, dict):
            yield f"{field} as {type(columns).__name__}, not a dict of a tensor by name"
            continue
        for part, scores in columns.items():
            if not isinstance(part, str) or not COMPONENT.fullmatch(part):
                yield f"a component named {part!r}, and a name becomes part of a metric: {PLAIN_NAME}"
            yield from _column_problems(part, scores, request)
    if isinstance(response.components, dict) and not response.components:
        yield 'no components: name each score, as in components={"total": total}'
        if isinstance(response.total, Tensor) and (bad := int((~torch.isfinite(response.total)).sum())):
            yield f"{bad} totals that are not finite"
    yield from _row_problems(response, len(request))


def _column_problems(part: object, scores: object, request: RewardRequest) -> Iterator[str]:
    if not isinstance(scores, Tensor):
        yield f"{part!r} as {type(scores).__name__}, not a tensor"
    elif scores.shape != (len(request),):
        yield f"{part!r} with the shape {list(scores.shape)} instead of [{len(request)}], one number per sample"


def _row_problems(response: RewardResponse, count: int) -> Iterator[str]:
    """The problems of the failures and the answers of a response."""
    failures, answers = response.failures, response.answers
    if not isinstance(failures, Mapping) or not all(
        row in range(count) and isinstance(why, tuple) and all(isinstance(each, ScoringFailure) for each in why)
        for row, why in failures.items()
    ):
        yield "failures that are not a dict of a tuple of ScoringFailure by number of the row"
    if answers is None:
        return
    if not isinstance(answers, Sequence) or not all(each is None or isinstance(each, Answer) for each in answers):
        yield "answers that are not a list of Answer or None"
    elif len(answers) != count:
        yield f"{len(answers)} answers for {count} samples"
