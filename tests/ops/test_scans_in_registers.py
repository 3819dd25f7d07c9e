"""Scans of fragments and of tiles in shared memory run in registers: every distribution, direction and type has the reference's
result, and a row that many threads hold is not passed through shared memory."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import numpy_dtype
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM80, SM90A = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a"))
OPS = {"sum": T.cumsum, "prod": T.cumprod, "max": T.cummax, "min": T.cummin}


def program(shape, dim, how, kind="sum", reverse=False, dtype="int32", threads=128):
    """how: source and result, each in shared memory (s) or a fragment (f), or i for a result in place."""
    @T.prim_func
    def kernel(X: T.Tensor(shape, dtype), Y: T.Tensor(shape, dtype)):
        with T.Kernel(1, threads=threads):
            a = T.alloc_shared(shape, dtype) if how[0] == "s" else T.alloc_fragment(shape, dtype)
            b = a if how[1] == "i" else T.alloc_shared(shape, dtype) if how[1] == "s" else T.alloc_fragment(shape, dtype)
            T.copy(X, a)
            OPS[kind](a, b, dim=dim, reverse=reverse)
            T.copy(b, Y)

    return kernel


def values(kind, dtype, shape):
    """Numbers whose scans are exact in any order."""
    rng, negative = np.random.default_rng(len(shape)), not dtype.startswith("uint")
    if kind == "prod":
        return np.where(rng.random(shape) < 0.95, 1, -1 if negative else 2).astype(numpy_dtype(dtype))
    low, high = {"sum": (-2, 3)}.get(kind, (-100, 100))
    return rng.integers(low if negative else 0, high, shape).astype(numpy_dtype(dtype))


def agree(f, kind="sum", targets=(SM80, SM90A)):
    func = f.func
    args = {b.name: values(kind, str(b.dtype), b.shape) for _, b in func.buffers}
    want = run_tile(func, args)
    for target in targets:
        lowered = lower(func, target)
        for name, got in run_device(lowered, args, check=True).outputs.items():
            np.testing.assert_array_equal(got, want[name], err_msg=f"{target}: {name}")
    return print_kernel(lowered.kernels[0])


@pytest.mark.parametrize("shape", [(20, 2, 6), (10, 2, 12)])
def test_lanes_of_a_line_lie_in_one_warp(shape):
    """12 and 24 do not divide 32: the second lane of a pair would be asked of another warp."""
    agree(program(shape, 1, "ff"))


@pytest.mark.parametrize("shape,dim", [((300,), 0), ((1, 257), 1), ((5, 1000), 1), ((64, 48), 1), ((64, 48), 0), ((7, 33), 0),
                                       ((3, 4, 130), 2), ((3, 70, 4), 1), ((200, 3), 0), ((1, 9000), 1)])
@pytest.mark.parametrize("threads,reverse", [(128, False), (96, True), (48, False), (64, True)])
def test_lines_of_any_length_and_threads_of_any_number(shape, dim, threads, reverse):
    for how in ("ss", "fi") if max(shape) < 9000 else ("si",):
        agree(program(shape, dim, how, threads=threads, reverse=reverse), targets=(SM90A,))


@pytest.mark.parametrize("how", ["si", "sf", "fs", "ff"])
def test_source_and_result_of_any_scope(how):
    agree(program((3, 1040), 1, how))
    agree(program((40, 24), 0, how, reverse=True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", list(OPS))
def test_every_type_and_kind(dtype, kind):
    agree(program((1, 520), 1, "fi", kind, kind in ("max", "prod"), dtype), kind)


def test_a_row_of_a_fragment_stays_in_registers():
    text = agree(program((1, 2048), 1, "fi", dtype="float32", threads=256))
    assert text.count("exchange[") == 2 and "__shared__" in text and "a_scan" not in text


def test_a_result_beside_its_source_in_one_tile_is_not_read_after_it_is_written():
    @T.prim_func
    def kernel(X: T.Tensor((2, 600), "int32"), Y: T.Tensor((2, 600), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((2, 600), "int32")
            T.copy(X, s)
            T.cumsum(s[0:1, 0:560], s[0:1, 8:568], dim=1)
            T.copy(s, Y)

    agree(kernel)


def test_accumulators_are_scanned_along_both_dimensions():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), Y: T.Tensor((64, 64), "float32"),
               Z: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, d)
            T.cumsum(c, dim=1)
            T.copy(c, Y)
            T.cumsum(d, dim=0, reverse=True)
            T.copy(d, Z)

    agree(kernel)
