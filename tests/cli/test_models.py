"""`unirl models`: what a directory lacks is named without loading it, and only needed files are downloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.layouts import Hub, files_in, write_repository
from unirl.cli.main import main
from unirl.models.loading import hub as loading_hub

FLUX = "black-forest-labs/FLUX.1-dev"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(FLUX, tmp_path_factory.mktemp("hub") / "flux")


@pytest.fixture
def folder(flux: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(flux, tmp_path / "model"))


def test_check_reports_every_network_of_a_complete_model(flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(flux), "--json"]) == 0
    rows = {row["component"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"transformer", "text_encoder", "text_encoder_2", "vae"}
    for name, row in rows.items():
        tensors = [load_file(path) for path in (flux / name).glob("*.safetensors")]
        assert row["num_tensors"] == sum(map(len, tensors)) and row["dtypes"] == ["F32"]
        assert (row["problem"], row["unused"]) == ("", [])
    assert main(["models", "check", str(flux)]) == 0
    assert "FluxTransformer2DModel" in capsys.readouterr().out


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, options: tuple[str, ...] = ()) -> None:
    assert main(["models", "check", str(folder), *options]) == 4
    message = capsys.readouterr().err
    assert [word for word in words if word not in message] == []


def test_check_names_what_is_missing_in_each_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [encoder] = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(encoder)
    name, _ = tensors.popitem()
    save_file(tensors, encoder, metadata={"format": "pt"})
    shard = folder / "transformer/diffusion_pytorch_model-00002-of-00003.safetensors"
    shard.unlink()
    (folder / "vae/diffusion_pytorch_model.safetensors").rename(folder / "vae/diffusion_pytorch_model.fp16.safetensors")
    refused(folder, capsys, f"are missing (1): {name}", f"are missing: {shard.name}", "only the variant 'fp16'")
    encoder.write_bytes(encoder.read_bytes()[:500])
    refused(folder, capsys, f"text_encoder in {encoder.parent}: Error while deserializing header")


def test_check_refuses_a_tensor_that_stands_in_two_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (folder / f"transformer/diffusion_pytorch_model-0000{i}-of-00003.safetensors" for i in (1, 2))
    name, tensor = next(iter(load_file(one).items()))
    save_file({**load_file(two), name: tensor}, two, metadata={"format": "pt"})
    refused(folder, capsys, f"{name} is in {two.name} and belongs to {one.name}")


def edit_transformer(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors in the first weight file of the transformer. The index lists what the file then has."""
    file = folder / "transformer/diffusion_pytorch_model-00001-of-00003.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_check_names_integers_in_place_of_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "context_embedder.weight"
    edit_transformer(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(folder, capsys, "are integers in the files", f"(1): {name} (I8). The weights are quantized")


def test_check_accepts_integer_buffers_of_older_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text encoders were published with their table of positions, which the network computes."""
    [encoder] = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(encoder)
    tensors["text_model.embeddings.position_ids"] = torch.arange(4)[None]
    save_file(tensors, encoder, metadata={"format": "pt"})
    assert main(["models", "check", str(folder)]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_only_on_demand(
    folder: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "check", str(folder), "--values"]) == 0
    name = "context_embedder.weight"
    edit_transformer(folder, lambda tensors: tensors[name].view(-1)[-1].fill_(value))
    assert main(["models", "check", str(folder)]) == 0
    capsys.readouterr()
    refused(folder, capsys, f"infinite or not a number (1): {name}", options=("--values",))


def test_check_names_many_tensors_up_to_a_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"stray_{i:02d}.weight" for i in range(23)]
    edit_transformer(folder, lambda tensors: tensors.update({name: torch.ones(1) for name in names}))
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] |= dict.fromkeys(names, "diffusion_pytorch_model-00001-of-00003.safetensors")
    index.write_text(json.dumps(listed))
    refused(folder, capsys, f"(23): {', '.join(names[:20])} and 3 more. The files belong to another model")


def test_check_refuses_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(tmp_path, capsys, "has neither model_index.json nor config.json", f"RECIPE bundle.path={tmp_path}")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "hunyuan_image_3_moe"}, "its config.json names no class, so transformers does"),
        ({"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}, "names Own, a class of the model's own"),
    ],
)
def test_check_of_a_model_with_a_layout_of_its_own_names_the_command_for_it(tmp_path, capsys, config, found) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, capsys, found, f"unirl check RECIPE bundle.path={tmp_path}, with a recipe of the family")


@pytest.mark.usefixtures("hub_answers")
def test_pull_shows_the_sizes_first_and_downloads_only_what_a_run_reads(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Api:
        def model_info(self, repo: str, revision: str | None, files_metadata: bool, timeout: float) -> SimpleNamespace:
            files = [SimpleNamespace(rfilename=n, size=(flux / n).stat().st_size) for n in sorted(files_in(flux))]
            return SimpleNamespace(siblings=files)

    fake = Hub(flux, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    monkeypatch.setattr(loading_hub, "_fetch", loading_hub._fetch.__wrapped__)
    assert main(["models", "pull", FLUX, "--dry-run"]) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    names = {row.split()[-1] for row in rows}
    assert {"transformer/config.json", "model_index.json"} <= names and not {"ae.safetensors", "README.md"} & names
    assert total.endswith(f"in {len(names)} files") and files_in(fake.cache) == {"model_index.json"}
    assert main(["models", "pull", FLUX]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(fake.cache) and files_in(fake.cache) == names


@pytest.mark.usefixtures("hub_answers")
def test_pull_says_what_to_do_about_an_unknown_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError

    response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))

    class Api:
        def model_info(self, repo: str, **options: object) -> None:
            raise RepositoryNotFoundError("x", response=response)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert main(["models", "pull", "someone/nothing"]) == 4
    assert "is not on the hub, or is private" in capsys.readouterr().err


def test_pull_without_a_connection_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:1")
    assert main(["models", "pull", "someone/model"]) == 4
    assert "the hub cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pull", "nonsense"], "is no hub id"),
        (["check", "someone/model"], "`unirl models pull someone/model` fetches it"),
        (["check", "/nowhere/at/all"], "there is no such directory"),
    ],
)
def test_words_that_are_neither_a_directory_nor_an_id_are_refused(words, says, capsys) -> None:
    assert main(["models", *words]) == 4
    assert says in capsys.readouterr().err
