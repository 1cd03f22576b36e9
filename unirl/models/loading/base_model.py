"""The lines of a model card that load, with another library, the model that an export belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OWN_LAYOUT = "unirl"
"""In place of a library, for a model whose publisher has a layout and code of its own."""
LOAD_LORA = ('pipe.load_lora_weights(".")  # this folder, or its id on the hub',)


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model before training, as its home library knows it."""

    library: str
    """`diffusers`, `transformers`, or OWN_LAYOUT."""
    loader: str = ""
    """The class of the library whose `from_pretrained` loads the model."""
    component: str = ""
    """The component of a pipeline of diffusers that is trained."""
    shipped: Path | None = None
    """The folder of a model that comes with this package."""
    is_toy: bool = False
    """True for a model with random weights, which has no files."""
    lora_lines: tuple[str, ...] = LOAD_LORA
    """The lines that load an adapter from the current folder into `pipe`, a pipeline of diffusers."""
