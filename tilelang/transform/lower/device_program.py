"""The lowered program: a host function and one device kernel per launch.  Codegen and runtime build on this contract."""

from __future__ import annotations

import re
from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Call, Expr, Func, Launch, Stmt, Var, dtype, free_vars, symbols_of, walk,
                         with_options, LaunchPlan, BufferFacts, rewrite_launches, GLOBAL)
from tilelang.ir.record import record
from tilelang.target.tensor_map import TensorMap, tensor_maps_of

from ..analysis.effects import effects


# The counter that T.sync_grid waits on (codegen/prelude_memory.cuh, sync_grid); the name is kept free for it.
GRID_BARRIER = Buffer("grid_barrier_", (1,), dtype("uint32"), facts=BufferFacts(zeroed=True))


@record
class DeviceKernel:
    """One launch as a kernel.

    name: the device entry.  params: in order, Buffers (passed as pointers), then Vars (symbols and scalars, by value).
    launch: the Launch in phase DEVICE.  grid: extents as host expressions.  threads: per block (x, y, z).
    shared_bytes: dynamic shared memory per block, an int, or a host Expr when it depends on the call.
    written: the tensors that the launch stores to, through pointers or tensor maps (all others are read-only).
    tensor_maps: the maps that the host encodes and passes after params, in this order.
    workspaces: global memory that the host allocates for each launch and passes after the maps.  A workspace with the
    attribute `zeroed` starts with zeros.
    """

    name: str
    params: tuple[Var | Buffer, ...]
    launch: Launch
    grid: tuple[Expr, ...]
    threads: tuple[int, int, int]
    shared_bytes: Any
    written: frozenset[Buffer]
    tensor_maps: tuple[TensorMap, ...] = ()
    workspaces: tuple[Buffer, ...] = ()

    @property
    def body(self) -> Stmt:
        return self.launch.body

    @property
    def plan(self) -> LaunchPlan:
        return self.launch.plan


@record
class LoweredProgram:
    """A lowered host function with its kernels.

    host: the Func; the plan of each Launch in it has the `name` of its kernel.  kernels: in launch order.
    """

    host: Func
    kernels: tuple[DeviceKernel, ...]


def split_host(func: Func) -> LoweredProgram:
    """Name the launches and give each its parameters: the program's buffers that it touches, then symbols and scalars.

    Kernel names: `<func>_kernel`, further launches `<func>_kernel_1`, …
    """
    kernels: list[DeviceKernel] = []
    base = re.sub(r"[^A-Za-z0-9_]", "_", func.name)  # a valid name of a C function

    def named(s: Launch) -> Launch:
        name = s.plan.cuda_entry or f"{base}_kernel" + (f"_{len(kernels)}" if kernels else "")
        out = with_options(s, name=name, may_alias=func.facts.may_alias or s.plan.may_alias)
        kernels.append(_kernel(func, out, name))
        return out

    return LoweredProgram(rewrite_launches(func, named), tuple(kernels))


def _source_kernel(func: Func, launch: Launch, name: str) -> DeviceKernel:
    """The kernel of a launch of the user's CUDA source: all parameters of the function in order; any tensor may be written."""
    buffers = dict(func.buffers)
    params: tuple[Any, ...] = tuple(buffers.get(p, p) for p in func.params)
    return DeviceKernel(name, params, launch, launch.grid, launch.threads, 0,
                        frozenset(p for p in params if isinstance(p, Buffer)))


def _kernel(func: Func, launch: Launch, name: str) -> DeviceKernel:
    if launch.plan.cuda_source:
        return _source_kernel(func, launch, name)
    calls = list(walk(launch.body, Call))
    own: set[Buffer] = {x.buffer for x in walk(launch.body, Alloc)}
    computed = {x.var for x in walk(launch.body, Bind) if x.var.dtype.is_handle}  # addresses
    outer: dict[Var, Buffer] = {}
    written: set[Var] = set()
    for e in effects(launch.body):
        if e.buffer not in own and e.buffer.scope_name == GLOBAL and e.storage not in computed:
            outer.setdefault(e.storage, e.buffer)
            if e.writes:
                written.add(e.storage)
    declared = [b for _, b in func.buffers if b.data in outer]
    extra = [b for b in outer.values() if all(b.data is not d.data for d in declared)]
    buffers = (*declared, *extra)
    bound = {*launch.block_vars, *launch.thread_vars}
    scalars = free_vars(launch.body) - bound - computed - {b.data for b in buffers} - {b.data for b in own}
    workspaces = tuple(sorted((b for b in own if b.scope_name == GLOBAL), key=lambda b: b.name))
    for b in (*buffers, *workspaces):
        scalars |= free_vars(b)
    if any(x.op == "sync_grid" for x in calls):
        workspaces = (GRID_BARRIER, *workspaces)
    ordered = _ordered(func, scalars)
    maps = tuple(m.check() for m in tensor_maps_of(launch))
    stored = {x.options.map for x in calls if x.op in ("tma_store", "tma_reduce_add", "tensor_map")}
    return DeviceKernel(name, (*buffers, *ordered), launch, launch.grid, launch.threads, launch.plan.shared_bytes,
                        frozenset(b for b in buffers if b.data in written) | {m.buffer for m in maps if m.name in stored},
                        maps, workspaces)


def _ordered(func: Func, scalars: set[Var]) -> list[Var]:
    """Scalars in a stable order: parameters, then symbols as they appear in tensor shapes, then host bindings."""
    order = dict.fromkeys((*func.params, *symbols_of(func), *walk(func.body, Var)))
    return [v for v in order if v in scalars]
