"""The chat that Qwen2.5-VL reads a prompt in; the transformer is fed what stands after its opening."""

from __future__ import annotations

from dataclasses import dataclass

CLOSING = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Template:
    """How a chat begins."""

    opening: str
    num_dropped: int
    """Tokens of the opening, which the transformer is not fed."""


def opening(instruction: str) -> str:
    """The system's instruction, up to where the user speaks."""
    return f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"


def written(text: str) -> str:
    """A prompt as the model is given it: the empty one, which stands for no prompt in guidance, is a space."""
    return text or " "


DRAW = Template(
    opening(
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background:"
    ),
    34,
)
