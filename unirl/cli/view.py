"""`unirl view [RUN_OR_FOLDER ...]`: a web page about runs, served to this machine."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from pathlib import Path

from unirl.cli.arguments import Parser
from unirl.cli.runs import FOLDER
from unirl.config.errors import AddressError, InvalidValueError, NotFoundError
from unirl.config.failures import Session
from unirl.tracking.streams import inert, say
from unirl.types.secrets import conceal

EXAMPLES = (
    "unirl view",
    "unirl view runs/unirl/first runs/unirl/second",
    "unirl view /data/runs --port 7860 --token-file ~/.unirl-view-token",
)
LOOPBACK = "127.0.0.1"
SHORTEST_TOKEN = 16


def run(argv: list[str], session: Session) -> int:
    parser = Parser(
        "view",
        "Show runs in a browser: curves, samples, settings, comparisons. It only reads, also while a run writes. "
        "Ctrl-C ends it.",
        EXAMPLES,
    )
    parser.add_argument("paths", nargs="*", metavar="RUN_OR_FOLDER", help="runs, or folders of runs (default: runs)")
    parser.option("--host", default=LOOPBACK, help=f"the address that it listens at (default {LOOPBACK}: this machine)")
    parser.option("--port", type=int, default=0, help="its port (default 0: a free one, which is printed)")
    parser.option("--token-file", metavar="FILE", help="a file with the token of the address (default: a random token)")
    allow = "a name of this machine that an address may have, beside localhost; may be given several times"
    parser.option("--allow-host", action="append", default=[], metavar="NAME", help=allow)
    options = parser.parse(argv)
    if not 0 <= options.port <= 65535:
        raise InvalidValueError(f"--port {options.port} is no port: give a number from 0 to 65535")
    folders = [Path(path) for path in options.paths or [FOLDER]]
    for folder in folders:
        if not folder.is_dir() and options.paths:
            raise NotFoundError(f"there is no folder {folder}. Name the folder of a run, or one that holds runs")
    token = secrets.token_urlsafe(24) if options.token_file is None else read_token(Path(options.token_file))
    from unirl.viewer.app import viewer_app
    from unirl.viewer.library import RunLibrary
    from unirl.viewer.server import address_of, listening, serve

    app = viewer_app(RunLibrary(folders), token, [*options.allow_host, *own_names(options.host)])
    try:
        opened = listening(options.host, options.port)
    except OSError as error:
        raise AddressError(
            f"--host {options.host} --port {options.port} cannot be used: {error.strerror or error}. "
            "Give another port, or 0"
        ) from error
    with opened:
        if not is_loopback(opened.getsockname()[0]):
            say(
                "unirl: other machines can reach this viewer. Whoever has its token sees the runs, and nothing is "
                "encrypted on the way. From one other machine, `ssh -L PORT:127.0.0.1:PORT` is safer"
            )
        print(inert(f"{address_of(opened)}?token={token}"), flush=True)
        conceal(token)
        serve(app, opened)
    return 0


def read_token(path: Path) -> str:
    """The token in a file. Raises NotFoundError (4001) or InvalidValueError (2004)."""
    try:
        with path.expanduser().open(encoding="ascii") as file:
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(f"--token-file {path} cannot be read ({error}). Name a file with a token in it") from error
    if len(token) < SHORTEST_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        raise InvalidValueError(
            f"the token in --token-file {path} must have at least {SHORTEST_TOKEN} letters, digits, '-' or '_'. "
            "Make one: python -c 'import secrets; print(secrets.token_urlsafe(24))'"
        )
    return token


def own_names(host: str) -> list[str]:
    """The names that addresses of this machine may have: none of a viewer that only this machine can reach."""
    if is_loopback(host):
        return []
    return [host, socket.gethostname()]


def is_loopback(host: str) -> bool:
    """Returns True if no other machine can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
