"""Ours: the library's kernels, and plain programs in a few tile configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tilelang
from tilelang.jit.kernel import _memory as memory

from . import programs
from .problems import Problem, make
from .providers import Candidate, Provider, Skip
from .workloads import Attention, Gemm, Workload

LIBRARY, FAST = "library", "library, fast accumulate"
GEMM_TILES = {f"{bm}x{bn}x{bk} s{stages} t{threads}": dict(bm=bm, bn=bn, bk=bk, stages=stages, threads=threads)
              for bm, bn, bk, stages, threads in ((128, 256, 64, 4, 256), (256, 128, 64, 4, 256), (128, 128, 64, 4, 256),
                                                  (128, 192, 64, 4, 256), (64, 128, 64, 4, 128))}
ATTENTION_TILES = {f"{bm}x{bn} s{stages} t{threads}": dict(bm=bm, bn=bn, stages=stages, threads=threads)
                   for bm, bn, stages, threads in ((128, 128, 2, 256), (192, 128, 2, 384), (128, 176, 2, 256),
                                                   (64, 128, 2, 128))}


def library_call(problem: Problem, label: str) -> Callable[[], Any]:
    """The library's function on the problem's tensors, its result written to one tensor."""
    from tilelang.library import flash_attention, matmul

    w, t, out = problem.workload, problem.tensors, problem.new_out()
    if isinstance(w, Attention):
        return partial(flash_attention, t["q"], t["k"], t["v"], causal=w.causal, layout="bhsd", out=out)
    scales = {x: t[x] for x in ("scale_a", "scale_b") if x in t}
    return partial(matmul, t["a"], t["b"], transpose_b=w.trans_b, out_dtype=problem.out_dtype(), out=out,
                   fast_accum=label == FAST, **scales)


def kernels_of(call: Callable[[], Any]) -> list[Any]:
    """The kernels that a call compiles."""
    before = set(memory)
    call()
    return [kernel for key, kernel in list(memory.items()) if key not in before]


def _config(target: Any) -> dict[str, bool]:
    return {"tl.enable_hopper": True, "tl.enable_fast_math": True} if target.has_wgmma else {}


def compiled(workload: Workload, label: str, device: str) -> Any:
    """The kernel of a plain program; cached by the compiler, in memory and on disk."""
    from tilelang.target import determine_target

    target = determine_target("auto" if device == "cuda" else device, return_object=True)
    if isinstance(workload, Attention):
        tiles = ATTENTION_TILES[label]
        w = workload
        program = programs.attention(w.batch, w.heads, w.kv, w.seq, w.dim, w.causal, w.dtype, **tiles)
    else:
        w = workload
        program = programs.gemm(w.m, w.n, w.k, w.trans_b, w.dtype, w.out, **GEMM_TILES[label])
    return tilelang.compile(program, target=target, pass_configs=_config(target) if target.is_cuda else {})


class TileLang(Provider):
    """device: "cpu" runs the CPU target, for trying the harness."""

    name, text, is_peer = "tilelang", "tilelang.library", False

    def __init__(self, device: str = "cuda") -> None:
        self.device, self.known = device, {}

    def unavailable(self) -> str:
        if self.device != "cuda":
            return ""
        from tilelang.runtime import cuda_driver

        return "" if cuda_driver.is_available() else "no CUDA device"

    def labels(self, workload: Workload) -> Sequence[str]:
        return (LIBRARY, FAST) if isinstance(workload, Gemm) and workload.scaling == "tensor" else (LIBRARY,)

    def compile(self, workload: Workload, label: str) -> dict[str, Any]:
        """The kernel is compiled by its first call."""
        call = library_call(make(workload, self.device), label)
        start = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - start}

    def candidate(self, problem: Problem, label: str) -> Candidate:
        call, key = library_call(problem, label), (problem.workload, label)
        if key not in self.known:
            self.known[key] = {k: v for kernel in kernels_of(call) for k, v in facts(kernel).items()}
        return Candidate(label, call, self.known[key])


class Programs(TileLang):
    """The plain programs with their tiles open: how good is the library's choice of tiles?"""

    name, text = "programs", "plain tile programs in a few configurations"

    def labels(self, workload: Workload) -> Sequence[str]:
        if isinstance(workload, Gemm) and workload.scaling:
            raise Skip("fp8 is the library's")
        return tuple(ATTENTION_TILES if isinstance(workload, Attention) else GEMM_TILES)

    def compile(self, workload: Workload, label: str) -> dict[str, Any]:
        start = time.perf_counter()
        kernel = compiled(workload, label, self.device)
        return {"seconds": time.perf_counter() - start, **facts(kernel)}

    def candidate(self, problem: Problem, label: str) -> Candidate:
        w = problem.workload
        kernel, out = compiled(w, label, self.device), problem.new_out()
        inputs = [problem[x] for x in (("q", "k", "v") if isinstance(w, Attention) else ("a", "b"))]

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
    """The library on the CPU target, for trying the harness."""
    return TileLang("cpu")


def open_tiles() -> Provider:
    return Programs()
