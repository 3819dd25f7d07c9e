"""What every tile op offers the passes.  An op is one file: fields, checks, effects, layouts, lowering and meaning."""

from __future__ import annotations

from typing import Any, Protocol

from tilelang.ir import Buffer, Expr, Region, TileOp
from tilelang.ir import Stmt as Stmt
from tilelang.ir.record import record


@record
class Access:
    """One region an op touches.  mode: "read", "write", "readwrite" or "atomic"."""

    region: Region
    mode: str

    @property
    def reads(self) -> bool:
        return self.mode != "write"

    @property
    def writes(self) -> bool:
        return self.mode != "read"


class LowerContext(Protocol):
    """What an op may ask while it is lowered for a GPU (implemented by transform/lower/lower_tile_ops.py)."""

    target: Any  # tilelang.target.Target
    num_threads: int  # threads that execute the op together (the block, or its warp group)
    thread: Expr  # linear index of this thread among them, int32

    def warp_group(self) -> Expr:
        """The index of this thread's warp group among them, int32 and known to be one per warp."""

    def layout_of(self, buffer: Buffer) -> Any:
        """Layout of a shared buffer, Fragment of a fragment."""

    def local_of(self, buffer: Buffer) -> Buffer:
        """The per-thread 1-D `local` array that holds this thread's registers of a fragment."""

    def physical(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        """Buffer and index to use in the lowered program for buffer[indices] (shared: layout applied; fragment: the
        local array and register; global and local: unchanged)."""

    def parallel(self, extents: tuple[Any, ...], body: Any, loop_layout: Any = None, *, is_async: bool = False,
                 width: int | None = None, span: Any = None) -> Stmt:
        """The lowering of `for idx in T.Parallel(*extents)`; body(vars) gives the Stmt of one iteration.

        is_async: a store of a global load into shared memory becomes cp.async where its width allows.  width: elements
        a thread takes along the contiguous dimension."""

    def private(self, extents: tuple[int, ...], body: Any, span: Any = None) -> Stmt:
        """body(vars) at every point, by every thread for itself (per-thread arrays)."""

    def distributed(self, dist: Any, body: Any, span: Any = None) -> Stmt:
        """The same under a given ops.distribute.Distribution."""

    def expr(self, e: Expr) -> Expr:
        """e with every buffer access in its lowered form (guards included)."""

    def contiguous_width(self, buffer: Buffer) -> int:
        """Elements of a shared buffer's aligned runs along its last dimension that are contiguous in storage."""

    def alignment(self, buffer: Buffer) -> int:
        """Bytes that the start of a global buffer is known to be a multiple of."""

    def divisor(self, e: Expr) -> int:
        """An integer known to divide e; 0 for zero."""

    def simplified(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The expressions, shortened by what is known here."""

    stores: Any  # transform.tma_stores.TmaStores: what may leave by TMA, and its staging

    def tensor_map(self, buffer: Buffer, box: tuple[int, ...], swizzle: int, tf32: bool = False,
                   row_bytes: int = 128) -> str:
        """Name of the tensor map of a global buffer for boxes (innermost extent first) with a swizzle (0, 32, 64, 128).

        tf32: its loads round float32 to tf32.  row_bytes: contiguous bytes of the tensor that are wanted together.
        """

    def prepend(self, s: Stmt) -> None:
        """A statement to run before those of the op being lowered (staging)."""

    def new_local(self, name: str, size: int, dtype: Any) -> Buffer:
        """A fresh per-thread array, allocated around the op."""

    def exchange(self, shape: tuple[int, ...], dt: Any) -> Buffer:
        """Shared memory for values that threads hand to each other within one op; ops of one shape take turns in it."""

    def new_fragment(self, name: str, layout: Any, dtype: Any) -> Buffer:
        """A fresh fragment of a given layout, allocated around the op."""

    def new_shared(self, name: str, shape: tuple[int, ...], dtype: Any, layout: Any = None) -> Buffer:
        """A fresh shared buffer (staging, cross-warp exchange), allocated around the op."""


class TileOpProtocol(Protocol):
    """The methods each class in tilelang.ops defines besides its fields."""

    def check(self) -> None:
        """Shapes, dtypes, scopes; raises errors.error(...) at self.span.  Called when the frontend builds the node."""

    def accesses(self) -> tuple[Access, ...]:
        """Regions read and written, with the mode."""

    def reference(self, env: Any) -> None:
        """Whole-tile meaning in NumPy.  env.read(region) -> ndarray of the tile (out-of-range global elements give
        the safe value); env.write(region, ndarray) (out-of-range skipped); env.eval(expr) -> scalar."""

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Layouts this op can add now, given `known` (see transform/layout/infer_layouts.py); {} when it cannot say yet."""

    def lower(self, cx: LowerContext) -> Stmt:
        """The statements the op becomes on cx.target, per thread."""


__all__ = ["Access", "LowerContext", "TileOp", "TileOpProtocol"]
