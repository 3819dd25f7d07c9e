"""Counts the CPUs that this process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Number of CPUs in the affinity mask, at least 1."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return max(1, os.cpu_count() or 1)
