"""Tile ops: copy, gemm, fill, reductions, scans, transpose."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (GLOBAL, SHARED, VARIABLE, Buffer, Const, Evaluate, Expr, Load, Region, Var, as_bool, call, cast,
                         convert, is_const, walk, FRAGMENT, LOCAL, PRIVATE)
from tilelang.ops import Copy, CopyPlan, Fill, Gemm, GemmSchedule, GemmWarpPolicy, Reduce, ReducePlan, Scan, Transpose
from tilelang.ops.reduce import KINDS

from .tracing.builder import Builder, Emitted, check_constant, need_builder
from .tracing.flags import flag
from .loops import attrs_of, options_from
from .tracing.regions import BufferSlice, Operand, check_inside, operand, pair, whole_region
from .tracing.state import describe, error, example, named
from .whole import function_of_programs

errors.register_warning("gemm-waits", "wg_wait of T.gemm, which is synchronous whatever the number")
errors.register_warning("element-copy", "T.copy of two elements at block level, where a tile was probably meant")

EVICTION_POLICIES = ("evict_normal", "evict_first", "evict_last")
EMITTED = Emitted()


def emit_op(b: Builder, op: Any) -> Emitted:
    """Check a tile op and emit it at the call.  Raises no-kernel, and what the op's check raises."""
    if b.kernel is None:
        raise errors.error("no-kernel", f"T.{op.op_name} is executed by the threads of a launch: it is valid inside T.Kernel "
                           "only", found=f"T.{op.op_name} outside of it", span=op.span)
    op.check()
    b.emit(op)
    return EMITTED


def check_policy(policy: Any) -> None:
    """Raises eviction-policy for a name that is none, and for anything that is no name."""
    if policy is not None and (not isinstance(policy, str) or policy not in EVICTION_POLICIES):
        raise error("eviction-policy", f"unknown eviction policy ‹{policy!r}›, expected «one of "
                    f"{', '.join(EVICTION_POLICIES)}»")


def accumulator_clearing(clear_accum: Any) -> Expr:
    """clear_accum of a GEMM as a bool expression.  Raises gemm-clear for numbers and anything else that is no bool."""
    if isinstance(clear_accum, (bool, np.bool_)):
        return as_bool(bool(clear_accum))
    given = convert(clear_accum) if hasattr(clear_accum, "__tilelang_expr__") else clear_accum
    if not isinstance(given, Expr) or not given.dtype.is_bool:
        raise error("gemm-clear", f"clear_accum must be a bool or a bool expression, found {clear_accum!r}")
    return given


def _is_of_the_block(b: Builder, e: Load) -> bool:
    """An element of global or shared memory at a place that only the block decides: by block indices and numbers."""
    if b.kernel is None or any(f.parallel for f in b.frames) or not e.buffer.scope_name.startswith(
            (GLOBAL, *SHARED)) or all(isinstance(d, (int, Const)) and getattr(d, "value", d) == 1
                                        for d in e.buffer.shape):
        return False
    known = {id(v) for v in b.kernel.block_vars}
    return all(id(v) in known for i in e.indices for v in walk(i) if isinstance(v, (Var, Load)))


def copy(src: Any, dst: Any, *, coalesced_width: int | None = None, disable_tma: bool = False,
         eviction_policy: str | None = None, prefer_instruction: str | None = None,
         annotations: dict[str, Any] | None = None, loop_layout: Any = None) -> Emitted:
    """dst = src, element by element, converting the type; block-collective and synchronous.

    src, dst: buffers, regions or start elements in any scope; extents are paired as the reference's "Regions and slices" says.
    coalesced_width: elements of one access.  Raises copy-option, eviction-policy.

    Example:
        T.copy(A[by * 128, 0], A_s)            # a (128, 64) tile from that element on
        T.copy(acc, C[by * 128, bx * 128])     # a (128, 128) tile, from registers
    """
    b = need_builder("T.copy")
    if annotations is not None and not isinstance(annotations, Mapping):
        attrs_of(annotations)  # raises
    notes = dict(annotations or {})
    check_policy(notes.get("eviction_policy", eviction_policy))
    prefer = notes.get("prefer_instruction", prefer_instruction)
    if prefer not in (None, "tma", "cp_async", "sync"):
        raise error("copy-option", f"prefer_instruction must be «'tma', 'cp_async' or 'sync'», got {prefer!r}")
    no_tma = flag(notes.pop("disable_tma", disable_tma), "disable_tma")
    plan, attrs = options_from(CopyPlan, notes, coalesced_width=coalesced_width, disable_tma=True if no_tma else None,
                               eviction_policy=eviction_policy, prefer_instruction=prefer_instruction,
                               loop_layout=loop_layout)
    if isinstance(src, Load) and isinstance(dst, Load) and not attrs and not plan.given():
        if _is_of_the_block(b, src) and _is_of_the_block(b, dst):
            errors.warn("element-copy", f"T.copy of one element: `{src.buffer.name}[...]` and `{dst.buffer.name}[...]` are "
                        "both elements", "give a tile on one side, or slices: T.copy(A[i, 0:n], B[i, 0:n])", span=b.span())
        b.store(dst.buffer, dst.indices, src)
        return EMITTED
    if isinstance(src, Load) and isinstance(dst, Load):
        s, d = whole_region(src, "src"), whole_region(dst, "dst")
    else:
        s, d = pair(src, dst)
    return emit_op(b, Copy(s, d, attrs, plan, span=b.here()))


