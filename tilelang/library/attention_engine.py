"""Attention and linear attention from descriptions of their parts: forward and backward follow from one description.

    class Softplus(OnlineFunc):                                   # weights log(1 + exp(score)), not normalised
        def update(self, score, state, reduce):
            return T.log1p(T.exp(score)), state, 1.0

    attention = AttentionEngine(Softplus(), score_mod=lambda s, b, h, i, j: s - 3.0)
    out = attention(q, k, v, block_mask=causal)                   # out.backward() works

The surface is that of AttentionEngine (Chen et al., arXiv 2502.15349): a function of scores, a mask, and a normalisation of
rows that is computed while keys come tile by tile; for linear attention, functions of q, k and v and a decay.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, ClassVar

import tilelang.language as T
from tilelang.errors import error

from .arguments import under_autocast
from .arrays import SEQUENCES
from .attention.flex_attention import BlockMask, ScoreMod, counted_from, flex_attention, in_pieces, state_of
from .attention.inputs import check_scale, with_whole_heads
from .attention.online import Reduce, traced
from .attention.online_attention import entered, online_attention
from .recurrent.elements import ElementMap
from .recurrent.decays import linear_attention

__all__ = ["AttentionEngine", "LinearAttentionEngine", "OnlineFunc", "Relu", "RetentionNorm", "Sigmoid", "Softmax"]
State = dict[str, Any]
_SOFTMAX, _ONLINE, _LINEAR = map(under_autocast, (flex_attention, online_attention, linear_attention))


class OnlineFunc:
    """The weights of a row of attention, computed while keys come tile by tile; subclasses describe them.

    With the weights w_j, update describes the sum over keys of w_j v_j, and finish a factor of it.  state: names of the values
    that a row keeps, with their values in front of the first key.  constant: names of states whose dependence on scores the
    gradient leaves out.  Expressions are float32, made by T and operators; a function without a derivative that is known (see
    flex_attention) is an error of backward alone.
    """

    state: ClassVar[dict[str, float]] = {}
    constant: ClassVar[tuple[str, ...]] = ()

    def update(self, score: Any, state: State, reduce: Reduce) -> tuple[Any, State, Any]:
        """(weight of a key, states behind a tile of keys, factor of all sums before it).

        score: of one key.  state: before the tile.  reduce.max(e), reduce.sum(e): the maximum and the sum of an expression of
        the score over the visible keys of the tile.  Weights do not depend on sums.  The result must not depend on maxima:
        they are references against overflow, and have no derivative.
        """
        raise NotImplementedError

    def finish(self, state: State) -> Any:
        """The factor of the sum of weighted values behind the last key."""
        return 1.0


class Softmax(OnlineFunc):
    """exp(score) over the sum of exp(score); 0 for a row without keys."""

    state: ClassVar[dict[str, float]] = {"top": -1e38, "total": 0.0}

    def update(self, score: Any, state: State, reduce: Reduce) -> tuple[Any, State, Any]:
        top = T.max(state["top"], reduce.max(score))
        factor, weight = T.exp(state["top"] - top), T.exp(score - top)
        return weight, {"top": top, "total": state["total"] * factor + reduce.sum(weight)}, factor

    def finish(self, state: State) -> Any:
        return T.if_then_else(state["total"] == 0.0, 0.0, 1.0 / state["total"])


class Sigmoid(OnlineFunc):
    """sigmoid(score + bias), not normalised."""

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = float(bias)

    def update(self, score: Any, state: State, reduce: Reduce) -> tuple[Any, State, Any]:
        return T.sigmoid(score + self.bias), state, 1.0


class Relu(OnlineFunc):
    """max(score, 0), to a power of 1 or 2, times a factor (as 1 / seq_k), not normalised."""

    def __init__(self, power: int = 1, factor: float = 1.0) -> None:
        if power not in (1, 2):
            raise error("attention-option", f"the power of Relu is {power}", expected="1 or 2", found=str(power),
                        hint="write an OnlineFunc for others")
        self.power, self.factor = power, float(factor)

    def update(self, score: Any, state: State, reduce: Reduce) -> tuple[Any, State, Any]:
        above = T.max(score, 0.0)
        return above * above if self.power == 2 else above, state, 1.0

    def finish(self, state: State) -> Any:
        return self.factor


class RetentionNorm(OnlineFunc):
    """score over max(|sum of scores|, 1), the normalisation of retention (Sun et al., arXiv 2307.08621), whose decays are a
    function of scores.  detached: the gradient takes the sum for a constant."""

    state: ClassVar[dict[str, float]] = {"total": 0.0}

    def __init__(self, detached: bool = False) -> None:
        self.constant = ("total",) * detached  # type: ignore[misc]

    def update(self, score: Any, state: State, reduce: Reduce) -> tuple[Any, State, Any]:
        return score, {"total": state["total"] + reduce.sum(score)}, 1.0

    def finish(self, state: State) -> Any:
        return 1.0 / T.max(T.abs(state["total"]), 1.0)


class AttentionEngine:
    """Attention by a function of scores, a mask, and a normalisation of rows; also q, k and v have gradients.

    online_func: a description, which is read here: later changes of the object have no effect.  score_mod: as flex_attention
    takes it.  Engines may be copied and pickled, as far as their functions may.  A description that says a softmax, in any
    order of operands, is flex_attention.  Of others a call compiles a forward and a backward kernel for the first lengths,
    then one each for all others, whose bits can differ; both run on flex_attention's lists of blocks, and backward without
    atomics, so that a kernel gives the same bits each time.  float16 and bfloat16: exponentials and sigmoids are off by units
    of float32.  Saved for backward: q, k, v, the result and 4 bytes for each state, query and head; of heads with 192 elements
    of q and v and more, gradients of scores besides, as flash_attention_backward says.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 4, 64)).astype(np.float16)
    >>> AttentionEngine(Sigmoid(bias=-4.0))(q, k, v).shape
    (1, 100, 4, 64)
    """

    def __init__(self, online_func: OnlineFunc | None = None, score_mod: ScoreMod | None = None) -> None:
        f = Softmax() if online_func is None else copy(online_func)
        if not isinstance(f, OnlineFunc):
            raise error("attention-option", f"online_func is {f!r}", expected="an object of a subclass of OnlineFunc",
                        found=type(f).__name__, hint="AttentionEngine(Sigmoid()), not AttentionEngine(Sigmoid)")
        trace = traced(f.update, f.finish, f.state, f.constant)
        self._func, self._softmax, self._score = f, trace.softmax, score_mod
        ours = type(f).__module__ == __name__
        self._key = entered(trace, (type(f).__name__, *sorted(vars(f).items())) if ours else state_of(f), score_mod)

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionEngine, (self._func, self._score)  # numbers are of one process

    def __call__(self, q: Any, k: Any, v: Any, *, block_mask: BlockMask | None = None, tensors: tuple[Any, ...] = (),
                 scale: float | None = None, layout: str = "bshd", target: Any = None) -> Any:
        """The result, like q with the last dimension of v.

        q, k, v, layout, scale, target, block_mask, tensors: as flex_attention takes them.  It is one operator for
        torch.compile, which reads functions when it traces.
        Raises attention-argument, attention-shape, attention-option, attention-gradient.
        """
        if self._softmax:
            return _SOFTMAX(q, k, v, score_mod=self._score, block_mask=block_mask, tensors=tensors, scale=scale,
                            layout=layout, target=target)
        factor = None if scale is None else check_scale(scale)
        whole = with_whole_heads(lambda q, k, v, scale: self(q, k, v, block_mask=block_mask, tensors=tensors, scale=scale,
                                                             layout=layout, target=target), q, k, v, factor)
        if whole is not None:
            return whole
        if len(q.shape) == 4 and q.shape[0] > SEQUENCES:
            return in_pieces(lambda q, k, v, first, mask: AttentionEngine(self._func, counted_from(self._score, first))(
                q, k, v, block_mask=mask, tensors=tensors, scale=scale, layout=layout, target=target), q, k, v, block_mask)
        return _ONLINE(self._key, q, k, v, block_mask, tuple(tensors), factor, layout, target)


class LinearAttentionEngine:
    """Linear attention with functions of the elements of q, k and v: linear_attention(q_mod(q), k_mod(k), v_mod(v), …).

    q_mod, k_mod, v_mod: expressions of an element, float32 (float64 of float64): `lambda x: T.max(x, 0.0)`.  Their derivatives
    are made of expressions.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 32)).astype(np.float16)
    >>> LinearAttentionEngine(q_mod=lambda x: T.max(x, 0.0), k_mod=lambda x: T.max(x, 0.0))(q, k, v).shape
    (1, 100, 2, 32)
    """

    def __init__(self, *, q_mod: Callable[[Any], Any] | None = None, k_mod: Callable[[Any], Any] | None = None,
                 v_mod: Callable[[Any], Any] | None = None) -> None:
        self._maps = [ElementMap(f) if f is not None else None for f in (q_mod, k_mod, v_mod)]

    def __call__(self, q: Any, k: Any, v: Any, log_decay: Any = None, *, scale: float = 1.0, target: Any = None) -> Any:
        """The result (batch, seq, heads, dim_v).  Arguments: as linear_attention takes them.  Raises delta-argument,
        attention-gradient."""
        q, k, v = (x if f is None else f(x, target) for f, x in zip(self._maps, (q, k, v)))
        return _LINEAR(q, k, v, log_decay, scale=scale, target=target)
