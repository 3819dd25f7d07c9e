"""Index tensors and per-thread arrays through the layouts that the program gives them."""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import TileLangError, error, register
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Evaluate, Expr, Func, If, Launch, Load, Node, Region, Stmt,
                         Store, TileOp, Var, cast, const, replace, rewrite, rewrite_launches, select, substitute, walk,
                         with_options, FRAGMENT, GLOBAL, LOCAL)
from tilelang.layout import THREAD, Fragment, Layout
from tilelang.layout.periods import stored_extents
from tilelang.ops import AtomicTile, Copy, Fill
from tilelang.ops.pairing import TileLoops, lower_elementwise
from tilelang.target.device_functions import EXTERNS

from ..analysis.guards import bounds_guard, promised, with_ranges
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

register("layout-use", ValueError, "an array with a layout is used in a way that needs its elements in row-major order",
         "access its elements one by one, or copy the tile to shared memory first",
         expected="accesses of elements, T.copy, T.fill or atomics")


def local_fragments(func: Func) -> Func:
    """Make fragments of the per-thread arrays that have a T.Fragment over several threads as their layout.

    Before: x = alloc_local((64, 32)); layouts=((x, Fragment),)    After: x = alloc_fragment((64, 32)), the same layouts
    A T.Fragment that gives every thread all elements leaves the array as it is: its registers are the order of the elements.
    """
    def changed(launch: Launch) -> Launch:
        given = [(b, lay) for b, lay in launch.plan.layouts if b.scope_name == LOCAL and isinstance(lay, Fragment)]
        if not given:
            return launch
        spread = {b: replace(b, scope_name=FRAGMENT) for b, lay in given if any(m.to == THREAD for d in lay.modes for m in d)}
        own = {b: Layout(lay.shape, lambda *at, f=lay: f.register_of(at)) for b, lay in given if b not in spread}
        out = with_options(launch, layouts=tuple((b, own.get(b, lay)) for b, lay in launch.plan.layouts))
        return substitute(out, spread)  # type: ignore[no-any-return]

    return rewrite_launches(func, changed)


@pass_(needs=TILE)
def laid_out_arrays(func: Func, cx: PassContext) -> Func:
    """Index tensors and per-thread arrays through the layouts that the program gives them.

    Before: Launch(layouts=((A, (i, j) -> (j, i)),)):       After: Launch():
                copy(A[0:8, k:k + 8], S)                               for i, j in Parallel(8, 8): S[i, j] = A'[k + j, i]
                A[i, j] = x                                            A'[j, i] = x
    A' is the storage of A in the output shape of the layout. An access that may be outside A is tested in the indices of A: it
    reads the safe value, or does nothing. Raises layout-use for what cannot be done element by element.
    """
    guarded = not cx.option(PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS)
    known = promised(func)[0]
    return rewrite_launches(func, lambda x: _Rewriting(x, known, guarded).run())


