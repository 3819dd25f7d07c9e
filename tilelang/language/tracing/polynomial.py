"""Exact difference of two index expressions as polynomials over opaque terms: the static extent of `a[x*8:(x+1)*8]`.

A module of its own: what the module of regions asks of a value counts as asked by the user (python_questions.py), and this
compares values by their hash.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Binary, Cast, Const, Expr, Unary, binary, convert

Monomial = tuple[Expr, ...]  # the factors, sorted by id of each term's representative
Poly = dict[Monomial, int]


def _terms(e: Any, known: dict[Expr, Expr]) -> Poly:
    if isinstance(e, int):
        return {(): e} if e else {}
    if isinstance(e, Const):
        return {(): int(e.value)} if e.value else {}
    if isinstance(e, Binary) and e.op in ("add", "sub", "mul"):
        a, b = _terms(e.a, known), _terms(e.b, known)
        if e.op == "mul":
            return _multiplied(a, b)
        out = dict(a)
        sign = 1 if e.op == "add" else -1
        for m, c in b.items():
            out[m] = out.get(m, 0) + sign * c
        return {m: c for m, c in out.items() if c}
    if isinstance(e, Unary) and e.op == "neg":
        return {m: -c for m, c in _terms(e.a, known).items()}
    if isinstance(e, Cast) and e.dtype.is_int and e.value.dtype.is_int and e.dtype.bits >= e.value.dtype.bits:
        return _terms(e.value, known)
    return {(known.setdefault(e, e),): 1}


def _multiplied(a: Poly, b: Poly) -> Poly:
    out: Poly = {}
    for m, c in a.items():
        for n, d in b.items():
            key = tuple(sorted((*m, *n), key=id))
            out[key] = out.get(key, 0) + c * d
    return {m: c for m, c in out.items() if c}


def difference(stop: Any, start: Any) -> Any:
    """stop - start as a Python int where it is constant, else the shortest expression found.

    Index arithmetic of extents is assumed not to wrap (bounds of a region are buffer indices).
    """
    if isinstance(stop, int) and isinstance(start, int):
        return stop - start
    known: dict[Expr, Expr] = {}
    a, b = _terms(stop, known), _terms(start, known)
    rest = dict(a)
    for m, c in b.items():
        rest[m] = rest.get(m, 0) - c
    rest = {m: c for m, c in rest.items() if c}
    if not rest:
        return 0
    if set(rest) == {()}:
        return rest[()]
    if not b:
        return stop
    if len(rest) < len(a) + len(b):
        return _rebuild(rest)
    return binary("sub", convert(stop), convert(start))


def _rebuild(p: Poly) -> Expr:
    out: Any = None
    for m, c in sorted(p.items(), key=lambda mc: mc[1] < 0):  # positive terms first
        term: Any = abs(c) if not m else None
        for t in m:
            term = t if term is None else term * t
        if m and abs(c) != 1:
            term = term * abs(c)
        if out is None:
            out = term if c > 0 else 0 - term
        else:
            out = out + term if c > 0 else out - term
    return convert(out)