def async_copy(src: Any, dst: Any, *, coalesced_width: int | None = None, annotations: dict[str, Any] | None = None,
               loop_layout: Any = None) -> Emitted:
    """Copy global to shared memory by cp.async and commit it, without waiting (sm_80+).  T.ptx_wait_group(n) waits.

    src: a region or start element of a global tensor.  dst: a tile in shared memory, of src's extents and dtype.
    Executed by the whole block.  Raises copy-option.

    Example:
        T.async_copy(A[by * 128, 0], A_s)
        T.ptx_wait_group(0)
        T.sync_threads()
    """
    b = need_builder("T.async_copy")
    s, d = pair(src, dst, "async_copy")
    if s.buffer.scope_name != GLOBAL or not d.buffer.scope_name.startswith("shared"):
        raise error("copy-option", f"T.async_copy moves «global to shared memory», found {s.buffer.scope_name} to "
                    f"{d.buffer.scope_name}", hint="use T.copy")
    if s.dtype != d.dtype:
        raise error("copy-option", f"T.async_copy moves bytes as they are, found {s.dtype} to {d.dtype}",
                    expected="one type on both sides", hint="load with T.async_copy in the tensor's type and convert in a "
                    "second tile, or use T.copy")
    plan, attrs = options_from(CopyPlan, annotations, coalesced_width=coalesced_width, loop_layout=loop_layout,
                               async_group=True)
    emit_op(b, Copy(s, d, attrs, plan, span=b.here()))
    b.emit(Evaluate(call("cp_async_commit", (), "void", span=b.here()), span=b.here()))
    return EMITTED


@example('T.fill(acc, -T.infinity("float32"))', "T.fill(A_s[0:16, :], 1.0)")
def fill(buffer: Any, value: Any, annotations: dict[str, Any] | None = None) -> Emitted:
    """Every element of a tile = value, cast to the tile's type; block-collective.

    buffer: a buffer, region or element of any shape, dtype and scope.  value: a scalar.  Raises fill-operand, fill-value.
    """
    b = need_builder("T.fill")
    if isinstance(buffer, (int, float, str, type(None))) or isinstance(buffer, Expr) and not isinstance(buffer, Load):
        raise error("fill-operand", f"T.fill and T.clear take a buffer, region or element, found {describe(buffer)}")
    r = whole_region(buffer, "the operand of T.fill")
    check_inside(r)
    v = convert(value)
    check_constant(v, r.dtype)
    if v.dtype.lanes in (1, r.dtype.lanes):
        v = cast(v, r.dtype)
    return emit_op(b, Fill(r, v, attrs_of(annotations), span=b.here()))


@example("T.clear(acc)")
def clear(buffer: Any, annotations: dict[str, Any] | None = None) -> Emitted:
    """Every element of a tile = 0; block-collective.

    buffer: a buffer, region or element of any shape, dtype and scope.
    """
    if isinstance(annotations, (int, float)):
        raise error("option-type", f"T.clear takes «a buffer» only, found the value ‹{annotations!r}›",
                    f"write T.fill(buffer, {annotations!r})")
    return fill(buffer, 0, annotations)


