"""Functions of single elements, with gradients, from expressions of the language."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tilelang.ir import Expr, Var, const, dtype, substitute

from ..arrays import accumulator, contiguous, type_name
from ..attention.derivative import derivative
from ..attention.inputs import running_on
from ..attention.flex_attention import state_of
from ..autograd import Function, Numbered, Results, Step
from ..place import target_text

_MAPS = Numbered()
_BLOCK = 1024  # elements of a block


class ElementMap:
    """y = f(x) for each element of a tensor, in float32 (float64 of float64); operators know it by its number."""

    def __init__(self, f: Callable[[Any], Any]) -> None:
        self.f, self.number = f, _MAPS.number(state_of(f), f)

    def __reduce__(self) -> tuple[Any, ...]:
        return ElementMap, (self.f,)  # numbers are of one process

    def __call__(self, x: Any, target: Any = None) -> Any:
        return _FUNCTION(x, self.number, target_text(target))


def map_elements(number: int, kind: str, backward: bool) -> Any:
    """The kernel (X, G, Y): Y = f(X), or f'(X) G. G has one element in the forward pass."""
    n, accum = T.dynamic("n"), accumulator(kind)
    x = Var("x", dtype(accum))
    y = _MAPS[number](x)
    y = derivative(y, x) if backward else y

    def value(at: Any) -> Any:
        return substitute(y, {x: T.cast(at, accum)}) if isinstance(y, Expr) else const(float(y), accum)

    @T.prim_func
    def mapped(X: T.Tensor((n,), kind), G: T.Tensor((n if backward else 1,), kind), Y: T.Tensor((n,), kind)):
        with T.Kernel(T.ceildiv(n, _BLOCK), threads=128) as bx:
            for i in T.Parallel(_BLOCK):
                if bx * _BLOCK + i < n:
                    at = bx * _BLOCK + i
                    Y[at] = value(X[at]) * T.cast(G[at], accum) if backward else value(X[at])

    return mapped


def _run(x: Any, g: Any, number: int, target: Any, out: Any) -> None:
    if 0 not in x.shape:
        at, flat = running_on(x, target), contiguous(x).reshape(-1)
        more = flat[:1] if g is None else contiguous(g).reshape(-1)
        at.kernel(map_elements, number, type_name(x), g is not None)(flat, more, out.reshape(-1))


def _like(x: Any, *rest: Any) -> Results:
    return [(tuple(x.shape), type_name(x))]


_FUNCTION = Function(
    "element_map", Step("Tensor x, int number, str? target", _like, lambda x, n, target, out: _run(x, None, n, target, out)),
    Step("Tensor x, int number, str? target, Tensor? grad", _like,
         lambda x, n, target, grad, out: _run(x, grad, n, target, out)),
    lambda needs, args, made: args, (0,))
