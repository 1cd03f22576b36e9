"""Compares tokens per second of our sampling and of `generate` in transformers, with equal weights and prompts.

    OMP_NUM_THREADS=1 python benchmarks/ar_sampling.py [--pairs 5] [--clock wall|cpu] [--cases equal] [--json out.json]

equal    As many rows as slots, all of one length, sampled at temperature 1. Both do the same work.
siblings The same with 8 rows per prompt. Our sampling reads each prompt once.
ragged   Four times as many rows as slots, greedy, so that both give the same tokens. `generate` runs one batch after
         another, each until its longest row ends. Our sampling refills free slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import CLOCKS, Ratio, measuring, paired, show, write
from torch import Tensor

from unirl.models.language.chat import TextCodec
from unirl.models.language.packing import prompt_tokens
from unirl.models.language.policy import policy_class
from unirl.models.language.stage import ARStage
from unirl.sde.noise import NoiseSource
from unirl.types.conditions import Conditions
from unirl.types.facts import LanguageFacts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

VOCABULARY = 8192
ENDS = tuple(range(0, VOCABULARY, 48))
"""Every 48th token ends a response, so that a random network gives responses of very unequal lengths."""
PAD = 1
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": list(ENDS),
    "pad_token_id": PAD,
}


@dataclass
class Speed(Ratio):
    """Time in seconds, and tokens per second."""

    ours_tokens_s: float = 0.0
    bare_tokens_s: float = 0.0


@dataclass(frozen=True)
class Models:
    """Our policy and the network of transformers, with equal random weights."""

    stage: ARStage
    plain: Any

    @staticmethod
    def of(config: dict[str, Any]) -> Models:
        """Builds both networks. The weights are the same at every call."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        plain = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
        policy = policy_class(Qwen3ForCausalLM)(Qwen3Config(**config)).eval()
        policy.load_state_dict(plain.state_dict())
        facts = LanguageFacts(
            family="qwen3",
            block_class_names=("Qwen3DecoderLayer",),
            lora_targets=(),
            batch_multiple=4,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            context_length=config["max_position_embeddings"],
        )
        return Models(ARStage(policy, facts, TextCodec(None, ENDS)), plain)


def prompts(lengths: list[int], siblings: int = 1) -> Conditions:
    """Returns random prompts of these lengths, each repeated `siblings` times."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return {"prompt": prompt_tokens([row for row in rows for _ in range(siblings)])}


def sampled(models: Models, conditions: Conditions, params: ARSamplingParams, slots: int) -> TextSegment:
    """Samples responses with this package."""
    ids = [f"row{i}" for i in range(len(conditions["prompt"]))]
    return models.stage.sample(conditions, params, NoiseSource(0, "r", 0), ids, slots)


@torch.no_grad()
def generated(models: Models, rows: list[Tensor], params: ARSamplingParams, batch: int) -> list[Tensor]:
    """Samples responses with transformers, one padded batch after another."""
    responses: list[Tensor] = []
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        width = max(map(len, some))
        ids = torch.stack([torch.cat([row.new_full((width - len(row),), PAD), row]) for row in some])
        mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in some])
        sampling = {"do_sample": True, "top_k": 0} if params.temperature else {"do_sample": False}
        out = models.plain.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            **sampling,
        )
        responses += list(out[:, width:])
    return responses


def speed(name: str, models: Models, conditions: Conditions, params: ARSamplingParams, slots: int, run: Run) -> Speed:
    """Measures both ways of sampling, with `slots` rows at the same time."""
    prompt = conditions["prompt"]
    rows = list(prompt.tokens.split(prompt.lengths.tolist()))  # type: ignore[attr-defined]
    segment = sampled(models, conditions, params, slots)
    theirs = generated(models, rows, params, slots)
    if params.temperature == 0:
        pairs = zip(segment.tokens.split(segment.lengths.tolist()), theirs, strict=True)
        assert all(torch.equal(own, other[: len(own)]) for own, other in pairs), "both must sample the same tokens"
    tokens = len(segment.tokens)
    lengths = segment.lengths
    times = paired(
        name,
        {
            "parameters": sum(p.numel() for p in models.plain.parameters()),
            "rows": len(rows),
            "slots": slots,
            "prompt_tokens": len(prompt.tokens),  # type: ignore[attr-defined]
            "response_tokens": tokens,
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        },
        lambda: sampled(models, conditions, params, slots),
        lambda: generated(models, rows, params, slots),
        run.pairs,
        CLOCKS[run.clock],
    )
    return Speed(**vars(times), ours_tokens_s=tokens / times.ours_s, bare_tokens_s=tokens / times.bare_s)


@dataclass(frozen=True)
class Run:
    """Number of pairs, and the clock."""

    pairs: int
    clock: str


def main(run: Run, chosen: list[str], path: str | None) -> None:
    """Measures and reports the named cases; no names = all cases."""
    models = Models.of(CONFIG)
    fixed = ARSamplingParams(max_new_tokens=64, min_new_tokens=64)
    greedy = ARSamplingParams(max_new_tokens=128, temperature=0.0)
    cases: dict[str, Callable[[str], Speed]] = {
        "equal": lambda name: speed(name, models, prompts([64] * 16), fixed, 16, run),
        "siblings": lambda name: speed(name, models, prompts([256] * 2, 8), replace(fixed), 16, run),
        "ragged": lambda name: speed(name, models, prompts([8 + 3 * i % 61 for i in range(32)]), greedy, 8, run),
    }
    results: list[Ratio] = []
    for name in [name for name in cases if not chosen or any(word in name for word in chosen)]:
        result = cases[name](name)
        show(result)
        print(f"    tokens a second: ours {result.ours_tokens_s:.0f}, generate {result.bare_tokens_s:.0f}", flush=True)
        results.append(result)
        if path:
            write(results, path)  # the results so far


if __name__ == "__main__":
    args = measuring(__doc__.splitlines()[0], pairs=5).parse_args()
    main(Run(args.pairs, args.clock), args.cases, args.json)
