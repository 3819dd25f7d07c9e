"""T.gemm of tiles that matrix instructions and warps do not divide: any M, N, K from 1, any number of threads."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, run
from hypothesis import given, settings
from hypothesis import strategies as st

import tilelang.language as T
from tilelang.ir import numpy_dtype
from tilelang.ops.gemm.select import GemmPlan, choose_gemm, operand_fragments
from tilelang.ops.plans import GemmSchedule
from tilelang.target import Target
from tilelang.target.mma import MMA_ROWS

Policy = T.GemmWarpPolicy
TYPES = (("float16", "float16", "float32"), ("float16", "float16", "float16"), ("bfloat16", "bfloat16", "float32"),
         ("float32", "float32", "float32"), ("float64", "float64", "float64"), ("int8", "int8", "int32"),
         ("uint8", "uint8", "int32"), ("float8_e4m3", "float8_e5m2", "float32"), ("float8_e5m2", "float8_e5m2", "float16"),
         ("bfloat16", "bfloat16", "float16"))


@dataclass(frozen=True)
class Case:
    """One program.  a_in, b_in: memory the product reads.  clear: how the accumulator starts.  use: who reads it."""

    m: int
    n: int
    k: int
    types: tuple[str, str, str] = TYPES[0]
    threads: int = 128
    ta: bool = False
    tb: bool = False
    policy: Policy = Policy.Square
    a_in: str = "shared"
    b_in: str = "shared"
    clear: str = "before"
    steps: int = 1
    stages: int = 0
    use: str = "copy"


def program(p: Case):
    m, n, k, (at, bt, ct) = p.m, p.n, p.k, p.types
    ta, tb, policy, steps = p.ta, p.tb, p.policy, p.steps
    sa, sb = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    out = {"rows": (m,), "columns": (n,)}.get(p.use, (m, n))
    flag, ones, use = p.clear == "flag", p.clear == "ones", p.use
    a_scope, b_scope = p.a_in == "shared", p.b_in == "shared"

    @T.prim_func
    def f(A: T.Tensor((steps * sa[0], sa[1]), at), B: T.Tensor((steps * sb[0], sb[1]), bt), C: T.Tensor(out, ct)):
        with T.Kernel(1, threads=p.threads):
            As, Bs = T.alloc_shared(sa, at), T.alloc_shared(sb, bt)
            Af, Bf = T.alloc_fragment(sa, at), T.alloc_fragment(sb, bt)
            F = T.alloc_fragment((m, n), ct)
            if ones:
                for i, j in T.Parallel(m, n):
                    F[i, j] = 1
            elif not flag:
                T.clear(F)
            for s in T.Pipelined(steps, num_stages=p.stages):
                T.copy(A[s * sa[0], 0], As)
                T.copy(B[s * sb[0], 0], Bs)
                if not a_scope:
                    T.copy(As, Af)
                if not b_scope:
                    T.copy(Bs, Bf)
                T.gemm(As if a_scope else Af, Bs if b_scope else Bf, F, transpose_A=ta, transpose_B=tb, policy=policy,
                       clear_accum=(s == 0) if flag else False)
            if use == "copy":
                T.copy(F, C)
            elif use == "rows" or use == "columns":
                R = T.alloc_fragment(out, ct)
                T.reduce_sum(F, R, dim=1 if use == "rows" else 0)
                T.copy(R, C)
            elif use == "shared":
                S = T.alloc_shared((m, n), ct)
                T.copy(F, S)
                for i, j in T.Parallel(m, n):
                    C[i, j] = S[i, j] * 2
            else:
                for i, j in T.Parallel(m, n):
                    F[i, j] = F[i, j] + i - j
                for i, j in T.Parallel(m, n):
                    C[i, j] = F[i, j]

    return f


def small(shape, dt, seed):
    """Small integers: every order of summation gives the same."""
    low = 0 if dt.startswith("u") else -2
    return np.random.default_rng(seed).integers(low, 3, shape).astype(numpy_dtype(dt))


def operands(p: Case):
    a = (p.steps * (p.k if p.ta else p.m), p.m if p.ta else p.k)
    b = (p.steps * (p.n if p.tb else p.k), p.k if p.tb else p.n)
    return small(a, p.types[0], 1), small(b, p.types[1], 2)


def expected(p: Case, a, b):
    """From the definition, in float64."""
    total = np.ones((p.m, p.n)) if p.clear == "ones" else np.zeros((p.m, p.n))
    for x, y in zip(np.split(a.astype(float), p.steps), np.split(b.astype(float), p.steps)):
        total += (x.T if p.ta else x) @ (y.T if p.tb else y)
    if p.use == "loop":
        total += np.subtract.outer(np.arange(p.m), np.arange(p.n))
    return {"rows": total.sum(1), "columns": total.sum(0), "shared": 2 * total}.get(p.use, total)


def agrees(p: Case, on):
    a, b = operands(p)
    want = expected(p, a, b)
    for name in on:
        got = run(program(p), a, b, on=name)[2]
        np.testing.assert_array_equal(got.astype(float), want, f"{name}: {p}")


CASES = {
    "12_warps": Case(16, 104, 32, threads=384),
    "ones": Case(1, 1, 1), "row": Case(1, 40, 24, clear="ones", use="columns"), "column": Case(40, 1, 24, use="rows"),
    "idle_warps": Case(16, 16, 16, threads=256, policy=Policy.FullRow),
    "k_tail_of_ldmatrix": Case(32, 32, 40, steps=3, stages=2, clear="flag"),
    "rows_beyond_ldmatrix": Case(24, 40, 32, ta=True, use="loop"), "odd_rows": Case(23, 39, 16, ta=True, tb=True),
    "fragments": Case(20, 12, 10, a_in="fragment", b_in="fragment", ta=True, policy=Policy.FullCol, clear="ones"),
    "registers": Case(40, 24, 32, a_in="fragment", policy=Policy.FullRow, threads=96, steps=2, stages=3),
    "one_warp": Case(33, 17, 9, threads=32, b_in="fragment", use="rows"),
    "odd_threads": Case(20, 12, 10, threads=40), "half_sums": Case(17, 25, 8, TYPES[1], tb=True, use="loop"),
    "bf16": Case(15, 31, 33, TYPES[2], steps=2, stages=4), "fp32": Case(7, 9, 12, TYPES[3], threads=64),
    "fp64": Case(9, 7, 5, TYPES[4], ta=True), "int8": Case(24, 20, 48, TYPES[5], threads=192, use="columns"),
    "uint8": Case(5, 36, 17, TYPES[6], tb=True), "fp8_mixed": Case(31, 8, 33, TYPES[7], a_in="fragment"),
    "fp8_half_sums": Case(16, 16, 32, TYPES[8]), "bf16_half_sums": Case(20, 24, 40, TYPES[9], clear="flag", steps=2, stages=2),
    "bf16_half_moved": Case(17, 25, 8, TYPES[9], threads=40, clear="ones", use="rows"),
    "shared_after": Case(40, 12, 24, use="shared", threads=256),
    "idle_warp_group": Case(64, 32, 16, threads=384, policy=Policy.FullRow),
    "wgmma_rows": Case(80, 40, 24, threads=256, steps=2, stages=2), "few_rows_many_warps": Case(8, 24, 16, threads=512),
}


@pytest.mark.spec("L11:gemm", "T.gemm")
@pytest.mark.parametrize("name", CASES)
def test_any_size_is_computed(name):
    p = CASES[name]
    agrees(p, [on for on in WITH_HOPPER if on != "cpu" or p.types[0] in ("float16", "int8")])


sizes = st.one_of(st.integers(1, 40), st.sampled_from((7, 8, 9, 15, 16, 17, 31, 32, 33)))
flags, scopes = st.booleans(), st.sampled_from(("shared", "fragment"))


@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(st.builds(Case, m=sizes, n=sizes, k=sizes, types=st.sampled_from(TYPES), threads=st.sampled_from((32, 64, 96, 128, 256)),
                 ta=flags, tb=flags, policy=st.sampled_from(tuple(Policy)), a_in=scopes, b_in=scopes,
                 clear=st.sampled_from(("before", "ones", "flag")), steps=st.integers(1, 3), stages=st.integers(0, 4),
                 use=st.sampled_from(("copy", "rows", "columns", "shared", "loop"))))
def test_drawn_sizes_are_computed(p):
    agrees(p, ("simulator", "sm_90a"))


@pytest.mark.slow
@settings(max_examples=400, deadline=None, database=None)
@given(st.builds(Case, m=sizes, n=sizes, k=sizes, types=st.sampled_from(TYPES), threads=st.sampled_from((32, 40, 96, 256, 384)),
                 ta=flags, tb=flags, policy=st.sampled_from(tuple(Policy)), a_in=scopes, b_in=scopes,
                 clear=st.sampled_from(("before", "ones", "flag")), steps=st.integers(1, 3), stages=st.integers(0, 4),
                 use=st.sampled_from(("copy", "rows", "columns", "shared", "loop"))))
def test_drawn_sizes_are_computed_everywhere(p):
    agrees(p, WITH_HOPPER)


@pytest.mark.parametrize("name", ("12_warps", "k_tail_of_ldmatrix", "rows_beyond_ldmatrix", "fragments", "int8", "fp8_mixed",
                                  "fp8_half_sums", "bf16_half_sums", "fp64"))
def test_the_text_is_accepted(name):
    """Also where a float8 product goes by multiply-adds: sm_80 has no instruction for it."""
    for arch in ("sm_80", "sm_90a"):
        text = cuda_text(program(CASES[name]), arch)
        assert "mma_m" in text or name.startswith("fp8") or name == "fp64"


def test_whole_steps_still_go_by_ldmatrix():
    text = cuda_text(program(CASES["k_tail_of_ldmatrix"]), assemble=False)
    assert "ldmatrix" in text and "16n8k8" in text
    assert "ldmatrix" in cuda_text(program(replace(CASES["k_tail_of_ldmatrix"], k=48, m=24)), assemble=False)


@pytest.mark.parametrize("on", ("simulator", "sm_90a"))
def test_what_lies_in_padding_reaches_no_element(on):
    """Registers that stand for no element once held infinity: 0 * inf must not come into a sum."""
    inf = float("inf")

    @T.prim_func
    def f(A: T.Tensor((20, 10), "float16"), B: T.Tensor((10, 12), "float16"), C: T.Tensor((20, 12), "float32")):
        with T.Kernel(1, threads=64):
            F, Af = T.alloc_fragment((20, 12), "float32"), T.alloc_fragment((20, 10), "float16")
            Bf = T.alloc_fragment((10, 12), "float16")
            T.fill(Af, inf)
            T.fill(Bf, inf)
            T.fill(F, inf)
            T.copy(A, Af)
            T.copy(B, Bf)
            for i, j in T.Parallel(20, 12):
                F[i, j] = 1
            T.gemm(Af, Bf, F)
            T.copy(F, C)

    a, b = small((20, 10), "float16", 3), small((10, 12), "float16", 4)
    assert np.array_equal(run(f, a, b, on=on)[2], 1 + a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_half_sums_of_operands_that_half_does_not_hold(on):
    """bfloat16 reaches further than float16: products are formed and added in float32, the sum is rounded once."""
    p = Case(16, 16, 32, TYPES[9])
    a, b = operands(p)
    a, b = (a.astype(np.float32) * 2.0**20).astype(a.dtype), (b.astype(np.float32) * 2.0**-24).astype(b.dtype)
    for threads in (128, 40):  # by the instruction, and by multiply-adds
        assert np.array_equal(run(program(replace(p, threads=threads)), a, b, on=on)[2].astype(float), expected(p, a, b))


@pytest.mark.parametrize("on", WITH_HOPPER)
def test_parts_of_shared_buffers(on):
    """Elements beyond the region belong to the buffer, but not to the product."""
    @T.prim_func
    def f(A: T.Tensor((3, 40, 40), "float16"), B: T.Tensor((3, 40, 40), "float16"), C: T.Tensor((3, 20, 12), "float32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((20, 12), "float32")
            As, Bs = T.alloc_shared((3, 40, 40), "float16"), T.alloc_shared((3, 40, 40), "float16")
            T.copy(A, As)
            T.copy(B, Bs)
            for k in T.serial(3):
                T.clear(F)
                T.gemm(As[k, 8:28, 3:21], Bs[k, 4:22, k * 2:k * 2 + 12], F)
                T.copy(F, C[k, 0:20, 0:12])

    a, b = small((3, 40, 40), "float16", 5), small((3, 40, 40), "float16", 6)
    want = np.stack([a[k, 8:28, 3:21].astype(np.float32) @ b[k, 4:22, 2 * k:2 * k + 12].astype(np.float32) for k in range(3)])
    assert np.array_equal(run(f, a, b, on=on)[2], want)


@pytest.mark.parametrize("on", WITH_HOPPER)
def test_products_of_several_k_and_types_add_to_one_accumulator(on):
    """The first goes by multiply-adds, the others by instructions of their own: one layout serves them all."""
    parts = (("float32", 9), ("float16", 24), ("float16", 7), ("bfloat16", 5), ("float32", 16))

    @T.macro
    def add(A, B, F, k, dt):
        As, Bs = T.alloc_shared((20, k), dt), T.alloc_shared((k, 12), dt)
        for i, j in T.Parallel(20, k):
            As[i, j] = T.cast(A[i, j], dt)
        for i, j in T.Parallel(k, 12):
            Bs[i, j] = T.cast(B[i, j], dt)
        T.gemm(As, Bs, F)

    @T.prim_func
    def f(A: T.Tensor((20, 24), "float32"), B: T.Tensor((24, 12), "float32"), C: T.Tensor((20, 12), "float32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((20, 12), "float32")
            T.clear(F)
            add(A, B, F, parts[0][1], parts[0][0])
            add(A, B, F, parts[1][1], parts[1][0])
            add(A, B, F, parts[2][1], parts[2][0])
            add(A, B, F, parts[3][1], parts[3][0])
            add(A, B, F, parts[4][1], parts[4][0])
            T.copy(F, C)

    a, b = small((20, 24), "float32", 7), small((24, 12), "float32", 8)
    assert np.array_equal(run(f, a, b, on=on)[2], sum(a[:, :k] @ b[:k] for _, k in parts))


@pytest.mark.parametrize("on", ("simulator", "sm_90a"))
def test_a_padded_accumulator_becomes_an_operand(on):
    @T.prim_func
    def f(A: T.Tensor((20, 10), "float16"), B: T.Tensor((10, 12), "float16"), D: T.Tensor((12, 9), "float16"),
          C: T.Tensor((20, 9), "float32"), E: T.Tensor((12, 9), "float32")):
        with T.Kernel(1, threads=96):
            F, H = T.alloc_fragment((20, 12), "float32"), T.alloc_fragment((20, 12), "float16")
            G, G2 = T.alloc_fragment((20, 9), "float32"), T.alloc_fragment((12, 9), "float32")
            As, Bs = T.alloc_shared((20, 10), "float16"), T.alloc_shared((10, 12), "float16")
            Ds, D2 = T.alloc_shared((12, 9), "float16"), T.alloc_shared((20, 9), "float16")
            T.copy(A, As)
            T.copy(B, Bs)
            T.copy(D, Ds)
            T.clear(F)
            T.gemm(As, Bs, F)
            T.copy(F, H)
            T.gemm(H, Ds, G, clear_accum=True)
            T.copy(G, C)
            for i, j in T.Parallel(20, 9):
                D2[i, j] = i - j
            T.gemm(H, D2, G2, transpose_A=True, clear_accum=True)
            T.copy(G2, E)

    a, b, d = small((20, 10), "float16", 1), small((10, 12), "float16", 2), small((12, 9), "float16", 3)
    h = a.astype(np.float32) @ b.astype(np.float32)
    got = run(f, a, b, d, on=on)
    assert np.array_equal(got[3], h @ d.astype(np.float32))
    assert np.array_equal(got[4], h.T @ np.subtract.outer(np.arange(20), np.arange(9)))


@pytest.mark.parametrize("policy", tuple(Policy))
def test_warps_cover_any_accumulator(policy):
    """`cover` needs no more warps than there are, leaves none without a tile, and follows the policy."""
    for warps in (1, 2, 3, 4, 7, 8, 12, 16):
        for m in (1, 16, 17, 40, 64, 130):
            for n in (1, 8, 9, 24, 104, 256):
                i, j = policy.cover(m, n, warps, (16, 8))
                rows, cols = -(-m // (16 * i)) * 16, -(-n // (8 * j)) * 8
                assert i * j <= warps and rows * i >= m > rows * (i - 1) and cols * j >= n > cols * (j - 1)
    assert Policy.FullRow.cover(130, 256, 4, (16, 8))[0] == 3 and Policy.FullCol.cover(130, 255, 4, (16, 8)) == (1, 4)
    assert Policy.Square.cover(16, 104, 12, (16, 8)) == (1, 7) and Policy.Square.even_partition(16, 104, 12, (16, 8)) is None


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (16, 104, 32), (23, 39, 20), (8, 24, 24), (130, 72, 72)])
def test_padded_fragments_hold_every_element_once_a_copy(m, n, k):
    def tile(b, ext):
        buffer = SimpleNamespace(name="x", scope_name="local.fragment")
        return SimpleNamespace(dtype=b, buffer=buffer, extents=ext, is_full=True)

    op = SimpleNamespace(a=tile("float16", (m, k)), b=tile("float16", (k, n)), c=tile("float32", (m, n)), m=m, n=n, k=k,
                         policy=Policy.Square, transpose_a=False, transpose_b=False, plan=GemmSchedule(), span=None)
    plan = choose_gemm(op, Target("sm_80"), 256)
    assert isinstance(plan, GemmPlan) and plan.instruction in MMA_ROWS
    for frag, shape in zip(operand_fragments(op, MMA_ROWS[plan.instruction], plan.warps, 256), ((m, k), (k, n), (m, n))):
        assert frag.shape == shape and frag == frag.cut(shape)
        for owners in frag.owners():
            assert len(np.unique(owners * frag.registers + frag.register_table())) == shape[0] * shape[1]


@pytest.mark.parametrize("clear", ("no", "before", "first"))
@pytest.mark.parametrize("shape", ((240,), (10, 24), (1, 20, 12)), ids=str)
def test_an_accumulator_seen_in_another_shape(shape, clear):
    """The instruction's layout has no form of the other shape: the product moves the accumulator."""
    before, first = clear == "before", clear == "first"

    @T.prim_func
    def f(A: T.Tensor((40, 16), "float16"), B: T.Tensor((16, 12), "float16"), C: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=96):
            F = T.alloc_fragment((20, 12), "float32")
            As, Bs = T.alloc_shared((20, 16), "float16"), T.alloc_shared((16, 12), "float16")
            T.copy(B, Bs)
            if before:
                T.clear(F)
            elif not first:
                for i, j in T.Parallel(20, 12):
                    F[i, j] = i + j
            for k in T.serial(2):
                T.copy(A[k * 20, 0], As)
                T.gemm(As, Bs, F, clear_accum=(k == 0) if first else False)
            T.copy(T.reshape(F, shape), C)

    a, b = small((40, 16), "float16", 1), small((16, 12), "float16", 2)
    want = (a[:20].astype(np.float32) + a[20:]) @ b.astype(np.float32)
    if clear == "no":
        want += np.add.outer(np.arange(20), np.arange(12))
    for on in WITH_HOPPER:
        assert np.array_equal(run(f, a, b, on=on)[2], want.reshape(shape)), on


def test_a_wgmma_accumulator_seen_in_another_shape():
    """wgmma is left to programs whose accumulators have its layout; the report says so."""
    @T.prim_func
    def f(A: T.Tensor((64, 16), "float16"), B: T.Tensor((16, 24), "float16"), C: T.Tensor((12, 128), "float32")):
        with T.Kernel(1, threads=128):
            F = T.alloc_fragment((64, 24), "float32")
            As, Bs = T.alloc_shared((64, 16), "float16"), T.alloc_shared((16, 24), "float16")
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(F)
            T.gemm(As, Bs, F)
            T.copy(T.reshape(F, (12, 128)), C)

    a, b = small((64, 16), "float16", 1), small((16, 24), "float16", 2)
    want = (a.astype(np.float32) @ b.astype(np.float32)).reshape(12, 128)
    for on in ("simulator", "sm_90a"):
        assert np.array_equal(run(f, a, b, on=on)[2], want), on


@pytest.mark.parametrize("dt", ("float32", "float64"))
def test_an_operand_that_is_an_accumulator_too(dt):
    """F is multiplied before it is accumulated into: its layout is the accumulator's, the operand is staged."""
    @T.prim_func
    def f(A: T.Tensor((32, 24), dt), B: T.Tensor((24, 32), dt), C: T.Tensor((2, 32, 24), dt)):
        with T.Kernel(1, threads=128):
            F, G = T.alloc_fragment((32, 24), dt), T.alloc_fragment((32, 32), dt)
            As, Bs = T.alloc_shared((32, 24), dt), T.alloc_shared((24, 32), dt)
            T.copy(A, As)
            T.copy(B, Bs)
            T.copy(As, F)
            T.gemm(F, Bs, G, clear_accum=True)
            T.gemm(G, As, F)
            T.copy(F, C[0, :, :])
            T.gemm(G, F, F)
            T.copy(F, C[1, :, :])

    a, b = small((32, 24), dt, 1), small((24, 32), dt, 2)
    first = a + a @ b @ a
    for on in WITH_HOPPER:
        got = run(f, a, b, on=on)[2]
        assert np.array_equal(got[0], first), on
        assert dt == "float32" or np.array_equal(got[1], first + a @ b @ first), on  # tf32 rounds the large ones


