"""Every row of the argument table (spec/runtime.md §4) on the compiled stub; the next good call always works."""

import ctypes

import numpy as np
import pytest
from hosts import build, program, tensor

from tilelang.ir import BOOL, F32, I32, I64, Var, dtype, FuncFacts
from tilelang.runtime.signature import signature_of


def f32(*shape):
    return np.zeros(shape, np.float32)


def refused(call, good, bad, message, kind=RuntimeError):
    with pytest.raises(kind, match=message):
        call(*bad)
    assert call(*good) is None  # the process and the next call live on


@pytest.fixture(scope="module")
def static():
    fns, _ = build(program(tensor("A", (4, 8)), tensor("B", (8,), "float16")))
    return fns["call"]


GOOD = (f32(4, 8), np.zeros(8, np.float16))


@pytest.mark.spec("R4:rank", "R4:dtype", "R4:shape", "R4:strides")
@pytest.mark.parametrize("bad, message", [
    ((f32(4, 8),), "main: num_args should be 2"),
    ((*GOOD, 1), "main: num_args should be 2"),
    ((1, GOOD[1]), "kernel main input A expected pointer or tensor handle"),
    (("x", GOOD[1]), "kernel main input A expected pointer or tensor handle"),
    ((None, GOOD[1]), r"main\.A is expected to have non-NULL pointer"),
    ((f32(32), GOOD[1]), "kernel main input A ndim mismatch, expected 2"),
    ((GOOD[0].astype(np.float64), GOOD[1]), "kernel main input A dtype mismatch, expected float32"),
    ((GOOD[0], f32(8)), "kernel main input B dtype mismatch, expected float16"),
    ((f32(4, 9), GOOD[1]), r"kernel main input A shape\[1\] violates packed ABI constraint"),
    ((f32(5, 8), GOOD[1]), r"kernel main input A shape\[0\] violates packed ABI constraint"),
    ((f32(8, 4).T, GOOD[1]), r"kernel main input A strides\[1\] violates packed ABI constraint"),
    ((f32(4, 16)[:, ::2], GOOD[1]), "expected to be compact array, but got non-compact strides"),
    ((f32(4, 16)[:, :8], GOOD[1]), r"kernel main input A strides\[0\] violates"),
])
def test_refuses_tensors_that_do_not_fit(static, bad, message):
    refused(static, GOOD, bad, message, ValueError if "num_args" in message else RuntimeError)


@pytest.mark.spec("R4:shape")
def test_symbols_bind_by_shape_and_must_agree():
    m, n = Var("m", I32), Var("n", I32)
    fns, seen = build(program(tensor("A", (m, n)), tensor("B", (n, m))))
    assert fns["call"](f32(3, 5), f32(5, 3)) is None
    assert (seen.calls[-1]["m"], seen.calls[-1]["n"]) == (3, 5)
    refused(fns["call"], (f32(2, 2), f32(2, 2)), (f32(3, 5), f32(5, 4)),
            r"kernel main input B shape\[1\] violates packed ABI constraint")


@pytest.mark.spec("L5:symbolic-shapes", "R4:calls")
def test_linear_equations_are_solved_and_must_be_whole():
    m, n = Var("m", I32), Var("n", I32)
    fns, seen = build(program(tensor("A", (m + n,)), tensor("B", (2 * m,)), tensor("C", (n * m, 1))))
    fns["call"](f32(7), f32(6), f32(12, 1))
    assert (seen.calls[-1]["m"], seen.calls[-1]["n"]) == (3, 4)
    good = (f32(7), f32(6), f32(12, 1))
    refused(fns["call"], good, (f32(7), f32(5), f32(12, 1)), r"input B shape\[0\] violates .* no whole m")
    refused(fns["call"], good, (f32(8), f32(6), f32(12, 1)), r"input A shape\[0\] violates")
    refused(fns["call"], good, (f32(7), f32(6), f32(11, 1)), r"input C shape\[0\] violates .* no whole n")
    refused(fns["call"], good, (f32(0), f32(0), f32(0, 1)), r"input C shape\[0\] violates .* no whole n")


