"""check_blocks: blocks that store different values in the same elements of a tensor are refused on every backend."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import TILE_PASSES

f32 = "float32"


def launch(body, grid=(4,)):
    """body: macro of (X, Y, b, n): two tensors of 128, the block index (or indices), a scalar; a grid of None has n blocks."""
    @T.prim_func
    def main(X: T.Tensor((128,), f32), Y: T.Tensor((128,), f32), n: T.int32):
        with T.Kernel(*(n if g is None else g for g in grid), threads=32) as b:
            body(X, Y, b, n)

    return main


@T.macro
def of_the_index(X, Y, b, n):
    for i in T.Parallel(32):
        Y[i] = T.cast(b, f32)


@T.macro
def of_other_elements(X, Y, b, n):
    for k in T.serial(n):
        for i in T.Parallel(32):
            Y[i] = X[b * 32 + i] + k


@T.macro
def through_shared_memory(X, Y, b, n):
    s = T.alloc_shared((32,), f32)
    T.copy(X[b * 32], s)
    T.copy(s, Y[0:32])


@T.macro
def of_a_reduction(X, Y, b, n):
    f, o = T.alloc_fragment((32,), f32), T.alloc_fragment((1,), f32)
    T.copy(X[b * 32], f)
    T.reduce_sum(f, o)
    T.copy(o, Y[0:1])


@T.macro
def of_a_variable(X, Y, b, n):
    v = T.alloc_var(f32)
    v = X[b]
    Y[0] = v


@T.macro
def by_a_fill(X, Y, b, n):
    T.fill(Y[0:32], T.cast(b, f32))


@T.macro
def by_an_update(X, Y, b, n):
    for i in T.Parallel(32):
        Y[i] += X[i]


@T.macro
def by_two_of_four(X, Y, b, n):
    if b < 2:
        for i in T.Parallel(32):
            Y[i] = X[b * 32 + i]


@T.macro
def of_the_second_index(X, Y, b, n):
    for i in T.Parallel(32):
        Y[b[0] * 32 + i] = X[i] + T.cast(b[1], f32)


@T.macro
def at_half_of_the_index(X, Y, b, n):
    for i in T.Parallel(32):
        Y[b // 2 * 32 + i] = X[b * 32 + i]


@T.macro
def at_the_last_bit_of_the_index(X, Y, b, n):
    s = T.alloc_shared((32,), f32)
    half = b & 1
    T.copy(X[b * 32], s)
    T.copy(s, Y[half * 32:half * 32 + 32])


@T.macro
def at_a_remainder_and_a_bound(X, Y, b, n):
    if b // 3 == 0:
        Y[T.min(b, 1)] = X[b]
    else:
        Y[b + 5] = X[b]


RACES = [at_half_of_the_index, at_the_last_bit_of_the_index, at_a_remainder_and_a_bound, of_the_index, of_other_elements,
         through_shared_memory, of_a_reduction, of_a_variable, by_a_fill, by_an_update, by_two_of_four, of_the_second_index]


@pytest.mark.parametrize("body", RACES, ids=lambda b: b.__name__)
def test_blocks_that_store_different_values_in_one_element_are_refused(body):
    """Only the simulator told of the race; other backends kept the value of any block."""
    with pytest.raises(ValueError) as e:
        run_passes(launch(body, (2, 2) if body is of_the_second_index else (4,)).func, TILE_PASSES, PassContext(Target("c")))
    assert e.value.kind == "block-overwrite" and e.value.span is not None


@pytest.mark.parametrize("where", [{"execution_backend": "tile"}, {"target": "cpu"}, *(
    {"target": {"kind": "cuda", "arch": a}, "execution_backend": "simulator"} for a in ("sm_80", "sm_90a"))])
def test_every_backend_refuses_them(where):
    with pytest.raises(ValueError, match="block-overwrite"):
        tilelang.compile(launch(through_shared_memory), **where)


@pytest.mark.parametrize("body", RACES[:3] + [of_other_elements], ids=lambda b: b.__name__)
def test_as_many_blocks_as_a_call_says_get_a_warning(body):
    with pytest.warns(TileLangWarning, match="block-overwrite"):
        tilelang.compile(launch(body, (None,)), target="cpu")


@T.macro
def equal_values(X, Y, b, n):
    for i in T.Parallel(32):
        Y[i] = X[i] * 2.0


@T.macro
def in_one_block(X, Y, b, n):
    if b == 3 and X[0] >= 0:
        for i in T.Parallel(32):
            Y[i] = X[b * 32 + i]


@T.macro
def in_the_other_branch(X, Y, b, n):
    if b > 0:
        Y[32 + b] = 1.0
    else:
        for i in T.Parallel(32):
            Y[i] = X[b * 32 + i]


@T.macro
def in_the_block_that_a_scalar_names(X, Y, b, n):
    if b == n:
        for i in T.Parallel(32):
            Y[i] = X[b * 32 + i]


@T.macro
def with_atomics(X, Y, b, n):
    for i in T.Parallel(32):
        T.atomic_add(Y[i], X[b * 32 + i])


@T.macro
def at_a_name_of_the_index(X, Y, b, n):
    row = b * 32
    for i in T.Parallel(32):
        at = row + i
        Y[at] = X[i] * T.cast(b, f32)


@T.macro
def in_turns(X, Y, b, n):
    for k in T.serial(T.ceildiv(n - b, 4)):
        t = k * 4 + b
        Y[t] = X[t]


@T.macro
def in_the_last_block(X, Y, b, n):
    c = T.alloc_shared((1,), f32)
    tx = T.get_thread_binding()
    if tx == 0:
        c[0] = T.atomic_add(Y[127], 1.0, return_prev=True)
    T.sync_threads()
    if c[0] == 3.0:
        Y[tx] = X[b * 32 + tx]


@T.macro
def by_the_first_that_takes_a_lock(X, Y, b, n):
    if T.get_thread_binding() == 0:
        taken = T.atomic_add(Y[127], 1.0, return_prev=True)
        if taken == 0.0:
            Y[0] = X[b]


@T.macro
def after_the_block_before(X, Y, b, n):
    tx = T.get_thread_binding()
    if tx == 0:
        turn = T.alloc_var(f32, init=-1.0)
        while turn != T.cast(b, f32):
            turn = T.atomic_load(Y[127], memory_order="acquire")
    T.sync_threads()
    for i in T.Parallel(32):
        Y[i] = Y[i] + X[b * 32 + i]
    T.sync_threads()
    if tx == 0:
        T.atomic_store(Y[127], T.cast(b, f32) + 1.0, memory_order="release")


@T.macro
def of_the_half_at_the_half(X, Y, b, n):
    s = T.alloc_shared((32,), f32)
    half = b // 2
    T.copy(X[half * 32], s)
    for i in T.Parallel(32):
        Y[b // 2 * 32 + i] = s[i] + T.cast(half, f32)


@T.macro
def by_the_even_of_two(X, Y, b, n):
    if b % 2 == 0:
        for i in T.Parallel(32):
            Y[b // 2 * 32 + i] = X[b * 32 + i]


@T.macro
def at_a_quotient_and_a_remainder(X, Y, b, n):
    for i in T.Parallel(32):
        Y[b // 2 * 64 + b % 2 * 32 + i] = X[b * 32 + i]


ALLOWED = [of_the_half_at_the_half, by_the_even_of_two, at_a_quotient_and_a_remainder, after_the_block_before,
           by_the_first_that_takes_a_lock, equal_values, in_one_block, in_the_other_branch, in_the_block_that_a_scalar_names,
           with_atomics, at_a_name_of_the_index, in_turns, in_the_last_block]


@pytest.mark.parametrize("size", [4, None], ids=["static", "run-time"])
@pytest.mark.parametrize("body", ALLOWED, ids=lambda b: b.__name__)
def test_other_stores_are_left_alone(body, size, recwarn):
    kernel = tilelang.compile(launch(body, (size,)), execution_backend="tile")
    kernel(np.arange(128, dtype=np.float32), np.zeros(128, np.float32), 3)
    assert not [w for w in recwarn if "block-overwrite" in str(w.message)]