@pytest.mark.parametrize("threads", (32, 128, 256))
@pytest.mark.parametrize("side", ("a", "b"))
@pytest.mark.parametrize("dt, scope", [("float16", "fragment"), ("float32", "fragment"), ("float32", "shared"),
                                       ("float64", "shared"), ("float16", "wide")])
def test_a_product_in_place_reads_what_was_there(dt, scope, side, threads):
    """c += c @ b and c += a @ c; also where the registers of c are in the order of an operand."""
    m = n = 64 if scope == "wide" else 16
    where = T.alloc_shared if scope == "shared" else T.alloc_fragment
    left = side == "a"

    @T.prim_func
    def f(A: T.Tensor((m, n), dt), C: T.Tensor((m, n), dt)):
        with T.Kernel(1, threads=threads):
            As, F = T.alloc_shared((m, n), dt), where((m, n), dt)
            T.copy(A, As)
            T.copy(A, F)
            if left:
                T.gemm(F, As, F, policy=Policy.FullRow)
            else:
                T.gemm(As, F, F, policy=Policy.FullCol)
            T.copy(F, C)

    a = np.clip(small((m, n), dt, 1), -1, 1)
    want = a.astype(np.float64) + a.astype(np.float64) @ a.astype(np.float64)
    for on in WITH_HOPPER:
        assert np.array_equal(run(f, a, on=on)[1].astype(np.float64), want), on


