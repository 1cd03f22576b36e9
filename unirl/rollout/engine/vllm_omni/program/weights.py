"""Weights on their way into a network: the ways by which they arrive, and the network's own copy, read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unirl.distributed.weight_sync.fingerprint import Fingerprint, fingerprints
from unirl.distributed.weight_sync.listening_routes import open_buffer

FUSED: Mapping[str, tuple[str, ...]] = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""A layer of vLLM-Omni to the layers of diffusers whose rows it joins, in order."""
RENAMED = (
    (".to_out.0.", ".to_out."),
    (".ffn.net.0.", ".ffn.net_0."),
    (".ffn.net.2.", ".ffn.net_2."),
    ("scale_shift_table", "output_scale_shift_prepare.scale_shift_table"),
)
"""Parts of names of diffusers that vLLM-Omni writes in another way."""


def fused_parts(part: str) -> tuple[str, ...]:
    """The layers of diffusers that are joined with `part`, in order."""
    return next(parts for parts in FUSED.values() if part in parts)


class BucketReader:
    """Reads buckets of tensors: from the body of a request, or from a shared buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None

    def open_buffer(self, handle: Mapping[str, Any]) -> None:
        """Open the buffer of the client: CUDA IPC, or a file in shared memory."""
        self.buffer = open_buffer(dict(handle), self.device)

    def tensors(self, bucket: Mapping[str, Any], body: bytes | memoryview) -> dict[str, Tensor]:
        """The tensors of a bucket by name, as views. They must be read before the request is answered."""
        if bucket["by"] == "body":
            view = memoryview(body)
            data = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
        elif self.buffer is None:
            raise ValueError("no shared buffer was opened")
        else:
            data = self.buffer
        return dict(unpacked(bucket["entries"], data))


def unpacked(entries: Iterable[tuple[str, str, list[int], int]], data: Tensor) -> Iterable[tuple[str, Tensor]]:
    """The tensors in `data` [bytes] uint8, by (name, dtype, shape, offset)."""
    for name, dtype, shape, offset in entries:
        kind = getattr(torch, dtype)
        end = offset + kind.itemsize * torch.Size(shape).numel()
        if end > data.numel():
            raise ValueError(f"{name} ends at byte {end}, and {data.numel()} bytes arrived")
        yield name, data[offset:end].view(kind).view(shape)


class HeldWeights:
    """The parameters of the networks of a pipeline of vLLM-Omni by the names of diffusers.

    Of several networks, such as the two experts of Wan 2.2, each name begins with that of its network in the pipeline.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        """
        Args:
            networks: by their names in the pipeline.
        """
        self.networks = nn.ModuleDict(networks)
        self.only = next(iter(networks)) + "." if len(networks) == 1 else ""
        self.names = frozenset(name for name, _ in self.networks.named_parameters())
        self.rows: dict[str, int] = {}
        """The number of rows of each tensor that was loaded."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the networks. Raises KeyError for a name that they do not have."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self.rows[name] = tensor.shape[0] if tensor.dim() else 1
            self.place(name)
            network, _, rest = f"{self.only}{name}".partition(".")
            parts.setdefault(network, {})[rest] = tensor
        with torch.no_grad():
            for network, part in parts.items():
                self.networks[network].load_weights(part.items())  # type: ignore[operator]

    def place(self, name: str) -> tuple[str, str | None]:
        """The parameter that holds a tensor, and the fused layer's part. Raises KeyError if there is none.

        The name of the parameter begins with that of its network.
        """
        full = f"{self.only}{name}"
        layer, _, leaf = full.rpartition(".")
        head, _, last = layer.rpartition(".")
        for fused, parts in FUSED.items():
            joined = f"{head}.{fused}.{leaf}"
            if last in parts and joined in self.names:
                return joined, last
        for ours, theirs in (("", ""), *RENAMED):
            renamed = full.replace(ours, theirs) if ours else full
            if renamed in self.names:
                return renamed, None
        kinds = " and ".join(sorted({type(network).__name__ for network in self.networks.values()}))
        raise KeyError(f"{kinds} has no parameter for {name}")

    def layer(self, name: str) -> tuple[str, int]:
        """The layer that computes with a layer of diffusers, and the place of its rows among those of a fused one."""
        parameter, part = self.place(f"{name}.weight")
        return parameter.removesuffix(".weight"), 0 if part is None else fused_parts(part).index(part)

    def unfused(self, name: str) -> str:
        """The layer's name in its pipeline, as if it were not fused."""
        parameter, part = self.place(f"{name}.weight")
        layer = parameter.removesuffix(".weight")
        return layer if part is None else f"{layer.rpartition('.')[0]}.{part}"

    def held(self, name: str) -> Tensor:
        """The network's own values of a tensor. The rows of a fused layer are those after the parts before it."""
        parameter, part = self.place(name)
        values: Tensor = self.networks.get_parameter(parameter).detach()
        if part is None:
            return values
        layer, _, leaf = name.rpartition(".")
        head = layer.rpartition(".")[0]
        parts = fused_parts(part)
        before = parts[: parts.index(part)]
        start = sum(self.rows[f"{head}.{each}.{leaf}"] for each in before)
        return values[start : start + self.rows[name]]

    def fingerprints(self) -> dict[str, Fingerprint]:
        """The fingerprint of every loaded tensor, read back from the network."""
        return fingerprints((name, self.held(name)) for name in self.rows)
