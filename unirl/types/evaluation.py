"""Results of an evaluation: scores of held-out prompts, and accuracy when the reward judges answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from unirl.types.batch import concat_rows
from unirl.types.primitives import Facts, Preview
from unirl.types.reward import Answer
from unirl.types.rows import rows_by_key

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Scores of the samples of held-out prompts, one row per sample."""

    sample_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    prompts: tuple[str, ...]
    rewards: Tensor  # [B] float32
    components: dict[str, Tensor]  # name -> [B] float32
    media: Preview
    track: str
    """The name of the track that was scored."""
    prompt_image_uris: tuple[tuple[str, ...], ...] = ()
    """Paths or addresses of the images in each prompt; () if no prompt has any."""
    logged_rewards: dict[str, Tensor] = field(default_factory=dict)  # name -> [B] float32, NaN = not scored
    answers: tuple[Answer | None, ...] | None = None
    """The answer in each sample, if the reward judges answers. None for samples that were not judged."""
    facts: tuple[Facts, ...] = ()
    """Further facts about each sample, to be shown in reports; () = none."""
    unscored: int = 0
    """Number of samples that could not be scored. They appear in no other field."""

    @staticmethod
    def joined(parts: Sequence[EvalResult]) -> EvalResult:
        """One result with the rows of all `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        logged = dict.fromkeys(name for part in parts for name in part.logged_rewards)
        answers = [part.answers for part in parts if part.answers is not None]
        return EvalResult(
            sample_ids=_end_to_end(part.sample_ids for part in parts),
            group_ids=_end_to_end(part.group_ids for part in parts),
            prompts=_end_to_end(part.prompts for part in parts),
            prompt_image_uris=_end_to_end(part.prompt_image_uris for part in parts),
            rewards=torch.cat([part.rewards for part in parts]),
            components={name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components},
            logged_rewards={name: torch.cat([part._logged_scores(name) for part in parts]) for name in logged},
            answers=_end_to_end(answers) if len(answers) == len(parts) else None,
            facts=_end_to_end(part.facts for part in parts),
            unscored=sum(part.unscored for part in parts),
            media=concat_rows([part.media for part in parts]),
            track=parts[0].track,
        )

    def _logged_scores(self, name: str) -> Tensor:
        """[B] scores of one logged-only reward; NaN where a sample was not scored."""
        return self.logged_rewards.get(name, torch.full_like(self.rewards, math.nan))

    @property
    def mean(self) -> float:
        """The mean reward."""
        return float(self.rewards.double().mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over prompts. Samples of one prompt are not independent."""
        means = [float(self.rewards[rows].double().mean()) for rows in self.groups()]
        if len(means) < 2:
            return 0.0
        centre = sum(means) / len(means)
        return math.sqrt(sum((m - centre) ** 2 for m in means) / (len(means) - 1) / len(means))

    def groups(self) -> list[list[int]]:
        """The rows of each group of samples of one prompt."""
        return list(rows_by_key(self.group_ids).values())

    def metrics(self) -> dict[str, float]:
        """The metrics to log, under `eval/`."""
        metrics = {
            "eval/reward_mean": self.mean,
            "eval/reward_stderr": self.standard_error,
            "eval/reward_min": float(self.rewards.min()),
            "eval/reward_max": float(self.rewards.max()),
        }
        scores = self.components | {name: values[values.isfinite()] for name, values in self.logged_rewards.items()}
        metrics |= {
            f"eval/{name}_mean": float(values.double().mean()) for name, values in scores.items() if len(values)
        }
        metrics |= accuracy(self.answers_by_prompt())
        return metrics | ({"eval/unscored": float(self.unscored)} if self.unscored else {})

    def answers_by_prompt(self) -> list[list[Answer]]:
        """The answers to each prompt, without those that were not judged."""
        if self.answers is None:
            return []
        return [[answer for row in rows if (answer := self.answers[row]) is not None] for rows in self.groups()]

    def facts_of(self, row: int) -> Facts:
        """Facts about a sample besides its scores, including its answer."""
        answer = self.answers[row] if self.answers is not None else None
        text: Facts = {} if answer is None or answer.text is None else {"answer": answer.text}
        right: Facts = {} if answer is None else {"right": answer.right}
        return {**(self.facts[row] if self.facts else {}), **text, **right}


def accuracy(prompts: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """`eval/avg@n`, `pass@k` for every power of two k <= n, `maj@n`: means over prompts.

    n is the largest number of answers to one prompt. `pass@k` leaves out prompts with fewer than k answers. `maj@n`
    needs the text of every answer and is left out otherwise.
    """
    prompts = [answers for answers in prompts if answers]
    if not prompts:
        return {}
    most = max(len(answers) for answers in prompts)
    metrics = {f"eval/avg@{most}": _mean([_mean([answer.right for answer in answers]) for answers in prompts])}
    for k in (1 << power for power in range(most.bit_length())):
        enough = [answers for answers in prompts if len(answers) >= k]
        metrics[f"eval/pass@{k}"] = _mean([pass_at(k, len(a), sum(one.right for one in a)) for a in enough])
    if all(answer.text is not None for answers in prompts for answer in answers):
        metrics[f"eval/maj@{most}"] = _mean([majority(answers) for answers in prompts])
    return metrics


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n, is right.

    1 - C(n - right, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[Answer]) -> float:
    """1 if the most frequent answer is right, else 0; the mean over tied answers if there is a tie.

    All right answers count as the same answer, whatever their text. A response without an answer has no vote; the
    result is 0 if no response has one.
    """
    votes = Counter("" if answer.right else answer.text for answer in answers if answer.right or answer.text)
    if not votes:
        return 0.0
    first = max(votes.values())
    tied = [text for text, count in votes.items() if count == first]
    return tied.count("") / len(tied)


def _end_to_end(parts: Iterable[Sequence[T]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
