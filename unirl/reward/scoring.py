"""Calls of a scorer: the checks on every response, and the search for rows that cannot be scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace

import torch
from torch import Tensor

from unirl.config.errors import InvalidScoreError, RewardError, RewardUnreachableError, UniRLError
from unirl.config.plugins import contract_of, definition, explained
from unirl.reward.base import RewardScorer
from unirl.reward.contract import check_response
from unirl.types.progress import progress
from unirl.types.reward import Answer, Failures, RewardRequest, RewardResponse, ScoringFailure


def name_of(scorer: RewardScorer) -> str:
    """Returns the name of a scorer in error messages: its class."""
    return type(scorer).__name__


def unscorable(scorers: Iterable[RewardScorer], prompt: str, metadata: Mapping[str, object]) -> Iterator[str]:
    """Yields why a scorer could score no sample of a prompt, for each scorer that says so."""
    for scorer in scorers:
        try:
            scorer.check_prompt(prompt, metadata)
        except RewardError as error:
            yield f"reward {name_of(scorer)!r} cannot score this prompt: {error}"


def checked_score(scorer: RewardScorer, request: RewardRequest, name: str) -> RewardResponse:
    """Returns the scorer's response, whose scores have the right count, are finite, and are float32 on the CPU.

    Raises:
        RewardError: 6002 when the scorer fails or the count is wrong, 6003 when a score is not finite.
    """
    response = response_of(scorer, request, name)
    refuse_failures(response, request)
    return response


def response_of(scorer: RewardScorer, request: RewardRequest, name: str) -> RewardResponse:
    """Returns the scorer's response to the columns that it reads.

    A row that has a score that is not finite, or that the scorer could not score, is listed in `failures`.

    Raises:
        RewardError: 6002 when the scorer fails as a whole or the count is wrong.
    """
    try:
        response = scorer.score(request.columns(scorer.reads, scorer.reads_levels))
    except UniRLError:
        raise
    except (Exception, SystemExit) as error:  # a scorer is foreign code: whatever it raises, the error must name it
        raise RewardError(
            f"reward {name!r} failed on {len(request)} samples from {request.sample_ids[0]!r} on: "
            f"{explained(error) or f'{type(error).__name__}: {error}'}"
            "\n  No reward was attached; a failed reward is never counted as zero"
        ) from error
    check_response(scorer, response, request, name)
    total = column_of(response.total)
    components, logged_rewards = (
        {part: column_of(scores) for part, scores in columns.items()}
        for columns in (response.components, response.logged_rewards)
    )
    failures: dict[int, Failures] = dict(response.failures)
    for part, scores in [(name, total), *((f"{name}.{part}", scores) for part, scores in components.items())]:
        for row in (~torch.isfinite(scores)).nonzero().flatten().tolist():
            known = failures.get(row, ())
            if all(failure.reward in logged_rewards for failure in known):
                why = f"reward {part!r} gave {float(scores[row])} to sample {request.sample_ids[row]!r}"
                failures[row] = (ScoringFailure(name, why, InvalidScoreError.code), *known)
            total[row] = torch.nan
    return replace(response, total=total, components=components, logged_rewards=logged_rewards, failures=failures)


def refuse_failures(response: RewardResponse, request: RewardRequest) -> None:
    """Raises RewardError for the first row without a reward."""
    failed = response.failed_rows()
    if failed:
        failure = response.failures[failed[0]][0]
        place = "" if request.places is None else f" The sample belongs to {request.places[failed[0]]}."
        raise RewardError.of_code(failure.code)(
            f"{failure.why} ({len(failed)} of {len(request)} samples could not be scored).{place} A reward must be a "
            "finite number, and a failed one is never counted as zero. Correct the prompt or the reward, or let "
            "reward.on_failure drop such samples"
        )


def column_of(scores: Tensor) -> Tensor:
    """Returns a float32 copy [B] on the CPU."""
    return scores.detach().to("cpu", torch.float32, copy=True)


def score_by_halves(scorer: RewardScorer, request: RewardRequest, name: str) -> RewardResponse:
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
            return failed_response(request, name, error)
    middle = len(request) // 2
    halves = [range(middle), range(middle, len(request))]
    return concat_responses([score_by_halves(scorer, request.select(rows), name) for rows in halves])


def failed_response(request: RewardRequest, name: str, error: RewardError) -> RewardResponse:
    """Returns a response without scores, in which every row failed with this error."""
    failures = dict.fromkeys(range(len(request)), (ScoringFailure(name, str(error), error.code),))
    return RewardResponse(total=torch.full((len(request),), torch.nan), components={}, failures=failures)


def concat_responses(responses: Sequence[RewardResponse]) -> RewardResponse:
    """Joins the responses to consecutive rows. A component that is missing, because all rows failed, is NaN."""
    failures: dict[int, Failures] = {}
    answers: list[Answer | None] = []
    for response in responses:
        failures |= {len(answers) + row: row_failures for row, row_failures in response.failures.items()}
        answers += response.answers or [None] * len(response.total)
    return RewardResponse(
        total=torch.cat([response.total for response in responses]),
        components=_concat_columns([response.components for response in responses], responses),
        logged_rewards=_concat_columns([response.logged_rewards for response in responses], responses),
        failures=failures,
        answers=answers if any(response.answers is not None for response in responses) else None,
    )


def _concat_columns(parts: Sequence[Mapping[str, Tensor]], responses: Sequence[RewardResponse]) -> dict[str, Tensor]:
    blanks = [torch.full_like(response.total, torch.nan) for response in responses]
    return {
        name: torch.cat([part.get(name, blank) for part, blank in zip(parts, blanks, strict=True)])
        for name in dict.fromkeys(name for part in parts for name in part)
    }


def objective_of(scorer: RewardScorer, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Returns the scorer's differentiable total [B] on the images' device. Raises RewardError (6002) if it has none."""
    scores: object = scorer.objective(images, prompts)
    has_graph = images.requires_grad and torch.is_grad_enabled()
    if not isinstance(scores, Tensor):
        found = type(scores).__name__
    elif scores.shape != (len(images),):
        found = f"a tensor of shape {list(scores.shape)}"
    elif has_graph and not scores.requires_grad:
        found = f"a tensor of shape {list(scores.shape)} without a gradient"
    else:
        return scores.to(images.device)
    lines = [
        f"reward {name_of(scorer)!r}: {definition(type(scorer), 'objective')}: objective returned {found}. It must "
        f"return a tensor of shape [{len(images)}] with its gradient: one number per image, without detach()",
        *contract_of(type(scorer), "objective"),
    ]
    raise RewardError("\n  ".join(lines))


