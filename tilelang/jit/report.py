"""What a kernel was made into and what may be expected of it: facts for JITKernel.report, kept with the binary."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilelang.ir import Const, Func, walk
from tilelang.ir.expr import Call
from tilelang.target import Target
from tilelang.target.cluster import cluster_of
from tilelang.target.rates import RATES

from .work import Work, work_of

_RESERVED = 1024  # bytes of shared memory that CUDA keeps of each block (from compute capability 8.0 on)
_BLOCKS = {75: 16, 86: 16, 87: 16, 89: 24}  # most blocks of a multiprocessor, 32 elsewhere
# Calls worth a line, and what they are for.
_KINDS = {
    "products": ("wgmma", "mma"), "loads": ("tma_load", "bulk_load", "cp_async"),
    "stores": ("tma_store", "tma_reduce_add", "bulk_store"), "shared memory": ("ldmatrix", "stmatrix"),
    "barriers": ("sync_threads", "named_barrier", "mbarrier_wait", "cluster_sync"),
}


def facts_of(program: Any, func: Func, target: Target, resources: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """JSON facts of each device kernel of a lowered program.

    func: the tile program.  resources: what the assembler said of each (registers, spills, static_shared).
    """
    works = work_of(func)
    out = []
    for k, kernel in enumerate(program.kernels):
        known = resources[k] if resources is not None else {}
        work = works[k] if len(works) == len(program.kernels) else Work(known=False, touched=None)
        launch = kernel.launch
        shared = kernel.shared_bytes if isinstance(kernel.shared_bytes, int) else None
        threads = launch.num_threads
        facts: dict[str, Any] = {
            "name": kernel.name,
            "grid": [g if isinstance(g, int) else int(g.value) if isinstance(g, Const) else repr(g) for g in kernel.grid],
            "threads": threads, "cluster": list(cluster_of(launch) or ()) or None,
            "instructions": _instructions(launch), "maps": [_map(m) for m in kernel.tensor_maps],
            "schedule": launch.attr("pipeline_report"), "declined": list(launch.attr("report", ())),
            "registers": known.get("registers"), "spills": known.get("spills"), "shared_bytes": shared,
            "static_shared": known.get("static_shared"), "synchronisation": launch.attr("sync_report"),
        }
        facts["occupancy"] = _occupancy(target, threads, facts)
        facts["limits"] = _limits(target, work, facts["instructions"])
        out.append(facts)
    return out


def _instructions(launch: Any) -> dict[str, dict[str, int]]:
    """Kind -> instruction -> places in the program."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    for x in walk(launch.body):
        if not isinstance(x, Call):
            continue
        for kind, ops in _KINDS.items():
            if x.op in ops:
                found[kind][_spelled(x)] += 1
    return {kind: dict(sorted(c.items())) for kind, c in found.items() if c}


def _spelled(c: Call) -> str:
    if c.op in ("wgmma", "mma"):
        return str(c.attr("row"))
    if c.op == "cp_async":
        return f"cp.async of {c.attr('bytes')} bytes"
    if c.op in ("ldmatrix", "stmatrix"):
        return f"{c.op}.x{c.attr('num')}" + (".trans" if c.attr("trans") else "")
    if c.op in ("tma_load", "tma_store", "tma_reduce_add"):
        return f"{c.op} by {c.attr('map')}" + (" to a cluster" if c.attr("multicast") else "")
    return c.op


def _map(m: Any) -> str:
    swizzle = f", swizzle {m.swizzle}" if m.swizzle else ""
    return f"{m.name}: boxes of {' x '.join(map(str, reversed(m.box)))} of `{m.buffer.name}`{swizzle}"


