"""Rewards of texts that have a right answer: what they share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, ClassVar

from unirl.config.dependencies import need
from unirl.config.errors import RewardError
from unirl.reward.base import RewardScorer
from unirl.reward.mathematics.checker import MathChecker
from unirl.reward.scoring import score_rows
from unirl.types.protocols import Capabilities
from unirl.types.reward import Answer, RewardRequest, RewardResponse

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


@dataclass(frozen=True, kw_only=True)
class AnswerSpec:
    """Where the right answer is."""

    answer_key: str = "answer"
    """Metadata key of it: a text or a number."""


@dataclass(frozen=True)
class AnswerVerdict:
    """What a scorer of right answers makes of a response."""

    scores: Mapping[str, float]
    """By component; the scorer's own is 1 for the right answer."""
    said: str
    """The answer that was read, equal for equal ones; "" = the response gives none."""


class AnswerScorer(RewardScorer):
    """1 for the right answer, 0 for another one or none; a prompt whose metadata has no right answer has no score."""

    name: ClassVar[str]
    """The component's name."""
    reads = ("texts", "metadata")
    capabilities = Capabilities(modalities=("text",))
    config: AnswerSpec

    def __init__(self, config: AnswerSpec) -> None:
        self.config = config
        self.names: tuple[str, ...] = (self.name,)
        self.threads = 1

    @abstractmethod
    def judge(self, text: str, answer: str) -> AnswerVerdict:
        """Of a response, given what `read_answer` made of the right answer."""

    def read_answer(self, answer: str) -> str:
        """The right answer as `judge` takes it. Raises RewardError when it has not the form that it must have."""
        return answer

    def reference_answer(self, metadata: Mapping[str, Any]) -> str:
        """The right answer of a prompt. Raises RewardError when there is none."""
        found = metadata.get(self.config.answer_key)
        answer = str(found).strip() if isinstance(found, str | int | float) and not isinstance(found, bool) else ""
        if not answer:
            raise RewardError(
                f"no right answer in metadata {self.config.answer_key!r} (keys: {sorted(metadata)}, value: {found!r}). "
                "Write it there as text or as a number, or name its key in answer_key"
            )
        return self.read_answer(answer)

    def check_prompt(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        self.reference_answer(metadata)

    def score(self, request: RewardRequest) -> RewardResponse:
        texts, metadata = request.texts, request.metadata
        assert texts is not None and metadata is not None

        answers: dict[int, Answer] = {}

        def score_row(row: int) -> Mapping[str, float]:
            judged = self.judge(texts[row], self.reference_answer(metadata[row]))
            answers[row] = Answer(right=judged.scores[self.name] == 1.0, text=judged.said)
            return judged.scores

        scored = score_rows(request, self.names, score_row, self.threads)
        return replace(scored, answers=[answers.get(row) for row in range(len(request))])


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text, braces within it balanced; None when there is no whole one."""
    for opening in reversed(list(BOX.finditer(text))):
        content = _balanced(text, opening.end())
        if content is not None:
            return content.strip()
    return None


def _balanced(text: str, begin: int) -> str | None:
    """The text from `begin` to the brace that closes the one before it."""
    depth = 1
    for at in range(begin, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
        if depth == 0:
            return text[begin:at]
    return None


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
        answer = self.reference_answer(metadata)
        with self._checker() as checker:
            checker.check_reference(answer)

    def judge(self, text: str, answer: str) -> AnswerVerdict:
        with self._checker() as checker:
            found = checker.judge(answer, self.answer_in(text))
        scores = (float(found.verdict == "right"), float(found.verdict == "undecided"))
        return AnswerVerdict(dict(zip(self.names, scores, strict=True)), found.said)
