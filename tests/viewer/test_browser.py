"""Every page of the viewer in a real browser, with real clicks and keys."""

import json
import re
import shutil
from urllib.parse import urlsplit

import pytest

from tests.recorded_runs import PROMPTS, act, record
from tests.viewer.serving import viewer
from unirl.viewer.library import id_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt install chromium)")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><svg onload=\"document.title='owned'\"> \u202eturned {{7*7}}"
ALARM = {"ev": "alarm.raise", "alarm": "diversity.collapse", "step": 8, "text": "outputs grow alike", "value": 0.269375}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for medium in ("image", "text", "video"):
        record(root / medium, medium, prompts=(*PROMPTS, HOSTILE), steps=8, seed=len(medium))
    record(root / "failed", code=5)
    damaged = record(root / "damaged", code=None)
    (damaged / "eval/step-000006/scores.json").write_text("[")
    act(shutil.copytree(root / "text", root / "acting"), step=8)
    shutil.rmtree(root / "acting/eval/step-000000")
    with (root / "image/events.jsonl").open("a") as file:
        file.write(f"{json.dumps(ALARM)}\n")
    (root / "text/config/resolved.yaml").write_text(f"num_rollouts: 8\nname: {json.dumps(HOSTILE)}\n")
    return root


@pytest.fixture(scope="module")
def served(root):
    with viewer(root) as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    """A page that was opened with its token. At its end: nothing was asked elsewhere, and nothing went wrong."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(20_000)
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.goto(served.address)
    page.wait_for_selector("tr[data-item]")
    yield page
    assert {urlsplit(url).netloc for url in asked} == {f"{served.host}:{served.port}"}
    assert wrong == []
    assert page.title() == "UniRL runs"
    page.close()


def opened(page, root, name, part=""):
    """Goes to a page of a run by its address, and waits until it is shown."""
    page.evaluate("hash => { location.hash = hash; }", f"#/run/{id_of(root / name)}{part}")
    page.wait_for_selector("nav a[aria-current]:not(:has-text('Runs'))" if "sample" not in part else "main .shown")
    page.wait_for_selector("main:not([aria-busy]) h1")


def assert_drawn(page, chart):
    """A chart is drawn once it is in the window."""
    page.locator(f"[data-chart='{chart}']").scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-chart='{chart}'] canvas")


def test_the_list_of_runs_is_searched_and_leads_to_a_run_and_a_comparison(page, root):
    assert page.locator("tr[data-item]").count() == 6
    assert page.locator("tr:has-text('1 alarm')").get_attribute("data-run") == id_of(root / "image")
    page.keyboard.press("/")
    page.keyboard.type("failed")
    assert page.locator("tr[data-item]").count() == 1
    assert page.locator(".badge").inner_text() == "failed (5)"
    assert page.locator(".badge").get_attribute("title") == "The run ended with an error."
    page.locator("input[type=search]").fill("finished")
    assert page.locator("tr[data-item]").count() == 4
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Space")
    page.keyboard.press("j")
    page.keyboard.press("Space")
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector("h1:has-text('Compare')")
    assert page.locator("nav a[aria-current]").inner_text() == "Compare"
    page.get_by_role("link", name="Runs").click()
    page.locator("tr[data-item] a").first.click()
    page.wait_for_selector("h2:has-text('Curves')")


def test_a_run_has_curves_with_spread_phases_outcome_ledger_and_warnings(page, root):
    opened(page, root, "image")
    page.wait_for_selector("[data-chart='Reward'] canvas")
    page.wait_for_selector("h2:has-text('Held-out scores')")
    label = page.locator("[data-chart='Reward'] [role=img]").get_attribute("aria-label")
    assert label == "Reward over step. Last: training 0.800, held out 0.510"
    for chart in ("shape", "Time of a step by phase"):
        assert_drawn(page, chart)
    text = page.locator("main").inner_text()
    raised = page.locator(".notice:has-text('Alarms and warnings')").inner_text()
    assert "outputs grow alike (diversity.collapse, step 8, value 0.2694)" in raised
    assert "the reward looks odd" in raised
    assert text.index("Alarms and warnings") < text.index("Curves")
    assert "not finite: 8" in text
    assert "unirl train seed=5" in text
    plot = page.locator("[data-chart='Reward'] .u-over")
    plot.hover(position={"x": plot.bounding_box()["width"] - 5, "y": 60})
    page.wait_for_selector("[data-chart='Reward'] .u-legend:has-text('0.800 +- 0.100')")
    page.get_by_label("Add a metric").select_option("rollout/reward_std")
    page.wait_for_selector("figcaption:has-text('Constant') >> nth=1")


def test_a_gallery_is_filtered_by_fields_and_walked_by_keys(page, root):
    opened(page, root, "image", "/gallery")
    page.wait_for_selector(".tile img.large, .tile img")
    assert page.locator("[data-count]").inner_text() == "24 of 24 stored samples"
    page.get_by_label("Prompt has").focus()
    page.keyboard.type("onerr")
    page.get_by_label("Order").select_option("best")
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('4 of')")
    assert page.evaluate("() => location.hash").endswith("?prompt=onerr&order=best")
    page.get_by_label("Prompt has").focus()
    page.keyboard.type("or ")
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('0 of')")
    page.keyboard.press("Backspace")
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('4 of')")
    assert page.evaluate("() => document.activeElement.value") == "onerror"
    assert HOSTILE.split(" \u202e")[0] in page.locator(".tile .prompt").first.inner_text()
    page.get_by_role("link", name="Reset").click()
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('24 of')")
    page.get_by_label("From").select_option("eval")
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('20 of')")
    page.get_by_label("Order").select_option("best")
    page.wait_for_function("() => document.querySelector('.tile b')?.textContent === '0.920'")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator(".tile.selected").get_attribute("data-number") == "1"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Sample e:4@0:1')")


def test_a_sample_shows_its_text_reward_and_lineage_without_acting_on_them(page, root):
    opened(page, root, "text", "/sample?kind=eval&step=8&row=8")
    page.wait_for_selector("h2:has-text('Lineage')")
    text = page.locator("main").inner_text()
    assert "onerror" in text
    assert "<U+202E>turned {{7*7}}" in text
    assert "answer 8 at 0.8 <script>" in text
    assert "Mean of the stored samples\tRank among them" in text
    assert page.locator("main img, main svg, main script").count() == 0
    assert page.locator(".tree li").all_inner_texts()[1].startswith("text: answer 8")
    page.keyboard.press("j")
    page.wait_for_selector("h1:has-text('Sample e:4@0:1')")


def test_a_sample_shows_the_log_prob_and_the_sigma_of_each_step(page, root):
    opened(page, root, "image", "/sample?kind=samples&step=8&row=2")
    page.wait_for_selector("[data-chart='sigma'] canvas")
    label = page.locator("[data-chart='logp'] [role=img]").get_attribute("aria-label")
    assert label == "logp over stochastic step. Last: logp -1"


def test_the_tokens_of_a_text_are_coloured_by_a_value_of_each(page, root):
    opened(page, root, "text", "/sample?kind=samples&step=8&row=2")
    marks = page.locator(".tokens .token")
    assert marks.all_inner_texts()[:2] == ["<b>big</b>", " an<U+202E>swer"]
    classes = lambda: [mark.split()[-1] for mark in marks.evaluate_all("nodes => nodes.map((node) => node.className)")]  # noqa: E731
    assert classes() == ["above-2", "above-2", "above-2", "read", "above-2"]  # half of the largest of the prompt
    page.get_by_label("Colour by").select_option("log_ratio")
    assert classes() == ["above-4", "below-2", "below-0", "read", "above-1"]
    assert marks.nth(1).get_attribute("title") == "token 2: log-ratio -0.100"
    page.get_by_label("Colour by").select_option("logp")
    assert classes() == ["below-1", "below-1", "below-0", "read", "below-4"]
    page.get_by_text("Table of the 5 tokens").click()
    assert page.locator("details tbody tr").nth(1).inner_text().split() == [
        "2",
        "an<U+202E>swer",
        "0.500",
        "-0.100",
        "-1",
    ]
    lines = page.eval_on_selector_all(
        ".below-1, .above-1", "nodes => nodes.map((node) => getComputedStyle(node).borderBottomStyle)"
    )
    assert set(lines) == {"dotted"}
    assert page.locator("[data-lacks]").count() == 0
    opened(page, root, "text", "/sample?kind=eval&step=8&row=2")
    assert "Evaluations record no tokens" in page.locator("[data-lacks=tokens]").inner_text()


def test_before_and_after_slide_over_each_other_and_space_flips_them(page, root):
    opened(page, root, "image", "/pairs")
    over = page.locator(".over").first
    over.wait_for()
    clip = "node => getComputedStyle(node).clipPath"
    assert over.evaluate(clip) == "inset(0px 0px 0px 50%)"
    slider = page.get_by_label("Share that shows the later evaluation")
    slider.focus()
    page.keyboard.press("End")
    assert over.evaluate(clip) == "inset(0px 0px 0px 0%)"
    page.keyboard.press("Escape")
    page.keyboard.press("Space")
    assert over.evaluate(clip) == "inset(0px 0px 0px 100%)"
    before, after = (page.locator(".side").first.locator("img").nth(n).get_attribute("src") for n in (0, 1))
    assert re.sub(r"step=\d+", "", before) == re.sub(r"step=\d+", "", after)
    for _ in range(3):
        page.keyboard.press("j")
    title = page.locator("section:focus h3").bounding_box()["y"]
    assert title > page.locator("header").evaluate("node => node.getBoundingClientRect().bottom")
    opened(page, root, "text", "/pairs")
    page.wait_for_selector("section")
    assert page.locator("input[type=range]").count() == 0
    opened(page, root, "acting", "/pairs")
    page.wait_for_selector(".notice:has-text('There is only one evaluation, after step 8')")


def test_videos_play(page, root):
    opened(page, root, "video", "/sample?kind=eval&step=8&row=0")
    medium = page.locator(".shown video")
    medium.wait_for()
    page.locator("h1").click()
    page.keyboard.press("Space")
    page.wait_for_function("() => document.querySelector('.shown video').currentTime > 0.1")
    page.keyboard.press("Space")
    assert medium.evaluate("video => video.paused")
    page.locator("a[data-item]").first.focus()
    page.wait_for_function("() => !document.querySelector('[data-item] video').paused")  # it plays by itself
    page.keyboard.press("Space")
    assert page.locator("[data-item] video").first.evaluate("video => video.paused")
    assert medium.evaluate("video => video.paused")


def test_episodes_are_listed_by_step_and_task_and_lead_to_their_samples(page, root):
    opened(page, root, "acting", "/episodes")
    assert page.locator("nav a[aria-current]").inner_text() == "Episodes"
    by_step, by_task = page.locator("table").all()
    assert by_step.locator("tbody tr").inner_text().split() == ["8", "training", "3", "0.250", "20", "50", "%"]
    assert [row.split("\t")[-1] for row in by_task.locator("tbody tr").all_inner_texts()] == ["50 %", ""]
    assert "training, step 8: success, reward 0.250, 20 steps" in page.locator("main").inner_text()
    page.locator("a[data-item]").first.click()
    page.wait_for_selector("h1:has-text('Sample t:0')")
    opened(page, root, "acting", "/sample?kind=samples&step=8&row=2")
    page.wait_for_selector(".tree li:has-text('group: start1@0')")
    assert page.locator("h2", has_text="Prompt").count() == 0


def test_settings_have_origins_and_differences(page, root):
    opened(page, root, "image", "/config")
    page.wait_for_selector("h2:has-text('All settings')")
    row = page.locator("tr", has_text="num_rollouts")
    assert row.inner_text().split() == ["num_rollouts", "8", "recipe", "r.yaml:2"]
    page.get_by_label("only what was set").check()
    assert page.locator("tr", has_text="lr").count() == 0
    page.get_by_label("Compare with").select_option(id_of(root / "failed"))
    page.wait_for_selector("h2:has-text('Differences')")
    assert "num_rollouts" in page.locator("table").first.inner_text()
    opened(page, root, "text", "/config")
    page.wait_for_selector("td:has-text('<U+202E>turned {{7*7}}')")


def test_a_comparison_has_curves_over_each_axis_intervals_and_the_same_prompts(page, root):
    ids = ",".join(id_of(root / name) for name in ("image", "failed", "text"))
    page.evaluate("hash => { location.hash = hash; }", f"#/compare?runs={ids}")
    page.wait_for_selector("[data-chart='rollout/reward_mean'] canvas")
    page.get_by_label("Curves over").select_option("seconds")
    page.wait_for_function("() => document.querySelector('[data-chart] [role=img]').ariaLabel.includes('over seconds')")
    page.wait_for_selector("h3:has-text('a red circle')")
    text = page.locator("main").inner_text()
    assert "A to B: step 8 of image, step 6 of failed" in text
    assert "C text: mean reward" in text
    assert page.locator("section").count() == 4
    page.set_viewport_size({"width": 390, "height": 700})
    page.wait_for_timeout(500)  # charts are drawn again
    page.locator(".u-label").evaluate_all("nodes => nodes.forEach((node) => { node.textContent = 'name-'.repeat(9); })")
    page.wait_for_function("() => document.documentElement.scrollWidth <= 390")


def test_the_system_page_has_memory_phases_and_the_machine(page, root):
    opened(page, root, "image", "/system")
    page.wait_for_selector("[data-chart='mem/host_peak_gib'], figcaption:has-text('mem/host_peak_gib')")
    text = page.locator("main").inner_text()
    assert re.search(r"generate\s+12\s+75.0 %", text)
    assert "platform" in text


def test_a_damaged_and_an_unknown_run_say_what_is_wrong(page, root, served):
    opened(page, root, "damaged", "/pairs")
    page.wait_for_selector("summary:has-text('could not be read whole')")
    assert "eval/step-000006/scores.json: it is damaged" in page.locator("main").inner_text()
    opened(page, root, "damaged", "/gallery")
    page.wait_for_selector(".tile")


def test_a_live_run_shows_new_steps_by_itself(browser, tmp_path):
    copy = record(tmp_path / "live", code=0)
    facts = copy / "run.json"
    told = json.loads(facts.read_text())
    ended = told["exit"]
    told |= {"exit": None, "sessions": [told["sessions"][0] | {"host": "elsewhere"}]}  # its heartbeat is fresh
    facts.write_text(json.dumps(told))
    steps = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text("")
    with viewer(tmp_path) as served:
        page = browser.new_page(viewport={"width": 1280, "height": 400})
        page.goto(served.address)
        page.wait_for_selector(".badge:has-text('running')")
        page.evaluate("hash => { location.hash = hash; }", f"#/run/{id_of(copy)}")
        page.wait_for_selector("text=no step yet")
        (copy / "metrics.jsonl").write_text(steps)
        page.wait_for_selector("text=step 6 of 6")
        page.locator("[data-chart='Time of a step by phase']").scroll_into_view_if_needed()  # it is drawn when near
        page.wait_for_selector("[data-chart='Time of a step by phase'] canvas")
        with (copy / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 7, "rollout/reward_mean": 0.75, "rollout/reward_std": 0.1}) + "\n")
        page.wait_for_selector("text=step 7 of 6")
        # The state and the curves ask on their own, so one of them may be newer for a moment.
        page.wait_for_selector("[data-chart='Reward'] [role=img][aria-label*='training 0.750']", state="attached")
        page.evaluate("hash => { location.hash = hash; }", f"#/run/{id_of(copy)}/gallery")
        page.wait_for_selector("h1:has-text('Gallery')")
        assert page.locator(".badge").inner_text() == "running"
        facts.write_text(json.dumps(told | {"exit": ended}))
        page.wait_for_selector(".badge:has-text('finished')")
        page.close()


COLOURS = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const texts = "h1, h2, p, a, dt, dd, th, td, pre, .soft, .badge, label, button, .caption, .token, .tree li, " +
    "figcaption, .u-legend *";
  return [...document.querySelectorAll(texts)].filter((node) => node.textContent.trim()).map((node) => {
    const grounds = [];
    for (let at = node; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    pen.clearRect(0, 0, 1, 1);
    for (const colour of grounds) {
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
    }
    const ground = [...pen.getImageData(0, 0, 1, 1).data];
    pen.fillStyle = getComputedStyle(node).color;
    pen.fillRect(0, 0, 1, 1);
    return [[...pen.getImageData(0, 0, 1, 1).data], ground, `${node.className} ${node.textContent.slice(0, 30)}`];
  });
}"""
"""Ink and ground of each text as the browser paints them, with the transparent layers between."""
NAMELESS = """() => [...document.querySelectorAll("input, select, button, img, video")].filter(
  (node) => !(node.labels?.length || node.ariaLabel || node.textContent.trim() || node.alt)
).map((node) => node.outerHTML)"""


