"""Laws of fragments, by brute force on small shapes."""

import random

import numpy as np
import pytest

import tilelang
import tilelang.language as T

from tilelang.ir import Const, Var, dtype, free_vars, is_const
from tilelang.layout import (
    Fragment,
    Mode,
    make_gemm_fragment_8x8,
    make_gemm_fragment_8x8_transposed,
    replicated_fragment,
    row_fragment,
    tile_fragment,
)
from tilelang.layout.mode import evaluate_index

I32 = dtype("int32")
C = Fragment((16, 8), ((Mode(2, "register", 2), Mode(8, "thread", 4)), (Mode(4, "thread", 1), Mode(2, "register", 1))),
             threads=32)


def number(e):
    return int(e.value) if isinstance(e, Const) else int(e)


def random_fragment(r):
    """Random digits over 1-3 dimensions, some padded, some replicated."""
    nd = r.randint(1, 3)
    digits = []
    step = {"thread": 1, "register": 1}
    for _ in range(r.randint(1, 5)):
        to = r.choice(["thread", "register"])
        size = r.choice([2, 3, 4, 5])
        digits.append((r.randrange(nd + (to == "thread")), Mode(size, to, step[to])))
        step[to] *= size * (r.choice([1, 1, 1, 2]) if to == "thread" else 1)
    r.shuffle(digits)
    modes = [tuple(m for d, m in digits if d == k) for k in range(nd + 1)]
    shape = []
    for m in modes[:nd]:
        n = 1
        for x in m:
            n *= x.size
        shape.append(max(1, n - r.choice([0, 0, 0, 1])))
    return Fragment(shape, modes[:nd], replicate=modes[nd], threads=step["thread"] + r.choice([0, 0, 3]))


@pytest.mark.parametrize("seed", range(40))
def test_inverse_finds_every_element_and_nothing_else(seed):
    f = random_fragment(random.Random(seed))
    t, g = Var("t", I32), Var("g", I32)
    index, holds = f.index_at(t, g)
    tt, gg = np.arange(f.threads)[:, None], np.arange(f.registers)[None, :]
    env = {t: tt, g: gg}
    full = (f.threads, f.registers)
    got = [np.broadcast_to(evaluate_index(i, env), full) for i in index]
    ok = np.ones(full, bool) if holds is None else np.broadcast_to(evaluate_index(holds, env), full)
    want = {}
    owners, regs = f.owners(), f.register_table()
    for at in np.ndindex(*f.shape):
        for rep in range(f.replicas):
            key = (int(owners[(rep, *at)]), int(regs[at]))
            assert key not in want, "two elements in one register"
            want[key] = at
            assert f.thread_of(at, rep) == key[0] and f.register_of(at) == key[1]
    assert {(int(a), int(b)) for a, b in np.argwhere(ok)} == set(want)
    for (a, b), at in want.items():
        assert tuple(int(x[a, b]) for x in got) == at


@pytest.mark.parametrize("seed", range(20))
def test_symbolic_map_equals_table(seed):
    f = random_fragment(random.Random(100 + seed))
    vs = [Var(f"i{d}", I32) for d in range(f.ndim)]
    grid = dict(zip(vs, np.meshgrid(*[np.arange(n) for n in f.shape], indexing="ij")))
    assert np.array_equal(np.broadcast_to(evaluate_index(f.thread_of(vs), grid), f.shape), f.owners()[0])
    assert np.array_equal(np.broadcast_to(evaluate_index(f.register_of(vs), grid), f.shape), f.register_table())


def test_constant_register_gives_constant_digits():
    t = Var("t", I32)
    index, holds = tile_fragment(C, (2, 4), (2, 2)).index_at(t, 5)
    assert holds is None
    index, _ = C.index_at(3, 2)
    assert [number(i) for i in index] == [8, 6]


def test_tile_fragment_is_the_instruction_in_every_warp():
    f = tile_fragment(C, (2, 4), (2, 2))
    assert f.shape == (64, 64) and f.threads == 128 and f.registers == 32 and f.replicas == 1
    owners, regs = f.owners()[0], f.register_table()
    for wm in range(2):
        for wn in range(2):
            for rm in range(2):
                for rn in range(4):
                    rows = slice(32 * wm + 16 * rm, 32 * wm + 16 * rm + 16)
                    cols = slice(32 * wn + 8 * rn, 32 * wn + 8 * rn + 8)
                    assert np.array_equal(owners[rows, cols], C.owners()[0] + 32 * (wm + 2 * wn))
                    assert np.array_equal(regs[rows, cols], C.register_table() + 4 * (4 * rm + rn))


