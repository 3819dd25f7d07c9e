"""Names around the body of a kernel: bindings (7), loops (8), allocation (6), views and pointers (19), raw statements (23)."""

import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

N = 64


# ---- bindings ------------------------------------------------------------------------------------------------------

@pytest.mark.spec("T.get_block_binding")
@pytest.mark.spec("L7:bindings")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_bindings_and_extents(on):
    @T.prim_func
    def f(Y: T.Tensor((2, 3, 8, 4), "int32"), E: T.Tensor((5,), "int32")):
        with T.Kernel(3, 2, threads=(4, 8)) as _:
            bx, by = T.get_block_bindings()
            tx, ty, tz = T.get_thread_bindings()
            gx, gy = T.get_block_extents()
            x, y, z = T.get_thread_extents()
            Y[T.get_block_binding(1), bx, ty, tx] = ((by * gx + bx) * y + ty) * T.get_thread_extent(0) + tx
            if bx + by + tx + ty == 0:
                E[0] = T.get_block_extent(0)
                E[1] = T.get_block_extent(1)
                E[2] = T.get_thread_extent(1)
                E[3] = z
                E[4] = gy

    y, e = run(f, on=on)
    assert np.array_equal(y.ravel(), np.arange(2 * 3 * 8 * 4)) and e.tolist() == [3, 2, 8, 1, 2]


@pytest.mark.spec("L7:bindings")
def test_bindings_outside_their_launch_are_refused():
    def traced(build, grid):
        @T.prim_func
        def f(n: T.int32, Y: T.Tensor((4,), "int32")):
            with T.Kernel(n if grid is None else grid, threads=32):
                Y[0] = build()

    for build in (lambda: T.get_block_extent(1), lambda: T.get_thread_extent(3), lambda: T.get_block_binding(2)):
        with pytest.raises(TileLangError) as e:
            traced(build, 4)
        assert e.value.kind == "launch-dim"
    for build in (lambda: T.get_block_extent(0), lambda: T.get_block_extents()[0]):
        with pytest.raises(TileLangError, match="known only when the kernel is launched"):
            traced(build, None)
    for outside in (T.get_block_bindings, T.get_thread_bindings, T.get_thread_extents, T.get_block_extents,
                    T.get_thread_extent, T.get_block_extent):
        with pytest.raises(AssertionError, match="KernelLaunchFrame is not initialized"):
            outside()


# ---- loops ---------------------------------------------------------------------------------------------------------

