"""Janus-Pro: text to image tokens with a language model, from transformers classes.

The language model reads text tokens through its own embedding, and image tokens through an embedding of the codebook
and an aligner. The generation head gives logits over the codebook. A VQ decoder turns the tokens into an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.config.errors import DataError, InvalidValueError, NotFoundError
from unirl.models.chunks import padded_chunks
from unirl.models.denoising.decoding import PixelRows
from unirl.models.janus_pro.network import JANUS, VAE, VAE_IN_CHECKPOINT, CodebookDecoder, empty_decoder, plain_logits
from unirl.models.language.bundle import CPU, LM, Config, LanguageBundle, language_facts
from unirl.models.language.chat import TextCodec
from unirl.models.language.guidance import guided_logits
from unirl.models.language.image_tokens import UNCONDITIONAL, ImageTokenStage, unconditional_of
from unirl.models.language.packing import prompt_tokens, prompts_of
from unirl.models.language.pipeline import CANARIES, TokenPipeline, check_prompt_length
from unirl.models.language.policy import tempered
from unirl.models.language.tools import ToolBox
from unirl.models.loading.adapter_files import Adapter
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.estimate import ModelEstimate, parameters_of
from unirl.models.loading.hub import copy_files, quiet_libraries
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, ModuleWeights, SafetensorsWeights, SavedWeights
from unirl.models.loading.toy_tokenizers import janus_tokenizer
from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.facts import ImageTokenFacts
from unirl.types.primitives import Images
from unirl.types.progress import progress
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import ARSamplingParams, ImageTokenSamplingParams
from unirl.types.segments import ImageTokenSegment, TextSegment

FOLDER = Path(__file__).parent
BEGIN_OF_IMAGE = "<begin_of_image>"
CHAT = "<|User|>: {text}\n\n<|Assistant|>:"
"""The chat of a prompt, up to the beginning of the answer, which is an image."""
ORIGINALS = {f"deepseek-ai/{name}": f"deepseek-community/{name}" for name in ("Janus-Pro-1B", "Janus-Pro-7B")}
"""Checkpoints in the format of DeepSeek's own code, and the same weights in that of transformers."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja")
"""The files of a checkpoint that only the processor of transformers reads."""
CANARY_IMAGE_TOKENS = 4


