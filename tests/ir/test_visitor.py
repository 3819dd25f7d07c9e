"""Walks and rewrites of statements."""

from tilelang.ir import (EMPTY, Break, Evaluate, For, Func, If, Launch, Seq, call, const, dtype, fresh, inner, rewrite_launches,
                         rewrite_stmts, seq, statements)


def act(name):
    return Evaluate(call(name, (), "void"))


def names(body):
    return [s.call.op for s in statements(body) if isinstance(s, Evaluate)]


def program():
    i = fresh("i", dtype("int32"))
    bx, *threads = (fresh(n, dtype("int32")) for n in ("bx", "tx", "ty", "tz"))
    launch = Launch((const(2),), (bx,), (1, 1, 1), tuple(threads), seq(act("c"), act("d")))
    loop = For(i, const(0), const(4), "serial", seq(act("b"), If(fresh("p", dtype("bool")), launch, act("e"))))
    return Func("f", (), (), seq(act("a"), loop, act("f")))


def test_statements_come_in_the_order_of_the_program():
    f = program()
    assert names(f.body) == list("abcdef")
    assert [len(inner(s)) for s in statements(f.body)] == [3, 0, 1, 2, 0, 2, 1, 2, 0, 0, 0, 0]
    assert inner(Break()) == ()


def test_a_rewrite_looks_into_what_it_keeps_and_not_into_what_it_gives():
    f = program()
    seen = []

    def twice(s):
        seen.append(s)
        return seq(s, s) if isinstance(s, Evaluate) and s.call.op in "bc" else None

    out = rewrite_stmts(f, twice)
    assert names(out.body) == list("abbccdef") and len(seen) == len(list(statements(f.body)))
    assert all(not isinstance(x, Seq) for s in statements(out.body) if isinstance(s, Seq) for x in s.stmts)
    assert rewrite_stmts(f, lambda s: None) is f and rewrite_stmts(f.body, lambda s: None) is f.body
    assert names(rewrite_stmts(f, lambda s: EMPTY if isinstance(s, For) else None).body) == ["a", "f"]


def test_launches_are_found_below_host_statements():
    f = program()
    assert rewrite_launches(f, lambda x: None) is f
    assert names(rewrite_launches(f, lambda x: x.body.stmts[0]).body) == list("abcef")
