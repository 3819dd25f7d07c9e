"""Propagates known layouts through copies between fragments, reductions, parallel loops and views."""

from __future__ import annotations

from tilelang.errors import error
from tilelang.ir import Buffer, FRAGMENT
from tilelang.layout import Fragment
from tilelang.ops import Gemm

from .layout_uses import Uses, at_line, seen_as
from .loop_layouts import Loop, Touch, over_loops, projected, usable
from .loop_partition import spread_thin


class CommonLayouts:
    """The layouts of a launch that follow from those known so far.  Raises layout-no-structure and layout-conflict."""

    def __init__(self, uses: Uses) -> None:
        self.uses, self.known = uses, uses.known

    def propagate(self) -> None:
        """Propagate layouts until nothing changes.  Linear in practice: each pass settles a buffer or is the last one."""
        changed = True
        while changed:
            changed = False
            for op in self.uses.ops:
                if isinstance(op, Gemm) or not hasattr(op, "infer_layout"):
                    continue
                for b, lay in op.infer_layout(self.uses.known_for(op)).items():
                    if b.scope_name == FRAGMENT and b not in self.known.layouts and b not in self.uses.alone \
                            and self.uses.suits_views(b, lay):
                        self.known.settle(b, lay, f"follows T.{op.op_name}{at_line(op)}")
                        changed = True
            for loop in self.uses.loops.values():
                changed |= self._through_loop(loop)
            for group in self.uses.views():
                changed |= self._through_views(group)

    def _through_views(self, group: list[Buffer]) -> bool:
        have = next((b for b in group if b in self.known.layouts), None)
        if have is None:
            return False
        changed = False
        for b in group:
            if b is have:
                continue
            lay = seen_as(self.known.layouts[have], have, b)
            if lay is None:
                raise error("layout-no-structure", f"`{have.name}` with the layout {self.known.layouts[have]!r} cannot be seen "
                            f"as {tuple(b.shape)} of {b.dtype} (`{b.name}`)",
                            expected=f"a layout that can be seen as {tuple(b.shape)} of {b.dtype}",
                            found=repr(self.known.layouts[have]), span=b.span or self.uses.launch.span,
                            hint="copy the tile through shared memory, and reshape it there")
            old = self.known.layouts.get(b)
            if old is not None and old != lay:
                raise error("layout-conflict", f"Layout infer conflict between `{have.name}` and its view `{b.name}`: "
                            f"{self.known.layouts[have]!r} and {old!r}", found=f"{self.known.layouts[have]!r} and {old!r}",
                            span=b.span or self.uses.launch.span, hint="copy the view to another fragment")
            if old is None:
                self.known.settle(b, lay, f"is `{have.name}` in another shape")
                changed = True
        return changed

    def _through_loop(self, loop: Loop) -> bool:
        settled = self.known.layouts.keys() | self.uses.alone
        unknown = [t for t in loop.touches if t.plain and t.exact and t.buffer not in settled]
        if not unknown:
            return False
        layout = self.of_loop(loop, full=True)
        if layout is None:
            return False
        changed = False
        for t in unknown:
            if t.buffer in self.known.layouts:
                continue
            lay = projected(layout, t)
            if lay is not None and self.uses.suits_views(t.buffer, lay):
                self.known.settle(t.buffer, lay, f"follows the parallel loop{at_line(loop.node)}")
                changed = True
        return changed

    def of_loop(self, loop: Loop, full: bool) -> Fragment | None:
        """The user's layout of a loop, or one derived from the known fragments that the loop touches.

        Written fragments are tried first, then those with most dimensions.  full: use a fragment only when its layout
        determines
        all parallel loops.
        """
        given = loop.node.plan.loop_layout
        if given is not None:
            return given
        best: tuple[tuple[int, int, int], Touch, Fragment] | None = None
        for t in loop.touches:
            lay = self.known.layouts.get(t.buffer)
            if lay is None or not usable(lay, t):
                continue
            moved = sum(d is not None and loop.extents[d] > 1 for d in t.dims)
            key = (0 if t.writes else 1, -moved, lay.replicas)
            if best is None or key < best[0]:
                best = (key, t, lay)
        if best is None:
            return None
        _, t, lay = best
        left = [d for d, n in enumerate(loop.extents) if d not in t.dims and n > 1 and d not in loop.serial]
        if full and left:
            return None
        if left and not t.writes and spread_thin(loop.extents, [d for d in t.dims if d is not None], lay.replicas):
            return None
        return over_loops(lay, t, loop.extents)
