"""The viewer in a real browser on runs of several tracks: `unirl train` of the prompt enhancer and a unified model."""

import subprocess
import sys

import pytest

from tests.source_tree import ROOT
from tests.viewer.serving import viewer
from tests.viewer.test_browser import CHROMIUM, COLOURS, NAMELESS, assert_drawn, browser, contrast, opened, page  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")]
RECIPES = {"pe": "pe/quickstart", "unified": "unified_model/bagel_think_joint"}
TRACKS = {"pe": ("ar", "diffusion"), "unified": ("image", "think")}
EVERY = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=1", "evaluation.eval_steps=2", "save_interval=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tracks")
    for name, recipe in RECIPES.items():
        command = [sys.executable, "-m", "unirl.cli", "train", recipe, *EVERY, f"run.dir={root / name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
    return root


@pytest.fixture(scope="module")
def served(root):
    with viewer(root) as served:
        yield served


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_of_several_tracks_is_walked_from_the_list_to_a_sample_and_its_siblings(page, root, name):  # noqa: F811
    page.get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector("[data-chart='Reward'] canvas")
    assert page.locator("p.notice").inner_text() == "toy scale: random weights, rewards mean nothing"
    label = page.locator("[data-chart='Reward'] [role=img]").get_attribute("aria-label")
    assert all(f"{track} " in label for track in (*TRACKS[name], "held out"))
    titles = page.locator("[data-chart]").evaluate_all("nodes => nodes.map((node) => node.dataset.chart)")
    assert len(titles) == len(set(titles)) and not any(title.startswith("Reward,") for title in titles)

    page.get_by_role("link", name="Gallery").click()
    page.wait_for_selector(".tile img")
    page.get_by_label("From").select_option("samples")
    page.get_by_label("Last step").select_option("1")
    page.wait_for_function("() => document.querySelector('[data-count]')?.textContent.startsWith('16 of')")
    page.keyboard.press("j")
    page.keyboard.press("Enter")

    page.wait_for_selector("h2:has-text('Lineage')")
    tree = page.locator(".tree li")
    depths = tree.evaluate_all("nodes => nodes.map((node) => Number(node.dataset.depth))")
    assert depths[:3] == [0, 1, 2] and depths.count(1) == 2 and depths.count(2) == 8
    assert page.locator(".tree .here").count() == 1
    assert tree.nth(1).inner_text().startswith("rewrite: ")
    for chart in ("logp", "sigma"):
        assert_drawn(page, chart)
    here = page.locator("h1").inner_text()
    tree.locator("a").nth(5).click()
    page.wait_for_function("said => document.querySelector('h1')?.textContent !== said", arg=here)
    page.wait_for_selector("h2:has-text('Lineage')")
    page.keyboard.press("k")
    page.wait_for_function("() => document.querySelector('.tree .here a')")


def test_settings_of_two_runs_differ_and_a_comparison_has_the_tracks_of_both(page, root):  # noqa: F811
    opened(page, root, "pe", "/config")
    page.get_by_label("Compare with").select_option(label="unified (unified_model/bagel_think_joint)")
    page.wait_for_selector("h2:has-text('Differences')")
    row = page.locator("tr", has_text="data_source.data_path").first
    assert "datasets/requests/train.jsonl" in row.inner_text() and "datasets/pickscore/train.txt" in row.inner_text()

    page.get_by_role("link", name="Runs").click()
    page.wait_for_selector("tr[data-item]")
    for _ in RECIPES:
        page.keyboard.press("j")
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector("[data-chart='ar/rollout/reward_mean'] canvas")
    assert_drawn(page, "think/rollout/reward_mean")
    assert "the settings of the reward differ" in page.locator("main").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("part", ["", "/gallery", "/sample?kind=samples&step=2&row=1"])
def test_pages_of_several_tracks_fit_a_phone_with_contrast_and_named_controls(page, root, theme, part):  # noqa: F811
    page.set_viewport_size({"width": 375, "height": 700})
    while theme not in page.locator("#theme").inner_text():
        page.locator("#theme").click()
    opened(page, root, "unified", part)
    page.wait_for_timeout(300)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 375
    assert page.evaluate(NAMELESS) == []
    assert [text for ink, ground, text in page.evaluate(COLOURS) if contrast(ink, ground) < 4.5] == []
