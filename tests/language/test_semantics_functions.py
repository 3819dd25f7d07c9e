"""Kernel functions, macros and helpers: arguments, outputs, types and errors (one test a row of language.md 2 to 4)."""

import numpy as np
import pytest
from semantics_harness import nodes, out

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.simulator.reference.run import run_tile


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


def test_tracing_is_fast():
    import time

    from test_trace import gemm

    gemm(64, 64, 64)
    t = time.process_time()  # of this process: other work on the machine is not tracing
    for _ in range(5):
        gemm(64, 64, 64)
    assert (time.process_time() - t) / 5 < 0.010


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
    assert e.value.span.function == "f" and "T.clear(buffer, annotations=None)" in e.value.hint


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


@pytest.mark.parametrize("known", [True, False])
def test_a_condition_known_when_traced_promotes_both_sides_too(known):
    i, x = T.int32(), T.float16()
    got = T.if_then_else(known, i, x)
    assert got.dtype == "float16" == T.Select(i < 3, got, x).dtype


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


def test_a_lambda_is_not_a_kernel():
    with pytest.raises(ValueError, match="not a plain function definition"):
        T.prim_func(lambda A: None)
