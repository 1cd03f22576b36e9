"""A video model as an environment: it predicts the frames that follow, and a reward scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast

import msgspec
import torch
from torch import Tensor

from unirl.config.errors import InvalidValueError, did_you_mean
from unirl.config.targets import find_target
from unirl.envs.scored import check_reads, frame_size
from unirl.models.denoising.bundle import DiffusersBundle
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.loading.estimate import HeldModel
from unirl.models.world_model import ActionTokens, WorldModel, check_chunk
from unirl.sde.kernels import EulerODE
from unirl.types.device import accelerator
from unirl.types.environments import (
    ContinuousActions,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    FrameReward,
    Observations,
)
from unirl.types.protocols import TORCH_DTYPES, DtypeName
from unirl.types.sampling import DiffusionSamplingParams

VIDEO_MODELS: Mapping[str, str] = {"wan21": "Wan21", "wan22": "Wan22"}
"""Families of image to video, by the setting `model`, and how the names of their classes begin."""


class FirstFrames(Protocol):
    """Shows the frames with which episodes begin. Every environment with images does."""

    spaces: EnvironmentSpaces

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """The first observations of episodes, one for each start."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(eq=False)
class Scene:
    """An episode of one slot."""

    frame: Tensor  # [3, H, W] uint8, the newest frame
    start: EpisodeStart
    age: int = 0
    """Actions that were taken."""


