"""Responses token by token: rows sit in slots, whose keys and values are kept; who is finished makes room.

    waiting rows --prefill, a prompt once for all its rows--> slots --draw--> tokens --one forward--> slots ...
                                                                |
                                                          finished rows

A forward has one token of every slot. Where nobody waits any more, empty slots are given up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unirl.config.errors import DivergenceError
from unirl.models.chunks import padded_rows, round_up
from unirl.models.language.packing import expand_positions, first_row_with_same_prompt, pack_prompts, prompts_of
from unirl.models.language.policy import NextTokenLogits, Outputs, TokenInputs, tempered
from unirl.models.language.responses import Response, ResponseBuilder
from unirl.models.language.slot_cache import KVCache, Prefill, Step
from unirl.models.language.token_sampling import sample_tokens
from unirl.types.conditions import Conditions
from unirl.types.sampling import ARSamplingParams

PREFILL_TOKENS = 16384
"""Tokens of prompts in one forward, or one prompt."""
TOKENS_AHEAD = 8
"""On an accelerator, tokens that are drawn before the driver looks at them. What follows an end is thrown away."""

Forward = Callable[[TokenInputs], Outputs]


class Decoding:
    """One rollout of all rows of `conditions`."""

    def __init__(
        self,
        forward: Forward,
        conditions: Conditions,
        params: ARSamplingParams,
        endings: ResponseBuilder,
        uniforms: Tensor,
        responses: Sequence[Response],
    ) -> None:
        """
        Args:
            forward: the network.
            uniforms: [B, max_new_tokens] what each token of each row is drawn by.
            responses: one per row, to be padded.
        """
        self.forward = forward
        self.conditions = conditions
        self.params = params
        self.endings = endings
        self.uniforms = uniforms
        self.responses = responses
        self.prompts = prompts_of(conditions)
        self.device = self.prompts.tokens.device
        self.ends = torch.tensor(endings.codec.ends, dtype=torch.int64, device=self.device)
        self.first_of_prompt = first_row_with_same_prompt(conditions)
        self.response_start = (self.prompts.next_position.cpu() - self.prompts.lengths).tolist()
        """By row: what the position of a response's token is ahead of the number of tokens before it."""
        self.waiting = deque(responses)

    def run(self, slots: int, multiple: int) -> None:
        """Fill all responses, at most `slots` at a time; forwards have multiples of `multiple` slots and tokens."""
        self.multiple = multiple
        count = round_up(min(slots, len(self.responses)), multiple)
        self.cache = KVCache(count)
        self.seats: list[Response | None] = [None] * count
        self.cached = [0] * count
        """Tokens of each slot whose keys and values are kept."""
        self.logits: Tensor | None = None
        """[S, V] of the token that comes next in each slot."""
        while self._seat():
            tokens = self._draw_ahead()
            if any(self.seats):
                self._step(tokens)

    # Who sits where

    def _seat(self) -> bool:
        """Fill empty slots with who waits, or give empty slots up; whether anybody sits."""
        if self.waiting:
            empty = [slot for slot, response in enumerate(self.seats) if response is None]
            prompts: dict[int, list[int]] = {}
            for slot in empty[: len(self.waiting)]:
                response = self.waiting.popleft()
                self.seats[slot] = response
                prompts.setdefault(self.first_of_prompt[response.row], []).append(slot)
            for some in _within(prompts, self.prompts.lengths.tolist()):
                self._prefill({row: prompts[row] for row in some})
        elif 2 * round_up(sum(map(bool, self.seats)), self.multiple) <= len(self.seats):
            self._give_up_slots()
        return any(self.seats)

    def _give_up_slots(self) -> None:
        taken = [slot for slot, response in enumerate(self.seats) if response is not None]
        empty = [slot for slot, response in enumerate(self.seats) if response is None]
        kept = sorted(taken + empty[: round_up(len(taken), self.multiple) - len(taken)])
        self.cache.keep(kept)
        self.seats = [self.seats[slot] for slot in kept]
        self.cached = [self.cached[slot] for slot in kept]
        assert self.logits is not None
        self.logits = self.logits[kept]

    # Forwards

    def _prefill(self, prompts: dict[int, list[int]]) -> None:
        """Read the prompts of some rows, each for all the slots that wait for it."""
        packed = pack_prompts(self.conditions, list(prompts))
        self.cache.reserve(max(packed.lengths))
        sources, places, start = [], [], 0
        for length, slots in zip(packed.lengths, prompts.values(), strict=True):
            for slot in slots:
                sources.append(torch.arange(start, start + length))
                places.append(torch.arange(length) + slot * self.cache.capacity)
                self.cached[slot] = length
            start += length
        lasts = torch.tensor(packed.lengths).cumsum(0) - 1
        padded = packed.padded(self.multiple)
        attention_fn = Prefill(
            self.cache, padded.lengths, self._here(torch.cat(sources)), self._here(torch.cat(places))
        )
        output_fn = NextTokenLogits(self._here(lasts[padded_rows(len(lasts), self.multiple)]))
        logits = self.forward(padded.inputs(attention_fn, output_fn))["logits"]
        if self.logits is None:
            self.logits = logits.new_zeros(len(self.seats), logits.shape[1])
        for i, slots in enumerate(prompts.values()):
            self.logits[slots] = logits[i]

    def _step(self, tokens: Tensor) -> None:
        """Read one token [S] of every slot; an empty one reads on into nothing."""
        starts = [0 if r is None else self.response_start[r.row] for r in self.seats]
        positions = torch.tensor([start + done for start, done in zip(starts, self.cached, strict=True)])
        lengths = [done + 1 for done in self.cached]
        self.cache.reserve(max(lengths))
        inputs = TokenInputs(
            tokens=tokens,
            positions=expand_positions(self._here(positions), self.prompts.positions),
            attention_fn=Step(self.cache, lengths, self.device),
            output_fn=NextTokenLogits(torch.arange(len(tokens), device=self.device)),
        )
        self.logits = self.forward(inputs)["logits"]
        self.cached = [0 if r is None else n for r, n in zip(self.seats, lengths, strict=True)]

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    # Tokens

    def _draw_ahead(self) -> Tensor:
        """The last of some tokens [S] that were drawn for every slot; who is over leaves."""
        drawn: list[Tensor] = []
        logps: list[Tensor] = []
        for i in range(self._tokens_ahead()):
            if i:
                self._step(drawn[-1])
            token, logp = self._draw(i)
            drawn.append(token)
            logps.append(logp)
        self._record(torch.stack(drawn, 1).tolist(), torch.stack(logps, 1).tolist())
        return drawn[-1]

    def _tokens_ahead(self) -> int:
        """How many tokens to draw before looking at them; one where text decides, or where looking costs nothing."""
        if self.device.type == "cpu" or self.endings.watched:
            return 1
        left = [self.params.max_new_tokens - len(r.tokens) for r in self.seats if r is not None]
        return min(TOKENS_AHEAD, *left)

    def _draw(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Tokens [S] and their log-probs [S], `ahead` of those that are recorded."""
        assert self.logits is not None
        rows = [0 if r is None else r.row for r in self.seats]
        counts = [0 if r is None else len(r.tokens) + ahead for r in self.seats]
        logps = tempered(self.logits, self.params.temperature)
        allowed = logps
        if self.params.min_new_tokens > min(counts):
            early = self._here(torch.tensor(counts)) < self.params.min_new_tokens
            allowed = logps.clone()
            allowed[:, self.ends] = allowed[:, self.ends].masked_fill(early[:, None], -math.inf)
        tokens = sample_tokens(allowed, self.uniforms[rows, counts], self.params)
        forced = {slot: r.forced[0] for slot, r in enumerate(self.seats) if r is not None and r.forced}
        if forced:
            tokens[list(forced)] = self._here(torch.tensor(list(forced.values())))
        return tokens, logps.gather(1, tokens[:, None])[:, 0]

    def _record(self, tokens: list[list[int]], logps: list[list[float]]) -> None:
        """Extend the responses by tokens [S, A] up to their ends; who is over leaves the slot empty."""
        for slot, response in enumerate(self.seats):
            if response is None:
                continue
            for token, logp in zip(tokens[slot], logps[slot], strict=True):
                if not math.isfinite(logp):
                    raise DivergenceError(
                        f"the model gives token {len(response.tokens)} of {response.id} the log-prob {logp}: its "
                        "weights or activations are no longer finite. Go back to an earlier checkpoint, or lower the "
                        "learning rate"
                    )
                self.endings.extend(response, token, logp)
                if response.is_over:
                    self.seats[slot], self.cached[slot] = None, 0
                    break


def _within(rows: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """`rows` in parts of at most PREFILL_TOKENS tokens, or of one row."""
    parts: list[list[int]] = []
    total = 0
    for row in rows:
        total += lengths[row]
        if not parts or total > PREFILL_TOKENS:
            parts.append([])
            total = lengths[row]
        parts[-1].append(row)
    return parts
