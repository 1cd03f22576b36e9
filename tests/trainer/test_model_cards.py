"""The lines of a model card do what they say: the test runs them in the folder of the export."""

import os
from pathlib import Path

import pytest
import torch

from unirl.cli.main import main
from unirl.models.loading.base_model import BaseModel
from unirl.models.wan22.family import Wan22Bundle, Wan22Pipeline
from unirl.trainer.model_card import _use_adapter

SMALL = ("num_rollouts=1", "evaluation.eval_steps=0", "tracking.sample_steps=0", "save_interval=0", "batch_size=2")
SMALL += ("sampling.samples_per_prompt=4", "stack.micro_batch_size=8")


def exported(folder: Path, recipe: str, formats: tuple[str, ...], *settings: str) -> dict[str, Path]:
    """The folder of each format of a run of one step."""
    assert main(["train", recipe, *SMALL, f"run.dir={folder / 'run'}", *settings]) == 0
    words = [word for name in formats for word in ("--format", name)]
    assert main(["export", str(folder / "run"), "--out", str(folder / "out"), *words]) == 0
    return {name: folder / "out" / name for name in formats}


def run_card(folder: Path, monkeypatch) -> dict[str, object]:
    """The variables after the Python lines of the card in a folder, which is the current one while they run."""
    monkeypatch.chdir(folder)
    lines = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(compile(lines, str(folder / "README.md"), "exec"), names)
    return names


def adapter_norm(module: torch.nn.Module) -> float:
    return sum(float(tensor.detach().norm()) for name, tensor in module.named_parameters() if "lora_B" in name)


def test_the_cards_of_the_quick_start_load_all_three_formats(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    formats = ("diffusers-lora", "peft", "full")
    folders = exported(tmp_path, "diffusion/quickstart", formats, "sampling.num_inference_steps=4")
    (tmp_path / "out" / "full" / "toy").mkdir()  # a folder of that name in the current one changes no card
    networks = {
        "diffusers-lora": run_card(folders["diffusers-lora"], monkeypatch)["pipe"].transformer,
        "peft": run_card(folders["peft"], monkeypatch)["pipe"].transformer,
    }
    norms = {name: adapter_norm(network) for name, network in networks.items()}
    assert norms["diffusers-lora"] == pytest.approx(norms["peft"]) and norms["peft"] > 0
    whole = run_card(folders["full"], monkeypatch)["model"].transformer
    inputs = {
        "hidden_states": torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(0)),
        "encoder_hidden_states": torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)),
        "pooled_projections": torch.randn(1, 64, generator=torch.Generator().manual_seed(2)),
        "timestep": torch.tensor([500.0]),
    }
    with torch.no_grad():
        outputs = [net.float().eval()(**inputs).sample for net in (whole, *networks.values())]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=0.05, rtol=0.05)  # bfloat16 rounds the merged weights
    for folder in folders.values():
        assert "unirl/models/sd3/quickstart/README.md" in (folder / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft of transformers
def test_the_cards_of_a_language_model_load_an_adapter_and_a_whole_model(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    lora = ("backend.lora_cfg.rank=4", "backend.lora_cfg.alpha=8")
    folders = exported(tmp_path, "llm/quickstart", ("peft", "full"), *lora)
    adapted = run_card(folders["peft"], monkeypatch)["model"]
    whole = run_card(folders["full"], monkeypatch)["model"]
    assert adapter_norm(adapted) > 0
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(adapted.float()(tokens).logits, whole.float()(tokens).logits, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("place", ["a hub id", "a folder"])
def test_the_card_names_a_base_model_of_the_hub_and_not_a_folder_of_this_machine(tmp_path, place) -> None:
    name = "Qwen/Qwen3-0.6B" if place == "a hub id" else str(tmp_path / "my-model")
    (tmp_path / "my-model").mkdir()
    lines = list(_use_adapter(BaseModel(library="transformers", loader="Qwen3ForCausalLM"), "peft", name))
    assert lines[1:3] == ["from peft import PeftModel", "from transformers import Qwen3ForCausalLM"]
    base = 'base = "Qwen/Qwen3-0.6B"' if place == "a hub id" else 'base = "my-model"  # the folder of the base model'
    assert base in lines and str(tmp_path) not in "".join(lines)
    assert 'PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), ".")' in lines[-2]


def test_the_lines_for_two_experts_load_both_files_as_the_verification_does(tmp_path) -> None:
    class Plain:
        def __init__(self):
            self.calls = []

        def load_lora_weights(self, folder, **options):
            self.calls.append((os.path.basename(folder), options))

    pipeline = Wan22Pipeline.__new__(Wan22Pipeline)
    pipeline.bundle = Wan22Bundle(path="toy", dtype="fp32")
    assert pipeline.bundle.has_experts and len(pipeline.lora_lines) == 2
    by_lines, by_code = Plain(), Plain()
    for line in pipeline.lora_lines:
        exec(line, {"pipe": by_lines})
    pipeline.load_lora(by_code, Path("."))
    assert by_lines.calls == [(".", options) for _, options in by_code.calls]
