"""Compilation without a cache: makes the artifact of a request, with one function per kind of target."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from dataclasses import replace
from importlib import import_module
from threading import Thread
from typing import Any

from tilelang.env import env
from tilelang.errors import TileLangError, brought, error, register, register_warning, warn
from tilelang.ir import Assert, Call, Evaluate, For, Launch, contains, statements, stmts_of, walk
from tilelang.runtime.cpus import usable_cpus
from tilelang.runtime.host_engine import compile_object, ffi_state, load_llvm
from tilelang.runtime.nvcc_options import nvrtc_options
from tilelang.runtime.size_checks import SizeCheck, size_checks
from tilelang.runtime.signature import Signature, TensorArg, host_assumptions, needed_symbols, signature_of
from tilelang.target.cluster import cluster_size
from tilelang.target.machine import REGISTERS_PER_SM
from tilelang.target.mma import row as row_of
from tilelang.target.probe import load_libcuda
from tilelang.log import phase
from tilelang.transform.framework.observe import PassEventObserver, announce_code, write_traces_by

from .artifact import INTERPRETED, KERNEL_SEPARATOR, Artifact, Request, disjoint_parameters, written_parameters
from .collecting import collect_meanwhile, rarely_collected
from .diagnostics import jit_phase
from .hooks import apply_hook, has_hook
from .report import facts_of, with_resources
from .spills import THRESHOLD as SPILLED

register("compile-timeout", TimeoutError, "the device compiler takes longer than TILELANG_COMPILE_TIMEOUT_SECONDS",
         "set TILELANG_COMPILE_TIMEOUT_SECONDS to more seconds, or leave it empty",
         expected="device code within TILELANG_COMPILE_TIMEOUT_SECONDS")


def _trace_writer() -> PassEventObserver:
    from .trace import tracer  # 4 ms: only compilations that are traced write pages

    return tracer()


write_traces_by(_trace_writer)


register_warning("without-effect", "no statement of a program stores in a tensor or is a call")


class Stopwatch:
    """Milliseconds per named phase."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.times[name] = round(self.times.get(name, 0.0) + (now - self._last) * 1e3, 2)
        self._last = now


def build(request: Request) -> Artifact:
    """Compile a request.  Raises the compiler's errors, at the user's line."""
    sig = signature_of(request.func, request.out_idx)
    if request.backend in INTERPRETED:
        make: Callable[[Request, Signature], Artifact] = build_interpreted
    else:
        make = {"cuda": build_cuda, "hip": build_hip}.get(request.target.kind, build_cpu)
    with jit_phase("build", request.func.name), rarely_collected():
        out = make(request, sig)
    written = written_parameters(request.func)
    if sig.out_idx:
        for a in sig.outputs:
            if a.buffer.name not in written:
                warn("unwritten-output", f"nothing writes the output `{a.buffer.name}`: a call returns what its memory held",
                     "store to it in the kernel, or return no such tensor", a.buffer.span)
    elif not written and not contains(request.func.body, Evaluate, Assert) and any(isinstance(a, TensorArg) for a in sig.args):
        warn("without-effect", f"no statement of `{request.func.name}` stores in a tensor: a call changes nothing",
             "store elements or T.copy a tile to a tensor: `B = A` only gives a tensor another name", request.func.span)
    return out


def _config(request: Request) -> dict[str, Any]:
    """The pass configs that a request is lowered with."""
    # A call checks strides before the first launch and falls back to a kernel without TMA (JITKernel.unaligned).
    surely = sum(isinstance(s, Launch) for s in stmts_of(request.func.body))
    checked = surely == sum(isinstance(x, Launch) for x in walk(request.func.body))
    return {"tl.assume_aligned_strides": checked, **request.config}


def layouts_of(request: Request) -> Iterator[tuple[str, str, Any]]:
    """(kernel, buffer, layout) of the shared and fragment buffers of a request for a GPU, in the schedule that is compiled.

    The request is lowered again, because compiled programs hold addresses and registers only.
    """
    from tilelang.transform.framework.observe import PassEvent, PassEventObserver, observing  # 1 ms
    from tilelang.transform.pipeline import lower  # 243 ms

    class Last(PassEventObserver):
        func = request.func

        def on_pass(self, event: PassEvent) -> None:
            if event.name == "infer_layouts":
                self.func = event.after

    last = Last()
    with observing(last):
        program = lower(request.func, request.target, _config(request))
    launches = [x for x in walk(last.func.body) if isinstance(x, Launch)]
    for kernel, launch in zip(program.kernels, launches):
        for buffer, layout in launch.plan.layouts:
            yield kernel.name, buffer.name, layout


