"""`unirl data`: every problem of a prompt file is named by line, whoever finds it; public sets come from any mirror."""

from __future__ import annotations

import csv
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from tests.source_tree import ROOT
from unirl.cli.main import main
from unirl.data.data_source import MultimodalRLDataSource
from unirl.data.datasets import load_prompts
from unirl.reward.local.gsm8k_exact_match import GSM8KExactMatchRewardScorer
from unirl.reward.local.mc_exact_match import MCExactMatchRewardScorer

GOOD = '{"prompt": "a sign that says \\"Open\\""}'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"

    def write(*lines):
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def run(capsys, *words):
    status = main(["data", *words])
    output = capsys.readouterr()
    return status, output.out, output.err


# check


def test_a_valid_file_is_described(capsys, file):
    path = file(GOOD, '{"prompt": "\\"A\\" in blue", "metadata": {"kind": "letter"}}')
    status, out, err = run(capsys, "check", path, "--reward", "ocr")
    assert (status, err) == (0, "")
    assert out == f"{path}: 2 prompts of 11 to 23 characters; metadata kind; valid\n"


def test_every_problem_is_named_by_its_line_whoever_finds_it(capsys, file):
    path = file(GOOD, '{"prompt": "no quote"}', "{broken", '{"caption": ""}', "", GOOD.replace("Open", " "), "[]")
    status, out, err = run(capsys, "check", path, "--reward", "ocr")
    assert (status, out) == (4, "")
    lines = err.splitlines()
    assert lines[0] == "error[4002]: 5 problems in prompt files:"
    for number, why in ((2, "no text in double quotes"), (3, "not valid JSON"), (4, "is empty"),
                        (6, "no text in double quotes"), (7, "expected one JSON object")):  # fmt: skip
        assert any(line.startswith(f"  {path}:{number}: ") and why in line for line in lines), (number, err)


def test_many_problems_are_counted_and_some_are_shown(capsys, file):
    status, _, err = run(capsys, "check", file(*['{"prompt": ""}'] * 50))
    assert status == 4 and err.startswith("error[4002]: 50 problems") and "... and 30 more" in err
    assert err.count("is empty") == 20


def test_the_setting_of_a_scorer_decides_what_it_misses(capsys, file):
    path = file('{"prompt": "x", "metadata": {"text": "Hi"}}', '{"prompt": "\\"y\\""}')
    status, _, err = run(capsys, "check", path, "-r", "ocr", "--set", "target_key=text")
    assert status == 4 and f"{path}:2: " in err and "no text in metadata 'text'" in err and f"{path}:1:" not in err


def test_the_report_as_json_holds_all_problems(capsys, file):
    path = file(*['{"prompt": "x"}'] * 30)
    status, out, _ = run(capsys, "check", path, "-r", "exact_match", "--json")
    (result,) = json.loads(out)
    assert status == 4 and result["prompts"] == len(result["problems"]) == 30


def test_prompts_in_two_files_are_said(capsys, file, tmp_path):
    path, other = file(GOOD, '{"prompt": "x"}'), tmp_path / "other.txt"
    other.write_text("x\ny\n")
    status, _, err = run(capsys, "check", path, str(other))
    assert status == 0 and f"1 of the 2 prompts of {other} are also in {path}" in err


def test_a_recipe_brings_its_files_and_its_reward(capsys, monkeypatch, file):
    monkeypatch.chdir(ROOT)
    recipe = ("check", "--recipe", "diffusion/quickstart")
    status, out, err = run(capsys, *recipe)
    assert (status, err) == (0, "")
    assert "shapes/train.jsonl: 18 prompts" in out and "shapes/eval.jsonl: 6 prompts" in out
    ocr = "reward.backend._target_=unirl.reward.local.ocr.OCRRewardScorer"
    path = file(GOOD, '{"prompt": "nothing"}')
    status, _, err = run(capsys, *recipe, ocr, f"data_source.data_path={path}", "evaluation.data_path=null")
    assert (
        status == 4
        and err.startswith("error[4002]: 1 problem ")
        and f"{path}:2: " in err
        and "no text in double quotes" in err
    )


SHAPES = ('{"prompt": "a red circle", "metadata": {"color": "red", "shape": "circle"}}', '{"prompt": "a cat"}',
          '{"prompt": "an orange circle", "metadata": {"color": "orange", "shape": "circle"}}')  # fmt: skip


def test_the_shapes_reward_names_every_prompt_that_it_cannot_score(capsys, file):
    path = file(*SHAPES)
    status, _, err = run(capsys, "check", path, "--reward", "shapes")
    assert status == 4 and err.startswith("error[4002]: 2 problems in prompt files:")
    assert f"{path}:2: " in err and "no attribute" in err
    assert f"{path}:3: " in err and "'color' is 'orange'" in err and "Write one of red, green" in err


