"""Prompt files: what the schema allows is read exactly, and everything else is refused by file, line and text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from unirl.config.errors import DataError
from unirl.data.datasets import load_prompts
from unirl.types.primitives import MediaRef


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_txt_gives_one_prompt_per_line_with_ids_of_file_and_row(tmp_path):
    prompts = load_prompts(write(tmp_path, "train.txt", "a red circle\n\n  a blue square \r\n\ta cat: 3, \u732b\n"))
    assert [prompt.text for prompt in prompts] == ["a red circle", "a blue square", "a cat: 3, \u732b"]
    assert [prompt.prompt_id for prompt in prompts] == ["train.txt:0", "train.txt:1", "train.txt:2"]
    assert prompts[1].group_id == "train.txt:1@0"


def test_only_line_feeds_separate_prompts(tmp_path):
    text = "one\u2028still one\x85here too\u00a0end\n"
    assert [prompt.text for prompt in load_prompts(write(tmp_path, "a.txt", text))] == [text.strip()]


def test_byte_order_mark_is_not_part_of_the_first_prompt(tmp_path):
    for name, content in (("a.txt", "cat"), ("a.jsonl", '{"prompt": "cat"}'), ("a.json", '["cat"]')):
        assert load_prompts(write(tmp_path, name, b"\xef\xbb\xbf" + content.encode()))[0].text == "cat"


def test_json_forms_of_the_seed_schema_all_give_the_same_prompts(tmp_path):
    forms = [
        ["a", {"prompt": "b"}, {"caption": "c"}],
        {"prompts": ["a", {"caption": "b"}, "c"]},
    ]
    for form in forms:
        path = write(tmp_path, "p.json", json.dumps(form, indent=2))
        ids = [f"p.json:{index}" for index in range(3)]
        assert [(prompt.text, prompt.prompt_id) for prompt in load_prompts(path)] == list(zip("abc", ids, strict=True))
    for single in ({"caption": "a"}, {"prompt": "a"}):
        assert [p.text for p in load_prompts(write(tmp_path, "p.json", json.dumps(single)))] == ["a"]


def test_extra_keys_become_metadata_unless_metadata_is_given(tmp_path):
    rows = [{"prompt": "a", "tag": "counting", "n": 3}, {"prompt": "b", "metadata": {"tag": [1]}, "prompt_id": "b1"}]
    first, second = load_prompts(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert first.metadata == {"tag": "counting", "n": 3}
    assert (second.metadata, second.prompt_id) == ({"tag": [1]}, "b1")


def test_prompt_key_names_the_text_and_leaves_other_keys_to_metadata(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "a", "prompt": "original"}\n{"caption": "b"}\n')
    first, second = load_prompts(path, prompt_key="text")
    assert (first.text, first.metadata, second.text) == ("a", {"prompt": "original"}, "b")


def test_media_uris_resolve_against_the_file_and_addresses_pass_unchanged(tmp_path):
    uris = ["frames/1.png", "/data/2.png", "https://example.org/3.png", "s3://bucket/4.png", "gs://bucket/5.png"]
    rows = [{"prompt": u, "media_refs": [{"modality": "image", "role": "condition", "uri": u}]} for u in uris]
    prompts = load_prompts(write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    expected = [str(tmp_path / "frames/1.png"), *uris[1:]]
    assert [prompt.media for prompt in prompts] == [(MediaRef("image", "condition", uri),) for uri in expected]


BAD_ENTRIES = [
    ('{"prompt": ""}', "'prompt' is empty"),
    ('{"prompt": 3}', 'must be text, found the number 3; write it as "3"'),
    ('{"prompt": null}', "found null"),
    ('{"text": "a"}', r"no key 'prompt' \(or 'caption'\); its keys are \['text'\]"),
    ('{"prompt": "a", "caption": "b"}', "both 'prompt' and 'caption' are given and differ"),
    ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
    ('{"prompt": "a", "prompt_id": 7}', "'prompt_id' must be text"),
    ('{"prompt": "a", "prompt_id": "x y"}', "contains white space"),
    ('{"prompt": "a", "metadata": "m"}', "'metadata' must be an object, found text"),
    ('{"prompt": "a", "metadata": {}, "tag": 1}', r"the keys \['tag'\] beside 'metadata'"),
    ('{"prompt": "a", "prompt_embed_path": "x.pt"}', "'prompt_embed_path' is a precomputed embedding"),
    ('{"prompt": "a", "pooled_prompt_embeds": []}', "'pooled_prompt_embeds' is a precomputed embedding"),
    ('{"prompt": "a", "negative_prompt": "b"}', "set sampling.negative_prompt"),
    ('{"prompt": "a", "seed": 3}', "set sampling.seed"),
    ('{"prompt": "a", "score": NaN}', "NaN is not a JSON value"),
    ('{"prompt": "a", "score": 1e999}', "the number 1e999 is too large"),
    ('{"prompt": "a\\u0000b"}', r"control character U\+0000"),
    ('{"prompt": "a\\ud800"}', "half of a UTF-16 surrogate pair"),
    ('{"prompt": "a"', "not valid JSON: Expecting ',' delimiter"),
    ('["a"]', "expected one JSON object per line"),
    ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ('{"prompt": "a", "media": {}}', "'media_refs' must be a list"),
    ('{"prompt": "a", "media": [], "media_refs": []}', "two names of one list"),
    ('{"prompt": "a", "media": [{"uri": "x.png"}]}', r"exactly the form .*found \['uri'\]"),
    ('{"prompt": "a", "media": ["x.png"]}', "exactly the form .*found text"),
]


@pytest.mark.parametrize(("entry", "why"), BAD_ENTRIES, ids=[why[:40] for _, why in BAD_ENTRIES])
def test_bad_line_is_refused_with_file_line_reason_and_text(entry, why, tmp_path):
    path = write(tmp_path, "bad.jsonl", f'{{"prompt": "fine"}}\n\n{entry}\n')
    with pytest.raises(DataError, match=why) as caught:
        load_prompts(path)
    assert caught.value.code == 4002
    assert str(caught.value).startswith(f"{path}:3: ")
    assert ascii(entry[:20])[1:-1] in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("modality", "role", "uri", "code", "why"),
    [
        ("video", "condition", "a.mp4", 4002, "modality 'video' and role 'condition'"),
        ("image", "mask", "a.png", 4002, "modality 'image' and role 'mask'"),
        (["image"], "condition", "a.png", 4002, "modality"),
        ("image", "condition", "file:///etc/passwd", 4002, "scheme 'file'"),
        ("image", "condition", "http://[", 4002, "not a valid address"),
        ("image", "condition", "", 4002, "'uri' is empty"),
        ("image", "condition", "../secret.png", 4003, "is outside the folder"),
        ("image", "condition", "link/secret.png", 4003, "is outside the folder"),
    ],
)
def test_unknown_media_and_escaping_uris_are_refused_by_name(modality, role, uri, code, why, tmp_path):
    os.symlink("/", tmp_path / "link")
    row = {"prompt": "a", "media_refs": [{"modality": modality, "role": role, "uri": uri}]}
    with pytest.raises(DataError, match=why) as caught:
        load_prompts(write(tmp_path, "a.jsonl", json.dumps(row)))
    assert caught.value.code == code


def test_two_recorded_images_of_a_role_are_refused(tmp_path):
    (tmp_path / "a.png").touch()
    ref = {"modality": "image", "role": "chosen", "uri": "a.png"}
    with pytest.raises(DataError, match="2 media references of role 'chosen'; keep only one"):
        load_prompts(write(tmp_path, "a.json", json.dumps([{"prompt": "a", "media": [ref, ref]}])))


def test_repeated_prompt_id_names_both_lines(tmp_path):
    row = '{"prompt": "a", "prompt_id": "x"}'
    with pytest.raises(DataError, match=r"a\.jsonl:4: prompt_id 'x' was already used in line 1"):
        load_prompts(write(tmp_path, "a.jsonl", f'{row}\n{{"prompt": "b"}}\n\n{row}\n'))


def test_entry_of_a_json_list_is_refused_with_its_own_line(tmp_path):
    listed = '\n[\n "a",\n {"prompt":\n   "b"}, 5\n,\n\n  {"prompt": ""}]\n'
    for text, line in (
        (listed, 5),
        (listed.replace("5", '"[c"'), 8),
        ('{\n "prompts"\n:\n[ "a",\n"" ] }', 5),
    ):
        with pytest.raises(DataError) as caught:
            load_prompts(write(tmp_path, "a.json", text))
        assert f"a.json:{line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", "", "holds no prompts. Expected one prompt per line"),
        ("a.txt", " \n\r\n\t\n", "holds no prompts"),
        ("a.jsonl", "\n", "holds no prompts"),
        ("a.json", "", "holds no prompts"),
        ("a.json", "[]", "holds no prompts"),
        ("a.json", "3", "expected a list of strings or objects"),
        ("a.json", '{"prompts": "a"}', "expected a list of strings or objects"),
        ("a.json", '{"prompts": [], "version": 2}', r"the keys \['version'\] beside 'prompts'"),
        ("a.json", '["a",]', r"a\.json:1: not valid JSON"),
        ("a.csv", "a", r"unknown extension '.csv'. Accepted: .txt, .jsonl, .json, .parquet"),
        ("a.txt", b"caf\xe9\n", r"a\.txt:1: the text is not UTF-8 \(bytes e9 0a\)"),
        ("a.txt", b"ok\nok\n\xff\xff\n", r"a\.txt:3: the text is not UTF-8"),
        ("a.txt", "cat".encode("utf-16"), "UTF-16"),
        ("a.txt", "one\rtwo\rthree", "the line contains a carriage return"),
    ],
)
def test_bad_file_is_refused_as_a_whole(name, content, why, tmp_path):
    with pytest.raises(DataError, match=why) as caught:
        load_prompts(write(tmp_path, name, content))
    assert caught.value.exit_status == 4


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt does not exist \(looked in .*DATA_PATH"):
        load_prompts(tmp_path / "absent.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_prompts(tmp_path / "folder.txt")


def test_lower_and_upper_case_extensions_are_the_same(tmp_path):
    assert len(load_prompts(write(tmp_path, "A.TXT", "cat"))) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["prompt", "caption", "media", "metadata"]), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    suffix=st.sampled_from([".txt", ".jsonl", ".json"]),
    content=st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()) | st.text().map(str.encode),
)
@example(suffix=".json", content=b"[" * 100_000)
@example(suffix=".jsonl", content=b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}")
def test_any_bytes_give_prompts_or_a_typed_error(suffix, content, tmp_path):
    path = write(tmp_path, "fuzz" + suffix, content)
    try:
        prompts = load_prompts(path)
    except DataError as error:
        assert str(path) in str(error)
        str(error).encode()
    else:
        assert all(prompt.text.strip() for prompt in prompts)
