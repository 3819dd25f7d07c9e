"""Python in a kernel function: what each statement means (one test a row of language.md 2.3)."""

import logging

import numpy as np
import pytest
from semantics_harness import nodes, out

import tilelang.language as T
from tilelang.ir import Bind, If


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


def test_a_literal_of_uint64_was_refused():
    most = 2**64 - 1

    @T.prim_func
    def f(O: T.Tensor((12,), "uint64")):
        with T.Kernel(1, threads=1):
            O[0] = most
            v = T.alloc_var("uint64", 2**63)
            O[1] = v
            O[2] = O[0] - 2**63
            O[3] = O[0] ^ 0xFF00_0000_0000_0001
            O[4] = T.if_then_else(O[0] == most, most, 0)
            O[5] = T.max(O[2], 2**63)
            s = T.alloc_fragment((4,), "uint64")
            T.fill(s, most)
            T.copy(s, O[6:10])
            O[10] = 2**63 + T.cast(1, "uint32")
            O[11] = T.cast(most, "uint64") // 3

    assert out(f) == [most, 2**63, 2**63 - 1, 0xFF_FFFF_FFFF_FFFE, most, 2**63, *[most] * 4, 2**63 + 1, most // 3]


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


def test_walrus_and_conditional_expression_of_python_values():
    flag = False

    @T.prim_func
    def f(A: T.Tensor((2,), "int32"), O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            O[0] = (y := A[0] + 1) * y
            O[1] = A[0] if flag else 7

    assert out(f, np.array([2, 3], np.int32)) == [9, 7]


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
