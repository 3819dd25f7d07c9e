"""Random numbers of a thread (language 20): cuRAND's Philox by an independent computation, the same on every execution."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.language.generators import Xorwow

THREADS, DRAWS = 40, 7
XORWOW, MRG = "curandStateXORWOW_t", "curandStateMRG32k3a_t"
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


# Words after curand_init(seed, sequence, offset) of cuRAND 10.4.5, whose device header was compiled for the host.
OF_CURAND = {
    (XORWOW, (0, 0, 0)): [3179217846, 1883133293, 2220552389, 674260989],
    (XORWOW, (42, 1, 0)): [687819970, 2592620328, 2975550928, 2672029660],
    (XORWOW, (1099511627781, 37, 3)): [393217160, 1444945848, 742106721, 3011600592],
    (XORWOW, (0, 0, 17179869187)): [1552972210, 2320204213, 2789275551, 3614188823],
    (XORWOW, (42, 8589934599, 3)): [142135085, 217596647, 1567979299, 1848563526],
    (XORWOW, (1099511627781, 8589934599, 17179869187)): [3042377411, 3583694391, 4038857507, 1067588711],
    (MRG, (0, 0, 0)): [545508615, 1368065476, 1327943825, 3546985268],
    (MRG, (42, 1, 0)): [473693671, 2915688571, 3765870715, 929260147],
    (MRG, (1099511627781, 37, 3)): [471436137, 323423041, 773329658, 2833659929],
    (MRG, (0, 0, 17179869187)): [374338888, 2677238178, 509204226, 2464058949],
    (MRG, (42, 8589934599, 3)): [904329136, 1513318252, 500240604, 2149638955],
    (MRG, (1099511627781, 8589934599, 17179869187)): [3381733158, 2545262440, 3502313529, 806389026],
}
NEAR = [(0, 0, 0), (42, 1, 0), (2**40 + 5, 37, 3)]
FAR = [(0, 0, 2**34 + 3), (42, 2**33 + 7, 3), (2**40 + 5, 2**33 + 7, 2**34 + 3)]


def words_of(generator, cases):
    """A program that draws four words for each row (seed, sequence, offset) of a tensor."""
    N = len(cases)

    @T.prim_func
    def f(C: T.Tensor((N, 3), "int64"), Y: T.Tensor((N, 4), "uint32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            T.rng_init(C[t, 0], C[t, 1], C[t, 2], generator)
            for k in T.serial(4):
                Y[t, k] = T.rng_rand()

    return f


@pytest.mark.spec("T.rng_init", "T.rng_rand", "L20:rng")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("generator", (XORWOW, MRG))
def test_words_are_those_of_curands_other_generators(generator, on):
    y = run(words_of(generator, NEAR), np.array(NEAR), on=on)[1]
    assert y.tolist() == [OF_CURAND[generator, case] for case in NEAR]


@pytest.mark.spec("T.rng_init", "L20:rng")
@pytest.mark.parametrize("generator", (XORWOW, MRG))
def test_sequences_and_offsets_may_be_far(generator):
    f = words_of(generator, FAR)
    assert run(f, np.array(FAR), on="cpu")[1].tolist() == [OF_CURAND[generator, case] for case in FAR]
    cuda_text(f)


@pytest.mark.spec("T.rng_rand_float", "L20:rng")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("generator,bit,uniform,normal", [
    (XORWOW, 32, [0.995697677, 0.505169094], [-0.00301545602, -0.0928122625, 0.559383869]),
    (XORWOW, 64, [0.5051692217096786, 0.056354883217631435], [0.40520930294996099, 1.096142804332281, -0.51627369247608712]),
    (MRG, 32, [0.297252566, 0.476877421], [0.225508779, -1.5412631, -0.603051662]),
    (MRG, 64, [0.2972525777588107, 0.47687742129605759], [0.22550887646345674, -1.5412630825034577, -0.60305168440990164])])
def test_floats_of_curands_other_generators(generator, bit, uniform, normal, on):
    """Of seed 1, sequence 2, offset 0."""
    @T.prim_func
    def f(Y: T.Tensor((2,), f"float{bit}"), Z: T.Tensor((3,), f"float{bit}")):
        with T.Kernel(1, threads=1):
            T.rng_init(1, 2, 0, generator)
            for i in T.serial(2):
                Y[i] = T.rng_rand_float(bit)
            T.rng_init(1, 2, 0, generator)
            for i in T.serial(3):
                Z[i] = T.rng_rand_float(bit, "normal")

    y, z = run(f, on=on)
    bound = 1e-6 if bit == 32 else 1e-14
    assert np.abs(y - uniform).max() < bound and np.abs(z - normal).max() < bound


def test_the_polynomial_of_xorwow_is_that_of_its_steps():
    """Cayley and Hamilton: the steps whose powers it has cancel each other in every state."""
    v, total = [123456789, 362436069, 521288629, 88675123, 5783321], [0] * 5
    for i in range(161):
        if Xorwow.STEPS >> i & 1:
            total = [a ^ b for a, b in zip(total, v)]
        t = v[0] ^ v[0] >> 2
        v = [*v[1:], (v[4] ^ v[4] << 4 ^ t ^ t << 1) & M32]
    assert total == [0] * 5 and Xorwow.STEPS >> 160 == 1


def block_words(key, low, high):
    """The 64 bits of Philox's first two words for a key and the halves of a counter."""
    c = philox([low & M32, low >> 32, high & M32, high >> 32], (key & M32, key >> 32))
    return c[0] | c[1] << 32


