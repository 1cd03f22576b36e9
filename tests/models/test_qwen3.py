"""Qwen3 from a directory and as a toy: facts before loading, refused checkpoints, and exports to transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.texts import TEXTS, networks, rollout
from unirl.config.errors import DataError
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.loading.lora import inject_lora
from unirl.models.loading.toy_tokenizers import qwen3_tokenizer
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.types.facts import LanguageFacts, LoraSpec
from unirl.types.sampling import ARSamplingParams

PARAMS = ARSamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it."""
    folder = tmp_path_factory.mktemp("qwen3")
    _, plain = networks(seed=5, tie_word_embeddings=request.param)
    plain.generation_config.eos_token_id = [258, 256]
    plain.save_pretrained(folder)
    qwen3_tokenizer().save_pretrained(folder)
    return folder


def test_a_directory_is_loaded_to_the_bits_of_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    bundle = Qwen3Bundle(path=str(directory), dtype="fp32")
    wanted = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    result = bundle.trainable().state_dict()
    assert result.keys() == wanted.keys() and all(torch.equal(result[name], wanted[name]) for name in wanted)
    assert all(parameter.requires_grad for parameter in bundle.trainable().parameters())


def test_ends_are_those_of_the_generation_config(directory: Path) -> None:
    assert Qwen3Bundle(path=str(directory), dtype="fp32").codec.ends == (256, 258)


def test_facts_are_known_before_loading(directory: Path) -> None:
    facts = Qwen3Bundle.facts_of(str(directory))
    assert facts == Qwen3Bundle(path=str(directory), dtype="fp32").facts
    assert isinstance(facts, LanguageFacts)
    assert (facts.vocab_size, facts.hidden_size, facts.context_length) == (261, 32, 2048)


def test_facts_name_real_blocks_and_layers() -> None:
    bundle = Qwen3Bundle(path="toy", dtype="fp32")
    names = [name for name, _ in bundle.trainable().named_modules()]
    assert {type(m).__name__ for m in bundle.trainable().modules()} >= set(bundle.facts.block_class_names)
    assert all(any(name.endswith(suffix) for name in names) for suffix in bundle.facts.lora_targets)


def test_the_toy_is_the_same_whenever_it_is_built() -> None:
    first, second = (Qwen3Bundle(path="toy", dtype="fp32") for _ in range(2))
    states = first.trainable().state_dict(), second.untrained().state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_network_without_storage_starts_as_one_that_was_loaded(directory: Path, lora: bool) -> None:
    from unirl.train.backend.base import OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import LoraConfig

    answers, trained = [], []
    for meta_init in (True, False):
        bundle = Qwen3Bundle(path=str(directory), dtype="fp32", meta_init=meta_init)
        adapters = LoraConfig(rank=2) if lora else None
        backend = FSDPBackend(bundle, seed=3, optimizer_cfg=OptimizerConfig(learning_rate=1e-3), lora_cfg=adapters)
        pipeline = Qwen3Pipeline(bundle)
        answers.append(pipeline.stage.canary(pipeline.canary_inputs()).values)
        trained.append(sorted(backend.trainable))
    assert torch.equal(*answers) and trained[0] == trained[1]


# What is refused


def broken(directory: Path, folder: Path, **changes: Any) -> str:
    """A copy of a checkpoint whose config says something else."""
    for file in directory.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_path_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"bundle\.path='/nowhere/at/all': no such directory"):
        Qwen3Bundle(path="/nowhere/at/all")


def test_a_directory_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        Qwen3Bundle(path=str(tmp_path))


def test_another_family_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model_type='llama', but Qwen3Bundle reads 'qwen3'"):
        Qwen3Bundle(path=broken(directory, tmp_path, model_type="llama"))


def test_a_sliding_window_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sliding-window attention is not available"):
        Qwen3Bundle.facts_of(broken(directory, tmp_path, use_sliding_window=True))


def test_a_vocabulary_that_does_not_match_is_refused(tmp_path: Path) -> None:
    _, plain = networks(vocab_size=259)
    plain.save_pretrained(tmp_path)
    qwen3_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"its tokenizer has token 260, and the network embeds 259"):
        Qwen3Bundle(path=str(tmp_path), dtype="fp32")


