"""A toy policy over tokens: a table of logits, so that every probability is known, and rollouts of it.

stage = token_stage()                      logits by prompt and previous token, over a vocabulary of 5
track = token_track(stage, prompts=2)      4 samples per prompt: different lengths, context tokens, rewards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from unirl.models.language.stage import TokenReplay, ValueGradient
from unirl.models.value_head import TokenValueHead
from unirl.sde.noise import NoiseSource
from unirl.testing.toy import toy_facts
from unirl.types.batch import Batch, row
from unirl.types.conditions import Conditions
from unirl.types.facts import LatentFacts
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import TextSegment

END = 0
"""The token that ends a response. It is sampled and trained like any other."""
CONTEXT = 2
"""The position of a context token in every response of `token_track`, like the answer of a tool."""


@dataclass(kw_only=True, eq=False)
class PromptNumber(Batch):
    """The number of the prompt of each row."""

    number: Tensor = row()  # [B] int64


class TokenTable(nn.Module):
    """Logits of the next token by prompt and previous token. The previous token of the first one is V."""

    def __init__(self, vocabulary: int = 5, prompts: int = 4) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.shape = (prompts, vocabulary + 1, vocabulary)
        self.table = nn.Parameter(torch.zeros(self.shape))

    def forward(self, prompt: Tensor, previous: Tensor) -> Tensor:
        """[N, V] logits for prompts [N] and previous tokens [N]."""
        return self.table[prompt, previous]

    @property
    def facts(self) -> LatentFacts:
        """Facts, which a train backend needs of a bundle."""
        return toy_facts(batch_multiple=1)

    def trainable(self) -> nn.Module:
        return self


@dataclass(frozen=True, kw_only=True)
class TokenSampling:
    """Sampling settings of the toy."""

    max_new_tokens: int = 6
    temperature: float = 1.0
    top_p: float = 1.0
    """Of the tokens that top_k keeps, keep the most likely ones until their probabilities sum to this."""
    top_k: int = 0
    """Keep this number of the most likely tokens; 0 = all."""
    ends: bool = True
    """A response ends after END. If false, all have max_new_tokens."""


class TableStage:
    """A `TokenStage` over a table.

    Its hidden state is the one-hot index of the line of the table that is read, and the line itself.
    """

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.value_head: nn.Module | None = None

    def build_value_head(self, width: int, seed: int) -> TokenValueHead:
        prompts, previous, tokens = self.table.shape
        return TokenValueHead.of(prompts * previous + tokens, width, seed)

    def replay(
        self,
        conditions: Conditions,
        segment: TextSegment,
        *,
        entropy: bool = False,
        values: ValueGradient | None = None,
    ) -> TokenReplay:
        prompt, previous = self._states(conditions, segment)
        logits: Tensor = self.table(prompt, previous)
        logps = (logits / segment.temperature).log_softmax(1)
        logp = logps.gather(1, segment.tokens[:, None])[:, 0]
        state_values = None if values is None else self._values(prompt, previous, logits, values)
        return TokenReplay(logp, -(logps.exp() * logps).sum(1) if entropy else None, state_values)

    @torch.no_grad()
    def sample(
        self, conditions: Conditions, params: TokenSampling, noise: NoiseSource, ids: Sequence[str]
    ) -> TextSegment:
        """One response per row: position t by inverse CDF of entry t of the draw `tok` of the row's id."""
        prompt = _prompt(conditions)
        uniform = noise.uniform(ids, "tok", (params.max_new_tokens,)).to(prompt.device)
        previous = torch.full_like(prompt, self.table.vocabulary)
        tokens, logps = [], []
        for t in range(params.max_new_tokens):
            full = self._logps(prompt, previous, params.temperature)
            previous = _drawn(truncated(full.exp(), params), uniform[:, t])
            tokens.append(previous)
            logps.append(full.gather(1, previous[:, None])[:, 0])
        grid, logp = torch.stack(tokens, dim=1), torch.stack(logps, dim=1)  # [B, T]
        ended = (grid == END).int().cumsum(1) - (grid == END).int() > 0
        mask = ~ended if params.ends else torch.ones_like(ended)
        return TextSegment(
            tokens=grid[mask],
            logp=logp[mask],
            loss_mask=torch.ones(int(mask.sum()), dtype=torch.bool, device=grid.device),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0).cpu()]),
            finished=(grid == END).any(1) if params.ends else torch.zeros_like(ended[:, 0]),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            anchors={},
        )

    def _values(self, prompt: Tensor, previous: Tensor, logits: Tensor, gradient: ValueGradient) -> Tensor:
        """[N] values of the states."""
        assert self.value_head is not None, "a stack whose loss needs a value head provides it"
        prompts, lines, _ = self.table.shape
        line = one_hot(prompt * lines + previous, prompts * lines)
        values: Tensor = self.value_head(torch.cat([line, logits if gradient == "policy" else logits.detach()], dim=1))
        return values

    def _logps(self, prompt: Tensor, previous: Tensor, temperature: float) -> Tensor:
        """[N, V] log-probs of the tempered distribution."""
        logits: Tensor = self.table(prompt, previous)
        return (logits / temperature).log_softmax(1)

    def _states(self, conditions: Conditions, segment: TextSegment) -> tuple[Tensor, Tensor]:
        """[sum L] the prompt of each token and the token before it."""
        prompt = _prompt(conditions).repeat_interleave(segment.lengths.to(segment.tokens.device))
        previous = segment.tokens.roll(1)
        starts = segment.offsets[:-1][segment.lengths > 0].to(previous.device)
        return prompt, previous.index_fill(0, starts, self.table.vocabulary)


