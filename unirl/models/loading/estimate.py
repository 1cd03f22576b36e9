"""Parameter counts and layer sizes of a model that is not loaded, measured on modules without storage."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from unirl.types.facts import ModelFacts

Stream = Literal["image", "text", "joint", "vision", "row"]
"""The tokens that a layer reads: those of the sample, of the prompt, of both, of a vision encoder, or one per row."""

STREAMS: tuple[tuple[Stream, str], ...] = (
    ("image", r"_moe_gen\.|_moe_gen$|vae2llm|llm2vae"),
    ("text", r"^language_model\.model\.layers\."),  # the other expert of a mixture of transformers
    ("text", r"caption_embedder|cap_embedder"),
    ("row", r"^image_head\.net\.time_embed|^timestep_emb\.|\.emb_layers\."),
    ("image", r"^image_(head|in_projector|out_projector)"),
    ("row", r"time_|(^|\.)t_embedder|modulation|_mod\.|norm\w*\.linear$|norm_out\.linear_1$"),
    ("vision", r"^visual\.|\.visual\.|image_embedder|attn2\.add_[kv]_proj"),
    ("text", r"add_[qkv]_proj|to_add_out|_context\.|txt_|context_embedder|context_refiner|text_embedder"),
    ("text", r"(^|\.)blocks\.\d+\.attn2\.to_[kv]$"),  # cross-attention of Wan
    ("joint", r"single_transformer_blocks|(^|\.)layers\.|lm_head|norm_out\.linear_2$"),
    ("image", r""),
)
"""A stream and the names of its layers, as a regular expression. The first match counts."""


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens that the network reads for one row."""

    image: int
    text: int
    vision: int = 0
    causal: bool = False
    """True if a token attends to the earlier tokens alone."""

    def of(self, stream: Stream) -> int:
        """The number of tokens of a stream."""
        both = {"joint": self.image + self.text, "row": 1}
        return both[stream] if stream in both else int(vars(self)[stream])


@dataclass(frozen=True)
class Attention:
    """The streams whose tokens attend, and those that are attended to."""

    width: int
    queries: tuple[Stream, ...]
    keys: tuple[Stream, ...]

    def flops(self, lengths: Lengths) -> float:
        """Operations for one row: two matrix products of every query with every key that it may see."""
        queries, keys = (sum(lengths.of(stream) for stream in each) for each in (self.queries, self.keys))
        return 4.0 * queries * keys * self.width * (0.5 if lengths.causal else 1.0)


@dataclass(frozen=True)
class MatrixLayer:
    """A matrix of the network: a linear layer, or a convolution over patches."""

    inputs: int
    outputs: int
    stream: Stream
    attention: Attention | None = None
    """The attention whose queries it makes."""
    is_adapted: bool = False
    """True if the family's adapters go on it."""


@dataclass(frozen=True)
class HeldModel:
    """A model beside the trained one, which stays on its device and is not trained."""

    name: str
    parameters: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """Parameter counts and layer sizes of a model that is not loaded."""

    facts: ModelFacts
    parameters: Mapping[str, int]
    """Number of parameters by component."""
    linears: Mapping[str, tuple[int, int]]
    """(inputs, outputs) of every linear layer of the trained module, by name."""
    patches: Mapping[str, tuple[int, int]]
    """The same of every convolution that turns patches into tokens."""
    num_experts: int = 1
    """Networks in the trained module, of which a forward pass of a row runs one."""
    buffers: int = 0
    """Numbers in tables of the trained module that are no parameters, such as positions."""
    idle_parameters: int = 0
    """Parameters of the trained module that a token does not run: those of the experts that it is not routed to."""
    copied_parameters: int = 0
    """Parameters that every forward pass copies: those of experts, for grouped products."""
    copied_at_once: int = 0
    """Parameters of the largest of these copies, of which one exists at a time."""
    kept_in_fp32: int = 0
    """Parameters of the trained module that stay in fp32 in any dtype."""
    num_blocks: int
    block_parameters: int = 0
    """Parameters of all blocks, which several devices gather one at a time. Those of the rest are gathered together."""
    largest_block: int = 0
    """Parameters of the largest block."""
    width: int
    """Width of a token in the trained module."""
    cache_width: int = 0
    """Numbers that sampling caches per token (keys and values of all blocks). 0 for models without a cache."""

    def adapted_layers(self, targets: Iterable[str] | None = None) -> list[tuple[int, int]]:
        """(inputs, outputs) of the layers that `targets` names (name suffixes; None takes the model's own)."""
        suffixes = tuple(f".{name}" for name in targets or self.facts.lora_targets)
        return [shape for name, shape in self.linears.items() if f".{name}".endswith(suffixes)]

    def layers(self, targets: Iterable[str] | None = None) -> list[MatrixLayer]:
        """The layers that a forward pass of one row runs, with their streams.

        Args:
            targets: the adapted layers, as in `adapted_layers`.
        """
        suffixes = tuple(f".{name}" for name in targets or self.facts.lora_targets)
        shapes = {**self.linears, **self.patches}
        active = {name: shape for name, shape in shapes.items() if not re.match(r"\w+_[2-9]\.", name)}
        shown = active if self.num_experts > 1 else shapes
        return [
            MatrixLayer(
                inputs=inputs,
                outputs=outputs,
                stream=stream_of(name),
                attention=_attention(name, shown),
                is_adapted=f".{name}".endswith(suffixes),
            )
            for name, (inputs, outputs) in shown.items()
        ]

    @property
    def block_weights(self) -> int:
        """Number of weights of the linear layers in the blocks of the trained module, without biases."""
        names = [name for name in self.linears if re.search(r"(blocks|layers)\.\d+\.", name) and "visual" not in name]
        return sum(math.prod(self.linears[name]) for name in names)

    @property
    def text_width(self) -> int:
        """The width of a token of the prompt as the text encoder makes it; 0 if there is none."""
        readers = [name for name in self.linears if stream_of(name) == "text" and not re.search("blocks|refiner", name)]
        return self.linears[readers[0]][0] if readers else 0

    def lora_parameters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Number of parameters of adapters of `rank` on these layers."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self.adapted_layers(targets))


