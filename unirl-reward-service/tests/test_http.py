"""What is refused before any worker is asked, each with its status and kind; no worker runs in this file."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import tracemalloc

import httpx2
import msgspec
import numpy as np
import pytest
from reward_service.__main__ import Server, main
from reward_service.app import Service, make_app
from reward_service.config import config_of, read_token
from reward_service.faults import image_file
from reward_service.rewards import Job

from unirl.config.errors import ConfigError, UsageError
from unirl.reward.client.wire import JSON, MSGPACK, ItemError, Refusal, ScoreItem, ScoreRequest, Turn, decode, encode

TOKEN = "a-token-of-sixteen-or-more"
JSON_TYPE = {"content-type": JSON}


def a_service(**limits) -> Service:
    tree = {
        "server": {
            "limits": {"items": 8, "body_mb": 0.01, "body_s": 0.2, "turns": 2, **limits},
            "queue_timeout_s": 0.1,
            "host_names": ["test"],
        },
        "rewards": [{"name": "clip", "scorer": "brightness", "max_queue": 16}],
    }
    return Service(config_of(tree))


def ask(method: str, path: str, service: Service | None = None, token: str | None = None, **options) -> httpx2.Response:
    """One request to a service without workers."""

    async def run() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=make_app(service or a_service(), token))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def refused(response: httpx2.Response) -> tuple[int, str]:
    """Status and kind."""
    return response.status_code, decode(Refusal, response.content, JSON).kind


def body(**changes) -> bytes:
    return json.dumps({"requests": [{"history": [{"text": "a"}], "required_rewards": ["clip"], **changes}]}).encode()


DAMAGED = [
    (b"", 400, "malformed"),
    (b"{", 400, "malformed"),
    (b"[" * 5000, 422, "schema"),
    (b"\xff\xfe\x00", 400, "malformed"),
    (b"{}", 422, "schema"),
    (b'{"requests": []}', 422, "schema"),
    (b'{"requests": [1]}', 422, "schema"),
    (body(required_rewards=[]), 422, "schema"),
    (body(nonsense=1), 422, "schema"),
    (body(history=[{"image_b64": 5}]), 422, "schema"),
    (body(history=[{"image_b64": "a", "video_path": "b"}]), 422, "schema"),
    (body(required_rewards=["clop"]), 400, "unknown_reward"),
    (body(history=[{"text": "a"}] * 3), 422, "schema"),
    (b'{"requests": [' + b",".join([body()[14:-2]] * 9) + b"]}", 413, "too_large"),
    (b'{"requests": [' + b",".join([body(request_id="x")[14:-2]] * 2) + b"]}", 409, "conflict"),
    (b" " * 20_000, 413, "too_large"),
]


@pytest.mark.parametrize(("sent", "status", "kind"), DAMAGED)
def test_a_damaged_request_is_refused_by_kind(sent, status, kind):
    assert refused(ask("POST", "/score", content=sent, headers=JSON_TYPE)) == (status, kind)


def test_a_refusal_names_the_place_and_the_way_out():
    response = ask("POST", "/score", content=body(required_rewards=["clop"]), headers=JSON_TYPE)
    assert response.json()["detail"] == "requests[0] requires 'clop'. Did you mean 'clip'? There are clip"
    response = ask("POST", "/score", content=body(history=[{"text": 3}]), headers=JSON_TYPE)
    assert "$.requests[0].history[0].text" in response.json()["detail"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-pickle", "multipart/form-data"])
def test_only_json_and_msgpack_are_read(content_type):
    response = ask("POST", "/score", content=body(), headers={"content-type": content_type})
    assert refused(response) == (415, "unsupported_type")


def test_a_gzip_body_is_decompressed_up_to_the_limit():
    packed = {**JSON_TYPE, "content-encoding": "gzip"}
    unknown = gzip.compress(body(required_rewards=["clop"]))
    assert refused(ask("POST", "/score", content=unknown, headers=packed)) == (400, "unknown_reward")
    assert refused(ask("POST", "/score", content=gzip.compress(bytes(10**8)), headers=packed)) == (413, "too_large")
    assert refused(ask("POST", "/score", content=unknown[:-9], headers=packed)) == (400, "malformed")
    assert refused(ask("POST", "/score", content=b"no gzip", headers=packed)) == (400, "malformed")
    brotli = {**JSON_TYPE, "content-encoding": "br"}
    assert refused(ask("POST", "/score", content=unknown, headers=brotli)) == (415, "unsupported_type")


def test_a_gzip_bomb_takes_no_more_memory_than_a_body_may():
    packed = {**JSON_TYPE, "content-encoding": "gzip"}
    bomb, service = gzip.compress(bytes(10**8)), a_service(body_mb=1, pending_mb=4)
    tracemalloc.start()
    response = ask("POST", "/score", service, content=bomb, headers=packed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused(response) == (413, "too_large")
    assert peak < 6 * 2**20


def test_a_slow_body_is_refused():
    async def slowly():
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    assert refused(ask("POST", "/score", content=slowly(), headers=JSON_TYPE)) == (408, "too_slow")


@pytest.mark.parametrize("length", ["99999999999", "9" * 5000])
def test_a_body_that_declares_too_much_is_refused_before_it_comes(length):
    async def nothing():
        await asyncio.sleep(600)
        yield b""

    headers = JSON_TYPE | {"content-length": length}
    assert refused(ask("POST", "/score", content=nothing(), headers=headers)) == (413, "too_large")


def test_a_body_of_unknown_length_ends_at_the_limit():
    async def endless():
        while True:
            yield b" " * 1000

    assert refused(ask("POST", "/score", content=endless(), headers=JSON_TYPE)) == (413, "too_large")


@pytest.mark.parametrize("path", ["/score", "/health", "/rewards", "/metrics", "/openapi.json", "/nothing"])
@pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
def test_requests_without_the_token_are_refused(path, sent):
    response = ask("GET", path, token=TOKEN, headers=sent)
    assert refused(response) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"


def test_requests_with_the_token_are_accepted():
    response = ask("GET", "/rewards", token=TOKEN, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (response.status_code, response.json()) == (200, ["clip"])


def test_other_routes_and_methods_are_typed_too():
    assert refused(ask("GET", "/nothing")) == (404, "no_such_route")
    assert refused(ask("GET", "/score")) == (405, "no_such_route")


@pytest.mark.parametrize("path", ["/live", "/ready"])
def test_probes_answer_without_the_token_and_under_any_name(path):
    response = ask("GET", path, token=TOKEN, headers={"Host": "10.1.2.3:8000"})
    assert response.status_code == (200 if path == "/live" else 503)


def test_a_service_is_live_before_it_is_ready_and_while_it_drains():
    service = a_service()
    assert ask("GET", "/live", service).json() == {"status": "live"}
    assert refused(ask("GET", "/ready", service)) == (503, "not_ready")
    service.rewards["clip"]._replicas[0].ready = True
    assert ask("GET", "/ready", service).json() == {"status": "ready"}
    for phase in ("loading", "draining"):
        service.phase = phase
        assert ask("GET", "/live", service).json() == {"status": "live"}
        assert ask("GET", "/ready", service).json()["detail"] == f"the service is {phase}"
        response = ask("POST", "/score", service, content=body(), headers=JSON_TYPE)
        assert refused(response) == (503, phase) and response.headers["retry-after"] == "1"


def test_a_draining_service_waits_for_the_requests_in_progress_up_to_its_limit():
    service = Service(config_of({"server": {"drain_s": 0.4}, "rewards": [{"name": "clip", "scorer": "brightness"}]}))

    async def run(held_s: float) -> float:
        begun = asyncio.get_running_loop().time()
        service.phase = "serving"
        with service.request():
            draining = asyncio.ensure_future(service.drain())
            await asyncio.wait([draining], timeout=held_s)
        await draining
        return asyncio.get_running_loop().time() - begun

    assert 0.1 <= asyncio.run(run(0.1)) < 0.4
    assert asyncio.run(run(5.0)) >= 0.4


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:80"])
def test_a_web_page_cannot_call_a_service_on_loopback_by_its_own_name(host):
    service = Service(config_of({"rewards": [{"name": "clip", "scorer": "brightness"}]}))
    assert refused(ask("GET", "/health", service, headers={"Host": host})) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "[::1]"])
def test_a_service_on_loopback_answers_by_the_names_of_this_machine(host):
    service = Service(config_of({"rewards": [{"name": "clip", "scorer": "brightness"}]}))
    assert ask("GET", "/health", service, headers={"Host": host}).status_code == 200


def test_a_request_has_an_id_in_its_response_and_in_the_log(caplog):
    caplog.set_level("INFO", "reward_service")
    response = ask("POST", "/score", content=b"{", headers={**JSON_TYPE, "X-Request-Id": "run-7.batch_3"})
    assert response.headers["x-request-id"] == "run-7.batch_3"
    assert "request run-7.batch_3 of 127.0.0.1: POST '/score' -> 400" in caplog.text
    forged = ask("GET", "/nothing%0Aforged", headers={"X-Request-Id": "a forged line"})
    assert len(forged.headers["x-request-id"]) == 32 and "\nforged" not in caplog.text and "a forged" not in caplog.text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_may_read_is_refused(mode, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    server = config_of({"server": {"token_file": str(file)}, "rewards": [{"name": "a", "scorer": "b"}]}).server
    with pytest.raises(UsageError, match=f"has mode {mode:o}.*chmod 600"):
        read_token(server)


def test_the_document_has_the_limits_of_the_service():
    document = ask("GET", "/openapi.json").json()
    item = document["components"]["schemas"]["ScoreItem"]["properties"]
    assert item["history"]["maxItems"] == 2 and item["required_rewards"]["uniqueItems"]
    assert document["components"]["schemas"]["ScoreRequest"]["properties"]["requests"]["maxItems"] == 8
    assert set(document["paths"]) == {"/score", "/rewards", "/health", "/live", "/ready", "/metrics"}


def test_health_says_that_no_worker_is_ready():
    assert ask("GET", "/health").json() == {"status": "degraded", "rewards": {"clip": [False]}}


def items(*prompts: str, **changes) -> ScoreRequest:
    return ScoreRequest(
        requests=[
            ScoreItem(history=[Turn(text=p), Turn(text=p)], required_rewards=["clip"], **changes) for p in prompts
        ]
    )


def test_a_full_queue_is_429_with_retry_after_and_queues_no_item():
    service = a_service()
    reward = service.rewards["clip"]

    async def run():
        loop = asyncio.get_running_loop()
        reward.submit([Job(None, loop.create_future()) for _ in range(14)])

    asyncio.run(run())
    response = ask("POST", "/score", service, content=encode(items("a", "b", "c")), headers={"content-type": MSGPACK})
    assert refused(response) == (429, "busy")
    assert int(response.headers["retry-after"]) >= 1
    assert reward.has_room(2, "another") and not reward.has_room(3, "another")


def test_an_item_that_no_worker_starts_in_time_is_a_timeout_and_leaves_the_queue():
    service = a_service()
    response = ask("POST", "/score", service, content=encode(items("a", "b")), headers={"content-type": MSGPACK})
    errors = msgspec.msgpack.decode(response.content)["errors"]
    assert [ItemError.read(each["clip"]).kind for each in errors] == ["timeout", "timeout"]
    assert len(service.rewards["clip"]) == 0


def test_bodies_that_are_too_large_together_are_503():
    service = a_service(pending_mb=0.04)

    async def run():
        with service.budget.share("one") as one, service.budget.share("two") as two:
            one.take(20_000)
            two.take(11_000)
            transport = httpx2.ASGITransport(app=make_app(service, None))
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post("/score", content=b" " * 9_000, headers=JSON_TYPE)

    response = asyncio.run(run())
    assert refused(response) == (503, "busy") and response.headers["retry-after"] == "1"
    assert service.budget.used == 0


def test_files_that_unpack_to_too_much_together_are_refused():
    """Ten pictures of a megabyte each, in a few kilobytes."""
    blank = base64.b64encode(image_file(np.zeros((590, 590, 3), np.uint8), "png")).decode()
    sent = b'{"requests": [' + b",".join([body(history=[{"image_b64": blank}])[14:-2]] * 10) + b"]}"
    service = a_service(items=10, body_mb=1, pending_mb=5, body_s=10)
    assert refused(ask("POST", "/score", service, content=sent, headers=JSON_TYPE)) == (413, "too_large")
    assert service.budget.used == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "reward.example"])
def test_beyond_this_machine_it_does_not_start_without_a_token(host, tmp_path, capsys):
    file = tmp_path / "service.yaml"
    file.write_text(json.dumps({"server": {"host": host}, "rewards": [{"name": "clip", "scorer": "brightness"}]}))
    assert main([str(file)]) == 2
    assert "error[2040]" in capsys.readouterr().err


def test_a_token_file_opens_the_service_to_others_if_it_holds_a_token(tmp_path):
    file = tmp_path / "token"
    tree = {"server": {"host": "0.0.0.0", "token_file": str(file)}, "rewards": [{"name": "a", "scorer": "b"}]}
    server = config_of(tree).server
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(server)
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(UsageError, match="at least 16"):
        read_token(server)
    file.write_text(f"{TOKEN}\n")
    assert read_token(server) == TOKEN


ONE = {"name": "a", "scorer": "b"}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"rewards": [{"name": "a"}]}, "rewards.0.scorer is required"),
        ({"rewards": [{**ONE, "num_replica": 2}]}, "Did you mean 'rewards.0.num_replicas'"),
        ({"rewards": [ONE], "server": {"limits": {"body": 3}}}, "unknown key 'server.limits.body'"),
        ({"rewards": []}, "name at least one"),
        ({"rewards": [ONE, ONE]}, "two called 'a'"),
        ({"rewards": [{**ONE, "num_replicas": 0}]}, "must be >= 1"),
        ({"rewards": [{**ONE, "device": "gpu"}]}, "must be auto, cpu, cuda"),
        ({"rewards": [{**ONE, "max_queue": 5}]}, "would never fit"),
        ({"rewards": [ONE], "server": {"limits": {"media_roots": ["/no/such/folder"]}}}, "not a directory"),
        ({"rewards": [ONE], "server": {"port": "x"}}, "server.port"),
        ({"rewards": [ONE], "server": {"limits": {"body_mb": 600}}}, "does not fit twice"),
        ({"rewards": [ONE], "server": {"load_timeout_s": 0}}, "must be > 0"),
        ({"rewards": [ONE], "server": {"tls_cert": "a.pem"}}, "need each other"),
        ({"rewards": [ONE], "server": {"limits": {"client_share": 1.5}}}, "must lie in (0, 1]"),
        ({"rewards": [{**ONE, "recycle_mb": 0}]}, "must be > 0"),
    ],
)
def test_an_error_in_the_file_is_named(tree, said):
    with pytest.raises(ConfigError) as raised:
        config_of(tree)
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["- a", "server: 3", "rewards: [", "\xff"])
def test_a_file_that_is_not_a_config_is_refused(text, tmp_path, capsys):
    (tmp_path / "service.yaml").write_text(text, encoding="latin-1")
    assert main([str(tmp_path / "service.yaml")]) == 2
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("error[2003]") == 2


def test_the_command_line_wins_and_is_checked(tmp_path, capsys):
    (tmp_path / "service.yaml").write_text(json.dumps({"rewards": [ONE]}))
    assert main([str(tmp_path / "service.yaml"), "--port", "99999"]) == 2
    assert main([str(tmp_path / "service.yaml"), "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert "server.port must lie in 0..65535, got 99999" in said and "error[2040]" in said


def test_replicas_take_the_gpus_in_turn():
    reward = config_of({"rewards": [{**ONE, "device": "cuda:2,5", "num_replicas": 3}]}).rewards[0]
    assert [reward.environment(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["2", "5", "2"]


def test_a_port_in_use_is_reported(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = tmp_path / "service.yaml"
        file.write_text(json.dumps({"server": {"port": taken.getsockname()[1]}, "rewards": [ONE]}))
        assert main([str(file)]) == 3
    assert "error[3003]" in capsys.readouterr().err


def test_the_address_accepts_connections_as_soon_as_it_is_printed(tmp_path, capsys, monkeypatch):
    (tmp_path / "service.yaml").write_text(json.dumps({"rewards": [ONE]}))

    async def start(service):
        pass

    async def serve(server, sockets):
        while not (said := capsys.readouterr().out):
            await asyncio.sleep(0)
        printed = said.rpartition(":")[2]
        socket.create_connection(("127.0.0.1", int(printed)), timeout=300).close()

    monkeypatch.setattr(Service, "start", start)
    monkeypatch.setattr(Server, "serve", serve)
    assert main([str(tmp_path / "service.yaml")]) == 0
