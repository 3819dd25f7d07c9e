"""Settles layouts that allow no choice: the user's annotations and those required by TMA and MMA instructions."""

from __future__ import annotations

import os
from typing import Any

from tilelang import errors
from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import Buffer, Var, with_options, FRAGMENT
from tilelang.layout import Fragment, Layout
from tilelang.ops import AtomicTile, Copy, Gemm
from tilelang.ops.gemm.select import (COLUMNS, SIMT, GemmPlan, choose_gemm, computed_form, grouped_columns, why_simt,
                                      with_warps_of)
from tilelang.ops.gemm.wgmma import choose_wgmma, operand_layouts, shared_layout, wgmma_fragments
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_boxes import copied_tile
from tilelang.target import Target
from tilelang.target.wgmma import WGMMA_ROWS, wgmma_sizes

from ..legalize.hopper_features import hopper
from .layout_uses import Uses, at_line, run_time_shape
from .loop_layouts import row_groups
from ..framework.pass_ import PassContext
from ..analysis.copied_tiles import rounded_tiles

register("layout-conflict", ValueError, "a buffer is asked for two layouts that cannot both hold",
         "annotate the buffer with one layout of its shape and kind, or leave the layout out",
         expected="one layout that all uses of the buffer agree on")
register("wgmma-gemm", ValueError, "a T.wgmma_gemm that no warp-group instruction computes",
         "M in multiples of 64 for each warp group, operands in shared memory with K in whole instructions; T.gemm "
         "multiplies any tiles",
         expected="a GEMM that wgmma computes")

register_warning("slow-gemm", "a T.gemm without the fastest matrix instruction of the target for its element types")

_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
# What to do where wgmma needs swizzle atoms and a call has the address of the tile.
_POINTERS = ("the call would see swizzle atoms: fill the tile by T.copy, T.tma_copy, T.ptx_cp_async or element stores, which "
             "go through its layout, or multiply it by T.gemm")


