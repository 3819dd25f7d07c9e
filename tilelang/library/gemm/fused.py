"""`fused_matmul`: a GEMM with the caller's epilogue and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilelang.errors import error
from tilelang.jit.captured import Captured

from ..arrays import aligned, compact_copy, contiguous, empty, maker, strided, strides, type_name
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .fused_kernels import HOW, FusedForm, Reduced, Value, fused_gemm
from .plan import choose_tile, tile_problem
from .problem import MatmulProblem, check_gradient, check_target, check_tensors, matmul_problem
from .kernels import Form
from .tile import Chip, Tile, without_wgmma

MOST_TENSORS = 2
_EXACT = Tile(128, 128, 32, 6, 256)
_FUNCTIONS = Captured(None)
_ANSWERS: Cache[Prepared] = Cache(1024)


def fused_matmul(a: Any, b: Any, epilogue: Value | None = None, *, second: Any = None, tensors: Sequence[Any] = (),
                 reduce: Sequence[tuple[Any, ...]] = (), stored: bool = True, transpose_a: bool = False,
                 transpose_b: bool = False, exact: bool = False, out_dtype: Any = None, target: Any = None,
                 execution_backend: str | None = None) -> Any:
    """op(a) @ op(b), each element changed by a function of the caller, and reductions of the result, in one pass over it.

    a: (m, k), or (k, m) with transpose_a.  b: (k, n), or (n, k) with transpose_b.  Types are as for matmul, out_dtype too.
    epilogue(x, i, j, *tensors): the element of row i and column j, an expression of the language of the accumulator x, which
    is float32 (float64 for float64, int32 for integers): `lambda x, i, j, scale: T.max(x * scale[i], 0)`.
    second: another matrix like b.  epilogue(x, y, i, j, *tensors) then makes one element of those of op(a) @ op(b) and
    op(a) @ op(second): `lambda x, y, i, j: x / (1 + T.exp(-x)) * y` is SwiGLU of a gate and an up projection.
    tensors: up to 2 that functions read by index; any shapes and types.
    reduce: (over, how) or (over, how, value) each: over "rows" gives (m,), over "all" gives (); how is "sum", "max" or
    "absmax"; value(x, i, j, *tensors) of the changed element x, x itself by default.  Reductions have the accumulator's type
    and read elements before they are rounded; they are formed in one order, so that the same inputs give the same bits.
    stored: False leaves the matrix out.
    exact: float32 keeps its precision on a GPU, by three GEMMs of tf32 over operands that are halved first (8 bytes an element
    of a and b): the error of an element is (k u + 2^-20) s in the terms of matmul's docstring.  On the CPU it always does.

    Result: (m, n) of out_dtype, with reductions (the matrix, reduction, …); without the matrix the reductions alone, always a
    tuple.  Each shape and each set of functions, with the values that they read, compiles a kernel.

    Raises matmul-shape, matmul-type, matmul-option, matmul-device, matmul-gradient, matmul-target.

    >>> import numpy as np
    >>> c, most = fused_matmul(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), lambda x, i, j: x * (i + 1),
    ...                        reduce=[("all", "absmax")])
    >>> c.tolist(), float(most)
    ([[3.0, 3.0], [6.0, 6.0]], 6.0)
    """
    arrays = (a, b, *([] if second is None else [second]), *tensors)
    if not all(isinstance(r, tuple) and len(r) in (2, 3) for r in reduce):
        raise error("matmul-option", f"reductions ‹{reduce!r}› of fused_matmul",
                    expected="a sequence of (over, how) or (over, how, value)", hint='for example reduce=[("rows", "sum")]')
    functions = (epilogue, *(r[2] if len(r) > 2 else None for r in reduce))
    states = tuple(None if f is None else _FUNCTIONS.argument(f) for f in functions)
    options = tuple(r[:2] for r in reduce), states, stored, exact, second is not None, transpose_a, transpose_b, out_dtype, str(
        target), execution_backend
    answer = known(_ANSWERS, arrays, options)
    if answer is None:
        check_tensors(arrays)
        form = {"transpose_a": transpose_a, "transpose_b": transpose_b, "out_dtype": out_dtype}
        answer = enter(_ANSWERS, arrays, options, _prepare(
            arrays, functions, options, Place.of(a, target, execution_backend), form))
    check_gradient("fused_matmul", *arrays)
    made = answer.run(*arrays)
    return made[0] if stored and not reduce else made


def epilogue_form(p: MatmulProblem, chip: Chip, pair: bool = False) -> Form:
    """The form of a GEMM whose epilogue the library does not know: one accumulator, or those of a pair side by side; each
    element in one tile, rows as rows."""
    chip, problem = tile_problem(replace(p, n=2 * p.n) if pair else p, chip, 1, p.m)
    if p.kind == "tf32" and not (problem.a_k and problem.b_k):  # wgmma would read one of them from registers, with swap-AB
        chip = without_wgmma(chip)
    tile = choose_tile(chip, replace(problem, may_split=False, may_swap_ab=False, may_overlap=False))
    return p.form(replace(tile, bn=max(8, tile.bn // 2 // 8 * 8)) if pair else tile)


def _prepare(arrays: tuple[Any, ...], functions: tuple[Value | None, ...], options: tuple[Any, ...], at: Place,
             form: dict[str, Any]) -> Prepared:
    """Check the arguments, and compile the kernel.  options: of the key of the call."""
    (a, b, *tensors), (kinds, states, stored, exact, pair) = arrays, options[:5]
    second = tensors.pop(0) if pair else None
    none = dict.fromkeys(("bias", "scale_a", "scale_b", "out"))
    p = matmul_problem({"a": a, "b": b, **none}, at.target, activation=None, fast_accum=True, **form)
    check_target(p, at.target)
    if pair and (tuple(second.shape) != tuple(b.shape) or type_name(second) != type_name(b) or exact or functions[0] is None):
        found = f"{type_name(second)} {tuple(second.shape)}"
        raise error("matmul-option", f"second of fused_matmul is ‹{found}›",
                    expected=f"{type_name(b)} {tuple(b.shape)} as b, with an epilogue of both, and not exact",
                    hint="pass a second matrix of the shape and type of b, and a function of both accumulators")
    wrong = [k for k in kinds if len(k) != 2 or k[0] not in ("rows", "all") or k[1] not in HOW]
    if exact and p.kind != "tf32":
        raise error("matmul-option", f"exact is for operands of «float32», found {p.types[0]}",
                    hint="leave it out: sums of other types are exact to the accumulator")
    if wrong or len(tensors) > MOST_TENSORS or p.batch or 0 in (p.m, p.n, p.k) or not (kinds or stored):
        found = f"reduction {wrong[0]}" if wrong else f"{len(tensors)} tensors, shapes {tuple(a.shape)} and {tuple(b.shape)}"
        raise error("matmul-option", f"fused_matmul has no kernel for ‹{found}›", expected="matrices that are not empty, up to "
                    f"{MOST_TENSORS} tensors, reductions (\"rows\" or \"all\", {' or '.join(HOW)})",
                    hint="call it once for each matrix of a batch; join tensors that functions read")
    sides = [(a, p.left), (b, p.right), *([(second, p.right)] if pair else [])]
    loose = [not (y.plain and strided(x) and (aligned(x) or not at.target.is_gpu)) for x, y in sides]
    if pair and strides(second) != strides(b):
        loose[1:] = [True] * 2
    if any(loose):
        def compact(given: tuple[Any, ...]) -> tuple[Any, ...]:
            return *(compact_copy(x) if way else x for x, way in zip(given, loose)), *given[len(loose):]

        inner = _prepare(compact(arrays), functions, options, at, form)
        return Prepared(lambda *given: inner.run(*compact(given)))
    reduced = tuple(Reduced(k[1], f, k[0] == "all") for k, f in zip(kinds, functions[1:]))
    exact = exact and at.target.is_gpu
    f = FusedForm(p.form(_EXACT) if exact else epilogue_form(p, at.chip, pair), functions[0], reduced,
                  tuple((tuple(int(n) for n in x.shape), type_name(x)) for x in tensors), stored, states, exact, pair)
    tile, acc, count = f.plain.tile, p.types[3], len(reduced)
    kernel = at.kernel(fused_gemm, f, cluster=tile.cluster or None, enable_pdl=tile.pdl or None)
    result, work = maker(a, (p.m, p.n), p.types[2]), maker(a, (count, 1 - -p.n // tile.bn, p.m), acc)
    views = p.left.view, p.right.view

    def run(a: Any, b: Any, *tensors: Any) -> tuple[Any, ...]:
        c = result() if stored else None
        workspace, whole = work() if count else None, empty(a, (count,), acc)
        others = tensors[pair:]
        given = [contiguous(x) for x in others] + [None] * (MOST_TENSORS - len(others))
        d = views[1](tensors[0]) if pair else empty(a, (2, p.m + p.n, p.k), acc) if exact else None
        kernel(views[0](a), views[1](b), d, *given, workspace, whole if any(r.whole for r in reduced) else None, c)
        found = tuple(whole[n:n + 1].reshape(()) if r.whole else workspace[n, -1] for n, r in enumerate(reduced))
        return (c, *found) if stored else found

    return Prepared(run)
