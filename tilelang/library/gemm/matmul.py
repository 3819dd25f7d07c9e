"""matmul and grouped_matmul: checks, and one plan for all calls of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from tilelang.errors import register
from tilelang.ir import dtype
from tilelang.language.tracing.state import error

from ..aliasing import Disjoint, overlap
from ..arrays import aligned, empty, expects_gradient, facts, fresh, maker, place, strided, type_name, zeros
from ..opt_in import wanted
from .kernels import ACTIVATIONS, Form
from .operands import Operand, operand
from .plan import Place, Request, check_target, chosen, grouped, product
from .tile_cost import Tile

register("matmul-shape", ValueError, "operands of a library product whose shapes do not fit together",
         expected="operands whose shapes go together")
register("matmul-type", TypeError, "element types a library product does not take",
         expected="element types that the product takes")
register("matmul-option", ValueError, "an option of a library product that it does not have",
         expected="an option that the product has")
register("matmul-device", ValueError, "operands of a library product on different devices", expected="operands on one device")
register("matmul-gradient", RuntimeError, "a library product is asked for a gradient, which it does not compute",
         "call it under torch.no_grad(), or pass tensors without requires_grad",
         expected="operands without requires_grad, or torch.no_grad()")

_FP8 = ("float8_e4m3fn", "float8_e5m2")
# operand type -> (kind, accumulator, result unless another is asked for)
_TYPES = {"float16": ("half", "float32", "float16"), "bfloat16": ("half", "float32", "bfloat16"),
          "float32": ("tf32", "float32", "float32"), "float64": ("float", "float64", "float64"),
          "int8": ("int8", "int32", "int32"), "uint8": ("int8", "int32", "int32"),
          **{f: ("fp8", "float32", "bfloat16") for f in _FP8}}
_UNSET = Tile(64, 64, 64, 2, 128)
_MOST_SIZES = 4  # numbers of rows that get a kernel of their own
_ROWS: dict[Any, set[int]] = {}
_PLANS: dict[Any, _Plan] = {}
_MOST_PLANS = 4096  # kernels stay in the memory of tilelang.compile and on disk


def matmul(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, bias: Any = None,
           activation: str | None = None, out_dtype: Any = None, scale_a: Any = None, scale_b: Any = None,
           fast_accum: bool = False, out: Any = None, target: Any = None, execution_backend: str | None = None,
           tune: bool | None = None) -> Any:
    """activation(scale * (op(a) @ op(b)) + bias), a new tensor or `out`.

    a: (m, k), or (k, m) with transpose_a.  b: (k, n), or (n, k) with transpose_b.  a may have a batch in front, b the same
    batch or none.  Torch tensors or NumPy arrays of any sizes and strides; a transposed view costs nothing.
    bias: (n,), of a floating-point type.  activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu".
    Result: (m, n) or (batch, m, n) of out_dtype.

    Element types (accumulated in; result unless out_dtype says otherwise): float16, bfloat16 (float32; the same),
    float32 (rounded to tf32 on a GPU, float32; the same), float64, int8, uint8 (int32; int32), float8_e4m3fn and
    float8_e5m2 in any mix (float32; bfloat16).
    scale_a, scale_b: float32, for float8 and int8: one element each, or for float8 one for every 128 of k of each row of
    op(a), (m, ceil(k / 128)), and one for every 128 x 128 of op(b), (ceil(n / 128), ceil(k / 128)).
    fast_accum: float8 sums stay in the matrix unit, which on sm_90 adds with about 13 bits; otherwise sums of 128 are
    added in float32.
    out: contiguous, of the result's shape and type, apart from the operands.  target, execution_backend: as for
    tilelang.compile, instead of the device the operands are on.
    tune: True: the first call of a form times a dozen ways to compute it on the operands' GPU and keeps the fastest, if it is
    surely faster than the cost model's choice (seconds, once: the disk cache remembers it; reference,
    "Tuning the library").  False: the model's choice.  None: as the setting TILELANG_LIBRARY_TUNING says when a form comes
    first.

    Error of an element, with u = 2**-24 and s the sum of |a||b| over k: (k u + e) s and the rounding to the result's
    type; e is 0 for float16, bfloat16 and float64, 2**-10 for float32 on a GPU, 2**-11 for float8 (k / 32 * 2**-13 with
    fast_accum, where k > 128).  Integers are exact modulo 2**32.  Identical inputs give identical bits.

    Raises matmul-shape, matmul-type, matmul-option, matmul-device, matmul-gradient, matmul-target.

    >>> import numpy as np
    >>> matmul(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    try:
        key = (facts(a), facts(b), transpose_a, transpose_b, None if bias is None else facts(bias), activation, out_dtype,
               None if scale_a is None else facts(scale_a), None if scale_b is None else facts(scale_b), fast_accum,
               None if out is None else facts(out), target if target is None else str(target), execution_backend, tune)
    except AttributeError:
        check_tensors((a, b), (bias, scale_a, scale_b, out))
        raise
    plan = _PLANS.get(key)
    if plan is None:
        where = Place.of(a, target, execution_backend)
        tuned = wanted(tune, a, where.target, where.backend)
        if tuned is None:  # a captured call takes what is there
            return matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, bias=bias, activation=activation,
                          out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum, out=out, target=target,
                          execution_backend=execution_backend, tune=False)
        plan = _kept(key, _Plan(_plan(a, b, transpose_a, transpose_b, bias, activation, out_dtype, scale_a, scale_b,
                                      fast_accum, out, where, tuned),
                                None if out is None else Disjoint(out, (a, b, bias, scale_a, scale_b))))
    if not isinstance(a, np.ndarray):
        check_gradient("matmul", a, b, bias, scale_a, scale_b, out)
    if out is not None and not plan.disjoint.surely(out, (a, b, bias, scale_a, scale_b)):
        check_disjoint(out, {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b})
    return plan.run(a, b, bias, scale_a, scale_b, out)


