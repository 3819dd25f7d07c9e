"""Compiles and loads host programs in this process: LLVM IR text -> object -> address -> TVM-FFI function.

llvmlite and tvm_ffi are imported on first use (tvm_ffi imports torch where torch is installed).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

from tilelang.errors import error, register
from tilelang.target.probe import open_library
from tilelang.log import phase

register("runtime-missing", ImportError, "a package the runtime needs is missing or has a version it does not know",
         "install tilelang-py with its dependencies")

_lock = threading.RLock()
_FFI_SYMBOLS = ("TVMFFIErrorSetRaisedFromCStr", "TVMFFIObjectDecRef", "TVMFFIEnvTensorAlloc", "TVMFFIFunctionCall",
                "TVMFFIEnvGetStream")


class _Llvm:
    """Target machine and ORC JIT of this process, made once."""

    def __init__(self) -> None:
        load_llvm()
        try:
            import llvmlite.binding as llvm  # 25 ms
        except ImportError as e:
            raise error("runtime-missing", "«llvmlite» is needed to run kernels", found="none",
                        hint="pip install llvmlite") from e
        self.llvm = llvm
        for start in ("initialize_native_target", "initialize_native_asmprinter"):
            getattr(llvm, start)()
        self.cpu = llvm.get_host_cpu_name()
        self.machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=self.cpu, opt=0, reloc="pic", codemodel="jitdefault")  # at 1 it takes twice as long, and calls as long
        self.jit = llvm.create_lljit_compiler(
            llvm.Target.from_default_triple().create_target_machine(cpu=self.cpu, opt=1, reloc="pic",
                                                                    codemodel="jitdefault"), use_jit_link=False)
        self.loaded = 0


def load_llvm() -> None:
    """Load the library of llvmlite in advance, because llvmlite's own load at the first use stops all other threads.

    A library that cannot be found or loaded is left to llvmlite.
    """
    spec = find_spec("llvmlite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = os.path.join(folder, "binding", "libllvmlite.so")
        if os.path.exists(path):
            try:
                open_library(path)
            except OSError:
                return


class _Ffi:
    """The functions of tvm_ffi that are used, created once."""

    def __init__(self) -> None:
        torch_in_use = "torch" in sys.modules  # by the program: tvm_ffi imports it too
        try:
            import tvm_ffi  # over 100 ms, and torch with it where that is installed
            from tvm_ffi import core, libinfo  # over 100 ms, and torch with it where that is installed
        except ImportError as e:
            raise error("runtime-missing", "«apache-tvm-ffi» is needed to call kernels", found="none",
                        hint="pip install 'apache-tvm-ffi>=0.1.14,<0.2'") from e
        make = getattr(core.Function, "__from_extern_c__", None)
        if make is None:
            raise error("runtime-missing", f"apache-tvm-ffi ‹{tvm_ffi.__version__}› has no Function.__from_extern_c__",
                        expected="apache-tvm-ffi >=0.1.14,<0.2", hint="install a version >=0.1.14,<0.2")
        self.torch_in_use = torch_in_use
        self.module, self.make_function = tvm_ffi, make
        self.lib = ctypes.CDLL(libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
        self.addresses = {n: ctypes.cast(getattr(self.lib, n), ctypes.c_void_p).value for n in _FFI_SYMBOLS}
        self.array_slot = ctypes.c_void_p(self._global_function(b"ffi.Array"))
        self.addresses["tl_make_array"] = ctypes.addressof(self.array_slot)
        self.default_device = ctypes.c_int32(0)  # device of calls without tensors; set before such a call
        self.addresses["tl_default_device"] = ctypes.addressof(self.default_device)

    def _global_function(self, name: bytes) -> int:
        class Bytes(ctypes.Structure):
            _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t)]

        out = ctypes.c_void_p()
        if self.lib.TVMFFIFunctionGetGlobal(ctypes.byref(Bytes(name, len(name))), ctypes.byref(out)) or not out.value:
            raise error("runtime-missing", f"apache-tvm-ffi has no global function {name.decode()}",
                        expected=f"the global function {name.decode()}", found="none")
        return out.value  # kept for the life of the process


_llvm, _ffi = cache(_Llvm), cache(_Ffi)


def llvm_state() -> _Llvm:
    """LLVM of this process."""
    with _lock, phase("start LLVM") if not _llvm.cache_info().currsize else nullcontext():
        return _llvm()


def ffi_state() -> _Ffi:
    """TVM-FFI of this process.  Raises ImportError (named error) when it is missing or has an unknown version."""
    with _lock, phase("load TVM-FFI") if not _ffi.cache_info().currsize else nullcontext():
        return _ffi()


def compile_object(ir_text: str) -> bytes:
    """Host LLVM IR to a relocatable object for this machine."""
    state = llvm_state()
    with _lock, phase("LLVM compiles"):
        module = state.llvm.parse_assembly(ir_text)
        module.verify()
        return state.machine.emit_object(module)


class LoadedCode:
    """An object that is loaded into this process.  addresses: of the exported names.  library: owns the memory of the code.

    symbols: name -> address of the external symbols besides those of the process.
    """

    def __init__(self, obj: bytes, names: tuple[str, ...], symbols: Mapping[str, int | None] = {}) -> None:
        state = llvm_state()
        with _lock, phase("link host code"):
            builder = state.llvm.JITLibraryBuilder().add_object_img(obj).add_current_process()
            for name, address in symbols.items():
                builder.import_symbol(name, address)
            for name in names:
                builder.export_symbol(name)
            state.loaded += 1
            self.library = builder.link(state.jit, f"tilelang_{state.loaded}")
            self.addresses = {n: self.library[n] for n in names}

    @property
    def address(self) -> int:
        """The address of the only exported name."""
        (found,) = self.addresses.values()
        return found


class HostLibrary(LoadedCode):
    """Loaded host code.  symbols: name -> address of the external symbols other than TVM-FFI functions."""

    def __init__(self, obj: bytes, names: tuple[str, ...], symbols: Mapping[str, int] = {}) -> None:
        super().__init__(obj, names, {**ffi_state().addresses, **symbols})

    def function(self, name: str, *keep: Any, release_gil: bool = True) -> Callable[..., Any]:
        """The function as a TVM-FFI function; keeps this library and `keep` alive."""
        fn = ffi_state().make_function(self.addresses[name], keep_alive_object=(self, *keep))
        fn.release_gil = release_gil
        return fn
