"""Batched decoding: samples responses token by token, in a fixed number of slots with a key-value cache.

    waiting responses --prefill, one forward per distinct prompt--> slots --sample--> tokens --forward--> slots ...
                                                                      |
                                                             finished responses

Each forward reads one token of every slot. When a response finishes, its slot admits the next waiting response. When no
response waits any more, the cache is compacted to the active slots.

An accelerator does not wait for the host between tokens, nor the host for it. The host launches some tokens of every
slot, reads the ones before them when their copy has arrived, and refills slots a little later than it could. The tokens
stay the same, since they depend on the row and its own tokens alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.compiler import set_stance

from unirl.config.errors import DivergenceError
from unirl.models.chunks import padded_rows, round_up
from unirl.models.language.attention import KVCache, PrefillAttention, groups_by_length, width_of_all
from unirl.models.language.chat import TextCodec
from unirl.models.language.guidance import GuidedSampler
from unirl.models.language.packing import first_row_with_same_prompt, pack_prompts, prompts_of
from unirl.models.language.policy import NextTokenLogits
from unirl.models.language.slots import CapturedStep, DecodeStep, Forward, Sampler, SlotState, TokenSampler, read_tokens
from unirl.models.language.tools import ToolBox
from unirl.types.batch import bounds_of
from unirl.types.conditions import Conditions
from unirl.types.device import CPU, device_module, to_device, to_host
from unirl.types.facts import PREFILL_TOKENS
from unirl.types.progress import progress
from unirl.types.sampling import ARSamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TOKENS_AHEAD = 8
"""Number of tokens that an accelerator samples before their copy to the host begins.

The host reads them while the device samples the next ones. Tokens after an end are discarded: with 8, at most 16 of a
response, which is little beside hundreds, while the host needs less than the time of 8 tokens to record them.
"""


@dataclass
class Response:
    """One response while it is sampled."""

    row: int
    id: str
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    """Per token: True if the policy sampled it, False if a tool wrote it."""
    forced: deque[int] = field(default_factory=deque)
    """Tokens of a tool's answer that are appended next, in place of sampled tokens."""
    num_sampled: int = 0
    """Number of its tokens that the device has been told to sample. `tokens` has those that the host has read."""
    finished: bool = False
    """True after an end token or a stop string."""
    truncated: bool = False
    """True if it reached `max_new_tokens` without finishing."""
    pause_at: int | None = None
    """Number of tokens at which it pauses. None: it does not."""
    num_before: int = 0
    """Number of its tokens that were sampled earlier. The prompt that is read ends with them."""

    @property
    def is_done(self) -> bool:
        return self.finished or self.truncated or len(self.tokens) == self.pause_at

    def limit(self, params: ARSamplingParams) -> int:
        """The number of tokens at which sampling stops in any case."""
        return params.max_new_tokens if self.pause_at is None else min(self.pause_at, params.max_new_tokens)


class ResponseBuilder:
    """Appends tokens to responses, applies the stopping criteria, and lets tools write answers."""

    def __init__(self, codec: TextCodec, params: ARSamplingParams, tools: ToolBox | None) -> None:
        self.codec = codec
        self.params = params
        self.tools = tools
        self.searched = (*params.stop, *(tools.closings if tools is not None else ()))
        """Strings that are searched for after every token: stop strings and closing tags of tool calls."""
        # A token may be only a part of a letter, and special tokens may decode to nothing.
        self.window = max((len(text.encode()) for text in self.searched), default=0) + 8

    def append(self, response: Response, token: int, logp: float) -> None:
        """Append the next forced token if there is one, else the sampled `token`."""
        sampled = not response.forced
        response.tokens.append(token if sampled else response.forced.popleft())
        response.logps.append(logp)
        response.sampled.append(sampled)
        length = len(response.tokens)
        if sampled:
            completed = self._completed_strings(response.tokens)
            stopped = length >= self.params.min_new_tokens and any(text in completed for text in self.params.stop)
            response.finished = stopped or token in self.codec.ends
            if self.tools is not None and any(text in completed for text in self.tools.closings):
                answer = self.tools.answer(self.codec.spell(response.tokens))
                response.forced.extend([] if answer is None else self.codec.encode(answer))
        response.truncated = not response.finished and length >= self.params.max_new_tokens

    def _completed_strings(self, tokens: list[int]) -> list[str]:
        """The searched strings that the last token completes."""
        if not self.searched:
            return []
        tail = tokens[-self.window :]
        now, before = self.codec.spell(tail), self.codec.spell(tail[:-1])
        return [text for text in self.searched if now.count(text) > before.count(text)]


