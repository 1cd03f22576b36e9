"""The pipelines of language models, from prompts to decoded samples, and the export to transformers and peft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from unirl.config.errors import DataError
from unirl.models.base import CANARY_PROMPTS, response_of
from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.chat import ChatFormat
from unirl.models.language.packing import prompt_tokens, prompts_of
from unirl.models.language.policy import tempered
from unirl.models.language.stage import ARStage
from unirl.models.language.tools import ToolBox
from unirl.models.loading.adapter_files import Adapter, load_peft_adapter, write_peft_adapter
from unirl.models.loading.base_model import BaseModel
from unirl.models.loading.completeness import replace_tensors
from unirl.models.loading.hub import quiet_libraries
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.primitives import Decoded, Texts
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

CANARIES = tuple(text for text in CANARY_PROMPTS if text)
BundleT = TypeVar("BundleT", bound=LanguageBundle, covariant=True)


@dataclass(frozen=True)
class PlainPrompt:
    """A prompt as programs other than UniRL take it: tokens and image files."""

    tokens: list[int]
    """The prompt with one placeholder for each image."""
    expanded: list[int]
    """The prompt as the network reads it, with one placeholder for each token of an image."""
    images: tuple[bytes, ...] = ()
    """PNG files, in the order of their placeholders. They have the size at which the network reads them."""


class TokenPipeline(ABC, Generic[BundleT]):
    """Generates samples, token by token, from texts with one bundle, and exports the model to transformers and peft."""

    capabilities: ClassVar[Capabilities]
    track: ClassVar[str]
    """The name of the track in the requests that verify an export."""
    lora_formats: ClassVar[tuple[str, ...]] = ("peft",)

    def __init__(self, bundle: BundleT, stage: ARStage) -> None:
        self.bundle = bundle
        self.facts = bundle.facts
        self.stage = stage

    def stage_of(self, track: str) -> ARStage:
        """The policy, by any name."""
        return self.stage

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """Sample one response per row of a request, `chunk_size` of them at a time."""
        _, params = req.only_track(ARSamplingParams)
        conditions = self.encode(req, params)
        noise = NoiseSource(params.seed, req.purpose, req.step)
        rows = (conditions, params, noise, req.sample_ids, chunk_size)
        if req.started is None:
            segment = self.stage.sample(*rows)
        else:
            segment = self.stage.go_on(*rows, req.started, req.weight_version)
        return response_of(req, conditions, segment, self.decoded(segment, req.sample_ids))

    @abstractmethod
    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """The conditions of a request. Each distinct prompt is encoded once."""

    @abstractmethod
    def decoded(self, segment: TextSegment, sample_ids: Sequence[str]) -> Decoded:
        """The samples that the tokens stand for."""

    @abstractmethod
    def canary_inputs(self) -> PromptTokens:
        """Fixed prompts, as tokens."""

    @abstractmethod
    def plain_logp(self, network: nn.Module, conditions: Conditions, segment: TextSegment) -> Tensor:
        """[sum L] log-probs of recorded tokens by a model of transformers: one row at a time, without packing."""

    # Export to transformers and peft

    @property
    def base_model(self) -> BaseModel:
        """The model before training, as transformers loads it."""
        bundle = self.bundle
        return BaseModel(
            library="transformers",
            loader=bundle.family.network_class().__name__,
            shipped=bundle.shipped.get(bundle.path),
            is_toy=bundle.path in bundle.toys,
        )

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the model, with `tensors` in place of its own, and its tokenizer as a directory of transformers."""
        network = self.bundle.untrained()
        replace_tensors(network, tensors)
        # In a process group the library writes on rank 0 alone, but here each rank has a folder of its own.
        vars(network)["should_save_on_this_rank"] = lambda is_main_process: True
        with quiet_libraries():
            network.save_pretrained(folder)
            self.bundle.codec.tokenizer.save_pretrained(folder)
        return folder

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write an adapter as a folder that peft loads onto the untrained model."""
        return write_peft_adapter(folder, adapter, self.bundle.path)

    def verify_model(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """Max abs difference between our log-probs of our responses to `texts` and those of the model in `folder`."""
        with quiet_libraries():
            kind = self.bundle.family.network_class()
            exported = kind.from_pretrained(folder, dtype=self.bundle.dtype, local_files_only=True)
        return self._difference(exported, texts, params)

    def verify_lora(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """The same for the untrained model with the adapter in `folder`, loaded by peft."""
        return self._difference(load_peft_adapter(folder, self.bundle.untrained()), texts, params)

    def _difference(self, exported: nn.Module, texts: Sequence[str], params: ARSamplingParams) -> float:
        ids = [f"verify:{i}" for i in range(len(texts))]
        req = RolloutReq(
            sample_ids=ids,
            group_ids=ids,
            primitives={"text": Texts(texts=list(texts))},
            metadata=[{} for _ in texts],
            tracks={self.track: TrackSpec(sampling=params)},
            purpose="eval",
            step=0,
        )
        with torch.no_grad():
            track = self.generate(req, len(texts)).tracks[self.track].sampled_as(TextSegment)
            ours = self.stage.replay(track.conditions, track.segment).logp
            theirs = self.plain_logp(exported.eval().to(self.bundle.device), track.conditions, track.segment)
        return float((ours - theirs).abs().max())


class TextPipeline(TokenPipeline[BundleT]):
    """Generates texts from texts with one bundle. A response of only an end token is valid; its text is ""."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",), pauses=True)
    track: ClassVar[str] = "text"

    def __init__(
        self,
        bundle: BundleT,
        *,
        chat: bool = True,
        system_instruction: str | None = None,
        enable_thinking: bool = False,
        tools: ToolBox | None = None,
        use_cuda_graphs: bool = False,
    ) -> None:
        """
        Args:
            chat: render prompts with the chat template of the model; False passes them unchanged.
            system_instruction: the system message of every chat.
            enable_thinking: enable the thinking mode of chat templates that have one.
            tools: tools that the model may call; a chat describes them in its system message.
            use_cuda_graphs: on a GPU, capture each kind of decoding step as a CUDA graph, which is launched at once. It
                has no effect on a CPU and with tools, and has not yet run on a GPU.
        """
        super().__init__(bundle, bundle.stage(tools, use_cuda_graphs))
        messages = [system_instruction, tools.instruction if chat and tools is not None else None]
        system = "\n\n".join(text for text in messages if text is not None) or None
        self.format = ChatFormat(bundle.codec, chat, system, enable_thinking)

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """The conditions of a request: `prompt`, and `images` for models that take images.

        Each distinct prompt is encoded once.
        """
        texts = req.prompts()
        tokens = {text: self.bundle.codec.encode(self.format.text(text)) for text in dict.fromkeys(texts)}
        for text, id in zip(texts, req.group_ids, strict=True):
            check_prompt_length(len(tokens[text]), id, params)
        return {"prompt": prompt_tokens([tokens[text] for text in texts]).to(self.bundle.device)}

    def plain_prompts(self, conditions: Conditions) -> list[PlainPrompt]:
        """The prompts of `conditions`, for a program that does not read conditions."""
        prompts = prompts_of(conditions)
        rows = [row.tolist() for row in prompts.tokens.cpu().split(prompts.lengths.tolist())]
        return [PlainPrompt(row, row) for row in rows]

    def from_plain(self, tokens: Sequence[int], images: Sequence[bytes]) -> Conditions:
        """The conditions of one `PlainPrompt`, from its tokens and images. Raises ValueError if they do not match."""
        if images:
            raise ValueError(f"{type(self).__name__} reads no images, and the prompt has {len(images)}")
        return {"prompt": prompt_tokens([tokens]).to(self.bundle.device)}

    def decoded(self, segment: TextSegment, sample_ids: Sequence[str]) -> Texts:
        return Texts(texts=self.decode(segment))

    def decode(self, segment: TextSegment) -> list[str]:
        """The texts of responses, without special tokens."""
        rows = segment.tokens.cpu().split(segment.lengths.tolist())
        return [self.bundle.codec.decode(row.tolist()) for row in rows]

    def canary_inputs(self) -> PromptTokens:
        return prompt_tokens([self.bundle.codec.encode(self.format.text(text)) for text in CANARIES])

    def plain_logp(self, network: nn.Module, conditions: Conditions, segment: TextSegment) -> Tensor:
        return transformers_logp(network, conditions, segment)


def check_prompt_length(count: int, id: str, params: ARSamplingParams) -> None:
    """Raise DataError if a prompt of `count` tokens is empty, or longer than the recipe allows."""
    if not count:
        raise DataError(
            f"prompt {id} is empty, so the model has no token to continue from: remove it from the data, or set "
            "pipeline.chat=true"
        )
    if count > params.max_prompt_tokens:
        raise DataError(
            f"prompt {id} is {count} tokens long, its template included, and sampling.max_prompt_tokens is "
            f"{params.max_prompt_tokens}: raise that, or remove the prompt from the data. Prompts are never truncated"
        )


def transformers_logp(network: nn.Module, conditions: Conditions, segment: TextSegment) -> Tensor:
    """[sum L] log-probs of recorded tokens by a model of transformers: one row at a time, without packing."""
    prompts = prompts_of(conditions)
    rows = zip(
        prompts.tokens.split(prompts.lengths.tolist()), segment.tokens.split(segment.lengths.tolist()), strict=True
    )
    logps = []
    for prompt, response in rows:
        tokens = torch.cat([prompt, response])
        logits = network(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logps.append(tempered(logits, segment.temperature).gather(1, response[:, None])[:, 0])
    return torch.cat(logps)
