"""Calls of attention with a normalisation of its own: checks, kernels, and the operators of torch.

Kernels of attention with a normalisation of its own (online.py): forward, and gradients by blocks of keys and of queries.

A score of -inf, and a key that a row does not see, have the weight 0 and count in no reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import tilelang.language as T

from tilelang.ir import Const, Expr, substitute

from ..arrays import compact, compact_copy, contiguous, empty, is_numpy, maker, type_name, zeros
from ..autograd import Function, Numbered, Results, Step
from ..caches import Cache, Prepared, enter, known
from ..place import target_text
from .backward import OWN_QUERIES, any_lengths, backward_tiles, fitted, symbolic_backward
from .backward_kernels import FEW, Place, changed, dense_place, gradient_launches, hide, put, steps_of
from .flex_attention import (MOST_TENSORS, BlockMask, check_state, flex_problem, flex_tile, functions_of, state_of,
                             without_arrays)
from .form import AttentionForm, BackwardForm, ScoreFunctions
from .inputs import check_gradient, strides_of
from .kernels import key_tiles
from .online import NEUTRAL, Lagging, Rule, Traced, quick
from .problem import Mask, opened
from .tile_cost import machine_of

_DESCRIPTIONS = Numbered()  # (description, score_mod)
_CALLS = Numbered()  # (number of the description, mask without arrays, uses)
_RUNS: Cache[Prepared] = Cache(1024)


def entered(trace: Traced, state: Any, score_mod: Any) -> str:
    """The key of a description: its number, as a text, which torch.compile compares.  state: tells it, hashable."""
    return str(_DESCRIPTIONS.number((state, repr(trace), state_of(score_mod)), (trace, score_mod)))


def _number(key: str, uses: Any, mask: str) -> int:
    """The number of a call's functions. torch.compile executes it while it traces, without looking into it."""
    description = int(key)
    state = state_of(_DESCRIPTIONS[description][1])
    return _CALLS.number((description, state, uses, mask), (description, without_arrays(mask), uses))


_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without torch


def online_attention(key: str, q: Any, k: Any, v: Any, block_mask: BlockMask | None, tensors: tuple[Any, ...],
                     scale: float | None, layout: str, target: Any) -> Any:
    """The result of a call of AttentionEngine."""
    read, shown = tuple(tensors), () if block_mask is None else block_mask.tensors
    read += tuple(x for x in shown if not any(x is y for y in read))
    uses = tuple(range(len(tensors))), tuple(next(n for n, y in enumerate(read) if y is x) for x in shown)
    check_gradient("AttentionEngine for the tensors of a function", *(read or (q if is_numpy(q) else q.detach(),)))
    lists, mask = (None, None), ""
    if block_mask is not None:
        lists, mask = (block_mask.blocks, block_mask.columns), block_mask.key
    return _FUNCTION(q, k, v, *read, *[None] * (MOST_TENSORS - len(read)), *lists, _number(key + "", uses, mask + ""), scale,
                     layout, target_text(target))


def _called(arrays: tuple[Any, ...], number: int) -> tuple[Traced, BlockMask | None, tuple[Any, ...], ScoreFunctions, int]:
    """(description, mask, tensors that are read, functions, number of the description) of a call's arrays from `first` on."""
    first, second, rows, columns = arrays
    read = tuple(x for x in (first, second) if x is not None)
    description, mask, uses = _CALLS[number]
    trace, score_mod = _DESCRIPTIONS[description]
    if mask is not None:
        check_state(mask)
        mask = replace(mask, blocks=rows, columns=columns, tensors=tuple(read[n] for n in uses[1]))
    functions = functions_of(score_mod, mask, None if rows is None else (rows, columns), read, uses)
    return trace, mask, read, functions, description


