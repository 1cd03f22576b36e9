"""A real process of `transformers serve` samples from the trained weights, and what goes wrong with it is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import warm_servers
from tests.served_tokens import Served
from unirl.config.errors import EngineError, IncompatibleError, SyncError
from unirl.distributed.weight_sync.fingerprint import fingerprints
from unirl.models.language.packing import prompts_of
from unirl.rollout.engine.openai.transformers_serve import PROBE_LADDER, TransformersServeEngine
from unirl.rollout.engine.serving import process
from unirl.rollout.engine.serving.engine import SEEDS
from unirl.sde.noise import NoiseSource, key_seed
from unirl.testing.engine import check_engine
from unirl.testing.language import text_params, text_request


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it running. Its weights are those of the last update."""
    served = Served.at(TransformersServeEngine, tmp_path_factory.mktemp("run"))
    yield served
    served.engine.server.stop()


def test_it_keeps_the_contract_of_an_engine(served) -> None:
    """Refusal before a push, likely draws before and after an update and from a snapshot, row bits, sleep."""
    check_engine(served.engine, served.trained, served.backend, text_request(8, text_params(samples_per_prompt=6)))


def test_its_tokens_are_those_of_generate_with_the_same_seed(served) -> None:
    """The library's own generate, with the trained weights, seeded for each row."""
    served.train(1)
    served.push()
    req = served.asking(temperature=0.7, top_k=40, top_p=0.9)
    params = req.tracks["text"].sampling
    prompts = prompts_of(served.trained.encode(req, params))
    network = served.trained.bundle.untrained()
    network.load_state_dict(dict(served.backend.named_tensors("full")), strict=False)
    noise = NoiseSource(params.seed, req.purpose, req.step)
    expected = []
    for id, prompt in zip(req.sample_ids, prompts.tokens.split(prompts.lengths.tolist()), strict=True):
        torch.manual_seed(key_seed(params.seed, noise.key(id, "tok")) % SEEDS)
        settings = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "max_new_tokens": 10}
        ends = list(served.trained.bundle.codec.ends)
        mask = torch.ones_like(prompt[None])
        out = network.generate(prompt[None], attention_mask=mask, eos_token_id=ends, pad_token_id=ends[0], **settings)
        expected.append(out[0, len(prompt) :].tolist())
    assert served.tokens(req) == expected
    assert len({tuple(row) for row in expected}) > 6


def test_greedy_decoding_and_stop_strings_end_as_trainside_does(served) -> None:
    """Greedy tokens are the trainer's own; a stop string ends the response at the token that completes it."""
    served.push()
    req = served.asking(temperature=0.0, samples_per_prompt=1)
    with torch.no_grad():
        theirs = served.trained.generate(req, 4).tracks["text"].segment
    ours = served.engine.generate(req).tracks["text"].segment
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.finished, theirs.finished)
    stop = served.trained.bundle.codec.spell(theirs.tokens[2:3].tolist())
    req = served.asking(temperature=0.0, samples_per_prompt=1, stop=(stop,))
    with torch.no_grad():
        theirs = served.trained.generate(req, 4).tracks["text"].segment
    ours = served.engine.generate(req).tracks["text"].segment
    assert ours.finished[0] and torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.offsets, theirs.offsets)


@pytest.mark.parametrize("size", [0.0, 3e-4, 3e-3, 3e-2, 10.0])
def test_the_probe_bounds_the_difference_of_logits(served, size) -> None:
    """Expected logits that are off by `size`, relative, in one token: the bound is the next step of the ladder."""
    served.push()
    inputs = served.engine.canary_inputs()
    with torch.no_grad():
        logits = served.trained.stage.canary(inputs).values.double()
    scale = float(logits.square().mean().sqrt())
    third = logits[0].argsort(descending=True)[2]
    logits[0, third] += size * scale
    prompts = served.trained.plain_prompts({"prompt": inputs})
    result = served.engine.server.probe(prompts, logits.float())
    expected = next((step for step in PROBE_LADDER if step >= size), float("inf"))
    assert result.relative == expected


