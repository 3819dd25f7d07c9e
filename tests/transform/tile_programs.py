"""Small tile programs built by hand, with layouts given, for the lowering tests."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Buffer, Func, Launch, Load, Parallel, Region, Seq, Stmt, Store, Var, const, convert, dtype,
                         fresh, load, LaunchPlan, ParallelPlan)
from tilelang.layout import Fragment, linear_layout
from tilelang.transform.lower.lower_tile_ops import lower_tile_ops
from tilelang.transform.framework.pass_ import PassContext


def tensor(name: str, shape: tuple[Any, ...], dt: str = "float32") -> Buffer:
    return Buffer(name, shape, dtype(dt))


def shared(name: str, shape: tuple[int, ...], dt: str = "float32") -> Buffer:
    return Buffer(name, shape, dtype(dt), "shared.dyn")


def fragment(name: str, shape: tuple[int, ...], dt: str = "float32") -> Buffer:
    return Buffer(name, shape, dtype(dt), "local.fragment")


def region(b: Buffer, *mins: Any, extents: tuple[Any, ...] | None = None) -> Region:
    mins = mins or (0,) * b.ndim
    return Region(b, tuple(convert(m) for m in mins), tuple(b.shape if extents is None else extents))


def parallel(extents: tuple[Any, ...], body: Any, **plan: Any) -> Parallel:
    vs = tuple(fresh("ij"[k] if k < 2 else f"i{k}") for k in range(len(extents)))
    out = body(*vs)
    return Parallel(vs, tuple(convert(e) for e in extents), out, plan=ParallelPlan(**plan))


def program(tensors: list[Buffer], locals_: list[tuple[Buffer, Any]], body: Any, *, grid: tuple[Any, ...] = (1,),
            threads: Any = 128, scalars: tuple[Var, ...] = ()) -> Func:
    """A one-launch function.  locals_: (buffer, layout or None for linear).  body(*block_vars) -> statements."""
    bx = tuple(fresh("bx by bz".split()[k]) for k in range(len(grid)))
    t3 = tuple(fresh(n) for n in ("tx", "ty", "tz"))
    threads = threads if isinstance(threads, tuple) else (threads, 1, 1)
    stmts = body(*bx)
    layouts = tuple((b, linear_layout(b.shape) if lay is None else lay) for b, lay in locals_
                    if b.scope_name not in ("local", "local.var"))
    inner: Stmt = Seq((*[Alloc(b) for b, _ in locals_], *stmts))
    launch = Launch(tuple(convert(g) for g in grid), bx, threads, t3, inner, LaunchPlan(layouts=layouts))
    handles = tuple(Var(b.name + "_handle", dtype("handle")) for b in tensors)
    return Func("main", handles + scalars, tuple(zip(handles, tensors)), launch)


def lowered(func: Func) -> Func:
    return lower_tile_ops(func, PassContext())


__all__ = ["Fragment", "Load", "Store", "const", "fragment", "load", "lowered", "parallel", "program", "region",
           "shared", "tensor"]
