"""Random numbers of a thread (language 20): cuRAND's Philox by an independent computation, the same on every execution."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

THREADS, DRAWS = 40, 7
M32 = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 of Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & M32, (p0 >> 32) ^ c[3] ^ k[1], p0 & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return c


def words(seed, seq, off, n):
    """The n first words after curand_init(seed, seq, off)."""
    out = []
    for i in range(off, off + n):
        at = (i // 4) | seq << 64
        out.append(philox([(at >> 32 * j) & M32 for j in range(4)], (seed & M32, seed >> 32))[i % 4])
    return out


def test_the_reference_is_philox():
    """Known answers of the Philox paper's test vectors (philox4x32, 10 rounds)."""
    assert philox([0] * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([M32] * 4, (M32, M32)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.spec("must:20-random")
@pytest.mark.spec("T.rng_init", "T.rng_rand", "L20:rng")
@pytest.mark.parametrize("seed,off", [(42, 0), (2 ** 40 + 5, 6), (0, 2 ** 34 + 3)])
def test_words_are_those_of_philox(seed, off):
    @T.prim_func
    def f(Y: T.Tensor((THREADS, DRAWS), "uint32")):
        with T.Kernel(2, threads=THREADS // 2) as bx:
            T.rng_init(seed, off=off)
            for k in T.serial(DRAWS):
                Y[bx * (THREADS // 2) + T.get_thread_binding(), k] = T.rng_rand()

    (y,) = everywhere(f)
    assert y.tolist() == [words(seed, t, off, DRAWS) for t in range(THREADS)]
    cuda_text(f)


@pytest.mark.spec("T.rng_init", "L20:rng")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_the_sequence_may_be_chosen_and_started_again(on):
    @T.prim_func
    def f(n: T.int32, Y: T.Tensor((2, 32, 2), "uint32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            for r in T.serial(2):
                T.rng_init(n, t * 3 + r, 1)
                Y[r, t, 0] = T.rng_rand()
                Y[r, t, 1] = T.rng_rand()

    (y,) = run(f, 7, on=on)
    assert y.tolist() == [[words(7, t * 3 + r, 1, 2) for t in range(32)] for r in range(2)]


@pytest.mark.spec("T.rng_rand_float", "L20:rng")
@pytest.mark.parametrize("bit", (32, 64))
def test_uniform_numbers(bit):
    @T.prim_func
    def f(Y: T.Tensor((64, 5), f"float{bit}")):
        with T.Kernel(1, threads=64):
            T.rng_init(1)
            for k in T.serial(5):
                Y[T.get_thread_binding(), k] = T.rng_rand_float(bit=bit)

    ref = np.array([words(1, t, 0, 5) for t in range(64)], np.float64) * 2.0 ** -32 + 2.0 ** -33
    for on in EXECUTIONS:
        (y,) = run(f, on=on)
        assert np.abs(y - ref).max() < 2.0 ** -23 and (y > 0).all() and (y <= 1).all()
    cuda_text(f)


@pytest.mark.spec("T.rng_rand_float", "L20:rng")
@pytest.mark.parametrize("bit", (32, 64))
def test_normal_numbers_come_in_pairs(bit):
    @T.prim_func
    def f(Y: T.Tensor((64, 5), f"float{bit}")):
        with T.Kernel(1, threads=64):
            T.rng_init(3)
            for k in T.serial(5):
                Y[T.get_thread_binding(), k] = T.rng_rand_float(bit, "normal")

    per = bit // 16
    w = np.array([words(3, t, 0, 3 * per) for t in range(64)], np.uint64).reshape(64, 3, per)
    if bit == 32:
        u, v = (w[..., i].astype(np.float64) * 2.0 ** -32 + 2.0 ** -33 for i in range(2))
    else:
        z = w[..., 0::2] ^ (w[..., 1::2] << np.uint64(21))
        u, v = (z[..., i].astype(np.float64) * 2.0 ** -53 + 2.0 ** -54 for i in range(2))
    r = np.sqrt(-2 * np.log(u))
    ref = np.stack([r * np.sin(2 * np.pi * v), r * np.cos(2 * np.pi * v)], -1).reshape(64, 6)[:, :5]
    for on in EXECUTIONS:
        (y,) = run(f, on=on)
        assert np.abs(y - ref).max() < (2e-5 if bit == 32 else 1e-13)
    cuda_text(f)


@pytest.mark.spec("L20:rng")
@pytest.mark.parametrize("build,kind", [
    (lambda: T.rng_rand(), "rng"), (lambda: T.rng_init(1, generator="other"), "rng"), (lambda: T.rng_init(1.5), "rng"),
    (lambda: (T.rng_init(1), T.rng_rand_float(16)), "rng"), (lambda: (T.rng_init(1), T.rng_rand_float(dist="gamma")), "rng"),
    (lambda: T.rng_init(1, generator="curandStateXORWOW_t"), "not-available"),
    (lambda: T.rng_init(1, generator="curandStateMRG32k3a_t"), "not-available")])
def test_what_is_refused(build, kind):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(Y: T.Tensor((4,), "uint32")):
            with T.Kernel(1, threads=4):
                build()
    assert e.value.kind == kind
    assert kind != "rng" or isinstance(e.value, AssertionError)