@dataclass(frozen=True, eq=False)
class Unread:
    """Tokens that the device samples, on their way to the host."""

    slots: list[Response | None]
    """The response in each slot when the tokens were sampled."""
    tokens: Tensor  # [A, S] on the host, once they have arrived
    logps: Tensor  # [A, S]
    arrived: ArrivalEvent | None

    @staticmethod
    def of(slots: Sequence[Response | None], sampled: Sequence[tuple[Int[Tensor, "S"], Float[Tensor, "S"]]]) -> Unread:
        """Start the copies of tokens and log-probs [S] each. The host does not wait for them."""
        tokens, logps = (torch.stack(values) for values in zip(*sampled, strict=True))
        host_tokens, host_logps = (values.to(CPU, non_blocking=True) for values in (tokens, logps))
        module = device_module(tokens.device)
        arrived = None if module is None else module.current_stream(tokens.device).record_event()
        return Unread(list(slots), host_tokens, host_logps, arrived)

    def values(self) -> tuple[list[list[int]], list[list[float]]]:
        """Wait until they have arrived. Tokens and log-probs [S, A]."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.T.tolist(), self.logps.T.tolist()


class ArrivalEvent(Protocol):
    """An event of a device's stream."""

    def synchronize(self) -> None:
        """Wait for the event."""


def look_ahead(device: torch.device, builder: ResponseBuilder) -> LookAhead:
    """On a CPU, and if the text so far decides what follows, the host reads every token before the next is sampled."""
    return LookAhead(1, 0) if device.type == "cpu" or builder.tools is not None else LookAhead(TOKENS_AHEAD, 1)


@dataclass(frozen=True)
class LookAhead:
    """Number of tokens that the device samples before the host reads the first of them."""

    tokens: int
    """Tokens of each slot in a chunk. The host reads whole chunks."""
    unread: int
    """Chunks that are launched before the host reads the one before them."""


