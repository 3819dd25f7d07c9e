"""Decide which Hopper features (sm_90a: wgmma, TMA, warp roles) a program is compiled with."""

from __future__ import annotations

from collections.abc import Callable

from tilelang.target.tensor_map import ADDRESS_ALIGN

from tilelang.ir import Alloc, Bind, Buffer, For, Launch, Load, contains, free_vars, is_const, walk, GLOBAL
from tilelang.ir.record import record

from ..analysis.effects import effects
from ..framework.pass_ import PassConfigKey, PassContext


@record
class Hopper:
    """The features that may be used: wgmma, TMA, warp specialisation."""

    wgmma: bool = False
    tma: bool = False
    warp_roles: bool = False
    strides: bool = False  # run-time strides may be assumed to suit TMA: the host checks them at each call


def hopper(cx: PassContext) -> Hopper:
    """The features of the target, without those that the configuration turns off."""
    target = cx.target
    if not getattr(target, "has_wgmma", False) or not cx.option(PassConfigKey.TL_ENABLE_HOPPER):
        return Hopper()
    if cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC):  # place_sync writes the fences and barriers of warp roles
        return Hopper()
    wgmma = not cx.option(PassConfigKey.TL_DISABLE_WGMMA)
    tma = not cx.option(PassConfigKey.TL_DISABLE_TMA_LOWER) and cx.option(
        PassConfigKey.TL_GLOBAL_ALIGNMENT) >= ADDRESS_ALIGN
    return Hopper(wgmma, tma, tma and not cx.option(PassConfigKey.TL_DISABLE_WARP_SPECIALIZED),
                  bool(cx.option(PassConfigKey.TL_ASSUME_ALIGNED_STRIDES)))


def may_resize(cx: PassContext) -> bool:
    """Whether blocks and steps may get a size that suits wgmma."""
    return hopper(cx).wgmma and bool(cx.option(PassConfigKey.TL_RESIZE_BLOCKS))


def no_warp_roles(cx: PassContext) -> str:
    """The option that turns warp roles off on a target that has them; "" where none does, and on other targets."""
    if not getattr(cx.target, "has_wgmma", False) or hopper(cx).warp_roles:
        return ""
    if not cx.option(PassConfigKey.TL_ENABLE_HOPPER):
        return "tl.enable_hopper is off"
    if cx.option(PassConfigKey.TL_GLOBAL_ALIGNMENT) < ADDRESS_ALIGN:
        return "tensors may start at any address (tl.global_alignment)"
    return next(f"{key.value} is on" for key in (
        PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC, PassConfigKey.TL_DISABLE_TMA_LOWER,
        PassConfigKey.TL_DISABLE_WARP_SPECIALIZED) if cx.option(key))


def placed_in_kernel(launch: Launch) -> Callable[[Buffer], str]:
    """A function that names the property of a tensor which is known only inside the kernel: "address", "shape", or "" for none.
    Where there is one, the host cannot make a tensor map."""
    nodes = list(walk(launch.body, Alloc, Bind, For))
    inside = {x.buffer.data if isinstance(x, Alloc) else x.var for x in nodes} | {*launch.block_vars, *launch.thread_vars}
    own = {x.buffer.data for x in nodes if isinstance(x, Alloc) and x.buffer.scope_name == GLOBAL} | {
        x.var for x in nodes if isinstance(x, Bind) and x.var.dtype.is_handle}

    def known(b: Buffer) -> str:
        if b.data in own:
            return "address"
        late = any(v in inside for v in free_vars(b))
        return "shape" if late or any(contains(x, Load) for x in b.exprs) else ""

    return known


def unreadable(launch: Launch, b: Buffer) -> str:
    """Why TMA may not read a tensor; "" if it may."""
    if b.data in {e.storage for e in effects(launch.body) if e.writes and e.buffer.scope_name == GLOBAL}:
        return f"`{b.name}` is written by the kernel"
    if not b.facts.symmetric and (late := placed_in_kernel(launch)(b)):  # bulk copies need no map
        return f"the {late} of `{b.name}` is known in the kernel only"
    safe = dict(launch.plan.safe_values)
    return f"outside `{b.name}` reads as {safe[b]}" if b in safe and not is_const(safe[b], 0) else ""
