"""Rewards of texts whose right answer is mathematics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from unirl.config.extras import need
from unirl.reward.mathematics.checker import MathChecker
from unirl.reward.mathematics.text_answers import AnswerScorer, AnswerSpec, Judgement


@dataclass(frozen=True, kw_only=True)
class MathSpec(AnswerSpec):
    """How answers are compared."""

    timeout_s: float = 5.0
    """Seconds for one comparison, by the clock on the wall."""
    num_workers: int = 1
    """Processes that compare, each a row at a time."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"{type(self).__name__}.timeout_s must be > 0 seconds, got {self.timeout_s}")
        if self.num_workers < 1:
            raise ValueError(f"{type(self).__name__}.num_workers must be >= 1, got {self.num_workers}")


class MathScorer(AnswerScorer):
    """1 if math-verify finds the response's answer equal to the right one, else 0.

    A response whose answer is missing, or is no mathematics, is wrong: 0. So is one that cannot be compared within
    `timeout_s` or the memory of a process, while an easy question still can; the component `<name>_undecided` is 1 for
    it. A right answer that is missing or no LaTeX, and a process that dies or is too slow for easy questions, are
    failures. A right answer that math-verify cannot calculate with (50\\%) is compared as text.
    """

    config: MathSpec

    def __init__(self, config: MathSpec) -> None:
        super().__init__(config)
        self.names, self.threads = (self.name, f"{self.name}_undecided"), config.num_workers
        need("math_verify", extra="math", by=f"reward {self.name!r}")
        self._idle: SimpleQueue[MathChecker] = SimpleQueue()
        for _ in range(config.num_workers):
            self._idle.put(MathChecker(config.timeout_s))

    @abstractmethod
    def answer_in(self, text: str) -> str:
        """What of a response is compared; empty when it gives no answer."""

    @contextmanager
    def _checker(self) -> Iterator[MathChecker]:
        """A process that nobody else uses meanwhile."""
        checker = self._idle.get()
        try:
            yield checker
        finally:
            self._idle.put(checker)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        answer = self.answer_of(metadata)
        with self._checker() as checker:
            checker.check_reference(answer)

    def judge(self, text: str, answer: str) -> Judgement:
        with self._checker() as checker:
            found = checker.judge(answer, self.answer_in(text))
        scores = (float(found.verdict == "right"), float(found.verdict == "undecided"))
        return Judgement(dict(zip(self.names, scores, strict=True)), found.said)
