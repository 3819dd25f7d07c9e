"""Copies into LDS and guarded loads in the machine code of TileLang programs: right at any size, and their waits are needed."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import isa_decode
import isa_elf
import isa_hip
import isa_launch
import isa_machine
import numpy as np
import pytest

pytestmark = isa_hip.needs_zig
NOP = 0xBF800000


def scaled_product(m: Any, n: int, k: int, dt: str = "float16", threads: int = 64, between: bool = False) -> Any:
    """C = (A * S) B^T in tiles of 32 x 32 x 32.  between: the scaled tile goes through shared memory."""
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((m, k), dt), B: T.Tensor((n, k), dt), S: T.Tensor((k,), "float32"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=threads) as (bx, by):
            a, b = T.alloc_shared((32, 32), dt), T.alloc_shared((32, 32), dt)
            s, p = T.alloc_shared((32,), "float32"), T.alloc_shared((32, 32), dt)
            f, c = T.alloc_fragment((32, 32), dt), T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[by * 32, ko * 32], a)
                T.copy(B[bx * 32, ko * 32], b)
                T.copy(S[ko * 32], s)
                if between:
                    for i, j in T.Parallel(32, 32):
                        p[i, j] = a[i, j] * s[j]
                    T.gemm(p, b, c, transpose_B=True)
                else:
                    for i, j in T.Parallel(32, 32):
                        f[i, j] = a[i, j] * s[j]
                    T.gemm(f, b, c, transpose_B=True)
            T.copy(c, C[by * 32, bx * 32])

    return main


def plain_product(m: int, n: int, k: int) -> Any:
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[by * 64, ko * 32], a)
                T.copy(B[bx * 64, ko * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    return main


class Built:
    """A program lowered and compiled for a chip."""

    def __init__(self, program: Any, chip: str) -> None:
        import tilelang
        from tilelang.target import Target
        from tilelang.transform.pipeline import lower

        target = {"kind": "hip", "mcpu": f"gfx{chip}"}
        self.lowered = lower(program.func, Target(target), {})
        self.kernel = tilelang.compile(program, target=target)
        self.code = isa_elf.read(self.kernel._built.files["kernel.hsaco"])[self.lowered.kernels[0].name]

    def simulated(self, arrays: dict[str, Any]) -> Any:
        from tilelang.simulator import run_device

        return run_device(self.lowered, arrays)

    def run(self, arrays: dict[str, Any], code: Any = None) -> None:
        program = isa_machine.Program(code or self.code)
        host = isa_launch.Host(self.lowered, [(self.lowered.kernels[0], program)], arrays, None)
        host.run(self.lowered.host.body)


def numbers(m: int, n: int, k: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((m, k), (n, k)))
    return {"A": a, "B": b, "S": rng.integers(-2, 3, k).astype(np.float32), "C": np.full((m, n), np.nan, np.float32)}


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
@pytest.mark.parametrize("m, n, k, between", [(64, 32, 64, True), (33, 40, 72, False), (40, 33, 70, True)])
def test_tiles_of_any_size_reach_lds(m: int, n: int, k: int, between: bool, chip: str) -> None:
    """Full tiles, rows of a whole number of chunks, rows that are none: what lies outside of the tensors is 0."""
    built, arrays = Built(scaled_product(m, n, k, between=between), chip), numbers(m, n, k)
    want = (arrays["A"] * arrays["S"].astype(np.float16)).astype(np.float32) @ arrays["B"].T.astype(np.float32)
    np.testing.assert_array_equal(built.simulated({n: x.copy() for n, x in arrays.items()}).outputs["C"], want)
    built.run(arrays)
    np.testing.assert_array_equal(arrays["C"], want)
    text = built.kernel.get_kernel_source()
    assert ("cp_async_within<16>" in text) == (chip == "950" and k % 8 == 0)
    assert "cp_async_within<4>" in text  # 32 scales by 32 lanes, on every chip


def test_rows_of_an_unknown_number_reach_lds() -> None:
    """The bytes of A are not known: its descriptor begins in front of the first lane's place."""
    import tilelang.language as T

    m, n, k = T.dynamic("m"), 64, 64
    built, arrays = Built(plain_product(m, n, k), "950"), {x: y for x, y in numbers(45, n, k).items() if x != "S"}
    want = arrays["A"].astype(np.float32) @ arrays["B"].T.astype(np.float32)
    np.testing.assert_array_equal(built.simulated({n: x.copy() for n, x in arrays.items()}).outputs["C"], want)
    built.run(arrays)
    np.testing.assert_array_equal(arrays["C"], want)
    assert "tl::cp_async<16>" in built.kernel.get_kernel_source()


def lines(built: Built) -> list[isa_decode.Instruction]:
    found = []
    for i in isa_decode.Decoder(built.code.chip).all(built.code.code):
        found.append(i)
        if i.name == "s_endpgm":
            return found
    raise AssertionError("no end")


