"""Kernels of attention with a normalisation of its own (online.py): forward, and gradients by blocks of keys and of queries.

A score of -inf, and a key that a row does not see, have the weight 0 and count in no reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T
from tilelang.ir import Expr, Var, substitute

from .backward_kernels import FEW, Place, key_tiles, sees, shows, steps_of
from .derivative import derivative
from .form import BackwardForm
from .online import NEUTRAL, Traced
from .problem import Mask


@dataclass(frozen=True)
class OnlineForm:
    """both: sizes, strides, tiles and functions; its plain.tile is the tile of a block of queries in the forward kernel, that
    of a block of keys in the backward one. number: of the description, by which forms are compared."""

    both: BackwardForm
    number: int
    trace: Traced = field(compare=False)

    sizes = property(lambda self: self.both.sizes)
    kept = property(lambda self: max(1, len(self.trace.names)))  # values of a row that are saved

    @property
    def facts(self) -> int:
        """Values of a row in the workspace of the backward pass: states, the factor, what a change of a state costs."""
        return len(self.trace.names) + 1 + len(self.trace.changes())

    @property
    def states(self) -> Any:
        """The parameter States: (states, batch, heads, seq_q)."""
        return T.Tensor((self.kept, self.sizes.batch, self.sizes.heads, self.sizes.seq_q), "float32")


def changed(f: BackwardForm, at: Place, value: Any, h: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """(changed score, its derivative) of an element of Q K^T."""
    if f.functions.score is None:
        return value * at.scale, 1.0
    score = Var("score", value.dtype)
    x = T.cast(f.functions.score(score, at.batch, h, query, key, *[at.read[n] for n in f.functions.uses[0]]), value.dtype)
    place = {score: value * at.scale}
    slope = derivative(x, score)
    return substitute(x, place), substitute(T.cast(slope, value.dtype), place) if isinstance(slope, Expr) else slope


@T.macro
def change_scores(f, at, S, h, element, partly):
    """Elements of Q K^T become changed scores, those that are hidden -inf. element: maps (i, j) to (query, key)."""
    for i, j in T.Parallel(*S.shape):
        x = changed(f, at, S[i, j], h, *element(i, j))[0]
        S[i, j] = T.if_then_else(sees(f, at, *element(i, j)), x, -T.infinity(S.dtype))
    if f.functions.mask is not None:
        if partly:
            for i, j in T.Parallel(*S.shape):
                S[i, j] = T.if_then_else(shows(f, at, h, *element(i, j)), S[i, j], -T.infinity(S.dtype))


def visible(S: Any, i: Any, j: Any, e: Any, neutral: Any = 0.0) -> Any:
    """An expression of the score S[i, j], or the neutral value where it is hidden."""
    return T.if_then_else(S[i, j] == -T.infinity(S.dtype), neutral, e)


@T.macro
def reduce_keys(t, reduction, S, W, found, result, i_th):
    """A reduction over the keys of a tile. W: elements of its operand. found: maps (i, j or None) to the values of variables.
    """
    for i, j in T.Parallel(*S.shape):
        W[i, j] = visible(S, i, j, substitute(reduction.of, found(i, j)), NEUTRAL[reduction.kind])
    if reduction.kind == "max":
        T.reduce_max(W, result, dim=1)
    else:
        T.reduce_sum(W, result, dim=1)


@T.macro
def set_rows(rows, value):
    """rows[i] = value(i)."""
    for i in T.Parallel(*rows.shape):
        rows[i] = value(i)


def values_of(t: Traced, S: Any, now: Any, results: Any) -> Callable[..., dict[Any, Any]]:
    """Maps (i, j), or (i,), to the values of the variables of a description: of row i, and of the score S[i, j]."""
    def found(i: Any, j: Any = None) -> dict[Any, Any]:
        rows = {v: x[i] for v, x in zip((*t.states, *(r.result for r in t.reductions)), (*now, *results))}
        return rows if j is None else {**rows, t.score: S[i, j]}

    return found


@T.macro
def absorb_online(t, S, W, P, acc, now, new, results):
    """Add a tile of changed scores: the weights go to P, the states of the rows move on, and `acc` is rescaled.

    t: Traced. now, new: fragments of the states, before and behind the tile. results: of the reductions.
    """
    found = values_of(t, S, now, results)
    reduced = [reduce_keys(t, r, S, W, found, x, n) for n, (r, x) in enumerate(zip(t.reductions, results))]  # noqa: F841
    if not (len(t.reductions) > 0 and t.reductions[-1].of is t.weight):
        for i, j in T.Parallel(*S.shape):
            W[i, j] = visible(S, i, j, substitute(t.weight, found(i, j)))
    T.copy(W, P)
    if isinstance(t.rescale, Expr):
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] *= substitute(t.rescale, found(i))
    moved = [set_rows(x, lambda i, e=e: substitute(e, found(i))) for x, e in zip(new, t.next)]  # noqa: F841
    copied = [T.copy(x, y) for x, y in zip(new, now)]  # noqa: F841


def online_forward(form: OnlineForm) -> Any:
    """The kernel (Q, K, V, scale, Blocks, X0, X1, O, States). Blocks: as BlockMask.blocks."""
    f, t, p = form.both, form.trace, form.both.plain
    batch, seq_q, seq_k, heads = f.sizes[:4]
    rows, keys = p.tile.rows, p.tile.keys
    across, along = f.functions.block or (None, None)

    @T.prim_func
    def online_attention(Q: p.q, K: p.k, V: p.v, scale: T.float32, Blocks: T.Tensor(f.functions.rows, "int32"),
                         X0: T.Tensor(*f.functions.tensors[0]), X1: T.Tensor(*f.functions.tensors[1]), O: p.o,
                         States: form.states):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=p.tile.threads) as (bx, h, b):
            Qs, Ks = T.alloc_shared((rows, f.sizes.dim), f.dtype), T.alloc_shared((keys, f.sizes.dim), f.dtype)
            Vs, P = T.alloc_shared((keys, f.sizes.dim_v), f.dtype), T.alloc_fragment((rows, keys), f.dtype)
            S, W = T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, keys), "float32")
            acc = T.alloc_fragment((rows, f.sizes.dim_v), "float32")
            now, new = ([T.alloc_fragment((rows,), "float32") for _ in t.names] for _ in (0, 1))
            results = [T.alloc_fragment((rows,), "float32") for _ in t.reductions]
            row = bx * rows
            at = Place(b, 0, seq_q, 0, seq_k, None, 0, f.factor(scale), (X0, X1))
            steps = steps_of(lambda g: h, 1, keys, key_tiles(Mask(), 0, rows, seq_k, keys), along,
                             (Blocks, b, row // (across or 1)), f.functions.mask is not None)
            T.copy(p.rows(Q, b, h, row, rows), Qs)
            T.clear(acc)
            begun = [T.fill(x, v) for x, v in zip(now, t.first)]  # noqa: F841
            for n in T.Pipelined(steps.count(0), num_stages=p.tile.stages):
                k0 = steps.tile(0, n)[1]
                T.copy(p.rows(K, b, h // p.group, k0, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                change_scores(f, at, S, h, lambda i, j, k0=k0: (row + i, k0 + j), steps.hides(0, n))
                T.copy(p.rows(V, b, h // p.group, k0, keys), Vs)
                absorb_online(t, S, W, P, acc, now, new, results)
                T.gemm(P, Vs, acc)
            for i, j in T.Parallel(*acc.shape):
                acc[i, j] *= substitute(t.factor, {v: x[i] for v, x in zip(t.states, now)})
            T.copy(acc, p.rows(O, b, h, row, rows))
            stored = [T.copy(x, States[n, b, h, row:row + rows]) for n, x in enumerate(now)]  # noqa: F841

    return online_attention


@T.macro
def online_facts(form, at, tensors, States, h, row):
    """Facts of f.unit rows from `row` on: states, the factor, and the cost of a change of a state, which all are 0 behind the
    last row. tensors: O, dO, Facts."""
    O, dO, Facts = tensors
    f, t = form.both, form.trace
    o, do = (T.alloc_fragment((FEW, f.sizes.dim_v), "float32") for _ in (0, 1))
    delta = T.alloc_fragment((FEW,), "float32")
    for n in T.serial(f.unit // FEW):
        first = row + n * FEW
        T.copy(f.plain.rows(O, at.batch, h, first, FEW), o)
        T.copy(f.plain.rows(dO, at.batch, h, first, FEW), do)
        for i, j in T.Parallel(FEW, f.sizes.dim_v):
            o[i, j] *= do[i, j]
        T.reduce_sum(o, delta, dim=1)
        for i in T.Parallel(FEW):
            inside = first + i < at.seq_q
            own = [T.if_then_else(inside, States[n, at.batch, h, T.min(first + i, at.seq_q - 1)], 0.0)
                   for n in range(len(t.names))]
            place = dict(zip(t.states, own))
            values = [*own, substitute(t.factor, place), *[substitute(c[1], place) * delta[i] for c in t.changes()]]
            stored = [put(Facts, (at.lead(h), n, first + i), T.if_then_else(inside, x, 0.0))  # noqa: F841
                      for n, x in enumerate(values)]


@T.macro
def put(X, at, value):
    """X[at] = value."""
    X[at] = value


def elements(form: OnlineForm, fact: Any) -> tuple[Any, Any, Any]:
    """(weight, factor of the gradient of a weight, what the states add) of a score. fact: maps the number of a fact to its
    value for the row."""
    t, n = form.trace, len(form.trace.names)
    place = {s: fact(k) for k, s in enumerate(t.states)}
    more: Any = 0.0
    for k, (_, _, by) in enumerate(t.changes()):
        by = substitute(by, place) if isinstance(by, Expr) else by
        more = more + fact(n + 1 + k) * by
    slope = t.slope
    return (substitute(t.at_end(t.weight), place) * fact(n),
            (substitute(slope, place) if isinstance(slope, Expr) else slope) * fact(n), more)


def weight_of(form: OnlineForm, score: Any, fact: Any) -> Any:
    """The weight of a changed score."""
    return substitute(elements(form, fact)[0], {form.trace.score: score})


@T.macro
def weigh_online(form, at, S, P, h, element, partly, fact):
    """P becomes the weights of a tile of Q K^T, S the changed scores. fact: maps (n, i, j) to fact n of the row of an element.
    """
    change_scores(form.both, at, S, h, element, partly)
    for i, j in T.Parallel(*S.shape):
        P[i, j] = visible(S, i, j, weight_of(form, S[i, j], lambda n, i=i, j=j: fact(n, i, j)))


def gradient(form: OnlineForm, at: Place, S: Any, E: Any, raw: Any, h: Any, element: Any, i: Any, j: Any, fact: Any) -> Any:
    """The gradient of an element of scale Q K^T. E: of dO V^T. raw: Q K^T itself; None: where no function changes scores."""
    _, a, b = elements(form, lambda n: fact(n, i, j))
    found = substitute(E[i, j] * a + b, {form.trace.score: S[i, j]})
    slope = 1.0 if raw is None else changed(form.both, at, raw[i, j], h, *element(i, j))[1]
    return visible(S, i, j, found * slope)


@T.macro
def online_step(form, at, tensors, tiles, results, tile, k0, partly):
    """A step of a block of keys: the gradients of a tile of queries, (head, first row), are added to the results."""
    (Q, dO, Facts), (Ks, Vs, Qs, dOs, Fs), (dk, dv), (h, row) = tensors, tiles, results, tile
    f = form.both
    keys, rows = f.plain.tile.keys, f.plain.tile.rows
    S, E = T.alloc_fragment((keys, rows), "float32"), T.alloc_fragment((keys, rows), "float32")
    P, dS = T.alloc_fragment((keys, rows), f.dtype), T.alloc_fragment((keys, rows), f.dtype)
    raw = T.alloc_fragment((keys, rows), "float32") if f.functions.score is not None else None
    T.copy(f.plain.rows(Q, at.batch, h, row, rows), Qs)
    T.copy(Facts[at.lead(h), :, row:row + rows], Fs)
    T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
    if raw is not None:
        T.copy(S, raw)
    weigh_online(form, at, S, P, h, lambda i, j: (row + j, k0 + i), partly, lambda n, i, j: Fs[n, j])
    T.copy(f.plain.rows(dO, at.batch, h, row, rows), dOs)
    T.gemm(Vs, dOs, E, transpose_B=True, clear_accum=True)
    T.gemm(P, dOs, dv)
    for i, j in T.Parallel(keys, rows):
        dS[i, j] = gradient(form, at, S, E, raw, h, lambda i, j: (row + j, k0 + i), i, j, lambda n, i, j: Fs[n, j])
    T.gemm(dS, Qs, dk)


@T.macro
def online_queries(form, at, steps, tensors, h, row):
    """dQ of the tile of queries from `row` on, a fragment. tensors: Q, K, V, dO, Facts."""
    Q, K, V, dO, Facts = tensors
    f, p = form.both, form.both.plain
    keys, rows, dim, dim_v = f.query.keys, f.query.rows, f.sizes.dim, f.sizes.dim_v
    Ks, Vs = T.alloc_shared((keys, dim), f.dtype), T.alloc_shared((keys, dim_v), f.dtype)
    Qs, dOs = T.alloc_shared((rows, dim), f.dtype), T.alloc_shared((rows, dim_v), f.dtype)
    facts = [T.alloc_fragment((rows,), "float32") for _ in range(form.facts)]
    S, E = T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, keys), "float32")
    dS = T.alloc_fragment((rows, keys), f.dtype)
    raw = T.alloc_fragment((rows, keys), "float32") if f.functions.score is not None else None
    dq = T.alloc_fragment((rows, dim), "float32")
    T.copy(p.rows(Q, at.batch, h, row, rows), Qs)
    T.copy(p.rows(dO, at.batch, h, row, rows), dOs)
    loaded = [T.copy(Facts[at.lead(h), n, row:row + rows], x) for n, x in enumerate(facts)]  # noqa: F841
    T.clear(dq)
    for n in T.Pipelined(steps.count(0), num_stages=f.query.stages):
        k0 = steps.tile(0, n)[1]
        T.copy(p.rows(K, at.batch, h // p.group, k0, keys), Ks)
        T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
        if raw is not None:
            T.copy(S, raw)
        change_scores(f, at, S, h, lambda i, j, k0=k0: (row + i, k0 + j), steps.hides(0, n))
        T.copy(p.rows(V, at.batch, h // p.group, k0, keys), Vs)
        T.gemm(dOs, Vs, E, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(rows, keys):
            dS[i, j] = gradient(form, at, S, E, raw, h, lambda i, j, k0=k0: (row + i, k0 + j), i, j,
                                lambda n, i, j: facts[n][i])
        T.gemm(dS, Ks, dq)
    for i, j in T.Parallel(rows, dim):
        dq[i, j] *= at.scale
    return dq


def online_backward(form: OnlineForm) -> Any:
    """The kernel (Q, K, V, O, dO, States, scale, Rows, Columns, X0, X1, Facts, dQ, dK, dV). Facts (batch * heads, facts,
    padded): workspace. All else as in dense_backward."""
    f, p, query, tile = form.both, form.both.plain, form.both.query, form.both.plain.tile
    batch, seq_q, seq_k, heads, kv_heads, dim, dim_v = f.sizes
    padded = T.ceildiv(seq_q, f.unit) * f.unit
    across, along = f.functions.block or (None, None)
    masked = f.functions.mask is not None

    def place(b: Any, scale: Any, *read: Any) -> Place:
        return Place(b, 0, seq_q, 0, seq_k, lambda h: b * heads + h, 0, f.factor(scale), read)

    @T.prim_func
    def online_attention_backward(
            Q: p.q, K: p.k, V: p.v, O: p.o, dO: f.gradient, States: form.states, scale: T.float32,
            Rows: T.Tensor(f.functions.rows, "int32"), Columns: T.Tensor(f.functions.columns, "int32"),
            X0: T.Tensor(*f.functions.tensors[0]), X1: T.Tensor(*f.functions.tensors[1]),
            Facts: T.Tensor((batch * heads, form.facts, padded), "float32"), dQ: f.result(0), dK: f.result(1), dV: f.result(2)):
        with T.Kernel(padded // f.unit, heads, batch, threads=128) as (bx, h, b):
            online_facts(form, place(b, scale), (O, dO, Facts), States, h, bx * f.unit)
        with T.Kernel(T.ceildiv(seq_k, tile.keys), kv_heads, batch, threads=tile.threads) as (bx, hk, b):
            k0 = bx * tile.keys
            at = place(b, scale, X0, X1)
            Ks, Vs = T.alloc_shared((tile.keys, dim), f.dtype), T.alloc_shared((tile.keys, dim_v), f.dtype)
            Qs, dOs = T.alloc_shared((tile.rows, dim), f.dtype), T.alloc_shared((tile.rows, dim_v), f.dtype)
            Fs = T.alloc_shared((form.facts, tile.rows), "float32")
            dk, dv = T.alloc_fragment((tile.keys, dim), "float32"), T.alloc_fragment((tile.keys, dim_v), "float32")
            steps = steps_of(lambda g: hk * p.group + g, p.group, tile.rows, key_tiles(Mask(), 0, tile.keys, seq_q, tile.rows),
                             across, (Columns, b, k0 // (along or 1)), masked)
            T.copy(p.rows(K, b, hk, k0, tile.keys), Ks)
            T.copy(p.rows(V, b, hk, k0, tile.keys), Vs)
            T.clear(dk)
            T.clear(dv)
            for g in T.serial(steps.loops):
                for n in T.Pipelined(steps.count(g), num_stages=tile.stages):
                    online_step(form, at, (Q, dO, Facts), (Ks, Vs, Qs, dOs, Fs), (dk, dv), steps.tile(g, n), k0,
                                steps.hides(g, n))
            for i, j in T.Parallel(tile.keys, dim):
                dk[i, j] *= at.scale
            T.copy(dk, p.rows(dK, b, hk, k0, tile.keys))
            T.copy(dv, p.rows(dV, b, hk, k0, tile.keys))
        with T.Kernel(padded // f.unit, heads, batch, threads=query.threads) as (bx, h, b):
            row = bx * query.rows
            steps = steps_of(lambda g: h, 1, query.keys, key_tiles(Mask(), 0, query.rows, seq_k, query.keys), along,
                             (Rows, b, row // (across or 1)), masked)
            dq = online_queries(form, place(b, scale, X0, X1), steps, (Q, K, V, dO, Facts), h, row)
            T.copy(dq, p.rows(dQ, b, h, row, query.rows))

    return online_attention_backward
