"""The pipeline of a denoising model: encodes prompts and their images, samples, decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from unirl.config.errors import DataError, IncompatibleError
from unirl.models.base import CANARY_IDS, CANARY_PROMPTS, LatentCanaryInputs
from unirl.models.chunks import balanced_chunk_size, map_chunks, padded_chunks, select_conditions
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.embeddings import ConditionImages, PromptEmbeddings
from unirl.models.images import fit_image, read_image
from unirl.sde.guidance import NEGATIVE
from unirl.sde.kernels import EulerODE
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions
from unirl.types.primitives import Images, Videos
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

BundleT = TypeVar("BundleT", bound=DiffusionBundle)

VIDEO = Capabilities(modalities=("video",))
CANARY_SIGMA = 0.5
CANARY_SIDE_TOKENS = 4
CANARY_SEQUENCE_LENGTH = 32


@dataclass(frozen=True)
class _SamplingInputs:
    """The inputs of sampling that all chunks of a request share."""

    params: DiffusionSamplingParams
    noise: NoiseSource
    sample_ids: list[str]
    start_ids: list[str]  # ids that key x_T: of the sample, or of its group


class DecodeAhead:
    """Decodes the latents of sampled chunks in a thread while the next chunk is sampled; on a GPU in its own stream.

    The pixels have the same bits as without the thread, since decoding always runs in chunks of one size.
    """

    def __init__(self, decode: Callable[[Tensor], Images | Videos], device: torch.device) -> None:
        self.decode = decode
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._parts: list[Future[Images | Videos]] = []

    def __enter__(self) -> DecodeAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def add(self, latents: Tensor) -> None:
        """Start to decode the latents [b, *latent] of a chunk."""
        ready = None if self.stream is None else torch.cuda.current_stream(latents.device).record_event()
        self._parts.append(self._thread.submit(self._decoded, latents, ready))

    def result(self) -> Images | Videos:
        """The decoded chunks as one batch, in order. Raises the exception of a failed decoding."""
        parts: list[Any] = [part.result() for part in self._parts]
        whole: Images | Videos = type(parts[0]).concat(parts)
        return whole

    def _decoded(self, latents: Tensor, ready: torch.cuda.Event | None) -> Images | Videos:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            if self.stream is not None and ready is not None:
                self.stream.wait_event(ready)
                latents.record_stream(self.stream)
            pixels = self.decode(latents)
            if self.stream is not None:
                self.stream.synchronize()
            return pixels


class DiffusionPipeline(Generic[BundleT]):
    """Generates images or videos from texts (and images) with the components of one bundle."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("image",))
    """Video families set `VIDEO`."""

    def __init__(
        self,
        bundle: BundleT,
        *,
        encode_batch_size: int = 8,
        decode_batch_size: int = 8,
        embedding_cache_gb: float = 2.0,
        keep_resident: bool = True,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        decode_ahead: bool = False,
    ) -> None:
        """A pipeline over `bundle`.

        Args:
            encode_batch_size: number of prompts per forward of the text encoders.
            decode_batch_size: number of latents or images per forward of the VAE.
            embedding_cache_gb: main memory for cached text embeddings, GiB; 0 disables the cache.
            keep_resident: False moves encoders and VAE to the device only while they run.
            vae_tiling: run the VAE on overlapping tiles of large images or videos, which needs less memory.
            vae_slicing: run the VAE on one row at a time, which needs less memory.
            decode_ahead: decode each chunk while the next one is sampled. Both need memory at the same time.
        """
        self.bundle = bundle
        self.facts = bundle.facts
        self.stage = bundle.stage()
        self.decoder = bundle.decoder()
        self.embed = PromptEmbeddings(
            bundle, bundle.text_encoder(), batch_size=encode_batch_size, cache_gb=embedding_cache_gb
        )
        self.condition_image_encoder = bundle.condition_image_encoder()
        self.decode_batch_size = decode_batch_size
        self.decode_ahead = decode_ahead
        for option, wanted in (("tiling", vae_tiling), ("slicing", vae_slicing)):
            if wanted:
                self._cut_vae(option)
        if not keep_resident:
            bundle.offload(bundle.frozen)

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """Sigmas [T + 1] float32: the explicit schedule of `params`, or the model's own."""
        if params.sigmas is not None:
            return torch.tensor(params.sigmas, dtype=torch.float32)
        seq_len = self.facts.image_seq_len(params)
        return self.facts.schedule.sigmas(params.num_inference_steps, seq_len)

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """Sample all rows of a request with pinned sampling settings, about `chunk_size` rows per forward."""
        _, params = req.only_track(DiffusionSamplingParams)
        conditions = self.encode(req.prompts(), params, self._condition_images(req, params))
        if not self.decode_ahead:
            segment = LatentSegment.concat(list(self._sampled(req, params, conditions, chunk_size)))
            return _response(req, conditions, segment, self.decode(segment.final))
        parts = []
        with DecodeAhead(self.decode, self.bundle.device) as ahead:
            for part in self._sampled(req, params, conditions, chunk_size):
                parts.append(part)
                ahead.add(part.final)
            return _response(req, conditions, LatentSegment.concat(parts), ahead.result())

    def record(self, req: RolloutReq, images: Images) -> RolloutResp:
        """The response for recorded images, one per row of the request: their latents, without a trajectory."""
        _, params = req.only_track(DiffusionSamplingParams)
        conditions = self.encode(req.prompts(), params, self._condition_images(req, params))
        noise = NoiseSource(params.seed, req.purpose, req.step)
        segment = self.stage.record(self.latents_of(images), params, noise)
        return _response(req, conditions, segment, images)

    def canary_inputs(self) -> LatentCanaryInputs:
        """Fixed prompts, encoded by the pipeline's own encoders, and keyed noise at sigma 0.5."""
        side = CANARY_SIDE_TOKENS * self.facts.vae_scale * self.facts.patch_size
        params = DiffusionSamplingParams(
            kernel=EulerODE(), height=side, width=side, max_sequence_length=CANARY_SEQUENCE_LENGTH
        )
        fewest, _ = self.facts.condition_images
        grey = ConditionImages.of(torch.full((fewest, 3, side, side), 0.5)) if fewest else None
        return LatentCanaryInputs(
            x=NoiseSource(0, "eval", 0).normal(list(CANARY_IDS), "x", self.facts.latent_shape(params)),
            sigma=torch.full((len(CANARY_PROMPTS),), CANARY_SIGMA),
            conditions=self.encode(CANARY_PROMPTS, params, None if grey is None else [grey] * len(CANARY_PROMPTS)),
        )

    def offload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to main memory."""
        self.bundle.offload(names)

    def onload(self, names: Sequence[str]) -> None:
        """Move components of the bundle to its device."""
        self.bundle.onload(names)

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The conditions of prompts: `text`, `negative_text` if guidance is active, and conditions from their images.

        Args:
            images: the images of each prompt, in the size of the sample. None if the prompts have no images.
        """
        length = params.max_sequence_length
        conditions: Conditions = {"text": self.embed(texts, length, images)}
        if self.facts.guidance_of(params).active:
            conditions[NEGATIVE + "text"] = self.embed([params.negative_prompt] * len(texts), length, images)
        if images is not None:
            conditions |= self._image_conditions(images, params)
        return conditions

    def decode(self, latents: Tensor) -> Images | Videos:
        """The images or videos of latents [B, *latent], rounded to 256 levels."""
        with torch.no_grad(), self.bundle.resident(self.decoder.components):
            pixels = map_chunks(self.decoder.decode, latents.float(), self.decode_batch_size, self.facts.batch_multiple)
        if self.facts.frame_scale is not None:
            return Videos.of(pixels, self.facts.fps)
        return Images(pixels=pixels.mul(255).round_().div_(255))

    def latents_of(self, images: Images) -> Tensor:
        """The latents [B, *latent] of images, on the bundle's device."""
        encoder, device = self.bundle.encoder(), self.bundle.device
        with torch.no_grad(), self.bundle.resident(encoder.components):
            return map_chunks(
                lambda pixels: encoder.encode(pixels.to(device)),
                images.pixels,
                self.decode_batch_size,
                self.facts.batch_multiple,
            )

    def initial_noise(self, noise: NoiseSource, ids: Sequence[str], params: DiffusionSamplingParams) -> Tensor:
        """x_T [B, *latent] keyed by ids, on the bundle's device. Rows with the same id are equal."""
        return noise.normal(ids, "x", self.facts.latent_shape(params)).to(self.bundle.device)

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
        images = {uris: ConditionImages.of(_read_images(uris, params)) for uris in dict.fromkeys(rows)}
        return [images[uris] for uris in rows]

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

    def _sampled(
        self, req: RolloutReq, params: DiffusionSamplingParams, conditions: Conditions, chunk_size: int
    ) -> Iterator[LatentSegment]:
        """The segments of the request, chunk by chunk."""
        start_ids = req.group_ids if params.init_same_noise else req.sample_ids
        inputs = _SamplingInputs(params, NoiseSource(params.seed, req.purpose, req.step), req.sample_ids, start_ids)
        multiple = self.facts.batch_multiple
        size = balanced_chunk_size(len(req), chunk_size, multiple)
        for chunk in padded_chunks(len(req), size, multiple):
            yield self._sample_rows(inputs, conditions, list(chunk.rows)).slice(0, chunk.num_real)

    def _sample_rows(self, inputs: _SamplingInputs, conditions: Conditions, rows: list[int]) -> LatentSegment:
        x_T = self.initial_noise(inputs.noise, [inputs.start_ids[row] for row in rows], inputs.params)  # noqa: N806
        ids = [inputs.sample_ids[row] for row in rows]
        return self.stage.sample(select_conditions(conditions, rows), x_T, inputs.params, inputs.noise, ids)


def _read_images(uris: Sequence[str], params: DiffusionSamplingParams) -> Tensor:
    """Pixels [N, 3, H, W] in [0, 1], fitted to the size of the sample."""
    return torch.stack([fit_image(read_image(uri), params.height, params.width) for uri in uris])


def _response(req: RolloutReq, conditions: Conditions, segment: LatentSegment, decoded: Images | Videos) -> RolloutResp:
    """The response with the one track of a request, rows in the order of the request."""
    [name] = req.tracks
    track = RolloutTrack(
        sample_ids=req.sample_ids,
        group_ids=req.group_ids,
        prompts=req.prompts(),
        conditions=conditions,
        segment=segment,
        decoded=decoded,
        weight=torch.ones(len(req)),
        weight_version=torch.full((len(req),), req.weight_version, dtype=torch.int64),
    )
    return RolloutResp({name: track})
