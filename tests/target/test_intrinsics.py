"""Meanings of scalar intrinsics against Python's own functions, and completeness of the table."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from tilelang.codegen.device.page import Page
from tilelang.codegen.cuda.printer import KernelPrinter
from tilelang.ir import Launch, const, fresh, seq
from tilelang.target import INTRINSICS
from tilelang.target.intrinsics import PURE

UNARY = ["exp", "exp2", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin",
         "acos", "atan", "asinh", "atanh", "erf", "floor", "ceil", "trunc", "fabs"]


@pytest.mark.parametrize("name", UNARY)
def test_unary_meaning(name):
    x = np.array([0.125, 0.5, 0.75], np.float32)
    want = [getattr(math, name)(float(v)) for v in x]
    np.testing.assert_allclose(INTRINSICS[name].reference(x), want, rtol=1e-6)


def test_rounding_functions():
    x = np.array([0.5, 1.5, -2.5, 0.49999997, -0.49999997, 8388609.0], np.float32)
    np.testing.assert_array_equal(INTRINSICS["round"].reference(x), [1, 2, -3, 0, -0.0, 8388609])
    np.testing.assert_array_equal(INTRINSICS["nearbyint"].reference(x), [0, 2, -2, 0, -0.0, 8388609])


@pytest.mark.parametrize("dt", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_bit_counts(dt):
    info = np.iinfo(dt)
    x = np.array([0, 1, 2, 77, info.max, info.min], dt)
    bits = [int(v) & (2**info.bits - 1) for v in x]
    assert INTRINSICS["popcount"].reference(x).tolist() == [b.bit_count() for b in bits]
    assert INTRINSICS["clz"].reference(x).tolist() == [info.bits - b.bit_length() for b in bits]


def test_find_functions():
    assert INTRINSICS["__ffs"].reference(np.array([0, 1, 8, -(2**31)], np.int32)).tolist() == [0, 1, 4, 32]
    fns = INTRINSICS["__fns"].reference
    assert [int(fns(np.uint32(0b1010), b, n)) for b, n in ((0, 1), (0, 2), (3, -1), (1, 0), (0, 3))] == \
        [1, 3, 3, 1, 0xFFFFFFFF]


@pytest.mark.parametrize("op, args", [("ieee_add", (1.0, 2.0**-30)), ("ieee_mul", (1.1, 1.3)),
                                      ("ieee_fdiv", (1.0, 3.0)), ("ieee_fsqrt", (2.0,)),
                                      ("ieee_fmaf", (1.1, 1.3, 0.7))])
def test_ieee_modes_bracket_the_exact_result(op, args):
    args = tuple(np.float32(a) for a in args)
    f = INTRINSICS[op].reference
    rn, rz, ru, rd = (float(f(*args, rounding_mode=m)) for m in ("rn", "rz", "ru", "rd"))
    assert rd < ru and rd <= rn <= ru and rz == (rd if rn > 0 else ru)
    assert np.nextafter(np.float32(rd), np.float32(np.inf)) == np.float32(ru)


def test_fused_multiply_add_is_computed_in_its_own_type():
    assert INTRINSICS["ieee_fmaf"].cuda["float32"].startswith("__fmaf_{rounding_mode}(")
    assert INTRINSICS["ieee_fmaf"].cuda["float64"].startswith("__fma_{rounding_mode}(")


IN_STORES = ("pack_pairs", "codes_taken", "dequantise_pair")  # codegen/cuda prints the store around them
REPLACED = ("combine_operand",)  # by the lowering of the tile op around them
OF_NVSHMEM = ("by_nvshmem", "pe_barrier")  # a branch, and what stands in the side of it that is not printed
OF_AMD = ("wait_loads", "wait_shared", "wave_priority", "loads_between", "lanes_transposed")


@dataclass
class Kernel:
    name: str
    params: tuple
    launch: Launch


def test_every_pure_row_has_text():
    launch = Launch((const(1),), (fresh("bx"),), (32, 1, 1), (fresh("tx"), fresh("ty"), fresh("tz")), seq())
    special = KernelPrinter(Kernel("empty", (), launch), Page("empty", False), False).calls.special
    for row in INTRINSICS.values():
        assert row.cuda or row.name in (*IN_STORES, *REPLACED, *OF_NVSHMEM, *OF_AMD) or row.name in special, row.name
        if row.effect == PURE and row.reference is None and row.name not in (*REPLACED, *OF_NVSHMEM):
            assert row.name in ("reinterpret", "to_tf32", "assume", "in_warp_groups", "cluster_rank",
                                "cluster_size", "world_rank", "world_size", "remote_address", "wgmma_descriptor",
                                "tensor_map") or row.name.startswith("get_")
