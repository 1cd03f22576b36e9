"""The part of check_engine_package.py for `--engine sglang_llm_images`: prompts with images for SGLang."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripts.check_engine_package import Exchange, Json, arguments, checked, client, inside, shortened

__all__ = ["arguments", "inside", "live", "requests_of_the_engine"]
KINDS = ("full", "adapters")
SIZES = ((40, 30), (20, 50))
"""Width and height of the images in prompts. They are no multiples of a token."""
PATCH = 14
"""Side of a patch. SGLang reads patches of another size as features for Qwen2.5-VL."""


def tiny_qwen_vl(path: str, **keys: object) -> Any:
    """The pipeline of a tiny model."""
    from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline

    return QwenVLPipeline(QwenVLBundle(path=path, dtype="fp32", **keys))  # type: ignore[arg-type]


def write_qwen2_5_vl(folder: Path) -> str:
    """A tiny Qwen2.5-VL with patches of the published size."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

    from unirl.models.qwen_vl.family import FOLDER

    settings = json.loads((FOLDER / "toy.json").read_text())["toy-qwen2.5"]
    settings["vision_config"] |= {"patch_size": PATCH, "window_size": 4 * PATCH}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings))
    network.float().save_pretrained(folder)
    tiny_qwen_vl("toy-qwen2.5").bundle.codec.tokenizer.save_pretrained(folder)
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
    from unirl.testing.conformance.served import ServedModel
    from unirl.testing.conformance.sglang_llm import fake_sglang

    fake = fake_sglang(ServedModel.of_recipe("vlm/quickstart"), 0, ["--enable-deterministic-inference"], None)
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, images = partial(tiny_qwen_vl, "toy"), write_images(Path(folder))
            with client("full", Path(folder), model, images, url=fake.url) as each:
                each.push()
                each.engine.server.concurrency = 1  # in the order of the prompts
                each.engine.generate(each.request(samples_per_prompt=1))
                return each.exchanges
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join()


def live(python: str, settings: Mapping[str, object]) -> Json:
    """Start the real server with tiny models, and compare it with the trainer."""
    results: Json = {}
    answers: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(Path(folder))
        models: Mapping[str, Callable[..., Any]] = {
            "qwen3_vl": partial(tiny_qwen_vl, "toy"),
            "qwen2_5_vl": partial(tiny_qwen_vl, write_qwen2_5_vl(Path(folder) / "qwen2_5_vl")),
        }
        for name, model in models.items():
            for kind in KINDS:
                run_dir = Path(folder) / f"{name}-{kind}"
                with client(kind, run_dir, model, images, python_executable=python, **settings) as each:
                    results[f"{name}, {kind}"] = checked(each, kind)
                    print(name, kind, json.dumps(results[f"{name}, {kind}"]), flush=True)
                    for exchange in each.exchanges:
                        answers.setdefault(exchange.name, shortened(exchange))
    shown = {"engine_args": settings.get("engine_args", {})}
    kept = {name: answer for name, answer in answers.items() if name.endswith("with images")}
    return {"settings": shown, "results": results, "answers": kept}
