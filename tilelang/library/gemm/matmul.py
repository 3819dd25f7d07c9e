"""`matmul` and `grouped_matmul`: calls with arguments of one form are planned once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..agreement import Disjoint
from ..arrays import aligned, empty, facts, fresh, maker, strided, zeros
from ..caches import Cache
from ..opt_in import dynamic_shapes, wanted
from .build import Place, grouped_run, matmul_run
from .plan import plan_matmul
from .problem import (MatmulProblem, check_disjoint, check_gradient, check_target, check_tensors, grouped_problem,
                      matmul_problem, result_shape)


class _Planned(NamedTuple):
    """The prepared answer to calls of one form. run: computes. disjoint: the test of `out`, where it is given."""

    run: Callable[..., Any]
    disjoint: Any


_PLANS: Cache[_Planned] = Cache(4096)  # kernels stay in the memory of tilelang.compile and on disk


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
    out: contiguous, of the result's shape and type, disjoint from the operands.  target, execution_backend: as for
    tilelang.compile, instead of the device the operands are on.
    tune: True: the first call of a form times a dozen ways to compute it on the operands' GPU and keeps the fastest, if it is
    surely faster than the cost model's choice (seconds, once: the disk cache remembers it; reference, "Tuning the library").
    False: the model's choice.  None: as the setting TILELANG_LIBRARY_TUNING says when a form comes first.

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
        tensors = {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out": out}
        plan = _first_matmul(key, tensors, tune, {
            "transpose_a": transpose_a, "transpose_b": transpose_b, "activation": activation, "out_dtype": out_dtype,
            "fast_accum": fast_accum, "target": target, "execution_backend": execution_backend})
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
        tensors = {"a": a, "b": b, "bias": bias, "group_sizes": group_sizes}
        plan = _first_grouped(key, tensors, tune, {
            "transpose_b": transpose_b, "activation": activation, "out_dtype": out_dtype, "target": target,
            "execution_backend": execution_backend})
    if not isinstance(a, np.ndarray):
        check_gradient("grouped_matmul", a, b, bias)
    return plan.run(a, b, bias, group_sizes)


def _first_matmul(key: Any, tensors: dict[str, Any], tune: bool | None, options: dict[str, Any]) -> _Planned:
    """The plan of calls like this one, kept under a key. options: those of matmul that are no tensors."""

    def again(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any, tune: bool | None = tune) -> Any:
        return matmul(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out, tune=tune, **options)

    a, *others, out = tensors.values()
    disjoint = None if out is None else Disjoint(out, (a, *others))
    at = Place.of(a, options["target"], options["execution_backend"])
    tuned = wanted(tune, a, at.target, at.backend)
    if tuned is None:  # a call during graph capture takes the present plan
        return _Planned(lambda *args: again(*args, False), disjoint)
    form = {name: x for name, x in options.items() if name not in ("target", "execution_backend")}
    problem = matmul_problem(tensors, at.target, **form, dynamic=dynamic_shapes())
    return _PLANS.keep(key, _Planned(_run(problem, at, tensors, tuned, again), disjoint))


def _first_grouped(key: Any, tensors: dict[str, Any], tune: bool | None, options: dict[str, Any]) -> _Planned:
    """The plan of calls of grouped_matmul like this one, kept under a key."""

    def again(a: Any, b: Any, bias: Any, group_sizes: Any, tune: bool | None = tune) -> Any:
        return grouped_matmul(a, b, group_sizes, bias=bias, tune=tune, **options)

    at = Place.of(tensors["a"], options["target"], options["execution_backend"])
    tuned = wanted(tune, tensors["a"], at.target, at.backend)
    if tuned is None:
        return _Planned(lambda *args: again(*args, False), None)
    form = {name: x for name, x in options.items() if name not in ("target", "execution_backend")}
    problem = grouped_problem(tensors, at.target, **form)
    return _PLANS.keep(key, _Planned(_grouped(problem, at, tensors, tuned, again), None))


def _run(p: MatmulProblem, at: Place, tensors: dict[str, Any], tune: bool, again: Callable[..., Any]) -> Callable[..., Any]:
    """A function f(a, b, bias, scale_a, scale_b, out) for calls with such tensors. again: matmul with the same options."""
    a, b = tensors["a"], tensors["b"]
    shape = result_shape(a, p.m, p.n)
    if 0 in shape:
        return lambda a, b, bias, sa, sb, out: empty(a, shape, p.types[2]) if out is None else out
    if p.k == 0:
        return _of_zeros(p, at)
    loose = [name for name, x in (("a", a), ("b", b)) if not strided(x) or at.target.is_cuda and not aligned(x)]
    if loose:
        return _aligning(loose, again)
    check_target(p, at.target)
    plan = plan_matmul(p, at.chip)
    if tune:
        along = -1 - (p.left.transposed != p.left.flipped), -2 + (p.right.transposed != p.right.flipped)
        plan = _tuned("matmul_task", p, at, a, shape, tuple(x for name, x in tensors.items() if name != "out"), along)
    return matmul_run(p, plan, at, a, shape)


def _tuned(task: str, *args: Any) -> Any:
    """The plan that the tuner finds for a task of tuning_candidates.py."""
    # Few calls are tuned.
    from .. import tuning  # 20 ms: the tuner
    from . import tuning_candidates  # 5 ms

    return tuning.tuner.choose(getattr(tuning_candidates, task)(*args)).choice


def _of_zeros(p: MatmulProblem, at: Place) -> Callable[..., Any]:
    """The function for an empty k, which computes with one zero instead."""
    lead, lead_b = ((x.batch,) if x.batch else () for x in (p.left, p.right))

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        return matmul(zeros(a, (*lead, p.m, 1), p.types[0]), zeros(a, (*lead_b, 1, p.n), p.types[1]), bias=bias,
                      activation=p.activation or None, out_dtype=p.types[2], out=out, target=at.target,
                      execution_backend=at.backend, tune=False)

    return run


def _aligning(loose: list[str], again: Callable[..., Any]) -> Callable[..., Any]:
    """A function that copies operands which the kernel cannot read.

    These are operands whose first element is at no multiple of 16 bytes, which wide loads need, and those with negative
    strides.
    """

    def run(a: Any, b: Any, *others: Any) -> Any:
        return again(*(fresh(x) if name in loose else x for name, x in (("a", a), ("b", b))), *others)

    return run


def _grouped(p: MatmulProblem, at: Place, tensors: dict[str, Any], tune: bool, again: Callable[..., Any]) -> Callable[..., Any]:
    """A function f(a, b, bias, group_sizes) for calls with such tensors. again: grouped_matmul with the same options."""
    a, b = tensors["a"], tensors["b"]
    if not (strided(a) and strided(b)):  # negative strides
        return lambda a, b, bias, sizes: again(*(x if strided(x) else fresh(x) for x in (a, b)), bias, sizes)
    check_target(p, at.target)
    plan = plan_matmul(p, at.chip)
    if tune:
        along = -1, -2 + (p.right.transposed != p.right.flipped)
        plan = _tuned("grouped_task", p, at, a, (p.m, p.n), tuple(tensors.values()), along)
    run, out = grouped_run(p, plan, at, a), maker(a, (p.m, p.n), p.types[2])
    return lambda a, b, bias, sizes: run(a, b, bias, sizes, out())
