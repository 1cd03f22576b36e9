"""A viewer in a thread of this process, and requests to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

from unirl.viewer.app import viewer_app
from unirl.viewer.library import RunLibrary
from unirl.viewer.server import listening, serve

TOKEN = "a-token-of-the-tests"
NAMED = {"authorization": f"Bearer {TOKEN}"}
Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Served:
    """Where a viewer can be asked."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://{self.host}:{self.port}/?token={TOKEN}"

    def ask(self, path: str, headers: Mapping[str, str] = NAMED, method: str = "GET", **parameters: object) -> Answer:
        """Status, headers and body of the answer to one request, whose path is sent as it is."""
        connection = HTTPConnection(self.host, self.port, timeout=20)
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        connection.request(method, target, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(2**26)
        connection.close()
        return answer.status, dict(answer.getheaders()), body


@contextmanager
def viewer(*folders: Path) -> Iterator[Served]:
    """Serves the runs of some folders within the block."""
    with listening("127.0.0.1", 0) as opened:
        stops: list = []
        app = viewer_app(RunLibrary(folders), TOKEN)
        thread = threading.Thread(target=serve, args=(app, opened, stops.append))
        thread.start()
        try:
            yield Served(*opened.getsockname())
        finally:
            while not stops:
                thread.join(0.01)
            stops[0]()
            thread.join()
