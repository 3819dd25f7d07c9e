"""Vendor libraries through torch: cuBLAS, cuDNN and flash attention; and plain torch operations on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .problems import BLOCK, Problem
from .providers import Candidate, Provider, Skip
from .workloads import Attention, Gemm, Workload


def _second(problem: Problem) -> torch.Tensor:
    """B as (k, n)."""
    w = problem.workload
    assert isinstance(w, Gemm)
    return problem["b"].T if w.trans_b else problem["b"]


class CuBlas(Provider):
    text = "torch.matmul, and torch._scaled_mm for fp8 (per tensor; by block where cuBLAS has it)"

    def unavailable(self) -> str:
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def labels(self, workload: Workload) -> Sequence[str]:
        if not isinstance(workload, Gemm):
            raise Skip("matrix products only")
        if workload.scaling == "tensor":
            return ("_scaled_mm fast accumulate", "_scaled_mm")
        return ("_scaled_mm by block",) if workload.scaling == "block" else ("matmul",)

    def candidate(self, problem: Problem, label: str) -> Candidate:
        a, b = problem["a"], _second(problem)
        if label == "matmul":
            out = problem.new_out()
            return Candidate(label, lambda: torch.matmul(a, b, out=out))
        dtype, fast = problem.out_dtype(), label.endswith("fast accumulate")
        # 1x128 scales of A go column by column, 128x128 scales of B row by row: cuBLAS's order
        sa, sb = problem["scale_a"], problem["scale_b"]
        if label.endswith("by block"):
            sa, sb = sa.T.contiguous().T, sb.T
        return Candidate(label, lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=dtype, use_fast_accum=fast))


class Sdpa(Provider):
    """scaled_dot_product_attention held to one backend."""

    def __init__(self, backend: str) -> None:
        self.backend, self.text = backend, f"torch scaled_dot_product_attention, {backend}"

    def unavailable(self) -> str:
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def labels(self, workload: Workload) -> Sequence[str]:
        if not isinstance(workload, Attention):
            raise Skip("attention only")
        return (self.backend,)

    def candidate(self, problem: Problem, label: str) -> Candidate:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        w = problem.workload
        assert isinstance(w, Attention)
        q, k, v = (problem[x] for x in "qkv")
        backend, options = getattr(SDPBackend, label), {"is_causal": w.causal, "enable_gqa": w.kv != w.heads}

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **options)

        return Candidate(label, call)


class Plain(Provider):
    """Ordinary operations in float32: a stand-in peer on machines without a GPU, never a competitor."""

    text = "plain torch operations in float32, any device (for trying the harness)"
    is_peer = False

    def labels(self, workload: Workload) -> Sequence[str]:
        return ("float32",)

    def candidate(self, problem: Problem, label: str) -> Candidate:
        w, dtype = problem.workload, problem.out_dtype()
        call: Callable[[], Any]
        if isinstance(w, Gemm):
            a, b = problem["a"].float(), _second(problem).float()
            if w.scaling == "tensor":
                a, b = a * problem["scale_a"], b * problem["scale_b"]
            elif w.scaling == "block":
                a = a * problem["scale_a"].repeat_interleave(BLOCK, 1)[:, :w.k]
                sb = problem["scale_b"].repeat_interleave(BLOCK, 0)[:w.n].repeat_interleave(BLOCK, 1)[:, :w.k]
                b = b * (sb.T if w.trans_b else sb)
            call = lambda: (a @ b).to(dtype)  # noqa: E731
        else:
            q, k, v = (problem[x].float() for x in "qkv")
            k, v = (x.repeat_interleave(w.heads // w.kv, 1) for x in (k, v))
            call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=w.causal).to(dtype)  # noqa: E731
        return Candidate(label, call)


def cublas() -> Provider:
    return CuBlas()


def cudnn() -> Provider:
    return Sdpa("CUDNN_ATTENTION")


def flash() -> Provider:
    return Sdpa("FLASH_ATTENTION")


def plain() -> Provider:
    return Plain()
