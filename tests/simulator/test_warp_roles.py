"""Tile programs whose warp groups have roles: they equal the plain program, and a wrong barrier is a deadlock."""

import numpy as np
import pytest
from hopper_text import ELECT, addr, do, groups
from kernel_text import alloc, program

from tilelang.errors import TileLangError
from tilelang.simulator import run_tile

rng = np.random.default_rng(5)
M, N, K, BM, BN, BK = 64, 48, 160, 32, 16, 32
A, B = rng.integers(-4, 5, (M, K)).astype(np.float16), rng.integers(-4, 5, (K, N)).astype(np.float16)
TENSORS = {"A": ((M, K), "float16"), "B": ((K, N), "float16"), "C": ((M, N), "float32")}
GEMM = "T.gemm(a=T.region({a}, {pad}32, 32), b=T.region({b}, {pad}32, 16), c=T.region(F[0, 0], 32, 16), " \
    'transpose_a=False, transpose_b=False, policy=T.py(0), clear_accum=False)'


def barriers(name: str, counts: list[int]) -> str:
    return alloc(name, (len(counts),), "uint64", "shared.barrier")[:-1] + \
        f", arrive={tuple(counts)})"


def plain() -> object:
    return program(TENSORS, f"""
        {alloc("As", (BM, BK), "float16", "shared.dyn")}
        {alloc("Bs", (BK, BN), "float16", "shared.dyn")}
        {alloc("F", (BM, BN), "float32", "local.fragment")}
        T.fill(dst=T.region(F[0, 0], 32, 16), value=0.0)
        for k in T.serial({K // BK}):
            T.copy(src=T.region(A[by * 32, k * 32], 32, 32), dst=T.region(As[0, 0], 32, 32))
            T.copy(src=T.region(B[k * 32, bx * 16], 32, 16), dst=T.region(Bs[0, 0], 32, 16))
            {GEMM.format(a="As[0, 0]", b="Bs[0, 0]", pad="")}
        T.copy(src=T.region(F[0, 0], 32, 16), dst=T.region(C[by * 32, bx * 16], 32, 16))
    """, grid=f"{N // BN}, {M // BM}", threads=256)


def specialised(stages: int = 3, *, elect: bool = False, full: str = "(k // {s}) % 2", empty: str = "(k // {s} + 1) % 2",
                release: bool = True, arrivals: int = 128, off: int = 0, steps: int = K // BK,
                common: bool = False) -> object:
    """Worked program 10: group 1 fills a ring, group 0 multiplies.

    elect: one thread announces the bytes.  common: the accumulator is cleared and stored by all.
    """
    s, nbytes = stages, (BM * BK + BK * BN) * 2 + off
    how = "" if elect else "expect=True, "
    full_counts = [1 if elect else arrivals] * s
    plan = f"barrier=(full, k % {s}), {how}tma=True"
    copies = f"""T.copy(src=T.region(A[by * 32, k * 32], 32, 32), dst=T.region(As[k % {s}, 0, 0], 1, 32, 32), {plan})
T.copy(src=T.region(B[k * 32, bx * 16], 32, 16), dst=T.region(Bs[k % {s}, 0, 0], 1, 32, 16), {plan})"""
    if elect:
        fill = [f"if ((tx >= 128) and (tx < 160)) and {ELECT}:",
                f"    {do('mbarrier_arrive_expect_tx', addr(f'full[k % {s}]'), nbytes)}",
                *("    " + line for line in copies.splitlines())]
    else:
        fill = [*copies.splitlines(), do("mbarrier_arrive", addr(f"full[k % {s}]"))]
    clear = "T.fill(dst=T.region(F[0, 0], 32, 16), value=0.0)"
    store = "T.copy(src=T.region(F[0, 0], 32, 16), dst=T.region(C[by * 32, bx * 16], 32, 16))"
    produce = "\n            ".join(fill).replace("\n            ", "\n        ")
    return program(TENSORS, f"""
{alloc("As", (s, BM, BK), "float16", "shared.dyn")}
{alloc("Bs", (s, BK, BN), "float16", "shared.dyn")}
{alloc("F", (BM, BN), "float32", "local.fragment")}
{barriers("full", full_counts)}
{barriers("empty", [128] * s)}
{clear if common else "pass"}
if {groups(1)}:
    for k in T.serial({steps}):
        {do("mbarrier_wait", addr(f"empty[k % {s}]"), empty.format(s=s))}
        {produce}
if {groups(0)}:
    {"pass" if common else clear}
    for k in T.serial({K // BK}):
        {do("mbarrier_wait", addr(f"full[k % {s}]"), full.format(s=s))}
        {GEMM.format(a=f"As[k % {s}, 0, 0]", b=f"Bs[k % {s}, 0, 0]", pad="1, ")}
        {do("mbarrier_arrive", addr(f"empty[k % {s}]")) if release else "pass"}
    {"pass" if common else store}
{store if common else "pass"}
""", grid=f"{N // BN}, {M // BM}", threads=256)


