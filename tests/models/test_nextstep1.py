"""NextStep-1 against its published equations, written here with plain transformers, and its replays and exports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from tests.models.rollouts import roll, sampling
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.diffusion_ppo import DiffusionPPO
from unirl.config.errors import DataError, IncompatibleError, NotFoundError
from unirl.models.denoising.continuous_tokens import TOKENS
from unirl.models.denoising.stage import GradientMask
from unirl.models.loading.adapter_files import Adapter
from unirl.models.nextstep1.family import NextStepBundle, NextStepPipeline
from unirl.sde.kernels import EulerODE
from unirl.sde.noise import NoiseSource
from unirl.testing.algorithm import check_algorithm, moved_away, prepared_track
from unirl.testing.bundle import check_latents
from unirl.train.backend.base import OptimizerConfig
from unirl.train.backend.fsdp import FSDPBackend
from unirl.types.conditions import LatentCondition
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

LARGE = "stepfun-ai/NextStep-1-Large"
TEXTS = ("a red circle", "two blue squares", "x")
PATHS = ("toy", "toy-positions")


@cache
def pipeline_of(path: str = "toy") -> NextStepPipeline:
    """A pipeline that no test changes."""
    return NextStepPipeline(NextStepBundle(path=path, dtype="fp32"))


def fresh(path: str = "toy", **options: Any) -> NextStepPipeline:
    return NextStepPipeline(NextStepBundle(path=path, dtype="fp32", **options))


# --- the published equations -----------------------------------------------------------------------------------------


class Published:
    """Sampling as the authors write it: one prompt at a time, attention and cache of transformers, time 0 at noise."""

    def __init__(self, bundle: NextStepBundle) -> None:
        from transformers import Qwen2Config, Qwen2Model

        self.config = bundle.config
        self.tensors = bundle.untrained().state_dict()
        self.tokenizer = bundle.tokenizer
        config = Qwen2Config.from_dict({**self.config, "_attn_implementation": "eager"})
        self.backbone = Qwen2Model(config).eval()
        self.backbone.load_state_dict({name: self.tensors[name] for name in self.backbone.state_dict()})

    def prompt(self, text: str, rows: int, columns: int) -> Tensor:
        tokens = self.tokenizer(text)["input_ids"]
        area = self.tokenizer("<|image_area|>" + f"{rows}*{columns}")["input_ids"]
        return torch.tensor([[*tokens, *area, self.config["boi"]]])

    def layer(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def position(self, token: int, columns: int) -> Tensor:
        """The sines of the column and of the row: He et al. 2022 (MAE), whose code the authors use."""
        quarter = self.config["hidden_size"] // 4
        waves = []
        for place in (token % columns, token // columns):
            angles = [place / 10000 ** (k / quarter) for k in range(quarter)]
            waves += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        return torch.tensor(waves)

    def head(self, x: Tensor, t: float, c: Tensor) -> Tensor:
        """The velocity from noise to data [d] at x [d] and time t, for the condition c [D]."""
        net = "image_head.net"
        angles = t * torch.exp(-math.log(10000.0) * torch.arange(128) / 128)
        time = self.layer(f"{net}.time_embed.mlp.0", torch.cat([angles.cos(), angles.sin()]))
        y = self.layer(f"{net}.time_embed.mlp.2", silu(time)) + self.layer(f"{net}.cond_embed", c)
        x = self.layer(f"{net}.input_proj", x)
        for i in range(self.config["fm_head_layers"]):
            block = f"{net}.res_blocks.{i}"
            shift, scale, gate = self.layer(f"{block}.adaLN_modulation.1", silu(y)).chunk(3)
            weight, bias = self.tensors[f"{block}.in_ln.weight"], self.tensors[f"{block}.in_ln.bias"]
            h = layer_norm(x, x.shape, weight, bias, 1e-6) * (1 + scale) + shift
            x = x + gate * self.layer(f"{block}.mlp.2", silu(self.layer(f"{block}.mlp.0", h)))
        shift, scale = self.layer(f"{net}.final_layer.adaLN_modulation.1", silu(y)).chunk(2)
        return self.layer(f"{net}.final_layer.linear", layer_norm(x, x.shape, eps=1e-6) * (1 + scale) + shift)

    @torch.no_grad()
    def sample(self, text: str, negative: str, x_T: Tensor, times: list[float], scale: float) -> Tensor:  # noqa: N803
        """Latents [C, H, W] by Euler steps from noise x_T [C, H, W], with the scale of classifier-free guidance."""
        p = self.config["latent_patch_size"]
        channels, height, width = x_T.shape
        rows, columns = height // p, width // p
        noise = torch.einsum("chpwq->hwcpq", x_T.reshape(channels, rows, p, columns, p)).reshape(rows * columns, -1)
        branches = [(self.prompt(each, rows, columns), None) for each in (text, negative)]
        states = [self.backbone(input_ids=ids, use_cache=True) for ids, _ in branches]
        raw: list[Tensor] = []
        for token in range(rows * columns):
            conditions = []
            for state in states:
                c = state.last_hidden_state[0, -1]
                if self.config["use_gen_pos_embed"]:
                    c = c + self.position(token, columns)
                conditions.append(self.layer("image_out_projector", c))
            x = noise[token]
            for t, t_next in itertools.pairwise(times):
                cond, uncond = (self.head(x, t, c) for c in conditions)
                x = x + (uncond + scale * (cond - uncond)) * (t_next - t)
            raw.append(x)
            embeds = self.layer("image_in_projector", layer_norm(x, x.shape, eps=1e-6))[None, None]
            states = [self.backbone(inputs_embeds=embeds, cache=state.cache, use_cache=True) for state in states]
        tokens = torch.stack(raw).reshape(rows, columns, channels, p, p)
        return torch.einsum("hwcpq->chpwq", tokens).reshape(channels, height, width)


def euler(pipeline: NextStepPipeline, scale: float, height: int = 32, width: int = 48) -> DiffusionSamplingParams:
    values = {"guidance_scale": scale, "height": height, "width": width, "negative_prompt": "bad"}
    return sampling(pipeline, kernel=EulerODE(), sde_indices=(), **values)


@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.parametrize("path", PATHS)
def test_euler_samples_are_those_of_the_published_equations(path: str, scale: float) -> None:
    pipeline = pipeline_of(path)
    params = euler(pipeline, scale)
    noise, ids = NoiseSource(7, "eval", 0), [f"row {i}" for i in range(len(TEXTS))]
    x_T = pipeline.initial_noise(noise, ids, params)  # noqa: N806
    ours = pipeline.stage.sample(pipeline.encode(TEXTS, params), x_T, params, noise, ids).final
    published, times = Published(pipeline.bundle), [1 - sigma for sigma in pipeline.sigmas(params).tolist()]
    theirs = torch.stack([published.sample(t, "bad", x, times, scale) for t, x in zip(TEXTS, x_T, strict=True)])
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_the_vae_decodes_normed_patches() -> None:
    pipeline = pipeline_of()
    latents = torch.randn(4, 4, 4, 6, generator=torch.Generator().manual_seed(3))
    patches = latents.unfold(2, 2, 2).unfold(3, 2, 2)  # [B, C, H / 2, W / 2, 2, 2]
    mean = patches.mean((1, 4, 5), keepdim=True)
    var = patches.var((1, 4, 5), keepdim=True, unbiased=False)
    normed = ((patches - mean) / (var + 1e-6).sqrt()).permute(0, 1, 2, 4, 3, 5).reshape(latents.shape)
    vae: Any = pipeline.bundle.modules["vae"]
    with torch.no_grad():
        pixels = (vae.decode(normed).sample / 2 + 0.5).clamp(0, 1)
        assert torch.allclose(pipeline.decoder.decode(latents), pixels, atol=1e-5)


# --- sampling and replay ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_toy_has_the_properties_of_every_family(path: str) -> None:
    check_latents(pipeline_of(path), 32, 48)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replay_with_guidance_equals_the_rollout_bit_for_bit(passes: int, dtype: str) -> None:
    pipeline = pipeline_of()
    track = roll(pipeline, guidance_scale=4.0, guidance_passes=passes, trajectory_dtype=dtype)
    segment = track.segment
    with torch.no_grad():
        together = pipeline.stage.replay(track.conditions, segment, segment.sde_indices).logp
        row = pipeline.stage.replay(track.select([4]).conditions, segment.select([4]), segment.sde_indices).logp
    assert torch.equal(together, segment.logp) and torch.equal(row, segment.logp[4:5])


def test_a_network_in_bf16_replays_its_rollout_to_rounding() -> None:
    """Attention in bf16 adds in another order for one query than for many; float32 is computed in float64."""
    pipeline = NextStepPipeline(NextStepBundle(path="toy", dtype="bf16"))
    track = roll(pipeline, guidance_scale=4.0)
    with torch.no_grad():
        replay = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices)
    assert (replay.logp - track.segment.logp).abs().max() < 0.01


def test_log_probs_are_means_over_latents_of_the_normal_density() -> None:
    pipeline = pipeline_of()
    track = roll(pipeline, guidance_scale=4.0)
    segment: LatentSegment = track.segment
    with torch.no_grad():
        replay = pipeline.stage.replay(track.conditions, segment, segment.sde_indices)
    for column, step in enumerate(segment.sde_indices):
        density = torch.distributions.Normal(replay.mean[:, column], replay.std[column])
        expected = density.log_prob(segment.latents_at(step + 1)).flatten(1).mean(1)
        assert torch.allclose(segment.logp[:, column], expected, atol=1e-5)


def test_a_token_depends_on_earlier_tokens_and_on_no_later_one() -> None:
    pipeline = pipeline_of()
    track = roll(pipeline)
    x, sigma = track.segment.latents_at(0), torch.full((len(track),), 0.7)
    finished = track.segment.final.clone()
    changed = finished.clone()
    changed[..., 2:4, 0:2] += 1.0  # token 2 of 4: the first of the second row
    v = [
        pipeline.stage.velocity(
            x, sigma, {**track.conditions, TOKENS: LatentCondition(latents=each)}, track.segment.guidance
        )
        for each in (finished, changed)
    ]
    same = [
        (a == b).all() for a, b in zip(*(pipeline.stage.denoiser.tokens(each).unbind(1) for each in v), strict=True)
    ]
    assert same == [True, True, True, False]


def test_the_noise_of_a_token_is_its_patch_of_the_keyed_noise() -> None:
    """From the stored states and the replayed velocity, the kernel's own noise comes back."""
    pipeline = pipeline_of()
    track = roll(pipeline)
    segment = track.segment
    with torch.no_grad():
        replay = pipeline.stage.replay(track.conditions, segment, segment.sde_indices)
    keyed = NoiseSource(segment.seed, "r", segment.step).normal(track.sample_ids, "s2", segment.final.shape[1:])
    noise = (segment.latents_at(3) - replay.mean[:, 1]) / replay.std[1]
    assert torch.allclose(noise, keyed, atol=1e-4)


