"""The pipeline of one network that writes and draws: texts, each of which continues those before it, then an image.

    prompt --stage of `think`--> text --stage of `image`--> latents --VAE--> pixels
             N texts per prompt         M images per text

The tokens of a text reach the next track exactly as they were sampled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, TypeVar

from torch import Tensor

from unirl.models.base import Stage, response_of
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.peft_pipeline import PeftPipeline
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.language.packing import prompt_tokens, prompts_of
from unirl.models.language.pipeline import check_prompt_length
from unirl.models.language.stage import ARStage
from unirl.models.unified.bundle import IMAGE, UnifiedBundle
from unirl.models.unified.checkpoint import NETWORK
from unirl.sde.guidance import NEGATIVE
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.primitives import Texts
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import TextSegment

Written = Mapping[str, list[int]]
"""The tokens that a row's ancestors sampled, by track, in the order of the tracks."""


BundleT = TypeVar("BundleT", bound=UnifiedBundle, covariant=True)


class UnifiedPipeline(DiffusionPipeline[BundleT], PeftPipeline[BundleT]):
    """Generates the tracks of a request one after another. A request for the track `image` alone draws its prompts.

    Exports have the layout of the checkpoint, or are adapters for peft.
    """

    text_tracks: ClassVar[tuple[str, ...]]
    """The texts that the model can write before an image, in their order. A recipe may leave some out."""

    @classmethod
    def tracks(cls) -> tuple[str, ...]:
        """The tracks that the model can sample, each before the one that continues it."""
        return (*cls.text_tracks, IMAGE)

    @cached_property
    def text_stages(self) -> dict[str, ARStage]:
        """The policies of texts that were asked for, by track."""
        return {}

    def text_stage(self, track: str) -> ARStage:
        """The policy of a text: one of `text_tracks`, or an answer, which is a text by any other name."""
        if track not in self.text_stages:
            stage = self.bundle.stage_of(track)
            assert isinstance(stage, ARStage), f"the policy of the text track {track!r} samples tokens"
            self.text_stages[track] = stage
        return self.text_stages[track]

    @abstractmethod
    def writing_prompt(self, track: str, prompt: str, written: Written) -> list[int]:
        """The tokens that the model reads before it writes the text of a track."""

    @abstractmethod
    def drawing_prompt(self, prompt: str, written: Written, *, conditional: bool = True) -> list[int]:
        """The tokens that the model reads before it draws. The unconditional pass of guidance is not `conditional`."""

    @abstractmethod
    def unconditional_prompts(self, texts: Sequence[str], params: DiffusionSamplingParams) -> PromptTokens:
        """The tokens of the unconditional pass of guidance, where the track `image` draws the prompts `texts`."""

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The tokens `text`, and those of the unconditional pass, `negative_text`, if guidance is active."""
        conditions = super().encode(texts, params, images)
        if NEGATIVE + "text" in conditions:
            conditions[NEGATIVE + "text"] = self.unconditional_prompts(texts, params).to(self.bundle.device)
        return conditions

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the files of the published repository, with `tensors` in place of those of the trained network."""
        bundle = self.bundle
        frozen = [name for name in bundle.configs.components if name != NETWORK]
        parts = dict(zip(frozen, bundle.require(frozen, "be exported as a whole"), strict=True))
        network = bundle.with_tensors(tensors)
        bundle.family.write(folder, {NETWORK: network, **parts}, bundle.configs, bundle.root)
        bundle.tokenizer.save_pretrained(folder)
        return folder

    def stage_of(self, track: str) -> Stage:  # type: ignore[override]
        """The policy of a track: of images for `image`, and otherwise of that text."""
        return self.stage if track == IMAGE else self.text_stage(track)

    def prompts_of(self, req: RolloutReq) -> list[str]:
        """The prompt of each row, as `writing_prompt` and `drawing_prompt` read it."""
        return req.prompts()

    def prompt_conditions(self, prompts: Mapping[str, Sequence[list[int]]], req: RolloutReq) -> Conditions:
        """The conditions, by name, of the tokens that the model reads for each row of a request."""
        return {name: prompt_tokens(rows) for name, rows in prompts.items()}

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """Sample the tracks of a request, the first of which has one row per row of the request."""
        if list(req.tracks) == [IMAGE]:
            return super().generate(req, chunk_size)
        tree: dict[str, RolloutTrack] = {}
        written: list[Written] = [{}] * len(req)
        for name, spec in req.tracks.items():
            parent_ids = None
            if spec.parent is not None:
                written = [each for each in written for _ in range(spec.branch)]
                req = req.branched(name)
                parent_ids = list(req.group_ids)
            alone = req.replace(tracks={name: replace(spec, parent=None, branch=1)})
            if name == IMAGE:
                track = self._drawn(alone, written, chunk_size)
            else:
                track = self._written(alone, written, chunk_size)
                written = [{**each, name: own} for each, own in zip(written, tokens_of(track), strict=True)]
            tree[name] = track.replace(parent_track=spec.parent, parent_ids=parent_ids)
        return RolloutResp(tree)

    def _written(self, req: RolloutReq, written: Sequence[Written], slots: int) -> RolloutTrack:
        """A text for each row of a request."""
        name, params = req.only_track(ARSamplingParams)
        rows = zip(self.prompts_of(req), written, strict=True)
        prompts = [self.writing_prompt(name, prompt, each) for prompt, each in rows]
        conditions = self.prompt_conditions({"prompt": prompts}, req)
        for count, id in zip(prompts_of(conditions).lengths.tolist(), req.group_ids, strict=True):
            check_prompt_length(count, id, params)
        conditions = {key: condition.to(self.bundle.device) for key, condition in conditions.items()}
        noise = NoiseSource(params.seed, req.purpose, req.step)
        segment = self.text_stage(name).sample(conditions, params, noise, req.sample_ids, slots)
        rows_of_tokens = segment.tokens.cpu().split(segment.lengths.tolist())
        texts = [self.bundle.codec.decode(row.tolist()) for row in rows_of_tokens]
        return response_of(req, conditions, segment, Texts(texts=texts)).tracks[name]

    def _drawn(self, req: RolloutReq, written: Sequence[Written], chunk_size: int) -> RolloutTrack:
        """An image for each row of a request, given the texts of its ancestors."""
        name, params = req.only_track(DiffusionSamplingParams)
        rows = list(zip(self.prompts_of(req), written, strict=True))
        prompts = {"text": [self.drawing_prompt(prompt, each) for prompt, each in rows]}
        if self.facts.guidance_of(params).active:
            prompts[NEGATIVE + "text"] = [self.drawing_prompt(prompt, each, conditional=False) for prompt, each in rows]
        conditions = self.prompt_conditions(prompts, req)
        conditions = {key: condition.to(self.bundle.device) for key, condition in conditions.items()}
        track = self.generate_from(req, params, conditions, chunk_size).tracks[name]
        texts = [self.bundle.codec.decode(list(each.values())[-1]) for each in written]
        return track.replace(prompts=[text or prompt for text, prompt in zip(texts, req.prompts(), strict=True)])


def tokens_of(track: RolloutTrack) -> list[list[int]]:
    """The sampled tokens of each row of a text."""
    segment = track.sampled_as(TextSegment).segment
    return [row.tolist() for row in segment.tokens.cpu().split(segment.lengths.tolist())]
