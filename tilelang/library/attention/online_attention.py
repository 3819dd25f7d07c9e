"""Calls of attention with a normalisation of its own: checks, kernels, and the operators of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..arrays import compact, compact_copy, empty, is_numpy, maker, type_name, zeros
from ..autograd import Function, Results, Step
from ..caches import Cache, Prepared, enter, known
from ..place import target_text
from .backward import OWN_QUERIES, any_lengths, backward_tiles, fitted, symbolic_backward
from .flex_attention import MOST_TENSORS, BlockMask, check_state, flex_problem, flex_tile, functions_of, state_of
from .form import AttentionForm, BackwardForm, ScoreFunctions
from .inputs import check_gradient, strides_of
from .online import Rule, Traced
from .online_kernels import OnlineForm, online_backward, online_forward
from .problem import Mask, opened
from .tile_cost import machine_of

_DESCRIPTIONS: list[tuple[Traced, Any]] = []  # (description, score_mod)
_CALLS: list[tuple[int, BlockMask | None, Any]] = []  # (description, mask without arrays, uses): operators take their numbers
_NUMBERS: dict[Any, int] = {}
_RUNS: Cache[Prepared] = Cache(1024)


def entered(trace: Traced, score_mod: Any) -> int:
    """The number of a description."""
    _DESCRIPTIONS.append((trace, score_mod))
    return len(_DESCRIPTIONS) - 1


def _number(description: int, uses: Any, mask_mod: Any, sizes: Any, block: Any) -> int:
    """The number of a call's functions. torch.compile executes it while it traces, without looking into it."""
    key = description, state_of(_DESCRIPTIONS[description][1]), uses, state_of(mask_mod), sizes, block
    if key not in _NUMBERS:
        _NUMBERS[key] = len(_CALLS)
        _CALLS.append((description, mask_mod and BlockMask(mask_mod, sizes, block, None, state=state_of(mask_mod)), uses))
    return _NUMBERS[key]


_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without torch


def online_attention(description: int, q: Any, k: Any, v: Any, block_mask: BlockMask | None, tensors: tuple[Any, ...],
                     scale: float | None, layout: str, target: Any) -> Any:
    """The result of a call of AttentionEngine."""
    read, shown = tuple(tensors), () if block_mask is None else block_mask.tensors
    read += tuple(x for x in shown if not any(x is y for y in read))
    uses = tuple(range(len(tensors))), tuple(next(n for n, y in enumerate(read) if y is x) for x in shown)
    check_gradient("AttentionEngine for the tensors of a function", *(read or (q if is_numpy(q) else q.detach(),)))
    lists, mask = (None, None), (None, None, None)
    if block_mask is not None:
        lists, mask = (block_mask.blocks, block_mask.columns), (block_mask.mask_mod, block_mask.sizes, block_mask.block)
    return _FUNCTION(q, k, v, *read, *[None] * (MOST_TENSORS - len(read)), *lists, _number(description, uses, *mask), scale,
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
            [empty(q, (1,), "float32") if x is None else x for x in (first, second)])


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
