"""Threads that exchange values through shared memory in branches; grids that wait for each other; odd scalars."""

import numpy as np
import pytest
from user_harness import BF, SIM, agree, mark

import tilelang
import tilelang.language as T

A64 = np.arange(64, dtype=np.int32)
PLAIN = ("tile", "cpu")  # GPUs refuse what is a race between the threads of one statement


def test_a_statement_that_reads_what_other_threads_write_in_it():
    """Thread after thread, the later half read what the first had just written."""
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s, tx = T.alloc_shared((64,), "int32"), T.get_thread_binding()
            s[tx] = A[tx]
            s[tx] = s[63 - tx] + 1
            if tx < 32:
                s[tx] = s[31 - tx] * 2
            B[tx] = s[tx]

    want = A64[::-1] + 1
    want[:32] = want[:32][::-1] * 2
    agree(main, [A64, mark(64, np.int32)], {1: want}, on=PLAIN)


def test_branches_with_loops_and_other_branches_that_exchange():
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s, tx = T.alloc_shared((64,), "int32"), T.get_thread_binding()
            s[tx] = A[tx]
            if tx < 32:
                for d in range(5):
                    v = s[tx ^ (1 << d)]
                    s[tx] = s[tx] + v
            elif tx < 48:
                s[tx] = s[tx] * 2
            else:
                s[tx] = s[111 - tx]
            B[tx] = s[tx]

    want = A64.copy()
    want[:32], want[32:48], want[48:] = A64[:32].sum(), A64[32:48] * 2, A64[48:][::-1]
    agree(main, [A64, mark(64, np.int32)], {1: want}, on=PLAIN)


