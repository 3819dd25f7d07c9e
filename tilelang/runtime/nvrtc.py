"""Compiles CUDA C++ to cubins in this process, through NVRTC and ctypes.  Needs no GPU, no driver and no host compiler.

NVRTC is searched in the nvidia wheels (extra `[cuda]`), then in a system CUDA toolkit.  Source: NVRTC manual.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from threading import Lock
import tempfile
from typing import Any

from tilelang.env import env
from tilelang.errors import TileLangError, error, register
from tilelang.ir.record import record
from tilelang.target.nvshmem import USED
from tilelang.target.probe import load_libcuda, open_library
from tilelang.log import phase

from .nvshmem import linked, linker_beside


register("nvrtc-missing", RuntimeError, "no NVRTC library that can compile for the target was found",
         expected="an NVRTC library that compiles for the target")
register("nvrtc-broken", RuntimeError, "the NVRTC that was found does not work", expected="an NVRTC that works")
register("register-limit", RuntimeError, "an instruction of a kernel takes more registers than a thread of its block has",
         "take smaller tiles, or fewer threads in a block")
register("nvrtc-compile", RuntimeError, "NVRTC rejected the generated CUDA source", expected="CUDA source that NVRTC compiles")

register("nvrtc-option", RuntimeError, "NVRTC does not take an option of the device compiler",
         expected="options of nvcc for the device compiler, or options of NVRTC")

NO_CACHE = "--no-cache"
INVALID_OPTION, COMPILATION = 5, 6  # nvrtcResult


@record
class Resources:
    """The resources of one kernel that ptxas reports.  registers: per thread; others: bytes (per thread, shared per block).

    serialised: why ptxas waits for each wgmma where it is issued, "" where it does not ("C7514: ...").
    """

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    constant_bytes: int = 0
    serialised: str = ""

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


@record
class Cubin:
    """A compiled module.

    bytes: the cubin (ELF).  registers: largest of its kernels.  spills: bytes stored and loaded, summed.
    shared_bytes: static shared memory, largest.  log: compiler output.  kernels: Resources by kernel name.
    """

    bytes: bytes = field(repr=False)
    registers: int
    spills: int
    shared_bytes: int
    log: str = field(repr=False)
    kernels: dict[str, Resources] = field(default_factory=dict)


@record
class NvrtcCandidate:
    """One NVRTC found on this machine.  major: from its file name; 0 when unknown."""

    library: str
    includes: tuple[str, ...]
    major: int


class Nvrtc:
    """A loaded NVRTC.  version: (major, minor).  archs: sm numbers it compiles for.  prefix: of the library's functions."""

    prefix = "nvrtc"

    def __init__(self, candidate: NvrtcCandidate) -> None:
        with phase("load NVRTC"):
            for builtins in _builtins_beside(candidate.library):  # a library without an RPATH finds it only if it is loaded
                open_library(builtins)
            self.lib = open_library(candidate.library)
        self.path, self.includes = candidate.library, candidate.includes
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        n = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(n))
        archs = (ctypes.c_int * n.value)()
        self._call("GetSupportedArchs", archs)
        self.archs = tuple(archs)

    def _call(self, name: str, *args: Any) -> None:
        rc = getattr(self.lib, self.prefix + name)(*args)
        if rc != 0:
            said = getattr(self.lib, f"{self.prefix}GetErrorString")(rc).decode()
            raise RuntimeError(f"{self.prefix.upper()} ({self.path}): {said}")

    def compile(self, source: str, options: Sequence[str], what: str = "CUBIN") -> tuple[int, str, bytes]:
        """(result code, log, result or b"").  what: "CUBIN" or "PTX".  Thread-safe: each call has its own program."""
        program, compiles = ctypes.c_void_p(), getattr(self.lib, f"{self.prefix}CompileProgram")
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        try:
            argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            with phase("NVRTC compiles" if source else "NVRTC compiles nothing"):
                rc = compiles(program, len(options), argv)
            log = self._read(program, "ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
            return rc, log, self._read(program, what) if rc == 0 else b""
        finally:
            getattr(self.lib, f"{self.prefix}DestroyProgram")(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"Get{what}", program, buffer)
        return buffer.raw[:size.value]


def _builtins_beside(library: str) -> list[str]:
    """The libraries that an NVRTC opens by name at its first compilation; they lie in its folder."""
    names = ("libnvrtc-builtins.so*", "nvrtc-builtins64_*.dll")
    return [path for name in names for path in sorted(glob.glob(os.path.join(os.path.dirname(library), name)))]


def _compile(nvrtc: Nvrtc, source: str, options: Sequence[str], *what: str) -> tuple[int, str, bytes]:
    """nvrtc.compile without the driver's compilation cache.

    For that cache NVRTC initialises the driver (0.2 s in a process that has not done so), and a cached result lacks the
    messages of ptxas about registers, spills and serialisation.
    """
    found = nvrtc.compile(source, [*options, NO_CACHE], *what)
    return nvrtc.compile(source, options, *what) if found[0] == INVALID_OPTION else found  # one without such a cache


_LIBRARY_NAMES = ("lib/libnvrtc.so.*", "lib64/libnvrtc.so.*", "bin/nvrtc64_*_0.dll", "bin/x64/nvrtc64_*_0.dll")


def _wheel_roots() -> list[tuple[str, list[str]]]:
    """(folder with lib/, include folders) of nvidia wheels, CUDA 13 layout (nvidia/cu13) and 12 (nvidia/cuda_nvrtc)."""
    spec = importlib.util.find_spec("nvidia")
    out: list[tuple[str, list[str]]] = []
    for base in (spec.submodule_search_locations or ()) if spec else ():
        for root in sorted(glob.glob(os.path.join(base, "cu[0-9]*")), reverse=True):
            out.append((root, [os.path.join(root, "include")]))
        out.append((os.path.join(base, "cuda_nvrtc"), [os.path.join(base, "cuda_runtime", "include")]))
    return out


def _system_roots() -> list[tuple[str, list[str]]]:
    roots = [env.CUDA_HOME] + sorted(glob.glob("/usr/local/cuda-*"), reverse=True) + ["/usr/local/cuda", "/opt/cuda"]
    return [(r, [os.path.join(r, "include"), os.path.join(r, "targets", "x86_64-linux", "include")])
            for r in dict.fromkeys(filter(None, roots))]


def find_nvrtc() -> list[NvrtcCandidate]:
    """Every NVRTC on this machine: newest major first, wheels before toolkits."""
    found: list[NvrtcCandidate] = []
    for root, includes in _wheel_roots() + _system_roots():
        for pattern in _LIBRARY_NAMES:
            for path in sorted(glob.glob(os.path.join(root, pattern))):
                m = re.search(r"libnvrtc\.so\.(\d+)$|nvrtc64_(\d{2})\d_0\.dll$", path)
                if m:
                    dirs = [d for d in includes if os.path.isfile(os.path.join(d, "cuda_fp16.h"))]
                    dirs += [d for d in (os.path.join(d, "cccl") for d in dirs) if os.path.isdir(d)]  # where nvcc looks too
                    found.append(NvrtcCandidate(path, tuple(dirs), int(m.group(1) or m.group(2))))
    return sorted(found, key=lambda c: (not c.includes, -c.major))


_loading = Lock()  # threads that compile first wait for one of them to load NVRTC


@cache
def load_nvrtc(candidate: NvrtcCandidate) -> Nvrtc | str:
    """The NVRTC once it has compiled an empty source, which takes its start-up time in advance; else why it does not work."""
    try:
        nvrtc = Nvrtc(candidate)
        rc, log, _ = _compile(nvrtc, "", [f"-arch=sm_{nvrtc.archs[-1]}"])
    except (OSError, RuntimeError, AttributeError) as e:
        return f"does not load: {e}"
    return nvrtc if rc == 0 else f"does not compile an empty source: {' '.join(log.split()) or f'nvrtcResult {rc}'}"


@cache
def choose_nvrtc(arch_number: int, driver_major: int | None = None, links: bool = False) -> Nvrtc:
    """The newest NVRTC that works, compiles for sm_<arch_number> and whose cubins a driver of that CUDA major loads.

    driver_major: CUDA major version of the driver, None when there is no driver (any NVRTC will do).  links: an nvJitLink lies
    beside it, if any has one.
    A cubin loads on every driver of its own or a later CUDA major (CUDA compatibility guide, "minor version
    compatibility").  Raises RuntimeError naming what to install.
    """
    refused, broken = [], []
    with phase("find NVRTC"):
        found = find_nvrtc()
    if links:
        found.sort(key=lambda c: linker_beside(c.library) is None)
    for c in found:
        if driver_major is not None and c.major > driver_major:
            refused.append(f"{c.library}: newer than the driver (CUDA {driver_major})")
            continue
        with _loading:
            loaded = load_nvrtc(c)
        if isinstance(loaded, str):
            broken.append(f"{c.library}: {loaded}")
        elif arch_number not in loaded.archs:
            refused.append(f"{c.library}: no sm_{arch_number} (has {', '.join(map(str, loaded.archs))})")
        else:
            return loaded
    major = 12 if arch_number < 75 else driver_major or 13  # CUDA 13 dropped the architectures before sm_75
    cu = "" if major >= 13 else f"-cu{major}"
    names = "'tilelang-py[cuda]'" if not cu and not broken else f"nvidia-cuda-nvrtc{cu} nvidia-cuda-runtime{cu}"
    kind, said = ("nvrtc-broken", "that works") if broken else ("nvrtc-missing", "was found")
    raise error(kind, f"no NVRTC library for sm_{arch_number} {said}", found=f"none for sm_{arch_number}",
                notes=[(None, r) for r in (*broken, *refused)],
                hint=f"pip install {'--force-reinstall ' if broken else ''}{names}, or set CUDA_HOME to a CUDA toolkit")


def driver_cuda_major() -> int | None:
    """CUDA major version of the installed driver, None without one."""
    lib, version = load_libcuda(), ctypes.c_int()
    if lib is None or lib.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000


def toolchain_version(arch: str) -> str:
    """Text that names the compiler used for an arch (part of cache keys): "nvrtc 13.5"."""
    return "nvrtc {}.{}".format(*compiler_for(arch).version)


def _arch_number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def compiler_for(arch: str, links: bool = False) -> Nvrtc:
    """The NVRTC that compiles for arch ("sm_90a") on this machine.  links: one with an nvJitLink, if there is one.  Raises
    RuntimeError when none does."""
    return choose_nvrtc(_arch_number(arch), driver_cuda_major(), *[True] * links)


def compile_cubin(source: str, arch: str, options: Sequence[str] = ()) -> Cubin:
    """Compile CUDA C++ source to a cubin for arch ("sm_80", "sm_90a").

    options: further NVRTC options.  Raises RuntimeError with the compiler's errors and the source lines they refer to if the
    source does not compile, and if no NVRTC is installed.
    """
    nvrtc, links = compiler_for(arch, USED in source), USED in source
    flags = [f"-arch={arch}", "-std=c++17", "-default-device", "--ptxas-options=-v", *["-rdc=true"] * links,
             *(f"-I{d}" for d in nvrtc.includes), *options]
    # Without headers nearly half of the front end's input are NVRTC's own declarations; --minimal omits most of them.
    small = [] if "#include" in source else ["--minimal"]
    rc, log, cubin = _compile(nvrtc, source, [*flags, *small])
    if rc != 0 and small:  # the source may use omitted declarations, or this NVRTC may not know the option
        rc, log, cubin = _compile(nvrtc, source, flags)
    if rc != 0 or not cubin:
        raise _rejected(nvrtc, rc, log, source, arch)
    kernels = parse_resources(log)
    values = kernels.values()
    if links:
        cubin = linked(cubin, source, nvrtc, arch, tuple(d for c in find_nvrtc() for d in c.includes))
    return Cubin(cubin, max((k.registers for k in values), default=0), sum(k.spills for k in values),
                 max((k.shared_bytes for k in values), default=0), log, kernels)


def compile_ptx(source: str, arch: str, options: Sequence[str] = ()) -> str:
    """PTX text of CUDA C++ source for arch.  Raises RuntimeError as compile_cubin does."""
    nvrtc = compiler_for(arch)
    flags = [f"-arch={arch.replace('sm_', 'compute_')}", "-std=c++17", "-default-device",
             *(f"-I{d}" for d in nvrtc.includes), *options]
    rc, log, ptx = _compile(nvrtc, source, flags, "PTX")
    if rc != 0:
        raise _rejected(nvrtc, rc, log, source, arch)
    return ptx.rstrip(b"\0").decode()


def _rejected(nvrtc: Nvrtc, rc: int, log: str, source: str, arch: str) -> TileLangError:
    """The error for a result of NVRTC other than success."""
    if rc == INVALID_OPTION:
        unknown = re.search(r"(?:unrecognized option|invalid value for) (\S+)", log)
        name = unknown[1] if unknown else " ".join(log.split())
        return error("nvrtc-option", f"NVRTC does not take the option ‹{name}›", notes=[(None, log)], hint=f"take {name} out "
                     "of compile_flags or tl.device_compile_flags; options for the host compiler and the linker have no use "
                     "here")
    if needed := re.search(r"\(C7602\) Insufficient registers \((\d+)\).* register target of (\d+)", log):
        return error("register-limit", f"ptxas gives each thread {needed[1]} registers, and one instruction takes {needed[2]}",
                     expected=f"tiles that take {needed[1]} registers of a thread", found=f"{needed[2]} registers")
    text = error_text(log, source)
    if rc not in (0, COMPILATION):
        return error("nvrtc-broken", f"{nvrtc.path} fails (nvrtcResult {rc}) while it compiles for {arch}:\n{text}",
                     found="an NVRTC that fails", hint="python -m tilelang doctor says which NVRTC works; pip install "
                     "--force-reinstall nvidia-cuda-nvrtc, or set CUDA_HOME to another CUDA toolkit")
    hint = "if the source contains no T.import_source or call_extern of yours, this is a compiler bug"
    if header := re.search(r'(?:could not|cannot) open source file "([^"\s]+)', log):
        hint = f"{header[1]} lies in none of {', '.join(nvrtc.includes)}: give its folder by compile_flags=[\"-I…\"]; " \
            "pip install nvidia-cuda-cccl gives nv/, cuda/, cub/ and thrust/" if nvrtc.includes else \
            "the CUDA headers are missing: pip install 'tilelang-py[cuda]', or set CUDA_HOME to a CUDA toolkit"
    message = f"NVRTC rejected the CUDA source for {arch}:\n{text}"
    return error("nvrtc-compile", message, found="source that it rejects", hint=hint)


_SCREEN, _AROUND, _PLACES, _WIDTH = 30, 2, 4, 160  # lines of a screen; beside a place; places shown; characters of a line


def error_text(log: str, source: str) -> str:
    """The compiler's errors and the source lines they refer to, on one screen.  If shortened, the full texts go to files."""
    lines, said = source.splitlines(), log.splitlines()
    short = len(lines) <= _SCREEN
    if short and len(said) <= _SCREEN:
        return f"{log}\n\nsource:\n{_numbered(lines, range(len(lines)))}"
    wrong = [i for i, line in enumerate(said) if ": error" in line or ": catastrophic error" in line] or [0]
    told = sorted({k for i in wrong[:_PLACES] for k in range(i, min(i + 3, len(said)))})
    named = [int(m[1] or m[2]) - 1 for i in wrong[:_PLACES] if (m := re.search(r"\((\d+)\): |:(\d+):\d+: ", said[i]))]
    shown = sorted({k for n in named for k in range(n - _AROUND, n + _AROUND + 1) if 0 <= k < len(lines)}) or \
        range(min(_SCREEN // 2, len(lines)))  # the log names no line
    text = "\n".join(said[i][:_WIDTH] for i in told) + f"\n({len(wrong)} errors)" * (len(wrong) > _PLACES)
    return f"{text}\n\nsource:\n{_numbered(lines, shown)}\nall of it: {_saved(log, source)}"


def _numbered(lines: list[str], shown: Iterable[int]) -> str:
    out, last = [], -1
    for i in shown:
        if i > last + 1:
            out.append("  ... |")
        out.append(f"{i + 1:5d} | {lines[i][:_WIDTH]}")
        last = i
    return "\n".join(out)


def _saved(log: str, source: str) -> str:
    """A folder with the source and the compiler's output; a note where none can be written."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="tilelang-nvrtc-"))
        (folder / "kernel.cu").write_text(source + "\n", encoding="utf-8")
        (folder / "nvrtc.log").write_text(log + "\n", encoding="utf-8")
        return str(folder)
    except OSError as e:
        return f"(no file could be written: {e})"


_SERIALISED = re.compile(r"\((C75\d\d)\) Potential Performance Loss: wgmma\.mma_async instructions are serialized due to "
                         r"(.*?) in the function '([^']+)'")


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources by kernel name from the output of `--ptxas-options=-v`."""
    out: dict[str, Resources] = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'", 1)[0]

        def number(pattern: str, text: str = part) -> int:
            m = re.search(pattern, text)
            return int(m.group(1)) if m else 0

        out[name] = Resources(number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
                              number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes stack frame"),
                              number(r"(\d+) bytes smem"), number(r"(\d+) bytes cmem\[0\]"),
                              next((f"{code}: {why}" for code, why, of in _SERIALISED.findall(log) if of == name), ""))
    return out


def available() -> bool:
    """Whether an NVRTC is installed.  Does not load it."""
    return sys.platform in ("linux", "win32") and bool(find_nvrtc())
