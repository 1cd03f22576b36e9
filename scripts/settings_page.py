"""Writes docs/settings.md, every key that a recipe may write, from the signatures and docstrings of the classes.

python scripts/settings_page.py            # about ten seconds; reads no weights and needs no connection
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from unirl.config.build import SPECIAL
from unirl.config.compose import compose
from unirl.config.key_docs import KeyDoc, keys_of, summary_of
from unirl.config.merge import leaves
from unirl.config.node import Node
from unirl.config.overrides import OPTIONS
from unirl.config.recipe import POLICIES, EnhancerConfig, RecipeConfig
from unirl.config.recipe_files import PACKAGE, list_recipes
from unirl.config.schema import Schema, is_config, schema_of
from unirl.config.targets import find_target
from unirl.reward.registry import scorers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
OPENING = """\
<!-- This page is generated. To change it, run: .venv/bin/python scripts/settings_page.py -->
# Settings

A recipe writes keys; `unirl train RECIPE key=value` changes them. The first table has the keys at the top level. A key
of type `block` holds the keys of a class, which `_target_` names. The sections below list the keys of each class by
block: classes that are defaults, that a shipped recipe or an option such as `rollout=server` names, or that score
samples. A class of your own adds its keys in the same way ([extending](extending.md)).

`unirl config show RECIPE --doc` prints the same for one recipe with the values in effect, and
`unirl config show RECIPE BLOCK --doc` for one of its blocks. `unirl config why KEY RECIPE` prints the source of a
value."""
ENHANCER = """## Top level of a prompt enhancer

A recipe with the blocks `ar` and `diffusion` trains two policies ([prompt enhancement](prompt_enhancement.md)). Each of
them holds the blocks `bundle`, `pipeline`, `backend`, `rollout`, `algorithm`, `stack`, `sampling` and `sync`, as in
`ar.sampling.temperature`. All other keys stand at the top level as above. In addition:"""
TABLE = "| key | type | default | meaning |\n|---|---|---|---|"
Target = Callable[..., object]


def classes_by_block() -> dict[str, list[Target]]:
    """The classes that a recipe may name in each block of its top level, sorted by name. A class appears once."""
    targets: dict[str, set[Target]] = {key: set() for key in schema_of(RecipeConfig).keys}
    for key in schema_of(RecipeConfig).keys.values():
        default = [find_target(key.default_target, key.name)] if key.default_target else []
        targets[key.name].update([*default, *_configs(key.annotation)])
    options = [yaml.safe_load(path.read_text()) for path in sorted(OPTIONS.rglob("*.yaml"))]
    recipes = [compose(str(recipe.path)).tree for recipe in list_recipes((PACKAGE.parent / "examples",))]
    for tree in (*options, *recipes):
        for path, value in leaves(tree):
            if path.endswith(f".{SPECIAL}"):
                targets[block_of(path)].add(find_target(value, path))
    targets["reward"].update(scorers().values())
    seen: set[Target] = set()
    result = {}
    for block, named in targets.items():
        result[block] = [target for target in _with_configs(named) if target not in seen]
        seen.update(result[block])
    return {block: named for block, named in result.items() if named}


def block_of(path: str) -> str:
    """The block of a key, without that of its policy: `ar.stack.max_grad_norm` is a key of `stack`."""
    blocks = path.split(".")
    return blocks[1] if blocks[0] in POLICIES else blocks[0]


def _with_configs(targets: set[Target]) -> list[Target]:
    """The classes, and the config dataclasses that their keys take, each after the first class that takes it."""
    ordered: list[Target] = []
    waiting = sorted(targets, key=lambda target: schema_of(target).name)
    while waiting:
        target = waiting.pop(0)
        if target not in ordered:
            ordered.append(target)
            keys = schema_of(target).keys.values()
            waiting = [*(config for key in keys for config in _configs(key.annotation, type(key.default))), *waiting]
    return ordered


def _configs(*annotations: object) -> Iterator[type]:
    """The config dataclasses of unirl that annotations name."""
    for annotation in annotations:
        if is_config(annotation) and annotation is not Node and annotation.__module__.startswith("unirl."):
            yield annotation
        yield from _configs(*typing.get_args(annotation))


def page() -> str:
    """The page as Markdown."""
    parts = [OPENING, "## Top level", _table(schema_of(RecipeConfig))]
    shared = schema_of(RecipeConfig).keys
    own = {name: key for name, key in schema_of(EnhancerConfig).keys.items() if shared.get(name) != key}
    parts += [ENHANCER, _table(replace(schema_of(EnhancerConfig), keys=own))]
    for block, targets in classes_by_block().items():
        parts.append(f"## `{block}`")
        tables: dict[str, list[Schema]] = {}
        for schema in map(schema_of, targets):
            tables.setdefault(_table(schema) if schema.keys else "No keys.", []).append(schema)
        for table, alike in tables.items():
            parts += [f"### {', '.join(schema.name.partition(schema.owner.__module__)[2][1:] for schema in alike)}"]
            parts += ["\n".join(f"- {_name(schema)}: {_cell(summary_of(schema.target))}" for schema in alike), table]
    return "\n\n".join(parts) + "\n"


def _name(schema: Schema) -> str:
    """The dotted name, marked where a block of this class needs no `_target_`."""
    return f"`{schema.name}`" + (" (without `_target_`)" if schema.is_value else "")


def _table(schema: Schema) -> str:
    return "\n".join([TABLE, *(_row(doc) for doc in keys_of(schema))])


def _row(doc: KeyDoc) -> str:
    return f"| `{doc.path}` | {_cell(doc.type)} | {_cell(doc.default)} | {_cell(doc.doc)} |"


def _cell(text: str) -> str:
    """Text that cannot end a cell or begin HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
