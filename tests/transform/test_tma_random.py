"""Generated programs of copies, loops and sums: with TMA the device simulator gives what the tile program means."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import NP

import tilelang.language as T
from tilelang.ir import walk
from tilelang.ir.expr import Call
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import legalized, lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})


@st.composite
def moves(draw):
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "int8", "int32"]))
    bm, bn = draw(st.sampled_from([8, 24, 32, 64, 72])), draw(st.sampled_from([16, 32, 40, 64, 128]))
    return {"dtype": dtype, "bm": bm, "bn": bn, "threads": draw(st.sampled_from([32, 128, 256])),
            "m": draw(st.integers(1, 150)), "n": draw(st.sampled_from([16, 48, 64, 72, 96, 100, 128, 160])),
            "dy": draw(st.integers(-9, 9)), "dx": draw(st.integers(-9, 9)), "steps": draw(st.integers(1, 3)),
            "rank": draw(st.sampled_from([2, 3])), "way": draw(st.sampled_from(["tile", "two", "fragment", "change"])),
            "out": draw(st.sampled_from(["copy", "over", "add"])), "seed": draw(st.integers(0, 99))}


def program_of(d):
    bm, bn, dtype, m, n, steps = d["bm"], d["bn"], d["dtype"], d["m"], d["n"], d["steps"]
    way, out, dy, dx, rank = d["way"], d["out"], d["dy"], d["dx"], d["rank"]
    rows = steps * m
    a_shape, b_shape = (((2, rows, n), (2, rows, n)) if rank == 3 else ((rows, n), (rows, n)))
    total = dtype if dtype in ("float16", "float32", "int32", "bfloat16") else "int32"
    b_type = total if out == "add" else dtype

    @T.prim_func
    def main(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, b_type)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), 2 if rank == 3 else 1, threads=d["threads"]) as (bx, by, bz):
            S, U = T.alloc_shared((bm, bn), dtype), T.alloc_shared((bm, bn), b_type)
            F = T.alloc_fragment((bm, bn), dtype)
            for t in range(steps):
                if rank == 3:
                    T.copy(A[bz, t * m + by * bm + dy:t * m + by * bm + dy + bm, bx * bn + dx:bx * bn + dx + bn], S)
                else:
                    T.copy(A[t * m + by * bm + dy:t * m + by * bm + dy + bm, bx * bn + dx:bx * bn + dx + bn], S)
                if way == "change":
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = S[i, j] + T.cast(1, dtype)
                if way == "fragment":
                    T.copy(S, F)
                    T.copy(F, U)
                else:
                    for i, j in T.Parallel(bm, bn):
                        U[i, j] = T.cast(S[bm - 1 - i, j] if way == "two" else S[i, j], b_type)
                row = (0 if out == "over" else t * m) + by * bm
                if out == "add":
                    if rank == 3:
                        T.atomic_add(B[bz, row:row + bm, bx * bn:bx * bn + bn], U)
                    else:
                        T.atomic_add(B[row:row + bm, bx * bn:bx * bn + bn], U)
                elif rank == 3:
                    T.copy(U, B[bz, row:row + bm, bx * bn:bx * bn + bn])
                else:
                    T.copy(U, B[row:row + bm, bx * bn:bx * bn + bn])

    return main, a_shape, b_shape, b_type


SEEN: set[str] = set()


def overlaps(d):
    """Whether the tiles of different blocks share rows: then blocks race in the program itself."""
    return d["out"] == "copy" and d["steps"] > 1 and d["m"] % d["bm"] != 0


@settings(max_examples=60, deadline=None, database=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(moves())
def check(d):
    if overlaps(d):
        d = {**d, "m": -(-d["m"] // d["bm"]) * d["bm"]}
    if d["dy"] >= d["steps"] * d["m"] or d["dx"] >= d["n"]:  # every element would be outside, which is rejected
        d = {**d, "dy": 0, "dx": 0}
    main, a_shape, b_shape, b_type = program_of(d)
    rng = np.random.default_rng(d["seed"])
    args = {"A": rng.integers(-9, 10, a_shape).astype(NP[d["dtype"]]), "B": rng.integers(-9, 10, b_shape).astype(NP[b_type])}
    program = lower(main.func, SM90A, {"tl.enable_hopper": True})
    SEEN.update(x.op for k in program.kernels for x in walk(k.launch) if isinstance(x, Call))
    want = run_tile(legalized(main.func, SM90A), args)["B"]
    assert np.array_equal(run_device(program, args).outputs["B"], want)


@pytest.mark.timeout(600)
def test_copies_loops_and_sums():
    check()
    assert {"tma_load", "tma_store", "tma_reduce_add", "bulk_wait"} <= SEEN
