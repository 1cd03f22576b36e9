"""Batched decoding: samples responses token by token, in a fixed number of slots with a key-value cache.

    waiting responses --prefill, one forward per distinct prompt--> slots --sample--> tokens --forward--> slots ...
                                                                      |
                                                             finished responses

Each forward reads one token of every slot. When a response finishes, its slot admits the next waiting response. When no
response waits any more, the cache is compacted to the active slots.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl.config.errors import DivergenceError
from unirl.models.chunks import padded_rows, round_up
from unirl.models.language.attention import DecodeAttention, KVCache, PrefillAttention
from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import expand_positions, first_row_with_same_prompt, pack_prompts, prompts_of
from unirl.models.language.policy import NextTokenLogits, Outputs, TokenInputs, tempered
from unirl.models.language.tools import ToolBox
from unirl.types.conditions import Conditions
from unirl.types.sampling import ARSamplingParams

PREFILL_TOKENS = 16384
"""Largest number of prompt tokens in one prefill forward. A longer prompt gets a forward of its own."""
TOKENS_AHEAD = 8
"""Number of tokens that an accelerator samples before the host reads them. Tokens after an end are discarded."""

Forward = Callable[[TokenInputs], Outputs]


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
    finished: bool = False
    """True after an end token or a stop string."""
    truncated: bool = False
    """True if it reached `max_new_tokens` without finishing."""

    @property
    def is_done(self) -> bool:
        return self.finished or self.truncated


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
        if response.forced:
            token = response.forced.popleft()
        response.tokens.append(token)
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


class Decoding:
    """Samples one response per row of `conditions`."""

    def __init__(
        self,
        forward: Forward,
        conditions: Conditions,
        params: ARSamplingParams,
        builder: ResponseBuilder,
        uniforms: Tensor,
        responses: Sequence[Response],
    ) -> None:
        """
        Args:
            forward: one forward of the network.
            uniforms: [B, max_new_tokens] the uniform number that selects each token of each row.
            responses: one empty response per row; `run` completes them in place.
        """
        self.forward = forward
        self.conditions = conditions
        self.params = params
        self.builder = builder
        self.uniforms = uniforms
        self.responses = responses
        self.prompts = prompts_of(conditions)
        self.device = self.prompts.tokens.device
        self.ends = torch.tensor(builder.codec.ends, dtype=torch.int64, device=self.device)
        self.prompt_row = first_row_with_same_prompt(conditions)
        self.position_offset = (self.prompts.next_position.cpu() - self.prompts.lengths).tolist()
        """Per row: position of a response token minus the number of tokens before it."""
        self.waiting = deque(responses)

    def run(self, num_slots: int, multiple: int) -> None:
        """Complete all responses, at most `num_slots` at a time. Forwards are padded to a multiple of `multiple`."""
        self.multiple = multiple
        count = round_up(min(num_slots, len(self.responses)), multiple)
        self.cache = KVCache(count)
        self.slots: list[Response | None] = [None] * count
        self.cached = [0] * count
        """Number of cached tokens per slot."""
        self.logits: Tensor | None = None
        """[S, V] logits of the next token of each slot."""
        while self._admit_and_compact():
            tokens = self._sample_ahead()
            if any(self.slots):
                self._decode(tokens)

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
            for rows in _split_by_tokens(prompts, self.prompts.lengths.tolist()):
                self._prefill({row: prompts[row] for row in rows})
        elif 2 * round_up(sum(map(bool, self.slots)), self.multiple) <= len(self.slots):
            self._compact()
        return any(self.slots)

    def _compact(self) -> None:
        """Keep the active slots, and as many idle ones as the multiple needs."""
        active = [slot for slot, response in enumerate(self.slots) if response is not None]
        idle = [slot for slot, response in enumerate(self.slots) if response is None]
        slots = sorted(active + idle[: round_up(len(active), self.multiple) - len(active)])
        self.cache.select(slots)
        self.slots = [self.slots[slot] for slot in slots]
        self.cached = [self.cached[slot] for slot in slots]
        assert self.logits is not None
        self.logits = self.logits[slots]

    # Forwards

    def _prefill(self, prompts: dict[int, list[int]]) -> None:
        """Read some prompts, given as {row: slots}. Each is read once and cached in all of its slots."""
        packed = pack_prompts(self.conditions, list(prompts))
        self.cache.reserve(max(packed.lengths))
        sources, targets, start = [], [], 0
        for length, slots in zip(packed.lengths, prompts.values(), strict=True):
            for slot in slots:
                sources.append(torch.arange(start, start + length))
                targets.append(torch.arange(length) + slot * self.cache.capacity)
                self.cached[slot] = length
            start += length
        last_tokens = torch.tensor(packed.lengths).cumsum(0) - 1
        padded = packed.padded(self.multiple)
        attention_fn = PrefillAttention(
            self.cache, padded.lengths, self._to_device(torch.cat(sources)), self._to_device(torch.cat(targets))
        )
        output_fn = NextTokenLogits(self._to_device(last_tokens[padded_rows(len(last_tokens), self.multiple)]))
        logits = self.forward(padded.inputs(attention_fn, output_fn))["logits"]
        if self.logits is None:
            self.logits = logits.new_zeros(len(self.slots), logits.shape[1])
        for i, slots in enumerate(prompts.values()):
            self.logits[slots] = logits[i]

    def _decode(self, tokens: Tensor) -> None:
        """Read one token [S] of every slot. Idle slots read a token too, whose output is never used."""
        offsets = [0 if r is None else self.position_offset[r.row] for r in self.slots]
        positions = torch.tensor([offset + count for offset, count in zip(offsets, self.cached, strict=True)])
        lengths = [count + 1 for count in self.cached]
        self.cache.reserve(max(lengths))
        inputs = TokenInputs(
            tokens=tokens,
            positions=expand_positions(self._to_device(positions), self.prompts.positions),
            attention_fn=DecodeAttention(self.cache, lengths, self.device),
            output_fn=NextTokenLogits(torch.arange(len(tokens), device=self.device)),
        )
        self.logits = self.forward(inputs)["logits"]
        self.cached = [0 if r is None else n for r, n in zip(self.slots, lengths, strict=True)]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    # Tokens

    def _sample_ahead(self) -> Tensor:
        """Sample one or several tokens for every slot, record them, and return the last ones [S]."""
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        for i in range(self._num_tokens_ahead()):
            if i:
                self._decode(tokens[-1])
            token, logp = self._sample_next(i)
            tokens.append(token)
            logps.append(logp)
        self._record(torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist())
        return tokens[-1]

    def _num_tokens_ahead(self) -> int:
        """The number of tokens to sample before the host reads them: one on a CPU, or if text decides what follows."""
        if self.device.type == "cpu" or self.builder.searched:
            return 1
        left = [self.params.max_new_tokens - len(r.tokens) for r in self.slots if r is not None]
        return min(TOKENS_AHEAD, *left)

    def _sample_next(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Sample tokens [S] with log-probs [S]; `ahead` tokens of each slot are sampled but not yet recorded."""
        assert self.logits is not None
        rows = [0 if r is None else r.row for r in self.slots]
        counts = [0 if r is None else len(r.tokens) + ahead for r in self.slots]
        logps = tempered(self.logits, self.params.temperature)
        allowed = logps
        if self.params.min_new_tokens > min(counts):
            too_short = self._to_device(torch.tensor(counts)) < self.params.min_new_tokens
            allowed = logps.clone()
            allowed[:, self.ends] = allowed[:, self.ends].masked_fill(too_short[:, None], -math.inf)
        tokens = sample_tokens(allowed, self.uniforms[rows, counts], self.params)
        forced = {slot: r.forced[0] for slot, r in enumerate(self.slots) if r is not None and r.forced}
        if forced:
            tokens[list(forced)] = self._to_device(torch.tensor(list(forced.values())))
        return tokens, logps.gather(1, tokens[:, None])[:, 0]

    def _record(self, tokens: list[list[int]], logps: list[list[float]]) -> None:
        """Append tokens [S, A] to the responses up to their ends, and free the slots of completed responses."""
        for slot, response in enumerate(self.slots):
            if response is None:
                continue
            for token, logp in zip(tokens[slot], logps[slot], strict=True):
                if not math.isfinite(logp):
                    raise DivergenceError(
                        f"the model gives token {len(response.tokens)} of {response.id} the log-prob {logp}: its "
                        "weights or activations are no longer finite. Go back to an earlier checkpoint, or lower the "
                        "learning rate"
                    )
                self.builder.append(response, token, logp)
                if response.is_done:
                    self.slots[slot], self.cached[slot] = None, 0
                    break


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


