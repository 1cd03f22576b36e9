"""SD3Bundle from a toy, a directory and a hub id: facts and estimates before loading, and errors for bad paths."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from unirl.config.errors import DataError
from unirl.models.loading.checkpoint import ModelConfigs
from unirl.models.sd3.family import SD3, SD3Bundle, SD3Pipeline
from unirl.sde.kernels import EulerODE
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams

MEDIUM = "stabilityai/stable-diffusion-3.5-medium"


def num_parameters(bundle: SD3Bundle) -> dict[str, int]:
    return {name: sum(p.numel() for p in module.parameters()) for name, module in bundle.modules.items()}


def test_the_toy_is_the_same_whenever_it_is_built(toy: SD3Pipeline) -> None:
    before = torch.random.get_rng_state()
    again = SD3Bundle(path="toy", dtype="fp32")
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, module in toy.bundle.modules.items():
        theirs = again.modules[name].state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in module.state_dict().items())


def test_dtype_applies_to_transformer_and_encoders_and_the_vae_is_fp32() -> None:
    modules = SD3Bundle(path="toy", dtype="bf16").modules
    result = {name: next(module.parameters()).dtype for name, module in modules.items()}
    assert result.pop("vae") == torch.float32
    assert set(result.values()) == {torch.bfloat16}


def test_an_estimate_counts_the_parameters_of_the_loaded_model(toy: SD3Pipeline, pixel: SD3Pipeline) -> None:
    for pipeline in (toy, pixel):
        bundle = pipeline.bundle
        assert dict(SD3Bundle.estimate(bundle.path).parameters) == num_parameters(bundle)
        assert SD3Bundle.facts_of(bundle.path) == bundle.facts


def test_an_estimate_counts_the_adapters_that_peft_would_add() -> None:
    from peft import LoraConfig

    transformer = SD3Bundle(path="toy", dtype="fp32").trainable()
    targets = list(SD3Bundle.facts_of("toy").lora_targets)
    transformer.add_adapter(LoraConfig(r=3, target_modules=targets))  # type: ignore[operator]
    added = sum(p.numel() for name, p in transformer.named_parameters() if "lora_" in name)
    assert SD3Bundle.estimate("toy").lora_parameters(3) == added


def of_side(side: int) -> DiffusionSamplingParams:
    return DiffusionSamplingParams(kernel=EulerODE(), height=side, width=side)


def test_the_public_checkpoints_are_known_without_a_connection() -> None:
    facts = SD3Bundle.facts_of(MEDIUM)
    assert facts.latent_shape(of_side(512)) == (16, 64, 64) and facts.image_seq_len(of_side(512)) == 1024
    billions = {name: count / 1e9 for name, count in SD3Bundle.estimate(MEDIUM).parameters.items()}
    # Model cards: 2.5B with everything but T5 counted loosely; CLIP-L 123M, CLIP-G 695M, T5-XXL encoder 4.76B.
    assert billions == pytest.approx(
        {"transformer": 2.24, "text_encoder": 0.124, "text_encoder_2": 0.695, "text_encoder_3": 4.76, "vae": 0.084},
        rel=0.01,
    )


def test_the_latents_of_a_pixel_model_are_an_image(pixel: SD3Pipeline) -> None:
    assert pixel.facts.vae_scale == 1 and pixel.facts.latent_shape(of_side(16)) == (3, 16, 16)
    assert set(pixel.bundle.modules) == {"transformer", "text_encoder"}
    latents = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).view(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert pixel.decoder.decode(latents)[0, 0, 0].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", SD3.shipped)
def test_a_shipped_model_loads(name: str) -> None:
    facts = SD3Bundle.facts_of(name)
    assert facts.vae_scale == 1
    assert dict(SD3Bundle.estimate(name).parameters) == num_parameters(SD3Bundle(path=name, dtype="fp32"))


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(path: str, match: str, revision: str | None = None) -> None:
    with pytest.raises(DataError, match=match) as caught:
        SD3Bundle(path=path, revision=revision, dtype="fp32")
    assert caught.value.code == 4001 and caught.value.exit_status == 4


def test_a_missing_directory_is_named_with_valid_alternatives() -> None:
    refused("/no/such/model", "'/no/such/model': no such directory. Give a directory in the diffusers layout, a hub id")


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    refused(str(tmp_path), "has no model_index.json: it is not a diffusers model directory")


def test_a_model_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "FluxTransformer2DModel"]}))
    refused(str(tmp_path), "its transformer is FluxTransformer2DModel, but this bundle .sd3. reads SD3")


def test_damaged_files_are_refused_by_name(pixel_directory: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(pixel_directory, broken)
    weights = next((broken / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(str(broken), "cannot load transformer")
    (broken / "scheduler" / "scheduler_config.json").write_text("{")
    refused(str(broken), r"scheduler_config.json:1: not JSON")
    (broken / "transformer" / "config.json").unlink()
    refused(str(broken), "config.json is missing: the model directory is incomplete")


@pytest.mark.usefixtures("hub_answers")
@pytest.mark.parametrize("kind", ["gated", "absent", "revision", "offline"])
def test_errors_of_the_hub_are_reported_with_a_remedy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    error, match = {
        "gated": (errors.GatedRepoError("x", response=response), "is gated. Accept its licence .*hf auth login"),
        "absent": (errors.RepositoryNotFoundError("x", response=response), "is not on the hub, or is private"),
        "revision": (errors.RevisionNotFoundError("x", response=response), "has no revision 'v9'"),
        "offline": (
            errors.LocalEntryNotFoundError("x"),
            "is not in the local cache and the hub cannot be reached .*set bundle.path to a local directory",
        ),
    }[kind]

    def fail(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    refused("someone/some-sd3", f"model 'someone/some-sd3' {match}", "v9" if kind == "revision" else None)


@pytest.mark.usefixtures("hub_answers")
def test_a_process_asks_the_hub_once_for_the_same_files(pixel_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def download(repo: str, *, allow_patterns: list[str], **options: object) -> str:
        asked.append((repo, *allow_patterns))
        return str(pixel_directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for _ in range(2):
        SD3Bundle(path="someone/sd3-asked-once", dtype="fp32").untrained()
    assert len(asked) == len(set(asked)) > 0


def test_loading_prints_nothing_and_restores_the_logging_of_the_libraries(
    pixel_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    before = (of_diffusers.get_verbosity(), of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled())
    SD3Bundle(path=str(pixel_directory), dtype="fp32")
    assert capfd.readouterr() == ("", "")
    after = (of_diffusers.get_verbosity(), of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled())
    assert after == before


def test_a_class_path_without_its_library_is_refused_with_a_remedy() -> None:
    family = dataclasses.replace(SD3, classes={**SD3.classes, "vae": "AutoencoderKL"})
    with pytest.raises(ValueError, match=r"reads its vae by 'AutoencoderKL'\. Write the library before the class"):
        family.class_of("vae")


def test_an_estimate_needs_a_layer_that_takes_adapters() -> None:
    def facts(configs: ModelConfigs, batch_multiple: int) -> LatentFacts:
        return dataclasses.replace(SD3.facts(configs, batch_multiple), lora_targets=("attn.qkv",))

    with pytest.raises(ValueError, match=r"no linear layer named attn\.qkv; it has "):
        dataclasses.replace(SD3, facts=facts).estimate("toy")
