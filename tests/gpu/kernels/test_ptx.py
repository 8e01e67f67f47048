"""The programs that stand for a GPU: what instructions do, and what a GPU would punish."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest

from tests.gpu.kernels.ptx import WARP, Program
from tests.gpu.kernels.ptx_memory import Memory, RaceError

ADDRESS = 1 << 40  # of the only memory there is


def run(code: str, *, num_warps: int = 2, arguments: Sequence[int] = ()) -> np.ndarray:
    """What its threads leave in 4 bytes each, whose place is in %rd1."""
    memory = Memory(np.zeros(4 * WARP * num_warps, np.uint8), ADDRESS)
    begin = f"mov.u64 %rd1, {ADDRESS};\nmov.u32 %r1, %tid.x;\nmad.wide.u32 %rd1, %r1, 4, %rd1;"
    ptx = ".visible .entry f(\n.param .b32 f_param_0\n)\n{\n" + f"{begin}\n{code}\nret;\n" + "}\n"
    Program((0,), num_warps, [memory]).run(ptx, arguments)
    return memory.content.view(np.uint32)


def bits(number: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


NAN = "0f7FC00000"
ONE_WORD = [
    ("add.s32 %r2, 7, -9", 0xFFFFFFFE),
    ("mul.lo.s32 %r2, -3, 5", 0xFFFFFFF1),
    ("mul.hi.s16 %rs1, 21846, 300;\ncvt.u32.u16 %r2, %rs1", 100),
    ("mad.lo.s32 %r2, 6, 7, -2", 40),
    ("shl.b32 %r2, 1, 31", 1 << 31),
    ("shl.b32 %r2, 1, 32", 0),
    ("shr.u32 %r2, -8, 1", 0x7FFFFFFC),
    ("shr.s32 %r2, -8, 1", 0xFFFFFFFC),
    ("shr.s32 %r2, -8, 40", 0xFFFFFFFF),
    ("bfe.u32 %r2, 0xABCD, 4, 8", 0xBC),
    ("bfe.s32 %r2, 0xABCD, 4, 8", 0xFFFFFFBC),
    ("prmt.b32 %r2, 0x33221100, 0x77665544, 0x5410U", 0x55441100),
    ("prmt.b32 %r2, 0x33221180, 0x87654321, 0x8FB7U", 0xFFFF0087),  # signs of bytes 0, 7 and 3
    ("prmt.b32 %r2, 0x33221100, %r9, 0x0321U", 0x00332211),  # nothing wrote %r9
    ("prmt.b32 %r2, 0x33221100, %r9, 0x4321U", 0xD0332211),
    ("setp.lt.s32 %p1, -1, 0;\nselp.b32 %r2, 5, 6, %p1", 5),
    ("setp.lt.u32 %p1, -1, 0;\nselp.b32 %r2, 5, 6, %p1", 6),
    (f"setp.ltu.f32 %p1, {NAN}, {bits(1)};\nselp.b32 %r2, 5, 6, %p1", 5),
    (f"setp.num.f32 %p1, {NAN}, {bits(1)};\nselp.b32 %r2, 5, 6, %p1", 6),
    (f"setp.nan.f32 %p1, {NAN}, {bits(1)};\nselp.b32 %r2, 5, 6, %p1", 5),
    (f"fma.rn.f32 %r2, {bits(3)}, {bits(0.5)}, {bits(-1)}", 0x3F000000),
    ("mul.f32 %r2, 0f00000003, 0f4B800000", 0x01C00000),  # 3 * 2 ** -149, 2 ** 24 times
    ("mul.ftz.f32 %r2, 0f00000003, 0f4B800000", 0),
    (f"min.f32 %r2, {NAN}, {bits(2)}", 0x40000000),
    (f"min.NaN.f32 %r2, {NAN}, {bits(2)}", 0x7FC00000),
    (f"min.NaN.xorsign.abs.f32 %r2, {bits(-4)}, {bits(2)}", 0xC0000000),
    ("mov.b32 {%rs1, %rs2}, 0xBEEF1234;\ncvt.s32.s16 %r2, %rs2", 0xFFFFBEEF),
    ("mov.b32 %r2, {1, 2}", 0x00020001),
    ("cvt.rn.bf16.f32 %rs1, 0f3F808000;\ncvt.u32.u16 %r2, %rs1", 0x3F80),  # a tie, to even
    ("cvt.rn.bf16.f32 %rs1, 0f3F818000;\ncvt.u32.u16 %r2, %rs1", 0x3F82),
    ("add.bf16 %rs1, 16256, 15232;\ncvt.u32.u16 %r2, %rs1", 0x3F80),  # 1 + 2 ** -8, the same
    ("add.bf16x2 %r2, 0x3F803F80, 0x3B803C00", 0x3F803F81),
    (f"cvt.rn.f16x2.f32 %r2, {bits(2)}, {bits(1)}", 0x40003C00),
    ("add.s16x2 %r2, 0x0001FFFF, 0x00010001", 0x00020000),
    ("ld.param.b32 %r2, [f_param_0]", 11),
]


@pytest.mark.parametrize(("code", "expected"), ONE_WORD)
def test_instructions_do_what_the_manual_says(code, expected):
    found = run(f"{code};\nst.global.b32 [ %rd1 + 0 ], {{ %r2 }};", arguments=[11])
    assert {f"{n:#x}" for n in found.tolist()} == {f"{expected:#x}"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [("shfl.sync.bfly.b32 %r2, %r1, 3, 31, -1", [n ^ 3 for n in range(64)]),
     ("shfl.sync.idx.b32 %r2, %r1, 5, 31, -1", 32 * [5] + 32 * [37]),
     ("redux.sync.add.s32 %r2, %r1, -1", 32 * [496] + 32 * [1520]),
     ("redux.sync.max.s32 %r2, %r1, -1", 32 * [31] + 32 * [63])],
)  # fmt: skip
def test_lanes_of_a_warp_see_each_other(code, expected):
    assert run(f"{code};\nst.global.b32 [%rd1], %r2;").tolist() == expected


def test_threads_that_part_come_together_again():
    code = """
        and.b32 %r2, %r1, 3;
        mov.b32 %r3, 100;
        $L__loop:
        setp.eq.b32 %p1, %r2, 0;
        @%p1 bra $L__end;
        add.s32 %r3, %r3, %r2;
        sub.s32 %r2, %r2, 1;
        bra.uni $L__loop;
        $L__end:
        shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1;
        st.global.b32 [%rd1], %r3;
    """
    sums = [100, 101, 103, 106]
    assert run(code).tolist() == [sums[(n ^ 1) & 3] for n in range(64)]


EXCHANGE = """
    shl.b32 %r2, %r1, 2;
    st.shared.b32 [%r2], %r1;
    {barrier}
    xor.b32 %r2, %r2, {far};
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%rd1], %r3;
"""


def test_a_barrier_lets_warps_exchange():
    found = run(EXCHANGE.format(barrier="bar.sync 0;", far=128))
    assert found.tolist() == [n ^ 32 for n in range(64)]
    assert run(EXCHANGE.format(barrier="", far=4)).tolist() == [n ^ 1 for n in range(64)]


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync -1;"])
def test_warps_that_exchange_without_one_are_a_race(barrier):
    with pytest.raises(RaceError):
        run(EXCHANGE.format(barrier=barrier, far=128))


def test_what_is_read_may_not_be_overwritten_without_a_barrier():
    code = "ld.shared.b32 %r3, [0];\nsetp.eq.b32 %p1, %r1, 40;\n{}@%p1 st.shared.b32 [0], %r1;"
    run(code.format("bar.sync 0;\n"))
    with pytest.raises(RaceError):
        run(code.format(""))


def test_all_may_write_the_same_at_once_but_nothing_else():
    run("mov.b32 %r2, 7;\nst.shared.b32 [0], %r2;")
    with pytest.raises(RaceError):
        run("st.shared.b32 [0], %r1;")


@pytest.mark.parametrize(
    ("code", "said"),
    [("ld.global.v2.b32 {%r2, %r3}, [%rd1];", "not aligned"),
     ("ld.global.b32 %r2, [%rd1 + 4];", "no memory"),
     ("mov.u64 %rd2, 16;\nld.global.b32 %r2, [%rd2];", "no memory"),
     ("$L__1:\nbra.uni $L__1;", "does not end"),
     ("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L__1;\nbar.sync 0;\n$L__1:", "never come"),
     ("tanh.approx.f32 %r2, %r1;", "unknown")],
)  # fmt: skip
def test_what_a_gpu_would_punish_is_an_error(code, said, monkeypatch):
    monkeypatch.setattr("tests.gpu.kernels.ptx.MAX_STEPS", 100)
    with pytest.raises(AssertionError, match=said):
        run(code)


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_are_dealt_to_the_threads_of_a_warp(trans):
    """8 rows of 8 numbers of 16 bits, n * 10 + 1 in the place n."""
    code = f"""
        shl.b32 %r2, %r1, 1;
        mad.lo.s32 %r3, %r2, 10, 1;
        add.s32 %r4, %r3, 10;
        shl.b32 %r5, %r4, 16;
        or.b32 %r3, %r3, %r5;
        shl.b32 %r5, %r1, 2;
        st.shared.b32 [%r5], %r3;
        and.b32 %r6, %r1, 7;
        shl.b32 %r6, %r6, 4;
        ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r7}}, [%r6];
        st.global.b32 [%rd1], %r7;
    """
    halves = run(code, num_warps=1).view(np.uint16).reshape(32, 2)
    places = np.arange(64).reshape(8, 8)
    dealt = places.T if trans else places
    assert (halves == dealt.reshape(32, 2) * 10 + 1).all()
    back = code.replace(
        "st.global.b32 [%rd1], %r7;",
        f"stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r6 + 256], {{%r7}};"
        "ld.shared.b32 %r7, [%r5 + 256];\nst.global.b32 [%rd1], %r7;".replace(";ld", ";\nld"),
    )
    found = run(back, num_warps=1).view(np.uint16)
    assert (found == np.arange(64) * 10 + 1).all()


def test_copies_arrive_when_they_are_waited_for():
    """As late as a GPU may bring them."""
    code = """
        st.global.b32 [%rd1], %r1;
        shl.b32 %r2, %r1, 2;
        cp.async.ca.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x4, {size};
        cp.async.commit_group;
        cp.async.ca.shared.global [ %r2 + 1024 ], [ %rd1 + 0 ], 0x4;
        cp.async.commit_group;
        cp.async.wait_group {kept};
        ld.shared.b32 %r3, [%r2];
        ld.shared.b32 %r4, [%r2 + 1024];
        shl.b32 %r4, %r4, 8;
        or.b32 %r3, %r3, %r4;
        st.global.b32 [%rd1], %r3;
    """
    for size, kept, one, other in ((4, 0, 1, 1), (4, 1, 1, 0), (4, 2, 0, 0), (0, 1, 0, 0)):
        found = run(code.format(size=size, kept=kept))
        assert found.tolist() == [n * one | n * other << 8 for n in range(64)]
