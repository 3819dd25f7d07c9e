"""Lower raw wgmma and TMA calls of the user: pin registers, check tensors, align shared memory.

    warpgroup_arrive()                       wgmma_pin(C); wgmma_fence()
    ptx_wgmma_ss(..., C.data, 0, ...)  ->    wgmma(C, ...)
    warpgroup_wait(0)                        wgmma_wait(0); wgmma_pin(C)

The accumulators change while the program goes on: without the pins a compiler may read them before the wait.
"""

from __future__ import annotations

from typing import Any

from tilelang.errors import error
from tilelang.ir import AddressOf, Alloc, Buffer, Call, Evaluate, Launch, Seq, Stmt, Var, const, seq, walk, with_inner, LOCAL
from tilelang.target.tensor_map import tensor_maps_of

from ..analysis.effects import effects
from ..analysis.statements import do


def pin_raw_wgmmas(launch: Launch) -> Launch:
    """Pin the registers of raw wgmmas before fences and after waits, where the registers are in scope."""
    raw = {a.buffer for c in walk(launch.body, Call) if c.op == "wgmma"
           for a in c.args[:2] if isinstance(a, AddressOf) and a.buffer.scope_name == LOCAL}
    if not raw:
        return launch

    def inside(x: Any, seen: tuple[Buffer, ...]) -> Any:
        if isinstance(x, Seq):
            out: list[Stmt] = []
            for s in x.stmts:
                if isinstance(s, Alloc) and s.buffer in raw:
                    seen = (*seen, s.buffer)
                out.append(inside(s, seen))
            return seq(*out, span=x.span)
        if isinstance(x, Evaluate) and x.call.op in ("wgmma_fence", "wgmma_wait"):
            pins = [do("wgmma_pin", AddressOf(b, (const(0),)), count=int(b.shape[0])) for b in seen]
            return seq(*pins, x) if x.call.op == "wgmma_fence" else seq(x, *pins)
        return with_inner(x, lambda y: inside(y, seen))

    return inside(launch, ())  # type: ignore[no-any-return]


def check_raw_loads(launch: Launch) -> None:
    """Reject raw TMA loads of tensors that the same kernel stores to: TMA does not see these stores. Raises tma-copy."""
    maps = {m.name: m.buffer for m in tensor_maps_of(launch)}
    loads = {maps[c.options.map].data: c for c in walk(launch.body, Call) if c.op == "tma_load"}
    for e in effects(launch.body) if loads else ():
        if e.writes and e.storage in loads:
            raise error("tma-copy", f"T.tma_load of `{e.buffer.name}`, which is written by the kernel: TMA does not see what "
                        "threads store",
                        expected="a tensor that the kernel does not write", found=f"`{e.buffer.name}`, which it writes",
                        span=loads[e.storage].span, notes=((getattr(e.node, "span", None), "written here"),))


def alignment_by_hand(launch: Launch) -> dict[Var, int]:
    """Alignment in bytes of the shared storage that a program passes to descriptors and TMA. The hardware swizzles address
    bits, and the swizzle pattern repeats after 8 rows of the swizzle's width."""
    maps = {m.name: m.swizzle for m in tensor_maps_of(launch)}
    out: dict[Var, int] = {}
    for c in walk(launch.body, Call):
        if c.op in ("wgmma_descriptor", "tma_load") and isinstance(c.args[0], AddressOf):
            swizzle = maps.get(c.options.map, 0) if c.op == "tma_load" else c.options.swizzle
            data = c.args[0].buffer.data
            out[data] = max(out.get(data, 0), 128, 8 * swizzle)
    return out
