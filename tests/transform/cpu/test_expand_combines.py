"""The pass expand_combines: reductions and scans by a function as loops over their lines."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.ir import Parallel, For, to_text, walk
from tilelang.ir.parser import parse
from tilelang.ops.combine import Combine, ReduceWith, ScanWith
from tilelang.transform.cpu.expand_combines import expand_combines
from tilelang.transform.framework.pass_ import PassContext


@T.prim_func
def program(A: T.Tensor((5, 7), "int32"), B: T.Tensor((5,), "int32")):
    with T.Kernel(1, threads=32):
        a = T.alloc_shared((5, 7), "int32")
        b = T.alloc_shared((5,), "int32")
        T.copy(A, a)
        T.scan_with(a, a, lambda x, y: x + y, 0, dim=1)
        T.reduce_with(a, b, lambda x, y: x + y, 0, dim=1)
        T.copy(b, B)


def test_each_becomes_a_loop_over_its_lines():
    before = program.func
    assert [type(s) for s in walk(before, Combine)] == [ScanWith, ReduceWith]
    after = expand_combines(before, PassContext())
    assert not list(walk(after, Combine))
    assert [tuple(int(n.value) for n in s.extents) for s in walk(after, Parallel)] == [(5, 1), (5, 1)]
    assert [int(s.extent.value) for s in walk(after, For)] == [7, 7]


def test_both_programs_compute_the_same():
    a = np.arange(35, dtype=np.int32).reshape(5, 7)
    b = np.zeros(5, np.int32)
    tilelang.compile(program, target="cpu")(a, b)
    assert (b == np.cumsum(a, 1).sum(1)).all()


def test_what_is_printed_parses_back():
    assert parse(to_text(program.func)).same(program.func)
