"""Tiles that are loaded ahead go past the registers where the chip's lanes can fill LDS in their order."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import (Call, Evaluate, Launch, Load, Store, Var, binary, const, replace, rewrite, substitute, walk,
                         with_options)
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.launch import check_launch

CHIPS = "gfx90a", "gfx942", "gfx950"


def product(m=128, n=128, k=128, dt="float16", nt=True, tiles=(64, 64, 32), stages=2):
    bm, bn, bk = tiles

    @T.prim_func
    def main(A: T.Tensor((m, k), dt), B: T.Tensor((n, k) if nt else (k, n), dt), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            a, b = T.alloc_shared((bm, bk), dt), T.alloc_shared((bn, bk) if nt else (bk, bn), dt)
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], a)
                if nt:
                    T.copy(B[bx * bn, ko * bk], b)
                else:
                    T.copy(B[ko * bk, bx * bn], b)
                T.gemm(a, b, c, transpose_B=nt)
            T.copy(c, C[by * bm, bx * bn])

    return main


def attention(dim=64, queries=64, keys=64, seq=128):
    @T.prim_func
    def program(Q: T.Tensor((queries, dim), "float16"), K: T.Tensor((seq, dim), "float16"), V: T.Tensor((seq, dim), "float16"),
                O: T.Tensor((queries, dim), "float32")):
        with T.Kernel(1, threads=256):
            q, k, v = (T.alloc_shared((n, dim), "float16") for n in (queries, keys, keys))
            s, p = T.alloc_fragment((queries, keys), "float32"), T.alloc_fragment((queries, keys), "float16")
            o, top, new = (T.alloc_fragment(x, "float32") for x in ((queries, dim), (queries,), (queries,)))
            T.copy(Q, q)
            T.clear(o)
            T.fill(top, -1e30)
            for i in T.Pipelined(seq // keys, num_stages=2):
                T.copy(K[i * keys, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(top, new)
                T.reduce_max(s, new, dim=1, clear=False)
                for x, y in T.Parallel(queries, dim):
                    o[x, y] *= T.exp2(top[x] - new[x])
                for x, y in T.Parallel(queries, keys):
                    p[x, y] = T.exp2(s[x, y] - new[x])
                T.copy(new, top)
                T.copy(V[i * keys, 0], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            T.copy(o, O)

    return program


def lowered(program, chip="gfx950"):
    return lower(program.func, Target(chip))


def copies(program):
    return [x.options.bytes for x in walk(program.kernels[0].launch.body, Call) if x.op == "cp_async"]


def inputs(m=128, n=128, k=128, dt=np.float16, nt=True):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (m, k)).astype(dt), rng.integers(-3, 4, (n, k)).astype(dt)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    return {"A": a, "B": b if nt else np.ascontiguousarray(b.T), "C": np.zeros((m, n), np.float32)}, want


@pytest.mark.parametrize("chip, options, bytes_", [
    ("gfx950", {}, [16] * 4), ("gfx950", {"nt": False}, [16] * 4), ("gfx942", {}, []), ("gfx90a", {}, []),
    ("gfx950", {"k": 100, "tiles": (64, 64, 40)}, []),  # rows of 100 halves: no whole chunks
    ("gfx950", {"tiles": (32, 64, 16)}, [16] * 4),  # of A by half of the threads
    ("gfx950", {"stages": 1}, []),  # the tile is read while the next one is on its way
    ("gfx950", {"dt": "float32"}, [16] * 4), ("gfx950", {"m": 100, "n": 72}, [16] * 4)])
def test_what_goes_past_the_registers_is_as_wide_as_loads_would_be(chip, options, bytes_):
    program = lowered(product(**options), chip)
    assert copies(program) == bytes_
    names = {n: options[n] for n in ("m", "n", "k", "nt") if n in options}
    args, want = inputs(**names, dt=options.get("dt", "float16"))
    report = run_device(program, args)
    np.testing.assert_array_equal(report.outputs["C"], want)
    assert report.conflicts == 0 or options.get("tiles")


def test_a_tile_with_another_value_outside_is_loaded_by_registers():
    """Descriptors give zeros only."""
    @T.prim_func
    def main(A: T.Tensor((60, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_safe_value({A: 2.0})
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0:64, k * 32:k * 32 + 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    program, rng = lowered(main), np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (n, 64)).astype(np.float16) for n in (60, 64))
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 64), np.float32)}).outputs["C"]
    want = np.pad(a.astype(np.float32), ((0, 4), (0, 0)), constant_values=2) @ b.astype(np.float32).T
    np.testing.assert_array_equal(got, want)
    assert copies(program) == [16, 16]  # of B


def test_a_tile_that_is_the_same_in_every_iteration_is_copied_to_the_version_of_each():
    """Its load in front of the loop and the one inside are one object."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 32), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B, b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    program, rng = lowered(main), np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (64, 64)).astype(np.float16), rng.integers(-3, 4, (64, 32)).astype(np.float16)
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((64, 64), np.float32)}).outputs["C"]
    np.testing.assert_array_equal(got, (a[:, :32] + a[:, 32:]).astype(np.float32) @ b.astype(np.float32).T)
    assert copies(program) == [16] * 4


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_loses_no_pass_to_bank_conflicts(chip):
    rng = np.random.default_rng(1)
    q, k, v = ((rng.standard_normal((n, 64)) / 4).astype(np.float16) for n in (64, 128, 128))
    program = lowered(attention(), chip)
    report = run_device(program, {"Q": q, "K": k, "V": v, "O": np.zeros((64, 64), np.float32)})
    s = q.astype(np.float32) @ k.astype(np.float32).T
    p = np.exp2(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(report.outputs["O"], p.astype(np.float16).astype(np.float32) @ v.astype(np.float32), rtol=2e-2,
                               atol=2e-2)
    assert report.conflicts == 0 and copies(program) == ([16] * 4 if chip == "gfx950" else [])


# ---- planted faults -------------------------------------------------------------------------------------------------


def altered(program, fn):
    return replace(program.host, body=rewrite(program.host.body, fn))


def pending(n):
    """Waits that let n groups of copies run."""
    return lambda x: with_options(x, n=n) if isinstance(x, Call) and x.op == "cp_async_wait" else None


def without(op):
    def changed(x):
        if isinstance(x, Evaluate) and x.call.op == op:
            return replace(x, call=replace(x.call, op="cp_async_commit", options=None))
        return None

    return changed


@pytest.mark.parametrize("fault", [pending(1), without("cp_async_wait"), without("sync_threads")])
def test_a_weak_or_missing_wait_of_a_lowered_program_is_found(fault):
    """By the simulator, and by the verifier that every compilation runs."""
    program, (args, _) = altered(lowered(product()), fault), inputs()
    with pytest.raises(TileLangError) as e:
        run_device(program, args)
    assert e.value.kind in ("sim-async", "sim-race")
    text, faults = check_launch(next(walk(program, Launch)))
    assert faults or not text.startswith("ordered")


def test_a_wrong_lane_of_a_fragment_is_found():
    """Neighbouring lanes load each other's part of an MFMA operand: the result is not that of the program."""
    def changed(x):
        if isinstance(x, Store) and x.buffer.name == "b_a" and isinstance(x.value, Load):
            tx = next(v for v in walk(x.value, Var) if v.name == "tx")
            return replace(x, value=substitute(x.value, {tx: binary("bitxor", tx, const(1))}))
        return None

    args, want = inputs()
    right = run_device(lowered(product(), "gfx942"), {n: x.copy() for n, x in args.items()}).outputs["C"]
    wrong = run_device(altered(lowered(product(), "gfx942"), changed), args).outputs["C"]
    np.testing.assert_array_equal(right, want)
    assert (wrong != want).mean() > 0.5
