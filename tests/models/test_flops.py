"""The counts that plans are made of equal what torch's counters see in the networks."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.family_cases import CASES, built
from unirl.models.denoising.vae import IMAGE
from unirl.models.loading.estimate import AllocationCounter, Lengths, decoding_cost, forward_flops
from unirl.models.qwen3.family import Qwen3Bundle
from unirl.models.qwen_image.family import QwenImageBundle
from unirl.models.sd3.family import SD3Bundle
from unirl.types.sampling import DiffusionSamplingParams

EXACT = [case for case in CASES if case.name not in ("hunyuan_video15", "lumina2")]
"""HunyuanVideo 1.5 reads further tokens of ByT5; a part of Lumina2 runs on padding, another part does not."""
Z_IMAGE_MULTIPLE = 32
"""Z-Image pads the tokens of the sample and of the prompt to multiples of this."""


def counted(work):
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def lengths_of(case, facts, conditions, pixels):
    """The tokens that the network reads for each row."""
    text, image = conditions["text"], pixels // facts.patch_size**2
    if case.name == "z_image":
        return Lengths(*(-(-tokens // Z_IMAGE_MULTIPLE) * Z_IMAGE_MULTIPLE for tokens in (image, text.embeds.shape[1])))
    references = conditions[IMAGE].latents.shape[1] if facts.reference_tokens else 0
    vision = conditions["vision"].embeds.shape[1] if "vision" in conditions else 0
    return Lengths(image * (1 + references), text.embeds.shape[1], vision)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_the_formula_counts_what_a_forward_pass_of_the_family_computes(case):
    pipeline = built(case)
    facts, inputs = pipeline.facts, pipeline.canary_inputs()
    layers = type(pipeline.bundle).estimate(case.path).layers()
    conditions = facts.guidance.feeds(inputs.conditions)[0]
    lengths = lengths_of(case, facts, conditions, inputs.x[0, 0].numel())
    total = counted(lambda: pipeline.stage.denoiser.velocity(inputs.x, inputs.sigma, conditions))
    # The first and the last layer of Z-Image do not see its padding.
    tolerance = 0.01 if case.name == "z_image" else 0.0
    assert total == pytest.approx(len(inputs.x) * sum(forward_flops(layers, lengths)), rel=tolerance, abs=0)


def test_the_formula_counts_a_language_model_whose_attention_it_halves():
    estimate = Qwen3Bundle.estimate("toy")
    network = Qwen3Bundle(path="toy", dtype="fp32").untrained()
    tokens = 12
    total = counted(lambda: network(torch.arange(2 * tokens).view(2, tokens) + 5, use_cache=False))
    matrices, attention = forward_flops(estimate.layers(), Lengths(0, tokens, causal=True))
    assert total == 2 * (matrices + 2 * attention)


def test_adapters_add_two_thin_matrices_to_their_layers():
    estimate = SD3Bundle.estimate("toy")
    lengths, rank = Lengths(1, 1), 4
    plain, adapted = (sum(forward_flops(estimate.layers(), lengths, each)) for each in (0, rank))
    assert adapted - plain == 2 * estimate.lora_parameters(rank)


@pytest.mark.parametrize(
    ("bundle", "path", "side", "text", "teraflops"),
    [
        (SD3Bundle, "stabilityai/stable-diffusion-3.5-medium", 512, 333, 2.44),
        (QwenImageBundle, "Qwen/Qwen-Image", 384, 512, 15.9),
        (QwenImageBundle, "Qwen/Qwen-Image", 384, 64, 70.7 / 8),
    ],
)
def test_the_published_networks_cost_what_the_counter_saw_in_them(bundle, path, side, text, teraflops):
    """Counted with torch's FlopCounterMode on the whole networks: TFLOP of a forward pass of one row."""
    estimate = bundle.estimate(path)
    tokens = estimate.facts.image_seq_len(DiffusionSamplingParams(kernel=None, height=side, width=side))
    total = sum(forward_flops(estimate.layers(), Lengths(tokens, text)))
    assert total / 1e12 == pytest.approx(teraflops, rel=0.06)