@pytest.mark.spec("T.Serial", "T.parallel")
@pytest.mark.spec("L8:serial", "L8:grid", "L8:raw-loops")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_loops_by_their_other_names(on):
    @T.prim_func
    def f(X: T.Tensor((N, 4), "int32"), Y: T.Tensor((5, N, 4), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            for k in T.Serial(1, 4, 2):
                Y[0, t, k] = X[t, k]
            for k in T.Unroll(4):
                Y[1, t, k] = X[t, k] + k
            for k in T.Vectorized(4):
                Y[2, t, k] = X[t, k] * 2
            for i, j in T.grid(2, 2):
                Y[4, t, i * 2 + j] = X[t, i * 2 + j]
        with T.Kernel(1, threads=N):
            for i in T.parallel(N):
                Y[3, i, 0] = X[i, 3]

    x = np.random.default_rng(0).integers(-99, 99, (N, 4)).astype(np.int32)
    y = run(f, x, on=on)[1]
    assert np.array_equal(y[0], x * [0, 1, 0, 1]) and np.array_equal(y[1], x + np.arange(4))
    assert np.array_equal(y[2], x * 2) and np.array_equal(y[3, :, 0], x[:, 3]) and np.array_equal(y[4], x)


@pytest.mark.spec("T.parallel", "L8:raw-loops")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_parallel_loop_starts_where_it_is_told(on):
    """T.parallel(start, stop) refused every start other than 0."""
    @T.prim_func
    def f(n: T.int32, X: T.Tensor((N,), "int32"), Y: T.Tensor((3, N), "int32")):
        with T.Kernel(1, threads=N):
            F = T.alloc_fragment((N,), "int32")
            T.copy(X, F)
            for i in T.parallel(3, 40):
                F[i] += i
            T.copy(F, Y[0, :])
            for i in T.parallel(n, 2 * n + 1):
                Y[1, i] = X[i] * 2
            first = T.alloc_var("int32", init=n)
            for i in T.parallel(first, n):  # no iteration
                Y[2, i] = 1
            first = n - 2
            for i in T.parallel(first, n):
                Y[2, i] = i

    x = np.arange(N, dtype=np.int32) * 3
    y = run(f, 9, x, on=on)[1]
    k = np.arange(N)
    assert np.array_equal(y[0], x + k * ((k >= 3) & (k < 40))) and np.array_equal(y[1], x * 2 * ((k >= 9) & (k < 19)))
    assert np.array_equal(y[2], k * ((k >= 7) & (k < 9)))


@pytest.mark.spec("L8:loop_break")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_leaving_a_loop_and_an_iteration(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            a = T.alloc_var("int32")
            b = T.alloc_var("int32")
            c = T.alloc_var("int32")
            for k in T.serial(N):
                if X[k] < 0:
                    T.break_loop()
                a += X[k]
            for k in T.serial(N):
                if X[k] % 2 == 0:
                    T.continue_loop()
                b += X[k]
            for k in T.serial(N):
                if X[k] > 90:
                    T.loop_break()
                c += 1
            Y[0] = a
            Y[1] = b
            Y[2] = c

    x = np.random.default_rng(0).integers(0, 90, N).astype(np.int32)
    x[40], x[50] = -1, 95
    assert run(f, x, on=on)[1].tolist() == [x[:40].sum(), x[x % 2 == 1].sum(), 50]


@pytest.mark.spec("T.ws")
@pytest.mark.spec("L8:ws")
def test_warp_groups_by_their_other_name():
    @T.prim_func
    def f(Y: T.Tensor((384,), "int32")):
        with T.Kernel(1, threads=384):
            t = T.get_thread_binding()
            frame = T.WarpSpecialize(0, 2)
            assert isinstance(frame, T.WarpSpecializeFrame)
            with frame:
                Y[t] = 1
            with T.ws(1):
                Y[t] = 2

    assert np.array_equal(everywhere(f)[0], np.repeat([1, 2, 1], 128))


# ---- allocation and tensors ----------------------------------------------------------------------------------------

@pytest.mark.spec("T.alloc_buffer", "T.sblock_alloc_buffer")
@pytest.mark.spec("L6:allocate")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_raw_allocation_in_any_scope(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            S = T.allocate((N,), "int32", "shared")
            L = T.sblock_alloc_buffer((2,), "int32", scope="local")
            F = T.alloc_buffer((N,), "int32", scope="local.fragment")
            S[t] = X[t]
            L[0] = S[N - 1 - t]
            S[t] = L[0] + 1
            T.copy(S, F)
            T.copy(F, Y)

    x = np.arange(N, dtype=np.int32)
    assert np.array_equal(run(f, x, on=on)[1], x[::-1] + 1)


@pytest.mark.spec("L6:allocate")
def test_raw_allocation_refuses_unknown_scopes():
    for allocate in (T.allocate, T.sblock_alloc_buffer):
        def program(allocate=allocate):
            @T.prim_func
            def f(Y: T.Tensor((4,), "int32")):
                with T.Kernel(1, threads=32):
                    allocate((4,), "int32", scope="texture")

        with pytest.raises(TileLangError) as e:
            program()
        assert e.value.kind == "alloc-scope"


@pytest.mark.spec("T.FragmentBuffer", "T.SharedBuffer")
@pytest.mark.spec("L5:scoped-buffers")
def test_buffers_of_a_scope_as_annotations():
    @T.macro
    def scale(S: T.SharedBuffer((N,), "int32"), F: T.FragmentBuffer((N,), "int32"), L: T.LocalBuffer((1,), "int32")):
        T.copy(S, F)
        for i in T.Parallel(N):
            F[i] = F[i] * 2
        L[0] = 7

    assert isinstance(scale, T.Macro)
    scopes = [T.SharedBuffer((4,)).scope(), T.FragmentBuffer((4,)).scope(), T.LocalBuffer((4,)).scope()]
    assert scopes == ["shared.dyn", "local.fragment", "local"]

    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32"), Z: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((N,), "int32")
            F = T.alloc_fragment((N,), "int32")
            L = T.alloc_local((1,), "int32")
            T.copy(X, S)
            scale(S, F, L)
            T.copy(F, Y)
            Z[0] = L[0]

    x = np.arange(N, dtype=np.int32)
    _, y, z = everywhere(f, x)
    assert np.array_equal(y, 2 * x) and z[0] == 7


@pytest.mark.spec("T.Buffer")
@pytest.mark.spec("L5:Buffer")
def test_the_older_tensor_annotation_warns():
    with pytest.warns(DeprecationWarning, match="T.Tensor"):
        spec = T.Buffer((4, 8), "float16")
    assert spec.shape == (4, 8) and spec.dtype == "float16" and spec.scope() == "global"


@pytest.mark.spec("L19:pointers")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_tensors_at_addresses(on):
    @T.prim_func
    def f(P: T.Tensor((2,), "int64"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=32):
            A = T.make_tensor_from_addr(P[0], (N,), "int32")
            for i in T.Parallel(N):
                Y[i] = A[i] + 1

    data = np.arange(N, dtype=np.int32)
    p = np.array([data.ctypes.data, 0], np.int64)
    assert np.array_equal(run(f, p, on=on, simulated=True)[1], data + 1)
    assert "reinterpret_cast<const int*>(ptr)[" in cuda_text(f)


def test_null_pointers():
    @T.prim_func
    def f(p: T.ptr, Y: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            if T.isnullptr(p):
                Y[0] = 1
            else:
                Y[0] = 2

    assert "nullptr" in cuda_text(f)
    kernel = tilelang.compile(f, target="cpu")
    data, y = np.zeros(4, np.int32), np.zeros(1, np.int32)
    kernel(0, y)
    assert y[0] == 1
    kernel(data.ctypes.data, y)
    assert y[0] == 2


# ---- device source and raw statements ------------------------------------------------------------------------------

TWICE = "__device__ int twice(int x) { return 2 * x; }"


def device_source(spell):
    """Y = 2 * X by a function of the user's source, given in one of the ways there are."""
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N, prelude=TWICE if spell == "prelude" else None):
            t = T.get_thread_binding()
            if spell == "import":
                T.import_source(TWICE)
                T.import_source(None)
            if spell == "sblock_attr":
                T.sblock_attr({"pragma_import_c": TWICE})
            if spell == "attr":
                with T.attr(0, "pragma_import_c", TWICE):
                    Y[t] = T.call_pure_extern("int32", "twice", X[t])
            else:
                Y[t] = T.call_pure_extern("int32", "twice", X[t])

    return f


SPELLINGS = ("import", "sblock_attr", "attr", "prelude")


@pytest.mark.spec("T.import_source", "T.sblock_attr", "T.attr")
@pytest.mark.spec("L18:raw-attributes", "L19:extern")
def test_device_source_by_every_spelling():
    for spell in SPELLINGS:
        f = device_source(spell)
        for on in EXECUTIONS:
            with pytest.raises(TileLangError, match="twice"):
                run(f, on=on, simulated=True)
        text = cuda_text(f)
        assert text.count(TWICE) == 1 and "twice(X[" in text, spell


@pytest.mark.spec("T.sblock_attr")
@pytest.mark.spec("L18:raw-attributes")
def test_other_raw_attributes_are_refused():
    def program(spell):
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=32):
                if spell == "attr":
                    with T.attr(0, "thread_extent", 4):
                        Y[0] = 1
                else:
                    T.sblock_attr({"unknown": 1})

    for spell in ("attr", "sblock_attr"):
        with pytest.raises(NotImplementedError) as e:
            program(spell)
        assert e.value.kind == "not-available"
    with pytest.raises(TypeError):
        T.call_pure_extern("int32", 3)


@pytest.mark.spec("T.If", "T.Then", "T.While")
@pytest.mark.spec("L23:raw-statements")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_raw_branches_and_loops(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((2, N), "int32")):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            with T.If(X[t] > 0):
                with T.Then():
                    Y[0, t] = X[t]
                with T.Else():
                    Y[0, t] = 0 - X[t]
            n = T.alloc_local((1,), "int32")
            n[0] = 0
            with T.While(n[0] * n[0] < X[t]):
                n[0] = n[0] + 1
            Y[1, t] = n[0]

    x = np.random.default_rng(0).integers(-99, 99, N).astype(np.int32)
    y = run(f, x, on=on)[1]
    assert np.array_equal(y[0], np.abs(x))
    assert np.array_equal(y[1], np.ceil(np.sqrt(np.maximum(x, 0))))


@pytest.mark.spec("L23:raw-statements")
def test_raw_branches_out_of_place_are_refused():
    def program(build):
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=32):
                build(Y)

    def without_then(Y):
        with T.If(Y[0] > 0):
            pass

    def alone(branch):
        def build(Y):
            with branch():
                T.buffer_store(Y, 1, [0])

        return build

    for build in (without_then, alone(T.Then), alone(T.Else)):
        with pytest.raises(TileLangError) as e:
            program(build)
        assert e.value.kind == "raw-statement"


# ---- helpers of whole kernels --------------------------------------------------------------------------------------

@pytest.mark.spec("T.c2d_im2col")
@pytest.mark.spec("L10:im2col")
def test_image_columns_by_their_older_name():
    @T.prim_func
    def f(X: T.Tensor((1, 4, 4, 8), "float32"), Y: T.Tensor((16, 72), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((16, 72), "float32")
            with pytest.warns(DeprecationWarning):
                T.c2d_im2col(X, S, 0, 0, 3, 1, 1, 1)
            T.copy(S, Y)

    x = np.random.default_rng(0).standard_normal((1, 4, 4, 8)).astype(np.float32)
    padded = np.pad(x[0], ((1, 1), (1, 1), (0, 0)))
    want = [[padded[h:h + 3, w:w + 3].ravel() for w in range(4)] for h in range(4)]
    assert np.array_equal(everywhere(f, x)[1], np.array(want).reshape(16, 72))


@pytest.mark.spec("L21:tile-scheduler")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_scheduler_of_ones_own(on):
    class Columns(T.BaseTileScheduler):
        """Tiles of a (4, 3) grid, column by column."""

        def update_current_idx(self, linear_idx):
            self._set("m_idx", linear_idx % 4)
            self._set("n_idx", linear_idx // 4)

        def valid(self):
            return self.linear_idx < 12

    @T.prim_func
    def f(Y: T.Tensor((4, 3), "int32")):
        with T.Kernel(5, threads=1) as b:
            s = Columns()
            s.init(b)
            while s.valid():
                Y[s.m_idx, s.n_idx] = s.linear_idx * 10 + s.current_iter
                s.next_tile(5)

    want = [[(n * 4 + m) * 10 + (n * 4 + m) // 5 for n in range(3)] for m in range(4)]
    assert run(f, on=on)[0].tolist() == want
    with pytest.raises(NotImplementedError):
        T.BaseTileScheduler(stateful=False).valid()


def test_functions_of_the_jit_have_a_type():
    @tilelang.jit(out_idx=[-1], target="cpu")
    def double(n):
        @T.prim_func
        def f(X: T.Tensor((n,), "int32"), Y: T.Tensor((n,), "int32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(n):
                    Y[i] = X[i] * 2

        return f

    assert isinstance(double, T.JITFunc)
    assert np.array_equal(double(8)(np.arange(8, dtype=np.int32)), np.arange(8) * 2)


@pytest.mark.spec("T.alloc_global", "L6:alloc_global")
def test_a_workspace_in_a_loop_of_the_host_is_that_of_its_turn():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        for k in range(3):
            W = T.alloc_global((64,), "int32")
            with T.Kernel(1, threads=64):
                t = T.get_thread_binding()
                V = T.alloc_global((64,), "int32")
                W[t] = A[t] + k
                V[t] = O[t]
                O[t] = V[t]
            with T.Kernel(1, threads=64):
                t = T.get_thread_binding()
                O[t] = O[t] + W[63 - t]

    a = np.arange(64, dtype=np.int32)
    assert np.array_equal(everywhere(f, a)[1], 3 * a[::-1] + 3)
