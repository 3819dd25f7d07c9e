"""CUDA's library functions called by name: their values where no CUDA is, and that a device compiler knows each of them."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc
from tilelang.target.device_functions import _table

FLOATS = np.array([*np.linspace(-3, 3, 20), 0.5, 1.5, 2.5, -0.5, 1e9, -1e9, 2**31, 65520, 7e-6, 0, -0.0, 1e-40], np.float32)
CODES = np.array([0, 1, 2, 3, 5, 7, 8, 0x80000000, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF, 0x80, 0xFF00, 31, 32, 33] * 2, np.uint32)
HALF = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def called(name, result, *operands):
    """The values of one function on every execution.  operands: "A" floats, "C" codes, or a function of the thread."""
    @T.prim_func
    def f(A: T.Tensor((32,), "float32"), C: T.Tensor((32,), "uint32"), O: T.Tensor((32,), result)):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            O[t] = T.call_extern(result, name, *(x(A, C, t) for x in operands))

    out = everywhere(f, FLOATS, CODES)[2]
    cuda_text(f)
    return out


def a(A, C, t):
    return A[t]


def c(A, C, t):
    return C[t]


def integer(A, C, t):
    return T.reinterpret(C[t], "int32")


@pytest.mark.parametrize("mode, fn", [("rn", np.rint), ("rz", np.trunc), ("ru", np.ceil), ("rd", np.floor)])
def test_conversions_in_each_direction(mode, fn):
    got = called(f"__float2int_{mode}", "int32", a)
    assert np.array_equal(got, np.clip(fn(FLOATS.astype(np.float64)), -2**31, 2**31 - 1).astype(np.int64).astype(np.int32))
    wide = FLOATS.astype(np.float64)
    for kind, name in (("float16", "half"), ("bfloat16", "bfloat16")):
        got = called(f"__float2{name}_{mode}", kind, a)
        with np.errstate(over="ignore"):
            near = FLOATS.astype(HALF[kind])
        up, down = (np.nextafter(near, HALF[kind](s * np.inf)) for s in (1, -1))
        inward = np.where(wide > 0, down, up)
        want = {"rn": near, "ru": np.where(near.astype(np.float64) < wide, up, near),
                "rd": np.where(near.astype(np.float64) > wide, down, near),
                "rz": np.where(np.abs(near.astype(np.float64)) > np.abs(wide), inward, near)}[mode]
        assert np.array_equal(got, want), (kind, got, want)


def test_integer_and_bit_functions():
    assert np.array_equal(called("__popc", "int32", c), [bin(x).count("1") for x in CODES])
    assert np.array_equal(called("__clz", "int32", integer), [32 - int(x).bit_length() for x in CODES])
    assert np.array_equal(called("__ffs", "int32", integer), [(int(x) & -int(x)).bit_length() for x in CODES])
    assert np.array_equal(called("__brev", "uint32", c), [int(f"{x:032b}"[::-1], 2) for x in CODES])
    assert np.array_equal(called("__umulhi", "uint32", c, c), [int(x) * int(x) >> 32 for x in CODES])
    signed = [int(x) for x in CODES.view(np.int32)]
    assert np.array_equal(called("__mulhi", "int32", integer, integer), [x * x >> 32 for x in signed])
    for end, shift in (("l", 5), ("r", 5), ("l", 40), ("lc", 40), ("rc", 40), ("lc", 5)):
        by = min(shift, 32) if end[1:] else shift & 31
        both = [int(x) << 32 | 77 for x in CODES]
        want = [(x << by) >> 32 & 0xFFFFFFFF if end[0] == "l" else x >> by & 0xFFFFFFFF for x in both]
        got = called(f"__funnelshift_{end}", "uint32", lambda A, C, t: T.uint32(77), c, lambda A, C, t, s=shift: T.uint32(s))
        assert np.array_equal(got, want)
    picked = called("__byte_perm", "uint32", c, lambda A, C, t: T.uint32(0xA0B0C0D0), lambda A, C, t: T.uint32(0x7150))
    assert np.array_equal(picked, [0xA0 << 24 | (x >> 8 & 255) << 16 | 0xC0 << 8 | x & 255 for x in map(int, CODES)])
    dot = called("__dp4a", "int32", integer, integer, lambda A, C, t: 3)
    assert np.array_equal(dot, [3 + int((x.astype(np.int64) ** 2).sum()) for x in CODES.view(np.int8).reshape(32, 4)])


def test_reinterpretations_comparisons_and_loads():
    assert np.array_equal(called("__float_as_uint", "uint32", a), FLOATS.view(np.uint32))
    assert np.array_equal(called("__ldg", "float32", lambda A, C, t: T.address_of(A[31 - t])), FLOATS[::-1])
    assert np.array_equal(called("__saturatef", "float32", a), np.clip(FLOATS, 0, 1))
    assert np.array_equal(called("fmaxf", "float32", a, lambda A, C, t: T.float32(0.5)), np.maximum(FLOATS, 0.5))
    with np.errstate(over="ignore"):
        fused = (FLOATS.astype(np.float64) ** 2 + FLOATS).astype(np.float32)
    assert np.array_equal(called("__fmaf_rn", "float32", a, a, a), fused)
    # The type that the program gives the call is that of its value, also where the function's own differs.
    assert np.array_equal(called("__popc", "int64", lambda A, C, t: C[t]), [bin(x).count("1") for x in CODES])


def test_functions_of_a_warp_are_those_of_the_language():
    @T.prim_func
    def f(C: T.Tensor((64,), "int32"), O: T.Tensor((8, 64), "uint32"), S: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            O[0, t] = T.call_extern("uint32", "__match_any_sync", 0xFFFFFFFF, C[t] % 5)
            O[1, t] = T.call_extern("uint32", "__ballot_sync", T.uint32(0xFFFFFFFF), C[t] > 8)
            O[2, t] = T.cast(T.call_extern("int32", "__shfl_xor_sync", 0xFFFFFFFF, C[t], 3), "uint32")
            O[3, t] = T.cast(T.call_extern("int32", "__shfl_down_sync", 0xFFFFFFFF, C[t], 1, 16), "uint32")
            O[4, t] = T.cast(T.call_extern("int32", "__reduce_add_sync", 0xFFFFFFFF, C[t]), "uint32")
            O[5, t] = T.call_extern("uint32", "__activemask")
            T.call_extern("handle", "atomicAdd", T.address_of(S[0]), C[t])
            T.call_extern("handle", "__syncthreads")
            T.call_extern("handle", "__threadfence")
            T.call_extern("handle", "AtomicAdd", T.address_of(S[1]), 2)
            O[6, t] = T.cast(T.call_extern("int32", "__any_sync", 0xFFFFFFFF, C[t] == 40), "uint32")

    x = np.random.default_rng(1).permutation(64).astype(np.int32)
    _, o, s = everywhere(f, x)
    warps = x.reshape(2, 32)
    assert np.array_equal(o[0], [sum(1 << k for k in range(32) if w[k] % 5 == w[j] % 5) for w in warps for j in range(32)])
    assert np.array_equal(o[1], np.repeat([sum(1 << k for k in range(32) if w[k] > 8) for w in warps], 32))
    assert np.array_equal(o[2], warps[:, np.arange(32) ^ 3].ravel())
    lane = np.arange(32)
    assert np.array_equal(o[3], warps[:, np.where(lane % 16 < 15, lane + 1, lane)].ravel())
    assert np.array_equal(o[4], np.repeat(warps.sum(1), 32)) and np.all(o[5] == 0xFFFFFFFF) and list(s) == [x.sum(), 128]
    assert np.array_equal(o[6], np.repeat((warps == 40).any(1), 32))
    cuda_text(f)


@pytest.mark.parametrize("name", ("tl::fp8_e4m3_from_float", "cute::something"))
def test_functions_of_other_device_libraries_are_named(name):
    @T.prim_func
    def f(A: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            A[t] = T.call_extern("float32", name, A[t])

    with pytest.raises(TileLangError, match=name) as e:
        cuda_text(f)
    assert "T.cast" in str(e.value) or "T.import_source" in str(e.value)
    for on in EXECUTIONS:
        with pytest.raises(TileLangError, match="extern"):
            run(f, on=on, simulated=True)


TYPES = {"int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short", "int32": "int",
         "uint32": "unsigned", "int64": "long long", "uint64": "unsigned long long", "float32": "float", "float64": "double",
         "float16": "__half", "bfloat16": "__nv_bfloat16", "bool": "bool"}


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_the_device_compiler_knows_every_function_of_the_table():
    lines = []
    for name, forms in _table().items():
        for f in forms:
            args = ", ".join(f"p_{f.result} + t" if p == "*" else f"p_{p}[t]" for p in f.params)
            lines.append(f"p_{f.result}[t] = {name}({args});")
    params = ", ".join(f"{c}* p_{k}" for k, c in TYPES.items())
    text = "\n".join(["#include <cuda_fp16.h>", "#include <cuda_bf16.h>",
                      f'extern "C" __global__ void all_of_them({params}) {{ const int t = threadIdx.x;', *lines, "}"])
    assert len(lines) > 250
    nvrtc.compile_cubin(text, "sm_90a")
