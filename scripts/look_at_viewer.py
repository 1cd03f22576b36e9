"""Takes a screenshot of every page of the viewer, to be looked at. Half a minute for each run.

    .venv/bin/python scripts/look_at_viewer.py runs/unirl/first -o /tmp/pages
    .venv/bin/python scripts/look_at_viewer.py runs/unirl/first runs/unirl/second --dark --width 390

With one run: all pages about it. With several: also their comparison. docs/images/viewer.png is the upper part of
`1-run.png` of the quick start, with `--width 1200 --height 1280 --top`. Needs Debian's chromium and playwright.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from unirl.viewer.app import viewer_app
from unirl.viewer.library import RunLibrary, id_of
from unirl.viewer.server import address_of, listening, serve

WAIT_MS = 4000
"""Milliseconds for the parts of a page that come after its first part."""
PAGES = {
    "run": "",
    "gallery": "/gallery",
    "pairs": "/pairs",
    "config": "/config",
    "system": "/system",
    "episodes": "/episodes",
}


@contextmanager
def served(runs: list[Path]) -> Iterator[str]:
    """The address of a viewer in a thread of this process."""
    token = secrets.token_urlsafe(16)
    with listening("127.0.0.1", 0) as opened:
        stops: list[Callable[[], None]] = []
        thread = threading.Thread(target=serve, args=(viewer_app(RunLibrary(runs), token), opened, stops.append))
        thread.start()
        try:
            yield f"{address_of(opened)}?token={token}"
        finally:
            stops[0]()
            thread.join()


def addresses(runs: list[Path], sample: str) -> Iterator[tuple[str, str]]:
    """The name and the place of each page."""
    yield "runs", "#/"
    for number, run in enumerate(runs, 1):
        for name, part in PAGES.items():
            yield f"{number}-{name}", f"#/run/{id_of(run)}{part}"
        yield f"{number}-sample", f"#/run/{id_of(run)}/sample?{sample}"
    if len(runs) > 1:
        yield "compare", f"#/compare?runs={','.join(map(id_of, runs))}"


def photograph(page: Page, address: str, runs: list[Path], sample: str, out: Path, whole: bool) -> None:
    """Writes one PNG file for each page."""
    page.goto(address)
    page.wait_for_selector("tr[data-item]")
    base = address.partition("?")[0]
    for name, place in addresses(runs, sample):
        page.goto(base + place)
        page.wait_for_selector("main:not([aria-busy])")
        page.wait_for_timeout(WAIT_MS)
        page.screenshot(path=out / f"{name}.png", full_page=whole)
        print(out / f"{name}.png", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes a screenshot of every page of the viewer.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--out", type=Path, default=Path("viewer_pages"))
    parser.add_argument("--sample", default="kind=eval&step=0&row=0", help="the sample whose page is shown")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--top", action="store_true", help="only what a window of this height shows")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with served(options.runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": options.width, "height": options.height}
        page = browser.new_page(viewport=size, color_scheme="dark" if options.dark else "light")
        photograph(page, address, options.runs, options.sample, options.out, not options.top)
        browser.close()


if __name__ == "__main__":
    main()
