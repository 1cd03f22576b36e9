"""Names of tensors: those of the trained network, of the checkpoint that the server loaded, and of the server itself.

network       model.layers.0.self_attn.q_proj.weight
checkpoint    the same, or older names, which the family maps (`LanguageFamily.parameter_name`)
server        model.layers.0.self_attn.qkv_proj.weight: q, k and v joined
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.config.errors import SyncError, did_you_mean
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.models.language.bundle import LanguageFamily
from unirl.models.loading.completeness import read_headers
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS
from unirl.rollout.engine.serving.payloads import ADAPTER_TENSOR

BASE = "base_model.model."
"""The beginning of the names of adapter tensors, as peft writes them."""
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(QKV, ("qkv_proj", QKV)),
    **dict.fromkeys(GATE_UP, ("gate_up_proj", GATE_UP)),
}
"""Layer to the layer of the server that has its rows, and to the layers that are joined there, in order."""


def checkpoint_names(root: Path, family: LanguageFamily) -> dict[str, str]:
    """Parameter of the network to its name in the checkpoint in `root`."""
    headers = read_headers(f"the model in {root}", root, LANGUAGE_WEIGHTS)
    return {family.parameter_name(name): name for name in headers}


def wire_names(layout: WeightLayout, names: Mapping[str, str]) -> dict[str, str]:
    """Tensor of a layout to the name under which the server takes it.

    SGLang ignores tensors whose names it does not know, so every name must be in the checkpoint that it loaded.

    Args:
        names: see `checkpoint_names`.

    Raises:
        SyncError: naming a tensor that has no name there.
    """
    wire: dict[str, str] = {}
    for name in layout.tensors:
        match = ADAPTER_TENSOR.fullmatch(name) if layout.payload == "adapter" else None
        parameter = name if match is None else f"{match['layer']}.weight"
        if parameter not in names:
            raise SyncError(
                f"the trainer sends {name!r}, and the checkpoint of the server has no {parameter!r}: the server would "
                f"ignore it.{did_you_mean(parameter, names)}"
            )
        own = names[parameter]
        wire[name] = own if match is None else f"{BASE}{own.removesuffix('.weight')}.{match['side']}.weight"
    return wire


@dataclass(frozen=True)
class ServerPart:
    """The rows of a tensor of the server that one tensor of the checkpoint fills."""

    name: str
    """The tensor of the server."""
    part: int = 0
    num_parts: int = 1


def server_part(name: str) -> ServerPart:
    """The place of a tensor of the checkpoint."""
    words = name.replace("model.language_model.", "model.", 1).split(".")
    if len(words) < 2 or words[-2] not in FUSED or "visual" in words:
        return ServerPart(".".join(words))
    fused, parts = FUSED[words[-2]]
    return ServerPart(".".join([*words[:-2], fused, words[-1]]), parts.index(words[-2]), len(parts))
