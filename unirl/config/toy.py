"""scale=toy: any recipe, small enough for a CPU in seconds. One layer between the recipe and the command line.

The quantities of the loop get small values here; a class says its own in `toy: ClassVar[Mapping]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unirl.config.build import SPECIAL, schemas_of
from unirl.config.device_sets import num_device_sets, num_named, scaled
from unirl.config.merge import Layer, Tree, fold, get, join, leaves, put
from unirl.config.recipe import MAX_DEVICES

SOURCE = "scale=toy"

QUANTITIES: Mapping[str, Any] = {
    "devices_per_node": None,
    "num_rollouts": 3,
    "evaluation.max_prompts": 4,
    "evaluation.samples_per_prompt": 1,
    "evaluation.num_inference_steps": None,
    "evaluation.max_new_tokens": None,
    "backend.lora_cfg.rank": 4,
    "backend.fsdp_cfg.shard_size": None,
    "backend.fsdp_cfg.fsdp_mode": None,
}

GROUP = "sampling.samples_per_prompt"
"""A recipe's own, where that is smaller: a method may need groups of one, and a recorded pair has two samples."""

FRAMES, MOST_FRAMES = "sampling.num_frames", 5
"""A recipe's own, where there are no more: 5 are two latent frames of a VAE that holds 4 frames in one."""

NUM_PROMPTS = 2
"""Prompts per step, at least: as many more as the updates of the recipe need to divide the samples."""


def toy_layer(tree: Tree, plugins: tuple[str, ...] = (), typed: Tree | None = None) -> Layer:
    """The small values for a composed recipe (interpolations resolved).

    Args:
        typed: what the command line sets, which wins over these values.
    """
    schemas = schemas_of(tree, plugins)
    # A class that is typed replaces the recipe's here already: values below the recipe's would fall together with it.
    toy = _targets(typed or {})
    for path, schema in schemas.items():
        for name, value in schema.toy.items():
            put(toy, join(path, name), value)
    for path, value in QUANTITIES.items():
        parent, _, name = path.rpartition(".")
        if parent in schemas and name in schemas[parent].keys:
            put(toy, path, value)
    if _is_small(get(tree, GROUP), get(toy, GROUP)):
        put(toy, GROUP, get(tree, GROUP))
    if _is_small(MOST_FRAMES, get(tree, FRAMES)):
        put(toy, FRAMES, MOST_FRAMES)
    for path, value in _devices(tree, typed or {}).items():
        put(toy, path, value)
    put(toy, "batch_size", _num_prompts(fold((Layer("", tree), Layer("", toy)))))
    return Layer(SOURCE, toy)


def _targets(typed: Tree) -> Tree:
    """The classes that a tree names."""
    found: Tree = {}
    for path, value in leaves(typed):
        if path.rpartition(".")[2] == SPECIAL and isinstance(value, str):
            put(found, path, value)
    return found


def _is_small(value: Any, other: Any) -> bool:
    return type(value) is int and type(other) is int and 0 < value < other


def _devices(tree: Tree, typed: Tree) -> Tree:
    """As few devices as the layout can have, or as many as are typed, and the layout on them. A typed one stays."""
    placement = tree.get("placement")
    if not isinstance(placement, dict):
        return {"num_devices": 1, "runtime": None}
    if get(typed, "placement.train") is not None or get(typed, "placement.rollout") is not None:
        return {"num_devices": num_named(placement)}
    fewest = num_device_sets(placement)
    wanted = typed.get("num_devices", fewest)
    if type(wanted) is not int or not 0 < wanted <= MAX_DEVICES:
        return {}
    # One process plays a layout of one device a device_set.
    return {
        "num_devices": fewest,
        "placement": scaled(placement, wanted),
        "runtime": "local" if wanted <= fewest else None,
    }


def _num_prompts(tree: Tree) -> int:
    """The smallest P >= NUM_PROMPTS for which the recipe's updates divide the P x N samples."""
    group = get(tree, GROUP, 1)
    updates = get(tree, "stack.num_updates_per_batch", 1)
    if not all(type(count) is int and count > 0 for count in (group, updates)):
        return NUM_PROMPTS
    multiple = updates // math.gcd(updates, group)
    return max(1, math.ceil(NUM_PROMPTS / multiple)) * multiple
