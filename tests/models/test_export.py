"""What is exported draws what was trained: adapters in diffusers and PEFT, and whole models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.models.rollouts import PROMPTS, sampling
from unirl.config.errors import DataError
from unirl.models.denoising.diffusers_pipeline import difference, plain_pipeline
from unirl.models.loading.adapter_files import DIFFUSERS_FILE, Adapter, write_diffusers_lora, write_peft_adapter
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.sde.kernels import DPMSolver2M
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

RANK, ALPHA = 4, 6.0


@pytest.fixture(params=["toy", "pixel"])
def trained(request: pytest.FixtureRequest, pixel_directory: Path) -> SD3Pipeline:
    """A model whose adapters have learned something, as the backend would leave it."""
    from peft import LoraConfig, inject_adapter_in_model

    path = "toy" if request.param == "toy" else str(pixel_directory)
    bundle = SD3Bundle(path=path, dtype="fp32")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(bundle.facts.lora_targets))
    inject_adapter_in_model(config, bundle.trainable(), "default")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in bundle.trainable().named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    return SD3Pipeline(bundle)


def adapter_of(pipeline: SD3Pipeline) -> Adapter:
    named = {name: p.detach() for name, p in pipeline.bundle.trainable().named_parameters() if ".lora_" in name}
    return Adapter.from_named(named, rank=RANK, alpha=ALPHA, target_modules=pipeline.facts.lora_targets)


def settings(pipeline: SD3Pipeline, **changes: object) -> DiffusionSamplingParams:
    side = 32 if pipeline.facts.vae_scale == 8 else 16
    return sampling(pipeline, height=side, width=side, **changes)


def untrained_difference(pipeline: SD3Pipeline) -> float:
    plain = plain_pipeline(pipeline.bundle, pipeline.bundle.untrained())
    return difference(pipeline, plain, PROMPTS, settings(pipeline))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_diffusers_draws_the_same_with_the_exported_lora(
    trained: SD3Pipeline, tmp_path: Path, guidance_scale: float
) -> None:
    write_diffusers_lora(tmp_path, adapter_of(trained))
    assert untrained_difference(trained) > 1e-2
    assert trained.verify_lora(tmp_path, PROMPTS, settings(trained, guidance_scale=guidance_scale)) < 1e-4


def test_settings_with_a_short_tail_and_an_own_solver_are_verified_on_the_whole_schedule(
    trained: SD3Pipeline, tmp_path: Path
) -> None:
    write_diffusers_lora(tmp_path, adapter_of(trained))
    flash = dataclasses.replace(settings(trained), tail_fraction=0.4, solver=DPMSolver2M(), sigmas=None)
    assert trained.verify_lora(tmp_path, PROMPTS, flash) == trained.verify_lora(tmp_path, PROMPTS, settings(trained))


def test_verification_sees_a_wrong_alpha(trained: SD3Pipeline, tmp_path: Path) -> None:
    right = adapter_of(trained)
    write_diffusers_lora(tmp_path, Adapter(right.layers, right.rank, 2 * right.alpha, right.target_modules))
    assert trained.verify_lora(tmp_path, PROMPTS, settings(trained)) > 1e-3


def test_the_lora_file_says_its_settings_in_diffusers_words(trained: SD3Pipeline, tmp_path: Path) -> None:
    path = write_diffusers_lora(tmp_path, adapter_of(trained))
    assert path.name == DIFFUSERS_FILE and [p.name for p in tmp_path.iterdir()] == [DIFFUSERS_FILE]
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
        keys = list(file.keys())
    assert header["transformer.r"] == RANK and header["transformer.lora_alpha"] == ALPHA
    assert all(key.startswith("transformer.transformer_blocks.") for key in keys)
    assert {key.rsplit(".", 2)[1] for key in keys} == {"lora_A", "lora_B"}


def test_peft_loads_the_exported_folder_onto_the_plain_network(trained: SD3Pipeline, tmp_path: Path) -> None:
    from peft import PeftModel

    write_peft_adapter(tmp_path, adapter_of(trained), base_model=trained.bundle.path)
    loaded = PeftModel.from_pretrained(trained.bundle.untrained(), str(tmp_path))
    plain = plain_pipeline(trained.bundle, loaded.base_model.model)
    assert difference(trained, plain, PROMPTS, settings(trained)) < 1e-4


def test_a_merged_model_draws_the_same_from_its_directory(trained: SD3Pipeline, tmp_path: Path) -> None:
    merged = adapter_of(trained).merged_into(trained.bundle.untrained().state_dict())
    trained.write_model(merged, tmp_path / "model")
    assert trained.verify_model(tmp_path / "model", PROMPTS, settings(trained)) < 1e-4


def test_fully_trained_weights_come_back_by_our_own_bundle(pixel_directory: Path, tmp_path: Path) -> None:
    pipeline = SD3Pipeline(SD3Bundle(path=str(pixel_directory), dtype="fp32"))
    with torch.no_grad():
        for parameter in pipeline.bundle.trainable().parameters():
            parameter.add_(0.01)
    tensors = {name: p.detach() for name, p in pipeline.bundle.trainable().named_parameters()}
    folder = pipeline.write_model(tensors, tmp_path / "model")
    again = SD3Bundle(path=str(folder), dtype="fp32")
    assert isinstance(again.facts, LatentFacts) and again.facts == pipeline.facts
    assert all(torch.equal(p, tensors[name]) for name, p in again.trainable().named_parameters())
    assert set(again.tokenizers) == {"tokenizer"}


def test_weights_without_adapters_are_refused_as_a_lora() -> None:
    with pytest.raises(DataError, match="no LoRA tensors among the 1 trained parameters"):
        Adapter.from_named({"proj.weight": torch.ones(2, 2)}, rank=2, alpha=2.0, target_modules=("proj",))


def test_an_unknown_parameter_is_refused(toy: SD3Pipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no parameter 'nowhere\.weight'"):
        toy.write_model({"nowhere.weight": torch.ones(1)}, tmp_path)
