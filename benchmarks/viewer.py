"""Times the viewer in Chromium: first pages, scrolling of a long gallery, reading of a long table, memory.

    .venv/bin/python benchmarks/viewer.py [--samples 100000] [--lines 1000000] [--json benchmarks/viewer.json]

Three runs are written first: 10,000 steps with 40 metrics and 2,000 images of 256 pixels; 100,000 images of 64 pixels;
and 1,000,000 steps. Each server is a fresh process. Needs Debian's chromium and playwright. 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from unirl.tracking.samples import SampleRow, write_manifest
from unirl.viewer.library import id_of

PARTS = ("run", "report", "writing", "gallery", "table")
PER_STEP = 100
SCROLLED_FRAMES = 600
WATCH = """() => {
  window.longest = []; window.gaps = [];
  new PerformanceObserver((list) => window.longest.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({ type: "longtask", buffered: false });
}"""
SCROLL = """(frames) => new Promise((resolve) => {
  let n = 0, last = performance.now();
  const frame = (now) => {
    window.gaps.push(now - last);
    last = now;
    // Fast scrolling, and every hundred frames a jump to another part of the gallery.
    if (n % 100 === 99) window.scrollTo(0, (0.137 * n * 977 % 1) * document.body.scrollHeight);
    else window.scrollBy(0, 240);
    if (n++ < frames) requestAnimationFrame(frame);
    else setTimeout(() => resolve([window.longest, window.gaps.slice(1)]), 500);
  };
  requestAnimationFrame(frame);
})"""


def write_facts(root: Path, steps: int) -> None:
    """The record of a run that has ended, and its settings."""
    session = {"started": "2026-01-01T00:00:00.000Z", "pid": 1, "host": "elsewhere", "argv": ["train", "r"]}
    facts = {"schema_version": 1, "id": root.name, "created": datetime.now(UTC).isoformat(), "recipe": "bench/viewer"}
    facts |= {"sessions": [session], "exit": {"code": 0, "reason": "", "time": ""}}
    (root / "config").mkdir(parents=True)
    (root / "run.json").write_text(json.dumps(facts))
    (root / "config/resolved.yaml").write_text(f"num_rollouts: {steps}\n")


def write_metrics(root: Path, steps: int, num_metrics: int) -> None:
    """A table of metrics whose values look like those of a run."""
    names = ["rollout/reward_mean", "rollout/reward_std", "reward/shape_mean", "reward/shape_std", "time/step"]
    names += ["time/generate", "time/train", "train/kl", "train/grad_norm", "mem/host_peak_gib"]
    names = [*names, *(f"custom/m{i}" for i in range(num_metrics - len(names)))][:num_metrics]
    draw = random.Random(0)
    with open(root / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row: dict[str, float] = {name: draw.random() for name in names}
            file.write(json.dumps({"step": step, "samples/generated": 64.0, **row}, sort_keys=True) + "\n")


def write_samples(root: Path, count: int, side: int) -> None:
    """Steps with PER_STEP samples. The files of a step are links to 32 noisy images."""
    pool = root / "pool"
    pool.mkdir(parents=True)
    for n in range(32):
        noise = Image.effect_noise((side, side), 60).convert("RGB")
        noise.save(pool / f"{n}.webp", quality=80)
    draw = random.Random(1)
    for step in range(1, math.ceil(count / PER_STEP) + 1):
        folder = root / f"samples/step-{step:06d}"
        folder.mkdir(parents=True)
        rows = []
        for n in range(PER_STEP):
            os.link(pool / f"{n % 32}.webp", folder / f"p{n:03d}.webp")
            prompt = f"a photo of subject {draw.randrange(500)} in the style of painter {draw.randrange(500)}"
            row = {
                "sample_id": f"{step}:{n}",
                "group_id": f"{step}:{n // 8}",
                "prompt": prompt,
                "reward": draw.random(),
            }
            rows.append({**row, "rewards": {"shape": draw.random(), "colour": draw.random()}, "file": f"p{n:03d}.webp"})
        (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """The address of a viewer in a process of its own, and the id of the process."""
    command = [sys.executable, "-m", "unirl.cli", "view", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline(4096).strip(), process.pid
        finally:
            process.terminate()


def peak_mib(pid: int) -> float:
    """Largest resident memory of a process until now, in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cpu_s(pid: int) -> float:
    """Seconds that a process computed until now. A busy machine does not change them much."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shown_after(page: Page, address: str, selector: str) -> float:
    """Seconds from the request of an address until an element of it is there."""
    begun = time.perf_counter()
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(selector, timeout=120_000)
    return time.perf_counter() - begun


def first_pages(page: Page, root: Path) -> dict[str, Any]:
    """A run with 10,000 steps and 2,000 samples: the first time each page is shown by a fresh server."""
    with served(root) as (address, pid):
        page.goto(address)
        page.wait_for_selector("tr[data-item]")
        base = f"{address.partition('?')[0]}#/run/{id_of(root)}"
        begun = cpu_s(pid)
        run_s = shown_after(page, base, "[data-chart='Reward'] canvas")
        run_cpu_s = cpu_s(pid) - begun
        gallery_s = shown_after(page, f"{base}/gallery", ".tile img")
        again_s = shown_after(page, base, "[data-chart='Reward'] canvas")
        return {
            "run_s": run_s,
            "server_cpu_of_run_s": run_cpu_s,
            "gallery_s": gallery_s,
            "run_again_s": again_s,
            "server_peak_mib": peak_mib(pid),
        }


def long_gallery(page: Page, root: Path) -> dict[str, Any]:
    """A gallery of many samples: until its first page is shown, and the tasks of the browser while it is scrolled."""
    with served(root) as (address, pid):
        page.goto(address)
        page.wait_for_selector("tr[data-item]")
        base = f"{address.partition('?')[0]}#/run/{id_of(root)}"
        shown_s = shown_after(page, f"{base}/gallery", ".tile img")
        page.wait_for_selector("[data-count]:not(:has-text('reading'))", timeout=120_000)
        indexing_cpu_s = cpu_s(pid)
        again_s = shown_after(page, f"{base}/gallery?order=best", ".tile img")
        count = page.locator("[data-count]").inner_text()
        page.evaluate(WATCH)
        tasks, gaps = page.evaluate(SCROLL, SCROLLED_FRAMES)
        page.wait_for_selector(".tile img")
        return {
            "count": count,
            "first_page_s": shown_s,
            "server_cpu_of_index_s": indexing_cpu_s,
            "sorted_by_reward_s": again_s,
            "scrolled_frames": len(gaps),
            "long_tasks_over_100_ms": sum(task > 100 for task in tasks),
            "longest_task_ms": max(tasks, default=0.0),
            "median_frame_ms": sorted(gaps)[len(gaps) // 2],
            "longest_frame_ms": max(gaps),
            "server_peak_mib": peak_mib(pid),
        }


def long_table(page: Page, root: Path) -> dict[str, Any]:
    """A table of very many lines: the first curve, until all of it was read, and one more look."""
    with served(root) as (address, pid):
        page.goto(address)
        page.wait_for_selector("tr[data-item]")
        base = f"{address.partition('?')[0]}#/run/{id_of(root)}"
        first_s = shown_after(page, base, "[data-chart='Reward'] canvas")
        begun = time.perf_counter()
        ask = "async (path) => (await (await fetch(path)).json()).complete"
        while not page.evaluate(ask, f"/api/runs/{id_of(root)}/curves"):
            pass
        whole_s = first_s + time.perf_counter() - begun
        whole_cpu_s = cpu_s(pid)
        begun = time.perf_counter()
        page.evaluate(ask, f"/api/runs/{id_of(root)}/curves?names=rollout/reward_mean")
        return {
            "megabytes": (root / "metrics.jsonl").stat().st_size / 1e6,
            "first_curve_s": first_s,
            "whole_s": whole_s,
            "server_cpu_of_whole_s": whole_cpu_s,
            "next_request_s": time.perf_counter() - begun,
            "server_peak_mib": peak_mib(pid),
        }


def report_of(root: Path) -> dict[str, float]:
    """A report of a run by a fresh process: seconds, CPU seconds, and its size."""
    target = root.parent / "report.html"
    begun, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-m", "unirl.cli", "report", str(root), "-o", str(target)], check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall_s": time.perf_counter() - begun, "cpu_s": cpu, "megabytes": target.stat().st_size / 1e6}


def writing(folder: Path) -> dict[str, float]:
    """The manifest of 16 responses of 512 tokens, with the log-probs, log-ratios and advantages of each: CPU and size.

    It is written when the samples are scored, and again with the values that training found.
    """
    draw = random.Random(2)
    series = {name: tuple(draw.gauss(0, 1) for _ in range(512)) for name in ("logp", "log_ratio", "advantage")}
    facts: dict[str, Any] = {"group_id": "g", "prompt": "p" * 200, "reward": 0.5, "pieces": (" word",) * 512}
    rows = [
        SampleRow(sample_id=f"p:{n}", series={"logp": series["logp"]}, text="word " * 512, **facts) for n in range(16)
    ]
    path, times = folder / "manifest.jsonl", []
    for _ in range(20):
        begun = time.process_time()
        write_manifest(rows, path)
        write_manifest([replace(row, series=series) for row in rows], path)
        times.append(time.process_time() - begun)
    return {"cpu_ms": 1000 * sorted(times)[len(times) // 2], "kilobytes": path.stat().st_size / 1e3}


def front_end_bytes() -> int:
    """Bytes of all files of the front end, each compressed with gzip."""
    total = 0
    for file in (files("unirl.viewer") / "static").iterdir():
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as writer:
            writer.write(file.read_bytes())
        total += packed.tell()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the viewer in Chromium.")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", default=None, help="the file for the figures; it keeps those of other parts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        roots = {name: Path(folder) / name for name in ("run", "gallery", "table")}
        lines = options.lines if "table" in options.parts else 1
        for (name, root), steps in zip(roots.items(), (10_000, 1000, lines), strict=True):
            write_facts(root, steps)
            write_metrics(root, steps, 10 if name == "table" else 40)
        write_samples(roots["run"], 2000, 256)
        write_samples(roots["gallery"], options.samples if "gallery" in options.parts else PER_STEP, 64)
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        kept = Path(options.json) if options.json else None
        measured = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
        measured |= {"cores": os.cpu_count(), "chromium": browser.version, "front_end_gzip_bytes": front_end_bytes()}
        makers: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
            "run": ("run_of_10000_steps_and_2000_samples", lambda: first_pages(page, roots["run"])),
            "report": ("report_of_this_run", lambda: report_of(roots["run"])),
            "writing": ("manifest_of_16_responses_of_512_tokens", lambda: writing(Path(folder))),
            "gallery": ("gallery", lambda: long_gallery(page, roots["gallery"])),
            "table": (f"table_of_{options.lines}_lines", lambda: long_table(page, roots["table"])),
        }
        for name in options.parts:
            title, measure = makers[name]
            measured[title] = {"load_average": os.getloadavg()[0], **measure()}
        browser.close()
    text = json.dumps(measured, indent=1)
    print(text)
    if kept is not None:
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
