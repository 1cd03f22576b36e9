"""Starts of episodes as the prompts of a policy that acts: an endless sequence, each another beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from unirl.config.errors import InvalidValueError, ResumeError
from unirl.data.datasets import Prompt
from unirl.types.protocols import State


class EnvironmentStarts:
    """Prompt n is start n of task n mod the number of tasks. Evaluations have starts of their own.

    What a start is, the environment makes of the seed that belongs to its name: `start17`, or `eval3`.
    """

    toy: ClassVar[Mapping[str, object]] = {}
    prompts: Sequence[Prompt] = ()
    """Nothing is known about starts before they are made."""

    def __init__(self, seed: int = 42, eval_data_path: str | None = None, *, tasks: tuple[str, ...] = ("",)) -> None:
        """The trainer passes the run's seed. The names of starts do not depend on it, but what they lead to does.

        Args:
            tasks: instructions, for environments and policies that read one. They take turns.
        """
        if not tasks:
            raise InvalidValueError("data_source.tasks is empty. Leave it out for environments without instructions")
        if eval_data_path is not None:
            raise InvalidValueError(
                f"evaluation.data_path={eval_data_path}: evaluations of environments have starts of their own, not a "
                "file. Leave it out; evaluation.max_prompts is their number"
            )
        self.tasks = tasks
        self.cursor = 0

    def take(self, count: int, size: tuple[int, int] | None = None) -> list[Prompt]:
        """The next `count` starts. Moves the cursor."""
        starts = [self._start("start", number) for number in range(self.cursor, self.cursor + count)]
        self.cursor += count
        return starts

    def sized(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """The prompts themselves: episodes have no size in pixels."""
        return list(prompts)

    def eval_prompts(self, max_prompts: int) -> list[Prompt]:
        """The starts of evaluations, the same in each of them."""
        return [self._start("eval", number) for number in range(max_prompts)]

    def _start(self, kind: str, number: int) -> Prompt:
        return Prompt(text=self.tasks[number % len(self.tasks)], prompt_id=f"{kind}{number}")

    def state_dict(self) -> State:
        return {"cursor": self.cursor, "tasks": list(self.tasks)}

    def load_state_dict(self, state: State) -> None:
        """Raises ResumeError (7002) if the tasks differ from those of the checkpoint."""
        if state["tasks"] != list(self.tasks):
            raise ResumeError(
                f"data_source.tasks changed since the checkpoint, from {state['tasks']} to {list(self.tasks)}. Restore "
                "it, or start a new run"
            )
        self.cursor = int(state["cursor"])
