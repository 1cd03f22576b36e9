"""Secrets of a recipe: which keys hold one, and the recipe as it may be written."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from unirl.config.compose import VARIABLE
from unirl.config.errors import InvalidValueError
from unirl.config.merge import join, leaves
from unirl.config.node import Node, nodes_below
from unirl.types.secrets import MASK, SecretMark, is_secret_name, redact


def secret_keys(root: Node) -> set[str]:
    """The paths of keys that are typed as secret."""
    keys = [(node.path, key) for node in nodes_below(root) for key in node.schema.keys.values()]
    return {join(path, key.name) for path, key in keys if is_secret_type(key.annotation)}


def is_secret_type(annotation: object) -> bool:
    """True for `Secret`, alone or in a union."""
    parts = typing.get_args(annotation)
    return any(isinstance(part, SecretMark) or is_secret_type(part) for part in parts)


def is_secret(path: str, written: object, typed: set[str]) -> bool:
    """True if the value of a key is secret: by the type or the name of the key, or by the name of its variable.

    Args:
        written: the value as the recipe writes it.
    """
    variables = VARIABLE.findall(written) if isinstance(written, str) else []
    return path in typed or is_secret_name(path) or any(map(is_secret_name, variables))


def secret_values(tree: object, written: object, typed: set[str], path: str = "") -> list[str]:
    """The texts of a resolved recipe that are secret."""
    if isinstance(tree, str):
        return [tree] if is_secret(path, written, typed) else []
    found = [secret_values(value, below, typed, at) for at, _, value, below in _entries(tree, written, path)]
    return [text for texts in found for text in texts]


def public(tree: object, written: object, typed: set[str], path: str = "") -> object:
    """A resolved recipe as it may be written: a secret is the variable that it is read from, or it is masked.

    Args:
        written: the recipe before `${...}` was resolved.
    """
    if isinstance(tree, (dict, list)):
        entries = {key: public(value, below, typed, at) for at, key, value, below in _entries(tree, written, path)}
        return entries if isinstance(tree, dict) else list(entries.values())
    if not isinstance(tree, str):
        return tree
    hidden = MASK if is_secret(path, written, typed) else redact(tree)
    is_read = isinstance(written, str) and VARIABLE.search(written)
    return written if hidden != tree and is_read else hidden


def _entries(tree: object, written: object, path: str) -> Iterator[tuple[str, object, object, object]]:
    """Path, key, value, and value as written of each entry of a mapping or a list. Those of a list share its path."""
    if isinstance(tree, dict):
        below = written if isinstance(written, dict) else {}
        yield from ((join(path, key), key, value, below.get(key)) for key, value in tree.items())
    elif isinstance(tree, list):
        items = written if isinstance(written, list) and len(written) == len(tree) else [None] * len(tree)
        yield from ((path, i, value, items[i]) for i, value in enumerate(tree))


def refuse_masked(tree: object) -> None:
    """Refuses (2004) a recipe that was read back from a run, without the secrets that the run did not write."""
    for path, value in leaves(tree):
        if value == MASK:
            name = path.rpartition(".")[2].upper()
            raise InvalidValueError(
                f"{path}={MASK}: this recipe was written by a run, and a run never writes secrets. Give the value "
                f"again, by a variable: {path}='${{oc.env:{name}}}'"
            )


def reference(setting: str, typed: set[str]) -> str:
    """An override as it may be shown: a secret that was typed becomes a variable, `reward.token=${oc.env:TOKEN}`."""
    key, sign, value = setting.partition("=")
    path = key.lstrip("+~")
    if not sign or VARIABLE.search(value) or not (path in typed or is_secret_name(path)):
        return redact(setting)
    return f"{key}=${{oc.env:{path.rpartition('.')[2].upper()}}}"
