"""Integer values of all threads during a walk through a block's program (barriers.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Binary, Cast, Const, Expr, Launch, Load, Select, Unary, Var, children, walk
from tilelang.ir.expr import Call
from tilelang.ir.numbers import keeps_value, may_wrap, wrapped

from .answers import Answers
from .locals import Locals
from .shadow import combined
from .uniform import Uniform

# Values assumed for numbers that are unknown but equal in all threads: one walk each where a condition uses one.
SAMPLES = (0, 1, 3, 6)


class Numbers:
    """Values of expressions at the current point of a walk.

    n, threads: the number of threads of a block, and their numbers.  env: values of names, one for all threads or one per
    thread.  trial: which of SAMPLES is used for unknown numbers.  sampled: whether a condition used one.  locals: variables
    that are followed.
    """

    locals: Locals

    def __init__(self, launch: Launch, trial: int, given: dict[Var, int | None]) -> None:
        """At the start only the thread numbers are known; the block is the first one."""
        self.launch, self.trial, self.sampled = launch, trial, False
        x, y, z = self.launch.threads
        self.n = x * y * z
        self.threads = t = np.arange(self.n)
        self.env: dict[Var, Any] = dict(zip(self.launch.thread_vars, (t % x, t // x % y, t // (x * y))))
        self.env.update((v, 0) for v in self.launch.block_vars)
        self.guessing = False
        self.uniform: Uniform | None = None
        self.answers = Answers(launch, given)
        self._constant: dict[int, bool] = {}  # by id of an expression, like all tables below
        self._known: dict[int, tuple[Any]] = {}
        self._variables: dict[int, tuple[tuple[Var, ...] | None]] = {}

    def in_common(self) -> Uniform:
        """Which values all threads have in common; computed at the first use."""
        self.uniform = self.uniform or Uniform(self.launch)
        return self.uniform

    def truth(self, e: Expr) -> Any:
        """Value of a condition; of one that depends on unknown numbers equal in all threads, the value in this trial."""
        c = self.value(e)
        if c is not None:
            return c
        uniform = self.in_common()
        self.guessing = True
        c = self.value(e)
        self.guessing = False
        alike = not uniform.differs(e)
        self.sampled |= alike or c is not None
        return self.trial == 0 if alike and (self.trial < 2 or c is None) else c

    def value(self, e: Expr) -> Any:
        """Value of an integer expression per thread (or one for all), None when unknown."""
        if isinstance(e, Const):
            return e.value if not e.dtype.is_float else None
        if isinstance(e, Var):
            return self.env.get(e)
        if isinstance(e, Load):
            held = self.locals.values.get(e.buffer.data)
            if held is not None:
                return held
            if self.guessing and not e.dtype.is_float and self.uniform and not self.uniform.differs(e):
                return SAMPLES[self.trial]
            return None
        if isinstance(e, Binary):
            if self.same_everywhere(e):
                hit = self._known.get(id(e))
                if hit is None:
                    hit = self._known[id(e)] = (self.binary(e),)
                return hit[0]
            return self.binary(e)
        if isinstance(e, Cast):
            if e.dtype.is_float or e.value.dtype.is_float:
                return None
            v = self.value(e.value)
            return v if v is None or keeps_value(e.value.dtype, e.dtype) else wrapped(v, e.dtype)
        if isinstance(e, Unary):
            v = self.value(e.a)
            if v is None:
                return None
            v = {"neg": np.negative, "not": np.logical_not, "bitnot": np.invert}[e.op](v)
            return wrapped(v, e.dtype) if may_wrap(e.dtype) else v
        if isinstance(e, Select):
            c, x, y = self.value(e.cond), self.value(e.a), self.value(e.b)
            return None if c is None or x is None or y is None else np.where(c, x, y)
        return None

    def binary(self, e: Binary) -> Any:
        a, b = self.value(e.a), self.value(e.b)
        if a is None or b is None:
            return self.answers.compared(e, a, b, self.env) if e.op in ("eq", "ne") else None
        out = combined(e.op, a, b)
        return wrapped(out, e.dtype) if out is not None and may_wrap(e.dtype, e.op) else out

    def same_everywhere(self, e: Expr) -> bool:
        """Whether a value depends on the thread alone, so that it is computed once."""
        hit = self._constant.get(id(e))
        if hit is None:
            if isinstance(e, Var):
                hit = e in self.launch.thread_vars or e in self.launch.block_vars
            else:
                hit = not isinstance(e, (Load, Call)) and all(
                    self.same_everywhere(c) for c in children(e) if isinstance(c, Expr))
            self._constant[id(e)] = hit
        return hit

    def hangs_on(self, e: Expr) -> tuple[Var, ...] | None:
        """The variables that a value depends on besides the thread; None where it depends on memory."""
        hit = self._variables.get(id(e))
        if hit is None:
            free: dict[Var, None] = {}
            for x in walk(e):
                if isinstance(x, (Load, Call)):
                    hit = (None,)
                    break
                if isinstance(x, Var) and not self.same_everywhere(x):
                    free[x] = None
            else:
                hit = (tuple(free),)
            self._variables[id(e)] = hit
        return hit[0]