def device_source(request: Request, early: Callable[[Any, list[str]], None] | None = None) -> tuple[Any, list[str], Stopwatch]:
    """(lowered program, source per kernel in the target's language, times).

    early: called with a program and its sources before its synchronisation is verified, again for each schedule tried.
    Sources that a user's hook edits are not given early.
    """
    from tilelang.transform.pipeline import lower  # 243 ms

    watch, kind = Stopwatch(), str(request.target.kind)
    print_kernel = import_module(f"tilelang.codegen.{kind}.printer").print_kernel  # 33 ms
    program: Any
    config = _config(request)
    fast = bool(request.config.get("tl.enable_fast_math"))
    lines = bool(request.config.get("tl.emit_line_directives"))
    given: list[str] = []

    def printed(p: Any) -> list[str]:
        return [print_kernel(k, fast_math=fast, line_directives=lines) for k in p.kernels]

    def announce(p: Any) -> None:
        watch.lap("lower")
        given.clear()
        try:
            with phase("print"):
                given.extend(printed(p))
        except Exception:  # a program that cannot be printed is diagnosed once it is known to be the chosen one
            return
        watch.lap("print")
        if early is not None:
            early(p, given)

    with jit_phase("lower", request.func.name):
        program = lower(request.func, request.target, config, early=None if has_hook(kind) else announce)
    watch.lap("verify" if given else "lower")
    sources = given or [apply_hook(kind, s, request.target) for s in printed(program)]
    if sources is not given:
        watch.lap("print")
    for kernel, source in zip(program.kernels, sources):
        announce_code(kernel.name, source, kind, request.target)
    return program, sources, watch


def host_text(request: Request, sig: Signature, launcher: Any) -> str:
    """LLVM IR of the host program."""
    from tilelang.runtime.host_stub import stub_text  # 16 ms: the host code generator is loaded while NVRTC compiles

    return stub_text(sig, launcher, needed_symbols(request.func, sig), (), host_assumptions(request.func, sig),
                     *disjoint_parameters(request), sizes=sizes_of(request, sig))


def sizes_of(request: Request, sig: Signature) -> tuple[SizeCheck, ...]:
    """Conditions under which no size or index of a program overflows, but for indices that are computed in 64 bits."""
    from tilelang.transform.analysis.index_width import widen_indices  # 20 ms: loaded by the passes of a compilation

    return size_checks(widen_indices(request.func), sig)


def device_options(request: Request) -> list[str]:
    """Options of the device compiler that pass configs and compile_flags ask for."""
    out: list[str] = []
    if request.config.get("tl.enable_fast_math"):
        out.append("--use_fast_math")
    level = request.config.get("tl.ptxas_register_usage_level")
    if level is not None:
        out.append(f"--ptxas-options=--register-usage-level={int(level)}")
    extra = request.config.get("tl.device_compile_flags") or ()
    out += extra.split() if isinstance(extra, str) else [str(f) for f in extra]
    return nvrtc_options([*out, *request.flags], request.target.arch)


def launcher_of(request: Request, program: Any) -> Any:
    """The launcher of a lowered program, for the driver of the request's target."""
    from tilelang.runtime.gpu_api import APIS  # 1 ms
    from tilelang.runtime.launchers import GpuLauncher  # 15 ms

    return GpuLauncher(program.host, program.kernels, request.target.max_shared_bytes, APIS[request.target.kind])


def compile_host(request: Request, sig: Signature, program: Any) -> tuple[str, bytes, dict[str, int]]:
    """(LLVM IR, object) of the host program of a lowered program, and the alignment in bytes that it asks of each tensor."""
    with phase("host part"):
        launcher = launcher_of(request, program)
        text = host_text(request, sig, launcher)
        return text, compile_object(text), alignments(sig, launcher)


