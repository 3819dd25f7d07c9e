"""Programs that were accepted and computed something else than they say."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning

f32, i32 = "float32", "int32"
BACKENDS = {"tile": {"execution_backend": "tile"}, "cpu": {"target": "cpu"}} | {
    arch: {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "simulator"} for arch in ("sm_80", "sm_90a")}


def tiles(body):
    """body: macro of (s, q, f, X, Y, n): shared tiles of (4, 64) and (4, 32), a fragment of (4, 64), tensors of (4, 64)."""
    @T.prim_func
    def main(X: T.Tensor((4, 64), f32), Y: T.Tensor((4, 64), f32), n: T.int32):
        with T.Kernel(1, threads=128):
            s, q = T.alloc_shared((4, 64), f32), T.alloc_shared((4, 32), f32)
            f = T.alloc_fragment((4, 64), f32)
            T.copy(X, s)
            T.copy(X, f)
            body(s, q, f, X, Y, n)
            T.copy(s, Y)

    return main


@T.macro
def to_a_smaller_part(s, q, f, X, Y, n):
    T.copy(s, Y[0:2, 0:64])


@T.macro
def from_a_smaller_part(s, q, f, X, Y, n):
    T.copy(X[0:2, 0:64], s)


@T.macro
def between_parts(s, q, f, X, Y, n):
    T.copy(s[0:2, 0:32], Y[0:4, 0:32])


@T.macro
def of_a_fragment(s, q, f, X, Y, n):
    T.copy(f, Y[n * 2:n * 2 + 2, 0:64])


@T.macro
def into_shared(s, q, f, X, Y, n):
    T.copy(f[0:2, 0:64], s[0:4, 0:64])


@T.macro
def added(s, q, f, X, Y, n):
    T.atomic_add(Y[0:2, 0:64], s)


@T.macro
def the_greatest(s, q, f, X, Y, n):
    T.atomic_max(Y, s[0:2, 0:64])


@T.macro
def copied_asynchronously(s, q, f, X, Y, n):
    T.async_copy(X[0:2, 0:64], s)
    T.ptx_wait_group(0)


@pytest.mark.parametrize("body", [to_a_smaller_part, from_a_smaller_part, between_parts, of_a_fragment, into_shared, added,
                                  the_greatest, copied_asynchronously], ids=lambda b: b.__name__)
def test_a_copy_between_two_sizes_is_refused(body):
    """128 elements went where the program says 64."""
    with pytest.raises(ValueError) as e:
        tiles(body)
    assert e.value.kind == "copy-range" and e.value.span is not None


SPELLINGS = ("T.copy(s, Y[{r}])", "T.copy(Y[{r}], s)", "T.copy(s[{r}], Y)", "T.copy(Y, s[{r}])", "T.copy(f, s[{r}])",
             "T.copy(s[{r}], f)", "T.copy(f[{r}], s)", "T.copy(s, f[{r}])", "T.copy(Y[{r}], f)", "T.copy(X, Y[{r}])",
             "T.async_copy(Y[{r}], s)", "T.atomic_add(Y[{r}], s)", "T.atomic_add(Y, s[{r}])", "T.atomic_max(Y[{r}], f)")


@pytest.mark.parametrize("cut", [False, True])
def test_drawn_copies_are_refused_if_one_extent_differs(cut):
    """Any spelling, rank and axis."""
    rng, wrong = np.random.default_rng(0), []
    for _ in range(40):
        shape = tuple(int(n) for n in rng.choice([2, 4, 8, 16], rng.integers(1, 4)))
        axis, start = rng.integers(len(shape)), "n" if rng.integers(2) and cut else "0"
        spelling = str(rng.choice(SPELLINGS))
        start = "0" if "s[" in spelling or "f[" in spelling else start
        region = ", ".join(f"{start}:{start} + {n // 2}" if cut and d == axis else f"0:{n}" for d, n in enumerate(shape))
        text = f"""import tilelang.language as T
@T.prim_func
def f(X: T.Tensor({shape}, "float32"), Y: T.Tensor({shape}, "float32"), n: T.int32):
    with T.Kernel(1, threads=128):
        s, f = T.alloc_shared({shape}, "float32"), T.alloc_fragment({shape}, "float32")
        T.clear(s)
        T.clear(f)
        {spelling.format(r=region)}
