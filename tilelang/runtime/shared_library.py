"""Exports CPU kernels as shared libraries that the module loader of TVM-FFI opens (CUDA kernels: cuda_library.py).

The library contains the kernel, its host program (checks, outputs) and its own thread pool.  It depends only on libtvm_ffi and
the C library.  Once loaded it stays mapped, because its worker threads run in its code.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilelang.errors import error, register

from .cpu_engine import cpu_engine
from .cpu_pool import pool_ir
from .host_engine import ffi_state

register("kernel-export", NotImplementedError, "a kernel is to be written as a shared library, and cannot be")
register("kernel-link", RuntimeError, "the system's linker rejects a kernel's shared library",
         "check the compiler that CC names: it must link shared libraries for this machine",
         expected="a linker that makes shared libraries")
register("kernel-library", ValueError, "a saved kernel is of another program, or no saved kernel at all",
         "export it again with export_library", expected="a saved kernel of this program, with these options, by this version")

FINGERPRINT = "tl_fingerprint"
_COMPILERS = ("cc", "gcc", "clang")
_NAME = re.compile(r"[A-Za-z_]\w*")

# Services that a kernel compiled in this process gets from Python, for a kernel that is loaded from a file: the array
# constructor, the default device, workers for the pool (TILELANG_NUM_THREADS, else the CPUs this process may use), a new pool
# after fork.
_TVM_FFI = """
@tl_text_array = private unnamed_addr constant [10 x i8] c"ffi.Array\\00"
@{fingerprint} = constant [{length} x i8] c"{text}\\00"
declare i32 @TVMFFIFunctionGetGlobal(ptr, ptr)
define internal void @tl_start() {{
  %name = alloca {{ ptr, i64 }}
  store ptr @tl_text_array, ptr %name
  %size = getelementptr i8, ptr %name, i64 8
  store i64 9, ptr %size
  %found = call i32 @TVMFFIFunctionGetGlobal(ptr %name, ptr @tl_make_array)
  call void @{start}()
  ret void
}}
@__tvm_ffi_{name} = alias i32 (ptr, ptr, i32, ptr), ptr @tl_call
"""
_POOL = """
@tl_text_threads = private unnamed_addr constant [21 x i8] c"TILELANG_NUM_THREADS\\00"
declare ptr @getenv(ptr)
declare i32 @atoi(ptr)
declare void @tl_pool_want(i32)
declare void @tl_pool_reset()
declare i32 @pthread_atfork(ptr, ptr, ptr)
{cpu_declarations}
define internal void @tl_start_pool() {{
entry:
  %text = call ptr @getenv(ptr @tl_text_threads)
  %given = icmp ne ptr %text, null
  br i1 %given, label %read, label %count
read:
  %asked = call i32 @atoi(ptr %text)
  %some = icmp sgt i32 %asked, 0
  br i1 %some, label %start, label %count
count:
{cpu_count}
  br label %start
start:
  %threads = phi i32 [ %asked, %read ], [ %cpus, %count ]
  %workers = sub i32 %threads, 1
  call void @tl_pool_want(i32 %workers)
  %hook = call i32 @pthread_atfork(ptr null, ptr null, ptr @tl_pool_reset)
  ret void
}}
"""
_LINUX = ("declare i32 @sched_getaffinity(i32, i64, ptr)\ndeclare i32 @__sched_cpucount(i64, ptr)",
          "  %mask = alloca [128 x i8], align 8\n  %got = call i32 @sched_getaffinity(i32 0, i64 128, ptr %mask)\n"
          "  %cpus = call i32 @__sched_cpucount(i64 128, ptr %mask)")
_OTHER = ("declare i64 @sysconf(i32)", "  %online = call i64 @sysconf(i32 58)\n  %cpus = trunc i64 %online to i32")


def export_name(name: str) -> str:
    """The symbol name of a program in its library.  Raises kernel-export if it is not a C identifier."""
    if not _NAME.fullmatch(name):
        raise error("kernel-export", f"‹{name!r}› cannot be the name of a function in a library", expected="a name of letters, "
                    "digits and underscores", hint="give the function a name of letters, digits and underscores")
    return name


def ffi_entry(name: str, fingerprint: str, start: str) -> str:
    """LLVM IR of the fingerprint, of the exported function, and of @tl_start, which calls `start`."""
    return _TVM_FFI.format(fingerprint=FINGERPRINT, length=len(fingerprint) + 1, text=fingerprint, name=name, start=start)


def write_library(path: Any, name: str, host_ir: str, kernel_object: bytes, entry: str, fingerprint: str) -> None:
    """Link a CPU kernel to a shared library.

    host_ir: text of the host module.  entry: function of kernel_object that it calls.  fingerprint: stored in the file and
    checked by open_library.  Raises kernel-export if there is no compiler, kernel-link if linking fails.
    """
    text = host_ir.replace("@tl_make_array = external global ptr", "@tl_make_array = internal global ptr null")
    text = text.replace("@tl_default_device = external global i32", "@tl_default_device = internal global i32 0")
    text = re.sub(r"@tl_cpu_entry\b", f"@{entry}", text)
    glue = ffi_entry(export_name(name), fingerprint, "tl_start_pool")
    engine = cpu_engine()
    link_with_ffi(path, name, {
        "kernel.o": kernel_object, "host.o": engine.emit_object(text + glue + pool_start("tl_start"), opt=1),
        "pool.o": engine.emit_object(pool_ir("x86_64" in engine.triple), opt=1)}, ("-lm", "-lpthread"))


def pool_start(start: str = "tl_start_pool") -> str:
    """LLVM IR that sets the number of threads when the library is loaded.  start: the function that runs then."""
    declarations, count = _LINUX if sys.platform.startswith("linux") else _OTHER
    return _POOL.format(cpu_declarations=declarations, cpu_count=count) + run_at_load(start)


def run_at_load(function: str) -> str:
    """LLVM IR that runs a function when the library is loaded.

    On Linux it names the section, because llvmlite writes llvm.global_ctors to .ctors, which lld does not read.
    """
    if sys.platform.startswith("linux"):
        return (f'@tl_init = internal global ptr @{function}, section ".init_array", align 8\n'
                '@llvm.used = appending global [1 x ptr] [ptr @tl_init], section "llvm.metadata"\n')
    return ("@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] "
            f"[{{ i32, ptr, ptr }} {{ i32 65535, ptr @{function}, ptr null }}]\n")


def link_with_ffi(path: Any, name: str, objects: dict[str, bytes], libraries: tuple[str, ...]) -> None:
    """Link objects and libtvm_ffi into a shared library at `path`.  Raises kernel-export, kernel-link."""
    find_compiler()
    libtvm_ffi = Path(_libtvm_ffi())
    link(path, name, objects, (str(libtvm_ffi), *libraries, f"-Wl,-rpath,{libtvm_ffi.parent}"),
         ("__tvm_ffi_*", "tl_call", "tl_full", "tl_check", FINGERPRINT))


def link(path: Any, name: str, objects: dict[str, bytes], libraries: tuple[str, ...], exported: tuple[str, ...]) -> None:
    """Link objects into a shared library that exports these symbols.  Raises kernel-export, kernel-link."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="tilelang-link-") as folder:
        for file, data in objects.items():
            (Path(folder) / file).write_bytes(data)
        out = Path(folder) / "library"
        flags = ["-shared", "-o", str(out), *(str(Path(folder) / f) for f in objects), *libraries]
        if sys.platform.startswith("linux"):
            script = Path(folder) / "exports"
            script.write_text(f"{{ global: {'; '.join(exported)}; local: *; }};\n", encoding="utf-8")
            flags += [f"-Wl,--version-script={script}", "-Wl,-z,nodelete", "-Wl,-z,noexecstack"]
        done = subprocess.run([*compiler, *flags], capture_output=True, text=True)
        if done.returncode:
            raise error("kernel-link", f"{shlex.join(compiler)} cannot link the library of `{name}`:\n"
                        f"{(done.stderr or done.stdout).strip() or '(no output)'}",
                        found=f"one that ends with {done.returncode}")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(out, temporary)
        os.replace(temporary, target)  # a library in use keeps its old file