def alignments(sig: Signature, launcher: Any) -> dict[str, int]:
    """The alignment in bytes that a launcher asks of the address of each tensor parameter."""
    return {a.name: launcher.alignment(a) for a in sig.args if isinstance(a, TensorArg)}


class _Started:
    """Binaries that are compiled while the program's synchronisation is being verified: the cubins, and the host code where
    enough CPU cores are free.  They are discarded when the verification rejects the program."""

    def __init__(self, program: Any, sources: list[str], cubin: Callable[[str], Any],
                 host: Callable[[Any], tuple[str, bytes, dict[str, int]]], pool: ThreadPoolExecutor) -> None:
        self.sources, self.make_host = list(sources), host
        self.cubins = [pool.submit(cubin, s) for s in self.sources]
        time.sleep(1e-4)  # gives NVRTC's thread the GIL first: this thread would hold it for some ms more
        self.host = pool.submit(host, program) if usable_cpus() > 2 else None

    def cancel(self) -> None:
        """Cancel the jobs that have not started."""
        for work in (*self.cubins, self.host):
            if work is not None:
                work.cancel()

    def done(self) -> bool:
        """Whether the device compiler has finished."""
        return all(work.done() for work in self.cubins)

    def host_of(self, program: Any) -> tuple[str, bytes, dict[str, int]]:
        """The host code of this program.  Called after the verification accepted it."""
        if self.host is None:
            return self.make_host(program)
        try:
            return self.host.result()
        except TileLangError as e:
            raise brought(e) from None


def _load_what_calls_need() -> None:
    """Import TVM-FFI while NVRTC compiles, where torch is loaded: the first call needs it, and importing it takes as long as
    compiling a GEMM.  When it cannot be imported, the call reports that."""
    if "torch" in sys.modules and load_libcuda() is not None:
        try:
            ffi_state()
        except Exception:
            return


_SHORTER_FLIGHTS = ("iteration", "statement")  # values of tl.wgmma_in_flight, each shorter than the one before


def build_cuda(request: Request, sig: Signature) -> Artifact:
    """The artifact for a GPU.

    Where ptxas serialises wgmma or spills, schedules with fewer wgmma in flight are compiled too, and the first one without
    these faults is taken; where none is, the one with the least of them.
    """
    best = _build_cuda(request, sig)
    fault, why = _ptxas_faults(best), _ptxas_complaints(best)
    if not fault[0] and ("tl.wgmma_in_flight" in request.config or not any(k["overlap"] for k in best.meta["facts"])):
        return best
    for flight in _SHORTER_FLIGHTS:
        if not any(fault):
            break
        other = _build_cuda(replace(request, config={**request.config, "tl.wgmma_in_flight": flight}), sig)
        if (found := _ptxas_faults(other)) < fault:
            best, fault = other, found
            for facts in best.meta["facts"]:
                facts["declined"].append(f"wgmma in flight for longer: {why}")
    return best


def _ptxas_faults(artifact: Artifact) -> tuple[bool, int, int]:
    """(whether ptxas may lose metadata in flight, kernels in which it serialises wgmma, bytes spilled in main loops)."""
    kernels, source = artifact.meta["kernels"], artifact.kernel_source
    # Where registers do not suffice, ptxas moves the metadata that a wgmma in flight still reads.
    lost = "wgmma_used<" in source and "wgmma_wait<1>" in source and any(k["spills"] for k in kernels)
    return (lost, sum(bool(k["serialised"]) for k in kernels), sum(k["spills"] for k in kernels if k["spills"] >= SPILLED))


def _ptxas_complaints(artifact: Artifact) -> str:
    kernels = artifact.meta["kernels"]
    return "; ".join(dict.fromkeys([f"ptxas serialises them ({k['serialised']})" for k in kernels if k["serialised"]] + [
        f"{k['spills']} bytes a thread are spilled" for k in kernels if k["spills"]]))


