"""The report of a run: true figures, inert texts, images that fit, and runs that are damaged or under way."""

import base64
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from tests.recorded_runs import record
from unirl.tracking.comparison import progress_of
from unirl.tracking.record import RunRecord
from unirl.tracking.report import ReportTooLarge, write_report
from unirl.tracking.report_samples import EmbeddedImages, data_uri, shortened

LIMIT = 20 * 10**6
HOSTILE = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\u202e{{ 7*7 }}\x1b[2J'
VOID = {"meta", "img", "br", "line", "link"}


class Page(HTMLParser):
    """Tags, attributes and text of a page. Tags that are not closed in order raise an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]

    def images(self) -> list[Image.Image]:
        uris = [value.partition("base64,")[2] for value in self.values("src")]
        return [Image.open(io.BytesIO(base64.b64decode(uri))) for uri in uris]


def report(root, tmp_path, limit: int = LIMIT) -> Page:
    """The report of a run, which may hold nothing that acts or that comes from elsewhere."""
    path = tmp_path / "report.html"
    write_report(RunRecord(root), path, limit)
    assert path.stat().st_size <= limit
    page = Page(path.read_text(encoding="utf-8"))
    assert {"script", "link", "iframe", "object", "form", "base"}.isdisjoint(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert all(value.startswith("data:image/webp;base64,") for value in page.values("src"))
    assert {value.removeprefix("#") for value in page.values("href")} <= set(page.values("id"))
    assert any(value.startswith("default-src 'none'") for value in page.values("content"))
    return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {medium: record(folder / medium, medium) for medium in ("image", "text", "video")}


@pytest.mark.parametrize("medium", ["image", "text", "video"])
def test_the_page_shows_outcome_prompts_settings_and_commands(runs, tmp_path, medium):
    page = report(runs[medium], tmp_path)
    (whole, *_) = progress_of(RunRecord(runs[medium])).differences
    assert f"{whole.before:.4g} \u2192 {whole.after:.4g}" in page.text
    assert f"{whole.interval.low:+.3g} to {whole.interval.high:+.3g}" in page.text
    for words in (
        "a <b>bold</b> cross", "r.yaml:2", "command line", "unirl train seed=1", "the reward looks odd",
        "6 (not finite)", "48 generated samples", "finished",
    ):  # fmt: skip
        assert words in page.text
    assert page.tags.count("polyline") == 4  # training and held out: of the reward, and of its component
    assert "could not be read" not in page.text
    assert "run.dir=" not in page.text.split("unirl train seed=1")[1].splitlines()[0]  # else the run would go on


def test_images_are_those_of_the_run_and_videos_move(runs, tmp_path):
    shown = report(runs["image"], tmp_path).images()
    assert len(shown) == 4 * 2 * 2 + 4
    with Image.open(runs["image"] / "eval/step-000006/p03-s00.webp") as stored:
        last = np.asarray(stored.convert("RGB"))
    assert any(np.array_equal(np.asarray(image.convert("RGB")), last) for image in shown)
    assert {image.n_frames for image in report(runs["video"], tmp_path).images()} == {4}
    assert report(runs["text"], tmp_path).images() == []


def test_the_prompts_that_changed_most_come_first(runs, tmp_path):
    text = report(runs["image"], tmp_path).text
    places = [text.index(prompt) for prompt in ("a green line", "a <b>bold</b> cross", "a blue square", "a red circle")]
    assert places == sorted(places)


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    root = record(tmp_path / "run", medium="text", prompts=(HOSTILE, "b", "c"))
    shutil.copy(root / "metrics.jsonl", tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    named = "".join(json.dumps({**row, f"reward/{HOSTILE}_mean": row["step"]}) + "\n" for row in rows)
    (root / "metrics.jsonl").write_text(named)
    (root / "events.jsonl").write_text(json.dumps({"t": HOSTILE, "ev": "warning", "text": HOSTILE}) + "\n")
    (root / "config/resolved.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    (root / "ledger.jsonl").write_text(json.dumps({"generated": 1, "dropped": 1, "reasons": {HOSTILE: 1}}) + "\n")
    facts = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps(facts | {"recipe": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    page = report(root, tmp_path)
    assert page.text.count("<script>alert(1)</script>") > 12
    assert "<U+202E>{{ 7*7 }}<U+001B>[2J" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", (tmp_path / "report.html").read_text())


def test_secrets_are_masked_in_texts_and_images_are_left_alone(tmp_path):
    root = record(tmp_path / "run", medium="text", prompts=("b", "c"))
    token = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF3g"
    (root / "events.jsonl").write_text(json.dumps({"ev": "warning", "text": f"key {token}"}) + "\n")
    report(root, tmp_path)
    assert token not in (tmp_path / "report.html").read_text()


def test_images_are_reduced_and_then_left_out_to_fit(tmp_path):
    root = record(tmp_path / "run", prompts=("a", "b"))
    noise = np.random.default_rng(0)
    content = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (400, 300, 3), dtype=np.uint8)).save(content, "JPEG")
    for path in root.rglob("*.webp"):
        path.write_bytes(content.getvalue())
    sizes = {}
    for limit in (LIMIT, 500_000, 115_000):
        page = report(root, tmp_path, limit)
        sizes[limit] = max(max(image.size) for image in page.images())
    assert sizes[LIMIT] == 384
    assert sizes[LIMIT] > sizes[500_000] > sizes[115_000] == 96
    assert "images were left out" in page.text
    with pytest.raises(ReportTooLarge, match="without any image"):
        report(root, tmp_path, 1000)


def test_the_budget_of_images_is_kept_to_the_byte(runs):
    run = RunRecord(runs["image"])
    files = [f"eval/step-000006/p0{p}-s00.webp" for p in range(4)]
    length = len(data_uri(run.files.frames(files[0]), 384))
    for budget, omitted in ((4 * length, 0), (4 * length - 1, 1), (length, 3), (0, 4)):
        images = EmbeddedImages.within(run, files, budget)
        assert (images.omitted, len(images._uris)) == (omitted, 4 - omitted)


def test_killed_damaged_and_nearly_empty_runs_have_a_page(runs, tmp_path):
    killed = report(record(tmp_path / "killed", code=None), tmp_path)
    assert "lost" in killed.text and "could not be read" not in killed.text
    failed = report(record(tmp_path / "failed", code=1, scale="toy"), tmp_path)
    assert "failed (ValueError: it broke)" in failed.text and "Toy scale: random weights" in failed.text
    damaged = shutil.copytree(runs["image"], tmp_path / "damaged")
    for path in [*damaged.rglob("*.json"), *damaged.rglob("*.yaml"), *damaged.rglob("p00*.webp")]:
        path.write_bytes(b"\xff{[")
    text = report(damaged, tmp_path).text
    assert "What could not be read" in text and "config/resolved.yaml: it is damaged" in text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    text = report(empty, tmp_path).text
    for words in ("stored no evaluation", "No step has a finite reward", "no times", "run.json: there is no such file"):
        assert words in text


def test_a_run_without_a_second_evaluation_shows_its_samples(runs, tmp_path):
    root = shutil.copytree(runs["image"], tmp_path / "run")
    shutil.rmtree(root / "eval/step-000000")
    page = report(root, tmp_path)
    assert "there is no second one" in page.text and "Held-out samples" in page.text
    assert len(page.images()) == 4 * 2 + 4


def test_episodes_without_a_video_are_left_out(runs, tmp_path):
    root = shutil.copytree(runs["video"], tmp_path / "run")
    for path in root.glob("eval/*/scores.json"):
        scores = json.loads(path.read_text())
        for row in scores["samples"][:4]:
            row["facts"]["frames"] = 0
        path.write_text(json.dumps(scores))
    page = report(root, tmp_path)
    assert "All 2 prompts with stored samples" in page.text
    assert len(page.images()) == 2 * 2 * 2 + 4


def test_a_row_cannot_name_a_file_outside_of_the_run(runs, tmp_path):
    root = shutil.copytree(runs["image"], tmp_path / "run")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "private.png")
    scores = json.loads((root / "eval/step-000006/scores.json").read_text())
    for row in scores["samples"]:
        row["file"] = "../../../private.png"
    (root / "eval/step-000006/scores.json").write_text(json.dumps(scores))
    page = report(root, tmp_path)
    assert "outside of the run" in page.text
    assert len(page.images()) == 4 * 2 + 4


def test_writing_follows_no_link_and_changes_nothing_else(runs, tmp_path):
    root = shutil.copytree(runs["text"], tmp_path / "run")
    target = tmp_path / "target"
    target.write_text("mine")
    for name in ("report.html", ".report.html.tmp"):
        (root / name).symlink_to(target)
    before = set(root.rglob("*"))
    write_report(RunRecord(root), root / "report.html", LIMIT)
    assert target.read_text() == "mine"
    assert set(root.rglob("*")) == before
    assert not (root / "report.html").is_symlink()
    umask = os.umask(0)
    os.umask(umask)
    assert (root / "report.html").stat().st_mode & 0o777 == 0o666 & ~umask


def test_long_texts_lose_their_middle():
    assert shortened("x" * 100, 100) == "x" * 100
    assert shortened("a" * 50 + "b" * 900 + "c" * 50, 100) == "a" * 50 + " [... 900 characters ...] " + "c" * 50
