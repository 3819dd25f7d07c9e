"""`matmul`, and the preparation of it and of grouped_matmul: calls with arguments of one form are planned once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tilelang.target.machine import MAX_GRID

from ..agreement import Disjoint, magnitude
from ..arrays import aligned, compact, compact_copy, empty, fresh, in_chunks, strided, strides, zeros
from ..caches import Cache, Prepared, enter, known
from ..place import Place, dynamic_shapes
from .build import planned_run
from .plan import plan_matmul
from .problem import (MatmulProblem, check_disjoint, check_gradient, check_target, check_tensors, grouped_problem,
                      matmul_problem, result_shape)


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
    arrays = a, b, bias, scale_a, scale_b, out
    options = transpose_a, transpose_b, activation, out_dtype, fast_accum, str(target), execution_backend, tune
    answer = known(_ANSWERS, arrays, options)
    if answer is None:
        answer = enter(_ANSWERS, arrays, options, prepare(
            matmul, dict(zip(_NAMES, arrays)), tune, dict(zip(_OPTIONS, (*options[:5], target, execution_backend)))))
    check_gradient("matmul", *arrays)
    if out is not None and not answer.disjoint.surely(out, arrays[:-1]):
        check_disjoint(out, dict(zip(_NAMES, arrays[:-1])))
    return answer.run(*arrays)


_NAMES = "a", "b", "bias", "scale_a", "scale_b", "out"
_OPTIONS = "transpose_a", "transpose_b", "activation", "out_dtype", "fast_accum", "target", "execution_backend"
_ANSWERS: Cache[Prepared] = Cache(4096)


def prepare(function: Callable[..., Any], tensors: dict[str, Any], tune: bool | None, options: dict[str, Any]) -> Prepared:
    """The answer to calls like this one of a function, matmul or grouped_matmul. options: its arguments that are no tensors."""

    names = tuple(tensors)  # what is kept for later calls holds no tensors

    def again(*arrays: Any, **more: Any) -> Any:
        return function(**dict(zip(names, arrays)), **{"tune": tune, **options, **more})

    check_tensors(x for name, x in tensors.items() if x is not None or name not in _NAMES[2:])
    a, *others = tensors.values()
    out = tensors.get("out")
    disjoint = None if out is None else Disjoint(out, (a, *others[:-1]))
    at = Place.of(a, options["target"], options["execution_backend"])
    tuned = at.tuned(tune, a)
    if tuned is None:  # a call during graph capture takes the present plan
        return Prepared(partial(again, tune=False), disjoint=disjoint, passing=True)
    form = {name: x for name, x in options.items() if name not in _OPTIONS[-2:]}
    make = grouped_problem if "group_sizes" in tensors else matmul_problem
    problem = make(tensors, at.target, **form, dynamic=dynamic_shapes())
    return Prepared(_run(problem, at, tensors, tuned, again), disjoint=disjoint)


def _run(p: MatmulProblem, at: Place, tensors: dict[str, Any], tune: bool, again: Callable[..., Any]) -> Callable[..., Any]:
    """A function of such tensors, in this order. again: the library's function with the same options."""
    a, b = tensors["a"], tensors["b"]
    shape = result_shape(a, p.m, p.n)
    if 0 in shape:
        return lambda *arrays: empty(arrays[0], shape, p.types[2]) if arrays[-1] is None else arrays[-1]  # the last one is out
    if p.k == 0:
        return _of_zeros(p, at)
    if p.batch > MAX_GRID[2]:
        def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
            out = empty(a, shape, p.types[2]) if out is None else out
            each = (a, out) if b.ndim == 2 else (a, out, b)
            in_chunks(lambda a, out, b=b: again(a, b, bias, scale_a, scale_b, out), MAX_GRID[2], *each)
            return out

        return run
    # Wide loads need a first element at a multiple of 16 bytes; strides of kernels are not negative.
    loose = [not strided(x) or at.target.is_gpu and not aligned(x) for x in (a, b)]
    bent = [n not in ("a", "b", "out") and x is not None and strides(x) != compact(tuple(x.shape)) for n, x in tensors.items()]
    if any(loose + bent):
        return lambda a, b, *others: again(*(fresh(x) if copied else x for x, copied in zip((a, b), loose)),
                                           *(compact_copy(x) if copied else x for x, copied in zip(others, bent[2:])))
    check_target(p, at.target)
    if not tune:
        if p.groups and not p.dynamic:
            family = replace(p, m=0, left=replace(p.left, rows=0, lead=0))
            p = replace(p, dynamic=not at.comes_first(family, p.m))
        return planned_run(p, plan_matmul(p, at.chip), at, a, shape)
    # Few calls are tuned.
    from .. import tuning  # 20 ms: the tuner
    from .tuning_candidates import matmul_task  # 5 ms

    given = tuple(x for name, x in tensors.items() if name != "out")
    exact = "float64" if p.kind == "float" else "float32"
    task = matmul_task(p, at, a, shape, given, lambda: again(*map(magnitude, given), tune=False, out_dtype=exact))
    return planned_run(p, tuning.tuner.choose(task).choice, at, a, shape)


def _of_zeros(p: MatmulProblem, at: Place) -> Callable[..., Any]:
    """The function for an empty k, which computes with one zero instead."""
    lead, lead_b = ((x.batch,) if x.batch else () for x in (p.left, p.right))

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        return matmul(zeros(a, (*lead, p.m, 1), p.types[0]), zeros(a, (*lead_b, 1, p.n), p.types[1]), bias=bias,
                      activation=p.activation or None, out_dtype=p.types[2], out=out, target=at.target,
                      execution_backend=at.backend, tune=False)

    return run