@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("dt, acc, scopes", [("float32", "float32", ("local", "shared", "local")),
                                             ("float16", "float32", ("local", "shared", "fragment")),
                                             ("float16", "float32", ("shared", "local", "fragment")),
                                             ("int8", "int32", ("local", "local", "fragment"))])
def test_operands_in_memory_of_each_thread(dt, acc, scopes):
    """Every thread has all of a tile in `local` memory: an accumulator there is computed by each."""
    make = {"local": T.alloc_local, "shared": T.alloc_shared, "fragment": T.alloc_fragment}
    a_in, b_in, c_in = scopes

    @T.macro
    def move(X, Y, rows, columns, one_by_one):
        if one_by_one:
            for i in T.serial(rows):
                for j in T.serial(columns):
                    Y[i, j] = X[i, j]
        else:
            T.copy(X, Y)

    @T.prim_func
    def f(A: T.Tensor((16, 17), dt), B: T.Tensor((17, 12), dt), C: T.Tensor((16, 12), acc)):
        with T.Kernel(1, threads=32):
            a, b, c = make[a_in]((16, 17), dt), make[b_in]((17, 12), dt), make[c_in]((16, 12), acc)
            move(A, a, 16, 17, a_in == "local")
            move(B, b, 17, 12, b_in == "local")
            T.clear(c)
            T.gemm(a, b, c)
            move(c, C, 16, 12, c_in == "local")

    a, b = small((16, 17), dt, 1), small((17, 12), dt, 2)
    for on in WITH_HOPPER:
        assert np.array_equal(run(f, a, b, on=on)[2], a.astype(float) @ b.astype(float)), on