def warp_policy(policy: Any) -> GemmWarpPolicy:
    """The policy of a gemm.  Raises option-type."""
    if isinstance(policy, bool) or not isinstance(policy, int) or policy not in list(GemmWarpPolicy):
        raise error("option-type", f"policy is one of T.GemmWarpPolicy.Square, FullRow and FullCol, found {policy!r}",
                    expected="T.GemmWarpPolicy.Square, FullRow or FullCol")
    return GemmWarpPolicy(policy)


def gemm(A: Any, B: Any, C: Any, transpose_A: bool = False, transpose_B: bool = False,
         policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Any = False, k_pack: int = 1, mbar: Any = None,
         annotations: dict[str, Any] | None = None, *, wg_wait: int = 0) -> Emitted:
    """C += op(A) @ op(B) (= when clear_accum), accumulating in C's type; synchronous and block-collective.

    A: (M, K), or (K, M) if transpose_A, shared or fragment.  B: (K, N), or (N, K) if transpose_B, shared or fragment.
    C: (M, N) fragment.  Raises gemm-shape, gemm-types, gemm-clear.
    wg_wait: how many groups of wgmma may be left in flight, -1 for any number, in older programs.  Such programs wait by
    themselves, so waiting at once (0) computes the same: other numbers give the warning gemm-waits.

    Example:
        T.clear(acc)
        T.gemm(A_s, B_s, acc)                       # (128, 64) @ (64, 128)
        T.gemm(A_s, C_s, acc, transpose_B=True)     # C_s: (128, 64)
    """
    b = need_builder("T.gemm")
    if isinstance(wg_wait, bool) or not isinstance(wg_wait, int) or wg_wait < -1:
        raise error("copy-option", f"wg_wait is -1 or a number of groups, got {wg_wait!r}",
                    expected="an integer of at least -1")
    if wg_wait:
        errors.warn("gemm-waits", f"wg_wait={wg_wait} has no effect: T.gemm is synchronous",
                    "leave it out, or write T.wgmma_gemm and T.wait_wgmma", span=b.here())
    if mbar is not None:
        raise error("copy-option", "T.gemm with mbar is for Blackwell's asynchronous matrix unit and is not available",
                    expected="no mbar", found=describe(mbar))
    clearing = accumulator_clearing(clear_accum)
    if isinstance(k_pack, bool) or not isinstance(k_pack, int) or k_pack not in (1, 2):
        raise error("copy-option", f"k_pack is «1 or 2», got {k_pack!r}")
    a, b_, c = (whole_region(x, f"operand {n} of T.gemm") for x, n in ((A, "A"), (B, "B"), (C, "C")))
    for r in (a, b_, c):
        check_inside(r)
    plan, attrs = options_from(GemmSchedule, annotations, k_pack=k_pack if k_pack != 1 else None)
    return emit_op(b, Gemm(a, b_, c, flag(transpose_A, "transpose_A"), flag(transpose_B, "transpose_B"), warp_policy(policy),
                           clearing, attrs, plan, span=b.here()))


def tile_of(b: Builder, x: Any, what: str, read: bool = True) -> tuple[Region, Callable[[], None] | None]:
    """(a whole buffer to reduce or for a result, what copies it back to the region that is meant, if any).

    A region becomes a buffer of its own, in registers, without its dimensions of one element.  read: its elements are needed.
    Raises reduce-operand."""
    if isinstance(x, Load) and x.buffer.scope_name == VARIABLE:
        return whole_region(x, what), None
    if not isinstance(x, (Buffer, BufferSlice)):
        raise error("reduce-operand", f"{what} must be a buffer or a region of one, found {describe(x)}")
    if not isinstance(x, BufferSlice) or x.region.is_full:
        return operand(x, what).region(), None
    shape = tuple(n for n in x.region.extents if not is_const(n, 1)) or (1,)
    if x.buffer.scope_name == GLOBAL or not all(isinstance(n, int) for n in shape):
        raise error("reduce-operand", f"{what} must be a tile on the chip of constant extents, found {describe(x)}",
                    found=f"extents ({', '.join(map(str, x.region.extents))}) in {x.buffer.scope_name} memory",
                    hint="T.copy the region to a fragment or shared buffer of its size")
    tile = temporary(b, x.buffer, shape)
    if read:
        copy(x, tile.buffer)
    return tile.region(), lambda: b.emit(Copy(*pair(tile.buffer, x), span=b.here()))


