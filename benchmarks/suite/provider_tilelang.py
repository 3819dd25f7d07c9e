"""Ours: the library's kernels where the library has them, else the plain programs in a few tile configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tilelang

from . import programs
from .problems import Problem, make
from .providers import Candidate, Provider, Skip
from .workloads import Attention, Gemm, Workload

LIBRARY = "library"
GEMM_TILES = {f"{bm}x{bn}x{bk} s{stages} t{threads}": dict(bm=bm, bn=bn, bk=bk, stages=stages, threads=threads)
              for bm, bn, bk, stages, threads in ((128, 256, 64, 4, 256), (256, 128, 64, 4, 256), (128, 128, 64, 4, 256),
                                                  (128, 192, 64, 4, 256), (64, 128, 64, 4, 128))}
ATTENTION_TILES = {f"{bm}x{bn} s{stages} t{threads}": dict(bm=bm, bn=bn, stages=stages, threads=threads)
                   for bm, bn, stages, threads in ((128, 128, 2, 256), (192, 128, 2, 384), (128, 176, 2, 256),
                                                   (64, 128, 2, 128))}
SMALL_TILES = {"32x32x32 s2 t128": dict(bm=32, bn=32, bk=32, stages=2, threads=128)}  # the CPU target: only tried


def library_call(workload: Workload) -> Callable[[Problem], Callable[[], Any]] | None:
    """How the library is asked for a workload: problem -> call.  None: the library does not have it."""
    try:
        import tilelang.library as library  # type: ignore[import-not-found]
    except ImportError:
        return None
    if isinstance(workload, Attention):
        attend = getattr(library, "flash_attention", None)
        return attend and (lambda p: lambda: attend(p["q"], p["k"], p["v"], causal=workload.causal, layout="bhsd"))
    matmul = getattr(library, "matmul", None)
    if matmul is None:
        return None
    if not workload.scaling:
        return lambda p: lambda: matmul(p["a"], p["b"], transpose_b=workload.trans_b)
    return lambda p: lambda: matmul(p["a"], p["b"], transpose_b=workload.trans_b, scale_a=p["scale_a"],
                                    scale_b=p["scale_b"], out_dtype=p.out_dtype())


def _config(target: Any) -> dict[str, bool]:
    return {"tl.enable_hopper": True, "tl.enable_fast_math": True} if target.has_wgmma else {}


def compiled(workload: Workload, label: str, device: str) -> Any:
    """The kernel of a plain program; cached by the compiler, in memory and on disk."""
    from tilelang.target import determine_target

    target = determine_target("auto" if device == "cuda" else device, return_object=True)
    if isinstance(workload, Attention):
        tiles = ATTENTION_TILES[label] if label in ATTENTION_TILES else dict(bm=32, bn=32, stages=1, threads=128)
        w = workload
        program = programs.attention(w.batch, w.heads, w.kv, w.seq, w.dim, w.causal, w.dtype, **tiles)
    else:
        w = workload
        program = programs.gemm(w.m, w.n, w.k, w.trans_b, w.dtype, w.out, **{**GEMM_TILES, **SMALL_TILES}[label])
    return tilelang.compile(program, target=target, pass_configs=_config(target) if target.is_cuda else {})


class TileLang(Provider):
    name, text, is_peer = "tilelang", "tilelang.library, or plain tile programs in a few configurations", False

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def unavailable(self) -> str:
        if self.device != "cuda":
            return ""
        from tilelang.runtime import cuda_driver

        return "" if cuda_driver.is_available() else "no CUDA device"

    def labels(self, workload: Workload) -> Sequence[str]:
        if library_call(workload):
            return (LIBRARY,)
        if isinstance(workload, Gemm) and workload.scaling:
            raise Skip("fp8 is the library's")
        if self.device != "cuda":
            return tuple(SMALL_TILES)
        return tuple(ATTENTION_TILES if isinstance(workload, Attention) else GEMM_TILES)

    def compile(self, workload: Workload, label: str) -> dict[str, Any]:
        if label == LIBRARY:  # compiles when it is called
            problem = make(workload, self.device)
            library = library_call(workload)
            assert library
            start = time.perf_counter()
            library(problem)()
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        kernel = compiled(workload, label, self.device)
        return {"seconds": time.perf_counter() - start, **facts(kernel)}

    def candidate(self, problem: Problem, label: str) -> Candidate:
        w = problem.workload
        if label == LIBRARY:
            library = library_call(w)
            assert library
            return Candidate(label, library(problem))
        kernel, out = compiled(w, label, self.device), problem.new_out()
        names = ("q", "k", "v") if isinstance(w, Attention) else ("a", "b")
        inputs = [problem[x] for x in names]

        def call() -> Any:
            kernel(*inputs, out)
            return out

        return Candidate(label, call, facts(kernel))


def facts(kernel: Any) -> dict[str, Any]:
    """Registers, spills and the report of a compiled kernel, as far as it has them."""
    out: dict[str, Any] = {}
    for name in ("n_regs", "n_spills", "shared_memory"):
        value = getattr(kernel, name, None)
        if value is not None:
            out[name] = value
    report = kernel.report()
    if report:
        out["report"] = report
    return out


def provider() -> Provider:
    return TileLang()


def on_cpu() -> Provider:
    """The same through the CPU target, for trying the harness."""
    return TileLang("cpu")