def grouped_matmul(a: Any, b: Any, group_sizes: Any, *, transpose_b: bool = False, bias: Any = None,
                   activation: str | None = None, out_dtype: Any = None, target: Any = None,
                   execution_backend: str | None = None, tune: bool | None = None) -> Any:
    """Rows of a in groups, each multiplied by a matrix of its own: out[rows of g] = activation(a[rows of g] @ b[g] + bias).

    a: (rows, k).  b: (groups, k, n), or (groups, n, k) with transpose_b.  group_sizes: (groups,) int32 on the same device,
    read by the kernel: group g has group_sizes[g] rows, which follow those of g - 1; rows of no group come out as zeros.
    The rest (out_dtype, …) and types are as for matmul (float8 without scales is accumulated in two levels); tune times
    groups of the sizes that the first call has.

    Raises matmul-shape, matmul-type, matmul-option, matmul-device, matmul-gradient, matmul-target.

    >>> import numpy as np
    >>> a, b = np.ones((3, 2), np.float32), np.array([1, 2], np.float32).reshape(2, 1, 1) * np.ones((2, 2, 1), np.float32)
    >>> grouped_matmul(a, b, np.array([1, 2], np.int32)).ravel().tolist()
    [2.0, 4.0, 4.0]
    """
    try:
        key = ("grouped", facts(a), facts(b), facts(group_sizes), transpose_b, None if bias is None else facts(bias),
               activation, out_dtype, target if target is None else str(target), execution_backend, tune)
    except AttributeError:
        check_tensors((a, b, group_sizes), (bias,))
        raise
    plan = _PLANS.get(key)
    if plan is None:
        where = Place.of(a, target, execution_backend)
        tuned = wanted(tune, a, where.target, where.backend)
        if tuned is None:
            return grouped_matmul(a, b, group_sizes, transpose_b=transpose_b, bias=bias, activation=activation,
                                  out_dtype=out_dtype, target=target, execution_backend=execution_backend, tune=False)
        plan = _kept(key, _Plan(_grouped_plan(a, b, group_sizes, transpose_b, bias, activation, out_dtype, where, tuned), None))
    if not isinstance(a, np.ndarray):
        check_gradient("grouped_matmul", a, b, bias)
    return plan.run(a, b, bias, group_sizes)


class _Plan(NamedTuple):
    """What calls of one key share.  run: computes.  disjoint: of `out`, where one is given."""

    run: Callable[..., Any]
    disjoint: Any


def _kept(key: Any, plan: _Plan) -> _Plan:
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
        _ROWS.clear()
    _PLANS[key] = plan
    return plan


def check_gradient(name: str, *operands: Any) -> None:
    """Raises matmul-gradient where torch would expect one of the function of this name.  operands: torch tensors, or None."""
    if expects_gradient(*operands):
        raise error("matmul-gradient", f"{name} computes no gradient, but an operand requires one",
                    found="an operand that requires a gradient")


