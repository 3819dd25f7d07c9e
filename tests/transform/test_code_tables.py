"""code_tables: values decoded from codes of four bits took twenty instructions each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import Call, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BOOK = [-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0]


def e2m1(x: Any) -> Any:
    e, mant = (x >> T.uint8(1)) & T.uint8(3), T.cast(x & T.uint8(1), "float16") * T.float16(0.5)
    power = T.cast(T.uint8(1) << (e - T.min(e, T.uint8(1))), "float16")
    size = T.if_then_else(e == T.uint8(0), mant, (T.float16(1) + mant) * power)
    return T.if_then_else(x >= T.uint8(8), -size, size)


def codebook(dtype: str) -> Callable[[Any], Any]:
    def value(x: Any) -> Any:
        out: Any = T.cast(BOOK[0], dtype)
        for k, v in enumerate(BOOK):
            out = T.if_then_else(x == T.uint8(k), T.cast(v, dtype), out)
        return out

    return value


def decoded(decode: Callable[[Any], Any], out: str, mask: int = 15) -> Any:
    @T.prim_func
    def main(B: T.Tensor((37, 24), "uint8"), W: T.Tensor((37, 48), out)):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(37, 48):
                x = (B[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(mask)
                W[i, j] = decode(x)

    return main


PROGRAMS = {"e2m1": (e2m1, "float16"), "codebook": (codebook("float16"), "float16"),
            "bfloat16": (codebook("bfloat16"), "bfloat16")}


def tables(program: Any, arch: str = "sm_90a") -> list[Call]:
    lowered = lower(program.func, Target({"kind": "cuda", "arch": arch}))
    return [x for x in walk(lowered.kernels[0].launch, Call) if x.op == "codes_taken"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_of_codes_are_looked_up(name: str, arch: str):
    program = decoded(*PROGRAMS[name])
    assert tables(program, arch)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": arch}))
    given = {"B": np.random.default_rng(0).integers(0, 256, (37, 24)).astype(np.uint8)}
    given["B"][0, :16] = np.arange(16) * 17
    given["W"] = np.zeros((37, 48), DTYPES[PROGRAMS[name][1]])
    expected, found = run_tile(program, given)["W"], run_device(lowered, given).outputs["W"]
    assert expected.tobytes() == found.tobytes()
    source = tilelang.compile(program, target={"kind": "cuda", "arch": arch}).get_kernel_source()
    assert nvrtc.compile_cubin(source, arch).bytes


def test_longer_codes_stay():
    assert not tables(decoded(e2m1, "float16", 31))


def packed(value: Callable[[Any, Any], Any], where: str, source: str = "uint8") -> Any:
    """Weights of 4 bits, decoded from codes that no variable holds, in shared memory; a table in memory."""
    @T.prim_func
    def main(B: T.Tensor((64, 32), source), V: T.Tensor((16,), "float16"), W: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            q, w = T.alloc_shared((64, 32), source), T.alloc_shared((64, 64), "float16")
            v = T.alloc_shared((16,), "float16")
            T.copy(B, q)
            T.copy(V, v)
            for i, j in T.Parallel(64, 64):
                w[i, j] = value((q[i, j // 2] >> T.cast(j % 2 * 4, source)) & T.cast(15, source), v if where == "shared" else V)
            T.copy(w, W)

    return main


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name, value, where, source", [
    ("arithmetic", lambda x, v: e2m1(x), "", "uint8"), ("shared", lambda x, v: v[x], "shared", "uint8"),
    ("global", lambda x, v: v[x] * T.float16(2), "global", "uint8"), ("signed", lambda x, v: v[x], "shared", "int8"),
    ("short", lambda x, v: T.cast(x, "float16") - T.float16(8), "", "uint8")])
def test_codes_of_no_variable_and_tables_in_memory_took_a_load_each(name: str, value: Any, where: str, source: str, arch: str):
    program = packed(value, where, source)
    assert tables(program, arch)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": arch}))
    given = {"B": np.random.default_rng(0).integers(0, 256, (64, 32)).astype(np.uint8).view(source),
             "V": np.array(BOOK, np.float16), "W": np.zeros((64, 64), np.float16)}
    expected, found = run_tile(program, given)["W"], run_device(lowered, given).outputs["W"]
    assert expected.tobytes() == found.tobytes()
    source = tilelang.compile(program, target={"kind": "cuda", "arch": arch}).get_kernel_source()
    assert nvrtc.compile_cubin(source, arch).bytes


def test_a_table_that_the_loop_writes_is_not_taken_ahead():
    @T.prim_func
    def main(B: T.Tensor((4,), "uint8"), W: T.Tensor((8,), "float16")):
        with T.Kernel(1, threads=1):
            q, w = T.alloc_local((4,), "uint8"), T.alloc_local((8,), "float16")
            v = T.alloc_shared((16,), "float16")
            for i in T.serial(16):
                v[i] = T.cast(i, "float16")
            for i in T.serial(4):
                q[i] = B[i]
            for j in T.unroll(8):
                w[j] = v[(q[j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15)]
                v[j] = w[j] + T.float16(1)
            for j in T.serial(8):
                W[j] = w[j]

    given = {"B": np.array([0x10, 0x21, 0x10, 0x32], np.uint8), "W": np.zeros(8, np.float16)}
    assert not tables(main)
    lowered = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    want, got = run_tile(main, given)["W"], run_device(lowered, given).outputs["W"]
    assert np.array_equal(want, got)


def test_a_value_that_another_variable_decides_too_stays():
    @T.prim_func
    def main(B: T.Tensor((64,), "uint8"), S: T.Tensor((64,), "float16"), W: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                x = B[i] & T.uint8(15)
                W[i] = T.if_then_else(x > T.uint8(3), S[i], T.cast(x, "float16")) * T.float16(2) + T.float16(1) - S[0]

    assert not tables(main)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_tables_on_the_gpu(name: str):
    import torch

    program = decoded(*PROGRAMS[name])
    codes = np.arange(37 * 24).reshape(37, 24).astype(np.uint8)
    dtype = getattr(torch, PROGRAMS[name][1])
    expected, found = torch.zeros(37, 48, dtype=dtype), torch.zeros(37, 48, dtype=dtype, device="cuda")
    tilelang.compile(program, target="cpu")(torch.from_numpy(codes), expected)
    tilelang.compile(program)(torch.from_numpy(codes).cuda(), found)
    assert torch.equal(expected, found.cpu())


@pytest.mark.parametrize("lanes", [2, 8, 16])
@pytest.mark.parametrize("table", [False, True])
def test_codes_were_taken_in_front_of_the_loop_that_stores_them(lanes: int, table: bool):
    @T.prim_func
    def main(X: T.Tensor((32, lanes // 2), "uint8"), V: T.Tensor((16,), "float16"), W: T.Tensor((32, lanes), "float16")):
        with T.Kernel(1, threads=32):
            q, book, t = T.alloc_local((lanes // 2,), "uint8"), T.alloc_shared((16,), "float16"), T.get_thread_binding()
            T.copy(V, book)
            for v in T.unroll(lanes):
                q[v // 2] = X[t, v // 2]
                x = (q[v // 2] >> (v % 2 * 4)) & 15
                W[t, v] = book[T.cast(x, "int32")] if table else e2m1(T.cast(x, "uint8"))

    rng = np.random.default_rng(4)
    given = {"X": rng.integers(0, 256, (32, lanes // 2)).astype(np.uint8), "V": np.array(BOOK, np.float16),
             "W": np.zeros((32, lanes), np.float16)}
    device = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
    assert np.array_equal(run_device(device, given).outputs["W"], run_tile(main.func, given)["W"])


@pytest.mark.parametrize("lanes", [2, 8])
@pytest.mark.parametrize("own", [False, True])
def test_codes_named_by_a_variable_of_the_loop_were_taken_in_front_of_it(lanes: int, own: bool):
    @T.prim_func
    def main(X: T.Tensor((32, 64), "uint8"), P: T.Tensor((64,), "int32"), W: T.Tensor((32, lanes), "float16")):
        with T.Kernel(1, threads=32):
            q, t = T.alloc_local((64,), "uint8"), T.get_thread_binding()
            for v in T.unroll(64):
                q[v] = X[t, v]
            for v in T.unroll(lanes):
                place = P[v if own else 1]
                W[t, v] = e2m1((q[place if own else place * 4 + v // 2] >> (v % 2 * 4)) & 15)

    rng = np.random.default_rng(5)
    given = {"X": rng.integers(0, 256, (32, 64)).astype(np.uint8), "P": rng.integers(0, 12, 64).astype(np.int32),
             "W": np.zeros((32, lanes), np.float16)}
    device = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
    assert np.array_equal(run_device(device, given).outputs["W"], run_tile(main.func, given)["W"])
