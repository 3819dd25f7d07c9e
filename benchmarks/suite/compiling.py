"""Compile every configuration before anything is timed: many processes, empty caches, the time of each kept."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from . import providers as provider_table
from .providers import Skip
from .workloads import Workload

CACHES = {"TILELANG_CACHE_DIR": "tilelang", "TRITON_CACHE_DIR": "triton"}


def private_caches(folder: Path) -> dict[str, str]:
    """Environment variables that put every provider's cache into a folder: empty, so that compiles are cold."""
    return {name: str(folder / sub) for name, sub in CACHES.items()}


def compile_one(provider: str, workload: Workload, label: str) -> dict[str, Any]:
    """In a worker process: compile one configuration.  "error" in the result: it did not compile."""
    entry: dict[str, Any] = {"provider": provider, "workload": workload.name, "label": label}
    try:
        facts = provider_table.get(provider).compile(workload, label)
    except Skip as e:
        return {**entry, "skipped": str(e)}
    except Exception as e:
        return {**entry, "error": f"{type(e).__name__}: {e}"[:1000]}
    return {**entry, **(facts or {"skipped": "nothing to compile"})}


def jobs(names: Iterable[str], workloads: Sequence[Workload]) -> list[tuple[str, Workload, str]]:
    """(provider, workload, label) of all that can be compiled.  Providers are asked in this process."""
    out: list[tuple[str, Workload, str]] = []
    for name in names:
        provider = provider_table.get(name)
        if provider.unavailable() or type(provider).compile is provider_table.Provider.compile:
            continue
        for w in workloads:
            try:
                out += [(name, w, label) for label in provider.labels(w)]
            except Skip:
                continue
    return out


def compile_all(todo: Sequence[tuple[str, Workload, str]], workers: int, seconds: float) -> list[dict[str, Any]]:
    """Results of compile_one; what is not done after `seconds`, or is lost with a crashed worker, says so.

    It is then compiled when it is first called: slower, nothing else.
    """
    if not todo:
        return []
    deadline = time.time() + seconds
    pool = ProcessPoolExecutor(min(workers, len(todo)), mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Future[dict[str, Any]], tuple[str, Workload, str]] = {pool.submit(compile_one, *j): j for j in todo}
    out, open_ = [], set(futures)
    while open_ and time.time() < deadline:
        done, open_ = wait(open_, timeout=max(0.1, deadline - time.time()), return_when=FIRST_COMPLETED)
        for f in done:
            provider, w, label = futures[f]
            problem = f.exception()
            out.append({"provider": provider, "workload": w.name, "label": label, "error": f"worker lost: {problem}"}
                       if problem else f.result())
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for f in open_:
        provider, w, label = futures[f]
        out.append({"provider": provider, "workload": w.name, "label": label, "error": f"not done after {seconds:.0f} s"})
    if open_:
        for p in processes:
            p.kill()
    return out


def default_workers() -> int:
    return max(1, (os.cpu_count() or 2) - 2)
