"""Many clients through a proxy that spoils a share of what passes: nothing is lost, repeated or wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from reward_service.faults import FAULTS, FaultProxy

from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.client.retries import score_items
from unirl.reward.client.wire import ScoreItem, Turn

from .test_service import figure

CLIENTS, ITEMS = 12, 40


def items(client: int) -> list[ScoreItem]:
    """Each has a length of its own."""
    lengths = range(client * ITEMS + 10, (client + 1) * ITEMS + 10)
    return [ScoreItem(history=[Turn(text="x" * n), Turn(text="")], required_rewards=["odd"]) for n in lengths]


def ask(url: str, client: int) -> list[float]:
    """The scores of one client's items."""
    config = ConnectionConfig(base_url=url, batch_size=4, concurrency=2, timeout=3.0, retry_delay=0.01)
    connection = Connection(config)
    try:
        return [outcome.scores["odd"]["total"] for outcome in score_items(connection, items(client))]
    finally:
        connection.close()


@pytest.mark.parametrize("rate", [0.2, 0.4])
def test_under_faults_every_item_gets_its_own_score_and_is_scored_once(rate, service, http):
    scored = 'unirl_reward_items_total{outcome="scored",reward="odd"}'
    before = figure(http, scored)
    with FaultProxy(service.url, rate=rate, seed=3, delay_s=4.0) as proxy, ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda client: ask(proxy.url, client), range(CLIENTS)))
        spoiled = {fault for fault in FAULTS if proxy.counts[fault]}
    assert [score for answer in answers for score in answer] == [float(n) for n in range(10, CLIENTS * ITEMS + 10)]
    assert len(spoiled) >= 5
    assert figure(http, scored) == before + CLIENTS * ITEMS
