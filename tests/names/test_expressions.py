"""Expressions (section 4), data types (section 3) and the names of expression classes (section 23)."""

import re
import typing

import numpy as np
import pytest
from everywhere import EXECUTIONS, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

N = 64
RNG = np.random.default_rng(0)


def pairs(dtype):
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    z = RNG.integers(max(info.min, -9), 9, N).astype(dtype)
    z[z == 0] = 3
    x[:4], z[:4] = [info.min, info.max, 0, 7], [2, 5, 3, 7]
    return x, z


BINARY = {
    "bitwise_and": (T.bitwise_and, np.bitwise_and), "bitwise_or": (T.bitwise_or, np.bitwise_or),
    "bitwise_xor": (T.bitwise_xor, np.bitwise_xor), "floordiv": (T.floordiv, np.floor_divide),
    "floormod": (T.floormod, np.mod), "FloorDiv": (T.FloorDiv, np.floor_divide), "FloorMod": (T.FloorMod, np.mod),
    "min": (T.min, np.minimum), "max": (T.max, np.maximum), "Min": (T.Min, np.minimum), "Max": (T.Max, np.maximum),
    "Add": (T.Add, np.add), "Sub": (T.Sub, np.subtract), "Mul": (T.Mul, np.multiply),
    "truncmod": (T.truncmod, np.fmod), "Mod": (T.Mod, np.fmod),
}
COMPARE = {"EQ": (T.EQ, np.equal), "NE": (T.NE, np.not_equal), "LT": (T.LT, np.less), "LE": (T.LE, np.less_equal),
           "GT": (T.GT, np.greater), "GE": (T.GE, np.greater_equal)}


def rows(fns, X, Z, Y, i):
    for k, fn in enumerate(fns):
        T.buffer_store(Y, fn(X[i], Z[i]), (k, i))


@pytest.mark.spec("T.bitwise_xor", "T.floordiv", "T.floormod")
@pytest.mark.spec("L4.2:operators")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "int64"])
def test_integer_operators_by_name(dtype, on):
    fns, tests = [r[0] for r in BINARY.values()], [r[0] for r in COMPARE.values()]

    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), Y: T.Tensor((len(fns), N), dtype),
          C: T.Tensor((len(tests), N), "bool")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            rows(fns, X, Z, Y, i)
            rows(tests, X, Z, C, i)

    x, z = pairs(dtype)
    _, _, y, c = run(f, x, z, on=on)
    with np.errstate(over="ignore"):
        for got, (name, (_, meaning)) in zip(y, BINARY.items()):
            np.testing.assert_array_equal(got, meaning(x, z), name)
    for got, (name, (_, meaning)) in zip(c, COMPARE.items()):
        np.testing.assert_array_equal(got, meaning(x, z), name)