def stream_of(name: str) -> Stream:
    """The tokens that the layer of this name reads."""
    return next(stream for stream, pattern in STREAMS if re.search(pattern, name))


def _attention(name: str, shapes: Mapping[str, tuple[int, int]]) -> Attention | None:
    """The attention that the layer `name` makes the queries of. None if it makes none."""
    prefix, _, kind = name.rpartition(".")
    if kind == "to_qkv_mlp_proj":  # one layer for queries, keys, values and the widened activations
        return Attention(shapes[name][0], (stream_of(name),), (stream_of(name),))
    if kind == "qkv_proj":  # the output layer reads the heads of the queries
        return Attention(shapes[f"{prefix}.o_proj"][0], (stream_of(name),), (stream_of(name),))
    if kind not in ("to_q", "q_proj", "q_proj_moe_gen"):
        return None
    others = ("k_proj", "k_proj_moe_gen") if kind == "q_proj_moe_gen" else ("to_k", "k_proj", "add_k_proj")
    keys = [f"{prefix}.{other}" for other in others]
    queries = [name, f"{prefix}.add_q_proj"]
    streams = [tuple(stream_of(each) for each in names if each in shapes) for names in (queries, keys)]
    return Attention(shapes[name][1], *streams)


def forward_flops(layers: Iterable[MatrixLayer], lengths: Lengths, rank: int = 0) -> tuple[float, float]:
    """Operations of a forward pass of one row, as torch's counter counts them: of the matrices, and of attention.

    Args:
        rank: rank of the adapters. 0: no adapters.
    """
    matrices = attention = 0.0
    for layer in layers:
        tokens = lengths.of(layer.stream)
        matrices += 2.0 * tokens * layer.inputs * layer.outputs
        matrices += 2.0 * tokens * rank * (layer.inputs + layer.outputs) * layer.is_adapted
        attention += 0.0 if layer.attention is None else layer.attention.flops(lengths)
    return matrices, attention


def patches_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every convolution whose steps are as long as its window, by name."""
    result = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d) and part.stride == part.kernel_size:
            result[name] = (part.in_channels * math.prod(part.kernel_size), part.out_channels)
    return result


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while it is active, also of tensors without storage."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, list[int]] = {}
        """Storage -> [number of tensors that share it, bytes]."""
        self.now = self.peak = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            # A view of a tensor from outside, such as a weight, is no allocation.
            if tensor.untyped_storage()._cdata in self.alive or tensor.untyped_storage()._cdata not in read:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = [0, storage.nbytes()]
            self.made += storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self.alive[key][0] += 1
        weakref.finalize(tensor, self._free, key)

    def _free(self, key: int) -> None:
        self.alive[key][0] -= 1
        if self.alive[key][0] == 0:
            self.now -= self.alive.pop(key)[1]


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class DecodingCost:
    """The work of decoding one sample."""

    flops: float = 0.0
    peak_bytes: int = 0
    """Bytes that are allocated at one time beside the weights and the latents."""
    made_bytes: int = 0
    """Bytes that are allocated in all, each of which is written once and read about once."""
    dtype_bytes: int = 4
    """Bytes of a number of the VAE."""
    tiled: bool = False
    """The VAE decodes in overlapping tiles."""


BLENDS = ("blend_v", "blend_h", "blend_t")
"""Methods of diffusers' VAEs that blend a tile with the one above, before or earlier, pixel row by pixel row."""