def temporary(b: Builder, like: Buffer, shape: tuple[int, ...]) -> Operand:
    """A new tile of this shape in registers: of the block, or of each thread as `like` is."""
    scope = LOCAL if like.scope_name in PRIVATE else FRAGMENT
    tile = b.allocate(Buffer(b.fresh_name(f"{like.name}_part"), shape, like.dtype, scope, span=b.here()))
    b.unnamed.pop(id(tile), None)
    return operand(tile, "a tile")


def dimension(dim: Any, r: Region, kind: str) -> int:
    """A dimension of a tile, counted from 0.  Raises reduce-dim or scan-dim (kind)."""
    rank = len(r.extents)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise error(kind, f"dim must be «an integer», got {dim!r}")
    if not -rank <= dim < rank:
        raise error(kind, f"dim ‹{dim}› is out of range for `{r.buffer.name}` with {rank} dimensions",
                    expected=f"{-rank} to {rank - 1}")
    return dim % rank


def check_batch(batch: Any) -> None:
    """Check the number of outputs per exchange, which never changes results.  Raises reduce-batch for no positive integer."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise error("reduce-batch", f"batch must be a positive integer, got {batch!r}")


def reduce(buffer: Any, out: Any, reduce_type: str, dim: int = -1, clear: bool = True, batch: int = 1,
           nan_propagate: bool = False, annotations: dict[str, Any] | None = None) -> Emitted:
    """out = reduce_type over dimension dim of buffer, computed in out's type; clear=False combines with out's value.

    buffer: a fragment or shared tile, or a region of one, of any shape and numeric dtype.  Of a region, dimensions of one
    element are left out, and dim counts the others.  out: a fragment or shared tile (or region) of that shape without
    dimension dim (or with 1 there).  Executed by the whole block.

    Example:
        T.reduce(acc, m, "max", dim=1)              # (128, 128) -> (128,)
        T.reduce(acc[:, 0:64], m, "max", dim=1)     # of the first 64 columns
    """
    b = need_builder("T.reduce")
    if not isinstance(reduce_type, str) or reduce_type not in KINDS:
        raise error("reduce-kind", f"unknown kind of reduction ‹{reduce_type!r}›, expected «one of {', '.join(KINDS)}»")
    check_batch(batch)
    cleared = flag(clear, "clear")
    src, _ = tile_of(b, buffer, "the source of a reduction")
    dst, put = tile_of(b, out, "the result of a reduction", not cleared)
    along = dimension(dim, src, "reduce-dim")
    plan, attrs = options_from(ReducePlan, annotations, batch=batch if batch != 1 else None)
    emit_op(b, Reduce(src, dst, reduce_type, along, cleared, flag(nan_propagate, "nan_propagate"), attrs, plan, span=b.here()))
    if put is not None:
        put()
    return EMITTED


def _reduction(kind: str, about: str, example: str) -> Callable[..., Emitted]:
    def fn(buffer: Any, out: Any, dim: int = -1, clear: bool = True, batch: int = 1,
           annotations: dict[str, Any] | None = None) -> Emitted:
        return reduce(buffer, out, kind, dim, clear, batch, False, annotations)

    def extremum(buffer: Any, out: Any, dim: int = -1, clear: bool = True, batch: int = 1, nan_propagate: bool = False,
                 annotations: dict[str, Any] | None = None) -> Emitted:
        return reduce(buffer, out, kind, dim, clear, batch, nan_propagate, annotations)

    out = extremum if kind in ("max", "min", "absmax") else fn
    return named(out, f"reduce_{kind}", f"{about}\n\nbuffer, out, clear: as T.reduce.\n\nExample:\n    {example}")


reduce_max, reduce_min, reduce_absmax, reduce_prod = (
    _reduction(kind, about, f"T.reduce_{kind}(acc, m, dim=1)   # (128, 128) -> (128,)") for kind, about in (
        ("max", "Maximum along dim."), ("min", "Minimum along dim."), ("absmax", "Maximum of absolute values along dim."),
        ("prod", "The elements along dim multiplied by each other.")))
reduce_bitand, reduce_bitor, reduce_bitxor = (
    _reduction(f"bit{op}", f"Bitwise {about} along dim (integer or bool).",
               f"T.reduce_bit{op}(bits, mask, dim=1)   # int32 (128, 128) -> (128,)") for op, about in (
        ("and", "and"), ("or", "or"), ("xor", "exclusive or")))
reduce_sum = _reduction("sum", "Sum along dim.", "T.reduce_sum(acc, m, dim=1)                 # (128, 128) -> (128,)\n"
                        "    T.reduce_sum(acc, m, dim=1, clear=False)    # added to what m holds")


@example("T.reduce_abssum(acc, m, dim=1)   # (128, 128) -> (128,)")
def reduce_abssum(buffer: Any, out: Any, dim: int = -1, batch: int = 1,
                  annotations: dict[str, Any] | None = None) -> Emitted:
    """Sum of absolute values along dim.

    buffer, out: as T.reduce.
    """
    return reduce(buffer, out, "abssum", dim, True, batch, False, annotations)


def _scan(kind: str, src: Any, dst: Any, dim: int, reverse: bool, annotations: dict[str, Any] | None) -> Emitted:
    b = need_builder(f"T.cum{kind}")
    s = whole_region(src, f"the source of T.cum{kind}")
    d = s if dst is None else whole_region(dst, f"the result of T.cum{kind}")
    rank = len(s.extents)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise error("scan-dim", f"Dimension {dim} is out of bounds for `{s.buffer.name}` with {rank} dimensions",
                    expected=f"{-rank} to {rank - 1}", found=repr(dim))
    if not operand(src, "src").whole and s.extents[dim] == 1 and any(n != 1 for n in s.extents):
        raise error("scan-dim", f"dimension {dim} of this region of `{s.buffer.name}` is one element: nothing would be summed",
                    expected="a dimension of several elements", found=f"dimension {dim} of extents {tuple(s.extents)}",
                    hint=f"T.cum{kind}(…, dim={next(d for d, n in enumerate(s.extents) if n != 1)})")
    check_inside(s)
    check_inside(d)
    return emit_op(b, Scan(s, d, kind, dim % rank, flag(reverse, "reverse"), attrs_of(annotations), span=b.here()))


def _cumulative(kind: str, about: str, operands: str, example: str = "") -> Callable[..., Emitted]:
    def fn(src: Any, dst: Any = None, dim: int = 0, reverse: bool = False,
           annotations: dict[str, Any] | None = None) -> Emitted:
        return _scan(kind, src, dst, dim, reverse, annotations)

    return named(fn, f"cum{kind}", f"{about}\n\nsrc, dst: {operands}.\n\nExample:\n    T.cum{kind}(x_s){example}")


_TILES = "shared or fragment tiles of one shape and type, or global tensors"
cumsum = _cumulative("sum", "Inclusive prefix sum along dim, in place when dst is None; reverse: from the end.", _TILES,
                     "\n    T.cumsum(acc, dim=1)")
cummax = _cumulative("max", "Inclusive prefix maximum along dim, in place when dst is None.", _TILES)
cumprod = _cumulative("prod", "Inclusive prefixes along dim, multiplied up, in place when dst is None; reverse: from the end.",
                      "as T.cumsum")
cummin = _cumulative("min", "Inclusive prefix minimum along dim, in place when dst is None; reverse: from the end.",
                     "as T.cumsum")


@example("T.transpose(A_s, D_s)   # (128, 64) -> (64, 128)")
def transpose(src: Any, dst: Any, annotations: dict[str, Any] | None = None) -> Emitted:
    """dst[…, j, i] = src[…, i, j], cast to dst's type; block-collective.

    src: a (…, M, N) tile in shared memory or a fragment.  dst: another (…, N, M) tile in shared memory or a fragment.
    Raises transpose-operand, transpose-shape.
    """
    b = need_builder("T.transpose")
    for x, what in ((src, "source"), (dst, "destination")):
        o = operand(x, f"the {what} of T.transpose")
        if o.extents is None or len(o.extents) < 2:
            raise error("transpose-operand", f"the {what} of T.transpose needs two dimensions with extents", found=describe(x))
    s, d = whole_region(src, "src"), whole_region(dst, "dst")
    return emit_op(b, Transpose(s, d, attrs_of(annotations), span=b.here()))


class _Callable(types.ModuleType):
    """The name `T.tile` is this module, and in programs of whole tensors the function of that name."""

    def __call__(self, *args: Any) -> Any:
        return function_of_programs("tile")(*args)


sys.modules[__name__].__class__ = _Callable

__all__ = ["GemmWarpPolicy", "async_copy", "clear", "copy", "cummax", "cummin", "cumprod", "cumsum", "fill", "gemm", "reduce",
           "reduce_abssum", "reduce_sum", "transpose"]
