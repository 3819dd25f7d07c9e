"""Programs that draw random numbers in T.Parallel: masks and scales are right, the numbers have their distribution."""

import numpy as np
import pytest
from everywhere import cuda_text, everywhere

import tilelang.language as T

F32, F16 = "float32", "float16"


def fair(drawn, p):
    """Whether a share p of independent trials came true: within 5 deviations."""
    drawn = np.asarray(drawn, np.float64)
    return abs(drawn.mean() - p) < 5 * np.sqrt(p * (1 - p) / drawn.size)


def unrelated(a, b):
    """Whether two rows of numbers are uncorrelated within 5 deviations."""
    a, b = (x - x.mean() for x in (np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)))
    return abs((a * b).mean()) < 5 * a.std() * b.std() / np.sqrt(a.size)


@pytest.mark.parametrize("p", (0.1, 0.5))
def test_dropout_of_a_fragment_with_scale(p):
    @T.prim_func
    def f(X: T.Tensor((100, 96), F32), seed: T.int32, Y: T.Tensor((100, 96), F32)):
        with T.Kernel(T.ceildiv(96, 64), T.ceildiv(100, 32), threads=128) as (bx, by):
            F = T.alloc_fragment((32, 64), F32)
            T.copy(X[by * 32, bx * 64], F)
            T.rng_init(seed)
            for i, j in T.Parallel(32, 64):
                F[i, j] = T.if_then_else(T.rng_rand_float() > p, F[i, j] * T.float32(1 / (1 - p)), 0.0)
            T.copy(F, Y[by * 32, bx * 64])

    x = np.random.default_rng(1).uniform(1, 2, (100, 96)).astype(np.float32)
    y, other = everywhere(f, x, 3)[-1], everywhere(f, x, 4, on=("tile",))[-1]
    kept = y != 0
    assert np.array_equal(y[kept], (x * np.float32(1 / (1 - p)))[kept]) and fair(kept, 1 - p)
    assert unrelated(kept[:32, :64], kept[32:64, :64]) and unrelated(kept[:96, :32], kept[:96, 64:])
    assert unrelated(kept, other != 0)
    cuda_text(f)


def test_dropout_of_attention_probabilities():
    """Each key tile drops other probabilities; the sum of the row is that of all of them."""
    S, D, keep = 64, 32, 0.75

    @T.prim_func
    def f(Q: T.Tensor((S, D), F16), K: T.Tensor((S, D), F16), O: T.Tensor((S, S), F32), M: T.Tensor((S, S), "int32")):
        with T.Kernel(S // 32, threads=128) as bx:
            q = T.alloc_shared((32, D), F16)
            k = T.alloc_shared((32, D), F16)
            s = T.alloc_fragment((32, 32), F32)
            T.copy(Q[bx * 32, 0], q)
            T.rng_init(2024, bx)
            for n in T.Pipelined(S // 32, num_stages=2):
                T.copy(K[n * 32, 0], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(32, 32):
                    s[i, j] = T.exp2(s[i, j])
                for i, j in T.Parallel(32, 32):
                    u = T.rng_rand_float()
                    M[bx * 32 + i, n * 32 + j] = T.if_then_else(u < keep, 1, 0)
                    s[i, j] = T.if_then_else(u < keep, s[i, j] / keep, 0.0)
                T.copy(s, O[bx * 32, n * 32])

    rng = np.random.default_rng(2)
    q, k = (rng.integers(-1, 2, (S, D)).astype(np.float16) / 8 for _ in range(2))
    masks = []
    for on in ("tile", "simulator", "cpu", "sm_90a"):
        _, _, o, m = everywhere(f, q, k, on=(on,))
        want = np.exp2(q.astype(np.float64) @ k.astype(np.float64).T) * m / keep
        assert np.abs(o - want).max() < 1e-5 and fair(m, keep)
        assert unrelated(m[:, :32], m[:, 32:]) and unrelated(m[:32], m[32:])
        masks.append(m)
    assert all(np.array_equal(m, masks[0]) for m in masks)
    cuda_text(f)


@pytest.mark.parametrize("shared", (False, True))
def test_normal_initialisation(shared):
    @T.prim_func
    def f(Y: T.Tensor((128, 64), F32)):
        with T.Kernel(4, threads=64) as bx:
            W = T.alloc_shared((32, 64), F32) if shared else T.alloc_fragment((32, 64), F32)
            T.rng_init(17, bx * 64 + T.get_thread_binding())
            for i, j in T.Parallel(32, 64):
                W[i, j] = T.rng_rand_float(dist="normal") * 0.5 + 1.0
            T.copy(W, Y[bx * 32, 0])

    rows = [everywhere(f, on=(on,))[0] for on in ("tile", "simulator", "cpu")]
    for y in rows:
        z = (y.astype(np.float64) - 1) / 0.5
        assert abs(z.mean()) < 5 / np.sqrt(z.size) and abs(z.std() - 1) < 5 / np.sqrt(2 * z.size)
        assert fair(np.abs(z) < 1, 0.682689) and fair(z > 1.644854, 0.05) and len(np.unique(y)) > 0.99 * y.size
        assert np.abs(y - rows[0]).max() < 1e-5  # sine and logarithm differ in their last bits
    cuda_text(f)


def test_draws_under_a_condition_and_repeated_until_accepted():
    @T.prim_func
    def f(Y: T.Tensor((256,), F32), N: T.Tensor((256,), "int32")):
        with T.Kernel(2, threads=64) as bx:
            T.rng_init(5)
            for i in T.Parallel(128):
                n = T.alloc_var("int32", init=0)
                u = T.alloc_var(F32, init=1.0)
                if i % 2 == 0:
                    while u > 0.25:
                        u = T.rng_rand_float()
                        n += 1
                else:
                    u = T.rng_rand_float()
                Y[bx * 128 + i] = u
                N[bx * 128 + i] = n

    y, n = everywhere(f)
    assert (y[::2] <= 0.25).all() and 2.5 < n[::2].mean() < 6 and fair(y[1::2] > 0.5, 0.5) and len(np.unique(y)) == 256
    cuda_text(f)
