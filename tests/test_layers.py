"""The layer order: imports point down, rooms of one row never see each other, no import goes in a circle."""

import graphlib
import subprocess
import sys
from collections.abc import Container

from tests.source_tree import Import, Module, imports_of, modules, resolved

LAYERS = {
    "types": 0,
    "media": 0,
    "sde": 1,
    "config": 1,
    "tracking": 1,
    "distributed": 2,
    "models": 3,
    "algorithms": 4,
    "rollout": 4,
    "reward": 4,
    "data": 4,
    "envs": 4,
    "train": 5,
    "plan": 6,
    "trainer": 7,
    "bench": 8,
    "testing": 8,
    "viewer": 8,
    "cli": 9,
    # The entrypoints `python -m unirl.train_<domain>` are the command line under another name.
    "api": 10,
    "train_diffusion": 10,
    "train_vlm": 10,
    "train_pe": 10,
    "train_unified_model": 10,
    "train_embodied": 10,
}
TORCH_ONLY = {"types", "sde"}
NO_PROCESSES = {"models", "algorithms", "sde", "types"}
STAGES = (
    "base",
    "chunks",
    "denoising.differentiable",
    "denoising.stage",
    "language.stage",
    "policies.stage",
)
STAGE_CONTRACTS = {"unirl.models." + name for name in STAGES}
# What a module may import outside its functions: quick to load, and present wherever the package is.
AT_TOP = {"torch", "typing_extensions", "numpy", "PIL", "safetensors", "omegaconf", "hydra", "yaml", "rich", "msgspec"}
# Gymnasium itself imports these modules, to find the environments that they register.
REGISTERS_WITH = {"unirl.testing.toy_environments": "gymnasium"}
HEAVY = ("diffusers", "transformers", "peft", "accelerate", "ray", "datasets", "wandb", "tensorboard", "swanlab")


def place(module: Module, found: Import) -> str:
    return f"{module.name}:{found.line} imports {found.target}"


def imports(rooms: Container[str] = LAYERS, internal: bool | None = None) -> list[tuple[Module, Import]]:
    """(module, import) of every module in `rooms`; of our own modules only, of others only, or (None) of both."""
    return [
        (module, result)
        for module in modules().values()
        if module.package in rooms
        for result in imports_of(module)
        if internal is None or internal == (top(result) == "unirl")
    ]


def test_every_room_has_a_layer():
    rooms = {module.package for module in modules().values()} - {""}
    assert rooms <= set(LAYERS), f"give {rooms - set(LAYERS)} a row in LAYERS"


def test_imports_point_down():
    def upward(module: Module, result: Import) -> bool:
        room = modules()[resolved(result.target)].package
        return room not in ("", module.package) and LAYERS[room] >= LAYERS[module.package]

    assert [place(module, result) for module, result in imports(internal=True) if upward(module, result)] == []


def test_importing_the_root_package_imports_what_python_has_loaded():
    top_level = [each for each in imports_of(modules()["unirl"]) if each.top_level and not each.for_types]
    assert {each.target.partition(".")[0] for each in top_level} <= {"__future__", "os", "typing"}


def test_no_import_goes_in_a_circle():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for module, result in imports(internal=True):
        if not result.for_types:
            graph[module.name] |= {resolved(result.target)} - {module.name}
    graphlib.TopologicalSorter(graph).prepare()


def test_algorithms_see_the_stage_contracts_and_no_model_family():
    seen = {resolved(result.target) for _, result in imports({"algorithms"}, internal=True)}
    assert {name for name in seen if name.startswith("unirl.models")} <= STAGE_CONTRACTS


def test_maths_and_models_know_no_processes():
    processes = ("ray", "unirl.distributed", "torch.distributed")
    wrong = [place(*pair) for pair in imports(NO_PROCESSES) if pair[1].target.startswith(processes)]
    assert wrong == []


def test_types_and_sde_need_torch_alone():
    """At run time; jaxtyping's names are imported for type checkers (docs/decisions/checked-shapes.md)."""
    known = {"torch", "typing_extensions", *sys.stdlib_module_names}  # torch itself requires typing_extensions
    needed = [pair for pair in imports(TORCH_ONLY, internal=False) if not pair[1].for_types]
    assert [place(*pair) for pair in needed if top(pair[1]) not in known] == []


def test_heavy_libraries_are_imported_inside_functions():
    known = AT_TOP | sys.stdlib_module_names
    heavy = [pair for pair in imports(internal=False) if pair[1].top_level and top(pair[1]) not in known]
    heavy = [pair for pair in heavy if REGISTERS_WITH.get(pair[0].name) != top(pair[1])]
    assert [place(*pair) for pair in heavy] == []


def top(found: Import) -> str:
    return found.target.split(".")[0]


def test_importing_everything_loads_no_heavy_library():
    script = f"""
import importlib, sys
for name in {sorted(modules())!r}:
    if name.endswith("__main__"):
        continue
    importlib.import_module(name)
    found = [library for library in {HEAVY!r} if library in sys.modules]
    if found:
        sys.exit(f"importing {{name}} loaded {{found}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
