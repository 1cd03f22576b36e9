"""Compares replay, loss and gradient of GRPO on packed rows with padded rows and with the step of TRL.

    OMP_NUM_THREADS=1 python benchmarks/ar_replay.py [--pairs 5] [--clock wall|cpu] [--cases ragged] [--json out.json]

padded   The forward of transformers on padded rows, log_softmax over [B, L, V], and the same loss.
trl      `GRPOTrainer._compute_loss` on the same tokens, if TRL is installed. It computes the entropy as well.

Memory is the peak of all tensors except the weights, gradients included. The case `long` has a large vocabulary, so
that the logits [B, L, V] dominate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from ar_sampling import CONFIG, PAD, Models, Run, prompts
from harness import CLOCKS, Ratio, measuring, memory, paired, show, write
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.segments import TextSegment

MB = 1e6


@dataclass
class Cost(Ratio):
    """Time in seconds, and memory in megabytes."""

    ours_peak_mb: float = 0.0
    bare_peak_mb: float = 0.0
    gradient_gap: float = 0.0
    """Largest difference of the two gradients, relative to the largest entry."""


@dataclass(frozen=True)
class Rows:
    """Recorded responses, packed and padded."""

    track: RolloutTrack
    padded: dict[str, Tensor]

    @staticmethod
    def of(prompt_lengths: list[int], lengths: list[int], vocabulary: int) -> Rows:
        """Returns rows of random tokens with recorded log-probs of 0."""
        generator = torch.Generator().manual_seed(2)
        total, batch = sum(lengths), len(lengths)
        conditions = prompts(prompt_lengths)
        tokens = torch.randint(0, vocabulary, (total,), generator=generator)
        segment = TextSegment(
            tokens=tokens,
            logp=torch.zeros(total),
            loss_mask=torch.ones(total, dtype=torch.bool),
            offsets=torch.tensor([0, *lengths]).cumsum(0),
            finished=torch.ones(batch, dtype=torch.bool),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            anchors={},
        )
        advantages = torch.randn(batch, generator=generator)
        ids = [f"row{i}" for i in range(batch)]
        track = RolloutTrack(
            sample_ids=ids,
            group_ids=ids,
            conditions=conditions,
            segment=segment,
            advantages=advantages,
            weight=torch.ones(batch),
            weight_version=torch.zeros(batch, dtype=torch.int64),
        )
        heads = conditions["prompt"].tokens.split(prompt_lengths)  # type: ignore[attr-defined]
        left, right = padded(list(heads), left=True), padded(list(tokens.split(lengths)), left=False)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return Rows(track, dict(zip(names, (*left, *right), strict=True)) | {"advantages": advantages})


def padded(rows: list[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    """Returns tokens and mask, [B, L] each. The mask is 0 for padding."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def ours(models: Models, rows: Rows) -> None:
    """Runs replay, loss and gradient of this package."""
    algorithm = ARGRPO()
    loss = algorithm.loss(models.stage, rows.track, (0,)).loss / algorithm.count(rows.track)
    models.stage.network.zero_grad()
    loss.backward()


def textbook(models: Models, rows: Rows) -> None:
    """Runs loss and gradient of GRPO over padded rows, at ratio 1."""
    p = rows.padded
    ids = torch.cat([p["prompt_ids"], p["completion_ids"]], 1)
    mask = torch.cat([p["prompt_mask"], p["completion_mask"]], 1)
    width = p["completion_ids"].shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = models.plain(
        input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1, use_cache=False
    ).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(2, p["completion_ids"][:, :, None])[:, :, 0]
    ratio = (logp - logp.detach()).exp()
    advantage = p["advantages"][:, None]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    models.plain.zero_grad()
    ((losses * p["completion_mask"]).sum() / p["completion_mask"].sum()).backward()


def trl_step(models: Models) -> Callable[[Models, Rows], None]:
    """Returns a step with the loss of TRL on the same rows. Its trainer has the plain network."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t1", eos_token="t0")
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        bf16=False,
        beta=0.0,
        loss_type="bnpo",
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,
    )
    trainer: Any = GRPOTrainer(
        model=models.plain,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "t1"}] * 4),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1

    def step(models: Models, rows: Rows) -> None:
        models.plain.zero_grad()
        trainer._compute_loss(models.plain, dict(rows.padded)).backward()

    return step


def gradient_gap(models: Models) -> float:
    """Returns the largest difference of the two gradients, relative to the largest entry."""
    own = dict(models.stage.network.named_parameters())
    pairs = [(own[name].grad, p.grad) for name, p in models.plain.named_parameters()]
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def cost(name: str, models: Models, rows: Rows, bare: Callable[[Models, Rows], None], run: Run) -> Cost:
    """Measures both ways of the same step."""
    segment = rows.track.segment
    ours(models, rows)
    bare(models, rows)
    gap = gradient_gap(models)
    peaks = [memory(lambda step=step: step(models, rows)).peak / MB for step in (ours, bare)]
    shapes = {
        "parameters": sum(p.numel() for p in models.plain.parameters()),
        "vocabulary": models.stage.facts.vocab_size,
        "rows": len(segment),
        "tokens": len(segment.tokens) + len(rows.track.conditions["prompt"].tokens),  # type: ignore[attr-defined]
        "padded_tokens": sum(rows.padded[f"{part}_ids"].numel() for part in ("prompt", "completion")),
    }
    times = paired(name, shapes, lambda: ours(models, rows), lambda: bare(models, rows), run.pairs, CLOCKS[run.clock])
    return Cost(**vars(times), ours_peak_mb=peaks[0], bare_peak_mb=peaks[1], gradient_gap=gap)


def main(run: Run, chosen: list[str], path: str | None) -> None:
    """Measures and reports the named cases; no names = all cases."""
    vocabulary = 32768
    small, large = Models.of(CONFIG), Models.of(CONFIG | {"vocab_size": vocabulary, "num_hidden_layers": 2})
    lengths = [16 + 29 * i % 113 for i in range(8)]
    cases = {
        "equal": (small, Rows.of([32] * 4, [96] * 4, 8192)),
        "ragged": (small, Rows.of([8 + 5 * i % 41 for i in range(8)], lengths, 8192)),
        "long": (large, Rows.of([32] * 2, [384] * 2, 8192)),
    }
    results: list[Ratio] = []
    for name in [name for name in cases if not chosen or any(word in name for word in chosen)]:
        models, rows = cases[name]
        baselines = {"padded": textbook} | ({"trl": trl_step(models)} if find_spec("trl") else {})
        for against, bare in baselines.items():
            result = cost(f"{name} / {against}", models, rows, bare, run)
            show(result)
            peaks = f"{result.ours_peak_mb:.0f} MB against {result.bare_peak_mb:.0f} MB"
            print(f"    peak {peaks}, gradients differ by {result.gradient_gap:.1e}", flush=True)
            results.append(result)
            if path:
                write(results, path)  # the results so far


if __name__ == "__main__":
    args = measuring(__doc__.splitlines()[0], pairs=5).parse_args()
    main(Run(args.pairs, args.clock), args.cases, args.json)
