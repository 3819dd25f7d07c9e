"""The data behind JITKernel.report: instructions, schedule, resources and roofline of each kernel, stored with the binary."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from tilelang.ir import AddressOf, Call, Const, Func, If, Launch, Load, Ramp, Store, walk, GLOBAL
from tilelang.target import Target
from tilelang.target.cluster import cluster_of
from tilelang.target.machine import CPU_CHIP, RESERVED_SHARED, UNIT_RATES, chip_of, kernel_rates
from tilelang.target.warp_groups import PER_GROUP, WARP_LANES, warps_in, warps_of
from tilelang.transform.analysis.loop_schedule import Schedule, number

from .work import Work, work_of

# Calls that the report lists, and their purpose.
_KINDS = {
    "MMAs": ("wgmma", "mma"), "loads": ("tma_load", "bulk_load", "cp_async"),
    "stores": ("tma_store", "tma_reduce_add", "bulk_store"), "shared memory": ("ldmatrix", "stmatrix"),
    "barriers": ("sync_threads", "named_barrier", "mbarrier_wait", "cluster_sync"),
}


def facts_of(program: Any, func: Func, target: Target, resources: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """JSON facts of each device kernel of a lowered program.

    func: the tile program.  resources: the assembler's figures of each kernel (`with_resources`).
    """
    works = work_of(func)
    out = []
    for k, kernel in enumerate(program.kernels):
        work = works[k] if len(works) == len(program.kernels) else Work(known=False, touched=None)
        launch = kernel.launch
        shared = kernel.shared_bytes if isinstance(kernel.shared_bytes, int) else None
        threads = launch.num_threads
        nodes = list(walk(launch.body, Call, If, Load, Store))
        facts: dict[str, Any] = {
            "name": kernel.name,
            "grid": _grid(kernel.grid),
            "block": list(launch.threads), "threads": threads, "cluster": list(cluster_of(launch) or ()) or None,
            "instructions": _instructions(nodes), "maps": [_map(m) for m in kernel.tensor_maps],
            "why": _reasons(nodes, target), "warp_roles": _warp_roles(launch, nodes), "stages": dict(launch.plan.stages),
            "schedule": launch.plan.pipeline_report, "overlap": launch.plan.overlap,
            "declined": list(launch.plan.report), "schedules": list(launch.plan.schedules), "blocks": work.blocks,
            "first": work.first, "last": work.last, "registers": None, "spills": None, "serialised": "",
            "shared_bytes": shared,
            "dynamic_shared": repr(kernel.shared_bytes), "static_shared": None, "synchronisation": launch.plan.sync_report,
            "nouns": target.nouns,
        }
        facts["occupancy"] = _occupancy(target, threads, facts)
        facts["limits"] = _limits(target, work, facts["instructions"])
        facts["predicted"] = predicted(target, facts)
        out.append(facts)
    return out if resources is None else with_resources(out, target, resources)


def _grid(grid: Any) -> list[Any]:
    return [g if isinstance(g, int) else int(g.value) if isinstance(g, Const) else repr(g) for g in grid]


def cpu_facts(func: Func, target: Target, source: str) -> list[dict[str, Any]]:
    """JSON facts of each launch of a program for the CPU, with the fields of `facts_of`.

    threads: those of the pool that run blocks.  instructions: the vector instructions of the whole program, at its first
    launch.  source: its LLVM IR, "" where there is none."""
    from tilelang.runtime.cpu_engine import cpu_engine, thread_count  # 20 ms: loads llvmlite

    out: list[dict[str, Any]] = []
    vectors = vector_instructions(cpu_engine().emit_assembly(source)) if source else {}
    for k, (launch, work) in enumerate(zip(walk(func.body, Launch), work_of(func))):
        grid = _grid(launch.grid)
        known = [g for g in grid if isinstance(g, int)]
        cores = min(thread_count(), max(1, math.prod(known))) if len(known) == len(grid) else thread_count()
        out.append({
            "name": func.name if k == 0 else f"{func.name}_{k}", "grid": grid, "block": [], "threads": cores, "cluster": None,
            "instructions": {"vectors": vectors} if k == 0 and source else {}, "maps": [], "why": [], "warp_roles": [],
            "stages": {}, "schedule": "", "overlap": "", "declined": [], "registers": None, "spills": None, "serialised": "",
            "shared_bytes": None, "dynamic_shared": "", "static_shared": None, "synchronisation": None, "occupancy": None,
            "schedules": [], "blocks": 0, "first": 0.0, "last": 0.0, "predicted": None, "nouns": {},
            "limits": _limits(target, work, {}, cores)})
    return out


_VECTOR_KINDS = {"FMAs": r"vfn?m(add|sub)\d*p[sdh]|fml[as]|fmadd", "conversions": r"v?cvt|fcvt|scvtf|ucvtf",
                 "moves": r"v?mov|v?lddqu|ld[1-4pr]?|st[1-4pr]?|v?broadcast|vp?broadcast", "arithmetic": r".*"}


def vector_instructions(assembly: str) -> dict[str, int]:
    """Kind and width of vector instructions -> number of places in assembly text of x86-64 or AArch64; {"none": 1} without."""
    found: Counter[str] = Counter()
    for line in assembly.splitlines():
        m = re.match(r"\s+([a-z][a-z0-9]*)\s+(.*)", line)
        if m is None or re.search(r"s[sdh]$", m[1]) or re.match(r"v?(mov[dq]|xorp|pxor|zero)", m[1]):
            continue  # scalar instructions use vector registers too
        widths = [{"x": 16, "y": 32, "z": 64}[r] for r in re.findall(r"%([xyz])mm\d", m[2])]
        widths += [int(n) * {"b": 1, "h": 2, "s": 4, "d": 8}[t] for n, t in re.findall(r"\bv\d+\.(\d+)([bhsd])", m[2])]
        if widths:
            kind = next(k for k, pattern in _VECTOR_KINDS.items() if re.match(pattern, m[1]))
            found[f"{kind} of {max(widths)} bytes"] += 1
    return dict(sorted(found.items())) or {"none": 1}


def with_resources(facts: list[dict[str, Any]], target: Target, resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The facts of `facts_of` with the assembler's figures of each kernel: registers, spills, static_shared; on AMD GPUs
    agprs, sgprs, scalar_spills, scratch."""
    out = []
    for one, known in zip(facts, resources):
        one = {**one, **{name: known.get(name) for name in ("registers", "spills", "serialised", "static_shared")}}
        one |= {name: known[name] for name in ("agprs", "sgprs", "scalar_spills", "scratch") if name in known}
        one["occupancy"] = _occupancy(target, one["threads"], one)
        out.append({**one, "predicted": predicted(target, one)})
    return out


