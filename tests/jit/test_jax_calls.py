"""Kernels called by XLA: an exported library's handler on a call frame made by hand, and jax_call where JAX is installed."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import tilelang
import tilelang.language as T

I32, I64, P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class Record(ctypes.Structure):
    """Base of the records below."""

    _fields_ = [("struct_size", I64), ("extension", P)]


class Buffer(Record):
    _fields_ = [("dtype", I32), ("data", P), ("rank", I64), ("dims", ctypes.POINTER(I64))]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", I32), ("value", P)]


class Values(Record):
    _fields_ = [("size", I64), ("types", P), ("values", ctypes.POINTER(P))]


class Attributes(Record):
    _fields_ = [("size", I64), ("types", P), ("names", P), ("values", ctypes.POINTER(P))]


class Failure(Record):
    _fields_ = [("message", ctypes.c_char_p), ("code", I32)]


CREATE = ctypes.CFUNCTYPE(P, ctypes.POINTER(Failure))


class Api(Record):
    _fields_ = [("version", I64 * 3), ("internal", P), ("create", CREATE), ("rest", P * 8)]


class Call(Record):
    _fields_ = [("api", ctypes.POINTER(Api)), ("context", P), ("stage", I32), ("args", Values), ("rets", Values),
                ("attrs", Attributes)]


class Metadata(Record):  # its second word is the size of the version record
    _fields_ = [("unused", P), ("major", I32), ("minor", I32), ("traits", ctypes.c_uint32)]


class Extension(ctypes.Structure):
    _fields_ = [("struct_size", I64), ("type", I32), ("next", P), ("metadata", ctypes.POINTER(Metadata))]


CODES = {np.dtype(t): c for t, c in (("float32", 11), ("float64", 12), ("int32", 4), ("int64", 5), ("bool", 1))}


def call_of(arrays, results, numbers, stage=3):
    """A call frame, the errors that its call makes, and what must live as long."""
    errors, keep = [], []

    def create(failure):
        errors.append((failure.contents.code, failure.contents.message.decode()))
        return 77

    def values(kind, items):
        array = (P * max(1, len(items)))(*(ctypes.addressof(x) for x in items))
        keep.extend([array, *items])
        return kind(size=len(items), values=array)

    def buffer(a):
        return Buffer(dtype=CODES[a.dtype], data=a.ctypes.data, rank=a.ndim, dims=(I64 * max(1, a.ndim))(*a.shape))

    def scalar(x):
        keep.append(np.array(x))
        return Scalar(CODES[keep[-1].dtype], keep[-1].ctypes.data)

    api = Api(create=CREATE(create))
    keep.append(api)
    return Call(api=ctypes.pointer(api), stage=stage, args=values(Values, [*map(buffer, arrays)]),
                rets=values(Values, [*map(buffer, results)]),
                attrs=values(Attributes, [scalar(v) for _, v in sorted(numbers.items())])), errors, keep


def blend():
    m = T.dynamic("m")

    @T.prim_func
    def blend(A: T.Tensor((m, 33), "float32"), z: T.float32, S: T.Tensor((m,), "int32"), B: T.Tensor((m, 33), "float32"),
              a: T.int32, flag: T.bool):
        with T.Kernel(m, threads=32) as x:
            for j in T.Parallel(33):
                B[x, j] = A[x, j] * z + a + T.if_then_else(flag, 1000, 0)
            S[x] += a

    return blend


@needs_compiler
def test_the_handler_of_a_library_runs_a_call_frame(tmp_path):
    """Results: the output B, then S, which the kernel writes; both buffers of S are the same memory."""
    library = ctypes.CDLL(str(tilelang.compile(blend(), out_idx=[3], target="cpu").export(tmp_path)))
    library.blend_xla.restype, library.blend_xla.argtypes = P, [P]
    a, s = np.arange(5 * 33, dtype=np.float32).reshape(5, 33), np.arange(5, dtype=np.int32)
    b = np.zeros_like(a)
    numbers = {"a": np.int64(7), "z": np.float64(0.5), "flag": np.bool_(True)}

    def run(arrays, results, numbers, stage=3):
        frame, errors, keep = call_of(arrays, results, numbers, stage)
        assert (library.blend_xla(ctypes.addressof(frame)) is not None) == bool(errors)
        return errors

    assert run((a, s), (b, s), numbers) == []
    assert np.array_equal(b, a * 0.5 + 1007) and s.tolist() == [7, 8, 9, 10, 11]
    assert run((a, s), (b, s), numbers, stage=1) == [] and s[0] == 7  # of another stage: nothing runs
    assert run((a, s), (b,), numbers) == [(3, "kernel blend takes 2 results")]
    assert run((a,), (b, s), numbers) == [(3, "kernel blend takes 2 tensors")]
    assert run((a, s), (b, s), {"a": 1}) == [(3, "kernel blend takes 3 attributes")]
    assert run((a, s), (b, s), {**numbers, "a": np.float64(1)}) == [
        (3, "kernel blend scalar a expected an attribute of type int64")]
    assert run((a[:4], s), (b, s), numbers) == [(3, "kernel blend input S shape[0] violates packed ABI constraint, expected m")]
    assert run((a.astype(np.float64), s), (b, s), numbers) == [(3, "kernel blend input A dtype mismatch, expected float32")]
    assert run((a.ravel(), s), (b, s), numbers) == [(3, "kernel blend input A ndim mismatch, expected 2")]
    assert np.array_equal(b, a * 0.5 + 1007) and s[0] == 7
    metadata = Metadata()
    extension = Extension(type=1, metadata=ctypes.pointer(metadata))
    frame = Call(extension=ctypes.addressof(extension))
    assert library.blend_xla(ctypes.addressof(frame)) is None and (metadata.major, metadata.minor) == (0, 1)


@needs_compiler
def test_kernels_that_xla_has_no_types_for_have_no_handler(tmp_path):
    @T.prim_func
    def packed(A: T.Tensor((64,), "int4"), B: T.Tensor((64,), "int8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[i] = A[i]

    kernel = tilelang.compile(packed, target="cpu")
    library = ctypes.CDLL(str(kernel.export(tmp_path)))
    assert hasattr(library, "packed") and not hasattr(library, "packed_xla")
    a, b = (np.arange(32) * 7 % 256).astype(np.uint8).view(np.int8), np.zeros(64, np.int8)
    assert library.packed(P(a.ctypes.data), P(b.ctypes.data)) == 0
    assert b.reshape(32, 2).tolist() == [[(x & 15 ^ 8) - 8, x >> 4] for x in a.tolist()]
    with pytest.raises(NotImplementedError, match="has no compiled code that C programs could call"):
        tilelang.jax_call(tilelang.compile(packed, target="cpu", execution_backend="tile"))(a, b)
    with pytest.raises(ValueError, match="`A` of kernel packed has a type that XLA does not have"):
        tilelang.jax_call(kernel)(a, b)


OFFSETS = r"""
#include <stdbool.h>
#include "xla/ffi/api/c_api.h"
#define AT(type, field, n) _Static_assert(offsetof(type, field) == n, #field)
AT(XLA_FFI_CallFrame, extension_start, 8); AT(XLA_FFI_CallFrame, api, 16); AT(XLA_FFI_CallFrame, ctx, 24);
AT(XLA_FFI_CallFrame, stage, 32); AT(XLA_FFI_CallFrame, args, 40); AT(XLA_FFI_CallFrame, rets, 80);
AT(XLA_FFI_CallFrame, attrs, 120); AT(struct XLA_FFI_Args, size, 16); AT(struct XLA_FFI_Args, args, 32);
AT(struct XLA_FFI_Rets, rets, 32);
AT(struct XLA_FFI_Attrs, attrs, 40); AT(struct XLA_FFI_Buffer, dtype, 16); AT(struct XLA_FFI_Buffer, data, 24);
AT(struct XLA_FFI_Buffer, rank, 32); AT(struct XLA_FFI_Buffer, dims, 40); AT(XLA_FFI_Scalar, value, 8);
AT(XLA_FFI_Api, XLA_FFI_Error_Create, 48); AT(XLA_FFI_Api, XLA_FFI_Stream_Get, 80);
AT(struct XLA_FFI_Error_Create_Args, message, 16); AT(struct XLA_FFI_Error_Create_Args, errc, 24);
AT(struct XLA_FFI_Stream_Get_Args, ctx, 16); AT(struct XLA_FFI_Stream_Get_Args, stream, 24);
AT(struct XLA_FFI_Metadata_Extension, metadata, 24); AT(struct XLA_FFI_Metadata, traits, 32);
AT(struct XLA_FFI_Metadata, api_version.major_version, 24);
"""


@needs_compiler
def test_the_offsets_are_those_of_the_header(tmp_path):
    jax = pytest.importorskip("jax")
    (tmp_path / "offsets.c").write_text(OFFSETS)
    subprocess.run(["cc", "-std=c11", "-c", f"-I{jax.ffi.include_dir()}", "offsets.c"], cwd=tmp_path, check=True)


def test_jax_calls_a_kernel_in_a_compiled_function():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    call = tilelang.jax_call(tilelang.compile(blend(), out_idx=[3], target="cpu"))
    a, s = jnp.arange(5 * 33, dtype=jnp.float32).reshape(5, 33), jnp.arange(5)
    for function in (lambda a, s: call(a, 0.5, s, 7, True), jax.jit(lambda a, s: call(a * 1, 0.5, s + 0, 7, True))):
        b, t = function(a, s)
        assert np.array_equal(b, np.asarray(a) * 0.5 + 1007) and t.tolist() == [7, 8, 9, 10, 11]
    assert s.tolist() == [0, 1, 2, 3, 4]  # arrays of JAX are values
    both = jax.vmap(lambda a: call(a, 1.0, s, 1, False)[0])(jnp.stack([a, a + 1]))
    assert np.array_equal(both[1], np.asarray(a) + 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"input S shape\[0\] violates"):
        call(a[:4], 0.5, s, 7, True)
    with pytest.raises(ValueError, match="`z` of kernel blend is no number while JAX traces"):
        jax.jit(call)(a, 0.5, s, 7, True)
    with pytest.raises(ValueError, match="kernel blend is given 2 arguments"):
        call(a, s)


class Foreign:
    """An array of a package with the namespace of the array API, whose from_dlpack copies, as JAX does for some memory."""

    def __init__(self, array):
        self.held, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **_):
        return self.held.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)

    def __array_namespace__(self):
        return Foreign

    @classmethod
    def from_dlpack(cls, x):
        return cls(np.from_dlpack(x).copy())

    @classmethod
    def asarray(cls, x):
        return cls(np.array(x))


def twice(element):
    @tilelang.jit
    def twice(X):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        Y = T.empty((N,), element)
        with T.Kernel(T.ceildiv(N, 32), threads=32) as bx:
            for i in T.Parallel(32):
                Y[bx * 32 + i] = X[bx * 32 + i] * 2
        return Y

    return twice


BACKENDS = [(None, "cpu"), ("tile", "cpu"), ("simulator", "sm_80")]


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend, target", BACKENDS)
def test_a_result_is_of_the_package_of_the_argument_once_it_is_written(backend, target, element):
    made = tilelang.jit(twice(element).func, execution_backend=backend, target=target)(Foreign(np.arange(40, dtype=np.float32)))
    assert type(made) is Foreign and (made.held == 2 * np.arange(40)).all() and made.held.dtype.name == element


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend, target", BACKENDS)
def test_arrays_of_jax_came_back_as_numpy(backend, target, element):
    jax = pytest.importorskip("jax")
    made = tilelang.jit(twice(element).func, execution_backend=backend, target=target)(jax.numpy.arange(40, dtype="float32"))
    assert isinstance(made, jax.Array) and (made == 2 * np.arange(40)).all() and made.dtype == element


def test_jax_calls_an_eager_function_for_the_shapes_it_meets():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @tilelang.jit(target="cpu")
    def pairs(X, scale: int = 2):
        N = T.const("N")
        X: T.Tensor((N,), "bfloat16")
        Y = T.empty((2 * N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                Y[2 * i] = X[i]
                Y[2 * i + 1] = X[i] * scale
        return Y

    call = jax.jit(tilelang.jax_call(pairs))
    for n in (5, 130):
        x = jnp.arange(n, dtype=jnp.bfloat16)
        want = np.asarray(x, np.float32)
        assert np.array_equal(call(x), np.stack([want, 2 * want], 1).ravel())


@needs_compiler
def test_jax_takes_the_handler_of_an_exported_library(tmp_path):
    jax = pytest.importorskip("jax")
    library = ctypes.CDLL(str(tilelang.compile(blend(), out_idx=[3], target="cpu").export(tmp_path, name="mix")))
    jax.ffi.register_ffi_target("mix", jax.ffi.pycapsule(library.mix_xla), platform="cpu")
    a, s = jax.numpy.ones((4, 33)), jax.numpy.arange(4)
    types = (jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct(s.shape, s.dtype))
    numbers = {"a": np.int64(2), "z": np.float64(3), "flag": np.bool_(False)}
    b, t = jax.ffi.ffi_call("mix", types, input_output_aliases={1: 1})(a, s, **numbers)
    assert np.array_equal(b, np.full((4, 33), 5.0)) and t.tolist() == [2, 3, 4, 5]


def test_other_packages_may_set_the_types_of_capsules(monkeypatch):
    """jax.ffi.pycapsule does: read-only arrays could not be passed any more after it."""
    shared = ctypes.pythonapi.PyCapsule_New
    monkeypatch.setattr(shared, "argtypes", (P, ctypes.c_char_p, ctypes.CFUNCTYPE(None, ctypes.py_object)))
    a = np.ones((2, 33), np.float32)
    a.flags.writeable = False
    b = tilelang.compile(blend(), out_idx=[3], target="cpu")(a, 2.0, np.zeros(2, np.int32), 1, False)
    assert (b == 3).all()
