"""OpenVLA as a policy over action tokens. Kim et al. 2024 (arXiv:2406.09246) and, in parallel, 2025 (arXiv:2502.19645).

    <s>, patches of the images, instruction, K action tokens --Llama--> K distributions over the bins

An instruction has a fixed number of places, and stands at their end; empty places are masked and have no position, so
that a row does not depend on how long the instructions of other rows are. With `autoregressive` decoding the tokens
before a token are its inputs, and attention looks back alone. With `parallel` decoding (OpenVLA-OFT) the inputs are
zeros, attention looks in both directions, and one forward gives all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from unirl.models.openvla.actions import ActionScale, bin_centres
from unirl.models.openvla.vision_towers import Projector, VisionBackbone
from unirl.models.policies.networks import HIDDEN, PARTS, Outputs, PolicyNetwork
from unirl.types.environments import INSTRUCTION, ContinuousActions, Observations

if TYPE_CHECKING:
    from transformers import DynamicCache, LlamaConfig

DecodingOrder = Literal["autoregressive", "parallel"]
DecisionPart = Literal["token", "action", "chunk"]
Config = Mapping[str, Any]
END = 2
"""`</s>` of Llama 2, which follows the action tokens of a sequence that is decoded in parallel."""


def text_config(config: Config) -> LlamaConfig:
    """The sizes of the language model. The published file names few; the others have the defaults of the class."""
    from transformers import LlamaConfig

    return LlamaConfig(**{"attn_implementation": "sdpa", **config["text_config"]})


class OpenVLAPolicy(PolicyNetwork):
    """A policy of chunks of C actions of A numbers, each of which is one of 256 bins.

    Recorded are the bins [N, C A]. The log-prob of a decision is the sum over its tokens, at the temperature of the
    policy, among the action tokens alone.
    """

    noise = "uniform"

    def __init__(
        self,
        config: Config,
        *,
        cameras: Sequence[str],
        actions: int,
        chunk: int,
        decoding: DecodingOrder,
        temperature: float,
        scale: ActionScale | None,
        parts: DecisionPart = "token",
    ) -> None:
        """
        Args:
            config: the configuration file of a checkpoint.
            cameras: keys of the observations that are images, in the order in which the network reads them.
            actions: A.
            chunk: C.
            temperature: divides the logits.
            parts: what of a decision has a log-prob of its own: each of its C A tokens, each of its C actions, or
                nothing but the chunk.
            scale: from numbers in [-1, 1] to actions of the robot. None: the numbers are the actions.
        """
        from transformers import LlamaForCausalLM

        super().__init__()
        self.cameras, self.chunk, self.action_size, self.decoding = tuple(cameras), chunk, actions, decoding
        self.temperature, self.scale, self.parts = temperature, scale, parts
        self.actions = ContinuousActions(actions)
        self.num_tokens, self.num_bins = chunk * actions, int(config["n_action_bins"])
        self.noise_shape = (self.num_tokens,)
        self.vocabulary = config["text_config"]["vocab_size"] - config["pad_to_multiple_of"]
        self.centres = bin_centres(self.num_bins)
        self.vision_backbone = VisionBackbone(config["timm_model_ids"], config["image_sizes"])
        text = text_config(config)
        self.projector = Projector(self.vision_backbone.width, text.hidden_size)
        self.language_model = LlamaForCausalLM(text)

    @property
    def hidden_size(self) -> int:
        """D of the states."""
        size: int = self.language_model.config.hidden_size
        return size

    def forward(
        self,
        observations: Observations,
        actions: Tensor | None = None,
        noise: Tensor | None = None,
        deterministic: bool = False,
        entropy: bool = False,
    ) -> Outputs:
        """See `PolicyNetwork.forward`. `hidden` [N, D] is the state from which the first token is predicted."""
        prompt, seen = self._prompt(observations)
        chosen_by = None if deterministic else noise
        if actions is None and self.decoding == "autoregressive":
            actions = self._decode(prompt, seen, chosen_by)
        # The log-probs of new actions come from the forward that replays them, so that a replay has the same bits.
        hidden = self._states(prompt, seen, actions)
        logits = self._logits(hidden)
        if actions is None:
            actions = self._chosen(logits, chosen_by)
        of_tokens = self.token_log_probs(logits, actions)
        size = {"token": 1, "action": self.action_size, "chunk": self.num_tokens}[self.parts]
        outputs = {
            "actions": actions,
            "logp": of_tokens.sum(1),
            PARTS: of_tokens.unflatten(1, (-1, size)).sum(2),
            HIDDEN: hidden[:, 0].float(),
        }
        return outputs | ({"entropy": self.entropy(logits)} if entropy else {})

    def parameters_of(self, observations: Observations) -> Tensor:
        """[N, K, 256] logits of bins, with parallel decoding; otherwise they depend on the tokens before."""
        assert self.decoding == "parallel", "the logits of a token depend on those before it"
        prompt, seen = self._prompt(observations)
        return self._logits(self._states(prompt, seen, None))

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """[N, K] bins, by the inverse of the distribution function in the order of the bins."""
        below = parameters.softmax(-1).cumsum(-1) <= noise[..., None]
        return below.sum(-1).clamp(max=self.num_bins - 1)

    def likeliest(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return parameters.argmax(-1)

    def token_log_probs(self, logits: Tensor, actions: Tensor) -> Tensor:
        """[N, K] log-probs of bins [N, K], nats."""
        return logits.log_softmax(-1).gather(-1, actions[..., None])[..., 0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        return self.token_log_probs(parameters, actions).sum(1)

    def entropy(self, parameters: Tensor) -> Tensor:
        logp = parameters.log_softmax(-1)
        return -(logp.exp() * logp).sum((1, 2))

    def executed(self, actions: Tensor) -> Tensor:
        """[N, C, A] actions of the robot. An environment clips what is beyond its own bounds."""
        numbers = self.centres[actions.cpu()].unflatten(1, (self.chunk, self.action_size))
        return numbers if self.scale is None else self.scale.apply(numbers)

    # The sequence

    def _prompt(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Inputs [N, P + L, D] of the language model before the actions, and bool, True where there is a token."""
        words = observations[INSTRUCTION]
        embeds = self.language_model.model.embed_tokens(words.clamp(min=0))
        patches = [self.projector(self.vision_backbone(observations[camera])) for camera in self.cameras]
        prompt = torch.cat([embeds[:, :1], *(part.to(embeds.dtype) for part in patches), embeds[:, 1:]], dim=1)
        seen = torch.ones(prompt.shape[:2], dtype=torch.bool, device=prompt.device)
        seen[:, prompt.shape[1] - (words.shape[1] - 1) :] = words[:, 1:] >= 0
        return prompt, seen

    def _states(self, prompt: Tensor, seen: Tensor, actions: Tensor | None) -> Tensor:
        """[N, K, D] the states from which the action tokens are predicted, in one forward."""
        if self.decoding == "parallel":
            end = torch.full((len(prompt), 1), END, device=prompt.device)
            zeros = prompt.new_zeros(len(prompt), self.num_tokens, prompt.shape[2])
            after = torch.cat([zeros, self.language_model.model.embed_tokens(end).to(prompt.dtype)], dim=1)
        else:
            assert actions is not None
            after = self._embedded(actions[:, :-1]).to(prompt.dtype)
        inputs = torch.cat([prompt, after], dim=1)
        seen = torch.cat([seen, seen.new_ones(after.shape[:2])], dim=1)
        states = self._llama(inputs, seen, inputs.shape[1])
        first = prompt.shape[1] - 1
        return states[:, first : first + self.num_tokens]

    def _embedded(self, actions: Tensor) -> Tensor:
        """[N, K, D] embeddings of bins [N, K]."""
        return self.language_model.model.embed_tokens(self.vocabulary - 1 - actions)

    def _llama(self, inputs: Tensor, seen: Tensor, queries: int, cache: DynamicCache | None = None) -> Tensor:
        """States [N, queries, D] of the last tokens of a sequence; `seen` [N, T] is False at its empty places."""
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -queries:]
        allowed = seen[:, None, None, :].expand(-1, 1, queries, -1)
        if self.decoding == "autoregressive":
            places = torch.arange(seen.shape[1], device=seen.device)
            here = places[-queries:, None]
            # An empty place looks at itself, since a softmax over nothing is not a number.
            allowed = (allowed & (places <= here)) | (places == here)
        output = self.language_model.model(
            inputs_embeds=inputs,
            attention_mask=allowed,
            position_ids=positions,
            cache=cache,
            use_cache=cache is not None,
        )
        states: Tensor = output.last_hidden_state
        return states

    def _logits(self, states: Tensor) -> Tensor:
        """[N, K, 256] fp32 logits of bins at the temperature of the policy; no other token is computed."""
        head = self.language_model.lm_head.weight[self.vocabulary - self.num_bins : self.vocabulary]
        return linear(states, head).float().flip(-1) / self.temperature

    def _decode(self, prompt: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
        """[N, K] new bins, one after another: drawn with `noise` [N, K], or the likeliest ones."""
        from transformers import DynamicCache

        cache, inputs, chosen = DynamicCache(), prompt, []
        for place in range(self.num_tokens):
            state = self._llama(inputs, seen, inputs.shape[1], cache)[:, -1:]
            chosen.append(self._chosen(self._logits(state), None if noise is None else noise[:, place : place + 1]))
            inputs = self._embedded(chosen[-1]).to(prompt.dtype)
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
        return torch.cat(chosen, dim=1)

    def _chosen(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        return logits.argmax(-1) if noise is None else self.draw(logits, noise)
