"""Masks that are applied only where they change something, and products that clear their start."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import attention

import tilelang.language as T
from tilelang.ir import Evaluate, If, Parallel, binary, is_const, logical, parse, to_text, unary, walk
from tilelang.ir.expr import Call
from tilelang.ops import Fill, Gemm
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.legalize.guard_masks import guard_masks
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import legalized, lower

N, STEPS = 32, 4
SM80 = Target({"kind": "cuda", "arch": "sm_80"})


def masked(mask, steps=STEPS, n=N):
    """P = mask applied to A[k], for each k; `mask(P, i, j, k, bx, length)` is the parallel loop's body."""

    @T.prim_func
    def main(A: T.Tensor((steps, n, n), "float32"), B: T.Tensor((2, steps, n, n), "float32"), length: T.int32):
        with T.Kernel(2, threads=128) as bx:
            P = T.alloc_fragment((n, n), "float32")
            for k in T.serial(steps):
                T.copy(A[k, :, :], P)
                for i, j in T.Parallel(n, n):
                    mask(P, i, j, k, bx, length)
                T.copy(P, B[bx, k, :, :])

    return main


@T.macro
def causal(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else(bx * 64 + i >= k * N + j, P[i, j], -1.0)


@T.macro
def named(P, i, j, k, bx, length):
    seen = (k * N + j < length) and (bx * 64 + i >= k * N + j)
    P[i, j] = T.if_then_else(seen, P[i, j], -1.0)


@T.macro
def window(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else((k * N + j > bx * 64 + i - 40) and (k * N + j <= bx * 64 + i + 70), P[i, j], -1.0)


@T.macro
def turned(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else((k * N + j >= length) or (bx * 64 + i < k * N + j), -1.0, P[i, j])


@T.macro
def statement(P, i, j, k, bx, length):
    if k * N + j >= length:
        P[i, j] = -1.0


@T.macro
def scaled(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else(k * N + 2 * j - i < length, P[i, j] * 2.0, -1.0)


@T.macro
def distance(P, i, j, k, bx, length):
    P[i, j] = P[i, j] * (1.0 - T.min(T.abs(T.cast(bx * 64 + i - (k * N + j), "float32")), 33.0) * 0.01)


@T.macro
def signed(P, i, j, k, bx, length):
    P[i, j] = P[i, j] + T.max(T.cast(bx * 64 + i - (k * N + j), "float32"), -1.0)


MASKS = {f.__name__: f for f in (causal, named, window, turned, statement, scaled, distance, signed)}


def guarded(func):
    return guard_masks(legalized(func.func), PassContext(SM80))


def guards(func):
    return [s for s in walk(func.body) if isinstance(s, If) and any(isinstance(x, Call) and x.op == "keep_branch"
                                                                  for x in walk(s))]


@pytest.mark.parametrize("length", [0, 1, 32, 63, 100, 128, 200])
@pytest.mark.parametrize("name", MASKS)
def test_same_values(name, length):
    func = masked(MASKS[name])
    new = guarded(func)
    assert len(guards(new)) == {"named": 2, "window": 2, "turned": 2}.get(name, 1) and parse(to_text(new)) == new
    rng = np.random.default_rng(0)
    a = rng.standard_normal((STEPS, N, N)).astype(np.float32)
    b = np.zeros((2, STEPS, N, N), np.float32)
    want = run_tile(func, [a, b, length])["B"]
    assert np.array_equal(run_tile(new, [a, b, length])["B"], want)
    if length in (63, 128):
        assert np.array_equal(run_device(lower(func.func, SM80), {"A": a, "B": b, "length": length}).outputs["B"], want)


def test_the_test_is_the_tightest_point():
    (guard,) = guards(guarded(masked(causal)))
    assert str(guard.cond) == "((bx * 64) < ((k * 32) + 31))"


def test_what_is_proven_is_not_tested():
    @T.macro
    def inside(P, i, j, k, bx, length):
        P[i, j] = T.if_then_else(k * N + j < STEPS * N, P[i, j], -1.0)

    new = guarded(masked(inside))
    assert not guards(new) and not any(isinstance(s, Parallel) for s in walk(new.body))


@T.macro
def from_memory(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else(P[i, j] < length, P[i, j], -1.0)


@T.macro
def bent(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else(i * j < length, P[i, j], -1.0)


@T.macro
def periodic(P, i, j, k, bx, length):
    P[i, j] = T.if_then_else((k + j) % 3 < length, P[i, j], -1.0)


@pytest.mark.parametrize("mask", [from_memory, bent, periodic], ids=["from_memory", "bent", "periodic"])
def test_other_masks_stay(mask):
    func = masked(mask)
    assert guarded(func) == legalized(func.func)


def test_each_condition_has_its_own_test():
    """The end of the keys is proven, the period of the mask cannot be told: both are left out of the diagonal's test."""
    @T.macro
    def mixed(P, i, j, k, bx, length):
        seen = (k * N + j < STEPS * N) and ((k + j) % 3 != 1) and (bx * 64 + i >= k * N + j)
        P[i, j] = T.if_then_else(seen, P[i, j], -1.0)

    func = masked(mixed)
    new = guarded(func)
    (guard,) = guards(new)
    assert str(guard.cond) == "((bx * 64) < ((k * 32) + 31))"
    loops = [s for s in walk(new.body) if isinstance(s, Parallel)]
    assert len(loops) == 2 and "floormod" in repr(loops[0]) or "%" in str(loops[0])
    a = np.random.default_rng(0).standard_normal((STEPS, N, N)).astype(np.float32)
    b = np.zeros((2, STEPS, N, N), np.float32)
    assert np.array_equal(run_tile(new, [a, b, 1])["B"], run_tile(func, [a, b, 1])["B"])


def test_small_tiles_and_masks_outside_loops_stay():
    small = masked(causal, n=16)
    assert guarded(small) == legalized(small.func)

    @T.prim_func
    def once(A: T.Tensor((N, N), "float32"), length: T.int32):
        with T.Kernel(1, threads=128):
            P = T.alloc_fragment((N, N), "float32")
            T.copy(A, P)
            for i, j in T.Parallel(N, N):
                P[i, j] = T.if_then_else(j < length, P[i, j], 0.0)
            T.copy(P, A)

    assert guarded(once) == legalized(once.func)


def product(start, clear=False):
    @T.prim_func
    def main(A: T.Tensor((4 * N, N), "float16"), B: T.Tensor((N, N), "float16"), C: T.Tensor((4 * N, N), "float32")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((N, N), "float16"), T.alloc_shared((N, N), "float16")
            P = T.alloc_fragment((N, N), "float32")
            T.copy(B, Bs)
            for k in T.serial(4):
                start(P, k)
                T.copy(A[k * N, 0], As)
                T.gemm(As, Bs, P, clear_accum=clear)
                T.copy(P, C[k * N, 0])

    return main


@T.macro
def cleared(P, k):
    T.clear(P)


@T.macro
def zeroed(P, k):
    for i, j in T.Parallel(N, N):
        P[i, j] = 0.0


@T.macro
def mask_or_zero(P, k):
    for i, j in T.Parallel(N, N):
        P[i, j] = T.if_then_else(k * N + j < 70, 0.0, -T.infinity("float32"))


@T.macro
def ones(P, k):
    T.fill(P, 1.0)


@T.macro
def minus_zero(P, k):
    T.fill(P, -0.0)


@pytest.mark.spec("T.infinity")
@pytest.mark.parametrize("start, clears", [
    (cleared, "T.bool(True)"), (zeroed, "T.bool(True)"), (mask_or_zero, "(((k * 32) + 31) < 70)"), (ones, None),
    (minus_zero, None)], ids=["cleared", "zeroed", "mask_or_zero", "ones", "minus_zero"])
def test_products_clear_their_start(start, clears):
    func = product(start)
    new = guarded(func)
    (gemm,) = [s for s in walk(new.body) if isinstance(s, Gemm)]
    if clears is None:
        assert new == legalized(func.func)
    else:
        assert str(gemm.clear_accum) == clears and not any(isinstance(s, Fill) for s in walk(new.body))
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (4 * N, N)).astype(np.float16), rng.integers(-3, 4, (N, N)).astype(np.float16)
    c = np.zeros((4 * N, N), np.float32)
    want = run_tile(func, [a, b, c])["C"]
    assert np.array_equal(run_tile(new, [a, b, c])["C"], want)
    for arch in ("sm_80", "sm_90a"):
        program = lower(func.func, Target({"kind": "cuda", "arch": arch}), {"tl.enable_hopper": True})
        assert np.array_equal(run_device(program, {"A": a, "B": b, "C": c}).outputs["C"], want)


def test_a_tile_that_is_used_before_its_product_is_filled():
    @T.prim_func
    def main(A: T.Tensor((N, N), "float16"), C: T.Tensor((2, N, N), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((N, N), "float16")
            P = T.alloc_fragment((N, N), "float32")
            T.copy(A, As)
            T.clear(P)
            T.copy(P, C[0, :, :])
            T.gemm(As, As, P)
            T.copy(P, C[1, :, :])

    assert guarded(main) == legalized(main.func)


def test_statements_that_a_user_counts_stay():
    @T.prim_func
    def main(A: T.Tensor((4 * N, N), "float16"), C: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((N, N), "float16")
            P, Q = T.alloc_fragment((N, N), "float32"), T.alloc_fragment((N, N), "float32")
            T.clear(Q)
            for k in T.Pipelined(4, order=[0, 1, 2, 3, 4], stage=[0, 1, 1, 1, 1]):
                T.copy(A[k * N, 0], As)
                T.clear(P)
                T.gemm(As, As, P)
                for i, j in T.Parallel(N, N):
                    P[i, j] = T.if_then_else((k * N + j < 70) and (i >= j), P[i, j], -1.0)
                for i, j in T.Parallel(N, N):
                    Q[i, j] += P[i, j]
            T.copy(Q, C)

    assert guarded(main) == legalized(main.func)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_masks(data):
    """Comparisons, joined, of affine terms with random coefficients."""
    number = st.integers(-3, 3)

    def comparison():
        a, b, c, d = (data.draw(number) for _ in range(4))
        e = data.draw(st.integers(-150, 150))
        op = data.draw(st.sampled_from(["lt", "le", "gt", "ge"]))
        return lambda i, j, k, bx: binary(op, i * a + j * b, k * (c * N) + bx * (d * 16) + e)

    first, second, third = comparison(), comparison(), comparison()
    join, turn = data.draw(st.sampled_from(["and", "or"])), data.draw(st.booleans())
    invert = data.draw(st.booleans())

    def seen(*at):
        both = logical(join, first(*at), second(*at))
        return logical("or" if join == "and" else "and", unary("not", both) if invert else both, third(*at))

    @T.macro
    def mask(P, i, j, k, bx, length):
        if turn:
            P[i, j] = T.if_then_else(seen(i, j, k, bx), -1.0, P[i, j])
        else:
            P[i, j] = T.if_then_else(seen(i, j, k, bx), P[i, j], -1.0)

    func = masked(mask, steps=3)
    new = guarded(func)
    a = np.random.default_rng(0).standard_normal((3, N, N)).astype(np.float32)
    b = np.zeros((2, 3, N, N), np.float32)
    assert np.array_equal(run_tile(new, [a, b, 0])["B"], run_tile(func, [a, b, 0])["B"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_start_that_is_asked_for_before_its_condition_changes(arch):
    """The product does not ask again whether its tile was cleared, behind what changes the answer."""

    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            F = T.alloc_fragment((64, 64), "float32")
            turns = T.alloc_var("int32", init=0)
            T.copy(A, S)
            T.fill(F, 5)
            if turns == 0:
                for i, j in T.Parallel(64, 64):
                    F[i, j] = 0
            else:
                for i, j in T.Parallel(64, 64):
                    F[i, j] = F[i, j] * 2
            turns = turns + 1
            T.gemm(S, S, F, transpose_B=True)
            T.copy(F, C)

    a = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float16)
    got = run_device(lower(main.func, Target({"kind": "cuda", "arch": arch})), [a, np.zeros((64, 64), np.float32)]).outputs["C"]
    assert np.array_equal(got, a.astype(np.float32) @ a.T.astype(np.float32))


def test_attention_masks_its_last_blocks_only():
    new = guarded(attention(1, 1, 512, 64, causal=True))
    (guard,) = guards(new)
    products = [s for s in walk(new.body) if isinstance(s, Gemm)]
    assert not is_const(products[0].clear_accum, False) and any(
        isinstance(s, Evaluate) and s.call.op == "keep_branch" for s in walk(guard.then))