class _Rewriting:
    """The rewriting of one launch.  known: ranges of variables.  guarded: accesses outside a tensor have a meaning."""

    def __init__(self, launch: Launch, known: Analyzer, guarded: bool) -> None:
        self.launch, self.known, self.guarded = launch, known, guarded
        self.layouts: dict[Buffer, Layout] = {b: lay for b, lay in launch.plan.layouts if b.scope_name in (GLOBAL, LOCAL)}
        self.stored: dict[Buffer, Buffer] = {}
        self.safe = dict(launch.plan.safe_values)

    def run(self) -> Launch:
        """The launch without layouts of tensors and per-thread arrays."""
        launch = self.launch
        if not self.layouts:
            return launch
        for b, lay in self.layouts.items():
            data = b.data if b.scope_name == GLOBAL else Var(b.name, b.data.dtype, span=b.span)
            extents: Any = lay.output_shape if b.is_static else stored_extents(lay, b.shape)[0]
            self.stored[b] = replace(b, shape=extents, strides_=None, data=data)
        self.known = with_ranges(self.known, launch)
        self._views(launch.body)
        body = rewrite(launch.body, self.node)
        for x in walk(body):
            used = getattr(x, "buffer", None)
            if isinstance(used, Buffer) and used in self.layouts:
                raise _unusable(used, "its address is taken" if isinstance(x, AddressOf) else "it is used as a whole", x)
        kept = tuple((b, lay) for b, lay in launch.plan.layouts if b not in self.layouts)
        return with_options(replace(launch, body=body), layouts=kept)

    def _views(self, s: Stmt) -> None:
        """Raise layout-use if the storage of an array with a layout is also seen in another shape."""
        storage = {b.data: b for b in self.layouts}
        for x in walk(s):
            v = x if isinstance(x, Buffer) else getattr(x, "buffer", None)
            if isinstance(v, Buffer) and v.data in storage and v is not storage[v.data]:
                raise _unusable(storage[v.data], f"it is also seen as `{v.name}` of shape {v.shape}", x)

    def node(self, x: Node) -> Node | None:
        """What replaces a node whose children are already replaced."""
        match x:
            case Load() if x.buffer in self.layouts:
                inside, at = self._place(x.buffer, x.indices, x)
                value = replace(x, buffer=self.stored[x.buffer], indices=at)
                outside = self.safe.get(x.buffer, cast(const(0), x.dtype))
                return value if inside is None else select(inside, value, outside)
            case Store() if x.buffer in self.layouts:
                inside, at = self._place(x.buffer, x.indices, x)
                return _if(inside, replace(x, buffer=self.stored[x.buffer], indices=at))
            case Alloc() if x.buffer in self.layouts and x.buffer.scope_name == LOCAL:
                return replace(x, buffer=self.stored[x.buffer])
            case Call() if x.op in EXTERNS:
                return replace(x, args=tuple(self._pointer(a)[1] for a in x.args))
            case Evaluate():
                inside, out = self._atomic(x.call)
                return None if out is x.call else _if(inside, replace(x, call=out))
            case Bind():
                inside, out = self._atomic(x.value)
                value = out if inside is None else select(inside, out, cast(const(0), out.dtype))
                return None if out is x.value else replace(x, value=value)
            case TileOp():
                return self._tile_op(x)
        return None

    def _atomic(self, e: Expr) -> tuple[Expr | None, Expr]:
        """(the condition under which it is done, a call on the place of an element) for an atomic on an element, else the
        expression as it is."""
        if not isinstance(e, Call) or not e.op.startswith("atomic_") or e.dtype.lanes > 1:
            return None, e
        inside, at = self._pointer(e.args[0])
        return inside, e if at is e.args[0] else replace(e, args=(at, *e.args[1:]))

    def _pointer(self, e: Expr) -> tuple[Expr | None, Expr]:
        """(the condition that an element exists, its address in the storage)."""
        if not (isinstance(e, AddressOf) and e.buffer in self.layouts):
            return None, e
        inside, at = self._place(e.buffer, e.indices, e)
        return inside, replace(e, buffer=self.stored[e.buffer], indices=at)

    def _place(self, b: Buffer, indices: tuple[Expr, ...], x: Node) -> tuple[Expr | None, tuple[Expr, ...]]:
        """(the condition that an element exists, None where it surely does; its indices in the storage)."""
        if any(i.dtype.lanes > 1 for i in indices):
            raise _unusable(b, "a vector of it is accessed", x)
        checked = self.guarded and b.scope_name == GLOBAL
        return bounds_guard(self.known, b.shape, indices) if checked else None, self.layouts[b].places_of(indices)

    def _tile_op(self, op: TileOp) -> Stmt | None:
        """A tile operation on an array with a layout, as a loop over its elements."""
        b = next((r.buffer for r in walk(op, Region) if r.buffer in self.layouts), None)
        if b is None:
            return None
        plan: Any = getattr(op, "plan", None)
        asked = plan is not None and (getattr(plan, "by_hand", False) or getattr(plan, "async_group", False) or plan.use_tma)
        if asked or not isinstance(op, (AtomicTile, Copy, Fill)):
            raise _unusable(b, f"{'an asynchronous ' if asked else ''}T.{op.op_name} moves rows of it", op)
        loops = TileLoops()
        if isinstance(op, Copy):
            to = op.dst.dtype
            out = lower_elementwise(loops, op.dst, op.src, lambda v: cast(v, to), op.span, loop_layout=plan.loop_layout,
                                    width=plan.coalesced_width)
        elif isinstance(op, Fill):
            value = op.value
            out = lower_elementwise(loops, op.dst, None, lambda _: value, op.span)
        else:
            out = op.elementwise(loops)
        self.known = with_ranges(self.known, out)
        return rewrite(out, self.node)  # type: ignore[no-any-return]


def _if(cond: Expr | None, s: Any) -> Stmt:
    return s if cond is None else If(cond, s, span=s.span)  # type: ignore[no-any-return]


def _unusable(b: Buffer, why: str, x: Any) -> TileLangError:
    return error("layout-use", f"`{b.name}` has a layout, and {why}", found=why, span=getattr(x, "span", None) or b.span)
