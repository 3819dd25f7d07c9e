"""Faults planted in binaries are found: waits removed or weakened, barriers and required cycles removed, wrong registers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import isa_decode
import isa_elf
import isa_hip
import isa_machine
import numpy as np
import pytest
from test_isa_programs import chips, floats, numbers

pytestmark = isa_hip.needs_zig
NOP = 0xBF800000
Array = Any


def instructions(chip: str, name: str) -> Iterator[isa_decode.Instruction]:
    """Those of a kernel up to its end (padding follows)."""
    for i in isa_decode.Decoder(chip).all(isa_hip.programs(chip)[name].kernel.code):
        yield i
        if i.name == "s_endpgm":
            return


def changed(chip: str, name: str, address: int, *words: int) -> isa_machine.Program:
    """The kernel with other words at an address."""
    kernel = isa_hip.programs(chip)[name].kernel
    code = bytearray(kernel.code)
    for n, word in enumerate(words):
        code[address + 4 * n:address + 4 * n + 4] = word.to_bytes(4, "little")
    return isa_machine.Program(dataclasses.replace(kernel, code=bytes(code)))


def right(program: isa_machine.Program) -> bool:
    """Run a kernel on small arrays; whether its result is right."""
    name = program.kernel.name
    if name == "gemm":
        a, b = (numbers(seed, (64, 64), -4, 5, np.float16) for seed in (30, 31))
        c = np.zeros((64, 64), np.float32)
        program.run((1,), (256,), [a, b, c, 64, 64])
        return np.array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)
    if name == "transpose":
        x, out = numbers(17, (32, 32)), np.zeros((32, 32), np.int32)
        program.run((1,), (256,), [x, out, 32])
        return np.array_equal(out, x.T)
    if name == "block_sum":
        x, sums = numbers(15, 256).astype(np.float32), np.zeros(1, np.float32)
        program.run((1,), (256,), [x, sums])
        return bool(sums[0] == x.sum())
    if name == "softmax":
        x, out = floats(18, (1, 150)), np.zeros((1, 150), np.float32)
        program.run((1,), (128,), [x, out, 150])
        e = np.exp(x.astype(float) - x.max())
        return np.allclose(out, e / e.sum(), rtol=2e-6)
    assert name == "saxpy"
    x, y = floats(0, 100), floats(1, 100)
    expected = (x.astype(np.float64) * np.float32(1.5) + y).astype(np.float32)
    program.run((1,), (128,), [x, y, 1.5, 100])
    return np.array_equal(y, expected)


def found(program: isa_machine.Program) -> str:
    """The text of the fault that a run meets, "wrong" for a wrong result, "" if all is well."""
    try:
        return "" if right(program) else "wrong"
    except isa_machine.Fault as fault:
        return str(fault)


KERNELS = ("gemm", "transpose", "block_sum", "softmax", "saxpy")


@chips
@pytest.mark.parametrize("name", KERNELS)
def test_every_wait_that_is_removed_is_missed(chip: str, name: str) -> None:
    waits = [i for i in instructions(chip, name) if i.name == "s_waitcnt"]
    assert waits and not found(isa_hip.programs(chip)[name])
    for i in waits:
        text = found(changed(chip, name, i.address, NOP))
        assert "not been waited for" in text or "was not waited for" in text or "ended with no barrier" in text, (i.text, text)


@chips
@pytest.mark.parametrize("name", KERNELS)
def test_a_wait_that_lets_one_more_operation_run_is_missed(chip: str, name: str) -> None:
    """vmcnt(n) to vmcnt(n + 1), lgkmcnt(n) to lgkmcnt(n + 1).

    The wait written by hand for gfx950 asks for more than it must: the values read from LDS have been used before.
    """
    missed = total = 0
    for i in instructions(chip, name):
        if i.name == "s_waitcnt":
            vector, local = i.mods["vmcnt"], i.mods["lgkmcnt"]
            for v, n in ((vector + 1, local), (vector, local + 1)):
                if v <= 63 and n <= 15:
                    weak = 0xBF8C0000 | v & 15 | v >> 4 << 14 | i.words[0] & 0x70 | n << 8
                    total += 1
                    missed += not found(changed(chip, name, i.address, weak))
    assert total and missed == ((name, chip) == ("gemm", "950"))


@chips
@pytest.mark.parametrize("name", ["gemm", "transpose", "block_sum", "softmax"])
def test_a_barrier_that_is_removed_is_missed(chip: str, name: str) -> None:
    barriers = [i for i in instructions(chip, name) if i.name == "s_barrier"]
    assert barriers
    for i in barriers:
        assert "ended with no barrier since" in found(changed(chip, name, i.address, NOP))


@chips
def test_a_barrier_that_only_some_waves_reach_is_found(chip: str) -> None:
    """A scalar branch in front of it, which the second wave takes."""
    text = """
        #define B(x) __builtin_amdgcn_##x
        extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(128, 128))) void apart(int* y) {
          int t = B(workitem_id_x)();
          if (B(readfirstlane)(t >> 6) != PLANTED) { asm volatile("" ::: "memory"); B(s_barrier)(); }
          y[t] = t;
        }"""
    for planted in (2, 1):
        kernel = isa_elf.read(isa_hip.objects(chip, text.replace("PLANTED", str(planted))))["apart"]
        y = np.zeros(128, np.int32)
        run = functools.partial(isa_machine.Program(kernel).run, (1,), (128,), [y])
        if planted == 2:
            run()
            np.testing.assert_array_equal(y, np.arange(128))
        else:
            with pytest.raises(isa_machine.Fault, match="1 of 2 waves wait at a barrier"):
                run()


@chips
@pytest.mark.parametrize("name", ["gemm", "softmax"])
def test_cycles_that_an_instruction_needs_are_missed(chip: str, name: str) -> None:
    """s_nop of several cycles cut to one."""
    for i in instructions(chip, name):
        if i.name == "s_nop" and i.mods["simm"]:
            assert "cycles are needed after" in found(changed(chip, name, i.address, NOP)), i.text


@chips
def test_a_wrong_register_of_a_matrix_operand_is_found(chip: str) -> None:
    matrices = [i for i in instructions(chip, "gemm") if i.format == "MFMA"]
    for i in matrices[:4]:
        for shift in (0, 9):  # A, B
            assert found(changed(chip, "gemm", i.address, i.words[0], i.words[1] ^ 2 << shift)), i.text
        assert found(changed(chip, "gemm", i.address, i.words[0] ^ 4, i.words[1])), i.text


@chips
def test_wrong_lanes_are_found(chip: str) -> None:
    """A DPP control, and the lanes of an LDS address."""
    i = next(i for i in instructions(chip, "block_sum") if "dpp" in i.mods)
    assert found(changed(chip, "block_sum", i.address, i.words[0], i.words[1] ^ 3 << 8)) == "wrong"
    i = next(i for i in instructions(chip, "gemm") if i.name == "ds_read_b128")
    assert found(changed(chip, "gemm", i.address, i.words[0] ^ 16, i.words[1]))


@chips
def test_accesses_outside_of_memory_are_found(chip: str) -> None:
    i = next(i for i in instructions(chip, "gemm") if i.name == "ds_read_b128")
    assert "LDS byte" in found(changed(chip, "gemm", i.address, i.words[0] | 0xFFF0, i.words[1]))
    i = next(i for i in instructions(chip, "saxpy") if i.name == "global_store_dword")
    assert "of buffer" in found(changed(chip, "saxpy", i.address, i.words[0] | 0xFF0, i.words[1]))
    x, y = floats(0, 100), floats(1, 99)
    with pytest.raises(isa_machine.Fault, match=r"saxpy at .*global_load_dword.*buffer 2, which has 396 bytes"):
        isa_hip.programs(chip)["saxpy"].run((1,), (128,), [x, y, 1.5, 100])
