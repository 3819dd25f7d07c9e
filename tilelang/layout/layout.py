"""Layouts of shared and global tiles: map a logical index to a physical element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from tilelang.errors import TileLangError, facts
from tilelang.arith import simplify
from tilelang.arith.integers import row_major_strides
from tilelang.ir import Binary, Const, Expr, Var, binary, const, convert, free_vars, substitute, to_text
from tilelang.ir.record import record

from . import draw
from .distinct import distinct
from .fitted import IndexMap, applied, index_vars, leading_extents, static_extents
from .mode import ADDRESS, Mode, covered, error, evaluate_index, fit, merged
from .periods import closed_shape

Forward = Callable[..., Any]
_LARGE = 1 << 20  # elements


@record
class Swizzle:
    """XOR of the chunk index with the row: chunk' = chunk ^ (row // rows_per_line % chunks), in rows of whole chunks.

    chunk: elements of a chunk.  chunks: number of chunk positions that are permuted (a power of two).  rows_per_line: rows
    in one 128-byte line of the 32 banks.  bytes: 32, 64 or 128 if this is the hardware's swizzle mode of that width, 16 for
    unswizzled boxes of 16 bytes (layout/swizzled_boxes.py).
    """

    chunk: int
    chunks: int
    rows_per_line: int
    bytes: int = 0

    def __str__(self) -> str:
        return f"swizzle {self.chunks} chunks of {self.chunk} elements"


class Layout(IndexMap):
    """Maps the index of an element to its place in storage.

    Layout(shape, forward_fn): forward_fn(*indices) returns the physical index, one expression or several (row-major over
    the box they span).  Raises layout-not-injective (ValueError) when two elements have the same place.

    >>> Layout((4, 4), lambda i, j: (j, i)).offset((1, 2))
    9

    An extent that is known at run time only is replaced by two periods of the map along it (layout/periods.py).
    """

    def __init__(self, shape: Sequence[int], forward_fn: Forward | None = None, *, size: int | None = None,
                 swizzle: Swizzle | None = None, trusted: bool = False) -> None:
        self._forward = forward_fn or (lambda *idx: idx)
        self.extents = shape
        self.shape = static_extents(closed_shape(shape, self._forward), type(self).__name__)
        self.swizzle = swizzle
        self._declared, self._trusted = size, trusted
        if forward_fn is not None and not trusted:
            self._check()

    def _check(self) -> None:
        if self._large and self._lines is not None and self._digits_distinct():
            return
        table = self.table()
        if distinct(table).size != table.size:
            flat = np.sort(table, axis=None)
            twice = int(flat[:-1][flat[1:] == flat[:-1]][0])
            at = [tuple(int(x) for x in p) for p in np.argwhere(table == twice)[:2]]
            raise error("layout-not-injective", f"Layout {self.shape}: elements {at[0]} and {at[1]} both go to place {twice}",
                        found=f"elements {at[0]} and {at[1]} at place {twice}")

    # ---- the map --------------------------------------------------------------------------------------------------

    @cached_property
    def _symbolic(self) -> tuple[tuple[Var, ...], tuple[Expr, ...]]:
        """The index variables, and the physical index as expressions of them."""
        vs = index_vars(self.ndim)
        out = applied(self._forward, vs, f"Layout {self.shape}")
        env = {v: (0, n - 1) for v, n in zip(vs, self.shape)}
        places = _places(out)
        if any(isinstance(e, (str, type(None))) for e in places):
            raise error("layout-invalid", f"the function of Layout {self.shape} gives ‹{out!r}›, expected places",
                        expected="an index or a tuple of indices", hint="return integer arithmetic on the indices")
        return vs, tuple(simplify(convert(e), env) for e in places)

    @property
    def _large(self) -> bool:
        """Whether the table is too large to be made without need: tensors may have layouts too."""
        return prod(self.shape) > _LARGE

    @cached_property
    def _lines(self) -> tuple[tuple[int, tuple[np.ndarray, ...]], ...] | None:
        """Per physical index: its value at element 0, and along each dimension what it adds to that value.

        None where a physical index is not a sum of functions of single indices.
        """
        vs, index = self._symbolic
        if not all(map(_of_single_indices, index)):
            return None
        out = []
        for e in index:
            first = int(evaluate_index(e, dict.fromkeys(vs, np.int64(0))))
            out.append((first, tuple(
                np.broadcast_to(evaluate_index(e, {**dict.fromkeys(vs, np.int64(0)), v: np.arange(n)}), (n,)) - first
                for v, n in zip(vs, self.shape))))
        return tuple(out)

    def _digits_distinct(self) -> bool:
        """Whether the digits of all dimensions together count distinct places, which proves the map injective."""
        digits: list[Mode] = []
        for d in range(self.ndim):
            line = sum(s * lines[d] for (_, lines), s in zip(self._lines or (), self._strides))
            try:
                digits += fit({ADDRESS: np.asarray(line)}, "")
            except TileLangError:
                return False
        at = 1
        for m in sorted(digits, key=lambda m: m.stride):
            if m.stride < at:
                return False
            at = m.stride * m.size
        return True

    @cached_property
    def _tables(self) -> tuple[np.ndarray, ...]:
        vs, index = self._symbolic
        grid = np.meshgrid(*[np.arange(n, dtype=np.int64) for n in self.shape], indexing="ij", sparse=True)
        env = dict(zip(vs, grid))
        return tuple(np.broadcast_to(evaluate_index(e, env), self.shape).astype(np.int64) for e in index)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Extent of each physical index."""
        if self._declared is not None and self._trusted:
            return (self._declared,)
        lines = self._lines if self._large else None
        ranges = [(int(t.min()), int(t.max())) if t.size else (0, -1) for t in self._tables] if lines is None else [
            (first + sum(int(a.min()) for a in added), first + sum(int(a.max()) for a in added)) for first, added in lines]
        out = []
        for low, high in ranges:
            if low < 0:
                raise error("layout-invalid", f"Layout {self.shape}: the physical index is negative (‹{low}›)",
                            expected="a place from 0")
            out.append(high + 1)
        if self._declared is not None and len(out) == 1:
            return (max(self._declared, out[0]),)
        return tuple(out)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return row_major_strides(self.output_shape)

    @cached_property
    def _table(self) -> np.ndarray:
        out = np.zeros(self.shape, dtype=np.int64)
        for t, s in zip(self._tables, self._strides):
            out += t * s
        return out

    def table(self) -> np.ndarray:
        """int64[*shape]: the physical element of each element."""
        return self._table

    def places(self, idx: Sequence[np.ndarray]) -> np.ndarray:
        """Physical elements of many indices (one integer array per dimension), without the whole table."""
        vs, index = self._symbolic
        env = dict(zip(vs, idx))
        out = np.zeros(np.broadcast_shapes(*[np.shape(i) for i in idx]), dtype=np.int64)
        for e, s in zip(index, self._strides):
            out = out + evaluate_index(e, env) * s
        return out

    @cached_property
    def size(self) -> int:
        """Elements of storage, padding included."""
        return prod(self.output_shape)

    def offset(self, idx: Sequence[Any]) -> Any:
        """Physical element of an index; int when all indices are ints."""
        if len(idx) != self.ndim:
            raise error("layout-invalid", f"Layout {self.shape} takes «{self.ndim} indices», found {len(idx)}")
        if all(isinstance(i, (int, np.integer)) for i in idx):
            return int(self._table[tuple(idx)])
        vs, index = self._symbolic
        mapping = {v: convert(i) for v, i in zip(vs, idx)}
        out: Any = 0
        for e, s in zip(index, self._strides):
            out = out + substitute(e, mapping) * s
        return out

    def places_of(self, idx: Sequence[Expr]) -> tuple[Expr, ...]:
        """The physical index of an element, computed in the types of its indices."""
        return tuple(map(convert, _places(self._forward(*idx))))

    def __call__(self, *idx: Any) -> list[Expr]:
        return self.map_forward_index(list(idx))

    # ---- methods of the language ----------------------------------------------------------------------------------

    @property
    def index(self) -> list[Expr]:  # type: ignore[override]
        return list(self._symbolic[1])

    def get_output_shape(self) -> list[int]:
        return list(self.output_shape)

    def get_linearized_forward_index(self) -> Expr:
        """The physical element as one expression of get_forward_vars()."""
        vs = self._symbolic[0]
        return simplify(convert(self.offset(vs)), {v: (0, n - 1) for v, n in zip(vs, self.shape)})

    def map_forward_index(self, indices: Sequence[Any]) -> list[Expr]:
        """The physical index, one expression per physical dimension; constants fold."""
        vs, index = self._symbolic
        if len(indices) != len(vs):
            raise error("layout-invalid", f"Layout {self.shape} takes «{len(vs)} indices», found {len(indices)}")
        mapping = {v: convert(i) for v, i in zip(vs, indices)}
        return [simplify(substitute(e, mapping)) for e in index]

    def repeat(self, dim: int, factor: int) -> Layout:
        """The layout repeated `factor` times along a dimension; the repetitions follow one another in storage."""
        if isinstance(dim, bool) or isinstance(factor, bool) or not isinstance(dim, int) or not isinstance(factor, int):
            raise facts(TypeError(f"Layout.repeat takes integers, found {dim!r}, {factor!r}"),
                        "integers", f"{dim!r}, {factor!r}")
        if not -self.ndim <= dim < self.ndim or factor <= 0:
            raise facts(ValueError(f"Layout.repeat: dim {dim} of a {self.ndim}-D layout, factor {factor}"),
                        f"a dimension of {self.ndim} and a positive factor", f"dim {dim}, factor {factor}")
        d, n = dim % self.ndim, self.shape[dim]

        def fn(*idx: Any) -> Any:
            return (idx[d] // n, *_places(self._forward(*idx[:d], idx[d] % n, *idx[d + 1:])))

        return Layout([s * factor if k == d else s for k, s in enumerate(self.shape)], fn, swizzle=self.swizzle)

    def expand(self, leading_shape: Sequence[int] | int) -> Layout:
        """The layout with additional leading dimensions (an integer: one), whose slices follow one another in storage.

        Raises TypeError if leading_shape is neither an integer nor a list of integers, ValueError for extents below 1.
        """
        leading_shape = leading_extents(leading_shape, "Layout.expand")
        k = len(leading_shape)
        if k == 0:
            return self
        size = self.size

        if self._declared is None:  # the leading indices precede the physical indices of this layout
            def through(*idx: Any) -> Any:
                return (*idx[:k], *_places(self._forward(*idx[k:])))

            return Layout((*leading_shape, *self.shape), through, swizzle=self.swizzle, trusted=True)

        def fn(*idx: Any) -> Any:
            return row_major(idx[:k], leading_shape) * size + self.offset(idx[k:])

        return Layout((*leading_shape, *self.shape), fn, size=size * prod(leading_shape), swizzle=self.swizzle, trusted=True)

    def inverse(self) -> Layout:
        """The layout that maps physical to logical indices.  Raises layout-no-structure when digits cannot express it."""
        flat = self._table.reshape(-1)
        if self.size != flat.size:
            raise error("layout-invalid", f"Layout {self.shape} leaves places unused and has no inverse",
                        expected=f"{flat.size} places", found=str(self.size))
        back = np.argsort(flat)
        modes = fit({ADDRESS: back}, f"inverse of Layout {self.shape}")
        shape, box = self.shape, self.output_shape

        def fn(*idx: Any) -> Any:
            at = _digits_value(row_major(idx, box), modes)
            return _unravel(at, shape)

        return Layout(box, fn)

    def reshape(self, shape: Sequence[int], rescale_num: int = 1, rescale_den: int = 1) -> Layout:
        """The same storage seen with another shape (row-major order of elements kept).

        rescale_num / rescale_den: ratio of old to new element size when the element type changes too.  Raises layout-invalid
        if the number of elements differs, or if the bytes of a new element are not contiguous.
        """
        new = tuple(int(s) for s in shape)
        if int(np.prod(new)) * rescale_den != int(np.prod(self.shape)) * rescale_num:
            raise error("layout-invalid", f"Layout.reshape: {self.shape} has «{int(np.prod(self.shape))} elements», {new} "
                        f"needs ‹{int(np.prod(new)) * rescale_den // rescale_num}›")

        if rescale_den > rescale_num and rescale_den % rescale_num == 0:
            f = rescale_den // rescale_num
            together = self._table.reshape(-1, f)
            apart = (together[:, 0] % f != 0) | (together != together[:, :1] + np.arange(f)).any(1)
            if apart.any():
                raise error("layout-invalid", f"Layout.reshape: elements {f * int(apart.argmax())} to "
                            f"{f * int(apart.argmax()) + f - 1} of {self.shape} are to be one element",
                            expected=f"{f} places in a row, the first a multiple of {f}",
                            found=f"places {', '.join(map(str, together[apart.argmax()]))}")

        def fn(*idx: Any) -> Any:
            at = row_major(idx, new)
            if rescale_num == rescale_den:
                return self.offset(_unravel(at, self.shape))
            if rescale_num > rescale_den:  # smaller elements: several lie in one old element
                f = rescale_num // rescale_den
                return self.offset(_unravel(at // f, self.shape)) * f + at % f
            f = rescale_den // rescale_num
            return self.offset(_unravel(at * f, self.shape)) // f

        return Layout(new, fn, size=self.size * rescale_num // rescale_den, swizzle=self.swizzle)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self.shape == other.shape and self.size == other.size and
                                 np.array_equal(self._table, other._table))

    def __hash__(self) -> int:
        return hash((self.shape, self.size))

    def __repr__(self) -> str:
        vs, index = self._symbolic
        args = ", ".join(v.name for v in vs)
        out = ", ".join(repr(e) for e in index)
        return (f"Layout({self.shape} -> {self.output_shape}, transform: ({args}{',' if len(vs) == 1 else ''}) -> "
                f"({out}{',' if len(index) == 1 else ''}))")

    def __str__(self) -> str:
        return draw.layout(self.shape, f"{self.size} elements" + (f"  {self.swizzle}" if self.swizzle else ""), self.table())

    def __tilelang_text__(self) -> str:
        """The text T.layout(...), which `text.read_layout` parses."""
        names = " ".join(v.name for v in self.get_forward_vars())
        code = tuple(to_text(e) for e in self.index)
        size = self.size if len(code) == 1 else None
        swizzle = self.swizzle and (self.swizzle.chunk, self.swizzle.chunks, self.swizzle.rows_per_line, self.swizzle.bytes)
        return f'T.layout({self.shape!r}, "{names}", {code!r}, {size}, {swizzle})'


def _of_single_indices(e: Expr) -> bool:
    """Whether an index expression is a sum of terms that each depend on at most one variable."""
    if isinstance(e, Binary) and e.op in ("add", "sub"):
        return _of_single_indices(e.a) and _of_single_indices(e.b)
    if isinstance(e, Binary) and e.op == "mul" and isinstance(e.b, Const):
        return _of_single_indices(e.a)
    return len(free_vars(e)) < 2


def _places(out: Any) -> Sequence[Any]:
    """The physical indices that a function of a layout returned: one, or several."""
    return out if isinstance(out, (tuple, list)) else (out,)


def row_major(idx: Sequence[Any], shape: Sequence[int]) -> Any:
    """The number of an element in row-major order.  idx: ints or expressions."""
    out: Any = 0
    for i, n in zip(idx, shape):
        out = i if isinstance(out, int) and out == 0 else out * n + i
    return out


def _unravel(at: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """The indices of an element of this number in row-major order."""
    out: list[Any] = []
    for k, n in enumerate(reversed(shape)):
        last = k == len(shape) - 1
        out.append(at if last else at % n)
        at = at // n
    return tuple(reversed(out))


def _digits_value(at: Any, modes: Any) -> Any:
    out: Any = 0
    right = 1
    for m in reversed(merged(modes)):
        d = at if right == 1 else at // right
        if right * m.size != covered(modes):
            d = d % m.size
        out = d * m.stride + out
        right *= m.size
    return out


def xor(a: Any, b: Any) -> Any:
    """a ^ b of index expressions or ints."""
    if isinstance(a, int) and isinstance(b, int):
        return a ^ b
    return binary("bitxor", a if isinstance(a, Expr) else const(a), b if isinstance(b, Expr) else const(b))
