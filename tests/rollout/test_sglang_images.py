"""Images in the prompts of a SGLang engine: the server computes with the same tokens and pixels as the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests import served_tokens
from tests.fake_servers import sglang as fake
from tests.served_tokens import ATOL, FAKE, Served
from unirl.config.errors import EngineError, IncompatibleError
from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline
from unirl.rollout.engine.openai.transformers_serve import TransformersServeEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine
from unirl.testing.language import text_params, text_request
from unirl.types.primitives import MediaRef, PromptImages
from unirl.types.rollout_req import RolloutReq

RECIPE = "vlm/quickstart"
SIZES = ((40, 30), (20, 50))
COUNTS = (0, 1, 2)
"""Images in each of the three prompts."""


def tiny_qwen_vl(**keys: object) -> QwenVLPipeline:
    return QwenVLPipeline(QwenVLBundle(path="toy", dtype="fp32", **keys))


serving = partial(served_tokens.serving, SGLangLLMRolloutEngine, **FAKE, pipeline=tiny_qwen_vl)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of noise, whose sizes are no multiples of a token."""
    folder, generator = tmp_path_factory.mktemp("pictures"), torch.Generator().manual_seed(0)
    paths = [str(folder / f"{width}.png") for width, _ in SIZES]
    for path, (width, height) in zip(paths, SIZES, strict=True):
        levels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(levels.numpy()).save(path)
    return paths


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that has the trainer's first weights."""
    folder = tmp_path_factory.mktemp("run")
    with fake(recipe=RECIPE) as url, serving(folder, url=url) as served:
        served.push()
        yield served


def asking(served: Served, pictures: list[str]) -> RolloutReq:
    """Three prompts without images, with one and with two, of four samples each."""
    req = text_request(3, text_params(samples_per_prompt=4)).from_weights("live", served.backend.updates)
    refs = [tuple(MediaRef("image", "condition", path) for path in pictures[:count]) for count in COUNTS]
    images = PromptImages(per_prompt=[each for each in refs for _ in range(4)])
    return req.replace(primitives={**req.primitives, "images": images})


def test_log_probs_are_those_of_the_replay_before_and_after_an_update(served, pictures) -> None:
    assert served.log_prob_gap(asking(served, pictures)) < ATOL
    served.train()
    served.push()
    assert served.log_prob_gap(asking(served, pictures)) < ATOL


def test_the_answers_depend_on_the_images(served, pictures) -> None:
    """So equal log-probs are no accident: images in another order give other responses."""
    served.push()
    one, other = (served.tokens(asking(served, files)) for files in (pictures, pictures[::-1]))
    assert one[:4] == other[:4] and one[4:] != other[4:]


def test_images_of_another_size_are_refused_by_name(tmp_path, pictures) -> None:
    with fake("other-image-size", recipe=RECIPE) as url, serving(tmp_path, url=url) as served:
        served.push()
        says = r"reads the [12] images .* as another number of tokens.*pipeline\.max_pixels must lie within"
        with pytest.raises(EngineError, match=says):
            served.sampled(asking(served, pictures))


def test_images_of_other_colours_have_log_probs_that_the_replay_contradicts(tmp_path, pictures) -> None:
    """Their number of tokens is right, so only the trainer can tell: its parity gate compares the log-probs."""
    with fake("other-colours", recipe=RECIPE) as url, serving(tmp_path, url=url) as served:
        served.push()
        assert served.log_prob_gap(asking(served, pictures)) > 1e-3


def test_an_engine_whose_server_reads_texts_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"TransformersServeEngine sends texts alone.*rollout=sglang"):
        TransformersServeEngine(tiny_qwen_vl(meta_init=True), tmp_path)