def test_damaged_weights_are_refused(directory: Path, tmp_path: Path) -> None:
    path = broken(directory, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"cannot load the model in"):
        Qwen3Bundle(path=path, dtype="fp32")


def test_a_checkpoint_that_lacks_a_weight_is_refused(directory: Path, tmp_path: Path) -> None:
    """transformers would draw it at random."""
    from safetensors.torch import load_file, save_file

    path = broken(directory, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DataError, match=r"the model in .*: tensors of \w+ are missing \(\d+\): model\.layers\.1\.mlp\.up_proj"
    ):
        Qwen3Bundle(path=path, dtype="fp32")


def test_a_directory_without_a_tokenizer_is_refused(directory: Path, tmp_path: Path) -> None:
    path = broken(directory, tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match=r"cannot load the tokenizer in"):
        Qwen3Bundle(path=path, dtype="fp32")


# The way out


def perturbed(pipeline: Qwen3Pipeline) -> dict[str, torch.Tensor]:
    """The trained parameters, after something like training."""
    generator = torch.Generator().manual_seed(0)
    trained = {n: p for n, p in pipeline.bundle.trainable().named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


def test_transformers_loads_the_exported_model_with_equal_outputs(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pipeline = Qwen3Pipeline(Qwen3Bundle(path=str(directory), dtype="fp32"))
    folder = pipeline.write_model(perturbed(pipeline), tmp_path / "out")
    assert pipeline.verify_model(folder, TEXTS, PARAMS) < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert "unirl" not in (folder / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(folder).chat_template == pipeline.bundle.codec.tokenizer.chat_template
    again = Qwen3Pipeline(Qwen3Bundle(path=str(folder), dtype="fp32"))
    assert torch.equal(rollout(again, PARAMS).segment.tokens, rollout(pipeline, PARAMS).segment.tokens)


def test_the_check_of_an_export_detects_another_weight(directory: Path, tmp_path: Path) -> None:
    pipeline = Qwen3Pipeline(Qwen3Bundle(path=str(directory), dtype="fp32"))
    tensors = perturbed(pipeline)
    tensors["model.layers.0.self_attn.q_proj.weight"][0] += 1.0
    assert pipeline.verify_model(pipeline.write_model(tensors, tmp_path), TEXTS, PARAMS) > 1e-3


def test_peft_loads_the_exported_adapter_with_equal_outputs(directory: Path, tmp_path: Path) -> None:
    pipeline = Qwen3Pipeline(Qwen3Bundle(path=str(directory), dtype="fp32"))
    spec = LoraSpec(rank=4, alpha=8.0, targets=pipeline.facts.lora_targets)
    inject_lora(pipeline.bundle.trainable(), spec, seed=0)
    tensors = perturbed(pipeline)
    adapter = Adapter.from_named(tensors, rank=4, alpha=8.0, target_modules=spec.targets)
    write_peft_adapter(tmp_path, adapter, base_model=str(directory))
    assert pipeline.verify_lora(tmp_path, TEXTS, replace(PARAMS, temperature=0.8)) < 1e-5
    merged = adapter.merged_into(pipeline.bundle.untrained().state_dict())
    assert pipeline.verify_model(pipeline.write_model(merged, tmp_path / "full"), TEXTS, PARAMS) < 1e-4


def test_unknown_names_are_not_written(tmp_path: Path) -> None:
    pipeline = Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32"))
    with pytest.raises(ValueError, match=r"no parameter 'model\.nothing'"):
        pipeline.write_model({"model.nothing": torch.zeros(1)}, tmp_path)


def test_the_toy_configuration_has_the_structure_of_a_published_one() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(**Qwen3Bundle.toys["toy"])
    assert set(config.layer_types) == {"full_attention"} and config.vocab_size == len(qwen3_tokenizer())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-0.6B-Base", 596_049_920),
        ("Qwen/Qwen3-4B-Base", 4_022_468_096),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
    ],
)
def test_a_public_model_is_planned_without_a_connection_at_the_size_that_its_card_states(name, parameters) -> None:
    assert sum(Qwen3Bundle.estimate(name).parameters.values()) == parameters
