"""Quotients of unrolled loops (lane_quotients), elements that runs of lanes share, and what decoding narrow weights costs."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.arith import Analyzer
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import (Bind, Buffer, Cast, For, Func, Launch, Store, binary, cast, const, dtype, fresh, seq,
                         substitute, walk, FuncFacts)
from tilelang.runtime import nvrtc, sass
from tilelang.target import Target
from tilelang.transform.memory.simplify import lane_quotients
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "dequantize_gemm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import dequantize
import narrow
from sass_text import opcodes

I32 = dtype("int32")
ARCHS = {a: Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a")}


def quotients_of(n, step, divisions, outer=""):
    """(loop before, stored values after) of  x0 = t * step; for v in unroll(n): j = x0 + v; out[k] = j // c, j % c."""
    t, v, x0, j = (fresh(x, I32) for x in ("t", "v", "x0", "j"))
    out = Buffer("out", (2 * len(divisions),), I32, "local")
    stores = [Store(out, (const(2 * k + m),), binary(op, j, const(c)))
              for k, c in enumerate(divisions) for m, op in enumerate(("floordiv", "floormod"))]
    body = seq(Bind(x0, t * step), For(v, const(0), const(n), "unroll", seq(Bind(j, x0 + v), *stores)))
    return (t, v, x0, j), [s.value for s in stores], [s.value for s in walk(behind(t, body)) if isinstance(s, Store)]


def behind(t, body):
    """The statements of a launch of 64 blocks t behind the pass."""
    launch = Launch((const(64),), (t,), (32, 1, 1), tuple(fresh(x, I32) for x in ("tx", "ty", "tz")), body)
    return lane_quotients(Func("f", (), (), launch, facts=FuncFacts(phase="DEVICE")), PassContext(None, {})).body


@pytest.mark.parametrize("n, step", [(8, 8), (4, 24), (2, 6), (8, 4), (3, 3)])
def test_values_stay_and_the_lane_leaves_the_dividend(n, step):
    divisions = (2, 3, 4, 6, 8, 12, 16, 24, 32)
    (t, v, x0, j), before, after = quotients_of(n, step, divisions)
    for a, b in zip(before, after):
        for tv in (-5, -1, 0, 3, 7):
            for lane in range(n):
                at = {t: const(tv), v: const(lane), x0: const(tv * step), j: const(tv * step + lane)}
                value = [Analyzer().simplify(substitute(e, at)) for e in (a, b)]
                assert value[0].value == value[1].value, (a, b, tv, lane)
        c = a.b.value
        whole = c & (c - 1) == 0 and step % c == 0
        changed = whole or n & (n - 1) == 0 and step % n == 0 and (c % n == 0 or n % c == 0)
        assert (b is not a) == changed, (a, b)


@pytest.mark.parametrize("step, n, changed", [(8, 8, True), (3, 5, True), (2**19, 8, False)])
def test_conversions_of_lanes_and_of_the_rest_are_two_where_both_are_exact(step, n, changed):
    t, v, j = (fresh(x, I32) for x in ("t", "v", "j"))
    out = Buffer("out", (1,), dtype("float32"), "local")
    before = cast(const(5) - j, "float32")
    body = For(v, const(0), const(n), "unroll", seq(Bind(j, t * step + v * 2), Store(out, (const(0),), before)))
    after = next(s.value for s in walk(behind(t, body)) if isinstance(s, Store))
    assert (sum(isinstance(x, Cast) for x in walk(after)) == 2) == changed
    for tv, lane in ((0, 0), (63, n - 1), (7, 1)):
        at = {t: const(tv), v: const(lane), j: const(tv * step + lane * 2)}
        values = [float(Analyzer().simplify(substitute(e, at)).value) for e in walk(after, Cast)]
        assert sum(values) == 5.0 - tv * step - lane * 2


