"""Headers of GGUF files: those that are true, those that are damaged, and those that lie."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_infinity import CheckpointError, MoEInfinityError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.gguf.file import read_gguf_header
from tests.gguf_files import Tensor, build, header, number, string, text
from tools.convert_to_gguf import convert

MODEL = {"general.architecture": text("qwen3moe")}
HEADER_BYTES = 1 << 20  # more than any header here needs


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))
    convert(folder, folder / "model.gguf", "q8_0")
    return folder / "model.gguf"


@pytest.fixture
def write(tmp_path: Path):
    def write(content: bytes, data: int = 4096) -> Path:
        file = tmp_path / "model.gguf"
        file.write_bytes(content + bytes(data))
        return file

    return write


def test_a_header_is_what_the_gguf_package_finds(model_file):
    found = read_gguf_header(model_file)
    reader = gguf.GGUFReader(model_file)
    assert [t.name for t in found.tensors] == [t.name for t in reader.tensors]
    for ours, theirs in zip(found.tensors, reader.tensors, strict=True):
        assert ours.stored_dtype == theirs.tensor_type.name
        assert ours.shape == tuple(int(size) for size in theirs.shape[::-1])
        assert (ours.extent.offset, ours.extent.num_bytes) == (theirs.data_offset, theirs.n_bytes)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert found.metadata == expected
    assert found.num_bytes == reader.data_offset


def test_values_of_all_types_are_read(write):
    values = {
        "a": struct.pack("<IB", 0, 200), "b": struct.pack("<Ib", 1, -3),
        "c": struct.pack("<IH", 2, 60000), "d": struct.pack("<Ih", 3, -300),
        "e": struct.pack("<If", 6, 0.5), "f": struct.pack("<I?", 7, True),
        "g": struct.pack("<IQ", 10, 1 << 60), "h": struct.pack("<Iq", 11, -(1 << 60)),
        "i": struct.pack("<Id", 12, 0.1), "j": text("ü"),
        "k": struct.pack("<IIQ2h", 9, 3, 2, 7, -8), "l": struct.pack("<IIQ", 9, 8, 1) + string("x"),
    }  # fmt: skip
    found = read_gguf_header(write(header(values, []))).metadata
    assert list(found.values()) == [
        200, -3, 60000, -300, 0.5, True, 1 << 60, -(1 << 60), 0.1, "ü", [7, -8], ["x"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "shape"),
    [((32, 2, 1, 1), (2, 32)), ((32, 1, 1, 1), (32,)), ((4, 1, 2, 1), (2, 1, 4)), ((1, 1), (1,))],
)
def test_ones_behind_the_dimensions_are_left_out(write, dims, shape):
    """llama.cpp has four dimensions of each tensor, and some programs write all of them."""
    (found,) = read_gguf_header(write(header(MODEL, [Tensor("t", dims)]))).tensors
    assert found.shape == shape


@pytest.mark.parametrize("dims", [(32, 2, 1), (32, 2, 1, 1)])
def test_a_stack_of_one_expert_stays_a_stack(write, dims):
    tensor = Tensor("blk.0.ffn_up_exps.weight", dims)
    (found,) = read_gguf_header(write(header(MODEL, [tensor]))).tensors
    assert found.shape == (1, 2, 32)


LIES = {
    "not a GGUF file": b"GGUG" + header(MODEL, [])[4:],
    "older than GGUF": b"tjgg" + header(MODEL, [])[4:],
    "version 1": header(MODEL, [], version=1),
    "version 9": header(MODEL, [], version=9),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "more than the file has room for": header(MODEL, [], counts=(1 << 20, 1)),
    "entries of metadata, more": header(MODEL, [], counts=(0, 1 << 20)),
    "tensors, expected at most": header(MODEL, [], counts=(1 << 40, 1)),
    "metadata, expected at most": header(MODEL, [], counts=(0, 1 << 63)),
    "header ends after": header({"a": struct.pack("<IQ", 8, 1 << 62)}, []),
    "strings, more than": header({"a": struct.pack("<IIQ", 9, 8, 1 << 20)}, []),
    "numbers, more than": header({"a": struct.pack("<IIQ", 9, 0, 1 << 20)}, []),
    "strings, expected at most": header({"a": struct.pack("<IIQ", 9, 8, 1 << 61)}, []),
    "numbers, expected at most": header({"a": struct.pack("<IIQ", 9, 0, 1 << 50)}, []),
    "unknown type 77": header({"a": struct.pack("<I", 77)}, []),
    "array of the unknown type 9": header({"a": struct.pack("<IIQ", 9, 9, 1)}, []),
    "is there twice": header({"a": number(1)}, [], counts=(0, 2)) + string("a") + number(2),
    "alignment of 48": header({"general.alignment": number(48)}, []),
    "alignment of 0": header({"general.alignment": number(0)}, []),
    "alignment of 'x'": header({"general.alignment": text("x")}, []),
    "the name": header({"a\n": number(1)}, []),
    "has 5 dimensions": header(MODEL, [Tensor("t", (1, 1, 1, 1, 1))]),
    "has 0 dimensions": header(MODEL, [Tensor("t", ())]),
    "the shape [0]": header(MODEL, [Tensor("t", (0,))]),
    "in blocks of 256": header(MODEL, [Tensor("t", (32,), 12)]),
    "type 99, which is not known": header(MODEL, [Tensor("t", (32,), 99)]),
    "type Q8_1, which is not supported": header(MODEL, [Tensor("t", (32,), 9)]),
    "no multiple of 32": header(MODEL, [Tensor("t", offset=7)]),
    "ends at byte": header(MODEL, [Tensor("t", offset=1 << 20)]),
    "t ends at byte 18": header(MODEL, [Tensor("t", offset=(1 << 64) - 32)]),
    "t ends at byte 5,316,911,983": header(MODEL, [Tensor("t", (1 << 40, 1 << 40, 1 << 40))]),
    "two tensors of one name": header(MODEL, [Tensor("t"), Tensor("t", offset=128)]),
    "t and u overlap": header(MODEL, [Tensor("t"), Tensor("u", offset=96)]),
}


@pytest.mark.parametrize("said", LIES)
def test_a_header_that_lies_is_refused_by_name(said, write):
    file = write(LIES[said])
    with pytest.raises(CheckpointError) as caught:
        read_gguf_header(file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_array_longer_than_any_vocabulary_is_refused_though_its_bytes_are_there(write):
    """Its items would be objects of Python, of more than 30 times the bytes."""
    count = 4_194_304
    file = write(header({"a": struct.pack("<IIQ", 9, 0, count)}, []), data=count + 64)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"{count} numbers, expected at most 4000000"):
            read_gguf_header(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < HEADER_BYTES


def test_a_file_cut_off_anywhere_is_refused(model_file, tmp_path):
    whole = model_file.read_bytes()
    end = read_gguf_header(model_file).num_bytes
    file = tmp_path / "cut.gguf"
    for length in [*range(0, end, 41), end, len(whole) - 33]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_gguf_header(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_a_header_says_costs_no_more_than_the_file(data, model_file, tmp_path):
    """Any bytes of the header replaced: an error of ours, or tensors inside the file."""
    content = bytearray(model_file.read_bytes())
    end = read_gguf_header(model_file).num_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8]))
        content[at : at + len(new)] = new
    file = tmp_path / "fuzzed.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        for tensor in read_gguf_header(file).tensors:
            assert tensor.extent.offset >= 24
            assert tensor.extent.offset + tensor.extent.num_bytes <= len(content)
    except CheckpointError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < HEADER_BYTES


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data())
def test_a_model_with_any_numbers_in_its_metadata_loads_or_is_refused(data, model_file, tmp_path):
    """Sizes that no tensor has, of the wrong sign or type, end in an error of ours."""
    content = bytearray(model_file.read_bytes())
    key = data.draw(
        st.sampled_from(
            [key for key in read_gguf_header(model_file).metadata if "qwen3moe." in key]
        )
    )
    at = content.index(string(key)) + len(string(key))
    new = data.draw(st.sampled_from([0, 1, 3, 7, 64, 1 << 31, (1 << 32) - 1]))
    content[at + 4 : at + 8] = struct.pack("<I", new)
    file = tmp_path / "fuzzed.gguf"
    file.write_bytes(content)
    with suppress(MoEInfinityError):
        inspect_checkpoint(str(file))
