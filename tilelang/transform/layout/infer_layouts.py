"""Chooses a layout for every shared and fragment buffer of a launch.

    Launch(attrs: layouts=(user's…))              Launch(attrs: layouts=((A_s, Layout), (C_f, Fragment), …))
      Gemm(A_s, B_s, C_f)                    ->     Gemm(A_s, B_s, C_f, attrs: instruction, warps)
      Parallel(i, j): C_f[i, j] = …                 Parallel(i, j, attrs: loop_layout=Fragment)

The layouts of fragments are chosen in three levels.  *Strict* (strict_layouts.py): the user's annotations and the layouts
that MMA instructions require.  *Common* (common_layouts.py): what follows from these through copies between fragments,
reductions and parallel loops.  *Free*: the remaining fragments, largest buffer first, distributed so that memory is read in
the widest vectors; after each choice the common rules run again.  Then each shared buffer gets the layout that suits its
accesses (shared_layouts.py).

If two uses require different layouts of one fragment, the first use wins, and the other one is staged through shared
memory when it is lowered; so every program gets layouts.  A large fragment that every thread would hold completely is
kept in shared memory where that gives the same results (staged_fragments.py).  A Parallel that touches fragments carries
`loop_layout`; without it the lowering distributes the points over the threads cyclically.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.errors import error
from tilelang.ir import Buffer, Launch, Parallel, Stmt, Var, replace, rewrite_stmts, with_options, FRAGMENT, SHARED
from tilelang.layout import Fragment, Layout, replicated_fragment, row_fragment, view_layout, viewed_fragment
from tilelang.ops import Gemm, Reduce
from tilelang.ops.layouts import spread

from .layout_uses import Uses, at_line, seen_as
from .loop_layouts import Loop, with_registers, Touch, over_loops, projected, usable, rereads, spread_thin
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_
from .shared_layouts import Access, choose_shared_layout, memory_accesses, vector_elements
from .strict_layouts import StrictLayouts


@pass_(needs=TILE, of=Launch)
def infer_layouts(launch: Launch, cx: PassContext) -> Launch:
    """Choose layouts for all launches of a program.  The module docstring describes the rules."""
    while True:
        try:
            return _Inference(launch, cx).run()
        except _Staged as e:
            launch = e.launch


class _Staged(Exception):
    """Raised when no layout distributes a large fragment; `launch` keeps that fragment in shared memory."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch


class _Inference:
    """Chooses the layouts of one launch.  Raises _Staged."""

    def __init__(self, launch: Launch, cx: PassContext) -> None:
        self.launch, self.cx = launch, cx
        self.uses = Uses(launch)
        self.known = self.uses.known
        self._limit = getattr(cx.target, "max_shared_bytes", 0)
        self.strict, self.common = StrictLayouts(self.uses, cx), CommonLayouts(self.uses)

    def run(self) -> Launch:
        self.strict.settle()
        self.common.propagate()
        self._free()
        self._loops()
        self._shared()
        body = rewrite_stmts(self.launch.body, self._decided)
        order = {b: k for k, b in enumerate(self.uses.buffers)}
        layouts = tuple(sorted(((b, lay) for b, lay in self.known.layouts.items() if b in order), key=lambda p: order[p[0]]))
        self._report(layouts)
        report = (*self.launch.plan.report, *self.strict.reasons) or None
        return with_options(replace(self.launch, body=body), layouts=layouts, report=report)

    def _report(self, layouts: tuple[tuple[Buffer, Any], ...]) -> None:
        """Report each layout and its reason at debug trace level 4, and draw pictures where the config asks for them."""
        if self.cx.debug >= 4:
            for b, lay in layouts:
                self.cx.report(f"# layout of {b.name} ({self.known.why[b]}): {lay!r}")
        if self.cx.option(PassConfigKey.TL_LAYOUT_VISUALIZATION_ENABLE):
            draw_layouts([(b.name, lay) for b, lay in layouts], self.cx)

    # ---- free -----------------------------------------------------------------------------------------------------

    def _free(self) -> None:
        for loop in self.uses.loops.values():
            self._free_serial(loop)
        order = {b: k for k, b in enumerate(self.uses.buffers)}
        waiting = [b for b in self.uses.buffers if b.scope_name == FRAGMENT and b not in self.known.layouts]
        waiting.sort(key=lambda b: (b in self.uses.alone, -b.size, order[b]))
        for b in waiting:
            if b not in self.known.layouts:
                self.known.settle(b, self._choose(b), "free")
                self.common.propagate()

    def _free_serial(self, loop: Loop) -> None:
        """Lay out the fragments of a loop that accumulates along some dimensions; threads split the other dimensions."""
        if not loop.serial or self.common.of_loop(loop, full=False) is not None:
            return
        for t in loop.touches:
            whole = t.plain and t.exact and not t.inside
            if t.writes and whole and t.buffer not in self.known.layouts and t.buffer not in self.uses.alone:
                rows = row_fragment(t.buffer.shape, self.uses.known_for(t.buffer).threads)
                if not self.uses.suits_views(t.buffer, rows):
                    continue
                self.known.settle(t.buffer, rows, f"free; accumulated along a loop{at_line(loop.node)}")
                self.common.propagate()
                return

    def _choose(self, b: Buffer) -> Fragment:
        shape, threads = tuple(b.shape), self.uses.known_for(b).threads
        if b in self.uses.alone:  # every thread may access any element
            return self._whole(b)
        inside = {d for lp in self.uses.loops.values() for t in lp.touches if t.buffer is b and t.plain for d in t.inside}
        if inside and len(inside) < len(shape):
            kept = [d for d in range(len(shape)) if d not in inside]
            rows = with_registers(row_fragment([shape[d] for d in kept], threads), shape, inside, kept)
            if self.uses.suits_views(b, rows):
                return rows
        fast, vector = vector_elements(b, self.uses.ops, [lp.node for lp in self.uses.loops.values()], self.uses.analyzer)
        total = b.size
        while vector > 1 and total < threads * vector:
            vector //= 2
        while vector > 1 and shape[fast] % vector:
            vector //= 2
        for op in self.uses.ops:
            reduced = self.known.layouts.get(op.dst.buffer) if isinstance(op, Reduce) and op.src.buffer is b else None
            if isinstance(op, Reduce) and isinstance(reduced, Fragment):
                over = spread(reduced, op.dim, shape, vector if fast == op.dim else 1)
                if over is not None and self.uses.suits_views(b, over):
                    return over
        order = [d for d in range(len(shape)) if d != fast] + [fast] if shape else []
        out = row_fragment(shape, threads, vector, order)
        if not self.uses.suits_views(b, out):
            out = viewed_fragment(shape, self.uses.cuts(b), threads, vector if fast == len(shape) - 1 else 1)
        return out if self.uses.suits_views(b, out) and not out.replicas == threads > 1 else self._whole(b)

    def _whole(self, b: Buffer) -> Fragment:
        """The layout in which every thread holds the whole tile.  Raises _Staged if shared memory suits it better."""
        from .staged_fragments import is_large, staged  # 2 ms

        if is_large(b):
            launch = staged(self.launch, b.data, getattr(self.cx.target, "max_shared_bytes", None))
            if launch is not None:
                raise _Staged(launch)
        return replicated_fragment(b.shape, self.uses.known_for(b).threads)

    # ---- loops and shared -----------------------------------------------------------------------------------------

    def _loops(self) -> None:
        for loop in self.uses.loops.values():
            loop.layout = self.common.of_loop(loop, full=False)
            if loop.layout is not None and loop.layout.replicas > 1 and rereads(loop.node.body):
                loop.layout = None

    def _shared(self) -> None:
        roots: dict[Var, Buffer] = {}
        for b in self.uses.buffers:
            if b.scope_name in SHARED:
                roots.setdefault(b.data, b)
        by_storage: dict[Var, list[Access]] = {}
        accesses = list(self.uses.accesses)
        for op in self.uses.ops:
            accesses += memory_accesses(self.strict.gemms.get(id(op), op), self.uses.analyzer)
        for a in accesses:
            by_storage.setdefault(a.buffer.data, []).append(a)
        chosen: dict[Buffer, tuple[Layout, str]] = {}
        for pads in (True, False):  # rows are not padded where the tiles fit only without
            for data, root in roots.items():
                if root not in self.known.layouts:
                    uses = [a for a in by_storage.get(data, ()) if a.buffer is root]
                    plain = data in self.uses.pointers or len(uses) != len(by_storage.get(data, ()))
                    chosen[root] = choose_shared_layout(root, uses, self._partition_of, plain, self.cx.target, pads), \
                        "address taken or seen in another shape" if plain else f"{len(uses)} accesses"
            padded = sum((lay.size - b.size) * b.dtype.bytes for b, (lay, _) in chosen.items() if b.is_static)
            spare = self._limit - sum(b.size * b.dtype.bytes for b in roots.values() if b.is_static and b.data in by_storage)
            if not 0 <= spare < padded:
                break
        for root, (lay, why) in chosen.items():
            self.known.settle(root, lay, why)
        for b in self.uses.buffers:
            if b.scope_name in SHARED and b not in self.known.layouts:
                root = roots[b.data]
                self.known.settle(b, view_layout(self.known.layouts[root], root, b), f"is `{root.name}` in another shape")

    def _partition_of(self, a: Access) -> Fragment | None:
        if isinstance(a.partition, Buffer):
            return self.known.layouts.get(a.partition)
        loop = self.uses.loops.get(id(a.partition))
        return None if loop is None else loop.layout

    # ---- the program with the decisions ---------------------------------------------------------------------------

    def _decided(self, s: Stmt) -> Stmt | None:
        if isinstance(s, Gemm):
            return self.strict.gemms[id(s)]
        if isinstance(s, Parallel):
            loop = self.uses.loops.get(id(s))
            return s if loop is None or loop.layout is None else with_options(s, loop_layout=loop.layout)
        return None


# ---- draw layouts -----------------------------------------------------------------------------------------------------------
# Draws the layouts of a launch when tl.layout_visualization_enable is set.


FOLDER = "./tmp"


def draw_layouts(layouts: Iterable[tuple[str, Any]], cx: PassContext) -> None:
    """Report each layout as text, or write picture files.

    The pictures are <FOLDER>/<buffer>.<format>, for the formats in tl.layout_visualization_formats.  Raises ValueError for an
    unknown format.
    """
    from tilelang.layout.picture import draw_files, picture_of, wanted_formats  # 2 ms

    formats = str(cx.option(PassConfigKey.TL_LAYOUT_VISUALIZATION_FORMATS))
    words = ["txt", "pdf", "png", "svg"] if formats == "all" else [f.strip() for f in formats.split(",")]
    pictures = [w for w in words if w != "txt"]
    files = wanted_formats(",".join(pictures)) if pictures else ()
    for name, layout in layouts:
        if "txt" in words:
            cx.report(f"# {name}\n{layout}")
        if files:
            for path in draw_files(picture_of(layout, name), FOLDER, name, files):
                cx.report(f"# layout of {name}: {path}")


# ---- common layouts ---------------------------------------------------------------------------------------------------------
# Propagates known layouts through copies between fragments, reductions, parallel loops and views.


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
            return given.with_threads(self.known.threads)
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
