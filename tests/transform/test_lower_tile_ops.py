"""Structure of lowered programs: vector widths, guards, cp.async, registers."""

from __future__ import annotations

import pytest
from tile_programs import Store, fragment, load, lowered, parallel, program, region, shared, tensor

from tilelang.errors import TileLangError
from tilelang.ir import (AddressOf, Call, Cast, For, Func, If, Load, Ramp, Select, Seq, Var, cast, dtype, fresh,
                         walk)
from tilelang.ir import Store as StoreNode
from tilelang.ir.verify import THREADS_BOUND, verify
from tilelang.layout import row_fragment
from tilelang.ops import Copy, CopyPlan, Fill


def lanes_of(func: Func, name: str, kind: type = Load) -> set[int]:
    return {i.lanes if isinstance(i, Ramp) else 1 for x in walk(func) if isinstance(x, kind) and x.buffer.name == name
            for i in x.indices[-1:]}


def valid(func: Func) -> Func:
    out = lowered(func)
    assert [str(f) for f in verify(out, THREADS_BOUND)] == []
    return out


def add_program(n: int, tile: int, dt: str = "float32") -> Func:
    a, b, c = tensor("A", (n,), dt), tensor("B", (n,), dt), tensor("C", (n,), dt)
    return program([a, b, c], [], lambda bx: [parallel((tile,), lambda i: Store(
        c, (bx * tile + i,), load(a, (bx * tile + i,)) + load(b, (bx * tile + i,))))], grid=(-(-n // tile),))


@pytest.mark.parametrize("n,dt,lanes", [(4096, "float32", 4), (4096, "float16", 8), (4088, "float16", 8),
                                        (4092, "float16", 4)])
def test_vector_width_follows_row_length_and_type(n, dt, lanes):
    out = valid(add_program(n, 1024, dt))
    assert lanes_of(out, "A") == {lanes} and lanes_of(out, "C", StoreNode) == {lanes}


@pytest.mark.spec("L9:guards")
def test_guards_are_dropped_when_proven_and_kept_when_not():
    assert not any(isinstance(x, (If, Select)) for x in walk(valid(add_program(4096, 1024))))
    assert any(isinstance(x, If) for x in walk(valid(add_program(4092, 1024))))


def copy_program(shape, tile, dt="float16", **plan) -> Func:
    a, s = tensor("A", shape, dt), shared("S", tile, dt)
    grid = tuple(-(-n // t) for n, t in zip(shape, tile))
    return program([a], [(s, None)], lambda bx, by: [Copy(region(a, bx * tile[0], by * tile[1], extents=tile),
                                                         region(s), plan=CopyPlan(**plan))], grid=grid)


@pytest.mark.parametrize("columns,bytes_,guarded", [(128, 16, False), (136, 16, True), (132, 8, True), (130, 4, True)])
def test_async_copy_takes_the_widest_aligned_vector(columns, bytes_, guarded):
    calls = [x for x in walk(valid(copy_program((64, columns), (32, 64), async_group=True)))
             if isinstance(x, Call) and x.op == "cp_async"]
    assert {c.options.bytes for c in calls} == {bytes_}
    assert all((len(c.args) == 3) == guarded for c in calls)


def test_async_copy_of_odd_rows_is_a_plain_copy():
    out = valid(copy_program((64, 131), (32, 64), async_group=True))
    assert not any(isinstance(x, Call) for x in walk(out))
    assert lanes_of(out, "A") == {1}


def test_fragment_registers_are_functions_of_the_register_loops():
    frag = row_fragment((32, 64), 128, 8)
    f, c = fragment("F", (32, 64)), tensor("C", (32, 64), "float16")
    out = valid(program([c], [(f, frag)], lambda bx: [
        Fill(region(f), cast(1.0, "float32")), Copy(region(f), region(c))]))
    for x in walk(out):
        if isinstance(x, (Load, StoreNode)) and x.buffer.name == "F":
            assert not any(getattr(v, "name", "") == "tx" for i in x.indices for v in walk(i))
    assert lanes_of(out, "C", StoreNode) == {8}


def test_replicated_fragment_is_stored_once():
    """Each of 4 threads holds every row's value; one of them stores it."""
    rows = row_fragment((32, 4), 128, 1).reduce(1)
    f, c = fragment("F", (32,)), tensor("C", (32,))
    out = valid(program([c], [(f, rows)], lambda bx: [Fill(region(f), cast(1.0, "float32")),
                                                      Copy(region(f), region(c))]))
    stores = [x for x in walk(out) if isinstance(x, If) and any(
        isinstance(y, StoreNode) and y.buffer.name == "C" for y in walk(x))]
    assert stores and "% 4" in repr(stores[0].cond)


def test_foreign_fragment_elements_go_through_shared_memory():
    f, c = fragment("F", (32, 32)), tensor("C", (32, 32))
    out = valid(program([c], [(f, row_fragment((32, 32), 128))], lambda bx: [
        Fill(region(f), cast(1.0, "float32")),
        parallel((32, 32), lambda i, j: Store(c, (i, j), load(f, (j, 31 - i))))]))
    assert any(isinstance(x, StoreNode) and x.buffer.name == "F_s" for x in walk(out))
    assert not any(isinstance(x, AddressOf) for x in walk(out))


@pytest.mark.parametrize("index", [lambda i: i // 2, lambda i: (i * 7) % 32, lambda i: i * 2])
def test_updates_of_one_element_by_several_iterations_are_made_by_one_thread(index):
    a, s = tensor("A", (64,)), shared("S", (128,))
    valid(program([a], [(s, None)], lambda bx: [
        parallel((64,), lambda i: Store(s, (index(i),), load(s, (index(i),)) + load(a, (i,))))]))


def test_fragment_read_outside_parallel_is_refused():
    f, c = fragment("F", (32,)), tensor("C", (32,))
    with pytest.raises(TileLangError, match="Cannot lower access to thread-distributed fragment `F`"):
        k = fresh("k")
        lowered(program([c], [(f, row_fragment((32,), 128))], lambda bx: [
            For(k, cast(0, "int32"), cast(32, "int32"), "serial", Store(c, (k,), load(f, (k,))))]))


def test_conversion_keeps_memory_vectors():
    a, b = tensor("A", (1024,), "float16"), tensor("B", (1024,))
    out = valid(program([a, b], [], lambda bx: [Copy(region(a), region(b))]))
    assert lanes_of(out, "A") == {4} and lanes_of(out, "B", StoreNode) == {4}
    assert any(isinstance(x, Cast) for x in walk(out))


@pytest.mark.spec("M:dynamic-vector")
@pytest.mark.parametrize("n", [4095, None])
def test_rows_that_end_inside_a_vector_are_tested_at_run_time(n):
    size = Var("n", dtype("int32")) if n is None else n
    a, c = tensor("A", (size,)), tensor("C", (size,))
    func = program([a, c], [], lambda bx: [parallel((512,), lambda i: Store(
        c, (bx * 512 + i,), load(a, (bx * 512 + i,)) + 1.0))], grid=((size + 511) // 512,),
        scalars=() if n is not None else (size,))
    out = valid(func)
    assert lanes_of(out, "A") == {1, 4} and lanes_of(out, "C", StoreNode) == {1, 4}
    branch = next(x for x in walk(out) if isinstance(x, If) and x.orelse is not None)
    assert not any(isinstance(x, (If, Select)) for x in walk(branch.then))


def test_statements_of_a_body_bind_their_own_lanes():
    a, b, c = tensor("A", (1024,)), tensor("B", (1024,)), tensor("C", (1024,))
    out = valid(program([a, b, c], [], lambda bx: [parallel((1024,), lambda i: Seq((
        Store(b, (i,), load(a, (i,)) + 1.0), Store(c, (i,), load(a, (i,)) * 2.0))))]))
    assert lanes_of(out, "B", StoreNode) == lanes_of(out, "C", StoreNode) == {4}
