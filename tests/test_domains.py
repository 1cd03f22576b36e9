"""The shared machinery knows no domain: what differs between pictures and texts is a method or a field of the noun."""

import ast
from collections.abc import Iterator

import pytest

from tests.source_tree import modules
from unirl.config.recipe_files import DOMAIN_OF

SHARED = ("trainer", "train", "distributed", "tracking")
DOMAIN_FILES = {"unirl.trainer.diffusion", "unirl.trainer.text"}
"""The one file of each domain, which says what a request of it holds."""
NOUNS = ("segments", "sampling", "facts", "conditions", "primitives")
GENERAL = {"Sampling", "ModelFacts", "Bundle", "Stage", "Pipeline"}
"""Classes beside those of domains that stand for every one of them."""
MODALITIES = {"image", "text", "video", "audio", "picture"}
KEYED = {"tracks", "primitives", "conditions"}
"""Mappings whose keys are a domain's words."""


def domain_classes() -> set[str]:
    """Names of the classes that only some domains have: nouns, models and losses."""
    rooms = [m for m in modules().values() if m.package in ("models", "algorithms") or m.name in DOMAIN_FILES]
    rooms += [modules()[f"unirl.types.{name}"] for name in NOUNS]
    return {node.name for room in rooms for node in ast.walk(room.tree) if isinstance(node, ast.ClassDef)} - GENERAL


def domain_words() -> set[str]:
    """Modalities, model families, buckets and track names."""
    models = [module for module in modules().values() if module.package == "models"]
    calls = [node for module in models for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    families = {
        key.value.value
        for call in calls
        for key in call.keywords
        if key.arg == "family" and isinstance(key.value, ast.Constant)
    }
    return MODALITIES | {*DOMAIN_OF, *DOMAIN_OF.values()} | families


def branches(tree: ast.AST, classes: set[str], words: set[str]) -> Iterator[str]:
    """Every place that asks which domain it is in."""
    for node in ast.walk(tree):
        asked: set[str] = set()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = _names(node.args[1]) & classes
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = {word for side in sides for word in _constants(side)} & words
            if any(ast.unparse(side).startswith("type(") for side in sides):
                asked |= {name for side in sides for name in _names(side)} & classes
        elif isinstance(node, ast.MatchClass):
            asked = _names(node.cls) & classes
        elif isinstance(node, ast.MatchValue):
            asked = _constants(node.value) & words
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in KEYED:
            asked = _constants(node.slice) & words
        if asked:
            line: int = node.lineno  # type: ignore[attr-defined]
            yield f"line {line} asks for {', '.join(sorted(asked))}: {ast.unparse(node)}"


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }


def _constants(node: ast.AST) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_nothing_shared_branches_on_the_domain():
    classes, words = domain_classes(), domain_words()
    result = [
        f"{module.name}: {branch}"
        for module in modules().values()
        if module.package in SHARED and module.name not in DOMAIN_FILES
        for branch in branches(module.tree, classes, words)
    ]
    assert not result, "give the noun a method instead:\n" + "\n".join(result)


def test_domains_are_found_in_the_source():
    assert {"DiffusionSamplingParams", "TextSegment", "ARStage", "DiffusionGRPO", "Images"} <= domain_classes()
    assert {"sd3", "image", "llm"} <= domain_words()


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(segment, TextSegment): pass",
        "if isinstance(segment, (str, segments.TextSegment)): pass",
        "if type(sampling) is DiffusionSamplingParams: pass",
        "x = 1 if name == 'image' else 2",
        "if facts.family in ('sd3', 'flux'): pass",
        "track = resp.tracks['text']",
        "match segment:\n    case LatentSegment(): pass",
        "match medium:\n    case 'video': pass",
    ],
)
def test_a_branch_on_the_domain_is_seen(line):
    assert list(branches(ast.parse(line), domain_classes(), domain_words()))


@pytest.mark.parametrize(
    "line", ["if isinstance(x, Tensor): pass", "if name == 'live': pass", "track = resp.tracks[self.track]"]
)
def test_other_questions_are_free(line):
    assert not list(branches(ast.parse(line), domain_classes(), domain_words()))
