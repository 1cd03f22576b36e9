"""Prompts in, a rollout out: chat template, tokens, responses, texts, with one language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from unirl.config.errors import DataError
from unirl.models.base import CANARY_PROMPTS
from unirl.models.language import export as text_export
from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.chat import ChatFormat
from unirl.models.language.tools import ToolBox
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.primitives import Texts
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

CANARIES = tuple(text for text in CANARY_PROMPTS if text)
BundleT = TypeVar("BundleT", bound=LanguageBundle)


class TextPipeline(Generic[BundleT]):
    """Text to text with one bundle. An empty response is a response: the token that ends it, and the text ""."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",))
    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)

    def __init__(
        self,
        bundle: BundleT,
        *,
        chat: bool = True,
        system_instruction: str | None = None,
        enable_thinking: bool = False,
        tools: ToolBox | None = None,
    ) -> None:
        """A pipeline over `bundle`.

        Args:
            chat: prompts are put into the model's chat template; False feeds them as they are.
            system_instruction: what stands before every chat.
            enable_thinking: lets models think aloud whose chat template has such a switch.
            tools: what answers in the middle of a response, of which a chat is told; absent = nothing does.
        """
        self.bundle = bundle
        self.facts = bundle.facts
        self.stage = bundle.stage(tools)
        told = [system_instruction, tools.instruction if chat and tools is not None else None]
        system = "\n\n".join(text for text in told if text is not None) or None
        self.format = ChatFormat(bundle.codec, chat, system, enable_thinking)

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """The rollout of a request, `chunk_size` responses in the making at a time."""
        name, params = req.only_track(ARSamplingParams)
        conditions = self.encode(req, params)
        noise = NoiseSource(params.seed, req.purpose, req.step)
        segment = self.stage.sample(conditions, params, noise, req.sample_ids, chunk_size)
        track = RolloutTrack(
            sample_ids=req.sample_ids,
            group_ids=req.group_ids,
            prompts=req.prompts(),
            conditions=conditions,
            segment=segment,
            decoded=Texts(texts=self.decode(segment)),
            weight=torch.ones(len(req)),
            weight_version=torch.full((len(req),), req.weight_version, dtype=torch.int64),
        )
        return RolloutResp({name: track})

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """What the network reads: `prompt`, and `images` in families that see. Each distinct prompt is encoded once."""
        texts = req.prompts()
        tokens = {text: self.bundle.codec.encode(self.format.text(text)) for text in dict.fromkeys(texts)}
        for text, id in zip(texts, req.group_ids, strict=True):
            check_prompt_length(len(tokens[text]), id, params)
        return {"prompt": prompt_tokens([tokens[text] for text in texts]).to(self.bundle.device)}

    def decode(self, segment: TextSegment) -> list[str]:
        """The texts of responses, as a reader sees them."""
        rows = segment.tokens.cpu().split(segment.lengths.tolist())
        return [self.bundle.codec.decode(row.tolist()) for row in rows]

    def canary_inputs(self) -> PromptTokens:
        """Fixed prompts, as tokens."""
        return prompt_tokens([self.bundle.codec.encode(self.format.text(text)) for text in CANARIES])

    def offload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to main memory."""
        self.bundle.offload(names)

    def onload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to its device."""
        self.bundle.onload(names)

    # The way out to transformers

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """A directory that transformers loads, of the model with `tensors` in place of its own."""
        return text_export.write_model(self.bundle, tensors, folder)

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """The folder that peft loads onto the untrained model."""
        return write_peft_adapter(folder, adapter, self.bundle.path)

    def verify_model(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """Max abs difference between our log-probs of our responses to `texts` and those of the model in `folder`."""
        return self._difference(text_export.load_model(self.bundle, folder), texts, params)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """The same, with the adapter in `folder` on the untrained model."""
        return self._difference(text_export.load_adapted(self.bundle, folder), texts, params)

    def _difference(self, home: nn.Module, texts: Sequence[str], params: ARSamplingParams) -> float:
        ids = [f"verify:{i}" for i in range(len(texts))]
        req = RolloutReq(
            sample_ids=ids,
            group_ids=ids,
            primitives={"text": Texts(texts=list(texts))},
            metadata=[{} for _ in texts],
            tracks={"text": TrackSpec(sampling=params)},
            purpose="eval",
            step=0,
            weights="live",
            weight_version=0,
        )
        with torch.no_grad():
            track = self.generate(req, len(texts)).tracks["text"]
            ours = self.stage.replay(track.conditions, track.segment).logp
            theirs = text_export.plain_logp(home.to(self.bundle.device), track.conditions, track.segment)
        return float((ours - theirs).abs().max())


def check_prompt_length(count: int, id: str, params: ARSamplingParams) -> None:
    """Raises DataError when a prompt of `count` tokens is empty, or longer than the recipe allows."""
    if not count:
        raise DataError(
            f"prompt {id} is empty, and a response needs something to follow: remove it from the data, or set "
            "pipeline.chat=true"
        )
    if count > params.max_prompt_tokens:
        raise DataError(
            f"prompt {id} is {count} tokens long, its template included, and sampling.max_prompt_tokens is "
            f"{params.max_prompt_tokens}: raise that, or remove the prompt from the data. Nothing is cut off"
        )


def prompt_tokens(rows: Sequence[Sequence[int]]) -> PromptTokens:
    """Prompts of text alone, whose tokens stand at 0, 1, 2, ..."""
    lengths = torch.tensor([len(row) for row in rows])
    return PromptTokens(
        tokens=torch.tensor([token for row in rows for token in row]),
        positions=torch.cat([torch.arange(len(row)) for row in rows]),
        next_position=lengths,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )
