"""Inspection of a compilation: the program after a pass, layouts, a simulated run, compile times, the machine's abilities."""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np

from tilelang.env import env
from tilelang.errors import TileLangError
from tilelang.ir import GLOBAL, Cast, Const, For, Func, Launch, Load, Store, dtype, free_vars, inner, numpy_dtype, walk
from tilelang.ops import Copy, Gemm, Reduce
from tilelang.runtime.signature import signature_of
from tilelang.target import Target, of_arch
from tilelang.target.hip import HIP_CHIPS
from tilelang.transform.analysis.effects import effects
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower

from .artifact import KERNEL_SEPARATOR
from .building import build, device_source, host_text, launcher_of
from .requests import make_request


def program_after(program: Any, target: Any = "auto", after: str | None = None) -> Func:
    """The program after a pass of the GPU pipeline (None: after the last).  Raises LookupError, which lists the passes."""
    passes = (*TILE_PASSES, *DEVICE_PASSES)
    if after is not None:
        names = [p.__name__ for p in passes]
        if after not in names:
            raise LookupError(f"no pass {after}: passes are {', '.join(names)}")
        passes = passes[:names.index(after) + 1]
    t = Target(target)
    cx = PassContext(t if t.is_gpu else Target({"kind": "cuda", "arch": "sm_80"}))
    return run_passes(program if isinstance(program, Func) else program.func, passes, cx)


def sources_of(program: Any, target: Any = "auto") -> tuple[str, str]:
    """(device source, host source) of a program, as tilelang.compile generates them.  No device compiler is needed."""
    request = make_request(program, target=target)
    if request.target.is_cpu:
        made = build(request)
        return made.kernel_source, made.host_source
    lowered, sources, _ = device_source(request)
    launcher = launcher_of(request, lowered)
    return KERNEL_SEPARATOR.join(sources), host_text(request, signature_of(request.func, request.out_idx), launcher)


def layouts_after(program: Any, target: Any = "auto") -> Iterator[tuple[str, Any]]:
    """(buffer name, Layout or Fragment) of every shared and fragment buffer, in order of allocation."""
    for n in walk(program_after(program, target, "infer_layouts").body):
        if isinstance(n, Launch):
            for buffer, layout in n.plan.layouts:
                yield buffer.name, layout


# The compiler of each kind of GPU: its name, module and function.
_COMPILERS = {"cuda": ("nvrtc", "tilelang.runtime.nvrtc", "compile_cubin"),
              "hip": ("clang", "tilelang.runtime.hip_compiler", "compile_hsaco")}


def compile_times(trace: Callable[[], Any], arch: str = "sm_90a", repeat: int = 5) -> Iterator[str]:
    """Report lines with the median times of tracing, lowering (by pass), printing and compiling of what `trace` makes."""
    target = of_arch(arch)
    tool, module, function = _COMPILERS[target.kind]
    print_kernel = import_module(f"tilelang.codegen.{target.kind}.printer").print_kernel  # 31 ms
    compile_text = getattr(import_module(module), function)  # 6 ms
    phases: dict[str, list[float]] = {}
    first: dict[str, float] = {}

    def timed(name: str, run: Any) -> Any:
        start = time.perf_counter()
        out = run()
        seconds = time.perf_counter() - start
        first.setdefault(name, seconds)
        phases.setdefault(name, []).append(seconds)
        return out

    records: dict[str, list[float]] = {}
    for _ in range(max(2, repeat)):
        func = timed("trace", trace)
        cx = PassContext(target, verify=False)
        program = timed("lower", lambda func=func, cx=cx: lower(func.func, target, cx=cx))
        for name, seconds in cx.seconds.items():
            records.setdefault(name, []).append(seconds)
        source = timed("print", lambda program=program: "\n".join(print_kernel(k) for k in program.kernels))
        made = timed(tool, lambda source=source: compile_text(source, target.arch))
    ms = {k: statistics.median(v) * 1e3 for k, v in phases.items()}
    python = ms["trace"] + ms["lower"] + ms["print"]
    cold = sum(first.values()) * 1e3
    yield f"{func.func.name} for {arch}; median of {max(2, repeat)} (first in this process)"
    for k, v in ms.items():
        yield f"  {k:<8}{v:8.1f} ms   ({first[k] * 1e3:.1f} ms)"
    yield f"  python  {python:8.1f} ms   total {python + ms[tool]:.1f} ms   cold, first in process {cold:.1f} ms"
    yield f"  binary: {made.registers} registers, {made.spills} {'registers' if target.chip else 'bytes'} spilled"
    slow = sorted(records.items(), key=lambda r: -statistics.median(r[1]))[:6]
    yield "  slowest passes: " + ", ".join(f"{k} {statistics.median(v) * 1e3:.1f}" for k, v in slow) + " ms"


