"""The mirrors that a recipe may name in `tracking.mirrors`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from unirl.tracking.backends.base import Mirror
from unirl.tracking.backends.swanlab import SwanLabMirror
from unirl.tracking.backends.tensorboard import TensorBoardMirror
from unirl.tracking.backends.wandb import WandbMirror

MIRRORS: dict[str, type[Mirror]] = {"wandb": WandbMirror, "tensorboard": TensorBoardMirror, "swanlab": SwanLabMirror}


class MirrorUnavailable(ValueError):
    """A mirror was asked for whose library is not installed."""


def make_mirrors(names: Sequence[str]) -> tuple[Mirror, ...]:
    """The mirrors of these names; their libraries are found but not imported. Raises MirrorUnavailable, ValueError."""
    for name in names:
        if name not in MIRRORS:
            raise ValueError(f"tracking.mirrors: unknown mirror {name!r}; there are {', '.join(sorted(MIRRORS))}")
        if find_spec(name) is None:
            raise MirrorUnavailable(
                f"tracking.mirrors names {name!r}, but the package {name} is not installed. Install it with "
                f"pip install 'unirl[{name}]', or remove it from tracking.mirrors"
            )
    return tuple(MIRRORS[name]() for name in names)
