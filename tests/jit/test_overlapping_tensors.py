"""One memory passed for two tensors: what is written by one name is read by the other, in the order of the program."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import Call, For, Launch, walk
from tilelang.transform.legalize.aliasing import keep_order, made_of_pointers, overlapping, parameter_names, read_after_write
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower

F32 = "float32"
SM80, SM90 = {"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a"}
EXECUTIONS = {"tile": ("cpu", "tile"), "sm_80": (SM80, "simulator"), "sm_90a": (SM90, "simulator"), "cpu": ("cpu", None)}
RNG = np.random.default_rng(5)


def kernel(f, execution, **config):
    target, backend = EXECUTIONS[execution]
    return tilelang.compile(f, target=target, execution_backend=backend, pass_configs=config)


@T.prim_func
def crossing(A: T.Tensor((64,), F32), B: T.Tensor((64,), F32), C: T.Tensor((64,), F32)):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(64):
            B[i] = A[i] * 2
        for i in T.Parallel(64):
            C[i] = A[63 - i] + 1


@T.prim_func
def ahead(A: T.Tensor((6, 64), F32), B: T.Tensor((6, 64), F32)):
    with T.Kernel(1, threads=128) as _:
        S = T.alloc_shared((64,), F32)
        for k in T.Pipelined(5, num_stages=3):
            T.copy(A[k, :], S)
            for i in T.Parallel(64):
                B[k + 1, i] = A[k + 1, i] + S[63 - i]


@T.prim_func
def in_place(O: T.Tensor((64,), F32), A: T.Tensor((64,), F32)):
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(64):
            O[i] = A[i] * 2


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_tensor_passed_twice(execution):
    a, c = random(64), np.zeros(64, np.float32)
    want = a * 2
    k = kernel(crossing, execution)
    k(a, a, c)
    assert (a == want).all() and (c == want[::-1] + 1).all()
    a, b = random(64), np.zeros(64, np.float32)
    before = a.copy()
    k(a, b, c)
    assert (a == before).all() and (b == a * 2).all() and (c == a[::-1] + 1).all()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_reads_ahead_stay_behind_writes(execution):
    a = random(6, 64)
    want = a.copy()
    for i in range(5):
        want[i + 1] += want[i][::-1]
    k = kernel(ahead, execution)
    k(a, a)
    np.testing.assert_allclose(a, want, rtol=1e-5, atol=1e-5)


SA, SB = T.dynamic("sa, sb")


@T.prim_func
def shifted(A: T.Tensor((64,), F32), B: T.Tensor((64,), F32), C: T.Tensor((64,), F32)):
    with T.Kernel(1, threads=32) as _:
        T.fill(B, 5)
        for i in T.Parallel(64):
            C[i] = A[i] + 1


@T.prim_func
def columns(A: T.StridedTensor((8, 16), (SA, 1), F32), B: T.StridedTensor((8, 16), (SB, 1), F32)):
    with T.Kernel(1, threads=32) as _:
        for i, j in T.Parallel(8, 16):
            B[i, j] = A[i, j] + 1
        for i, j in T.Parallel(8, 16):
            B[i, j] = B[i, j] + A[7 - i, j]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_parts_of_one_array(execution):
    """Partly the same elements; columns that only lie between each other."""
    base, c = random(96), np.zeros(64, np.float32)
    want = base.copy()
    want[20:84] = 5
    kernel(shifted, execution)(base[:64], base[20:84], c)
    assert (base == want).all() and (c == want[:64] + 1).all()
    packed = random(8, 32)
    left, right = packed[:, :16], packed[:, 16:]
    kept = left.copy()
    kernel(columns, execution)(left, right)
    assert (left == kept).all()
    np.testing.assert_allclose(right, kept + 1 + kept[::-1], rtol=1e-6, atol=1e-6)


M = T.dynamic("m")


@T.prim_func
def pointers(p: T.ptr, A: T.Tensor((M,), F32), q: T.ptr, rows: T.int32, C: T.Tensor((M,), F32)):
    with T.Kernel(1, threads=32) as _:
        P, Q = T.make_tensor(p, (rows, 8), F32, strides=(8, 1)), T.make_tensor(q, (M,), F32)
        for i in T.Parallel(M):
            P[i // 8, i % 8] = 7
        for i in T.Parallel(M):
            C[i] = A[i] + Q[i]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_memory_behind_pointers(execution):
    assert read_after_write(pointers.func) == (("p", "A"), ("p", "q"))
    k = kernel(pointers, execution)
    for shift in (-24, 0, 5, 32):
        buf, ones, c = random(128), np.ones(32, np.float32), np.zeros(32, np.float32)
        want = buf.copy()
        want[48 + shift:80 + shift] = 7
        for a, q in ((buf[48:80], ones), (ones, buf[48:80])):
            k(buf[48 + shift:80 + shift], a, q, 4, c)
            np.testing.assert_array_equal(c, want[48:80] + 1)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_element_by_element_in_place_needs_no_other_kernel(execution):
    a = random(64)
    want = a * 2
    k = kernel(in_place, execution)
    k(a, a)
    assert (a == want).all() and "in_order" not in k._variants


def test_which_tensors_must_lie_apart():
    assert read_after_write(crossing.func) == (("B", "A"),)
    assert read_after_write(ahead.func) == (("B", "A"),)
    assert read_after_write(in_place.func) == ()

    @T.prim_func
    def declared(A: T.Tensor((64,), F32), B: T.Tensor((64,), F32), C: T.Tensor((64,), F32)):
        with T.Kernel(1, threads=32) as _:
            T.annotate_restrict_buffers(A, B)
            T.copy(A, B)
            T.copy(A, C)

    assert read_after_write(declared.func) == () and overlapping(declared.func, True)
    assert parameter_names(crossing.func) == ("A", "B", "C") and parameter_names(pointers.func) == ("A", "C", "P", "Q")
    assert {n: [b.name for b in made] for n, made in made_of_pointers(pointers.func).items()} == {"p": ["P"], "q": ["Q"]}
    assert not overlapping(crossing.func, True) and overlapping(crossing.func, False)


def test_a_condition_asked_for_again_reads_behind_the_loop():
    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1) as _:
            n = T.alloc_var("int32", init=0)
            while A[0] < 3 and n < 9:
                n = n + 1
                B[0] = n

    assert read_after_write(main.func) == (("B", "A"),)
    a = np.zeros(4, np.int32)
    kernel(main, "cpu")(a, a)
    assert a[0] == 3


def test_the_kernel_in_order():
    """No pipeline, no promise to the device compiler, a barrier where threads read what others have written."""
    def launch(f, target, **config):
        (k,) = lower(f.func, tilelang.tvm.target.Target(target), config).kernels
        return k.launch

    def barriers(x):
        return sum(isinstance(n, Call) and n.op == "sync_threads" for n in walk(x))

    assert not barriers(launch(crossing, SM80)) and barriers(launch(crossing, SM80, **{"tirx.noalias": False}))
    kept = keep_order(ahead.func, PassContext(None, {"tirx.noalias": False}))
    assert [x.kind for x in walk(kept.body) if isinstance(x, For)] == ["serial"]
    assert [b.name for x in walk(kept.body) if isinstance(x, Launch) for b in x.plan.overlapping] == ["B", "A"]
    assert keep_order(ahead.func, PassContext(None, {})) == ahead.func
    usual, plain = (str(launch(ahead, SM90, **c)) for c in ({}, {"tirx.noalias": False}))
    assert "cp_async" in usual or "tma_load" in usual
    assert "cp_async" not in plain and "tma_load" not in plain
    source = tilelang.compile(crossing, target=SM80, pass_configs={"tirx.noalias": False}).get_kernel_source()
    assert "__restrict__" not in source