def test_a_server_that_keeps_old_weights_is_caught(served, monkeypatch) -> None:
    """The folder is right and its name is repeated; only the logits tell that the server did not load it."""
    served.train(2)
    served.push()
    write, old = served.engine.pipeline.write_model, dict(served.backend.named_tensors("full"))
    monkeypatch.setattr(served.engine.pipeline, "write_model", lambda tensors, folder: write(stale, folder))
    stale = {name: tensor.clone() for name, tensor in old.items()}
    served.train(3)
    with pytest.raises(SyncError, match="did not arrive as it was sent"):
        served.push()
    monkeypatch.undo()
    server, end = served.engine.server, served.engine.server.end_weights

    def lying():
        right, server.sent = server.sent, stale
        return fingerprints((name, right[name]) for name in end())

    monkeypatch.setattr(server, "end_weights", lying)
    with pytest.raises(SyncError, match="every tensor arrived, but the forward of engine rank 0 differs"):
        served.push()
    with pytest.raises(SyncError, match="no verified weights"):
        served.engine.generate(served.asking())


@pytest.mark.slow
def test_a_killed_server_is_restarted_with_its_weights_and_gives_the_same_answers(tmp_path) -> None:
    served = Served.at(TransformersServeEngine, tmp_path, max_restarts=1)
    served.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "spawn", warm_servers.COLD)  # as a run starts it, in an interpreter of its own
        served.push()
    serving = served.engine.server.process
    expected = served.tokens(served.asking())
    complete, asked = served.engine.server.complete, []

    def killing(request, params):
        asked.append(request.id)
        if len(asked) == 5:
            os.killpg(serving._process.pid, signal.SIGKILL)
        return complete(request, params)

    served.engine.server.complete = killing
    assert served.tokens(served.asking()) == expected
    assert serving.num_starts == 2 and len(asked) == len(expected) + 1
    asked.clear()
    text = r"(?s)ended by signal SIGKILL.*max_restarts=1 times.*log is .*serve-0\.log"
    with pytest.raises(EngineError, match=text):
        served.engine.generate(served.asking())
    served.engine.server.stop()
    assert not (tmp_path / "engine" / "transformers-serve-0").exists()


def test_a_server_that_cannot_start_says_why(tmp_path) -> None:
    served = Served.at(TransformersServeEngine, tmp_path, python_executable="/usr/bin/false")
    with pytest.raises(EngineError, match="ended with exit status 1 before it answered"):
        served.push()
    missing = Served.at(TransformersServeEngine, tmp_path, python_executable="/no/such/python")
    with pytest.raises(EngineError, match="cannot be started"):
        missing.push()
    slow = Served.at(
        TransformersServeEngine, tmp_path, python_executable=str(waiting_program(tmp_path)), start_timeout_s=0.3
    )
    with pytest.raises(EngineError, match=r"did not answer within rollout\.start_timeout_s=0\.3 s"):
        slow.push()
    absent = Served.at(TransformersServeEngine, tmp_path, url="http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"no transformers serve answers at rollout\.url=http://127\.0\.0\.1:9"):
        absent.push()


def waiting_program(folder: Path) -> Path:
    program = folder / "waits"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    return program


def test_no_server_outlives_a_process_that_is_killed(tmp_path) -> None:
    """kill -9 of the process that started a server, whose child is in the same group."""
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\nwait\n")
    program.chmod(0o755)
    script = (
        "import pathlib, time\n"
        "from unirl.rollout.engine.serving.process import ServerProcess\n"
        f"process = ServerProcess('x', ['{program}'], pathlib.Path('{tmp_path}/log'))\n"
        "process.start()\n"
        "time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script])
    child = int(waited(lambda: (tmp_path / "child").read_text().strip() if (tmp_path / "child").exists() else ""))
    owner.kill()
    owner.wait()
    waited(lambda: not is_running(child))


def waited(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing came within {seconds} s")


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_models_that_read_images_are_refused() -> None:
    from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline

    pipeline = QwenVLPipeline(QwenVLBundle(path="toy", dtype="fp32"))
    with pytest.raises(IncompatibleError, match="sends texts alone"):
        TransformersServeEngine(pipeline)