def score_rows(
    request: RewardRequest, names: Sequence[str], score_row: Callable[[int], Mapping[str, float]], threads: int = 1
) -> RewardResponse:
    """Scores a request row by row. A row on which `score_row` raises is listed in `failures`; the others keep scores.

    Args:
        names: the components; the first one is the total.
        threads: rows that are scored at the same time.

    Raises:
        RewardError: 6001 when the server that scores the rows cannot be reached; any other UniRLError of `score_row`.
    """
    scores = torch.full((len(names), len(request)), torch.nan)
    failures: dict[int, Failures] = {}

    def reported(row: int) -> Mapping[str, float]:
        try:
            return score_row(row)
        finally:
            progress("scored sample", len(request))

    with ThreadPoolExecutor(threads) as pool:
        attempts = [pool.submit(copy_context().run, reported, row) for row in range(len(request))]
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
                ScoringFailure(names[0], f"reward {names[0]!r}, sample {request.sample_ids[row]!r}: {why}", code),
            )
    components = dict(zip(names, scores, strict=True))
    return RewardResponse(total=scores[0].clone(), components=components, failures=failures)


def _concerns_one_row(error: BaseException) -> bool:
    """Returns False for an error of the scorer as a whole or of the process."""
    if isinstance(error, RewardError):
        return not isinstance(error, RewardUnreachableError)
    return isinstance(error, Exception) and not isinstance(error, UniRLError)
