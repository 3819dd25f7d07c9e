"""Python in a kernel function: what each construct means (one test a row)."""

import logging

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Bind, Break, Continue, For, If, Parallel, While, numpy_dtype, walk
from tilelang.simulator.tile import run_tile


def run(f, *args):
    full = list(args)
    for p in f.func.params[len(full):]:
        b = f.func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    return run_tile(f.func, full)


def nodes(f, kind):
    return [n for n in walk(f.func.body) if isinstance(n, kind)]


def out(f, *args):
    """The result of a kernel with one output `O`."""
    return run(f, *args)["O"].tolist()


@pytest.mark.spec("L2.3:bind-scalar")
def test_scalar_binding_is_immutable_and_named():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as b:
            x = A[b] + 1
            O[b] = x * x

    (x,) = nodes(f, Bind)
    assert x.var.name == "x" and x.var.dtype == "int32"
    assert out(f, np.arange(4, dtype=np.int32)) == [1, 4, 9, 16]


@pytest.mark.spec("L2.3:bind-scalar")
def test_rebinding_warns_and_makes_a_new_variable(caplog):
    with caplog.at_level(logging.WARNING, "tilelang.language"):
        @T.prim_func
        def f(A: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
            with T.Kernel(4, threads=1) as b:
                x = A[b]
                x = x + 1
                x = x * 2
                O[b] = x
    assert out(f, np.arange(4, dtype=np.int32)) == [2, 4, 6, 8]


@pytest.mark.spec("L2.3:bind-scalar")
def test_shape_expressions_before_the_kernel_stay_symbolic():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        half = (n + 1) // 2
        with T.Kernel(half, threads=1) as b:
            O[b] = A[b]

    assert not nodes(f, Bind)


@pytest.mark.spec("L2.3:store-var")
def test_alloc_var_is_read_and_assigned_by_name():
    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1) as _:
            v = T.alloc_var("int32", init=3)
            w = T.alloc_var("int32")
            y = v
            v = v + 4
            v += 1
            w = v * 2
            O[0] = v
            O[1] = y
            O[2] = w

    assert out(f) == [8, 3, 16]


@pytest.mark.spec("L6:alloc_var")
@pytest.mark.parametrize("args, kw, want", [
    (("int32",), {}, 0), (("int32", 1), {}, 1), (("int32", "local.var"), {}, 0), (("int32", 1, "local.var"), {}, 1),
    (("int32", 1), {"scope": "local.var"}, 1), (("int32",), {"init": 1}, 1),
    (("int32",), {"init": 1, "scope": "local.var"}, 1), (("int32",), {"init": 2.75}, 2)])