class StrictLayouts:
    """Settles the strict layouts of one launch.  Raises layout-conflict and wgmma-gemm.

    gemms: by id, each GEMM with the instruction that was chosen for it.  reasons: why a faster strategy was not used.  why: by
    id of a GEMM, why wgmma does not compute it.
    """

    def __init__(self, uses: Uses, cx: PassContext) -> None:
        self.uses, self.known, self.cx = uses, uses.known, cx
        self.gemms: dict[int, Gemm] = {}
        self.reasons: list[str] = []
        self.why: dict[int, str] = {}
        self._forced: dict[Var, GemmPlan] = {}  # accumulators of T.wgmma_gemm: the plan that lays out each
        self._demanded: dict[Buffer, tuple[Any, Any]] = {}  # fragment -> (layout, the node that required it first)

    def settle(self) -> None:
        """Settle the user's annotations first, then what instructions require."""
        self._annotated()
        self._required()

    def _annotated(self) -> None:
        uses = self.uses
        for b, lay in uses.launch.plan.layouts:
            want = Fragment if b.scope_name == FRAGMENT else Layout
            if not isinstance(lay, want):
                raise error("layout-conflict", f"`{b.name}` ({b.scope_name}) needs «a {want.__name__}», found "
                            f"{type(lay).__name__}", found=f"a {type(lay).__name__}", span=uses.launch.span)
            lead = len(b.shape) - len(lay.shape)
            if lead < 0 or tuple(b.shape[lead:]) != tuple(lay.shape):
                raise error("layout-conflict", f"the layout of `{b.name}` has shape {lay.shape}, the buffer {tuple(b.shape)}",
                            expected=f"shape {tuple(b.shape)}", found=str(lay.shape), span=uses.launch.span)
            if isinstance(lay, Fragment) and lay.threads != uses.known_for(b).threads:
                if lay.threads > uses.known.threads:
                    raise error("layout-conflict", f"the layout of `{b.name}` uses {lay.threads} threads, the block "
                                f"has {uses.known.threads}",
                                expected=f"at most {uses.known.threads} threads", found=str(lay.threads), span=uses.launch.span)
                lay = lay.with_threads(uses.known.threads)
            uses.known.settle(b, lay.expand(b.shape[:lead]) if lead else lay, "given by the user")
            uses.buffers.setdefault(b)
            self._demanded[b] = (lay, uses.launch)

    def _required(self) -> None:
        gemms = [op for op in self.uses.ops if isinstance(op, Gemm)]
        for op in gemms:
            for b in (op.a.buffer, op.b.buffer, op.c.buffer):
                if not b.is_static:
                    raise run_time_shape(b, op.span)
        rows_first = row_groups(gemms, self.uses.ops, self.uses.loops.values())
        target = self.cx.target if getattr(self.cx.target, "arch", "") else Target("sm_80")
        self._by_tma()
        by_groups = self._by_wgmma(gemms)
        forms = {id(op): computed_form(op, target) for op in gemms}
        plans = [(op, by_groups.get(id(op)) or choose_gemm(forms[id(op)], target, self.uses.known_for(op).threads,
                                                           op.c.buffer in rows_first)) for op in gemms]
        for op, plan in plans:
            self._report(op, plan, target)
        grouped = grouped_columns([(forms[id(op)], p) for op, p in plans], self.uses.ops, self.uses.loops.values(),
                                  target.transposed_loads)
        first: dict[Buffer, GemmPlan] = {}
        asked: list[tuple[Gemm, GemmPlan, dict[Buffer, Any]]] = []
        # Instructions that accept existing layouts come last; mma.sync works on the rows that wgmma gives each warp.
        for op, plan in sorted(plans, key=lambda p: (p[1].instruction == SIMT, p[1].instruction not in WGMMA_ROWS)):
            plan = with_warps_of(plan, first.setdefault(op.c.buffer, plan))
            new = self.gemms[id(op)] = with_options(
                op if plan.instruction == SIMT else forms[id(op)], instruction=plan.instruction, warps=plan.warps,
                columns=COLUMNS if op.c.buffer in grouped else 1,
                transposed=op.a.dtype.bits in target.transposed_loads)
            asked.append((op, plan, new.infer_layout(self.uses.known_for(op))))
        for op, plan, layouts in asked:  # accumulators before operands: those can be staged
            lay, old = layouts.get(op.c.buffer), self.known.layouts.get(op.c.buffer)
            if old is None:
                self._demand(op, plan, op.c.buffer, lay)
            elif plan.instruction != SIMT and old != lay and (
                    plan.instruction in WGMMA_ROWS or op.c.buffer.data not in self._forced):
                # mma.sync copies operands that have another layout
                self._conflict(op.c.buffer, old, lay, op)
        for op, plan, layouts in asked:
            for b, lay in layouts.items():
                if b not in self.known.layouts:
                    self._demand(op, plan, b, lay)

    def _report(self, op: Gemm, plan: GemmPlan, target: Target) -> None:
        """Report, and warn at the user's line, why a GEMM does not have the fastest instruction of the target for its types.

        What the package itself multiplies so is reported alone: its users cannot change it.
        """
        alone = plan.instruction == SIMT
        why = why_simt(op, target, self.uses.known_for(op).threads) if alone else self.why.get(id(op), "")
        if plan.instruction in WGMMA_ROWS or not why:
            return
        by = "multiply-adds of single threads" if alone else "mma.sync"
        self.reasons.append(f"T.gemm{at_line(op)} by {by}: {why}")
        best = alone or bool(wgmma_sizes(op.a.dtype, op.b.dtype, op.c.dtype))
        if best and op.span is not None and not op.span.file.startswith(_PACKAGE):
            reason, _, change = why.partition("; ")
            warn("slow-gemm", f"T.gemm of {op.a.dtype} is computed by {by}, not at the full rate of matrix instructions: "
                 f"{reason}", change, span=op.span)

    def _demand(self, op: Gemm, plan: GemmPlan, b: Buffer, lay: Any) -> None:
        """Give a fragment the layout that an instruction works on.

        Where a view of the fragment has no form of that layout, the GEMM copies the operand instead.
        """
        if lay is not None and self.uses.suits_views(b, lay):
            self.known.settle(b, lay, f"{plan.instruction} on {plan.warps[0]}x{plan.warps[1]} warps{at_line(op)}")
            self._demanded[b] = (lay, op)

    def _by_tma(self) -> None:
        """Lay out in swizzle atoms what TMA fills or reads."""
        for op in self.uses.ops:
            if isinstance(op, Copy) and (op.plan.dst_block is not None or op.plan.tma and is_row(op)):
                self.uses.pointers.update((op.src.buffer.data, op.dst.buffer.data))  # copied as bytes: rows in order
            elif isinstance(op, (Copy, AtomicTile)) and op.plan.tma:
                b = copied_tile(op).buffer
                lay = shared_layout(b)
                given = self.known.layouts.get(b)
                if lay is None or given is not None and given != lay:
                    raise error("layout-conflict", f"`{b.name}` is moved by TMA, its layout must be made of swizzle atoms, "
                                f"found {given!r}", expected="a layout of swizzle atoms", span=op.span,
                                hint="leave the layout out, or move it by T.copy with disable_tma=True")
                self.known.settle(b, lay, f"moved by TMA{at_line(op)}")

    def _by_wgmma(self, gemms: list[Gemm]) -> dict[int, GemmPlan]:
        """The GEMMs computed by wgmma; settles the layouts of their operands in shared memory.

        All GEMMs into one accumulator use the same instruction, because the accumulator's layout depends on it.
        """
        if not hopper(self.cx).wgmma:  # only GEMMs that name wgmma explicitly
            gemms = [op for op in gemms if op.plan.wait is not None]
        plans: dict[int, GemmPlan] = {}
        declined: set[Var] = set()
        rounded = rounded_tiles(self.uses.ops)
        for op in sorted(gemms, key=lambda op: not self._is_forced(op)):
            first = self._forced.get(op.c.buffer.data)
            cut = "its warps are no whole warp groups; take warp roles of whole warp groups" * (id(op) in self.uses.cutting)
            plan = cut or choose_wgmma(op, self.uses.known_for(op).threads, rounded, first)
            why = plan if isinstance(plan, str) else self._unpanelled(op)
            if isinstance(plan, GemmPlan) and not why:
                plans[id(op)] = plan
                if self._is_forced(op):
                    self._forced.setdefault(op.c.buffer.data, plan)
                continue
            if self._is_forced(op):
                by = [self.uses.taken[b.data] for b in (op.a.buffer, op.b.buffer)
                      if f"`{b.name}` is taken" in why and b.data in self.uses.taken]
                raise error("wgmma-gemm", "T.wgmma_gemm() requires Hopper WGMMA lowering, but constraints were not satisfied: "
                            f"‹{why}›", span=op.span, notes=tuple((c.span, "its address is taken here") for c in by),
                            hint=_POINTERS if by else "")
            if first is None:
                declined.add(op.c.buffer.data)
            self.why[id(op)] = why
        shared_out: dict[Var, Any] = {}
        for op in gemms:
            if id(op) in plans and op.plan.wait != -1 and op.c.buffer.data not in self._forced:
                plan = plans[id(op)]
                acc = wgmma_fragments(op, WGMMA_ROWS[plan.instruction], plan.warps, self.uses.known_for(op).threads)[2]
                if not self.uses.suits_views(op.c.buffer, acc):
                    declined.add(op.c.buffer.data)
                    self.why[id(op)] = "its accumulator is seen in another shape; accumulate into a fragment of its own"
                elif shared_out.setdefault(op.c.buffer.data, acc) != acc:
                    declined.add(op.c.buffer.data)
                    self.why[id(op)] = "other GEMMs lay out its accumulator in another way; give all the same warp policy"
        for op in gemms:
            if op.c.buffer.data in declined:
                if plans.pop(id(op), None):
                    self.why.setdefault(id(op), "another GEMM into its accumulator cannot have wgmma; give "
                                        "that GEMM an accumulator of its own")
            elif id(op) in plans:
                for b, lay in operand_layouts(op).items():
                    self.known.settle(b, lay, f"{plans[id(op)].instruction}{at_line(op)}")
        return plans

    def _is_forced(self, op: Gemm) -> bool:
        """Whether the user wrote T.wgmma_gemm."""
        return self.uses.by_hand and bool(op.plan.wait == -1)

    def _unpanelled(self, op: Gemm) -> str:
        """Why the shared operands of a GEMM cannot be laid out in swizzle atoms; "" when they can."""
        for b, lay in operand_layouts(op).items():
            if b.data in self.uses.pointers and (b.data in self.uses.taken or not self._is_forced(op)):
                return f"the address of `{b.name}` is taken"
            if any(x is not b and x.data is b.data for x in self.uses.buffers):
                return f"`{b.name}` is seen in another shape"
            if b in self.known.layouts and self.known.layouts[b] != lay:
                return f"the layout given for `{b.name}` is not made of swizzle atoms"
        return ""

    def _conflict(self, b: Buffer, old: Any, new: Any, op: Gemm) -> None:
        asked = self._demanded.get(b)
        who = asked[1] if asked else None
        raise error("layout-conflict", f"Layout infer conflict between two uses of `{b.name}` as an accumulator: ‹{old!r} and "
                    f"{new!r}›", span=op.span, notes=((getattr(who, "span", None), "first asked for here"),),
                    hint=f"copy `{b.name}` to a second fragment, or give both the same warp policy")
