"""Loops over registers of their own that run seldom: the PTX of masks and of stores does what the loops say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

sys.path.insert(0, str(Path(__file__).parent))
from handmade import kernel, thread_vars

import tilelang.language as T
from tilelang.arith import Analyzer
from tilelang.codegen.cuda import print_kernel
from tilelang.codegen.rare_loops import LOW, Predicates, wrapped
from tilelang.ir import (Alloc, Bind, Buffer, Call, For, If, Ramp, Store, binary, const, dtype, fresh, load, logical, seq, walk,
                         with_attrs)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.expr import Select
from tilelang.runtime import nvrtc
from tilelang.target.register_forms import RARE, affine_in, form_of, inlined, rare_form
from transform.test_product_registers import both_ways, marked, numbers

passes = sys.modules["tilelang.transform.whole_registers"]
FAST = {"tl.enable_fast_math": True}
I32 = dtype("int32")
SHAPE = (3, 2, 2)  # turns of the loops, element r * 4 + q * 2 + p
K, AT, TX, SEEN = (fresh(n, I32) for n in ("k", "at", "tx", "seen"))
LOOPS = tuple(fresh(n, I32) for n in "rqp")
COLUMN, ROW = LOOPS[0] * 8 + TX % 4 * 2 + LOOPS[2], TX // 4 % 8 + LOOPS[1] * 8


def not_equal(a, b):
    return ~equal(a, b)


def equal(a, b):
    return binary("eq", a, b)


def nest(body, shape=SHAPE, loops=LOOPS):
    for v, n in reversed(list(zip(loops, shape))):
        body = For(v, const(0), const(n), "unroll", body)
    return body


def masked(cond, a=None, b=None):
    """The nest that selects among elements of a register array by a condition."""
    s, f32 = Buffer("S", (12,), dtype("float32"), "local"), dtype("float32")
    at = (LOOPS[0] * 4 + LOOPS[1] * 2 + LOOPS[2],)
    mine = load(s, at)
    return nest(Store(s, at, Select(cond, mine if a is None else a, const(-np.inf, f32) if b is None else b, f32)))


def run(lines, values):
    """Predicates by name after PTX lines on int32 operands %0, %1 …, all with one value a lane."""
    known = {f"%{i}": np.asarray(v, np.int32) for i, v in enumerate(values)}
    compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
                "ne": np.not_equal}
    for line in lines:
        op, rest = line.rstrip(";").split(" ", 1)
        to, *args = rest.split(", ")
        x = [known[a] if a in known else np.int32(int(a)) for a in args]
        name = op.split(".")
        if name[0] == "setp":
            known[to] = compared[name[1]](*x)
        elif name[0] == "add":
            known[to] = (x[0].astype(np.int64) + x[1]).astype(np.int32)
        else:
            known[to] = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}[name[0]](*x)
    return known


def predicates(cond, facts, data=()):
    """(tests, what they say at each point); operands are texts of the expressions they stand for."""
    named = {}

    def top(e):
        named[text := repr(e)] = e
        return text

    tests = Predicates(facts, set(LOOPS), top, lambda e: any(v in data for v in walk(e)))
    points = [dict(zip(LOOPS, p)) for p in np.ndindex(*SHAPE)]
    said = [tests.holds(cond, at) for at in points]
    operands = [named[t.removeprefix("(int)(").removesuffix(")") if t.startswith("(int)(") else t] for t in tests.operands]
    return tests, points, said, operands


BOUNDS = {K: (0, 4096), AT: (0, 8192), TX: (0, 127), SEEN: (0, 8192)}
ANY = {**BOUNDS, AT: (LOW, -LOW - 1), SEEN: (LOW, -LOW - 1)}
CAUSAL = K + COLUMN <= AT + ROW
CONDITIONS = {
    "causal": (CAUSAL, BOUNDS),
    "window": (logical("and", CAUSAL, K + COLUMN >= AT + ROW - 20), BOUNDS),
    "either": (logical("or", SEEN > 4000, ~(COLUMN < 9)), BOUNDS),
    "known": (logical("and", COLUMN < 14, COLUMN < 900), BOUNDS),
    "never": (COLUMN - 8 * LOOPS[0] < 0, BOUNDS),
    "equal": (logical("or", equal(K + COLUMN, ROW), not_equal(COLUMN, ROW)), BOUNDS),
    "beyond": (K + COLUMN < SEEN, ANY),
    "overflow": (AT + COLUMN <= SEEN + ROW, ANY),
    "one": (logical("and", TX < 7, K < 9), BOUNDS),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_predicates_say_what_conditions_say(name):
    cond, bounds = CONDITIONS[name]
    rng = np.random.default_rng(7)
    values = {v: rng.integers(lo, hi, 300, endpoint=True).astype(np.int32) for v, (lo, hi) in bounds.items()}
    values[K][:150] = values[AT][:150] = np.arange(150) // 2  # where limits lie
    if name == "overflow":
        values[AT][150:200], values[SEEN][200:250] = -LOW - 1, LOW
    tests, points, said, operands = predicates(cond, Analyzer(bounds))
    known = run(tests.lines, [evaluate(e, values) for e in operands])
    for at, p in zip(points, said):
        want = evaluate(cond, {**values, **{v: np.int32(n) for v, n in at.items()}})
        got = known[p] if isinstance(p, str) else p
        assert np.array_equal(np.broadcast_to(got, 300), np.broadcast_to(want, 300)), at
    assert name != "known" or set(said[:4]) == {True}
    assert name != "never" or not any(said)
    apart = "s32 n" in "".join(tests.declared())
    assert apart == (name in ("beyond", "overflow")), "sides apart where a difference may overflow"


def test_rows_and_columns_that_are_as_far_apart_share_a_test():
    tests, _, said, _ = predicates(CAUSAL, Analyzer(BOUNDS))
    assert len(tests.operands) == 1 and len(tests.lines) == len(set(said)) == 8
    assert said[:4] == ["p0", "p1", "p2", "p3"] and said[6:8] == ["p0", "p1"], "column 8 of row 8 is column 0 of row 0"


def test_values_from_memory_are_not_subtracted():
    tests, *_ = predicates(K + COLUMN < SEEN, Analyzer(BOUNDS), data=(SEEN,))
    assert any(x.startswith("add.s32") for x in tests.lines) and wrapped(2**31) == LOW


def test_what_has_the_form_of_a_mask():
    form = rare_form(masked(CAUSAL))
    assert form.kind == "select" and form.kind in RARE and form.reads and [k for k, _ in form.points] == list(range(12))
    assert form_of(masked(CAUSAL, const(0.0, "float32"))).reads is False, "all are written"
    n = fresh("n", I32)
    rows = Buffer("rows", (12,), I32, "global")
    for cond in (load(rows, (LOOPS[0],)) > 3, LOOPS[0] * LOOPS[1] < 2, (COLUMN + K) // 3 < 4, (K // n < 2),
                 COLUMN.astype("int64") < 4):
        assert rare_form(masked(cond)) is None, cond
    assert rare_form(masked(K // 4 < 2)) is not None
    assert rare_form(masked(CAUSAL, b=load(rows, (LOOPS[0],)).astype("float32"))) is None
    base, by = affine_in(K + COLUMN, set(LOOPS))
    assert by == {LOOPS[0]: 8, LOOPS[2]: 1} and not base.const and inlined(If(CAUSAL, masked(CAUSAL)))[1] is None


# ---- stores -------------------------------------------------------------------------------------------------------------


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
    assert [k for k, _ in rare_form(stores(m, at, lanes=1)).points] == [0, 2, 4, 6, 8, 10]
    assert rare_form(stores(Buffer("M", (4, 64, 64), dtype("float16"), "global"), at)) is None
    assert rare_form(stores(Buffer("M", (4, 64, 64), dtype("float32"), "shared"), at)) is None
    assert rare_form(stores(m, (K, (ROW + K) // 3, at[2]))) is None, "no address that loops move by a constant"
    assert rare_form(stores(m, (load(Buffer("at", (4,), I32, "global"), (K,)), *at[1:]))) is None, "the stores may change it"


@pytest.mark.parametrize(("lanes", "shape"), [(1, (4, 64, 64)), (2, (4, 64, 64)), (2, ("n", "m", 64)), (4, (4, "n", "m"))])
def test_stores_go_where_the_loops_say(lanes, shape):
    sizes = {"n": fresh("n", I32), "m": fresh("m", I32)}
    m = Buffer("M", tuple(sizes.get(n, n) for n in shape), dtype("float32"), "global")
    loop = stores(m, (K, ROW, LOOPS[0] * 8 + TX % 4 * 2), lanes)
    acc = form_of(loop).buffer
    tvars = (TX, *thread_vars()[1:])
    text = print_kernel(kernel([m, K, *sizes.values()], [Alloc(acc), with_attrs(loop, registers=True)], tvars=tvars))
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
                if k + block > 0:
                    for i, j in T.Parallel(64, 64):
                        S[i, j] = T.if_then_else(k * 64 + j <= block * 64 + i, S[i, j], 0.0)
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
    monkeypatch.setattr(passes, "MASKS", True)
    q, k = numbers(128, 64) // 3, numbers(128, 64) // 3
    got, lowered = both_ways(after_branches(wide), q, k, np.zeros((64, 64), np.float16), np.zeros((64, wide), np.float32),
                            monkeypatch=monkeypatch, config=FAST)
    s = q.astype(np.float32) @ k.astype(np.float32).T
    s[64:64] = 0
    seen = np.tril(np.ones((128, 128), bool))
    p = np.where(seen, s, 0).astype(np.float16).astype(np.float32)
    assert np.array_equal(got[:, :64], (p @ k.astype(np.float32))[64:]) and not got[:, 64:].any()
    kinds, into, out = marked(lowered)
    assert {"select", "store", "read"} <= set(kinds) and into == out == 0, "no array"
    text = print_kernel(lowered, fast_math=True)
    lines = re.search(r'store_acc\(void\* p0\) \{ asm volatile\("(.*?)" ::', text).group(1).split("\\n")
    assert len(lines) == 16 and lines[1] == f"st.global.v2.f32 [%0+{8 * wide * 4}], {{tl_acc_2, tl_acc_3}};"
    assert sum(isinstance(x, Call) and x.attr("move") is not None for x in walk(lowered.launch.body)) == 0
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a", ["--use_fast_math"])
        assert cubin.spills == 0 and "C75" not in cubin.log
