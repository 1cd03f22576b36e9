"""scale=toy makes any recipe small enough to run on a CPU in seconds.

It is one layer of settings between the recipe and the command line. The quantities of the loop get small values here,
and a class gives its own small values in `toy: ClassVar[Mapping]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import ValidationError, convert

from unirl.config.build import SPECIAL, schemas_of
from unirl.config.device_sets import num_device_sets, num_named, scaled, with_rest
from unirl.config.errors import ConfigError
from unirl.config.merge import ConfigLayer, Tree, fold, get, join, leaves, put
from unirl.config.node_groups import NodeGroup, devices_of_groups, numbered, shrunk
from unirl.config.recipe import MAX_DEVICES, policy_keys

QUANTITIES: Mapping[str, object] = {
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
"""A recipe's own value is kept if it is smaller: a loss may need groups of one, and a recorded pair has 2 samples."""

UPDATES = "stack.num_updates_per_batch"
FRAMES, MOST_FRAMES = "sampling.num_frames", 5
"""A recipe's own value is kept if it is smaller. 5 frames are two latent frames of a VAE that compresses 4 to 1."""

SERVICE = "transfer_queue"
"""A recipe's own service between processes is left out where there is one process."""
NUM_PROMPTS = 2
"""The fewest prompts per step. A recipe gets more if its updates do not divide the samples otherwise."""


def toy_layer(tree: Tree, plugins: tuple[str, ...] = (), typed: Tree | None = None) -> ConfigLayer:
    """The small values for a composed recipe whose interpolations are resolved.

    Args:
        typed: the settings of the command line, which win over these values.
    """
    schemas = schemas_of(tree, plugins)
    # A class from the command line replaces the recipe's here already, so that its own toy values apply.
    toy = _targets(typed or {})
    for path, schema in schemas.items():
        for name, value in schema.toy.items():
            put(toy, join(path, name), value)
    for quantity, value in QUANTITIES.items():
        for path in (quantity, *policy_keys(tree, quantity)):
            parent, _, name = path.rpartition(".")
            if parent in schemas and name in schemas[parent].keys:
                put(toy, path, value)
    for path in policy_keys(tree, GROUP):
        if _is_small(get(tree, path), get(toy, path)):
            put(toy, path, get(tree, path))
    for path in policy_keys(tree, FRAMES):
        if _is_small(MOST_FRAMES, get(tree, path)):
            put(toy, path, MOST_FRAMES)
    for path, value in _devices(tree, typed or {}).items():
        put(toy, path, value)
    if SERVICE in tree and SERVICE not in (typed or {}) and _is_local(tree | toy | (typed or {})):
        put(toy, SERVICE, None)
    put(toy, "batch_size", _num_prompts(fold((ConfigLayer("", tree), ConfigLayer("", toy)))))
    return ConfigLayer("scale=toy", toy)


def _is_local(tree: Tree) -> bool:
    """True if the recipe runs in one process."""
    return tree.get("runtime") == "local" or (tree.get("runtime") is None and tree.get("num_devices") == 1)


def _targets(typed: Tree) -> Tree:
    """The classes that a tree names."""
    targets: Tree = {}
    for path, value in leaves(typed):
        if path.rpartition(".")[2] == SPECIAL and isinstance(value, str):
            put(targets, path, value)
    return targets


def _is_small(value: object, other: object) -> bool:
    return type(value) is int and type(other) is int and 0 < value < other


def _devices(tree: Tree, typed: Tree) -> Tree:
    """The fewest devices that the layout can have, or those of the command line, and the layout on these devices."""
    placement = tree.get("placement")
    if isinstance(tree.get("node_groups"), dict):
        return _grouped_devices(tree, typed)
    if not isinstance(placement, dict):
        return {"num_devices": 1, "runtime": None}
    if get(typed, "placement.train") is not None or get(typed, "placement.rollout") is not None:
        return {"num_devices": num_named(with_rest(placement, _count(typed.get("num_devices"))))}
    placement = with_rest(placement, _count(tree.get("num_devices")))
    fewest = num_device_sets(placement)
    wanted = typed.get("num_devices", fewest)
    if type(wanted) is not int or not 0 < wanted <= MAX_DEVICES:
        return {}
    # One process can run a layout whose device sets have one device each.
    return {
        "num_devices": fewest,
        "placement": scaled(placement, wanted),
        "runtime": "local" if wanted <= fewest else None,
    }


def _grouped_devices(tree: Tree, typed: Tree) -> Tree:
    """One node of each group, with one device for each part of the group that roles share, in one process.

    Groups or roles that the command line names are kept as they are.
    """
    try:
        groups = convert(tree.get("node_groups"), dict[str, NodeGroup])
        if "node_groups" in typed or "placement" in typed:
            return {"num_devices": sum(group.num_devices for group in groups.values())}
        placement = tree.get("placement")
        return _one_node_each(groups, placement if isinstance(placement, dict) else {})
    except (ConfigError, ValidationError):  # the check of the recipe says what is wrong
        return {}


def _one_node_each(groups: Mapping[str, NodeGroup], placement: Mapping[str, object]) -> Tree:
    devices = devices_of_groups(groups)
    in_numbers = numbered(placement, groups)
    parts: dict[str, list[object]] = {label: [] for label in groups}
    places: dict[str, object] = {}
    for role, place in placement.items():
        label = place.partition(":")[0].strip() if isinstance(place, str) else ""
        if label not in devices:
            places[role] = place
            continue
        if in_numbers[role] not in parts[label]:
            parts[label].append(in_numbers[role])
        places[role] = f"{label}:{parts[label].index(in_numbers[role])}"
    sizes = {label: max(len(own), 1) for label, own in parts.items()}
    num_devices = sum(sizes.values())
    return {
        "num_devices": num_devices,
        "node_groups": shrunk(groups, sizes),
        "placement": places,
        "runtime": "local",
    }


def _count(num_devices: object) -> int:
    """A number of devices that is not checked yet. 0 if it is none."""
    return num_devices if type(num_devices) is int and 0 < num_devices <= MAX_DEVICES else 0


def _num_prompts(tree: Tree) -> int:
    """The smallest P >= NUM_PROMPTS for which the updates of every policy divide the P x N samples of its track."""
    samples, multiple = 1, 1
    for group_key, updates_key in zip(policy_keys(tree, GROUP), policy_keys(tree, UPDATES), strict=True):
        group, updates = get(tree, group_key, 1), get(tree, updates_key, 1)
        if not (isinstance(group, int) and isinstance(updates, int) and min(group, updates) > 0):
            return NUM_PROMPTS
        samples *= group
        multiple = math.lcm(multiple, updates // math.gcd(updates, samples))
    return max(1, math.ceil(NUM_PROMPTS / multiple)) * multiple