def _beside(q: Any, arrays: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """(lists of the mask, tensors of functions) that kernels get, with unused ones."""
    first, second, rows, columns = arrays
    return ([empty(q, (1, 1, 1, 1), "int32") if x is None else x for x in (rows, columns)],
            [empty(q, (1,), "float32") if x is None else contiguous(x) for x in (first, second)])


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> None:
    *arrays, number, scale, layout, target, out, states = rest
    given = (q, k, v, *arrays)
    answer = known(_RUNS, given, ("forward", number, scale, layout, target))
    if answer is None:
        trace, mask, read, functions, description = _called(tuple(arrays), number)
        at, p = flex_problem((q, k, v), read, mask, target, scale=scale, layout=layout, with_lse=False)
        p = opened(p, at, "online", description, *functions.family)
        tile = flex_tile(machine_of(at.target, at.sms, p.dtype).kind, p, functions.block)
        plain = AttentionForm(p.sizes, p.strides, p.layout, p.dtype, Mask(), tile, False, p.scale)
        both = BackwardForm(plain, p.strides[3], functions=functions)
        form = OnlineForm(any_lengths(both, p) if p.opened else both, description, trace)
        kernel = None if p.empty else at.kernel(_program, online_forward, form)

        def run(q: Any, k: Any, v: Any, rows: Any, read: list[Any], out: Any, states: Any) -> None:
            if kernel is None:
                out[...] = 0
                for n, value in enumerate(trace.first):
                    states[n] = value
            else:
                kernel(*(compact_copy(x) if c else x for x, c in zip((q, k, v), p.copied)), p.scale, rows, *read, out, states)

        answer = enter(_RUNS, given, ("forward", number, scale, layout, target), Prepared(run))
    lists, read = _beside(q, tuple(arrays))
    answer.run(q, k, v, lists[0], read, out, states)


def _backward(q: Any, k: Any, v: Any, out: Any, states: Any, *rest: Any) -> None:
    *arrays, number, scale, layout, target, grad, dq, dk, dv = rest
    grad = zeros(out, tuple(out.shape), type_name(out)) if grad is None else grad
    given = (q, k, v, out, grad, *arrays)
    answer = known(_RUNS, given, ("backward", number, scale, layout, target))
    if answer is None:
        trace, mask, read, functions, description = _called(tuple(arrays), number)
        at, p = flex_problem((q, k, v), read, mask, target, scale=scale, layout=layout, with_lse=False)
        steps = [strides_of(x, at.target.is_gpu and not is_numpy(q)) for x in (out, grad)]
        machine = machine_of(at.target, at.sms, p.dtype)
        keys, queries = backward_tiles(machine, p, True, functions.block)
        strides = (*p.strides[:3], steps[0] or compact(p.shapes[3]))
        plain = AttentionForm(p.sizes, strides, p.layout, p.dtype, Mask(), keys, False, p.scale)
        both = BackwardForm(plain, steps[1] or compact(p.shapes[3]), queries, functions, rule=Rule(
            trace, p.dtype, functions.score is not None), number=description)
        p = opened(p, at, "online backward", description, *functions.family, most=OWN_QUERIES)
        both = fitted(both, machine, at, p.opened)
        form = OnlineForm(any_lengths(both, p) if p.opened else both, description, trace)
        kernel = None if p.empty else at.kernel(_program, online_backward, form)
        copied, rows = [*p.copied, *(s is None for s in steps)], -(-p.sizes.seq_q // both.unit) * both.unit
        facts = maker(q, (max(1, sum(both.facts)), p.sizes.batch * p.sizes.heads, rows), "float32")
        stored = maker(q, both.dq_workspace[1], p.dtype if both.stored else "float32")
        pairs = p.sizes.batch * p.sizes.kv_heads

        def run(tensors: tuple[Any, ...], states: Any, lists: list[Any], read: list[Any], results: tuple[Any, ...]) -> None:
            if kernel is None:
                for x in results:
                    x[...] = 0
            else:
                read_ = [compact_copy(x) if c else x for x, c in zip(tensors, copied)]
                made = facts(), stored()
                for first in range(0, pairs, both.stored or pairs):
                    kernel(*read_, states, p.scale, first, *lists, *read, *made, *results)

        answer = enter(_RUNS, given, ("backward", number, scale, layout, target), Prepared(run))
    answer.run((q, k, v, out, grad), states, *_beside(q, tuple(arrays)), (dq, dk, dv))


def _program(make: Any, form: OnlineForm) -> Any:
    """The program of a form, whose sizes that are None are given by each call."""
    return make(replace(form, both=symbolic_backward(form.both)))


def _results(q: Any, k: Any, v: Any, *rest: Any) -> Results:
    number, _, layout, _ = rest[-4:]
    shape = (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else tuple(q.shape[:3])
    count = max(1, len(_DESCRIPTIONS[_CALLS[number][0]][0].names))
    return [((*q.shape[:-1], v.shape[-1]), type_name(q)), ((count, *shape), "float32")]


_OPTIONS = "Tensor? first, Tensor? second, Tensor? rows, Tensor? columns, int call, float? scale, str layout, str? target"
_FUNCTION = Function(
    "attention_engine", Step(f"Tensor q, Tensor k, Tensor v, {_OPTIONS}", _results, _forward, 2),
    Step(f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor states, {_OPTIONS}, Tensor? grad",
         lambda *args: [(tuple(x.shape), type_name(x)) for x in args[:3]], _backward, 3),
    lambda needs, args, made: (*args[:3], *made, *args[3:]), (0, 1, 2))


# ---- kernels ----------------------------------------------------------------------------------------------------------

LAG = 4.0  # a maximum follows the scores when it is this far behind: float16 holds exp10(4)


@dataclass(frozen=True)
class OnlineForm:
    """both: sizes, strides, tiles and functions; its plain.tile is the tile of a block of queries in the forward kernel.
    number: of the description, by which forms are compared."""

    both: BackwardForm
    number: int
    trace: Traced = field(compare=False)

    sizes = property(lambda self: self.both.sizes)

    @property
    def states(self) -> Any:
        """The parameter States: (states, batch, heads, seq_q); of one at least."""
        return T.Tensor((max(1, len(self.trace.names)), self.sizes.batch, self.sizes.heads, self.sizes.seq_q), "float32")


def values_of(f: BackwardForm, at: Place, t: Lagging, S: Any, rows: tuple[Any, ...]) -> Callable[..., dict[Any, Any]]:
    """Maps (i, j), or (i,), to the values of a description's variables: of row i, and of the score of S[i, j], which a
    function has changed already."""
    def found(i: Any, j: Any = None) -> dict[Any, Any]:
        values = {v: x[i] for v, x in zip((*t.states, *t.reached, *(r.result for r in t.reductions)), rows)}
        return values if j is None else {**values, t.score: S[i, j] if f.functions.score is not None else S[i, j] * at.scale}

    return found


@T.macro
def set_rows(rows, value):
    """rows[i] = value(i)."""
    for i in T.Parallel(*rows.shape):
        rows[i] = value(i)


@T.macro
def follow(before, after, result):
    """A maximum moves on where it is LAG behind that of a tile."""
    for i in T.Parallel(*before.shape):
        after[i] = T.if_then_else(result[i] - before[i] > LAG, T.max(before[i], result[i]), before[i])


@T.macro
def reduce_keys(reduction, W, result):
    """A reduction over the keys of a tile of operands."""
    if reduction.kind == "max":
        T.reduce_max(W, result, dim=1)
    else:
        T.reduce_sum(W, result, dim=1)


@T.macro
def reduce_scores(f, at, t, reduction, tiles, h, element, partly, found, result):
    """A reduction of scores, S, or of an expression of them, which are needed afterwards; W has its operands."""
    S, W = tiles
    if reduction.of is t.score and reduction.kind == "max":
        hide(f, at, (S,), element, h, partly, NEUTRAL["max"])
        T.reduce_max(S, result, dim=1)
        if f.functions.score is None:
            set_rows(result, lambda i: result[i] * at.scale)
    else:
        for i, j in T.Parallel(*S.shape):
            W[i, j] = guarded(f, S, i, j, quick(substitute(reduction.of, found(i, j)), f.dtype), NEUTRAL[reduction.kind])
        hide(f, at, (W,), element, h, partly, NEUTRAL[reduction.kind])
        reduce_keys(reduction, W, result)


def guarded(f: BackwardForm, S: Any, i: Any, j: Any, e: Any, neutral: float) -> Any:
    """An expression of a score; the neutral value where a function has made it -inf."""
    return e if f.functions.score is None else T.if_then_else(S[i, j] == -T.infinity(S.dtype), neutral, e)


@T.macro
def absorb_online(f, at, t, S, W, P, acc, rows, h, element, partly):
    """Add a tile of Q K^T: the weights go to P, the states of the rows move on, and `acc` is rescaled.

    t: Lagging. W: a fragment like S, or None where no reduction needs one. rows: (states before, states after the tile,
    results of the reductions, factors).
    """
    now, new, results, factor = rows

    found = values_of(f, at, t, S, (*now, *new, *results))
    if f.functions.score is not None:
        for i, j in T.Parallel(*S.shape):
            S[i, j] = changed(f, at, S[i, j], h, *element(i, j))[0]
    first, last = t.in_order()
    _ = [reduce_scores(f, at, t, t.reductions[n], (S, W), h, element, partly, found, results[n]) for n in first]
    _ = [follow(now[n], new[n], results[r]) for n, r in t.lags.items()]
    for i, j in T.Parallel(*S.shape):
        S[i, j] = guarded(f, S, i, j, quick(substitute(t.weight, found(i, j)), f.dtype), 0.0)
    hide(f, at, (S,), element, h, partly)
    _ = [reduce_keys(t.reductions[n], S, results[n]) for n in last]
    if isinstance(t.rescale, Expr):
        set_rows(factor, lambda i: quick(substitute(t.rescale, found(i)), f.dtype))
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] *= factor[i]
    T.copy(S, P)
    rest = [n for n in range(len(new)) if n not in t.lags]
    _ = [set_rows(new[n], lambda i, e=t.next[n]: quick(substitute(e, found(i)), f.dtype)) for n in rest]
    _ = [T.copy(x, y) for x, y in zip(new, now)]


def online_forward(form: OnlineForm) -> Any:
    """The kernel (Q, K, V, scale, Blocks, X0, X1, O, States). Blocks: as BlockMask.blocks."""
    f, p = form.both, form.both.plain
    t = Lagging(form.trace)
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
            S = T.alloc_fragment((rows, keys), "float32")
            W = T.alloc_fragment((rows, keys), "float32") if t.scratch else None
            acc = T.alloc_fragment((rows, f.sizes.dim_v), "float32")
            now, new = ([T.alloc_fragment((rows,), "float32") for _ in t.states] for _ in (0, 1))
            results = [T.alloc_fragment((rows,), "float32") for _ in t.reductions]
            factor = T.alloc_fragment((rows,), "float32")
            row = bx * rows
            at = Place(b, 0, seq_q, 0, seq_k, None, 0, f.factor(scale), (X0, X1))
            steps = steps_of(lambda g: h, 1, keys, key_tiles(Mask(), 0, rows, seq_k, keys), along,
                             (Blocks, b, row // (across or 1)), f.functions.mask is not None)
            T.copy(p.rows(Q, b, h, row, rows), Qs)
            T.clear(acc)
            begun = [T.fill(x, v) for x, v in zip(now, form.trace.first)]  # noqa: F841
            for n in T.Pipelined(steps.count(0), num_stages=p.tile.stages):
                k0 = steps.tile(0, n)[1]
                T.copy(p.rows(K, b, h // p.group, k0, keys), Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.copy(p.rows(V, b, h // p.group, k0, keys), Vs)
                absorb_online(f, at, t, S, W, P, acc, (now, new, results, factor), h,
                              lambda i, j, k0=k0: (row + i, k0 + j), steps.hides(0, n))
                T.gemm(P, Vs, acc)
            if not isinstance(t.factor, Const) or t.factor.value != 1.0:
                for i, j in T.Parallel(*acc.shape):
                    acc[i, j] *= substitute(t.factor, {v: x[i] for v, x in zip(t.states, now)})
            T.copy(acc, p.rows(O, b, h, row, rows))
            stored = [T.copy(x, States[n, b, h, row:row + rows]) for n, x in enumerate(now)]  # noqa: F841

    return online_attention


@T.macro
def online_facts(f, at, tensors, States, h, row):
    """Facts of f.unit rows from `row` on, which are 0 behind the last row. tensors: O, dO, Facts."""
    O, dO, Facts = tensors
    t, rule = f.rule.trace, f.rule
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
            place = {s: T.if_then_else(inside, States[n, at.batch, h, T.min(first + i, at.seq_q - 1)], 0.0)
                     for n, s in enumerate(t.states)}
            place[rule.delta] = delta[i]
            stored = [put(Facts, (n, at.lead(h), first + i), T.if_then_else(inside, substitute(e, place), 0.0))  # noqa: F841
                      for n, e in enumerate(rule.facts)]


def online_backward(form: OnlineForm) -> Any:
    """The kernel (Q, K, V, O, dO, States, scale, first, Rows, Columns, X0, X1, Facts, Sum, dQ, dK, dV). Facts (facts,
    batch * heads, padded): workspace. All else as in dense_backward."""
    f, p = form.both, form.both.plain
    batch, seq_q, _, heads = f.sizes[:4]
    padded = T.ceildiv(seq_q, f.unit) * f.unit

    @T.prim_func
    def online_attention_backward(
            Q: p.q, K: p.k, V: p.v, O: p.o, dO: f.gradient, States: form.states, scale: T.float32, first: T.int32,
            Rows: T.Tensor(f.functions.rows, "int32"), Columns: T.Tensor(f.functions.columns, "int32"),
            X0: T.Tensor(*f.functions.tensors[0]), X1: T.Tensor(*f.functions.tensors[1]),
            Facts: T.Tensor((max(1, len(f.rule.facts)), batch * heads, padded), "float32"),
            Sum: T.Tensor(f.dq_workspace[1], f.dq_workspace[0]), dQ: f.result(0), dK: f.result(1), dV: f.result(2)):
        if len(f.rule.facts) > 0:
            with T.Kernel(padded // f.unit, *f.launched(p.group), threads=128) as (bx, y, z):
                b, h = f.head(first, y, z, p.group)
                online_facts(f, dense_place(f, b, scale, first), (O, dO, Facts), States, h, bx * f.unit)
        gradient_launches(f, (Q, K, V, dO, Sum), lambda at, n, h, row, length: Facts[n, at.lead(h), row:row + length],
                          (scale, first, X0, X1), (Rows, Columns), (dQ, dK, dV))

    return online_attention_backward