def _build_cuda(request: Request, sig: Signature) -> Artifact:
    """CUDA source through NVRTC to cubins.  NVRTC and LLVM work without the GIL: they load under the lowering, and compile
    while the synchronisation is verified."""
    from tilelang.runtime.cuda_cache import CUDABinaryCache  # 6 ms
    from tilelang.runtime.nvrtc import compile_cubin, compiler_for  # 5 ms

    options = device_options(request)
    binaries = CUDABinaryCache()
    compiled = binaries.compile if env.is_cache_enabled() else compile_cubin
    arch = request.target.arch
    begun: _Started | None = None
    pool = ThreadPoolExecutor(3, "compile")
    try:
        pool.submit(compiler_for, arch)  # in advance; compiling reports the error that this may raise
        if usable_cpus() > 2:
            pool.submit(load_llvm)

        def start(program: Any, sources: list[str]) -> None:
            nonlocal begun
            if begun is not None:
                begun.cancel()
            begun = _Started(program, sources, lambda s: compiled(s, arch, options),
                             lambda p: compile_host(request, sig, p), pool)

        program, sources, watch = device_source(request, start)
        if begun is None or begun.sources != sources:
            start(program, sources)
        assert begun is not None
        _load_what_calls_need()  # while LLVM works too
        if not begun.done():
            collect_meanwhile()
        host, host_object, aligned = begun.host_of(program)
        watch.lap("host")
        with phase("facts"):
            facts = facts_of(program, request.func, request.target)
        with phase("wait for NVRTC"):
            cubins = _within_time(begun.cubins)
        used = with_resources(facts, request.target, [{"registers": c.registers} for c in cubins])
        dense = _with_more_blocks(used, program, sources, request)
        if dense != sources:
            works = {k: pool.submit(compiled, s, arch, options) for k, s in enumerate(dense) if s != sources[k]}
            closer = {k: c for k, work in works.items() if (c := _fitting(work)) is not None}
            sources = [dense[k] if k in closer else s for k, s in enumerate(sources)]
            cubins = [closer.get(k, c) for k, c in enumerate(cubins)]
        watch.lap("nvrtc")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if binaries.made:
        Thread(target=binaries.flush).start()  # so that the call does not wait for the disk
    files = {"host.o": host_object}
    kernels = []
    for k, (kernel, cubin) in enumerate(zip(program.kernels, cubins)):
        file = "kernel.cubin" if k == 0 else f"kernel_{k}.cubin"
        files[file] = cubin.bytes
        dynamic = kernel.shared_bytes if isinstance(kernel.shared_bytes, int) else None
        kernels.append({"name": kernel.name, "file": file, "registers": cubin.registers, "spills": cubin.spills,
                        "serialised": "; ".join(filter(None, (r.serialised for r in cubin.kernels.values()))),
                        "shared_bytes": dynamic, "static_shared": cubin.shared_bytes,
                        "cluster": cluster_size(kernel.launch),
                        "threads": kernel.threads[0] * kernel.threads[1] * kernel.threads[2]})
    meta = {"kernels": kernels, "alignment": aligned, "times": watch.times, "sync_report": _sync_text(program),
            "facts": with_resources(facts, request.target, kernels)}
    return Artifact("cuda", KERNEL_SEPARATOR.join(sources), host, files, meta)


