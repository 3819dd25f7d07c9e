"""Printed kernels on a GPU, through the driver alone: the same constructs that test_cuda.py compiles, with values."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tilelang.ir import Alloc, Store, binary, call, cast, const, dtype, load, numpy_dtype, seq

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import by_driver
from handmade import at, evaluate, gemm, kernel, local, ramp, shared, tensor, thread_vars, unrolled

from tilelang.target import INTRINSICS, Target
from tilelang.target.intrinsics import PURE
from tilelang.ir.numbers import round_tf32
from tilelang.target.mma import MMA_ROWS

pytestmark = pytest.mark.gpu


def run(k, arrays: dict[str, np.ndarray], grid=(1,)) -> dict[str, np.ndarray]:
    return by_driver.run(k, Target("cuda").arch, arrays, grid)


@pytest.mark.parametrize("dt", ["float16", "bfloat16"])
def test_gemm(dt):
    M = N = 256
    K = 512
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32).astype(numpy_dtype(dt)) for s in ((M, K), (K, N)))
    k = gemm(M, N, K, dt=dt)
    got = run(k, {"A": a, "B": b, "C": np.zeros((M, N), numpy_dtype(dt))}, (N // 128, M // 128))["C"]
    wide = a.astype(np.float64), b.astype(np.float64)
    want = wide[0] @ wide[1]
    unit = 2.0**-11 if dt == "float16" else 2.0**-8
    bound = np.abs(want) * unit + np.abs(wide[0]) @ np.abs(wide[1]) * (K * 2.0**-24) + 2.0**-24
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def gathered(fragment, matrix):
    out = np.zeros((32, fragment.registers), matrix.dtype)
    out[fragment.owners()[0].ravel(), fragment.register_table().ravel()] = matrix.ravel()
    return out


@pytest.mark.parametrize("row", list(MMA_ROWS.values()), ids=list(MMA_ROWS))
def test_matrix_row_means_what_the_table_says(row):
    if not Target("cuda").at_least(row.min_arch):
        pytest.skip(f"needs sm_{row.min_arch}")
    rng = np.random.default_rng(3)
    m, n, k = row.shape

    def matrix(shape, dt):
        return rng.integers(0 if dt.is_unsigned else -4, 5, shape).astype(numpy_dtype(dt))

    mats = matrix((m, k), row.a_dtype), matrix((k, n), row.b_dtype), matrix((m, n), row.c_dtype)
    tv = thread_vars()
    body, params, arrays = [], [], {}
    for name, frag, dt, x in zip("abc", (row.a, row.b, row.c), (row.a_dtype, row.b_dtype, row.c_dtype), mats):
        regs, t = local(f"{name}_regs", frag.registers, str(dt)), tensor(name, (32 * frag.registers,), str(dt))
        params.append((t, regs))
        arrays[name] = gathered(frag, x).ravel()
        body += [Alloc(regs), unrolled(frag.registers, lambda i, r=regs, t=t, f=frag: Store(
            r, (i,), load(t, (tv[0] * f.registers + i,))))]
    (_, a), (_, b), (tc, c) = params
    body += [evaluate("mma", at(c, 0), at(a, 0), at(b, 0), row=row.name),
             unrolled(row.c.registers, lambda i: Store(tc, (tv[0] * row.c.registers + i,), load(c, (i,))))]
    got = run(kernel([t for t, _ in params], seq(*body), threads=32, tvars=tv), arrays)["c"]
    np.testing.assert_array_equal(got, gathered(row.c, row.reference(*mats)).ravel())


def float_functions():
    return [r for r in INTRINSICS.values() if r.effect == PURE and r.reference and r.cuda and "float32" in r.cuda
            and not r.name.startswith("ieee_") and r.name not in ("ldexp", "nextafter")]


@pytest.mark.parametrize("row", float_functions(), ids=lambda r: r.name)
def test_float32_function_means_what_the_table_says(row):
    tv = thread_vars()
    names = "xyz"[:row.arity]
    rng = np.random.default_rng(5)
    low, high = (1.0, 3.0) if row.name == "acosh" else (0.05, 0.95)
    arrays = {n: rng.uniform(low, high, 128).astype(np.float32) for n in names}
    result = "float32" if row.result == "same" else row.result
    params = [tensor(n, (128,)) for n in names] + [tensor("out", (128,), result)]
    args = [load(p, (tv[0],)) for p in params[:-1]]
    k = kernel(params, Store(params[-1], (tv[0],), call(row.name, args, result)), tvars=tv)
    got = run(k, {**arrays, "out": np.zeros(128, numpy_dtype(result))})["out"]
    want = np.asarray(row.reference(*(a.astype(np.float64) for a in arrays.values())))
    fast = row.name.startswith("__") or row.name.startswith("fast")
    if row.name.endswith("_rounded_sum"):  # its error is one of the sum that it stands in
        np.testing.assert_allclose(got, want, rtol=0, atol=16 * 2.0**-23)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-5 if fast else 1e-6, atol=2e-6 if fast else 1e-7)


def test_to_tf32_rounds_as_the_table_says():
    tv = thread_vars()
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    a, o = tensor("a", (128,)), tensor("o", (128,))
    got = run(kernel((a, o), Store(o, (tv[0],), call("to_tf32", (load(a, (tv[0],)),), "float32")), tvars=tv),
              {"a": x, "o": x * 0})["o"]
    np.testing.assert_array_equal(got, round_tf32(x))


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_cp_async_fills_zeros_where_the_predicate_is_false(nbytes):
    n = nbytes // 4
    tv = thread_vars()
    tx = tv[0]
    a, o, s = tensor("a", (128 * n,)), tensor("o", (128 * n,)), shared("s", 128 * n, "float32")
    body = seq(Alloc(s), evaluate("cp_async", at(s, tx * n), at(a, tx * n), binary("ne", tx % 3, const(0)),
                                  bytes=nbytes),
               evaluate("cp_async_commit"), evaluate("cp_async_wait", n=0), evaluate("sync_threads"),
               *(Store(o, (tx * n + i,), load(s, (tx * n + i,))) for i in range(n)))
    x = np.arange(1, 128 * n + 1, dtype=np.float32)
    got = run(kernel((a, o), body, tvars=tv, shared_bytes=512 * n, shared_offsets=((s, 0),)),
              {"a": x, "o": x * 0 - 1})["o"]
    np.testing.assert_array_equal(got, np.where(np.arange(128 * n) // n % 3 != 0, x, 0))


@pytest.mark.parametrize("dt", ["float32", "float64", "float16", "bfloat16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("op", ["add", "max", "min"])
def test_atomics_of_all_types(op, dt):
    tv = thread_vars()
    x = (np.arange(128) % 13).astype(numpy_dtype(dt))
    start = 5
    a, o = tensor("a", (128,), dt), tensor("o", (1,), dt)
    k = kernel((a, o), evaluate(f"atomic_{op}", at(o, 0), load(a, (tv[0],))), tvars=tv)
    got = run(k, {"a": x, "o": np.array([start], x.dtype)})["o"][0]
    want = {"add": start + x.astype(int).sum(), "max": 12, "min": 0}[op]
    if dt == "bfloat16" and op == "add":  # sums beyond 256 round: the order decides the last bits
        assert abs(float(got) - want) <= 0.1 * want
    else:
        assert float(got) == want


@pytest.mark.parametrize("source, to", [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32"),
                                        ("float32", "float8_e4m3"), ("float32", "float8_e5m2"),
                                        ("float8_e4m3", "float16"), ("float32", "int8"), ("int8", "float16"),
                                        ("float16", "bfloat16"), ("int32", "bfloat16")])
@pytest.mark.parametrize("lanes", [1, 4])
def test_conversions(source, to, lanes):
    tv = thread_vars()
    x = np.linspace(-100, 100, 128 * lanes).astype(numpy_dtype(source))
    a, o = tensor("a", (128 * lanes,), source), tensor("o", (128 * lanes,), to)
    index = tv[0] if lanes == 1 else ramp(tv[0] * lanes, lanes)
    k = kernel((a, o), Store(o, (index,), cast(load(a, (index,)), dtype(to).with_lanes(lanes))), tvars=tv)
    got = run(k, {"a": x, "o": np.zeros(128 * lanes, numpy_dtype(to))})["o"]
    wide = x.astype(np.float32) if numpy_dtype(source).kind not in "iu" else x
    want = wide.astype(numpy_dtype(to))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