def luminance(colour):
    """Relative luminance of red, green and blue from 0 to 255 (WCAG 2.1)."""
    parts = [part / 255 for part in colour[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(ink, ground):
    high, low = sorted((luminance(ink), luminance(ground)), reverse=True)
    return (high + 0.05) / (low + 0.05)


PAGES = {
    "": ("image", "[data-chart='Reward'] canvas"),
    "/gallery": ("failed", ".tile"),
    "/pairs": ("image", ".side"),
    "/config": ("image", "h2:has-text('All settings')"),
    "/system": ("image", "td"),
    "/episodes": ("acting", "td"),
    "/sample?kind=eval&step=8&row=0": ("image", ".tree"),
    "/sample?kind=samples&step=8&row=3": ("text", ".token"),
}
"""Each page of a run, a run that has it, and what shows that it is complete."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast_and_controls_have_names(page, root, theme):
    while theme not in page.locator("#theme").inner_text():
        page.locator("#theme").click()
    for part, (name, complete) in PAGES.items():
        opened(page, root, name, part)
        page.wait_for_selector(complete)
        pairs = page.evaluate(COLOURS)
        assert len(pairs) > 30
        assert [text for ink, ground, text in pairs if contrast(ink, ground) < 4.5] == [], part
        assert page.evaluate(NAMELESS) == [], part
    focused = page.locator("#theme")
    focused.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("part", PAGES)
def test_pages_fit_a_phone(page, root, part):
    page.set_viewport_size({"width": 375, "height": 700})
    opened(page, root, PAGES[part][0], part)
    page.wait_for_timeout(300)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 375
