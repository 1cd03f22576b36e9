"""The base classes of rewards for texts with a right answer, in plain text or in mathematics."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import ClassVar

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
    """The place of the right answer."""

    answer_key: str = "answer"
    """Metadata key of the right answer, which is a text or a number."""


class AnswerScorer(RewardScorer):
    """1 for the right answer, 0 for another answer or none. It fails on a sample without a right answer."""

    name: ClassVar[str]
    """Name of the component."""
    reads = ("texts", "metadata")
    capabilities = Capabilities(modalities=("text",))
    config: AnswerSpec

    def __init__(self, *, config: AnswerSpec = AnswerSpec()) -> None:
        self.config = config
        self.names: tuple[str, ...] = (self.name,)
        self.threads = 1

    @abstractmethod
    def judge(self, text: str, answer: str) -> tuple[dict[str, float], str]:
        """Returns the scores of a response by component, and the answer that it gives; "" if it gives none.

        The component with the scorer's name is 1 for the right answer. Equal answers are equal texts.

        Args:
            answer: the right answer as `read_answer` returns it.
        """

    def read_answer(self, answer: str) -> str:
        """Returns the right answer in the form that `judge` needs. Raises RewardError when it cannot be read."""
        return answer

    def reference_answer(self, metadata: Mapping[str, object]) -> str:
        """Returns the right answer of a prompt. Raises RewardError when there is none."""
        value = metadata.get(self.config.answer_key)
        answer = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
        if not answer:
            raise RewardError(
                f"no right answer in metadata {self.config.answer_key!r} (keys: {sorted(metadata)}, value: {value!r}). "
                "Write it there as text or as a number, or name its key in answer_key"
            )
        return self.read_answer(answer)

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        self.reference_answer(metadata)

    def score(self, request: RewardRequest) -> RewardResponse:
        texts, metadata = request.texts, request.metadata
        assert texts is not None and metadata is not None

        answers: list[Answer | None] = [None] * len(request)

        def score_row(row: int) -> Mapping[str, float]:
            scores, answer = self.judge(texts[row], self.reference_answer(metadata[row]))
            answers[row] = Answer(right=scores[self.name] == 1.0, text=answer)
            return scores

        response = score_rows(request, self.names, score_row, self.threads)
        return replace(response, answers=answers)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last complete \boxed{...} of a text, with balanced braces; None if there is none."""
    for opening in reversed(list(BOX.finditer(text))):
        content = _balanced(text, opening.end())
        if content is not None:
            return content.strip()
    return None


def _balanced(text: str, begin: int) -> str | None:
    """Returns the text from `begin` to the brace that closes the brace before `begin`; None if no brace closes it."""
    depth = 1
    for at in range(begin, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
        if depth == 0:
            return text[begin:at]
    return None


@dataclass(frozen=True, kw_only=True)
class MathSpec(AnswerSpec):
    """The place of the right answer, and the deadline and number of comparisons."""

    timeout_s: float = 5.0
    """Deadline of one comparison, in seconds of wall-clock time."""
    num_workers: int = 1
    """Number of processes, each of which compares one row at a time."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"MathSpec.timeout_s must be > 0 seconds, got {self.timeout_s}")
        if self.num_workers < 1:
            raise ValueError(f"MathSpec.num_workers must be >= 1, got {self.num_workers}")


class MathScorer(AnswerScorer):
    """1 if math-verify finds the response's answer equal to the right answer, else 0.

    A response without an answer, or with an answer that is not mathematics, scores 0. A response that cannot be
    compared within `timeout_s` or within the memory limit has no score: it is a failure, which `reward.on_failure` may
    drop. So is a right answer that is missing or is not LaTeX, and a process that dies or is too slow for easy
    questions. A right answer that math-verify cannot evaluate (50\\%) is compared as text.
    """

    config: MathSpec

    def __init__(self, *, config: MathSpec = MathSpec()) -> None:
        super().__init__(config=config)
        self.threads = config.num_workers
        self.check_start()
        self._idle: SimpleQueue[MathChecker] = SimpleQueue()
        for _ in range(config.num_workers):
            self._idle.put(MathChecker(config.timeout_s))

    def check_start(self) -> None:
        """Raises DependencyError if math-verify is not installed: for a run, before it makes a folder."""
        need("math_verify", extra="math", by=f"reward {self.name!r}")

    @abstractmethod
    def answer_in(self, text: str) -> str:
        """Returns the part of a response to compare; empty if the response gives no answer."""

    @contextmanager
    def _checker(self) -> Iterator[MathChecker]:
        """Reserves a process for the caller."""
        checker = self._idle.get()
        try:
            yield checker
        finally:
            self._idle.put(checker)

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        answer = self.reference_answer(metadata)
        with self._checker() as checker:
            checker.check_reference(answer)

    def judge(self, text: str, answer: str) -> tuple[dict[str, float], str]:
        with self._checker() as checker:
            comparison = checker.judge(answer, self.answer_in(text))
        if comparison.verdict == "undecided":
            raise RewardError(
                f"the answer was not compared with {answer!r} within {self.config.timeout_s:g} s and the memory limit, "
                "so it is neither right nor wrong. Set reward.on_failure.max_dropped_fraction to train without such "
                "samples, or raise config.timeout_s"
            )
        return {self.name: float(comparison.verdict == "right")}, comparison.answer
