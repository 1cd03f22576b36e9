"""The top level of a recipe: every block and scalar that it may hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from msgspec import Meta

from unirl.config.errors import did_you_mean
from unirl.config.evaluation import EvaluationConfig, NonNegative, NonNegativeFloat, Positive
from unirl.config.live import ProfileConfig, TrackingConfig
from unirl.config.node import Node
from unirl.config.node_groups import NodeGroup
from unirl.config.saving import CheckpointConfig, RestartConfig
from unirl.config.watching import WatchConfig
from unirl.types.credit import CreditName

Where = str | int | tuple[int, ...]
"""Devices of a role: `0-3`, `0,2`, `3`, `[0, 2]`, `all`, `rest`, `in train`, `in rollout`, `cpu`, `cpu x2`; or those of
a group of nodes: `LABEL`, `LABEL:0-3`."""

Runtime = Literal["local", "ray", "torchrun"]
"""Where roles run: in the driver's process, in workers of Ray, or in processes of torchrun."""
MAX_DEVICES = 2**16


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The identity of a run."""

    project: str = "unirl"
    """Folder under runs/, and project name in tracking services."""
    name: str | None = None
    """Name of the run; absent = made from time and recipe."""
    dir: str | None = None
    """The run directory; absent = runs/<project>/<name>."""
    stop_grace_s: Annotated[float, Meta(gt=0), Meta(le=1e6)] = 1800.0
    """Seconds after a stop signal by which the run ends. It finishes its step and saves; if that takes longer, it ends
    without. Set it to less than the time that a scheduler leaves between its signal and SIGKILL."""

    def __post_init__(self) -> None:
        if self.dir is not None and not self.dir.strip():
            raise ValueError("dir is empty, which would be the current folder. Name a folder, or leave run.dir out")


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Bounds on the difference between the engine's log-probs and their replay by the trainer before any update.

    The measure is the largest |log ratio| in nats, divided by the clip range of the loss. At 1 the trust region is
    used up before anything was learned. Low precision alone may give a fraction of 1, wrong weights give hundreds.
    """

    warn: NonNegativeFloat = 0.5
    """The run warns from this value on; 0 = never."""
    stop: NonNegativeFloat = 10.0
    """The run stops from this value on; 0 = never. If both are 0, nothing is measured."""

    def __post_init__(self) -> None:
        if 0 < self.stop < self.warn:
            raise ValueError(f"stop must be >= warn ({self.warn:g}) or 0, got {self.stop:g}")