def part_of_an_accumulator(dt):
    @T.prim_func
    def f(A: T.Tensor((16, 16), dt), B: T.Tensor((16, 16), dt), C: T.Tensor((32, 16), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((16, 16), dt), T.alloc_shared((16, 16), dt)
            c = T.alloc_fragment((32, 16), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c[16:32, :])
            T.copy(c, C)

    return f


@pytest.mark.spec("must:11-accumulator-whole")
def test_part_of_an_accumulator_is_for_multiply_adds_alone():
    a, b = small((16, 16), "float32", 1), small((16, 16), "float32", 2)
    for on in WITH_HOPPER:
        got = run(part_of_an_accumulator("float32"), a, b, on=on)[2]
        assert np.array_equal(got, np.concatenate([np.zeros((16, 16)), a @ b])), on
    for arch in ("sm_80", "sm_90a"):
        with pytest.raises(AssertionError, match="`c` is a part of a fragment .local_buf must be a fragment"):
            cuda_text(part_of_an_accumulator("float16"), arch)


@pytest.mark.parametrize("threads, m, n", [(192, 48, 40), (256, 128, 256)])
def test_products_of_several_policies_add_to_one_accumulator(threads, m, n):
    """The warps are shared out once; warp-group instructions are used where one layout serves all products."""
    @T.prim_func
    def f(A: T.Tensor((m, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((m, 32), "float16"), T.alloc_shared((32, n), "float16")
            c = T.alloc_fragment((m, n), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c, policy=Policy.FullRow)
            T.gemm(a, b, c, policy=Policy.FullCol)
            T.copy(c, C)

    a, b = small((m, 32), "float16", 1), small((32, n), "float16", 2)
    for on in ("simulator", "sm_90a"):
        assert np.array_equal(run(f, a, b, on=on)[2], 2 * a.astype(np.float32) @ b.astype(np.float32)), on
