"""Calls that other tests run on one execution only: the same values on the tile meaning, the simulator and the CPU."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

RNG = np.random.default_rng(0)


@pytest.mark.spec("T.atomic_addx2", "T.atomic_addx4")
@pytest.mark.spec("L13:vector")
@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
def test_vector_atomics_of_many_threads(element):
    """32 threads add pairs, and fours of float32, to 8 elements; small integers are exact in each type."""

    @T.prim_func
    def f(A: T.Tensor((32, 4), element), O: T.Tensor((4, 2), element), Q: T.Tensor((2, 4), "float32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            T.atomic_addx2(O[i % 4, 0], A[i, 0])
            if element == "float32":
                T.atomic_addx4(Q[i % 2, 0], A[i, 0])

    a = RNG.integers(-2, 3, (32, 4)).astype(getattr(ml_dtypes, element) if element == "bfloat16" else element)
    _, o, q = everywhere(f, a, on=WITH_HOPPER)
    wide = a.astype(np.float64)
    assert np.array_equal(o.astype(np.float64), wide[:, :2].reshape(8, 4, 2).sum(0))
    if element == "float32":
        assert np.array_equal(q, wide.reshape(16, 2, 4).sum(0))
    assert "atomic_add" in cuda_text(f, "sm_90a")


@pytest.mark.spec("T.dp4a")
@pytest.mark.spec("L11:dp4a")
def test_four_products_of_bytes():
    @T.prim_func
    def f(A: T.Tensor((32, 8), "int8"), B: T.Tensor((32, 8), "int8"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            acc = T.alloc_local((1,), "int32")
            acc[0] = i
            T.dp4a(A[i, 0], B[i, 0], acc)
            T.dp4a(A[i, 4:8], B[i, 4:8], acc)
            O[i] = acc[0]

    a, b = (RNG.integers(-128, 128, (32, 8)).astype(np.int8) for _ in "ab")
    a[0], b[0] = -128, -128
    o = everywhere(f, a, b)[2]
    assert np.array_equal(o, (a.astype(np.int32) * b).sum(1) + np.arange(32))


@pytest.mark.spec("T.im2col")
@pytest.mark.spec("L10:im2col")
@pytest.mark.parametrize("stride, dilation, pad", [(1, 1, 1), (2, 1, 0), (1, 2, 2)])
def test_image_columns(stride, dilation, pad):
    n, h, w, c, kernel, rows, columns = 2, 6, 5, 8, 3, 16, 8
    oh = (h + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    ow = (w + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    total = n * oh * ow

    @T.prim_func
    def f(X: T.Tensor((n, h, w, c), "float16"), Y: T.Tensor((total, kernel * kernel * c), "float16")):
        with T.Kernel(T.ceildiv(total, rows), kernel * kernel * c // columns, threads=32) as (by, bk):
            S = T.alloc_shared((rows, columns), "float16")
            T.im2col(X, S, by, bk, kernel, stride, dilation, pad)
            T.copy(S, Y[by * rows, bk * columns])

    x = RNG.standard_normal((n, h, w, c)).astype(np.float16)
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    want = np.stack([padded[:, i * dilation:i * dilation + (oh - 1) * stride + 1:stride,
                            j * dilation:j * dilation + (ow - 1) * stride + 1:stride]
                     for i in range(kernel) for j in range(kernel)], 3).reshape(total, -1)
    assert np.array_equal(everywhere(f, x, on=WITH_HOPPER)[1], want)


@pytest.mark.spec("T.device_assert")
@pytest.mark.spec("L20:device_assert")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_an_assertion_that_holds_changes_nothing_and_one_that_does_not_is_told(on):
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            T.device_assert(A[i] > 0, "A must be positive")
            O[i] = A[i] * 2

    a = np.arange(1, 33, dtype=np.int32)
    assert np.array_equal(run(f, a, on=on)[1], 2 * a)
    a[5] = 0
    if on == "cpu":  # of CUDA alone, says the specification
        assert np.array_equal(run(f, a, on=on)[1], 2 * a)
    else:
        with pytest.raises(TileLangError, match="A must be positive"):
            run(f, a, on=on, simulated=True)
    assert "A must be positive" in cuda_text(f)


@pytest.mark.spec("T.alloc_global", "L6:alloc_global")
def test_a_workspace_between_two_launches():
    @T.prim_func
    def f(A: T.Tensor((40,), "float32"), O: T.Tensor((40,), "float32")):
        W = T.alloc_global((40,), "float32")
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(20):
                W[b * 20 + i] = A[b * 20 + i] + 1.0
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                O[i] = W[39 - i]

    a = RNG.standard_normal(40).astype(np.float32)
    assert np.array_equal(everywhere(f, a, on=WITH_HOPPER)[1], (a + np.float32(1))[::-1])


PACKED = np.arange(64, dtype=np.float32)


@pytest.mark.spec("T.Ramp", "T.Broadcast")
def test_vectors_of_indices_and_values_in_every_memory():
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((8, 8), "float32"),
          D: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            S = T.alloc_shared((64,), "float32")
            L = T.alloc_local((8,), "float32")
            S[T.Ramp(t, 8, 8)] = A[T.Ramp(t * 8, 1, 8)]  # column t
            T.sync_threads()
            L[T.Ramp(0, 2, 4)] = S[T.Ramp(t * 8, 2, 4)]
            L[T.Ramp(7, -2, 4)] = S[T.Ramp(0, 1, 4) * 2 + (t * 8 + 1)]
            B[T.Ramp(t * 8, 1, 4)] = L[T.Ramp(6, -2, 4)]
            B[T.Ramp(t * 8 + 4, 1, 4)] = T.Broadcast(L[7], 4) + A[T.Broadcast(t, 4)]
            C[t, T.Ramp(0, 1, 4)] = T.view(A, (8, 8))[T.Ramp(0, 2, 4), t]  # the row is the vector
            D[T.Ramp(t * 4, 1, 4)] = T.Ramp(t, 3, 4) * T.Broadcast(t, 4)

    _, b, c, d = everywhere(f, PACKED, on=WITH_HOPPER)
    a, t = PACKED.reshape(8, 8), np.arange(8)
    assert np.array_equal(b.reshape(8, 8)[:, :4], a.T[:, 6::-2])
    assert np.array_equal(b.reshape(8, 8)[:, 4:], np.repeat((a[1] + t)[:, None], 4, 1))
    assert np.array_equal(c[:, :4], a[::2].T) and not c[:, 4:].any()
    assert np.array_equal(d.reshape(8, 4), (t[:, None] + 3 * np.arange(4)) * t[:, None])
    cuda_text(f)


@pytest.mark.spec("T.float32x4")
def test_elements_that_are_vectors_are_moved_by_every_statement():
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            V = T.view(A, (16,), "float32x4")
            W = T.view(B, (16,), "float32x4")
            S = T.alloc_shared((16,), "float32x4")
            Z = T.alloc_shared((16,), "float32x4")
            v = T.alloc_var("float32x4", V[t])
            T.fill(Z, 3)
            T.copy(V, S)
            for i in T.Parallel(16):
                W[i] = S[15 - i] + Z[i]
            T.view(C, (16,), "float32x4")[t] = v + V[15 - t]

    _, b, c = everywhere(f, PACKED, on=WITH_HOPPER)
    back = PACKED.reshape(16, 4)[::-1].ravel()
    assert np.array_equal(b, back + 3) and np.array_equal(c, PACKED + back)
    cuda_text(f)


@pytest.mark.spec("T.match_buffer", "T.decl_buffer", "T.address_of")
def test_views_of_parts_of_shared_memory():
    @T.prim_func
    def f(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float32"), C: T.Tensor((8, 8), "float32"),
          D: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            S = T.alloc_shared((8, 8), "float32")
            T.copy(A, S)
            corner = T.match_buffer(S[4:8, 0:4], (4, 4), "float32")
            turned = T.decl_buffer((8, 8), "float32", data=S.data, scope="shared.dyn", strides=(1, 8))
            tail = T.make_tensor(T.address_of(S[6, 0]), (16,), "float32")
            for i, j in T.Parallel(4, 4):
                B[i, j] = corner[i, j]
            T.copy(turned, C)
            if t < 16:
                D[t] = tail[15 - t]

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    _, b, c, d = everywhere(f, a, on=WITH_HOPPER)
    assert np.array_equal(b[:4, :4], a[4:, :4]) and np.count_nonzero(b) == 16
    assert np.array_equal(c, a.T) and np.array_equal(d, a[6:].ravel()[::-1])
    cuda_text(f)


def test_views_that_leave_shared_memory_are_refused():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=8):
            S = T.alloc_shared((8,), "float32")
            T.copy(A, S)
            V = T.decl_buffer((4,), "float32", data=S.data, scope="shared.dyn", elem_offset=6)
            A[T.get_thread_binding() % 4] = V[T.get_thread_binding() % 4]

    with pytest.raises(TileLangError, match="no part of `S`"):
        cuda_text(f)
    with pytest.raises(TileLangError, match="part of a fragment"):
        @T.prim_func
        def g(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=8):
                F = T.alloc_fragment((8,), "float32")
                T.copy(A, F)
                T.decl_buffer((4,), "float32", data=F.data, scope="local.fragment", elem_offset=4)


@pytest.mark.spec("T.float8_e4m3fnuz", "T.float8_e5m2fnuz")
@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_small_floats_without_a_negative_zero(dtype):
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), dtype), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((64,), dtype)
            for i in T.Parallel(64):
                S[i] = T.cast(A[i], dtype)
            T.copy(S, B)
            for i in T.Parallel(64):
                C[i] = T.cast(S[i], "float32") * 2.0

    a = np.concatenate([np.linspace(-20, 20, 62), [0.0, 1e9]]).astype(np.float32)
    kind = getattr(ml_dtypes, dtype)
    want = np.clip(a, -float(ml_dtypes.finfo(kind).max), float(ml_dtypes.finfo(kind).max)).astype(kind)
    for on in EXECUTIONS:
        _, b, c = run(f, a, on=on)
        assert np.array_equal(b.view(np.uint8), want.view(np.uint8)), on
        assert np.array_equal(c, want.astype(np.float32) * 2), on
    cuda_text(f)


@pytest.mark.spec("T.print", "L20:print")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_lines_of_every_kind_are_printed(on, capfd):
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            S = T.alloc_shared((2,), "int32")
            L = T.alloc_local((1,), "float16")
            F = T.alloc_fragment((2,), "float32")
            L[0] = 1.5
            T.copy(A[0:2], S)
            T.copy(A[0:2], F)
            T.print(S)
            T.print(F, msg="held")
            T.print(L, msg="own")
            T.print(A[t] + 1, msg="next")
            if t == 3:
                T.print(msg="done")

    run(f, np.arange(4, dtype=np.int32) * 5, on=on, simulated=True)
    at = [f"BlockIdx=(0, 0, 0), ThreadIdx=({t}, 0, 0)" for t in range(4)]
    want = [f"msg='buffer<S, int32>' {at[0]}: buffer=S, index={i}, dtype=int value={5 * i}" for i in range(2)]
    want += [f"msg='held' {at[0]}: buffer=F, index={i}, dtype=float value={5.0 * i:f}" for i in range(2)]
    want += [f"msg='own' {a}: buffer=L, index=0, dtype=half value=1.500000" for a in at]
    want += [f"msg='next' {a}: dtype=int value={5 * t + 1}" for t, a in enumerate(at)]
    want += [f"msg='done' {at[3]}"]
    got = [line for line in capfd.readouterr().out.splitlines() if line.startswith("msg=")]
    assert sorted(got) == sorted(want)
    cuda_text(f)


@pytest.mark.spec("T.launch_thread", "T.sblock", "T.reads", "T.writes", "T.thread_binding")
def test_launches_written_as_scopes_of_indices():
    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.launch_thread("blockIdx.x", 2) as bx, T.launch_thread("threadIdx.x", 4) as tx:
            with T.sblock("body"):
                T.reads(A[bx * 4 + tx])
                T.writes(B[bx * 4 + tx])
                B[bx * 4 + tx] = A[bx * 4 + tx] * 3

    @T.prim_func
    def g(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(4, thread="threadIdx.x"):
                B[bx * 4 + tx] = A[bx * 4 + tx] * 3

    @T.prim_func
    def h(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        bx = T.launch_thread("blockIdx.x", 2)
        tx = T.launch_thread("threadIdx.x", 4)
        B[bx * 4 + tx] = A[bx * 4 + tx] * 3

    a = np.arange(8, dtype=np.int32)
    for program in (f, g, h):
        assert np.array_equal(everywhere(program, a)[1], a * 3)
        cuda_text(program)


@pytest.mark.spec("T.tvm_access_ptr", "T.type_annotation", "T.access_ptr")
def test_places_named_by_every_kind_of_pointer():
    @T.prim_func
    def f(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            T.call_intrin("void", "atomic_add", T.access_ptr(B[t], "rw"), A[t])
            T.call_intrin("void", "atomic_add", B.access_ptr("rw", offset=t), A[t] * 10)
            T.call_intrin("void", "atomic_add", T.tvm_access_ptr(T.type_annotation("int32"), B.data, t, 1, 3), A[t] * 100)
            T.call_intrin("void", "atomic_add", T.address_of(B[7 - t]), 1)

    a = np.arange(8, dtype=np.int32)
    assert np.array_equal(everywhere(f, a)[1], a * 111 + 1)
    cuda_text(f)


@pytest.mark.spec("T.syncthreads_count", "T.syncthreads_or")
def test_a_vote_of_warp_groups_that_did_different_things():
    """Each group counted its own threads alone in the tile meaning."""
    @T.prim_func
    def f(B: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            t = T.get_thread_binding()
            with T.ws(0):
                B[t] = t
            for k in T.serial(2):
                B[t] = B[t] + T.syncthreads_count(t < 100 + k) + 1000 * T.syncthreads_or(t == 255)

    t = np.arange(256)
    assert np.array_equal(everywhere(f)[0], np.where(t < 128, t, 0) + 201 + 2000)
    cuda_text(f)


@pytest.mark.spec("T.sync_grid")
def test_a_grid_barrier_of_blocks_with_roles():
    @T.prim_func
    def f(B: T.Tensor((512,), "int32"), C: T.Tensor((512,), "int32")):
        with T.Kernel(2, threads=256) as b:
            t = T.get_thread_binding()
            with T.ws(0):
                B[b * 256 + t] = b * 256 + t
            with T.ws(1):
                B[b * 256 + t] = 7
            T.sync_grid()
            C[b * 256 + t] = B[511 - b * 256 - t]

    t = np.arange(512)
    assert np.array_equal(everywhere(f)[1], np.where(t % 256 < 128, t, 7)[::-1])
