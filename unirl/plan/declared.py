"""What the classes of a recipe declare of themselves, read without making anything."""

from __future__ import annotations

import inspect

from unirl.config.node import Node
from unirl.types.protocols import Capabilities


def capabilities_of(node: Node) -> Capabilities:
    """What a node's class declares; nothing when it declares nothing."""
    declared = inspect.getattr_static(node.schema.owner, "capabilities", None)
    return declared if isinstance(declared, Capabilities) else Capabilities()
