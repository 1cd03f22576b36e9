"""Janus-Pro: tokens, guidance, log-probs, images and exports against transformers' own Janus with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.config.errors import ConfigError, DataError, NotFoundError
from unirl.models.janus_pro.family import BEGIN_OF_IMAGE, JanusProBundle, JanusProPipeline
from unirl.models.language import decoding
from unirl.models.language.decoding import LookAhead
from unirl.models.language.image_tokens import UNCONDITIONAL
from unirl.models.language.policy import Outputs, TokenInputs
from unirl.models.loading.adapter_files import Adapter
from unirl.models.loading.hub import quiet_libraries
from unirl.models.loading.lora import inject_lora
from unirl.sde.noise import NoiseSource
from unirl.types.facts import LoraSpec
from unirl.types.primitives import Images, Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ImageTokenSamplingParams
from unirl.types.segments import ImageTokenSegment

TEXTS = ("a cat", "two red circles on a table", "x" * 40)
PARAMS = ImageTokenSamplingParams(max_new_tokens=16, height=32, width=32, max_prompt_tokens=100, guidance_scale=5.0)
BOS, PAD, BOI = 256, 258, 259
CODEBOOK = 64
SCALES = (0.0, 1.0, 5.0)


@pytest.fixture(scope="module")
def pipeline() -> JanusProPipeline:
    return JanusProPipeline(JanusProBundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="module")
def plain(pipeline: JanusProPipeline) -> Any:
    """transformers' own network."""
    return with_generation_config(pipeline.bundle.untrained())


def with_generation_config(network: Any) -> Any:
    """The settings that generation_config.json of a published model has."""
    network.generation_config.update(bos_token_id=BOS, pad_token_id=PAD, eos_token_id=257)
    network.generation_config.generation_kwargs = {"boi_token_id": BOI}
    return network


def request(params: ImageTokenSamplingParams, texts: Sequence[str] = TEXTS, siblings: int = 2) -> RolloutReq:
    groups = [f"p{i}@0" for i in range(len(texts))]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=list(texts))},
        metadata=[{} for _ in texts],
        tracks={"image": TrackSpec(sampling=params)},
        purpose="r",
        step=0,
    ).expand(siblings)


def rollout(
    pipeline: JanusProPipeline, params: ImageTokenSamplingParams = PARAMS, slots: int = 4, **asked: Any
) -> RolloutTrack[ImageTokenSegment]:
    with torch.no_grad():
        resp = pipeline.generate(request(params, **asked), slots)
    return resp.tracks["image"].sampled_as(ImageTokenSegment)


def text_ids(pipeline: JanusProPipeline, text: str) -> list[int]:
    """The prompt of an image as token ids of transformers."""
    chat = f"<|User|>: {text}\n\n<|Assistant|>:"
    return pipeline.bundle.codec.tokenizer(chat + BEGIN_OF_IMAGE).input_ids


def textbook_logits(plain: Any, ids: Sequence[int], tokens: Tensor, scale: float) -> Tensor:
    """[L, K] guided logits before each image token: both branches as a batch of two, transformers' own guidance."""
    from transformers import ClassifierFreeGuidanceLogitsProcessor

    prompt = torch.tensor(ids)
    branches = torch.stack([prompt, prompt.masked_fill((prompt != BOS) & (prompt != BOI), PAD)])
    text = plain.get_input_embeddings()(branches)
    image = plain.prepare_embeddings_for_image_generation(tokens[:-1])[None].expand(2, -1, -1)
    states = plain.model.language_model(inputs_embeds=torch.cat([text, image], 1), use_cache=False)
    logits = plain.model.generation_head(states.last_hidden_state[:, len(ids) - 1 :])
    if scale <= 1:  # the class of transformers refuses these
        return logits[1] + scale * (logits[0] - logits[1])
    guided: Tensor = ClassifierFreeGuidanceLogitsProcessor(scale)(tokens, logits.flatten(0, 1))
    return guided


