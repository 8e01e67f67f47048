"""Files of images become pictures in RGB. The files may be broken, or made to do harm."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING

from moe_infinity.errors import MoEInfinityError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 1 << 24  # of one picture, as 4096 x 4096: it takes 64 MiB while it is read
INSTALL = "images need the package pillow: pip install 'moe-infinity[images]'"


class BadImage(MoEInfinityError, ValueError):
    """An image cannot be read, or is too large."""


def read_picture(data: bytes) -> Image:
    """Return the picture in a file's bytes, in RGB and turned as its EXIF data say; of an animation
    its first frame. Raises BadImage for everything else, and where Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise BadImage(INSTALL) from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            _require_size(file)
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I"):  # 16 bits of grey: Pillow makes white of 256 and more
                picture = picture.convert("I").point(lambda grey: grey * (1 / 256)).convert("L")
            return picture.convert("RGB")  # as transformers loads images
    except BadImage:
        raise
    except MemoryError as error:
        raise BadImage("there is no memory for this image") from error
    except Exception as error:  # decoders raise anything
        names = ", ".join(FORMATS)
        raise BadImage(f"this is no image that can be read; expected one of {names}") from error


def _require_size(picture: Image) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise BadImage(f"this image has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        message = f"this image has {width} x {height} pixels, at most {MAX_PIXELS:,} are read"
        raise BadImage(message)


def digest_of(picture: Image) -> bytes:
    """Return what tells a picture from all others: 32 bytes, of its size and its pixels."""
    digest = hashlib.sha256(f"{picture.mode} {picture.size} ".encode())
    digest.update(picture.tobytes())
    return digest.digest()