def check_tensors(given: Iterable[Any], optional: Iterable[Any] = ()) -> None:
    """Raises matmul-type for the first that is no tensor.  optional: may be None."""
    for x in (*given, *(x for x in optional if x is not None)):
        if not (isinstance(x, np.ndarray) or hasattr(x, "stride") and hasattr(x, "data_ptr")):
            raise error("matmul-type", f"operands are torch tensors or NumPy arrays, found {type(x).__name__}",
                        expected="torch tensors or NumPy arrays", found=str(type(x).__name__),
                        hint="pass torch.from_numpy(x) or np.asarray(x)")


# ---- checks -----------------------------------------------------------------------------------------------------------


def _check_types(a: Any, b: Any, out_dtype: Any) -> tuple[str, str, str, str]:
    """(a, b, result, accumulator).  Raises matmul-type."""
    ta, tb = type_name(a), type_name(b)
    if ta not in _TYPES or not (ta == tb or ta in _FP8 and tb in _FP8):
        raise error("matmul-type", f"there is no product of {ta} and {tb}",
                    expected="operands of one type, or both float8", found=f"{ta} and {tb}",
                    hint="operands have one type, or are both float8; types: " + ", ".join(_TYPES))
    _, acc, result = _TYPES[ta]
    if out_dtype is not None:
        name = out_dtype.__name__ if isinstance(out_dtype, type) else str(out_dtype)
        result = f"{dtype(name.rpartition('.')[2])}"
    if not (dtype(result).is_float or result == acc):
        raise error("matmul-type", f"a product of {ta} has no result of {result}",
                    expected=f"{acc} or a floating-point type", found=str(result),
                    hint=f"{acc} and floating-point results exist")
    return ta, tb, result, acc


def _check_shapes(a: Operand, b: Operand) -> tuple[int, int, int]:
    """(m, n, k).  Raises matmul-shape."""
    (m, k), (k_b, n) = a.logical, b.logical
    if k != k_b:
        raise error("matmul-shape", f"op(a) is {m} x {k} and op(b) {k_b} x {n}: the inner sizes differ",
                    expected="one inner size", found=f"{k} and {k_b}",
                    hint="pass transpose_a=True or transpose_b=True for operands stored the other way round")
    return m, n, k


def _check_scales(scale_a: Any, scale_b: Any, kind: str, m: int, n: int, k: int, batch: bool) -> str:
    """Form.scaling.  Raises matmul-shape, matmul-option, matmul-type."""
    if scale_a is None and scale_b is None:
        return ""
    if kind not in ("fp8", "int8") or scale_a is None or scale_b is None:
        raise error("matmul-option", "scale_a and scale_b belong to products of float8 or int8, both of them",
                    expected="both scales, with operands of float8 or int8",
                    found=f"{sum(x is not None for x in (scale_a, scale_b))} scales with {kind}",
                    hint="multiply the result, or pass the other scale too")
    for x in (scale_a, scale_b):
        if type_name(x) != "float32":
            raise error("matmul-type", f"scales are float32, found {type_name(x)}",
                        expected="float32", found=type_name(x), hint="convert the scales")
    found = tuple(scale_a.shape), tuple(scale_b.shape)
    if all(s in ((), (1,), (1, 1)) for s in found):
        return "tensor"
    blocks = (m, ceil(k / 128)), (ceil(n / 128), ceil(k / 128))
    if kind != "fp8" or found != blocks or batch:
        raise error("matmul-shape", f"scales of shapes {found[0]} and {found[1]}, expected (1,) and (1,)" +
                    (f", or {blocks[0]} and {blocks[1]}" if kind == "fp8" and not batch else ""),
                    expected="(1,) and (1,), or one scale a block of 128", found=f"{found[0]} and {found[1]}",
                    hint="one scale a tensor; or one for 128 of k of a row of op(a) and for 128 x 128 of op(b)")
    return "block"


