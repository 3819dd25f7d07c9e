"""`swiglu` with gradients: silu(gate) * up."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.errors import error

from ..arrays import accumulator, type_name
from ..attention.form import LOG2E
from ..attention.inputs import running_on
from ..autograd import Function, Results, Step
from ..place import target_text
from .rows import VECTOR, as_rows, check_alike

_WIDTH, _THREADS = 1024, 128  # a tile of a row


def swiglu(gate: Any, up: Any = None, *, target: Any = None) -> Any:
    """gate / (1 + exp(-gate)) * up; of up's shape and gate's type.

    gate, up: (..., n), float16, bfloat16, float32 or float64.  Without up, gate is (..., 2 n) and holds both: the first n
    columns are the gate, as one GEMM of both projections gives them.  Computed in float32 (float64 for float64).
    target: as for rms_norm.

    Gradients of gate and up, of their type, in one tensor where they came in one.  Saved for them: gate and up; the result
    is not.

    Raises training-argument.

    >>> import numpy as np
    >>> swiglu(np.array([[0, 2]], np.float32)).tolist()
    [[0.0]]
    """
    return SWIGLU(gate, up, target_text(target))


class GateForm(NamedTuple):
    """What a kernel is compiled for.  n: columns of the result.  packed: gate and up are in one tensor."""

    n: int
    kind: str
    acc: str
    packed: bool

    @property
    def tiles(self) -> int:
        """Of a row.  Blocks are in the order of memory."""
        return -(-self.n // _WIDTH)

    @property
    def layout(self) -> Any:
        """Of a tile: neighbouring threads have neighbouring vectors, of as many elements as no row begins inside of."""
        v = gcd(self.n, VECTOR)
        return T.Fragment((_WIDTH,), forward_fn=lambda j: (j // v % _THREADS, j // (v * _THREADS) * v + j % v))

    def gate(self, m: Any) -> Any:
        return T.Tensor((m, 2 * self.n if self.packed else self.n), self.kind)

    def up(self, m: Any) -> Any:
        return T.Tensor((1, 1) if self.packed else (m, self.n), self.kind)

    def at(self, Gate: Any, Up: Any, row: Any, column: Any) -> Any:
        """The element of up; of its gradient, where these are given."""
        return Gate[row, self.n + column] if self.packed else Up[row, column]

    def sigmoid(self, x: Any) -> Any:
        one = T.cast(1, self.acc)
        return one / (one + (T.exp(-x) if self.acc == "float64" else T.exp2(x * -LOG2E)))


def gate_forward(f: GateForm) -> Any:
    """The kernel (Gate, Up, Y)."""
    m = T.dynamic("m")

    @T.prim_func
    def swiglu(Gate: f.gate(m), Up: f.up(m), Y: T.Tensor((m, f.n), f.kind)):
        with T.Kernel(m * f.tiles, threads=_THREADS) as bx:
            gate, up = T.alloc_fragment((_WIDTH,), f.kind), T.alloc_fragment((_WIDTH,), f.kind)
            for j in T.Parallel(_WIDTH, loop_layout=f.layout):  # all loads of a thread are on their way before it computes
                row, column = bx // f.tiles, bx % f.tiles * _WIDTH + j
                if column < f.n:
                    gate[j] = Gate[row, column]
                    up[j] = f.at(Gate, Up, row, column)
            for j in T.Parallel(_WIDTH, loop_layout=f.layout):
                row, column = bx // f.tiles, bx % f.tiles * _WIDTH + j
                if column < f.n:
                    g, u = T.cast(gate[j], f.acc), T.cast(up[j], f.acc)
                    Y[row, column] = g * f.sigmoid(g) * u

    return swiglu


def gate_backward(f: GateForm) -> Any:
    """The kernel (Gate, Up, dY, dGate, dUp)."""
    m = T.dynamic("m")

    @T.prim_func
    def swiglu_gradient(Gate: f.gate(m), Up: f.up(m), dY: T.Tensor((m, f.n), f.kind), dGate: f.gate(m), dUp: f.up(m)):
        with T.Kernel(m * f.tiles, threads=_THREADS) as bx:
            gate, up, grad = (T.alloc_fragment((_WIDTH,), f.kind) for _ in range(3))
            for j in T.Parallel(_WIDTH, loop_layout=f.layout):
                row, column = bx // f.tiles, bx % f.tiles * _WIDTH + j
                if column < f.n:
                    gate[j] = Gate[row, column]
                    up[j] = f.at(Gate, Up, row, column)
                    grad[j] = dY[row, column]
            for j in T.Parallel(_WIDTH, loop_layout=f.layout):
                row, column = bx // f.tiles, bx % f.tiles * _WIDTH + j
                if column < f.n:
                    g, u, d = (T.cast(v[j], f.acc) for v in (gate, up, grad))
                    s = f.sigmoid(g)
                    dGate[row, column] = d * u * s * (1 + g * (1 - s))
                    if f.packed:
                        dGate[row, f.n + column] = d * g * s
                    else:
                        dUp[row, column] = d * g * s

    return swiglu_gradient


def _form(gate: Any, up: Any) -> GateForm:
    columns, kind = gate.shape[-1], type_name(gate)
    return GateForm(columns // 2 if up is None else columns, kind, accumulator(kind), up is None)


def _results(gate: Any, up: Any, target: str | None) -> Results:
    check_alike("swiglu", gate, {"up": (up, tuple(gate.shape), (type_name(gate),))})
    if up is None and gate.shape[-1] % 2:
        raise error("training-argument", f"gate of swiglu has ‹{gate.shape[-1]}› columns, and up is left out",
                    expected="an even number of columns: those of gate, then those of up")
    return (((*gate.shape[:-1], _form(gate, up).n), type_name(gate)),)


def _run(gate: Any, up: Any, target: str | None, y: Any) -> None:
    if 0 not in gate.shape:
        f = _form(gate, up)
        running_on(gate, target).kernel(gate_forward, f)(*_matrices(f, gate, up), y.reshape(-1, f.n))


def _gradient_results(gate: Any, up: Any, target: str | None, dy: Any) -> Results:
    return (tuple(gate.shape), type_name(gate)), ((0,) if up is None else tuple(up.shape), type_name(gate))


def _gradient(gate: Any, up: Any, target: str | None, dy: Any, *made: Any) -> None:
    if 0 not in gate.shape:
        f = _form(gate, up)
        running_on(gate, target).kernel(gate_backward, f)(*_matrices(f, gate, up), as_rows(dy, f.n),
                                                          *_matrices(f, made[0], None if f.packed else made[1]))


def _matrices(f: GateForm, gate: Any, up: Any) -> tuple[Any, Any]:
    return as_rows(gate, gate.shape[-1]), None if f.packed else as_rows(up, f.n)


SWIGLU = Function("swiglu", Step("Tensor gate, Tensor? up, str? target", _results, _run),
                  Step("Tensor gate, Tensor? up, str? target, Tensor dy", _gradient_results, _gradient, 2),
                  lambda needs, given, made: given, (0, 1))
