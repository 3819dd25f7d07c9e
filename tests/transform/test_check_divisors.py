"""check_divisors: integer division by the constant 0 must not compile, for what comes out depends on the target."""

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