def find_compiler(otherwise: str = "the disk cache keeps compiled kernels without any") -> list[str]:
    """The command for linking: CC, else cc, gcc or clang.  otherwise: what to do where there is none.  Raises kernel-export."""
    given = shlex.split(os.environ.get("CC", ""))
    found = [given] if given else [[c] for c in _COMPILERS]
    for command in found:
        if shutil.which(command[0]):
            return command
    raise error("kernel-export", "a shared library needs the system's linker: there is no "
                f"{shlex.join(given) if given else ', '.join(_COMPILERS)}", expected="a linker", found="none",
                hint=f"install a C compiler, or name one in CC; {otherwise}")


def _libtvm_ffi() -> str:
    ffi_state()
    from tvm_ffi import libinfo  # over 100 ms, and torch with it where that is installed

    return str(libinfo.find_libtvm_ffi())


def open_library(path: Any, modes: tuple[str, ...], fingerprint: str) -> dict[str, Callable[..., Any]]:
    """The entry points ("call", …) of a library written by write_library, as TVM-FFI functions.

    Raises kernel-library for a file that is not such a library, or that was made from another program.
    """
    ffi = ffi_state()
    try:
        library = ctypes.CDLL(str(Path(path).resolve()))
        kept = (ctypes.c_char * (len(fingerprint) + 1)).in_dll(library, FINGERPRINT).value.decode("ascii", "replace")
        addresses = {m: ctypes.cast(getattr(library, f"tl_{m}"), ctypes.c_void_p).value for m in modes}
    except (OSError, ValueError, AttributeError) as e:
        raise error("kernel-library", f"{path} is no library of a kernel with these entry points: ‹{e}›") from None
    if kept != fingerprint:
        raise error("kernel-library", f"{path} was made of another program, or for other outputs",
                    found="one of another program")
    out = {}
    for mode, address in addresses.items():
        out[mode] = ffi.make_function(address, keep_alive_object=(library,))
        out[mode].release_gil = True
    return out
