"""The interface between tile ops and the passes.  An op is one file, one class with fields and these methods:

    check()             checks of shapes, dtypes and scopes, when the frontend builds the node: errors.error(...) at self.span
    accesses()          the regions that the op reads and writes, each as an Access
    infer_layout(known) layouts that follow from `known` (transform/layout/infer_layouts.py); {} while none can be inferred
    lower(cx)           the statements of a thread that implement the op on cx.target; cx: a LowerContext
    reference(env)      its meaning on whole tiles in NumPy: env.read(region) is the tile, with the safe value for elements of a
                        global tensor that are out of range; env.write(region, ndarray) skips those; env.eval(expr) is a scalar
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tilelang.ir import Buffer, Expr, Region, TileOp, Var
from tilelang.ir import Stmt as Stmt
from tilelang.ir.record import record


@record
class Access:
    """One region that an op accesses.  mode: "read", "write", "readwrite" or "atomic"."""

    region: Region
    mode: str

    @property
    def reads(self) -> bool:
        return self.mode != "write"

    @property
    def writes(self) -> bool:
        return self.mode != "read"


class LowerContext(Protocol):
    """The services an op may use while it is lowered for a GPU (implemented by transform/lower/lower_tile_ops.py)."""

    target: Any  # tilelang.target.Target
    num_threads: int  # threads that execute the op together: the block, or one warp group
    thread: Expr  # linear index of this thread among those, int32

    def warp_group(self) -> Expr:
        """Index of this thread's warp group among those that execute the op: int32, known to be uniform in a warp."""

    def layout_of(self, buffer: Buffer) -> Any:
        """The Layout of a shared buffer, or the Fragment of a fragment buffer."""

    def local_of(self, buffer: Buffer) -> Buffer:
        """The per-thread 1-D `local` array that holds this thread's registers of a fragment."""

    def physical(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        """The buffer and indices that replace buffer[indices] in the lowered program.

        Shared: the layout is applied.  Fragment: the thread's local array and the register.  Global and local: unchanged.
        """

    known: Any  # transform.known_ranges.KnownRanges: what is known of variables

    def guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int = 1) -> Expr | None:
        """Lowered condition that an access of `width` elements lies inside a global buffer; None where it does."""

    def parallel(self, extents: tuple[Any, ...], body: Any, loop_layout: Any = None, *, is_async: bool = False,
                 width: int | None = None, span: Any = None) -> Stmt:
        """Lower `for idx in T.Parallel(*extents)`.  body(vars) returns the Stmt of one iteration.

        is_async: a store of a global load into shared memory becomes cp.async where its width allows.
        width: elements that a thread accesses at once along the contiguous dimension.
        """

    def loop(self, var: Var, extent: int, body: Callable[[], Stmt]) -> Stmt:
        """A serial loop from 0, in whose body the range of the variable is known.  body(): its statements."""

    def private(self, extents: tuple[int, ...], body: Any, span: Any = None) -> Stmt:
        """Every thread runs body(vars) at every point by itself (loops over per-thread arrays)."""

    def distributed(self, dist: Any, body: Any, span: Any = None) -> Stmt:
        """Each thread runs body(vars) at the points that `dist`, an ops.distribute.Distribution, gives it."""

    def expr(self, e: Expr) -> Expr:
        """The expression e with every buffer access in its lowered form, guards included."""

    def vector_width(self, buffer: Buffer, start: tuple[Any, ...], elements: int) -> int:
        """Elements per vector of an access to `elements` neighbours of a row of a global or shared buffer.

        start: indices of the first.  All vectors together are exactly these elements; each is aligned and contiguous.
        """

    def simplified(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The expressions, simplified by what is known at this place."""

    stores: Any  # transform.tma_stores.TmaStores: which stores may use TMA, and their staging buffers

    def tensor_map(self, buffer: Buffer, box: tuple[int, ...], swizzle: int, tf32: bool = False,
                   row_bytes: int = 128) -> str:
        """Name of the tensor map of a global buffer.

        box: extents of the TMA box, innermost first.  swizzle: 0, 32, 64 or 128 bytes.  tf32: loads round float32 to tf32.
        row_bytes: contiguous bytes of the tensor that the op reads together.
        """

    def prepend(self, s: Stmt) -> None:
        """Add a statement in front of those of the op being lowered, for example to stage an operand."""

    def new_local(self, name: str, size: int, dtype: Any) -> Buffer:
        """A fresh per-thread array, allocated around the op."""

    def exchange(self, shape: tuple[int, ...], dt: Any) -> Buffer:
        """Shared memory through which threads exchange values within one op.  Ops of one shape reuse it in sequence."""

    def new_fragment(self, name: str, layout: Any, dtype: Any) -> Buffer:
        """A fresh fragment with the given layout, allocated around the op."""

    def new_shared(self, name: str, shape: tuple[int, ...], dtype: Any, layout: Any = None) -> Buffer:
        """A fresh shared buffer (staging, cross-warp exchange), allocated around the op."""


__all__ = ["Access", "LowerContext", "TileOp"]