def test_the_counter_of_allocations_sees_what_is_alive_at_one_time():
    """The first layer's input and output, then its output and that of the second: 8 and 12 numbers; then 4 + 8."""
    network = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    with torch.no_grad(), AllocationCounter() as memory:
        x = torch.zeros(1, 4)
        y = network[0](x)
        del x
        z = network[1](y)
        del y
    assert memory.peak == 4 * max(4 + 8, 8 + 4)
    assert memory.now == 4 * z.numel()


@pytest.mark.parametrize(
    ("bundle", "path", "side", "gib"),
    [
        (SD3Bundle, "stabilityai/stable-diffusion-3.5-medium", 1024, 24 / 8),
        (QwenImageBundle, "Qwen/Qwen-Image", 1024, 54 / 16),
    ],
)
def test_the_decoder_of_a_published_model_needs_gigabytes_for_one_image(bundle, path, side, gib):
    """By hand, SD3: the widest pair of layers at full size has 256 + 256 channels in and out, and a norm's copy.

    The VAE of Qwen-Image computes in bf16.
    """
    sampling = DiffusionSamplingParams(kernel=None, height=side, width=side)
    cost = bundle.family.decoding(path, sampling, dtype=bundle.family.vae_dtype("auto", "bf16"))
    assert cost.peak_bytes / 2**30 == pytest.approx(gib, rel=0.02)


VIDEO_TILES = {
    "tile_sample_min_height": 32,
    "tile_sample_min_width": 32,
    "tile_sample_stride_height": 24,
    "tile_sample_stride_width": 24,
}
DECODERS = {
    # family: latents, settings of the VAE. Some tiles, and some frames of wan21, have the shapes of earlier ones.
    "sd3": ((1, 4, 8, 5), {}),
    "flux2_klein": ((1, 4, 8, 5), {}),
    "qwen_image": ((1, 4, 1, 8, 5), VIDEO_TILES),
    "wan21": ((1, 4, 4, 7, 3), VIDEO_TILES),
    "hunyuan_video": (
        (1, 4, 8, 7, 3),
        {**VIDEO_TILES, "tile_sample_min_num_frames": 16, "tile_sample_stride_num_frames": 12},
    ),
    "hunyuan_video15": ((1, 4, 3, 7, 3), {"tile_latent_min_height": 4, "tile_latent_min_width": 4}),
}
CHEAP = [("sd3", True), ("wan21", False)]
"""The cases of the fast tier: tiles, and frames that leave something for the next one."""


def decoder_of(name, tiled):
    case = next(case for case in CASES if case.name == name)
    family = case.classes()[0].family
    with torch.device("meta"):
        vae = family.build(family.configs(case.path), "vae")
    for key, value in DECODERS[name][1].items():
        assert hasattr(vae, key)
        setattr(vae, key, value)
    vae.use_tiling = tiled
    return vae.eval()


@pytest.mark.parametrize(
    ("name", "tiled"),
    [
        pytest.param(name, tiled, marks=[] if (name, tiled) in CHEAP else pytest.mark.slow)
        for name in DECODERS
        for tiled in (False, True)
    ],
)
def test_tiles_and_frames_that_are_counted_once_cost_as_much_as_all_of_them(name, tiled):
    latents = DECODERS[name][0]
    vae = decoder_of(name, tiled)
    with torch.no_grad(), AllocationCounter() as memory, FlopCounterMode(display=False) as counter:
        vae.decode(torch.empty(latents, device="meta"), return_dict=False)
    cost = decoding_cost(decoder_of(name, tiled), latents)
    assert cost.flops == counter.get_total_flops()
    assert cost.peak_bytes == memory.peak
    assert cost.made_bytes == memory.made


def test_tiles_of_one_size_are_run_once():
    """Two columns of two whole tiles each, then the smaller ones at the right, at the bottom, and in the corner."""
    vae, runs = decoder_of("wan21", True), []
    forward = vae.decoder.forward
    vae.decoder.forward = lambda x, **kwargs: runs.append(tuple(x.shape[-2:])) or forward(x, **kwargs)
    decoding_cost(vae, (1, 4, 1, 7, 7))
    assert sorted(runs) == [(1, 1), (1, 4), (4, 1), (4, 4)]
