"""Rows that an index in memory names are copied in pieces of 16 bytes, asynchronously in pipelined loops."""

import numpy as np
import pytest
from sync_mutants import lowered as unverified

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Evaluate, Launch, call, numpy_dtype, rewrite, walk
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.launch import check_launch

TARGETS = [Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a")]
R, D, WORDS = 24, 64, 40


def agree(program, seed=0, dtype="float16"):
    """The CUDA text of a program for sm_90a, after the simulator has agreed with the reference on both targets."""
    f, rng = program.func, np.random.default_rng(seed)
    args = {b.name: rng.integers(-3, WORDS + 3 if b.dtype.is_int and b.dtype.bits > 8 else 4, b.shape).astype(
        numpy_dtype(b.dtype)) for _, b in f.buffers}
    want = run_tile(f, args)
    for target in TARGETS:
        lowered = lower(f, target)
        for name, got in run_device(lowered, args, check=True).outputs.items():
            np.testing.assert_array_equal(got, want[name], err_msg=f"{target}: {name}")
    return "\n".join(map(print_kernel, lowered.kernels))


def gather(row, dtype="float16", steps=3, stages=2, d=D, guard="", where="global", again=False):
    """O[step] = sum over steps of rows of X; row: how the loop body copies them to the tile."""
    @T.prim_func
    def kernel(X: T.Tensor((WORDS, steps * d), dtype), I: T.Tensor((steps, R), "int32"), O: T.Tensor((R, d), dtype)):
        with T.Kernel(1, threads=64):
            s, at = T.alloc_shared((R, d), dtype), T.alloc_shared((R,), "int32")
            o = T.alloc_fragment((R, d), dtype)
            T.clear(o)
            T.copy(I[0, 0:R], at)
            for k in T.Pipelined(steps, num_stages=stages):
                row(X, I, at, s, k)
                for i, j in T.Parallel(R, d):
                    o[i, j] += s[i, j]
            T.copy(o, O)

    return kernel


@T.macro
def plain(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        s[i, j] = X[I[k, i], k * s.shape[1] + j]


@T.macro
def through_a_tile(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        s[i, j] = X[at[i], k * s.shape[1] + j]


@T.macro
def selected(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        s[i, j] = T.if_then_else(I[k, i] >= 2, X[I[k, i], k * s.shape[1] + j], T.cast(0, X.dtype))


@T.macro
def selected_not(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        s[i, j] = T.if_then_else(I[k, i] < 2, T.cast(0, X.dtype), X[I[k, i], k * s.shape[1] + j])


@T.macro
def branches(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        row = I[k, i]
        if row >= 2:
            s[i, j] = X[row, k * s.shape[1] + j]
        else:
            s[i, j] = 0


@T.macro
def half_of_a_row(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        s[i, j] = T.if_then_else(j < s.shape[1] // 2, X[I[k, i], k * s.shape[1] + j], T.cast(0, X.dtype))


@T.macro
def row_by_row(X, I, at, s, k):
    for i in T.serial(s.shape[0]):
        T.copy(X[I[k, i], k * s.shape[1]:(k + 1) * s.shape[1]], s[i, :])


ASYNC = (plain, through_a_tile, selected, selected_not, half_of_a_row, branches)


@pytest.mark.parametrize("row", [*ASYNC, row_by_row], ids=lambda r: r.__name__)
@pytest.mark.parametrize("stages", [0, 2, 3])
def test_rows_of_an_index_are_copied_in_pieces_of_16_bytes(row, stages):
    text = agree(gather(row, stages=stages))
    body = text[text.index("__launch_bounds__"):]
    assert "half_t, 8>" in body or "cp_async<16>" in body
    if row in ASYNC and stages:
        assert "cp_async<16>(&s[" in body


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bfloat16", "float32", "int32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("row", [plain, selected], ids=lambda r: r.__name__)
def test_every_type_of_row_is_gathered_ahead(row, dtype):
    assert "cp_async<16>(&s[" in agree(gather(row, dtype=dtype, stages=2 if dtype != "float8_e4m3fn" else 3))


@pytest.mark.parametrize("d", [8, 12, 20, 33, 36])
def test_rows_of_any_length_are_gathered(d):
    agree(gather(plain, d=d))
    agree(gather(selected, d=d, dtype="float32"))


@T.macro
def tile_of_each_step(X, I, at, s, k):
    T.copy(I[k, 0:R], at)
    for i, j in T.Parallel(*s.shape):
        s[i, j] = X[at[i], k * s.shape[1] + j]


@T.macro
def some_rows_only(X, I, at, s, k):
    for i, j in T.Parallel(*s.shape):
        if I[k, i] >= 2:
            s[i, j] = X[I[k, i], k * s.shape[1] + j]


def test_an_index_tile_that_each_step_loads_is_not_read_before_it_has_landed():
    agree(gather(tile_of_each_step, stages=3))


def test_rows_that_a_step_leaves_alone_keep_what_an_earlier_one_wrote():
    @T.prim_func
    def kernel(X: T.Tensor((WORDS, 3 * D), "float16"), I: T.Tensor((3, R), "int32"), O: T.Tensor((R, D), "float16")):
        with T.Kernel(1, threads=64):
            s, o = T.alloc_shared((R, D), "float16"), T.alloc_fragment((R, D), "float16")
            T.clear(o)
            T.clear(s)
            for k in T.Pipelined(3, num_stages=2):
                some_rows_only(X, I, s, s, k)
                for i, j in T.Parallel(R, D):
                    o[i, j] += s[i, j]
            T.copy(o, O)

    agree(kernel)


def test_an_index_that_the_loop_overwrites_is_read_element_by_element():
    @T.prim_func
    def kernel(X: T.Tensor((WORDS, D), "int32"), O: T.Tensor((R, D), "int32")):
        with T.Kernel(1, threads=64):
            at = T.alloc_shared((R, D), "int32")
            for i, j in T.Parallel(R, D):
                at[i, j] = (i * 7 + j) % WORDS
            for i, j in T.Parallel(R, D):
                at[i, j] = X[at[i, j], j]
            for i, j in T.Parallel(R, D):
                O[i, j] = at[i, j]

    agree(kernel)


def test_rows_are_scattered_in_vectors():
    @T.prim_func
    def kernel(X: T.Tensor((R, D), "float16"), I: T.Tensor((R,), "int32"), O: T.Tensor((R * 8, D), "float16")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(R, D):
                O[i * 8 + I[i] % 8, j] = X[i, j]

    assert "half_t, 8>(&O" in agree(kernel)


def test_lanes_on_both_sides_of_a_bound_are_not_one_vector():
    @T.prim_func
    def kernel(X: T.Tensor((R, D), "float16"), O: T.Tensor((R, D), "float16")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(R, D):
                O[i, j] = T.if_then_else(j < 20, X[i, (j + 12) % D], X[i, (j ^ 2) % D])

    agree(kernel)


@pytest.mark.parametrize("shift", [1, 4, 8, 32])
def test_a_partner_that_both_branches_load_is_loaded_once(shift):
    @T.prim_func
    def kernel(X: T.Tensor((R, D), "float32"), O: T.Tensor((R, D), "float32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(R, D):
                partner = T.if_then_else((j // shift) % 2 == 0, -X[i, (j + shift) % D], X[i, (j + shift) % D])
                O[i, j] = X[i, j] + partner * X[i, j ^ shift]

    text = agree(kernel)
    assert shift < 4 or "float, 4>(&X_v" in text


def test_a_missing_barrier_before_indices_of_asynchronous_copies_was_called_ordered():
    """What the arguments of cp.async load from shared memory counted as no access."""
    @T.prim_func
    def main(A: T.Tensor((128, 96), "float16"), B: T.Tensor((64, 96), "float16"), I: T.Tensor((128,), "int32"),
             C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 32), "float16"), T.alloc_shared((64, 32), "float16")
            at = T.alloc_shared((128,), "int32")
            c = T.alloc_fragment((128, 64), "float32")
            T.clear(c)
            T.copy(I, at)
            for step in T.Pipelined(3, num_stages=3):
                for i, j in T.Parallel(128, 32):
                    a[i, j] = A[at[i], step * 32 + j]
                T.copy(B[0, step * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    func = unverified("sm_90a", main, {})
    launch = next(walk(func.body, Launch))
    assert check_launch(launch)[0].startswith("ordered")
    first = next(x for x in walk(launch.body, Evaluate) if x.call.op == "sync_threads")
    broken = rewrite(launch, lambda x: Evaluate(call("sync_warp", (), "void")) if x is first else None)
    assert not check_launch(broken)[0].startswith("ordered")


def alone(steps=5, stages=3, around="", dtype="float16", clear=False, written=False, rows=64, columns=256):
    """C = A[I] B^T, with rows of A gathered in the loop, in a block that has an SM to itself."""
    @T.macro
    def multiply(A, B, at, a, b, c):
        for step in T.Pipelined(steps, num_stages=stages):
            for i, j in T.Parallel(rows, 64):
                a[i, j] = A[at[i], step * 64 + j]
            T.copy(B[0, step * 64], b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=clear)

    @T.prim_func
    def main(A: T.Tensor((70, 64 * steps), dtype), B: T.Tensor((columns, 64 * steps), dtype), I: T.Tensor((rows,), "int32"),
             Z: T.Tensor((1,), "int32"), C: T.Tensor((rows, columns), "float32")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((rows, 64), dtype), T.alloc_shared((columns, 64), dtype)
            at = T.alloc_shared((rows,), "int32")
            c = T.alloc_fragment((rows, columns), "float32")
            T.clear(c)
            T.copy(I, at)
            if around == "loop":
                for _ in T.serial(2):
                    multiply(A, B, at, a, b, c)
            elif around == "branch":
                if Z[0] < WORDS:
                    multiply(A, B, at, a, b, c)
            else:
                multiply(A, B, at, a, b, c)
            T.copy(c, C)
            if written:
                B[0, 0] = 1.0

    return main


@pytest.mark.parametrize("options, under, by_tma", [
    ({}, True, True), ({"steps": 1}, True, True), ({"steps": 2}, True, True), ({"steps": 6, "stages": 4}, True, True),
    ({"around": "branch"}, True, False), ({"around": "loop"}, True, False), ({"written": True}, True, False),
    ({"clear": True}, False, False), ({"columns": 64}, False, False), ({"stages": 2}, False, False)])
def test_a_block_alone_on_its_sm_waited_for_each_gemm_of_gathered_rows(options, under, by_tma):
    """Its tensor cores had nothing to do under waits and copies.  TMA loads the other operand."""
    text = agree(alone(**options))
    assert ("tl::wgmma_wait<1>();" in text) == under and ("tma_load_2d(&b[" in text) == by_tma
    assert "cp_async<16>(&a[" in text


def test_each_copy_of_a_gathered_row_waited_for_its_index():
    """No load moves over a copy.  What the loop does not write is loaded in front of it."""
    for program in (alone(), alone(columns=64)):
        before, loop = agree(program).split("for (int step")
        assert "[it] = at[" in before and "at[it" not in loop and "cp_async<16>(&a[" in loop


def test_indices_that_the_loop_writes_are_loaded_in_it():
    @T.prim_func
    def main(A: T.Tensor((WORDS, 256), "float16"), I: T.Tensor((4, 64), "int32"), O: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=64):
            a, at = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64,), "int32")
            o = T.alloc_fragment((64, 64), "float16")
            T.clear(o)
            T.copy(I[0, :], at)
            for step in T.Pipelined(4, num_stages=2):
                for i, j in T.Parallel(64, 64):
                    a[i, j] = A[at[i], step * 64 + j]
                for i, j in T.Parallel(64, 64):
                    o[i, j] += a[i, j]
                for i in T.Parallel(64):
                    at[i] = I[step, i] + at[i] // 2
            T.copy(o, O)

    agree(main)


@pytest.mark.parametrize("form", ["stages", "outer loop", "variable"])
def test_what_selects_an_index_was_loaded_before_the_loop_wrote_it(form):
    """Only the tile of the index counted as written, not what the place in it is read from."""
    @T.prim_func
    def main(A: T.Tensor((WORDS, 256), "float16"), I: T.Tensor((64,), "int32"), O: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=64):
            a, at = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64,), "int32")
            of, o = T.alloc_shared((64,), "int32"), T.alloc_fragment((64, 64), "float16")
            v = T.alloc_var("int32", init=0)
            T.clear(o)
            for i in T.Parallel(64):
                at[i] = T.clamp(I[i], 0, WORDS - 1)
            if form == "stages":
                for step in T.Pipelined(4, order=[0, 1, 2], stage=[0, 0, 1]):
                    for i in T.Parallel(64):
                        of[i] = (i * 3 + step) % 64
                    for i, j in T.Parallel(64, 64):
                        a[i, j] = A[at[of[i]], step * 64 + j]
                    for i, j in T.Parallel(64, 64):
                        o[i, j] += a[i, j]
            else:
                for r in T.serial(2):
                    v += 7
                    for i in T.Parallel(64):
                        of[i] = (i * 3 + r) % 64
                    for step in T.Pipelined(4, num_stages=2):
                        for i, j in T.Parallel(64, 64):
                            a[i, j] = A[at[of[i] if form == "outer loop" else (i + v) % 64], step * 64 + j]
                        for i, j in T.Parallel(64, 64):
                            o[i, j] += a[i, j]
            T.copy(o, O)

    assert "cp_async<16>(&a[" in agree(main)


def test_indices_behind_a_condition_were_loaded_out_of_range():
    @T.prim_func
    def main(A: T.Tensor((WORDS, 256), "float16"), I: T.Tensor((50,), "int32"), O: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=64):
            a, at = T.alloc_shared((64, 64), "float16"), T.alloc_shared((50,), "int32")
            o = T.alloc_fragment((64, 64), "float16")
            T.clear(o)
            T.copy(I, at)
            for step in T.Pipelined(4, num_stages=2):
                for i, j in T.Parallel(64, 64):
                    if i < 50:
                        a[i, j] = A[at[i], step * 64 + j]
                    else:
                        a[i, j] = 0
                for i, j in T.Parallel(64, 64):
                    o[i, j] += a[i, j]
            T.copy(o, O)

    assert "cp_async<16>(&a[" in agree(main)


def test_blocks_with_gathered_rows_stayed_narrow():
    """Two blocks of 128 x 128 take more of shared memory's bandwidth than the tensor cores leave."""
    def program(k=256):
        @T.prim_func
        def main(A: T.Tensor((640, k), "float16"), B: T.Tensor((4096, k), "float16"), I: T.Tensor((4096,), "int32"),
                 C: T.Tensor((4096, 4096), "float16")):
            with T.Kernel(32, 32, threads=256) as (bx, by):
                a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
                c = T.alloc_fragment((128, 128), "float32")
                T.clear(c)
                for step in T.Pipelined(k // 64, num_stages=3):
                    for i, j in T.Parallel(128, 64):
                        a[i, j] = A[I[by * 128 + i], step * 64 + j]
                    T.copy(B[bx * 128, step * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[by * 128, bx * 128])

        return main

    for config, grid, under in ((None, [16, 32], True), ({"tl.resize_blocks": False}, [32, 32], False)):
        (kernel,) = lower(program().func, TARGETS[1], config).kernels
        assert [int(n) for n in map(str, kernel.launch.grid)] == grid and ("wgmma_wait<1>" in print_kernel(kernel)) == under
