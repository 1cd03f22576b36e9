"""Pictures that lie elsewhere, from a real server: read whole, or refused by prompt, address, rule and way out."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry as REMEMBERED
from PIL import Image

from unirl.cli.data import check
from unirl.config.errors import DataError, DependencyError
from unirl.data.data_source import MultimodalRLDataSource
from unirl.models.images import read_image
from unirl.models.loading import remote_files as remote
from unirl.models.loading.remote_files import FetchLimits, fetch

MIB = 2**20


def png(size: tuple[int, int] = (8, 6), color: object = "red") -> bytes:
    written = BytesIO()
    Image.new("RGB", size, color).save(written, "png")
    return written.getvalue()


class Shelf(BaseHTTPRequestHandler):
    """What the test server does at each path."""

    asked: ClassVar[Counter[str]] = Counter()
    sent = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        type(self).asked[self.path] += 1
        with suppress(ConnectionError):  # the reader may go away at any time
            getattr(self, self.path.strip("/").partition(".")[0])()

    def answer(self, body: bytes, kind: str = "image/png", status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length != -1:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def good(self) -> None:
        self.answer(png())

    def plain(self) -> None:
        self.answer(png(), kind="application/octet-stream", length=-1)

    def gone(self) -> None:
        self.answer(b"", status=404)

    def locked(self) -> None:
        self.answer(b"", status=403)

    def page(self) -> None:
        self.answer(b"<html>log in</html>", kind="text/html; charset=utf-8")

    def damaged(self) -> None:
        self.answer(png((64, 64))[:-40])

    def other(self) -> None:
        self.answer(b"GIF, no: nothing at all")

    def cut(self) -> None:
        self.answer(png(), length=10_000)

    def huge(self) -> None:
        self.answer(b"", length=10**12)

    def endless(self) -> None:
        self.answer(b"", length=-1)
        while True:
            self.wfile.write(bytes(64 * 1024))
            type(self).sent += 64 * 1024

    def mute(self) -> None:
        time.sleep(2)

    def slow(self) -> None:
        self.answer(png()[:20], length=-1)
        for _ in range(20):
            time.sleep(0.1)
            self.wfile.write(b"x")
            self.wfile.flush()

    def busy(self) -> None:
        first = self.asked[self.path] == 1
        self.answer(b"" if first else png(), status=503 if first else 200)

    def down(self) -> None:
        self.answer(b"", status=500)

    def moved(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/good.png")
        self.end_headers()

    def circle(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/circle.png")
        self.end_headers()

    def away(self) -> None:
        self.send_response(302)
        self.send_header("Location", "file:///etc/passwd")
        self.end_headers()

    def inward(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/good.png")
        self.end_headers()

    def credentials(self) -> None:
        self.send_response(302)
        self.send_header("Location", "http://169.254.169.254/latest/meta-data")
        self.end_headers()

    def thread(self) -> None:
        self.answer(png((2001, 10)))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    result = ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    result.daemon_threads = True
    thread = threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{result.server_port}"
    result.shutdown()
    thread.join()
    result.server_close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> None:
    """Nothing remembered, and short waits."""
    remote.CACHE.clear()
    Shelf.asked.clear()
    Shelf.sent = 0
    bounds = FetchLimits(max_bytes=MIB, timeout_s=0.4, tries=2, pause_s=0.01)
    monkeypatch.setattr(remote.fetch, "__defaults__", (bounds,))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def stores(monkeypatch, tmp_path) -> fsspec.AbstractFileSystem:
    """Stands for s3fs: a package of that name whose files lie in memory."""
    (tmp_path / "s3fs.py").write_text(
        "__version__ = '2026.1'\n"
        "from fsspec.implementations.memory import MemoryFileSystem\n"
        "class S3FileSystem(MemoryFileSystem):\n"
        "    protocol = ('s3',)\n"
        "    cachable = False\n"
        "    @classmethod\n"
        "    def _strip_protocol(cls, path):\n"
        "        return super()._strip_protocol(path.removeprefix('s3:/'))\n"
    )
    (tmp_path / "botocore").mkdir()
    (tmp_path / "botocore" / "__init__.py").touch()
    (tmp_path / "botocore" / "exceptions.py").write_text("class BotoCoreError(Exception): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").store.clear()
    REMEMBERED.pop("s3", None)
    for name in ("s3fs", "botocore", "botocore.exceptions"):
        sys.modules.pop(name, None)


def file_of(folder: Path, *uris: str) -> Path:
    rows = [
        {"prompt": "a", "media_refs": [{"modality": "image", "role": "condition", "uri": uri}], "prompt_id": f"p{i}"}
        for i, uri in enumerate(uris)
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "p.jsonl"


@pytest.mark.parametrize("name", ["good", "plain", "moved", "busy"])
def test_an_image_is_read_from_an_address(name, server) -> None:
    result = read_image(f"{server}/{name}.png")
    assert np.array_equal(np.asarray(result), np.asarray(Image.new("RGB", (8, 6), "red")))


BAD = {
    "gone": "answers 404. Correct the uri",
    "locked": "answers 403: it wants a login",
    "page": "answers with text/html, which is no image",
    "damaged": "cannot be read",
    "other": "cannot be read: it does not begin as a PNG or JPEG or WEBP file",
    "cut": "(2 tries)",
    "huge": "it has 953674.3 MiB; at most 1 MiB are read",
    "endless": "it goes on after 1 MiB; at most 1 MiB are read",
    "mute": "no answer, or not all of it, within 0.4 s (2 tries)",
    "slow": "no answer, or not all of it, within 0.4 s (2 tries)",
    "down": "the server answers 500 (2 tries)",
    "circle": "Correct the uri",
    "away": "Correct the uri",
    "inward": "it redirects to localhost, which is an address of this machine or its network",
    "credentials": "169.254.169.254 has a link-local address, which is never asked",
    "thread": "2001 x 10 pixels: one side may be at most 200 times the other",
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_had_is_refused_at_start_by_prompt_address_and_rule(name, server, tmp_path) -> None:
    uri = f"{server}/{name}.png"
    begin = time.monotonic()
    with pytest.raises(DataError) as caught:
        MultimodalRLDataSource(data_path=str(file_of(tmp_path, f"{server}/good.png", uri)))
    assert caught.value.code == 4003 and time.monotonic() - begin < 60
    for part in ("p.jsonl:2: prompt 'p1'", uri, BAD[name]):
        assert part in str(caught.value)
    assert Shelf.sent < 16 * MIB


def test_a_server_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"p0.*http://127\.0\.0\.1:9/a\.png cannot be fetched: .*\(2 tries\)"):
        MultimodalRLDataSource(data_path=str(file_of(tmp_path, "http://127.0.0.1:9/a.png")))


def test_a_data_source_asks_the_hosts_of_its_recipe(server, tmp_path) -> None:
    path = str(file_of(tmp_path, f"{server}/good.png"))
    for keys, why in (
        ({"allow_remote": False}, "data_source.allow_remote=false allows no URL"),
        ({"remote_hosts": ("images.org",)}, r"data_source.remote_hosts=\['images.org'\] lacks 127.0.0.1"),
    ):
        with pytest.raises(DataError, match=f"prompt 'p0': image .*: {why}") as caught:
            MultimodalRLDataSource(data_path=path, **keys)
        assert caught.value.code == 4003 and not Shelf.asked
    assert len(MultimodalRLDataSource(data_path=path, remote_hosts=("127.0.0.1",))) == 1


def test_a_redirect_into_this_network_is_not_followed(server) -> None:
    with pytest.raises(DataError, match="it redirects to localhost"):
        fetch(f"{server}/inward.png", FetchLimits(timeout_s=20))
    assert Shelf.asked == {"/inward.png": 1}


def test_a_link_local_address_is_never_asked() -> None:
    for host in ("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]"):
        with pytest.raises(DataError, match="has a link-local address, which is never asked"):
            read_image(f"http://{host}/latest/meta-data")


def test_data_check_names_every_bad_address(server, tmp_path) -> None:
    names = ("gone", "page", "huge")
    with pytest.raises(DataError, match="3 problems") as caught:
        check([str(file_of(tmp_path, f"{server}/good.png", *(f"{server}/{name}.png" for name in names)))])
    assert all(BAD[name] in str(caught.value) for name in names)


def test_an_address_is_asked_once_however_often_it_is_read(server, tmp_path) -> None:
    uri = f"{server}/good.png"
    data = MultimodalRLDataSource(data_path=str(file_of(tmp_path, uri, uri)))
    read_image(uri)
    assert data.state_dict() and Shelf.asked == {"/good.png": 1}


def test_of_what_is_kept_the_least_recently_read_goes_first(server) -> None:
    size = len(png())
    bounds = FetchLimits(cache_bytes=2 * size, timeout_s=5)
    one, two, three = (f"{server}/good.{number}.png" for number in range(3))
    for uri in (one, two, one, three, one):
        assert fetch(uri, bounds) == png()
    assert max(Shelf.asked.values()) == 1
    fetch(two, bounds)
    assert Shelf.asked["/good.1.png"] == 2


def test_a_fingerprint_holds_what_an_address_shows_and_not_where_it_is(server, tmp_path) -> None:
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "blue.png").write_bytes(png(color="blue"))
    uris = (f"{server}/good.png", str(tmp_path / "good.png"), str(tmp_path / "blue.png"))
    there, here, other = (
        MultimodalRLDataSource(data_path=str(file_of(tmp_path, uri))).state_dict()["fingerprint"] for uri in uris
    )
    assert there == here != other


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_store_whose_package_is_missing_names_it(scheme, package, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("unirl.config.dependencies.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=rf"{scheme}://.* needs {package}, not installed.*pip install {package}"):
        MultimodalRLDataSource(data_path=str(file_of(tmp_path, f"{scheme}://bucket/a.png")))


def test_an_image_of_a_store_is_read_bounded(stores, tmp_path) -> None:
    stores.pipe("/bucket/a.png", png((83, 48)))
    stores.pipe("/bucket/large.png", bytes(2 * MIB))
    assert read_image("s3://bucket/a.png").size == (83, 48)
    for name, why in (("large", "it has 2.0 MiB; at most 1 MiB"), ("gone", "there is no such object")):
        with pytest.raises(DataError, match=rf"prompt 'p0'.*s3://bucket/{name}\.png cannot be fetched: {why}"):
            MultimodalRLDataSource(data_path=str(file_of(tmp_path, f"s3://bucket/{name}.png")))
