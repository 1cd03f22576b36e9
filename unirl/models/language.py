"""A bundle of a language model: its network as a policy over tokens, and its tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from unirl.config.errors import DataError
from unirl.models.autoregressive import ARStage
from unirl.models.base import Bundle
from unirl.models.chat import TextCodec
from unirl.models.hub import NOT_FOUND
from unirl.models.tools import ToolBox
from unirl.types.facts import LanguageFacts

VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Files of which a tokenizer needs one."""


class LanguageBundle(Bundle, ABC):
    """A causal language model of transformers, trained as a `TokenPolicy`."""

    facts: LanguageFacts

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        facts: LanguageFacts,
        codec: TextCodec,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(modules, facts, dtype=dtype, device=device)
        self.codec = codec

    def stage(self, tools: ToolBox | None = None) -> ARStage:
        """The trained network as a policy that samples and replays."""
        return ARStage(self.trainable(), self.facts, self.codec, self.dtype, tools)

    @abstractmethod
    def untrained(self) -> nn.Module:
        """A second network on the CPU, of transformers' own class, with the checkpoint's weights."""


def load_network(kind: Any, root: Path, dtype: torch.dtype) -> nn.Module:
    """The network in `root`, of the class `kind` of transformers. Raises DataError unless every weight is there."""
    try:
        network, found = kind.from_pretrained(root, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # The libraries raise these four for missing, cut and foreign weight files.
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"cannot load the model in {root}: {reason}. Download it again", NOT_FOUND) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise DataError(
            f"{len(missing)} weights of the model in {root} are missing: {', '.join(missing[:5])}. Download it again",
            NOT_FOUND,
        )
    loaded: nn.Module = network
    return loaded


def load_tokenizer(root: Path) -> Any:
    """The tokenizer in `root`."""
    from transformers import AutoTokenizer

    # Without any of these files the library makes a tokenizer that knows no word.
    if not any((root / name).is_file() for name in VOCABULARIES):
        raise DataError(
            f"cannot load the tokenizer in {root}: it has none of {', '.join(VOCABULARIES)}. Give the folder that "
            "`tokenizer.save_pretrained` wrote, too",
            NOT_FOUND,
        )
    try:
        return AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError) as error:  # raised for files that are missing or are not what they should be
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"cannot load the tokenizer in {root}: {reason}. Download it again", NOT_FOUND) from error


def end_tokens(tokenizer: Any, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a response: those of the generation config or the model's, and the tokenizer's own."""
    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for config in configs:
        said = config.get("eos_token_id")
        found += said if isinstance(said, list) else [] if said is None else [said]
    return tuple(sorted(set(found)))


def require_vocabulary(tokenizer: Any, facts: LanguageFacts, path: str) -> None:
    """Raises DataError when the tokenizer knows tokens that the network has no row for."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= facts.vocab_size:
        raise DataError(
            f"{path}: its tokenizer has token {highest}, and the network embeds {facts.vocab_size}: they are not of "
            "one checkpoint. Download both again",
            code=NOT_FOUND,
        )