def _occupancy(target: Target, threads: int, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Blocks and warps of a multiprocessor at once, and what stops more; None where a figure is missing."""
    if not target.is_cuda or facts["shared_bytes"] is None:
        return None
    limits = target.limits
    shared = facts["shared_bytes"] + (facts["static_shared"] or 0)
    shared += _RESERVED if target.arch_number >= 80 else 0
    by = {"threads": limits.threads_per_sm // threads, "blocks": _BLOCKS.get(target.arch_number, 32)}
    if shared:
        by["shared memory"] = limits.shared_per_sm // shared
    if facts["registers"]:
        by["registers"] = limits.registers_per_sm // (-(-int(facts["registers"]) // 8) * 8 * -(-threads // 32) * 32)
    blocks = min(by.values())
    warps = blocks * -(-threads // 32)
    return {"blocks": blocks, "warps": warps, "of_warps": limits.threads_per_sm // 32,
            "limited_by": min(by, key=lambda k: by[k])}


def _limits(target: Target, work: Work, instructions: dict[str, Any]) -> dict[str, Any] | None:
    """The roofline: work, and the least time that the target's peak rates allow for it."""
    out: dict[str, Any] = {"flops": sum(work.flops.values()) if work.known else None,
                           "bytes": work.touched, "moved_by_tiles": work.loaded + work.stored if work.known else None}
    rates = RATES.get(target.arch_number) if target.is_cuda else None
    if rates is None:
        return out
    out["device"] = rates.device
    matrix = "products" in instructions
    times = {}
    if work.known and work.flops:
        peaks = [(f, rates.of(bits, matrix)) for bits, f in work.flops.items()]
        if all(p for _, p in peaks):
            times["arithmetic"] = sum(f / p for f, p in peaks if p)
    if work.touched:
        times["memory"] = work.touched / rates.bandwidth
    out["seconds"] = times
    out["bound"] = max(times, key=lambda k: times[k]) if times else None
    return out


def text_of(facts: dict[str, Any]) -> list[str]:
    """Lines of a report about one device kernel."""
    grid = " x ".join(str(g) for g in facts["grid"])
    out = [f"  {facts['name']}: grid {grid}, {facts['threads']} threads"
           + (f", clusters of {' x '.join(map(str, facts['cluster']))}" if facts["cluster"] else "")]
    resources = [f"{k.replace('_', ' ')} {facts[k]}" for k in ("registers", "spills", "shared_bytes", "static_shared")
                 if facts[k] is not None]
    if resources:
        out.append("    resources: " + ", ".join(resources))
    o = facts["occupancy"]
    if o is not None:
        out.append(f"    occupancy: {o['blocks']} block{'s' * (o['blocks'] != 1)} a multiprocessor, {o['warps']} of "
                   f"{o['of_warps']} warps, limited by {o['limited_by']}")
    for kind, found in facts["instructions"].items():
        out.append(f"    {kind}: " + ", ".join(f"{name} ({n})" if n > 1 else name for name, n in found.items()))
    out += [f"    map {m}" for m in facts["maps"]]
    if facts["schedule"]:
        out.append(f"    schedule: {facts['schedule']}")
    out += [f"    note: {line}" for line in facts["declined"]]
    out += [f"    {line}" for line in _limit_lines(facts["limits"])]
    if facts["synchronisation"]:
        out.append(f"    synchronisation: {facts['synchronisation']}")
    return out


def _limit_lines(limits: dict[str, Any] | None) -> list[str]:
    if limits is None:
        return []
    parts = []
    if limits["flops"]:
        parts.append(f"{limits['flops'] / 1e9:.3g} GFLOP of products")
    if limits["bytes"]:
        parts.append(f"{limits['bytes'] / 1e6:.3g} MB of tensors")
    if limits["moved_by_tiles"]:
        parts.append(f"{limits['moved_by_tiles'] / 1e6:.3g} MB moved by tiles")
    out = ["work: " + (", ".join(parts) if parts else "known at calls only")]
    if limits.get("bound"):
        times = ", ".join(f"{k} {v * 1e6:.3g} us" for k, v in limits["seconds"].items())
        out.append(f"limit: {times} at the peak rates of an {limits['device']}: bound by {limits['bound']}")
    return out


__all__ = ["facts_of", "text_of"]
