"""Cycles of an SM that the statements of a loop take, by unit: tensor cores, arithmetic and special functions.

The rates are those of CUDA C++ Programming Guide, "Arithmetic Instructions", for capability 9.0; the cost of wgmma is in
ops/gemm/wgmma.py.  The scheduler compares orders of a loop by these figures.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang.ir import (Binary, Call, Cast, For, If, Load, Node, Parallel, Select, Stmt, Store, Unary, const, is_const,
                         stmts_of, walk, FRAGMENT, GLOBAL, SHARED)
from tilelang.ir.record import record
from tilelang.ops import Copy, Fill, Gemm, Reduce
from tilelang.ops.gemm.wgmma import wgmma_cycles
from tilelang.target.machine import UNIT_RATES

# Special function instructions of each function; forms for rounded results (target/rounded_functions.py) have the same.
_SPECIAL = {"exp2": 1, "exp": 1, "log": 1, "log2": 1, "rsqrt": 1, "sqrt": 1, "sin": 1, "cos": 1, "tanh": 2, "sigmoid": 2,
            "erf": 1, "pow": 2, "div": 1, "fast_exp2": 1}
_UNKNOWN = 16  # iterations of a loop of run-time extent


@record
class Cycles:
    """tensor: of the tensor cores.  arithmetic: of issue slots.  special: of the special function units.  link: of the links to
    other devices.  port: of shared memory's port."""

    tensor: float = 0.0
    arithmetic: float = 0.0
    special: float = 0.0
    link: float = 0.0
    port: float = 0.0

    @property
    def ordinary(self) -> float:
        """Cycles of a statement that is no GEMM: its slowest unit."""
        return max(self.arithmetic, self.special, self.link)

    def plus(self, other: Cycles, times: float = 1.0) -> Cycles:
        return Cycles(self.tensor + other.tensor * times, self.arithmetic + other.arithmetic * times,
                      self.special + other.special * times, self.link + other.link * times, self.port + other.port * times)


def item_cycles(s: Stmt) -> Cycles:
    """The cycles of one SM for a statement that a whole block runs."""
    if isinstance(s, Gemm):
        read = ((s.a, s.m * s.k // s.sparsity), (s.b, s.n * s.k * s.m / 64))  # wgmma reads B for each 64 rows
        return Cycles(tensor=wgmma_cycles(s), port=sum(
            n * r.dtype.bits / 8 for r, n in read if r.buffer.scope_name in SHARED) / UNIT_RATES.port)
    if isinstance(s, Parallel):
        return _per_element(s.body, prod(_extent(n) for n in s.extents))
    if isinstance(s, Reduce):
        return Cycles(arithmetic=_elements(s.src) / UNIT_RATES.arithmetic)
    if isinstance(s, (Copy, Fill)):
        far = isinstance(s, Copy) and (s.src.buffer.facts.remote or s.dst.buffer.facts.remote)
        moved = _elements(s.dst) * s.dst.dtype.bits / 8
        staged = isinstance(s, Copy) and (s.src.buffer.scope_name, s.dst.buffer.scope_name) == (FRAGMENT, GLOBAL)
        return Cycles(arithmetic=_elements(s.dst) / UNIT_RATES.moves, link=moved * far / UNIT_RATES.link,
                      port=2 * moved * staged / UNIT_RATES.port)  # it is written to shared memory, and TMA reads it there
    if isinstance(s, For):
        return Cycles().plus(_all(s.body), _extent(s.extent))
    if isinstance(s, If):
        one = _all(s.then)
        return one if s.orelse is None else max(one, _all(s.orelse), key=lambda c: c.ordinary + c.tensor)
    return Cycles(arithmetic=1.0)


def _all(s: Stmt) -> Cycles:
    out = Cycles()
    for x in stmts_of(s):
        out = out.plus(item_cycles(x))
    return out


def _per_element(body: Stmt, elements: float) -> Cycles:
    """Cycles of an elementwise body for so many elements."""
    ordinary = special = products = sums = 0.0
    for x in walk(body):
        ordinary += _operations(x)
        special += _special(x)
        products += isinstance(x, Binary) and x.op == "mul" and x.dtype.is_float
        sums += isinstance(x, Binary) and x.op in ("add", "sub") and x.dtype.is_float
    ordinary += max(products, sums)  # a multiplication and an addition are one instruction
    return Cycles(arithmetic=(ordinary + special) * elements / UNIT_RATES.arithmetic,
                  special=special * elements / UNIT_RATES.special)


def _operations(x: Node) -> float:
    """Instructions of one node, without those below it and without multiplications and additions."""
    if isinstance(x, Binary):
        return 0.25 if x.dtype.is_int else 0.0 if x.op in ("mul", "add", "sub") else 1.0
    if isinstance(x, (Select, Unary, Cast)):
        return 0.5
    if isinstance(x, (Load, Store)):
        return 0.0 if x.buffer.scope_name.startswith("local") else 1.0
    return 1.0 if isinstance(x, Call) and not _special(x) else 0.0


def _special(x: Node) -> float:
    """Special function instructions of one node, without those below it."""
    return _SPECIAL.get(x.op.split("_rounded_")[0], 0) if isinstance(x, (Binary, Call)) and x.dtype.is_float else 0


def _extent(n: object) -> int:
    return int(n.value) if is_const(n) else _UNKNOWN  # type: ignore[attr-defined]


def _elements(region: Any) -> float:
    return float(prod([_extent(const(n) if isinstance(n, int) else n) for n in region.extents]))
