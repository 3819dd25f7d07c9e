"""FlashAttention-3, where a build of it is installed: the package flash_attn_interface, or the forward-only fa3_fwd."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from .problems import Problem
from .providers import Candidate, Provider, Skip
from .workloads import Attention, Workload

# interface -> its build options
PACKAGES = {"flash_attn_interface": "flash_attn_config", "fa3_fwd_interface": "fa3_fwd_config"}


def _package() -> str | None:
    return next((p for p in PACKAGES if importlib.util.find_spec(p)), None)


def _built_without(package: str) -> dict[str, Any]:
    """The build's switches; {} when it does not tell."""
    try:
        config = importlib.import_module(PACKAGES[package])
    except ImportError:
        return {}
    return getattr(config, "CONFIG", {}).get("build_flags", {})


class FlashAttention3(Provider):
    name, text = "fa3", "FlashAttention-3 (flash_attn_interface or fa3_fwd), where it is installed"

    def unavailable(self) -> str:
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        return "" if _package() else f"none of {', '.join(PACKAGES)} is installed"

    def labels(self, workload: Workload) -> Sequence[str]:
        if not isinstance(workload, Attention):
            raise Skip("attention only")
        package = _package()
        assert package
        flag = f"FLASHATTENTION_DISABLE_{'FP16' if workload.dtype == 'float16' else 'BF16'}"
        if _built_without(package).get(flag):
            raise Skip(f"{package} is built without {workload.dtype}")
        return (package,)

    def candidate(self, problem: Problem, label: str) -> Candidate:
        attend, w = importlib.import_module(label).flash_attn_func, problem.workload
        assert isinstance(w, Attention)
        q, k, v = (problem[x].transpose(1, 2) for x in "qkv")  # it takes heads behind sequences, by strides

        def call() -> torch.Tensor:
            out = attend(q, k, v, causal=w.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return Candidate(label, call)


def provider() -> Provider:
    return FlashAttention3()
