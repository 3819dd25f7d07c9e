"""fetch_ahead: warps of sm_80 waited for the first operands behind the barrier of every iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered, ops

import tilelang.language as T
from tilelang.ir import For, walk
from tilelang.simulator import run_device, run_tile


def product(bm: int = 64, bn: int = 64, bk: int = 64, stages: int = 2, threads: int = 128, k: int = 200, k_first: bool = False,
            dtype: str = "float16", steps: Any = None, extra: bool = False) -> Any:
    m, n, acc = 72, 80, "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def main(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n) if k_first else (n, k), dtype), C: T.Tensor((m, n), acc),
             count: T.Tensor((1,), "int32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            a, b = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bk, bn) if k_first else (bn, bk), dtype)
            c = T.alloc_fragment((bm, bn), acc)
            T.clear(c)
            for i in T.Pipelined(T.ceildiv(k, bk) if steps is None else count[0], num_stages=stages):
                T.copy(A[by * bm, i * bk], a)
                T.copy(B[i * bk, bx * bn] if k_first else B[bx * bn, i * bk], b)
                T.gemm(a, b, c, transpose_B=not k_first)
                if extra:
                    for x, y in T.Parallel(bm, bn):
                        c[x, y] += 1
            T.copy(c, C[by * bm, bx * bn])

    return main


def turned(program: Any, arch: str = "sm_80") -> list[bool]:
    """Of each loop with MMAs: whether a wait stands in front of its last ones."""
    (kernel,) = lowered(program, arch).kernels
    loops = [s for s in walk(kernel.launch, For) if s.kind == "serial" and "mma" in ops(s)]
    return [ops(s).index("mma") < max((k for k, x in enumerate(ops(s)) if x == "sync_threads"), default=-1) for s in loops]


@pytest.mark.parametrize("form", [
    {}, {"stages": 3}, {"k_first": True}, {"threads": 256}, {"threads": 256, "bk": 32, "stages": 4}, {"dtype": "bfloat16"},
    {"dtype": "int8", "bk": 128}, {"k": 64}, {"steps": 0}, {"steps": 3}, {"k": 120, "stages": 3}], ids=str)
def test_operands_of_the_next_iteration_are_loaded_under_the_last_mmas(form: dict[str, Any]):
    program, rng = product(**form), np.random.default_rng(1)
    assert turned(program) in ([True], [])  # no loop is left of one iteration
    given = {b.name: rng.integers(-3, 4, b.shape).astype(np.float32 if "float" in str(b.dtype) else np.int8)
             for b in program.buffer_map.values()}
    given = {name: np.asarray(x, dtype=run_type(program, name)) for name, x in given.items()}
    given["count"] = np.array([form.get("steps") or 0], np.int32)
    want, got = run_tile(program, given), run_device(lowered(program, "sm_80"), given).outputs
    np.testing.assert_array_equal(got["C"], want["C"])


def run_type(program: Any, name: str) -> Any:
    import ml_dtypes

    found = next(str(b.dtype) for b in program.buffer_map.values() if b.name == name)
    return ml_dtypes.bfloat16 if found == "bfloat16" else found


@pytest.mark.parametrize("form", [{"bk": 32}, {"bk": 16, "threads": 256}, {"extra": True}, {"bm": 128, "bn": 192, "bk": 64},
                                  {"dtype": "float32", "bk": 32}], ids=str)
def test_other_loops_keep_their_order(form: dict[str, Any]):
    assert turned(product(**form)) == [False]