def textbook_logp(plain: Any, pipeline: JanusProPipeline, track: RolloutTrack[ImageTokenSegment]) -> Tensor:
    """[sum L] the log-probs of recorded tokens, one image at a time."""
    result = []
    for text, tokens in zip(track.prompts, images_of(track), strict=True):
        logits = textbook_logits(plain, text_ids(pipeline, text), tokens, track.segment.guidance_scale)
        logps = (logits / track.segment.temperature).log_softmax(1)
        result.append(logps.gather(1, tokens[:, None])[:, 0])
    return torch.cat(result)


def images_of(track: RolloutTrack[ImageTokenSegment]) -> tuple[Tensor, ...]:
    return track.segment.tokens.split(track.segment.lengths.tolist())


def assert_same(found: RolloutTrack[Any], wanted: RolloutTrack[Any]) -> None:
    """Bit for bit."""
    assert torch.equal(found.segment.tokens, wanted.segment.tokens)
    assert torch.equal(found.segment.logp, wanted.segment.logp)
    assert isinstance(found.decoded, Images) and isinstance(wanted.decoded, Images)
    assert torch.equal(found.decoded.pixels, wanted.decoded.pixels)


# Prompts


def test_a_prompt_is_what_the_processor_of_transformers_makes_of_it(pipeline: JanusProPipeline) -> None:
    from transformers import JanusProcessor
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    tokenizer = pipeline.bundle.codec.tokenizer
    processor = JanusProcessor(JanusImageProcessorPil(), tokenizer, chat_template=None)
    for text in TEXTS:
        chat = f"<|User|>: {text}\n\n<|Assistant|>:"
        wanted = processor(text=chat, generation_mode="image", return_tensors=None).input_ids[0]
        result = [token - CODEBOOK for token in pipeline.prompt(f" {text}\n")]
        assert result == wanted and (result[0], result[-1]) == (BOS, BOI)


def test_an_unconditional_prompt_keeps_only_the_first_and_the_last_token(pipeline: JanusProPipeline) -> None:
    prompt = pipeline.prompt("a cat")
    rest = [CODEBOOK + PAD] * (len(prompt) - 2)
    assert pipeline.unconditional(prompt) == [CODEBOOK + BOS, *rest, CODEBOOK + BOI]


def test_a_prompt_that_is_too_long_is_refused_by_id_and_length(pipeline: JanusProPipeline) -> None:
    length = len(pipeline.prompt(TEXTS[2]))
    with pytest.raises(DataError, match=rf"prompt p2@0 is {length} tokens long.*max_prompt_tokens is {length - 1}"):
        rollout(pipeline, replace(PARAMS, max_prompt_tokens=length - 1))


