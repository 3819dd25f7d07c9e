"""A call of the user's function is made as often as it is written: not lost where its value is, not made again for guards."""

import re

import pytest

import tilelang
import tilelang.language as T
from tilelang.transform.legalize.bind_calls import bind_calls
from tilelang.transform.framework.pass_ import PassContext

SOURCE = "__device__ int tick(int* p) { return atomicAdd(p, 1); }"
CUDA = {"kind": "cuda", "arch": "sm_80"}


def tick(A):
    return T.call_extern("int32", "tick", A)


def calls_in(body):
    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), B: T.Tensor((16,), "int32"), n: T.int32):
        with T.Kernel(1, threads=1):
            T.import_source(SOURCE)
            body(A, B, n)

    text = tilelang.lower(main, target=CUDA).kernel_source
    return len(re.findall(r"tick\(&", text)), text


@T.macro
def product_with_zero(A, B, n):
    B[0] = tick(A) * 0


@T.macro
def zero_times(A, B, n):
    B[0] = 0 * tick(A)


@T.macro
def remainder_by_one(A, B, n):
    B[0] = tick(A) % 1


@T.macro
def no_bits(A, B, n):
    B[0] = tick(A) & 0


@T.macro
def a_minimum_that_is_known(A, B, n):
    B[0] = T.min(tick(A) % 4, -1)


@T.macro
def a_comparison_that_is_known(A, B, n):
    B[0] = T.cast(tick(A) % 4 < 4, "int32")


@T.macro
def a_condition_that_is_known(A, B, n):
    if tick(A) * 0 == 0:
        B[0] = 1


@T.macro
def before_a_constant(A, B, n):
    if tick(A) > 0 and False:
        B[0] = 1


@T.macro
def no_iterations(A, B, n):
    for i in T.serial(tick(A) * 0):
        B[i] = 1


@T.macro
def index_of_a_store(A, B, n):
    B[tick(A)] = 1


@T.macro
def index_of_a_load(A, B, n):
    B[0] = B[tick(A)]


@T.macro
def index_of_an_atomic(A, B, n):
    T.atomic_add(B[tick(A)], 1)


@T.macro
def index_in_a_condition(A, B, n):
    if B[tick(A)] > 0:
        B[0] = 1


@T.macro
def chained_comparison(A, B, n):
    B[0] = T.cast(0 <= tick(A) < n, "int32")


@T.macro
def power(A, B, n):
    B[0] = T.pow(tick(A), 3)


ONCE = (product_with_zero, zero_times, remainder_by_one, no_bits, a_minimum_that_is_known, a_comparison_that_is_known,
        a_condition_that_is_known, before_a_constant, no_iterations, index_of_a_store, index_of_a_load, index_of_an_atomic,
        index_in_a_condition, chained_comparison, power)


@pytest.mark.parametrize("body", ONCE, ids=[b.name for b in ONCE])
def test_a_call_that_is_written_once_is_made_once(body):
    count, text = calls_in(body)
    assert count == 1, text


@T.macro
def value_before_index(A, B, n):
    B[tick(A)] = tick(A) * 2 + n


def test_calls_of_one_statement_keep_pythons_order():
    count, text = calls_in(value_before_index)
    names = re.findall(r"const int (\w+) = tick\(", text)
    assert count == 2 and len(names) == 2, text
    assert re.search(rf"B\[{names[1]}\] = .*\b{names[0]}\b", text), text


@T.macro
def behind_and(A, B, n):
    if n > 0 and B[tick(A)] > 0:
        B[0] = 1


@T.macro
def while_index(A, B, n):
    while B[tick(A)] > 0:
        B[0] = 1


@pytest.mark.parametrize("body", [behind_and, while_index], ids=["and", "while"])
def test_an_index_that_may_not_be_computed_before_is_refused(body):
    with pytest.raises(ValueError, match="extern-repeated"):
        calls_in(body)


def test_a_program_without_such_calls_stays_the_same_object():
    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=1):
            x = T.call_extern("int32", "tick", A)
            A[x] = T.call_pure_extern("int32", "length", n) * 0

    assert bind_calls(main.func, PassContext()) is main.func