def test_a_solved_dimension_is_never_negative():
    m, n = Var("m", I32), Var("n", I32)
    fns, seen = build(program(tensor("A", (m + n,)), tensor("B", (2 * m,))))
    refused(fns["call"], (f32(3), f32(6)), (f32(2), f32(6)), r"input A shape\[0\] violates .*n is int32, from 0 to")
    assert seen.calls[-1]["n"] == 0


def test_an_equation_with_two_unknowns_is_refused_when_compiling():
    m, n = Var("m", I32), Var("n", I32)
    with pytest.raises(ValueError, match=r"unable to solve variables \(m, n\)"):
        signature_of(program(tensor("A", (m + n,))))
    with pytest.raises(ValueError, match=r"unable to solve variables \(m\)"):
        signature_of(program(tensor("A", (4,)), tensor("B", (m,))), [1])


def test_symbols_bind_by_scalars_and_strides():
    m, s, n = Var("m", I32), Var("s", I32), Var("n", I32)
    fns, seen = build(program(tensor("A", (m, 4), strides=(s, 1)), n, tensor("B", (n,))))
    base = f32(6, 10)
    fns["call"](base[:, :4], 3, f32(3))
    assert (seen.calls[-1]["m"], seen.calls[-1]["s"]) == (6, 10)
    refused(fns["call"], (base[:, :4], 3, f32(3)), (base[:, :4], 3, f32(4)), r"input B shape\[0\] violates")
    refused(fns["call"], (base[:, :4], 3, f32(3)), (base[:, :8:2], 3, f32(3)), r"input A strides\[1\] violates")


@pytest.mark.spec("R4:strides")
def test_strides_of_unit_and_empty_dimensions_are_free():
    fns, _ = build(program(tensor("A", (1, 8), strides=(8, 1)), tensor("B", (3, 1))))
    odd = np.lib.stride_tricks.as_strided(f32(64), (1, 8), (4 * 64, 4))
    fns["call"](odd, np.lib.stride_tricks.as_strided(f32(8), (3, 1), (4, 4)))
    m = Var("m", I32)
    fns, seen = build(program(tensor("A", (m, 8), strides=(8, 1))))
    fns["call"](f32(16, 16)[:0, :8])
    assert seen.calls[-1]["m"] == 0


def test_dimensions_beyond_the_symbol_type_are_refused():
    m = Var("m", dtype("int8"))
    fns, _ = build(program(tensor("A", (m,))))
    refused(fns["call"], (f32(127),), (f32(128),), r"shape\[0\] violates .*m is int8")


@pytest.mark.spec("R4:dtype")
@pytest.mark.parametrize("declared, given, ok", [
    ("bool", np.bool_, True), ("bool", np.int8, True), ("bool", np.uint8, True), ("bool", np.int16, False),
    ("int32", np.uint32, False), ("uint8", np.int8, False), ("tfloat32", np.float32, True),
])
def test_dtype_tolerances(declared, given, ok):
    fns, _ = build(program(tensor("A", (4,), declared)))
    if ok:
        fns["call"](np.zeros(4, given))
    else:
        with pytest.raises(RuntimeError, match="dtype mismatch"):
            fns["call"](np.zeros(4, given))


def test_fp8_family_and_packed_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from tilelang.runtime.dlpack import Exported

    fns, _ = build(program(tensor("A", (4,), "float8_e4m3")))
    for name in ("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"):
        fns["call"](Exported(np.zeros(4, getattr(ml_dtypes, name))))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        fns["call"](Exported(np.zeros(4, ml_dtypes.float8_e5m2)))
    fns, _ = build(program(tensor("A", (2, 8), "int4")))
    fns["call"](np.zeros((2, 4), np.int8))  # two values a byte
    with pytest.raises(RuntimeError, match=r"shape\[1\] violates"):
        fns["call"](np.zeros((2, 8), np.int8))