class JanusProBundle(LanguageBundle):
    """Janus-Pro 1B and 7B without their vision tower: the language model is trained, the VQ decoder is frozen.

    Trained are the language model, and the embedding, aligner and head of image tokens. The decoder computes in
    float32.
    """

    component_names = (LM, VAE)
    families: ClassVar = {JANUS.name: JANUS}
    toys = read_entries(FOLDER / "toy.json")
    published = read_entries(FOLDER / "published.json")
    shipped: ClassVar[Mapping[str, Path]] = {}
    toy_tokenizer = staticmethod(janus_tokenizer)
    facts: ImageTokenFacts

    @classmethod
    def config_of(cls, path: str, revision: str | None = None) -> Config:
        if path in ORIGINALS:
            raise InvalidValueError(
                f"bundle.path={path} is in the format of DeepSeek's own code, which transformers does not read. Use "
                f"bundle.path={ORIGINALS[path]}, which has the same weights"
            )
        config = super().config_of(path, revision)
        if path in cls.toys:
            return config
        filled: Config = JANUS.configuration(config).to_dict()  # files may leave out what equals a default
        tokens, grid = filled["vision_config"]["num_image_tokens"], filled["vq_config"]["num_patches"]
        if tokens != grid**2:
            raise NotFoundError(
                f"{path}: its config.json has num_image_tokens={tokens} and a grid of {grid} x {grid} image tokens, "
                "which do not agree. Download it again"
            )
        return filled

    @classmethod
    def _facts(cls, config: Config, device: torch.device = CPU) -> ImageTokenFacts:
        language = vars(language_facts(JANUS, config, device))
        vision = config["vision_config"]
        codebook = {"vocab_size": config["vq_config"]["num_embeddings"]}
        return ImageTokenFacts(
            **language | codebook, image_size=vision["image_size"], num_image_tokens=vision["num_image_tokens"]
        )

    @classmethod
    def estimate(cls, path: str, revision: str | None = None) -> ModelEstimate:
        with quiet_libraries():
            decoder = parameters_of(empty_decoder(cls._config_to_plan(path, revision)))
        estimate = super().estimate(path, revision)
        return replace(estimate, parameters={**estimate.parameters, VAE: decoder})

    def stage(self, tools: ToolBox | None = None, use_cuda_graphs: bool = False) -> ImageTokenStage:
        return ImageTokenStage(self.trainable(), self.facts, self.codec, self.dtype, tools, use_cuda_graphs)

    def decoder(self) -> CodebookDecoder:
        """The decoder of image tokens."""
        vae: Any = self.modules[VAE]
        return CodebookDecoder(vae)

    def _load_codec(self) -> TextCodec:
        codec = super()._load_codec()
        missing = [name for name in ("bos_token_id", "pad_token_id") if getattr(codec.tokenizer, name) is None]
        if missing or BEGIN_OF_IMAGE not in codec.tokenizer.get_vocab():
            raise NotFoundError(
                f"{self.path}: its tokenizer has no {' and no '.join(missing) or BEGIN_OF_IMAGE}, which begins or "
                "fills the prompts of images. Use the tokenizer of Janus-Pro"
            )
        return TextCodec(codec.tokenizer, ())  # nothing ends an image

    def _load_frozen(self, names: Sequence[str]) -> Mapping[str, nn.Module]:
        if VAE not in names:
            return {}
        vae, saved = empty_decoder(self.config), self._decoder_weights()
        sources = {name: f"{VAE_IN_CHECKPOINT}.{name}" for name in vae.state_dict()}
        missing = sorted({*sources.values()} - {*saved.shapes()})
        if missing:
            raise NotFoundError(
                f"{self.path}: the tensor {missing[0]} of the image decoder is missing ({len(missing)} in all). "
                "Download the model again"
            )
        vae.load_state_dict({name: saved.read(own).float() for name, own in sources.items()}, assign=True)
        return {VAE: vae}

    def _decoder_weights(self) -> SavedWeights:
        if self.path in self.toys:
            return ModuleWeights(self._plain(torch.float32))
        root = self.directory_of(self.path, self.revision)
        return SafetensorsWeights(root, lambda name: torch.float32, LANGUAGE_WEIGHTS, self.family.parameter_name)


