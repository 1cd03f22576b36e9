"""The top level of a recipe: every block and scalar that it may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from unirl.config.node import Node

Where = str | int | tuple[int, ...]
"""A place on the pool: `0-3`, `0,2`, `3`, `[0, 2]`, `all`, `in train`, `in rollout`, `cpu`, `cpu x2`."""

MAX_DEVICES = 2**16


Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loop without a learner, on held-out prompts with fixed noise."""

    eval_steps: NonNegative = 0
    """Evaluate before the first step, every this many steps, and after the last; 0 = never."""
    data_path: str | None = None
    """Held-out prompts; absent = the training file, unshuffled."""
    max_prompts: Positive = 32
    """The first this many prompts of the file."""
    samples_per_prompt: Positive = 1
    num_inference_steps: Positive | None = None
    """T of denoising; absent = that of `sampling`."""
    guidance_scale: NonNegativeFloat | None = None
    """Of denoising; absent = that of `sampling`."""
    temperature: NonNegativeFloat | None = None
    """Of text, 0 = the likeliest token always; absent = that of `sampling`."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Of text; absent = that of `sampling`."""
    top_k: NonNegative | None = None
    """Of text; absent = that of `sampling`."""
    max_new_tokens: Positive | None = None
    """Of text; absent = that of `sampling`."""
    seed: int = 42
    """Seeds the noise of evaluation, which is the same at every evaluation."""
    weights: Literal["live", "ema"] = "live"
    """Which weights are evaluated."""

    @property
    def enabled(self) -> bool:
        """Whether this run evaluates."""
        return self.eval_steps > 0

    def settings(self, known: Sequence[str]) -> dict[str, Any]:
        """What is set of sampling, of the optional keys those that are `known`; the others stay as in training."""
        optional = {key: vars(self)[key] for key in known if vars(self)[key] is not None}
        return {"samples_per_prompt": self.samples_per_prompt, "seed": self.seed, **optional}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The identity of a run."""

    project: str = "unirl"
    """The folder under runs/, and the project of the mirrors."""
    name: str | None = None
    """The run's own name; absent = made from time and recipe."""
    dir: str | None = None
    """The run directory; absent = runs/<project>/<name>."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics go beside the run directory's files, and how many samples are kept."""

    mirrors: tuple[Literal["wandb", "tensorboard", "swanlab"], ...] = ()
    """Services that repeat what the files say."""
    entity: str | None = None
    """The W&B team or user."""
    offline: bool = False
    """Mirrors write locally and never use the network."""
    sample_steps: NonNegative = 10
    """Keep samples every this many steps; 0 = never."""
    max_samples: Positive = 16
    """Samples kept each time."""


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """How far the engine's log-probs may be from the trainer's replay of the same steps, before the first update.

    The measure is the largest |log ratio|, nats, in units of the loss's clip range: at 1 the trust region is used up
    before anything was learned. Low precision alone may give a fraction of it, wrong weights give hundreds.
    """

    warn: NonNegativeFloat = 0.5
    """From here on the run warns; 0 = never."""
    stop: NonNegativeFloat = 10.0
    """From here on the run stops; 0 = never. With both 0 nothing is measured."""

    def __post_init__(self) -> None:
        if 0 < self.stop < self.warn:
            raise ValueError(f"stop must be >= warn ({self.warn:g}) or 0, got {self.stop:g}")