def of_iterations(seed, seq, off, before, count, n):
    """n words of each iteration of a T.Parallel, `before` executions of such loops after T.rng_init(seed, seq, off)."""
    key = block_words(seed, off + before, seq)
    return [words(key, number, 0, n) for number in range(count)]


@pytest.mark.spec("T.rng_init", "T.rng_rand", "L20:rng")
def test_iterations_draw_by_their_number_and_threads_as_before():
    @T.prim_func
    def f(Y: T.Tensor((4, 96), "uint32"), Z: T.Tensor((4, 8, 6, 5), "uint32"), W: T.Tensor((64, 2), "uint32")):
        with T.Kernel(2, threads=32) as bx:
            t = T.get_thread_binding()
            T.rng_init(5, bx * 32 + t, 3)
            W[bx * 32 + t, 0] = T.rng_rand()
            for r in T.serial(2):
                for i in T.Parallel(96):
                    Y[bx * 2 + r, i] = T.rng_rand()
                for i, j in T.Parallel(8, 6):
                    for k in T.serial(5):
                        Z[bx * 2 + r, i, j, k] = T.rng_rand()
            W[bx * 32 + t, 1] = T.rng_rand()

    y, z, w = everywhere(f)
    assert w.tolist() == [words(5, t, 3, 2) for t in range(64)]
    for bx, r in np.ndindex(2, 2):
        row, seq = bx * 2 + r, bx * 32
        assert y[row, :, None].tolist() == of_iterations(5, seq, 3, 2 * r, 96, 1)
        assert z[row].reshape(48, 5).tolist() == of_iterations(5, seq, 3, 2 * r + 1, 48, 5)
    cuda_text(f)


@pytest.mark.spec("T.rng_init", "L20:rng")
def test_numbers_of_iterations_do_not_depend_on_threads_or_layout():
    def program(threads, layout):
        @T.prim_func
        def f(Y: T.Tensor((2, 3, 16, 24), "float32")):
            with T.Kernel(2, 3, threads=threads) as (bx, by):
                T.rng_init(11)
                for i, j in T.Parallel(16, 24, loop_layout=layout):
                    Y[bx, by, i, j] = T.rng_rand_float()

        return f

    rows = T.Fragment((16, 24), forward_fn=lambda i, j: (i * 4 + j // 6, j % 6))
    got = [y for form in ((32, None), (128, None), (64, rows)) for y in everywhere(program(*form))]
    assert all(np.array_equal(g, got[0]) for g in got)
    ref = [of_iterations(11, bx + 2 * by, 0, 0, 16 * 24, 1) for bx, by in np.ndindex(2, 3)]
    assert np.abs(got[0].ravel() - (np.array(ref, np.float64) * 2.0**-32 + 2.0**-33).ravel()).max() < 2.0**-23


@pytest.mark.spec("T.rng_init", "L20:rng")
@pytest.mark.parametrize("generator", (XORWOW, MRG))
@pytest.mark.parametrize("on", EXECUTIONS)
def test_iterations_of_curands_other_generators_have_seeds_of_their_own(generator, on):
    @T.prim_func
    def f(Y: T.Tensor((48, 2), "uint32"), Z: T.Tensor((48, 2), "uint32"), S: T.Tensor((48,), "uint64")):
        with T.Kernel(1, threads=32):
            T.rng_init(9, 4, 0, generator)
            for i in T.Parallel(48):
                for k in T.serial(2):
                    Y[i, k] = T.rng_rand()
            for i in T.Parallel(48):
                T.rng_init(S[i], 0, 0, generator)
                for k in T.serial(2):
                    Z[i, k] = T.rng_rand()

    key = block_words(9, 0, 4)
    seeds = np.array([block_words(key, 0, number) for number in range(48)], np.uint64)
    y, z, _ = run(f, np.zeros((48, 2), np.uint32), np.zeros((48, 2), np.uint32), seeds, on=on)
    assert np.array_equal(y, z) and len(np.unique(y)) == 96


@pytest.mark.spec("L20:rng")
def test_iterations_need_a_seed_that_all_threads_share():
    @T.prim_func
    def f(S: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "uint32")):
        with T.Kernel(1, threads=64):
            v = T.alloc_var("int32")
            v = S[T.get_thread_binding()]
            T.rng_init(v)
            for i in T.Parallel(64):
                Y[i] = T.rng_rand()

    with pytest.raises(TileLangError) as e:
        run(f, on="cpu")
    assert e.value.kind == "parallel-thread"


@pytest.mark.spec("L20:rng")
@pytest.mark.parametrize("build,kind", [
    (lambda: T.rng_rand(), "rng"), (lambda: T.rng_init(1, generator="other"), "rng"), (lambda: T.rng_init(1.5), "rng"),
    (lambda: (T.rng_init(1), T.rng_rand_float(16)), "rng"), (lambda: (T.rng_init(1), T.rng_rand_float(dist="gamma")), "rng"),
    (lambda: (T.rng_init(1), T.rng_init(1, generator=XORWOW)), "rng")])
def test_what_is_refused(build, kind):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(Y: T.Tensor((4,), "uint32")):
            with T.Kernel(1, threads=4):
                build()
    assert e.value.kind == kind
    assert isinstance(e.value, AssertionError)
