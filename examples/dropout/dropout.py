"""Random numbers inside kernels: dropout whose mask is never stored, and normal noise.

T.rng_init gives a thread a stream of its own, named by a seed and a sequence number; the numbers depend on nothing else:
not on the target, the grid or the order of blocks.  So the backward pass makes the same mask again from the same seed,
and no mask travels through memory.  The generator is Philox4x32-10, as in cuRAND; the reference here is written anew.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T

EACH = 8  # elements a thread handles: neighbours in memory, numbers from one stream


def dropout(n: int, p: float, threads: int = 128, dtype: str = "float16"):
    """Y = X / (1 - p) where a number of [0, 2**32) is at least p 2**32, else 0.  Of gradients it is the backward pass."""
    limit, scale = min(int(p * 2**32), 2**32 - 1), 1 / (1 - p)

    @T.prim_func
    def program(X: T.Tensor((n,), dtype), seed: T.int32, Y: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, threads * EACH), threads=threads) as bx:
            stream = bx * threads + T.get_thread_binding()
            T.rng_init(seed, stream)
            for k in T.unroll(EACH):
                keep = T.rng_rand() >= T.uint32(limit)
                if stream * EACH + k < n:
                    Y[stream * EACH + k] = T.if_then_else(keep, X[stream * EACH + k] * T.float32(scale), 0)

    return program


def noise(n: int, threads: int = 128):
    """Y: (n,) float32, standard normal numbers."""
    @T.prim_func
    def program(seed: T.int32, Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, threads * EACH), threads=threads) as bx:
            stream = bx * threads + T.get_thread_binding()
            T.rng_init(seed, stream)
            for k in T.serial(EACH):
                z = T.rng_rand_float(dist="normal")
                if stream * EACH + k < n:
                    Y[stream * EACH + k] = z

    return program


def philox(seed: int, streams: int, count: int) -> np.ndarray:
    """(streams, count) words: ten rounds over a counter (position / 4, 0, stream, 0) with the seed as key."""
    position = np.arange(-(-count // 4), dtype=np.uint64)
    c = [np.broadcast_to(v, (streams, position.size)) for v in
         (position, np.uint64(0), np.arange(streams, dtype=np.uint64)[:, None], np.uint64(0))]
    low = np.uint64(2**32 - 1)
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(q >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]), q & low, (p >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]), p & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, -1).reshape(streams, -1)[:, :count].astype(np.uint32)


def check_dropout(n: int = 2**22 + 5, p: float = 0.3, seed: int = 1234, on: Place = HERE) -> list[Comparison]:
    """The mask bit for bit, forward and backward; one rounding of the scaled value."""
    x, dy = normal(n, "float16"), normal(n, "float16", 1)
    keep = philox(seed, -(-n // EACH), EACH).ravel()[:n] >= int(p * 2**32)
    kernel = on.compile(dropout(n, p), out_idx=[2])
    results = []
    for name, given in (("forward", x), ("backward", dy)):
        got = kernel(given, seed)
        want = np.where(keep, wide(given) / (1 - p), 0.0)
        results += [compare(f"dropout {name}", got, want, (EPS["float16"] + 2 * EPS["float32"]) * abs(want) + 2.0**-25),
                    compare(f"dropout {name}, mask", np.asarray(got) != 0, keep & (given != 0))]
    return results


def check_noise(n: int = 2**22, seed: int = 7, on: Place = HERE) -> list[Comparison]:
    """Moments of n independent normal numbers: mean, variance and fourth moment within six of their own deviations."""
    y = wide(on.compile(noise(n), out_idx=[1])(seed))
    return [compare(f"noise, moment {k}", (y**k).mean(), want, 6 * (spread / n)**0.5)
            for k, want, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96))]


if __name__ == "__main__":
    main(check_dropout, check_noise)
