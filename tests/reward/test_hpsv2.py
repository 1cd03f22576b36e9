"""HPSv2 is the cosine that open_clip's CLIP gives; its checkpoint is read into transformers' class."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from unirl.config.errors import DataError
from unirl.reward.local.hpsv2 import HPSv2RewardScorer, HPSv2Spec, from_open_clip, letterboxed
from unirl.reward.local.shared.clip import toy_clip_config, toy_processor
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

PROMPTS = ["a red circle", "two dogs, at night", "", "a blue cross on the left of a very long prompt " * 6, "x"]
WIDTH, HEADS, LAYERS, SIDE, PATCH = 32, 4, 2, 32, 8


class Block(nn.Module):
    """A transformer block with the names of open_clip."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(WIDTH, 2 * WIDTH))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.class_embedding = drawn(WIDTH)
        self.positional_embedding = drawn(1 + (SIDE // PATCH) ** 2, WIDTH)
        self.ln_pre, self.transformer, self.ln_post = nn.LayerNorm(WIDTH), Tower(), nn.LayerNorm(WIDTH)
        self.proj = drawn(WIDTH, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """open_clip's CLIP, written out: its parameters, its order of operations, tokens padded with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.transformer = Vision(), Tower()
        self.token_embedding = nn.Embedding(514, WIDTH)
        self.positional_embedding = drawn(77, WIDTH)
        self.ln_final, self.text_projection = nn.LayerNorm(WIDTH), drawn(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        for parameter in self.parameters():  # nothing stays at 0 or 1, so that nothing can be mixed up unseen
            parameter.data += 0.1 * torch.randn(parameter.shape)

    def encode_text(self, tokens: Tensor) -> Tensor:
        mask = torch.full((77, 77), float("-inf")).triu(1)
        x = self.ln_final(self.transformer(self.token_embedding(tokens) + self.positional_embedding, mask))
        return x[torch.arange(len(x)), tokens.argmax(dim=1)] @ self.text_projection

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        pair = [nn.functional.normalize(x, dim=1) for x in (self.visual(pixels), self.encode_text(tokens))]
        return (pair[0] * pair[1]).sum(1)


@pytest.fixture(scope="module")
def open_clip() -> OpenClip:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return OpenClip().eval().requires_grad_(False)


def tokens_of(prompts: list[str]) -> Tensor:
    """What open_clip's tokenizer gives: cut after 77 with the last one the end, filled up with 0."""
    rows = toy_processor().tokenizer(prompts)["input_ids"]
    cut = [row if len(row) <= 77 else [*row[:76], row[-1]] for row in rows]
    return torch.tensor([row + [0] * (77 - len(row)) for row in cut])


def images(height: int = SIDE, width: int = SIDE) -> Tensor:
    noise = torch.rand(len(PROMPTS), 3, height, width, generator=torch.Generator().manual_seed(0))
    return (noise * 255).round() / 255


def request(**sides: int) -> RewardRequest:
    return RewardRequest(sample_ids=[f"s{i}" for i in range(len(PROMPTS))], prompts=PROMPTS, images=images(**sides))


def published(folder, weights: dict, file: str) -> HPSv2Spec:
    """A spec of a checkpoint as it is published, beside the architecture and the processor of the toy."""
    config = toy_clip_config()
    config.text_config.hidden_act = config.vision_config.hidden_act = "gelu"
    config.save_pretrained(folder / "processor")
    toy_processor().save_pretrained(folder / "processor")
    if file.endswith(".pt"):
        torch.save({"epoch": 1, "name": "hps", "state_dict": weights}, folder / file)
    else:
        from safetensors.torch import save_file

        save_file(weights, folder / file)
    return HPSv2Spec(path=str(folder), file=file, processor=str(folder / "processor"), batch_size=4, device="cpu")


@pytest.mark.parametrize("file", ["HPS_v2.1_compressed.pt", "hps.safetensors"])
def test_scores_of_a_published_checkpoint_are_those_of_open_clip(open_clip, tmp_path, file):
    scorer = HPSv2RewardScorer(config=published(tmp_path, open_clip.state_dict(), file))
    assert isinstance(scorer.model, CLIPModel)
    processor = toy_processor().image_processor
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))
    expected = open_clip((images() - mean) / std, tokens_of(PROMPTS))
    torch.testing.assert_close(scorer.score(request()).total, expected, atol=1e-6, rtol=1e-5)
    assert expected.std() > 0.01


def test_a_checkpoint_by_its_file_of_an_old_torch_or_saved_by_transformers_scores_the_same(open_clip, tmp_path):
    spec = published(tmp_path, open_clip.state_dict(), "x.pt")
    first = HPSv2RewardScorer(config=spec)
    first.model.save_pretrained(tmp_path / "saved")
    old = {"state_dict": dict(open_clip.state_dict())}
    torch.save(old, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    same = {"processor": spec.processor, "batch_size": 4, "device": "cpu"}
    by_file = HPSv2Spec(path=str(tmp_path / "x.pt"), **same)
    of_old_torch = HPSv2Spec(path=str(tmp_path / "old.pt"), **same)
    saved = HPSv2Spec(path=str(tmp_path / "saved"), file=None, **same)
    for other in (by_file, of_old_torch, saved):
        assert torch.equal(HPSv2RewardScorer(config=other).score(request()).total, first.score(request()).total)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("ln_final.bias"), r"1 missing \(text_model\.final_layer_norm\.bias"),
        (lambda w: w.update(head=torch.zeros(2)), r"1 unexpected \(head"),
        (lambda w: w.update(text_projection=torch.zeros(3, 3)), r"1 mismatched .*text_projection"),
    ],
    ids=["missing", "left over", "of another shape"],
)
def test_a_checkpoint_of_another_model_is_refused(open_clip, tmp_path, change, words):
    weights = dict(open_clip.state_dict())
    change(weights)
    with pytest.raises(DataError, match=rf"config\.path: .*does not fit CLIPModel: {words}"):
        _ = HPSv2RewardScorer(config=published(tmp_path, weights, "x.pt")).model


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    def scorer(path):
        return HPSv2RewardScorer(config=HPSv2Spec(path=str(path), processor=str(tmp_path / "p"), device="cpu"))

    toy_clip_config().save_pretrained(tmp_path / "p")
    torch.save({"state_dict": {"x": torch.ones(1000)}}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    damaged = {
        "cut.pt": whole[: len(whole) // 2],
        "empty.pt": b"",
        "text.pt": b"<html>",
        "cut.safetensors": b"\x10\0\0",
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    for name, content in (("list.pt", [torch.ones(1)]), ("numbers.pt", {"state_dict": {"x": 1.0}})):
        torch.save(content, tmp_path / name)
    for path, words in (
        (tmp_path, "the directory holds no HPS_v2.1_compressed.pt"),
        (tmp_path / "none.pt", "no such file or directory"),
        *((tmp_path / name, f"{name} is not a checkpoint .*Download it again") for name in damaged),
        *((tmp_path / name, f"{name} is not a checkpoint .*ValueError") for name in ("list.pt", "numbers.pt")),
    ):
        with pytest.raises(DataError, match=words) as caught:
            _ = scorer(path).model
        assert caught.value.code == 4001


@pytest.mark.usefixtures("hub_answers")
def test_a_hub_id_loads_its_checkpoint(open_clip, tmp_path, monkeypatch):
    spec = published(tmp_path, open_clip.state_dict(), "x.pt")
    asked = []

    def download(repository, file, local_files_only):
        asked.append((repository, file))
        if repository == "some/where":
            raise FileNotFoundError("no connection")
        return str(tmp_path / "x.pt")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    scorer = HPSv2RewardScorer(config=HPSv2Spec(processor=spec.processor, batch_size=4, device="cpu"))
    assert torch.equal(scorer.score(request()).total, HPSv2RewardScorer(config=spec).score(request()).total)
    absent = HPSv2RewardScorer(config=HPSv2Spec(path="some/where", processor=spec.processor, device="cpu"))
    with pytest.raises(DataError, match=r"some/where': no such directory, and the hub did not give it .HPS_v2"):
        _ = absent.model
    assert asked == [("xswu/HPSv2", "HPS_v2.1_compressed.pt"), ("some/where", "HPS_v2.1_compressed.pt")]


def test_a_checkpoint_that_runs_code_is_not_read(tmp_path):
    class MakesADirectory:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    toy_clip_config().save_pretrained(tmp_path / "p")
    torch.save({"state_dict": {"x": MakesADirectory()}}, tmp_path / "code.pt")
    spec = HPSv2Spec(path=str(tmp_path / "code.pt"), processor=str(tmp_path / "p"), device="cpu")
    with pytest.raises(DataError, match="not a checkpoint of weights"):
        _ = HPSv2RewardScorer(config=spec).model
    assert not (tmp_path / "made").exists()


def test_every_weight_is_renamed_to_one_of_transformers(open_clip):
    renamed = from_open_clip(open_clip.state_dict())
    model = CLIPModel(CLIPConfig.from_dict(toy_clip_config().to_dict()))
    assert {n: t.shape for n, t in renamed.items()} == {n: t.shape for n, t in model.state_dict().items()}


@pytest.mark.parametrize("size", [(40, 28), (28, 40), (64, 64), (20, 24), (33, 100)], ids=str)
def test_images_are_scaled_as_by_pil_and_centred_on_black(size):
    """PIL resamples floats (mode F) without rounding: another implementation of the same filter."""
    pictures = images(*size)[:1]
    result = letterboxed(pictures, SIDE)
    height, width = (round(length * SIDE / max(size)) for length in size)
    rows = [
        Image.fromarray(channel.numpy()).resize((width, height), Image.Resampling.BICUBIC) for channel in pictures[0]
    ]
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    expected = np.zeros((3, SIDE, SIDE), np.float32)
    expected[:, top : top + height, left : left + width] = np.stack([np.asarray(row) for row in rows])
    torch.testing.assert_close(result[0], torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_scores_do_not_depend_on_order_or_batch_size_and_the_toy_is_fixed():
    def toy():
        return HPSv2RewardScorer(config=HPSv2Spec(path="toy", batch_size=4, device="cpu"))

    answer = check_reward(toy(), request(height=40, width=28), atol=1e-6)
    assert torch.equal(toy().score(request(height=40, width=28)).total, answer.total)
    assert list(answer.components) == ["hpsv2"] and answer.total.abs().max() <= 1