def _instructions(nodes: list[Any]) -> dict[str, dict[str, int]]:
    """Kind -> instruction -> number of places in the program."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS}
    for x in nodes:
        if isinstance(x, (Load, Store)) and x.buffer.scope_name == GLOBAL:
            lanes = x.indices[-1].lanes if x.indices and isinstance(x.indices[-1], Ramp) else 1
            nbytes = max(1, x.buffer.dtype.bits * int(lanes) // 8)
            kind = "loads" if isinstance(x, Load) else "stores"
            found[kind][f"{kind} of {nbytes} byte{'s' * (nbytes > 1)} by threads"] += 1
        if not isinstance(x, Call):
            continue
        for kind, ops in _KINDS.items():
            if x.op in ops:
                found[kind][_spelled(x)] += 1
    return {kind: dict(sorted(c.items())) for kind, c in found.items() if c}


def _reasons(nodes: list[Any], target: Target) -> list[str]:
    """Why these instructions were chosen: what each reads, what the target has.  Rejected choices are in `declined`."""
    out: dict[str, None] = {}
    for x in nodes:
        if not isinstance(x, Call):
            continue
        if x.op == "wgmma":
            a = "A in registers" if isinstance(x.args[1], AddressOf) else \
                f"A in shared memory with {'K' if x.options.a_major == 'k' else 'M'} contiguous"
            b = f"B in shared memory with {'K' if x.options.b_major == 'k' else 'N'} contiguous"
            out[f"{x.options.row}: whole warp groups; {a}, {b}"] = None
        elif x.op == "mma" and target.is_cuda and not target.has_wgmma:
            out[f"{x.options.row}: {target.arch} has no wgmma"] = None
        elif x.op == "cp_async" and target.has_cp_async and not target.has_wgmma:
            out[f"cp.async: {target.arch} has no TMA"] = None
        elif x.op in ("tma_load", "tma_store", "tma_reduce_add", "bulk_load", "bulk_store"):
            what = "runs of whole 16 bytes" if x.op.startswith("bulk") else "boxes"
            out[f"{x.op}: tiles whose {what} have addresses and strides of whole 16 bytes"] = None
        elif x.op == "stmatrix":
            out["stmatrix: stores 16-bit accumulators to shared memory"] = None
    return list(out)


def _warp_roles(launch: Any, nodes: list[Any]) -> list[dict[str, Any]]:
    """The warp roles of a block: {"warp_groups": [first, count], "threads", "registers", "does"}; "warps"
    in place of "warp_groups" where they are no whole ones.

    registers: registers of a thread after setmaxnreg; None where all threads keep the registers of the launch.
    """
    threads = launch.num_threads
    warps = warps_in(launch)
    calls = [x for x in nodes if isinstance(x, Call)]
    chosen = [(x, some) for x in nodes if isinstance(x, If) and (some := warps_of(x.cond)) is not None]
    parts: list[tuple[tuple[int, ...], list[Call]]] = []
    for x, (first, count) in chosen:
        mine = list(walk(x.then, Call))
        parts.append((tuple(range(first, first + count)), mine))
        others = tuple(w for w in warps if not first <= w < first + count)
        if x.orelse is not None and others:
            ids = set(map(id, mine))
            rest = [y for y in calls if id(y) not in ids] if len(chosen) == 1 else [
                y for y in walk(x.orelse, Call)]
            parts.append((others, rest))
    out: dict[tuple[int, ...], dict[str, Any]] = {}
    for who, run in parts or [(warps, calls)]:
        n = -(-len(who) // PER_GROUP)
        whole = who[0] % PER_GROUP == 0 and (len(who) % PER_GROUP == 0 or len(who) == len(warps))
        place = {"warp_groups": [who[0] // PER_GROUP, n]} if whole else {"warps": [who[0], len(who)]}
        one = out.setdefault(who, {**place, "threads": min(threads, WARP_LANES * len(who)), "registers": None, "does": []})
        ops = {x.op for x in run}
        one["does"] = [kind for kind in ("loads", "MMAs", "stores") if kind in one["does"] or ops & set(_KINDS[kind])]
        one["registers"] = next((x.options.n for x in run if x.op == "set_max_nreg"), one["registers"])
    return [out[k] for k in sorted(out)]


def _spelled(c: Call) -> str:
    if c.op in ("wgmma", "mma"):
        return c.options.row
    if c.op == "cp_async":
        return f"cp.async of {c.options.bytes} bytes"
    if c.op in ("ldmatrix", "stmatrix"):
        return f"{c.op}.x{c.options.num}" + (".trans" if c.options.trans else "")
    if c.op in ("tma_load", "tma_store", "tma_reduce_add"):
        return f"{c.op} by {c.options.map}" + (" to a cluster" if c.options.multicast else "")
    return c.op


def _map(m: Any) -> str:
    swizzle = f", swizzle {m.swizzle}" if m.swizzle else ""
    return f"{m.name}: boxes of {' x '.join(map(str, reversed(m.box)))} of `{m.buffer.name}`{swizzle}"


def _occupancy(target: Target, threads: int, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Resident blocks and warps of an SM and the resource that limits them; None where a figure is missing."""
    if target.is_cpu or facts["shared_bytes"] is None:
        return None
    limits, width = target.limits, target.warp_size
    shared = facts["shared_bytes"] + (facts["static_shared"] or 0)
    shared += RESERVED_SHARED if target.arch_number >= 80 else 0
    by = {"threads": limits.threads_per_sm // threads, "blocks": limits.blocks_per_sm}
    if shared:
        by["shared memory"] = limits.shared_per_sm // shared
    if facts["registers"]:
        by["registers"] = target.blocks_by_registers(int(facts["registers"]), threads)
    blocks = min(by.values())
    warps = blocks * -(-threads // width)
    return {"blocks": blocks, "warps": warps, "of_warps": limits.threads_per_sm // width,
            "limited_by": min(by, key=lambda k: by[k])}


def _limits(target: Target, work: Work, instructions: dict[str, Any], cores: int = 1) -> dict[str, Any] | None:
    """The roofline: the work, and the least time for it at the target's peak rates.  cores: of a CPU that share it."""
    out: dict[str, Any] = {"flops": sum(work.flops.values()) if work.known else None,
                           "bytes": work.touched, "moved_by_tiles": work.loaded + work.stored if work.known else None}
    chip = CPU_CHIP if target.is_cpu else chip_of(target.machine)
    if chip is None or not (chip.tensor or chip.fp32):
        return out
    out["device"] = chip.name if target.is_gpu else f"{cores} common CPU core{'s' * (cores > 1)}"
    matrix = "MMAs" in instructions
    times = {}
    if work.known and work.flops:
        peaks = [(f, chip.peak(bits, matrix)) for bits, f in work.flops.items()]
        if all(p for _, p in peaks):
            times["arithmetic"] = sum(f / p for f, p in peaks if p) / cores
    if work.touched:
        times["memory"] = work.touched / (chip.bandwidth * cores)
    out["seconds"] = times
    out["bound"] = max(times, key=lambda k: times[k]) if times else None
    return out


def predicted(target: Target, facts: dict[str, Any], mhz: float | None = None) -> dict[str, float] | None:
    """us: of a launch on an idle device whose SMs run at this clock (default: that of short kernels), by the schedules of its
    pipelined loops, its stores and its tensors.  least: that it takes at least, by the bounds of the loops.  None where the
    numbers of blocks or iterations are known at calls only."""
    loops, chip = [Schedule.parse(x) for x in facts["schedules"]], chip_of(target.machine)
    touched = (facts["limits"] or {}).get("bytes")
    if chip is None or not touched or not all(x.iterations and x.blocks for x in loops) or not (loops or facts["blocks"]):
        return None
    rates = kernel_rates("wgmma" if target.has_wgmma else "mma", target.machine)
    clock, blocks = mhz * 1e6 if mhz else rates.clock, loops[0].blocks if loops else facts["blocks"]
    tiles = math.ceil(blocks / chip.sm_count)  # of the SM that has most
    beside = min(tiles, (facts["occupancy"] or {}).get("blocks") or 1)
    starts = (UNIT_RATES.far if x.bound.term == "memory" else UNIT_RATES.latency for x in loops)
    waits = tiles / beside * ((facts["first"] > 0) * UNIT_RATES.latency + sum(starts))
    rate = UNIT_RATES.loads if any(s.groups for s in loops) else UNIT_RATES.by_threads
    least, took = 0.0, (waits + (facts["first"] / rate + facts["last"] / rates.store) / chip.sm_count) / clock
    for x in loops:
        hertz = rates.clock if x.bound.term == "memory" else clock  # that of memory does not fall with the clock of the SMs
        loaded = sum(i.cycles for i in x.items if i.unit == "loads")  # the blocks of an SM share what loads
        each = 1 if x.resident else beside  # whose cycles are those of a block among others
        own = max(loaded, x.near / each, *(c for unit, c in x.bound.terms if unit != "memory"))
        took += tiles * x.iterations * max(max(x.cycles / each, x.bound.cycles) / rates.clock, own / clock)
        least += blocks / chip.sm_count * x.iterations * x.bound.cycles / hertz
    least = max(least, touched / chip.bandwidth)
    return {"mhz": clock / 1e6, "least": least * 1e6,
            "us": max(took, touched / (rates.copy or rates.bandwidth), least) * 1e6 + rates.launch * 1e6}


def _loop_lines(facts: dict[str, Any]) -> list[str]:
    out = []
    for s in map(Schedule.parse, facts["schedules"]):
        terms = ", ".join(f"{name} {number(c)}" for name, c in s.bound.terms if c)
        said = (f"{number(s.cycles)} cycles an iteration, at least {number(s.bound.cycles)} by {s.bound.term} ({terms})"
                + (f"; {number(s.iterations)} iterations" if s.iterations else "")
                + (f"; MMAs busy {s.busy:.2f}, {_blocks(s.resident)} an SM" if s.resident else ""))
        out.append(f"loop {s.loop}: {_worded(said, facts)}")
    p, roofline = facts["predicted"], max((facts["limits"] or {}).get("seconds", {0: 0.0}).values(), default=0.0)
    return out if p is None else [*out, f"predicted: {_rounded(p['us'])} us at {p['mhz']:.0f} MHz, at least "
                                        f"{_rounded(p['least'])} us; {roofline / p['us'] * 1e6:.0%} of the roofline"]


def text_of(facts: dict[str, Any]) -> list[str]:
    """The report lines of one device kernel."""
    grid = " x ".join(str(g) for g in facts["grid"])
    out = [f"  {facts['name']}: grid {grid}, {facts['threads']} threads"
           + (f", clusters of {' x '.join(map(str, facts['cluster']))}" if facts["cluster"] else "")]
    resources = [text.format(facts[k]) for k, text in _RESOURCES.items() if facts.get(k) is not None]
    if resources:
        out.append("    resources: " + _worded(", ".join(resources), facts))
    o = facts["occupancy"]
    if o is not None:
        held = f"{_blocks(o['blocks'])} an SM, {o['warps']} of {o['of_warps']} warps, limited by {o['limited_by']}"
        out.append("    occupancy: " + _worded(held, facts))
    for kind, found in facts["instructions"].items():
        out.append(f"    {_worded(kind, facts)}: " + ", ".join(f"{name} ({n})" if n > 1 else name for name, n in found.items()))
    out += [f"    why {line}" for line in facts["why"]]
    out += [f"    map {m}" for m in facts["maps"]]
    if len(facts["warp_roles"]) > 1:
        out += [f"    warp role: {_warp_role_line(r)}" for r in facts["warp_roles"]]
    if facts["stages"]:
        out.append("    stages: " + ", ".join(f"{n} of {name}" for name, n in facts["stages"].items()))
    if facts["schedule"]:
        out.append(f"    schedule: {facts['schedule']}")
    if facts["overlap"]:
        out.append(f"    overlap: {facts['overlap']}")
    if facts["serialised"]:
        out.append(f"    ptxas serialises wgmma: {facts['serialised']}")
    out += [f"    note: {line}" for line in facts["declined"]]
    out += [f"    {line}" for line in (*_limit_lines(facts["limits"]), *_loop_lines(facts))]
    if facts["synchronisation"]:
        out.append(f"    synchronisation: {facts['synchronisation']}")
    return out


_RESOURCES = {"registers": "registers {}", "agprs": "of them AGPRs {}", "sgprs": "SGPRs {}",
              "scalar_spills": "SGPRs kept in VGPRs {}",
              "spills": "spills {}", "scratch": "private memory {} bytes", "shared_bytes": "dynamic shared memory {} bytes",
              "static_shared": "static shared memory {} bytes"}


def _blocks(n: int) -> str:
    return f"{n} block{'s' * (n != 1)}"


def _worded(text: str, facts: dict[str, Any]) -> str:
    """A text with the nouns of the kernel's machine (Target.nouns); no name of a program stands in it."""
    for noun, own in facts["nouns"].items():
        text = re.sub(rf"\b{noun}\b", own, text)
    return text


def _rounded(x: float) -> str:
    """Three significant digits, without an exponent for large numbers."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


def _warp_role_line(r: dict[str, Any]) -> str:
    what = "warp_groups" if "warp_groups" in r else "warps"
    first, count = r[what]
    name = what.replace("_", " ")
    who = f"{name[:-1]} {first}" if count == 1 else f"{name} {first} to {first + count - 1}"
    kept = f", {r['registers']} registers a thread" if r["registers"] else ""
    return f"{who}, {r['threads']} threads: {', '.join(r['does']) or 'other work'}{kept}"


def _limit_lines(limits: dict[str, Any] | None) -> list[str]:
    if limits is None:
        return []
    parts = []
    if limits["flops"]:
        parts.append(f"{_rounded(limits['flops'] / 1e9)} GFLOP of GEMMs")
    if limits["bytes"]:
        parts.append(f"{_rounded(limits['bytes'] / 1e6)} MB of tensors")
    if limits["moved_by_tiles"]:
        parts.append(f"{_rounded(limits['moved_by_tiles'] / 1e6)} MB moved by tiles")
    out = ["work: " + (", ".join(parts) if parts else "known at calls only")]
    if limits.get("bound"):
        times = ", ".join(f"{k} {_rounded(v * 1e6)} us" for k, v in limits["seconds"].items())
        device = limits["device"] if limits["device"][0].isdigit() else f"an {limits['device']}"
        out.append(f"limit: {times} at the peak rates of {device}: bound by {limits['bound']}")
    return out


def report_text(data: dict[str, Any]) -> str:
    """The text of JITKernel.report, made from JITKernel.report_data."""
    out = [f"kernel {data['name']} for {data['target']}"]
    if data["times"]:
        out.append("  compiled in " + ", ".join(f"{k} {v:.1f} ms" for k, v in data["times"].items()))
    for facts in data["kernels"]:
        out += text_of(facts)
    if data["unaligned"]:
        out.append("  tensors at any address and of any strides: another kernel was compiled for them")
    return "\n".join(out)
