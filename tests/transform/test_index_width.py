"""Indices beyond 2^31: computed in 64 bits, also through names bound to parts of them; sizes beyond are refused."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Bind, Load, Store, walk
from tilelang.ir.evaluate import evaluate
from tilelang.target import Target
from tilelang.transform.legalize.legalize import legalize
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower

LONG = 3 * 2**31


def printed(f):
    program = lower(f.func, Target({"kind": "cuda", "arch": "sm_80"}))
    return print_kernel(program.kernels[0])


@T.prim_func
def bound_name(A: T.Tensor((LONG,), "int8")):
    with T.Kernel(LONG // 1024, threads=128) as bx:
        tx = T.get_thread_binding()
        base = bx * 1024
        i = base + tx
        if i < 5000:
            A[i] = A[i] + T.int8(1)


@pytest.mark.spec("M:index-2-31")
def test_a_bound_name_that_indexes_a_long_tensor_does_not_wrap():
    func = run_passes(bound_name.func, [legalize], PassContext(verify=True))
    launch = next(n for n in walk(func.body) if type(n).__name__ == "Launch")
    values = {launch.block_vars[0]: np.int32(LONG // 1024 - 1), launch.thread_vars[0]: np.int32(127)}
    for n in walk(func.body):
        if isinstance(n, Bind):
            with np.errstate(over="ignore"):
                values[n.var] = evaluate(n.value, values)
    places = [n.indices[0] for n in walk(func.body) if isinstance(n, (Load, Store)) and n.buffer.name == "A"]
    assert len(places) == 2
    for i in places:
        assert int(evaluate(i, values)) == LONG - 1024 + 127
    condition = next(n.cond for n in walk(func.body) if type(n).__name__ == "If")
    assert not evaluate(condition, values)  # the wrapped value is below 5000


def test_a_bound_name_is_printed_in_64_bits():
    text = printed(bound_name)
    assert "const long long i_64 = base_64 + (long long)tx;" in text
    assert "A[i_64] =" in text and "(long long)i]" not in text


def test_short_tensors_keep_32_bit_indices():
    @T.prim_func
    def main(A: T.Tensor((2**20,), "int8")):
        with T.Kernel(1024, threads=128) as bx:
            tx = T.get_thread_binding()
            i = bx * 1024 + tx
            A[i] = A[i] + T.int8(1)

    assert "long long" not in printed(main)


def test_a_dimension_that_is_a_product_of_symbols_is_long():
    a, b = T.dynamic("a"), T.dynamic("b")

    @T.prim_func
    def main(A: T.Tensor((a * b,), "int8"), B: T.Tensor((a, b), "int8")):
        with T.Kernel(T.ceildiv(b, 128), a, threads=128) as (bx, by):
            tx = T.get_thread_binding()
            col = bx * 128 + tx
            if col < b:
                A[by * b + col] = T.int8(2)

    text = printed(main)
    assert "A[(long long)by * (long long)b + col_64]" in text
    assert "< (long long)a * (long long)b" in text


def test_strides_that_are_products_of_symbols_are_computed_in_64_bits():
    a, b, c = T.dynamic("a"), T.dynamic("b"), T.dynamic("c")

    @T.prim_func
    def main(A: T.Tensor((a, b, c), "int8")):
        with T.Kernel(T.ceildiv(c, 128), b, a, threads=128) as (bx, by, bz):
            tx = T.get_thread_binding()
            A[bz, by, bx * 128 + tx] = T.int8(2)

    assert "(long long)bz * ((long long)c * (long long)b)" in printed(main)


@pytest.mark.spec("M:index-2-31")
def test_a_bound_index_reaches_beyond_2_to_31_on_the_cpu():
    torch = pytest.importorskip("torch")

    @T.prim_func
    def main(A: T.Tensor((LONG,), "int8"), n: T.int32):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            i = n * 1024 + tx
            A[i] = T.int8(tx + 1)

    memory = torch.empty(LONG, dtype=torch.int8)  # pages are taken only where they are touched
    kernel = tilelang.compile(main, target="llvm")
    first = (2**32 + 2**20) // 1024
    kernel(memory, first)
    assert memory[first * 1024:first * 1024 + 32].tolist() == list(range(1, 33))


@pytest.mark.spec("M:index-2-31")
def test_a_row_stride_beyond_2_to_31_on_the_cpu():
    torch = pytest.importorskip("torch")
    step = 2**31 + 64

    @T.prim_func
    def main(A: T.StridedTensor((2, 32), (step, 1), "int8")):
        with T.Kernel(2, threads=32) as bx:
            row = bx
            for j in T.Parallel(32):
                A[row, j] = T.int8(j + 1)

    memory = torch.empty(step + 32, dtype=torch.int8)
    view = memory.as_strided((2, 32), (step, 1))
    tilelang.compile(main, target="llvm")(view)
    assert view.tolist() == [list(range(1, 33))] * 2