@dataclass(frozen=True, kw_only=True)
class RefillConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): draws until `batch_size` groups are informative.

    A group whose rewards are all equal gives no gradient; further draws of batch_size prompts replace it.
    """

    max_draws: int = 10
    """The most draws of a step. Groups that are missing then are filled with groups of equal rewards at weight 0."""

    def __post_init__(self) -> None:
        if self.max_draws < 2:
            raise ValueError(
                f"max_draws must be >= 2, got {self.max_draws}: one draw cannot be refilled. Leave refill out, or set "
                "advantage.select.drop_dead=true to train only the groups whose rewards differ"
            )


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig:
    """Generation beside training: while the weights learn from one step, the engine generates later ones."""

    max_staleness: NonNegative = 0
    """Steps by which the weights that sample are behind those that are trained. 0 = generate, then train; more needs an
    engine on devices of its own (placement.rollout)."""
    order: Literal["fixed", "free"] = "fixed"
    """fixed: every step comes from the weights of max_staleness steps before, and a second run is equal bit for bit.
    free: the engine gets new weights between two of the `reward_parts` of a step, as soon as they exist."""
    steps_ahead: Annotated[int, Meta(ge=1)] | None = None
    """Steps that wait to be trained or are generated, with order=free; null = max_staleness. With more of them, samples
    can be older than max_staleness steps when their turn comes."""
    too_old: Literal["redraw", "drop", "correct"] = "redraw"
    """What becomes of such samples. redraw: their prompts are sampled again. drop: they are not trained. correct: they
    are trained, with the importance ratio or weights of the loss."""

    slice_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens after which responses pause, so that the rest can come from newer weights; with order=free. null = a
    response comes from the weights that began it."""
    elastic: bool = False
    """The training devices sample some of the `reward_parts` of a step while they wait for samples, with a second
    engine, which sleeps while they train. It changes no bit of a run. It needs an engine on devices of its own."""

    def __post_init__(self) -> None:
        if self.elastic and self.is_free:
            raise ValueError("elastic belongs to order=fixed: with order=free samples depend on timing already")
        if self.is_free and not self.max_staleness:
            raise ValueError("order=free lets the engine run ahead, so max_staleness must be >= 1, got 0")
        if not self.is_free and (self.steps_ahead is not None or self.too_old != "redraw"):
            key = "steps_ahead" if self.steps_ahead is not None else "too_old"
            raise ValueError(f"{key} belongs to order=free: with order=fixed no sample is older than max_staleness")
        if not self.is_free and self.slice_tokens is not None:
            raise ValueError("slice_tokens belongs to order=free: with order=fixed no weights arrive during a step")

    @property
    def is_free(self) -> bool:
        """The engine does not wait for the end of a step."""
        return self.order == "free"

    @property
    def is_concurrent(self) -> bool:
        """A thread of its own generates, beside that of the loop."""
        return self.max_staleness > 0 or self.elastic

    @property
    def num_ahead(self) -> int:
        """Steps that are begun before the weights learn from an earlier one."""
        return self.steps_ahead or self.max_staleness


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The blocks of one policy: a model, how it samples, and how it is trained."""

    bundle: Node
    """The modules of one checkpoint."""
    pipeline: Node
    """Encodes prompts, samples and decodes with the bundle."""
    backend: Node
    """The trainable weights: sharding, optimizer, snapshots."""
    rollout: Node
    """The engine that samples."""
    algorithm: Node
    """The loss."""
    stack: Node = field(metadata={"target": "unirl.train.stack.TrainStack"})
    """Updates and micro-batches of a step."""
    sampling: Node
    """The sampling settings."""
    sync: Node | None = None
    """Sends weights to an engine that has its own; absent = the engine uses the trained weights."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The blocks and scalars of a recipe that all of its policies share."""

    reward: Node
    """The reward service, which scores samples."""
    advantage: Node = field(metadata={"target": "unirl.algorithms.shared.advantages.GroupAdvantage"})
    """Turns rewards into one advantage per sample."""
    data_source: Node
    """The prompts."""
    trainer: Node = field(metadata={"target": "unirl.trainer.diffusion.DiffusionTrainer"})
    """The trainer of a domain: how requests are made, and which track is trained."""
    parity: ParityConfig = ParityConfig()
    watch: WatchConfig = field(default_factory=WatchConfig)
    profile: ProfileConfig | None = None
    refill: RefillConfig | None = None
    """Dynamic sampling; absent = a step is one draw."""
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = RunConfig()
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restarts: RestartConfig = field(default_factory=RestartConfig)

    batch_size: Positive
    """Prompts per step, P. A step generates P x sampling.samples_per_prompt samples."""
    num_rollouts: Positive = 100
    """Steps of the loop."""
    num_devices: Annotated[int, Meta(ge=1), Meta(le=MAX_DEVICES)] = 1
    """Devices of the pool: GPUs, or CPU processes on a machine without a GPU."""
    devices_per_node: Positive | None = None
    """Devices of each node; absent = one node has all devices."""
    node_groups: dict[str, NodeGroup] | None = None
    """Label to nodes of a Ray cluster that differ: GPUs of several kinds, or CPU nodes. Roles are placed on labels."""
    runtime: Runtime | None = None
    """local = every role in this process; ray = one worker per device; torchrun = the processes that torchrun started;
    absent = torchrun under torchrun, else local for one device, else ray."""
    placement: dict[str, Where] | None = None
    """Role to devices, such as {train: 0-3, rollout: 4-7}, or to groups of nodes, such as {train: LABEL, rollout:
    "LABEL:0-3"}; absent = every role shares every device."""
    stall_timeout_s: Annotated[float, Meta(gt=0), Meta(le=1e9)] = 1800.0
    """A call that makes no progress for so long has stalled: the run ends and prints the stack of every worker. A
    denoising step, a decoded or scored chunk, a micro-batch, a chunk of tokens and the import of a module are
    progress."""
    connect_timeout_s: Annotated[float, Meta(gt=0), Meta(le=1e9)] = 60.0
    """Seconds that the ranks of a role, or a trainer and its engine, may take to find each other and connect."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What happens when the plan says that a GPU is too small. Plans are counted, so a run may show that they err."""
    allow_mixed_devices: bool = False
    """Let the ranks of one role run on devices of different kinds or drivers. They then wait for the slowest one."""
    row_transport: Literal["object_store", "collective"] = "object_store"
    """How latents, conditions and pixels travel between workers: Ray's object store, or gloo and NCCL messages."""
    transfer_queue: Node | None = None
    """A service that carries them in place of row_transport: simple | mooncake; absent = none."""
    reward_parts: Positive = 1
    """Parts of a step, each scored while the next is sampled. More than 1 needs devices of its own for the reward."""
    weight_sync_interval: Positive = 1
    """Send weights to an engine that has its own every this many steps."""
    save_interval: NonNegative = 50
    """Save a checkpoint every this many steps and after the last step; 0 = only after the last step."""
    keep_checkpoints: NonNegative = 3
    """The newest checkpoints to keep, counted after a new one is published; 0 = keep all."""
    resume: str = "auto"
    """auto = continue the run of the run directory, or start it; latest; none; or the path or URL of a checkpoint."""
    scale: Literal["full", "toy"] = "full"
    """toy = the same recipe with small values, which runs on a CPU in seconds."""
    plugins: tuple[str, ...] = ()
    """Packages other than unirl whose classes a `_target_` may name. A file says what it needs; only the command line,
    UNIRL_PLUGINS or ~/.config/unirl/plugins allows it."""

    @property
    def devices_on_node(self) -> int:
        """The devices of a node, or those of the node with the most if nodes differ."""
        if self.node_groups:
            return max(group.devices_per_node for group in self.node_groups.values())
        return self.devices_per_node or self.num_devices

    @property
    def runtime_in_use(self) -> Runtime:
        """The runtime of the recipe, or the one that follows from the number of devices."""
        return self.runtime or ("local" if self.num_devices == 1 else "ray")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(RunSettings, PolicyConfig):
    """A whole recipe. A block is a node, which is a class and the values of its keys; the trainer builds it."""

    @property
    def policies(self) -> dict[str, RecipeConfig]:
        """The recipe itself, under the name "": it has one policy."""
        return {"": self}

    @property
    def parents(self) -> tuple[tuple[str, int], ...]:
        """The tracks that this one continues, the first one first, and the samples of each row of the one before it."""
        return ()

    @property
    def data_prompts(self) -> int:
        """Prompts of the data in a step."""
        return self.batch_size // math.prod(count for _, count in self.parents)

    def path_of(self, block: str) -> str:
        """The key of a block of this policy, as the recipe writes it: `stack`, `ar.stack` or `algorithm.image`."""
        node = vars(self)[block]
        return node.path if isinstance(node, Node) else f"{self.bundle.path.removesuffix('bundle')}{block}"

    # Keys of blocks that the trainer and the plan read. Code that needs another key adds a property here.

    @property
    def samples_per_prompt(self) -> int:
        """N, samples per prompt (sampling.samples_per_prompt)."""
        return self.sampling.require("samples_per_prompt", int)

    @property
    def seed(self) -> int:
        """Seed of all keyed random numbers (sampling.seed)."""
        return self.sampling.require("seed", int)

    @property
    def learning_rate(self) -> float | None:
        """Peak learning rate (backend.optimizer_cfg.learning_rate). None if the backend has no such key."""
        optimizer = self.backend.get("optimizer_cfg", Node)
        return None if optimizer is None else optimizer.get("learning_rate", float)

    @property
    def num_updates(self) -> int:
        """Optimizer steps per step of the loop (stack.num_updates_per_batch)."""
        return self.stack.require("num_updates_per_batch", int)

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_rollouts * self.num_updates

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per micro-batch (stack.micro_batch_size). None for `auto`: the plan chooses them for the device."""
        return self.stack.get("micro_batch_size", int)

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
    def data_path(self) -> str | None:
        """The prompt file (data_source.data_path). None if the data source reads no file."""
        return self.data_source.get("data_path", str)

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of samples, if they differ by prompt (data_source.sizes)."""
        return self.data_source.get("sizes", tuple) or ()

    @property
    def recorded_roles(self) -> tuple[str, ...]:
        """Roles of recorded samples, such as chosen and rejected (data_source.recorded)."""
        return self.data_source.get("recorded", tuple) or ()

    @property
    def reward_backend(self) -> Node | None:
        """The scorer, or the client of one, that a reward service holds for the last track (reward.backend)."""
        return self.reward.get("backend", Node)

    @property
    def track_rewards(self) -> Mapping[str, Node]:
        """The rewards of tracks before the last one, by track (reward.tracks)."""
        return self.reward.get("tracks", dict) or {}

    @property
    def scorers(self) -> tuple[Node, ...]:
        """All scorers of the reward service: that of the last track, then those of other tracks."""
        own = [reward.require("backend", Node) for reward in self.track_rewards.values()]
        return (*([] if self.reward_backend is None else [self.reward_backend]), *own)

    @property
    def loaded_snapshots(self) -> Mapping[str, Node]:
        """Weight snapshots that are loaded from other checkpoints (backend.snapshots)."""
        return self.backend.get("snapshots", dict) or {}

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