def test_a_loop_that_moves_threads_over_each_others_places():
    """The place read and written is the same one, but another thread's in the next iteration."""
    @T.prim_func
    def main(B: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((16,), "int32"), T.get_thread_binding()
            if tx < 16:
                s[tx] = 1
            if tx < 16:
                for d in range(16):
                    s[(tx + d) % 16] = s[(tx + d) % 16] * 3 + tx
            if tx < 16:
                B[tx] = s[tx]

    want = np.ones(16, np.int64)
    for d in range(16):
        for t in range(16):
            want[(t + d) % 16] = want[(t + d) % 16] * 3 + t
    agree(main, [mark(16, np.int32)], {0: want.astype(np.int32)}, on=PLAIN)


def test_a_condition_that_its_branch_changes_is_asked_again():
    @T.prim_func
    def main(O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx, v = T.get_thread_binding(), T.alloc_var("int32", init=0)
            v = O[tx]
            if v % 3 == 0:
                for _ in range(5):
                    v = v * 2 + 1
                    if v % 3 == 0:
                        break
            O[tx] = v

    start = np.arange(32, dtype=np.int32)
    agree(main, [start], {0: np.where(start % 3 == 0, start * 4 + 3, start)})


@T.macro
def _merge(s, i, j, *, eps=0.0):
    na = s[2, i]
    nb = s[2, j]
    total = na + nb
    if total > eps:
        d = s[0, j] - s[0, i]
        s[1, i] = s[1, i] + s[1, j] + d * d * na * nb / total
        s[0, i] = s[0, i] + d * nb / total
        s[2, i] = total


@T.macro
def _tree(s, tx, w):
    if w > 0:
        T.sync_threads()
        if tx < w:
            _merge(s, tx, tx + w, eps=0.5)
        _tree(s, tx, w // 2)


def test_tree_of_a_macro_that_merges_moments():
    @T.prim_func
    def main(X: T.Tensor((3, 150), "float32"), Y: T.Tensor((3, 2), "float32")):
        with T.Kernel(3, threads=64) as b:
            tx, s = T.get_thread_binding(), T.alloc_shared((3, 64), "float32")
            mean, m2, n = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("int32")
            for i in range(tx, 150, 64):
                n += 1
                d = X[b, i] - mean
                mean += d / T.cast(n, "float32")
                m2 += d * (X[b, i] - mean)
            s[0, tx], s[1, tx], s[2, tx] = mean, m2, n
            _tree(s, tx, 32)
            if tx == 0:
                Y[b, 0] = s[0, 0]
                Y[b, 1] = s[1, 0] / s[2, 0]

    x = (np.random.default_rng(3).standard_normal((3, 150)) + 100).astype(np.float32)
    want = np.stack([x.astype(float).mean(1), x.astype(float).var(1)], 1)
    agree(main, [x, mark((3, 2), np.float32)], {1: want}, 1e-4)


@pytest.mark.parametrize("divided", [False, True])
def test_elimination_in_place(divided):
    n = 12

    @T.prim_func
    def main(A: T.Tensor((n, n), "float32"), L: T.Tensor((n, n), "float32")):
        with T.Kernel(1, threads=32):
            s, tx = T.alloc_shared((n, n), "float32"), T.get_thread_binding()
            T.copy(A, s)
            for k in range(n):
                if tx > k and tx < n:
                    if divided:
                        s[tx, k] = s[tx, k] / s[k, k]
                    for j in range(k + 1, n):
                        s[tx, j] -= s[tx, k] * s[k, j] if divided else s[tx, k] * s[k, j] / s[k, k]
            T.copy(s, L)

    a = (np.random.default_rng(3).standard_normal((n, n)) + n * np.eye(n)).astype(np.float32)
    want = a.astype(float)
    for k in range(n):
        f = want[k + 1:, k:k + 1] / want[k, k]
        want[k + 1:, k + 1:] -= f * want[k:k + 1, k + 1:]
        if divided:
            want[k + 1:, k:k + 1] = f
    agree(main, [a, mark((n, n), np.float32)], {1: want}, 1e-4)


def test_a_workspace_is_one_for_all_blocks_of_a_grid_that_waits():
    nb = 8

    @T.prim_func
    def main(X: T.Tensor((1000,), "uint32"), Y: T.Tensor((1000,), "uint64")):
        with T.Kernel(nb, threads=128) as b:
            tx = T.get_thread_binding()
            part, s = T.alloc_global((nb,), "uint64"), T.alloc_shared((128,), "uint64")
            s[tx] = T.cast(T.if_then_else(b * 128 + tx < 1000, X[b * 128 + tx], T.uint32(0)), "uint64")
            T.cumsum(s)
            if tx == 127:
                part[b] = s[tx]
            T.sync_grid()
            base = T.alloc_var("uint64", init=0)
            for j in T.serial(b):
                base += part[j]
            if b * 128 + tx < 1000:
                Y[b * 128 + tx] = s[tx] + base

    x = np.random.default_rng(3).integers(0, 2**32, 1000, dtype=np.uint32)
    agree(main, [x, mark(1000, np.uint64)], {1: np.cumsum(x.astype(np.uint64))}, on=("tile", "simulator"))


@pytest.mark.parametrize("target, backend", [("cpu", "tile"), ("cpu", None), (SIM, "simulator")])
def test_narrow_float_parameters_are_rounded_once(target, backend):
    """bfloat16 parameters needed a library function that most processes do not have."""
    @T.prim_func
    def main(h: T.float16, b: T.bfloat16, f: T.float32, O: T.Tensor((4,), "float64"), P: T.Tensor((1,), "bfloat16")):
        with T.Kernel(1, threads=1):
            O[0], O[1], O[2], O[3] = h, b, f, T.cast(b, "float64") * 3.0
            P[0] = b

    kernel = tilelang.compile(main, target=target, execution_backend=backend)
    rng = np.random.default_rng(1)
    edges = [0.1, -0.1, 1e-39, -9.2e-41, 4.6e-41, 4.5e-41, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, -0.0, 3]
    for v in [*edges, *rng.standard_normal(20)]:
        o, p = np.zeros(4), np.zeros(1, BF)
        kernel(v, v, v, o, p)
        b = _bfloat(float(v))
        assert o.tobytes() == np.array([np.float16(v), b, np.float32(v), b * 3.0], float).tobytes() or v != v, v
        assert p.astype(float).tobytes() == np.array([b]).tobytes() or v != v, v
    with pytest.raises(ValueError, match="the value is too large"):
        kernel(1.0, 3.4e38, 1.0, o, p)


def _bfloat(v):
    """v rounded to the nearest bfloat16, ties to even, as a float."""
    if not np.isfinite(v) or v == 0:
        return v
    unit = 2.0 ** (max(np.frexp(v)[1] - 1, -126) - 7)
    return float(np.copysign(np.rint(v / unit) * unit, v))


def test_tensors_that_have_no_memory_to_read_are_refused_by_name():
    torch = pytest.importorskip("torch")

    @T.prim_func
    def main(A: T.Tensor((4, 8), "float16")):
        with T.Kernel(4, threads=32) as b:
            A[b, 0] = 1.0

    kernel, a = tilelang.compile(main, target="cpu"), torch.ones(4, 8, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="kernel main input A layout mismatch, expected a dense tensor, got sparse_coo"):
        kernel(a.to_sparse())
    with pytest.raises(RuntimeError, match="kernel main input A device_type mismatch"):
        kernel(a.to("meta"))


def _voting(kind):
    """Branches and loops of the block whose conditions are elements of fragments."""
    @T.prim_func
    def main(A: T.Tensor((4, 64), "float32"), B: T.Tensor((4, 64), "float32"), n: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=96) as b:
            x, m, s = T.alloc_fragment((64,), "float32"), T.alloc_fragment((1,), "float32"), T.alloc_shared((64,), "float32")
            it = T.alloc_var("int32", init=0)
            T.copy(A[b, :], x)
            T.reduce_max(x, m)
            if kind == "while":
                while m[0] > 1.0:
                    for i in T.Parallel(64):
                        x[i] = x[i] * 0.5
                    T.reduce_max(x, m)
                    it += 1
            elif kind == "break":
                for _ in T.serial(100):
                    for i in T.Parallel(64):
                        x[i] = x[i] * 0.5
                    T.reduce_max(x, m)
                    it += 1
                    if m[0] <= 1.0:
                        break
            elif kind == "branches":
                if m[0] > 100.0:
                    T.copy(x, s)
                    for i in T.Parallel(64):
                        x[i] = s[63 - i]
                    it = 1
                elif m[0] > 10.0:
                    T.clear(x)
                    it = 2
            else:
                limit = m[0]
                for k in T.serial(8):
                    if limit > T.cast(k, "float32"):
                        for i in T.Parallel(64):
                            s[i] = x[i]
                        for i in T.Parallel(64):
                            x[i] = s[(i + 1) % 64]
                        it += 1
            T.copy(x, B[b, :])
            if T.get_thread_binding() == 0:
                n[b] = it
    return main


@pytest.mark.parametrize("kind", ["while", "break", "branches", "rotations"])
def test_conditions_on_elements_of_fragments_take_the_whole_block(kind):
    a = (np.random.default_rng(3).random((4, 64)) * [[1], [200], [50], [5]]).astype(np.float32)
    want, count = a.copy(), np.zeros(4, np.int32)
    for b in range(4):
        if kind == "while":
            while want[b].max() > 1:
                want[b] *= np.float32(0.5)
                count[b] += 1
        elif kind == "break":
            while not count[b] or want[b].max() > 1:
                want[b] *= np.float32(0.5)
                count[b] += 1
        elif kind == "branches":
            count[b] = 1 if a[b].max() > 100 else 2 if a[b].max() > 10 else 0
            want[b] = (a[b], a[b][::-1], 0 * a[b])[count[b]]
        else:
            count[b] = sum(a[b].max() > k for k in range(8))
            want[b] = np.roll(a[b], -count[b])
    agree(_voting(kind), [a, mark((4, 64), np.float32), mark(4, np.int32)], {1: want, 2: count})