"""
        try:
            tilelang.from_source(text, "f")
            refused = False
        except ValueError as e:
            refused = e.kind in ("copy-range", "copy-ranks") and e.span is not None
        if refused != cut:
            wrong.append(text)
    assert not wrong, wrong[0]


def test_a_copy_of_rows_whose_number_is_known_at_the_call_stays():
    @T.macro
    def rows(s, q, f, X, Y, n):
        T.copy(X[0:n, 0:64], s)

    x, y = np.arange(256, dtype=np.float32).reshape(4, 64), np.zeros((4, 64), np.float32)
    tilelang.compile(tiles(rows), target="cpu")(x, y, 2)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("scan", [lambda s, n: T.cumsum(s[n, :]), lambda s, n: T.cumsum(s[n, :], dim=0),
                                  lambda s, n: T.cummax(s[:, n], dim=1), lambda s, n: T.cumsum(s[n, 0:32], reverse=True)])
def test_a_scan_along_one_element_of_a_region_is_refused(scan):
    @T.macro
    def body(s, q, f, X, Y, n):
        scan(s, n)

    with pytest.raises(ValueError, match="scan-dim"):
        tiles(body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scan_of_a_row_says_its_dimension(backend):
    @T.macro
    def body(s, q, f, X, Y, n):
        T.cumsum(s[n, :], dim=1)

    x, y = np.arange(256, dtype=np.float32).reshape(4, 64) % 7, np.zeros((4, 64), np.float32)
    tilelang.compile(tiles(body), **BACKENDS[backend])(x, y, 2)
    np.testing.assert_array_equal(y, np.where(np.arange(4)[:, None] == 2, x.cumsum(1), x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dt", [i32, "int64", "int16"])
def test_ceildiv_by_a_negative_number_of_the_run(backend, dt):
    @T.prim_func
    def main(A: T.Tensor((64,), dt), B: T.Tensor((64,), dt), O: T.Tensor((4, 64), dt), k: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                O[0, i] = T.ceildiv(A[i], B[i])
                O[1, i] = T.ceildiv(A[i], -3)
                O[2, i] = T.ceildiv(7, B[i])
                O[3, i] = T.ceildiv(T.cast(A[i], i32), k)

    a, b = np.arange(-32, 32).astype(dt), np.resize([1, -1, 2, -2, 3, -3, 5, -7], 64).astype(dt)
    a[:2] = np.iinfo(dt).max, np.iinfo(dt).min + 1
    o = np.zeros((4, 64), dt)
    tilelang.compile(main, **BACKENDS[backend])(a, b, o, -5)
    wide, by = a.astype(object), b.astype(object)
    narrow = wide.astype(np.int64).astype(np.int32).astype(object)
    want = np.stack([-(-wide // by), -(-wide // -3), -(-7 // by), -(-narrow // -5)])
    np.testing.assert_array_equal(o, want.astype(np.int64).astype(dt))


@pytest.mark.parametrize("grid", [(2**31,), (1, 65536), (1, 1, 65536)])
def test_a_grid_beyond_the_most_blocks_is_refused(grid):
    with pytest.raises(ValueError, match="kernel-grid"):
        @T.prim_func
        def main(A: T.Tensor((64,), i32)):
            with T.Kernel(*grid, threads=32):
                A[0] = 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grid_beyond_the_most_blocks_is_refused_at_the_call(backend):
    @T.prim_func
    def main(A: T.Tensor((64,), i32), n: T.int32):
        with T.Kernel(1, n, threads=32):
            A[0] = 1

    kernel, a = tilelang.compile(main, **BACKENDS[backend]), np.zeros(64, i32)
    with pytest.raises(ValueError, match="65535"):
        kernel(a, 65536)
    assert not a.any()
    kernel(a, 1)
    assert a[0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_that_nothing_writes_gets_a_warning(backend):
    @T.prim_func
    def main(A: T.Tensor((64,), i32)):
        C, D = T.empty((64,), i32), T.empty((64,), i32)
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                C[i] = A[i]
        return C, D

    with pytest.warns(TileLangWarning, match="unwritten-output: nothing writes the output `D`") as told:
        tilelang.compile(main, **BACKENDS[backend])
    assert not any("`C`" in str(w.message) for w in told) and "test_silent_programs" in told[0].filename


def test_an_argument_that_is_returned_and_not_written_gets_a_warning():
    @T.prim_func
    def main(A: T.Tensor((64,), i32), B: T.Tensor((64,), i32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = 1

    with pytest.warns(TileLangWarning, match="unwritten-output: nothing writes the output `B`"):
        tilelang.compile(main, out_idx=[-1], target="cpu")


def test_a_tensor_that_is_given_another_name_in_place_of_values_gets_a_warning():
    """`B = s` stores nothing, and the call left the caller's tensor as it was."""
    @T.prim_func
    def main(A: T.Tensor((64,), i32), B: T.Tensor((64,), i32)):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), i32)
            T.copy(A, s)
            B = s  # noqa: F841

    with pytest.warns(TileLangWarning, match="without-effect: no statement of `main` stores in a tensor"):
        tilelang.compile(main, target="cpu")


EXCHANGES = {"shuffle": lambda v: T.shfl_xor(v, 1), "reduction": T.warp_reduce_sum,
             "vote": lambda v: T.cast(T.any_sync(v), i32),
             "ballot": lambda v: T.cast(T.ballot_sync(v), i32), "match": lambda v: T.cast(T.match_any_sync(v), i32)}


def exchange(op, threads):
    @T.prim_func
    def main(A: T.Tensor((threads,), i32)):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            A[tx] = op(A[tx])

    return main


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", EXCHANGES)
def test_exchanges_between_lanes_that_a_block_does_not_have_are_refused(op, backend):
    for threads in (1, 16, 48, 100):
        with pytest.raises(RuntimeError, match="warp-divergent"):
            tilelang.compile(exchange(EXCHANGES[op], threads), **BACKENDS[backend])
    tilelang.compile(exchange(EXCHANGES[op], 64), execution_backend="tile")
