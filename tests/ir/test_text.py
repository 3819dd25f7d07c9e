"""The printed text of any program parses back to the same program."""

import pytest

from tilelang import ops
from tilelang.ir import (Alloc, Assert, Bind, Break, Buffer, Const, Continue, Evaluate, For, Func, If, Launch, Parallel,
                         ParseError, Region, Seq, Store, Var, While, call, cast, const, dtype, load, logical, parse, select,
                         seq, to_text, unary, LaunchPlan, LoopPlan, ParallelPlan, FuncFacts)
from tilelang.ir.buffer import AddressOf
from tilelang.ir.expr import Broadcast, Ramp, Shuffle

F16, F32, I32 = dtype("float16"), dtype("float32"), dtype("int32")


def sample() -> Func:
    m = Var("m", I32)
    a = Buffer("A", (m, 64), F16)
    b = Buffer("B", (64, m * 2), F32, strides_=(m * 2, 1))
    pa, pb, n = Var("A_handle", dtype("handle")), Var("B_handle", dtype("handle")), Var("n", I32)
    bx, tx, ty, tz = Var("bx", I32), Var("tx", I32), Var("ty", I32), Var("tz", I32)
    s = Buffer("S", (32, 64), F16, "shared.dyn")
    view = Buffer("V", (2048,), F16, "shared.dyn", data=s.data)
    c = Buffer("C", (32, 32), F32, "local.fragment")
    v = Buffer("v", (1,), I32, "local.var")
    i, j, k, k2, y = (Var(x, I32) for x in ("i", "j", "k", "k", "for"))
    body = seq(
        Alloc(s), Alloc(c), Alloc(v, const(3)),
        ops.Fill(Region(c, (const(0), const(0)), (32, 32)), const(float("-inf"), F32)),
        For(k, const(0), (n + 31) // 32, "pipelined", seq(
            ops.Copy(Region(a, (bx * 32, k * 64), (32, 64)), Region(s, (const(0), const(0)), (32, 64)),
                     (("note", "mine"),), ops.CopyPlan(eviction_policy="evict_first")),
            ops.Gemm(Region(s, (const(0), const(0)), (32, 64)), Region(s, (const(0), const(0)), (32, 64)),
                     Region(c, (const(0), const(0)), (32, 32)), False, True, ops.GemmWarpPolicy.FullRow,
                     k == 0)), plan=LoopPlan(num_stages=3)),
        For(k2, const(2, "int32"), const(5), "unroll", If(k2 < n, Break(), Continue())),
        Bind(y, load(v, (0,)) + 1),
        Parallel((i, j), (const(32), const(32)), Store(c, (i, j), select(
            logical("and", i < n, unary("not", j == 3)), load(c, (i, j)) + cast(load(s, (i, j)), F32),
            const(0.5))), plan=ParallelPlan(coalesced_width=4)),
        While(load(v, (0,)) < y, Store(v, (const(0),), load(v, (0,)) + 1)),
        Store(view, (Ramp(tx * 8, const(1), 8, dtype("int32x8")),), Broadcast(const(1.0, F16), 8, dtype("float16x8"))),
        Evaluate(call("cp_async", [AddressOf(s, (tx, const(0))), AddressOf(a, (tx, const(0)))], "void", bytes=16)),
        Store(c, (tx, ty), call("exp", [load(c, (tx, tz))], F32)),
        Store(v, (const(0),), call("reinterpret", [Shuffle((const(1, "int16"), const(-2, "int16")), (0, 1),
                                                           dtype("int16x2"))], "int32")),
    )
    launch = Launch(((n + 31) // 32,), (bx,), (128, 1, 1), (tx, ty, tz), body,
                    plan=LaunchPlan(safe_values=((a, const(1.0, F16)),)))
    return Func("main", (pa, pb, n), ((pa, a), (pb, b)), seq(Assert(n > 0, 'n "must" be\n positive'), launch),
                attrs=(("note", (-1, "mine")),), facts=FuncFacts(out_idx=(-1,)))


def test_parse_of_print_is_the_same_program():
    f = sample()
    g = parse(to_text(f))
    assert f == g
    assert to_text(g) == to_text(f)


def test_equality_sees_a_changed_constant_dtype_attribute_and_swapped_variable():
    f = sample()
    text = to_text(f)
    for old, new in (("* 64", "* 65"), ('"float16", scope="shared.dyn"', '"bfloat16", scope="shared.dyn"'),
                     ("evict_first", "evict_last"), ("(i < n)", "(j < n)")):
        assert old in text, old
        assert parse(text.replace(old, new)) != f, old


@pytest.mark.parametrize("value, dt", [(2**40, "int64"), (-5, "int32"), (-1, "int8"), (1e-30, "float32"),
                                       (float("nan"), "float32"), (float("-inf"), "float16"), (-0.0, "float32"),
                                       (1.5, "bfloat16"), (True, "bool"), (255, "uint8")])
def test_literals_survive(value, dt):
    v = Buffer("x", (1,), dtype(dt))
    f = Func("f", (Var("p", dtype("handle")),), (), Seq(()))
    p = f.params[0]
    f = Func("f", (p,), ((p, v),), Store(v, (const(0),), Const(float(value) if dtype(dt).is_float else value, dtype(dt))))
    g = parse(to_text(f))
    assert repr(g.body.value.value) == repr(f.body.value.value) and g.body.value.dtype == dt and f == g


def test_bad_text_names_its_line():
    with pytest.raises(ParseError, match="line 3"):
        parse("@T.prim_func\ndef f():\n    x[0] = q\n")
