"""A machine told in words: what is known is taken, what is left out is marked as assumed."""

from __future__ import annotations

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.system.machine import own_bytes
from moe_infinity.tools.planning.machine import parse_machine


def test_sizes_and_rates_are_read_with_their_units():
    found = parse_machine(
        "ram=32GiB, disk=3GB/s,gpu=24GiB,link=25GB/s,cores=8,memory=60GB/s,products=2TFLOP/s"
    )
    assert (found.ram, found.gpu, found.cores) == (32 * 2**30, 24 * 2**30, 8)
    assert (found.disk, found.link, found.memory, found.products) == (3e9, 25e9, 60e9, 2e12)
    assert found.assumed == {"gpu_memory", "new_memory"}


def test_what_is_left_out_is_assumed():
    found = parse_machine("ram=16GiB")
    assert found.assumed == {"cores", "disk", "memory", "new_memory", "products"}
    assert found.gpu == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rom=32GiB", "unknown 'rom', expected some of: cores, ram"),
        ("ram", "ram=''"),
        ("ram=", "ram=''"),
        ("ram=lots", "ram='lots', expected for example ram=24GiB"),
        ("ram=50%", "ram='50%'"),
        ("ram=3GB/s", "ram='3GB/s'"),
        ("ram=0", "ram='0'"),
        ("cores=two", "cores='two', expected for example cores=8"),
        ("cores=-1", "cores='-1'"),
        ("disk=3GB", "disk='3GB', expected for example disk=3GB/s"),
        ("products=3", "expected for example products=300GFLOP/s"),
        ("ram=1GiB,ram=2GiB", "ram is given twice"),
        ("link=25GB/s", "link is of a GPU"),
        ("", "nothing is given"),
        (",", "nothing is given"),
    ],
)
def test_what_cannot_be_understood_is_an_error(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_machine(text)


def test_the_memory_of_this_process_is_counted_as_free():
    assert own_bytes() > 1 << 20
