"""Asking a scorer: what is checked of every answer, and what becomes of a row that has none."""

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
    """The name that errors give a scorer: its class."""
    return type(scorer).__name__


def check_prompt(scorer: Scorer, prompt: str, metadata: Mapping[str, Any]) -> None:
    """Raises RewardError when the scorer knows that no sample of this prompt could be scored."""
    if isinstance(scorer, PromptChecker):
        scorer.check_prompt(prompt, metadata)


def check_start(scorer: Scorer) -> None:
    """Raises RewardError or ConfigError when the scorer asks something elsewhere that is not there."""
    if isinstance(scorer, StartChecker):
        scorer.check_start()


def checked_score(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """The scorer's answer, given only the columns it reads: right count, finite, float32 on the CPU.

    Raises:
        RewardError: 6002 when the scorer fails or the count is wrong, 6003 when a score is not finite.
    """
    answer = answer_of(scorer, request, name)
    refuse_failures(answer, request)
    return answer


def answer_of(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """The same, but rows whose score is not finite, or which the scorer could not score, stand in `failures`.

    Raises:
        RewardError: 6002 when the scorer fails as a whole or the count is wrong.
    """
    columns: dict[str, Any] = {column: getattr(request, column) for column in scorer.reads}
    try:
        answer = scorer.score(RewardRequest(sample_ids=request.sample_ids, **columns))
    except UniRLError:
        raise
    except Exception as error:  # a scorer is foreign code: whatever it raises, the user must learn which reward it was
        raise RewardError(
            f"reward {name!r} failed on {len(request)} samples from {request.sample_ids[0]!r} on: "
            f"{type(error).__name__}: {error}. No reward was attached; a failed reward is never counted as zero"
        ) from error
    if not answer.components:
        raise RewardError(f"reward {name!r} answered without components: give each score a name")
    total = column_of(answer.total, request, name)
    components = {part: column_of(found, request, f"{name}.{part}") for part, found in answer.components.items()}
    logged = {part: column_of(found, request, f"{name}.{part}") for part, found in answer.logged_rewards.items()}
    failures: dict[int, Failures] = dict(answer.failures)
    for part, found in [(name, total), *((f"{name}.{part}", found) for part, found in components.items())]:
        for row in (~torch.isfinite(found)).nonzero().flatten().tolist():
            known = failures.get(row, ())
            if all(failure.reward in logged for failure in known):
                why = f"reward {part!r} gave {float(found[row])} to sample {request.sample_ids[row]!r}"
                failures[row] = (Failure(name, why, InvalidScoreError.code), *known)
            total[row] = torch.nan
    answers = _one_per_row(answer.answers, request, name)
    return RewardResponse(total=total, components=components, logged_rewards=logged, failures=failures, answers=answers)


def _one_per_row(
    answers: Sequence[Answer | None] | None, request: RewardRequest, name: str
) -> Sequence[Answer | None] | None:
    if answers is not None and len(answers) != len(request):
        raise RewardError(f"reward {name!r} gave {len(answers)} answers for {len(request)} samples")
    return answers


def refuse_failures(answer: RewardResponse, request: RewardRequest) -> None:
    """Raises RewardError for the first row without a reward."""
    lost = answer.lost()
    if lost:
        failure = answer.failures[lost[0]][0]
        raise RewardError.of_code(failure.code)(
            f"{failure.why} ({len(lost)} of {len(request)} samples could not be scored): a reward must be a finite "
            "number, and a failed one is never counted as zero"
        )


def column_of(scores: Tensor, request: RewardRequest, name: str) -> Tensor:
    """[B] a float32 copy on the CPU. Raises RewardError (6002) when their number is wrong."""
    if scores.shape != (len(request),):
        raise RewardError(
            f"reward {name!r} gave scores of shape {list(scores.shape)} for {len(request)} samples "
            f"({request.sample_ids[0]!r} to {request.sample_ids[-1]!r}): it must give one number per sample"
        )
    return scores.detach().to("cpu", torch.float32, copy=True)


def scored_apart(scorer: Scorer, request: RewardRequest, name: str) -> RewardResponse:
    """The scorer's answer; where it fails as a whole, halves are asked until the rows that fail stand alone.

    Raises:
        RewardError: 6001 when the scorer cannot be reached at all.
    """
    try:
        return answer_of(scorer, request, name)
    except RewardError as error:
        if isinstance(error, RewardUnreachableError):
            raise
        if len(request) == 1:
            nothing = torch.full((1,), torch.nan)
            return RewardResponse(total=nothing, components={}, failures={0: (Failure(name, str(error), error.code),)})
    middle = len(request) // 2
    halves = [range(middle), range(middle, len(request))]
    return joined([scored_apart(scorer, request.select(rows), name) for rows in halves])


def joined(answers: Sequence[RewardResponse]) -> RewardResponse:
    """The answers to consecutive rows as one. A score that an answer lacks, because all its rows failed, is NaN."""
    failures: dict[int, Failures] = {}
    before = 0
    for answer in answers:
        failures |= {before + row: found for row, found in answer.failures.items()}
        before += len(answer.total)
    return RewardResponse(
        total=torch.cat([answer.total for answer in answers]),
        components=_columns([answer.components for answer in answers], answers),
        logged_rewards=_columns([answer.logged_rewards for answer in answers], answers),
        failures=failures,
        answers=joined_answers([(answer.answers, len(answer.total)) for answer in answers]),
    )


def joined_answers(parts: Sequence[tuple[Sequence[Answer | None] | None, int]]) -> list[Answer | None] | None:
    """The answers to consecutive rows, of parts with so many rows, as one; None where a part has none."""
    if all(answers is None for answers, _ in parts):
        return None
    return [answer for answers, count in parts for answer in (answers or [None] * count)]


def _columns(parts: Sequence[Mapping[str, Tensor]], answers: Sequence[RewardResponse]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    blank = [torch.full_like(answer.total, torch.nan) for answer in answers]
    return {name: torch.cat([part.get(name, none) for part, none in zip(parts, blank, strict=True)]) for name in names}


def objective_of(scorer: Scorer, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """[B] the scorer's total with its gradient, on the device of the images.

    Raises:
        RewardError: 6002 when the scorer has none, or gives another number of scores.
    """
    name = name_of(scorer)
    if not isinstance(scorer, DifferentiableScorer):
        raise RewardError(f"reward {name!r} has no gradient: give it `objective(images, prompts)`, or choose another")
    scores = scorer.objective(images, prompts)
    if scores.shape != (len(images),):
        raise RewardError(
            f"reward {name!r} gave an objective of shape {list(scores.shape)} for {len(images)} pictures: "
            "it must give one number per picture"
        )
    return scores.to(images.device)


ScoreRow = Callable[[int], Mapping[str, float]]
"""The scores of a row by name. It raises when there are none."""


def score_rows(request: RewardRequest, names: Sequence[str], score_row: ScoreRow, threads: int = 1) -> RewardResponse:
    """The answer of a scorer that looks at one row at a time.

    A row on which `score_row` raises has no reward and says which sample it is and why; the others keep theirs.

    Args:
        names: the components; the first is the total.
        threads: rows in flight at once.

    Raises:
        RewardError: 6001 when what scores the rows cannot be reached; any other UniRLError of `score_row`.
    """
    scores = torch.full((len(names), len(request)), torch.nan)
    failures: dict[int, Failures] = {}
    with ThreadPoolExecutor(threads) as pool:
        attempts = [pool.submit(score_row, row) for row in range(len(request))]
    for row, attempt in enumerate(attempts):
        error = attempt.exception()
        if error is None:
            found = attempt.result()
            scores[:, row] = torch.tensor([found[name] for name in names])
        elif _is_no_sample(error):
            raise error
        else:
            why = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            code = error.code if isinstance(error, RewardError) else RewardError.code
            failures[row] = (
                Failure(names[0], f"reward {names[0]!r}, sample {request.sample_ids[row]!r}: {why}", code),
            )
    components = dict(zip(names, scores, strict=True))
    return RewardResponse(total=scores[0].clone(), components=components, failures=failures)


def _is_no_sample(error: BaseException) -> bool:
    """Whether an error is about the scorer or the process, not about one row."""
    if isinstance(error, RewardError):
        return isinstance(error, RewardUnreachableError)
    return isinstance(error, UniRLError) or not isinstance(error, Exception)
