"""Log lines about the phases of a compilation (TILELANG_JIT_DIAGNOSTICS=1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import tilelang.log  # noqa: F401 - the parent logger, with its handler
from tilelang.env import env

logger = logging.getLogger("tilelang.jit.diagnostics")


@contextmanager
def jit_phase(phase: str, name: str = "") -> Iterator[None]:
    """A context that logs start, end and duration of a phase when TILELANG_JIT_DIAGNOSTICS=1."""
    if not env.is_jit_diagnostics_enabled():
        yield
        return
    logger.info("TileLang JIT phase start: %s %s", phase, name)
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        logger.info("TileLang JIT phase failed: %s %s after %.1f ms", phase, name, (time.perf_counter() - start) * 1e3)
        raise
    logger.info("TileLang JIT phase done: %s %s in %.1f ms", phase, name, (time.perf_counter() - start) * 1e3)
