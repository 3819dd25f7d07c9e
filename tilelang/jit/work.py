"""Counts the FLOPs and bytes of a tile program from its tile operations, before any schedule is applied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np

from tilelang.errors import TileLangError
from tilelang.ir import (Bind, Buffer, Const, Expr, For, Func, If, Launch, Load, Parallel, Seq, Stmt, Store, Var, While,
                         free_vars, walk, GLOBAL)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.record import state
from tilelang.ops import Copy, Gemm
from tilelang.transform.analysis.pipeline_loops import is_pipelined

_MOST_POINTS = 1 << 16  # block indices over which lengths of loops are averaged


@state
class Work:
    """The work of one launch.  A figure is None where it depends on values that are known only at a call.

    flops: of GEMMs, by operand bits (2 m n k each; tiles that a condition skips are counted).  loaded, stored:
    bytes that tile copies move between global memory and blocks.  touched: bytes of the tensors, each counted once.  first,
    last: bytes loaded by copies, and stored by copies and elements, outside of the loops that are or may be pipelined.
    blocks: of the grid.
    """

    flops: dict[int, float] = field(default_factory=dict)
    loaded: float = 0.0
    stored: float = 0.0
    touched: float | None = 0.0
    first: float = 0.0
    last: float = 0.0
    known: bool = True
    blocks: int = 0


def work_of(func: Func) -> list[Work]:
    """The work of every launch of a tile program, in program order."""
    return [_Counter(x).work for x in _launches(func.body)]


def _launches(s: Stmt) -> Iterator[Launch]:
    for x in walk(s):
        if isinstance(x, Launch):
            yield x


class _Counter:
    def __init__(self, launch: Launch) -> None:
        self.work, self.within = Work(), False
        grid = [self._number(g, {}) for g in launch.grid]
        if any(g is None for g in grid):
            self.work = Work(known=False, touched=None)
            return
        sizes = [int(g) for g in grid if g is not None]
        blocks = int(np.prod(sizes)) if sizes else 1
        env: dict[Var, Any] = {}
        if 0 < blocks <= _MOST_POINTS:
            index = np.arange(blocks)
            for v, n in zip(launch.block_vars, sizes):
                env[v] = index % n
                index = index // n
        else:  # too many to evaluate one by one: the middle one represents all
            env = {v: np.array([n // 2]) for v, n in zip(launch.block_vars, sizes)}
        self.blocks = self.work.blocks = blocks
        self._stmt(launch.body, np.ones(1), env)
        self._tensors(launch)

    def _number(self, e: Any, env: dict[Var, Any]) -> Any:
        if isinstance(e, int):
            return e
        if isinstance(e, Const):
            return int(e.value)
        if free_vars(e) - set(env) or any(isinstance(x, Load) for x in walk(e)):
            return None
        try:
            return np.asarray(evaluate(e, env))
        except TileLangError:
            return None

    def _stmt(self, s: Stmt, times: Any, env: dict[Var, Any]) -> None:
        """Count a statement.  times: how often the blocks run s, an array over blocks or of one element."""
        match s:
            case Seq():
                for x in s.stmts:
                    self._stmt(x, times, env)
            case Bind():
                value = self._number(s.value, env) if s.value.dtype.is_int and s.value.dtype.lanes == 1 else None
                if value is not None:
                    env[s.var] = value
            case For():
                extent = self._number(s.extent, env)
                if extent is None:
                    self.work.known = self.work.known and not self._counts(s.body)
                    return
                start = self._number(s.start, env)
                inside = dict(env)
                if start is not None:
                    inside[s.var] = np.asarray(start) + np.maximum(np.asarray(extent) - 1, 0) // 2
                around, self.within = self.within, self.within or not any(map(is_pipelined, walk(s.body, For)))
                self._stmt(s.body, times * np.maximum(np.asarray(extent), 0), inside)
                self.within = around
            case If():
                self._stmt(s.then, times, dict(env))
                if s.orelse is not None:
                    self._stmt(s.orelse, times, dict(env))
            case While():
                self.work.known = self.work.known and not self._counts(s.body)
            case Gemm():
                bits = min(s.a.dtype.bits, s.b.dtype.bits)
                flops = 2.0 * s.m * s.n * s.k * self._total(times)
                self.work.flops[bits] = self.work.flops.get(bits, 0.0) + flops
            case Copy():
                self._copy(s, times)
            case Parallel():
                each = [self._number(n, env) for n in s.extents]
                if not self.within and all(n is not None for n in each):
                    stored = sum(x.value.dtype.bits / 8 for x in walk(s.body, Store) if x.buffer.scope_name == GLOBAL)
                    self.work.last += stored * self._total(times * np.prod([np.mean(n) for n in each]))

    def _total(self, times: Any) -> float:
        return float(np.mean(times)) * self.blocks

    def _copy(self, c: Copy, times: Any) -> None:
        for region, load in ((c.src, True), (c.dst, False)):
            if region.buffer.scope_name == GLOBAL and all(isinstance(n, int) or isinstance(n, Const)
                                                            for n in region.extents):
                size = float(np.prod([int(getattr(n, "value", n)) for n in region.extents])) * region.dtype.bits / 8
                if load:
                    self.work.loaded += size * self._total(times)
                    self.work.first += 0 if self.within else size * self._total(times)
                else:
                    self.work.stored += size * self._total(times)
                    self.work.last += 0 if self.within else size * self._total(times)

    def _counts(self, s: Stmt) -> bool:
        return any(isinstance(x, (Gemm, Copy)) for x in walk(s))

    def _tensors(self, launch: Launch) -> None:
        seen: dict[Var, Buffer] = {}
        for x in walk(launch.body):
            for b in _buffers(x):
                if b.scope_name == GLOBAL:
                    seen.setdefault(b.data, b)
        if not all(b.is_static for b in seen.values()):
            self.work.touched = None
            return
        self.work.touched = float(sum(b.bits / 8 for b in seen.values()))


def _buffers(x: Any) -> Iterator[Buffer]:
    if isinstance(x, (Load, Store)):
        yield x.buffer
    for value in (getattr(x, f, None) for f in ("src", "dst", "a", "b", "c")):
        buffer = getattr(value, "buffer", None)
        if isinstance(buffer, Buffer) and not isinstance(value, Expr):
            yield buffer