def truncated(probabilities: Tensor, params: TokenSampling) -> Tensor:
    """[N, V] the sampling distribution: the most likely tokens that top_k and then top_p keep, renormalised."""
    likely = top_k_top_p(probabilities, params.top_k, params.top_p)
    return likely / likely.sum(1, keepdim=True)


def top_k_top_p(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """[N, V] probabilities of the kept tokens, and 0 elsewhere, by a stable sort of the whole vocabulary.

    Keeps the `top_k` most likely tokens (0 keeps all), and of these the fewest whose share reaches `top_p`.
    """
    if top_k == 0 and top_p == 1.0:
        return probabilities
    count = min(top_k or probabilities.shape[1], probabilities.shape[1])
    ranked, order = (tensor[:, :count] for tensor in probabilities.sort(dim=1, descending=True, stable=True))
    shares = ranked.cumsum(1) / ranked.sum(1, keepdim=True)
    before = torch.cat([shares.new_zeros(len(shares), 1), shares[:, :-1]], dim=1)
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(before < top_p, ranked, 0.0))


def token_table(seed: int = 0, vocabulary: int = 5, prompts: int = 4) -> TokenTable:
    """A table of normal logits, which depend on the seed alone."""
    table = TokenTable(vocabulary, prompts)
    with torch.no_grad():
        table.table.normal_(generator=torch.Generator().manual_seed(seed))
    return table


def token_stage(seed: int = 0, **shape: int) -> TableStage:
    """A stage over a new table, which is `stage.table`."""
    return TableStage(token_table(seed, **shape))


def token_track(
    stage: TableStage,
    prompts: int = 2,
    siblings: int = 4,
    params: TokenSampling | None = None,
    seed: int = 42,
    step: int = 0,
    context: int | None = CONTEXT,
) -> RolloutTrack[TextSegment]:
    """A rollout of `stage`. The reward is the fraction of tokens equal to 1, the advantage is it minus its mean.

    Args:
        context: the position of the context token in every row; None = all tokens are sampled.
    """
    groups = [f"p{i}@{step}" for i in range(prompts) for _ in range(siblings)]
    ids = [f"{group}:{i % siblings}" for i, group in enumerate(groups)]
    conditions: Conditions = {"prompt": PromptNumber(number=torch.arange(prompts).repeat_interleave(siblings))}
    segment = stage.sample(conditions, params or TokenSampling(), NoiseSource(seed, "r", step), ids)
    if context is not None:
        segment = segment.replace(loss_mask=positions(segment) != context)
    rewards = torch.stack([(row == 1).float().mean() for row in segment.tokens.split(segment.lengths.tolist())])
    return RolloutTrack(
        sample_ids=ids,
        group_ids=groups,
        conditions=conditions,
        segment=segment,
        rewards=rewards,
        advantages=rewards - rewards.mean(),
        weight=torch.ones(len(ids)),
        weight_version=torch.zeros(len(ids), dtype=torch.int64),
    )


def positions(segment: TextSegment) -> Tensor:
    """[sum L] the position of each token in its row."""
    places = torch.arange(len(segment.tokens)) - segment.offsets[:-1].repeat_interleave(segment.lengths)
    return places.to(segment.tokens.device)


def _prompt(conditions: Conditions) -> Tensor:
    prompt = conditions["prompt"]
    assert isinstance(prompt, PromptNumber)
    return prompt.number


def _drawn(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[N] the first token whose cumulative probability exceeds `uniform` [N]; never one of probability 0."""
    passed = (probabilities.cumsum(1) <= uniform[:, None]).sum(1)
    last = (probabilities > 0).int().flip(1).argmax(1)  # round-off may leave the sum below `uniform`
    return torch.minimum(passed, probabilities.shape[1] - 1 - last)
