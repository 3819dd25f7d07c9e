"""How wide an access may be: the vector widths that contiguity, alignment and bounds allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (Binary, Bind, Buffer, Call, Cast, Const, Expr, Node, Ramp, Var, binary, children, free_vars, fresh,
                         is_const, ramp, walk, GLOBAL)

# Stride along the lanes of a op b, where a has stride 1, b has one value, and both are multiples of the run in lane 0.
_ALONG = {"floordiv": 0, "lt": 0, "ge": 0, "floormod": 1, "bitxor": 1}
ACROSS, ANYWHERE = 1, 2  # vectors may cross the end of a row; and those of bytes or halves be loaded from any element
MAX_BYTES = 16  # the widest load or store of one thread (PTX ISA, ld/st .v4.b32 and cp.async)


def stride_along(e: Expr, var: Var, analyzer: Analyzer) -> int | None:
    """Coefficient of var in e, 0 when e does not depend on it, None when e depends on it in another way."""
    form = analyzer.linear(e) if e.dtype.is_int and e.dtype.lanes == 1 else None
    if form is None:
        return None if var in free_vars(e) else 0
    out = 0
    for atom, c in form.terms.items():
        if atom is var:
            out += c
        elif isinstance(atom, Cast) and isinstance(atom.value, Var) and 32 <= atom.value.dtype.bits <= atom.dtype.bits:
            out += c if atom.value is var else 0  # the variable cast to the width of a large tensor's indices
        elif not isinstance(atom, Var) and var in free_vars(atom):
            return None
    return out


class LaneForms:
    """How integer and boolean expressions run along the lanes of a vector, `lanes` values of `var` from a multiple of lanes."""

    def __init__(self, var: Var, lanes: int, analyzer: Analyzer, divisors: Mapping[Expr, int]) -> None:
        self.var, self.lanes, self.analyzer = var, lanes, analyzer
        self.divisors = {**divisors, var: lanes}

    def of(self, e: Expr) -> tuple[int, int] | None:
        """(s, n): in each aligned run of n lanes, lane k is that of lane 0 plus k * s, where s is 0 or 1; None for others.

        `x // 64` and `x < 64` are the same in a run, `x % 64` and `x ^ 64` go on by ones, if no run crosses a multiple of 64.
        """
        if self.var not in free_vars(e):
            return 0, self.lanes
        if not e.dtype.is_int or e.dtype.lanes > 1:
            return self._atom(e)
        stride, run = 0, self.lanes
        for x, c in self.analyzer.linear(e).terms.items():
            part = self._atom(x) if self.var in free_vars(x) else (0, run)
            if part is None:
                return None
            stride, run = stride + c * part[0], min(run, part[1])
        return (stride, run) if stride in (0, 1) else None

    def _atom(self, e: Expr) -> tuple[int, int] | None:
        if e is self.var or isinstance(e, Cast) and e.value is self.var and 32 <= e.value.dtype.bits <= e.dtype.bits:
            return 1, self.lanes
        parts = [x for x in children(e) if isinstance(x, Expr)]
        forms = [f for f in map(self.of, parts) if f is not None]
        if len(forms) < len(parts) or isinstance(e, Call):
            return None
        run = min(f[1] for f in forms)
        if not any(f[0] for f in forms):
            return 0, run
        stride = _ALONG.get(e.op) if isinstance(e, Binary) and e.a.dtype.is_int else None
        if stride is None or forms[1][0] or e.op.startswith("floor") and not self.analyzer.can_prove(parts[1] >= 0):  # type: ignore
            return None
        for x in parts:
            run = power_of_two_in(known_divisor(x, self.divisors, self.analyzer), run)
        return stride, run


def access_weights(found: Iterable[tuple[Buffer, tuple[Expr, ...]]], vars: tuple[Var, ...],
                   extents: tuple[Any, ...]) -> dict[tuple[Buffer, tuple[Expr, ...]], int]:
    """How much the accesses of a loop nest to global and shared memory count when the loop along the lanes is chosen.

    Global memory counts most.  An access that does not depend on all loops, as that of an index of rows, moves few elements.
    """
    looped = {v for v, n in zip(vars, extents) if n != 1}
    return {(b, at): (4 if b.scope_name == GLOBAL else 1) * (16 if looped <= {v for i in at for v in walk(i, Var)} else 1)
            for b, at in found if b.scope_name == GLOBAL or b.scope_name.startswith("shared")}


def lane_dimension(found: Iterable[tuple[Buffer, tuple[Expr, ...]]], vars: tuple[Var, ...], extents: tuple[Any, ...],
                   width: Callable[[Buffer, tuple[Expr, ...], int, int], tuple[bool, int]]) -> tuple[int, int]:
    """(dimension, lanes): the dimension along which most memory accesses are contiguous, and the elements per thread there.

    lanes is the narrowest of their widths, since more elements would move the lanes of a warp further away from each other.
    width(buffer, indices, dimension, limit): whether an access is contiguous along it, and its width there, 0 for any.
    """
    best, score, weights = (len(vars) - 1, 1), 0, access_weights(found, vars, extents)
    for d in reversed(range(len(vars))):
        limit = power_of_two_in(extents[d], 64) if isinstance(extents[d], int) else 1
        ways = {(b, at): width(b, at, d, limit) for b, at in weights}
        own = sum(weights[x] for x, (contiguous, _) in ways.items() if contiguous)
        if own > score:
            score, best = own, (d, min((w for _, w in ways.values() if w), default=1))
    return best


def bound_divisors(body: Node) -> dict[Expr, int]:
    """Known divisors of the integer variables that statements of body bind to a value."""
    out: dict[Expr, int] = {}
    for x in walk(body, Bind):
        if x.var.dtype.is_int:
            out[x.var] = known_divisor(x.value, out)
    return out


def power_of_two_in(n: int, limit: int) -> int:
    """Largest power of two that divides n (0 is divisible by everything) and is at most limit."""
    w = 1
    while w * 2 <= limit and n % (w * 2) == 0:
        w *= 2
    return w


def layout_width(layout: Any, limit: int = 64) -> int:
    """Largest power of two w such that every aligned run of w elements along the last dimension is contiguous and
    aligned in storage."""
    table = np.asarray(layout.table())
    last = table.shape[-1] if table.ndim else 1
    w = 1
    while w * 2 <= limit and last % (w * 2) == 0:
        n = w * 2
        runs = table.reshape(-1, n)
        if np.any(runs[:, :1] % n) or np.any(runs - runs[:, :1] != np.arange(n)):
            break
        w = n
    return w


def _whole_words(buffer: Buffer, bits: int) -> bool:
    """Whether a tensor that starts at a multiple of 8 bytes ends at one: else aligned loads would reach over its end."""
    rows = [*zip(buffer.shape, buffer.strides)]
    static = all(isinstance(x, int) for row in rows for x in row)
    return static and (1 + sum((n - 1) * step for n, step in rows)) * bits % 64 == 0


class Widths:
    """Vector widths for one lowering; caches the widths of shared layouts.

    divisors: known divisors of bound variables. layout_of: layout of a shared buffer. alignment: assumed alignment of global
    tensors in bytes.
    """

    def __init__(self, layout_of: Callable[[Buffer], Any], alignment: int = MAX_BYTES) -> None:
        self.layout_of, self.alignment = layout_of, alignment
        self.by_layout: dict[int, tuple[Any, int]] = {}

    def shared_width(self, buffer: Buffer) -> int:
        layout = self.layout_of(buffer)
        hit = self.by_layout.get(id(layout))
        if hit is None:
            known = getattr(layout, "aligned_run", None)  # RowMajor with a run-time shape
            hit = self.by_layout[id(layout)] = (layout, layout_width(layout) if known is None else known)
        return hit[1]

    def width(self, buffer: Buffer, indices: tuple[Expr, ...], var: Var, lanes: int, analyzer: Analyzer,
              divisors: Mapping[Expr, int], loose: int = 0) -> int:
        """Vector width (1: none) of buffer[indices] for `lanes` consecutive values of var, of which the first is a multiple of
        lanes. Only for global and shared buffers. loose: see ACROSS and ANYWHERE."""
        bits = buffer.dtype.bits * buffer.dtype.lanes
        if bits % 8 or not indices or buffer.dtype.lanes > 1:
            return 1
        forms = LaneForms(var, lanes, analyzer, divisors)
        found = [forms.of(i) for i in indices]
        if any(f is None or f[0] != (k == len(indices) - 1) for k, f in enumerate(found)):
            return 1
        limit = min(max(1, MAX_BYTES * 8 // bits), *(f[1] for f in found if f))
        w = power_of_two_in(known_divisor(indices[-1], {**divisors, var: lanes}, analyzer), limit)
        if buffer.scope_name.startswith("shared"):
            return min(w, self.shared_width(buffer)) if w > 1 else 1
        w = self._global_width(buffer, indices, w, analyzer, divisors, loose)
        return limit if loose == ANYWHERE and w * bits <= 16 and limit * bits == 8 * MAX_BYTES <= 8 * self.aligned(buffer) \
            and buffer.strides[-1] == 1 and _whole_words(buffer, bits) else w

    def run_width(self, buffer: Buffer, start: tuple[Expr, ...], elements: int, analyzer: Analyzer,
                  divisors: Mapping[Expr, int], loose: int = 0) -> int:
        """Elements per vector of an access to `elements` neighbours along the last dimension of a global or shared buffer.

        start: indices of the first.  The width divides `elements`, so vectors access all of them and nothing else.
        """
        var = fresh("lane", start[-1].dtype)
        return self.width(buffer, (*start[:-1], start[-1] + var), var, power_of_two_in(elements, elements), analyzer, divisors,
                          loose)

    def aligned(self, buffer: Buffer) -> int:
        """Known alignment in bytes of the start of a global buffer."""
        align = buffer.facts.align or self.alignment
        return min(align, self.alignment) if self.alignment < MAX_BYTES else align

    def pieces(self, buffer: Buffer, indices: tuple[Expr, ...], lanes: list[tuple[Expr, ...]], analyzer: Analyzer,
               divisors: Mapping[Expr, int]) -> list[tuple[Expr, ...]] | None:
        """Indices of the narrower accesses into which a vector access (with lanes `lanes`) is split; None: it stays whole."""
        w = self.aligned_lanes(buffer, indices, analyzer, divisors)
        if w == len(lanes):
            return None
        return lanes if w == 1 else [
            (*at[:-1], ramp(at[-1], w)) for at in lanes[::w]]

    def aligned_lanes(self, buffer: Buffer, indices: tuple[Expr, ...], analyzer: Analyzer, divisors: Mapping[Expr, int]) -> int:
        """Lanes per piece, such that each piece of a vector access is certainly contiguous and aligned."""
        last = indices[-1] if indices else None
        if not isinstance(last, Ramp) or not is_const(last.stride, 1) or any(i.dtype.lanes > 1 for i in indices[:-1]) \
                or buffer.dtype.lanes > 1:
            return 1
        if buffer.scope_name == GLOBAL or buffer.scope_name.startswith("shared"):
            return self.run_width(buffer, (*indices[:-1], last.base), last.lanes, analyzer, divisors)
        if not isinstance(buffer.shape[-1], int):
            return 1
        limit = max(1, min(last.lanes, MAX_BYTES * 8 // buffer.dtype.bits))  # private arrays are aligned to 16 bytes
        w = power_of_two_in(last.lanes, power_of_two_in(known_divisor(last.base, divisors, analyzer), limit))
        return w if len(indices) == 1 else power_of_two_in(buffer.shape[-1], w)

    def _global_width(self, buffer: Buffer, indices: tuple[Expr, ...], w: int, analyzer: Analyzer,
                      divisors: Mapping[Expr, int], loose: int) -> int:
        strides = buffer.strides
        if strides[-1] != 1:
            return 1
        align = self.aligned(buffer)
        w = power_of_two_in(max(1, align * 8 // buffer.dtype.bits), w)
        w = power_of_two_in(known_divisor(buffer.offset, divisors, analyzer), w)
        for i, s in zip(indices[:-1], strides[:-1]):
            if not (isinstance(i, Const) and i.value == 0):
                w = power_of_two_in(known_divisor(s, divisors, analyzer) * known_divisor(i, divisors, analyzer), w)
        while w > 1 and not loose and known_divisor(buffer.shape[-1], divisors, analyzer) % w:
            # The vector could cross the end of the row, unless the whole access is proven to be inside.
            if analyzer.can_prove(binary("lt", indices[-1], buffer.shape[-1])):
                break
            w //= 2
        return w
