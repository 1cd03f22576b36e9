"""Calls of a scorer: the checks on every response, and the search for rows that cannot be scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import InvalidScoreError, RewardError, RewardUnreachableError, UniRLError
from unirl.reward.base import DifferentiableScorer, PromptChecker, StartChecker
from unirl.types.protocols import Scorer
from unirl.types.reward import Answer, Failure, Failures, RewardRequest, RewardResponse


def name_of(scorer: Scorer) -> str:
    """Returns the name of a scorer in error messages: its class."""
    return type(scorer).__name__


def check_prompt(scorer: Scorer, prompt: str, metadata: Mapping[str, Any]) -> None:
    """Raises RewardError when the scorer reports that no sample of this prompt could be scored."""
    if isinstance(scorer, PromptChecker):
        scorer.check_prompt(prompt, metadata)


def check_start(scorer: Scorer) -> None:
    """Raises RewardError or ConfigError when the scorer depends on a server that cannot score."""
    if isinstance(scorer, StartChecker):
        scorer.check_start()


def checked_score(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """Returns the scorer's response, whose scores have the right count, are finite, and are float32 on the CPU.

    Raises:
        RewardError: 6002 when the scorer fails or the count is wrong, 6003 when a score is not finite.
    """
    response = response_of(scorer, request, name)
    refuse_failures(response, request)
    return response


def response_of(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """Returns the scorer's response to the columns that it reads.

    A row that has a score that is not finite, or that the scorer could not score, is listed in `failures`.

    Raises:
        RewardError: 6002 when the scorer fails as a whole or the count is wrong.
    """
    columns: dict[str, Any] = {column: getattr(request, column) for column in scorer.reads}
    try:
        response = scorer.score(RewardRequest(sample_ids=request.sample_ids, **columns))
    except UniRLError:
        raise
    except Exception as error:  # a scorer is foreign code: whatever it raises, the error must name the reward
        raise RewardError(
            f"reward {name!r} failed on {len(request)} samples from {request.sample_ids[0]!r} on: "
            f"{type(error).__name__}: {error}. No reward was attached; a failed reward is never counted as zero"
        ) from error
    if not response.components:
        raise RewardError(f"reward {name!r} returned no components: give each score a name")
    if response.answers is not None and len(response.answers) != len(request):
        raise RewardError(f"reward {name!r} returned {len(response.answers)} answers for {len(request)} samples")
    total = column_of(response.total, request, name)
    components = {part: column_of(scores, request, f"{name}.{part}") for part, scores in response.components.items()}
    logged_rewards = {
        part: column_of(scores, request, f"{name}.{part}") for part, scores in response.logged_rewards.items()
    }
    failures: dict[int, Failures] = dict(response.failures)
    for part, scores in [(name, total), *((f"{name}.{part}", scores) for part, scores in components.items())]:
        for row in (~torch.isfinite(scores)).nonzero().flatten().tolist():
            known = failures.get(row, ())
            if all(failure.reward in logged_rewards for failure in known):
                why = f"reward {part!r} gave {float(scores[row])} to sample {request.sample_ids[row]!r}"
                failures[row] = (Failure(name, why, InvalidScoreError.code), *known)
            total[row] = torch.nan
    return RewardResponse(
        total=total, components=components, logged_rewards=logged_rewards, failures=failures, answers=response.answers
    )


def refuse_failures(response: RewardResponse, request: RewardRequest) -> None:
    """Raises RewardError for the first row without a reward."""
    failed = response.failed_rows()
    if failed:
        failure = response.failures[failed[0]][0]
        raise RewardError.of_code(failure.code)(
            f"{failure.why} ({len(failed)} of {len(request)} samples could not be scored): a reward must be a finite "
            "number, and a failed one is never counted as zero"
        )


def column_of(scores: Tensor, request: RewardRequest, name: str) -> Tensor:
    """Returns a float32 copy [B] on the CPU. Raises RewardError (6002) when the number of scores is wrong."""
    if scores.shape != (len(request),):
        raise RewardError(
            f"reward {name!r} gave scores of shape {list(scores.shape)} for {len(request)} samples "
            f"({request.sample_ids[0]!r} to {request.sample_ids[-1]!r}): it must give one number per sample"
        )
    return scores.detach().to("cpu", torch.float32, copy=True)


def score_by_halves(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """Returns the scorer's response. A request that fails is split in halves until only the rows that fail are left.

    Raises:
        RewardError: 6001 when the scorer cannot be reached at all.
    """
    try:
        return response_of(scorer, request, name)
    except RewardError as error:
        if isinstance(error, RewardUnreachableError):
            raise
        if len(request) == 1:
            no_score = torch.full((1,), torch.nan)
            return RewardResponse(total=no_score, components={}, failures={0: (Failure(name, str(error), error.code),)})
    middle = len(request) // 2
    halves = [range(middle), range(middle, len(request))]
    return concat_responses([score_by_halves(scorer, request.select(rows), name) for rows in halves])


def concat_responses(responses: Sequence[RewardResponse]) -> RewardResponse:
    """Joins the responses to consecutive rows. A component that is missing, because all rows failed, is NaN."""
    failures: dict[int, Failures] = {}
    offset = 0
    for response in responses:
        failures |= {offset + row: row_failures for row, row_failures in response.failures.items()}
        offset += len(response.total)
    return RewardResponse(
        total=torch.cat([response.total for response in responses]),
        components=_concat_columns([response.components for response in responses], responses),
        logged_rewards=_concat_columns([response.logged_rewards for response in responses], responses),
        failures=failures,
        answers=concat_answers([(response.answers, len(response.total)) for response in responses]),
    )


def concat_answers(parts: Sequence[tuple[Sequence[Answer | None] | None, int]]) -> list[Answer | None] | None:
    """Joins the answers of consecutive parts, each given with its number of rows. A part without answers gives None."""
    if all(answers is None for answers, _ in parts):
        return None
    return [answer for answers, count in parts for answer in (answers or [None] * count)]


def _concat_columns(parts: Sequence[Mapping[str, Tensor]], responses: Sequence[RewardResponse]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    blanks = [torch.full_like(response.total, torch.nan) for response in responses]
    return {
        name: torch.cat([part.get(name, blank) for part, blank in zip(parts, blanks, strict=True)]) for name in names
    }


def objective_of(scorer: Scorer, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Returns the scorer's differentiable total [B] on the device of the images.

    Raises:
        RewardError: 6002 when the scorer has no gradient, or returns another number of scores.
    """
    name = name_of(scorer)
    if not isinstance(scorer, DifferentiableScorer):
        raise RewardError(f"reward {name!r} has no gradient: give it `objective(images, prompts)`, or choose another")
    scores = scorer.objective(images, prompts)
    if scores.shape != (len(images),):
        raise RewardError(
            f"reward {name!r} gave an objective of shape {list(scores.shape)} for {len(images)} images: "
            "it must give one number per image"
        )
    return scores.to(images.device)


