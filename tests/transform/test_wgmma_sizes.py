"""wgmma out of T.gemm for every type: all N, operands from registers, both orders, each against exact sums."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import AddressOf, dtype, numpy_dtype, walk
from tilelang.ir.expr import Call
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.target.wgmma import wgmma_sizes
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
E4, E5 = "float8_e4m3fn", "float8_e5m2"
TYPES = {"f16": ("float16", "float16", "float32"), "f16_f16": ("float16", "float16", "float16"),
         "bf16": ("bfloat16", "bfloat16", "float32"), "tf32": ("float32", "float32", "float32"), "e4m3": (E4, E4, "float32"),
         "e5m2_e4m3": (E5, E4, "float32"), "s8": ("int8", "int8", "int32"), "u8": ("uint8", "uint8", "int32")}


def product(types, n, registers=False, ta=False, tb=True):
    """64 rows by n columns; registers: A is read from a fragment."""
    a_type, b_type, acc = types
    k = 32 * 8 // dtype(a_type).bits
    a_shape, b_shape = (k, 64) if ta else (64, k), (n, k) if tb else (k, n)

    @T.prim_func
    def main(A: T.Tensor(a_shape, a_type), B: T.Tensor(b_shape, b_type), C: T.Tensor((64, n), acc)):
        with T.Kernel(1, threads=128):
            As, Ar = T.alloc_shared(a_shape, a_type), T.alloc_fragment(a_shape, a_type)
            Bs, F = T.alloc_shared(b_shape, b_type), T.alloc_fragment((64, n), acc)
            T.clear(F)
            for _ in T.Pipelined(1, num_stages=2):  # TMA rounds the tiles of a ring to tf32
                T.copy(A, As)
                T.copy(B, Bs)
                if registers:
                    T.copy(As, Ar)
                    T.gemm(Ar, Bs, F, transpose_B=tb)
                else:
                    T.gemm(As, Bs, F, transpose_A=ta, transpose_B=tb)
            T.copy(F, C)

    return main


def columns_of(types, n, registers=False, ta=False, tb=True):
    """N of the instructions that the product takes, after its result was compared."""
    low = lower(product(types, n, registers, ta, tb).func, SM90)
    calls = [x for x in walk(low.kernels[0].launch) if isinstance(x, Call)]
    assert not any(x.op == "mma" for x in calls), low.kernels[0].launch.plan.report
    rng, k = np.random.default_rng(n), 32 * 8 // dtype(types[0]).bits
    shapes = (k, 64) if ta else (64, k), (n, k) if tb else (k, n)
    a, b = (rng.integers(0 if "u" in t else -3, 4, s).astype(numpy_dtype(dtype(t))) for t, s in zip(types, shapes))
    got = run_device(low, {"A": a, "B": b, "C": np.zeros((64, n), numpy_dtype(dtype(types[2])))}).outputs["C"]
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    assert np.array_equal(got.astype(np.float64), (wide_a.T if ta else wide_a) @ (wide_b.T if tb else wide_b))
    products = [x for x in calls if x.op == "wgmma"]
    assert all(isinstance(x.args[1], AddressOf) == registers for x in products)
    return {int(x.options.row.split("n")[1].split("k")[0]) for x in products}


@pytest.mark.parametrize("name", TYPES)
def test_every_size_and_operands_from_registers(name):
    """Every N from 8 to 256 with one of the types from shared memory and with another from registers."""
    types, turn = TYPES[name], [*TYPES].index(name)
    for n in range(8 + 8 * turn, 257, 8 * len(TYPES)):
        m = 8 + (n + 8 * 3 - 8) % 256
        for size, registers in ((n, False), (m, True)):
            if name == "tf32" and registers:
                continue  # a tile that threads read keeps its bits, which wgmma would cut: test_hopper_types.py
            taken = columns_of(types, size, registers)
            if size in wgmma_sizes(*types):
                assert taken == {size}
            else:  # sums of bytes have no instruction of every size: equal parts
                assert len(taken) == 1 and size % max(taken) == 0 and types[2] == "int32"


@pytest.mark.parametrize("types", [TYPES["f16"], TYPES["bf16"]], ids=["f16", "bf16"])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, False), (True, True)])
def test_both_orders_of_operands(types, ta, tb):
    assert columns_of(types, 40, ta=ta, tb=tb) == {40} and columns_of(types, 192, ta=ta, tb=tb) == {192}
    if not ta:
        assert columns_of(types, 40, registers=True, tb=tb) == {40}
