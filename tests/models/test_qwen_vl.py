"""Qwen-VL has the inputs, log-probs and greedy responses of transformers."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from unirl.config.errors import ConfigError, DataError
from unirl.models.loading.lora import adapter_names, choose_targets, inject_lora
from unirl.models.qwen_vl.family import QwenVLBundle, QwenVLPipeline
from unirl.models.qwen_vl.vision import IMAGE_TOKEN, split_images
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions
from unirl.types.facts import LoraSpec
from unirl.types.primitives import MediaRef, PromptImages, Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

FAMILIES = {"toy": "Qwen3VLProcessor", "toy-qwen2.5": "Qwen2_5_VLProcessor"}
SIZES = ((40, 30), (20, 50), (33, 31), (64, 16))
ROWS = [("hi", ()), ("what is it?", (0,)), ("two", (1, 2)), ("<image> or <image>?", (0, 3)), ("wide?", (3,))]
"""Prompts and their images: none, one, several, at marks; all of different lengths."""


@pytest.fixture(scope="module", params=FAMILIES)
def path(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pipeline(path) -> QwenVLPipeline:
    return QwenVLPipeline(QwenVLBundle(path=path, dtype="fp32"))


@pytest.fixture(scope="module")
def plain(pipeline) -> Any:
    """transformers' own network with the same weights."""
    return pipeline.bundle.untrained()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    files = []
    for number, (width, height) in enumerate(SIZES):
        picture = Image.new("RGB", (width, height), (40 * number, 90, 200 - 30 * number))
        ImageDraw.Draw(picture).ellipse((3, 3, width - 5, height - 4), fill=(250, 30 + 50 * number, 20))
        picture.save(folder / f"{number}.png")
        files.append(folder / f"{number}.png")
    return files


def request(pictures: list[Path], rows=ROWS) -> RolloutReq:
    ids = [f"{text}:{i}" for i, (text, _) in enumerate(rows)]
    refs = [tuple(MediaRef("image", "condition", str(pictures[i])) for i in chosen) for _, chosen in rows]
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[text for text, _ in rows]), "images": PromptImages(per_prompt=refs)},
        metadata=[{} for _ in rows],
        tracks={},
        purpose="r",
        step=0,
    )


def params(**changes) -> ARSamplingParams:
    return ARSamplingParams(**({"max_new_tokens": 7, "max_prompt_tokens": 200} | changes))


def encoded(pipeline: QwenVLPipeline, pictures: list[Path], rows=ROWS) -> Conditions:
    return pipeline.encode(request(pictures, rows), params())


def sampled(pipeline: QwenVLPipeline, pictures: list[Path], rows=ROWS, slots: int = 8, **changes):
    conditions = encoded(pipeline, pictures, rows)
    ids = [text + str(chosen) for text, chosen in rows]
    with torch.no_grad():
        segment = pipeline.stage.sample(conditions, params(**changes), NoiseSource(7, "r", 0), ids, slots)
    return conditions, segment


def processed(pipeline: QwenVLPipeline, path: str, pictures: list[Path], row) -> dict[str, Tensor]:
    """The inputs of one prompt by the real processor, which asks for a video processor that needs torchvision."""
    import transformers

    kind = getattr(transformers, FAMILIES[path])

    class Processor(kind):
        def check_argument_for_proper_class(self, name, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    tokenizer = pipeline.bundle.codec.tokenizer
    processor = Processor(
        image_processor=pipeline.bundle.image_processor,
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=tokenizer.chat_template,
    )
    text, chosen = row
    parts = text.split("<image>") if "<image>" in text else [*[""] * len(chosen), text]
    content: list[dict[str, str]] = [{"type": "text", "text": parts[0]}] if parts[0] else []
    for part in parts[1:]:
        content += [{"type": "image"}, *([{"type": "text", "text": part}] if part else [])]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(pictures[i]).convert("RGB") for i in chosen]
    return dict(processor(text=[chat], images=images or None, return_tensors="pt"))