@dataclass(frozen=True, kw_only=True)
class RefillConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): draws until `batch_size` groups are informative.

    A group whose rewards are all equal gives no gradient; further draws of batch_size prompts replace it.
    """

    max_draws: int = 10
    """Draws that a step may make. Places that are empty then are filled with groups of equal rewards, at weight 0."""

    def __post_init__(self) -> None:
        if self.max_draws < 2:
            raise ValueError(
                f"max_draws must be >= 2, got {self.max_draws}: one draw refills nothing. Leave refill out, or set "
                "advantage.select.drop_dead=true to train the groups that differ, however few"
            )


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """A whole recipe. Blocks are nodes (a class by `_target_`, and its keys); the trainer builds them."""

    bundle: Node
    """The model: modules of one checkpoint."""
    pipeline: Node
    """Encode, sample, decode with that model."""
    backend: Node
    """The trainable weights: wrapping, optimizer, snapshots."""
    rollout: Node
    """The engine that samples."""
    reward: Node
    """What scores the samples."""
    advantage: Node = field(metadata={"target": "unirl.algorithms.shared.advantages.GroupAdvantage"})
    """Rewards to one advantage per sample."""
    algorithm: Node
    """The loss."""
    stack: Node = field(metadata={"target": "unirl.train.stack.TrainStack"})
    """Updates and micro-batches of a step."""
    data_source: Node
    """The prompts."""
    sampling: Node
    """How samples are drawn."""
    trainer: Node = field(metadata={"target": "unirl.trainer.diffusion.DiffusionTrainer"})
    """The loop: what the model is given of a prompt, and which track is trained."""
    sync: Node | None = None
    """Weights to an engine that holds its own; absent = the engine borrows the trained ones."""
    parity: ParityConfig = ParityConfig()
    refill: RefillConfig | None = None
    """Draw on where groups of a step have equal rewards; absent = a step is one draw."""
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    tracking: TrackingConfig = TrackingConfig()

    batch_size: Positive
    """P, prompts per step; a step draws P x sampling.samples_per_prompt samples."""
    num_rollouts: Positive = 100
    """Steps of the loop."""
    num_devices: Annotated[int, Meta(ge=1), Meta(le=MAX_DEVICES)] = 1
    """Devices of the pool: GPUs, or CPU processes where there is none."""
    devices_per_node: Positive | None = None
    """Devices that each machine gives; absent = one machine gives all."""
    runtime: Literal["local", "ray"] | None = None
    """local = every role in this process; ray = one worker per device; absent = local for one device, else ray."""
    placement: dict[str, Where] | None = None
    """Role to devices, such as {train: 0-3, rollout: 4-7}; absent = every role shares every device."""
    stall_timeout_s: Annotated[float, Meta(gt=0), Meta(le=1e9)] = 1800.0
    """A call that takes longer has stalled: the run ends and shows where every worker stands."""
    row_transport: Literal["object_store", "collective"] = "object_store"
    """How latents, conditions and pixels go from worker to worker: Ray's object store, or gloo and NCCL messages."""
    reward_parts: Positive = 1
    """Parts of a step that are scored while the next is drawn; more than 1 needs a placement of its own for reward."""
    weight_sync_interval: Positive = 1
    """Send weights to an engine of its own every this many steps."""
    save_interval: NonNegative = 50
    """Checkpoint every this many steps and after the last; 0 = only after the last."""
    keep_checkpoints: NonNegative = 3
    """Older ones are deleted after a new one is published; 0 = keep all."""
    resume: str = "auto"
    """auto = continue what the run directory holds, else start; latest; none; or a checkpoint's path."""
    scale: Literal["full", "toy"] = "full"
    """toy = the same run with small values, on a CPU in seconds."""
    plugins: tuple[str, ...] = ()
    """Packages beside unirl whose classes a `_target_` may name."""

    @property
    def runtime_in_use(self) -> Literal["local", "ray"]:
        """The runtime that is asked for, or that follows from the number of devices."""
        return self.runtime or ("local" if self.num_devices == 1 else "ray")

    # Keys of blocks that the trainer and the plan read. Other code asks here, and does not spell a key path itself.

    @property
    def samples_per_prompt(self) -> int:
        """N, samples per prompt (sampling.samples_per_prompt)."""
        return self.sampling.require("samples_per_prompt", int)

    @property
    def seed(self) -> int:
        """Seed of all keyed random numbers (sampling.seed)."""
        return self.sampling.require("seed", int)

    @property
    def num_updates(self) -> int:
        """Optimizer steps per step of the loop (stack.num_updates_per_batch)."""
        return self.stack.require("num_updates_per_batch", int)

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_rollouts * self.num_updates

    @property
    def micro_batch_size(self) -> int:
        """Rows per micro-batch (stack.micro_batch_size)."""
        return self.stack.require("micro_batch_size", int)

    @property
    def micro_batch_tokens(self) -> int | None:
        """Tokens per micro-batch (stack.micro_batch_tokens). None if micro-batches are cut by their number of rows."""
        return self.stack.get("micro_batch_tokens", int)

    @property
    def model_path(self) -> str | None:
        """Directory or hub id of the model (bundle.path). None if the bundle has no such key."""
        return self.bundle.get("path", str)

    @property
    def model_revision(self) -> str | None:
        """Revision of a model on the hub (bundle.revision)."""
        return self.bundle.get("revision", str)

    @property
    def data_path(self) -> str | Path | None:
        """The prompt file (data_source.data_path). None if the data source reads no file."""
        return self.data_source.get("data_path", str) or self.data_source.get("data_path", Path)

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of samples, if they differ by prompt (data_source.sizes)."""
        return tuple(self.data_source.values.get("sizes") or ())

    @property
    def recorded_roles(self) -> tuple[str, ...]:
        """Roles of recorded samples, such as chosen and rejected (data_source.recorded)."""
        return tuple(self.data_source.values.get("recorded") or ())

    @property
    def reward_backend(self) -> Node | None:
        """The scorer, or the client of one, that a reward service holds (reward.backend)."""
        return self.reward.get("backend", Node)

    @property
    def lora(self) -> Node | None:
        """The LoRA block (backend.lora_cfg). None if all weights are trained."""
        return self.backend.get("lora_cfg", Node)

    @property
    def merges_adapters(self) -> bool:
        """True if the engine receives weights with adapters folded in (sync.merge_adapters)."""
        return self.sync is not None and bool(self.sync.get("merge_adapters", bool))

    @property
    def sync_transport(self) -> str | None:
        """How weights travel to the engine (sync.transport). None without a sync block."""
        return None if self.sync is None else self.sync.get("transport", str)
