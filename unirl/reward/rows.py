"""Scorers that look at one row at a time: what becomes of a row on which they fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from unirl.config.errors import RewardError, RewardUnreachableError, UniRLError
from unirl.types.reward import Failure, Failures, RewardRequest, RewardResponse

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
