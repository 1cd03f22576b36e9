"""The pipeline of a denoising model: encodes prompts and their images, samples, decodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from unirl.config.errors import DataError, IncompatibleError
from unirl.models.base import CANARY_IDS, CANARY_PROMPTS, LatentCanaryInputs, response_of
from unirl.models.chunks import balanced_chunk_size, map_chunks, padded_chunks, select_conditions
from unirl.models.denoising.bundle import DiffusionBundle, LatentBundle
from unirl.models.denoising.decoding import PixelRows, decoding_thread
from unirl.models.denoising.embeddings import ConditionImages, PromptEmbeddings
from unirl.models.denoising.stage import DiffusionStage
from unirl.models.images import fit_image, read_image
from unirl.sde.guidance import NEGATIVE
from unirl.sde.kernels import EulerODE
from unirl.sde.noise import NoiseSource
from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions, TextCondition
from unirl.types.device import to_device
from unirl.types.primitives import Images, Videos, unit
from unirl.types.progress import progress
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

LatentBundleT = TypeVar("LatentBundleT", bound=LatentBundle, covariant=True)
BundleT = TypeVar("BundleT", bound=DiffusionBundle, covariant=True)

VIDEO = Capabilities(modalities=("video",), differentiable=True)
CANARY_SIGMA = 0.5
CANARY_SIDE_TOKENS = 4
CANARY_SEQUENCE_LENGTH = 32


class LatentPipeline(ABC, Generic[LatentBundleT]):
    """Generates images or videos from prompts: encodes them, samples latents, and decodes these."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image",), differentiable=True)
    """Video families set `VIDEO`."""

    def __init__(
        self,
        bundle: LatentBundleT,
        *,
        decode_batch_size: int = 8,
        keep_resident: bool = True,
        vae_tiling: bool | Literal["auto"] = "auto",
        vae_slicing: bool = False,
        decode_ahead: bool = False,
    ) -> None:
        """
        Args:
            decode_batch_size: number of latents or images per forward of the VAE.
            keep_resident: False moves encoders and VAE to the device only while they run.
            vae_tiling: run the VAE on overlapping tiles of large images or videos, which needs less memory and changes
                pixels at the seams. A run with the word "auto" does so only where one sample at a time does not fit
                into the memory of its GPU, by the plan.
            vae_slicing: run the VAE on one row at a time, which needs less memory.
            decode_ahead: decode each chunk while the next one is sampled. Both need memory at the same time.
        """
        self.bundle = bundle
        self.facts = bundle.facts
        self.stage = bundle.stage()
        self.decoder = bundle.decoder()
        self.decode_batch_size = decode_batch_size
        self.decode_ahead = decode_ahead
        for option, wanted in (("tiling", vae_tiling), ("slicing", vae_slicing)):
            if wanted is True:
                self._cut_vae(option)
        if not keep_resident:
            bundle.offload(bundle.frozen)

    def stage_of(self, track: str) -> DiffusionStage:
        """The policy, by any name."""
        return self.stage

    @abstractmethod
    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The conditions of prompts, with those of the negative prompt if guidance is active.

        Args:
            images: the images of each prompt, in the size of the sample. None if the prompts have no images.
        """

    def cut_prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[bool] | None:
        """True for each prompt that is longer than the model reads. None if that is not known."""
        return None

    def replayed(self, conditions: Conditions, latents: Tensor) -> Conditions:
        """The conditions on which a replay of samples `latents` [B, *latent] depends; those of sampling by default."""
        return conditions

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """Sigmas [T + 1] float32: the explicit schedule of `params`, or that of the model."""
        if params.sigmas is not None:
            return torch.tensor(params.sigmas, dtype=torch.float32)
        seq_len = self.facts.image_seq_len(params)
        return self.facts.schedule_of(params).sigmas(params.num_inference_steps, seq_len)

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """Sample all rows of a request with pinned sampling settings, about `chunk_size` rows per forward."""
        _, params = req.only_track(DiffusionSamplingParams)
        return self.generate_from(req, params, self.conditions_of(req, params), chunk_size)

    def conditions_of(self, req: RolloutReq, params: DiffusionSamplingParams) -> Conditions:
        """The conditions of each row of a request."""
        return self.encode(req.prompts(), params, self._condition_images(req, params))

    def generate_from(
        self, req: RolloutReq, params: DiffusionSamplingParams, conditions: Conditions, chunk_size: int
    ) -> RolloutResp:
        """Sample all rows of a request, given their conditions."""
        chunks = self._sampled(req, params, conditions, chunk_size)
        pixels = PixelRows(len(req))
        if self.decode_ahead:
            segments: list[LatentSegment] = []
            with decoding_thread(partial(self._decode, pixels), self.bundle.device) as decode:
                for segment in chunks:
                    decode(sum(map(len, segments)), segment.final)
                    segments.append(segment)
            segment = LatentSegment.concat(segments)
        else:
            segment = LatentSegment.concat(list(chunks))
            self._decode(pixels, 0, segment.final)
        conditions, cut = self.replayed(conditions, segment.final), self.cut_prompts(req.prompts(), params)
        return response_of(req, conditions, segment, pixels.arrived(req.sample_ids, self.facts.fps), cut)

    def record(self, req: RolloutReq, images: Images) -> RolloutResp:
        """The response for recorded images, one per row of the request: their latents, without a trajectory."""
        _, params = req.only_track(DiffusionSamplingParams)
        conditions = self.conditions_of(req, params)
        noise = NoiseSource(params.seed, req.purpose, req.step)
        segment = self.stage.record(self.latents_of(images), params, noise)
        return response_of(req, self.replayed(conditions, segment.final), segment, images)

    def canary_inputs(self) -> LatentCanaryInputs:
        """Fixed prompts, encoded by the pipeline's own encoders, and keyed noise at sigma 0.5."""
        side = CANARY_SIDE_TOKENS * self.facts.vae_scale * self.facts.patch_size
        params = DiffusionSamplingParams(
            kernel=EulerODE(), height=side, width=side, max_sequence_length=CANARY_SEQUENCE_LENGTH
        )
        fewest, _ = self.facts.condition_images
        grey = ConditionImages.of(torch.full((fewest, 3, side, side), 0.5)) if fewest else None
        x = NoiseSource(0, "eval", 0).normal(list(CANARY_IDS), "x", self.facts.latent_shape(params))
        conditions = self.encode(CANARY_PROMPTS, params, None if grey is None else [grey] * len(CANARY_PROMPTS))
        return LatentCanaryInputs(
            x=x,
            sigma=torch.full((len(CANARY_PROMPTS),), CANARY_SIGMA),
            conditions=self.replayed(conditions, to_device(x, self.bundle.device)),
        )

    def decode(self, latents: Tensor) -> Images | Videos:
        """The images or videos of latents [B, *latent], on the host."""
        pixels = PixelRows(len(latents))
        self._decode(pixels, 0, latents)
        return pixels.arrived([f"row {row}" for row in range(len(latents))], self.facts.fps)

    def _decode(self, pixels: PixelRows, start: int, latents: Tensor) -> None:
        """Decode latents [b, *latent] to the rows of `pixels` from `start` on. The host waits for nothing."""
        with torch.no_grad(), self.bundle.resident(self.decoder.components):
            chunks = padded_chunks(len(latents), self.decode_batch_size, self.facts.batch_multiple)
            for chunk in chunks:
                decoded = self.decoder.decode(take_rows(latents, chunk.rows).float())
                pixels.put(start + chunk.rows[0], decoded[: chunk.num_real])
                progress("decoded chunk", len(chunks))

    def latents_of(self, images: Images) -> Tensor:
        """The latents [B, *latent] of images, on the bundle's device."""
        encoder, device = self.bundle.encoder(), self.bundle.device
        with torch.no_grad(), self.bundle.resident(encoder.components):
            return map_chunks(
                lambda levels: encoder.encode(unit(levels.to(device))),
                images.pixels,
                self.decode_batch_size,
                self.facts.batch_multiple,
            )

    def initial_noise(self, noise: NoiseSource, ids: Sequence[str], params: DiffusionSamplingParams) -> Tensor:
        """x_T [B, *latent] keyed by ids, on the bundle's device. Rows with the same id are equal."""
        return to_device(noise.normal(ids, "x", self.facts.latent_shape(params)), self.bundle.device)

    def _cut_vae(self, option: str) -> None:
        """Enable `tiling` or `slicing` of the VAE."""
        vaes: list[Any] = [self.bundle.modules[name] for name in self.decoder.components]
        for vae in vaes:
            if hasattr(vae, f"use_{option}"):  # the attribute of diffusers' VAEs that support it
                getattr(vae, f"enable_{option}")()
        if not any(hasattr(vae, f"use_{option}") for vae in vaes):
            kinds = ", ".join(type(vae).__name__ for vae in vaes) or "no VAE"
            raise IncompatibleError(
                f"pipeline.vae_{option}=true: {self.facts.family} decodes by {kinds}, which has no {option}. Remove it"
            )

    def _condition_images(self, req: RolloutReq, params: DiffusionSamplingParams) -> list[ConditionImages] | None:
        """The images of each row's prompt, read once and fitted to the sample's size. None if there are none."""
        rows = req.prompt_image_uris()
        counts = sorted({len(uris) for uris in rows})
        if counts == [0]:
            return None
        if len(counts) > 1:
            raise DataError(
                f"the prompts of one step have {' and '.join(map(str, counts))} condition images, but "
                f"{self.facts.family} needs the same number for each. Give every prompt of the data the same number"
            )
        images: dict[tuple[str, ...], ConditionImages] = {}
        for uris in dict.fromkeys(rows):
            pixels = [fit_image(read_image(uri), params.height, params.width) for uri in uris]
            images[uris] = ConditionImages.of(torch.stack(pixels))
        return [images[uris] for uris in rows]

    def _sampled(
        self, req: RolloutReq, params: DiffusionSamplingParams, conditions: Conditions, chunk_size: int
    ) -> Iterator[LatentSegment]:
        """The segments of the request, chunk by chunk."""
        noise = NoiseSource(params.seed, req.purpose, req.step)
        start_ids = req.group_ids if params.init_same_noise else req.sample_ids
        multiple = self.facts.batch_multiple
        size = balanced_chunk_size(len(req), chunk_size, multiple)
        for chunk in padded_chunks(len(req), size, multiple):
            rows = list(chunk.rows)
            x_T = self.initial_noise(noise, [start_ids[row] for row in rows], params)  # noqa: N806
            ids = [req.sample_ids[row] for row in rows]
            segment = self.stage.sample(select_conditions(conditions, rows), x_T, params, noise, ids)
            progress("sample", len(req), chunk.rows[0] + chunk.num_real)
            yield segment.slice(0, chunk.num_real)