def _check_rest(a: Any, others: dict[str, Any], n: int, bias: Any, activation: str | None) -> None:
    """Raises matmul-device, matmul-shape, matmul-option, matmul-type."""
    for name, x in others.items():
        if x is not None and place(x) != place(a):
            raise error("matmul-device", f"a is on {place(a)}, {name} on {place(x)}",
                        expected=f"{name} on {place(a)}", found=str(place(x)), hint="move the operands to one device")
    if bias is not None and tuple(bias.shape) != (n,):
        raise error("matmul-shape", f"bias has shape {tuple(bias.shape)}, expected ({n},)",
                    expected=f"({n},)", found=str(tuple(bias.shape)), hint="one bias a column")
    if bias is not None and not dtype(type_name(bias)).is_float:
        raise error("matmul-type", f"bias is of {type_name(bias)}",
                    expected="a floating-point type", found=type_name(bias), hint="pass a floating-point bias")
    if activation is not None and activation not in ACTIVATIONS:
        raise error("matmul-option", f"there is no activation {activation!r}",
                    expected=f"one of {', '.join(ACTIVATIONS)}", found=repr(activation),
                    hint="one of " + ", ".join(ACTIVATIONS))


def check_disjoint(out: Any, others: dict[str, Any]) -> None:
    """Tiles of the result are written while others still read the operands.  Raises matmul-option."""
    for name, x in others.items():
        if x is not None and overlap(out, x):
            raise error("matmul-option", f"out and {name} have memory in common",
                        expected="memory of its own", found=f"memory of {name}", hint="leave out out, or pass a copy")


# ---- plans ------------------------------------------------------------------------------------------------------------


def _plan(a: Any, b: Any, transpose_a: bool, transpose_b: bool, bias: Any, activation: str | None, out_dtype: Any,
          scale_a: Any, scale_b: Any, fast_accum: bool, out: Any, where: Place, tune: bool) -> Callable[..., Any]:
    """What calls with such operands run: f(a, b, bias, scale_a, scale_b, out)."""
    left, right = operand(a, "a", transpose_a), operand(b, "b", transpose_b)
    types = _check_types(a, b, out_dtype)
    m, n, k = _check_shapes(left, right)
    if b.ndim == 3 and (a.ndim == 2 or a.shape[0] != b.shape[0]):
        raise error("matmul-shape", f"a has shape {tuple(a.shape)}, b a batch of {b.shape[0]}",
                    expected="one batch, or a b without batch", found=f"{tuple(a.shape)} and {tuple(b.shape)}",
                    hint="both have one batch, or b is one matrix for all of a")
    kind = _TYPES[types[0]][0]
    scaling = _check_scales(scale_a, scale_b, kind, m, n, k, a.ndim == 3)
    _check_rest(a, {"b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out": out}, n, bias, activation)
    shape = (*a.shape[:-2], m, n)
    if out is not None and (tuple(out.shape) != shape or type_name(out) != types[2]):
        raise error("matmul-shape", f"out is {type_name(out)} {tuple(out.shape)}, expected {types[2]} {tuple(shape)}",
                    expected=f"{types[2]} {tuple(shape)}", found=f"{type_name(out)} {tuple(out.shape)}",
                    hint="leave out out")
    if 0 in shape:
        return lambda a, b, bias, sa, sb, out: empty(a, shape, types[2]) if out is None else out
    if k == 0:
        return _of_zeros(left, right, types, activation, where)
    loose = [name for name, x in (("a", a), ("b", b)) if not strided(x) or where.target.is_cuda and not aligned(x)]
    if loose:
        return _aligning(loose, transpose_a, transpose_b, activation, out_dtype, fast_accum, where, tune)
    two = kind == "fp8" and (scaling == "block" or not fast_accum and k > 128) and (
        where.target.is_cuda or scaling == "block")
    form = Form(m, n, k, types, _UNSET, left.batch, shared_b=bool(left.batch and not right.batch),
                bias="" if bias is None else type_name(bias), activation=activation or "", scaling=scaling)
    r = Request(form, kind, left, right, two, where, _many_rows(form, left, right, two, where))
    check_target(r)
    choice = chosen(r)
    if tune:
        along = -2 if transpose_a else -1, -1 if transpose_b else -2
        choice = _tuned("product_task", r, a, shape, (a, b, bias, scale_a, scale_b), along)
    return product(r, choice, a, shape)


def _tuned(task: str, *args: Any) -> Any:
    """The choice that the tuner finds for a task of matmul_choices.py, which is loaded for that alone."""
    from . import tuning_candidates as matmul_choices
    from .. import tuning

    return tuning.tuner.choose(getattr(matmul_choices, task)(*args)).choice


def _many_rows(form: Form, left: Operand, right: Operand, two: bool, where: Place) -> bool:
    """Whether such products have come with many numbers of rows: then one kernel for all of them is better."""
    key = (replace(form, m=0), left.down, right.strides, right.transposed, two, where)
    seen = _ROWS.setdefault(key, set())
    seen.add(form.m)
    return len(seen) > _MOST_SIZES


