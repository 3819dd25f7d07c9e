"""T.Scale: what each device does, what those of a node do together with a tile of each, and who has which part of a tensor.

At the scale "node" the blocks of one number on all ranks work together.  A collective stores this rank's tile into a box on
the other ranks, waits for them once, and reads what has come.  A box has two halves.  How often the block has met the others
chooses one, so that a rank stores into a half again only after a barrier which the others reached when they had read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from tilelang.ir import I32, Buffer, Const, Expr, Region, as_bool, binary, cast, convert, load, replace

from .alloc import alloc_fragment
from .distributed import barrier_all, get_rank, remote
from .hopper import block_rank_in_cluster
from .kernel import get_cluster_size, need_kernel
from .loops import Parallel
from .tensor import view as reshaped
from .tile import copy
from .tracing.builder import need_builder
from .tracing.regions import BufferSlice, subscript
from .tracing.scope import BodyFrame, IfFrame
from .tracing.state import describe, error, example

LEVELS = ("device", "node", "cta_cluster")


class Division(Enum):
    """How T.view divides a buffer among the units of a scale: whole rows (the first dimension), whole columns (the last one),
    or not at all."""

    FULL_ROW, FULL_COL, REPLICA = range(3)


FullRow, FullCol, Replica = Division


class ScaleFrame(BodyFrame):
    """The body of T.Scale.  Its value is the frame itself: rank, and at the scale "node" the collectives.

    box: see Scale.  row: this block's row of the pad.  at: the block's number.  ranks: how many there are.
    """

    opened_by = 'with T.Scale("device") as device:'

    def __init__(self, level: str, box: Buffer | None = None, pad: Buffer | None = None, at: Any = 0) -> None:
        super().__init__()
        self.level, self.box, self.pad, self.at = level, box, pad, at
        self.ranks = 0 if box is None else int(box.shape[2])

    def open(self, builder: Any) -> ScaleFrame:
        return self

    @property
    def rank(self) -> Expr:
        """The number of this device: int32."""
        return get_rank()

    def unit(self) -> tuple[Expr, int]:
        """(which unit of the level this block belongs to or is, how many units there are)."""
        if self.level == "cta_cluster":
            return block_rank_in_cluster(), get_cluster_size()
        if self.level == "node":
            return self._me, self.ranks
        frame, count = need_kernel("T.view"), 1
        number: Expr = Const(0, I32)
        for v, extent in zip(frame.block_vars, frame.blocks):
            n = int(extent.value) if isinstance(extent, Const) else extent if isinstance(extent, int) else 0
            if not n:
                raise error("scale", "T.view divides a tensor among blocks, whose number is known at run time only",
                            expected="a grid whose extents are known while compiling", found="a run-time extent")
            number, count = number + v * count, count * n
        return number, count

    def local_first(self, tile: Any, tiles: int) -> Expr:
        """The number of the tile to work on as number `tile` of `tiles`, so that a rank starts with its own part: int32."""
        if self.pad is None or tiles % self.ranks:
            raise error("scale", f"‹{tiles}› tiles are not divided among the devices",
                        expected='T.Scale("node", …), and a multiple of its ranks')
        return binary("floormod", cast(convert(tile), I32) + self._me * (tiles // self.ranks), Const(tiles, I32))

    # ---- collectives ------------------------------------------------------------------------------------------------

    def all_gather(self, src: Any, dst: Any) -> None:
        """dst[r] = src of rank r.  src: a tile.  dst: as many tiles, or a buffer of them.  Executed by the whole block."""
        half = self._half("all_gather")
        self._send(half, lambda r: src, self._me)
        self._receive(half, dst)

    def all_to_all(self, src: Any, dst: Any) -> None:
        """dst[r] = src[this rank] of rank r.  src, dst: as many tiles as ranks, or buffers of them.  Executed by the whole
        block."""
        half, tiles = self._half("all_to_all"), self._tiles(src)
        self._send(half, lambda r: tiles[r], self._me)
        self._receive(half, dst)

    def all_reduce(self, tile: Any) -> None:
        """tile = the sum over all ranks, in their order, which every rank gets alike.  Executed by the whole block.

        Sums of 16-bit floats are formed in float32."""
        half = self._half("all_reduce")
        self._send(half, lambda r: tile, self._me)
        self._sum(half, tile)

    def reduce_scatter(self, src: Any, dst: Any) -> None:
        """dst = the sum over all ranks r of their src[this rank], as all_reduce.  Executed by the whole block."""
        half, tiles = self._half("reduce_scatter"), self._tiles(src)
        self._send(half, lambda r: tiles[r], self._me)
        self._sum(half, dst)

    def broadcast(self, tile: Any, root: Any = 0) -> None:
        """tile = that of rank `root`, the same number on every rank.  Executed by the whole block."""
        half = self._half("broadcast")
        with IfFrame(as_bool(binary("eq", self._me, cast(convert(root), I32)))):
            for r in range(self.ranks):
                copy(tile, self._slot(remote(self.box, r), half, Const(0, I32)))
        self._meet()
        copy(self._slot(self.box, half, Const(0, I32)), tile)

    # ---- parts of them ----------------------------------------------------------------------------------------------

    @property
    def _me(self) -> Expr:
        return binary("floormod", get_rank(), Const(self.ranks, I32))  # a range that the compiler knows

    def _half(self, what: str) -> Expr:
        """The half of the box for the next collective, by how often this block has met the others."""
        if self.pad is None:
            hint = "T.copy_cluster moves tiles between the blocks of a cluster" if self.level == "cta_cluster" else ""
            raise error("scale", f'{what} at T.Scale("{self.level}"), which has no box for tiles',
                        expected='T.Scale("node", …)', found=f'T.Scale("{self.level}")', hint=hint)
        b = need_builder(f"T.Scale().{what}")
        turn = load(self.pad, (convert(self.at), Const(self.ranks, I32)))
        return b.nameless(b.let("half", cast(binary("floormod", turn, Const(2, turn.dtype)), I32)))

    def _slot(self, box: Any, half: Expr, rank: Expr) -> BufferSlice:
        tile = box.shape[3:]
        starts = (convert(self.at), half, rank, *(Const(0, I32) for _ in tile))
        return BufferSlice(Region(box, starts, (1, 1, 1, *tile)))

    def _tiles(self, tiles: Any) -> Sequence[Any]:
        if isinstance(tiles, Buffer):
            whole = tuple(tiles.shape[1:])
            tiles = [BufferSlice(Region(tiles, (Const(r, I32), *(Const(0, I32) for _ in whole)), (1, *whole)))
                     for r in range(int(tiles.shape[0]))] if isinstance(tiles.shape[0], int) else ()
        if not isinstance(tiles, (list, tuple)) or len(tiles) != self.ranks:
            raise error("scale", f"a tile for each of {self.ranks} ranks is needed, found {describe(tiles)}",
                        expected=f"{self.ranks} tiles, or a buffer whose first dimension is {self.ranks}")
        return tiles

    def _send(self, half: Expr, tile_for: Any, slot: Expr) -> None:
        for r in range(self.ranks):
            copy(tile_for(r), self._slot(remote(self.box, r), half, slot))
        self._meet()

    def _meet(self) -> None:
        assert self.pad is not None, "_half has seen the pad"
        barrier_all(BufferSlice(Region(self.pad, (convert(self.at), Const(0, I32)), (1, 2 * self.ranks))))

    def _receive(self, half: Expr, dst: Any) -> None:
        for r, tile in enumerate(self._tiles(dst)):
            copy(self._slot(self.box, half, Const(r, I32)), tile)

    def _sum(self, half: Expr, dst: Any) -> None:
        assert self.box is not None, "_half has seen the box"
        shape, b = tuple(self.box.shape[3:]), need_builder("T.Scale()")
        terms, total = [alloc_fragment(shape, self.box.dtype) for _ in range(self.ranks)], alloc_fragment(shape, self.box.dtype)
        for r, term in enumerate(terms):
            copy(self._slot(self.box, half, Const(r, I32)), term)
        wide = "float32" if str(self.box.dtype) in ("float16", "bfloat16") else str(self.box.dtype)
        with Parallel(*shape) as at:
            where = tuple(at) if isinstance(at, (tuple, list)) else (at,)
            out: Expr = cast(load(terms[0], where), wide)
            for term in terms[1:]:
                out = out + cast(load(term, where), wide)
            b.store(total, where, cast(out, self.box.dtype))
        copy(total, dst)


@example('with T.Scale("device") as device:', "    if device.rank == 0:", "        T.clear(acc)")
def Scale(level: str, box: Any = None, pad: Any = None, block: Any = 0) -> ScaleFrame:
    """A part of a kernel that says who does it: each device ("device"), all devices of the node together ("node"), or the
    blocks of a cluster ("cta_cluster").  T.view(buffer, layout=T.FullRow) is the part of a buffer that a unit of the scale
    has: a device at "node", a block at "device" and at "cta_cluster".

    `with T.Scale("node", box=B, pad=P, block=bx) as node:` gives the collectives of tiles node.all_gather(src, dst),
    all_to_all(src, dst), all_reduce(tile), reduce_scatter(src, dst) and broadcast(tile, root).  The blocks of one number on
    all ranks reach them equally often.
    box: a T.SymmTensor of shape (blocks, 2, ranks, *tile), through which the tiles go.  pad: a T.SymmTensor of zeros of
    shape (blocks, 2 * ranks), int64, as for T.barrier_all.  block: the row of both that only these blocks use.
    Raises scale, not-symmetric.
    """
    need_builder("T.Scale")
    if level not in LEVELS:
        raise error("scale", f"unknown scale ‹{level!r}›", expected=f"one of {', '.join(LEVELS)}")
    if level != "node":
        return ScaleFrame(level)
    for x, what in ((box, "box"), (pad, "pad")):
        if not isinstance(x, Buffer) or not x.facts.symmetric:
            raise error("not-symmetric", f"the {what} of T.Scale is ‹{describe(x)}›", expected="a T.SymmTensor parameter")
    sizes = [*box.shape[1:], *pad.shape[1:]]
    if len(box.shape) < 4 or len(pad.shape) != 2 or not all(isinstance(n, int) for n in sizes) or box.shape[1] != 2 or \
            pad.shape[1] != 2 * box.shape[2] or str(pad.dtype) != "int64":
        raise error("scale", f"box has the shape {tuple(box.shape)}, pad {tuple(pad.shape)} of {pad.dtype}",
                    expected="(blocks, 2, ranks, *tile), and (blocks, 2 * ranks) of int64",
                    found=f"{tuple(box.shape)} and {tuple(pad.shape)} of {pad.dtype}")
    return ScaleFrame(level, box, pad, block)


@example('bits = T.view(A_s, dtype="uint16")', 'with T.Scale("device"):', "    T.copy(T.view(X, layout=T.FullRow), Y)")
def view(src: Any, shape: Any = None, dtype: Any = None, strides: Any = None, layout: Any = None) -> Any:
    """A view of a buffer's storage with another shape, element type or strides, or the part of it that a unit of a scale has.

    src: a whole buffer of any shape, dtype and scope; the view has its scope.  shape: elements, default src's.
    dtype: default src's.  The number of bits must stay the same.  strides: of the view, in its elements, row-major by default;
    a buffer that is not dense needs them, and fragments have none.
    layout: T.FullRow, T.FullCol or T.Replica in a T.Scale: a region of src, of which each unit has equally many whole rows or
    whole columns, or all; or a function (unit, units) that returns a subscript of src.
    No data moves.  Raises view-source, view-size, tensor-strides; scale.
    """
    if layout is None:
        return reshaped(src, shape, dtype, strides)
    if not isinstance(src, Buffer) or any(x is not None for x in (shape, dtype, strides)):
        raise error("view-source", f"T.view with a layout takes a whole buffer and nothing else, found {describe(src)}",
                    expected="T.view(buffer, layout=…)")
    frame = next((f for f in reversed(need_builder("T.view").frames) if isinstance(f, ScaleFrame)), None)
    if frame is None:
        raise error("scale", f"T.view divides `{src.name}` outside of a T.Scale", expected='with T.Scale("node", …):',
                    found="none")
    unit, units = frame.unit()
    whole = subscript(src, (slice(None),) * len(src.shape))
    if not isinstance(layout, Division):
        if not callable(layout):
            raise error("scale", f"a layout of T.view is ‹{describe(layout)}›",
                        expected="T.FullRow, T.FullCol, T.Replica, or a function (unit, units) that returns a subscript")
        return subscript(src, layout(unit, units))
    if layout is Replica:
        return whole
    d = 0 if layout is FullRow else len(src.shape) - 1
    n = src.shape[d]
    if not isinstance(n, int) or n % units:
        what = "rows" if layout is FullRow else "columns"
        raise error("scale", f'{n} {what} of `{src.name}` do not divide among {units} units of the scale "{frame.level}"',
                    expected=f"a multiple of {units}", found=str(n))
    mins = tuple(unit * (n // units) if k == d else m for k, m in enumerate(whole.region.mins))
    extents = tuple(n // units if k == d else e for k, e in enumerate(whole.region.extents))
    return BufferSlice(replace(whole.region, mins=mins, extents=extents))


__all__ = ["FullCol", "FullRow", "Replica", "Scale", "view"]
