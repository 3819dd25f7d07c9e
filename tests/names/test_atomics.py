"""Atomics (section 13) on every execution: each element once, old values, orders, unavailable_names."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype

N = 64
RNG = np.random.default_rng(0)
ATOMIC = {"add": (T.atomic_add, np.add), "max": (T.atomic_max, np.maximum), "min": (T.atomic_min, np.minimum)}


@pytest.mark.spec("L13:scalar")
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64", "float16"])
@pytest.mark.parametrize("name", ATOMIC)
def test_one_element_by_each_thread(name, dtype):
    atomic, meaning = ATOMIC[name]

    @T.prim_func
    def f(X: T.Tensor((4, N), dtype), C: T.Tensor((4,), dtype)):
        with T.Kernel(4, threads=N) as b:
            i = T.get_thread_binding()
            atomic(C[b], X[b, i])

    x = RNG.integers(0, 9, (4, N)).astype(dtype)  # sums stay exact in halves
    start = np.full(4, 4, dtype)
    got = everywhere(f, x, start)[1]
    assert np.array_equal(got, meaning(meaning.reduce(x, 1), start))
    assert "atomic" in cuda_text(f)


@pytest.mark.spec("T.atomic_max", "T.atomic_min")
@pytest.mark.spec("L13:scalar")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_signs_count_in_extrema(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), C: T.Tensor((2,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            T.atomic_max(C[0], X[i])
            T.atomic_min(C[1], X[i])

    for x in (-np.arange(1, N + 1), np.arange(N) - 32):
        x = x.astype(dtype)
        start = np.array([-99, 99], dtype)
        assert run(f, x, start, on=on)[1].tolist() == [x.max(), x.min()]


@pytest.mark.spec("T.atomic_add")
@pytest.mark.spec("L13:tile")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("name", ATOMIC)
def test_tiles_update_each_element_once_per_block(name, on):
    atomic, meaning = ATOMIC[name]

    @T.prim_func
    def f(X: T.Tensor((3, 8, 8), "int32"), C: T.Tensor((8, 8), "int32"), D: T.Tensor((8, 8), "int32")):
        with T.Kernel(3, threads=32) as b:
            atomic(C, X[b, 0:8, 0:8])
            atomic(D[2:4, 0:8], 3)

    x = RNG.integers(-9, 9, (3, 8, 8)).astype(np.int32)
    c, d = RNG.integers(-9, 9, (2, 8, 8)).astype(np.int32)
    _, got_c, got_d = run(f, x, c, d, on=on)
    assert np.array_equal(got_c, meaning(meaning.reduce(x, 0), c))
    want = d.copy()
    for _ in range(3):
        want[2:4] = meaning(want[2:4], 3)
    assert np.array_equal(got_d, want)


@pytest.mark.spec("L13:scalar")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_old_values_are_those_of_some_order(on):
    @T.prim_func
    def f(C: T.Tensor((1,), "int32"), M: T.Tensor((1,), "int32"), O: T.Tensor((3, N), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            O[0, i] = T.atomic_add(C[0], 1, return_prev=True)
            O[1, i] = T.atomic_max(M[0], i, return_prev=True)
            O[2, i] = T.atomic_min(M[0], -1, return_prev=True)

    c, m, o = run(f, on=on)
    assert c[0] == N and sorted(o[0]) == list(range(N))
    assert m[0] == -1 and o[1].min() == 0 and o[1].max() < N  # the first saw the initial 0
    assert (o[2] >= 0).any() and (o[2] == -1).any()


@pytest.mark.spec("T.atomic_or")
@pytest.mark.spec("L13:load-store")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_or(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), C: T.Tensor((2,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            T.atomic_or(C[i % 2], X[i], memory_order="relaxed")

    x = (1 << RNG.integers(0, 31, N)).astype(dtype)
    x[::3] = 0
    start = np.array([1, 0], dtype)
    want = [np.bitwise_or.reduce(x[0::2]) | 1, np.bitwise_or.reduce(x[1::2])]
    assert run(f, x, start, on=on)[1].tolist() == want
    if on == "tile":
        cuda_text(f)


@pytest.mark.spec("T.atomic_load", "T.atomic_store")
@pytest.mark.spec("L13:load-store")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("store, load", [("relaxed", "relaxed"), ("release", "acquire"), ("seq_cst", "consume"),
                                         ("seq_cst", "seq_cst")])
def test_loads_and_stores(store, load, on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), C: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            T.atomic_store(C[i], X[i] + 1, memory_order=store)
            Y[i] = T.atomic_load(C[i], memory_order=load) * 2

    x = np.arange(N, dtype=np.int32)
    _, c, y = run(f, x, on=on)
    assert np.array_equal(c, x + 1) and np.array_equal(y, 2 * x + 2)
    if on == "tile":
        cuda_text(f)


@pytest.mark.parametrize("on", EXECUTIONS)
def test_in_shared_memory(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            S = T.alloc_shared((8,), "int32")
            T.clear(S)
            T.atomic_add(S[X[i] % 8], 1)
            T.atomic_or(S[0], 1024)
            T.copy(S, Y)

    x = RNG.integers(0, 99, N).astype(np.int32)
    want = np.bincount(x % 8, minlength=8)
    want[0] |= 1024
    assert run(f, x, on=on)[1].tolist() == want.tolist()


def refuses(error, kind, body, dtype="int32"):
    with pytest.raises(error) as e:
        @T.prim_func
        def f(C: T.Tensor((4,), dtype)):
            with T.Kernel(1, threads=N):
                body(C)
    assert e.value.kind == kind


@pytest.mark.spec("L13:load-store")
def test_refusals():
    for atomic in (T.atomic_add, T.atomic_max, T.atomic_min):
        refuses(KeyError, "atomic-order", lambda C, atomic=atomic: atomic(C[0], 1, memory_order="weak"))
        refuses(NotImplementedError, "atomic-previous", lambda C, atomic=atomic: atomic(C[0:4], 1, return_prev=True))
        refuses(TypeError, "atomic-operand", lambda C, atomic=atomic: atomic(3, 1))
        refuses(TileLangError, "atomic-dtype", lambda C, atomic=atomic: atomic(C[0], 1), "int8")
    refuses(NotImplementedError, "atomic-previous", lambda C: T.atomic_or(C, 1))
    refuses(TypeError, "atomic-operand", lambda C: T.atomic_or(C[0], 1), "float32")
    refuses(ValueError, "atomic-load-order", lambda C: T.atomic_store(C[0], 1, memory_order="acquire"))
    refuses(ValueError, "atomic-load-order", lambda C: T.atomic_load(C[0], memory_order="release"))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("order", [None, "acq_rel"])
def test_bits_differences_and_exchanges_with_old_values(dtype, shared, order):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype), Z: T.Tensor((5, N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            s = T.alloc_shared((N,), dtype) if shared else Y
            if shared:
                T.copy(Y, s)
            Z[0, i] = T.atomic_or(s[i], X[i], order, return_prev=True)
            Z[1, i] = T.atomic_and(s[i], 29, order, return_prev=True)
            Z[2, i] = T.atomic_xor(s[i], X[i], order, return_prev=True)
            Z[3, i] = T.atomic_sub(s[i], 3, order, return_prev=True)
            Z[4, i] = T.atomic_exch(s[i], X[i], order, return_prev=True)
            T.atomic_sub(s[i], X[i])
            T.atomic_xor(s[i], 6)
            T.atomic_and(s[i], 5)
            if shared:
                T.copy(s, Y)

    x, y = np.arange(N).astype(dtype), (np.arange(N) * 5 % 32).astype(dtype)
    old = [y, y | x, (y | x) & 29, (y | x) & 29 ^ x, ((y | x) & 29 ^ x) - np.array(3, dtype)]
    _, after, got = everywhere(f, x, y, np.zeros((5, N), dtype))
    assert np.array_equal(got, np.stack(old)) and (after == 4).all()
    assert "atomic_xor" in cuda_text(f)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_differences_and_exchanges_of_floats(dtype):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            T.atomic_sub(Y[i], X[i])
            Z[i] = T.atomic_exch(Y[i], X[N - 1 - i], return_prev=True)

    x, y = (np.arange(N).astype(numpy_dtype(dtype)) for _ in (0, 1))
    _, after, got = everywhere(f, x, y + y, np.zeros_like(x))
    assert np.array_equal(got, x) and np.array_equal(after, x[::-1])


@pytest.mark.parametrize("atomic", [T.atomic_or, T.atomic_and, T.atomic_xor, T.atomic_sub, T.atomic_exch])
@pytest.mark.parametrize("tile", [False, True])
def test_atomics_of_elements_refuse_tiles_and_other_types(atomic, tile):
    dtype = "int32" if tile else "int8"
    with pytest.raises(TileLangError, match="one element" if tile else "not defined on int8"):
        @T.prim_func
        def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype)):
            with T.Kernel(1, threads=N):
                if tile:
                    atomic(Y, X)
                else:
                    atomic(Y[0], 1)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("order", [None, "acq_rel"])
def test_an_element_is_exchanged_where_it_holds_a_value(dtype, shared, order):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), W: T.Tensor((2,), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            s = T.alloc_shared((N,), dtype) if shared else Y
            if shared:
                T.copy(Y, s)
            Z[i] = T.atomic_cas(s[i], X[i], 7 - 8 * (i % 2), order)
            if shared:
                T.copy(s, Y)
            if T.atomic_cas(W[0], 0, i + 1) == 0:  # by one thread
                T.atomic_add(W[1], 1)

    x = (np.arange(N) // 2).astype(dtype)
    y = np.where(np.arange(N) % 3 == 0, x, 200).astype(dtype)
    _, after, got, won = everywhere(f, x, y, np.zeros(N, dtype), np.zeros(2, dtype))
    new = (7 - 8 * (np.arange(N) % 2)).astype(dtype)
    assert np.array_equal(got, y) and np.array_equal(after, np.where(x == y, new, y))
    assert 1 <= won[0] <= N and won[1] == 1
    assert "atomic_cas" in cuda_text(f)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
@pytest.mark.parametrize("shared", [False, True])
def test_counters_that_wrap_around(dtype, shared):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Y: T.Tensor((N,), dtype), Z: T.Tensor((2, N), dtype), W: T.Tensor((2,), dtype)):
        with T.Kernel(2, threads=N):
            i = T.get_thread_binding()
            s = T.alloc_shared((N,), dtype)
            if T.get_block_binding(0) == 0:
                if shared:
                    T.copy(X, s)
                    Z[0, i] = T.atomic_inc(s[i], 20, return_prev=True)
                    Z[1, i] = T.atomic_dec(s[i], 5, "acq_rel", return_prev=True)
                    T.copy(s, Y)
                else:
                    Y[i] = X[i]
                    Z[0, i] = T.atomic_inc(Y[i], 20, return_prev=True)
                    Z[1, i] = T.atomic_dec(Y[i], 5, "acq_rel", return_prev=True)
            T.atomic_inc(W[0], 99)
            T.atomic_dec(W[1], 99)

    x = (np.arange(N) - (2 if dtype == "int32" else 0)).astype(dtype)
    wide = x.view(np.uint32).astype(np.int64)
    once = np.where(wide >= 20, 0, wide + 1)
    _, after, got, counts = everywhere(f, x, np.zeros_like(x), np.zeros((2, N), dtype), np.array([50, 10], dtype))
    assert np.array_equal(got, np.stack([x, once.astype(dtype)]))
    assert np.array_equal(after, np.where((once == 0) | (once > 5), 5, once - 1).astype(dtype))
    assert counts.tolist() == [78, 82]
    assert "atomic_inc" in cuda_text(f)


@pytest.mark.parametrize("call, text", [
    (lambda C: T.atomic_inc(C, 3), "one element"), (lambda C: T.atomic_cas(C[0], C, 1), "one element"),
    (lambda C: T.atomic_inc(C[0], 3), "32 bits"), (lambda C: T.atomic_cas(C[0], 0, 1, "strong"), "memory order")])
def test_exchanges_and_counters_refuse_tiles_and_other_types(call, text):
    with pytest.raises(TileLangError, match=text):
        @T.prim_func
        def f(C: T.Tensor((N,), "int64")):
            with T.Kernel(1, threads=N):
                call(C)


def test_blocks_that_take_turns_by_a_lock_were_said_to_overwrite_each_other():
    @T.prim_func
    def f(C: T.Tensor((3,), "int32")):
        with T.Kernel(4, threads=32):
            if T.get_thread_binding() == 0:
                held = T.alloc_var("int32", init=1)
                while held != 0:
                    held = T.atomic_cas(C[0], 0, 1, "acquire")
                C[1] = C[1] + 1
                T.atomic_exch(C[0], 0, "release")
            for _ in T.Parallel(64):
                T.atomic_inc(C[2], 99999)

    assert everywhere(f, np.zeros(3, np.int32), on=WITH_HOPPER)[0].tolist() == [0, 4, 256]


def test_neighbours_changed_by_four_atomics_of_a_thread_each():
    """A thread had a vector of four, so that each instruction of a warp reached four times the bytes that it changed."""
    @T.prim_func
    def f(I: T.Tensor((8,), "int32"), X: T.Tensor((8, 256), "float16"), C: T.Tensor((5, 256), "float32")):
        with T.Kernel(8, threads=64) as b:
            for j in T.Parallel(256):
                T.atomic_add(C[I[b], j], X[b, j])

    assert "+ tx" in next(s for s in cuda_text(f).splitlines() if "const int j" in s)
    rows, x = RNG.integers(0, 5, 8).astype(np.int32), RNG.integers(-9, 9, (8, 256)).astype(np.float16)
    want = np.zeros((5, 256), np.float32)
    np.add.at(want, rows, x)
    assert np.array_equal(everywhere(f, rows, x, np.zeros_like(want), on=WITH_HOPPER)[2], want)
