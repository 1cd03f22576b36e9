"""A server of tokens that loads a checkpoint and reports checksums of its weights: SGLang and vLLM.

checkpoint --launch--> server --checks of seeds and log-probs--> answers
buckets --names of the checkpoint--> server --checksums--> ChecksumProof
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import EngineError, SyncError
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.models.language.pipeline import PlainPrompt, TextPipeline
from unirl.rollout.engine.serving.checksums import ChecksumProof, SentTensors
from unirl.rollout.engine.serving.fake import fake_command
from unirl.rollout.engine.serving.http_server import option_words
from unirl.rollout.engine.serving.names import checkpoint_names, wire_names
from unirl.rollout.engine.serving.settings import TOY, InstalledServerSettings
from unirl.rollout.engine.serving.tokens import ProbeResult, TokenRequest, TokenServer
from unirl.types.sampling import ARSamplingParams

TOY_CHECKPOINT: Mapping[str, object] = {**TOY, "tp_size": 1, "context_length": None, "concurrency": 8}
"""The settings at scale=toy."""


@dataclass(kw_only=True)
class CheckpointServerSettings(InstalledServerSettings):
    """Settings of a server that loads a checkpoint of a language model."""

    tp_size: int = 1
    """Tensor-parallel ranks of a server that the engine starts."""
    context_length: int | None = None
    """The most tokens of a prompt and its response. Absent: those of the model."""
    deterministic: bool = True
    """Require that a seed determines a response; SGLang is started with --enable-deterministic-inference for it. False
    allows a server that ignores seeds. It can be faster, and such a run is not reproducible."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the command of the server, such as {attention_backend: fa3} for SGLang or {enforce_eager:
    true} for vLLM."""
    concurrency: int = 128


class CheckpointServer(TokenServer):
    """A server of a checkpoint in `root`, whose tensors get new values by their names in the checkpoint."""

    fake: ClassVar[str]
    """The name of its fake server (`unirl engines fake --engine`)."""
    seeded: ClassVar[ARSamplingParams]
    """Almost uniform draws of many tokens, for the check of seeds."""
    keeps_seeds: ClassVar[str]
    """How to get a server that keeps seeds, for an error message."""
    pipeline: TextPipeline[Any]
    settings: CheckpointServerSettings

    def __init__(
        self, pipeline: TextPipeline[Any], folder: Path, log: Path, settings: CheckpointServerSettings
    ) -> None:
        super().__init__(pipeline, folder, log, settings)
        self.concurrency = settings.concurrency
        self.root = folder
        """The folder of the checkpoint."""
        self.wire: Mapping[str, str] = {}
        """Tensor of the layout to its name in the checkpoint, or in requests for an adapter."""
        self.proof = ChecksumProof(self.name)
        self.sent = SentTensors(hashes_bytes=True)
        """The tensors of the transfer that is under way."""
        self.has_checked_seeds = False
        self.asleep: Sequence[Mapping[str, str]] = ()
        """The checksums of the weights when it went to sleep."""

    # The process

    def prepare(self, layout: WeightLayout) -> None:
        bundle = self.pipeline.bundle
        if bundle.path in bundle.toys:
            self.root = self.folder / "base"
            if not self.root.exists():
                self.pipeline.write_model({}, self.root)
        else:
            self.root = bundle.directory_of(bundle.path, bundle.revision)
        self.wire = wire_names(layout, checkpoint_names(self.root, bundle.family))

    def words(self, python: str, port: int) -> list[str]:
        fake = [*fake_command(self.fake, self.pipeline, self.root, port), "--"]
        start = fake if self.settings.is_fake else self.launch(python, port)
        return [*start, *self.flags(), *option_words(self.settings.engine_args)]

    @abstractmethod
    def launch(self, python: str, port: int) -> list[str]:
        """The command of the real program with its model, dtype and address."""

    @abstractmethod
    def flags(self) -> list[str]:
        """The arguments that follow from the settings, the device and the layout. A fake server gets them, too."""

    def restore(self) -> bool:
        self.proof = ChecksumProof(self.name)
        return not self.weights_name

    # Answers

    def refuse_mixture(self, id: str, weights: Sequence[str]) -> None:
        """Raises SyncError for the response `id` of several weights, unless responses may go on with new ones."""
        if len(weights) > 1 and self.settings.in_flight != "pause":
            raise SyncError(
                f"{self.name} sampled {id} from several weights, {', '.join(weights)}: another program sent weights to "
                "the same server meanwhile. Give each run its own server"
            )

    def probe(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> ProbeResult:
        if self.settings.deterministic and not self.has_checked_seeds:
            self._check_seeds(prompts[0])
            self.has_checked_seeds = True
        gap, scale = self.gaps(prompts, logits.double()), float(logits.double().square().mean().sqrt())
        return ProbeResult(float(gap.abs().max()), float(gap.square().mean().sqrt()) / scale, self.causes)

    @property
    def causes(self) -> str:
        """What a difference that the probe finds may come from."""
        return ProbeResult.causes

    @abstractmethod
    def gaps(self, prompts: Sequence[PlainPrompt], logits: Tensor) -> Tensor:
        """Differences between log-probs that the server reports after each prompt and those of `logits` [B, V], fp64.

        Raises:
            EngineError: an answer does not have the log-probs that were asked for.
        """

    def _check_seeds(self, prompt: PlainPrompt) -> None:
        """Raises EngineError unless equal seeds give equal responses and another seed gives another one."""

        def sampled(seed: int) -> list[int]:
            request = TokenRequest("seed", prompt, seed)
            return list(self.insist("to a probe", lambda: self.complete(request, self.seeded)).tokens)

        first, again, other = sampled(1), sampled(1), sampled(2)
        if first != again or first == other:
            what = "gives two responses for one seed" if first != again else "gives one response for two seeds"
            raise EngineError(
                f"{self.name} ignores seeds: it {what}. A run would not be reproducible. {self.keeps_seeds}, or set "
                "rollout.deterministic=false"
            )

    # Weights

    @abstractmethod
    def checksums(self) -> list[Mapping[str, str]]:
        """The checksums of the server's weights by their names at the server, for each tensor-parallel rank."""

    def check_version(self, version: str) -> None:
        """Raises SyncError unless `version`, the name of the server's weights, is that of the last transfer."""
        if version != self.weights_name:
            raise SyncError(
                f"the weights {self.weights_name!r} were sent, and {self.name} says that it has {version!r}: another "
                "program sent weights to the same server meanwhile. Give each run its own server"
            )

    def release(self, path: str) -> None:
        """Free the memory of the device by a request to `path`."""
        self.asleep = self.checksums()
        self.post_once(path, {})

    def resume(self, path: str) -> None:
        """Wake up by a request to `path`. Raises SyncError unless the weights are those before the sleep."""
        self.post_once(path, {})
        if self.checksums() != self.asleep:
            raise SyncError(f"{self.name} has other weights after its sleep than before: see {self.log}")


def log_prob_gaps(logits: Tensor, tokens: Sequence[int], reported: Sequence[float | None]) -> Tensor:
    """Differences between reported log-probs of tokens and log_softmax(logits), fp64. An absent log-prob is NaN.

    Args:
        logits: [V], divided by the temperature.
    """
    theirs = torch.tensor([float("nan") if logp is None else logp for logp in reported], dtype=torch.float64)
    return theirs - logits.log_softmax(0)[torch.tensor(tokens)]