def rows_of(packed: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(packed.split(offsets.diff().tolist()))


def plain_logp(plain: Any, inputs: dict[str, Tensor], response: Tensor) -> Tensor:
    """[L] log-probs of a response by transformers' own forward."""
    inputs = dict(inputs)
    prompt = inputs["input_ids"]
    inputs["input_ids"] = torch.cat([prompt, response[None]], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(response)))
    plain.model.rope_deltas = None
    logits = plain(**inputs).logits[0, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


# Inputs


def test_tokens_patches_and_positions_are_those_of_the_real_processor(pipeline, path, plain, pictures) -> None:
    conditions = encoded(pipeline, pictures)
    prompts, images = conditions["prompt"], conditions["images"]
    network = pipeline.bundle.trainable()
    tokens, positions = rows_of(prompts.tokens, prompts.offsets), rows_of(prompts.positions, prompts.offsets)
    patches = rows_of(images.patches, images.offsets)
    for i, row in enumerate(ROWS):
        inputs = processed(pipeline, path, pictures, row)
        ids = inputs["input_ids"][0]
        assert torch.equal(tokens[i].masked_fill(tokens[i] == IMAGE_TOKEN, pipeline.bundle.image_token), ids)
        places, deltas = plain.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        )
        assert torch.equal(positions[i], places[:, 0].T)
        assert prompts.next_position[i] == len(ids) + deltas[0, 0]
        if row[1]:
            assert [list(grid) for grid in images.grids[i]] == inputs["image_grid_thw"].tolist()
            torch.testing.assert_close(network.normalizer(patches[i], 2), inputs["pixel_values"], rtol=0, atol=2e-6)
    assert patches[0].shape == (0, 48) and images.patches.dtype == torch.uint8


def test_equal_prompts_are_encoded_once(pipeline, pictures, monkeypatch) -> None:
    opened = []
    read = pipeline.patcher.read
    monkeypatch.setattr(pipeline.patcher, "read", lambda file: opened.append(file) or read(file))
    conditions = encoded(pipeline, pictures, [ROWS[1]] * 3 + [ROWS[2]])
    assert len(opened) == 3
    patches = rows_of(conditions["images"].patches, conditions["images"].offsets)
    assert torch.equal(patches[0], patches[2])


def test_other_programs_get_tokens_and_images_that_give_the_same_inputs(pipeline, path, pictures) -> None:
    """The images are scaled already, so that the processor cuts them into the same patches."""
    conditions = encoded(pipeline, pictures)
    for i, (row, plain) in enumerate(zip(ROWS, pipeline.plain_prompts(conditions), strict=True)):
        files = [Image.open(BytesIO(image)) for image in plain.images]
        assert [image.mode for image in files] == ["RGB"] * len(row[1])
        assert plain.tokens.count(pipeline.bundle.image_token) == len(row[1])
        inputs = processed(pipeline, path, pictures, row)
        assert plain.expanded == inputs["input_ids"][0].tolist()
        again = pipeline.from_plain(plain.tokens, plain.images)
        for name, condition in again.items():
            expected = conditions[name].select([i])
            for key, value in vars(condition).items():
                same = (
                    torch.equal(value, vars(expected)[key]) if torch.is_tensor(value) else value == vars(expected)[key]
                )
                assert same, (name, key)
    with pytest.raises(ValueError, match="hold 1 image placeholders for 0 images"):
        pipeline.from_plain(pipeline.plain_prompts(conditions)[1].tokens, [])


def test_pixel_bounds_scale_images(path, pipeline, pictures) -> None:
    small = QwenVLPipeline(pipeline.bundle, min_pixels=64, max_pixels=256)
    grids = [encoded(p, pictures, [ROWS[1]])["images"].grids[0][0] for p in (pipeline, small)]
    assert [4 * 4 * rows * columns for _, rows, columns in grids] == [24 * 32, 8 * 16]
    for bounds in ({"min_pixels": 32}, {"min_pixels": 400, "max_pixels": 300}):
        with pytest.raises(ConfigError, match="64 <= min_pixels <= max_pixels must hold"):
            QwenVLPipeline(pipeline.bundle, **bounds)


