"""Tensors and per-thread arrays that a kernel indexes through a layout."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.ir.parser import parse
from tilelang.ir import to_text
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.laid_out_arrays import laid_out_arrays
from tilelang.transform.legalize.legalize import legalize

SM80, SM90A = ({"kind": "cuda", "arch": arch} for arch in ("sm_80", "sm_90a"))
EXECUTIONS = [(SM90A, "simulator"), (SM80, "simulator"), (SM90A, "tile"), ("cpu", None)]


def in_tiles(*at):
    """Tiles of 8 x 8, the even columns of a tile before the odd ones: the lanes of an MMA accumulator side by side."""
    *lead, i, j = at
    return *lead, i // 8, j // 8, j % 2, i % 8 * 4 + j % 8 // 2


def by_columns(i, j):
    return j, i


def stored(x, layout):
    """The storage of x under a layout, in the shape of x."""
    at = layout(*np.indices(x.shape))
    out = np.empty_like(x)
    out.ravel()[np.ravel_multi_index(at, [int(p.max()) + 1 for p in at])] = x
    return out


def agrees(prim, args, want, target, backend):
    got = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    tilelang.compile(prim, target=target, execution_backend=backend)(*got)
    for k, expected in want.items():
        np.testing.assert_array_equal(got[k], expected)


def written(form, layout):
    @T.prim_func
    def main(X: T.Tensor((128, 64), "float32"), Q: T.Tensor((128, 64), "float32"), O: T.Tensor((128, 64), "float32")):
        with T.Kernel(2, threads=128) as b:
            T.annotate_layout({Q: T.Layout(Q.shape, layout)})
            x = T.alloc_fragment((64, 64), "float32")
            T.copy(X[b * 64:(b + 1) * 64, :], x)
            if form == "atomic elements":
                for i, j in T.Parallel(64, 64):
                    T.atomic_add(Q[b * 64 + i, j], x[i, j])
            elif form == "atomic tile":
                T.atomic_add(Q[b * 64:(b + 1) * 64, :], x)
            elif form == "copy":
                T.copy(x, Q[b * 64:(b + 1) * 64, :])
            elif form == "elements":
                for i, j in T.Parallel(64, 64):
                    Q[b * 64 + i, j] = x[i, j]
            else:
                T.fill(Q[b * 64:(b + 1) * 64, :], 3.0)
        with T.Kernel(2, threads=128) as b:
            T.annotate_layout({Q: layout})
            T.copy(Q[b * 64:(b + 1) * 64, :], O[b * 64:(b + 1) * 64, :])

    return main


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("layout", [in_tiles, by_columns])
@pytest.mark.parametrize("form", ["atomic elements", "atomic tile", "copy", "elements", "fill"])
def test_a_tensor_with_a_layout_was_refused(form, layout, target, backend):
    x = np.random.default_rng(0).random((128, 64), np.float32)
    want = x if form != "fill" else np.full_like(x, 3)
    zeros = np.zeros_like(x)
    agrees(written(form, layout), [x, zeros, zeros], {1: stored(want, layout), 2: want}, target, backend)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
def test_tiles_that_reach_over_a_tensor_with_a_layout_touch_no_other_element(target, backend):
    @T.prim_func
    def main(X: T.Tensor((104, 72), "float16"), Q: T.Tensor((104, 72), "float16"), O: T.Tensor((128, 128), "float16")):
        with T.Kernel(2, 2, threads=128) as (bx, by):
            T.annotate_layout({X: in_tiles, Q: by_columns})
            T.annotate_safe_value({X: 7})
            s = T.alloc_shared((64, 64), "float16")
            x = T.alloc_fragment((64, 64), "float16")
            T.copy(X[by * 64, bx * 64], s)
            T.copy(s, x)
            T.copy(x, Q[by * 64, bx * 64])
            T.copy(s, O[by * 64:by * 64 + 64, bx * 64:bx * 64 + 64])

    x = np.random.default_rng(0).random((104, 72)).astype(np.float16)
    seen = np.full((128, 128), 7, np.float16)
    seen[:104, :72] = x
    agrees(main, [stored(x, in_tiles), np.zeros_like(x), np.zeros_like(seen)], {1: stored(x, by_columns), 2: seen}, target,
           backend)


def drawn_layout(rng):
    """(shape, layout): a random order of the digits of a matrix, with an XOR between two of the row's and column's."""
    sizes = [[int(n) for n in rng.choice([2, 3, 4, 8], rng.integers(1, 4))] for _ in range(2)]
    digits = [(d, k) for d in range(2) for k in range(len(sizes[d]))]
    order = [digits[k] for k in rng.permutation(len(digits))]
    low = sizes[0][-1] == sizes[1][-1] and sizes[0][-1] in (2, 4, 8) and rng.random() < 0.7

    def layout(i, j):
        values = {}
        for d, at in ((0, i), (1, j)):
            for k in reversed(range(len(sizes[d]))):
                values[d, k], at = at % sizes[d][k], at // sizes[d][k]
        if low:
            values[1, len(sizes[1]) - 1] = values[1, len(sizes[1]) - 1] ^ values[0, len(sizes[0]) - 1]
        return [values[at] for at in order]

    return (int(np.prod(sizes[0])), int(np.prod(sizes[1]))), layout


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_of_tensors(seed, target, backend):
    rng = np.random.default_rng(seed)
    (m, n), into = drawn_layout(rng)
    shape, out_of = drawn_layout(rng)
    while shape != (m, n):
        shape, out_of = drawn_layout(rng)
    rows, columns = int(rng.integers(1, m + 1)), int(rng.integers(1, n + 1))
    dtype, way = str(rng.choice(["float16", "float32", "int8"])), rng.choice(["shared", "fragment", "elements"])

    @T.prim_func
    def main(A: T.Tensor((m, n), dtype), B: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, rows), T.ceildiv(n, columns), threads=64) as (by, bx):
            T.annotate_layout({A: out_of, B: into})
            s = T.alloc_shared((rows, columns), dtype)
            f = T.alloc_fragment((rows, columns), dtype)
            if way == "elements":
                for i, j in T.Parallel(rows, columns):
                    B[by * rows + i, bx * columns + j] = A[by * rows + i, bx * columns + j]
            elif way == "shared":
                T.copy(A[by * rows, bx * columns], s)
                T.copy(s, B[by * rows, bx * columns])
            else:
                T.copy(A[by * rows, bx * columns], f)
                T.copy(f, B[by * rows, bx * columns])

    a = rng.integers(-99, 99, (m, n)).astype(dtype)
    agrees(main, [stored(a, out_of), np.zeros_like(a)], {1: stored(a, into)}, target, backend)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
def test_atomics_with_results_on_a_tensor_with_a_layout(target, backend):
    @T.prim_func
    def main(Q: T.Tensor((16, 16), "int32"), P: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            T.annotate_layout({Q: in_tiles})
            t = T.get_thread_binding()
            P[t] = T.atomic_add(Q[t // 4, t % 4 + n], t + 1, return_prev=True)
            T.atomic_store(Q[t // 4, -16], T.atomic_load(Q[t // 4, 1]))

    q = np.random.default_rng(0).integers(0, 9, (16, 16)).astype(np.int32)
    t = np.arange(64)
    after, old = q.copy(), np.zeros(64, np.int32)
    there = t % 4 + 14 < 16
    old[there] = q[t // 4, np.minimum(t % 4 + 14, 15)][there]
    after[(t // 4)[there], (t % 4 + 14)[there]] += t[there].astype(np.int32) + 1
    after[:, 0] = q[:, 1]
    agrees(main, [stored(q, in_tiles), np.zeros(64, np.int32), 14], {0: stored(after, in_tiles), 1: old}, target, backend)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
def test_four_dimensions_and_a_pipeline_read_through_a_layout(target, backend):
    shape = (2, 64, 2, 32)  # batch, rows, heads, columns

    def layout(b, i, h, j):
        return in_tiles(b, h, i, j)

    @T.prim_func
    def main(A: T.Tensor(shape, "float16"), O: T.Tensor(shape, "float32")):
        with T.Kernel(2, 2, threads=64) as (h, b):
            T.annotate_layout({A: T.Layout(A.shape, layout)})
            s = T.alloc_shared((16, 32), "float16")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[b, k * 16:(k + 1) * 16, h, :], s)
                for i, j in T.Parallel(16, 32):
                    O[b, k * 16 + i, h, j] = s[i, j] * 2

    a = np.random.default_rng(0).random(shape).astype(np.float16)
    agrees(main, [stored(a, layout), np.zeros(shape, np.float32)], {1: a.astype(np.float32) * 2}, target, backend)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
def test_per_thread_arrays_may_have_layouts(target, backend):
    @T.prim_func
    def main(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((32, 8), "float32"), O: T.Tensor((4, 8), "float32"),
             P: T.Tensor((32, 8), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_local((4, 8), "float32")
            d = T.alloc_local((32, 8), "float32")
            T.annotate_layout({a: by_columns, d: T.Fragment((32, 8), forward_thread_fn=lambda i, j: i)})
            T.copy(X, a)
            for i, j in T.grid(4, 8):
                a[i, j] = a[i, j] * 2
            T.copy(a, O)
            T.copy(Y, d)
            for i, j in T.Parallel(32, 8):
                d[i, j] = d[i, j] + 1
            T.copy(d, P)

    x, y = np.random.default_rng(0).random((4, 8), np.float32), np.random.default_rng(1).random((32, 8), np.float32)
    agrees(main, [x, y, np.zeros_like(x), np.zeros_like(y)], {2: x * 2, 3: y + 1}, target, backend)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("layout", [
    T.Fragment((4, 8), forward_thread_fn=lambda i, j: 0), T.Fragment((4, 8), lambda i, j: (0, j * 4 + i)),
    T.Fragment((4, 8), lambda i, j, rep: (rep, i * 8 + j), replicate=32)])
def test_a_fragment_of_one_thread_orders_its_own_array(layout, target, backend):
    @T.prim_func
    def main(X: T.Tensor((32, 4, 8), "float32"), O: T.Tensor((32, 4, 8), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            own = T.alloc_local((4, 8), "float32")
            T.annotate_layout({own: layout})
            for i in T.serial(4):
                for j in T.vectorized(8):
                    own[i, j] = X[t, i, j]
            for i, j in T.grid(4, 8):
                O[t, i, j] = own[3 - i, j] + t

    x = np.random.default_rng(0).random((32, 4, 8), np.float32)
    agrees(main, [x, np.zeros_like(x)], {1: x[:, ::-1] + np.arange(32, dtype=np.float32)[:, None, None]}, target, backend)


def test_layouts_of_tensors_leave_plain_loops_and_parse_back():
    context = PassContext(None)
    func = legalize(written("copy", in_tiles).func, context)
    assert parse(to_text(func)) == func
    out = laid_out_arrays(func, context)
    assert not any(x.plan.layouts for x in walk(out.body) if hasattr(x, "grid"))
    assert run_passes(out, (laid_out_arrays,), context) is out


def test_a_large_layout_is_checked_without_its_table():
    layout = T.Layout((64, 32, 8192, 128), lambda b, h, i, j: in_tiles(b, h, i, j))
    assert layout.output_shape == (64, 32, 1024, 16, 2, 32) and "_tables" not in vars(layout)
    with pytest.raises(ValueError, match="layout-not-injective"):
        T.Layout((2048, 1024), lambda i, j: i * 1023 + j)


@pytest.mark.parametrize("use, why", [
    ("tma", "an asynchronous T.copy moves rows of it"), ("view", "it is also seen as `v`"),
    ("add", "an asynchronous T.atomic moves rows of it"), ("vector", "a vector of it is accessed")])
def test_uses_that_need_rows_in_order_are_refused(use, why):
    @T.prim_func
    def main(Q: T.Tensor((16, 64), "float32"), X: T.Tensor((16, 64), "float32")):
        with T.Kernel(1, threads=128):
            T.annotate_layout({Q: by_columns})
            s = T.alloc_shared((16, 64), "float32")
            T.copy(X, s)
            if use == "tma":
                T.tma_copy(s, Q)
            elif use == "add":
                T.atomic_add(Q, s, use_tma=True)
            elif use == "vector":
                X[0, T.Ramp(0, 1, 4)] = Q[0, T.Ramp(0, 1, 4)]
            else:
                v = T.view(Q, (1024,), "float32")
                X[0, 0] = v[3] + Q[0, 0]

    with pytest.raises(TileLangError, match=f"layout-use.*{why}"):
        tilelang.compile(main, target=SM90A)


@pytest.mark.parametrize("layout, why", [
    (lambda i, j: i * 17 + j, "271 places for 256 elements"), (T.Fragment((16, 16), lambda i, j: (i, j)), "T.Fragment")])
def test_a_layout_of_a_tensor_permutes_its_storage(layout, why):
    with pytest.raises(ValueError, match=f"layout-annotation.*{why}"):
        @T.prim_func
        def main(Q: T.Tensor((16, 16), "float32")):
            with T.Kernel(1, threads=32):
                T.annotate_layout({Q: layout})
                T.clear(Q)


def any_rows(layout, form="fragment"):
    """O = Q = 2 X, Q through a layout, for any numbers of rows and columns."""
    rows, columns = T.dynamic("rows columns")

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float16"), Q: T.Tensor((rows, columns), "float16"),
             O: T.Tensor((rows, columns), "float16")):
        with T.Kernel(T.ceildiv(columns, 32), T.ceildiv(rows, 64), threads=64) as (bx, by):
            T.annotate_layout({Q: T.Layout(Q.shape, layout)})
            if form == "elements":
                for i, j in T.Parallel(64, 32):
                    if by * 64 + i < rows and bx * 32 + j < columns:
                        Q[by * 64 + i, bx * 32 + j] = X[by * 64 + i, bx * 32 + j] * 2
            elif form == "atomic":
                for i, j in T.Parallel(64, 32):
                    if by * 64 + i < rows and bx * 32 + j < columns:
                        T.atomic_add(Q[by * 64 + i, bx * 32 + j], X[by * 64 + i, bx * 32 + j] * 2)
            else:
                x = T.alloc_fragment((64, 32), "float16")
                T.copy(X[by * 64, bx * 32], x)
                for i, j in T.Parallel(64, 32):
                    x[i, j] = x[i, j] * 2
                T.copy(x, Q[by * 64, bx * 32])
        with T.Kernel(T.ceildiv(columns, 32), T.ceildiv(rows, 64), threads=64) as (bx, by):
            T.annotate_layout({Q: layout})
            s = T.alloc_shared((64, 32), "float16")
            for c in T.Pipelined(1, num_stages=2):
                T.copy(Q[by * 64, (bx + c) * 32], s)
                T.copy(s, O[by * 64, (bx + c) * 32])

    return main


def mixed(i, j):
    return j // 4, i // 6, i % 6 * 4 + (j ^ i % 2) % 4


@pytest.mark.parametrize("target, backend", EXECUTIONS)
@pytest.mark.parametrize("form", ["fragment", "elements", "atomic"])
@pytest.mark.parametrize("layout, shapes", [
    (by_columns, [(64, 32), (101, 37), (1, 1)]), (in_tiles, [(64, 32), (104, 72), (8, 8)]), (mixed, [(60, 32), (6, 100)]),
    (lambda i, j: (i, j), [(65, 33)]), (lambda i, j: (j // 2, i, j % 2), [(77, 34)])])
def test_a_layout_of_a_tensor_of_any_extents_was_refused(layout, shapes, form, target, backend):
    kernel = tilelang.compile(any_rows(layout, form), target=target, execution_backend=backend)
    for shape in shapes:
        x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float16)
        q, out = np.zeros_like(x), np.zeros_like(x)
        kernel(x, q, out)
        np.testing.assert_array_equal(q, stored(x * 2, layout))
        np.testing.assert_array_equal(out, x * 2)


@pytest.mark.parametrize("target, backend", EXECUTIONS)
def test_the_call_checks_that_extents_are_whole_periods_of_a_layout(target, backend):
    kernel = tilelang.compile(any_rows(in_tiles), target=target, execution_backend=backend)
    x = np.zeros((100, 64), np.float16)
    with pytest.raises(Exception, match=r"\(rows % 8\) == 0"):
        kernel(x, x.copy(), x.copy())


def test_a_layout_of_a_tensor_of_any_extents_parses_back():
    func = legalize(any_rows(in_tiles).func, PassContext(None))
    assert parse(to_text(func)) == func
    out = laid_out_arrays(parse(to_text(func)), PassContext(None))
    assert not any(x.plan.layouts for x in walk(out.body) if hasattr(x, "grid"))


@pytest.mark.parametrize("layout, why", [
    (lambda i, j: i * 3 + j * j, "does not repeat"), (lambda i, j: (i + j, j), "does not repeat"),
    (lambda i, j: (i // 2, j), "not-injective|overlap"), (lambda i, j: (i * 2, j), "overlap|leave places unused"),
    (lambda i, j: (T.min(i, 100), j), "does not repeat")])
def test_a_map_that_does_not_repeat_is_refused_for_any_extents(layout, why):
    with pytest.raises(ValueError, match=why):
        any_rows(layout)
