"""The networks of Janus-Pro: the language model as a policy over image tokens, and the decoder of these tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from unirl.models.language.bundle import Config, LanguageFamily
from unirl.models.language.policy import LMHead, TokenPolicy
from unirl.types.conditions import PromptImageInputs

if TYPE_CHECKING:
    from transformers import JanusVQVAE

VAE = "vae"
"""The frozen component that decodes image tokens."""
VAE_IN_CHECKPOINT = "model.vqmodel"
ENCODER_OF_VAE = ("encoder", "quant_conv")
"""The parts of the VAE that turn images into tokens, which training from texts does not need."""


class JanusPolicy(TokenPolicy):
    """Reads text and image tokens, and gives logits over the codebook.

    An image token has the id of its codebook entry. The text token t has the id K + t, where K is the codebook's size.
    """

    def tie_weights(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the head of texts, which may share the weight of the embedding, is left out."""

    def embeds(self, tokens: Tensor, images: PromptImageInputs | None) -> tuple[Tensor, dict[str, object]]:
        """Every token goes through both embeddings, and one of them is taken, so that the host waits for nothing."""
        size: int = self.config.vq_config.num_embeddings
        model: Any = self.get_submodule("model")
        text = model.language_model.embed_tokens((tokens - size).clamp(min=0))
        image = model.generation_aligner(model.generation_embeddings(tokens.clamp(max=size - 1)))
        return torch.where((tokens < size)[:, None], image, text)[None], {}

    def decoder(self) -> Any:
        return self.get_submodule("model.language_model")

    def head(self) -> LMHead:
        return self.get_submodule("model.generation_head")


JANUS = LanguageFamily(
    name="janus",
    model_class="JanusForConditionalGeneration",
    config_class="JanusConfig",
    block="LlamaDecoderLayer",
    policy=JanusPolicy,
    left_out=("model.vision_model", "model.aligner", VAE_IN_CHECKPOINT, "lm_head"),
)


@dataclass(frozen=True)
class CodebookDecoder:
    """Turns image tokens into pixels."""

    vae: JanusVQVAE
    components: ClassVar[tuple[str, ...]] = (VAE,)

    def decode(self, tokens: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [0, 1], not rounded."""
        return (self.vae.decode(tokens).float() / 2 + 0.5).clamp(0, 1)


def empty_decoder(config: Config) -> JanusVQVAE:
    """The VAE of a configuration without its encoder, and without storage for its parameters."""
    from accelerate import init_empty_weights
    from transformers import JanusVQVAE

    with init_empty_weights(include_buffers=False):
        vae = JanusVQVAE(JANUS.configuration(config).vq_config)
    for part in ENCODER_OF_VAE:
        delattr(vae, part)
    return vae


def plain_logits(network: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """[L, K] logits before each image token of a response after a prompt of text tokens, by a model of transformers."""
    text = network.get_input_embeddings()(prompt)
    image = network.prepare_embeddings_for_image_generation(response[:-1])
    states = network.model.language_model(inputs_embeds=torch.cat([text, image])[None], use_cache=False)
    logits: Tensor = network.model.generation_head(states.last_hidden_state[0, len(prompt) - 1 :])
    return logits
