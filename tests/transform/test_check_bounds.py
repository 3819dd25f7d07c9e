"""Accesses that certainly lie outside of block memory are refused for every target, others are not."""

import numpy as np
import pytest
from everywhere import everywhere

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.check.check_bounds import check_bounds
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.framework.pass_ import run_passes
from tilelang.transform.pipeline import TILE_PASSES, lower


def program(body, kind="shared"):
    """body: macro of (s, X, Y, b): 128 float32 of shared memory, a fragment or each thread, two tensors, the block."""
    @T.prim_func
    def f(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32"), n: T.int32):
        with T.Kernel(2, threads=128) as b:
            s = T.alloc_shared((128,), "float32") if kind == "shared" else T.alloc_fragment(
                (128,), "float32") if kind == "fragment" else T.alloc_local((128,), "float32")
            body(s, X, Y, b, n)

    return f


@T.macro
def one_behind(s, X, Y, b, n):
    for i in T.Parallel(128):
        Y[b * 128 + i] = s[i + 1]


@T.macro
def one_in_front_of_a_name(s, X, Y, b, n):
    for i in T.Parallel(128):
        j = i - 1
        s[j] = X[i]


@T.macro
def at_a_thread(s, X, Y, b, n):
    tx = T.get_thread_binding()
    s[tx + b] = X[tx]


@T.macro
def in_a_serial_loop(s, X, Y, b, n):
    for k in T.serial(2, 5):
        for i in T.Parallel(32):
            s[k * 32 + i] = X[i]


@T.macro
def below_the_first(s, X, Y, b, n):
    for i in T.serial(4):
        s[2 - i] = X[i]


@T.macro
def by_a_copy(s, X, Y, b, n):
    T.copy(X[0:128], s[b])


@T.macro
def unrolled_by_python(s, X, Y, b, n):
    for i in range(129):
        s[i] = X[i]


@pytest.mark.parametrize("target", ["c", "sm_80", "sm_90a"])
@pytest.mark.parametrize("body", [one_behind, one_in_front_of_a_name, at_a_thread, in_a_serial_loop,
                                  below_the_first, by_a_copy, unrolled_by_python], ids=lambda b: b.__name__)
def test_certain_accesses_outside_are_refused_for_every_target(body, target):
    """CUDA targets compiled them: a kernel read what lies behind the tile."""
    with pytest.raises(TileLangError, match="which has 128 elements") as e:
        lower(program(body).func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == "out-of-bounds" and "test_check_bounds.py" in str(e.value)


@T.macro
def under_a_condition(s, X, Y, b, n):
    for i in T.Parallel(128):
        if i < 127:
            Y[i] = s[i + 1]


@T.macro
def chosen(s, X, Y, b, n):
    for i in T.Parallel(128):
        Y[i] = T.if_then_else(i < 127, s[i + 1], 0.0)


@T.macro
def behind_a_break(s, X, Y, b, n):
    for k in T.serial(200):
        if k == 100:
            break
        s[k] = X[k]


@T.macro
def behind_a_return(s, X, Y, b, n):
    tx = T.get_thread_binding()
    if tx > 3:
        T.thread_return()
    s[tx + 64] = X[tx]


@T.macro
def as_often_as_asked(s, X, Y, b, n):
    for k in T.serial(n):
        for i in T.Parallel(128):
            Y[i] = s[i + k]


@T.macro
def outside_of_the_tensor(s, X, Y, b, n):
    for i in T.Parallel(128):
        s[i] = X[i + 200] + X[i - 3]


@pytest.mark.parametrize("body", [under_a_condition, chosen, behind_a_break, behind_a_return, as_often_as_asked,
                                  outside_of_the_tensor], ids=lambda b: b.__name__)
def test_what_may_be_inside_is_left_alone(body):
    run_passes(program(body).func, TILE_PASSES, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))


def test_the_last_element_is_inside():
    @T.macro
    def last(s, X, Y, b, n):
        for i in T.Parallel(128):
            s[i] = X[b * 128 + i]
        for i in T.Parallel(128):
            Y[b * 128 + i] = s[127 - i]

    x = np.arange(256, dtype=np.float32)
    got = everywhere(program(last), x, np.zeros_like(x), 0)[1]
    np.testing.assert_array_equal(got.reshape(2, 128), x.reshape(2, 128)[:, ::-1])


# ---- accesses that run only if a condition, a loop of unknown length or a role lets them -----------------------------------


def tiles(body, kind):
    """body: macro of (f, X, Y, n, b): a tile of (64, 32), two tensors of (64, 128)."""
    @T.prim_func
    def main(X: T.Tensor((64, 128), "float32"), Y: T.Tensor((64, 128), "float32"), n: T.int32):
        with T.Kernel(2, threads=128) as b:
            f = T.alloc_fragment((64, 32), "float32") if kind == "fragment" else T.alloc_shared((64, 32), "float32")
            T.clear(f)
            body(f, X, Y, n, b)

    return main


@T.macro
def in_a_loop_of_run_time_length(f, X, Y, n, b):
    for _ in T.serial(n):
        for i, j in T.Parallel(64, 128):
            f[i, j] *= 2.0


@T.macro
def in_a_while_loop(f, X, Y, n, b):
    v = T.alloc_var("int32", init=0)
    while v < n:
        for i, j in T.Parallel(64, 128):
            f[i, j] *= 2.0
        v = v + 1


@T.macro
def in_a_branch(f, X, Y, n, b):
    if n > 3:
        for i, j in T.Parallel(64, 128):
            f[i, j] *= 2.0


@T.macro
def in_a_branch_on_data(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if X[i, 0] > 0:
            f[i, j] *= 2.0


@T.macro
def in_the_other_branch(f, X, Y, n, b):
    if b == 0:
        Y[0, 0] = 1.0
    else:
        for i, j in T.Parallel(64, 128):
            f[i, j] *= 2.0


@T.macro
def in_a_pipeline(f, X, Y, n, b):
    s = T.alloc_shared((64, 128), "float32")
    for _ in T.Pipelined(n, num_stages=2):
        T.copy(X, s)
        for i, j in T.Parallel(64, 128):
            f[i, j] += s[i, j]


@T.macro
def in_a_warp_role(f, X, Y, n, b):
    with T.ws(0):
        for _ in T.serial(n):
            for i, j in T.Parallel(64, 128):
                f[i, j] *= 2.0


@T.macro
def behind_a_break_of_another_loop(f, X, Y, n, b):
    for r in T.serial(n):
        if r > 5:
            break
        for i, j in T.Parallel(64, 128):
            Y[i, j] = f[i, j]


@T.macro
def behind_a_return_of_some(f, X, Y, n, b):
    if n > 5:
        T.thread_return()
    for i in T.serial(65):
        f[i, 0] = 1.0


@T.macro
def of_the_chosen_value(f, X, Y, n, b):
    for r in T.serial(n):
        for i, j in T.Parallel(64, 32):
            Y[i, j] = T.if_then_else(r > 3, f[i, j + 1], 0.0)


@T.macro
def in_two_loops_of_a_macro(f, X, Y, n, b):
    for r in T.serial(n):
        in_a_branch(f, X, Y, r, b)


@T.macro
def in_part_of_the_loop(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if i < 3:
            f[i, j] = 1.0


@T.macro
def at_an_index_of_another_type(f, X, Y, n, b):
    for i, j in T.Parallel(64, 32):
        Y[i, j] = f[T.cast(i, "int64") + 1, j]


@T.macro
def at_an_unsigned_index(f, X, Y, n, b):
    for i, j in T.Parallel(64, 32):
        Y[i, j] = f[T.cast(i, "uint32") + 1, j]


@T.macro
def at_the_rest_of_a_thread(f, X, Y, n, b):
    tx = T.get_thread_binding()
    Y[tx // 2, 0] = f[tx % 64 + 1, 0]


@T.macro
def at_the_quotient_of_a_loop(f, X, Y, n, b):
    for _ in T.serial(n, n + 1):
        for k in T.serial(65):
            f[0, k // 2] = 1.0


REACHED = [at_an_index_of_another_type, at_an_unsigned_index, at_the_rest_of_a_thread, at_the_quotient_of_a_loop,
           in_a_loop_of_run_time_length, in_a_while_loop, in_a_branch, in_a_branch_on_data, in_the_other_branch, in_a_pipeline,
           in_a_warp_role, behind_a_break_of_another_loop, behind_a_return_of_some, of_the_chosen_value,
           in_two_loops_of_a_macro, in_part_of_the_loop]


@pytest.mark.parametrize("body, kind", [(b, k) for b in REACHED for k in ("fragment", "shared")
                                        if k == "shared" or b is not at_the_rest_of_a_thread],
                         ids=lambda x: getattr(x, "__name__", x))
def test_accesses_outside_wherever_they_are_reached_are_refused(body, kind):
    """The CPU wrote outside of the tile; sm_90a compiled it inside of a warp role."""
    with pytest.raises(IndexError) as e:
        run_passes(tiles(body, kind).func, TILE_PASSES, PassContext(Target({"kind": "cuda", "arch": "sm_90a"})))
    assert e.value.kind == "out-of-bounds" and e.value.span is not None


@pytest.mark.parametrize("where", [{"execution_backend": "tile"}, {"target": "cpu"}, *(
    {"target": {"kind": "cuda", "arch": a}, "execution_backend": "simulator"} for a in ("sm_80", "sm_90a"))])
def test_every_backend_refuses_an_access_outside_in_a_loop_of_run_time_length(where):
    with pytest.raises(IndexError):
        tilelang.compile(tiles(in_a_loop_of_run_time_length, "fragment"), **where)


@T.macro
def bounded_by_two_variables(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if i + j < 32:
            f[i, i + j] = 1.0


@T.macro
def bounded_by_a_run_time_size(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if j < n:
            f[i, j] = 1.0


@T.macro
def bounded_by_data(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if X[i, j] > 0:
            f[i, j] = 1.0


@T.macro
def bounded_by_a_variable(f, X, Y, n, b):
    v = T.alloc_var("int32", init=0)
    for k in T.serial(128):
        v = k * 2
        if v < 64:
            f[0, k] = 1.0


@T.macro
def bounded_by_continue(f, X, Y, n, b):
    for k in T.serial(128):
        if k >= 32:
            continue
        f[0, k] = 1.0


@T.macro
def never_reached(f, X, Y, n, b):
    for i, j in T.Parallel(64, 32):
        if i > 100:
            f[i, j + 32] = X[i + 64, j]


@T.macro
def in_reach_of_a_square(f, X, Y, n, b):
    for i, j in T.Parallel(64, 128):
        if i * i < 9 and j != 33 and j < 32:
            f[i, j] = 1.0


@T.macro
def at_quotients_and_rests(f, X, Y, n, b):
    tx = T.get_thread_binding()
    for k in T.serial(60):  # 7 and 7 are not the quotient and the rest of one k by 8
        f[k // 8 * 8 + k % 8, 0] = 1.0
        f[k // 8 * 9 + k % 8 - 4 * (k // 32), 0] = 1.0
        f[T.cast(k + 4, "uint8"), 0] = 1.0
        f[(k + 60) % 64, tx % 32] = 1.0
    f[tx // 2, (tx + 3) % 32] = 1.0


@pytest.mark.parametrize("body", [at_quotients_and_rests, bounded_by_two_variables, bounded_by_a_run_time_size,
                                  bounded_by_data, bounded_by_a_variable, bounded_by_continue, never_reached,
                                  in_reach_of_a_square], ids=lambda b: b.__name__)
def test_accesses_that_conditions_may_keep_inside_are_left_alone(body):
    run_passes(tiles(body, "shared").func, TILE_PASSES[:TILE_PASSES.index(check_bounds) + 1], PassContext(Target("c")))


# ---- tensors: accesses of which every element is outside ------------------------------------------------------------------


def vectors(body, shape=(8,)):
    @T.prim_func
    def main(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            body(X, Y, n)

    return main


@T.macro
def reads_beyond(X, Y, n):
    for i in T.Parallel(8):
        Y[i] = X[i + 8]


@T.macro
def stores_beyond(X, Y, n):
    for i in T.Parallel(8):
        Y[i + 8] = X[i]


@T.macro
def reads_in_front(X, Y, n):
    for i in T.Parallel(8):
        Y[i] = X[i - 20]


@T.macro
def reads_every_second(X, Y, n):
    for r in T.serial(n):
        Y[r] = X[2 * r + 8]


@T.macro
def reads_below_a_condition(X, Y, n):
    for i in T.Parallel(16):
        if i >= 8:
            Y[i - 8] = X[i]


@T.macro
def copies_from_beyond(X, Y, n):
    s = T.alloc_shared((8,), "float32")
    T.copy(X[8], s)
    T.copy(s, Y)


@T.macro
def adds_beyond(X, Y, n):
    for i in T.Parallel(8):
        T.atomic_add(Y[i + 8], X[i])


@T.macro
def reads_behind_the_size(X, Y, n):
    for i in T.Parallel(8):
        Y[i] = X[X.shape[0] + i]


@T.macro
def unsigned(X, Y, n):
    for i in T.Parallel(8):
        Y[i] = X[T.cast(i, "uint32") + T.uint32(8)]


@pytest.mark.parametrize("body", [reads_beyond, stores_beyond, reads_in_front, reads_every_second, reads_below_a_condition,
                                  copies_from_beyond, adds_beyond, reads_behind_the_size, unsigned], ids=lambda b: b.__name__)
def test_an_access_of_which_every_element_is_outside_the_tensor_is_refused(body):
    """It gave zeros, and stores were left out, without a word."""
    shape = (T.dynamic("m"),) if body is reads_behind_the_size else (8,)
    with pytest.raises(IndexError) as e:
        run_passes(vectors(body, shape).func, TILE_PASSES, PassContext(Target("c")))
    assert e.value.kind == "out-of-bounds" and "every element" in str(e.value) and e.value.span is not None


def test_rows_beyond_the_tensor_are_refused():
    @T.prim_func
    def main(X: T.Tensor((8, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(8, 16):
                Y[i, j] = X[i + 8, j]

    with pytest.raises(IndexError, match="dimension 0"):
        run_passes(main.func, TILE_PASSES, PassContext(Target("c")))


def test_a_stencil_on_one_element_gets_a_warning():
    @T.macro
    def neighbours(X, Y, n):
        for i in T.Parallel(1):
            Y[i] = X[i] + X[i + 1]

    with pytest.warns(tilelang.errors.TileLangWarning, match="outside-tensor"):
        kernel = tilelang.compile(vectors(neighbours, (1,)), target="cpu")
    x, y = np.array([3.0], np.float32), np.zeros(1, np.float32)
    kernel(x, y, 0)
    assert y[0] == 3


def test_accesses_that_some_elements_reach_are_left_alone():
    @T.macro
    def some(X, Y, n):
        for i in T.Parallel(8):
            Y[i] = X[i + 7] + T.if_then_else(i + 8 < 8, X[i + 8], 0.0)
            if i > 100:
                Y[i + 8] = X[i + 8]

    run_passes(vectors(some).func, TILE_PASSES, PassContext(Target("c")))


INDICES = ("{i} + {o}", "63 - {i} + {o}", "{i} // 8 * 8 + {i} % 8 + {o}", "T.min({i}, 63) + {o}", "{i} % 64 + {o}",
           "T.cast({i}, 'int64') + {o}", "T.cast(T.cast({i}, 'int64') + {o}, 'int32')", "({i} + 64) % 64 + {o}",
           "{i} * 2 // 2 + {o}")
AROUND = ("for r in T.serial(n):", "for r in T.serial(n, n + 2):", "if n > 1:", "if X[0, 0] > 0:",
          "for r in T.Pipelined(n, num_stages=2):", "with T.ws(0):", "for r in T.Persistent([n], 1, b):",
          "for r in T.unroll(2):", "for r, q in T.grid(n, 2):")
FORMS = ("f[{at}, j] *= 2.0", "f[{at}, j] = X[i, j]", "Y[i, j] = f[{at}, j]",
         "f[{at}, j] = T.if_then_else(j < 40, f[{at}, j], 1.0)")


@pytest.mark.parametrize("offset", [0, 1, -1, 64])
def test_drawn_accesses_are_refused_if_they_lie_outside(offset):
    """Any index in any loop: one element beyond is refused, and the same program inside is not."""
    rng, wrong = np.random.default_rng(offset + 2), []
    for _ in range(12):
        around, inner = rng.choice(AROUND), rng.choice(AROUND[:4])
        at = rng.choice(INDICES).format(i="i", o=offset if offset >= 0 else f"({offset})")
        text = f"""import tilelang.language as T
@T.prim_func
def f(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32"), n: T.int32):
    with T.Kernel(1, threads=128) as b:
        f = T.alloc_shared((64, 32), "float32")
        T.clear(f)
        {around}
            {inner}
                for i, j in T.Parallel(64, 32):
                    {rng.choice(FORMS).format(at=at)}
"""
        try:
            func = tilelang.from_source(text, "f").func
            run_passes(func, TILE_PASSES[:TILE_PASSES.index(check_bounds) + 1], PassContext(Target("c")))
            refused = False
        except TileLangError as e:
            refused = e.kind == "out-of-bounds" and e.span is not None
        if refused != (offset != 0):
            wrong.append(text)
    assert not wrong, wrong[0]
