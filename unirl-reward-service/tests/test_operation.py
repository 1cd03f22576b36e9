"""Operation of a service: TLS, quotas of connections, slow readers, draining, and workers that grow."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import uvicorn
from reward_service.__main__ import Server, main
from reward_service.child import Child
from reward_service.config import LimitsConfig, config_of
from reward_service.connections import limited_protocol
from reward_service.frames import ItemScores, ScorerRow
from reward_service.metrics import Metrics
from reward_service.rewards import Job, RewardQueue
from reward_service.running import RunningService

from unirl.config.errors import ConfigError, RewardError, UsageError
from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.client.wire import JSON, ScoreItem, Turn

STAND_IN = """#!{python}
import socket, sys, time
import msgspec
from reward_service.frames import Channel, ScorerLoaded, BatchOutcomes, ItemScores
channel, held = Channel(int(sys.argv[-1])), []
channel.receive()
channel.send(ScorerLoaded(["prompts"]))
while True:
    batch = channel.receive()
    if batch.rows[0].prompt == "grow":
        held.append(b"x" * 2**27)
    if batch.rows[0].prompt == "slow":
        time.sleep(1.0)
    channel.send(BatchOutcomes([ItemScores({{"total": float(len(row.prompt or ""))}}) for row in batch.rows]))
"""
"""A worker without torch, which starts at once. The total is the length of the prompt."""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> str:
    """An interpreter that runs the worker above, whatever it is asked to run."""
    file = tmp_path_factory.mktemp("stand-in") / "python"
    file.write_text(STAND_IN.format(python=sys.executable))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A folder with a certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=service"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("the program openssl is not installed")
    return folder


@pytest.fixture(scope="module")
def tls(stand_in, certificate) -> Iterator[RunningService]:
    server = {
        "tls_cert": str(certificate / "cert.pem"),
        "tls_key": str(certificate / "key.pem"),
        "drain_s": 5.0,
        "limits": {"connections": 8, "header_s": 5.0, "body_s": 1.0},
    }
    rewards = [{"name": "length", "scorer": "stand-in", "python": stand_in}]
    with RunningService({"server": server, "rewards": rewards}) as running:
        yield running


def items(*prompts: str) -> list[ScoreItem]:
    return [ScoreItem(history=[Turn(text=prompt), Turn(text="")], required_rewards=["length"]) for prompt in prompts]


@pytest.mark.slow
def test_a_client_that_trusts_the_certificate_scores_over_tls(tls, certificate):
    assert tls.url.startswith("https://")
    connection = Connection(ConnectionConfig(base_url=tls.url, ca_file=str(certificate / "cert.pem")))
    assert connection.post(items("four")).results == [{"length": {"total": 4.0}}]
    with pytest.raises(RewardError, match="CERTIFICATE_VERIFY_FAILED"):
        Connection(ConnectionConfig(base_url=tls.url)).health()
    with pytest.raises(ConfigError, match="has no certificate that can be read"):
        Connection(ConnectionConfig(base_url=tls.url, ca_file=__file__))


def test_a_certificate_without_its_key_is_found_at_the_start(certificate, tmp_path, capsys):
    file = tmp_path / "service.yaml"
    server = {"tls_cert": str(certificate / "key.pem"), "tls_key": str(certificate / "cert.pem"), "port": 0}
    file.write_text(json.dumps({"server": server, "rewards": [{"name": "a", "scorer": "b"}]}))
    assert main([str(file)]) == UsageError.exit_status
    assert "are no certificate with its key" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plain(stand_in) -> Iterator[RunningService]:
    server = {"drain_s": 5.0, "limits": {"connections": 8, "header_s": 5.0, "body_s": 1.0}}
    rewards = [{"name": "length", "scorer": "stand-in", "python": stand_in}]
    with RunningService({"server": server, "rewards": rewards}) as running:
        yield running


def dial(service: RunningService, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(service.url)
    return socket.create_connection((address.hostname, address.port), timeout=30, source_address=(source, 0))


@pytest.mark.slow
def test_one_client_cannot_use_up_the_connections(plain):
    held = [dial(plain, "127.0.0.2") for _ in range(4)]
    try:
        one_more = dial(plain, "127.0.0.2")
        answer = one_more.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head and json.loads(body)["kind"] == "busy"
        assert httpx2.get(f"{plain.url}/live", trust_env=False).status_code == 200
    finally:
        for connection in (*held, one_more):
            connection.close()


def test_a_client_that_does_not_read_its_responses_is_disconnected():
    """It asks and asks, until the buffers between are full."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(100_000)})

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            while True:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20)

    async def run():
        protocol = limited_protocol(LimitsConfig(body_s=0.5))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            server = Server(uvicorn.Config(app, http=protocol, lifespan="off", log_level="warning"), None)
            serving = asyncio.ensure_future(server.serve([listening]))
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(ask, listening.getsockname()[1])
            server.should_exit = True
            await serving

    asyncio.run(run())


def test_a_worker_that_grows_beyond_its_limit_is_replaced_and_no_score_is_lost(stand_in):
    reward = {"name": "length", "scorer": "stand-in", "python": stand_in, "recycle_mb": 100.0}
    config = config_of({"rewards": [reward]})

    async def run():
        queue = RewardQueue(config.rewards[0], config, Metrics())
        await queue.start()
        (first,) = queue.pids
        totals = []
        for prompt in ("a", "grow", "bb"):
            job = Job(ScorerRow("id", prompt=prompt), asyncio.get_running_loop().create_future())
            queue.submit([job])
            outcome = await asyncio.wait_for(job.outcome, 60)
            assert isinstance(outcome, ItemScores)
            totals.append(outcome.parts["total"])
        (second,) = queue.pids
        await queue.close()
        return totals, first, second, queue._metrics.text().decode()

    totals, first, second, metrics = asyncio.run(run())
    assert totals == [1.0, 4.0, 2.0] and first != second
    assert 'unirl_reward_restarts_total{cause="memory",reward="length"} 1.0' in metrics


def test_the_memory_of_a_process_is_that_of_the_system():
    async def run() -> tuple[float, float]:
        child = await Child.start([sys.executable, "-c", "held = b'x' * 2**27; print(flush=True); input()"])
        try:
            small = child.resident_mb()
            for _ in range(200):
                await asyncio.sleep(0.05)
                if child.resident_mb() > 128:
                    break
            return small, child.resident_mb()
        finally:
            await child.kill()
            assert child.resident_mb() == 0.0

    _, held = asyncio.run(run())
    assert 128 < held < 200


@pytest.mark.slow
def test_after_sigterm_the_request_in_progress_is_answered_and_new_ones_are_refused(stand_in):
    rewards = [{"name": "length", "scorer": "stand-in", "python": stand_in}]
    with RunningService({"server": {"drain_s": 20.0}, "rewards": rewards}) as service:
        connection, answers = Connection(ConnectionConfig(base_url=service.url)), []
        asking = threading.Thread(target=lambda: answers.append(connection.post(items("slow"))))
        asking.start()
        time.sleep(0.4)
        os.kill(service.pid, signal.SIGTERM)
        time.sleep(0.2)
        probes = {path: httpx2.get(service.url + path, trust_env=False).status_code for path in ("/live", "/ready")}
        refused = httpx2.post(f"{service.url}/score", content=b"{}", headers={"content-type": JSON}, trust_env=False)
        assert probes == {"/live": 200, "/ready": 503}
        assert (refused.status_code, refused.json()["kind"]) == (503, "draining")
        asking.join()
        assert answers[0].results == [{"length": {"total": 4.0}}]
        assert service.stop() == 0
