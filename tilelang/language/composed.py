"""Functions composed of other statements of the language: im2col tiles, dp4a, warp votes and reductions, hints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tilelang.ir import (Buffer, Expr, Load, Region, Shuffle, as_bool, binary, call, cast, convert, dtype as DType, is_const,
                         load, logical, I32, DYNAMIC, GLOBAL)
from tilelang.ops import Copy, CopyPlan
from tilelang.ops.im2col import by_elements, view
from tilelang.target.im2col import Im2col

from .alloc import alloc_var
from .atomic import atomic_add
from .tracing.builder import Builder, Emitted, need_builder
from .tracing.control_flow import ControlFlow
from .loops import grid
from .math import Shuffle_
from .tracing.regions import BufferSlice, operand
from .tracing.state import describe, error, example, named
from .tile import EMITTED, check_policy

WARP = 32  # lanes of a warp


@example("T.im2col(image, A_s, by, k, 3, 1, 1, 1)    # 3 x 3 kernel, stride 1, dilation 1, padding 1")
def im2col(img: Any, col: Any, nhw_step: Any, c_step: Any, kernel: Any, stride: Any, dilation: Any, pad: Any,
           eviction_policy: str | None = None, annotations: dict[str, Any] | None = None) -> Emitted:
    """Copy a tile of the im2col matrix of an NHWC image: rows are output pixels, columns are (kh, kw, c); zero outside it.

    Row r is output pixel nhw_step*BM + r (flattened n, oh, ow), column c is c_step*BK + c.
    img: (N, H, W, C) in global memory.  col: (BM, BK) in shared memory, of img's type.
    kernel, stride, dilation, pad: an integer, or a pair for height and width.  pad: the height's and the width's may be pairs,
    before and behind the image; negative ones cut the image.
    On sm_90a TMA loads the tile, in im2col mode, where height, width and channels are static and BK (16-bit elements: or 64)
    divides C; else threads do.  eviction_policy: accepted; without effect on copies by threads.  Raises im2col-operand.
    """
    b = need_builder("T.im2col")
    check_policy((annotations or {}).get("eviction_policy", eviction_policy))
    o = operand(col, "the destination of T.im2col")
    m = _matrix("T.im2col", img, kernel, stride, dilation, pad)
    if o.extents is None or len(o.extents) < 2 or o.buffer.dtype != img.dtype:
        raise error("im2col-operand", f"T.im2col writes «a tile of at least 2 dimensions and type {img.dtype}», found "
                    f"{describe(col)}")
    for name, value in (("nhw_step", nhw_step), ("c_step", c_step)):
        if not convert(value).dtype.is_int or convert(value).dtype.lanes != 1:
            raise error("im2col-operand", f"{name} of T.im2col is «an integer», found {describe(value)}")
    rows, columns = o.extents[-2:]
    op = Copy(Region(view(img, m), (convert(nhw_step * rows), convert(c_step * columns)), (rows, columns)), o.region(),
              plan=CopyPlan(eviction_policy=eviction_policy), span=b.here())
    b.emit(op if _fixed(img) else by_elements(op, img, m))
    return EMITTED


@example("X_w = T.im2col_matrix(image, 3, 1, 1, 1)",
         "T.copy(X_w[by * 128, k * 32], A_s)    # as T.im2col(image, A_s, by, k, 3, 1, 1, 1)")
def im2col_matrix(img: Any, kernel: Any, stride: Any = 1, dilation: Any = 1, pad: Any = 0) -> Buffer:
    """The im2col matrix of an NHWC image, of which T.copy reads tiles at any row and column; no element of it has an address.

    img: (N, H, W, C) in global memory, with static H, W, C.  The others as in T.im2col.  Raises im2col-operand.
    """
    need_builder("T.im2col_matrix")
    m = _matrix("T.im2col_matrix", img, kernel, stride, dilation, pad)
    if not _fixed(img):
        raise error("im2col-operand", f"T.im2col_matrix reads a dense image in global memory, found {describe(img)}",
                    expected="static height, width and channels", hint="T.im2col copies tiles of other images")
    return view(img, m)


def _fixed(img: Buffer) -> bool:
    """Whether tiles of an image's matrix are copies: it is dense in global memory, and only its number of images is open."""
    return all(isinstance(n, int) for n in img.shape[1:]) and img.strides_ is None and is_const(
        convert(img.offset), 0) and img.scope_name == GLOBAL


