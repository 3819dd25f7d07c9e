"""Walks and rewrites of statements."""

import copy
import pickle

import pytest

from tilelang.ir import (EMPTY, Binary, Bind, Break, Buffer, Call, Const, Evaluate, Expr, For, Func, If, Launch, Load,
                         Node, Seq, Stmt, Store, Var, call, const, contains, dtype, free_vars, fresh, inner, rewrite,
                         rewrite_launches, rewrite_stmts, seq, statements, substitute, walk)


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


def stores():
    """x = B[i] + 1; B[i] = 2 for i of a loop, where B has as many elements as a variable says."""
    n, i, x = (fresh(name, dtype("int32")) for name in "nix")
    b = Buffer("B", (n,), dtype("int32"))
    body = seq(Bind(x, b[i] + 1), Store(b, (i,), const(2)))
    return For(i, const(0), n, "serial", body)


def test_walks_by_class_find_what_walks_find():
    for whole in (program(), stores()):
        for classes in ((Node,), (Stmt,), (Expr,), (Var,), (Buffer,), (Launch, Call), (Load, Store), (Const, Binary), (Break,)):
            found = [x for x in walk(whole) if isinstance(x, classes)]
            assert [id(x) for x in walk(whole, *classes)] == [id(x) for x in found]
            assert contains(whole, *classes) == bool(found)
    assert not contains(stores().body, For) and contains(Break(), Stmt)


def test_what_holds_nothing_of_a_class_is_kept_without_a_look():
    s = stores()
    seen = []

    def other(x):
        seen.append(x)
        return replaced if isinstance(x, Load) else None

    replaced = const(7)
    out = rewrite(s, other, Load)
    assert [type(x) for x in seen] == [Load]
    assert out.body.stmts[0].value.a is replaced and out.body.stmts[1] is s.body.stmts[1] and out.extent is s.extent
    assert rewrite(s, lambda x: None, Load) is s
    assert rewrite(s, lambda x: seq(x, x) if isinstance(x, Bind) else None, Bind).body.stmts[2] is s.body.stmts[1]


def test_facts_kept_on_a_node_are_no_part_of_it():
    a, b = stores(), stores().body
    contains(a, Load), list(walk(a)), hash(a)
    plain = [Binary("add", const(1), const(2), dtype("int32")) for _ in range(2)]
    contains(plain[0], Const), hash(plain[0])
    assert plain[0].same(plain[1]) and hash(plain[0]) == hash(plain[1]) and repr(plain[0]) == repr(plain[1])
    assert id(next(walk(b, Buffer)).data) not in {id(x) for x in walk(b, Var)}  # a walk ends at a buffer


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_copies_do_not_take_over_what_was_found_out_about_the_original(again):
    """The names in a node are known by addresses: a copy's variables have others."""
    for _ in range(20):  # bits of names may coincide
        s = stores()
        assert substitute(s.body, {s.var: const(3)}) is not s.body
        hash(s)
        other = again(s)
        assert not {s.var, s.extent} & free_vars(substitute(other.body, {other.var: const(3), other.extent: const(9)}))
        assert other.var not in free_vars(substitute(other.body, {other.var: const(3)}))
        assert other._hash is None or hash(other) == hash(s)


def test_a_name_is_replaced_wherever_it_stands():
    """In indices, in the shape of a tensor and as its storage; what does not name it is the same object."""
    s = stores()
    b = next(walk(s, Buffer))
    out = substitute(s, {s.extent: const(8)})
    assert out.extent == const(8) and all(x.shape == (8,) for x in walk(out, Buffer)) and s.extent not in free_vars(out)
    other = fresh("p", b.data.dtype)
    assert {x.data for x in walk(substitute(s, {b.data: other}), Buffer)} == {other}
    assert substitute(s, {fresh("z", dtype("int32")): const(1)}) is s
    x = s.body.stmts[0].var
    assert substitute(s, {x: fresh("y", dtype("int32"))}).body.stmts[1] is s.body.stmts[1]
