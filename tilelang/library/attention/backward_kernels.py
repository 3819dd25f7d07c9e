"""The gradients of attention: P = exp(S - lse) is computed again from Q, K and the logarithms that the forward pass has kept.

With S = scale Q K^T, P = softmax(S), O = P V and delta_i = sum_d O_id dO_id - dlse_i, the gradients are
    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q.

A block has a tile of keys and processes the tiles of queries that see it, of all heads that read its kv head. Its scores are
transposed, keys as rows, so that P^T and dS^T come out of the tensor cores as the next GEMMs take them. dK and dV stay in
registers. Other blocks add to the same rows of dQ: either by atomics into float32 (five GEMMs), or blocks of queries compute
dQ, of dS that blocks of keys have stored (five GEMMs), or with S and dS once more (seven GEMMs), so that every sum has a fixed
order.

A score function changes S to x(S), and its derivative x' is a factor of dS: dS = P * x' * (dO V^T - delta).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.ir import Call, Expr, Var, const, rewrite, substitute, walk
from tilelang.target.rounded_functions import ALLOWED, without_factors

from .derivative import derivative
from .dropout import Dropout, alloc_decisions, draw, stays
from .form import FACTS, LOG2E, BackwardForm
from .kernels import key_tiles, leading, seen
from .packed_kernels import NEAR, heads_together, order_tiles
from .problem import Mask


FEW = 32  # rows whose facts are computed at a time


class Place(NamedTuple):
    """The sequence that a block works on.

    batch: None where sequences are packed. q0, seq_q, k0, seq_k: first query, number of queries, first key, number of keys.
    lead: maps a query head to its row in the workspace; w0: the place of the first query there. scale: the factor of scores.
    read: the tensors that score and mask functions read. number: of the sequence; seed: of dropout, or None. pair: maps a kv
    head to its place in the stored gradients of scores, where the sequence's keys begin at row `stored`.
    """

    batch: Any
    q0: Any
    seq_q: Any
    k0: Any
    seq_k: Any
    lead: Callable[[Any], Any]
    w0: Any
    scale: Any
    read: tuple[Any, ...] = ()
    number: Any = 0
    seed: Any = None
    pair: Callable[[Any], Any] | None = None
    stored: Any = 0

    def gradients(self, X: Any, hk: Any, key: Any, keys: int, column: Any, rows: int) -> Any:
        """A region of the stored gradients of scores of a kv head. column: see `stored_column`."""
        return X[self.pair(hk), self.stored + key:self.stored + key + keys, column:column + rows]

    def facts(self, X: Any, h: Any, row: Any, length: int) -> Any:
        """The region of `length` rows of a query head, from `row` of the sequence on, in the workspace."""
        start = self.w0 + row
        return X[self.lead(h), start:start + length] if len(X.shape) == 2 else X[self.lead(h), start:start + length, :]


class Steps(NamedTuple):
    """The tiles that a block processes, numbered (g, n): g below `loops`, n below count(g).

    tile: maps (g, n) to (query head, the tile's first row in the sequence). partly: maps (g, n) to whether the mask's function
    hides a part of the tile; None without one.
    """

    loops: int
    count: Callable[[Any], Any]
    tile: Callable[[Any, Any], tuple[Any, Any]]
    partly: Callable[[Any, Any], Any] | None = None

    def hides(self, g: Any, n: Any) -> Any:
        """Whether the mask's function hides a part of a tile."""
        return None if self.partly is None else self.partly(g, n)


def changed(f: BackwardForm, at: Place, value: Any, h: Any, query: Any, key: Any, unit: float = 1.0) -> tuple[Any, Any]:
    """(changed score times a unit, its derivative or None where that is 1) of an element of Q K^T."""
    if f.functions.score is None:
        return value * (at.scale * const(unit, f.accum) if unit != 1.0 else at.scale), None
    score = Var("score", value.dtype)
    x = T.cast(f.functions.score(score, at.batch, h, query, key, *[at.read[n] for n in f.functions.uses[0]]), value.dtype)
    slope, place = derivative(x, score), {score: value * at.scale}
    known: dict[int, Any] = {}  # values of functions, which the score and its derivative share

    def once(e: Any) -> Any:
        if id(e) not in known:
            y = substitute(e, place)
            if e.op == "tanh" and f.dtype in ALLOWED:
                u, k = without_factors(y.args[0])  # off by at most TANH_ERROR, as in the forward pass
                y = 1.0 - 2.0 * T.fast_rcp(T.fast_exp2(u * const(2 * k * LOG2E, f.accum)) + 1.0)
            known[id(e)] = T.bind(y)
        return known[id(e)]

    calls = {id(e) for e in walk(x, Call) if e.dtype.is_float}
    x, slope = (rewrite(e, lambda n: once(n) if id(n) in calls else None, Call) for e in (x, slope))
    return substitute(x * const(unit, f.accum) if unit != 1.0 else x, place), (
        None if not isinstance(slope, Expr) and slope == 1.0 else substitute(T.cast(slope, value.dtype), place))


def sees(f: BackwardForm, at: Place, query: Any, key: Any) -> Any:
    """Whether a query of the sequence sees a key of it, by limits of positions. Rows behind the last query have the logarithm
    +inf: they see nothing."""
    return seen(f.plain.mask, key, at.seq_k, query + at.seq_k - at.seq_q)


def shows(f: BackwardForm, at: Place, h: Any, query: Any, key: Any) -> Any:
    """Whether a query sees a key, by the mask's function."""
    return f.functions.mask(at.batch, h, query, key, *[at.read[n] for n in f.functions.uses[1]])


def change(f: BackwardForm, S: Any, E: Any, more: Any, fact: Callable[[int], Any], i: Any, j: Any) -> Any:
    """The gradient of a score. S, more: what `weigh` leaves. E: gradients of weights, dO V^T. fact: of the row, by number."""
    weight, gradient = S[i, j], E[i, j]
    if f.rule is not None:
        return f.rule.change(weight, gradient, None if more is None else more[i, j], fact)
    delta = fact(1)
    if not f.plain.drop:
        return weight * (gradient - delta)
    return T.abs(weight) * (T.if_then_else(weight > 0, gradient * f.rest, 0.0) - delta)


def power(f: BackwardForm, x: Any) -> Any:
    """2^x. In 16 bits, weights below 2^-126 are 0 anyway."""
    return T.fast_exp2(x) if f.dtype in ALLOWED else T.exp2(x)


def hides(f: BackwardForm, at: Place, element: Any, shape: Any) -> Any:
    """Whether positions hide a part of a tile. element: maps its places to (query, key)."""
    (query, key), (last, end) = element(0, 0), element(*(n - 1 for n in shape))
    mask, move = f.plain.mask, at.seq_k - at.seq_q
    ends = [] if mask.right is not None and mask.right <= 0 else [end >= at.seq_k]
    if mask.right is not None:
        ends.append(end > query + move + mask.right)
    if mask.left is not None:
        ends.append(key < last + move - mask.left)
    return functools.reduce(T.Or, ends)


@T.macro
def hide(f, at, tiles, element, h, partly, value=0.0):
    """Elements that positions or the mask's function hide become a value. element: maps (i, j) to (query, key)."""
    if not f.all_seen:
        if hides(f, at, element, tiles[0].shape):
            clear_hidden(tiles, lambda i, j: sees(f, at, *element(i, j)), value)
    if f.functions.mask is not None:
        if partly:
            clear_hidden(tiles, lambda i, j: shows(f, at, h, *element(i, j)), value)


@T.macro
def weigh_rows(f, at, S, P, more, fact, element, h, partly):
    """`weigh` by the form's rule. more: what is added to dS besides; fact: maps (n, i, j) to a fact of the row."""
    if f.rule.vanishes:
        hide(f, at, (S,), element, h, partly, -T.infinity(f.accum))
    for i, j in T.Parallel(*S.shape):
        x, slope = changed(f, at, S[i, j], h, *element(i, j))
        weight, factor, added = f.rule.values(x, lambda n, i=i, j=j: fact(n, i, j), slope)
        if P is not None:
            P[i, j] = weight
        if more is not None:
            more[i, j] = added
        S[i, j] = factor
    if not f.rule.vanishes:
        hide(f, at, tuple(x for x in (S, P, more) if x is not None), element, h, partly)


@T.macro
def weigh(f, at, S, P, logs, element, h, partly, Kept=None):
    """Elements S of Q K^T become the factors of dS, and P, in 16 bits, the weights.

    With dropout, S has the weights, those negative that it drops; P stays. logs: maps (i, j) to the logarithm, in base 2, of
    the row of queries. element: maps (i, j) to (query, key) in the sequence. P: None in blocks of queries, where nobody needs
    the weights. Kept: the decisions of dropout.
    """
    changes = f.functions.score is not None
    for i, j in T.Parallel(*S.shape):
        x, slope = changed(f, at, S[i, j], h, *element(i, j), LOG2E)
        weight = power(f, x - logs(i, j))
        if changes and P is not None:
            P[i, j] = weight
        # Hidden scores may have no derivative.
        S[i, j] = weight if slope is None else T.if_then_else(weight == 0.0, 0.0, weight * slope)
    hide(f, at, (S, P) if changes and P is not None else (S,), element, h, partly)
    if f.plain.drop:
        for i, j in T.Parallel(*S.shape):  # the sign of a weight says whether dropout keeps it
            S[i, j] = T.if_then_else(stays(Kept, i, j, P is not None), S[i, j], -S[i, j])
    elif P is not None and not changes:
        T.copy(S, P)


@T.macro
def clear_hidden(tiles, visible, value):
    """Elements of tiles that are not visible become a value. visible: maps (i, j) to whether one is."""
    for i, j in T.Parallel(*tiles[0].shape):
        stays = visible(i, j)
        cleared = [put(X, (i, j), T.if_then_else(stays, X[i, j], value)) for X in tiles]  # noqa: F841


@T.macro
def put(X, at, value):
    """X[at] = value."""
    X[at] = value


@T.macro
def key_block(f, at, steps, tensors, hk, k0):
    """(dK, dV) of the tile of keys from k0 on, fragments; dK is None where `stored_keys` computes it. tensors: Q, K, V, dO,
    facts of rows (see `gradient_launches`) and dQ; dQ is added to, or dS is stored there, unless blocks of queries compute
    all."""
    Q, K, V, dO, facts, dQ = tensors
    keys, rows, dim, dim_v = f.plain.tile.keys, f.plain.tile.rows, f.sizes.dim, f.sizes.dim_v
    (Ks, Vs), (Qs, dOs) = [[T.alloc_shared((x, n), f.dtype) for n in f.plain.stored] for x in (keys, rows)]
    of_rows = [T.alloc_shared((rows,), f.accum) for _ in range(sum(f.facts))]
    dk = None if f.lean else T.alloc_fragment((keys, dim), f.accum)
    dv = T.alloc_fragment((keys, dim_v), f.accum)
    T.copy(f.plain.rows(K, at.batch, hk, at.k0 + k0, keys, True), Ks)
    T.copy(f.plain.rows(V, at.batch, hk, at.k0 + k0, keys, True), Vs)
    shared = Ks
    if f.held:
        Kf, Vf = T.alloc_fragment((keys, dim), f.dtype), T.alloc_fragment((keys, dim_v), f.dtype)
        T.copy(leading(Ks, dim), Kf)
        T.copy(leading(Vs, dim_v), Vf)
        Ks, Vs = Kf, Vf
    if not f.lean:
        T.clear(dk)
    T.clear(dv)
    Kept = alloc_decisions(rows, keys, True) if f.plain.drop else None
    tiles, results = (Ks, Vs, Qs, dOs, of_rows, Kept, shared), (dk, dv, dQ if not f.stores else lambda h, row, n: at.gradients(
        dQ, hk, k0, keys, stored_column(f, dQ, k0, h - hk * f.plain.group, row, n), rows))
    if steps.loops == 1:
        for n in T.Pipelined(steps.count(0), num_stages=f.plain.tile.stages):
            add_queries(f, at, (Q, dO, facts), tiles, results, (*steps.tile(0, n), n), k0, steps.hides(0, n))
    else:
        for g in T.serial(steps.loops):
            for n in T.Pipelined(steps.count(g), num_stages=f.plain.tile.stages):
                add_queries(f, at, (Q, dO, facts), tiles, results, (*steps.tile(g, n), n), k0, steps.hides(g, n))
    if not f.lean:
        for i, j in T.Parallel(keys, dim):
            dk[i, j] *= at.scale
    if f.plain.drop:
        for i, j in T.Parallel(keys, dim_v):
            dv[i, j] *= f.rest
    return dk, dv


@T.macro
def add_queries(f, at, tensors, tiles, results, tile, k0, partly):
    """A step of key_block: a tile of queries, (head, first row, number of the step), is loaded, and its gradients are added to
    the results."""
    (Q, dO, facts), (Ks, Vs, Qs, dOs, of_rows, Kept, shared), (dk, dv, dQ), (h, row, n) = tensors, tiles, results, tile
    keys, rows, dim, dim_v = f.plain.tile.keys, f.plain.tile.rows, f.sizes.dim, f.sizes.dim_v
    S, E = T.alloc_fragment((keys, rows), f.accum), T.alloc_fragment((keys, rows), f.accum)
    P, dS = T.alloc_fragment((keys, rows), f.dtype), T.alloc_fragment((keys, rows), f.dtype)
    more = T.alloc_fragment((keys, rows), f.accum) if f.rule is not None and f.rule.second else None
    if f.plain.drop:
        draw(Kept, Dropout(at.seed, f.plain.drop, at.number, h), row, k0, True)
    T.copy(f.plain.rows(Q, at.batch, h, at.q0 + row, rows, True), Qs)
    loaded = [T.copy(facts(at, n, h, row, rows), of_rows[n]) for n in range(f.facts[0])]  # noqa: F841
    T.gemm(leading(Ks, dim), leading(Qs, dim), S, transpose_B=True, clear_accum=True)
    if f.rule is None:
        weigh(f, at, S, P, lambda i, j: of_rows[0][j], lambda i, j: (row + j, k0 + i), h, partly, Kept)
    else:
        weigh_rows(f, at, S, P, more, lambda n, i, j: of_rows[n][j], lambda i, j: (row + j, k0 + i), h, partly)
    T.copy(f.plain.rows(dO, at.batch, h, at.q0 + row, rows, True), dOs)
    later = [T.copy(facts(at, n, h, row, rows), of_rows[n]) for n in range(f.facts[0], sum(f.facts))]  # noqa: F841
    T.gemm(leading(Vs, dim_v), leading(dOs, dim_v), E, transpose_B=True, clear_accum=True)
    if f.plain.drop:
        for i, j in T.Parallel(keys, rows):
            P[i, j] = T.max(S[i, j], 0.0)
    T.gemm(P, leading(dOs, dim_v), dv)
    for i, j in T.Parallel(keys, rows):
        dS[i, j] = change(f, S, E, more, lambda n, j=j: of_rows[n][j], i, j)
    if not f.lean:
        T.gemm(dS, leading(Qs, dim), dk)
    if f.stores:
        T.copy(dS, dQ(h, row, n))
    elif f.query is None:
        dSs, dq = T.alloc_shared((keys, rows), f.dtype), T.alloc_fragment((rows, dim), f.accum)
        T.copy(dS, dSs)
        T.gemm(dSs, leading(shared, dim), dq, transpose_A=True, clear_accum=True)
        T.atomic_add(at.facts(dQ, h, row, rows), dq)


@T.macro
def query_block(f, at, steps, tensors, own, h, row):
    """dQ of the tile of queries from `row` on, a fragment. tensors: Q, K, V, dO and facts of rows; the tiles of `steps` are of
    keys. own: O, LSE, dLSE, L and D where the block computes the facts (f.finds), as row_facts takes them."""
    Q, K, V, dO, facts = tensors
    keys, rows, dim, dim_v = f.query.keys, f.query.rows, f.sizes.dim, f.sizes.dim_v
    (Ks, Vs), (Qs, dOs) = [[T.alloc_shared((x, n), f.dtype) for n in f.plain.stored] for x in (keys, rows)]
    of_rows = [T.alloc_fragment((rows,), f.accum) for _ in range(sum(f.facts))]
    S, E = T.alloc_fragment((rows, keys), f.accum), T.alloc_fragment((rows, keys), f.accum)
    dS = T.alloc_fragment((rows, keys), f.dtype)
    more = T.alloc_fragment((rows, keys), f.accum) if f.rule is not None and f.rule.second else None
    dq = T.alloc_fragment((rows, dim), f.accum)
    hk = h // f.plain.group
    T.copy(f.plain.rows(Q, at.batch, h, at.q0 + row, rows, True), Qs)
    T.copy(f.plain.rows(dO, at.batch, h, at.q0 + row, rows, True), dOs)
    if f.rows_held:
        Qf, dOf = T.alloc_fragment((rows, dim), f.dtype), T.alloc_fragment((rows, dim_v), f.dtype)
        T.copy(leading(Qs, dim), Qf)
        T.copy(leading(dOs, dim_v), dOf)
        Qs, dOs = Qf, dOf
    if f.finds:
        own_facts(f, at, dOs, own, of_rows, h, row)
    else:
        loaded = [T.copy(facts(at, n, h, row, rows), x) for n, x in enumerate(of_rows)]  # noqa: F841
    Kept = alloc_decisions(rows, keys) if f.plain.drop else None
    T.clear(dq)
    for n in T.Pipelined(steps.count(0), num_stages=f.query.stages):
        k0 = steps.tile(0, n)[1]
        if f.plain.drop:
            draw(Kept, Dropout(at.seed, f.plain.drop, at.number, h), row, k0)
        T.copy(f.plain.rows(K, at.batch, hk, at.k0 + k0, keys, True), Ks)
        T.gemm(leading(Qs, dim), leading(Ks, dim), S, transpose_B=True, clear_accum=True)
        element = lambda i, j, k0=k0: (row + i, k0 + j)  # noqa: E731
        if f.rule is None:
            weigh(f, at, S, None, lambda i, j: of_rows[0][i], element, h, steps.hides(0, n), Kept)
        else:
            weigh_rows(f, at, S, None, more, lambda n, i, j: of_rows[n][i], element, h, steps.hides(0, n))
        T.copy(f.plain.rows(V, at.batch, hk, at.k0 + k0, keys, True), Vs)
        T.gemm(leading(dOs, dim_v), leading(Vs, dim_v), E, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(rows, keys):
            dS[i, j] = change(f, S, E, more, lambda n, i=i: of_rows[n][i], i, j)
        T.gemm(dS, leading(Ks, dim), dq)
    for i, j in T.Parallel(rows, dim):
        dq[i, j] *= at.scale
    return dq


@T.macro
def stored_block(f, at, steps, tensors, h, row):
    """dQ of the tile of queries from `row` on, a fragment, of stored gradients of scores. tensors: K and these gradients."""
    K, dS = tensors
    keys, rows, dim = f.query.keys, f.query.rows, f.sizes.dim
    Ks, dSs = T.alloc_shared((keys, f.plain.stored[0]), f.dtype), T.alloc_shared((keys, rows), f.dtype)
    dq = T.alloc_fragment((rows, dim), f.accum)
    T.clear(dq)
    for n in T.Pipelined(steps.count(0), num_stages=f.query.stages):
        k0 = steps.tile(0, n)[1]
        T.copy(f.plain.rows(K, at.batch, h // f.plain.group, at.k0 + k0, keys, True), Ks)
        column = stored_column(f, dS, k0 // f.plain.tile.keys * f.plain.tile.keys, h % f.plain.group, row)
        T.copy(at.gradients(dS, h // f.plain.group, k0, keys, column, rows), dSs)
        T.gemm(dSs, leading(Ks, dim), dq, transpose_A=True)
    for i, j in T.Parallel(rows, dim):
        dq[i, j] *= at.scale
    return dq


@T.macro
def stored_keys(f, at, steps, tensors, hk, k0):
    """dK of the tile of keys from k0 on, a fragment, of stored gradients of scores. tensors: Q and these gradients."""
    Q, dS = tensors
    keys, rows, dim = f.plain.tile.keys, f.query.keys, f.sizes.dim
    Qs, dSs = T.alloc_shared((rows, f.plain.stored[0]), f.dtype), T.alloc_shared((keys, rows), f.dtype)
    dk = T.alloc_fragment((keys, dim), f.accum)
    T.clear(dk)
    for n in T.Pipelined(steps.count(0), num_stages=f.query.stages):
        h, row = steps.tile(0, n)
        T.copy(f.plain.rows(Q, at.batch, h, at.q0 + row, rows, True), Qs)
        T.copy(at.gradients(dS, hk, k0, keys, stored_column(f, dS, k0, h - hk * f.plain.group, row), rows), dSs)
        T.gemm(dSs, leading(Qs, dim), dk)
    for i, j in T.Parallel(keys, dim):
        dk[i, j] *= at.scale
    return dk


@T.macro
def row_facts(f, at, tensors, LSE, dLSE, h, row):
    """For f.unit rows from `row` on: delta goes to D, the logarithms in base 2 to L, zeros to Sum. Rows without keys, and those
    behind the last one, get +inf in L, so that their weights are 0. tensors: O, dO, L, D and Sum. LSE, dLSE: map a row of the
    sequence to its values."""
    O, dO, L, D, Sum = tensors
    dim = f.sizes.dim_v
    o, do = T.alloc_fragment((FEW, dim), f.accum), T.alloc_fragment((FEW, dim), f.accum)
    zeros, delta = T.alloc_fragment((FEW, f.sizes.dim), f.accum), T.alloc_fragment((FEW,), f.accum)
    for n in T.serial(f.unit // FEW):
        first = row + n * FEW
        T.copy(f.plain.rows(O, at.batch, h, at.q0 + first, FEW), o)
        T.copy(f.plain.rows(dO, at.batch, h, at.q0 + first, FEW), do)
        for i, j in T.Parallel(FEW, dim):
            o[i, j] *= do[i, j]
        T.reduce_sum(o, delta, dim=1)
        for i in T.Parallel(FEW):
            L[at.lead(h), at.w0 + first + i] = log_of(f, at, LSE, first + i)
            D[at.lead(h), at.w0 + first + i] = T.if_then_else(first + i < at.seq_q, delta[i] - dLSE(first + i), 0.0)
        if f.query is None:
            T.clear(zeros)
            T.copy(zeros, at.facts(Sum, h, first, FEW))


def log_of(f: BackwardForm, at: Place, LSE: Callable[[Any], Any], i: Any) -> Any:
    """The logarithm of a row in base 2; +inf without keys, and behind the last row."""
    lse = T.if_then_else(i < at.seq_q, LSE(i), -T.infinity(f.accum))
    return T.if_then_else(lse != -T.infinity(f.accum), lse * const(LOG2E, f.accum), T.infinity(f.accum))


@T.macro
def own_facts(f, at, dO, own, of_rows, h, row):
    """What row_facts computes, for the rows of a block of queries, also to the fragments of_rows. dO: their tile."""
    O, LSE, dLSE, L, D = own
    rows, dim = dO.shape[0], f.sizes.dim_v
    Os, o = T.alloc_shared((rows, dim), f.dtype), T.alloc_fragment((rows, dim), f.accum)
    T.copy(f.plain.rows(O, at.batch, h, at.q0 + row, rows), Os)
    for i, j in T.Parallel(rows, dim):
        o[i, j] = T.cast(Os[i, j], f.accum) * T.cast(dO[i, j], f.accum)
    T.reduce_sum(o, of_rows[1], dim=1)
    for i in T.Parallel(rows):
        of_rows[0][i] = log_of(f, at, LSE, row + i)
        of_rows[1][i] = T.if_then_else(row + i < at.seq_q, of_rows[1][i] - dLSE(row + i), 0.0)
        L[at.lead(h), at.w0 + row + i] = of_rows[0][i]
        D[at.lead(h), at.w0 + row + i] = of_rows[1][i]


@T.macro
def store_sum(f, at, Sum, dQ, h, row):
    """dQ of a tile of rows, from what atomics have added up."""
    dq = T.alloc_fragment((f.unit, f.sizes.dim), f.accum)
    T.copy(at.facts(Sum, h, row, f.unit), dq)
    for i, j in T.Parallel(f.unit, f.sizes.dim):
        dq[i, j] *= at.scale
    T.copy(dq, f.plain.rows(dQ, at.batch, h, at.q0 + row, f.unit))


def steps_of(head: Callable[[Any], Any], shared: int, length: int, found: tuple[Any, Any], across: int | None = None,
             lists: tuple[Any, Any, Any] = (None, None, None), hides: bool = False) -> Steps:
    """The tiles of a block: of the range `found`, or those that lists of a mask name.

    head: maps a number below `shared` to the query head. length: rows of a tile. across: rows of a block that lists name;
    None: no lists. lists: (blocks of the mask, as BlockMask.blocks; the batch; the block of the other side). hides: whether
    blocks may be hidden in part.
    """
    if across is None:
        first, last = found
        if shared == 1:
            return Steps(1, lambda g: last - first, lambda g, n: (head(0), (first + n) * length))
        each = T.max(1, last - first)
        return Steps(1, lambda g: shared * (last - first), lambda g, n: (head(n // each), (first + n % each) * length))
    assert across % length == 0, "tiles divide the blocks of a mask"
    blocks, b, other = lists
    several, per = blocks.shape[1] > 1 and shared > 1, across // length

    def entry(g: Any, n: Any) -> Any:
        return blocks[b if blocks.shape[0] > 1 else 0, head(g) if blocks.shape[1] > 1 else 0, other, n]

    def place(g: Any, n: Any) -> tuple[Any, Any]:
        """(number of the head, of the tile among those of the head)."""
        if shared == 1 or several:
            return g, n
        each = T.max(1, entry(g, 0) * per)
        return n // each, n % each

    def tile(g: Any, n: Any) -> tuple[Any, Any]:
        k, m = place(g, n)
        return head(k), entry(g, 2 + m // per) * across + m % per * length

    def partly(g: Any, n: Any) -> Any:
        return place(g, n)[1] >= entry(g, 1) * per

    return Steps(shared if several else 1, lambda g: (1 if several else shared) * entry(g, 0) * per, tile,
                 partly if hides else None)


@T.macro
def gradient_launches(f, tensors, facts, arguments, lists, results):
    """The launches of dense_backward after that of the facts of rows. tensors: Q, K, V, dO, Sum. facts: maps (place, number,
    head, row, length) to a region of facts. arguments: scale, first, X0, X1. lists: Rows, Columns. results: dQ, dK, dV."""
    key_launches(f, tensors, facts, arguments, lists[1], results[1:])
    if f.query is None:
        Sum, (scale, _, _, _), seq_q = tensors[4], arguments, f.sizes.seq_q
        with T.Kernel(T.ceildiv(seq_q, f.unit), f.sizes.heads, f.sizes.batch, threads=128) as (bx, h, b):
            store_sum(f, dense_place(f, b, scale, 0), Sum, results[0], h, bx * f.unit)
    else:
        query_launch(f, tensors, facts, arguments, lists[0], results[0])


@T.macro
def key_launches(f, tensors, facts, arguments, Columns, results):
    """The launches that compute dK and dV, with what gradient_launches takes."""
    (Q, K, V, dO, Sum), (scale, first, X0, X1), (dK, dV) = tensors, arguments, results
    seq_q, seq_k, group, functions, tile, query = *f.sizes[1:3], f.plain.group, f.functions, f.plain.tile, f.query
    across, along = (None, None) if functions.block is None else functions.block
    assert along is None or along % tile.keys == 0, "all keys of a block have one list of the mask"
    with T.Kernel(T.ceildiv(seq_k, tile.keys), *f.launched(1), threads=tile.threads) as (bx, y, z):
        b, hk = f.head(first, y, z, 1)
        k0 = bx * tile.keys
        steps = steps_of(lambda g: hk * group + g, group, tile.rows, query_tiles(f, k0, seq_q, seq_k), across,
                         (Columns, b, k0 // (along or 1)), functions.mask is not None)
        dk, dv = key_block(f, dense_place(f, b, scale, first, X0, X1), steps, (Q, K, V, dO, facts, Sum), hk, k0)
        if not f.lean:
            T.copy(dk, f.plain.rows(dK, b, hk, k0, tile.keys))
        T.copy(dv, f.plain.rows(dV, b, hk, k0, tile.keys))
    if f.lean:
        with T.Kernel(T.ceildiv(seq_k, tile.keys), *f.launched(1), threads=tile.threads) as (bx, y, z):
            b, hk = f.head(first, y, z, 1)
            k0 = bx * tile.keys
            steps = steps_of(lambda g: hk * group + g, group, query.keys, query_tiles(f, k0, seq_q, seq_k), across,
                             (Columns, b, k0 // (along or 1)))
            dk = stored_keys(f, dense_place(f, b, scale, first), steps, (Q, Sum), hk, k0)
            T.copy(dk, f.plain.rows(dK, b, hk, k0, tile.keys))


@T.macro
def query_launch(f, tensors, facts, arguments, Rows, dQ, own=None):
    """The launch of blocks of queries, with what gradient_launches takes. own: maps (batch, head) to what query_block takes."""
    (Q, K, V, dO, Sum), (scale, first, X0, X1), query = tensors, arguments, f.query
    seq_q, seq_k, group, functions = *f.sizes[1:3], f.plain.group, f.functions
    across, along = (None, None) if functions.block is None else functions.block
    assert across is None or across % query.rows == 0, "all queries of a block have one list of the mask"
    with T.Kernel(T.ceildiv(seq_q, query.rows), *f.launched(group), threads=query.threads) as (bx, y, z):
        b, h = f.head(first, y, z, group)
        row = bx * query.rows
        found = key_tiles(f.plain.mask, row + seq_k - seq_q, query.rows, seq_k, query.keys)
        steps = steps_of(lambda g: h, 1, query.keys, found, along, (Rows, b, row // (across or 1)), functions.mask is not None)
        at = dense_place(f, b, scale, first, X0, X1)
        dq = (stored_block(f, at, steps, (K, Sum), h, row) if f.stores else
              query_block(f, at, steps, (Q, K, V, dO, facts), None if own is None else own(b, h), h, row))
        T.copy(dq, f.plain.rows(dQ, b, h, row, query.rows))


def dense_place(f: BackwardForm, b: Any, scale: Any, first: Any, *read: Any) -> Place:
    """The place of a block of sequences that are not packed. first: as dense_backward takes it. read: X0 and X1."""
    _, seq_q, seq_k, heads, kv_heads = f.sizes[:5]
    return Place(b, 0, seq_q, 0, seq_k, lambda h: b * heads + h, 0, f.factor(scale), read, b,
                 T.bind(read[0][0]) if f.plain.drop and read else None, lambda hk: b * kv_heads + hk - first)


def query_tiles(f: BackwardForm, k0: Any, seq_q: Any, seq_k: Any) -> tuple[Any, Any]:
    """The tiles of a sequence's queries that see the tile of keys from k0 on; where these are stored, also the others of a
    block of queries."""
    back, tile = Mask(f.plain.mask.right, f.plain.mask.left), f.plain.tile  # of keys, by the queries that see them
    if not f.stores or f.functions.block:
        return key_tiles(back, k0 + seq_q - seq_k, tile.keys, seq_q, tile.rows)
    if back.right is None:  # the last query sees every key
        first = 0 if back.left is None else T.max(0, k0 + seq_q - seq_k - back.left) // f.unit * (f.unit // tile.rows)
        return first, T.ceildiv(seq_q, tile.rows)
    start, end = (x * (f.unit // tile.rows) for x in key_tiles(back, k0 + seq_q - seq_k, tile.keys, seq_q, f.unit))
    return start, T.max(start, T.min(end, T.ceildiv(seq_q, tile.rows)))


def stored_column(f: BackwardForm, X: Any, k0: Any, g: Any, row: Any, number: Any = None) -> Any:
    """Where the stored gradients of a tile of queries begin in the rows of the keys from k0 on. number: of the step that makes
    them, where it is known.

    The queries of all heads of a kv head lie side by side, those that a block of keys sees where sequences are not packed and
    no lists of a mask name them: then each step's tile follows that of the step before.
    """
    if f.plain.group == 1 or f.packed or f.functions.block is not None:
        return g * (X.shape[2] // f.plain.group) + row
    if number is not None:
        return number * f.plain.tile.rows
    first, last = query_tiles(f, k0, *f.sizes[1:3])
    return (g * T.max(1, last - first) - first) * f.plain.tile.rows + row


def dense_backward(f: BackwardForm) -> Any:
    """The kernel with the parameters (Q, K, V, O, dO, LSE, dLSE, scale, first, Rows, Columns, X0, X1, L, D, Sum, dQ, dK, dV).

    L, D (batch * heads, padded) and Sum (f.dq_workspace): workspace; padded: seq_q rounded up to a multiple of f.unit. first:
    with f.stored, the first pair of a batch and a kv head that the call computes. dLSE: one element where the logarithms have
    no gradient. Rows, Columns: the mask's blocks of keys by blocks of queries, and the other way round.
    """
    batch, seq_q, _, heads = f.sizes[:4]
    functions = f.functions
    padded = T.ceildiv(seq_q, f.unit) * f.unit

    @T.prim_func
    def attention_backward(
            Q: f.plain.q, K: f.plain.k, V: f.plain.v, O: f.plain.o, dO: f.gradient,
            LSE: T.Tensor((batch, heads, seq_q), f.accum), dLSE: f.plain.lse, scale: T.float32, first: T.int32,
            Rows: T.Tensor(functions.rows, "int32"), Columns: T.Tensor(functions.columns, "int32"),
            X0: T.Tensor(*functions.tensors[0]), X1: T.Tensor(*functions.tensors[1]),
            L: T.Tensor((batch * heads, padded), f.accum), D: T.Tensor((batch * heads, padded), f.accum),
            Sum: T.Tensor(f.dq_workspace[1], f.dq_workspace[0]),
            dQ: f.result(0), dK: f.result(1), dV: f.result(2)):
        facts = lambda at, n, h, row, length: at.facts((L, D)[n], h, row, length)  # noqa: E731
        given = lambda b, h: (lambda i: LSE[b, h, i], lambda i: T.if_then_else(  # noqa: E731
            i < seq_q, dLSE[b, h, i], 0.0) if f.plain.with_lse else 0.0)
        tensors, arguments = (Q, K, V, dO, Sum), (scale, first, X0, X1)
        if f.finds:
            query_launch(f, tensors, facts, arguments, Rows, dQ, lambda b, h: (O, *given(b, h), L, D))
            key_launches(f, tensors, facts, arguments, Columns, (dK, dV))
        else:
            with T.Kernel(padded // f.unit, *f.launched(f.plain.group), threads=128) as (bx, y, z):
                b, h = f.head(first, y, z, f.plain.group)
                row_facts(f, dense_place(f, b, scale, first), (O, dO, L, D, Sum), *given(b, h), h, bx * f.unit)
            gradient_launches(f, tensors, facts, arguments, (Rows, Columns), (dQ, dK, dV))

    return attention_backward


def _of_sequences(f: BackwardForm) -> tuple[Any, Any, Any]:
    """Functions of packed_backward: the place of a sequence, the head of a slot, and a gradient up to the end of a sequence."""
    tile = f.plain.tile

    def place(facts: list[Any], scale: Any, first: Any, Seed: Any = None) -> Place:
        first_q, seq_q, first_k, seq_k, number = facts
        return Place(None, first_q, seq_q, first_k, seq_k, lambda h: h, (first_q // f.unit + number) * f.unit, f.factor(scale),
                     number=number, seed=T.bind(Seed[0]) if f.plain.drop and Seed is not None else None,
                     pair=lambda hk: hk - first, stored=(first_k // tile.keys + number) * tile.keys)

    def head_of(first: Any, y: Any, each: int) -> Any:
        return first * each + y if f.stores else y

    def own(X: Any, end: Any) -> Any:
        """The tensor up to the end of a sequence."""
        return T.make_tensor(T.address_of(X[0, 0, 0]), (end, *X.shape[1:]), f.dtype)

    return place, head_of, own


def packed_backward(f: BackwardForm, sms: int = 1) -> Any:
    """The kernel for packed sequences, with the parameters (Q, K, V, O, dO, LSE, dLSE, scale, first, cu_q, cu_k, Seed,
    KeyTiles, QueryTiles, L, D, Sum, dQ, dK, dV).

    KeyTiles, QueryTiles: workspaces of order_tiles for tiles of tile.keys keys and of f.unit queries. L, D (heads, padded) and
    Sum (heads, padded, dim), as in dense_backward; padded: f.unit times the slots of one head in QueryTiles. first: with
    f.stored, the first kv head that the call computes. sms: blocks that run at the same time.
    """
    batch, tokens_q, tokens_k, heads, kv_heads, dim, dim_v = f.sizes
    group, tile, query = f.plain.group, f.plain.tile, f.query
    called = f.stored if f.stores else kv_heads  # kv heads of a call
    back = Mask(f.plain.mask.right, f.plain.mask.left)  # of keys, by the queries that see them
    near = max(1, NEAR // (2 * (dim + dim_v)))
    key_slots, query_slots = T.dynamic("key_slots, query_slots")
    padded = (tokens_q // f.unit + batch) * f.unit
    turned = replace(f.plain, mask=back, tile=replace(tile, rows=tile.keys, keys=tile.rows),
                     sizes=f.sizes._replace(heads=kv_heads, seq_q=tokens_k, seq_k=tokens_q))
    straight = replace(f.plain, tile=query or replace(tile, rows=f.unit))

    place, head_of, own = _of_sequences(f)

    @T.prim_func
    def attention_backward_packed(
            Q: f.plain.q, K: f.plain.k, V: f.plain.v, O: f.plain.o, dO: f.gradient, LSE: T.Tensor((heads, tokens_q), f.accum),
            dLSE: f.plain.lse, scale: T.float32, first: T.int32, cu_q: T.Tensor((batch + 1,), "int32"),
            cu_k: T.Tensor((batch + 1,), "int32"), Seed: T.Tensor((1,), "int64"),
            KeyTiles: T.Tensor((key_slots, FACTS), "int32"), QueryTiles: T.Tensor((query_slots, FACTS), "int32"),
            L: T.Tensor((heads, padded), f.accum), D: T.Tensor((heads, padded), f.accum),
            Sum: T.Tensor(f.dq_workspace[1] if f.stores else (heads, padded, dim) if query is None else (1, 1, 1),
                          f.dq_workspace[0]), dQ: f.result(0), dK: f.result(1), dV: f.result(2)):
        with T.Kernel(query_slots // (called * group), threads=128) as slot:
            wide = heads_together(called, group, near // T.max(1, tokens_k), query_slots // (called * group), sms)
            order_tiles(straight, QueryTiles, (cu_q, cu_k), slot, wide, near, sms, True, called * group)
        with T.Kernel(key_slots // called, threads=128) as slot:
            wide = heads_together(called, 1, near // T.max(1, tokens_q * group), key_slots // called, sms)
            order_tiles(turned, KeyTiles, (cu_k, cu_q), slot, wide, near // group, sms, True, called)
        with T.Kernel(query_slots, threads=128) as n:
            y, row, q0, seq_q, k0, seq_k, number = [QueryTiles[n, e] for e in range(7)]
            h = head_of(first, y, group)
            if seq_q > 0:
                row_facts(f, place([q0, seq_q, k0, seq_k, number], scale, first), (O, dO, L, D, Sum), lambda i: LSE[h, q0 + i],
                          lambda i: T.if_then_else(i < seq_q, dLSE[h, q0 + i], 0.0) if f.plain.with_lse else 0.0, h, row)
        with T.Kernel(key_slots, threads=tile.threads) as n:
            y, start, k0, seq_k, q0, length, number = [KeyTiles[n, e] for e in range(7)]
            hk, start = head_of(first, y, 1), start // tile.keys * tile.keys  # a multiple of them, as TMA asks for
            seq_q = T.if_then_else(seq_k > 0, length, 0)
            facts = lambda at, n, h, row, length: at.facts((L, D)[n], h, row, length)  # noqa: E731
            steps = steps_of(lambda g: hk * group + g, group, tile.rows, query_tiles(f, start, seq_q, seq_k))
            dk, dv = key_block(f, place([q0, seq_q, k0, seq_k, number], scale, first, Seed), steps, (Q, K, V, dO, facts, Sum),
                               hk, start)
            OwnK, OwnV = own(dK, k0 + seq_k), own(dV, k0 + seq_k)
            if seq_k > 0:
                T.copy(dk, f.plain.rows(OwnK, None, hk, k0 + start, tile.keys))
                T.copy(dv, f.plain.rows(OwnV, None, hk, k0 + start, tile.keys))
        with T.Kernel(query_slots, threads=128 if query is None else query.threads) as n:
            y, row, q0, seq_q, k0, length, number = [QueryTiles[n, e] for e in range(7)]
            h, row = head_of(first, y, group), row // f.unit * f.unit
            seq_k = T.if_then_else(seq_q > 0, length, 0)
            at, OwnQ = place([q0, seq_q, k0, seq_k, number], scale, first, Seed), own(dQ, q0 + seq_q)
            if query is None:
                if seq_q > 0:
                    store_sum(f, at, Sum, OwnQ, h, row)
            else:
                facts = lambda at, n, h, row, length: at.facts((L, D)[n], h, row, length)  # noqa: E731
                steps = steps_of(lambda g: h, 1, query.keys,
                                 key_tiles(f.plain.mask, row + seq_k - seq_q, query.rows, seq_k, query.keys))
                dq = (stored_block(f, at, steps, (K, Sum), h, row) if f.stores else
                      query_block(f, at, steps, (Q, K, V, dO, facts), None, h, row))
                if seq_q > 0:
                    T.copy(dq, f.plain.rows(OwnQ, None, h, q0 + row, query.rows))
        with T.Kernel(T.ceildiv(T.max(tokens_q, tokens_k), _OUTSIDE), threads=128) as n:
            if first == 0:
                clear_outside((dQ,), cu_q, batch, n * _OUTSIDE)
                clear_outside((dK, dV), cu_k, batch, n * _OUTSIDE)

    return attention_backward_packed


_OUTSIDE = 64  # tokens of a block that writes zeros for those of no sequence


@T.macro
def clear_outside(tensors, starts, batch, token):
    """Gradients of tokens of no sequence, those in front of the first and behind the last, are 0. token: of the block's first.
    """
    begin, end = starts[0], starts[batch]
    if T.Or(token < begin, token + _OUTSIDE > end):
        for h in T.serial(tensors[0].shape[1]):
            cleared = [clear_rows(X, h, token, begin, end) for X in tensors]  # noqa: F841


@T.macro
def clear_rows(X, h, token, begin, end):
    """Rows of a head, from `token` on, that are not from begin up to end become 0."""
    for i, j in T.Parallel(_OUTSIDE, X.shape[2]):
        if T.And(token + i < X.shape[0], T.Or(token + i < begin, token + i >= end)):
            X[token + i, h, j] = T.cast(0, X.dtype)