def test_gradients_reach_decoder_projectors_and_head_and_nothing_that_no_image_runs() -> None:
    pipeline = fresh()
    track = roll(pipeline, guidance_scale=4.0)
    loss = pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices).logp.sum()
    still = {name for name, _ in pipeline.bundle.trainable().named_parameters()} - gradients_of(pipeline, loss)
    # A bias of all keys changes no attention weight.
    assert {name for name in still if not name.endswith("k_proj.bias")} == {"lm_head.weight"}


@pytest.mark.parametrize("algorithm", [DiffusionGRPO(kl_coef=0.1), DiffusionNFT(), DiffusionPPO()])
def test_losses_on_denoising_steps_apply_as_they_are(algorithm: StageAlgorithm[Any]) -> None:
    pipeline = fresh()
    if algorithm.needs.value:
        pipeline.stage.value_head = pipeline.stage.build_value_head(8, seed=0)
    track = roll(pipeline, guidance_scale=1.0)
    track = track.replace(advantages=torch.tensor([1.0, -1.0] * 3), rewards=torch.tensor([1.0, 0.0] * 3))
    check_algorithm(algorithm, pipeline.stage, track)
    track = moved_away(prepared_track(algorithm, pipeline.stage, track))
    loss = algorithm.loss(pipeline.stage, track, algorithm.parts(track.segment)[0]).loss
    moved = gradients_of(pipeline, loss)
    assert any("layers.0.self_attn" in name for name in moved) and any("res_blocks.0" in name for name in moved)


