"""Writes docs/first_gpu_run.md: settings of every model family for GPUs of four sizes, as `unirl fit` finds them.

    OMP_NUM_THREADS=1 python scripts/first_gpu_page.py               every family, about a quarter of an hour
    OMP_NUM_THREADS=1 python scripts/first_gpu_page.py sd3 wan21_t2v
    python scripts/first_gpu_page.py --render                        only writes the page again

Nothing is loaded and nothing runs on a GPU: the figures are counted. Nothing on the page is edited by hand.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.support_matrix import FAMILIES as DENOISING
from unirl.cli.fit import FitReport, report_of
from unirl.cli.plan import clock, made_by
from unirl.config.load import load
from unirl.plan.devices import Device, device_named
from unirl.plan.fit import settings_with, usable

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "first_gpu_run.md"
RESULT = ROOT / "benchmarks" / "first_gpu_run.json"
DEVICES = ("4090", "l40s", "h100", "h200")
"""Devices with 24, 48, 80 and 141 GB."""
NODE = 8
"""Devices of one kind that are tried where one is not enough."""
WORDS: Mapping[str, tuple[str, ...]] = {"hunyuan_image3": ("devices_per_node=null",)}
FAMILIES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    **{key: (label, recipe, WORDS.get(key, ())) for key, (label, recipe) in DENOISING.items()},
    "qwen3": ("Qwen3 4B, all weights", "llm/qwen3_grpo_4b_base_dapo", ()),
    "qwen_vl": ("Qwen2.5-VL 7B, LoRA", "vlm/qwen_vl_argrpo_geo3k_mc_4x8_lora", ("devices_per_node=null",)),
}
"""The label of each family, its recipe, and the settings without which it does not run on one device."""
OPENING = """\
<!-- Written by a script, not by hand: .venv/bin/python scripts/first_gpu_page.py --render -->
# First GPU run

**Nothing on this page was measured on a GPU.** The settings are what `unirl fit` finds, and memory and times are
counted from the published configurations ([how](gpu.md)). Expect a step to take longer than the table says, and to need
up to 10 % more memory.

## In this order

```bash
unirl doctor diffusion/sd3_trainside     # driver, memory, disk; how many bytes of the model are missing
unirl models pull stabilityai/stable-diffusion-3.5-medium      # downloads the files that a run reads
unirl plan diffusion/sd3_trainside       # memory and time on this GPU; loads nothing
unirl fit diffusion/sd3_trainside        # the fastest settings that fit
unirl train diffusion/sd3_trainside num_rollouts=1 batch_size=2 evaluation.eval_steps=0
unirl plan diffusion/sd3_trainside       # with the settings of a run, its last line has the measured time of a step
```

Begin with one step of few prompts, as above: it loads the model, takes every phase once and writes the samples. Look at
`samples/step-*/contact_sheet.png` before the long run. Some models need a licence to be accepted on their page of the
hub, and `HF_TOKEN`.

## What to check in the first step

| what | where | good |
|---|---|---|
| rollout and training agree | `ratio` on the console | 1.000 in the first update; else the parity gate stops the run |
| the reward differs within groups | `zstd` | well below 1 |
| the images are images | `samples/step-000001/contact_sheet.png` | neither noise nor one color |
| the memory of the plan | `mem/*` in `metrics.csv` beside `unirl plan` | within 10 % |
| the time of the plan | `time/*` in `metrics.csv` beside `unirl plan` | the phases in the same proportions |

`python benchmarks/gpu_day.py --json day.jsonl` measures correctness and time of one GPU in at most 40 minutes, without
a hub. Please attach its file when you report a problem.

## The micro-batch

