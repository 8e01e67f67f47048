"""Files of images, whoever made them: pictures in RGB, or a refusal."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from moe_infinity.images import pictures
from moe_infinity.images.pictures import BadImage, digest_of, read_picture
from tests.images.files import animation, bomb, encoded, mutated, picture, samples, turned

COLOURS = picture(5, 48, 32)


def test_a_picture_is_what_was_drawn():
    read = read_picture(encoded(COLOURS, "PNG"))
    assert read.mode == "RGB"
    assert np.array_equal(np.asarray(read), np.asarray(COLOURS))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK"])
def test_every_kind_of_pixel_becomes_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    read = read_picture(encoded(COLOURS.convert(mode), kind))
    assert (read.mode, read.size) == ("RGB", COLOURS.size)


def test_16_bits_of_grey_keep_their_order():
    levels = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    read = np.asarray(read_picture(encoded(Image.fromarray(levels), "PNG")), int)
    assert np.array_equal(read, np.stack([levels // 256] * 3, -1))


def test_cmyk_keeps_its_colours():
    read = np.asarray(read_picture(encoded(COLOURS.convert("CMYK"), "JPEG", quality=95)), int)
    assert np.abs(read - np.asarray(COLOURS, int)).mean() < 20


def test_a_picture_is_turned_as_its_exif_data_say():
    assert picture(4, 48, 32).size == (48, 32)
    assert read_picture(turned()).size == (32, 48)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(kind):
    first = np.asarray(picture(1, 24, 16), int)
    read = np.asarray(read_picture(animation(kind)), int)
    assert np.abs(read - first).mean() < 20
    other = np.asarray(picture(2, 24, 16), int)
    assert np.abs(read - other).mean() > 40


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no image"),
        (b"GIF89a", "no image"),
        (encoded(COLOURS, "PNG")[:200], "no image"),
        (encoded(COLOURS, "JPEG")[:300], "no image"),
        (encoded(COLOURS, "TIFF"), "expected one of PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (bomb(5000, 5000), "5000 x 5000 pixels, at most 16,777,216"),
        (bomb(12_000, 12_000), "no image|pixels"),
        (bomb(60_000, 60_000), "no image|pixels"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_what_cannot_be_read_is_refused(data, said):
    with pytest.raises(BadImage, match=said):
        read_picture(data)


def test_without_pillow_the_refusal_says_what_to_install(monkeypatch):
    data = encoded(COLOURS, "PNG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadImage, match=r"pip install 'moe-infinity\[images\]'"):
        read_picture(data)


def test_digests_tell_pictures_apart():
    wide = Image.new("RGB", (4, 2))
    high = Image.new("RGB", (2, 4))
    assert digest_of(wide) == digest_of(wide.copy())
    assert len({digest_of(each) for each in (wide, high, COLOURS, picture(6, 48, 32))}) == 4


FUZZ = """
import random, resource, sys, warnings
from moe_infinity.images.pictures import MAX_PIXELS, BadImage, read_picture
from tests.images.files import mutated, samples
first, last = map(int, sys.argv[1:])
warnings.simplefilter("ignore")
files = samples()
for data in files:
    try: read_picture(data)
    except BadImage: pass
def kib(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
limit = (kib("VmSize") << 10) + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
num_read = 0
for seed in range(first, last):
    dice = random.Random(seed)
    try:
        picture = read_picture(mutated(dice.choice(files), dice))
    except BadImage:
        continue
    assert picture.mode == "RGB" and picture.width * picture.height <= MAX_PIXELS
    num_read += 1
print("done", last - first, num_read, kib("VmHWM"))
"""


def fuzz(first: int, last: int) -> list[str]:
    """Read changed files in a process with a limit of memory; an error of any other kind ends it.
    Returns how many were tried, how many became pictures, and the most memory in KiB.
    """
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.startswith("done"), (done.returncode, done.stderr[-2000:])
    return done.stdout.split()[1:]


def test_ten_thousand_changed_files_are_pictures_or_refused_within_bounded_memory():
    num_tried, num_read, peak_kib = map(int, fuzz(0, 10_000))
    assert num_tried == 10_000
    assert 500 < num_read < 9500, "both happen"
    assert peak_kib < 400 << 10


def test_changes_are_the_same_for_the_same_seed():
    data = samples()[0]
    assert mutated(data, random.Random(7)) == mutated(data, random.Random(7))
    assert pictures.MAX_PIXELS == 1 << 24