@dataclass(frozen=True, kw_only=True)
class ChildConfig(RecipeConfig):
    """A recipe as the policy of a child track sees it. Its `batch_size` counts the samples of the parent track."""

    parent: RecipeConfig
    """The recipe as the policy of the parent track sees it."""
    parent_track: str

    @property
    def parents(self) -> tuple[tuple[str, int], ...]:
        return *self.parent.parents, (self.parent_track, self.parent.samples_per_prompt)


@dataclass(frozen=True, kw_only=True)
class EnhancerConfig(RunSettings):
    """A recipe of two policies: a language model rewrites each prompt, and a diffusion model draws the rewrites."""

    ar: PolicyConfig
    """The language model. Its sampling.samples_per_prompt is the number of rewrites of a prompt, N."""
    diffusion: PolicyConfig
    """The diffusion model. Its sampling.samples_per_prompt is the number of samples of a rewrite, M."""
    rollout: Node = field(metadata={"target": "unirl.rollout.engine.composed.engine.ComposedRolloutEngine"})
    """The engine that composes those of the policies: how a response becomes a prompt."""
    trainer: Node = field(metadata={"target": "unirl.trainer.pe.PETrainer"})
    """The trainer of the domain."""
    credit: CreditName = "mean"
    """The rule of credit: the reward of a rewrite from those of its samples, and which samples are trained."""
    trained: tuple[Literal["ar", "diffusion"], ...] = ("ar", "diffusion")
    """The policies that are updated; the other one samples with the weights that it has."""

    def __post_init__(self) -> None:
        if not self.trained:
            raise ValueError("trained is empty, so nothing would be learned. Write trained=[ar], [diffusion] or both")

    @property
    def policies(self) -> dict[str, RecipeConfig]:
        """By track, the recipe as each policy sees it. The prompts of the diffusion model are the rewrites."""
        return seen_by_tracks(self, {"ar": vars(self.ar), "diffusion": vars(self.diffusion)}, self.trained)