def test_copies_are_in_flight_under_the_products() -> None:
    """In the steady loop no wait for them stands between the copies and the end of the products; LLVM put one in front of the
    first load of LDS, and one that was too weak beside the copies, which it counted with those loads."""
    names = [(i.name, i.mods) for i in lines(Built(plain_product(256, 256, 256), "950"))]
    first = next(n for n, (name, _) in enumerate(names) if name == "s_barrier")
    copies = [n for n, (name, mods) in enumerate(names) if name.startswith("buffer_load") and mods["lds"] and n > first]
    products = [n for n, (name, _) in enumerate(names) if name.startswith("v_mfma") and n > copies[0]]
    waits = [n for n, (name, mods) in enumerate(names) if name == "s_waitcnt" and mods["vmcnt"] < 63 and n > copies[0]]
    assert len(copies) == 4 and sum(n < waits[0] for n in products) >= 8
    assert not any(name.startswith(("global_load", "ds_write")) for name, _ in names)


@pytest.mark.parametrize("chip", isa_decode.CHIPS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_guarded_loads_have_no_branch(zero: float, chip: str) -> None:
    """Beyond the tensor's bytes its descriptor gives 0, which -0.0 is not."""
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((77,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            t = T.get_thread_binding()
            B[t] = T.if_then_else(t < 77, A[t], zero)

    built = Built(main, chip)
    got = {"A": np.arange(1, 78, dtype=np.float32), "B": np.full(128, np.nan, np.float32)}
    built.run(got)
    np.testing.assert_array_equal(got["B"].view(np.int32), np.pad(got["A"], (0, 51), constant_values=zero).view(np.int32))
    names = [i.name for i in lines(built)]
    assert ("buffer_load_dword" in names and not any(re.match("s_cbranch|s_and_saveexec", n) for n in names)) == (
        np.signbit(zero) == 0)


# ---- faults planted in these binaries ------------------------------------------------------------------------------------


def changed(built: Built, address: int, word: int) -> Any:
    code = bytearray(built.code.code)
    code[address:address + 4] = word.to_bytes(4, "little")
    return dataclasses.replace(built.code, code=bytes(code))


def found(built: Built, want: np.ndarray, code: Any) -> str:
    arrays = numbers(*want.shape, 96)
    try:
        built.run(arrays, code)
    except isa_machine.Fault as fault:
        return str(fault)
    return "" if np.array_equal(arrays["C"], want) else "wrong"


def planted(built: Built) -> Iterator[tuple[isa_decode.Instruction, int]]:
    """Each wait and barrier removed, each wait for copies that lets one more run."""
    for i in lines(built):
        if i.name in ("s_waitcnt", "s_barrier"):
            yield i, NOP
        if i.name == "s_waitcnt" and i.mods["vmcnt"] < 63:
            vector = i.mods["vmcnt"] + 1
            yield i, 0xBF8C0000 | vector & 15 | vector >> 4 << 14 | i.words[0] & 0xF70


def test_a_wait_or_barrier_that_is_removed_or_weak_is_missed() -> None:
    """Only waits for LDS in front of a barrier may be more than this program needs: its values of LDS have been used."""
    m, n, k = 32, 32, 96
    built, arrays = Built(scaled_product(m, n, k, threads=128, between=True), "950"), numbers(m, n, k)
    want = (arrays["A"] * arrays["S"].astype(np.float16)).astype(np.float32) @ arrays["B"].T.astype(np.float32)
    assert found(built, want, built.code) == ""
    all_ = lines(built)
    behind = {i.address: j.name for i, j in itertools.pairwise(all_)}
    kinds = set()
    for i, word in planted(built):
        text = found(built, want, changed(built, i.address, word))
        spare = i.name == "s_waitcnt" and i.mods["vmcnt"] == 63 and behind[i.address] == "s_barrier"
        assert text or spare, (i.text, hex(word))
        kinds.add((i.name, i.mods["vmcnt"] < 63 if i.name == "s_waitcnt" else None, word == NOP) if text else None)
    wait = "s_waitcnt"
    assert {(wait, True, True), (wait, True, False), (wait, False, True), ("s_barrier", None, True)} <= kinds


@pytest.mark.parametrize("chip", ["90a", "942"])
def test_a_missing_wait_for_a_copy_of_4_bytes_is_found(chip: str) -> None:
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((4, 128), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            t, s, c = T.get_thread_binding(), T.alloc_shared((128,), "float32"), T.alloc_local((1,), "float32")
            c[0] = 0.0
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, 0], s)
                c[0] += s[127 - t]
            B[t] = c[0]

    built, a = Built(main, chip), np.arange(512, dtype=np.float32).reshape(4, 128)

    def fault(code: Any) -> str:
        b = np.zeros(128, np.float32)
        try:
            built.run({"A": a, "B": b}, code)
        except isa_machine.Fault as e:
            return str(e)
        return "" if np.array_equal(b, a.sum(0)[::-1]) else "wrong"

    assert "cp_async_within<4>" in built.kernel.get_kernel_source() and not fault(built.code)
    waits = [i for i in lines(built) if i.name == "s_waitcnt" and i.mods["vmcnt"] < 63]
    assert waits and all("has not been waited for" in fault(changed(built, i.address, NOP)) for i in waits)