def test_prompts_without_a_chat_hold_their_images(pipeline, pictures) -> None:
    bare = QwenVLPipeline(pipeline.bundle, chat=False)
    tokens = encoded(bare, pictures, [("a<image>b", (0,))])["prompt"].tokens
    spelled = pipeline.bundle.codec.spell(tokens[tokens != IMAGE_TOKEN].tolist())
    assert spelled == "a<|vision_start|><|vision_end|>b" and int((tokens == IMAGE_TOKEN).sum()) == 12


# Log-probs


def test_replay_equals_the_forward_of_transformers_on_its_processors_inputs(pipeline, path, plain, pictures) -> None:
    conditions, segment = sampled(pipeline, pictures)
    ours = pipeline.stage.replay(conditions, segment).logp
    responses = rows_of(segment.tokens, segment.offsets)
    with torch.no_grad():
        theirs = [
            plain_logp(plain, processed(pipeline, path, pictures, row), response)
            for row, response in zip(ROWS, responses, strict=True)
        ]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, segment.logp, rtol=0, atol=1e-5)


def test_order_and_neighbours_change_nothing(pipeline, pictures) -> None:
    conditions, segment = sampled(pipeline, pictures)
    whole = rows_of(pipeline.stage.replay(conditions, segment).logp, segment.offsets)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4], [3], [1, 1, 0, 1]):
        some = {name: batch.select(order) for name, batch in conditions.items()}
        part = segment.select(order)
        result = rows_of(pipeline.stage.replay(some, part).logp, part.offsets)
        for row, one in zip(order, result, strict=True):
            torch.testing.assert_close(one, whole[row], rtol=0, atol=1e-6)
    again = sampled(pipeline, pictures, [ROWS[i] for i in (3, 1, 4, 0, 2)], slots=2)[1]
    assert torch.equal(again.select([3, 1, 4, 0, 2]).tokens, segment.tokens)


def test_greedy_responses_are_those_of_generate(pipeline, path, plain, pictures) -> None:
    _, segment = sampled(pipeline, pictures, temperature=0.0)
    for row, ours in zip(ROWS, rows_of(segment.tokens, segment.offsets), strict=True):
        inputs = processed(pipeline, path, pictures, row)
        plain.model.rope_deltas = None
        out = plain.generate(**inputs, max_new_tokens=7, do_sample=False)
        assert torch.equal(out[0, inputs["input_ids"].shape[1] :][: len(ours)], ours), row


