"""Rows whose other tests look at one execution: here values on every execution this machine has."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, call, everywhere, placed, run

import tilelang
import tilelang.language as T
from tilelang.ir import dtype as dtype_of
from tilelang.ir import numpy_dtype

RNG = np.random.default_rng(41)


def ints(*shape):
    return RNG.integers(-9, 10, shape).astype(np.int32)


@pytest.mark.spec("T.copy", "L10:copy", "L5:Tensor", "T.Tensor")
def test_a_copy_stays_inside_both_of_its_sides():
    @T.prim_func
    def f(A: T.Tensor((21, 13), "int32"), B: T.Tensor((21, 13), "int32"), C: T.Tensor((8, 16), "int32")):
        with T.Kernel(T.ceildiv(21, 8), threads=64) as b:
            S = T.alloc_shared((8, 16), "int32")
            F = T.alloc_fragment((8, 16), "int32")
            T.copy(A[b * 8, 0], S)
            T.copy(S, F)
            T.copy(F, B[b * 8, 0])
            if b == 2:
                T.copy(F, C)

    a = ints(21, 13)
    _, b, c = everywhere(f, a, on=WITH_HOPPER)
    want = np.zeros((8, 16), np.int32)
    want[:5, :13] = a[16:]
    assert np.array_equal(b, a) and np.array_equal(c, want)


@pytest.mark.spec("T.Ramp")
def test_a_ramp_is_a_vector_of_indices():
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            B[T.Ramp(t * 4, 1, 4)] = A[T.Ramp(t * 4, 1, 4)] + T.Broadcast(T.float32(1), 4)
            C[T.Ramp(t * 2, 1, 2)] = A[T.Ramp(t * 2, 2, 2)]

    a = ints(64).astype(np.float32)
    _, b, c = everywhere(f, a)
    assert np.array_equal(b, a + 1)
    assert np.array_equal(c.reshape(16, 2), np.stack([a[0:32:2], a[2:34:2]], 1))


@pytest.mark.spec("T.decl_buffer")
def test_a_declared_buffer_is_another_form_of_the_storage():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "uint32"), B: T.Tensor((64,), "uint16"), C: T.Tensor((8, 4), "uint32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((4, 8), "uint32")
            T.copy(A, S)
            V = T.decl_buffer((64,), "uint16", data=S.data, scope="shared.dyn")
            W = T.decl_buffer((8, 4), "uint32", data=S.data, scope="shared.dyn")
            T.copy(V, B)
            for i, j in T.Parallel(8, 4):
                C[i, j] = W[i, j]

    a = RNG.integers(0, 2**32, (4, 8), dtype=np.uint32)
    _, b, c = everywhere(f, a)
    assert np.array_equal(b, a.view(np.uint16).reshape(-1)) and np.array_equal(c, a.reshape(8, 4))


@pytest.mark.spec("T.infinity", "T.min_value", "T.max_value")
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_the_ends_of_a_type(dtype):
    @T.prim_func
    def f(A: T.Tensor((4,), dtype), B: T.Tensor((4, 4), dtype)):
        with T.Kernel(1, threads=4):
            for i in T.Parallel(4):
                B[0, i] = T.min(A[i], T.infinity(dtype))
                B[1, i] = T.max(A[i], -T.infinity(dtype))
                B[2, i] = T.max(A[i], T.min_value(dtype))
                B[3, i] = T.min(A[i], T.max_value(dtype))

    np_type = numpy_dtype(dtype_of(dtype))
    a = np.array([1, -2, np.inf, -np.inf], np_type)
    _, b = everywhere(f, a)
    info = ml_dtypes.finfo(np_type)
    assert np.array_equal(b[0], a) and np.array_equal(b[1], a)
    assert np.array_equal(b[2], np.where(a == -np.inf, info.min, a))
    assert np.array_equal(b[3], np.where(a == np.inf, info.max, a))


@pytest.mark.spec("T.thread_binding")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_loops_bound_to_threads_and_blocks_are_a_launch(on):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                B[bx * 32 + tx] = A[bx * 32 + 31 - tx]

    a = ints(64)
    assert np.array_equal(run(f, a, on=on)[1], a.reshape(2, 32)[:, ::-1].reshape(-1))


@pytest.mark.spec("T.unroll", "L8:unroll")
def test_an_unrolled_loop_is_a_loop():
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            L = T.alloc_local((4,), "int32")
            for k in T.unroll(4):
                L[k] = A[t * 4 + k]
            for k in T.unroll(3, -1, -1):
                B[t * 4 + k] = L[3 - k]

    a = ints(32)
    assert np.array_equal(everywhere(f, a)[1], a.reshape(8, 4)[:, ::-1].reshape(-1))


@pytest.mark.spec("T.syncthreads_and", "T.syncthreads_count", "T.syncthreads_or", "L15:block-votes")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_votes_of_a_block_everywhere(on):
    @T.prim_func
    def f(X: T.Tensor((64,), "int32"), Y: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            Y[0, i] = T.syncthreads_count(X[i] > 0)
            Y[1, i] = T.syncthreads_and(X[i])
            Y[2, i] = T.syncthreads_or(X[i] > 7)

    x = ints(64)
    y = run(f, x, on=on)[1]
    assert np.array_equal(y[0], np.full(64, (x > 0).sum()))
    assert np.array_equal(y[1] != 0, np.full(64, (x != 0).all())) and np.array_equal(y[2] != 0, np.full(64, (x > 7).any()))


@pytest.mark.spec("T.call_intrin", "T.access_ptr", "T.tvm_access_ptr", "T.type_annotation", "L19:pointers")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_an_intrinsic_by_its_name_on_pointers_to_elements(on):
    @T.prim_func
    def f(Y: T.Tensor((64,), "int32"), Z: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            T.call_intrin("void", "atomic_add", T.tvm_access_ptr(T.type_annotation("int32"), Y.data, t + 3, 1, 3), t)
            T.call_intrin("void", "atomic_add", T.access_ptr(Z[t // 2], "rw"), t)

    y, z = run(f, on=on)
    assert y.tolist() == [0] * 3 + list(range(32)) + [0] * 29
    assert z.tolist() == [4 * k + 1 for k in range(16)] + [0] * 48


@pytest.mark.spec("T.make_mma_swizzle_layout", "L22:layout-functions")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_swizzled_tile_holds_what_was_stored(on):
    @T.prim_func
    def f(A: T.Tensor((16, 64), "float16"), B: T.Tensor((64, 16), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((16, 64), "float16")
            T.annotate_layout({S: T.make_mma_swizzle_layout(S)})
            T.copy(A, S)
            for j, i in T.Parallel(64, 16):
                B[j, i] = S[i, j]

    a = ints(16, 64).astype(np.float16)
    assert np.array_equal(run(f, a, on=on)[1], a.T)


@pytest.mark.spec("T.sblock", "T.reads", "T.writes", "L23:raw-statements")
def test_a_block_with_its_regions_is_its_body():
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            with T.sblock("root"):
                T.reads(A[0:32])
                T.writes(B[0:32])
                S = T.alloc_shared((32,), "int32")
                T.copy(A, S)
                for i in T.Parallel(32):
                    B[i] = S[31 - i]

    a = ints(32)
    assert np.array_equal(everywhere(f, a)[1], a[::-1])


@pytest.mark.spec("L2.2:styles", "L2.5:symbols", "R2.2:jit")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_both_styles_of_jit_with_constants_and_symbols(on):
    where = placed(on)

    @tilelang.jit(**where, out_idx=[-1])
    def lazy(n):
        m = T.dynamic("m")

        @T.prim_func
        def main(A: T.Tensor((m, n), "int32"), B: T.Tensor((m, n), "int32")):
            with T.Kernel(m, threads=32) as b:
                for j in T.Parallel(n):
                    B[b, j] = A[b, n - 1 - j] + m

        return main

    @tilelang.jit(**where)
    def eager(A, B):
        m, n = T.dynamic("m"), T.const("n")
        A: T.Tensor((m, n), "int32")
        B: T.Tensor((m, n), "int32")
        with T.Kernel(m, threads=32) as b:
            for j in T.Parallel(n):
                B[b, j] = A[b, n - 1 - j] + m

    kernel = lazy(7)
    for rows in (3, 5):
        a, b = ints(rows, 7), np.zeros((rows, 7), np.int32)
        call(where, eager, a, b)
        assert np.array_equal(call(where, kernel, a), a[:, ::-1] + rows) and np.array_equal(b, a[:, ::-1] + rows)