def test_integer_scalars():
    n = Var("n", I32)
    fns, seen = build(program(tensor("A", (4,)), n))
    for x in (0, -1, True, 2**31 - 1, -2**31):
        fns["call"](f32(4), x)
        assert seen.calls[-1]["n"] == int(x)
    good = (f32(4), 1)
    refused(fns["call"], good, (f32(4), 2**31), "scalar n expected integer of int32", ValueError)
    refused(fns["call"], good, (f32(4), -2**31 - 1), "scalar n expected integer of int32", ValueError)
    for x in (1.0, None, "1", f32(4)):
        refused(fns["call"], good, (f32(4), x), "kernel main scalar n expected integer", TypeError)


@pytest.mark.spec("R4:scalar")
@pytest.mark.parametrize("name, low, high", [("int8", -128, 127), ("uint8", 0, 255), ("int64", -2**63, 2**63 - 1),
                                             ("uint32", 0, 2**32 - 1), ("uint64", 0, 2**63 - 1)])
def test_integer_scalar_ranges(name, low, high):
    fns, seen = build(program(tensor("A", (4,)), Var("n", dtype(name))))
    for x in (low, high):
        fns["call"](f32(4), x)
        assert seen.calls[-1]["n"] == x
    for x in (low - 1,) + ((high + 1,) if "64" not in name else ()):
        with pytest.raises((ValueError, TypeError)):
            fns["call"](f32(4), x)


def test_uint64_takes_large_values_as_pointers():
    fns, seen = build(program(tensor("A", (4,)), Var("n", dtype("uint64"))))
    fns["call"](f32(4), ctypes.c_void_p(2**64 - 2))
    assert seen.calls[-1]["n"] == -2


def test_float_and_bool_scalars():
    x, flag = Var("x", F32), Var("flag", BOOL)
    fns, seen = build(program(tensor("A", (4,)), x, flag))
    for given, want in ((2, 2.0), (0.5, 0.5), (True, 1.0), (float("inf"), float("inf"))):
        fns["call"](f32(4), given, True)
        assert seen.calls[-1]["x"] == want and seen.calls[-1]["flag"] == 1
    good = (f32(4), 1.0, False)
    refused(fns["call"], good, (f32(4), 1e39, False), "scalar x expected float of float32", ValueError)
    refused(fns["call"], good, (f32(4), None, False), "scalar x expected float", TypeError)
    refused(fns["call"], good, (f32(4), 1.0, 2), "scalar flag expected boolean", TypeError)
    refused(fns["call"], good, (f32(4), 1.0, 1.0), "scalar flag expected boolean", TypeError)


def test_pointers_take_tensors_and_addresses():
    p = Var("p", dtype("handle"))
    fns, seen = build(program(tensor("A", (4,)), p))
    b = f32(3)
    for x in (b, b.ctypes.data):
        fns["call"](f32(4), x)
        assert seen.calls[-1]["p"] == b.ctypes.data
    fns["call"](f32(4), None)
    assert seen.calls[-1]["p"] == 0
    with pytest.raises(RuntimeError, match="input p expected pointer or tensor handle"):
        fns["call"](f32(4), 1.5)


@pytest.mark.spec("R4:none")
def test_a_tensor_never_touched_may_be_none():
    m = Var("m", I32)
    a, b, c = tensor("A", (4,)), tensor("B", (m, 2)), tensor("C", (m,))
    fns, seen = build(program(a, b, c, touch=[a]))
    for x, y, want in ((f32(3, 2), None, 3), (None, f32(5), 5), (f32(4, 2), f32(4), 4)):
        fns["call"](f32(4), x, y)
        assert seen.calls[-1]["m"] == want
    with pytest.raises(RuntimeError, match=r"Symbolic shape variable m requires at least one non-null buffer among: "
                                           r"main\.B, main\.C"):
        fns["call"](f32(4), None, None)
    with pytest.raises(RuntimeError, match=r"input C shape\[0\] violates"):
        fns["call"](f32(4), f32(3, 2), f32(4))
    with pytest.raises(RuntimeError, match="input B ndim mismatch"):
        fns["call"](f32(4), f32(3), None)