def _matrix(name: str, img: Any, kernel: Any, stride: Any, dilation: Any, pad: Any) -> Im2col:
    """What the arguments of an im2col function describe."""
    if not isinstance(img, Buffer) or len(img.shape) != 4:
        raise error("im2col-operand", f"{name} reads «a whole 4-dimensional NHWC tensor», found {describe(img)}")
    taps, step, apart, around = (_of_image(*x) for x in (("kernel", kernel, 1), ("stride", stride, 1),
                                                         ("dilation", dilation, 1), ("pad", pad, 0)))
    out = tuple((img.shape[1 + d] + sum(around[d]) - apart[d] * (taps[d] - 1) - 1) // step[d] + 1 for d in (0, 1))
    return Im2col(img.shape[1:], out, taps, step, apart, tuple(-p[0] for p in around))


def _of_image(name: str, given: Any, least: int) -> Any:
    """A size of T.im2col for height and width; of padding the numbers before and behind."""
    both = given if isinstance(given, (tuple, list)) else (given, given)
    pairs = [p if isinstance(p, (tuple, list)) else (p, p) for p in both]
    numbers = [x for p in pairs for x in p]
    low = least if least or not any(isinstance(p, (tuple, list)) for p in both) else 1 - 2**15
    if len(pairs) != 2 or len(numbers) != 4 or least and any(isinstance(p, (tuple, list)) for p in both) or not all(
            isinstance(x, int) and not isinstance(x, bool) and low <= x < 2**15 for x in numbers):
        raise error("im2col-operand", f"{name} of T.im2col is «an integer from {least} to {2 ** 15 - 1}», found {given!r}",
                    hint="or a pair of them, for height and width")
    return tuple(map(tuple, pairs)) if not least else tuple(both)


@example("T.c2d_im2col(image, A_s, by, k, 3, 1, 1, 1)")
def c2d_im2col(*args: Any, **kw: Any) -> Emitted:
    """Deprecated spelling of T.im2col."""
    warnings.warn("T.c2d_im2col is deprecated, use T.im2col", DeprecationWarning, stacklevel=2)
    return im2col(*args, **kw)


def _following(x: Any, n: int, what: str) -> list[Load]:
    """The n consecutive elements that start at a buffer, slice or element."""
    o = operand(x, what)
    return [load(o.buffer, (*o.mins[:-1], o.mins[-1] + k)) for k in range(n)]


@example('T.dp4a(a8[i * 4], b8[i * 4], dot[0])   # dot = T.alloc_local((1,), "int32")')
def dp4a(A: Any, B: Any, C: Any) -> Emitted:
    """C[0] += sum of A[i] * B[i] over 4 consecutive int8 elements, in int32, once per executing thread.

    A, B: the first of 4 int8 elements, in any scope.  C: an int32 element, in any scope.
    """
    b = need_builder("T.dp4a")
    x, y, z = (operand(v, f"operand {n} of T.dp4a") for v, n in ((A, "A"), (B, "B"), (C, "C")))
    if x.buffer.dtype != "int8" or y.buffer.dtype != "int8":
        raise error("dp4a-type", f"dp4a requires int8 inputs, found {x.buffer.dtype} and {y.buffer.dtype}",
                    expected="int8 and int8")
    if z.buffer.dtype != "int32":
        raise error("dp4a-type", f"dp4a requires an «int32» accumulator, found {z.buffer.dtype}")
    total: Any = load(z.buffer, z.mins)
    for p, q in zip(_following(A, 4, "operand A of T.dp4a"), _following(B, 4, "operand B of T.dp4a")):
        total = total + cast(p, I32) * cast(q, I32)
    b.store(z.buffer, z.mins, total)
    return EMITTED


def _vector_atomic(n: int) -> Callable[..., Any]:
    def fn(dst: Any, value: Any, return_prev: bool = False) -> Any:
        targets = _following(dst, n, f"the destination of T.atomic_addx{n}")
        if isinstance(value, (Buffer, BufferSlice)) or isinstance(value, Load) and value.dtype.lanes == 1:
            values: list[Any] = list(_following(value, n, f"the value of T.atomic_addx{n}"))
        else:
            v = convert(value)
            if v.dtype.lanes != n:
                raise error("atomic-operand", f"T.atomic_addx{n} adds «{n} values», found {describe(value)}")
            values = [Shuffle((v,), (k,), v.dtype.scalar) for k in range(n)]
        old = [atomic_add(t, x, return_prev=return_prev) for t, x in zip(targets, values)]
        if return_prev:
            return Shuffle(tuple(old), tuple(range(n)), targets[0].dtype.with_lanes(n))
        return EMITTED

    return named(fn, f"atomic_addx{n}",
                 f"Add {n} consecutive values atomically, each on its own; return_prev: the old values as a vector.\n\n"
                 f"dst: the first of {n} consecutive elements, or a region of them, in global or shared memory.\n"
                 f"value: a region of {n} elements in any scope, or a vector.\n\n"
                 f"Example:\n    T.atomic_addx{n}(Y[i * {n}], X[i * {n}:i * {n} + {n}])")


atomic_addx2, atomic_addx4 = _vector_atomic(2), _vector_atomic(4)


def _vote(kind: str) -> Callable[[Any], Expr]:
    def fn(x: Any) -> Expr:
        b = need_builder(f"T.{kind}_of")
        o = operand(x, f"the operand of T.{kind}_of")
        extents = o.extents or (1,) * len(o.mins)
        if any(not (isinstance(e, int) and e == 1) for e in extents[:-1]) and not o.whole:
            raise error("vote-operand", f"T.{kind}_of takes a whole buffer, or a region that varies along its last "
                        "dimension only",
                        expected="a whole buffer, or a region along its last dimension", found=f"extents {tuple(extents)}")
        if not (o.buffer.dtype.is_bool or o.buffer.dtype.is_int):
            raise error("vote-operand", f"T.{kind}_of needs a bool or integer buffer, found {o.buffer.dtype}",
                        expected="bool or integer elements")
        lazy = b.lazy
        if o.whole and not b.loop_passes:  # also under a condition: reading a whole buffer has no effect
            b.lazy = 0
        try:
            return scanned(b, o, extents)
        finally:
            b.lazy = lazy

    def scanned(b: Any, o: Any, extents: tuple[Any, ...]) -> Expr:
        found = alloc_var("bool", init=kind == "all")
        with grid(*extents) as index:
            element = as_bool(load(o.buffer, [m + i for m, i in zip(o.mins, index)]))
            b.store(found.buffer, found.indices, logical("and" if kind == "all" else "or", found, element))
        return b.let(f"{kind}_of", found)  # a value: assigning it to a variable stores it

    return named(fn, f"{kind}_of", f"Whether {kind} of the elements of a buffer or region hold, seen by each thread: bool.\n\n"
                 "x: a buffer or region of static extents, in any scope that the thread can read.\n\nExample:\n"
                 f"    if T.{kind}_of(flags[0:8]):\n        Y[i] = 1")


any_of, all_of = _vote("any"), _vote("all")


def _warp_reduce(name: str, op: str) -> Callable[[Any], Expr]:
    def fn(value: Any) -> Expr:
        b: Builder = need_builder(f"T.warp_reduce_{name}")
        given: Expr = convert(value)
        if given.dtype.is_handle or given.dtype.lanes != 1:
            raise error("math-type", f"T.warp_reduce_{name} needs «a number», found {describe(value)}",
                        hint="pass an element or a scalar expression")
        v: Expr = b.let("lane_value", given)
        step = WARP // 2
        while step:
            other = b.let("other", call("shfl_xor", (v, convert(step)), v.dtype, span=b.here(), width=WARP))
            v = b.let(f"warp_{name}", binary(op, v, other))
            step //= 2
        return v

    source = "I[i]" if name.startswith("bit") else "X[i]"
    return named(fn, f"warp_reduce_{name}", f"{name} over the lanes of the warp; every lane gets it.\n\n"
                 f"Example:\n    total = T.warp_reduce_{name}({source})")


warp_reduce_sum, warp_reduce_max, warp_reduce_min = (
    _warp_reduce(n, o) for n, o in (("sum", "add"), ("max", "max"), ("min", "min")))
warp_reduce_bitand, warp_reduce_bitor = _warp_reduce("bitand", "bitand"), _warp_reduce("bitor", "bitor")


@example("x = X[i]", "if T.has_let_value(x):", "    Y[i] = x")
def has_let_value(var: Any) -> bool:
    """Whether a variable was read from a buffer element, whose address it may then stand for."""
    return id(var) in need_builder("T.has_let_value").elements


@example("x = X[i]", 'T.call_extern("handle", "my_load", T.address_of(T.get_let_value(x)), tx)')
def get_let_value(var: Any) -> Load:
    """The buffer element that a variable was read from."""
    b = need_builder("T.get_let_value")
    if id(var) not in b.elements:
        raise error("region-operand", f"‹{describe(var)}› was not read from an element",
                    expected="a value read from an element")
    return b.elements[id(var)][1]


def _lanes_of(what: str, dtype: Any, vectors: tuple[Any, ...], lanes: slice) -> Expr:
    """Some lanes of vectors, counted through one vector after the other.  dtype: of the result, as the program gives it."""
    types = [convert(v).dtype for v in vectors]
    if len(vectors) == 1 and types[0].lanes % 2:
        raise error("math-type", f"{what} takes «a vector with an even number of elements», found {types[0]}")
    out = Shuffle_(vectors, range(sum(t.lanes for t in types))[lanes])
    if DType(dtype) != out.dtype:
        raise error("math-type", f"{what} of {', '.join(map(str, types))} is «{out.dtype}», found {DType(dtype)}")
    return out


@example('v2 = T.vectorlow("float32x2", X[0:4])')
def vectorlow(dtype: Any, vec: Any) -> Expr:
    """Lower half of a vector.  dtype: of the half.  Raises math-type."""
    return _lanes_of("T.vectorlow", dtype, (vec,), slice(convert(vec).dtype.lanes // 2))


@example('v2 = T.vectorhigh("float32x2", X[0:4])')
def vectorhigh(dtype: Any, vec: Any) -> Expr:
    """Upper half of a vector.  dtype: of the half.  Raises math-type."""
    return _lanes_of("T.vectorhigh", dtype, (vec,), slice(convert(vec).dtype.lanes // 2, None))


@example('v4 = T.vectorcombine("float32x4", X[0:2], X[2:4])')
def vectorcombine(dtype: Any, vec1: Any, vec2: Any) -> Expr:
    """The vector that consists of two halves.  dtype: of the whole.  Raises math-type."""
    return _lanes_of("T.vectorcombine", dtype, (vec1, vec2), slice(None))


@example('T.tvm_storage_sync("shared")')
def tvm_storage_sync(scope: str) -> Emitted:
    """Barrier by name: "shared" (block) or "warp"."""
    rows = {"shared": "sync_threads", DYNAMIC: "sync_threads", "warp": "sync_warp"}
    b = need_builder("T.tvm_storage_sync")
    if scope not in rows:
        raise error("alloc-scope", f"T.tvm_storage_sync: unknown scope ‹{scope!r}›", expected=f"one of {', '.join(rows)}",
                    hint="use 'shared' or 'warp'")
    ControlFlow(b).expr(call(rows[scope], (), "void", span=b.here()))
    return EMITTED

__all__ = ["c2d_im2col", "dp4a", "get_let_value", "has_let_value", "im2col", "im2col_matrix", "tvm_storage_sync",
           "vectorcombine", "vectorhigh", "vectorlow"]