ARGS = [A, B, np.zeros((M, N), np.float32)]


@pytest.mark.parametrize("options", [{}, {"stages": 1}, {"stages": 8}, {"elect": True}, {"common": True}])
def test_a_specialised_program_equals_the_plain_one(options):
    want = run_tile(plain(), ARGS)["C"]
    assert np.array_equal(want, A.astype(np.float32) @ B.astype(np.float32))
    assert np.array_equal(run_tile(specialised(**options), ARGS)["C"], want)


@pytest.mark.parametrize("fault, kind, texts", [
    ({"release": False}, "sim-barrier", ("warp group 1 waits for parity 0 of empty[0] in phase 0: 128 of 128",)),
    ({"empty": "(k // {s}) % 2"}, "sim-barrier", ("empty[0] in phase 0",)),
    ({"arrivals": 129}, "sim-barrier", ("full[0] in phase 0: 1 of 129 arrivals pending",)),
    ({"arrivals": 64}, "sim-mbarrier", ("128 threads arrive in phase 0, which needs 64",)),
    ({"elect": True, "off": 2}, "sim-barrier", ("2 bytes still expected",)),
    ({"steps": 4}, "sim-barrier", ("warp group 0 waits for parity 1 of full[1]",)),
    ({"full": "(k // {s} + 1) % 2"}, "sim-uninitialized", ("As",)),
])
def test_planted_fault_is_found(fault, kind, texts):
    with pytest.raises(TileLangError) as e:
        run_tile(specialised(**fault), ARGS)
    assert e.value.kind == kind and all(t in str(e.value) for t in texts), (e.value.kind, str(e.value))
    assert e.value.hint


def test_roles_meet_at_barriers_and_share_what_all_of_them_declare():
    f = program({"A": ((2, 8), "int32"), "C": ((2, 8), "int32")}, f"""
        {alloc("S", (8,), "int32", "shared.dyn")}
        {alloc("R", (8,), "int32", "shared.dyn")}
        for k in T.serial(2):
            if {groups(1)}:
                T.copy(src=T.region(A[k, 0], 1, 8), dst=T.region(S[0], 8))
                {do("named_barrier_arrive", 1, 256)}
            else:
                {do("named_barrier", 1, 256)}
                for (i,) in T.Parallel(8):
                    R[i] = S[i] * 2
            {do("sync_threads")}
            T.copy(src=T.region(R[0], 8), dst=T.region(C[k, 0], 1, 8))
    """, threads=256)
    a = rng.integers(0, 99, (2, 8)).astype(np.int32)
    assert np.array_equal(run_tile(f, [a, np.zeros_like(a)])["C"], a * 2)


def test_a_wait_that_nothing_satisfies_is_refused_in_a_program_without_roles():
    f = program({"A": ((1,), "int32")}, f"""
        {barriers("bar", [128])}
        {do("mbarrier_wait", addr("bar[0]"), 1)}
        {do("mbarrier_arrive", addr("bar[0]"))}
        {do("mbarrier_wait", addr("bar[0]"), 0)}
        {do("mbarrier_wait", addr("bar[0]"), 1)}
    """, threads=128)
    with pytest.raises(TileLangError) as e:
        run_tile(f, [np.zeros(1, np.int32)])
    assert e.value.kind == "sim-barrier" and "parity 1 of bar[0] in phase 1" in str(e.value)


def test_an_element_of_a_fragment_is_updated_once_for_all_roles():
    f = program({"A": ((3,), "int32"), "C": ((1,), "int32")}, f"""
        {alloc("R", (1,), "int32", "local.fragment")}
        {alloc("S", (8,), "int32", "shared.dyn")}
        R[0] = 0
        for k in T.serial(3):
            R[0] = R[0] + A[k]
            for (i,) in T.Parallel(8):
                S[i] = A[k]
        if {groups(1)}:
            for (i,) in T.Parallel(1):
                C[i] = R[0]
    """, threads=256)
    a = np.array([1, 2, 3], np.int32)
    assert run_tile(f, [a, np.zeros(1, np.int32)])["C"] == 6
