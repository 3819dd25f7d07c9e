"""check_operands: divisions by the constant 0 and shifts by a constant outside the type must not compile.

Amounts known only at run time have one meaning on every target.
"""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

i32 = "int32"
Z = 0


def stores(value):
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                A[i] = value(A[i], n)

    return f


def grid():
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(n // Z, threads=8):
            A[0] = 1

    return f


def condition():
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(1, threads=8):
            if n % Z == 1:
                A[0] = 1

    return f


def in_place():
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(1, threads=8):
            for i in T.Parallel(8):
                A[i] //= Z

    return f


def extent():
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(1, threads=8):
            for i in T.serial(T.ceildiv(n, Z)):
                A[i] = 1

    return f


def index():
    @T.prim_func
    def f(A: T.Tensor((8,), i32), n: T.int32):
        with T.Kernel(1, threads=8):
            A[n % Z] = 1

    return f


def shape():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n // Z,), i32), B: T.Tensor((n,), i32)):
        with T.Kernel(1, threads=8):
            B[0] = 1

    return f


PROGRAMS = {
    "floor": stores(lambda a, n: a // Z), "modulo": stores(lambda a, n: a % Z),
    "truncdiv": stores(lambda a, n: T.truncdiv(a, Z)), "truncmod": stores(lambda a, n: T.truncmod(a, Z)),
    "typed zero": stores(lambda a, n: a // T.int32(0)), "product": stores(lambda a, n: a % (n * 0)),
    "zero by zero": stores(lambda a, n: T.int32(0) // T.int32(0) + a),
    "unsigned": stores(lambda a, n: T.Cast(i32, T.Cast("uint32", n) / T.Cast("uint32", 0))),
    "guarded at run time": stores(lambda a, n: T.if_then_else(n > 0, a // Z, a)),
    "grid": grid(), "condition": condition(), "in place": in_place(), "extent": extent(), "index": index(), "shape": shape(),
}
PLACES = {"cpu": {"target": "cpu"}, "tile": {"execution_backend": "tile"}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_constant_zero_divisor_is_refused(name, place):
    with pytest.raises(ZeroDivisionError) as e:
        tilelang.compile(PROGRAMS[name], **PLACES[place])
    assert e.value.kind == "division-by-zero" and e.value.span is not None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_constant_zero_divisor_is_refused_for_gpus(arch):
    from tilelang.target import Target
    from tilelang.transform.pipeline import lower

    with pytest.raises(ZeroDivisionError):
        lower(PROGRAMS["modulo"].func, Target({"kind": "cuda", "arch": arch}))


def test_divisions_that_are_never_traced_or_of_floats_stay():
    """A guard known while compiling takes the division away; floats divide by 0 as IEEE says."""
    tilelang.compile(stores(lambda a, n: T.if_then_else(Z > 0, a // Z, a)), target="cpu")
    tilelang.compile(stores(lambda a, n: a if Z == 0 else a // Z), target="cpu")
    tilelang.compile(stores(lambda a, n: T.Cast(i32, T.isinf(T.Cast("float32", n) / 0.0))), target="cpu")


TYPES = [f"{u}int{b}" for b in (8, 16, 32, 64) for u in ("", "u")]


def shifts(value, dt="int32"):
    @T.prim_func
    def f(A: T.Tensor((64,), dt), k: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                A[i] = value(A[i], k)

    return f


def launch(blocks):
    @T.prim_func
    def f(A: T.Tensor((64,), i32), k: T.int32):
        with T.Kernel(blocks(k), threads=64):
            T.atomic_add(A[0], 1)

    return f


def sized(amount):
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n << amount,), i32), B: T.Tensor((n,), i32)):
        with T.Kernel(1, threads=8):
            B[0] = 1

    return f


def vectors():
    @T.prim_func
    def f(A: T.Tensor((64,), i32), k: T.int32):
        with T.Kernel(1, threads=64):
            A[0:4] = A[0:4] << 32

    return f


OUTSIDE = {
    "by the bits": shifts(lambda a, k: a >> 32), "beyond": shifts(lambda a, k: a << 40),
    "below 0": shifts(lambda a, k: a << -1), "unsigned, below 0": shifts(lambda a, k: a << -1, "uint32"),
    "of a narrow type that is promoted": shifts(lambda a, k: a >> 32, "int8"),
    "of a constant": shifts(lambda a, k: a + (1 << T.int32(33))),
    "a constant that is 0": shifts(lambda a, k: a + (T.int32(5) >> 33)),
    "functions": shifts(lambda a, k: T.shift_right(a, 64)), "vectors": vectors(), "shape": sized(40),
    "grid": launch(lambda k: k << 32), "grid of a constant": launch(lambda k: T.int32(1) << 33),
    "guarded at run time": shifts(lambda a, k: T.if_then_else(k > 5, a << 32, a)),
} | {f"{dt} by its bits": shifts(lambda a, k, dt=dt: a << T.cast(int(dt.lstrip("uint")), dt), dt) for dt in TYPES}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_constant_amount_outside_the_type_is_refused(name, place):
    with pytest.raises(ValueError) as e:
        tilelang.compile(OUTSIDE[name], **PLACES[place])
    assert e.value.kind == "shift-range" and e.value.span is not None


BACKENDS = {"tile": {"execution_backend": "tile"}, "cpu": {"target": "cpu"}} | {
    arch: {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "simulator"} for arch in ("sm_80", "sm_90a")}


@pytest.mark.parametrize("backend", ["sm_80", "sm_90a"])
def test_a_constant_amount_outside_the_type_is_refused_for_gpus(backend):
    with pytest.raises(ValueError) as e:
        tilelang.compile(OUTSIDE["beyond"], **BACKENDS[backend])
    assert e.value.kind == "shift-range"


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_time_amounts_outside_the_type_shift_all_bits_out(backend):
    left, right = (tilelang.compile(shifts(op), **BACKENDS[backend]) for op in (lambda a, k: a << k, lambda a, k: a >> k))
    x = np.arange(-32, 32, dtype=np.int32) * 1000003
    for k in (0, 5, 31, 32, 33, 40, 64, 2**31 - 1, -1, -32):
        got = x.copy(), x.copy()
        left(got[0], k)
        right(got[1], k)
        by = k if 0 <= k < 32 else 63
        np.testing.assert_array_equal(got[0], (x.astype(np.int64) << by).astype(np.int32), str(k))
        np.testing.assert_array_equal(got[1], x >> min(by, 31), str(k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grid_shifted_out_of_its_type_is_refused_at_the_call(backend):
    kernel = tilelang.compile(launch(lambda k: 1 << k), **BACKENDS[backend])
    a = np.zeros(64, np.int32)
    kernel(a, 2)
    assert a[0] == 4 * 64
    for k in (31, 32, 33, 64, -1):
        with pytest.raises(ValueError, match="1 << k"):
            kernel(a, k)
    assert a[0] == 4 * 64


HOST = {"<<": lambda k, x: (k << 3) << k, ">>": lambda k, x: (k - 40) >> (k & 127),
        "narrow": lambda k, x: T.cast(T.cast(k, "uint8") << T.cast(k, "uint8"), i32),
        "to an integer": lambda k, x: T.cast(x, i32), "to an unsigned one": lambda k, x: T.cast(T.cast(x, "uint8"), i32)}


@pytest.mark.parametrize("name", HOST)
def test_the_host_program_computes_what_the_interpreter_computes(name):
    @T.prim_func
    def computed(A: T.Tensor((8,), i32), k: T.int32, x: T.float64):
        with T.Kernel(1, threads=8):
            A[0] = HOST[name](k, x)

    @T.prim_func
    def compared(A: T.Tensor((8,), i32), k: T.int32, x: T.float64, want: T.int32):
        assert HOST[name](k, x) == want, "another value"
        with T.Kernel(1, threads=8):
            A[1] = 1

    kernel, host = tilelang.compile(computed, execution_backend="tile"), tilelang.compile(compared, target="cpu")
    for k, x in ((0, 0.0), (1, -7.5), (5, 1e300), (33, -1e300), (64, np.nan), (127, np.inf), (-1, 300.0), (2**31 - 1, 2.0**31)):
        a = np.zeros(8, np.int32)
        kernel(a, k, x)
        host(a, k, x, int(a[0]))
