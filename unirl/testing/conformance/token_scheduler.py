"""Decodes the requests of a fake server of tokens together, token by token, so that any of them can be broken off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unirl.models.language.policy import tempered
from unirl.models.language.sampling import sample_tokens
from unirl.sde.noise import NoiseSource
from unirl.testing.conformance.token_model import TokenModel
from unirl.types.conditions import Conditions
from unirl.types.sampling import ARSamplingParams

YIELD_S = 0.0005
"""A pause between two tokens, in which other threads get the lock."""


@dataclass(eq=False)
class DecodedRow:
    """One response while it is sampled."""

    rid: str
    prompt: Sequence[int]
    """With one placeholder for each token of an image."""
    conditions: Conditions
    """The prompt for the network."""
    params: ARSamplingParams
    ends: Sequence[int]
    seed: int | None
    """None: its tokens are drawn from torch's generator, and cannot be repeated."""
    adapter: str | None = None
    scored: Sequence[int] = ()
    """Tokens whose log-probs are reported at every position."""
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Per token, the name of the weights that it was sampled from."""
    ending: str = ""
    """`stop`, `length` or `abort`; empty while it runs."""
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        shape = (self.params.max_new_tokens,)
        seeded = None if self.seed is None else NoiseSource(self.seed, "r", 0).uniform([""], "tok", shape)[0]
        self.uniforms: Tensor = torch.rand(shape) if seeded is None else seeded

    def append(self, token: int, logp: float, scores: list[float], version: str) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.scores.append(scores)
        self.versions.append(version)
        if token in self.ends:
            self.ending = "stop"
        elif len(self.tokens) == self.params.max_new_tokens:
            self.ending = "length"


def of_all_tokens(logits: Tensor, params: ARSamplingParams) -> Tensor:
    """Log-probs [B, V] of the tempered distribution, before top_k and top_p."""
    return tempered(logits, params.temperature)


class TokenScheduler:
    """Samples the next token of all requests in one forward, in a thread of its own."""

    def __init__(self, model: TokenModel, version: str) -> None:
        self.model = model
        self.version = version
        """The name of the present weights."""
        self.is_paused = False
        self.bend: Callable[[Tensor], Tensor] = lambda logits: logits
        """Changes the logits, for a fault."""
        self.log_probs: Callable[[Tensor, ARSamplingParams], Tensor] = of_all_tokens
        """Computes the log-probs that are reported, from logits [B, V] and the settings of the response."""
        self.running: list[DecodedRow] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._run, name="scheduler", daemon=True).start()

    def complete(self, rows: Sequence[DecodedRow]) -> None:
        """Sample the responses. Returns when all are done. During a pause, new ones wait."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_paused)
            self.running += rows
            self.changed.notify_all()
        for row in rows:
            row.done.wait()

    def abort(self, rid: str | None) -> None:
        """End the request of that name as it is, or all of them."""
        with self.changed:
            for row in [row for row in self.running if rid in (None, row.rid)]:
                self._end(row, "abort")

    def pause(self, is_paused: bool) -> None:
        """Stop between two tokens, or go on."""
        with self.changed:
            self.is_paused = is_paused
            self.changed.notify_all()

    def is_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs. Returns False if some do for longer."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.running, timeout_s)

    @contextmanager
    def between_requests(self) -> Iterator[None]:
        """Context in which no token is sampled. It waits for all requests to end, unless they are paused."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_paused or not self.running)
            yield

    def _run(self) -> None:
        while True:
            time.sleep(YIELD_S)
            with self.changed:
                self.changed.wait_for(lambda: self.running and not self.is_paused)
                adapters = dict.fromkeys(row.adapter for row in self.running)
                for adapter in adapters:
                    self._step([row for row in self.running if row.adapter == adapter], adapter)

    def _step(self, rows: Sequence[DecodedRow], adapter: str | None) -> None:
        logits = self.bend(self.model.logits([(row.conditions, row.tokens) for row in rows], adapter))
        for row, own in zip(rows, logits.split(1), strict=True):
            self._sample(row, own)
        for row in rows:
            if row.ending:
                self._end(row, row.ending)

    def _sample(self, row: DecodedRow, logits: Tensor) -> None:
        """Append a token that is sampled from logits [1, V]."""
        if len(row.tokens) < row.params.min_new_tokens:
            logits = logits.clone()
            logits[:, list(row.ends)] = -torch.inf
        uniform = row.uniforms[len(row.tokens)][None]
        token = int(sample_tokens(tempered(logits, row.params.temperature), uniform, row.params))
        reported = self.log_probs(logits, row.params)[0]
        row.append(token, float(reported[token]), reported[list(row.scored)].tolist(), self.version)

    def _end(self, row: DecodedRow, ending: str) -> None:
        row.ending = ending
        self.running.remove(row)
        row.done.set()
        self.changed.notify_all()