# Sampling


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_greedy_decoding_gives_the_image_tokens_of_generate(
    pipeline: JanusProPipeline, plain: Any, scale: float
) -> None:
    track = rollout(pipeline, replace(PARAMS, temperature=0.0, guidance_scale=scale), siblings=1)
    for text, tokens in zip(TEXTS, images_of(track), strict=True):
        ids = torch.tensor([text_ids(pipeline, text)])
        with quiet_libraries():
            wanted = plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_mode="image",
                do_sample=False,
                guidance_scale=scale + 1e-12,  # the library fails at 1
                max_length=200,
            )
        assert tokens.tolist() == wanted[0].tolist()
    assert len({tuple(tokens.tolist()) for tokens in images_of(track)}) == len(TEXTS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_a_sample_are_those_of_guided_tempered_logits(
    pipeline: JanusProPipeline, plain: Any, scale: float, temperature: float
) -> None:
    track = rollout(pipeline, replace(PARAMS, guidance_scale=scale, temperature=temperature, top_k=20))
    with torch.no_grad():
        wanted = textbook_logp(plain, pipeline, track)
    assert torch.allclose(track.segment.logp, wanted, atol=1e-5)


def test_each_token_is_the_inverse_cdf_of_its_own_draw(pipeline: JanusProPipeline, plain: Any) -> None:
    track = rollout(pipeline)
    uniforms = NoiseSource(PARAMS.seed, "r", 0).uniform(track.sample_ids, "tok", (16,)).double()
    for u, text, tokens in zip(uniforms, track.prompts, images_of(track), strict=True):
        with torch.no_grad():
            logits = textbook_logits(plain, text_ids(pipeline, text), tokens, 5.0)
        running = torch.cat([torch.zeros(16, 1), logits.double().softmax(1).cumsum(1)], 1)
        lower, upper = (running.gather(1, tokens[:, None] + i)[:, 0] for i in (0, 1))
        assert bool(((lower - 1e-5 <= u) & (u <= upper + 1e-5)).all())


@pytest.mark.parametrize("scale", SCALES)
def test_slots_order_neighbours_and_decoded_chunks_change_no_bit(pipeline: JanusProPipeline, scale: float) -> None:
    params = replace(PARAMS, guidance_scale=scale)
    whole = rollout(pipeline, params, 6)
    for slots in (1, 2, 3, 5, 64):
        assert_same(rollout(pipeline, params, slots), whole)
    order = [4, 0, 5]
    with torch.no_grad():
        some = pipeline.generate(request(params).select(order), 2).tracks["image"]
    assert_same(some, whole.select(order))
    other = JanusProPipeline(pipeline.bundle, decode_batch_size=12)
    assert_same(rollout(other, params), whole)


@pytest.mark.parametrize("ahead", [LookAhead(8, 1), LookAhead(3, 2)])
def test_sampling_ahead_of_the_host_changes_no_bit(
    pipeline: JanusProPipeline, monkeypatch: pytest.MonkeyPatch, ahead: LookAhead
) -> None:
    """As on an accelerator."""
    whole = rollout(pipeline)
    monkeypatch.setattr(decoding, "look_ahead", lambda device, builder: ahead)
    assert_same(rollout(pipeline, slots=2), whole)


def counted_tokens(pipeline: JanusProPipeline, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every forward from now on."""
    counts: list[int] = []
    forward = pipeline.stage._forward

    def counting(inputs: TokenInputs) -> Outputs:
        counts.append(len(inputs.tokens))
        return forward(inputs)

    monkeypatch.setattr(pipeline.stage, "_forward", counting)
    return counts


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_branches_stay_together_where_forwards_are_not_padded(
    pipeline: JanusProPipeline, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """As on an accelerator, where bits may differ."""
    whole = rollout(pipeline)
    monkeypatch.setattr(pipeline.stage, "facts", replace(pipeline.facts, batch_multiple=1))
    monkeypatch.setattr(decoding, "look_ahead", lambda device, builder: LookAhead(3, 1))
    result = rollout(pipeline, slots=slots)
    assert torch.equal(result.segment.tokens, whole.segment.tokens)
    assert torch.allclose(result.segment.logp, whole.segment.logp, atol=1e-4)


def test_without_guidance_a_sample_is_one_row_and_with_guidance_two(
    pipeline: JanusProPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    forward = pipeline.stage._forward
    monkeypatch.setattr(
        pipeline.stage, "_forward", lambda inputs: (read.append(len(inputs.tokens)), forward(inputs))[1]
    )
    counts = []
    for scale in (1.0, 5.0):
        read.clear()
        track = rollout(pipeline, replace(PARAMS, guidance_scale=scale), 4, texts=TEXTS[:1], siblings=4)
        assert (UNCONDITIONAL in track.conditions) == (scale != 1)
        with torch.no_grad():
            pipeline.stage.replay(track.conditions, track.segment)
        counts.append((read[1:-1], read[-1]))
    (decoded, replayed), (guided_decoded, guided_replayed) = counts
    assert [2 * count for count in decoded] == guided_decoded and set(decoded) == {4}
    assert guided_replayed == 2 * replayed


def test_siblings_share_the_reading_of_both_of_their_prompts(
    pipeline: JanusProPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    forward = pipeline.stage._forward
    monkeypatch.setattr(
        pipeline.stage, "_forward", lambda inputs: (read.append(len(inputs.tokens)), forward(inputs))[1]
    )
    rollout(pipeline, slots=8, texts=TEXTS[:1], siblings=8)
    assert read[0] == -(-2 * len(pipeline.prompt(TEXTS[0])) // 4) * 4


# Replay


@pytest.mark.parametrize("scale", SCALES)
def test_replay_has_the_bits_of_the_rollout_however_rows_are_packed(pipeline: JanusProPipeline, scale: float) -> None:
    track = rollout(pipeline, replace(PARAMS, guidance_scale=scale, temperature=0.8))
    with torch.no_grad():
        together = pipeline.stage.replay(track.conditions, track.segment).logp
        alone = [pipeline.stage.replay(row.conditions, row.segment).logp for row in track.chunk(1)]
    assert torch.equal(together, track.segment.logp)
    assert torch.equal(torch.cat(alone), together)


def test_entropy_and_values_are_of_the_guided_distribution_and_the_conditional_state(
    pipeline: JanusProPipeline, plain: Any
) -> None:
    track = rollout(pipeline, texts=TEXTS[:2], siblings=1)
    stage = pipeline.stage
    stage.value_head = stage.build_value_head(8, seed=0)
    torch.nn.init.normal_(stage.value_head.output_layer.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        replay = stage.replay(track.conditions, track.segment, entropy=True, values="head")
        entropies, states = [], []
        for text, tokens in zip(track.prompts, images_of(track), strict=True):
            ids = text_ids(pipeline, text)
            logits = textbook_logits(plain, ids, tokens, 5.0)
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
            embeds = [plain.get_input_embeddings()(torch.tensor(ids))]
            embeds.append(plain.prepare_embeddings_for_image_generation(tokens[:-1]))
            output = plain.model.language_model(inputs_embeds=torch.cat(embeds)[None], use_cache=False)
            states.append(output.last_hidden_state[0, len(ids) - 1 :])
        assert replay.entropy is not None and torch.allclose(replay.entropy, torch.cat(entropies), atol=1e-4)
        assert replay.values is not None
        assert torch.allclose(replay.values, stage.value_head(torch.cat(states)), atol=1e-5)
    stage.value_head = None


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_gradients_are_those_of_transformers_and_reach_every_trained_tensor(
    pipeline: JanusProPipeline, scale: float
) -> None:
    track = rollout(pipeline, replace(PARAMS, guidance_scale=scale))
    weights = torch.linspace(-1, 1, len(track.segment.tokens))
    module, plain = pipeline.bundle.trainable(), pipeline.bundle.untrained().requires_grad_(True)
    logp = pipeline.stage.replay(track.conditions, track.segment).logp
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad((weights * logp).sum(), parameters)
    theirs = [plain.get_parameter(name) for name in names]
    wanted = torch.autograd.grad((weights * textbook_logp(plain, pipeline, track)).sum(), theirs)
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    for name, ours, other in zip(names, found, wanted, strict=True):
        assert float((ours - other).abs().max()) < 1e-4 * largest, name
        assert bool(ours.any()), f"no gradient reaches {name}"


@torch.no_grad()
def test_the_canary_changes_with_every_trained_tensor() -> None:
    pipeline = JanusProPipeline(JanusProBundle(path="toy", dtype="fp32"))
    inputs = pipeline.canary_inputs()
    before = pipeline.stage.canary(inputs).values
    assert before.shape[1] == CODEBOOK
    for name, parameter in pipeline.bundle.trainable().named_parameters():
        original = parameter.clone()
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        assert not torch.equal(pipeline.stage.canary(inputs).values, before), name
        parameter.copy_(original)


# Images


def test_images_are_those_of_transformers_decoder_rounded_once(pipeline: JanusProPipeline, plain: Any) -> None:
    track = rollout(pipeline)
    with torch.no_grad():
        decoded = plain.decode_image_tokens(track.segment.tokens.unflatten(0, (-1, 16))).permute(0, 3, 1, 2)
    wanted = ((decoded + 1) * 127.5).clamp(0, 255)
    assert isinstance(track.decoded, Images) and track.decoded.pixels.shape == (6, 3, 32, 32)
    assert float((track.decoded.pixels.float() - wanted).abs().max()) <= 0.5 + 1e-3
    assert float(track.decoded.pixels.float().std()) > 10


@pytest.mark.parametrize(("token", "count"), [(CODEBOOK, 16), (-1, 16), (3, 15)])
def test_tokens_that_are_no_image_of_the_model_are_refused(pipeline: JanusProPipeline, token: int, count: int) -> None:
    segment = rollout(pipeline, texts=TEXTS[:1], siblings=1).segment
    tokens = torch.cat([segment.tokens[: count - 1], torch.tensor([token])])
    other = segment.replace(
        tokens=tokens, logp=segment.logp[:count], loss_mask=segment.loss_mask[:count], offsets=torch.tensor([0, count])
    )
    with pytest.raises(DataError, match=r"sample 'a' has 1[56] image tokens between .* 16 tokens between 0 and 63"):
        pipeline.decoded(other, ["a"])


def test_an_image_is_always_finished_and_reports_no_length(pipeline: JanusProPipeline) -> None:
    segment = rollout(pipeline).segment
    assert bool(segment.finished.all()) and segment.statistics() == {"samples/tokens": 96.0}
    assert segment.facts() == [{}] * 6 and segment.costs().tolist() == [32] * 6  # type: ignore[union-attr]


# The checkpoint


def test_the_trained_module_has_no_tower_and_no_decoder_and_keeps_the_names_of_transformers(
    pipeline: JanusProPipeline, plain: Any
) -> None:
    trained, whole = pipeline.bundle.trainable().state_dict(), plain.state_dict()
    assert set(trained) < set(whole)
    parts = {name.split(".")[1] for name in trained}
    assert parts == {"language_model", "generation_embeddings", "generation_aligner", "generation_head"}
    frozen = pipeline.bundle.modules["vae"].state_dict()
    assert all(torch.equal(tensor, whole[f"model.vqmodel.{name}"]) for name, tensor in frozen.items())
    assert not any(name.startswith(("encoder.", "quant_conv.")) for name in frozen)
    assert not any(parameter.requires_grad for parameter in pipeline.bundle.modules["vae"].parameters())


def test_a_bundle_for_training_alone_has_no_decoder() -> None:
    assert set(JanusProBundle(path="toy", dtype="fp32", components=("lm",)).modules) == {"lm"}


@pytest.mark.parametrize(("name", "layers"), [("1B", 24), ("7B", 30)])
def test_a_public_model_is_planned_with_the_parameters_of_transformers_class(name: str, layers: int) -> None:
    from accelerate import init_empty_weights
    from transformers import JanusConfig, JanusForConditionalGeneration

    path = f"deepseek-community/Janus-Pro-{name}"
    estimate = JanusProBundle.estimate(path)
    with init_empty_weights(), quiet_libraries():
        plain = JanusForConditionalGeneration(JanusConfig(**JanusProBundle.published[path]))
    unused = [plain.lm_head, plain.model.vision_model, plain.model.aligner]
    unused += [plain.model.vqmodel.encoder, plain.model.vqmodel.quant_conv]
    counts = [sum(parameter.numel() for parameter in module.parameters()) for module in (plain, *unused)]
    assert sum(estimate.parameters.values()) == counts[0] - sum(counts[1:])
    assert estimate.num_blocks == layers
    assert JanusProBundle.facts_of(path).num_image_tokens == 576


def test_checkpoints_of_deepseek_s_own_code_are_refused_with_the_ones_to_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Use bundle\.path=deepseek-community/Janus-Pro-7B"):
        JanusProBundle.facts_of("deepseek-ai/Janus-Pro-7B")
    (tmp_path / "config.json").write_text('{"model_type": "multi_modality"}')
    with pytest.raises(NotFoundError, match="model_type='multi_modality'"):
        JanusProBundle.facts_of(str(tmp_path))


# Export


@pytest.fixture(scope="module")
def directory(pipeline: JanusProPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of transformers with the processor's files."""
    folder = pipeline.write_model({}, tmp_path_factory.mktemp("janus"))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "JanusImageProcessor"}')
    return folder


def perturbed(pipeline: JanusProPipeline) -> dict[str, Tensor]:
    """The trained parameters, after something like training."""
    generator = torch.Generator().manual_seed(0)
    trained = {n: p for n, p in pipeline.bundle.trainable().named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return {name: parameter.detach().clone() for name, parameter in trained.items()}


def test_transformers_loads_the_exported_model_and_draws_the_same_tokens(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, JanusForConditionalGeneration

    pipeline = JanusProPipeline(JanusProBundle(path=str(directory), dtype="fp32"))
    folder = pipeline.write_model(perturbed(pipeline), tmp_path / "out")
    assert pipeline.verify_model(folder, TEXTS, PARAMS) < 1e-4
    with quiet_libraries():
        loaded = with_generation_config(JanusForConditionalGeneration.from_pretrained(folder)).eval()
    assert (folder / "preprocessor_config.json").read_text() == (directory / "preprocessor_config.json").read_text()
    assert AutoTokenizer.from_pretrained(folder).boi_token == BEGIN_OF_IMAGE
    greedy = replace(PARAMS, temperature=0.0)
    track = rollout(pipeline, greedy, texts=TEXTS[:1], siblings=1)
    ids = torch.tensor([text_ids(pipeline, TEXTS[0])])
    options = {"generation_mode": "image", "do_sample": False, "guidance_scale": 5.0, "max_length": 200}
    with quiet_libraries():
        tokens = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert tokens[0].tolist() == track.segment.tokens.tolist()
    tower = loaded.model.vision_model.state_dict()
    untouched = pipeline.bundle.untrained().model.vision_model.state_dict()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in tower.items())
    again = JanusProPipeline(JanusProBundle(path=str(folder), dtype="fp32"))
    assert_same(rollout(again), rollout(pipeline))


def test_the_check_of_an_export_detects_another_weight(directory: Path, tmp_path: Path) -> None:
    pipeline = JanusProPipeline(JanusProBundle(path=str(directory), dtype="fp32"))
    tensors = perturbed(pipeline)
    tensors["model.generation_head.vision_head.bias"][0] += 1.0
    assert pipeline.verify_model(pipeline.write_model(tensors, tmp_path), TEXTS, PARAMS) > 1e-3


def test_peft_loads_the_exported_adapter_on_the_language_model_alone(directory: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    pipeline = JanusProPipeline(JanusProBundle(path=str(directory), dtype="fp32"))
    spec = LoraSpec(rank=4, alpha=8.0, targets=pipeline.facts.lora_targets)
    inject_lora(pipeline.bundle.trainable(), spec, seed=0)
    adapter = Adapter.from_named(perturbed(pipeline), rank=4, alpha=8.0, target_modules=spec.targets)
    pipeline.write_lora(tmp_path, adapter)
    assert pipeline.verify_lora(tmp_path, TEXTS, replace(PARAMS, temperature=0.8)) < 1e-4
    with quiet_libraries(), pytest.warns(FutureWarning):
        loaded = PeftModel.from_pretrained(pipeline.bundle.untrained(), str(tmp_path))
    adapted = {name for name, _ in loaded.named_modules() if name.endswith("lora_A.default")}
    assert len(adapted) == 8 and all(".language_model." in name for name in adapted)
    read = pipeline.bundle.read_adapter(str(tmp_path))
    assert len(read) == 8, "a run may start from the file"
    merged = adapter.merged_into(pipeline.bundle.untrained().state_dict())
    assert pipeline.verify_model(pipeline.write_model(merged, tmp_path / "full"), TEXTS, PARAMS) < 1e-4


def test_a_tokenizer_without_begin_of_image_is_refused(directory: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(directory, tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "model" / file
        path.write_text(path.read_text().replace(BEGIN_OF_IMAGE, "<another>"))
    with pytest.raises(NotFoundError, match="has no <begin_of_image>"):
        JanusProBundle(path=str(tmp_path / "model"), dtype="fp32")