def machine_facts() -> Iterator[tuple[str, str, str]]:
    """Rows (component, state, hint): what this machine can do, and how to install what is missing."""
    yield "Python", platform.python_version(), "3.10 or newer"
    yield from _gpu_facts()
    yield from _hip_facts()
    yield from _cpu_facts()
    for package, gives in (("torch", "tensors of torch as arguments"),
                           ("matplotlib", "pictures of layouts: pip install 'tilelang-py[vis]'"),
                           ("tvm_ffi", "calling convention (core dependency)"),
                           ("ml_dtypes", "bf16, fp8 in NumPy (core dependency)")):
        found = importlib.util.find_spec(package) is not None
        yield package, "found" if found else "missing", gives
    yield "cache", env.TILELANG_CACHE_DIR, "TILELANG_CACHE_DIR"


def _gpu_facts() -> Iterator[tuple[str, str, str]]:
    from tilelang.runtime import cuda_driver, nvrtc, sass  # 10 ms

    if cuda_driver.is_available():
        d = cuda_driver.driver()
        count = d.device_count()
        for i in range(count):
            yield f"GPU {i}", str(d.properties(i)), "runs target=\"cuda\""
        if not count:
            yield "GPU", "driver without a device", "check nvidia-smi"
        yield "CUDA driver", ".".join(map(str, d.version())), "newest CUDA version the driver runs"
    else:
        yield "GPU", "none (no CUDA driver)", "install the NVIDIA driver; kernels still compile for any arch"
    found = nvrtc.find_nvrtc()
    for c in found:
        loaded = nvrtc.load_nvrtc(c)
        state, says = ("broken", loaded) if isinstance(loaded, str) else (
            ".".join(map(str, loaded.version)), f"compiles for sm_{loaded.archs[0]} to sm_{loaded.archs[-1]}")
        yield "NVRTC", state, f"{c.library} {says}"
    if not found:
        yield "NVRTC", "missing", "compiles CUDA C++ in process: pip install 'tilelang-py[cuda]'"
    yield "nvdisasm", sass.find_nvdisasm() or "missing", "show_sass: pip install nvidia-cuda-nvdisasm"


def _hip_facts() -> Iterator[tuple[str, str, str]]:
    from tilelang.runtime import hip_driver  # 3 ms

    archs = ", ".join(HIP_CHIPS)
    try:
        d = hip_driver.driver_of("hip")
        for i in range(d.device_count()):
            p = d.properties(i)
            yield f"AMD GPU {i}", str(p), 'runs target="hip"' if p.arch in HIP_CHIPS else f"no target; targets are {archs}"
        yield "HIP driver", ".".join(map(str, d.version())), "version of HIP"
    except TileLangError as e:
        state = "none (no HIP driver)" if e.kind == "hip-missing" else e.message
        yield "AMD GPU", state, f"{hip_driver.HOW}; kernels still compile for any arch, and run on the simulator"
    found = importlib.util.find_spec("ziglang") is not None
    yield "ziglang", version("ziglang") if found else "missing", f"compiles HIP C++ to code objects (.hsaco) for {archs}" + (
        "" if found else ": pip install 'tilelang-py[hip]'")


def _cpu_facts() -> Iterator[tuple[str, str, str]]:
    try:
        import llvmlite  # 1 ms
        import llvmlite.binding as llvm  # 21 ms

        features = llvm.get_host_cpu_features()
        vector = next((v for v in ("avx512f", "avx2", "avx", "sse4.2") if features.get(v)), "no SIMD extension known")
        yield "LLVM", ".".join(map(str, llvm.llvm_version_info)), f"llvmlite {llvmlite.__version__}"
        yield "CPU", f"{llvm.get_host_cpu_name()}, {vector}, {os.cpu_count()} cores", "runs target=\"cpu\""
    except ImportError:
        yield "LLVM", "missing", f"{sys.executable} -m pip install llvmlite"


# ---- a simulated run --------------------------------------------------------------------------------------------------

