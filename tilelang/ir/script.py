"""Prints a program for users: launches as loops over block and thread indices, tile operations on regions.

This form cannot be parsed.  The form that the compiler stores and reads back is that of `printer.to_text`.
"""

from __future__ import annotations

import enum
from typing import Any

from .buffer import Buffer, Region
from .expr import Cast, Const, Expr
from .nodes import Node, fields_of
from .printer import LOOPS, _Printer
from .stmt import Attrs, Alloc, Evaluate, For, Func, Launch, Parallel, Stmt, TileOp
from .scopes import GLOBAL

HEADER = "# from tvm.script import tirx as T"
BLOCKS, THREADS = (tuple(f"{kind}Idx.{axis}" for axis in "xyz") for kind in ("block", "thread"))


def to_script(f: Func) -> str:
    """The script form of a function."""
    p = _Script()
    p.func(f)
    return "\n".join([HEADER, "", *p.lines])


def _notes(s: Any) -> Attrs:
    """The annotations of a statement that the script shows: its options, then those of the user."""
    plan = getattr(s, s._options).given() if s._options else {}
    return tuple(sorted((*plan.items(), *getattr(s, "attrs", ()))))


def _access_masks(s: TileOp) -> dict[int, int]:
    """The access of a tile operation to each of its regions, by id of the region: 1 read, 2 written, 3 both."""
    masks: dict[int, int] = {}
    for a in s.accesses():  # type: ignore[attr-defined]
        masks[id(a.region)] = masks.get(id(a.region), 0) | (1 if a.reads else 0) | (2 if a.writes else 0)
    return masks


class _Script(_Printer):
    def number(self, v: Any) -> str:
        return str(v) if isinstance(v, int) else self.node(v)

    def node(self, n: Node) -> str:
        if isinstance(n, Cast):
            return f'T.Cast("{n.dtype}", {self.node(n.value)})'
        return super().node(n)

    def const(self, n: Const) -> str:
        if n.dtype == "float32":
            special = n.value != n.value or n.value in (float("inf"), float("-inf"))
            return f'T.float32("{n.value}")' if special else f"T.float32({float(n.value)!r})"
        return super().const(n)

    def value(self, v: Any) -> str:
        v = v.value if isinstance(v, enum.Enum) else v
        return repr(v) if type(v) in (int, float) and abs(v) < float("inf") else super().value(v)

    def attrs(self, attrs: tuple[tuple[str, Any], ...]) -> str:
        inner = ", ".join(f'"{k}": {self.value(v)}' for k, v in attrs)
        return f", annotations={{{inner}}}" if attrs else ""

    def _tensor(self, b: Buffer, scope: bool = True) -> str:
        """The shape, then properties that differ from the default: element type (float32), strides, offset, scope (global)."""
        text = self.numbers(b.shape) + ("" if b.dtype == "float32" else f', "{b.dtype}"')
        if b.strides_ is not None or not scope:
            text += f", strides={self.numbers(tuple(b.strides))}"
        if not (isinstance(b.offset, int) and b.offset == 0):
            text += f", elem_offset={self.number(b.offset)}"
        return text + (f', scope="{b.scope_name}"' if scope and b.scope_name != GLOBAL else "")

    def buffer_args(self, b: Buffer) -> str:
        return f"{self._tensor(b)}, data={self.name(b.data)}"

    def _loops(self, loops: list[tuple[Any, str]], body: Any) -> None:
        """Print nested loops `for name in head:`, then the body."""
        depth = self.depth
        for var, head in loops:
            self.emit(f"for {self.name(var)} in {head}:")
            self.depth += 1
        body()
        self.depth = depth

    def _launch(self, s: Launch) -> None:
        def block() -> None:
            self.emit('with T.sblock("tilelang_root"):')
            self.depth += 1
            self.emit("T.reads()")
            self.emit("T.writes()")
            notes = _notes(s)
            if notes:
                self.emit(f"T.sblock_attr({self.attrs(notes)[len(', annotations='):]})")
            self.stmt(s.body)
            self.depth -= 1

        def bound(extent: Any, tag: str) -> str:
            return f'T.thread_binding({self.number(extent)}, thread="{tag}")'

        self._loops([(v, bound(n, tag)) for v, n, tag in zip(s.block_vars, s.grid, BLOCKS)] +
                    [(v, bound(n, tag)) for v, n, tag in zip(s.thread_vars, s.threads, THREADS)], block)

    def stmt(self, s: Stmt) -> None:
        if isinstance(s, Alloc):
            self.declared.add(id(s.buffer))
            self.emit(f"{self.name(s.buffer)} = T.sblock_alloc_buffer({self._tensor(s.buffer)})")
            if s.init is not None:
                self.emit(f"{self.name(s.buffer)}[{', '.join('0' * len(s.buffer.shape))}] = {self.node(s.init)}")
            return
        if isinstance(s, (Launch, Parallel, For, Evaluate, TileOp)):
            self.declare_used(s)
        if isinstance(s, Launch):
            self._launch(s)
        elif isinstance(s, Parallel):
            heads = [f"T.parallel({self.node(e)}{self.attrs(_notes(s)) if k == 0 else ''})" for k, e in enumerate(s.extents)]
            self._loops(list(zip(s.vars, heads)), lambda: self.inside(s.body, len(self.lines)))
        elif isinstance(s, For):
            start = "" if isinstance(s.start, Const) and s.start.value == 0 else f"{self.node(s.start)}, "
            stop = self.node(s.extent) if not start else self.node(s.start + s.extent)
            kind = "serial" if s.kind == "pipelined" else LOOPS.get(s.kind)
            if kind == "serial" and not _notes(s):
                head = f"range({start}{stop})"
            elif kind:
                head = f"T.{kind}({start}{stop}{self.attrs(_notes(s))})"
            else:
                head = f'T.thread_binding({stop}, thread="{s.kind}"{self.attrs(_notes(s))})'
            self._loops([(s.var, head)], lambda: self.inside(s.body, len(self.lines)))
        elif isinstance(s, Evaluate):
            text = self.node(s.call)
            self.emit(text if text.startswith("T.") else f"T.evaluate({text})")
        elif isinstance(s, TileOp):
            self.emit(f"T.{s.op_name}({', '.join(self._operands(s))})")
        else:
            super().stmt(s)

    def _operands(self, s: TileOp) -> list[str]:
        """The fields in order, regions with their access mask, then the annotations by name."""
        masks = _access_masks(s)

        def field(v: Any) -> str:
            if isinstance(v, Region):
                extents = "".join(", " + self.number(e) for e in v.extents)
                return f"T.region({self.element(v.buffer, v.mins)}, {masks.get(id(v), 3)}{extents})"
            return self.node(v) if isinstance(v, Expr) else self.value(v)

        given = [field(getattr(s, f)) for f in fields_of(type(s)) if f not in ("attrs", "plan")]
        return given + [f"{k}={self.value(v)}" for k, v in _notes(s)]

    def func(self, f: Func) -> None:
        self.emit("@T.prim_func")
        self.emit(f"def {f.name}({', '.join(f'{self.name(p)}: T.{p.dtype}' for p in f.params)}):")
        self.depth += 1
        before = len(self.lines)
        notes = _notes(f)
        if notes:
            self.emit(f"T.func_attr({self.attrs(notes)[len(', annotations='):]})")
        self._symbols(f)
        for p, b in f.buffers:
            self.declared.add(id(b))
            self.emit(f"{self.name(b)} = T.match_buffer({self.name(p)}, {self._tensor(b, scope=False)})")
        self.inside(f.body, before)
        self.depth -= 1
