"""Samples that are texts: kept exactly, and read on pages on which nothing of them acts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from unirl.tracking.media import media_of, read_samples
from unirl.tracking.samples import SampleRow, SampleTable, write_manifest
from unirl.tracking.tables import read_rows
from unirl.tracking.texts import (
    MAX_GROUPS,
    PAGE_CHARACTERS,
    TextMedia,
    before_after_page,
    block,
    inline,
    samples_page,
    shortened,
    visible,
)
from unirl.types.primitives import Texts

EVIL = (
    "```\n# not a heading\n```",
    "~~~~\n</code></pre><script>alert(1)</script>\n~~~~",
    "\x1b[2J\x1b[31mred\x07\x00\x9b",
    "half a pair \ud800 and \udfff, turned \u202e round\u2066 \u200b\u2028\u0085",
    "\r\n\tline\rback\n\n\n- list\n1. one\n> quote\n---\n===",
    "`" * 50 + "*bold* [link](javascript:1) ![x](http://x/y.png) <img src=x>",
    "    four columns\n\tand a tab",
    "x" * 100_000,
    "\n" * 10_000 + "42",
    "\\boxed{\\frac{1}{2}} $x^2$ &amp; \u732b \u00e9 \U0001f600 \u3000wide",
    "",
    " \n ",
)


def table(texts: tuple[str, ...], prompt: str = "What is 3 + 4?", reward: float = 0.25) -> SampleTable[TextMedia]:
    rows = tuple(
        SampleRow(
            sample_id=f"p{i // 2}@0:{i % 2}",
            group_id=f"p{i // 2}@0",
            prompt=prompt,
            reward=reward + i / 100,
            rewards={"exact": 1.0, "`odd`": float("nan")},
            advantage=-0.5,
            facts={"tokens": 17, "finished": i % 2 == 0, "answer": "7"},
            track="text",
        )
        for i in range(len(texts))
    )
    return SampleTable(rows, TextMedia(texts))


def tokens_of(page: str) -> list:
    return MarkdownIt("commonmark").parse(page)


@pytest.mark.parametrize("text", EVIL)
def test_a_text_on_a_page_is_one_block_of_code_and_nothing_else(text) -> None:
    tokens = tokens_of("before\n\n" + block(text, 10**6) + "after\n")
    codes = [token for token in tokens if token.type == "code_block"]
    kinds = {token.type for token in tokens}
    assert kinds <= {"paragraph_open", "inline", "paragraph_close", "code_block"}
    if text.strip():
        assert len(codes) == 1
        shown = "\n".join(line.rstrip() for line in codes[0].content.split("\n")).strip("\n")
        assert shown == "\n".join(line.rstrip() for line in visible(shortened(text, 10**6)).split("\n")).strip("\n")
    else:
        assert not codes


@pytest.mark.parametrize("text", EVIL)
def test_a_short_text_in_a_line_is_code_or_absent(text) -> None:
    (inner,) = [token for token in tokens_of(f"a {inline(text)} z") if token.type == "inline"]
    assert {child.type for child in inner.children} <= {"text", "code_inline"}
    assert len(inline(text)) < 200


def test_characters_without_a_glyph_are_spelled_out_and_others_stay() -> None:
    assert visible("a\x1b[2J\u202e\ud800\r\nb\rc\td") == "a<U+001B>[2J<U+202E><U+D800>\nb<U+000D>c\td"
    assert visible(EVIL[9]) == EVIL[9]
    for text in EVIL:
        assert all(c in "\n\t" or c == "\u3000" or c.isprintable() for c in visible(text))


def test_a_long_text_keeps_its_beginning_and_its_end_and_says_how_much_is_missing() -> None:
    text = "".join(f"{i:06d}\n" for i in range(20_000))
    for limit in (100, 1000, 6000):
        short = shortened(text, limit)
        assert len(short) <= limit + 80
        head, missing, tail = re.fullmatch(r"(?s)(.*)\n\[\.\.\. (\d+) characters .*\]\n(.*)", short).groups()
        assert text.startswith(head) and text.endswith(tail) and head and tail.strip()
        assert len(head) + len(tail) + int(missing) == len(text)
    assert shortened("x" * 100_000, 300).startswith("x" * 190)
    assert shortened("short", 100) == "short"


def test_any_text_is_kept_exactly_and_read_back(tmp_path) -> None:
    texts = (*EVIL, "last \udcff")
    saved = table(texts, prompt=EVIL[1]).saved(tmp_path)
    write_manifest(saved.rows, tmp_path / "manifest.jsonl")
    result = read_samples(list(read_rows(tmp_path / "manifest.jsonl")), tmp_path)
    assert result.media == TextMedia(texts)
    assert [row.prompt for row in result.rows] == [EVIL[1]] * len(texts)
    assert (result.rows[0].medium, result.rows[0].facts) == ("text", saved.rows[0].facts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.jsonl"]


def test_a_page_says_what_is_known_best_first_and_is_a_file_that_any_program_reads(tmp_path) -> None:
    path = TextMedia(EVIL).page(table(EVIL), tmp_path, "samples of step 3")
    page = path.read_bytes().decode("utf-8")
    headings = re.findall(r"(?m)^#+ .*", page)
    assert headings[0] == "# samples of step 3"
    assert headings[1:4] == [
        "## Prompt 1: mean reward 0.355",
        "### Sample 1 of 2: reward 0.360",
        "### Sample 2 of 2: reward 0.350",
    ]
    means = [float(mean) for mean in re.findall(r"(?m)^## Prompt .*mean reward ([0-9.]+)", page)]
    assert means == sorted(means, reverse=True) and len(means) == len(EVIL) / 2
    assert "`p0@0:1`, advantage -0.500, answer `7`, not finished, tokens 17, `exact` 1.000, `` `odd` `` nan" in page
    assert "`p0@0:0`, advantage -0.500, answer `7`, finished, tokens 17" in page
    assert {token.tag for token in tokens_of(page) if token.type == "heading_open"} == {"h1", "h2", "h3"}
    assert not any(token.type == "html_block" for token in tokens_of(page))


def test_a_page_stays_readable_however_many_and_long_the_texts_are() -> None:
    rows = 400
    page = samples_page(table(("y" * 100_000,) * rows), "t")
    assert len(page) < 2 * PAGE_CHARACTERS
    assert f"{MAX_GROUPS} of {rows // 2} prompts shown" in page


def test_before_and_after_stand_under_their_prompt_in_order_of_sampling() -> None:
    before, after = table(("b0", "b1", "b2")), table(("a0", "a1", "a2"), reward=0.75)
    page = before_after_page(before, after, ("before (step 0)", "after (step 9)"))
    assert re.findall(r"    ([ab]\d)\n", page) == ["b0", "a0", "b1", "a1", "b2", "a2"]
    assert "mean reward 0.263 -> 0.762 over 2 prompts, better on 2, worse on 0, equal on 0" in page
    assert "### Before (step 0), sample 1: reward 0.250" in page
    assert "### After (step 9), sample 1: reward 0.750" in page


def test_prompts_that_changed_come_first_on_a_page() -> None:
    before = table(("same", "same", "b2", "b3", "b4", "b5"))
    after = table(("same", "same", "a2", "a3", "a4", "a5"))
    rows = tuple(replace(row, reward=row.reward + (i >= 4)) for i, row in enumerate(after.rows))
    page = before_after_page(before, replace(after, rows=rows), ("before", "after"))
    assert re.findall(r"    (same|b\d)\n", page) == ["b4", "b5", "b2", "b3", "same", "same", "same", "same"]


def test_prompts_that_read_alike_stand_apart_by_their_group() -> None:
    """Questions about images often have the same words."""
    page = before_after_page(table(("b",) * 6), table(("a",) * 6), ("before", "after"))
    assert len(re.findall("(?m)^## Prompt", page)) == 3


def test_texts_and_their_kind_come_from_what_an_engine_shows() -> None:
    assert media_of(Texts(texts=["a", "b"])) == TextMedia(("a", "b"))
    with pytest.raises(TypeError, match=r"tracking/media\.py"):
        media_of(Path("."))  # type: ignore[arg-type]


def test_a_prompt_about_pictures_names_them_and_keeps_them(tmp_path) -> None:
    plain = table(("a", "b"))
    rows = tuple(replace(row, images=("set/p 1.png", "x`y.png")) for row in plain.rows)
    saved = SampleTable(rows, plain.media).saved(tmp_path)
    write_manifest(saved.rows, tmp_path / "manifest.jsonl")
    result = read_samples(list(read_rows(tmp_path / "manifest.jsonl")), tmp_path)
    assert result.rows[0].images == ("set/p 1.png", "x`y.png")
    for page in (samples_page(result, "t"), before_after_page(result, result, ("before", "after"))):
        assert page.count("About `set/p 1.png`, ``x`y.png``") == 1
