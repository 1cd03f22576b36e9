"""The chats that Qwen2.5-VL reads a prompt in; the transformer is fed what stands after their opening."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EDIT, EDIT_PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
"""diffusers' pipelines of checkpoints that edit: one picture, or one to three."""
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
SEEN_PIXELS = 384 * 384


def _opening(instruction: str) -> str:
    return f"<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"


_DRAW = _opening(
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
_EDIT = _opening(
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


@dataclass(frozen=True)
class Template:
    """One of the chats."""

    opening: str
    num_dropped: int
    """Tokens of the opening, which the transformer is not fed."""
    picture: str = ""
    """How picture number {} is written before the prompt."""
    seen_pixels: int | None = None
    """The area that pictures are brought to before the encoder sees them; None: it sees what the VAE is given."""

    def pictures(self, count: int) -> str:
        """The pictures of a prompt, in order."""
        return "".join(self.picture.format(i + 1) for i in range(count))


TEMPLATES: Mapping[str, Template] = {
    "": Template(_DRAW, 34),
    EDIT: Template(_EDIT, 64, VISION),
    EDIT_PLUS: Template(_EDIT, 64, f"Picture {{}}: {VISION}", SEEN_PIXELS),
}
"""By a checkpoint's pipeline."""


def written(text: str) -> str:
    """A prompt as the model is given it: the empty one, which stands for no prompt in guidance, is a space."""
    return text or " "