# transformers 5.24 calls the argument `cache`. Earlier versions know only this name.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_sampled_placeholder_is_an_ordinary_token(pipeline, path, plain, pictures) -> None:
    conditions = encoded(pipeline, pictures, [ROWS[1]])
    said = torch.tensor([65, pipeline.bundle.image_token, pipeline.bundle.image_token, 66])
    segment = TextSegment(
        tokens=said,
        logp=torch.zeros(4),
        loss_mask=torch.ones(4, dtype=torch.bool),
        offsets=torch.tensor([0, 4]),
        finished=torch.tensor([False]),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        anchors={},
    )
    ours = pipeline.stage.replay(conditions, segment).logp
    inputs = processed(pipeline, path, pictures, ROWS[1])
    plain.model.rope_deltas = None
    with torch.no_grad():
        out = plain(**inputs, use_cache=True)
        logits = [out.logits[0, -1]]
        for step, token in enumerate(said[:-1]):
            place = int(conditions["prompt"].next_position[0]) + step
            out = plain(
                input_ids=token.view(1, 1),
                position_ids=torch.full((3, 1, 1), place),
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            logits.append(out.logits[0, -1])
    theirs = torch.stack(logits).log_softmax(-1).gather(1, said[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# The vision tower


def test_an_image_is_encoded_alone_whatever_other_images_there_are(pipeline, plain, pictures) -> None:
    network = pipeline.bundle.trainable()
    images = encoded(pipeline, pictures)["images"]
    result = split_images(images)
    assert len(result) == 6
    with torch.no_grad():
        ours = network._encode_images(images)
        alone = torch.cat([network.encode_image(*picture).features for picture in result])
        pixels = torch.cat([network.normalizer(patches, 2) for patches, _ in result])
        theirs = plain.model.get_image_features(pixels, torch.tensor([grid for _, grid in result]), return_dict=True)
    assert torch.equal(ours.features, alone)
    torch.testing.assert_close(ours.features, torch.cat(list(theirs.pooler_output)), rtol=0, atol=1e-5)
    deep = getattr(theirs, "deepstack_features", [])
    assert len(ours.deepstack) == len(deep) == (1 if network.config.model_type == "qwen3_vl" else 0)
    for layer, expected in zip(ours.deepstack, deep, strict=True):
        torch.testing.assert_close(layer, torch.cat(list(expected)), rtol=0, atol=1e-5)


def test_equal_images_run_through_the_tower_once(pipeline, pictures, monkeypatch) -> None:
    network = pipeline.bundle.trainable()
    images = encoded(pipeline, pictures, [ROWS[1]] * 4 + [ROWS[3]])["images"]
    calls = []
    encode_image = network.encode_image
    monkeypatch.setattr(network, "encode_image", lambda *image: calls.append(image) or encode_image(*image))
    network._encode_images(images)
    assert len(calls) == 2


def test_the_content_of_an_image_affects_the_response(pipeline, pictures) -> None:
    _, segment = sampled(pipeline, pictures)
    conditions = encoded(pipeline, pictures)
    for name, changed in (("same", 0), ("other", 255)):
        patches = conditions["images"].patches.clone()
        patches ^= changed
        seen = conditions | {"images": conditions["images"].replace(patches=patches)}
        with torch.no_grad():
            gaps = (pipeline.stage.replay(seen, segment).logp - segment.logp).abs()
        per_row = [float(gap.max()) for gap in rows_of(gaps, segment.offsets)]
        assert per_row[0] < 1e-5
        assert all((gap > 1e-3) == (name == "other") for gap in per_row[1:]), (name, per_row)


# Training


def gradients(bundle: QwenVLBundle, pictures: list[Path], rows=ROWS) -> dict[str, Tensor | None]:
    pipeline = QwenVLPipeline(bundle)
    conditions, segment = sampled(pipeline, pictures, rows)
    pipeline.stage.replay(conditions, segment).logp.sum().backward()
    return {name: parameter.grad for name, parameter in bundle.trainable().named_parameters()}


def test_a_frozen_tower_gets_no_gradient_and_a_trained_one_that_of_transformers(path, pictures, plain) -> None:
    frozen = gradients(QwenVLBundle(path=path, dtype="fp32"), pictures)
    assert {name.startswith("model.visual.") for name, grad in frozen.items() if grad is None} == {True}
    free_bundle = QwenVLBundle(path=path, dtype="fp32", freeze_vision_tower=False)
    free = gradients(free_bundle, pictures)
    pipeline = QwenVLPipeline(free_bundle)
    _, segment = sampled(pipeline, pictures)
    plain.requires_grad_(True).zero_grad()
    for row, response in zip(ROWS, rows_of(segment.tokens, segment.offsets), strict=True):
        plain_logp(plain, processed(pipeline, path, pictures, row), response).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.requires_grad_(False)
    assert free.keys() == expected.keys()
    for name, grad in free.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_trained_tower_without_images_gets_gradients_of_zero(path, pictures) -> None:
    result = gradients(QwenVLBundle(path=path, dtype="fp32", freeze_vision_tower=False), pictures, ROWS[:1])
    tower = {name: grad for name, grad in result.items() if name.startswith("model.visual.")}
    assert tower and all(grad is not None and not grad.any() for grad in tower.values())


def test_adapters_are_on_the_language_model_alone(path) -> None:
    bundle = QwenVLBundle(path=path, dtype="fp32")
    targets = choose_targets(bundle.trainable(), "model", bundle.facts.lora_targets)
    inject_lora(bundle.trainable(), LoraSpec(rank=2, alpha=4.0, targets=targets), seed=0)
    names = adapter_names(bundle.trainable())
    assert len(names) == 2 * 4 * 2 and all(name.startswith("model.language_model.layers.") for name in names)


# Checkpoints


def test_a_saved_model_is_loaded_again_with_and_without_meta_init(path, pipeline, plain, pictures, tmp_path) -> None:
    plain.save_pretrained(tmp_path)
    pipeline.bundle.codec.tokenizer.save_pretrained(tmp_path)
    pipeline.bundle.image_processor.save_pretrained(tmp_path)
    bundle = QwenVLBundle(path=str(tmp_path), dtype="fp32")
    assert bundle.facts == pipeline.facts and QwenVLBundle.facts_of(str(tmp_path)) == bundle.facts
    conditions, segment = sampled(pipeline, pictures)
    loaded = QwenVLPipeline(bundle)
    again = encoded(loaded, pictures)
    assert torch.equal(again["prompt"].tokens, conditions["prompt"].tokens)
    assert torch.equal(loaded.stage.replay(again, segment).logp, pipeline.stage.replay(conditions, segment).logp)
    empty = QwenVLBundle(path=str(tmp_path), dtype="fp32", meta_init=True)
    assert all(parameter.is_meta for parameter in empty.trainable().parameters())
    saved, network = empty.saved(), bundle.trainable()
    names = {name for name, _ in network.named_parameters()}
    assert names <= saved.shapes().keys() <= names | {"lm_head.weight"}
    for name, parameter in network.named_parameters():
        assert torch.equal(saved.read(name), parameter)


def test_an_exported_model_is_a_directory_of_its_own(pipeline, pictures, tmp_path) -> None:
    tensors = {name: parameter.detach() * 1.01 for name, parameter in pipeline.bundle.trainable().named_parameters()}
    exported = QwenVLPipeline(QwenVLBundle(path=str(pipeline.write_model(tensors, tmp_path)), dtype="fp32"))
    for name, parameter in exported.bundle.trainable().named_parameters():
        assert torch.equal(parameter, tensors[name])
    ours, theirs = (encoded(each, pictures) for each in (pipeline, exported))
    assert torch.equal(ours["prompt"].tokens, theirs["prompt"].tokens)
    assert torch.equal(ours["images"].patches, theirs["images"].patches)


def test_files_of_another_kind_are_refused_by_name(path, pipeline, plain, tmp_path) -> None:
    plain.config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"the model in .*: there is no model\.safetensors"):
        QwenVLBundle(path=str(tmp_path))
    tensors = dict(plain.state_dict())
    del tensors["model.visual.blocks.0.mlp.gate_proj.weight" if "2.5" in path else "model.visual.pos_embed.weight"]
    plain.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(DataError, match=r"the model in .*: tensors of \w+ are missing \(\d+\): model\.visual\."):
        QwenVLBundle(path=str(tmp_path))
    plain.save_pretrained(tmp_path)
    QwenVLBundle.toy_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"has no preprocessor_config\.json"):
        QwenVLBundle(path=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match="model_type='qwen3', but QwenVLBundle reads 'qwen2_5_vl', 'qwen3_vl'"):
        QwenVLBundle(path=str(tmp_path))


# Bad prompts


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("say <|image_pad|>", (0,)), "2 image placeholders for 1 images: the text itself contains"),
        (("say <|image_pad|>", ()), "1 image placeholders for 0 images"),
        (("<image><image>", (0,)), "2 placeholders <image>, but the prompt has 1 images"),
        (("long" * 60, (0,)), "tokens long, its template included, and sampling.max_prompt_tokens is 200"),
    ],
)
def test_bad_prompt_is_refused_by_name(row, why, pipeline, pictures) -> None:
    with pytest.raises(DataError, match=why) as caught:
        encoded(pipeline, pictures, [ROWS[0], row])
    assert f"prompt {row[0]}:1" in str(caught.value)


def test_a_missing_image_is_refused_by_prompt_and_file(pipeline, tmp_path) -> None:
    with pytest.raises(DataError, match=r"prompt what:0: image .*gone\.png is not a file on this machine"):
        encoded(pipeline, [tmp_path / "gone.png"], [("what", (0,))])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976), ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656)],
)
def test_a_public_model_is_planned_without_a_connection_at_the_size_that_its_card_states(name, parameters) -> None:
    assert sum(QwenVLBundle.estimate(name).parameters.values()) == parameters
