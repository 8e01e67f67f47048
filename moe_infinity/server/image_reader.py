"""Images of a conversation become what the model takes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_infinity.errors import MoEInfinityError
from moe_infinity.images.media import Media
from moe_infinity.images.pictures import BadImage, digest_of, read_picture
from moe_infinity.images.processor import model_inputs, takes_images
from moe_infinity.images.prompt import PromptImages, images_of
from moe_infinity.model import MoE
from moe_infinity.printable import printable
from moe_infinity.server.chat import ChatBody, asked_last
from moe_infinity.server.image_marks import ImageMarks
from moe_infinity.server.limits import FETCH_S, IMAGE_BYTES, IMAGES, PIXELS
from moe_infinity.server.parts import ImagePart
from moe_infinity.server.refusals import BadRequest, require_within

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
# Where configs have the ids that stand for images among the tokens.
IMAGE_IDS = ("image_token_id", "image_token_index", "image_patch_id", "media_placeholder_token_id")


class ImageReader:
    """Reads the images of requests for one model. Safe to call from several threads: pictures take
    much memory, so one prompt's are read after another's.
    """

    def __init__(self, moe: MoE, allowed: Sequence[str]) -> None:
        """`allowed`: the rules of `Media`. Raises ConfigError."""
        self._moe = moe
        self._media = Media(allowed)
        self._lock = threading.Lock()
        self.takes_images = takes_images(moe.model)
        if self.takes_images and moe.tokenizer.chat_template is None:
            moe.tokenizer.chat_template = self._template_of_processor()

    def _template_of_processor(self) -> str | None:
        """Return the chat template where only the processor has one, as in chat_template.json."""
        try:
            return getattr(self._moe.processor, "chat_template", None)
        except MoEInfinityError as error:
            logger.warning("there may be no chat template: %s", error)
            return None

    def marks(self, body: ChatBody, param: str) -> ImageMarks | None:
        """Return marks for the images of a conversation; None if it has none, or the model has no
        eyes. Raises BadRequest if such a model is asked about an image.
        """
        if self.takes_images:
            return ImageMarks() if any(message.images for message in body.messages) else None
        for part in asked_last(body.messages, is_continued=body.is_continued):
            message = f"this model reads text only, not a part of type {part.type!r}"
            problem = self._moe.vision_part.problem
            raise BadRequest(f"{message}: {problem}" if problem else message, param=param)
        return None

    def prompt(self, text: str, marks: ImageMarks, param: str) -> tuple[list[int], PromptImages]:
        """Return the token ids of what a chat template made of a conversation, and its images.
        Raises BadRequest, which names `param`.
        """
        if len(marks.order) != len(marks.parts):
            message = "the chat template has no place for an image in one of these messages"
            raise BadRequest(message, param=param)
        require_within(IMAGES, len(marks.order), param)
        files = self._files(marks.order, param)
        with self._lock:
            processor = self._processor(param)
            self._require_places(processor, text, len(files), param)
            pictures = self._pictures(files, param)
            try:
                made = model_inputs(processor, text, pictures, self._moe.model.dtype)
            except Exception as error:  # each processor checks in its own way
                message = f"the model's processor does not take this: {printable(error, 200)}"
                raise BadRequest(message, param=param) from error
        settings = processor.image_processor.to_json_string()
        images = images_of(made, list(map(digest_of, pictures)), settings, self._image_ids)
        return made["input_ids"][0].tolist(), images

    def _files(self, parts: Sequence[ImagePart], param: str) -> list[bytes]:
        deadline = time.monotonic() + FETCH_S.most
        files = []
        for at, part in enumerate(parts):
            try:
                if part.url is None and part.is_uploaded:
                    raise BadImage("file_id: this server keeps no files; send its data in base64")
                if part.url is None:
                    raise BadImage("there is no URL, and no data in base64")
                files.append(self._media.read(part.url, deadline))
            except BadImage as error:
                raise refused_image(at, error, param) from error
            require_within(IMAGE_BYTES, sum(map(len, files)), param)
        return files

    def _processor(self, param: str) -> Any:
        try:
            return self._moe.processor
        except MoEInfinityError as error:
            logger.warning("images are refused: %s", error)
            problem = str(error).partition("\n")[0] if isinstance(error, ValueError) else ""
            message = (
                problem or "the model's processor cannot be loaded (the server's log says why)"
            )
            raise BadRequest(message, param=param, code="no_images") from error

    def _require_places(self, processor: Any, text: str, num_images: int, param: str) -> None:
        """Raise BadRequest for a text in which a client wrote what stands for images."""
        token = getattr(processor, "image_token", None)
        if token is not None and text.count(token) != num_images:
            message = f"{token} stands for an image: a text must not have it"
            raise BadRequest(message, param=param)

    def _pictures(self, files: Sequence[bytes], param: str) -> list[Image]:
        pictures = []
        num_pixels = 0
        for at, data in enumerate(files):
            try:
                pictures.append(read_picture(data))
            except BadImage as error:
                raise refused_image(at, error, param) from error
            num_pixels += pictures[-1].width * pictures[-1].height
            require_within(PIXELS, num_pixels, param)
        return pictures

    @property
    def _image_ids(self) -> list[int]:
        """The ids that stand for images among the tokens."""
        config = self._moe.model.config
        return [value for name in IMAGE_IDS if (value := getattr(config, name, None)) is not None]


def refused_image(number: int, error: BadImage, param: str) -> BadRequest:
    """Return the refusal of one image of a request, counted from 0."""
    return BadRequest(f"image {number}: {error}", param=param, code="bad_image")