@runtime_checkable
class WritesTexts(Protocol):
    """A class of pipelines that write texts before they draw."""

    text_tracks: tuple[str, ...]
    """The tracks of the texts, in the order in which they are written."""

    def tracks(self) -> tuple[str, ...]:
        """All tracks that it can sample, each before the one that continues it. A classmethod."""


def in_chain(tracks: Iterable[str], pipeline: object) -> list[str]:
    """The tracks, each before the one that continues it: in the order of the pipeline's texts, then as given."""
    texts = pipeline.text_tracks if isinstance(pipeline, WritesTexts) else ()
    return sorted(tracks, key=lambda track: texts.index(track) if track in texts else len(texts))


@dataclass(frozen=True, kw_only=True)
class UnifiedConfig(RunSettings):
    """A recipe of one network that samples several tracks, such as a text and the image that it describes.

    Each track continues the one before it. The tracks share all blocks but `sampling` and `algorithm`, which have one
    entry for each.
    """

    bundle: Node
    """The modules of one checkpoint."""
    pipeline: Node
    """Encodes prompts, samples the tracks one after another, and decodes."""
    backend: Node
    """The trainable weights: sharding, optimizer, snapshots."""
    rollout: Node
    """The engine that samples all tracks."""
    stack: Node = field(metadata={"target": "unirl.train.unified_model_stack.UnifiedModelStack"})
    """Updates and micro-batches of a step, and how the losses of the tracks share them."""
    sync: Node | None = None
    """Sends weights to an engine that has its own; absent = the engine uses the trained weights."""
    sampling: dict[str, Node]
    """The sampling settings of each track. The last track is scored."""
    algorithm: dict[str, Node]
    """The loss of each track."""
    trainer: Node = field(metadata={"target": "unirl.trainer.unified_model.UnifiedModelTrainer"})
    """The trainer of the domain."""
    credit: CreditName = "mean"
    """The rule of credit between a row of a track and the rows that continue it (docs/credit.md)."""
    trained: tuple[str, ...] | None = None
    """The tracks whose losses are trained; absent = all."""

    def __post_init__(self) -> None:
        tracks = list(self.sampling)
        if len(tracks) < 2:
            named = f"the track {tracks[0]} alone" if tracks else "no track"
            raise ValueError(
                f"sampling has {named}. A recipe of one track writes sampling and algorithm without a name"
            )
        if set(self.algorithm) != set(tracks):
            raise ValueError(
                f"algorithm has the tracks {', '.join(self.algorithm) or 'none'}, and sampling has "
                f"{', '.join(tracks)}. Write one loss for each track, or leave out tracks that are not sampled"
            )
        unknown = [track for track in self.trained or () if track not in tracks]
        if unknown:
            raise ValueError(
                f"trained={list(self.trained or ())}: this recipe has no track '{unknown[0]}'."
                f"{did_you_mean(unknown[0], tracks)} Its tracks are {', '.join(tracks)}"
            )
        if self.trained == ():
            raise ValueError(f"trained is empty, so nothing would be learned. Name one or more of {', '.join(tracks)}")

    @property
    def chain(self) -> list[str]:
        """The tracks, each before the one that continues it."""
        return in_chain(self.sampling, self.pipeline.schema.owner)

    @property
    def policies(self) -> dict[str, RecipeConfig]:
        """The recipe as each track sees it. The prompts of a track are the samples of the track before it."""
        blocks = {name: getattr(self, name) for name in ("bundle", "pipeline", "backend", "rollout", "stack", "sync")}
        of_track = {
            track: blocks | {"sampling": self.sampling[track], "algorithm": self.algorithm[track]}
            for track in self.chain
        }
        return seen_by_tracks(self, of_track, self.trained or tuple(of_track))


