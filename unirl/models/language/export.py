"""A trained language model as transformers and peft load it, and what that model says of our responses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.packing import prompts_of
from unirl.models.language.policy import tempered
from unirl.models.loading.hub import quiet_libraries
from unirl.types.conditions import Conditions
from unirl.types.segments import TextSegment


def write_model(bundle: LanguageBundle, tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """The model and its tokenizer as `save_pretrained` writes them, with `tensors` in place of the model's own."""
    network: Any = bundle.untrained()
    unexpected = network.load_state_dict(dict(tensors), strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"the model has no parameter {unexpected[0]!r} ({len(unexpected)} unknown names)")
    with quiet_libraries():
        network.save_pretrained(folder)
        bundle.codec.tokenizer.save_pretrained(folder)
    return folder


def load_model(bundle: LanguageBundle, folder: Path) -> nn.Module:
    """The model in `folder`, of transformers' own class."""
    kind: Any = type(bundle.untrained())
    with quiet_libraries():
        network: nn.Module = kind.from_pretrained(folder, dtype=bundle.dtype, local_files_only=True)
    return network.eval()


def load_adapted(bundle: LanguageBundle, folder: Path) -> nn.Module:
    """The untrained model with the adapter in `folder`, by peft."""
    from peft import PeftModel

    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is about to go
        adapted: nn.Module = PeftModel.from_pretrained(bundle.untrained(), str(folder))
    return adapted.eval()


def plain_logp(network: nn.Module, conditions: Conditions, segment: TextSegment) -> Tensor:
    """[sum L] the log-probs of recorded tokens by a model of transformers: one row at a time, without packing."""
    prompts = prompts_of(conditions)
    rows = zip(
        prompts.tokens.split(prompts.lengths.tolist()), segment.tokens.split(segment.lengths.tolist()), strict=True
    )
    found = []
    for prompt, response in rows:
        tokens = torch.cat([prompt, response])
        logits = network(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(tempered(logits, segment.temperature).gather(1, response[:, None])[:, 0])
    return torch.cat(found)