def _of_zeros(left: Operand, right: Operand, types: tuple[str, ...], activation: str | None,
              where: Place) -> Callable[..., Any]:
    """Sums of nothing: those of one zero."""
    (m, _), (_, n) = left.logical, right.logical
    lead, lead_b = ((x.batch,) if x.batch else () for x in (left, right))

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        return matmul(zeros(a, (*lead, m, 1), types[0]), zeros(a, (*lead_b, 1, n), types[1]), bias=bias,
                      activation=activation, out_dtype=types[2], out=out, target=where.target,
                      execution_backend=where.backend, tune=False)

    return run


def _aligning(loose: list[str], transpose_a: bool, transpose_b: bool, activation: str | None, out_dtype: Any,
              fast_accum: bool, where: Place, tune: bool) -> Callable[..., Any]:
    """Operands whose first element is at no multiple of 16 bytes are copied: no wide load may touch them.  So are those whose
    elements lie backwards."""

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        a, b = (fresh(x) if name in loose else x for name, x in (("a", a), ("b", b)))
        return matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, bias=bias, activation=activation,
                      out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum, out=out,
                      target=where.target, execution_backend=where.backend, tune=tune)

    return run


def _grouped_plan(a: Any, b: Any, sizes: Any, transpose_b: bool, bias: Any, activation: str | None, out_dtype: Any,
                  where: Place, tune: bool) -> Callable[..., Any]:
    """What calls with such operands run: f(a, b, bias, sizes)."""
    types = _check_types(a, b, out_dtype)
    if a.ndim != 2 or b.ndim != 3:
        raise error("matmul-shape", f"a has {a.ndim} dimensions and b {b.ndim}, expected 2 and 3",
                    expected="2 and 3 dimensions", found=f"{a.ndim} and {b.ndim}",
                    hint="rows of all groups one after another; one matrix of b a group")
    left, right = operand(a, "a", False), operand(b, "b", transpose_b)
    m, n, k = _check_shapes(left, right)
    if tuple(sizes.shape) != (b.shape[0],) or type_name(sizes) != "int32":
        raise error("matmul-shape", f"group_sizes is {type_name(sizes)} {tuple(sizes.shape)}, expected int32 "
                    f"({b.shape[0]},)",
                    expected=f"int32 ({b.shape[0]},)", found=f"{type_name(sizes)} {tuple(sizes.shape)}",
                    hint="one size a matrix of b")
    _check_rest(a, {"b": b, "bias": bias, "group_sizes": sizes}, n, bias, activation)
    if 0 in (m, n, k) or not right.batch:
        raise error("matmul-shape", f"a grouped product of {m} x {k} by {right.batch} matrices of {k} x {n} has no work",
                    expected="rows, columns and groups", found=f"{m} x {k} by {right.batch} of {k} x {n}",
                    hint="call it with rows, columns and groups")
    if not (strided(a) and strided(b)):
        return _copying(transpose_b, activation, out_dtype, where, tune)
    kind = _TYPES[types[0]][0]
    form = Form(m, n, k, types, _UNSET, bias="" if bias is None else type_name(bias), activation=activation or "",
                groups=right.batch)
    r = Request(form, kind, left, right, kind == "fp8" and k > 128 and where.target.is_cuda, where)
    check_target(r)
    choice = chosen(r)
    if tune:
        choice = _tuned("grouped_task", r, a, (m, n), (a, b, bias, sizes), (-1, -1 if transpose_b else -2))
    run, out = grouped(r, choice, a), maker(a, (m, n), types[2])
    return lambda a, b, bias, sizes: run(a, b, bias, sizes, out())


def _copying(transpose_b: bool, activation: str | None, out_dtype: Any, where: Place, tune: bool) -> Callable[..., Any]:
    """Operands of a grouped product whose elements lie backwards are copied."""

    def run(a: Any, b: Any, bias: Any, sizes: Any) -> Any:
        a, b = (x if strided(x) else fresh(x) for x in (a, b))
        return grouped_matmul(a, b, sizes, transpose_b=transpose_b, bias=bias, activation=activation, out_dtype=out_dtype,
                              target=where.target, execution_backend=where.backend, tune=tune)

    return run


__all__ = ["check_disjoint", "check_gradient", "check_tensors", "grouped_matmul", "matmul"]