ScoreRow = Callable[[int], Mapping[str, float]]
"""Returns the scores of one row by name, or raises."""


def score_rows(request: RewardRequest, names: Sequence[str], score_row: ScoreRow, threads: int = 1) -> RewardResponse:
    """Scores a request row by row. A row on which `score_row` raises is listed in `failures`; the others keep scores.

    Args:
        names: the components; the first one is the total.
        threads: rows that are scored at the same time.

    Raises:
        RewardError: 6001 when the server that scores the rows cannot be reached; any other UniRLError of `score_row`.
    """
    scores = torch.full((len(names), len(request)), torch.nan)
    failures: dict[int, Failures] = {}
    with ThreadPoolExecutor(threads) as pool:
        attempts = [pool.submit(score_row, row) for row in range(len(request))]
    for row, attempt in enumerate(attempts):
        error = attempt.exception()
        if error is None:
            row_scores = attempt.result()
            scores[:, row] = torch.tensor([row_scores[name] for name in names])
        elif not _concerns_one_row(error):
            raise error
        else:
            why = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            code = error.code if isinstance(error, RewardError) else RewardError.code
            failures[row] = (
                Failure(names[0], f"reward {names[0]!r}, sample {request.sample_ids[row]!r}: {why}", code),
            )
    components = dict(zip(names, scores, strict=True))
    return RewardResponse(total=scores[0].clone(), components=components, failures=failures)


def _concerns_one_row(error: BaseException) -> bool:
    """Returns False for an error of the scorer as a whole or of the process."""
    if isinstance(error, RewardError):
        return not isinstance(error, RewardUnreachableError)
    return isinstance(error, Exception) and not isinstance(error, UniRLError)