def sample_tokens(logps: Tensor, uniform: Tensor, params: ARSamplingParams) -> Tensor:
    """Tokens [S] int64 from log-probs [S, V]: the most likely at temperature 0, else the inverse CDF at uniform [S].

    The CDF runs in vocabulary order over the tokens that top-k and then top-p keep.
    """
    if params.temperature == 0:
        return logps.argmax(1)
    return inverse_cdf(top_k_top_p(logps.double().exp(), params.top_k, params.top_p), uniform)


def top_k_top_p(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """[S, V] probabilities of the kept tokens, and 0 elsewhere. They are not renormalised.

    Keeps the `top_k` most likely tokens (0 keeps all), and of these the fewest whose share reaches `top_p`.
    """
    if top_k == 0 and top_p == 1.0:
        return probabilities
    count = min(top_k or probabilities.shape[1], probabilities.shape[1])
    ranked, order = (tensor[:, :count] for tensor in probabilities.sort(dim=1, descending=True, stable=True))
    shares = ranked.cumsum(1) / ranked.sum(1, keepdim=True)
    before = torch.cat([shares.new_zeros(len(shares), 1), shares[:, :-1]], dim=1)
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(before < top_p, ranked, 0.0))


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """[S] the first index at which the running sum of weights [S, V] float64 exceeds `uniform` [S] times their sum.

    It never selects an index of weight 0. In float64 the sums of 150,000 weights are accurate to 1e-14; in float32 a
    token of probability 1e-7 could not be distinguished from one of probability 0.
    """
    running = weights.cumsum(1)
    target = uniform.double()[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
