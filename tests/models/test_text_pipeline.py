"""Prompts in, texts out: chat templates, what is refused, and rows that do not depend on each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.models.texts import TEXTS, request, rollout
from unirl.config.errors import ConfigError, DataError
from unirl.models.language.chat import TextCodec
from unirl.models.language.tools import Calculator
from unirl.models.qwen3.family import Qwen3Bundle, Qwen3Pipeline
from unirl.types.sampling import ARSamplingParams

PARAMS = ARSamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def bundle() -> Qwen3Bundle:
    return Qwen3Bundle(path="toy", dtype="fp32")


def read(pipeline: Qwen3Pipeline, text: str) -> str:
    """What the model reads of a prompt."""
    prompt = pipeline.encode(request(PARAMS, texts=[text]), PARAMS)["prompt"]
    return pipeline.bundle.codec.spell(prompt.slice(0, 1).tokens.tolist())


def test_a_prompt_is_what_the_chat_template_makes_of_it(bundle: Qwen3Bundle) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "what is 1+1?"}]
    for thinking in (False, True):
        pipeline = Qwen3Pipeline(bundle, system_instruction="be short", enable_thinking=thinking)
        wanted = bundle.codec.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert read(pipeline, "what is 1+1?") == wanted
        assert ("<think>\n\n</think>" in wanted) == (not thinking)


def test_without_chat_a_prompt_is_fed_as_it_is(bundle: Qwen3Bundle) -> None:
    assert read(Qwen3Pipeline(bundle, chat=False), "1+1=") == "1+1="


def test_pieces_of_tokens_join_to_their_text_and_a_character_belongs_to_its_last_token(bundle: Qwen3Bundle) -> None:
    """Also of bytes that are no text: a random policy writes them."""
    codec = bundle.codec
    assert codec.pieces(codec.encode("a\u20ac b")) == ("a", "", "", "\u20ac", " ", "b")
    assert codec.pieces([*codec.encode("1"), *codec.ends[:1]]) == ("1", codec.spell(codec.ends[:1]))
    generator = torch.Generator().manual_seed(0)
    for count in range(12):
        tokens = torch.randint(0, 256, (count,), generator=generator).tolist()
        pieces = codec.pieces(tokens)
        assert (len(pieces), "".join(pieces)) == (count, codec.spell(tokens))


def test_pieces_keep_the_space_that_a_tokenizer_of_words_writes_between_two_tokens() -> None:
    """As Llama's: the decoder drops the space at the beginning of a text."""
    words = Tokenizer(WordLevel({"_a": 0, "_b": 1, "c": 2}))
    words.decoder = decoders.Metaspace(replacement="_", prepend_scheme="always")
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=words), ends=())
    assert codec.spell([0, 1, 2]) == "a bc"
    assert codec.pieces([0, 1, 2]) == ("a", " b", "c")


def test_a_chat_is_told_of_the_tools(bundle: Qwen3Bundle) -> None:
    tools = Calculator()
    assert tools.instruction in read(Qwen3Pipeline(bundle, tools=tools), "hi")
    both = read(Qwen3Pipeline(bundle, tools=tools, system_instruction="be short"), "hi")
    assert f"be short\n\n{tools.instruction}" in both
    assert read(Qwen3Pipeline(bundle, tools=tools, chat=False), "hi") == "hi"


def test_a_tokenizer_without_a_template_is_refused_with_the_way_out() -> None:
    bundle = Qwen3Bundle(path="toy", dtype="fp32")
    bundle.codec.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template: set pipeline\.chat=false"):
        Qwen3Pipeline(bundle)
    assert read(Qwen3Pipeline(bundle, chat=False), "1+1=") == "1+1="


def test_an_instruction_without_a_chat_is_refused(bundle: Qwen3Bundle) -> None:
    with pytest.raises(ConfigError, match=r"system_instruction needs a chat"):
        Qwen3Pipeline(bundle, chat=False, system_instruction="be short")


def test_a_prompt_that_is_too_long_is_refused_by_id_and_length(bundle: Qwen3Bundle) -> None:
    pipeline = Qwen3Pipeline(bundle, chat=False)
    params = replace(PARAMS, max_prompt_tokens=69)
    with pytest.raises(DataError, match=r"prompt p2@0 is 70 tokens long.*max_prompt_tokens is 69"):
        rollout(pipeline, params)
    assert rollout(pipeline, replace(PARAMS, max_prompt_tokens=70)).decoded is not None


def test_an_empty_prompt_is_refused_where_nothing_is_put_around_it(bundle: Qwen3Bundle) -> None:
    with pytest.raises(DataError, match=r"prompt p1@0 is empty"):
        rollout(Qwen3Pipeline(bundle, chat=False), PARAMS, texts=["a", ""])
    assert len(rollout(Qwen3Pipeline(bundle), PARAMS, texts=["a", ""])) == 4


def test_each_distinct_prompt_is_encoded_once(bundle: Qwen3Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, seen = Qwen3Pipeline(bundle), []
    encode = bundle.codec.encode
    monkeypatch.setattr(bundle.codec, "encode", lambda text: seen.append(text) or encode(text))  # type: ignore[func-returns-value]
    pipeline.encode(request(PARAMS, texts=["a", "b", "a"], siblings=4), PARAMS)
    assert len(seen) == 2


def test_texts_are_the_responses_without_special_tokens(bundle: Qwen3Bundle) -> None:
    track = rollout(Qwen3Pipeline(bundle), replace(PARAMS, max_new_tokens=60))
    rows = track.segment.tokens.split(track.segment.lengths.tolist())
    codec = bundle.codec
    assert track.decoded.texts == [codec.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert track.prompts == [text for text in TEXTS for _ in range(2)]


def test_an_empty_response_is_one_token_and_no_text(bundle: Qwen3Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that ends at once: every token is an end."""
    monkeypatch.setattr(bundle.codec, "ends", tuple(range(261)))
    monkeypatch.setattr(type(bundle.codec), "decode", lambda self, tokens: "")
    track = rollout(Qwen3Pipeline(bundle), PARAMS)
    assert track.segment.lengths.tolist() == [1] * 6 and bool(track.segment.finished.all())
    assert track.decoded.texts == [""] * 6
    replayed = Qwen3Pipeline(bundle).stage.replay(track.conditions, track.segment).logp.detach()
    assert float((replayed - track.segment.logp).abs().max()) < 1e-5


def fields(track: Any) -> list[Any]:
    segment = track.segment
    return [segment.tokens.tolist(), segment.logp.tolist(), segment.offsets.tolist(), track.decoded.texts]


def test_chunk_size_order_and_neighbours_change_nothing(bundle: Qwen3Bundle) -> None:
    pipeline = Qwen3Pipeline(bundle)
    whole = rollout(pipeline, PARAMS, slots=6)
    assert fields(rollout(pipeline, PARAMS, slots=1)) == fields(whole)
    order = [5, 0, 3]
    some = pipeline.generate(request(PARAMS).select(order), 4).tracks["text"]
    assert fields(some) == fields(whole.select(order))


def test_canaries_tell_two_networks_apart(bundle: Qwen3Bundle) -> None:
    pipeline, other = Qwen3Pipeline(bundle), Qwen3Pipeline(Qwen3Bundle(path="toy", dtype="fp32"))
    question = pipeline.canary_inputs()
    answer = pipeline.stage.canary(question).values
    assert torch.equal(answer, other.stage.canary(question).values)
    with torch.no_grad():
        other.bundle.trainable().get_parameter("model.layers.1.mlp.down_proj.weight")[0, 0] += 0.1
    assert not torch.equal(answer, other.stage.canary(question).values)
