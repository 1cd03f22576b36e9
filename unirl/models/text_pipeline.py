"""Prompts in, a rollout out: chat template, tokens, responses, texts, with one language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from unirl.models.chat import ChatFormat
from unirl.models.language import LanguageBundle
from unirl.models.tools import ToolBox
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ARSamplingParams

BundleT = TypeVar("BundleT", bound=LanguageBundle)


class TextPipeline(Generic[BundleT]):
    """Text to text with one bundle. An empty response is a response: the token that ends it, and the text ""."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("text",))

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
            tools: what answers in the middle of a response; absent = nothing does.
        """
        self.bundle = bundle
        self.facts = bundle.facts
        self.stage = bundle.stage(tools)
        self.format = ChatFormat(bundle.codec, chat, system_instruction, enable_thinking)

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """The rollout of a request, `chunk_size` responses in the making at a time."""
        raise NotImplementedError

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """What the network reads: `prompt`, and `images` in families that see. Each distinct prompt is encoded once."""
        raise NotImplementedError

    def canary_inputs(self) -> PromptTokens:
        """Fixed prompts, as tokens."""
        raise NotImplementedError

    def offload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to main memory."""
        self.bundle.offload(names)

    def onload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to its device."""
        self.bundle.onload(names)

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """A directory that transformers loads, of the model with `tensors` in place of its own."""
        raise NotImplementedError

    def verify_model(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """Max abs difference between the log-probs of our responses and those of the model in `folder`."""
        raise NotImplementedError

    def verify_lora(self, folder: Path, texts: Sequence[str], params: ARSamplingParams) -> float:
        """The same, with the adapter in `folder` on the untrained model."""
        raise NotImplementedError
