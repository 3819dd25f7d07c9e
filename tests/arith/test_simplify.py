"""Simplification equals evaluation, is idempotent, and finds the identities index code is made of."""

import itertools
import random

import pytest

from tilelang.arith import Analyzer, can_prove, divisible, interval, simplify, simplify_stmt
from tilelang.ir import (
    EMPTY,
    Binary,
    Bind,
    Buffer,
    Cast,
    Const,
    Evaluate,
    For,
    If,
    Launch,
    Load,
    Select,
    Seq,
    Store,
    Unary,
    Var,
    binary,
    call,
    const,
    convert,
    dtype,
    load,
    logical,
    select,
    unary,
    walk,
)

I32 = dtype("int32")
x, y, z = (Var(n, I32) for n in "xyz")
ENV = {x: (0, 31), y: (0, 3), z: (-5, 5)}


def value(e, env):
    """Plain Python meaning of the integer and bool nodes used here."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        return env[e]
    if isinstance(e, Select):
        return value(e.a if value(e.cond, env) else e.b, env)
    if isinstance(e, Unary):
        v = value(e.a, env)
        return {"neg": lambda: -v, "not": lambda: not v, "bitnot": lambda: ~v}[e.op]()
    if isinstance(e, Cast):
        return int(value(e.value, env))
    a, b = value(e.a, env), value(e.b, env)
    match e.op:
        case "add": return a + b
        case "sub": return a - b
        case "mul": return a * b
        case "floordiv": return a // b
        case "floormod": return a % b
        case "truncdiv": return int(a / b)
        case "truncmod": return a - int(a / b) * b
        case "min": return min(a, b)
        case "max": return max(a, b)
        case "bitand": return a & b
        case "bitor": return a | b
        case "bitxor": return a ^ b
        case "shl": return a << b
        case "shr": return a >> b
        case "lt": return a < b
        case "le": return a <= b
        case "gt": return a > b
        case "ge": return a >= b
        case "eq": return a == b
        case "ne": return a != b
        case "and": return a and b
        case "or": return a or b
    raise AssertionError(e.op)


def text(e):
    """Infix text for messages."""
    if isinstance(e, Const):
        return str(e.value)
    if isinstance(e, Var):
        return e.name
    if isinstance(e, Binary):
        return f"({text(e.a)} {e.op} {text(e.b)})"
    if isinstance(e, Unary):
        return f"{e.op}({text(e.a)})"
    return f"({text(e.a)} if {text(e.cond)} else {text(e.b)})" if isinstance(e, Select) else type(e).__name__


def random_int(r, depth):
    if depth <= 0 or r.random() < 0.15:
        return r.choice([x, y, z, const(r.choice([0, 1, 2, 3, 4, 7, 8, 12, 16, 32, -1, -4]))])
    op = r.choice(["add", "add", "sub", "mul", "floordiv", "floormod", "floordiv", "floormod", "min", "max", "truncdiv",
                   "truncmod", "bitand", "bitxor", "select", "neg", "shl", "shr"])
    a = random_int(r, depth - 1)
    if op == "neg":
        return unary("neg", a)
    if op == "select":
        return select(random_bool(r, depth - 1), a, random_int(r, depth - 1))
    if op in ("floordiv", "floormod", "truncdiv", "truncmod"):
        return Binary(op, a, const(r.choice([1, 2, 3, 4, 6, 8, 16])), I32)
    if op in ("shl", "shr"):
        return Binary(op, a, const(r.choice([0, 1, 2, 3])), I32)
    if op == "mul" and r.random() < 0.7:
        return Binary(op, a, const(r.choice([0, 1, 2, 3, 4, 8, -2, 16])), I32)
    return Binary(op, a, random_int(r, depth - 1), I32)


def random_bool(r, depth):
    if depth > 1 and r.random() < 0.4:
        return logical(r.choice(["and", "or"]), random_bool(r, depth - 1), random_bool(r, depth - 1))
    c = Binary(r.choice(["lt", "le", "gt", "ge", "eq", "ne"]), random_int(r, depth - 1), random_int(r, depth - 1),
               dtype("bool"))
    return Unary("not", c, dtype("bool")) if r.random() < 0.2 else c


POINTS = [dict(zip((x, y, z), p)) for p in itertools.product((0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 30, 31), range(4),
                                                             (-5, -4, -1, 0, 1, 3, 5))]


@pytest.mark.parametrize("seed", range(12))
def test_simplify_equals_evaluation_and_is_idempotent(seed):
    r = random.Random(seed)
    for _ in range(100):
        e = random_int(r, 4) if r.random() < 0.7 else random_bool(r, 4)
        a = Analyzer(ENV)
        s = a.simplify(e)
        lo, hi = a.interval(e) if e.dtype.is_int else (None, None)
        for p in r.sample(POINTS, 40):
            v = value(e, p)
            assert value(s, p) == v, f"{text(e)} -> {text(s)} at {list(p.values())}"
            assert (lo is None or lo <= v) and (hi is None or v <= hi)
        again = Analyzer(ENV).simplify(s)
        assert again.same(s), f"{text(e)} -> {text(s)} -> {text(again)}"
        assert a.simplify(s) is s


@pytest.mark.parametrize("before, after", [
    (x // 4 * 4 + x % 4, x),
    (x + 0 * y, x),
    ((x * 4 + y) // 4, x),
    ((x * 4 + y) % 4, y),
    ((x * 4 + y) // 8, x // 2),
    ((x * 4 + y) % 8, x % 2 * 4 + y),
    (x // 4 // 4, x // 16),
    (x % 16 % 4, x % 4),
    (x % 16 // 4, x // 4 % 4),
    (x // 4 % 2 * 4 + x % 4, x % 8),
    ((x + 7) // 8 * 8 - (x + 7) // 8 * 8, const(0)),
    (x % 32, x),
    (x // 32, const(0)),
    (y + y, y * 2),
    (x - x, const(0)),
    (binary("min", x, 40), x),
    (binary("max", x, -1), x),
    (binary("bitxor", x, x), const(0)),
    (select(x < 32, y, z), y),
    ((x * 128 + y * 32) // 32, x * 4 + y),
    ((x * 6 + 3) // 2, x * 3 + 1),
    ((x + z) - z, x),
], ids=range(22))
def test_index_identities(before, after):
    assert simplify(before, ENV).same(convert(after)), f"{text(before)} became {text(simplify(before, ENV))}"


def test_no_division_of_values_that_may_wrap():
    b = Buffer("B", (4,), dtype("int32"), "global")
    v = load(b, (0,))
    e = Binary("floordiv", Binary("mul", v, const(4), I32), const(4), I32)
    assert not simplify(e).same(v)  # v * 4 may wrap
    u = Var("u", dtype("uint32"))
    e = Binary("floordiv", Binary("mul", u, const(4, "uint32"), u.dtype), const(4, "uint32"), u.dtype)
    assert not simplify(e).same(u)
    small = Binary("floordiv", Binary("mul", x, const(4), I32), const(4), I32)
    assert simplify(small, ENV).same(x)


def test_proofs():
    n = Var("n", I32)
    assert can_prove(x < 32, ENV) and not can_prove(x < 31, ENV)
    assert can_prove(x * 4 + y < 128, ENV)
    assert can_prove(x + n >= n, {**ENV, n: (0, None)})
    assert can_prove(binary("min", x, n) <= x, ENV)
    assert not can_prove(x < n, ENV)
    assert can_prove(logical("and", x >= 0, y < 4), ENV)
    assert can_prove(2 * x != 2 * z + 1, ENV)
    assert interval(x * 2 + z, ENV) == (-5, 67)
    assert interval(n * 2, {n: (0, None)}) == (0, None)


def test_linear_and_divisible():
    n = Var("n", I32)
    form = Analyzer().linear(x * 4 + n * 2 + 3)
    assert form.terms == {x: 4, n: 2} and form.const == 3
    assert divisible(x * 8 + 16, 8) and not divisible(x * 8 + 4, 8) and not divisible(n, 8)
    assert divisible(n * 2, 16, {n: 8})
    assert divisible(n * x, 8, {n: 8})
    assert divisible(Cast(x * 4, dtype("int64")), 4)
    assert divisible(binary("bitxor", x * 8, y * 8), 8)
    assert not divisible(binary("bitxor", x * 6, y * 12), 3)


def test_statements_collect_ranges():
    a = Buffer("A", (64,), dtype("float32"), "global")
    i, tx, ty, tz, bx = (Var(n, I32) for n in ("i", "tx", "ty", "tz", "bx"))
    store = Store(a, (binary("floormod", tx * 4 + i, 512),), load(a, (i // 4,)))
    body = For(i, const(0), const(4), "serial", If(i < 4, store, None))
    launch = Launch((const(2),), (bx,), (128, 1, 1), (tx, ty, tz), body)
    out = simplify_stmt(launch)
    want = For(i, const(0), const(4), "serial", Store(a, (tx * 4 + i,), load(a, (const(0),))))
    assert out.body.same(want)
    assert simplify_stmt(out) is out


def test_branches_know_their_condition():
    a = Buffer("A", (64,), dtype("float32"), "global")
    n = Var("n", I32)
    inner = If(x < n, Store(a, (x,), Const(1.0, dtype("float32"))), None)
    out = simplify_stmt(If(x < n, Seq((inner, If(x < 8, EMPTY, inner))), None), ENV)
    assert not isinstance(out.then.stmts[0], If)
    out = simplify_stmt(If(x < 8, Store(a, (x // 8,), Const(1.0, dtype("float32"))), None), ENV)
    assert out.then.indices[0].same(const(0))


def test_branches_that_bound_integers_decide():
    """last = (x * 8 + 7) // 8 + 1 is x + 1, so last - 1 - k <= x for all k >= 0."""
    v, a = Buffer("v", (1,), I32, "local.var"), Buffer("A", (64,), I32, "global")
    last, k = Var("last", I32), Var("k", I32)
    put = Store(a, (x,), const(1))
    value = (x * 8 + 7) // 8 + 1

    def loop(cond, bound=value):
        return simplify_stmt(Seq((Bind(last, bound), For(k, const(0), const(5), "serial", If(cond, put, None)))), ENV)

    assert not any(isinstance(s, If) for s in walk(loop(last - 1 - k <= x)))
    assert not any(isinstance(s, If | Store) for s in walk(loop(last - 1 - k > x)))
    assert any(isinstance(s, If) for s in walk(loop(last - 1 - k >= x))), "k decides"
    assert any(isinstance(s, If) for s in walk(loop(last > x, load(v, (const(0),))))), "memory may change"


