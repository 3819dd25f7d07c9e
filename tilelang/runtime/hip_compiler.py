"""Compiles HIP C++ to code objects by the clang of the `ziglang` wheel.  Needs no GPU, no ROCm and no headers.

Three processes: text to machine code as text, that to an object, the object to a shared object, which drivers load.  Where the
wheel is missing and ROCm's hiprtc is installed, that compiles in this process.  Source: HIP RTC API reference, whose functions
have the parameters of NVRTC's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, field, fields
from functools import cache
from pathlib import Path

from tilelang.env import env
from tilelang.errors import TileLangError, error, register
from tilelang.ir.record import record
from tilelang.log import phase
from tilelang.target.probe import load_rocm

from .cache import DiskCache, Entry, digest
from .nvrtc import Nvrtc, error_text

register("hip-compiler-missing", RuntimeError, "no compiler for HIP kernels is installed", "pip install 'tilelang-py[hip]'",
         expected="the package ziglang, whose clang compiles for AMD GPUs", found="no package ziglang")
register("hip-compile", RuntimeError, "the compiler rejected the generated HIP source",
         expected="HIP source that clang compiles", found="source that it rejects")

_CODE_OBJECT = "-mcode-object-version=5"  # older drivers may not know version 6
# No contraction: a fused multiply-add is one that the program asks for.  Vector accesses of arrays of other types alias.  A
# register that some lanes have not set may be an argument of a function; as `noundef` it would tell LLVM that there are no such
# lanes, which drops the guards of their accesses.
_LANGUAGE = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-Xclang", "-no-enable-noundef-analysis",
             _CODE_OBJECT)
_FLAGS = ("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", *_LANGUAGE)


@record
class CodeObject:
    """A compiled kernel.

    bytes: the shared object (ELF).  isa: its machine code as text.  registers: vector registers of a lane, agprs of them
    accumulation registers; sgprs: scalar ones of a wave.  spills: vector registers that are spilled to memory;
    scalar_spills: scalar ones that are kept in lanes of vector registers.  scratch: private memory of a lane, bytes.
    shared_bytes: LDS of static size.
    """

    bytes: bytes = field(repr=False)
    isa: str = field(repr=False)
    registers: int
    agprs: int
    sgprs: int
    spills: int
    scalar_spills: int
    scratch: int
    shared_bytes: int


@cache
def find_zig() -> str | None:
    """Path of the compiler; None where the package is not installed."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("zig", "zig.exe"):
            if os.path.isfile(os.path.join(folder, name)):
                return os.path.join(folder, name)
    return None


def zig_stamp() -> str:
    """Text that identifies the compiler: part of cache keys."""
    zig = find_zig()
    if zig is None:
        return f"hiprtc {rtc._name}" if (rtc := load_rocm("hiprtc")) is not None else "no compiler for hip"
    st = os.stat(zig)
    return f"{zig} {st.st_size} {st.st_mtime_ns}"


def _run(args: Sequence[str], source: str, arch: str) -> None:
    zig = find_zig()
    if zig is None:
        raise error("hip-compiler-missing", f"a kernel for {arch} needs the compiler of the package ziglang")
    seconds = env.get_compile_timeout_seconds()
    try:
        done = subprocess.run([zig, *args], capture_output=True, text=True, timeout=seconds or None, check=False)
    except subprocess.TimeoutExpired:
        raise error("compile-timeout", f"the device compiler takes longer than {seconds:g} s",
                    found=f"no result after {seconds:g} s") from None
    if done.returncode != 0:
        raise _rejected("clang", done.stderr.strip() or f"it ends with code {done.returncode}", source, arch)


def _rejected(by: str, log: str, source: str, arch: str) -> TileLangError:
    return error("hip-compile", f"{by} rejected the HIP source for {arch}:\n{error_text(log, source)}",
                 hint="if the source contains no T.import_source or call_extern of yours, this is a compiler bug")


class Hiprtc(Nvrtc):
    """ROCm's compiler library."""

    prefix = "hiprtc"

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lib, self.path = library, str(library._name)
        library.hiprtcGetErrorString.restype = ctypes.c_char_p


def compile_hsaco(source: str, arch: str, options: Sequence[str] = ()) -> CodeObject:
    """Compile HIP C++ with one kernel for arch ("gfx942").  options: further options of clang.

    Raises RuntimeError with the compiler's errors and the lines they refer to, and if no compiler is installed.
    """
    if find_zig() is None and (library := load_rocm("hiprtc")) is not None:
        rc, log, binary = Hiprtc(library).compile(source, [f"--offload-arch={arch}", *_LANGUAGE, *options], "Code")
        if rc != 0:
            raise _rejected("hiprtc", log, source, arch)
        return _with_figures(binary, "")
    with tempfile.TemporaryDirectory(prefix="tilelang-hip-") as folder, phase("clang compiles"):
        text, isa, obj, out = (Path(folder, f"kernel.{end}") for end in ("hip", "s", "o", "hsaco"))
        text.write_text(source, encoding="utf-8")
        _run(["clang", *_FLAGS, f"--offload-arch={arch}", *options, "-S", str(text), "-o", str(isa)], source, arch)
        _run(["clang", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", _CODE_OBJECT, "-c", str(isa), "-o", str(obj)], source,
             arch)
        _run(["ld.lld", "-m", "elf64_amdgpu", "--no-undefined", "-shared", str(obj), "-o", str(out)], source, arch)
        return _with_figures(out.read_bytes(), isa.read_text(encoding="utf-8"))


def _with_figures(binary: bytes, isa: str) -> CodeObject:
    """A code object with the figures of its metadata, which is MessagePack: a name, then an unsigned integer."""
    def figure(name: str) -> int:
        number = rb"(?:\xcc(.)|\xcd(..)|\xce(....)|([\x00-\x7f]))"
        found = re.findall(rb"\." + name.encode() + number, binary, re.DOTALL)
        return max((int.from_bytes(b"".join(parts), "big") for parts in found), default=0)

    return CodeObject(binary, isa, figure("vgpr_count"), figure("agpr_count"), figure("sgpr_count"),
                      figure("vgpr_spill_count"), figure("sgpr_spill_count"), figure("private_segment_fixed_size"),
                      figure("group_segment_fixed_size"))


def compile_cached(source: str, arch: str, options: Sequence[str] = ()) -> CodeObject:
    """compile_hsaco, with the disk cache where it is on; sources that include files are not cached."""
    if not env.is_cache_enabled() or "#include" in source:
        return compile_hsaco(source, arch, options)
    disk, facts_of = DiskCache("hip_binaries"), [f.name for f in fields(CodeObject)]
    key = digest(["hsaco", facts_of, source, arch, [*_FLAGS, *options], zig_stamp()])
    entry = disk.load(key)
    if entry is not None and {"kernel.hsaco", "kernel.s"} <= set(entry.files):
        return CodeObject(entry.files["kernel.hsaco"], entry.files["kernel.s"].decode(), **entry.meta)
    made = compile_hsaco(source, arch, options)
    facts = {k: v for k, v in asdict(made).items() if k not in ("bytes", "isa")}
    disk.store(key, Entry(facts, {"kernel.hsaco": made.bytes, "kernel.s": made.isa.encode()}))
    return made