@pytest.mark.parametrize("command", [["check"], ["train", "num_rollouts=1"], ["data", "check", "--recipe"]])
def test_a_prompt_without_a_score_is_refused_before_a_folder_is_made(capsys, monkeypatch, file, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    path = file(*SHAPES[::-1])
    status = main([*command, "diffusion/quickstart", "batch_size=3", f"data_source.data_path={path}"])
    err = capsys.readouterr().err
    assert status == 4 and f"{path}:1: reward 'ShapesRewardScorer' cannot score this prompt: " in err
    assert "1 more" in err or f"{path}:2: " in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "name a prompt file"),
        (["a.txt", "--recipe", "diffusion/quickstart"], "do not name others"),
        (["a.txt", "batch_size=3"], "is a setting of a recipe"),
        (["a.txt", "-r", "orc"], "Did you mean 'ocr'"),
        (["a.txt", "-r", "ocr", "--set", "side"], "write --set key=value"),
        (["a.txt", "-r", "ocr", "--set", "sidd=3"], "side"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused(capsys, words, why):
    status, _, err = run(capsys, "check", *words)
    assert status == 2 and why in err


# preview


def test_a_preview_shows_the_first_prompts_with_what_belongs_to_them(capsys, file):
    path = file(*(json.dumps({"prompt": f"prompt {i}", "metadata": {"long": "x" * 500}}) for i in range(9)))
    status, out, _ = run(capsys, "preview", path, "-n", "2")
    assert status == 0 and out.startswith(f"{path}: 9 prompts of 8 to 8 characters")
    assert "prompt 0" in out and "prompts.jsonl:1\n  prompt 1\n" in out and "prompt 2" not in out
    assert max(map(len, out.splitlines()[1:])) <= 80 and "xxx ..." in out


def test_a_preview_as_json_is_whole(capsys, file):
    status, out, _ = run(capsys, "preview", file(GOOD, GOOD), "-n", "1", "--json")
    (line,) = out.splitlines()
    assert status == 0 and json.loads(line)["prompt"] == 'a sign that says "Open"'


def test_a_preview_of_a_broken_file_names_the_line(capsys, file):
    status, _, err = run(capsys, "preview", file(GOOD, "{"))
    assert status == 4 and ":2: not valid JSON" in err
    assert run(capsys, "preview", "x.txt", "-n", "0")[0] == 2


# populate


def tsv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["Prompt", "Category", "Challenge", "Note"], delimiter="\t")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows):
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


PARTI = [{"Prompt": 'a "stop"\tsign', "Category": "Outdoor Scenes", "Challenge": "Writing & Symbols", "Note": ""},
         {"Prompt": "a caf\u00e9", "Category": "Food", "Challenge": "Basic", "Note": "n"}]  # fmt: skip
