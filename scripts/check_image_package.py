"""The part of check_engine_package.py for `--engine sglang_llm_images`: prompts with images for SGLang."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.check_llm_package import LLMClient, arguments, checked, inside, shortened
from scripts.engine_client import Exchange, Json, compare

__all__ = ["arguments", "inside", "live", "requests_of_the_engine"]
KINDS = ("full", "adapters")
SIZES = ((40, 30), (20, 50))
"""Width and height of the images in prompts. They are no multiples of a token."""
PATCH = 14
"""Side of a patch. SGLang reads patches of another size as features for Qwen2.5-VL."""


class ImageClient(LLMClient):
    """A trainer and an engine of a model that reads images. The prompts have none, one and two."""

    def request(self, weights: str = "live", **params: object) -> Any:
        from unirl.types.primitives import MediaRef, PromptImages

        req, paths = super().request(weights, **params), write_images(self.folder)
        refs = [tuple(MediaRef("image", "condition", path) for path in paths[:count]) for count in range(3)]
        images = PromptImages(per_prompt=[each for each in refs for _ in range(len(req) // 3)])
        return req.replace(primitives={**req.primitives, "images": images})


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

    # One by one, in the order of the prompts.
    with sglang(recipe="vlm/quickstart") as url, ImageClient.of("qwen_vl", "full", url=url, concurrency=1) as each:
        each.push()
        each.engine.generate(each.request(samples_per_prompt=1))
        return each.exchanges


def live(python: str, settings: Mapping[str, Any]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    with tempfile.TemporaryDirectory() as root:
        paths = {"qwen3_vl": "toy", "qwen2_5_vl": write_qwen2_5_vl(Path(root) / "qwen2_5_vl")}
        runs = (
            (f"{name}, {kind}", ImageClient.of("qwen_vl", kind, path=paths[name], python_executable=python, **settings))
            for name, kind in itertools.product(paths, KINDS)
        )
        results, answers = compare(runs, lambda each, name: checked(each, []), shortened)
    shown = {"engine_args": settings.get("engine_args", {})}
    kept = {name: answer for name, answer in answers.items() if name.endswith("with images")}
    return {"settings": shown, "results": results, "answers": kept}
