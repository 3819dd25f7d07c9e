"""Pointers made of numbers: tables of addresses, addresses of elements, tensors that begin there, on every execution."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, cuda_text, everywhere, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

RNG = np.random.default_rng(3)


def table(arrays):
    return np.array([a.ctypes.data for a in arrays], np.int64)


def here(program, *args):
    """The tensors after a call on every execution of this machine; its addresses mean nothing to a GPU."""
    results = {on: run(program, *args, on=on, simulated=True) for on in WITH_HOPPER}
    for on, got in results.items():
        for g, w in zip(got, results["tile"]):
            np.testing.assert_array_equal(g, w, on)
    return results["tile"]


def call(program, *args, on):
    """A call with the arrays themselves, not with copies of them."""
    target, backend = WITH_HOPPER[on]
    tilelang.compile(program, target=target, execution_backend=backend)(*args)


def grouped_product(K=64, N=32, BM=32, BK=32, stages=2):
    """C[g] = A[g] @ B[g] for each g of three, every matrix where a table says; rows of a group are known at run time."""
    @T.prim_func
    def grouped(PA: T.Tensor((3,), T.ptr), PB: T.Tensor((3,), T.ptr), PC: T.Tensor((3,), T.ptr), M: T.Tensor((3,), "int32")):
        with T.Kernel(3, threads=128) as g:
            m = M[g]
            A = T.make_tensor(PA[g], (m, K), "float16")
            B = T.make_tensor(PB[g], (K, N), "float16")
            C = T.make_tensor(PC[g], (m, N), "float32")
            As = T.alloc_shared((BM, BK), "float16")
            Bs = T.alloc_shared((BK, N), "float16")
            Cf = T.alloc_fragment((BM, N), "float32")
            for i in T.serial(T.ceildiv(m, BM)):
                T.clear(Cf)
                for k in T.Pipelined(K // BK, num_stages=stages):
                    T.copy(A[i * BM, k * BK], As)
                    T.copy(B[k * BK, 0], Bs)
                    T.gemm(As, Bs, Cf)
                T.copy(Cf, C[i * BM, 0])

    return grouped


@pytest.mark.spec("T.ptr", "T.make_tensor", "L5:ptr")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_a_grouped_product_by_tables_of_addresses(on):
    rows = (32, 40, 7)
    a = [RNG.integers(-3, 4, (m, 64)).astype(np.float16) for m in rows]
    b = [RNG.integers(-3, 4, (64, 32)).astype(np.float16) for _ in rows]
    room = [np.full((m + 1, 32), -1, np.float32) for m in rows]  # a row more than the group has
    run(grouped_product(), table(a), table(b), table(room), np.array(rows, np.int32), on=on, simulated=True)
    for m, x, y, c in zip(rows, a, b, room):
        assert np.array_equal(c[:m], x.astype(np.float32) @ y.astype(np.float32)) and (c[m:] == -1).all()


@pytest.mark.gpu
@pytest.mark.spec("L5:ptr")
def test_a_grouped_product_on_a_gpu():
    import torch
    rows = (32, 300, 7)
    a = [torch.randint(-3, 4, (m, 64), device="cuda").half() for m in rows]
    b = [torch.randint(-3, 4, (64, 32), device="cuda").half() for _ in rows]
    c = [torch.full((m + 1, 32), -1.0, device="cuda") for m in rows]
    tables = [torch.tensor([x.data_ptr() for x in xs], device="cuda") for xs in (a, b, c)]
    tilelang.compile(grouped_product(), target="cuda")(*tables, torch.tensor(rows, dtype=torch.int32, device="cuda"))
    for m, x, y, z in zip(rows, a, b, c):
        assert torch.equal(z[:m], x.float() @ y.float()) and bool((z[m:] == -1).all())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_text_of_a_grouped_product(arch):
    text = cuda_text(grouped_product(), arch)
    assert "tl::cp_async<16>" in text and "(void*)PA[" in text


@pytest.mark.parametrize("stages", [0, 2, 3])
def test_a_pipeline_whose_tensors_are_read_from_a_table(stages):
    @T.prim_func
    def f(P: T.Tensor((5,), T.ptr), C: T.Tensor((16, 32), "float32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((16, 32), "float16")
            F = T.alloc_fragment((16, 32), "float32")
            T.clear(F)
            for k in T.Pipelined(5, num_stages=stages):
                A = T.make_tensor(P[k], (16, 32), "float16")
                T.copy(A, S)
                for i, j in T.Parallel(16, 32):
                    F[i, j] += S[i, j]
            T.copy(F, C)

    parts = [RNG.integers(-4, 5, (16, 32)).astype(np.float16) for _ in range(5)]
    assert np.array_equal(here(f, table(parts))[1], sum(p.astype(np.float32) for p in parts))
    cuda_text(f)


def test_every_iteration_and_every_thread_may_follow_an_address_of_its_own():
    @T.prim_func
    def f(P: T.Tensor((6,), T.ptr), C: T.Tensor((6, 16), "float32"), D: T.Tensor((6,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            for i, j in T.Parallel(6, 16):
                A = T.make_tensor(P[i], (16,), "float32")
                C[i, j] = A[j]
            if t < 6:
                B = T.make_tensor(P[t], (16,), "float32")
                D[t] = B[t + 1] + B[20]  # outside: the safe value

    parts = RNG.standard_normal((6, 16)).astype(np.float32)
    _, c, d = here(f, table(parts))
    assert np.array_equal(c, parts) and np.array_equal(d, parts[np.arange(6), np.arange(6) + 1])
    cuda_text(f)


def test_an_address_inside_an_array_that_is_passed_means_that_array():
    """What is written through the address is read by the tensor's name, and the other way round."""
    @T.prim_func
    def f(A: T.Tensor((4, 8), "float32"), P: T.Tensor((4,), T.ptr), B: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            for i in T.serial(4):
                row = T.make_tensor(P[i], (8,), "float32")
                A[i, 1] = 5.0 + i
                row[0] = row[1] * 2.0
                B[i] = A[i, 0]

    for on in EXECUTIONS:
        a = np.zeros((4, 8), np.float32)
        got = [a, table(a), np.zeros(4, np.float32)]
        call(f, *got, on=on)
        assert got[2].tolist() == [10, 12, 14, 16] == a[:, 0].tolist(), on


@pytest.mark.spec("T.address_of", "T.access_ptr")
def test_addresses_of_elements_as_numbers_and_as_the_start_of_tensors():
    @T.prim_func
    def f(A: T.Tensor((8, 8), "float32"), B: T.Tensor((64,), "float32"), D: T.Tensor((2,), "int64"),
          E: T.Tensor((32,), "int32")):
        with T.Kernel(2, threads=32) as b:
            t = T.get_thread_binding()
            half = T.make_tensor(T.address_of(A[4 * b, 0]), (32,), "float32")
            out = T.make_tensor(T.address_of(B[32 * b]), (4, 8), "float32")
            pair = T.make_tensor(T.address_of(half[t // 2 * 2]), (2,), "float32")  # one for each thread
            bits = T.make_tensor(A.access_ptr("r"), (64,), "int32")  # of another type
            out[t // 8, t % 8] = pair[1 - t % 2]
            if b == 0:
                E[t] = bits[t]
            D[b] = T.reinterpret(T.address_of(A[b, 3]), "int64") - T.reinterpret(T.address_of(A[0, 0]), "int64")

    a = RNG.standard_normal((8, 8)).astype(np.float32)
    _, b, d, e = everywhere(f, a, on=WITH_HOPPER)
    assert np.array_equal(b, a.reshape(32, 2)[:, ::-1].ravel())
    assert d.tolist() == [12, 44] and np.array_equal(e, a.ravel()[:32].view(np.int32))
    cuda_text(f)


@pytest.mark.spec("T.decl_buffer", "T.match_buffer")
def test_buffers_over_storage_that_begin_at_an_element():
    @T.prim_func
    def f(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((8, 8), "float32")):
        with T.Kernel(2, threads=32) as b:
            t = T.get_thread_binding()
            turned = T.decl_buffer((8, 8), "float32", data=B.data, strides=(1, 8))
            own = T.decl_buffer((2,), "float32", data=A.data, elem_offset=t * 2)  # another for each thread
            half = T.decl_buffer((32,), "float32", data=A.data, elem_offset=b * 32)
            turned[b * 4 + t // 8, t % 8] = half[t]
            corner = T.match_buffer(C[b * 4:b * 4 + 4, 0:2], (4, 2), "float32")
            if t < 4:
                corner[t, 0] = own[1]
            for i in T.Parallel(4):
                mine = T.match_buffer(C[b * 4 + i, 4:6], (2,), "float32")
                mine[1] = half[i]

    a = np.arange(1, 65, dtype=np.float32)
    _, b, c = everywhere(f, a, on=WITH_HOPPER)
    assert np.array_equal(b.reshape(8, 8).T.ravel(), a)
    assert np.array_equal(c[:, 0], np.tile(a[1:8:2], 2)) and np.array_equal(c[:, 5].reshape(2, 4), a.reshape(2, 32)[:, :4])
    assert np.count_nonzero(c) == 16
    cuda_text(f)


def test_pointers_are_moved_by_bytes_and_asked_whether_they_are_null():
    @T.prim_func
    def f(P: T.ptr, Q: T.ptr, Y: T.Tensor((4,), "float32"), Z: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            X = T.make_tensor(T.handle_add_byte_offset(P, 8), (4,), "float32")
            Y[t] = X[t]
            Z[0] = T.if_then_else(T.isnullptr(P), 1, 2)
            Z[1] = T.if_then_else(T.isnullptr(Q), 1, 2)

    x = np.arange(8, dtype=np.float32)
    y, z = (here(f, x.ctypes.data, 0, np.zeros(4, np.float32), np.zeros(2, np.int32))[k] for k in (0, 1))
    assert np.array_equal(y, x[2:6]) and z.tolist() == [2, 1]
    cuda_text(f)


@pytest.mark.parametrize("on", ["tile", "simulator"])
def test_addresses_that_lead_nowhere_are_refused(on):
    @T.prim_func
    def f(P: T.Tensor((1,), T.ptr), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=8):
            A = T.make_tensor(P[0] + 0, (8,), "float32")
            B[T.get_thread_binding()] = A[T.get_thread_binding()]

    def refused(address):
        with pytest.raises(TileLangError) as e:
            run(f, np.array([address], np.int64), on=on, simulated=True)
        assert "-->" in str(e.value)
        return e.value.kind, str(e.value)

    x = np.zeros(16, np.float32)
    assert refused(0)[0] == "sim-address" and "null" in refused(0)[1]
    assert refused(1 << 40)[0] == "sim-address"
    assert refused(x.ctypes.data + 2)[0] == "sim-misaligned"


def test_an_address_that_crosses_the_end_of_an_array_is_refused():
    @T.prim_func
    def f(X: T.Tensor((2,), "float32"), P: T.Tensor((1,), T.ptr)):
        with T.Kernel(1, threads=1):
            A = T.make_tensor(P[0] + 4, (1,), "float64")
            A[0] = T.cast(X[0], "float64")

    x = np.zeros(4, np.float32)
    for on in ("tile", "simulator"):
        with pytest.raises(TileLangError) as e:
            call(f, x[1:3], np.array([x[1:].ctypes.data], np.int64), on=on)
        assert e.value.kind == "sim-address" and "end of X" in str(e.value)


def test_shared_memory_is_no_place_to_begin_at_a_changing_element():
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=8):
                S = T.alloc_shared((8,), "float32")
                V = T.decl_buffer((1,), "float32", data=S.data, scope="shared.dyn", elem_offset=T.get_thread_binding())
                A[0] = V[0]
    assert e.value.kind == "pointer" and "changes" in str(e.value)