Leave `stack.micro_batch_size` at `auto`: a run takes the smallest micro-batch that trains at full speed among those
that fit ([details](gpu.md#the-micro-batch)). The tables show the number that it takes by the plan; where they list it
among the settings, type it. Otherwise set it only if a run is out of memory in `train`.

## Out of memory

`error[5002]` names the phase and the next setting to change. [The ladder](gpu.md#the-ladder) lists all of them in the
order in which they cost time.

## What is not verified

No recipe of this page has run on a GPU, and no published weights were loaded. Kernels of attention in bf16, the
overlap of copies and computation, NCCL, the measured probe of the micro-batch and the fragmentation of the allocator
were never observed. The times leave out loading, compilation, checkpoints and evaluations.

## Settings by model

Each row is the fastest run that fits: add its settings to `unirl train RECIPE`. "8 x" shares a step among eight GPUs
where one is too small. A step takes all the samples that are named above its table, and its time is nearly proportional
to them: a quarter of `batch_size` takes about a quarter of the time. "24 GB" is the RTX 4090, "48 GB" the L40S
(45 GiB), "80 GB" the H100 and "141 GB" the H200. For other GPUs, run `unirl fit RECIPE --device NAME --memory GIB`."""


def counted(family: str, device_name: str) -> list[dict[str, Any]]:
    """Returns what `unirl fit` finds on one device and, if that is too small, on eight."""
    _, recipe, words = FAMILIES[family]
    device, _ = device_named(device_name)
    cells = []
    for count in (1, NODE):
        report = report_of(recipe, [*words, *_placed(family, count)], device, device.memory_gib)
        cells.append(cell_of(report, device))
        if cells[-1]["fits"]:
            break
    return cells


def _placed(family: str, count: int) -> list[str]:
    """Returns the setting for so many devices; none if these are the devices of the recipe."""
    _, recipe, words = FAMILIES[family]
    return [] if load(recipe, words).config.num_devices == count else [f"num_devices={count}"]


def cell_of(report: FitReport, device: Device) -> dict[str, Any]:
    """Returns the figures of a report that the page shows."""
    found = report.fit.best or report.fit.smallest
    [(name, part)] = found.parts.items()  # every recipe of the page has one policy
    [run] = found.policies[name].runs
    micro_rows = settings_with(run, part.changes).micro_rows
    return {
        "devices": report.num_devices,
        "fits": report.fit.best is not None,
        "changes": [*report.words, *found.words()],
        "micro_rows": None if run.geometry.micro_batch_tokens is not None else micro_rows,
        "step_seconds": float(f"{found.seconds:.3g}"),
        "peak_gib": round(found.peak_gib, 1),
        "room_gib": round(usable(device.memory_gib), 1),
        "samples": report.num_samples,
        "made": made_by(run),
    }


def page(result: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the page."""
    tables = ["\n".join(_table(family, result[family])) for family in FAMILIES if family in result]
    others = [f"- {label}: `unirl fit {recipe}`" for key, (label, recipe, _) in FAMILIES.items() if key not in result]
    rest = ["### Not counted yet\n\n" + "\n".join(others)] if others else []
    return "\n\n".join([OPENING, *tables, *rest]) + "\n"


def _table(family: str, devices: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    label, recipe, _ = FAMILIES[family]
    first = devices[DEVICES[0]][0]
    made = "responses" if first["made"] == "tokens" else first["made"]
    yield f"### {label}\n\n`{recipe}`, {first['samples']:,} {made} in a step\n"
    yield "| GPU | settings | micro-batch | a step | peak, GiB |"
    yield "|---|---|---|---|---|"
    for name in DEVICES:
        yield _row(name, devices[name])


def _row(name: str, cells: Sequence[Mapping[str, Any]]) -> str:
    cell = next((each for each in cells if each["fits"]), cells[-1])
    gpu = f"{SIZES[name]} GB" if cell["devices"] == 1 else f"{cell['devices']} x {SIZES[name]} GB"
    if not cell["fits"]:
        needed = cell["peak_gib"] / usable(1.0)
        return f"| {gpu} | nothing fits; devices with {needed:,.0f} GiB would do | - | - | {cell['peak_gib']} |"
    changes = f"`{shlex.join(cell['changes'])}`" if cell["changes"] else "those of the recipe"
    micro = "by tokens" if cell["micro_rows"] is None else cell["micro_rows"]
    return f"| {gpu} | {changes} | {micro} | {clock(cell['step_seconds'])} | {cell['peak_gib']} of {cell['room_gib']} |"


SIZES: Mapping[str, int] = {"4090": 24, "l40s": 48, "h100": 80, "h200": 141}
"""Nominal GB of each device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--render", action="store_true", help="only write the page from the stored figures")
    arguments = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for family in [] if arguments.render else arguments.families or list(FAMILIES):
        result[family] = {device: counted(family, device) for device in DEVICES}
        print(family, flush=True)
        ordered = {key: result[key] for key in FAMILIES if key in result}
        RESULT.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
