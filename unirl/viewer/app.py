"""The web application: which address gives what, and how a value becomes an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from unirl.tracking.streams import inert
from unirl.types.secrets import redact
from unirl.viewer import episodes, pages, samples
from unirl.viewer.guard import App, Guard
from unirl.viewer.library import NoSuchRun, RunLibrary

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
T = TypeVar("T")


def viewer_app(library: RunLibrary, token: str, hosts: Sequence[str] = ()) -> App:
    """The ASGI application that shows the runs of a library, behind its guard.

    Args:
        token: what requests must have.
        hosts: names of this machine, beside `localhost`.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes: list[BaseRoute] = [Route(path, _json(answer)) for path, answer in _answers(library).items()]
    routes += [Route("/media/{id}/{form:str}", _media(library)), *_static_routes()]
    return Guard(Starlette(routes=routes), token, hosts)


def _answers(library: RunLibrary) -> Mapping[str, Callable[[Request], object]]:
    """The value that each address of the interface gives."""

    def on_run(answer: Callable[[RunLibrary, str], object]) -> Callable[[Request], object]:
        return lambda request: answer(library, _id(request))

    def on_part(answer: Callable[[RunLibrary, str, T], object], kind: type[T]) -> Callable[[Request], object]:
        return lambda request: answer(library, _id(request), asked(request, kind))

    def on_several(answer: Callable[[RunLibrary, T], object], kind: type[T]) -> Callable[[Request], object]:
        return lambda request: answer(library, asked(request, kind))

    return {
        "/api/runs": lambda request: pages.runs(library),
        "/api/runs/{id}": on_run(pages.run_page),
        "/api/runs/{id}/state": on_run(pages.state),
        "/api/runs/{id}/outcome": on_run(pages.outcome),
        "/api/runs/{id}/settings": on_run(pages.settings),
        "/api/runs/{id}/curves": on_part(pages.curves, pages.CurvesRequest),
        "/api/runs/{id}/samples": on_part(samples.samples, samples.SamplesRequest),
        "/api/runs/{id}/sample": on_part(samples.sample, samples.PlaceRequest),
        "/api/runs/{id}/episodes": on_run(episodes.episodes),
        "/api/runs/{id}/pairs": on_part(samples.pairs, samples.PairsRequest),
        "/api/compare": on_several(pages.comparison, pages.ComparisonRequest),
        "/api/compare/samples": on_several(pages.compared_samples, pages.ComparisonRequest),
    }


def asked(request: Request, kind: type[T]) -> T:
    """The parameters of a request as the dataclass `kind`. Raises BadRequest for a value that does not fit."""
    given = {name: value for name, value in request.query_params.items() if value != ""}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise pages.BadRequest(str(error)) from error


def shown(value: object) -> object:
    """`value` with each text masked and without characters that act on a reader: secrets, controls, direction marks."""
    if isinstance(value, str):
        return redact(inert(value))
    if isinstance(value, Mapping):
        return {inert(str(name)): shown(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(entry) for entry in value]
    return value


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _json(answer: Callable[[Request], object]) -> Callable[[Request], Response]:
    """An endpoint that gives the value of `answer` as JSON. Numbers that are not finite are null."""
    from starlette.responses import Response

    def endpoint(request: Request) -> Response:
        try:
            status, value = 200, answer(request)
        except (NoSuchRun, samples.NoSuchSample) as error:
            status, value = 404, {"error": str(error)}
        except pages.BadRequest as error:
            status, value = 400, {"error": str(error)}
        body = msgspec.json.encode(shown(msgspec.to_builtins(value)))
        return Response(body, status, {"cache-control": "no-store"}, "application/json")

    return endpoint


def _media(library: RunLibrary) -> Callable[[Request], Response]:
    """An endpoint that gives the file of a sample, or a part of it (RFC 9110, section 14)."""
    from starlette.responses import Response

    def endpoint(request: Request) -> Response:
        form = request.path_params["form"]
        try:
            if form not in ("file", "mp4"):
                raise samples.NoSuchSample(f"a sample has no {form}")
            place = asked(request, samples.PlaceRequest)
            content, kind = samples.media(library, _id(request), place, form == "mp4")
        except (NoSuchRun, samples.NoSuchSample) as error:
            return Response(inert(str(error)), 404, media_type="text/plain")
        except pages.BadRequest as error:
            return Response(inert(str(error)), 400, media_type="text/plain")
        headers = {"cache-control": "private, max-age=60", "accept-ranges": "bytes"}
        part = byte_range(request.headers.get("range", ""), len(content))
        if part is None:
            return Response(content, 200, headers, kind)
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{len(content)}"
        return Response(content[part.start : part.stop], 206, headers, kind)

    return endpoint


def byte_range(header: str, size: int) -> range | None:
    """The bytes of the header `Range: bytes=FIRST-LAST`. None for the whole, and for any other form."""
    unit, _, places = header.partition("=")
    first, dash, last = places.partition("-")
    if unit != "bytes" or not dash or not first.isdecimal() or (last and not last.isdecimal()):
        return None
    stop = min(int(last) + 1, size) if last else size
    return range(int(first), stop) if int(first) < stop else None


def _static_routes() -> list[BaseRoute]:
    """Routes to the files of the front end, which are read once. No other file can be asked for."""
    from starlette.responses import Response
    from starlette.routing import Route

    def giving(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:  # async, so that no thread is needed for each file
            return Response(content, 200, {"cache-control": "no-cache"}, kind)

        return endpoint

    routes: list[BaseRoute] = [Route("/favicon.ico", lambda request: Response(status_code=204))]
    for file in (files("unirl.viewer") / "static").iterdir():
        kind = CONTENT_TYPES[Path(file.name).suffix]
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        routes.append(Route(path, giving(file.read_bytes(), kind)))
    return routes