def test_alloc_var_forms(args, kw, want):
    @T.prim_func
    def f(O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var(*args, **kw)
            O[0] = v

    assert out(f) == [want]


@pytest.mark.spec("L6:alloc_var")
def test_loop_carries_an_alloc_var():
    @T.prim_func
    def f(O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1):
            total = T.alloc_var("int32")
            for i in range(5):
                total += i
            O[0] = total

    assert out(f) == [10]


@pytest.mark.spec("L2.3:if")
def test_static_if_takes_one_branch_at_trace_time():
    def make(flag):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                if flag:
                    x = 1
                else:
                    x = 2
                O[0] = x
        return f

    assert out(make(True)) == [1] and out(make(False)) == [2] and out(make(None)) == [2]
    assert not nodes(make(True), If)


@pytest.mark.spec("L2.3:if")
def test_runtime_if_elif_else():
    @T.prim_func
    def f(O: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=1) as b:
            if b < 2:
                O[b] = 10
            elif b == 3:
                O[b] = 20
            else:
                O[b] = 30

    assert out(f) == [10, 10, 30, 20, 30, 30]


@pytest.mark.spec("L2.3:if")
def test_integer_condition_means_not_zero():
    @T.prim_func
    def f(O: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=1) as b:
            if b % 2:
                O[b] = 1
            O[b] = O[b] + (5 if b % 3 and not b % 2 else 0)

    assert out(f) == [0, 1, 5, 1]


@pytest.mark.spec("L2.3:logical")
def test_and_or_not_and_chained_comparison():
    @T.prim_func
    def f(O: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=1) as b:
            if 1 <= b < 5 and not (b == 3 or b == 2) and True:
                O[b] = 1

    assert out(f) == [0, 1, 0, 0, 1, 0]


@pytest.mark.spec("L2.3:ternary")
def test_ternary_is_a_guarded_select():
    @T.prim_func
    def f(A: T.Tensor((4,), "float32"), O: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=1) as b:
            S = T.alloc_local((2,), "float32")
            S[0] = A[b]
            S[1] = A[b] * 2
            O[b] = S[b] if b < 2 else -1.0

    assert out(f, np.array([1, 2, 3, 4], np.float32)) == [1, 4, -1, -1]


@pytest.mark.spec("L2.3:swap")
def test_swap_evaluates_the_right_side_first():
    @T.prim_func
    def f(A: T.Tensor((2,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            B = T.alloc_local((2,), "int32")
            B[0] = A[0]
            B[1] = A[1]
            B[0], B[1] = B[1], B[0]
            u = T.alloc_var("int32", init=1)
            v = T.alloc_var("int32", init=2)
            u, v = v, u + v
            O[0] = B[0]
            O[1] = B[1]
            (O[2], (O[3],)) = u, (v,)

    assert out(f, np.array([7, 8], np.int32)) == [8, 7, 2, 3]


@pytest.mark.spec("L2.3:swap")
def test_chained_assignment():
    @T.prim_func
    def f(A: T.Tensor((2,), "int32"), O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            x = O[0] = A[0] + 1
            O[1] = O[2] = x

    assert out(f, np.array([7, 8], np.int32)) == [8, 8, 8]


@pytest.mark.spec("L2.3:augmented")
def test_augmented_assignment_of_elements():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            O[0] += 7
            O[0] *= 3
            O[0] //= 2
            O[1] |= 6
            O[1] ^= 2
            O[1] <<= 2

    assert out(f) == [10, 16]


@pytest.mark.spec("L2.3:range", "L8:serial")
@pytest.mark.parametrize("bounds", [(5,), (2, 7), (0, 10, 3), (10, 0, -1), (9, -1, -4), (3, 3), (5, 2)])
def test_range_is_pythons_range(bounds):
    @T.prim_func
    def f(O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            for i in range(*bounds):
                O[n] = i + 100
                n += 1

    want = [i + 100 for i in range(*bounds)]
    assert out(f)[:len(want) + 1] == want + [0]


@pytest.mark.parametrize("start, stop, step", [(0, 10, 3), (10, 0, -1), (10, 0, -3), (4, 4, 2), (0, 5, -1), (7, 1, -2)])
def test_run_time_step(start, stop, step):
    @T.prim_func
    def f(P: T.Tensor((3,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            for i in range(P[0], P[1], P[2]):
                O[n] = i + 100
                n += 1

    want = [i + 100 for i in range(start, stop, step)]
    assert out(f, np.array([start, stop, step], np.int32))[:len(want) + 1] == want + [0]


@pytest.mark.spec("L2.3:range")
def test_bounds_are_evaluated_on_entry():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32", init=4)
            s = T.alloc_var("int32", init=2)
            for _ in range(n):
                n += 1
            for i in range(0, 8, s):
                s = 1
                O[1] += i
            O[0] = n

    assert out(f) == [8, 12]


@pytest.mark.spec("L2.3:while")
def test_while_break_continue():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32")
            total = T.alloc_var("int32")
            while n < 100:
                n += 1
                if n % 2 == 0:
                    continue
                if n > 9:
                    break
                total += n
            O[0] = n
            O[1] = total

    assert out(f) == [11, 25]
    assert [len(nodes(f, k)) for k in (While, Break, Continue)] == [1, 1, 1]


@pytest.mark.spec("L2.3:break-continue")
def test_code_after_break_is_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tilelang.language"):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                for _i in range(3):
                    O[0] += 1
                    break
                    O[0] += 100
    assert "never executed" in caplog.text
    assert out(f) == [1]


@pytest.mark.spec("L2.3:while")
def test_constant_false_while_is_skipped(caplog):
    with caplog.at_level(logging.WARNING, "tilelang.language"):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                while 1 > 2:
                    O[0] = 9
                O[0] += 1
    assert "always false" in caplog.text
    assert out(f) == [1]


@pytest.mark.spec("L2.3:alias-buffer")
def test_aliases_of_buffers_and_regions():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "int32"), O: T.Tensor((4, 8), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((4, 8), "int32")
            same = S
            top = same[0:2, :]
            T.copy(A, S)
            T.fill(top, 5)
            T.copy(same, O)

    a = np.arange(32, dtype=np.int32).reshape(4, 8)
    want = a.copy()
    want[:2] = 5
    assert out(f, a) == want.tolist()


@pytest.mark.spec("L2.3:bind-slice")
def test_a_slice_as_a_value_is_a_vector():
    @T.prim_func
    def f(A: T.Tensor((2, 8), "int32"), O: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=1):
            O[0, 4:8] = A[0, 0:4] * 2 + 1
            v = A[1, 0:4]
            O[1, 0:4] = v

    a = np.arange(16, dtype=np.int32).reshape(2, 8)
    assert out(f, a) == [[0, 0, 0, 0, 1, 3, 5, 7], [8, 9, 10, 11, 0, 0, 0, 0]]


@pytest.mark.spec("L2.3:negative-index")
def test_negative_constants_count_from_the_end():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "int32"), O: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((1, 8), "int32")
            T.copy(A[-1, 0:8], S)
            T.copy(S, O[0:1, :])
            O[-1, -1] = A[-2, -3]
            T.copy(A[-2:-1, :4], O[1:2, :4])

    a = np.arange(32, dtype=np.int32).reshape(4, 8)
    assert out(f, a) == [a[3].tolist(), [16, 17, 18, 19, 0, 0, 0, 21]]


@pytest.mark.spec("L2.3:python")
def test_python_values_helpers_and_comprehensions_run_at_trace_time():
    offsets = [1, 2, 3]

    def helper(x, k):
        return x * k

    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            names = {f"o{k}": v for k, v in enumerate(offsets)}
            bufs = [T.alloc_local((1,), "int32") for _ in range(3)]
            T.fill(bufs[0], names["o0"])
            T.fill(bufs[1], sum(offsets))
            T.fill(bufs[2], (lambda q: q + 1)(helper(2, 5)))
            for i in range(1):
                O[i] = bufs[0][0]
                O[1] = bufs[1][0]
                O[2] = bufs[2][0]

    assert out(f) == [1, 6, 11]


@pytest.mark.spec("L2.3:helper")
def test_tile_op_in_a_helper_is_emitted_once():
    def move(a, b):
        return T.copy(a, b)

    def move_silently(a, b):
        T.copy(a, b)

    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), O: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            S = T.alloc_shared((8,), "int32")
            move(A, S)
            move_silently(S, O)

    from tilelang.ops import Copy

    ops = nodes(f, Copy)
    assert len(ops) == 2
    assert [o.span.function for o in ops] == ["move", "move_silently"]
    assert [o.span.caller.function for o in ops] == ["f", "f"]


def test_nested_parallel_is_fused_and_continue_kept():
    @T.prim_func
    def f(O: T.Tensor((4, 4), "int32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(4):
                for j in T.Parallel(4):
                    if i == j:
                        continue
                    O[i, j] = 1

    (p,) = nodes(f, Parallel)
    assert len(p.vars) == 2 and [v.name for v in p.vars] == ["i", "j"]
    assert out(f) == (1 - np.eye(4, dtype=int)).tolist()


@pytest.mark.spec("L8:unroll")
def test_unroll_vectorized_grid_and_attributes():
    @T.prim_func
    def f(O: T.Tensor((4, 4), "int32")):
        with T.Kernel(1, threads=1):
            for i in T.unroll(2, unroll_factor=2):
                for j in T.vectorized(4, annotations={"note": [1, 2]}):
                    O[i, j] = 1
            for i, j in T.grid(2, 4):
                O[i + 2, j] += i

    a, b, c, d = nodes(f, For)
    assert a.kind == "unroll" and a.attr("factor") == 2
    assert b.kind == "vectorized" and b.attr("note") == (1, 2)
    assert out(f) == [[1] * 4, [1] * 4, [0] * 4, [1] * 4]


@pytest.mark.spec("L2.4:macro")
def test_macro_kinds_of_arguments_and_recursion():
    @T.macro
    def fill_all(*buffers, value=1, **more):
        for_each(buffers, value + more["extra"])

    @T.macro
    def for_each(buffers, value):
        if len(buffers) > 0:
            T.fill(buffers[0], value)
            for_each(buffers[1:], value)

    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            a = T.alloc_local((1,), "int32")
            b = T.alloc_local((1,), "int32")
            fill_all(a, b, value=3, extra=4)
            O[0] = a[0]
            O[1] = b[0]

    assert out(f) == [7, 7]


@pytest.mark.spec("L2.4:macro")
def test_macro_by_value_and_by_reference():
    @T.macro
    def by_value(x):
        y = x + 1
        return y

    @T.macro
    def bump(x: T.Ref):
        x = x + 1
        x += 1

    @T.prim_func
    def f(O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var("int32", init=5)
            r = by_value(v)
            bump(v)
            bump(O[v % 4])
            O[0] = r
            O[1] = v

    assert out(f) == [6, 7, 0, 2]


def test_spans_hold_the_chain_of_macros():
    @T.macro
    def inner(S):
        T.clear(S)

    @T.macro
    def outer(S):
        inner(S)

    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            S = T.alloc_shared((2,), "int32")
            outer(S)

    from tilelang.ops import Fill

    (op,) = nodes(f, Fill)
    assert [s.function for s in op.span.chain()] == ["inner", "outer", "f"]


@pytest.mark.spec("L2.3:with")
def test_with_of_other_context_managers_runs_at_trace_time():
    import contextlib

    seen = []

    @contextlib.contextmanager
    def note(x):
        seen.append(x)
        yield x + 1
        seen.append(-x)

    @T.prim_func
    def f(O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1), note(3) as k:
            O[0] = k

    assert seen == [3, -3] and out(f) == [4]


def test_several_kernels_and_host_control_flow():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        assert n > 0, "empty"
        with T.Kernel(n, threads=1) as b:
            O[b] = A[b] + 1
        if n > 2:
            with T.Kernel(n, threads=1) as b:
                O[b] = O[b] * 2

    def r(k):
        return run_tile(f.func, [np.arange(k, dtype=np.int32), np.zeros(k, np.int32)])["O"].tolist()

    assert r(2) == [1, 2] and r(3) == [2, 4, 6]


@pytest.mark.spec("L8:ws")
def test_thread_bindings_and_ws():
    @T.prim_func
    def f(O: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            with T.ws(1):
                O[tx] = 1

    assert out(f) == [0] * 128 + [1] * 128
    assert T.KernelLaunchFrame.Current() is None


@pytest.mark.spec("L18:use_swizzle")
@pytest.mark.parametrize("order, panel, grid", [("row", 2, (5, 3)), ("column", 2, (5, 3)), ("row", 10, (4, 7)),
                                                ("row", 3, (1, 5)),
                                               ("mlx", 2, (3, 3))])
def test_use_swizzle_is_a_permutation(order, panel, grid):
    gx, gy = grid

    @T.prim_func
    def f(O: T.Tensor((gy, gx), "int32")):
        with T.Kernel(gx, gy, threads=1) as (bx, by):
            T.use_swizzle(panel, order=order)
            T.atomic_add(O[by, bx], 1)

    assert out(f) == np.ones((gy, gx), int).tolist()


@pytest.mark.spec("L8:raw-loops")
def test_thread_binding_loops_are_a_launch():
    @T.prim_func
    def f(O: T.Tensor((3, 8), "int32")):
        for bx in T.thread_binding(3, thread="blockIdx.x"):
            for tx in T.thread_binding(8, thread="threadIdx.x"):
                O[bx, tx] = bx * 10 + tx

    @T.prim_func
    def g(O: T.Tensor((3, 8), "int32")):
        with T.Kernel(3, threads=8) as bx:
            for tx in T.thread_binding(8, thread="threadIdx.x"):
                O[bx, tx] = bx * 10 + tx

    want = [[b * 10 + t for t in range(8)] for b in range(3)]
    assert out(f) == want and out(g) == want


@pytest.mark.spec("L2.1:prim_func")
def test_annotations_from_strings():
    src_globals = {}
    import linecache
    text = ("from __future__ import annotations\nimport tilelang.language as T\n"
            "def make(M):\n    @T.prim_func\n    def f(A: T.Tensor((M,), 'float32'), n: T.int32, k: float32):\n"
            "        with T.Kernel(1, threads=1):\n            A[0] = T.cast(n, 'float32') + k\n    return f\n")
    linecache.cache["<annotations>"] = (len(text), None, text.splitlines(True), "<annotations>")
    exec(compile(text, "<annotations>", "exec"), src_globals)
    f = src_globals["make"](12)
    assert [int(d) for d in f.buffer_map[f.params[0]].shape] == [12]
    assert [p.dtype for p in f.params[1:]] == ["int32", "float32"]


@pytest.mark.spec("L2.1:prim_func")
def test_body_annotations_declare_parameters():
    M = 12

    @T.prim_func
    def f(A, n):
        A: T.Tensor((M,), "float32")
        n: T.int32
        with T.Kernel(1, threads=1):
            A[0] = T.cast(n, "float32")

    assert [p.name for p in f.params] == ["A_handle", "n"]


@pytest.mark.spec("L2.3:return", "L6:empty")
def test_returned_tensors_are_outputs_in_return_order():
    @T.prim_func
    def f(A: T.Tensor((4,), "float32")):
        C = T.empty((4,), "float32")
        D = T.empty(4, dtype="int32")
        with T.Kernel(4, threads=1) as b:
            C[b] = A[b]
            D[b] = 1
        return D, C

    assert f.attrs["tilelang_out_idx"] == [-1, -2]
    assert [p.name for p in f.params] == ["A_handle", "C_handle", "D_handle"]


@pytest.mark.spec("L2.1:prim_func")
def test_prim_func_surface():
    @T.prim_func
    def f(A: T.Tensor((4,), "float32")):
        T.annotate_pass_configs({"tl.disable_tma_lower": True})
        T.annotate_compile_flags("-O3 --use_fast_math")
        with T.Kernel(1):
            A[0] = 1

    assert f.attrs["tilelang_pass_configs"] == {"tl.disable_tma_lower": True}
    assert f.attrs["tilelang_compile_flags"] == ["-O3", "--use_fast_math"]
    g = f.with_attr("global_symbol", "g")
    assert g.attrs["global_symbol"] == "g" and f.attrs["global_symbol"] == "f"
    assert f.with_attr("x", 1).attrs["x"] == 1 and f == f.with_attr({}) and str(f) == f.script()
    assert "A" in f.script() and f.orig_func.__name__ == "f"
    with pytest.raises(TypeError, match="not callable"):
        f(1)


def test_walrus_and_conditional_expression_of_python_values():
    flag = False

    @T.prim_func
    def f(A: T.Tensor((2,), "int32"), O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            O[0] = (y := A[0] + 1) * y
            O[1] = A[0] if flag else 7

    assert out(f, np.array([2, 3], np.int32)) == [9, 7]


def test_tracing_is_fast():
    import time

    from test_trace import gemm

    gemm(64, 64, 64)
    t = time.perf_counter()
    for _ in range(5):
        gemm(64, 64, 64)
    assert (time.perf_counter() - t) / 5 < 0.010


def test_error_of_plain_python_keeps_its_class_and_gets_the_place():
    with pytest.raises(ZeroDivisionError):
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1 // 0):
                A[0] = 1
    with pytest.raises(TypeError) as e:
        @T.prim_func
        def g(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                A[0] = A[0] << 1
    assert isinstance(e.value, TileLangError) and e.value.span.function == "g"


def test_wrong_arguments_of_a_call_are_placed():
    with pytest.raises(TypeError, match="unexpected keyword argument") as e:
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.clear(A, wrong=1)
    assert e.value.span.function == "f" and "help()" in e.value.hint


def test_errors_of_the_users_own_helpers_are_left_alone():
    def broken(x):
        return len(x)

    with pytest.raises(TypeError) as e:
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                A[0] = broken(5)
    assert not isinstance(e.value, TileLangError)


@pytest.mark.parametrize("make", [lambda: T.Parallel(2, 2), lambda: T.grid(2, 2), lambda: T.Persistent([2, 2], 1, 0)])
def test_one_name_for_two_extents_is_refused(make):
    with pytest.raises(ValueError, match="names one variable, the loop gives 2"):
        @T.prim_func
        def f(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                for i in make():
                    A[i] = 1


@pytest.mark.spec("L2.3:rebind-in-body")
def test_rebinding_inside_the_body_only_is_fine():
    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            x = 1
            for i in range(3):
                x = 5
                y = x + i
                x = y * 2
                O[i] = x

    assert out(f) == [10, 12, 14]


@pytest.mark.spec("L2.3:rebind-constant")
def test_a_python_value_of_one_branch_is_poisoned_after_it():
    with pytest.raises(RuntimeError, match="assigned in a run-time loop or branch") as e:
        @T.prim_func
        def f(O: T.Tensor((3,), "int32")):
            with T.Kernel(3, threads=1) as b:
                x = 0
                if b > 1:
                    x = 1
                O[b] = x
    assert e.value.kind == "loop-carried-value"


@pytest.mark.spec("L2.3:rebind-in-body")
def test_else_branch_sees_the_names_as_before_the_if():
    @T.prim_func
    def f(A: T.Tensor((3,), "int32"), O: T.Tensor((3,), "int32")):
        with T.Kernel(3, threads=1) as b:
            x = A[b]
            if b > 1:
                x = x + 100
                O[b] = x
            else:
                O[b] = x

    assert out(f, np.array([1, 2, 3], np.int32)) == [1, 2, 103]


@pytest.mark.spec("L2.3:rebind-constant")
def test_a_conditional_counter_is_refused():
    with pytest.raises(RuntimeError, match="re-bound in the loop"):
        @T.prim_func
        def f(A: T.Tensor((8,), "int32"), O: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=1):
                n = 0
                for i in range(8):
                    if A[i] > 3:
                        n = n + 1
                    O[i] = 0


@pytest.mark.spec("L2.3:swap")
def test_buffers_swapped_in_a_loop_are_refused():
    with pytest.raises(RuntimeError, match="re-bound in the loop"):
        @T.prim_func
        def f(O: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=1):
                a = T.alloc_local((1,), "int32")
                b = T.alloc_local((1,), "int32")
                for i in range(8):
                    a, b = b, a
                    a[0] = i


@pytest.mark.spec("L2.3:scope")
def test_a_name_of_the_kernel_is_dead_after_it():
    with pytest.raises(RuntimeError, match="used outside its defining region"):
        @T.prim_func
        def f(A: T.Tensor((8,), "int32")):
            with T.Kernel(8, threads=1) as b:
                A[b] = 1
            with T.Kernel(8, threads=1):
                A[b] = 2


def test_a_parameter_before_its_annotation_is_refused():
    with pytest.raises(ValueError, match="Argument `A` is not annotated"):
        @T.prim_func
        def f(A):
            with T.Kernel(1):
                A[0] = 1
            A: T.Tensor((4,), "float32")


def test_constructs_outside_a_builder_say_so():
    from tilelang.errors import JITNoBuilderError

    for call in (lambda: T.Kernel(1), lambda: step_(1), lambda: T.const("M"), lambda: T.annotate_compile_flags("-O3"),
                 lambda: T.make_tensor(T.ptr(), (4,))):
        with pytest.raises(JITNoBuilderError):
            call()


@T.macro
def step_(x):
    return x


@pytest.mark.spec("L5:ptr", "L5:handle")
def test_pointer_parameters_and_views():
    @T.prim_func
    def f(p: T.ptr, n: T.int32, O: T.Tensor((2, 8), "int32")):
        A = T.make_tensor(p, (n,), "int32")
        with T.Kernel(1, threads=1):
            S = T.alloc_shared((16,), "int32")
            V = T.reshape(S, (2, 8))
            T.fill(S, 3)
            S[9] = A[n - 1] + 4
            T.copy(V, O)

    assert f.params[0].dtype == "handle" and f.params[0].name == "p"
    bufs = {b.name: b for b in (x.buffer for x in walk(f.func.body) if hasattr(x, "buffer"))}
    assert bufs["A"].data is f.params[0]


@pytest.mark.spec("T.device_assert")
@pytest.mark.spec("L20:print", "L20:device_assert")
def test_print_and_device_assert_are_traced():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=32) as b:
            F = T.alloc_fragment((8,), "float32")
            T.copy(A, F)
            T.print(A[b], msg="here")
            T.print(F)
            T.print(msg="done")
            T.device_assert(b < 2, "grid")

    text = f.script()
    assert "msg='here' BlockIdx=(%d, %d, %d)" in text and "buffer=F, index=%d, dtype=float value=%f" in text
    assert "Device assert failed: grid" in text


@pytest.mark.spec("L4.1:promotion")
@pytest.mark.parametrize("a, b, want", [
    ("float16", "int32", "float16"), ("int64", "float16", "float16"), ("float16", "float32", "float32"),
    ("float16", "bfloat16", "float16"), ("int8", "uint8", "uint8"), ("int64", "uint32", "int64"), ("bool", "int8", "int8"),
    ("float8_e4m3", "float16", "float16"), ("float8_e4m3", "int32", "float8_e4m3"), ("uint8", "int32", "int32")])
def test_promotion(a, b, want):
    x, y = getattr(T, a)(), getattr(T, b)()
    assert (x + y).dtype == want == (y + x).dtype


@pytest.mark.spec("L4.1:promotion")
def test_literals_in_promotion():
    h = T.float16()
    assert (h + 1).dtype == "float16" and (h + 1.0).dtype == "float32" and (T.int8() + 1).dtype == "int32"
    assert T.pow(h, 2.0).dtype == "float32" and T.pow(h, 2).dtype == "float16"
    assert T.max(h, 1.0).dtype == "float32" and T.clamp(h, 0, 1).dtype == "float16"
    assert (T.int32() + 2**31).dtype == "int64"
    with pytest.raises(ValueError):
        T.int32() & 0xFFFFFFFF


def test_a_macro_that_changes_a_variable_may_end_a_block():
    @T.macro
    def bump(v: T.Ref):
        v = v + 1

    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(2, threads=1) as b:
            v = T.alloc_var("int32")
            for _i in range(3):
                O[b] = v
                bump(v)

    assert out(f) == [2, 2]


def test_try_match_import_and_del_run_at_trace_time():
    mode = "b"

    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        from math import floor

        with T.Kernel(1, threads=1):
            x = floor(1.5)
            try:
                O[0] = x
            finally:
                O[1] = 2
            del x
            match mode:
                case "a":
                    O[2] = 10
                case "b":
                    O[2] = 20

    assert out(f) == [1, 2, 20]
    with pytest.raises(RuntimeError, match="used before it has a value"):
        @T.prim_func
        def g(O: T.Tensor((3,), "int32")):
            with T.Kernel(1, threads=1):
                O[0] = late  # noqa: F821
                late = 1  # noqa: F841


@pytest.mark.spec("L2.3:bind-slice")
def test_a_named_slice_keeps_its_bounds():
    @T.prim_func
    def f(A: T.Tensor((16,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var("int32", init=4)
            part = A[v:v + 4]
            v = 8
            S = T.alloc_shared((4,), "int32")
            T.copy(part, S)
            T.copy(S, O)

    assert out(f, np.arange(16, dtype=np.int32)) == [4, 5, 6, 7]


@pytest.mark.spec("L8:Persistent")
def test_persistent_bounds_are_taken_on_entry():
    @T.prim_func
    def f(O: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=1):
            w = T.alloc_var("int32", init=1)
            for x, y in T.Persistent([2, 3], w, w - 1):
                w = 5
                O[x * 3 + y] += 1

    assert out(f) == [1] * 6


def test_a_lambda_is_not_a_kernel():
    with pytest.raises(ValueError, match="not a plain function definition"):
        T.prim_func(lambda A: None)