def test_operand_fragment_is_replicated_over_the_other_warps():
    f = tile_fragment(C, (2, 4), (2, 1), replicas=((3, 2),))
    assert f.replicas == 3 and f.threads == 32 * 6
    assert np.array_equal(np.unique(f.owners()[:, 0, 0]), [0, 64, 128])


def test_reduce_turns_threads_into_copies():
    f = tile_fragment(C, (2, 4), (2, 2))
    row = f.reduce(1)
    assert row.shape == (64,) and row.replicas == 8 and row.registers == 4
    owners = row.owners()
    for i in range(64):
        assert set(owners[:, i]) == set(f.owners()[0][i, :])
    assert f.reduce(1, keep=True).shape == (64, 1)
    assert row.same_owners(row) and row.same_owners(f.reduce(-1))


def test_equality_and_hash():
    one = row_fragment((128,), 128)
    everywhere = replicated_fragment((128,), 128)
    assert not everywhere.same_owners(one)
    assert one != everywhere and one == row_fragment((128,), 128) and hash(one) == hash(row_fragment((128,), 128))
    assert C.permuted((1, 0)) != C and C.permuted((1, 0)).permuted((1, 0)) == C


@pytest.mark.parametrize("shape, threads, vector", [((1000,), 128, 8), ((8, 100), 128, 4), ((128, 32), 128, 8),
                                                    ((3, 5, 7), 96, 1), ((64, 64), 100, 4), ((7,), 32, 1),
                                                    ((1, 1), 64, 1), ((33, 17), 1, 4), ((256, 2), 256, 2)])
def test_row_fragment_holds_every_element_once(shape, threads, vector):
    f = row_fragment(shape, threads, vector)
    keys = f.owners()[0] * f.registers + f.register_table()
    assert np.unique(keys).size == keys.size and f.threads == threads and f.replicas == 1
    assert f.vector_width % vector == 0


def test_row_fragment_with_columns_fastest_last_or_first():
    assert row_fragment((64, 64), 128, 1, order=(1, 0)) == row_fragment((64, 64), 128, 1).permuted((1, 0))
    assert row_fragment((128, 64), 128, 8).registers == 64