class DiffusionPipeline(LatentPipeline[BundleT]):
    """Generates images or videos from texts (and images) with the components of one bundle."""

    def __init__(
        self,
        bundle: BundleT,
        *,
        encode_batch_size: int = 8,
        decode_batch_size: int = 8,
        embedding_cache_gb: float = 2.0,
        keep_resident: bool = True,
        vae_tiling: bool | Literal["auto"] = "auto",
        vae_slicing: bool = False,
        decode_ahead: bool = False,
    ) -> None:
        """See `LatentPipeline`.

        Args:
            encode_batch_size: number of prompts per forward of the text encoders.
            embedding_cache_gb: main memory for cached text embeddings, GiB; 0 disables the cache.
        """
        self.embed: PromptEmbeddings[TextCondition] = PromptEmbeddings(
            bundle, bundle.text_encoder(), batch_size=encode_batch_size, cache_gb=embedding_cache_gb
        )
        self.condition_image_encoder = bundle.condition_image_encoder()
        super().__init__(
            bundle,
            decode_batch_size=decode_batch_size,
            keep_resident=keep_resident,
            vae_tiling=vae_tiling,
            vae_slicing=vae_slicing,
            decode_ahead=decode_ahead,
        )

    def cut_prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[bool] | None:
        return self.embed.cut(texts, params.max_sequence_length)

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """`text` of prompts, `negative_text` if guidance is active, and the conditions from their images."""
        length = params.max_sequence_length
        conditions: Conditions = {"text": self.embed(texts, length, images)}
        if self.facts.guidance_of(params).active:
            conditions[NEGATIVE + "text"] = self.embed([params.negative_prompt] * len(texts), length, images)
        if images is not None:
            conditions |= self._image_conditions(images, params)
        return conditions

    def _image_conditions(self, images: Sequence[ConditionImages], params: DiffusionSamplingParams) -> Conditions:
        """The conditions from images. Each distinct set of images is encoded once."""
        if self.condition_image_encoder is None:
            raise DataError(
                f"{self.facts.family} takes no condition images, but prompts have some. Remove their media_refs, or "
                "use a model for image to video or for editing"
            )
        encoder, device = self.condition_image_encoder, self.bundle.device
        distinct = {image.key: image.pixels for image in images}
        keys = list(distinct)
        stacked = torch.stack(list(distinct.values()))
        parts: list[Conditions] = []
        with torch.no_grad(), self.bundle.resident(encoder.components):
            for chunk in padded_chunks(len(keys), self.decode_batch_size, self.facts.batch_multiple):
                conditions = encoder.encode(stacked[list(chunk.rows)].to(device), params)
                parts.append(select_conditions(conditions, list(range(chunk.num_real))))
        rows = [keys.index(image.key) for image in images]
        joined = {name: type(c).concat([part[name] for part in parts]) for name, c in parts[0].items()}
        return select_conditions(joined, rows)