def decoding_cost(vae: nn.Module, latents: tuple[int, ...]) -> DecodingCost:
    """The cost of decoding latents [1, ...] with a VAE without storage, from a run on the meta device.

    A tile or a latent frame whose shapes occurred before is counted and not run again, so `vae` is of no other use.
    """
    from torch.utils.flop_counter import FlopCounterMode

    decode: Any = vae.decode
    dtype = next(vae.parameters()).dtype
    with torch.no_grad(), AllocationCounter() as memory, FlopCounterMode(display=False) as work:
        calls = RepeatedCalls(memory, work.get_total_flops)
        calls.run_once(vae.decoder, "forward")
        for name in BLENDS:
            if hasattr(vae, name):  # which of them a VAE has depends on its class
                calls.run_once(vae, name)
        decode(torch.empty(latents, device="meta", dtype=dtype), return_dict=False)
    flops = float(work.get_total_flops() + calls.flops)
    return DecodingCost(flops, memory.peak, memory.made, dtype.itemsize)


@dataclass(frozen=True)
class _Call:
    """The cost of a call, and what it left behind."""

    flops: int
    peak: int
    """Bytes at its peak, above those that were allocated before it."""
    made: int
    output: Leftover
    lists: Sequence[Sequence[Leftover]]
    """The items of each list that it was given, which it may change."""


Leftover = Callable[[Sequence[object]], object]
"""Makes something like what a call left behind, from the leaves of the arguments of another call."""


class RepeatedCalls:
    """Runs a function of tensors without storage once for each combination of shapes, and counts the other calls.

    The function may change the items of lists that it is given, as VAEs of videos do with the frames that they cache.
    """

    def __init__(self, memory: AllocationCounter, flops_so_far: Callable[[], int]) -> None:
        """
        Args:
            memory: counts the bytes of the calls that are run, and is told of the others.
            flops_so_far: the operations of everything that was run.
        """
        self.flops = 0
        """Operations of the calls that were not run."""
        self._memory = memory
        self._flops_so_far = flops_so_far
        self._calls: dict[Hashable, _Call] = {}

    def run_once(self, owner: Any, name: str) -> None:
        """Replace a method of `owner` by one that runs only with shapes that it has not seen."""
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = tree_flatten((args, kwargs))
            shapes = (id(owner), name, str(structure), *(_signature(leaf) for leaf in leaves))
            lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
            if shapes in self._calls:
                return self._repeat(self._calls[shapes], leaves, lists)
            # A call may free a tensor by taking it out of a list, so none is held here.
            leaves = [weakref.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            result, self._calls[shapes] = self._run(lambda: method(*args, **kwargs), leaves, lists)
            return result

        setattr(owner, name, counted)

    def _run(self, call: Callable[[], Any], leaves: Sequence[object], lists: Sequence[list[Any]]) -> tuple[Any, _Call]:
        memory, before = self._memory, self._memory.peak
        made, flops, memory.peak = memory.made, self._flops_so_far() + self.flops, memory.now
        start = memory.now
        output = call()
        cost = _Call(
            flops=self._flops_so_far() + self.flops - flops,
            peak=memory.peak - start,
            made=memory.made - made,
            output=_leftover(output, leaves),
            lists=[[_leftover(item, leaves) for item in items] for items in lists],
        )
        memory.peak = max(memory.peak, before)
        return output, cost

    def _repeat(self, call: _Call, leaves: Sequence[object], lists: Sequence[list[Any]]) -> Any:
        memory = self._memory
        peak, made = max(memory.peak, memory.now + call.peak), memory.made + call.made
        output = call.output(leaves)
        for items, leftovers in zip(lists, call.lists, strict=True):
            items[:] = [leftover(leaves) for leftover in leftovers]
        self.flops += call.flops
        memory.peak, memory.made = peak, made
        return output


def _signature(leaf: object) -> Hashable:
    """What decides the operations on an argument: a tensor's shape, strides and dtype; the value of anything else."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _leftover(value: object, leaves: Sequence[object]) -> Leftover:
    """Remembers a value that a call left behind: one of its arguments, a tensor of its own, or anything else.

    Args:
        leaves: the arguments, with a weak reference for each tensor.
    """
    if not isinstance(value, Tensor):
        return lambda leaves: value
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, weakref.ref) and leaf() is value:
            return lambda leaves: leaves[index]
    size, strides, offset, dtype = value.shape, value.stride(), value.storage_offset(), value.dtype
    numbers = value.untyped_storage().nbytes() // dtype.itemsize
    return lambda leaves: torch.empty(numbers, dtype=dtype, device="meta").as_strided(size, strides, offset)


def block_counts(module: nn.Module, facts: ModelFacts) -> dict[str, int]:
    """`num_blocks`, `block_parameters` and `largest_block` of an estimate."""
    counts = [parameters_of(part) for part in module.modules() if type(part).__name__ in facts.block_class_names]
    return {"num_blocks": len(counts), "block_parameters": sum(counts), "largest_block": max(counts, default=0)}


def linears_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every linear layer, by name."""
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return {name: (layer.in_features, layer.out_features) for name, layer in layers}


def buffers_of(module: nn.Module) -> int:
    """Number of numbers in the buffers of a module."""
    return sum(buffer.numel() for buffer in module.buffers())


def bytes_of(module: nn.Module) -> int:
    """Bytes of the parameters of a module. Tied ones count once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def parameters_of(module: nn.Module) -> int:
    """Number of parameters. Tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())