def random_arguments(func: Func, seed: int = 0, symbol: int = 100) -> list[Any]:
    """One random argument for each parameter: standard normal or small integers.  Symbolic dimensions become `symbol`."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for p in func.params:
        b = func.buffer_of(p)
        if b is None:
            out.append(symbol if p.dtype.is_int else 1.0)
            continue
        shape = tuple(d if isinstance(d, int) else symbol for d in b.shape)
        if b.dtype.is_float:
            out.append(rng.standard_normal(shape).astype(np.float32).astype(numpy_dtype(b.dtype)))
        else:
            out.append(rng.integers(0, 2 if b.dtype.is_bool else 8, shape).astype(numpy_dtype(b.dtype)))
    return out


def simulate_program(program: Any, arch: str = "sm_80", seed: int = 0) -> tuple[bool, str]:
    """Run the lowered program on the device simulator and compare with the reference interpreter.

    Returns whether all written tensors agree within a bound, and the report: verdict, tensors, counts.  The bound allows for
    sums in another order (float32 rounding, the square root of their length) and for rounding to the narrowest type that
    values are converted to.
    """
    from tilelang.simulator.device.run import run_device  # 100 ms
    from tilelang.simulator.reference.run import run_tile  # 99 ms

    func: Func = program if isinstance(program, Func) else program.func
    values = dict(zip([p.name for p in func.params], random_arguments(func, seed)))
    written, made = _outputs_of(func)
    given = {k: v for k, v in values.items() if k not in made}
    lowered = lower(func, of_arch(arch))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        want = run_tile(func, given)
        report = run_device(lowered.host, given)
    length, narrow = _longest_sum(func), _narrowest(func)
    largest = max((float(np.abs(v.astype(np.float64)).max(initial=0.0)) for v in values.values()
                   if isinstance(v, np.ndarray)), default=1.0)
    ok, lines = True, []
    for name in written:
        a, b = report.outputs[name].astype(np.float64), want[name].astype(np.float64)
        dt = next(x.dtype for _, x in func.buffers if x.name == name)
        with np.errstate(invalid="ignore"):
            err = float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)), initial=0.0))
        top = float(np.max(np.where(np.isfinite(b), np.abs(b), 0.0), initial=0.0))
        eps = max(_rounding(dt) if dt.is_float else 0.0, narrow)
        bound = 2 * eps * top + 4 * 2.0**-24 * length**0.5 * max(top, largest * largest) if dt.is_float else 0.0
        ok = ok and err <= bound
        terms = f"sums of {length} terms" if length > 1 else "no sums"
        lines.append(f"  {name}: largest difference from the reference interpreter {err:.3g}, bound {bound:.3g} "
                     f"({dt}, {terms}): {'ok' if err <= bound else 'FAIL'}")
    notes = sorted({str(w.message).partition(": ")[2].partition(";")[0] for w in told if "unwritten-output" in str(w.message)})
    return ok, "\n".join([f"{func.name} on the simulated {arch}: {'ok' if ok else 'FAIL'}", *lines,
                          *(f"  note: {n}" for n in notes), report.text()])


def _outputs_of(func: Func) -> tuple[list[str], set[str]]:
    """(tensor parameters that a program writes, those of them that it does not read and whose shapes the others tell)."""
    seen = [e for e in effects(func.body) if e.buffer.scope_name == GLOBAL]
    writes, reads = ({e.storage for e in seen if e.writes}, {e.storage for e in seen if e.reads})
    tensors = [(p.name, b) for p, b in func.buffers]
    kept = [b for _, b in tensors if b.data not in writes or b.data in reads]
    bound = {v for b in kept for d in b.shape if not isinstance(d, int) for v in free_vars(d)} | set(func.params)
    made = {name for name, b in tensors if b not in kept and all(
        isinstance(d, int) or set(free_vars(d)) <= bound for d in (*b.shape, *(b.strides_ or ())))}
    return [b.name for _, b in tensors if b.data in writes], made


def _longest_sum(func: Func) -> int:
    """The most terms that one element of a program sums: the inner extents of T.gemm and reductions times their loops."""
    def longest(s: Any, times: int) -> int:
        if isinstance(s, For):
            times *= int(s.extent.value) if isinstance(s.extent, Const) else 100
        inner_extent = 1
        if isinstance(s, Gemm):
            inner_extent = s.a.extents[-1 if not s.transpose_a else -2]
        elif isinstance(s, Reduce):
            inner_extent = s.src.extents[s.dim]
        elif isinstance(s, Store) and any(x.buffer is s.buffer for x in walk(s.value, Load)):
            return times
        count = int(inner_extent.value) if isinstance(inner_extent, Const) else inner_extent
        here = times * count if isinstance(count, int) and count > 1 else 1
        return max([here, *(longest(x, times) for x in inner(s))])

    return longest(func.body, 1)


def _narrowest(func: Func) -> float:
    """The largest relative rounding error of the float types that a program converts wider values to; 0 without one."""
    made = [n.dtype for n in walk(func.body, Cast) if n.dtype.is_float and n.value.dtype.is_float and n.dtype.bits <
            n.value.dtype.bits]
    made += [n.dst.dtype for n in walk(func.body, Copy) if n.dst.dtype.is_float and n.dst.dtype.bits < n.src.dtype.bits]
    return max((_rounding(dt) for dt in made), default=0.0)


def _rounding(dt: dtype) -> float:
    """The relative error of one rounding to a float type."""
    return float(ml_dtypes.finfo(numpy_dtype(dt)).eps) / 2
