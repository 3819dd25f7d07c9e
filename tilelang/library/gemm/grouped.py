"""`grouped_matmul` and its gradients: of the rows by the same kernel, of the matrices by a GEMM over each group's rows."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import dtype

from ..arrays import contiguous, empty, type_name
from ..autograd import Function, Results, Step, direct
from ..caches import Cache, Prepared, enter, known
from ..place import Place, target_text
from .matmul import prepare
from .plan import choose_tile, shared_rows
from .problem import TYPES, check_disjoint
from .tile import Tile, TileProblem, without_wgmma

_ANSWERS: Cache[Prepared] = Cache(4096)
_FINDERS = 128  # threads that search for groups
_COPIED = 256  # columns of a block that copies the last rows of a group
_NAMES = "a", "b", "bias", "group_sizes", "out"


def grouped_matmul(a: Any, b: Any, group_sizes: Any, *, transpose_b: bool = False, bias: Any = None,
                   activation: str | None = None, out_dtype: Any = None, out: Any = None, target: Any = None,
                   execution_backend: str | None = None, tune: bool | None = None) -> Any:
    """Rows of a in groups, each multiplied by a matrix of its own: out[rows of g] = activation(a[rows of g] @ b[g] + bias).

    a: (rows, k).  b: (groups, k, n), or (groups, n, k) with transpose_b.  group_sizes: (groups,) int32 on the same device,
    read by the kernel: group g has group_sizes[g] rows, which follow those of g - 1; rows of no group come out as zeros.
    The rest (out_dtype, out, …) and types are as for matmul (float8 without scales is accumulated in two levels); tune times
    groups of the sizes that the first call has.

    Gradients of a and b, of their types, for floating-point types of at least 16 bits without bias, activation, out_dtype and
    out; the rows of each group are a GEMM of their own.  Saved for them: a, b and group_sizes.  torch.compile takes such calls
    whole.

    The first number of rows has a kernel of its own, all others share one with tiles for 1024 rows a group, and the gradient of
    b another one. Which number comes first changes no bit, but those of float8 in two levels, whose steps of k are a tile's.

    Raises matmul-shape, matmul-type, matmul-option, matmul-device, matmul-gradient, matmul-target.

    >>> import numpy as np
    >>> a, b = np.ones((3, 2), np.float32), np.array([1, 2], np.float32).reshape(2, 1, 1) * np.ones((2, 2, 1), np.float32)
    >>> grouped_matmul(a, b, np.array([1, 2], np.int32)).ravel().tolist()
    [2.0, 4.0, 4.0]
    """
    if not direct((a, b, bias)):
        return _with_gradient(a, b, group_sizes, bias, transpose_b, {
            "activation": activation, "out_dtype": out_dtype, "out": out, "target": target,
            "execution_backend": execution_backend})
    arrays = a, b, bias, group_sizes, out
    options = transpose_b, activation, out_dtype, str(target), execution_backend, tune
    answer = known(_ANSWERS, arrays, options)
    if answer is None:
        answer = enter(_ANSWERS, arrays, options, prepare(
            grouped_matmul, dict(zip(_NAMES, arrays)), tune, {
                "transpose_b": transpose_b, "activation": activation, "out_dtype": out_dtype, "target": target,
                "execution_backend": execution_backend}))
    if out is not None and not answer.disjoint.surely(out, arrays[:-1]):
        check_disjoint(out, dict(zip(_NAMES, arrays[:-1])))
    return answer.run(*arrays)


class GroupForm(NamedTuple):
    """D[g] = L[rows of g]^T @ R[rows of g], (groups, k, n), for any number of rows.  kind: type of L, R and D.  blocks: that
    take the tiles in turn."""

    k: int
    n: int
    groups: int
    kind: str
    acc: str
    tile: Tile
    blocks: int


def gemm_over_groups(f: GroupForm) -> Any:
    """The kernel (L, R, sizes, where, Lt, Rt, D).

    where: (groups, 2) int32 workspace: the first row of each group and the row behind its last.  Lt, Rt: (groups, bk, k or n)
    workspace: the last rows of a group, which are no whole step, and zeros behind them: rows of the next group may hold
    anything.
    """
    t, m, kind = f.tile, T.dynamic("m"), f.kind
    rows, columns = ceil(f.k / t.bm), ceil(f.n / t.bn)
    tiles, high = rows * columns * f.groups, min(t.panel_size, rows)
    blocks = min(f.blocks, tiles)

    @T.macro
    def copy_last(X, Xt, g, c, last, end):
        for i, j in T.Parallel(t.bk, _COPIED):
            if c * _COPIED + j < X.shape[1]:
                Xt[g, i, c * _COPIED + j] = T.if_then_else(
                    last + i < end, X[T.min(last + i, m - 1), c * _COPIED + j], T.cast(0, kind))

    @T.prim_func
    def matmul_over_groups(L: T.Tensor((m, f.k), kind), R: T.Tensor((m, f.n), kind), sizes: T.Tensor((f.groups,), "int32"),
                           where: T.Tensor((f.groups, 2), "int32"), Lt: T.Tensor((f.groups, t.bk, f.k), kind),
                           Rt: T.Tensor((f.groups, t.bk, f.n), kind), D: T.Tensor((f.groups, f.k, f.n), kind)):
        with T.Kernel(1, threads=_FINDERS) as _:
            ends = T.alloc_shared((f.groups,), "int64")
            for g in T.Parallel(f.groups):
                ends[g] = T.cast(T.max(T.min(sizes[g], m), 0), "int64")
            T.cumsum(ends)
            for g in T.Parallel(f.groups):
                where[g, 0] = T.cast(T.min(T.if_then_else(g > 0, ends[T.max(g - 1, 0)], 0), m), "int32")
                where[g, 1] = T.cast(T.min(ends[g], m), "int32")
        with T.Kernel(T.ceildiv(max(f.k, f.n), _COPIED), f.groups, threads=128) as (c, g):
            first, end = where[g, 0], where[g, 1]
            last = first + (end - first) // t.bk * t.bk
            if last < end:
                copy_last(L, Lt, g, c, last, end)
                copy_last(R, Rt, g, c, last, end)
        with T.Kernel(blocks, threads=t.threads) as b:
            Ls, Rs = T.alloc_shared((t.bk, t.bm), kind), T.alloc_shared((t.bk, t.bn), kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            for w in T.serial(T.ceildiv(tiles - b, blocks)):
                tile = b + w * blocks
                g, inside = tile // (rows * columns), tile % (rows * columns)
                top = inside // (high * columns) * high  # as target/tile_order.py says
                by = top + inside % (high * columns) % T.min(high, rows - top)
                bx = inside % (high * columns) // T.min(high, rows - top)
                first, end = where[g, 0], where[g, 1]
                steps = (end - first) // t.bk
                T.clear(acc)
                for s in T.Pipelined(steps, num_stages=t.stages):
                    T.copy(L[first + s * t.bk, by * t.bm], Ls)
                    T.copy(R[first + s * t.bk, bx * t.bn], Rs)
                    T.gemm(Ls, Rs, acc, transpose_A=True)
                for s in T.Pipelined(T.ceildiv(end - first, t.bk) - steps, num_stages=t.stages):
                    T.copy(Lt[g, s, by * t.bm], Ls)
                    T.copy(Rt[g, s, bx * t.bn], Rs)
                    T.gemm(Ls, Rs, acc, transpose_A=True)
                T.copy(acc, D[g, by * t.bm, bx * t.bn])

    return matmul_over_groups


def gemm_over_rows(f: GroupForm) -> Any:
    """The kernel (L, R, D): D = L^T @ R, (k, n), over all rows, behind which TMA fills zeros."""
    t, m = f.tile, T.dynamic("m")

    @T.prim_func
    def matmul_over_rows(L: T.Tensor((m, f.k), f.kind), R: T.Tensor((m, f.n), f.kind), D: T.Tensor((f.k, f.n), f.kind)):
        with T.Kernel(T.ceildiv(f.n, t.bn), T.ceildiv(f.k, t.bm), threads=t.threads) as (bx, by):
            Ls, Rs = T.alloc_shared((t.bk, t.bm), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.use_swizzle(t.panel_size, order=t.order)
            T.clear(acc)
            for s in T.Pipelined(T.ceildiv(m, t.bk), num_stages=t.stages):
                T.copy(L[s * t.bk, by * t.bm], Ls)
                T.copy(R[s * t.bk, bx * t.bn], Rs)
                T.gemm(Ls, Rs, acc, transpose_A=True)
            T.copy(acc, D[by * t.bm, bx * t.bn])

    return matmul_over_rows


def matrix_gradient(left: Any, right: Any, sizes: Any, at: Place, d: Any) -> None:
    """d[g] = left[rows of g]^T @ right[rows of g].  left: (rows, k).  right: (rows, n).  d: (groups, k, n), contiguous.
    sizes: of the groups, or None where all rows are one group."""
    (groups, k, n), kind = d.shape, type_name(d)
    gemm, acc, _ = TYPES[kind]
    size, rows = dtype(kind).bytes, shared_rows(at, ceil(left.shape[0] / groups), "matrix gradient", groups, k, n, kind)
    chip = without_wgmma(at.chip) if gemm == "tf32" and at.chip.kind == "wgmma" else at.chip
    tile = choose_tile(chip, TileProblem(k, n, rows, groups, gemm, 8 * size, 8 * size, a_k=False, may_split=False,
                                            a_rows=gcd(k * size, 128), b_rows=gcd(n * size, 128)))
    if sizes is None:
        kernel = at.kernel(gemm_over_rows, GroupForm(k, n, groups, kind, acc, tile, 0), cluster=tile.cluster or None)
        kernel(contiguous(left), contiguous(right), d[0])
        return
    blocks = chip.sms if chip.kind == "wgmma" else 1 << 30
    tile = replace(tile, cluster=())
    kernel = at.kernel(gemm_over_groups, GroupForm(k, n, groups, kind, acc, tile, blocks), resize_blocks=False)
    kernel(contiguous(left), contiguous(right), sizes, empty(d, (groups, 2), "int32"), *(
        empty(d, (groups, tile.bk, x), kind) for x in (k, n)), d)


def _with_gradient(a: Any, b: Any, sizes: Any, bias: Any, transpose_b: bool, options: dict[str, Any]) -> Any:
    """grouped_matmul as an operator of torch.  options: its other arguments.  Raises matmul-gradient."""
    given = {"bias": bias, **{name: options[name] for name in ("activation", "out_dtype", "out")}}
    lost = [name for name, x in given.items() if x is not None]
    if lost or TYPES.get(type_name(a), ("int8",))[0] in ("int8", "fp8"):
        found = ", ".join(lost) or f"operands of {type_name(a)}"
        raise error("matmul-gradient", f"grouped_matmul has no gradient with ‹{found}›",
                    expected="floating-point operands of at least 16 bits, no bias, activation, out_dtype or out",
                    hint="add the bias and apply the activation to the result; leave out out")
    return GROUPED_MATMUL(a, b, sizes, transpose_b, target_text(options["target"]), options["execution_backend"])


def _results(a: Any, b: Any, sizes: Any, transpose_b: bool, *place: str | None) -> Results:
    return (((a.shape[0], b.shape[1 if transpose_b else 2]), type_name(a)),)


def _run(a: Any, b: Any, sizes: Any, transpose_b: bool, *place: str | None) -> tuple[Any, ...]:
    target, backend = place
    return (grouped_matmul(a, b, sizes, transpose_b=transpose_b, target=target, execution_backend=backend),)


def _gradient_results(a: Any, b: Any, sizes: Any, needs: list[bool], *others: Any) -> Results:
    return tuple((tuple(x.shape) if need else (0,), type_name(x)) for x, need in zip((a, b), needs))


def _gradient(a: Any, b: Any, sizes: Any, needs: list[bool], transpose_b: bool, target: str | None, backend: str | None,
              grad: Any) -> tuple[Any, ...]:
    of_a, of_b = (empty(a, tuple(x.shape) if need else (0,), type_name(x)) for x, need in zip((a, b), needs))
    if needs[0]:
        of_a = grouped_matmul(grad, b, sizes, transpose_b=not transpose_b, target=target, execution_backend=backend)
    if needs[1] and not a.shape[0]:
        of_b[...] = 0
    elif needs[1]:
        sides = (grad, a) if transpose_b else (a, grad)
        matrix_gradient(*sides, sizes, Place.of(a, target, backend), of_b)
    return of_a, of_b


GROUPED_MATMUL = Function(
    "grouped_matmul",
    Step("Tensor a, Tensor b, Tensor sizes, bool transpose_b, str? target, str? backend", _results, _run, owns=True),
    Step("Tensor a, Tensor b, Tensor sizes, bool[] needs, bool transpose_b, str? target, str? backend, Tensor grad",
         _gradient_results, _gradient, 2, owns=True),
    lambda needs, given, made: (*given[:3], list(needs[:2]), *given[3:]), (0, 1))
