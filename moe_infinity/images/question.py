"""A question about images, as `generate()` takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_infinity.errors import ConfigError, UnsupportedModelError
from moe_infinity.images.pictures import BadImage, read_picture
from moe_infinity.images.processor import model_inputs
from moe_infinity.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image

    from moe_infinity.model import MoE


def question(moe: MoE, text: str, files: Sequence[Path]) -> dict[str, Any]:
    """Return the inputs of `generate()` for a user's message of images and a text, as the model's
    chat template writes it. Raises UnsupportedModelError for a model without eyes or a template,
    and ConfigError, which names the file, for an image that cannot be read, or for one that its
    processor does not take.
    """
    if moe.processor is None:
        reason = f": {moe.vision_part.problem}" if moe.vision_part.problem else ""
        raise UnsupportedModelError(f"{moe.checkpoint} takes no images{reason}")
    templates = moe.tokenizer, moe.processor
    writer = next((each for each in templates if each.chat_template is not None), None)
    if writer is None:
        raise UnsupportedModelError(f"{moe.checkpoint} has no chat template to put images into")
    pictures = list(map(_picture_in, files))
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    try:
        prompt = writer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return dict(model_inputs(moe.processor, prompt, pictures, moe.model.dtype))
    except Exception as error:  # each template and processor checks in its own way
        message = f"the model's processor does not take this: {printable(repr(error), 200)}"
        raise ConfigError(message) from error


def _picture_in(file: Path) -> Image:
    try:
        return read_picture(file.read_bytes())
    except (OSError, BadImage) as error:
        raise ConfigError(f"{file}: {error}") from error
