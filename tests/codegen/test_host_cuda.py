"""The printed text of kernels, run on the host: the arithmetic and the addresses are those of the program."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tilelang.ir import AddressOf, Store, binary, cast, const, fresh, load, numpy_dtype, select, seq

sys.path.insert(0, str(Path(__file__).parent))
from handmade import evaluate, gemm, kernel, packed, ramp, tensor, thread_vars
from host_cuda import available, run_on_host

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.pipeline import lower

pytestmark = pytest.mark.skipif(not available(), reason="g++ and a CPU with F16C are needed")


@pytest.mark.parametrize("dt", ["float16", "bfloat16"])
def test_gemm(dt, tmp_path):
    m, n, k = 128, 256, 128
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32).astype(numpy_dtype(dt)) for s in ((m, k), (k, n)))
    c = np.zeros((m, n), numpy_dtype(dt))
    run_on_host(gemm(m, n, k, dt=dt), {"A": a, "B": b, "C": c}, (n // 128, m // 128), tmp_path)
    wide = a.astype(np.float64), b.astype(np.float64)
    want = wide[0] @ wide[1]
    unit = 2.0**-11 if dt == "float16" else 2.0**-8
    bound = np.abs(want) * unit + np.abs(wide[0]) @ np.abs(wide[1]) * (k * 2.0**-24) + 2.0**-24
    assert (np.abs(c.astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize("dt, most", [("float16", 1024), ("bfloat16", 128)])
def test_integers_of_few_values_become_halves_by_their_bits(dt, most, tmp_path):
    """Every value of every range that is converted so, from -(most - 1) on, and ranges that are one value too wide."""
    tv = thread_vars()
    tx = tv[0]
    n = np.arange(2 * most, dtype=np.int32)
    a = tensor("a", (2 * most,), "int32")
    starts = [0, -1, 1 - most] + [-7 - most // 2] * (dt == "float16")
    made = [(load(a, (tx + k,)) % most + s, n[k:k + 128] % most + s) for s in starts for k in range(0, 2 * most, 128)]
    wide = [(load(a, (tx,)) % (most + 1), n[:128] % (most + 1)), (load(a, (tx,)) % most - most, n[:128] % most - most)]
    o = tensor("o", (len(made) + len(wide), 128), dt)
    got = np.zeros(o.shape, numpy_dtype(dt))
    stores = [Store(o, (const(r), tx), cast(e, dt)) for r, (e, _) in enumerate(made + wide)]
    program = packed(kernel((a, o), seq(*stores), tvars=tv))
    text = print_kernel(program)
    assert text.count("tl::small_") == len(made)
    run_on_host(program, {"a": n, "o": got}, (1,), tmp_path)
    for r, (e, want) in enumerate(made + wide):
        np.testing.assert_array_equal(got[r].view(np.uint16), want.astype(numpy_dtype(dt)).view(np.uint16), err_msg=repr(e))


def test_integer_arithmetic_and_precedence(tmp_path):
    tv = thread_vars()
    tx = tv[0]
    x = np.random.default_rng(1).integers(-2**31, 2**31, 128, dtype=np.int32)
    y = np.where(np.arange(128) % 2, 7, -5).astype(np.int32)
    s = np.arange(128, dtype=np.int8)
    a, b, c = tensor("a", (128,), "int32"), tensor("b", (128,), "int32"), tensor("c", (128,), "int8")
    va, vb, vc, i = load(a, (tx,)), load(b, (tx,)), load(c, (tx,)), tx - 64
    n = np.arange(128) - 64
    with np.errstate(over="ignore"):
        table = [
            (va + vb * va, x + y * x), (va // vb, x // y), (va % vb, x % y), (i // 3, n // 3), (i % 3, n % 3),
            (i // 8, n // 8), (i % 8, n % 8), ((va >> 3) + 1, (x >> 3) + 1), ((va & 15) ^ (vb | 3), (x & 15) ^ (y | 3)),
            (va - (vb - va), x - (y - x)), (select(va < 3, i, select(vb > 0, i + 1, i * 2)),
                                            np.where(x < 3, n, np.where(y > 0, n + 1, n * 2))),
            (binary("truncdiv", va, vb), (x.astype(float) / y).astype(np.int64).astype(np.int32)),
            (cast(vc + vc, "int32"), (s + s).astype(np.int32)), (cast(vc * vc, "int32"), (s * s).astype(np.int32)),
            (binary("max", va, vb) - binary("min", va, vb), np.maximum(x, y) - np.minimum(x, y)),
        ]
    o = tensor("o", (len(table), 128), "int32")
    got = np.zeros((len(table), 128), np.int32)
    run_on_host(kernel((a, b, c, o), seq(*(Store(o, (const(r), tx), e) for r, (e, _) in enumerate(table))), tvars=tv),
                {"a": x, "b": y, "c": s, "o": got}, (1,), tmp_path)
    for r, (e, want) in enumerate(table):
        np.testing.assert_array_equal(got[r], want, err_msg=repr(e))


def test_vectors_and_half_arithmetic(tmp_path):
    tv = thread_vars()
    tx = tv[0]
    x, y = (np.random.default_rng(s).standard_normal(1024).astype(np.float16) for s in (0, 1))
    h, g, o, w = tensor("h", (1024,), "float16"), tensor("g", (1024,), "float16"), tensor("o", (1024,), "float16"), \
        tensor("w", (1024,), "float32")
    r = ramp(tx * 8, 8)
    body = seq(Store(o, (r,), load(h, (r,)) * load(g, (r,)) + load(h, (r,))),
               Store(w, (r,), cast(load(h, (r,)) - load(g, (r,)), "float32x8")))
    got, wide = np.zeros(1024, np.float16), np.zeros(1024, np.float32)
    run_on_host(kernel((h, g, o, w), body, tvars=tv), {"h": x, "g": y, "o": got, "w": wide}, (1,), tmp_path)
    np.testing.assert_array_equal(got, x * y + x)
    np.testing.assert_array_equal(wide, (x - y).astype(np.float32))


def test_swizzled_blocks_cover_the_grid(tmp_path):
    bx, by = fresh("bx"), fresh("by")
    o, got = tensor("o", (5, 7), "int32"), np.zeros((5, 7), np.int32)
    run_on_host(kernel((o,), evaluate("atomic_add", AddressOf(o, (by, bx)), const(1)), threads=1, grid=(7, 5),
                       block_vars=(bx, by), swizzle=(3, "column")), {"o": got}, (7, 5), tmp_path)
    assert (got == 1).all()


@pytest.mark.parametrize("blocks, loops", [(0, 0), (2, 1)])
def test_bytes_were_shifted_and_masked_for_the_address_of_each_count(blocks, loops, tmp_path):
    """Four instructions at half rate for two.  Few blocks have copies of the counts for lanes, and run two blocks in a row."""
    @T.prim_func
    def f(X: T.Tensor((5120,), "uint8"), Y: T.Tensor((256,), "int32")):
        with T.Kernel(10, threads=32) as b:
            counts = T.alloc_shared((256,), "int32")
            T.clear(counts)
            for i in T.Parallel(512):
                T.atomic_add(counts[X[b * 512 + i]], 1)
            T.atomic_add(Y, counts)

    (one,) = lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.persistent": blocks} if blocks else None).kernels
    text = print_kernel(one)
    assert "tl::byte_of(&X_v[0], v)" in text and text.count("#pragma unroll 2\n  for (int step") == loops
    x, y = np.random.default_rng(0).integers(0, 256, 5120).astype(np.uint8), np.zeros(256, np.int32)
    run_on_host(one, {"X": x, "Y": y}, (blocks or 10,), tmp_path)
    np.testing.assert_array_equal(y, np.bincount(x, minlength=256))
