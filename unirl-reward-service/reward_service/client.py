"""Asking a reward service from any Python program, without torch.

client = RewardClient("http://127.0.0.1:8000")
client.score([{"history": [{"text": "a cat", "image_b64": ...}], "required_rewards": ["pickscore"]}])
# [{"pickscore": {"total": 0.83, "pickscore": 0.83}}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from unirl.config.errors import RewardError
from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.client.retries import ScoresOrError, score_items
from unirl.reward.client.wire import Health, ItemError, ScoreItem


class RewardClient:
    """A connection that sends items again until they have their scores; the settings are `ConnectionConfig`'s."""

    def __init__(self, base_url: str, **settings: Any) -> None:
        self._connection = Connection(ConnectionConfig(base_url=base_url, **settings))

    def score(self, items: Sequence[ScoreItem | Mapping[str, Any]]) -> list[dict[str, dict[str, float]]]:
        """reward -> part -> score of every item, in their order.

        Raises:
            RewardError: the service cannot be reached, refuses, or could not score one of the items.
        """
        outcomes = self.outcomes(items)
        for place, outcome in enumerate(outcomes):
            for name, found in outcome.items():
                if isinstance(found, ItemError):
                    raise RewardError(f"reward {name!r} has no score of item {place}: {found}")
        return [{k: v for k, v in outcome.items() if not isinstance(v, ItemError)} for outcome in outcomes]

    def outcomes(self, items: Sequence[ScoreItem | Mapping[str, Any]]) -> list[dict[str, ScoresOrError]]:
        """The same, with an `ItemError` where a reward could not score.

        Raises:
            RewardError: the service cannot be reached, or refuses.
            msgspec.ValidationError: an item has another form than `unirl.reward.client.wire.ScoreItem`.
        """
        found = score_items(self._connection, [msgspec.convert(item, ScoreItem) for item in items])
        return [outcome.scores for outcome in found]

    def health(self) -> Health:
        """Which rewards there are, and which of their replicas are ready. Raises RewardError."""
        return self._connection.health()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
