"""Compiles LLVM IR for the CPU target and loads it into this process as callable addresses.

    code = compile_cpu_object(llvm_ir)            bytes that can be cached for this processor and llvmlite
    loaded = load_cpu_object(code, "entry")       loaded.address; keep `loaded` alive while the address is in use

Loading an object takes well under a millisecond; nearly all of the time is compilation.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from tilelang.env import env

from .cpu_pool import pool_ir
from .cpus import usable_cpus
from .host_engine import LoadedCode, llvm_state


def thread_count() -> int:
    """Number of threads that a launch may use: TILELANG_NUM_THREADS, else the number of CPUs this process may run on."""
    asked = int(env.TILELANG_NUM_THREADS)
    return asked if asked > 0 else usable_cpus()


class CpuEngine:
    """Compiles for the host and loads code next to the thread pool.  One per process; safe from several threads."""

    def __init__(self) -> None:
        self._llvm = llvm = llvm_state().llvm
        self._lock = threading.Lock()
        self.cpu, self.features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self.triple = llvm.get_process_triple()
        target = llvm.Target.from_triple(self.triple)
        self._machine = target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, reloc="pic")
        self._pool = self._load_pool()

    def emit_object(self, llvm_ir: str, opt: int = 2) -> bytes:
        """Optimised object code.  Raises RuntimeError for IR that LLVM rejects, which is a bug of this compiler."""
        with self._lock:
            module = self._optimised(llvm_ir, opt)
            return bytes(self._machine.emit_object(module))

    def emit_assembly(self, llvm_ir: str, opt: int = 2) -> str:
        """The optimised code as assembly text, for reading."""
        with self._lock:
            return str(self._machine.emit_assembly(self._optimised(llvm_ir, opt)))

    def emit_linked(self, modules: Sequence[str], exported: Sequence[str], any_cpu: bool = False) -> bytes:
        """One object of several modules, which shows only the exported symbols.  any_cpu: not only for CPUs like this one."""
        llvm = self._llvm
        with self._lock:
            cpu, features = ("", "") if any_cpu else (self.cpu, self.features)
            machine = llvm.Target.from_triple(self.triple).create_target_machine(
                cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")
            module = self._parsed(modules[0])
            for other in modules[1:]:
                module.link_in(self._parsed(other))
            for x in (*module.functions, *module.global_variables):
                if not x.is_declaration and x.name not in exported and not x.name.startswith("llvm."):
                    x.linkage = "internal"
            return bytes(machine.emit_object(self._passed(module, 2, machine)))

    def _parsed(self, llvm_ir: str) -> Any:
        module = self._llvm.parse_assembly(llvm_ir)
        module.triple = self.triple
        module.data_layout = str(self._machine.target_data)
        module.verify()
        return module

    def _optimised(self, llvm_ir: str, opt: int) -> Any:
        return self._passed(self._parsed(llvm_ir), opt, self._machine)

    def _passed(self, module: Any, opt: int, machine: Any) -> Any:
        llvm = self._llvm
        options = llvm.create_pipeline_tuning_options(speed_level=opt)
        # Measured on gemm, attention, softmax and elementwise programs: -O3 and loop unrolling double the compile time
        # and change no run time beyond noise (micro-kernels are written unrolled, the vectoriser interleaves).
        options.slp_vectorization = options.loop_unrolling = False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        return module

    def load(self, code: str | bytes, entry: str) -> LoadedCode:
        """Make `entry` of an object (bytes) or of LLVM IR (text) callable."""
        if isinstance(code, str):
            code = self.emit_object(code)
        return LoadedCode(code, (entry,), {"tl_parallel_for": self._pool["tl_parallel_for"]})

    def _load_pool(self) -> dict[str, int]:
        """Load the thread pool.  It is never unloaded, because its workers run in this code until the process ends."""
        code = self.emit_object(pool_ir("x86_64" in self.triple), opt=1)
        loaded = LoadedCode(code, ("tl_parallel_for", "tl_pool_want", "tl_pool_reset"))
        for kept in (loaded, loaded.library, llvm_state().jit):  # never unmapped, not even at interpreter exit
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        found = loaded.addresses
        ctypes.CFUNCTYPE(None, ctypes.c_int32)(found["tl_pool_want"])(thread_count() - 1)
        reset = ctypes.CFUNCTYPE(None)(found["tl_pool_reset"])
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=reset)
        return found


_engine, _create = cache(CpuEngine), threading.Lock()


def cpu_engine() -> CpuEngine:
    """The engine of this process."""
    with _create:
        return _engine()


def compile_cpu_object(llvm_ir: str) -> bytes:
    """Object code of a module for this processor."""
    return cpu_engine().emit_object(llvm_ir)


def load_cpu_object(code: bytes, entry: str) -> LoadedCode:
    """Load object code; `entry` is at .address of the result, which owns the memory."""
    return cpu_engine().load(code, entry)