def seen_by_tracks(
    settings: RunSettings, blocks: Mapping[str, Mapping[str, Any]], trained: Sequence[str]
) -> dict[str, RecipeConfig]:
    """The recipe as each track of a chain sees it: the settings of the run, and the blocks of the track.

    Args:
        blocks: by track, from the first one to the last. Each track continues the one before it.
        trained: the tracks whose weights are updated. No average is kept of other weights, since they stay as they are.
    """
    shared = {each.name: getattr(settings, each.name) for each in fields(RunSettings)}
    untrained = shared | {"evaluation": replace(settings.evaluation, weights="live")}
    views: dict[str, RecipeConfig] = {}
    parent: RecipeConfig | None = None
    parent_track = ""
    for track, own in blocks.items():
        of_track = {**(shared if track in trained else untrained), **own}
        if parent is None:
            parent = RecipeConfig(**of_track)
        else:
            of_track["batch_size"] = parent.batch_size * parent.samples_per_prompt
            parent = ChildConfig(**of_track, parent=parent, parent_track=parent_track)
        views[track], parent_track = parent, track
    return views


AnyConfig = RecipeConfig | EnhancerConfig | UnifiedConfig
POLICIES = ("ar", "diffusion")
"""The blocks of the policies of a recipe that has several."""
OF_TRACK = ("sampling", "algorithm")
"""The blocks of a unified model's recipe that have an entry for each track."""


