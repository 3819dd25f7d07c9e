"""JITKernel, a compiled program: calls, sources, reports, profiling; and the in-memory cache of kernels by request."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilelang.env import env
from tilelang.errors import InternalError, TileLangError, error, for_user, register, strict
from tilelang.ir import deep
from tilelang.log import logger, phase
from tilelang.runtime.host_engine import ffi_state
from tilelang.runtime.signature import KernelParam, params_of
from tilelang.runtime.signature import Signature, resolve_out_idx, signature_of

from .arguments import (OVERLAPPING, UNALIGNED, adapted, by_position, explain, explain_cython, refusing_negated, was,
                        was_rejected, with_outputs)
from .artifact import Artifact, CompiledArtifact, Request, without_outputs, written_parameters
from .collecting import rarely_collected
from .diagnostics import jit_phase
from .graph_names import named
from .kernel_cache import cache_key, internal, is_cached, produce
from .outputs import OutputCall
from .requests import make_request
from .sources import Sources
from .spills import of_program, warn_of_spills
from .torch_calls import in_graphs, traced, with_torch

if TYPE_CHECKING:
    from tilelang.transform import Schedule

    from .display import Layouts

    class Output(Any):
        """What a call returns: an array of the caller's package, or a tuple of them; of a factory, the kernel.

        For type checkers, which accept it wherever such an array is expected."""

        shape: tuple[int, ...]
        def __call__(self, *args: Any, **kwargs: Any) -> Output: ...
        def __getitem__(self, index: Any) -> Output: ...
        def __iter__(self) -> Iterator[Output]: ...

register("kernel-schedule", IndexError, "a kernel has no pipelined loop of this number",
         "count the T.Pipelined loops of the program from 0; kernels for the CPU have no schedules")
register("kernel-not-tuned", ValueError, "the tuner's result of a kernel that was not tuned is asked for",
         expected="a kernel made by the autotuner", found="a kernel compiled without it")


_ALIGNMENT = "tl.global_alignment"
_NOALIAS = "tirx.noalias"


class Adapter:
    """The object behind `kernel.adapter`, which older scripts use: the kernel, with two attributes under other names."""

    def __init__(self, kernel: JITKernel) -> None:
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name[:1] == "_":
            raise AttributeError(name)
        return getattr(self._kernel, {"result_idx": "out_idx", "libpath": "library_path"}.get(name, name))

    def get_exportable_executable(self) -> Any:
        return self._kernel

    def _legalize_result_idx(self, result_idx: Any) -> list[int]:
        """Positions of the outputs, counted from 0: those that an out_idx names; of None, those that the program returns."""
        func = self._kernel.request.func
        return list(resolve_out_idx(func if result_idx is None else without_outputs(func), result_idx))


def _no_attribute(kernel: JITKernel, name: str) -> Any:
    near = [] if name[:1] == "_" else get_close_matches(name, [n for n in dir(kernel) if n[:1] != "_"], 1)
    raise AttributeError(f"a kernel has no attribute `{name}`" + (f": did you mean `{near[0]}`?" if near else ""))


def _most(key: str, about: str) -> Any:
    """A property: the largest value of a resource among the kernels; None where none has it."""
    def largest(kernel: JITKernel) -> int | None:
        return max((r[key] for r in kernel.resource_usage if r.get(key) is not None), default=None)

    return property(largest, doc=about)


class JITKernel:
    """A compiled program.  Call it with its inputs in order or by name; it returns its outputs (out_idx, T.empty).  out=: a
    tensor, or a tuple of several, that the results are written to.

    Tensors: torch, NumPy and any DLPack object on the kernel's device.  The arguments are checked before anything runs;
    a failed check raises an error.  A kernel may be called from several threads.
    torch's negated views (x.conj().imag): strided ones are rejected, pass x.resolve_neg() instead.  Views of one element,
    and results of the private torch._neg_view on compact tensors, are read as stored, without the negation.
    """

    def __init__(self, func: Any = None, out_idx: Any = None, execution_backend: str | None = "tvm_ffi",
                 target: Any = "auto", target_host: Any = None, verbose: bool | None = False,
                 pass_configs: Any = None, from_database: bool = False, compile_flags: Any = None,
                 *, _request: Request | None = None, _artifact: Artifact | None = None) -> None:
        if _request is None:
            _request = make_request(func, out_idx, execution_backend, target, verbose, pass_configs, compile_flags)
            _artifact = produce(_request)[0]
        assert _artifact is not None
        self.request, self._built = _request, _artifact
        self.prim_func: Any = _request.given if _request.given is not None else _request.func
        self.signature: Signature = signature_of(_request.func, _request.out_idx)
        self.target, self.target_host = _request.target, target_host
        self.execution_backend = _request.backend
        self.pass_configs, self.compile_flags = dict(_request.config), list(_request.flags)
        self._sources = Sources(_artifact, _request.target, _request.flags)
        self.verbose = _request.verbose
        self.latency: float | None = None
        self.config: dict[str, Any] | None = None
        self.ref_latency: float | None = None
        self.library_path: str | None = None
        self.adapter = Adapter(self)
        self.graph_name = named(self)
        self._lock = threading.Lock()
        self._written: frozenset[str] | None = None
        self._variants: dict[str, JITKernel] = {}  # of the same program, that calls needed
        self._entry: Any = None
        self._run: Any = self._first_run

    if not TYPE_CHECKING:
        __getattr__ = _no_attribute  # type checkers report such names themselves

    # ---- calling --------------------------------------------------------------------------------------------------
    @in_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        if kwargs:
            return _call_with(self, args, kwargs)
        try:
            return self._run(*args)
        except Exception as e:
            problem = e
        try:
            return _again(self, args, problem)
        except (TileLangError, InternalError) as e:
            raise for_user(e)  # noqa: B904 - for_user decides what goes with it

    def __getitem__(self, grid: Any) -> Any:
        raise error("kernel-keyword", f"kernel {self.signature.name} takes no grid in brackets", found="kernel[...]",
                    hint="call kernel(...): the grid is what T.Kernel says")

    def _fitting(self, problem: Exception) -> JITKernel | None:
        """Another kernel of the same program, for valid arguments that this kernel rejected."""
        config = self.request.config
        if self.target.is_cuda and was(UNALIGNED, problem) and config.get(_ALIGNMENT, 16) > 1:
            return self.unaligned
        return self.in_order if was(OVERLAPPING, problem) and config.get(_NOALIAS, True) is not False else None

    @property
    def unaligned(self) -> JITKernel:
        """A kernel of the same program for any addresses and strides: no TMA, and accesses no wider than an element.

        It is compiled at the first call whose addresses or strides are not multiples of 16 bytes.
        """
        return self._variant("unaligned", config={**self.request.config, _ALIGNMENT: 1})

    @property
    def in_order(self) -> JITKernel:
        """A kernel of the same program for tensors that may overlap: it moves no read across a write
        (transform/legalize/aliasing.py).

        It is compiled at the first call that passes the same memory for two parameters, of which the program writes one
        and then reads the other.
        """
        return self._variant("in_order", config={**self.request.config, _NOALIAS: False})

    @property
    def into(self) -> JITKernel:
        """A kernel of the same program that takes its outputs as arguments, in the places of their parameters.

        It is compiled at the first call with out=.
        """
        if not self.signature.out_idx:
            return self
        return self._variant("into", func=without_outputs(self.request.func), out_idx=None, given=None)

    def _variant(self, name: str, **changes: Any) -> JITKernel:
        with self._lock:
            if name not in self._variants:
                self._variants[name] = compile_request(replace(self.request, **changes))
            return self._variants[name]

    def _first_run(self, *args: Any) -> Any:
        """Load the code, then replace the call by the fast path.  Calls that torch traces need no code."""
        if (op := traced(self)) is not None:
            return op(*args)
        with self._lock:
            self._load()
            if not self.signature.outputs or self._built.kind == "interpreted":
                self._run = self._entry.call if self.execution_backend != "cython" else _empty_list(self._entry.call)
            else:
                self._run = OutputCall(self)
            self._run = with_torch(self, refusing_negated(self.signature, self._run))
        return self._run(*args)

    def _load(self) -> None:
        if self._entry is None:
            from .loading import load  # 22 ms: the host code generator, which a first call needs and compiling does not

            with jit_phase("adapter", self.signature.name), phase("load"), rarely_collected():
                self._entry = load(self._built, self.signature, self.request)

    def written(self) -> frozenset[str]:
        """Names of the tensors and pointers that the program may write."""
        if self._written is None:
            known = self._built.meta.get("written")
            self._written = frozenset(written_parameters(self.request.func) if known is None else known)
        return self._written

    torch_function = func = property(lambda self: self)

    # ---- facts ----------------------------------------------------------------------------------------------------
    @property
    def params(self) -> list[KernelParam]:
        return params_of(self.request.func)

    @property
    def out_idx(self) -> list[int]:
        return list(self.signature.out_idx)

    @property
    def artifact(self) -> CompiledArtifact:
        """Sources and parameters in the form tilelang.lower gives."""
        return CompiledArtifact(self.prim_func, self.prim_func, self.params, self.kernel_source, self,
                                self.target, self.target_host)

    @property
    def kernel_source(self) -> str:
        return self._built.kernel_source

    @property
    def host_source(self) -> str:
        return self._built.host_source

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """Device source; with kernel_only=False the host source follows."""
        return self.kernel_source if kernel_only else self.kernel_source + "\n" + self.host_source

    def get_host_source(self) -> str:
        """LLVM IR of the host program (argument checks, launches)."""
        return self.host_source

    def show_source(self, which: str = "kernel") -> None:
        """Print source.  which: "kernel", "host" or "both"."""
        print(self._sources.of(which))

    def print_source_code(self, which: str = "kernel", file: Any = None) -> None:
        """Deprecated: show_source or export_sources."""
        warnings.warn("print_source_code is deprecated, use show_source or export_sources", DeprecationWarning,
                      stacklevel=2)
        if file is None:
            self.show_source(which)
        else:
            Path(file).write_text(self._sources.of(which), encoding="utf-8")

    def export_sources(self, kernel_path: Any = None, host_path: Any = None) -> None:
        """Write the device and host source to files.  Raises ValueError when neither path is given."""
        self._sources.write(kernel_path, host_path)

    @property
    def cubin(self) -> bytes | None:
        """The CUDA binary, None for other targets."""
        return self._built.files.get("kernel.cubin")

    @property
    def hsaco(self) -> bytes | None:
        """The code object of the first kernel for an AMD GPU, None for other targets."""
        return self._built.files.get("kernel.hsaco")

    @property
    def resource_usage(self) -> list[dict[str, Any]]:
        """Per device kernel: name, registers, spills (bytes), shared_bytes (dynamic), static_shared, threads."""
        return [dict(r) for r in self._built.meta.get("kernels", [])]

    n_regs = registers = _most("registers", "Registers per thread (the largest of the kernels); None where there are none.")
    n_spills = spills = _most("spills", "Bytes spilled to local memory.")
    n_max_threads = _most("threads", "Threads of a block.")
    shared_memory = _most("shared_bytes", "Dynamic shared memory of a block in bytes (the largest of the kernels).")

    @property
    def report_data(self) -> dict[str, Any]:
        """The contents of `report` as data: name, target, times (ms), kernels (facts of each device kernel), unaligned."""
        meta = self._built.meta
        facts = meta.get("facts", [])
        if self._built.kind == "cpu":
            from .report import cpu_facts  # 5 ms

            facts = cpu_facts(self.request.func, self.target, self.kernel_source)
        return {"name": self.signature.name, "target": str(self.target), "times": dict(meta.get("times", {})),
                "kernels": [dict(f) for f in facts], "unaligned": "unaligned" in self._variants}

    def report(self) -> str:
        """A text about the compiled kernel.

        For each device kernel: instructions, schedule, resources, occupancy, optimisations that were declined and why, and
        the roofline time (the least time at the target's peak rates)."""
        from .display import Report  # 2 ms
        from .report import report_text  # 5 ms

        return Report(report_text(self.report_data))

    def schedule(self, loop: int = 0) -> Schedule:
        """The schedule of pipelined loop number `loop`, in the order of the program; times are cycles of a steady iteration.
        Schedule.parse reads its text.  Raises kernel-schedule (IndexError) where there is no such loop; the CPU has none."""
        return schedule_of(self, loop)

    def plot_schedule(self, path: Any, loop: int = 0, measured: float | None = None) -> Path:
        """Draw a steady iteration by warp group and unit: .svg, .png, .pdf, or .json for ui.perfetto.dev.  measured: ms of a
        call, shown as cycles.  Raises as `schedule`, schedule-picture (ValueError), and ImportError without matplotlib."""
        from .display import draw_schedule  # 2 ms

        return draw_schedule(schedule_of(self, loop), Path(path), measured, schedule_of(self, loop, True))

    @cached_property
    def layouts(self) -> Layouts:
        """The Layout or Fragment of each shared and fragment buffer by name.  Empty on the CPU."""
        from .display import kernel_layouts  # 2 ms

        return kernel_layouts(self.request)

    def sync_report(self) -> str:
        """Verdict of the synchronisation verifier on each device kernel."""
        return self._built.meta.get("sync_report") or "no device synchronisation: blocks run one thread each"

    def export_library(self, path: Any) -> None:
        """Write the kernel as a shared library, by the system's linker.

        Programs without this package load it by `tvm_ffi.load_module(path)["name"]`; JITKernel.from_database loads it here.
        It runs on CPUs that have the features of this one and on GPUs of the target's architecture.  An exported CUDA kernel
        rejects addresses and strides that are not multiples of 16 bytes, for which this object would compile another kernel.
        Raises AttributeError for execution backends other than tvm_ffi, ValueError for an empty path, kernel-export
        (NotImplementedError) for a kernel that was not compiled here or without a linker, kernel-link when linking fails.
        """
        if self.execution_backend != "tvm_ffi":
            raise AttributeError(f"export_library exists for the tvm_ffi backend, this kernel runs by "
                                 f"{self.execution_backend}")
        from .exporting import export_library  # 20 ms: it loads the CPU engine and starts processes

        self.library_path = export_library(path, self.request, self._built)

    def export(self, folder: Any, name: str | None = None, arch: Any = None, ptx: bool = False) -> Path:
        """Write the kernel for C programs into a folder: libNAME.so, NAME.o, NAME.h, NAME.json, CMakeLists.txt, main.c.

        The library has the C function NAME, which takes the tensors' addresses, the scalars, the sizes that the program leaves
        open, and for CUDA a stream; NAME_error, which gives the message of an error; and NAME_xla for jax.ffi.  They need no
        Python.  name: default, that of the program.  arch: for CUDA, one architecture or several ("sm_80", "sm_90a"); a call
        takes the best that its device runs; default, that of the kernel.  ptx: add PTX, which later devices compile.
        A CPU library runs on CPUs that have the features of this one.  Returns the path of the library.  Raises kernel-export
        (NotImplementedError) for a name that C reserves and for kernels without compiled code; without a C compiler to link
        the library, after everything else is written.
        """
        from .exporting import export  # 20 ms: it loads the CPU engine and starts processes

        return export(self, folder, name, arch, ptx)

    # ---- ptx and sass ---------------------------------------------------------------------------------------------
    def show_ptx(self) -> None:
        self._sources.show("PTX")

    def show_sass(self) -> None:
        """Print the machine code: SASS, or that of an AMD GPU."""
        self._sources.show("SASS")

    def export_ptx(self, path: Any) -> None:
        self._sources.export("PTX", path)

    def export_sass(self, path: Any) -> None:
        self._sources.export("SASS", path)

    # ---- measuring, tuning ----------------------------------------------------------------------------------------
    def get_profiler(self, tensor_supply_type: Any = None) -> Any:
        """A Profiler of this kernel.  tensor_supply_type: how inputs are made."""
        from .profiling import make_profiler  # 7 ms

        return make_profiler(self, tensor_supply_type)

    def run_once(self, func: Any = None) -> Any:
        """Run once on generated inputs; with func, run that instead."""
        return self.get_profiler().run_once(func)

    def update_tuner_result(self, latency: float, config: dict[str, Any], ref_latency: float | None) -> JITKernel:
        self.latency, self.config, self.ref_latency = latency, config, ref_latency
        return self

    def get_tuner_result(self) -> tuple[float, dict[str, Any] | None, float | None]:
        if self.latency is None:
            raise error("kernel-not-tuned", "Tuning results are not available: the autotuner did not make this kernel",
                        hint="call a function decorated with @tilelang.autotune")
        return self.latency, self.config, self.ref_latency

    @classmethod
    def from_tilelang_function(cls, func: Any, **kwargs: Any) -> JITKernel:
        """Compile a PrimFunc."""
        return cls(func, **kwargs)

    @classmethod
    def from_database(cls, func: Any, host_kernel_source: str = "", device_kernel_source: str = "",
                      kernel_lib_path: Any = None, params: Any = None, target: Any = "auto", target_host: Any = None,
                      out_idx: Any = None, execution_backend: str | None = "tvm_ffi", pass_configs: Any = None,
                      compile_flags: Any = None) -> JITKernel:
        """Load a saved kernel without compiling.

        kernel_lib_path: a library of export_library, or the folder of an entry of the disk cache (or a file in it), at any
        place.  func and the other arguments: those it was compiled with.  The given sources are the ones that
        get_kernel_source and get_host_source return for a library.  params: ignored, since func determines them.
        Raises FileNotFoundError, and kernel-library (ValueError) for a kernel of another program or of other options.
        """
        from .exporting import saved_artifact  # 20 ms: it loads the CPU engine and starts processes

        if kernel_lib_path is None:
            raise ValueError("from_database needs kernel_lib_path")
        request = make_request(func, out_idx, execution_backend, target, False, pass_configs, compile_flags)
        kernel = cls(_request=request, _artifact=saved_artifact(kernel_lib_path, request, device_kernel_source,
                                                                host_kernel_source))
        kernel.target_host = target_host
        kernel.library_path = kernel._built.meta.get("library")
        if kernel.library_path:
            kernel._load()
        return kernel

    def _repr_html_(self) -> str:
        from .display import kernel_html  # 2 ms

        return kernel_html(self)

    def __repr__(self) -> str:
        return f"<JITKernel {self.signature.name} for {self.target}>"

    def __copy__(self) -> JITKernel:
        return self

    def __deepcopy__(self, memo: Any) -> JITKernel:
        return self

    def __reduce__(self) -> Any:
        return recompiled, (self.request, (self.latency, self.config, self.ref_latency))


def _again(kernel: JITKernel, args: tuple[Any, ...], problem: Exception) -> Any:
    """Handle a failed call: repeat it with converted arguments, or raise the full error."""
    entry = kernel._entry
    if entry is not None and (full := entry.diagnosed(problem)) is not None:
        raise full from None
    if len(args) == len(kernel.signature.inputs) and was_rejected(problem):
        fitting = kernel._fitting(problem)
        if fitting is not None:
            return fitting(*args)
        other = adapted(kernel.signature, args, kernel.written)
        if other is not None:
            try:
                return kernel._run(*other)
            except Exception as e:
                problem = e
            fitting = kernel._fitting(problem)
            if fitting is not None:
                return fitting(*other)
    tell = explain_cython if kernel.execution_backend == "cython" else explain
    out = tell(kernel.signature, args, problem)
    interpreted = (out is problem and kernel._built.lowered is not None and
                   getattr(entry, "unsupported", None) is not problem)
    fault = internal(kernel.request, "the interpreter", out) if interpreted else None
    if fault is not None:
        raise fault from out
    raise out from None


def schedule_of(kernel: JITKernel, loop: int, times: bool = False) -> Any:
    """The schedule of a pipelined loop; with `times`, the predicted us of its launch, None where calls decide it."""
    from tilelang.transform import Schedule  # 1 ms

    found = [(x, f["predicted"] and f["predicted"]["us"]) for f in kernel._built.meta.get("facts", []) for x in f["schedules"]]
    if not -len(found) <= loop < len(found):
        raise error("kernel-schedule", f"`{kernel.signature.name}` has no pipelined loop ‹{loop}› for {kernel.target}",
                    expected=f"a number below {len(found)}")
    return found[loop][1] if times else Schedule.parse(found[loop][0])


def _call_with(kernel: JITKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with keywords: inputs by name, out= for the results; stream= and skip_tensor_validation= (cython backend)."""
    sig = kernel.signature
    names = {a.name for a in sig.inputs}
    own = ("out", "stream", "skip_tensor_validation") if kernel.execution_backend == "cython" else ("out",)
    option = {k: kwargs.pop(k) for k in own if k in kwargs and k not in names}
    if kwargs:
        args = by_position(sig, args, kwargs)
    out, stream = option.get("out"), option.get("stream")
    places = [getattr(getattr(x, "device", None), "index", None) for x in args]
    device = next((i for i in places if isinstance(i, int)), 0)
    run: Any = kernel
    if out is not None:
        run, args, out = kernel.into, *with_outputs(sig, args, out)
    if stream is None or not kernel.target.is_gpu:
        found = run(*args)
    else:
        with ffi_state().module.use_raw_stream(ffi_state().module.device(kernel.target.ffi_device, device), int(stream)):
            found = run(*args)
    return found if out is None else out


def _empty_list(call: Any) -> Any:
    """The cython backend returns [] where there are no outputs."""
    def run(*args: Any) -> list[Any]:
        call(*args)
        return []

    return run


_memory: dict[tuple[str, str], JITKernel] = {}
_key_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def clear_memory() -> None:
    """Forget the kernels of this process."""
    with _guard:
        _memory.clear()
        _key_locks.clear()


@deep()
def compile_request(request: Request) -> JITKernel:
    """The kernel of a request, from memory, from the disk cache, or compiled now."""
    if not is_cached(request):
        return _compile_now(request, None)
    with phase("cache key"):
        key = cache_key(request)
    name = (key, request.backend)
    kernel = _memory.get(name)
    if kernel is not None:
        return kernel
    with _guard:
        lock = _key_locks.setdefault(key, threading.Lock())
    with lock:  # threads that want the same kernel wait for one compilation
        kernel = _memory.get(name)
        if kernel is None:
            kernel = _memory[name] = _compile_now(request, key)
    return kernel


def recompiled(request: Request, tuned: tuple[Any, Any, Any]) -> JITKernel:
    """Unpickle a kernel: compile the same program with the same settings, or take it from the cache.

    tuned: latency in ms, configuration and reference latency of a tuned kernel.
    """
    kernel = compile_request(request)
    if tuned[0] is not None:
        kernel.update_tuner_result(*tuned)
    return kernel


def _compile_now(request: Request, key: str | None) -> JITKernel:
    say = request.verbose or env.is_print_on_compilation_enabled()
    name = request.func.name
    start = time.perf_counter()
    logger.debug("TileLang begins to compile kernel `%s` with `out_idx=%s`", name, request.out_idx)
    with strict(request.config):
        try:
            artifact, source = produce(request, key)
        except TileLangError as e:
            if e.kind == "register-limit":
                raise of_program(request.func, e) from None
            raise
        kernel = JITKernel(_request=request, _artifact=artifact)
        ms = (time.perf_counter() - start) * 1e3
        if source != "disk" and request.target.is_cuda:
            warn_of_spills(request.func, kernel.n_spills or 0)
    if say:
        logger.info("TileLang completes to compile kernel `%s` for %s in %.0f ms (%s)", name, request.target, ms, source)
    _debug(kernel, source, ms)
    return kernel


def _debug(kernel: JITKernel, source: str, ms: float) -> None:
    level = env.TILELANG_DEBUG
    if level >= 1:
        print(f"[tilelang] {kernel.signature.name} for {kernel.target}: "
              f"{'cache hit on disk' if source == 'disk' else 'compiled'} in {ms:.1f} ms")
    if level >= 2:
        print(kernel.report())
        print(kernel.get_kernel_source())
    if level >= 5:
        kernel.show_sass() if kernel.target.is_gpu else None
