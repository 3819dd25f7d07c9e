"""Calls composed of other statements: reducers, im2col, votes, vector atomics, schedulers, aliases of elements."""

import numpy as np
import pytest
from semantics_harness import out, run

import tilelang.language as T


@pytest.mark.spec("L12.4:reducer-v2")
def test_reducer_accumulates_each_iteration_once():
    @T.prim_func
    def f(A: T.Tensor((6, 10), "float32"), O: T.Tensor((6,), "float32"), M: T.Tensor((6,), "float32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((6, 10), "float32")
            T.copy(A, F)
            acc = T.alloc_reducer((6,), "float32", op="sum")
            top = T.alloc_reducer((6,), "float32", op="max")
            r = T.alloc_fragment((6,), "float32")
            T.reducer_init(acc, 100)
            T.reducer_init(top)
            for i, j in T.Parallel(6, 10):
                T.reducer_update(acc[i], F[i, j])
                T.reducer_update(top[i], F[i, j])
            T.finalize_reducer(acc, r)
            T.copy(r, O)
            T.finalize_reducer(top, r)
            T.copy(r, M)

    a = np.arange(60, dtype=np.float32).reshape(6, 10)
    got = run(f, a)
    assert got["O"].tolist() == (a.sum(1) + 100).tolist() and got["M"].tolist() == a.max(1).tolist()


@pytest.mark.spec("L12.4:reducer-v1")
def test_older_reducer_form():
    with pytest.warns(DeprecationWarning):
        @T.prim_func
        def f(A: T.Tensor((6, 10), "float32"), O: T.Tensor((6,), "float32")):
            with T.Kernel(1, threads=32):
                F = T.alloc_fragment((6, 10), "float32")
                T.copy(A, F)
                acc = T.alloc_reducer((6,), "float32", op="sum", replication="all")
                T.clear(acc)
                for i, j in T.Parallel(6, 10):
                    acc[i] += F[i, j]
                T.finalize_reducer(acc)
                T.copy(acc, O)

    a = np.arange(60, dtype=np.float32).reshape(6, 10)
    assert out(f, a) == a.sum(1).tolist()


@pytest.mark.spec("T.im2col")
@pytest.mark.spec("L10:im2col")
@pytest.mark.parametrize("stride, dilation, pad", [(1, 1, 1), (2, 1, 0), (1, 2, 2)])
def test_im2col(stride, dilation, pad):
    N, H, W, C, K, BM, BK = 2, 5, 6, 3, 3, 16, 16
    OH = (H + 2 * pad - dilation * (K - 1) - 1) // stride + 1
    OW = (W + 2 * pad - dilation * (K - 1) - 1) // stride + 1
    rows, cols = -(-N * OH * OW // BM), -(-K * K * C // BK)

    @T.prim_func
    def f(A: T.Tensor((N, H, W, C), "float32"), O: T.Tensor((rows * BM, cols * BK), "float32")):
        with T.Kernel(cols, rows, threads=32) as (bx, by):
            S = T.alloc_shared((BM, BK), "float32")
            T.im2col(A, S, by, bx, K, stride, dilation, pad)
            T.copy(S, O[by * BM, bx * BK])

    a = np.random.default_rng(0).standard_normal((N, H, W, C)).astype(np.float32)
    padded = np.pad(a, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    want = np.zeros((rows * BM, cols * BK), np.float32)
    for n, oh, ow in np.ndindex(N, OH, OW):
        for kh, kw in np.ndindex(K, K):
            want[(n * OH + oh) * OW + ow, (kh * K + kw) * C:(kh * K + kw + 1) * C] = padded[
                n, oh * stride + kh * dilation, ow * stride + kw * dilation]
    np.testing.assert_array_equal(run(f, a)["O"], want)


@pytest.mark.spec("T.dp4a")
@pytest.mark.spec("L11:dp4a")
def test_votes_and_dot_product():
    @T.prim_func
    def f(A: T.Tensor((2, 4), "int8"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            acc = T.alloc_local((1,), "int32")
            acc[0] = 5
            T.dp4a(A[0, 0], A[1, 0:4], acc)
            some = T.any_of(A[1, 0:4])
            every = T.all_of(A)
            O[0] = acc[0]
            O[1] = 1 if some else 0
            O[2] = 1 if every else 0

    a = np.array([[1, 2, 3, 4], [0, 0, 7, 0]], np.int8)
    assert out(f, a) == [26, 1, 0, 0]


@pytest.mark.spec("T.atomic_addx2", "T.atomic_addx4")
@pytest.mark.spec("L13:vector")
def test_vector_atomics_add_each_element():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), O: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=1) as b:
            T.atomic_addx4(O[b * 4], A[b * 4])
            T.atomic_addx2(O[0], A[0:2])

    a = np.arange(8, dtype=np.float32)
    assert out(f, a) == [0, 3, 2, 3, 4, 5, 6, 7]


def test_warp_reduce_gives_every_lane_the_sum():
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            O[tx] = T.warp_reduce_sum(A[tx])

    text = f.script()
    assert text.count("shfl_xor") == 5


@pytest.mark.spec("T.PersistentTileScheduler")
@pytest.mark.spec("L21:tile-scheduler")
@pytest.mark.parametrize("column_major, swizzle", [(True, 1), (False, 1), (True, 2), (False, 3)])
def test_persistent_tile_scheduler_visits_each_tile_once(column_major, swizzle):
    @T.prim_func
    def f(O: T.Tensor((5, 4), "int32")):
        with T.Kernel(3, threads=1) as b:
            s = T.PersistentTileScheduler(5, 4, swizzle_size=swizzle, column_major=column_major, name="tiles")
            s.init(b)
            while s.valid():
                O[s.m_idx, s.n_idx] += 1
                s.next_tile()

    assert out(f) == np.ones((5, 4), int).tolist()
    assert "tiles_m_idx" in f.script()


@T.meta_class
class Counter:
    def __init__(self, start, name=None):
        self.value = T.alloc_var("int32", init=start)

    def bump(self, by):
        self.value[0] = self.value[0] + by

    def twice(self):
        return self.value * 2

    @T.inline
    def read(self):
        return self.value[0]


@pytest.mark.spec("L21:meta_class")
def test_meta_class_keeps_state_in_variables():
    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            c = Counter(4, name="c")
            c.bump(3)
            O[0] = c.read()
            O[1] = c.twice()
            c.value[0] = 1
            O[2] = c.value

    assert out(f) == [7, 14, 1]
    assert "c_value" in f.script()


@T.meta_class
class Total:
    def __init__(self, start):
        self.sum = T.alloc_var("int32", init=start)

    @property
    def doubled(self):
        return self.sum[0] * 2

    def __call__(self):
        return self.sum[-1] + 1

    @staticmethod
    def tripled(total):
        return total.sum[0] * 3

    def add(self, by):
        self.sum[0] += by

    def spill(self):
        self.sum[1] = 5


def _plus_100(total):
    return total.sum[0] + 100


def test_properties_dunders_and_plain_functions_read_the_variables_of_an_object():
    @T.prim_func
    def f(O: T.Tensor((5,), "int32")):
        with T.Kernel(1, threads=1):
            t = Total(4)
            before = t.doubled
            t.add(3)
            O[0] = t.doubled
            O[1] = t()
            O[2] = Total.tripled(t)
            O[3] = _plus_100(t)
            O[4] = before

    assert out(f) == [14, 8, 21, 107, 8]


@T.meta_class
class Countdown:
    def __init__(self, n):
        self.n = n
        self.left = T.alloc_var("int32", init=n)
        self.done = T.alloc_var("int32", init=0)

    def valid(self):
        twice = self.done[0] * 2
        return twice < self.n and self.left[0] > 0

    def signed(self, k):
        s = self.done[0] + k
        return T.if_then_else(s % 2 == 0, s, -s) if self.left[0] > 3 else s

    def step(self):
        self.done[0] += 1
        self.left[0] = self.left[0] - 1


def test_methods_that_only_read_state_stand_in_conditions():
    """They were taken for macros with effects: refused as the condition of a while loop and in arms of a selection."""
    @T.prim_func
    def f(O: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=1):
            c = Countdown(6)
            first = c.signed(3)
            while c.valid() or c.signed(2) < 0:
                O[c.done] = c.signed(c.done) + (c.signed(1) if c.valid() else 100)
                c.step()
            O[7] = first
            O[8] = c.done

    done, left, want = 0, 6, [0] * 9

    def signed(k):
        s = done + k
        return (s if s % 2 == 0 else -s) if left > 3 else s

    while done * 2 < 6 and left > 0 or signed(2) < 0:
        want[done] = signed(done) + (signed(1) if done * 2 < 6 and left > 0 else 100)
        done, left = done + 1, left - 1
    want[7:] = [-3, done]
    assert out(f) == want


@pytest.mark.parametrize("make, match", [
    (lambda: T.PersistentTileScheduler(3, 4, stateful=False), "keeps no linear_idx"),
    (lambda: T.BaseTileScheduler(), r"BaseTileScheduler must define update_current_idx\(linear_idx\)")])
def test_a_scheduler_says_what_it_does_not_have(make, match):
    """The missing state was a KeyError inside the compiler, the missing method an error without a place."""
    with pytest.raises(NotImplementedError, match=match):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1) as b:
                make().init(b)


@pytest.mark.parametrize("width", [0, 3, 7, 64, -32, 8.0])
def test_parts_of_a_warp_that_exchange_are_powers_of_two(width):
    """The simulator took parts of any width, which the hardware has not."""
    with pytest.raises(ValueError, match="1, 2, 4, 8, 16 or 32 lanes"):
        @T.prim_func
        def f(A: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                A[T.get_thread_binding()] = T.shfl_down(A[T.get_thread_binding()], 1, width=width)


def test_a_variable_has_no_second_element():
    """The store went to the variable whatever its index."""
    with pytest.raises(IndexError, match="`sum` is a variable: its only element is 0"):
        @T.prim_func
        def f(O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                t = Total(4)
                t.spill()
                O[0] = t.doubled


def test_a_name_of_an_element_still_says_where_a_tile_starts():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "int32"), O: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            S = T.alloc_shared((1, 8), "int32")
            start = A[2, 0]
            T.copy(start, S)
            T.copy(S, O[0:8])
            assert T.has_let_value(start) and T.get_let_value(start).buffer is A

    a = np.arange(32, dtype=np.int32).reshape(4, 8)
    assert out(f, a) == a[2].tolist()


def test_a_tuple_holds_values_not_later_ones():
    @T.prim_func
    def f(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=1):
            v = T.alloc_var("int32", init=3)
            pair = (v, v + 1)
            v = 10
            O[0] = pair[0]
            O[1] = pair[1]

    assert out(f) == [3, 4]


@pytest.mark.spec("T.launch_thread", "T.reads", "T.sblock", "T.writes")
@pytest.mark.spec("L23:raw-statements")
def test_raw_statements():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        T.Assert(T.int32(4) > 3, "never")
        with T.launch_thread("blockIdx.x", 4) as bx, T.sblock("body"):
            T.reads(A[0:4])
            T.writes(O[0:4])
            V = T.decl_buffer((2, 2), "int32", data=A.data)
            x = T.bind(V[bx // 2, bx % 2])
            T.buffer_store(O, T.call_intrin("int32", "abs", x), [bx])

    assert out(f, np.array([1, -2, 3, -4], np.int32)) == [1, 2, 3, 4]
    with pytest.raises(TypeError, match="no intrinsic is named"):
        T.call_intrin("int32", "nothing", 1)


def test_a_previous_value_in_an_expression_with_the_element_is_refused():
    with pytest.raises(RuntimeError, match="read in a statement that also"):
        @T.prim_func
        def f(O: T.Tensor((2,), "int32")):
            with T.Kernel(1, threads=1):
                O[1] = O[0] + T.atomic_add(O[0], 1, return_prev=True)


@pytest.mark.spec("L19:pointers")
def test_pointers_for_extern_calls():
    @T.prim_func
    def f(A: T.Tensor((4, 8), "float32")):
        with T.Kernel(1, threads=1):
            S = T.alloc_shared((8,), "float32")
            T.call_extern("handle", "move", S.access_ptr("w", offset=2), T.access_ptr(A[1, 2], "r"), T.address_of(A[3, 0]), A)
            x = T.call_extern("float32", "value", 1, 2.0)
            A[0, 0] = x

    text = f.script()
    assert 'T.address_of(S[2])' in text and "A[1, 2]" in text and '"value"' in text


def test_an_error_named_the_code_around_a_rewritten_function():
    with pytest.raises(TypeError, match=r"error\[type\]: main.<locals>.<lambda>\(\) takes 1 positional argument but 2"):
        @T.prim_func
        def main(X: T.Tensor((8, 8), "float32")):
            with T.Kernel(1, threads=32):
                s, m = T.alloc_fragment((8, 8), "float32"), T.alloc_fragment((8,), "float32")
                T.copy(X, s)
                T.reduce_with(s, m, lambda a: a, 0.0, dim=1)
