"""Files of images, good ones and ones that were changed at random."""

from __future__ import annotations

import io
import random
import struct
import zlib

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Colours at random, in blocks that a resized picture still shows."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animation(kind: str) -> bytes:
    frames = [picture(seed, 24, 16) for seed in (1, 2, 3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def turned() -> bytes:
    """EXIF says that the camera was held on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(4, 48, 32), "JPEG", exif=exif)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    )


def samples() -> list[bytes]:
    """Small files of every kind that is read, and some that are not."""
    colours = picture(5, 48, 32)
    return [
        encoded(colours, "PNG"),
        encoded(colours.convert("P"), "PNG"),
        encoded(colours.convert("RGBA"), "PNG"),
        encoded(colours.convert("I;16"), "PNG"),
        encoded(colours, "JPEG"),
        encoded(colours, "JPEG", progressive=True),
        encoded(colours.convert("CMYK"), "JPEG"),
        turned(),
        encoded(colours, "WEBP", lossless=True),
        encoded(colours.convert("RGBA"), "WEBP"),
        encoded(colours.convert("P"), "GIF"),
        animation("GIF"),
        animation("WEBP"),
        animation("PNG"),
        encoded(colours, "TIFF"),
        encoded(colours, "BMP"),
        bomb(60_000, 60_000),
    ]


def mutated(data: bytes, dice: random.Random) -> bytes:
    """A file with some bytes changed, cut out, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 8)):
        at = dice.randrange(len(changed)) if changed else 0
        size = dice.choice((1, 1, 2, 4, 16, 200))
        match dice.randrange(6):
            case 0:
                changed[at : at + size] = dice.randbytes(size)
            case 1:
                del changed[at : at + size]
            case 2:
                changed[at:at] = changed[at : at + size]
            case 3:
                changed[at : at + 4] = dice.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4))
                )
            case 4:
                changed[at : at + 1] = bytes([dice.randrange(256)])
            case _:
                if dice.random() < 0.3:
                    del changed[at:]
    return bytes(changed)
