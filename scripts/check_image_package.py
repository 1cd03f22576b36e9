"""The part of check_engine_package.py for `--engine sglang_llm_images`: prompts with images for SGLang."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.check_engine_package import Client, Exchange, Json, arguments, checked, client_of, inside, shortened

__all__ = ["arguments", "inside", "live", "requests_of_the_engine"]
KINDS = ("full", "adapters")
SIZES = ((40, 30), (20, 50))
"""Width and height of the images in prompts. They are no multiples of a token."""
PATCH = 14
"""Side of a patch. SGLang reads patches of another size as features for Qwen2.5-VL."""


@dataclass
class ImageClient(Client):
    """A trainer and an engine of a model that reads images."""

    images: Sequence[str] = ()
    """Image files. The first prompt has none, the second one and the third two of them."""

    def request(self, weights: str = "live", **params: object) -> Any:
        from unirl.types.primitives import MediaRef, PromptImages

        req = super().request(weights, **params)
        refs = [tuple(MediaRef("image", "condition", path) for path in self.images[:count]) for count in range(3)]
        images = PromptImages(per_prompt=[each for each in refs for _ in range(len(req) // 3)])
        return req.replace(primitives={**req.primitives, "images": images})


@contextmanager
def image_client(kind: str, folder: Path, **settings: object) -> Iterator[ImageClient]:
    """A trainer of a tiny Qwen-VL and its engine. The server of the engine ends with the block."""
    from unirl.rollout.engine.sglang_llm.engine import SGLangLLMRolloutEngine

    with client_of(SGLangLLMRolloutEngine, ImageClient, "qwen_vl", kind, folder, **settings) as each:
        each.images = write_images(folder)
        yield each


def write_qwen2_5_vl(folder: Path) -> str:
    """A tiny Qwen2.5-VL with patches of the published size."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

    from unirl.models.qwen_vl.family import FOLDER, QwenVLBundle

    settings = json.loads((FOLDER / "toy.json").read_text())["toy-qwen2.5"]
    settings["vision_config"] |= {"patch_size": PATCH, "window_size": 4 * PATCH}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings))
    network.float().save_pretrained(folder)
    QwenVLBundle(path="toy-qwen2.5", dtype="fp32").codec.tokenizer.save_pretrained(folder)
    bounds = {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=bounds).save_pretrained(folder)
    return str(folder)


def write_images(folder: Path) -> list[str]:
    """Files of noise."""
    import torch
    from PIL import Image

    generator, paths = torch.Generator().manual_seed(0), []
    for width, height in SIZES:
        levels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        paths.append(str(folder / f"{width}.png"))
        Image.fromarray(levels.numpy()).save(paths[-1])
    return paths


def requests_of_the_engine() -> list[Exchange]:
    """The requests about prompts with images, recorded against a fake server."""
    from tests.fake_servers import sglang

    with (
        sglang(recipe="vlm/quickstart") as url,
        tempfile.TemporaryDirectory() as folder,
        image_client("full", Path(folder), url=url, concurrency=1) as each,  # one by one, in the order of the prompts
    ):
        each.push()
        each.engine.generate(each.request(samples_per_prompt=1))
        return each.exchanges


def live(python: str, settings: Mapping[str, object]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    results: Json = {}
    answers: Json = {}
    with tempfile.TemporaryDirectory() as root:
        paths = {"qwen3_vl": "toy", "qwen2_5_vl": write_qwen2_5_vl(Path(root) / "qwen2_5_vl")}
        for name, kind in itertools.product(paths, KINDS):
            folder = Path(root) / f"{name}-{kind}"
            folder.mkdir()
            with image_client(kind, folder, path=paths[name], python_executable=python, **settings) as each:
                results[f"{name}, {kind}"] = checked(each, kind)
                print(name, kind, json.dumps(results[f"{name}, {kind}"]), flush=True)
                for exchange in each.exchanges:
                    answers.setdefault(exchange.name, shortened(exchange))
    shown = {"engine_args": settings.get("engine_args", {})}
    kept = {name: answer for name, answer in answers.items() if name.endswith("with images")}
    return {"settings": shown, "results": results, "answers": kept}