def _with_more_blocks(facts: list[dict[str, Any]], program: Any, sources: list[str], request: Request) -> list[str]:
    """The sources, asking for more resident blocks where registers alone are in the way.

    Only of kernels without warp roles, of which other blocks could work while threads wait for memory and for each other: one
    block more where more than half of an SM is empty, if that costs at most three tenths of the registers, and without MMA as
    many as cost a third where threads meet at a barrier in each iteration of a loop.  ptxas decides (_fitting).
    """
    from tilelang.transform.analysis.statements import barrier_in  # 5 ms: loaded by the passes

    out = []
    for one, kernel, source in zip(facts, program.kernels, sources):
        o, threads = one["occupancy"], one["threads"]
        if o is not None and o["limited_by"] == "registers" and len(one["warp_roles"]) < 2 and \
                kernel.launch.plan.min_blocks_per_sm == 1 and "--maxrregcount" not in str(request.flags):
            room = REGISTERS_PER_SM / (one["registers"] * threads)
            blocks = o["blocks"] + (2 * o["warps"] < o["of_warps"] and o["blocks"] + 1 <= 1.4 * room)
            if "MMAs" not in one["instructions"] and any(barrier_in(s) for x in walk(kernel.launch.body, For)
                                                         if x.kind == "serial" for s in statements(x.body)):
                blocks = max(blocks, min(o["of_warps"] // -(-threads // 32), int(1.5 * room)))
            source = source.replace(f"__launch_bounds__({threads}, 1)", f"__launch_bounds__({threads}, {blocks})") \
                if blocks > o["blocks"] else source
        out.append(source)
    return out


def _fitting(work: Future[Any]) -> Any:
    """The cubin of a kernel with fewer registers.

    None where it spills, serialises wgmma, has too few registers for an instruction, or takes too long to compile.
    """
    try:
        (got,) = _within_time([work])
    except TileLangError as e:
        if e.kind not in ("register-limit", "compile-timeout"):
            raise
        return None  # the kernel with more registers is there already
    return None if got.spills or any(r.serialised for r in got.kernels.values()) else got


def _within_time(works: list[Future[Any]]) -> list[Any]:
    """The device compiler's result.  Waits at most TILELANG_COMPILE_TIMEOUT_SECONDS, counted from this call.

    NVRTC runs in this process and cannot be stopped: after a timeout its thread runs on.
    """
    seconds = env.get_compile_timeout_seconds()
    end = time.monotonic() + seconds if seconds else None
    try:
        return [work.result(None if end is None else max(0.0, end - time.monotonic())) for work in works]
    except FutureTimeout:
        raise error("compile-timeout", f"the device compiler takes longer than {seconds:g} s",
                    found=f"no result after {seconds:g} s") from None


def _sync_text(program: Any) -> str:
    """The synchronisation verifier's verdicts, read from the launches."""
    lines = []
    for kernel in program.kernels:
        verdict = kernel.launch.plan.sync_report
        if verdict is not None:
            lines.append(f"{kernel.name}: {verdict}")
    return "\n".join(lines) or "the synchronisation verifier left no verdict"


def build_hip(request: Request, sig: Signature) -> Artifact:
    """The artifact for an AMD GPU: code objects of its kernels, each with its machine code as text.  Needs no device.

    Where registers are spilled, a kernel is compiled for fewer blocks of a compute unit, then the program without tiles in
    flight in registers; each is taken if it spills less.
    """
    best, option = _build_hip(request, sig), "tl.enable_async_copy"
    spilled = sum(k["spills"] for k in best.meta["kernels"])
    ahead = any(f["stages"] or (f.get("schedule") or "").startswith("pipelined") for f in best.meta["facts"])
    if not spilled or option in request.config or not ahead:
        return best
    other = _build_hip(replace(request, config={**request.config, option: False}), sig)
    if sum(k["spills"] for k in other.meta["kernels"]) >= spilled:
        return best
    for facts in other.meta["facts"]:
        facts["declined"].append(f"tiles in flight in registers: {spilled} registers a thread are spilled")
    return other


def _options_of(kernel: Any) -> list[str]:
    """Options of a kernel: no packed float32 where arithmetic runs under matrix instructions of other waves, as it waits for
    these; no sinking where these are scaled ones, which LLVM 22 moves to where lanes are switched off (llvm-project pull
    178627)."""
    calls = [*walk(kernel.launch.body, Call)]
    shared = any(x.op == "wave_priority" for x in calls)
    scaled = any("_scale_" in r.instruction for x in calls if x.op == "mma" and (r := row_of(x.options.row)))
    return ["-fno-slp-vectorize"] * shared + ["-mllvm", "-disable-machine-sink"] * scaled


_BLOCKS = re.compile(r", amdgpu_waves_per_eu\(\d+\)")


def _build_hip(request: Request, sig: Signature) -> Artifact:
    """HIP source through clang to code objects, which are made while the synchronisation is verified."""
    from tilelang.runtime.hip_compiler import compile_cached  # 3 ms

    extra = request.config.get("tl.device_compile_flags") or ()
    options = [*(extra.split() if isinstance(extra, str) else map(str, extra)), *request.flags]
    begun: list[tuple[str, Any]] = []
    pool = ThreadPoolExecutor(2, "compile")
    try:
        if usable_cpus() > 2:
            pool.submit(load_llvm)

        def start(program: Any, sources: list[str]) -> None:
            for _, work in begun:
                work.cancel()
            begun[:] = [(s, pool.submit(compile_cached, s, request.target.arch, options + _options_of(k)))
                        for s, k in zip(sources, program.kernels)]

        program, sources, watch = device_source(request, start)
        if [s for s, _ in begun] != sources:
            start(program, sources)
        host, host_object, aligned = compile_host(request, sig, program)
        watch.lap("host")
        objects = _within_time([work for _, work in begun])
        for n, (source, made) in enumerate(zip(sources, objects)):
            alone = _BLOCKS.sub("", source) if made.spills else source
            if alone != source and (other := compile_cached(alone, request.target.arch, options + _options_of(
                    program.kernels[n]))).spills < made.spills:
                sources[n], objects[n] = alone, other
        watch.lap("clang")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    files, kernels = {"host.o": host_object}, []
    for k, (kernel, made) in enumerate(zip(program.kernels, objects)):
        name = "kernel" if k == 0 else f"kernel_{k}"
        files |= {f"{name}.hsaco": made.bytes, f"{name}.s": made.isa.encode()}
        x, y, z = kernel.threads
        kernels.append({"name": kernel.name, "file": f"{name}.hsaco", "registers": made.registers, "agprs": made.agprs,
                        "sgprs": made.sgprs, "spills": made.spills, "scalar_spills": made.scalar_spills,
                        "scratch": made.scratch, "serialised": "",
                        "shared_bytes": kernel.shared_bytes if isinstance(kernel.shared_bytes, int) else None,
                        "static_shared": made.shared_bytes, "threads": x * y * z})
    facts = with_resources(facts_of(program, request.func, request.target), request.target, kernels)
    return Artifact("hip", KERNEL_SEPARATOR.join(sources), host, files, {
        "kernels": kernels, "alignment": aligned, "times": watch.times, "sync_report": _sync_text(program), "facts": facts})


def build_cpu(request: Request, sig: Signature) -> Artifact:
    """Compile the tile program and its host program through LLVM IR to object files."""
    from tilelang.codegen.cpu import compile_tile  # 82 ms
    from tilelang.runtime.cpu_engine import compile_cpu_object  # 3 ms
    from tilelang.runtime.launchers import CpuLauncher  # 14 ms
    from tilelang.transform.pipeline import lower_cpu  # 243 ms

    watch = Stopwatch()
    with jit_phase("lower", request.func.name):
        program = compile_tile(lower_cpu(request.func, request.target, request.config))
    watch.lap("lower")
    source = apply_hook("c", program.llvm_ir, request.target)
    announce_code(request.func.name, source, "llvm", request.target)
    kernel_object = compile_cpu_object(source)
    watch.lap("llvm")
    launcher = CpuLauncher(program.signature)
    host = host_text(request, sig, launcher)
    files = {"kernel.o": kernel_object, "host.o": compile_object(host)}
    watch.lap("host")
    meta = {"entry": program.entry, "kernels": [], "alignment": alignments(sig, launcher), "times": watch.times,
            "sync_report": "blocks run one after another on each worker thread: no device synchronisation"}
    return Artifact("cpu", source, host, files, meta)


def build_interpreted(request: Request, sig: Signature) -> Artifact:
    """An artifact without binaries: it holds the tile program or the lowered program for an interpreter."""
    from tilelang.transform.framework.pass_ import PassContext, run_passes  # 20 ms
    from tilelang.transform.legalize.drop_assumptions import drop_assumptions  # 1 ms
    from tilelang.transform.pipeline import TILE_PASSES, lower  # 243 ms

    tile = request.backend == "tile"  # the reference interpreter has no limits of a machine
    if tile or request.target.is_cpu:
        cx = PassContext(None if request.target.is_gpu else request.target, request.config)
        func = run_passes(request.func, (*TILE_PASSES, drop_assumptions), cx)
        return Artifact("interpreted", repr(request.func), "", {}, {}, func)
    program = lower(request.func, request.target, request.config)
    return Artifact("interpreted", "\n\n".join(repr(k.launch) for k in program.kernels), "", {}, {
        "sync_report": _sync_text(program), "facts": facts_of(program, request.func, request.target)}, program.host)