@dataclass(eq=False)
class Decoding:
    """Samples one response per row of `conditions`, at most `num_slots` samples at a time."""

    forward: Forward
    conditions: Conditions
    builder: ResponseBuilder
    uniforms: Tensor
    """[B, max_new_tokens] the uniform number that selects each token of each row."""
    responses: Sequence[Response]
    """One empty response per row; `run` completes them in place."""
    num_slots: int
    multiple: int
    """Forwards are padded to a multiple of this many tokens."""
    use_cuda_graphs: bool = False
    """Capture steps on an accelerator, except with tools, whose answers the host sends."""
    guidance_scale: float = 1.0
    """If it is not 1, the responses 2i and 2i + 1 are the conditional and the unconditional branch of one sample."""

    def __post_init__(self) -> None:
        self.params = self.builder.params
        self.prompts = prompts_of(self.conditions)
        self.device = self.prompts.tokens.device
        ends = torch.tensor(self.builder.codec.ends, dtype=torch.int64)
        sampler = TokenSampler(self.params, self.uniforms, to_device(ends, self.device))
        self.is_guided = self.guidance_scale != 1
        self.sampler: Sampler = GuidedSampler(sampler, self.guidance_scale) if self.is_guided else sampler
        self.prompt_row = first_row_with_same_prompt(self.conditions)
        [next_position] = to_host([self.prompts.next_position])
        self.next_position: list[int] = next_position.tolist()
        self.prompt_lengths: list[int] = self.prompts.lengths.tolist()
        self.ahead = look_ahead(self.device, self.builder)
        self.waiting = deque(self.responses)
        # The branches of a guided sample stay in adjacent slots: they come and go together, and all counts are even.
        slots = 2 * self.num_slots if self.is_guided else self.num_slots
        count = round_up(min(slots, len(self.responses)), self.multiple)
        self.cache = KVCache(count)
        if self.device.type != "cpu":  # addresses stay, and nothing is copied when responses grow
            self.cache.reserve(max(self.prompt_lengths) + self.params.max_new_tokens)
        self.slots: list[Response | None] = [None] * count
        self.unread: deque[Unread] = deque()
        self.state: SlotState | None = None
        self.captures = self.use_cuda_graphs and self.ahead.unread > 0
        self.captured: CapturedStep | None = None

    def run(self) -> None:
        """Complete all responses."""
        try:
            while self._admit_and_compact():
                tokens = self._sample_ahead()
                unfinished = len(self.waiting) + sum(map(bool, self.slots))
                branches = 2 if self.is_guided else 1
                progress("sample", len(self.responses) // branches, (len(self.responses) - unfinished) // branches)
                while len(self.unread) > self.ahead.unread:
                    self._record(self.unread.popleft())
                if any(self.slots) and not self.captures:
                    self._read(tokens)
            while self.unread:
                self._record(self.unread.popleft())
        finally:
            self.cache.release()

    # Slots

    def _admit_and_compact(self) -> bool:
        """Admits waiting responses and compacts idle slots. Returns True while any slot is active."""
        if self.waiting:
            idle = [slot for slot, response in enumerate(self.slots) if response is None]
            prompts: dict[int, list[int]] = {}
            for slot in idle[: len(self.waiting)]:
                response = self.waiting.popleft()
                self.slots[slot] = response
                prompts.setdefault(self.prompt_row[response.row], []).append(slot)
            for rows in _split_by_tokens(prompts, self.prompt_lengths):
                self._prefill({row: prompts[row] for row in rows})
        elif 0 < 2 * round_up(sum(map(bool, self.slots)), self.multiple) <= len(self.slots):
            self._compact()
        return any(self.slots)

    def _compact(self) -> None:
        """Keep the active slots, and as many idle ones as the multiple needs."""
        active = [slot for slot, response in enumerate(self.slots) if response is not None]
        idle = [slot for slot, response in enumerate(self.slots) if response is None]
        slots = sorted(active + idle[: round_up(len(active), self.multiple) - len(active)])
        self.slots = [self.slots[slot] for slot in slots]
        assert self.state is not None
        selected = self._to_device(slots)
        self.cache.select(selected)
        self.state.select(selected)
        self.captured = None  # its graphs write to the memory of all slots

    # Forwards

    def _prefill(self, prompts: dict[int, list[int]]) -> None:
        """Read some prompts, given as {row: slots}. Each is read once and cached in all of its slots."""
        packed = pack_prompts(self.conditions, list(prompts))
        self.cache.reserve(max(packed.lengths))
        starts = bounds_of(packed.lengths)
        sources, targets = [], []
        for start, length, slots in zip(starts[:-1], packed.lengths, prompts.values(), strict=True):
            for slot in slots:
                sources.append(start + torch.arange(length))
                targets.append(torch.arange(length) + slot * self.cache.capacity)
        last_tokens = starts[1:] - 1
        padded = packed.padded(self.multiple)
        copied, places = (to_device(torch.cat(index), self.device) for index in (sources, targets))
        is_first = self.state is None
        attention_fn = PrefillAttention(self.cache, padded.attention(self.device), copied, places, allocates=is_first)
        last_tokens = last_tokens[padded_rows(len(last_tokens), self.multiple)]
        inputs = padded.inputs(attention_fn, NextTokenLogits(to_device(last_tokens, self.device)))
        # A compiled block cannot allocate its part of the cache.
        with set_stance("force_eager") if is_first else nullcontext():
            logits = self.forward(inputs)["logits"]
        if self.state is None:
            count, vocabulary = len(self.slots), logits.shape[1]
            zeros = torch.zeros(4, count, dtype=torch.int64, device=self.device)
            self.state = SlotState(logits.new_zeros(count, vocabulary), zeros)
        slots = [slot for some in prompts.values() for slot in some]
        prompt = self._to_device([i for i, some in enumerate(prompts.values()) for _ in some])
        counters = [self._first_counters(self.slots[slot]) for slot in slots]
        self.state.assign(self._to_device(slots), self._to_device(counters).T, logits[prompt])

    def _first_counters(self, response: Response | None) -> tuple[int, int, int, int]:
        """The counters of a slot in which the prompt of a response has been read."""
        assert response is not None
        return response.row, response.num_before, self.next_position[response.row], self.prompt_lengths[response.row]

    def _read(self, tokens: Tensor) -> None:
        """Read one token [S] of every slot. Idle slots read a token too, whose output is never used."""
        lengths = self._lengths()
        self.cache.reserve(max(lengths))
        capacity = self.cache.capacity
        on_cpu = self.device.type == "cpu"
        groups = groups_by_length(lengths) if on_cpu else {width_of_all(max(lengths), capacity): None}
        assert self.state is not None
        read_tokens(self.forward, self.state, tokens, capacity, groups, self.prompts.positions.shape[1:])

    def _lengths(self) -> list[int]:
        """The number of tokens of each slot, those included that are to be read next."""
        return [1 if r is None else self._length(r) for r in self.slots]

    def _length(self, response: Response) -> int:
        sampled = min(response.num_sampled, response.limit(self.params))
        return self.prompt_lengths[response.row] - response.num_before + sampled

    def _to_device(self, values: object) -> Tensor:
        """Integers, on the device."""
        return to_device(torch.tensor(values), self.device)

    # Tokens

    def _sample_ahead(self) -> Tensor:
        """Sample one or several tokens for every slot, start their copies to the host, and return the last ones [S].

        A response that has all its tokens gives up its slot, although the host has not read them.
        """
        slots = list(self.slots)
        most = max(r.limit(self.params) - r.num_sampled for r in slots if r is not None)
        sampled: list[tuple[Tensor, Tensor]] = []
        for _ in range(min(self.ahead.tokens, most)):
            if sampled and not self.captures:
                self._read(sampled[-1][0])
            sampled.append(self._run_captured() if self.captures else self._sample_next())
        self.unread.append(Unread.of(slots, sampled))
        for slot, response in enumerate(slots):
            if response is not None and response.num_sampled >= response.limit(self.params):
                self.slots[slot] = None
        return sampled[-1][0]

    def _sample_next(self) -> tuple[Tensor, Tensor]:
        """Sample tokens [S] with log-probs [S]."""
        assert self.state is not None
        forced = None
        if any(response is not None and response.forced for response in self.slots):
            forced = self._to_device([r.forced[0] if r is not None and r.forced else -1 for r in self.slots])
        return self.sampler(self.state, self._count_token(), forced)

    def _run_captured(self) -> tuple[Tensor, Tensor]:
        """Sample tokens [S] with log-probs [S], and read them."""
        assert self.state is not None
        if self.captured is None:
            shape = self.prompts.positions.shape[1:]
            step = DecodeStep(self.forward, self.sampler, self.state, self.cache.capacity, shape)
            self.captured = CapturedStep(step, self.device)
        forbid_ends = self._count_token()
        return self.captured(width_of_all(max(self._lengths()), self.cache.capacity), forbid_ends)

    def _count_token(self) -> bool:
        """Count one more token of each response. True if one of them is too short to end with it."""
        active = [response for response in self.slots if response is not None]
        forbid_ends = min(response.num_sampled for response in active) < self.params.min_new_tokens
        for response in active:
            response.num_sampled += 1
        return forbid_ends

    def _record(self, unread: Unread) -> None:
        """Append tokens to the responses up to their ends, and free the slots of completed responses."""
        for response, tokens, logps in zip(unread.slots, *unread.values(), strict=True):
            for token, logp in zip(tokens, logps, strict=True):
                if response is None or response.is_done:
                    break
                if not math.isfinite(logp):
                    raise DivergenceError(
                        f"the model gives token {len(response.tokens)} of {response.id} the log-prob {logp}: its "
                        "weights or activations are no longer finite. Go back to an earlier checkpoint, or lower the "
                        "learning rate"
                    )
                self.builder.append(response, token, logp)
        self.slots = [None if response is None or response.is_done else response for response in self.slots]


def _split_by_tokens(rows: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """`rows` in groups of at most PREFILL_TOKENS tokens, or of a single row."""
    groups: list[list[int]] = []
    total = 0
    for row in rows:
        total += lengths[row]
        if not groups or total > PREFILL_TOKENS:
            groups.append([])
            total = lengths[row]
        groups[-1].append(row)
    return groups
