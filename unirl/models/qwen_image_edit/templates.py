"""The chats that Qwen2.5-VL reads a prompt in and sees its images in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unirl.models.qwen_image.family import EDIT_PLUS
from unirl.models.qwen_image.templates import Template, opening

VISION = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
SEEN_PIXELS = 384 * 384
EDIT_OPENING = opening(
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


@dataclass(frozen=True)
class EditTemplate(Template):
    """A chat with images before the prompt."""

    image: str
    """How image number {} is written."""
    seen_pixels: int | None = None
    """The area that images are brought to before the encoder sees them; None: it sees what the VAE is given."""

    def images(self, count: int) -> str:
        """The images of a prompt, in order."""
        return "".join(self.image.format(i + 1) for i in range(count))


TEMPLATES: Mapping[str, EditTemplate] = {
    "": EditTemplate(EDIT_OPENING, 64, VISION),
    EDIT_PLUS: EditTemplate(EDIT_OPENING, 64, f"Picture {{}}: {VISION}", SEEN_PIXELS),
}
"""By a checkpoint's pipeline."""
