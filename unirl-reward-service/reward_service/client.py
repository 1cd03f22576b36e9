"""A client of reward services for any Python program, without torch.

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
    """A connection that retries until all items have their scores. The settings are those of `ConnectionConfig`."""

    def __init__(self, base_url: str, **settings: Any) -> None:
        self._connection = Connection(ConnectionConfig(base_url=base_url, **settings))

    def score(self, items: Sequence[ScoreItem | Mapping[str, Any]]) -> list[dict[str, dict[str, float]]]:
        """Returns reward -> part -> score for every item, in their order.

        Raises:
            RewardError: the service cannot be reached, refuses the request, or could not score one of the items.
        """
        outcomes = self.outcomes(items)
        for index, outcome in enumerate(outcomes):
            for name, scores in outcome.items():
                if isinstance(scores, ItemError):
                    raise RewardError(f"reward {name!r} has no score for item {index}: {scores}")
        return [{k: v for k, v in outcome.items() if not isinstance(v, ItemError)} for outcome in outcomes]

    def outcomes(self, items: Sequence[ScoreItem | Mapping[str, Any]]) -> list[dict[str, ScoresOrError]]:
        """Returns the same as `score`, with an `ItemError` where a reward could not score.

        Raises:
            RewardError: the service cannot be reached, or refuses the request.
            msgspec.ValidationError: an item does not have the form of `unirl.reward.client.wire.ScoreItem`.
        """
        results = score_items(self._connection, [msgspec.convert(item, ScoreItem) for item in items])
        return [result.scores for result in results]

    def health(self) -> Health:
        """Returns the rewards of the service and the readiness of their replicas. Raises RewardError."""
        return self._connection.health()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
