"""The machine at hand."""

from __future__ import annotations

from typing import Any

from tilelang.runtime.cpus import usable_cpus


def get_current_device() -> Any:
    """The device new tensors go to: torch's current GPU, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_available_cpu_count() -> int:
    """CPUs this process may use."""
    return usable_cpus()