@pytest.mark.spec("L18:Fragment")
def test_user_functions_are_fitted():
    f = Fragment((8, 8), forward_fn=lambda i, j: (i * 4 + j // 2, j % 2))
    assert f == make_gemm_fragment_8x8() and f.threads == 32
    g = Fragment((8, 8), forward_thread_fn=lambda i, j: j * 4 + i // 2, forward_index_fn=lambda i, j: i % 2)
    assert g == make_gemm_fragment_8x8_transposed()
    h = Fragment((16,), forward_thread_fn=lambda i, rep: i + rep * 16, replicate=2, forward_index_fn=lambda i: 0)
    assert h.replicas == 2 and h.threads == 32
    assert repr(f) == ("Fragment((8, 8) -> (2,), replicate: 1, thread: 32, forward_thread: ((_i * 4) + (_j // 2)), "
                       "forward_index: ((_j % 2),))")


@pytest.mark.spec("L18:Fragment")
def test_user_functions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="layout-not-injective"):
        Fragment((8, 8), forward_fn=lambda i, j: (i, 0))
    with pytest.raises(ValueError, match="layout-no-structure"):
        Fragment((8, 8), forward_fn=lambda i, j: ((i ^ j) * 8 + j, 0))
    with pytest.raises(ValueError, match="layout-no-structure"):
        Fragment((8,), forward_fn=lambda i: (i, i))
    with pytest.raises(ValueError, match="layout-invalid"):
        Fragment((8,), ((Mode(4, "thread", 1),),))
    with pytest.raises(ValueError, match="layout-not-injective"):
        Fragment((4, 4), ((Mode(4, "thread", 1),), (Mode(4, "thread", 2),)))


@pytest.mark.spec("L18:Fragment")
def test_repeat_and_replicate():
    f = make_gemm_fragment_8x8()
    r = f.repeat([2, 3])
    assert r.shape == (16, 24) and r.registers == 12 and r.threads == 32
    t = f.repeat([2, 1], repeat_on_thread=True)
    assert t.shape == (16, 8) and t.threads == 64
    assert f.replicate(2).replicas == 2 and f.replicate(2).threads == 64
    assert is_const(f.map_forward_thread([1, 2]), 5)


def test_drawing():
    text = str(make_gemm_fragment_8x8())
    lines = text.splitlines()
    assert lines[0] == "Fragment 8x8  32 threads x 2 registers"
    assert lines[4].split() == ["1", "|", "4:0", "4:1", "5:0", "5:1", "6:0", "6:1", "7:0", "7:1"]


def test_reshape_keeps_every_element_in_its_register():
    f = row_fragment((64, 32), 128, 4)
    for shape in ((32, 64), (2048,), (8, 8, 32), (64, 4, 8)):
        g = f.reshape(shape)
        assert np.array_equal(g.owners()[0].reshape(-1), f.owners()[0].reshape(-1))
        assert np.array_equal(g.register_table().reshape(-1), f.register_table().reshape(-1))
    halves = f.reshape((64, 64), 32, 16)
    assert np.array_equal(halves.owners()[0][:, ::2], f.owners()[0])
    assert np.array_equal(halves.register_table()[:, 1::2], 2 * f.register_table() + 1)
    assert halves.reshape((64, 32), 16, 32) == f
    with pytest.raises(ValueError, match="layout-no-structure"):
        row_fragment((64, 32), 128).reshape((64, 16), 16, 32)  # two elements of one word in two threads
    with pytest.raises(ValueError, match="layout-no-structure"):
        row_fragment((8, 12), 8, 1).reshape((5, 5))


def test_a_type_error_of_a_users_function_is_not_taken_for_its_number_of_arguments():
    calls = []

    def forward(i, j, rep):
        calls.append((i, j, rep))
        return "x" + 1, i

    with pytest.raises(TypeError, match="concatenate"):
        T.Fragment((8, 8), forward_fn=forward, replicate=2)
    assert len(calls) == 1


@pytest.mark.parametrize("shape, thread, registers", [
    ((128, 8), lambda i, j: i, lambda i, j: j), ((64, 64), lambda i, j: i * 2 + j // 32, lambda i, j: j % 32),
    ((64, 8), lambda i, j: i % 32, lambda i, j: i // 32 * 8 + j), ((32,), lambda i: i, lambda i: 0)])
def test_elements_of_one_thread_were_said_to_fall_on_one_place(shape, thread, registers):
    """Without an index function a thread's elements take its registers in row-major order."""
    assert T.Fragment(shape, forward_thread_fn=thread) == T.Fragment(shape, forward_thread_fn=thread,
                                                                     forward_index_fn=registers)


@pytest.mark.parametrize("target, backend", [({"kind": "cuda", "arch": "sm_90a"}, "simulator"), ("cpu", "tile"), ("cpu", None)])
@pytest.mark.parametrize("columns", [1, 33, 64])
def test_rows_of_one_thread_reduce_and_copy(columns, target, backend):
    @T.prim_func
    def main(A: T.Tensor((128, columns), "float32"), B: T.Tensor((128, columns), "float32"), M: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((128, columns), "float32")
            m = T.alloc_fragment((128,), "float32")
            s = T.alloc_shared((128, columns), "float32")
            T.annotate_layout({x: T.Fragment(x.shape, forward_thread_fn=lambda i, j: i),
                               m: T.Fragment(m.shape, forward_thread_fn=lambda i: i)})
            T.copy(A, s)
            T.copy(s, x)
            T.reduce_max(x, m, dim=1)
            for i, j in T.Parallel(128, columns):
                x[i, j] = x[i, j] - m[i]
            T.copy(x, B)
            T.copy(m, M)

    a = np.random.default_rng(0).random((128, columns), np.float32)
    b, m = np.zeros_like(a), np.zeros(128, np.float32)
    tilelang.compile(main, target=target, execution_backend=backend)(a, b, m)
    assert np.array_equal(m, a.max(1)) and np.array_equal(b, a - a.max(1, keepdims=True))


def test_thread_and_index_of_a_fragment_are_expressions_of_its_indices():
    f = T.Fragment((16, 8), lambda i, j: (i % 8 * 4 + j // 2, i // 8 * 2 + j % 2)).replicate(2)
    i, j = f.get_forward_vars()
    grid = np.meshgrid(range(16), range(8), indexing="ij")
    rep = next(v for v in free_vars(f.thread) if v not in (i, j))
    for r in range(2):
        assert np.array_equal(evaluate_index(f.thread, {i: grid[0], j: grid[1], rep: r}), f.owners()[r])
    assert f.index == f.get_forward_index()
    assert np.array_equal(evaluate_index(f.index[0], {i: grid[0], j: grid[1]}), f.register_table())