class NoMemory:
    """A one-dimensional float32 tensor of n elements whose data pointer is null."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                    ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                    ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                    ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

    def __init__(self, n):
        self.extents, self.steps = (ctypes.c_int64 * 1)(n), (ctypes.c_int64 * 1)(1)
        self.tensor = self.Tensor(None, (ctypes.c_int32 * 2)(1, 0), 1, 2, 32, 1, self.extents, self.steps, 0, None, None)

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.spec("R4:null")
def test_a_tensor_without_memory():
    m = Var("m", I64)
    fns, seen = build(program(tensor("A", (m,))))
    nothing, some = NoMemory(0), NoMemory(3)
    refused(fns["call"], (f32(3),), (some,), "input A data pointer is NULL")
    fns["call"](nothing)  # there is nothing to read
    assert len(seen.calls) == 2


@pytest.mark.spec("R4:offset", "R4:null")
def test_misaligned_and_empty_data():
    m = Var("m", I64)
    fns, _ = build(program(tensor("A", (m,))), align=16)
    base = f32(64)
    start = (-base.ctypes.data % 16) // 4
    fns["call"](base[start:start + 8])
    refused(fns["call"], (base[start:start + 8],), (base[start + 1:start + 9],),
            "input A byte_offset violates packed ABI constraint: its data must be aligned to 16 bytes")
    fns["call"](base[start + 1:start + 1])  # nothing is read from an empty tensor


def test_outputs_given_and_reported():
    m = Var("m", I32)
    fns, seen = build(program(tensor("A", (m, 3)), tensor("B", (2 * m + 1, 3)), tensor("C", (m,))), [2, 1])
    a, b, c = f32(4, 3), f32(9, 3), f32(4)
    fns["full"](a, c, b)  # inputs, then outputs as they are returned
    assert (seen.calls[-1]["B"], seen.calls[-1]["C"]) == (b.ctypes.data, c.ctypes.data)
    room = (ctypes.c_int64 * 4)()
    fns["check"](a, ctypes.addressof(room))
    assert list(room) == [4, 9, 3, 4]


def test_outputs_come_from_torch_for_torch_inputs():
    torch = pytest.importorskip("torch")
    m = Var("m", I32)
    fns, seen = build(program(tensor("A", (m, 3)), tensor("B", (2 * m + 1, 3), "bfloat16"), tensor("C", (m,))), [2, 1])
    out = list(fns["call"](torch.zeros(4, 3)))
    assert [tuple(o.shape) for o in out] == [(4,), (9, 3)] and out[1].dtype == torch.bfloat16
    assert all(isinstance(o, torch.Tensor) for o in out)
    assert seen.calls[-1]["C"] == out[0].data_ptr()


@pytest.mark.spec("R2.1:compile")
@pytest.mark.parametrize("out_idx, message", [
    ((1,), "list of integers"), ("1", "list of integers"), (1.0, "list of integers"), ([True], "list of integers"),
    ([3], "between -3 and 2"), ([-4], "out of range"), ([1, -2], "twice"), ([2], "not a tensor"),
])
def test_bad_out_idx(out_idx, message):
    func = program(tensor("A", (4,)), tensor("B", (4,)), Var("n", I32))
    with pytest.raises(ValueError, match=message):
        signature_of(func, out_idx)


def test_out_idx_conflicts_and_rank():
    func = program(tensor("A", (4,)), tensor("B", (4,)), facts=FuncFacts(out_idx=(-1,)))
    assert signature_of(func).out_idx == (1,)
    with pytest.raises(ValueError, match="Out index conflict"):
        signature_of(func, [0])
    with pytest.raises(ValueError, match="no dimensions"):
        signature_of(program(tensor("A", (4,)), tensor("B", ())), [1])
    with pytest.raises(ValueError, match="not compact"):
        signature_of(program(tensor("A", (4,)), tensor("B", (4, 4), strides=(8, 1))), [1])