def test_branches_do_not_know_what_memory_held_before_a_store():
    v, a = Buffer("v", (1,), I32, "local.var"), Buffer("A", (64,), I32, "global")
    n, put = Var("n", I32), Store(a, (x,), const(1))
    cond = Binary("gt", load(v, (const(0),)), const(0), dtype("bool"))
    inner = If(cond, put, None)
    assert not isinstance(simplify_stmt(If(cond, Seq((put, inner)), None), ENV).then.stmts[1], If)
    stored = simplify_stmt(If(cond, Seq((Store(v, (const(0),), n), inner)), None), ENV)
    assert isinstance(stored.then.stmts[1], If)
    otherwise = simplify_stmt(If(cond, put, Seq((Store(v, (const(0),), n), inner))), ENV)
    assert isinstance(otherwise.orelse.stmts[1], If)
    both = If(logical("and", cond, x < n), Seq((Store(v, (const(0),), n), If(x < n, inner, None))), None)
    assert simplify_stmt(both, ENV).then.stmts[1].cond.same(cond)  # what memory does not decide is still known
    other = Binary("gt", load(a, (y,)), const(0), dtype("bool"))
    barrier = Evaluate(call("sync_threads", (), "void"))
    assert isinstance(simplify_stmt(If(other, Seq((barrier, If(other, put, None))), None), ENV).then.stmts[1], If)


def test_loops_of_extent_zero_and_one():
    a = Buffer("A", (64,), dtype("float32"), "global")
    s = Store(a, (x,), Const(1.0, dtype("float32")))
    assert simplify_stmt(For(x, const(3), const(1), "serial", s)).indices[0].same(const(3))
    assert simplify_stmt(For(x, const(3), const(0), "serial", s)).same(EMPTY)


def test_load_under_logic_is_not_dropped_or_moved():
    a = Buffer("A", (64,), dtype("bool"), "global")
    v = load(a, (x,))
    assert isinstance(simplify(logical("and", v, Binary("lt", x, const(0), dtype("bool"))), {}), Binary)
    assert isinstance(simplify(Binary("and", v, Binary("eq", y, const(9), dtype("bool")), dtype("bool")), ENV), Binary)
    assert isinstance(v, Load)


def test_a_shift_by_a_variable_is_an_atom():
    k = Var("k", I32)
    for e in (const(1) << k, (k * 2) << k):
        assert simplify(e).same(e) and [(atom.same(e), c) for atom, c in Analyzer().linear(e).terms.items()] == [(True, 1)]