def recipe_class(tree: Mapping[str, object]) -> type[AnyConfig]:
    """The class of a recipe.

    One with a block of a policy has several policies, unless it has the blocks of one. One whose sampling settings
    have names has several tracks of one network.
    """
    if "bundle" in tree and any(_has_names(tree.get(block)) for block in OF_TRACK):
        return UnifiedConfig
    blocks = [tree[name] for name in POLICIES if name in tree]
    has_models = any(isinstance(block, Mapping) and "bundle" in block for block in blocks)
    return EnhancerConfig if has_models or (blocks and "bundle" not in tree) else RecipeConfig


def _has_names(block: object) -> bool:
    """True for a mapping of names to blocks."""
    return (
        isinstance(block, Mapping)
        and "_target_" not in block
        and any(isinstance(item, Mapping) and "_target_" in item for item in block.values())
    )


def policy_keys(tree: Mapping[str, object], key: str) -> list[str]:
    """The key of each policy for the key of a recipe of one: `sampling.seed` gives `ar.sampling.seed` and so on.

    Keys that the tracks of one network share occur once for each track.
    """
    kind = recipe_class(tree)
    if kind is EnhancerConfig:
        return [f"{name}.{key}" for name in POLICIES]
    if kind is UnifiedConfig:
        block, dot, rest = key.partition(".")
        tracks = tree.get("sampling")
        names = (
            [name for name, block in tracks.items() if isinstance(block, Mapping)]
            if isinstance(tracks, Mapping)
            else []
        )
        return [f"{block}.{name}{dot}{rest}" if block in OF_TRACK else key for name in names]
    return [key]


POLICY_BLOCKS = tuple(each.name for each in fields(PolicyConfig))
"""The blocks that each policy of a recipe of several has."""
_POLICY_KEY = re.compile(rf"(?<![\w./])({'|'.join(POLICY_BLOCKS)})(?=\.[a-z_]|=[^\s=])")


def keys_of_policy(text: str, config: RecipeConfig) -> str:
    """A text for the user in which the keys of a policy are those of the recipe: `ar.stack.micro_batch_size`.

    Args:
        config: the recipe as the policy sees it. The keys of the only policy of a recipe stay as they are.
    """

    def key(match: re.Match[str]) -> str:
        path = config.path_of(match[1])
        return match[1] if text.startswith(path, match.start()) else path

    return _POLICY_KEY.sub(key, text)


def said_of_policy(text: str, policy: str, config: RecipeConfig) -> str:
    """A refusal or a notice that names its policy: by its keys, or before the text if that does not begin with one.

    Args:
        policy: the name of the policy; "" for the only one of a recipe.
    """
    named = keys_of_policy(text, config)
    first = re.match(r"\w+", named)
    shared = {each.name for each in fields(RunSettings)} | {n for n in POLICY_BLOCKS if config.path_of(n) == n}
    is_shared = first is not None and first[0] in shared
    begins_with_policy = named.startswith((f"{policy}.", *(f"{block}.{policy}" for block in OF_TRACK)))
    return named if not policy or is_shared or begins_with_policy else f"{policy}: {named}"
