"""Constructs of other people's programs, each as its smallest program, on every execution."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

F32 = "float32"
X = np.arange(1, 17, dtype=np.float32)


# ---- vectors of neighbouring elements ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start, lanes, step", [(-4, 4, 1), (-2, 4, 1), (1, 4, -1), (-3, 2, 1)])
@pytest.mark.parametrize("shared", (False, True))
def test_a_ramp_that_starts_below_zero_wraps_each_element(start, lanes, step, shared):
    @T.prim_func
    def f(A: T.Tensor((16,), F32), B: T.Tensor((16,), F32), C: T.Tensor((16,), F32)):
        with T.Kernel(1, threads=1):
            S = T.alloc_shared((16,), F32)
            T.copy(A, S)
            if shared:
                B[T.Ramp(0, 1, lanes)] = S[T.Ramp(start, step, lanes)]
            else:
                B[T.Ramp(0, 1, lanes)] = A[T.Ramp(start, step, lanes)]
            C[T.Ramp(start, step, lanes)] = A[T.Ramp(0, 1, lanes)] * 2

    _, b, c = everywhere(f, X)
    at = [(start + step * k) % 16 for k in range(lanes)]
    assert np.array_equal(b[:lanes], X[at]) and np.array_equal(c[at], 2 * X[:lanes]) and np.count_nonzero(c) == lanes
    cuda_text(f)


def test_the_elements_of_a_ramp_in_a_loop_are_those_of_scalar_indices():
    def program(ramp):
        @T.prim_func
        def f(A: T.Tensor((16,), F32), B: T.Tensor((12,), F32)):
            with T.Kernel(1, threads=1):
                for i in T.serial(3):
                    if ramp:
                        B[T.Ramp(4 * i, 1, 4)] = A[T.Ramp(i - 3, 1, 4)]
                    else:
                        B[4 * i] = A[i - 3]
                        B[4 * i + 1] = A[i - 2]
                        B[4 * i + 2] = A[i - 1]
                        B[4 * i + 3] = A[i]
        return f

    assert np.array_equal(everywhere(program(True), X)[1], everywhere(program(False), X)[1])


@pytest.mark.parametrize("lanes", (2, 4))
def test_an_atomic_addition_takes_a_ramp_as_its_destination(lanes):
    add = T.atomic_addx2 if lanes == 2 else T.atomic_addx4

    @T.prim_func
    def f(A: T.Tensor((16,), F32), B: T.Tensor((16,), F32)):
        with T.Kernel(1, threads=1):
            for i in T.serial(16 // lanes):
                add(B[T.Ramp(lanes * i, 1, lanes)], A[T.Ramp(lanes * i, 1, lanes)])

    assert np.array_equal(everywhere(f, X, X)[1], 2 * X)
    cuda_text(f)


# ---- reducers ----------------------------------------------------------------------------------------------------------


def reducing(form, init=None):
    @T.prim_func
    def f(A: T.Tensor((64, 4), F32), B: T.Tensor((4,), F32), n: T.int32, m: T.int32):
        with T.Kernel(1, threads=64):
            acc = T.alloc_reducer((4,), F32, op="sum")
            F = T.alloc_fragment((4,), F32)
            T.clear(F)
            if form == "below":
                T.reducer_init(acc, init)
                for i, j in T.Parallel(64, 4):
                    T.reducer_update(acc[j], A[i, j])
                if n > 0:
                    T.finalize_reducer(acc, F)
            if form == "both":
                T.reducer_init(acc)
                if n > 0:
                    for i, j in T.Parallel(64, 4):
                        T.reducer_update(acc[j], A[i, j])
                    T.finalize_reducer(acc, F)
                else:
                    for i, j in T.Parallel(64, 4):
                        T.reducer_update(acc[j], -A[i, j])
                    T.finalize_reducer(acc, F)
            if form == "behind":
                if n > 0:
                    T.reducer_init(acc)
                if n > 0 and m > 0:
                    for i, j in T.Parallel(64, 4):
                        T.reducer_update(acc[j], A[i, j])
                    T.finalize_reducer(acc, F)
            if form == "elsewhere":
                if n > 0:
                    T.reducer_init(acc)
                if m > 0:
                    T.finalize_reducer(acc, F)
            if form == "twice":
                T.reducer_init(acc)
                if n > 0:
                    T.finalize_reducer(acc, F)
                if m > 0:
                    T.finalize_reducer(acc, F)
            if form == "late":
                T.reducer_init(acc)
                if n > 0:
                    T.finalize_reducer(acc, F)
                for i, j in T.Parallel(64, 4):
                    T.reducer_update(acc[j], A[i, j])
            if form == "loop":
                T.reducer_init(acc)
                for _ in T.serial(n):
                    T.finalize_reducer(acc, F)
            T.copy(F, B)

    return f


@pytest.mark.parametrize("form", ("below", "both", "behind"))
def test_a_reducer_may_end_in_a_branch_of_the_branch_where_it_starts(form):
    a = np.arange(256, dtype=np.float32).reshape(64, 4)
    f = reducing(form)
    for n, m in ((1, 1), (0, 1), (1, 0)):
        taken = n > 0 and (m > 0 or form != "behind")
        want = a.sum(0) if taken else -a.sum(0) if form == "both" else np.zeros(4)
        assert np.array_equal(everywhere(f, a, np.zeros(4, np.float32), n, m)[1], want)
    cuda_text(f)


@pytest.mark.parametrize("form", ("elsewhere", "twice", "late", "loop"))
def test_a_reducer_that_may_end_without_a_start_or_twice_is_rejected(form):
    with pytest.raises(TileLangError) as e:
        reducing(form)
    assert e.value.kind == "reducer-order"


@pytest.mark.parametrize("init", (lambda: T.float16(1), lambda: T.int32(1), lambda: -T.infinity("float64")))
def test_an_initial_value_of_another_type_than_the_reducer_is_rejected(init):
    with pytest.raises(TileLangError) as e:
        reducing("below", init())
    assert e.value.kind == "reducer-operand"


# ---- transposes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("tensors", "slices", "to shared", "from shared", "ragged"))
def test_global_tensors_are_transposed(form):
    n = 13 if form == "ragged" else 16

    @T.prim_func
    def f(A: T.Tensor((2, 8, n), F32), B: T.Tensor((2, n, 8), F32)):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((16, 8), F32)
            if form == "tensors":
                T.transpose(A, B)
            if form == "slices":
                T.transpose(A[1, :, :], B[1, :, :])
            if form in ("to shared", "ragged"):
                T.transpose(A[1, 0:8, 0:16], S)
                T.copy(S, B[1, 0:16, :])
            if form == "from shared":
                T.copy(B[1, :, :], S)
                T.transpose(S, A[1, :, :])

    a = np.arange(16 * n, dtype=np.float32).reshape(2, 8, n)
    b = np.arange(16 * n, dtype=np.float32).reshape(2, n, 8)
    x, y = everywhere(f, a, b)
    if form == "from shared":
        assert np.array_equal(x[1], b[1].T)
    else:
        assert np.array_equal(y[1], a[1].T) and np.array_equal(y[0], a[0].T if form == "tensors" else b[0])
    cuda_text(f)


# ---- numbers -------------------------------------------------------------------------------------------------------------


def test_infinity_of_e5m2_is_no_finite_number():
    @T.prim_func
    def f(B: T.Tensor((4,), "float8_e5m2"), C: T.Tensor((4,), F32)):
        with T.Kernel(1, threads=4):
            for i in T.Parallel(4):
                B[i] = T.if_then_else(i < 2, T.infinity("float8_e5m2"), -T.infinity("float8_e5m2"))
                C[i] = T.cast(-T.infinity("float8_e5m2"), F32)

    b, c = everywhere(f)
    assert np.array_equal(b.astype(np.float32), [np.inf, np.inf, -np.inf, -np.inf]) and np.all(c == -np.inf)
    cuda_text(f)


@pytest.mark.parametrize("pairs", (False, True))
def test_a_fused_product_of_bfloat16_compiles_for_devices_without_the_instruction(pairs):
    bf16 = "bfloat16"

    @T.prim_func
    def f(A: T.Tensor((64,), bf16), B: T.Tensor((64,), bf16)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                if pairs:
                    B[2 * i:2 * i + 2] = T.fma2(A[2 * i:2 * i + 2], A[2 * i:2 * i + 2], A[2 * i:2 * i + 2])
                else:
                    B[i] = T.ieee_fmaf(A[i], A[i], A[i])

    for arch in ("sm_75", "sm_80"):
        cuda_text(f, arch)


# ---- names ---------------------------------------------------------------------------------------------------------------

NAMES = ("NULL", "char16_t", "__restrict__", "__global__", "__CUDA_ARCH__", "__shared__", "INFINITY", "requires", "linux",
         "INT_MAX", "__half", "co_await")


@pytest.mark.parametrize("dt", ("float32", "float16"))
@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_program_may_be_a_word_of_the_device_language(name, dt):
    source = f'''
import tilelang.language as T

@T.prim_func
def f({name}: T.Tensor((64,), "{dt}"), B: T.Tensor((64,), "{dt}"), n_{name}: T.int32):
    with T.Kernel(1, threads=64):
        S = T.alloc_shared((64,), "{dt}")
        T.copy({name}, S)
        for i in T.Parallel(64):
            B[i] = S[i] + n_{name}

@T.prim_func
def g(A: T.Tensor((64,), "{dt}"), B: T.Tensor((64,), "{dt}"), {name}: T.int32):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            B[i] = A[i] * {name} + A[i]
'''
    for function in ("f", "g"):
        cuda_text(tilelang.from_source(source, function))


def test_the_products_of_bfloat16_pairs_are_rounded_once():
    x = np.arange(64, dtype=np.float32).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(1.25)

    @T.prim_func
    def f(A: T.Tensor((64,), "bfloat16"), B: T.Tensor((64,), "bfloat16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[i] = T.ieee_fmaf(A[i], A[i], A[i])

    wide = x.astype(np.float64)
    assert np.array_equal(everywhere(f, x)[1], (wide * wide + wide).astype(np.float32).astype(ml_dtypes.bfloat16))


# ---- kernels without a run -------------------------------------------------------------------------------------------------


@tilelang.jit(target="cpu")
def doubled(A, block: int = 64):
    N = T.const("N")
    A: T.Tensor((N,), F32)
    C = T.empty((N,), F32)
    with T.Kernel(T.ceildiv(N, block), threads=64) as b:
        for i in T.Parallel(block):
            C[b * block + i] = A[b * block + i] * 2
    return C


def test_a_kernel_is_compiled_for_the_values_of_its_constants():
    for kernel in (doubled.compile(N=16), doubled.compile(N=16, block=32), doubled(X, __return_kernel=True)):
        assert np.array_equal(kernel(X), 2 * X)


def test_a_configuration_has_pass_configs_of_its_own():
    own = {"tl.disable_safe_memory_legalize": False}
    tuned = tilelang.autotune(configs=[{"block": 32, "pass_configs": own}, {"block": 64}], warmup=1, rep=1)(doubled)
    assert np.array_equal(tuned(X), 2 * X)
    kernel = tuned(X, __return_kernel=True)
    assert kernel.config in ({"block": 32, "pass_configs": own}, {"block": 64})


# ---- random numbers in parallel loops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("word", "uniform", "normal", "two loops"))
def test_iterations_draw_random_numbers_of_their_own_sequence(form):
    @T.prim_func
    def f(A: T.Tensor((64,), F32), B: T.Tensor((64,), F32)):
        with T.Kernel(2, threads=16) as b:
            for i in T.Parallel(32):
                T.rng_init(7, b * 32 + i)
                if form == "word":
                    A[b * 32 + i] = T.cast(T.rng_rand() >> T.uint32(8), F32)
                if form in ("uniform", "two loops"):
                    A[b * 32 + i] = T.rng_rand_float()
                if form == "normal":
                    A[b * 32 + i] = T.rng_rand_float(dist="normal")
            if form == "two loops":
                for i in T.Parallel(32):
                    T.rng_init(7, b * 32 + i)
                    B[b * 32 + i] = T.rng_rand_float()

    a, b = everywhere(f) if form != "normal" else (everywhere(f, on=("tile",)))
    assert len(np.unique(a)) == 64 and (form != "two loops" or np.array_equal(a, b))
    cuda_text(f)


@pytest.mark.parametrize("where", ("thread", "loop"))
def test_numbers_of_iterations_are_not_drawn_elsewhere(where):
    with pytest.raises(TileLangError, match="T.rng_init") as e:
        @T.prim_func
        def f(A: T.Tensor((64,), "uint32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(64):
                    T.rng_init(1, i)
                if where == "thread":
                    A[T.get_thread_binding()] = T.rng_rand()
                else:
                    for i in T.Parallel(64):
                        A[i] = T.rng_rand()
    assert e.value.kind == "rng"


# ---- updates of one element by several iterations ----------------------------------------------------------------------------


@pytest.mark.parametrize("index", ("one", "mod", "half"))
@pytest.mark.parametrize("shared", (False, True))
def test_iterations_that_update_one_element_are_computed_alike(index, shared):
    where = {"one": lambda i: 0, "mod": lambda i: i % 4, "half": lambda i: i // 2}[index]

    @T.prim_func
    def f(A: T.Tensor((64,), F32), B: T.Tensor((32,), F32)):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((32,), F32)
            T.clear(S)
            for i in T.Parallel(64):
                if shared:
                    S[where(i)] += A[i]
                else:
                    B[where(i)] += A[i]
            if shared:
                T.copy(S, B)

    a, want = np.arange(64, dtype=np.float32), np.zeros(32, np.float32)
    np.add.at(want, [where(i) for i in range(64)], a)
    assert np.array_equal(everywhere(f, a)[1], want)
    cuda_text(f)


@pytest.mark.parametrize("index", ("one", "half"))
def test_updates_of_one_element_by_a_run_time_number_of_iterations_are_rejected_alike(index):
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), F32), B: T.Tensor((32,), F32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(n):
                if index == "one":
                    B[0] += A[i]
                else:
                    B[i // 2] += A[i]

    for target in ({"kind": "cuda", "arch": "sm_90a"}, "cpu"):
        with pytest.raises(TileLangError, match="atomic_add") as e:
            tilelang.compile(f, target=target)
        assert e.value.kind == "parallel-order"


@pytest.mark.parametrize("form", ("element", "fragment", "loop", "chain", "while", "branch", "tensor", "pipeline", "private"))
def test_an_update_by_the_whole_block_happens_once(form):
    @T.prim_func
    def f(A: T.Tensor((8, 64), F32), B: T.Tensor((8, 64), F32), G: T.Tensor((8,), F32)):
        with T.Kernel(8, threads=96) as b:
            s = T.alloc_shared((64,), F32)
            F = T.alloc_fragment((64,), F32)
            m = T.alloc_fragment((1,), F32)
            T.copy(A[b, :], s)
            T.copy(s, F)
            T.reduce_sum(F, m)
            if form == "element":
                s[63] = s[63] + 1.0
            if form == "fragment":
                s[63] = s[63] + m[0]
            if form == "loop":
                for i in T.serial(8):
                    s[i] = s[i] + s[i + 1]
            if form == "chain":
                s[3] = s[3] + s[4]
                s[4] = s[4] * s[3]
                v = s[4]
                s[5] = s[5] + v
            if form == "while":
                while s[0] < 10.0:
                    s[0] = s[0] + 3.0
            if form == "branch":
                if s[1] > 0.0:
                    s[2] = s[2] + 5.0
                else:
                    s[2] = s[2] - 5.0
            if form == "tensor":
                G[b] = G[b] + s[3]
                for i in T.Parallel(64):
                    s[i] = s[i] + G[b]
            if form == "pipeline":
                for i in T.Pipelined(8, num_stages=2):
                    T.copy(A[i, :], s)
                    s[0] = s[0] + s[63]
                    for j in T.Parallel(64):
                        F[j] += s[j]
                T.copy(F, s)
            if form == "private":
                total = T.alloc_var(F32, init=0.0)
                for i in T.serial(4):
                    total = total + s[i]
                s[9] = s[9] + total
            for i in T.Parallel(64):
                B[b, i] = s[63 - i]

    a = (np.arange(512, dtype=np.float32) % 7).reshape(8, 64)
    _, b, _ = everywhere(f, a, on=WITH_HOPPER)
    plain = {"element": lambda x: x[63] + 1, "fragment": lambda x: x[63] + x.sum(),
             "branch": lambda x: x[2] + (5 if x[1] > 0 else -5), "private": lambda x: x[9] + x[:4].sum()}
    if form in plain:
        at = {"element": 63, "fragment": 63, "branch": 2, "private": 9}[form]
        assert np.array_equal(b[:, 63 - at], [plain[form](x) for x in a])
    cuda_text(f, "sm_90a")
