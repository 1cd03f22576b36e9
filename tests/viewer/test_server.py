"""The viewer's answers: what it shows of runs in any state, and what it refuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import chain

import pytest

from tests.processes import wait_until
from tests.recorded_runs import PIECES, PROMPTS, act, record
from tests.viewer.serving import NAMED, TOKEN, viewer
from unirl.tracking.record import RunRecord
from unirl.viewer import library as library_module
from unirl.viewer.app import byte_range
from unirl.viewer.guard import COOKIE
from unirl.viewer.library import RunLibrary, id_of
from unirl.viewer.pages import runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with finished runs of each medium, one that failed, one that died, and damaged ones."""
    root = tmp_path_factory.mktemp("runs")
    for medium in ("image", "text", "video"):
        record(root / medium, medium, prompts=(*PROMPTS, "turn \u202e around \x1b[31m"), seed=len(medium))
    record(root / "failed", code=5)
    record(root / "died", code=None)
    with (root / "died/events.jsonl").open("a") as file:
        for step in (1, 2):
            file.write(f"{json.dumps({'alarm': 'kl', 'ev': 'alarm.raise', 'step': step, 'value': step / 3})}\n")
    shutil.copytree(root / "image", root / "newer")
    facts = root / "newer/run.json"
    facts.write_text(facts.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    shutil.copytree(root / "image", root / "damaged")
    (root / "damaged/run.json").write_text("{")
    (root / "damaged/eval/step-000006/scores.json").write_text("[")
    with (root / "damaged/metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 7, "rol')
    return root


@pytest.fixture(scope="module")
def ask(root):
    with viewer(root) as served:
        yield served.ask


@pytest.fixture(scope="module")
def data(ask):
    def data(path, **parameters):
        status, headers, body = ask(path, **parameters)
        assert (status, headers["content-type"]) == (200, "application/json"), body
        return json.loads(body)

    return data


def test_a_viewer_does_without_torch():
    """It would take three quarters of the memory."""
    script = "import sys, unirl.cli.main, unirl.cli.view, unirl.viewer.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_all_runs_are_listed_with_what_their_records_say(root, data):
    listed = {run["name"]: run for run in data("/api/runs")["runs"]}
    assert {name: run["status"] for name, run in listed.items()} == {
        "image": "finished", "text": "finished", "video": "finished", "failed": "failed", "died": "lost",
        "newer": "unknown", "damaged": "unknown",
    }  # fmt: skip
    shown = listed["image"]
    assert (shown["steps"], shown["total_steps"], shown["first_reward"], shown["last_reward"]) == (6, 6, 0.1, 0.6)
    assert shown["id"] == id_of(root / "image")
    assert (shown["alarms"], listed["died"]["alarms"]) == (0, 2)


def test_the_newest_run_of_the_list_is_read_before_its_page_is_asked_for(root):
    library = RunLibrary([root])
    newest, *others = [row["id"] for row in runs(library)["runs"]]
    assert wait_until(lambda: library.open(newest).tables_are_complete, 30)
    assert not any(library.open(id).tables_are_complete for id in others)


def test_curves_are_those_of_the_record(root, data):
    run = RunRecord(root / "image")
    names = ["rollout/reward_mean", "mem/host_peak_gib", "absent", "eval/reward_mean"]
    shown = data(f"/api/runs/{id_of(run.root)}/curves", names=",".join(names))
    assert shown["steps"] == [row["step"] for row in run.metrics.rows]
    assert shown["columns"]["rollout/reward_mean"] == [row["rollout/reward_mean"] for row in run.metrics.rows]
    assert shown["columns"]["absent"] == [None] * 6
    assert shown["evaluations"] == {"eval/reward_mean": [row["eval/reward_mean"] for row in run.evaluations]}
    assert shown["seconds"] == [2.0 * step for step in range(1, 7)]
    assert shown["complete"] is True


def test_a_page_of_a_run_has_outcome_ledger_warnings_and_origin(root, data):
    raised = [event["text"] for event in data(f"/api/runs/{id_of(root / 'died')}")["events"]][-2:]
    assert raised == ["kl, step 1, value 0.3333", "kl, step 2, value 0.6667"]
    id = id_of(root / "failed")
    page = data(f"/api/runs/{id}")
    assert page["status"] == {"state": "failed", "code": 5, "reason": "ValueError: it broke"}
    assert page["ledger"] == {"generated": 48, "scored": 42, "dropped": 6, "reasons": {"not finite": 6}}
    assert ("warning", "the reward looks odd") in [(event["name"], event["text"]) for event in page["events"]]
    reward = data(f"/api/runs/{id}/outcome")["outcome"]["differences"][0]
    assert (reward["name"], reward["num_prompts"], reward["after"] - reward["before"]) == (
        "reward",
        4,
        pytest.approx(0.25),
    )
    assert reward["interval"]["low"] < 0.25 < reward["interval"]["high"]
    origins = {
        row["key"]: (row["shown"], row["source"], row["place"]) for row in data(f"/api/runs/{id}/settings")["settings"]
    }
    assert origins["num_rollouts"] == ("6", "recipe", "r.yaml:2")
    assert origins["lr"] == ("0.1", "default", "")


@pytest.mark.parametrize("name", ["damaged", "newer", "died"])
def test_a_run_that_is_not_whole_is_shown_as_far_as_it_goes(root, data, name):
    id = id_of(root / name)
    page = data(f"/api/runs/{id}")
    assert (page["count"], page["step"]) == (6, 6)
    problems = {
        *page["problems"],
        *data(f"/api/runs/{id}/samples")["problems"],
        *data(f"/api/runs/{id}/pairs")["problems"],
    }
    named = {problem.partition(": ")[0] for problem in problems}
    assert named == {
        "damaged": {"run.json", "metrics.jsonl", "eval/step-000006/scores.json"}, "newer": {"run.json"}, "died": set(),
    }[name]  # fmt: skip


def test_a_gallery_filters_and_pages(root, data):
    id = id_of(root / "image")
    every = data(f"/api/runs/{id}/samples")
    assert (every["total"], every["scores"], every["steps"]) == (24, ["shape"], {"samples": [6], "eval": [0, 6]})
    parts = [data(f"/api/runs/{id}/samples", offset=offset, limit=10)["rows"] for offset in (0, 10, 20)]
    assert list(chain(*parts)) == every["rows"]
    best = data(f"/api/runs/{id}/samples", kind="eval", last_step=0, order="best", prompt="CIRCLE")["rows"]
    assert [row["reward"] for row in best] == [pytest.approx(0.02), 0]
    assert {(row["kind"], row["step"], row["prompt"]) for row in best} == {("eval", 0, "a red circle")}


def test_a_sample_has_its_neighbours_and_its_lineage(root, tmp_path):
    copy = shutil.copytree(root / "text", tmp_path / "run")
    manifest = copy / "samples/step-000006/manifest.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[1] |= {"track": "think", "sample_id": "parent"}
    rows[2] |= {"track": "answer", "parent_id": "parent", "facts": {"rewrite": "a longer prompt"}}
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with viewer(tmp_path) as served:
        _, _, body = served.ask(f"/api/runs/{id_of(copy)}/sample", kind="samples", step=6, row=2)
        shown = json.loads(body)
        _, _, body = served.ask(f"/api/runs/{id_of(copy)}/sample", kind="eval", step=6, row=3)
        held_out = json.loads(body)
    assert [(node["depth"], node["label"], node["row"]) for node in shown["lineage"]] == [
        (0, "prompt", None), (1, "think", 1), (2, "rewrite", None), (3, "answer", 2),
    ]  # fmt: skip
    assert [row["row"] for row in shown["siblings"]] == [0, 1, 2, 3]
    assert [(row["step"], row["sample_id"]) for row in held_out["history"]] == [(0, "e:1@0:1"), (6, "e:1@0:1")]


def test_samples_with_parents_that_are_not_stored_stand_below_their_parents(root, tmp_path):
    run = shutil.copytree(root / "image", tmp_path / "rewritten")
    manifest = run / "samples/step-000006/manifest.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    for n, (parent, rewrite) in enumerate((("a", "a long circle"), ("b", None), ("a", "a long circle"), ("b", None))):
        rows[n] |= {"parent_id": parent, "track": "diffusion", "facts": {"rewrite": rewrite} if rewrite else {}}
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with viewer(tmp_path) as served:
        place = {"kind": "samples", "step": 6, "row": 2}
        found = json.loads(served.ask(f"/api/runs/{id_of(run)}/sample", **place)[2])
    assert [
        (node["depth"], node["label"], node["text"].partition(",")[0], node["row"]) for node in found["lineage"]
    ] == [
        (0, "prompt", PROMPTS[0], None),
        (1, "rewrite", "a long circle", None),
        (2, "image", "t:0", 0),
        (2, "image", "t:2", 2),
        (1, "parent", "b", None),
        (2, "image", "t:1", 1),
        (2, "image", "t:3", 3),
    ]


def test_episodes_have_means_by_step_and_by_task_and_the_newest_come_first(root, tmp_path, data):
    acting = shutil.copytree(root / "text", tmp_path / "acting")
    rows = act(acting)
    for step in (0, 6):
        scores = acting / f"eval/step-{step:06d}/scores.json"
        held_out = json.loads(scores.read_text())
        held_out["samples"][0]["facts"] = {"episodes": 1, "steps": step, "success": step > 0}
        scores.write_text(json.dumps(held_out))
    with viewer(tmp_path) as served:
        found = json.loads(served.ask(f"/api/runs/{id_of(acting)}/episodes")[2])
    means = {"count": 3, "reward": pytest.approx(0.25), "length": 20.0, "success": 0.5}
    assert found["steps"][1] == {"kind": "samples", "name": 6, "step": 6} | means
    assert [(row["kind"], row["step"]) for row in found["steps"]] == [("eval", 6), ("samples", 6), ("eval", 0)]
    assert [(task["name"], task["step"], task["count"], task["success"]) for task in found["tasks"]] == [
        (PROMPTS[0], 6, 1, 1.0),
        (PROMPTS[0], 6, 2, 0.5),
        ("start1", 6, 1, None),
    ]
    assert [row["sample_id"] for row in found["rows"]][1:4] == [row["sample_id"] for row in rows[:3]]
    assert data(f"/api/runs/{id_of(root / 'image')}/episodes")["total"] == 0


def test_before_and_after_pair_the_same_prompt_and_noise(root, data):
    shown = data(f"/api/runs/{id_of(root / 'image')}/pairs")
    assert (shown["before"], shown["after"], shown["total"]) == (0, 6, 5)
    for row in shown["rows"]:
        assert [before["sample_id"] for before, _ in row["pairs"]] == [after["sample_id"] for _, after in row["pairs"]]
        assert row["rewards"][1] > row["rewards"][0]


def test_a_comparison_has_differences_intervals_and_common_prompts(root, data):
    ids = ",".join(id_of(root / name) for name in ("image", "failed", "text"))
    shown = data("/api/compare", runs=ids)
    assert [(each["key"], each["values"]) for each in shown["differences"]] == [("seed", [5, 1, 4])]
    assert [each["differences"][0]["num_prompts"] for each in shown["outcomes"]] == [4, 5]
    assert shown["outcomes"][1]["differences"][0]["interval"] == {"low": 0, "high": 0}
    common = data("/api/compare/samples", runs=ids)
    assert [row["prompt"] for row in common["rows"]] == list(PROMPTS)
    assert [len(row["samples"]) for row in common["rows"]] == [3, 3, 3, 3]


def test_media_are_given_by_their_content_and_in_parts(root, ask):
    for name, kind in (("image", "image/webp"), ("video", "image/webp")):
        path = f"/media/{id_of(root / name)}/file"
        status, headers, whole = ask(path, kind="eval", step=6, row=0)
        assert (status, headers["content-type"], whole[:4]) == (200, kind, b"RIFF")
        assert headers["content-security-policy"].startswith("default-src 'none'; sandbox")
        assert headers["x-content-type-options"] == "nosniff"
        status, headers, part = ask(path, {**NAMED, "range": "bytes=4-9"}, kind="eval", step=6, row=0)
        assert (status, headers["content-range"], part) == (206, f"bytes 4-9/{len(whole)}", whole[4:10])


@pytest.mark.parametrize(
    ("header", "expected"),
    [("bytes=0-0", range(1)), ("bytes=3-", range(3, 10)), ("bytes=3-99", range(3, 10)), ("bytes=-3", None),
     ("bytes=10-", None), ("bytes=5-2", None), ("bytes=0-1,3-4", None), ("lines=0-1", None), ("", None)],
)  # fmt: skip
def test_one_range_of_bytes_is_understood(header, expected):
    assert byte_range(header, 10) == expected


def test_files_that_are_no_image_or_lie_elsewhere_are_refused(root, tmp_path):
    copy = shutil.copytree(root / "image", tmp_path / "runs" / "run")
    secret = tmp_path / "secret.png"
    shutil.copy(next((root / "image/eval/step-000006").glob("*sheet.png")), secret)
    folder = copy / "samples/step-000006"
    (folder / "drawn.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    (folder / "page.webp").write_text("<html><script>alert(1)</script></html>")
    (folder / "out.webp").symlink_to(secret)
    os.mkfifo(folder / "pipe.webp")
    manifest = folder / "manifest.jsonl"
    row = json.loads(manifest.read_text().splitlines()[0])
    names = [
        "drawn.svg",
        "page.webp",
        "out.webp",
        "pipe.webp",
        "../../../secret.png",
        str(secret),
        "..",
        "a\0b",
        "",
        "x" * 300,
        f"../step-000006/{row['file']}",
    ]
    manifest.write_text("".join(json.dumps(row | {"file": name}) + "\n" for name in names))
    with viewer(tmp_path / "runs") as served:
        for number, name in enumerate(names):
            status, headers, _ = served.ask(f"/media/{id_of(copy)}/file", kind="samples", step=6, row=number)
            assert (status, headers["content-type"]) == (404, "text/plain; charset=utf-8"), name
        status, _, body = served.ask(f"/api/runs/{id_of(copy)}/samples", kind="samples")
        assert status == 200
        assert [each["has_file"] for each in json.loads(body)["rows"]] == [name != "" for name in names]


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/../../etc/passwd", "/static/",
     "/api/runs/../..", "/api/runs/%2e%2e", "/media/x/file", "/media/..%2f/file?kind=eval&step=0&row=0", "/docs",
     "/openapi.json", "//etc/passwd"],
)  # fmt: skip
def test_no_address_leads_out_of_the_given_folders(ask, path):
    assert ask(path)[0] in (400, 404)


def test_a_folder_that_is_a_link_out_of_the_given_one_is_not_shown(root, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "linked").symlink_to(root / "image")
    with viewer(tmp_path / "given") as served:
        assert json.loads(served.ask("/api/runs")[2])["runs"] == []
        assert served.ask(f"/api/runs/{id_of(root / 'image')}")[0] == 404


@pytest.mark.parametrize(
    ("headers", "method", "status"),
    [
        (NAMED, "GET", 200), (NAMED, "HEAD", 200), (NAMED, "POST", 405), (NAMED, "PUT", 405), (NAMED, "DELETE", 405),
        (NAMED, "OPTIONS", 405), ({}, "GET", 401), ({}, "POST", 405), ({"authorization": "Bearer wrong"}, "GET", 401),
        ({"authorization": "Bearer "}, "GET", 401), ({**NAMED, "host": "evil.example"}, "GET", 421),
        ({**NAMED, "host": "evil.example:80"}, "GET", 421), ({**NAMED, "host": "127.0.0.1.evil.example"}, "GET", 421),
        ({**NAMED, "host": ""}, "GET", 421), ({**NAMED, "host": "localhost:99"}, "GET", 200),
        ({**NAMED, "host": "[::1]:99"}, "GET", 200), ({**NAMED, "host": "10.1.2.3"}, "GET", 200),
        ({**NAMED, "host": "[evil.example]"}, "GET", 421), ({**NAMED, "sec-fetch-site": "cross-site"}, "GET", 403),
        ({**NAMED, "sec-fetch-site": "same-origin"}, "GET", 200), ({"cookie": "\x7f=;;="}, "GET", 401),
    ],
)  # fmt: skip
def test_only_who_has_the_token_and_this_machines_name_may_read(ask, headers, method, status):
    assert ask("/api/runs", headers, method)[0] == status


def test_the_token_of_the_address_becomes_a_cookie(ask):
    status, headers, _ = ask(f"/?token={TOKEN}", {"host": "127.0.0.1:8"})
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert re.fullmatch(rf"{COOKIE}-8={TOKEN}; Path=/; HttpOnly; SameSite=Strict", cookie)
    own = {"host": "127.0.0.1:8", "cookie": cookie.partition(";")[0]}
    assert ask("/", own)[0] == 200
    assert ask("/", {**own, "host": "127.0.0.1:9"})[0] == 401
    assert ask("/?token=wrong", {})[0] == 401


def test_the_page_allows_its_own_files_only(ask):
    _, headers, body = ask("/")
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy
    text = body.decode()
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="/static/viewer.js">']
    assert not re.search(r"<style| style=| on\w+=|https?:", text)


def test_hostile_texts_are_inert_in_every_answer(root, ask):
    id = id_of(root / "text")
    for path in (f"/api/runs/{id}/samples", f"/api/runs/{id}/pairs", f"/api/compare/samples?runs={id}"):
        _, headers, body = ask(path)
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        assert (
            "turn <U+202E> around <U+001B>[31m"
            in json.loads(json.dumps(json.loads(body), ensure_ascii=False)).__repr__()
        )
        assert "\\u202e" not in body.decode()
        assert "\u202e" not in body.decode()


@pytest.mark.parametrize(
    ("path", "parameters"),
    [("samples", {"order": "odd"}), ("samples", {"kind": "../eval"}), ("samples", {"low": "much"}),
     ("sample", {"kind": "eval", "step": "six", "row": 0}), ("sample", {"kind": "eval"}),
     ("curves", {"names": "a," * 65})],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(root, ask, path, parameters):
    status, _, body = ask(f"/api/runs/{id_of(root / 'image')}/{path}", **parameters)
    assert status == 400
    assert json.loads(body)["error"]


def test_a_running_run_shows_each_new_step(root, tmp_path, monkeypatch):
    copy = shutil.copytree(root / "image", tmp_path / "run")
    monkeypatch.setattr(library_module, "READING_S", -1.0)
    with viewer(tmp_path) as served:
        path = f"/api/runs/{id_of(copy)}/curves?names=rollout/reward_mean"
        assert json.loads(served.ask(path)[2])["count"] == 6
        with (copy / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps({"step": step, "rollout/reward_mean": 1.0}) + "\n" for step in range(7, 200)))
        counts, complete = [], False
        while not complete:
            shown = json.loads(served.ask(path)[2])
            counts.append(shown["count"])
            complete = shown["complete"]
        assert counts == [64, 128, 192, 199]
        lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
        (copy / "cut").write_text("".join(lines[:3]))
        os.replace(copy / "cut", copy / "metrics.jsonl")
        assert json.loads(served.ask(path)[2])["count"] == 3


def test_tokens_are_inert_and_those_of_a_secret_are_left_out(root, tmp_path):
    """A secret has several tokens, of which none looks like one."""
    copy = shutil.copytree(root / "text", tmp_path / "told")
    manifest = copy / "samples/step-000006/manifest.jsonl"
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows[1]["pieces"] = ["key: ", "hf_", "AbCdEfGhIjKlMnOp", "QrStUvWxYz0123456789"]
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with viewer(tmp_path) as served:
        told = [
            json.loads(served.ask(f"/api/runs/{id_of(copy)}/sample", kind="samples", step=6, row=row)[2])["tokens"]
            for row in (0, 1)
        ]
    assert told[0] == {"pieces": [PIECES[0], " an<U+202E>swer", *PIECES[2:]], "context": [3], "has_secret": False}
    assert told[1] == {"pieces": [], "context": [], "has_secret": True}
