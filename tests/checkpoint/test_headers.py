"""Headers of safetensors files: each tensor is where the format's own library finds it, and a file
whose header is not true is refused by name."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from moe_infinity.checkpoint.file_names import checkpoint_files
from moe_infinity.checkpoint.headers import Extent, read_headers
from moe_infinity.errors import CheckpointError
from tests.safetensors_file import entry, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(file: Path, said: str = "") -> None:
    """Reading the header fails with a message that names the file and says this."""
    with pytest.raises(CheckpointError, match=f"{re.escape(file.name)}.*{said}"):
        read_headers([file])


def test_extents_hold_the_bytes_that_safetensors_gives_a_tensor(sharded_checkpoint):
    for file in checkpoint_files(sharded_checkpoint):
        expected = load_file(file)
        headers = read_headers([file])
        assert headers.tensors.keys() == expected.keys()
        for name, tensor in headers.tensors.items():
            with tensor.extent.file.open("rb") as stream:
                stream.seek(tensor.extent.offset)
                raw = stream.read(tensor.extent.num_bytes)
            value = expected[name].contiguous()
            assert raw == value.view(torch.uint8).numpy().tobytes(), name
            assert (tensor.shape, tensor.dtype) == (tuple(value.shape), str(value.dtype)[6:])


def test_all_shards_of_the_index_are_found_once(sharded_checkpoint):
    assert checkpoint_files(sharded_checkpoint) == sorted(sharded_checkpoint.glob("*.safetensors"))


def test_a_single_file_needs_no_index(tiny_checkpoint):
    assert checkpoint_files(tiny_checkpoint) == [tiny_checkpoint / "model.safetensors"]


def test_reading_headers_counts_the_bytes_of_headers_only(tiny_checkpoint):
    file = tiny_checkpoint / "model.safetensors"
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert read_headers([file]).num_bytes == 8 + length


def test_part_cuts_an_extent_into_equal_runs():
    whole = Extent(Path("f"), 100, 12)
    assert [whole.equal_part(i, 3) for i in range(3)] == [
        Extent(Path("f"), 100 + 4 * i, 4) for i in range(3)
    ]


def test_a_missing_shard_is_named(copy_of, sharded_checkpoint):
    folder = copy_of(sharded_checkpoint)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=re.escape(lost.name)):
        checkpoint_files(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_not_one_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape("model.safetensors.index.json")):
        checkpoint_files(tmp_path)


def test_an_index_of_any_size_is_refused_unread(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, (64 << 20) + 1)
    with pytest.raises(CheckpointError, match="more than 67108864 bytes"):
        checkpoint_files(tmp_path)


def test_a_name_of_any_length_is_refused(file):
    """Patterns that are searched in it take the square of its length."""
    write(file, {".experts" * 100: entry("U8", [2], 0, 2)}, b"ab")
    refused(file, "is too long")


def test_a_file_that_vanished_is_named(file):
    refused(file)


def test_a_truncated_file_is_refused(file):
    write(file, {"a": entry("F32", [4], 0, 16)}, b"x" * 9)
    refused(file, "not fully covered\nhint: truncated")


def test_bytes_after_the_last_tensor_are_refused(file):
    write(file, {"a": entry("F32", [4], 0, 16)}, b"x" * 17)
    refused(file)


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 50) + b'{"a"'])
def test_a_file_that_ends_inside_its_header_is_refused(file, raw):
    file.write_bytes(raw)
    refused(file)


@pytest.mark.parametrize("length", [100_000_001, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_format_allows_is_refused_unread(file, length):
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    refused(file, "too large")


@pytest.mark.parametrize("text", [b"", b"not json", b'{"a":', b"\xff\xfe\x00", b"[1, 2]", b"3"])
def test_a_header_that_is_no_json_object_is_refused(file, text):
    write(file, text)
    refused(file)


def test_an_unsupported_dtype_is_refused_by_the_name_of_its_tensor(file):
    write(file, {"the_tensor": entry("C64", [2], 0, 16)}, bytes(16))
    refused(file, "the_tensor")


def test_metadata_is_not_a_tensor(file):
    write(file, {"__metadata__": {"format": "pt"}, "a": entry("U8", [2], 0, 2)}, b"ab")
    assert list(read_headers([file]).tensors) == ["a"]


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},  # overlap
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)},  # the same bytes twice
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [2], 5, 7)},  # a hole
        {"a": entry("U8", [8], 0, 8), "b": entry("U8", [4], 2, 6)},  # one inside the other
    ],
)
def test_tensors_that_overlap_or_leave_a_hole_are_refused(file, header):
    end = max(fields["data_offsets"][1] for fields in header.values())
    write(file, header, bytes(end))
    refused(file)


@pytest.mark.parametrize("offsets", [(0, 2**50), (2**50, 2**50 + 16), (8, 24)])
def test_offsets_beyond_the_file_are_refused(file, offsets):
    write(file, {"a": entry("U8", [offsets[1] - offsets[0]], *offsets)}, bytes(16))
    refused(file)


@pytest.mark.parametrize(
    ("dtype", "shape", "begin", "end"),
    [("F32", [4], 0, 8), ("F32", [2], 0, 16), ("BF16", [2, 3], 0, 24), ("F32", [0], 0, 16)],
)
def test_offsets_that_contradict_shape_and_dtype_are_refused(file, dtype, shape, begin, end):
    write(file, {"a": entry(dtype, shape, begin, end)}, bytes(end))
    refused(file)


@pytest.mark.parametrize(
    "fields",
    [
        None, 3, [], {}, "text",
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": None, "shape": [4], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
    ],
)  # fmt: skip
def test_an_entry_that_is_malformed_or_of_unknown_dtype_is_refused(file, fields):
    write(file, {"the_tensor": fields}, bytes(16))
    refused(file)


def test_a_tensor_in_two_shards_is_refused_with_both_names(tmp_path):
    files = [
        write(tmp_path / name, {"a": entry("U8", [2], 0, 2)}, b"ab") for name in ("one", "two")
    ]
    with pytest.raises(CheckpointError, match=r"tensor a .*one.*two"):
        read_headers(files)


def test_empty_tensors_and_scalars_are_fine(file):
    header = {"e": entry("F32", [0, 3], 0, 0), "s": entry("F32", [], 0, 4)}
    write(file, header, bytes(4))
    sizes = {name: t.extent.num_bytes for name, t in read_headers([file]).tensors.items()}
    assert sizes == {"e": 0, "s": 4}


def test_a_header_nested_too_deep_for_the_parser_is_refused(file):
    write(file, b'{"a":' + b"[" * 200_000)
    refused(file)


@given(st.data())
def test_a_header_with_any_byte_changed_is_read_or_refused_but_never_points_outside(
    tmp_path_factory, data
):
    file = tmp_path_factory.mktemp("changed") / "model.safetensors"
    header = {"a": entry("F32", [4], 0, 16), "b": entry("U8", [8], 16, 24)}
    write(file, header, bytes(24))
    raw = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 25))
    raw[position] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    try:
        tensors = read_headers([file]).tensors.values()
    except CheckpointError:
        return
    for tensor in tensors:
        assert tensor.extent.offset + tensor.extent.num_bytes <= len(raw)
        assert np.prod(tensor.shape) >= 0
