"""Wide raw loads and stores (language 14): values are those of the bytes in memory, on every execution."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype

LOADS = {32: T.ldg32, 64: T.ldg64, 128: T.ldg128, 256: T.ldg256}
STORES = {32: T.stg32, 64: T.stg64, 128: T.stg128, 256: T.stg256}
DTYPES = ("float16", "float32", "int8", "bfloat16", "uint16", "float8_e4m3")


def moved(bits, dtype):
    """Y = X, `bits` bits a thread, through registers as uint32 words; W holds the first word of each."""
    n, load, store = 16 * bits // T.dtype(dtype).bits, LOADS[bits], STORES[bits]
    step = n // 16

    @T.prim_func
    def f(X: T.Tensor((n,), dtype), Y: T.Tensor((n,), dtype), W: T.Tensor((16,), "uint32")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            v = load(X[t * step])
            store(Y[t * step], v)
            W[t] = v if bits == 32 else T.extract_lane(v, 0)

    return f, n


@pytest.mark.spec("T.ldg32", "T.ldg64", "T.ldg128", "T.ldg256", "T.stg32", "T.stg64", "T.stg128", "T.stg256", "L14:wide-access")
@pytest.mark.parametrize("bits", LOADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_global_memory_moves_as_words(bits, dtype):
    if T.dtype(dtype).bits > bits:
        pytest.skip("an element is wider")
    f, n = moved(bits, dtype)
    raw = np.random.default_rng(bits).integers(0, 120, n * T.dtype(dtype).bytes).astype(np.uint8)
    x = raw.view(numpy_dtype(dtype))
    got, y, w = everywhere(f, x)
    assert y.tobytes() == raw.tobytes() and got.tobytes() == raw.tobytes()
    assert np.array_equal(w, raw.view(np.uint32)[::bits // 32])


@pytest.mark.parametrize("bits", LOADS)
def test_global_words_assemble(bits):
    text = cuda_text(moved(bits, "float16")[0])
    assert "tl::load" in text or bits == 32


@pytest.mark.spec("T.lds32", "T.lds64", "T.lds128", "T.sts32", "T.sts64", "T.sts128")
@pytest.mark.parametrize("bits", (32, 64, 128))
def test_shared_memory_moves_as_words(bits):
    load = {32: T.lds32, 64: T.lds64, 128: T.lds128}[bits]
    store = {32: T.sts32, 64: T.sts64, 128: T.sts128}[bits]
    step = bits // 16
    n = 32 * step

    @T.prim_func
    def f(X: T.Tensor((n,), "float16"), Y: T.Tensor((n,), "float16")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "float16")
            R = T.alloc_shared((n,), "float16")
            t = T.get_thread_binding()
            T.copy(X, S)
            store(R[(31 - t) * step], load(S[t * step]))
            T.copy(R, Y)

    x = np.random.default_rng(0).standard_normal(n).astype(np.float16)
    assert np.array_equal(everywhere(f, x)[1], x.reshape(32, step)[::-1].ravel())
    cuda_text(f)


@pytest.mark.spec("L14:wide-access")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_false_predicate_reads_zeros_and_writes_nothing(on):
    @T.prim_func
    def f(X: T.Tensor((32,), "float32"), Y: T.Tensor((32,), "float32"), Z: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            T.stg128(Y[t * 4], T.ldg128(X[t * 4], pred=t < 5))
            T.stg128(Z[t * 4:t * 4 + 4], T.ldg128(X[t * 4:t * 4 + 4]), pred=t >= 3)

    x = np.arange(1, 33, dtype=np.float32)
    _, y, z = run(f, x, np.full(32, -1, np.float32), np.full(32, -1, np.float32), on=on)
    assert np.array_equal(y, np.where(np.arange(32) < 20, x, 0)) and np.array_equal(z, np.where(np.arange(32) < 12, -1, x))


@pytest.mark.spec("L14:wide-access")
def test_whole_buffers_start_at_their_first_element():
    @T.prim_func
    def f(X: T.Tensor((2, 4), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=1):
            T.stg128(Y, T.ldg128(X))

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert np.array_equal(everywhere(f, x)[1], x[0])


@pytest.mark.spec("L14:wide-access")
@pytest.mark.parametrize("build,kind", [
    (lambda A, S, D: T.ldg32(A[0] + 1), "wide-operand"), (lambda A, S, D: T.ldg32(3), "wide-operand"),
    (lambda A, S, D: T.ldg64(S[0]), "wide-operand"), (lambda A, S, D: T.lds32(A[0]), "wide-operand"),
    (lambda A, S, D: T.ldg32(D[0]), "bit-size"), (lambda A, S, D: T.stg128(A[0], T.ldg64(A[0])), "bit-size"),
    (lambda A, S, D: T.sts64(S[0], 1.0), "bit-size")])
def test_operands_that_are_refused(build, kind):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(A: T.Tensor((64,), "float32"), D: T.Tensor((64,), "float64")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((64,), "float32")
                build(A, S, D)
    assert e.value.kind == kind
    with pytest.raises(TypeError):
        T.lds32(1, 2)


@pytest.mark.spec("T.add2")
@pytest.mark.spec("L5:slice-value")
def test_a_slice_as_a_value_may_start_anywhere():
    @T.prim_func
    def f(n: T.int32, X: T.Tensor((3, 24), "float16"), Y: T.Tensor((6, 4), "float16")):
        with T.Kernel(1, threads=1):
            S = T.alloc_shared((3, 24), "float16")
            L = T.alloc_local((3, 24), "float16")
            T.copy(X, S)
            for i, j in T.grid(3, 24):
                L[i, j] = X[i, j]
            a = T.add2(X[1, 1:3], X[2, n:n + 2])
            b = T.add2(S[1, 1:3], S[2, n:n + 2])
            c = T.add2(L[1, 1:3], L[2, n:n + 2])
            Y[0, 0:2] = a
            Y[1, 1:3] = b
            Y[2, 2:4] = c
            d = X[1, 4:8] + S[0, 3:7]
            Y[3, 0:4] = d
            L[1, 3:7] = d
            Y[4, 0:4] = L[1, 3:7]
            S[2, 5:9] = d
            Y[5, 0:4] = S[2, 5:9]

    x = np.arange(72, dtype=np.float16).reshape(3, 24)
    y = everywhere(f, 5, x)[1]
    two = x[1, 1:3] + x[2, 5:7]
    for r in range(3):
        assert np.array_equal(y[r, r:r + 2], two)
    assert (y[3:] == x[1, 4:8] + x[0, 3:7]).all()
    cuda_text(f)
