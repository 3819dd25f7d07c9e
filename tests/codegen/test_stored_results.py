"""Loops that store registers of their own as they are: the PTX does what the loops say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).parent))
from handmade import kernel, thread_vars

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Alloc, Bind, Buffer, Call, For, Ramp, Store, const, dtype, fresh, load, seq, walk, with_options
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.target.register_forms import form_of, store_form
from tilelang.transform.pipeline import lower
from transform.test_accumulator_registers import both_ways, marked, numbers

FAST = {"tl.enable_fast_math": True}
I32 = dtype("int32")
SHAPE = (3, 2, 2)  # turns of the loops, element r * 4 + q * 2 + p
K, TX = (fresh(n, I32) for n in ("k", "tx"))
LOOPS = tuple(fresh(n, I32) for n in "rqp")
ROW = TX // 4 % 8 + LOOPS[1] * 8


def nest(body, shape=SHAPE, loops=LOOPS):
    for v, n in reversed(list(zip(loops, shape))):
        body = For(v, const(0), const(n), "unroll", body)
    return body


def stores(to, indices, lanes=2):
    acc = Buffer("acc", (12,), dtype("float32"), "local")
    place = LOOPS[0] * 4 + LOOPS[1] * 2
    row = fresh("row", I32)
    if lanes > 1:
        indices = (*indices[:-1], Ramp(indices[-1], const(1), lanes, I32.with_lanes(lanes)))
        place = Ramp(place, const(1), lanes, I32.with_lanes(lanes))
    body = Store(to, (indices[0], row, *indices[2:]), load(acc, (place,)))
    return nest(seq(Bind(row, indices[1]), body), SHAPE[:2], LOOPS[:2])


def test_what_has_the_form_of_stores():
    m = Buffer("M", (4, 64, 64), dtype("float32"), "global")
    at = (K, ROW, LOOPS[0] * 8 + TX % 4 * 2)
    form = form_of(stores(m, at))
    assert form.kind == "store" and [k for k, _ in form.points] == [0, 2, 4, 6, 8, 10]
    assert [k for k, _ in store_form(stores(m, at, lanes=1)).points] == [0, 2, 4, 6, 8, 10]
    assert store_form(stores(Buffer("M", (4, 64, 64), dtype("float16"), "global"), at)) is None
    assert store_form(stores(Buffer("M", (4, 64, 64), dtype("float32"), "shared"), at)) is None
    assert store_form(stores(m, (K, (ROW + K) // 3, at[2]))) is None, "no address that loops move by a constant"
    assert store_form(stores(m, (load(Buffer("at", (4,), I32, "global"), (K,)), *at[1:]))) is None, "the stores may change it"


@pytest.mark.parametrize(("lanes", "shape"), [(1, (4, 64, 64)), (2, (4, 64, 64)), (2, ("n", "m", 64)), (4, (4, "n", "m"))])
def test_stores_go_where_the_loops_say(lanes, shape):
    sizes = {"n": fresh("n", I32), "m": fresh("m", I32)}
    m = Buffer("M", tuple(sizes.get(n, n) for n in shape), dtype("float32"), "global")
    loop = stores(m, (K, ROW, LOOPS[0] * 8 + TX % 4 * 2), lanes)
    acc = form_of(loop).buffer
    tvars = (TX, *thread_vars()[1:])
    text = print_kernel(kernel([m, K, *sizes.values()], [Alloc(acc), with_options(loop, registers=True)], tvars=tvars))
    lines, args = (re.search(p, text).group(1) for p in (r'store_acc\(.*?asm volatile\("(.*?)" ::', r"tl::store_acc\((.*)\);"))
    rng = np.random.default_rng(3)
    at = {"k": 3, "n": 70, "m": 80, "tx": int(rng.integers(128))}
    strides = [1]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * at.get(n, n))
    starts = [eval(re.sub(r"\(long long\)|LL", "", a), {}, at) for a in re.findall(r"&M\[(.*?)\](?:,|$)", args)]
    assert len(starts) == (2 if "m" in shape[2:] else 1), "rows of unknown length have addresses of their own"
    stored = {}
    for number, away, names in re.findall(r"\[%(\d)([+-]\d+)?\], \{(.*?)\}", lines):
        for i, name in enumerate(names.split(", ")):
            stored[int(name.removeprefix("tl_acc_"))] = starts[int(number)] + int(away or 0) // 4 + i
    want = {r * 4 + q * 2 + i: 3 * strides[0] + (at["tx"] // 4 % 8 + 8 * q) * strides[1] + r * 8 + at["tx"] % 4 * 2 + i
            for r in range(3) for q in range(2) for i in range(lanes)}
    assert stored == want


def after_branches(wide):
    """A product of a product whose result one block of two stores by TMA, the other in float32."""
    @T.prim_func
    def program(Q: T.Tensor((128, 64), "float16"), K: T.Tensor((128, 64), "float16"), O: T.Tensor((64, 64), "float16"),
                M: T.Tensor((64, wide), "float32")):
        with T.Kernel(2, threads=128) as block:
            Qs, Ks = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            S, P = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(Q[block * 64, 0], Qs)
            T.clear(acc)
            for k in T.serial(2):
                T.copy(K[k * 64, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.copy(S, P)
                T.gemm(P, Ks, acc)
            if block < 1:
                T.copy(acc, O)
            else:
                for i, j in T.Parallel(64, 64):
                    M[i, j] = acc[i, j]

    return program


@pytest.mark.parametrize("wide", [64, 72])
def test_branches_work_on_the_registers(monkeypatch, wide):
    q, k = numbers(128, 64) // 3, numbers(128, 64) // 3
    got, lowered = both_ways(after_branches(wide), q, k, np.zeros((64, 64), np.float16), np.zeros((64, wide), np.float32),
                            monkeypatch=monkeypatch, config=FAST)
    s = q.astype(np.float32) @ k.astype(np.float32).T
    p = s.astype(np.float16).astype(np.float32)
    assert np.array_equal(got[:, :64], (p @ k.astype(np.float32))[64:]) and not got[:, 64:].any()
    kinds, into, out = marked(lowered)
    assert {"store", "read"} <= set(kinds) and into == out == 0, "no array"
    text = print_kernel(lowered, fast_math=True)
    lines = re.search(r'store_acc\(void\* p0\) \{ asm volatile\("(.*?)" ::', text).group(1).split("\\n")
    assert len(lines) == 16 and lines[1] == f"st.global.v2.f32 [%0+{8 * wide * 4}], {{tl_acc_2, tl_acc_3}};"
    calls = [x for x in walk(lowered.launch.body) if isinstance(x, Call)]
    assert not any(x.op == "wgmma_pin" and x.options.move is not None for x in calls)
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a", ["--use_fast_math"])
        assert cubin.spills == 0 and "C75" not in cubin.log


def in_halves(n, form):
    """A product whose result is rounded to 16 bits in registers before it is stored."""
    @T.prim_func
    def program(A: T.Tensor((64, 64), "float16"), B: T.Tensor((2 * n, 64), "float16"), rows: T.Tensor((1,), "int32"),
                C: T.Tensor((64, n), "float16")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((n, 64), "float16")
            acc, packed = T.alloc_fragment((64, n), "float32"), T.alloc_fragment((64, n), "float16")
            T.copy(A, a)
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(B[k * n, 0], b)
                T.gemm(a, b, acc, transpose_B=True)
            if form == "copies":
                T.copy(acc, packed)
                T.copy(packed, C)
            elif form == "branch":
                if rows[0] > 3:
                    for i, j in T.Parallel(64, n):
                        packed[i, j] = acc[i, j]
                    T.copy(packed, C)
            else:
                for i, j in T.Parallel(64, n):
                    if i < rows[0]:
                        C[i, j] = acc[i, j]

    return program


@pytest.mark.parametrize("n", [24, 64])
@pytest.mark.parametrize("form", ["copies", "branch", "rows"])
def test_halves_of_a_result_were_read_from_an_array_that_nothing_wrote(form, n):
    """They were in named registers, which the stores do not know: only operands of wgmma are read from there."""
    (lowered,) = lower(in_halves(n, form).func, Target({"kind": "cuda", "arch": "sm_90a"}), {}).kernels
    text = print_kernel(lowered)
    name = "C_tile" if form == "rows" else "packed"
    assert f"tl::halves_{name}(&{name}[0]);" in text and f"tl_{name}_" not in text
    outputs = re.search(rf'halves_{name}\(void\* p\).*?asm volatile\(".*?" : (.*?)\);', text).group(1)
    assert outputs == ", ".join(f'"=r"(to[{k}])' for k in range(n // 4))
    if nvrtc.available():
        assert nvrtc.compile_cubin(text, "sm_90a").spills == 0