GSM8K = [{"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}] * 3
MATH = [{"problem": "What is $x$?", "solution": "", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 1}]


def drawn(color):
    file = io.BytesIO()
    Image.new("RGB", (6, 5), color).save(file, "png")
    return file.getvalue()


GEOMETRY = [
    {
        "images": [{"bytes": drawn(color), "path": None}],
        "problem": "<image>Find x.",
        "choices": ["1", "2", "3", "4"],
        "ground_truth": "C",
    }
    for color in ("red", "blue")
]
DAPO = [{"prompt": "What is 1 + 1?", "solution": "2", "ability": "math"}]
AIME = [{"id": 60, "problem": "Find $m+n$.", "solution": "Long.", "answer": "204", "url": "none", "year": "2024"}]
FILES = {
    "open-r1/DAPO-Math-17k-Processed/resolve/main/en/train-00000-of-00001.parquet": parquet(DAPO),
    "HuggingFaceH4/aime_2024/resolve/main/data/train-00000-of-00001.parquet": parquet(AIME),
    "nateraw/parti-prompts/resolve/main/PartiPrompts.tsv": tsv(PARTI),
    "openai/gsm8k/resolve/main/main/train-00000-of-00001.parquet": parquet(GSM8K),
    "openai/gsm8k/resolve/main/main/test-00000-of-00001.parquet": parquet(GSM8K[:1]),
    **{
        f"xyliu6/geometry3k/resolve/main/data/{split}-00000-of-00001.parquet": parquet(GEOMETRY)
        for split in ("train", "validation", "test")
    },
    "HuggingFaceH4/MATH-500/resolve/main/test.jsonl": "".join(json.dumps(row) + "\n" for row in MATH).encode(),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine: address, its files, and a fresh cache."""
    files = dict(FILES)

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(self.path.removeprefix("/datasets/"))

        def do_GET(self):
            self.wfile.write(self.answer(self.path.removeprefix("/datasets/")))

        def answer(self, name):
            content = files.get(name, b"")
            self.send_response(200 if name in files else 404)
            if name not in files:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{hash(content)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return content

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield f"http://127.0.0.1:{server.server_port}", files
    server.shutdown()
    server.server_close()


def test_a_public_set_comes_from_a_mirror_as_prompt_files(capsys, hub, tmp_path):
    out = tmp_path / "parti"
    status, said, _ = run(capsys, "populate", "parti_prompts", "--endpoint", hub[0], "--out", str(out))
    assert status == 0 and "2 prompts" in said and "Apache-2.0" in said
    first, second = load_prompts(out / "test.jsonl")
    assert first.text == 'a "stop"\tsign' and first.metadata["challenge"] == "Writing & Symbols"
    assert second.text == "a caf\u00e9"
    assert sorted(path.name for path in out.iterdir()) == ["test.jsonl"]


def test_sets_of_mathematics_fit_their_rewards(capsys, hub, tmp_path):
    assert run(capsys, "populate", "gsm8k", "--endpoint", hub[0], "--out", str(tmp_path / "g"))[0] == 0
    train, test = (load_prompts(tmp_path / "g" / f"{split}.jsonl") for split in ("train", "test"))
    assert (len(train), len(test)) == (3, 1) and "####" in train[0].text
    GSM8KExactMatchRewardScorer().check_prompt(train[0].text, train[0].metadata)
    assert run(capsys, "populate", "math_500", "--endpoint", hub[0], "--out", str(tmp_path / "m"))[0] == 0
    (prompt,) = load_prompts(tmp_path / "m" / "test.jsonl")
    assert prompt.metadata["answer"] == r"\frac{1}{2}" and prompt.text.endswith(r"\boxed{}.")


@pytest.mark.parametrize(("name", "split", "answer"), [("dapo_math", "train", "2"), ("aime_2024", "test", "204")])
def test_competition_problems_ask_for_a_boxed_answer(capsys, hub, tmp_path, name, split, answer):
    assert run(capsys, "populate", name, "--endpoint", hub[0], "--out", str(tmp_path))[0] == 0
    (prompt,) = load_prompts(tmp_path / f"{split}.jsonl")
    assert prompt.metadata["answer"] == answer and prompt.text.endswith(r"\boxed{}.")


def test_a_set_with_pictures_becomes_prompts_and_files(capsys, hub, tmp_path):
    assert run(capsys, "populate", "geometry3k", "--endpoint", hub[0], "--out", str(tmp_path))[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    first, second = MultimodalRLDataSource(data_path=str(tmp_path / "train.jsonl")).eval_prompts()
    assert first.text == "Find x.\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer with the letter."
    MCExactMatchRewardScorer().check_prompt(first.text, first.metadata)
    shown = [Image.open(prompt.images[0].uri).getpixel((0, 0)) for prompt in (first, second)]
    assert shown == [(255, 0, 0), (0, 0, 255)]


def test_existing_files_are_kept_unless_told(capsys, hub, tmp_path):
    words = ("populate", "math_500", "--endpoint", hub[0], "--out", str(tmp_path))
    (tmp_path / "test.jsonl").write_text("mine")
    status, _, err = run(capsys, *words)
    assert status == 2 and "--overwrite" in err and (tmp_path / "test.jsonl").read_text() == "mine"
    assert run(capsys, *words, "--overwrite")[0] == 0
    assert len(load_prompts(tmp_path / "test.jsonl")) == 1


def test_a_set_that_changed_its_form_leaves_nothing_behind(capsys, hub, tmp_path):
    address, files = hub
    files["HuggingFaceH4/MATH-500/resolve/main/test.jsonl"] = b'{"question": "?"}\n'
    status, _, err = run(capsys, "populate", "math_500", "--endpoint", address, "--out", str(tmp_path / "m"))
    assert status == 4 and "row 1 of test.jsonl has no key 'answer'" in err
    assert list((tmp_path / "m").iterdir()) == []


def test_a_hub_without_the_file_or_out_of_reach_names_the_way_out(capsys, monkeypatch, hub, tmp_path):
    address, files = hub
    files.clear()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own attempts
    for endpoint in (address, "http://127.0.0.1:9"):
        words = ("populate", "math_500", "--endpoint", endpoint, "--out", str(tmp_path))
        status, _, err = run(capsys, *words)
        assert status == 4 and "error[4001]: HuggingFaceH4/MATH-500: test.jsonl cannot be downloaded" in err
        assert "--endpoint URL or HF_ENDPOINT" in err


def test_the_sets_are_listed_and_a_misspelt_one_is_recognised(capsys):
    status, out, _ = run(capsys, "populate")
    assert status == 0 and "gsm8k" in out and "math_500" in out
    status, _, err = run(capsys, "populate", "gsmk")
    assert status == 2 and "Did you mean 'gsm8k'?" in err