def test_a_sum_keeps_the_value_that_memory_had():
    """What a sum was made of may have changed where its quotient is taken."""
    @T.prim_func
    def f(O: T.Tensor((32, 8), "int32")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            s = T.alloc_var("int32", init=i)
            for v in T.unroll(8):
                j = s * 8 + v
                s = s + 1
                O[i, v] = j // 4
                s = s - 1

    got = np.zeros((32, 8), np.int32)
    tilelang.compile(f, target=ARCHS["sm_90a"], execution_backend="simulator")(got)
    assert np.array_equal(got, np.arange(256).reshape(32, 8) // 4)


def test_parts_of_lanes_leave_too():
    """((x0 // 2) + v // 2) % 16 of a lane v in [0, 8): v // 2 is a lane of its own."""
    (t, v, x0, j), _, _ = quotients_of(8, 8, ())
    e = binary("floormod", binary("floordiv", x0, const(2)) + binary("floordiv", v, const(2)), const(16))
    out = Buffer("out", (1,), I32, "local")
    body = seq(Bind(x0, t * 8), For(v, const(0), const(8), "unroll", Store(out, (const(0),), e)))
    value = next(s.value for s in walk(behind(t, body)) if isinstance(s, Store))
    assert value.op == "add" and Analyzer().simplify(value.b).same(binary("floordiv", v, const(2))), value


def decoded(n, k, group, offset=0):
    """out = nibbles of W, less 8, times the scale of their group; rows and columns that no tile divides."""
    @T.prim_func
    def program(W: T.Tensor((n, k // 2), "uint8"), scales: T.Tensor((n, -(-k // group)), "float16"),
                out: T.Tensor((n, k), "float16")):
        with T.Kernel(T.ceildiv(n, 16), T.ceildiv(k, 64), threads=64) as (bx, by):
            S = T.alloc_shared((16, 64), "float16")
            for i, j in T.Parallel(16, 64):
                c = by * 64 + j + offset
                q = (W[bx * 16 + i, (by * 64 + j + offset) // 2] >> T.cast(c % 2 * 4, "uint8")) & T.uint8(15)
                S[i, j] = T.cast(T.cast(q, "int32") - 8, "float16") * scales[bx * 16 + i, c // group]
            for i, j in T.Parallel(16, 64):
                if by * 64 + j + offset < k:
                    out[bx * 16 + i, by * 64 + j + offset] = S[i, j]

    return program


@pytest.mark.parametrize("n, k, group, offset", [(19, 72, 8, 0), (16, 100, 20, 0), (16, 130, 32, 2), (16, 70, 4, 1)])
def test_nibbles_of_groups_are_decoded_right(n, k, group, offset):
    rng = np.random.default_rng(0)
    w = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (n, -(-k // group))).astype(np.float16)
    q = np.stack((w & 15, w >> 4), 2).reshape(n, k).astype(np.float16) - np.float16(8)
    want = q * scales.repeat(group, 1)[:, :k]
    want[:, :offset] = 7
    for target, backend in (("cpu", None), (ARCHS["sm_80"], "simulator"), (ARCHS["sm_90a"], "simulator")):
        got = np.full((n, k), 7, np.float16)
        tilelang.compile(decoded(n, k, group, offset), target=target, execution_backend=backend)(w, scales, got)
        np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
@pytest.mark.parametrize("weights, arch, loads", [(dequantize.int4, "sm_80", 16), (narrow.fp4, "sm_90a", 24)])
def test_weights_are_loaded_as_words_their_scales_once_and_integers_converted_by_bits(weights, arch, loads):
    """A thread decodes 64 weights of 8 rows: a scale and a zero of each row (fp4: also a word of weights, which int4 copies
    ahead).  Integers become float16 by logical operations and packed subtractions, not by I2F."""
    (kernel,) = lower(weights(256, 256, 256).func, ARCHS[arch]).kernels
    ops = opcodes(sass.disassemble(nvrtc.compile_cubin(print_kernel(kernel), arch).bytes))
    assert ops["LDG"] <= loads and ops["LDS"] <= 12 and not ops.get("I2F") and ops["LOP3"] + ops["PRMT"] > 96, ops