@pytest.mark.spec("T.shift_left", "T.shift_right")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint8"])
def test_shifts_and_complements(dtype, on):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), Z: T.Tensor((N,), dtype), Y: T.Tensor((3, N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.shift_left(X[i], Z[i])
            Y[1, i] = T.shift_right(X[i], Z[i])
            Y[2, i] = T.bitwise_not(X[i])

    x, _ = pairs(dtype)
    z = RNG.integers(0, np.iinfo(dtype).bits, N).astype(dtype)
    y = run(f, x, z, on=on)[2]
    assert np.array_equal(y, np.stack([x << z, x >> z, ~x]))


@pytest.mark.spec("T.Cast")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_logic_by_name(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "bool"), Z: T.Tensor((N,), "bool"), Y: T.Tensor((4, N), "bool"),
          D: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.And(X[i], Z[i])
            Y[1, i] = T.Or(X[i], Z[i])
            Y[2, i] = T.Not(X[i])
            Y[3, i] = T.likely(X[i])
            D[i] = T.Div(T.Cast("float32", i), 8.0)

    x, z = RNG.integers(0, 2, (2, N)).astype(bool)
    _, _, y, d = run(f, x, z, on=on)
    assert np.array_equal(y, np.stack([x & z, x | z, ~x, x]))
    assert np.array_equal(d, np.arange(N, dtype=np.float32) / 8)


@pytest.mark.spec("T.Shuffle", "T.extract_lane")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_vectors_of_expressions(on):
    @T.prim_func
    def f(X: T.Tensor((N, 4), "int32"), Y: T.Tensor((6, N, 4), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            v = X[i, 0:4]
            Y[0, i, 0:4] = T.broadcast(X[i, 0], 4)
            Y[1, i, 0:4] = T.ramp(X[i, 0], 3, 4)
            Y[2, i, 0:4] = T.Shuffle([v], [3, 1, 2, 0])
            Y[3, i, 0:2] = T.vectorlow("int32x2", v)
            Y[3, i, 2:4] = T.vectorhigh("int32x2", v)
            Y[4, i, 0:4] = T.vectorcombine("int32x4", T.vectorhigh("int32x2", v), T.vectorlow("int32x2", v))
            Y[5, i, 0] = T.extract_lane(v, 2)

    x = RNG.integers(-99, 99, (N, 4)).astype(np.int32)
    y = run(f, x, on=on)[1]
    first = x[:, :1]
    assert np.array_equal(y[0], np.repeat(first, 4, 1)) and np.array_equal(y[1], first + 3 * np.arange(4))
    assert np.array_equal(y[2], x[:, [3, 1, 2, 0]]) and np.array_equal(y[3], x)
    assert np.array_equal(y[4], x[:, [2, 3, 0, 1]]) and np.array_equal(y[5, :, 0], x[:, 2])


@pytest.mark.spec("T.Kernel", "T.Tensor", "T.get_thread_binding", "T.prim_func")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_vector_access_over_the_edge_keeps_the_lanes_inside(on):
    @T.prim_func
    def f(X: T.Tensor((30,), "int32"), Y: T.Tensor((30,), "int32")):
        with T.Kernel(1, threads=8):
            i = T.get_thread_binding() * 4
            Y[i:i + 4] = X[i:i + 4] + 1

    x = np.arange(30, dtype=np.int32)
    assert np.array_equal(run(f, x, on=on)[1], x + 1)


def test_division_of_python_integers():
    assert T.cdiv(7, 2) == T.ceildiv(7, 2) == 4 and T.cdiv(-7, 2) == -3 and T.cdiv(0, 5) == 0
    assert list(range(T.cdiv(7, 2))) == [0, 1, 2, 3]
    assert T.align_up(13, 8) == 16 and T.align_up(16, 8) == 16
    assert T.index_to_coordinates(23, (2, 3, 4)) == [1, 2, 3]


@pytest.mark.spec("T.align_up")
@pytest.mark.spec("L4.2:operators")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_division_of_values(on):
    @T.prim_func
    def f(Y: T.Tensor((5, N), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.cdiv(i, 3)
            Y[1, i] = T.align_up(i, 8)
            a, b, c = T.index_to_coordinates(i, (2, 4, 8))
            Y[2, i] = a
            Y[3, i] = b
            Y[4, i] = c

    t = np.arange(N)
    assert np.array_equal(run(f, on=on)[0], np.stack([-(-t // 3), -(-t // 8) * 8, t // 32, t // 8 % 4, t % 8]))


@pytest.mark.spec("L4.3:casts")
def test_limits_of_types():
    import ml_dtypes

    for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64"):
        info = np.iinfo(name)
        assert (T.min_value(name).value, T.max_value(name).value) == (info.min, info.max)
        assert T.max_value(name).dtype == name
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
        most = float(ml_dtypes.finfo(name).max)
        assert (T.min_value(name).value, T.max_value(name).value) == (-most, most), name
    assert T.infinity("float16").value == float("inf") and T.infinity(T.float32).dtype == "float32"
    with pytest.raises(TileLangError) as e:
        T.infinity("int32")
    assert e.value.kind == "math-type"


@pytest.mark.spec("T.PrimExpr")
@pytest.mark.spec("L23:nodes")
def test_classes_of_expressions():
    i = T.Var("i", "int32")
    assert isinstance(i, T.PrimExpr) and isinstance(T.SizeVar("n", "int32"), T.Var)
    assert T.var("k", "int64").dtype == "int64" and isinstance(T.var(), T.Var)
    assert isinstance(i + 1, T.PrimExpr) and (i + 1).dtype == "int32"
    assert isinstance(T.int32(3), T.IntImm) and T.int32(3).value == 3
    assert isinstance(T.float32(1.5), T.FloatImm) and T.float32(1.5).value == 1.5
    assert T.IntImm("int64", 3).dtype == "int64" and T.FloatImm("float16", 0.5).value == 0.5
    assert not isinstance(T.int32(3), T.FloatImm) and not isinstance(i, T.IntImm)
    assert isinstance(i + 1, T.Add) and not isinstance(i + 1, T.Sub) and isinstance(i < 3, T.LT)
    assert isinstance(T.Not(i < 3), T.Not) and T.Div(i, 2).op == "truncdiv"
    assert T.Call("float32", "exp", [T.Var("x", "float32")]).op == "exp"
    assert isinstance(T.Select(i > 0, i, i), T.Select) and isinstance(T.Cast("float32", i), T.Cast)
    with pytest.raises(TypeError):
        T.IntImm("float32", 1)
    assert isinstance(T.exp(T.Var("x", "float32")), T.Call)
    assert T.StringImm("text").value == "text"
    assert T.Cast("float32", i).dtype == "float32" and T.cast(i, "int64").dtype == "int64"
    assert T.meta_var([1, i])[1] is i
    seen = []

    @T.prim_func
    def f(X: T.Tensor((4,), "float16")):
        with T.Kernel(1, threads=4) as b:
            seen.append(isinstance(X[b], T.BufferLoad))

    assert seen == [True]
    assert isinstance(f, T.PrimFunc)
    assert T.Any is typing.Any


@pytest.mark.spec("L4.3:casts")
def test_casts_refuse_bad_options():
    x = T.Var("x", "float32")
    for bad in (lambda: T.cast(x, "float16", round="up"), lambda: T.cast(x, "float16", sat=1),
                lambda: T.cast(x, "float16", round="rs")):
        with pytest.raises(ValueError) as e:
            bad()
        assert e.value.kind == "cast-option"
    with pytest.raises(ValueError, match="sizes differ"):
        T.reinterpret(x, "int64")
    with pytest.raises(TypeError, match="mismatched types"):
        T.Select(x > 0, x, T.float16(0))


@pytest.mark.spec("L3.1:dtype")
def test_types_by_any_spelling():
    assert T.get_tvm_dtype("float") == T.float32 and T.get_tvm_dtype(np.int8) == "int8"
    assert T.get_tvm_dtype(bool) == "bool" and T.get_tvm_dtype(np.dtype("uint16")) == "uint16"
    with pytest.raises(ValueError):
        T.get_tvm_dtype("half")
    with pytest.raises(TypeError):
        T.get_tvm_dtype([1])
    assert T.AnyDType is not None  # for annotations: def f(dtype: T.AnyDType)


def test_families_of_small_floats():
    names = ["float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float4_e2m1fn", "float4_e2m1_unpacked", "float16", "int8"]
    assert [T.is_f8f6f4_family(n) for n in names] == [True] * 5 + [False] * 2
    assert [T.is_float4(n) for n in names] == [False] * 3 + [True] * 2 + [False] * 2
    assert [T.is_float4_e2m1fn(n) for n in names] == [False] * 3 + [True] + [False] * 3
    assert [T.is_float4_e2m1_unpacked(n) for n in names] == [False] * 4 + [True] + [False] * 2


@pytest.mark.spec("T.Var", "T.symbolic")
@pytest.mark.spec("L2.5:symbols")
def test_symbols_by_their_older_name():
    with pytest.warns(DeprecationWarning, match="T.dynamic"):
        m, n = T.symbolic("m, n")
    assert isinstance(m, T.Var) and (m.name, n.dtype) == ("m", "int32")


@pytest.mark.spec("T.reduce_bitand", "T.reduce_bitor", "T.reduce_bitxor")
@pytest.mark.spec("L12.2:reduce")
def test_reductions_of_bits_and_running_extrema():
    @T.prim_func
    def f(X: T.Tensor((8, N), "int32"), Y: T.Tensor((3, 8), "int32"), Z: T.Tensor((8, N), "int32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((8, N), "int32")
            r = T.alloc_fragment((8,), "int32")
            s = T.alloc_shared((8, N), "int32")
            T.copy(X, x)
            T.reduce_bitand(x, r, dim=1)
            T.copy(r, Y[0, 0:8])
            T.reduce_bitor(x, r, dim=1)
            T.copy(r, Y[1, 0:8])
            T.reduce_bitxor(x, r, dim=1)
            T.copy(r, Y[2, 0:8])
            T.copy(X, s)
            T.cummax(s, dim=1)
            T.copy(s, Z)

    x = RNG.integers(-2**31, 2**31, (8, N)).astype(np.int32)
    x[1] |= 9
    _, y, z = everywhere(f, x)
    want = [np.bitwise_and.reduce(x, 1), np.bitwise_or.reduce(x, 1), np.bitwise_xor.reduce(x, 1)]
    assert np.array_equal(y, np.stack(want)) and np.array_equal(z, np.maximum.accumulate(x, 1))


@pytest.mark.parametrize("wrong, text", [
    (lambda v: T.vectorlow("float32", v[0]), "T.vectorlow takes a vector with an even number of elements, found float32"),
    (lambda v: T.vectorhigh("float32x2", v[0:3]), "T.vectorhigh takes a vector with an even number of elements"),
    (lambda v: T.vectorlow("float16x2", v[0:4]), "T.vectorlow of float32x4 is float32x2, found float16x2"),
    (lambda v: T.vectorcombine("float32x8", v[0:2], v[2:4]), "T.vectorcombine of float32x2, float32x2 is float32x4, found"),
    (lambda v: T.vectorcombine("float32x2", v[0], T.cast(v[1], "float16")), "found 2 lanes of float32, float16"),
    (lambda v: T.Shuffle([], [0]), "one element type, found 1 lanes of"),
    (lambda v: T.Shuffle([v[0:4]], [0, 4]), "lane 4 of float32x4 does not exist"),
    (lambda v: T.Shuffle([v[0:4]], [0, -1]), "lane -1 of float32x4 does not exist")])
def test_parts_of_vectors_that_do_not_exist_reached_the_compiler(wrong, text):
    with pytest.raises((TypeError, IndexError), match=re.escape(text)):
        @T.prim_func
        def main(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=1):
                Y[0] = wrong(X)