class JanusProPipeline(TokenPipeline[JanusProBundle]):
    """Text to image with Janus-Pro."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image",))
    track: ClassVar[str] = "image"

    def __init__(self, bundle: JanusProBundle, *, decode_batch_size: int = 4, use_cuda_graphs: bool = False) -> None:
        """
        Args:
            decode_batch_size: number of images per forward of the decoder.
            use_cuda_graphs: see `TextPipeline`.
        """
        super().__init__(bundle, bundle.stage(use_cuda_graphs=use_cuda_graphs))
        self.facts: ImageTokenFacts = bundle.facts
        self.decode_batch_size = decode_batch_size

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """`prompt`, and with guidance `unconditional_prompt`. Each distinct prompt is encoded once."""
        assert isinstance(params, ImageTokenSamplingParams)
        texts = req.prompts()
        tokens = {text: self.prompt(text) for text in dict.fromkeys(texts)}
        for text, id in zip(texts, req.group_ids, strict=True):
            check_prompt_length(len(tokens[text]), id, params)
        prompts = [tokens[text] for text in texts]
        conditions: Conditions = {"prompt": prompt_tokens(prompts)}
        if params.is_guided:
            conditions[UNCONDITIONAL] = prompt_tokens([self.unconditional(prompt) for prompt in prompts])
        return {name: condition.to(self.bundle.device) for name, condition in conditions.items()}

    def prompt(self, text: str) -> list[int]:
        """The ids of the tokens that the model reads before an image: bos, the chat, begin-of-image."""
        codec = self.bundle.codec
        tokens = [codec.tokenizer.bos_token_id, *codec.encode(CHAT.format(text=text.strip()) + BEGIN_OF_IMAGE)]
        return [self.facts.vocab_size + token for token in tokens]

    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        """`prompt` with padding in place of all tokens but bos and begin-of-image, as transformers builds it."""
        tokenizer, size = self.bundle.codec.tokenizer, self.facts.vocab_size
        kept = {size + tokenizer.bos_token_id, size + tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)}
        return [token if token in kept else size + tokenizer.pad_token_id for token in prompt]

    def decoded(self, segment: TextSegment, sample_ids: Sequence[str]) -> Images:
        """The images, rounded to 256 levels. Raises DataError for tokens that are not in the codebook."""
        tokens, decoder = self.image_tokens(segment, sample_ids), self.bundle.decoder()
        pixels = PixelRows(len(tokens))
        with torch.no_grad(), self.bundle.resident(decoder.components):
            chunks = padded_chunks(len(tokens), self.decode_batch_size, self.facts.batch_multiple)
            for chunk in chunks:
                made = decoder.decode(take_rows(tokens, chunk.rows).to(self.bundle.device))
                pixels.put(chunk.rows[0], made[: chunk.num_real])
                progress("decoded chunk", len(chunks))
        images = pixels.arrived(sample_ids, fps=1.0)
        assert isinstance(images, Images)
        return images

    def image_tokens(self, segment: TextSegment, sample_ids: Sequence[str]) -> Tensor:
        """The tokens [B, L] of the images, on the host."""
        count, size = self.facts.num_image_tokens, self.facts.vocab_size
        rows = segment.tokens.cpu().split(segment.lengths.tolist())
        for id, row in zip(sample_ids, rows, strict=True):
            if len(row) != count or int(row.min()) < 0 or int(row.max()) >= size:
                raise DataError(
                    f"sample {id!r} has {len(row)} image tokens between {int(row.min())} and {int(row.max())}, but an "
                    f"image of {self.facts.family} has {count} tokens between 0 and {size - 1}: they come from "
                    "another model"
                )
        return torch.stack(rows)

    def canary_inputs(self) -> PromptTokens:
        """Prompts and the first tokens of an image, so that both embeddings take part."""
        image = list(range(CANARY_IMAGE_TOKENS))
        return prompt_tokens([self.prompt(text) + image for text in CANARIES])

    # Export to transformers and peft

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Writes a directory that transformers loads, with the files of the checkpoint's processor."""
        written = super().write_model(tensors, folder)
        if self.bundle.path not in self.bundle.toys:
            root = self.bundle.directory_of(self.bundle.path, self.bundle.revision, configs_only=True)
            copy_files(root, written, PROCESSOR_FILES)
        return written

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """The file names whole layers: a suffix would also adapt the vision tower, which was not trained."""
        return super().write_lora(folder, replace(adapter, target_modules=tuple(adapter.layers)))

    def plain_logp(self, network: nn.Module, conditions: Conditions, segment: TextSegment) -> Tensor:
        assert isinstance(segment, ImageTokenSegment)
        prompts, responses = prompts_of(conditions), segment.tokens.split(segment.lengths.tolist())
        branches = [prompts, unconditional_of(conditions)] if segment.is_guided else [prompts]
        rows = zip(*(each.tokens.split(each.lengths.tolist()) for each in branches), strict=True)
        logps = []
        for row, response in zip(rows, responses, strict=True):
            logits = [plain_logits(network, prompt - self.facts.vocab_size, response) for prompt in row]
            final = guided_logits(torch.stack(logits, 1), segment.guidance_scale) if segment.is_guided else logits[0]
            logps.append(tempered(final, segment.temperature).gather(1, response[:, None])[:, 0])
        return torch.cat(logps)