def gradients_of(pipeline: NextStepPipeline, loss: Tensor) -> set[str]:
    """The names of the parameters with a gradient."""
    loss.backward()
    parameters = pipeline.bundle.trainable().named_parameters()
    return {name for name, p in parameters if p.grad is not None and bool(p.grad.abs().sum() > 0)}


# --- files -----------------------------------------------------------------------------------------------------------


def moved(pipeline: NextStepPipeline, names: str = "") -> NextStepPipeline:
    """The same pipeline with other weights, in the parameters whose names contain `names`."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in pipeline.bundle.trainable().named_parameters():
            if names in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return pipeline


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[NextStepPipeline, Path]:
    """A pipeline with weights of its own, and the model that it wrote."""
    pipeline = moved(fresh())
    folder = tmp_path_factory.mktemp("model")
    return pipeline, pipeline.write_model(pipeline.bundle.trainable().state_dict(), folder)


def test_a_written_model_has_published_names_and_loads_into_a_second_network(
    written: tuple[NextStepPipeline, Path],
) -> None:
    from safetensors.torch import load_file

    pipeline, folder = written
    names = load_file(folder / "model.safetensors").keys()
    assert {"embed_tokens.weight", "layers.1.self_attn.q_proj.bias", "norm.weight", "lm_head.weight"} < names
    assert {"image_in_projector.bias", "image_out_projector.weight"} < names
    assert {"image_head.net.res_blocks.1.adaLN_modulation.1.bias", "image_head.net.time_embed.mlp.2.weight"} < names
    assert pipeline.verify_model(folder, TEXTS, euler(pipeline, 3.0)) == 0.0
    other = fresh(str(folder))
    assert torch.equal(roll(other).segment.latents, roll(pipeline).segment.latents)
    assert torch.equal(roll(other).decoded.pixels, roll(pipeline).decoded.pixels)
    assert other.facts == pipeline.facts == NextStepBundle.facts_of(str(folder))


@pytest.mark.parametrize("meta_init", [False, True])
def test_weights_are_read_row_by_row_from_files_that_also_hold_computed_positions(
    written: tuple[NextStepPipeline, Path], tmp_path: Path, meta_init: bool
) -> None:
    from safetensors.torch import load_file, save_file

    pipeline, folder = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "gen_pos_embed": torch.zeros(1, 16, 32)}, tmp_path / "model.safetensors")
    bundle = NextStepBundle(components=(), path=str(tmp_path), dtype="fp32", meta_init=meta_init)
    assert next(bundle.trainable().parameters()).is_meta == meta_init
    backend = FSDPBackend(bundle, optimizer_cfg=OptimizerConfig(learning_rate=1e-2))
    gathered = backend.gather()
    expected = dict(pipeline.bundle.trainable().named_parameters())
    assert gathered and all(torch.equal(tensor, expected[name]) for name, tensor in gathered.items())


def test_an_adapter_is_loaded_by_peft_and_starts_another_run(tmp_path: Path) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    pipeline = fresh()
    targets = pipeline.facts.lora_targets
    inject_adapter_in_model(
        PeftConfig(r=4, lora_alpha=6.0, target_modules=list(targets)), pipeline.bundle.trainable(), "default"
    )
    moved(pipeline, ".lora_")
    named = {name: p.detach() for name, p in pipeline.bundle.trainable().named_parameters() if ".lora_" in name}
    adapter = Adapter.from_named(named, rank=4, alpha=6.0, target_modules=targets)
    pipeline.write_lora(tmp_path, adapter)
    params = euler(pipeline, 3.0)
    assert pipeline.verify_lora(tmp_path, TEXTS, params) < 1e-4
    untrained = pipeline.difference(pipeline.bundle.untrained(), TEXTS, params)
    assert untrained > 1e-2, "the adapter must have an effect"
    assert pipeline.bundle.read_adapter(str(tmp_path)).keys() == adapter.layers.keys()


# --- the published model ---------------------------------------------------------------------------------------------


def test_the_published_model_has_14_billion_parameters_and_a_head_of_157_million() -> None:
    estimate = NextStepBundle.estimate(LARGE)
    head = sum(i * o + o for name, (i, o) in estimate.linears.items() if name.startswith("image_head."))
    assert round(head / 1e6) == 157  # arXiv:2508.10711; its layer norms have 37 thousand more
    assert 14.9e9 < estimate.parameters["lm"] < 15.0e9
    assert estimate.facts.image_seq_len(dataclasses.replace(euler(pipeline_of(), 1.0), height=512, width=512)) == 1024
    assert (estimate.num_blocks, estimate.width) == (48, 5120)


def test_the_estimate_counts_the_toy() -> None:
    counted = {name: sum(p.numel() for p in m.parameters()) for name, m in pipeline_of().bundle.modules.items()}
    assert NextStepBundle.estimate("toy").parameters == counted


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("toy", {"height": 40}, r"sampling.height=40 is not a positive multiple of 16 .* of nextstep1\)\. Use 32"),
        ("toy", {"num_frames": 5}, "sampling.num_frames=5: nextstep1 generates images"),
        ("toy", {"guidance_scale_2": 3.0}, "sampling.guidance_scale_2=3 is for models with two experts"),
        ("toy-positions", {"width": 80}, "sampling.width=80: nextstep1 has positions for 64 pixels. Use 64 or less"),
    ],
)
def test_sizes_and_guidance_that_do_not_fit_are_refused(path: str, changes: Any, message: str) -> None:
    params = dataclasses.replace(DiffusionSamplingParams(kernel=EulerODE(), height=32, width=32), **changes)
    with pytest.raises(ValueError, match=message):
        NextStepBundle.facts_of(path).check(params)


def test_a_bundle_without_a_vae_cannot_decode_and_says_so() -> None:
    with pytest.raises(ValueError, match="this bundle was built without vae, so it cannot decode latents"):
        NextStepPipeline(NextStepBundle(components=(), path="toy", dtype="fp32"))


def test_step_caches_differentiated_steps_and_condition_images_are_refused() -> None:
    pipeline = pipeline_of()
    params = euler(pipeline, 1.0)
    noise, ids = NoiseSource(0, "r", 0), ["a"]
    inputs = (pipeline.encode(["x"], params), pipeline.initial_noise(noise, ids, params))
    with pytest.raises(IncompatibleError, match=r"sampling.cache_threshold=0\.1 reuses blocks"):
        pipeline.stage.sample(*inputs, dataclasses.replace(params, cache_threshold=0.1), noise, ids)
    with pytest.raises(IncompatibleError, match="samples its image tokens one after another"):
        pipeline.stage.sample(*inputs, params, noise, ids, GradientMask(steps=(0,)))
    with pytest.raises(DataError, match="nextstep1 takes no condition images"):
        pipeline.encode(["x"], params, images=[])
    with pytest.raises(ValueError, match="give the condition 'tokens'"):
        pipeline.stage.velocity(inputs[1], torch.ones(1), inputs[0], pipeline.facts.guidance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2', but NextStepBundle reads 'nextstep'"),
        ({"o_attention_bias": True}, "o_attention_bias=True, but NextStepBundle reads False"),
        ({"fm_head_layers": 3}, "tensors of NextStep are missing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    written: tuple[NextStepPipeline, Path], tmp_path: Path, change: Any, message: str
) -> None:
    shutil.copytree(written[1], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotFoundError, match=message):
        fresh(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("vae/diffusion_pytorch_model.safetensors", r"cannot read the VAE in .*vae: .*Download it again"),
        ("vae/config.json", "vae/config.json is missing"),
        ("model.safetensors", "there is no model.safetensors"),
        ("tokenizer.json", "cannot load the tokenizer"),
    ],
)
def test_missing_files_are_named(
    written: tuple[NextStepPipeline, Path], tmp_path: Path, file: str, message: str
) -> None:
    shutil.copytree(written[1], tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink()
    with pytest.raises(NotFoundError, match=message):
        fresh(str(tmp_path))


def test_a_tokenizer_without_the_mark_of_an_images_area_is_refused(
    written: tuple[NextStepPipeline, Path], tmp_path: Path
) -> None:
    from unirl.models.loading.toy_tokenizers import qwen_tokenizer

    shutil.copytree(written[1], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*token*"):
        path.unlink()
    qwen_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NotFoundError, match=r"has no token <\|image_area\|>"):
        fresh(str(tmp_path))


def test_an_unknown_component_is_refused() -> None:
    with pytest.raises(ValueError, match="the checkpoint has no component 'text_encoder'; it has lm, vae"):
        NextStepBundle(components=("text_encoder",), path="toy", dtype="fp32")
