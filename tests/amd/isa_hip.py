"""Compiles HIP text to code objects with the compiler of the ziglang package, for tests of the interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import subprocess
import tempfile

import isa_elf
import isa_machine
import pytest

FOLDER = pathlib.Path(__file__).parent
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None,
                               reason="the package ziglang is not installed: pip install ziglang")


@functools.cache
def tool() -> str:
    spec = importlib.util.find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "zig")


@functools.cache
def objects(chip: str, text: str, *flags: str) -> bytes:
    """The code object of HIP text for gfx<chip>."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "k.hip").write_text(text)
        version = "-mcode-object-version=5"
        steps = [["clang", "-x", "hip", "--cuda-device-only", f"--offload-arch=gfx{chip}", "-nogpulib", "-nogpuinc", "-O3",
                  *flags, "-ffp-contract=off", version, "-S", "k.hip", "-o", "k.s"],
                 ["clang", "-target", "amdgcn-amd-amdhsa", f"-mcpu=gfx{chip}", version, "-c", "k.s", "-o", "k.o"],
                 ["ld.lld", "-m", "elf64_amdgpu", "--no-undefined", "-shared", "k.o", "-o", "k.hsaco"]]
        for step in steps:
            done = subprocess.run([tool(), *step], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        return (folder / "k.hsaco").read_bytes()


@functools.cache
def programs(chip: str) -> dict[str, isa_machine.Program]:
    """The kernels of isa_programs.hip."""
    data = objects(chip, (FOLDER / "isa_programs.hip").read_text())
    return {name: isa_machine.Program(kernel) for name, kernel in isa_elf.read(data).items()}