class WorldModelEnvironment:
    """Slots whose frames a video model predicts, one for each action: no simulator runs after the first frame.

    One step takes a chunk of C actions. The model denoises the C frames that follow the newest frame, of all slots in
    one forward. The start of the episode and the number of the chunk decide the noise, so equal starts and actions
    give equal frames. The first frame that shows success ends the episode; otherwise `max_steps` actions do.
    The observation is the frame after the last action of the chunk, or the one that shows success.

    The model is a checkpoint of Wan that was trained on actions (`scripts/train_world_model.py` trains a small one):
    a folder in the layout of diffusers with the file actions.safetensors.
    """

    is_keyed = True
    toy: ClassVar[Mapping[str, object]] = {"model": "wan22", "path": "toy-world", "dtype": "fp32"}

    def __init__(
        self,
        *,
        path: str,
        first: FirstFrames,
        reward: FrameReward,
        model: Literal["wan21", "wan22"] = "wan22",
        camera: str = "pixels",
        actions: Annotated[int, msgspec.Meta(ge=1)] = 7,
        chunk: Annotated[int, msgspec.Meta(ge=1)] = 8,
        max_steps: Annotated[int, msgspec.Meta(ge=1)] = 64,
        num_inference_steps: Annotated[int, msgspec.Meta(ge=1)] = 4,
        max_sequence_length: Annotated[int, msgspec.Meta(ge=2)] = 128,
        forward_batch_size: Annotated[int, msgspec.Meta(ge=1)] = 16,
        dtype: DtypeName = "bf16",
    ) -> None:
        """
        Args:
            path: folder or hub id of a world model, or a toy with random weights, such as `toy-world`.
            first: the environment whose resets show the first frames. It is never stepped.
            reward: scores the frames.
            model: family of the checkpoint: Wan 2.1 or 2.2, of image to video.
            camera: name of the frames, as an observation here and in `first`.
            actions: numbers of an action.
            chunk: actions of a step. Wan takes multiples of 4.
            max_steps: actions after which an episode is truncated.
            num_inference_steps: denoising steps of a chunk.
            max_sequence_length: tokens of the text, of which the last ones are the actions of a chunk.
            forward_batch_size: slots in one forward of the video model.
            dtype: the compute dtype of the video model.

        Raises:
            InvalidValueError: 2004, frames, chunks or actions that the model cannot read.
            NotFoundError: 4001, a checkpoint that is not there, or that was not trained on actions.
        """
        self._path, self._dtype, self._chunk, self._max_steps = path, dtype, chunk, max_steps
        self._first, self._reward, self._camera = first, reward, camera
        self._bundle_class, self._pipeline_class = video_model(model)
        height, width = frame_size(first.spaces, camera, "pipeline.env.first")
        check_reads(reward, (height, width))
        self._sampling = DiffusionSamplingParams(
            kernel=EulerODE(),
            num_inference_steps=num_inference_steps,
            height=height,
            width=width,
            max_sequence_length=max_sequence_length,
        )
        self._forward_batch_size = forward_batch_size
        self.spaces = EnvironmentSpaces(
            observations={camera: (3, height, width)},
            actions=ContinuousActions(actions),
            most_steps=max_steps,
            chunk=chunk,
        )
        self._check()
        self._world: WorldModel | None = None
        self._scenes: dict[int, Scene] = {}

    @classmethod
    def held(cls, settings: Mapping[str, Any]) -> HeldModel:
        """The size of the video model with all its components, which is not loaded."""
        bundle, _ = video_model(settings["model"])
        estimate, dtype = bundle.estimate(settings["path"]), settings["dtype"]
        parts, itemsize = dict(estimate.parameters), TORCH_DTYPES[dtype].itemsize
        tokens = bundle.family.configs(settings["path"], None).components["transformer"]["text_dim"]
        parts["actions"] = (settings["actions"] + settings["chunk"]) * tokens
        sizes = {"vae": bundle.family.vae_dtype("auto", dtype).itemsize, "actions": torch.float32.itemsize}
        num_bytes = sum(number * sizes.get(part, itemsize) for part, number in parts.items())
        in_fp32 = estimate.kept_in_fp32 * (torch.float32.itemsize - itemsize)
        return HeldModel("video model", sum(parts.values()), num_bytes + in_fp32)

    def reset(self, slots: Sequence[int], starts: Sequence[EpisodeStart]) -> Observations:
        """Start one episode in each slot. `unirl.types.environments.Environment.reset` has the contract."""
        frames = self._first.reset(slots, starts)[self._camera]
        self._scenes |= {
            slot: Scene(frame.clone(), start) for slot, frame, start in zip(slots, frames, starts, strict=True)
        }
        return {self._camera: frames}

    def step(self, slots: Sequence[int], actions: Tensor) -> EnvironmentStep:
        """Take C actions [B, C, A] in each slot. `unirl.types.environments.Environment.step` has the contract."""
        idle = [slot for slot in slots if slot not in self._scenes]
        assert not idle, f"slots {idle} have no episode: it ended, or never began. Reset them first"
        scenes = [self._scenes[slot] for slot in slots]
        before, tasks = torch.stack([scene.frame for scene in scenes]), [scene.start.task for scene in scenes]
        keys = [(scene.start.seed, f"after{scene.age}") for scene in scenes]
        actions = actions.float().clamp(-1, 1)
        frames = self._loaded().predict(before, tasks, actions, keys, self._forward_batch_size)
        rewards, success = self._reward.score(before, frames, tasks)
        counts = success.cumsum(1) - success.long() == 0  # up to the first success, and that one
        reached = success.any(1)
        last = counts.sum(1) - 1
        newest = frames[torch.arange(len(frames)), last]
        for scene, frame in zip(scenes, newest, strict=True):
            scene.frame, scene.age = frame, scene.age + self._chunk
        truncated = torch.tensor([scene.age >= self._max_steps for scene in scenes]) & ~reached
        for row in torch.nonzero(reached | truncated)[:, 0].tolist():
            del self._scenes[slots[row]]
        return EnvironmentStep(
            observations={self._camera: newest},
            rewards=torch.where(counts, rewards, 0.0).sum(1),
            terminated=reached,
            truncated=truncated,
            success=reached,
        )

    def render(self, slots: Sequence[int]) -> Tensor:
        """[B, 3, H, W] uint8, the newest frames of the slots."""
        return torch.stack([self._scenes[slot].frame for slot in slots])

    def close(self) -> None:
        """Forget all episodes, and free the model."""
        self._scenes.clear()
        self._first.close()
        self._world = None

    def _check(self) -> None:
        """Refuse a model that cannot predict such frames, without loading it."""
        facts = self._bundle_class.facts_of(self._path)
        if not facts.condition_images[1]:
            raise InvalidValueError(
                f"pipeline.env.path={self._path} reads no first frame. Use a model of image to video"
            )
        side = facts.vae_scale * facts.patch_size
        height, width = self._sampling.height, self._sampling.width
        if height % side or width % side:
            raise InvalidValueError(
                f"pipeline.env: frames of {height} x {width} pixels do not divide into the {side} x {side} pixels of a "
                f"token of {self._path}. Show frames whose sides are multiples of {side} in pipeline.env.first"
            )
        check_chunk(facts, self._chunk, self._sampling.max_sequence_length)
        if self._max_steps % self._chunk:
            raise InvalidValueError(
                f"pipeline.env.max_steps={self._max_steps} is no multiple of the {self._chunk} actions of a step "
                f"(pipeline.env.chunk). Set max_steps={max(1, self._max_steps // self._chunk) * self._chunk}"
            )

    def _loaded(self) -> WorldModel:
        """The video model, which is loaded for the first step."""
        if self._world is None:
            bundle = self._bundle_class(accelerator(), path=self._path, dtype=self._dtype)
            bundle.trainable().requires_grad_(False)
            shape = (self.spaces.step_shape[-1], self._chunk, bundle.configs.components["transformer"]["text_dim"])
            tokens = ActionTokens.toy(*shape) if bundle.root is None else ActionTokens.read(bundle.root, *shape)
            self._world = WorldModel.of(self._pipeline_class(bundle), tokens, self._sampling)
        return self._world


def video_model(name: str) -> tuple[type[DiffusersBundle], type[DiffusionPipeline[Any]]]:
    """The bundle and the pipeline of a family that predicts frames from a first one.

    Raises:
        InvalidValueError: 2004, there is no such family here.
    """
    if name not in VIDEO_MODELS:
        raise InvalidValueError(
            f"pipeline.env.model={name!r} is no video model that predicts frames from a first one. Choose "
            f"{', '.join(VIDEO_MODELS)}.{did_you_mean(name, VIDEO_MODELS)}"
        )
    family = f"unirl.models.{name}.family.{VIDEO_MODELS[name]}"
    bundle, pipeline = (find_target(f"{family}{kind}", "pipeline.env.model") for kind in ("Bundle", "Pipeline"))
    return cast(type[DiffusersBundle], bundle), cast(type[DiffusionPipeline[Any]], pipeline)
