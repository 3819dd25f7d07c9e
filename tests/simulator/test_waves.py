"""Waves of 64 lanes on both interpreters: lanes, MFMA, LDS banks, loads into LDS and their waits; planted faults are found."""

import numpy as np
import pytest
from kernel_text import alloc, program

from tilelang.errors import TileLangError
from tilelang.ir import Launch, numpy_dtype, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target.banks import wavefronts
from tilelang.target.mfma import MFMA_ROWS
from tilelang.transform.verify_sync.launch import check_launch

GFX942, GFX950 = 'phase="DEVICE", chip="gfx942"', 'phase="DEVICE", chip="gfx950"'
SYNC = 'T.evaluate(T.call("sync_threads", "void"))'


def wave(tensors, body, threads=64, facts=GFX942):
    return program(tensors, body, threads=threads, facts=facts)


def refused(f, args, kind, text=""):
    with pytest.raises(TileLangError) as e:
        run_device(f, args)
    assert e.value.kind == kind and text in str(e.value), str(e.value)


# ---- lanes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [lambda f, x: run_device(f, x).outputs, run_tile], ids=["device", "tile"])
def test_shuffles_reach_64_lanes_and_votes_those_of_a_program_warp(run):
    f = wave({"A": ((128,), "int32"), "B": ((128,), "int32"), "C": ((128,), "uint64"), "D": ((128,), "int32")}, """
        B[tx] = T.call("shfl_xor", "int32", A[tx], 32, width=64) + T.call("shfl_idx", "int32", A[tx], 63, width=64)
        C[tx] = T.call("ballot", "uint64", A[tx] % 3 == 0)
        D[tx] = T.call("shfl_idx", "int32", A[tx], 31, width=32) + 100 * T.call("get_warp_idx", "int32")
    """, threads=128, facts='chip="gfx942"')
    a = np.random.default_rng(0).integers(0, 99, 128).astype(np.int32)
    out = run(f, [a, a, np.zeros(128, np.uint64), a])
    lane, wave64, warp = np.arange(128), a.reshape(2, 64), a.reshape(4, 32)
    assert np.array_equal(out["B"], a[lane ^ 32] + np.repeat(wave64[:, 63], 64))
    bits = ((warp % 3 == 0) * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(1)
    assert np.array_equal(out["C"], np.repeat(bits, 32))
    assert np.array_equal(out["D"], np.repeat(warp[:, 31], 32) + 100 * (lane // 32))


def test_a_shuffle_that_half_a_wave_reaches_is_found():
    f = wave({"A": ((64,), "int32")}, """
        if tx < 32:
            A[tx] = T.call("shfl_xor", "int32", A[tx], 32, width=64)
    """)
    refused(f, [np.zeros(64, np.int32)], "sim-warp-divergence")


# ---- MFMA ---------------------------------------------------------------------------------------------------------------


def one_instruction(row, lane="tx"):
    """C = A @ B by one wave, each lane loading the elements of its registers.  lane: whose elements a lane loads of A."""
    (m, n, k), run = row.shape, row.a.registers
    rows = f"(4 * (tx // {n}) + r)" if m == 16 else f"(8 * (r // 4) + 4 * (tx // {n}) + r % 4)"
    return wave({"A": ((m, k), str(row.a_dtype)), "B": ((k, n), str(row.b_dtype)), "C": ((m, n), str(row.c_dtype))}, f"""
        {alloc("a", (run,), str(row.a_dtype), "local")}
        {alloc("b", (run,), str(row.b_dtype), "local")}
        {alloc("c", (row.c.registers,), str(row.c_dtype), "local")}
        for r in T.unroll({run}):
            a[r] = A[({lane}) % {m}, {run} * (({lane}) // {m}) + r]
            b[r] = B[{run} * (tx // {n}) + r, tx % {n}]
        for r in T.unroll({row.c.registers}):
            c[r] = T.cast(0, "{row.c_dtype}")
        T.evaluate(T.call("mma", "void", T.address_of(c[0]), T.address_of(a[0]), T.address_of(b[0]), row="{row.name}"))
        for r in T.unroll({row.c.registers}):
            C[{rows}, tx % {n}] = c[r]
    """)


SOME = [MFMA_ROWS[n] for n in ("mfma.16x16x16.f16.f16.f32", "mfma.32x32x8.bf16.bf16.f32", "mfma.16x16x32.i8.i8.i32",
                               "mfma.16x16x32.e4m3fnuz.e4m3fnuz.f32", "mfma.16x16x4.f32.f32.f32")]


@pytest.mark.parametrize("row", SOME, ids=[r.name for r in SOME])
def test_mfma_multiplies_what_the_lanes_hold(row):
    rng = np.random.default_rng(2)
    m, n, k = row.shape
    a, b = (rng.integers(-4, 5, s).astype(numpy_dtype(dt)) for s, dt in (((m, k), row.a_dtype), ((k, n), row.b_dtype)))
    args = [a, b, np.zeros((m, n), numpy_dtype(row.c_dtype))]
    want = a.astype(np.float64) @ b.astype(np.float64)
    for out in (run_device(one_instruction(row), args).outputs, run_tile(one_instruction(row), args)):
        assert np.array_equal(out["C"].astype(np.float64), want)
    wrong = one_instruction(row, "tx - tx % 64 // 63")  # lane 63 holds the elements of lane 62
    assert not np.array_equal(run_device(wrong, args).outputs["C"].astype(np.float64), want)


def test_mfma_needs_all_lanes_of_a_wave():
    f = wave({"C": ((64,), "float32")}, f"""
        {alloc("a", (4,), "float16", "local")}
        {alloc("c", (4,), "float32", "local")}
        if tx < 63:
            T.evaluate(T.call("mma", "void", T.address_of(c[0]), T.address_of(a[0]), T.address_of(a[0]), row="{SOME[0].name}"))
        C[tx] = c[0]
    """)
    refused(f, [np.zeros(64, np.float32)], "sim-warp-divergence", "64 lanes")


def test_a_row_of_another_warp_size_is_refused():
    refused(program({"C": ((64,), "float32")}, f"""
        {alloc("a", (4,), "float16", "local")}
        {alloc("c", (4,), "float32", "local")}
        T.evaluate(T.call("mma", "void", T.address_of(c[0]), T.address_of(a[0]), T.address_of(a[0]), row="{SOME[0].name}"))
    """, threads=64), [np.zeros(64, np.float32)], "sim-unsupported")


# ---- LDS ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip, row_bytes, rows, swizzle, passes", [
    ("gfx942", 64, 16, lambda r: 0, 16), ("gfx942", 64, 16, lambda r: r // 2 % 4, 8),
    ("gfx942", 64, 32, lambda r: r // 2 % 4, 8), ("gfx942", 128, 16, lambda r: 0, 32),
    ("gfx942", 128, 16, lambda r: r % 8, 8), ("gfx942", 128, 16, lambda r: r // 2 % 8, 16),
    ("gfx942", 256, 32, lambda r: r % 8, 8), ("gfx950", 64, 32, lambda r: r // 4 % 4, 4),
    ("gfx950", 128, 16, lambda r: r // 2 % 8, 4), ("gfx950", 128, 32, lambda r: r % 8, 8),
    ("gfx950", 256, 16, lambda r: r % 16, 4), ("gfx950", 256, 16, lambda r: r % 8, 8)])
def test_loads_of_16_bytes_take_the_passes_of_the_chip(chip, row_bytes, rows, swizzle, passes):
    lane = np.arange(64)
    row, chunk = lane % rows, lane // rows
    address = row * row_bytes + 16 * (chunk ^ swizzle(row))
    assert wavefronts(address[None], 16, np.ones((1, 64), bool), chip)[0] == passes


def test_bank_conflicts_are_reported_by_access():
    f = wave({"A": ((64,), "float32")}, f"""
        {alloc("S", (4096,), "float32", "shared.dyn")}
        S[tx * 32] = A[tx]
        {SYNC}
        A[tx] = S[(63 - tx) * 32]
    """)
    report = run_device(f, [np.ones(64, np.float32)])
    assert report.conflicts == 2 * (64 - 2)


def test_an_overrun_of_lds_is_found():
    f = wave({"A": ((64,), "float32")}, f"""
        {alloc("S", (64,), "float32", "shared.dyn")}
        S[tx + 1] = A[tx]
        {SYNC}
        A[tx] = S[63 - tx]
    """)
    refused(f, [np.ones(64, np.float32)], "sim-out-of-bounds")


def test_a_barrier_in_divergence_is_found():
    f = wave({"A": ((128,), "float32")}, f"""
        {alloc("S", (128,), "float32", "shared.dyn")}
        S[tx] = A[tx]
        if tx < 64:
            {SYNC}
        A[tx] = S[127 - tx]
    """, threads=128)
    refused(f, [np.ones(128, np.float32)], "sim-barrier")


# ---- loads into LDS -----------------------------------------------------------------------------------------------------


def wait(n):
    return f'T.evaluate(T.call("wait_loads", "void", n={n}))'


def copy(dst, src, nbytes=4):
    return f'T.evaluate(T.call("cp_async", "void", T.address_of({dst}), T.address_of({src}), bytes={nbytes}))'


def ring(pending=2, end=SYNC, after=SYNC, place="tx", facts=GFX942):
    """B = sum over t of A[t] reversed, by two waves; two loads of a stage are in flight ahead."""
    return wave({"A": ((4, 256), "float32"), "B": ((256,), "float32")}, f"""
        {alloc("S", (512,), "float32", "shared.dyn")}
        {alloc("c", (2,), "float32", "local")}
        c[0] = 0.0
        c[1] = 0.0
        {copy(f"S[{place}]", "A[0, tx]")}
        {copy("S[tx + 128]", "A[0, tx + 128]")}
        for t in T.serial(4):
            if t + 1 < 4:
                {copy("S[(t + 1) % 2 * 256 + tx]", "A[t + 1, tx]")}
                {copy("S[(t + 1) % 2 * 256 + tx + 128]", "A[t + 1, tx + 128]")}
                {wait(pending) if pending is not None else "pass"}
            else:
                {wait(0) if pending is not None else "pass"}
            {after}
            c[0] = c[0] + S[t % 2 * 256 + 255 - tx]
            c[1] = c[1] + S[t % 2 * 256 + 127 - tx]
            {end}
        B[tx] = c[0]
        B[tx + 128] = c[1]
    """, threads=128, facts=facts)


A4 = np.random.default_rng(1).integers(0, 9, (4, 256)).astype(np.float32)


def verdict(f):
    return check_launch(next(n for n in walk(f) if isinstance(n, Launch)))


def test_a_ring_of_loads_into_lds_is_ordered_by_waits_on_their_number():
    report = run_device(ring(), [A4, np.zeros(256, np.float32)])
    assert np.array_equal(report.outputs["B"], A4.sum(0)[::-1]) and report.conflicts == 0
    text, faults = verdict(ring())
    assert text.startswith("ordered") and not faults


@pytest.mark.parametrize("fault, kinds", [
    ({"pending": 3}, {"sim-async"}),  # too weak
    ({"pending": None}, {"sim-async"}),  # missing
    ({"after": "pass"}, {"sim-race"}),  # a wait of the reader alone
    ({"end": "pass"}, {"sim-race", "sim-async"}),
])
def test_a_weak_or_missing_wait_is_found(fault, kinds):
    with pytest.raises(TileLangError) as e:
        run_device(ring(**fault), [A4, np.zeros(256, np.float32)])
    assert e.value.kind in kinds
    assert verdict(ring(**fault))[1]


def test_a_load_into_lds_writes_one_run_for_each_wave():
    refused(ring(place="tx % 2 * 64 + tx // 2"), [A4, np.zeros(256, np.float32)], "sim-async", "outside the run")


def test_loads_into_lds_have_the_sizes_of_the_chip():
    body = f"""
        {alloc("S", (256,), "float32", "shared.dyn")}
        {copy("S[tx * 4]", "A[tx * 4]", 16)}
        {wait(0)}
        B[tx] = S[tx * 4]
    """
    tensors = {"A": ((256,), "float32"), "B": ((64,), "float32")}
    args = [np.arange(256, dtype=np.float32), np.zeros(64, np.float32)]
    refused(wave(tensors, body), args, "sim-unsupported", "gfx942")
    assert np.array_equal(run_device(wave(tensors, body, facts=GFX950), args).outputs["B"], 4 * np.arange(64))
