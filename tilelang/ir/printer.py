"""Prints the IR as text.  `parse(to_text(f)) == f` in every phase, and the text is the same in every process."""

from __future__ import annotations

import enum
import keyword
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import fields, is_dataclass
from typing import Any

from .dtype import dtype
from .buffer import AddressOf, Buffer, Load, Region
from .children import children
from .expr import Binary, Broadcast, Call, Cast, Const, Expr, Ramp, Select, Shuffle, StringConst, Unary, Var
from .nodes import Node, fields_of, node_text
from .options import Options
from .stmt import (Alloc, Assert, Bind, Break, Continue, Evaluate, For, Func, If, Launch, Parallel, Seq, Stmt, Store,
                   TileOp, While)
from .visitor import symbols_of, walk

SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "floormod": "%", "bitand": "&",
           "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
           "gt": ">", "ge": ">=", "and": "and", "or": "or"}
LOOPS = {"serial": "serial", "unroll": "unroll", "vectorized": "vectorized", "pipelined": "Pipelined"}


@node_text.provide
def to_text(n: Any) -> str:
    """The text of any node."""
    p = _Printer()
    return n._text or p.block(n) if isinstance(n, (Func, Stmt)) else p.value(n)


def _statements(v: Any) -> tuple[Any, ...]:
    """The statements in a field of a statement, or the records in it that contain statements."""
    if isinstance(v, tuple):
        return tuple(x for y in v for x in _statements(y))
    if isinstance(v, Stmt):
        return (v,)
    holds = not isinstance(v, (Node, type)) and is_dataclass(v) and any(_statements(getattr(v, f.name)) for f in fields(v))
    return (v,) if holds else ()


def _tuple(texts: Iterable[str]) -> str:
    """A tuple of Python."""
    items = [*texts]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


class Names:
    """Unique names of the variables and buffers in one text."""

    def __init__(self) -> None:
        self.given: dict[int, str] = {}
        self.taken: set[str] = {"T", "float"}
        self.keep: list[Any] = []  # named objects stay alive so that ids stay unique

    def __call__(self, obj: Var | Buffer) -> str:
        got = self.given.get(id(obj))
        if got is None:
            base = re.sub(r"\W", "_", obj.name) or "v"
            if base[0].isdigit() or keyword.iskeyword(base):
                base = "_" + base
            got, k = base, 0
            while got in self.taken:
                k += 1
                got = f"{base}_{k}"
            self.taken.add(got)
            self.given[id(obj)] = got
            self.keep.append(obj)
        return got


class _Printer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.name = Names()
        self.declared: set[int] = set()

    def block(self, n: Func | Stmt) -> str:
        """The text of a function or a statement."""
        self.func(n) if isinstance(n, Func) else self.stmt(n)
        return "\n".join(self.lines)

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    # ---- values ----
    def value(self, v: Any) -> str:
        if isinstance(v, Const) and v.dtype == "bool":
            return f"T.bool({v.value})"  # True or False alone is the Python value
        if isinstance(v, Node):
            return self.node(v)
        if isinstance(v, enum.Enum):
            return self.value(v.value)
        if isinstance(v, dtype):
            return f'T.dtype("{v}")'
        if isinstance(v, tuple):
            return _tuple(map(self.value, v))
        if isinstance(v, str):
            return '"' + repr("'" + v)[2:-1].replace('"', '\\"') + '"' if '"' not in v else repr(v)
        if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))):
            return f'float("{v}")'
        if v is None or isinstance(v, (bool, int, float)):
            return f"T.py({v!r})" if isinstance(v, (int, float)) and not isinstance(v, bool) else repr(v)
        text = getattr(v, "__tilelang_text__", None)
        if text is not None:
            return text()
        return f'T.opaque("{type(v).__name__}")'

    def number(self, v: Any) -> str:
        """A shape entry: a Python int or an expression."""
        return str(v) if isinstance(v, int) else "T.expr(" + self.node(v) + ")"

    def numbers(self, values: tuple[Any, ...]) -> str:
        return _tuple(map(self.number, values))

    def node(self, n: Node) -> str:
        match n:
            case Var():
                return self.name(n)
            case Const():
                return self.const(n)
            case StringConst():
                return self.value(n.value)
            case Cast():
                return f'T.cast({self.node(n.value)}, "{n.dtype}")'
            case Binary():
                a, b = self.node(n.a), self.node(n.b)
                sym = SYMBOLS.get(n.op)
                return f"({a} {sym} {b})" if sym else f"T.{n.op}({a}, {b})"
            case Unary():
                a = self.node(n.a)
                return {"neg": f"T.neg({a})", "not": f"(not {a})", "bitnot": f"(~{a})"}[n.op]
            case Select():
                f = "if_then_else" if n.lazy else "Select"
                return f"T.{f}({self.node(n.cond)}, {self.node(n.a)}, {self.node(n.b)})"
            case Load():
                text = self.element(n.buffer, n.indices)
                return text if n.dtype == n.buffer.dtype_at(n.indices) else f'T.load({text}, "{n.dtype}")'
            case AddressOf():
                return f"T.address_of({self.element(n.buffer, n.indices)})"
            case Call():
                args = "".join(", " + self.node(a) for a in n.args)
                return f'T.call("{n.op}", "{n.dtype}"{args}{self.options(n.options)})'
            case Ramp():
                return f"T.Ramp({self.node(n.base)}, {self.node(n.stride)}, {n.lanes})"
            case Broadcast():
                return f"T.Broadcast({self.node(n.value)}, {n.lanes})"
            case Shuffle():
                vs = ", ".join(map(self.node, n.vectors))
                return f'T.Shuffle(({vs},), {_tuple(map(str, n.indices))}, "{n.dtype}")'
            case Buffer():
                return self.name(n)
            case Region():
                ext = "".join(", " + self.number(e) for e in n.extents)
                return f"T.region({self.element(n.buffer, n.mins)}{ext})"
            case Stmt() | Func():
                return _Printer().block(n)
        raise TypeError(f"no text for {type(n).__name__}")

    def const(self, n: Const) -> str:
        v = n.value
        if n.dtype == "bool":
            return "True" if v else "False"
        if n.dtype == "int32":
            return str(v)
        if n.dtype.is_float:
            special = v != v or v in (float("inf"), float("-inf"))
            text = f'"{v}"' if special else repr(float(v))
            return text if n.dtype == "float32" and not special else f"T.{n.dtype}({text})"
        return f"T.{n.dtype}({v})"

    def element(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        return f"{self.name(b)}[{', '.join(map(self.node, indices)) if indices else '()'}]"

    def attrs(self, attrs: tuple[tuple[str, Any], ...]) -> str:
        if not attrs:
            return ""
        return ", attrs=(" + "".join(f'("{k}", {self.value(v)}), ' for k, v in attrs).rstrip(" ") + ")"

    def literal(self, v: Any) -> str:
        """A Python literal, printed as Python does."""
        if isinstance(v, tuple):
            return _tuple(map(self.literal, v))
        return self.value(v) if isinstance(v, str) else repr(v)

    def options(self, options: Options | None) -> str:
        """The options that differ from their defaults, as keyword arguments.  Python literals are printed without T.py()."""
        if options is None:
            return ""
        texts = {k: self.literal(v) if k in options.literal else self.value(v) for k, v in options.given().items()}
        return "".join(f", {k}={v}" for k, v in texts.items())

    # ---- statements ----
    def declare_used(self, n: Any) -> None:
        """Print declarations of the buffers used here that have no Alloc before (views, bound pointers)."""
        for x in _own_buffers(n):
            if id(x) not in self.declared:
                self.declared.add(id(x))
                for d in x.exprs:
                    self.declare_used(d)
                self.emit(f"{self.name(x)} = T.decl_buffer({self.buffer_args(x)})")

    def buffer_args(self, b: Buffer) -> str:
        text = f'{self.value(b.name)}, {self.numbers(b.shape)}, "{b.dtype}", scope="{b.scope_name}"'
        if b.strides_ is not None:
            text += f", strides={self.numbers(b.strides_)}"
        if not (isinstance(b.offset, int) and b.offset == 0):
            text += f", offset={self.number(b.offset)}"
        # Buffers with the same storage have the same data pointer; the first of them defines it.
        return text + f', data="{self.name(b.data)}"' + self.options(b.facts)

    def body(self, s: Stmt) -> None:
        self.depth += 1
        self.inside(s, len(self.lines))
        self.depth -= 1

    def inside(self, s: Stmt, before: int) -> None:
        """Print the statements of a block, or `pass` where nothing stands after so many lines."""
        self.stmt(s)
        if len(self.lines) == before:
            self.emit("pass")

    def stmt(self, s: Stmt) -> None:
        if isinstance(s, Seq):
            for x in s.stmts:
                self.stmt(x)
            return
        if isinstance(s, Alloc):
            self.declared.add(id(s.buffer))
            init = "" if s.init is None else f", init={self.node(s.init)}"
            self.emit(f"{self.name(s.buffer)} = T.alloc({self.buffer_args(s.buffer)}{init})")
            return
        self.declare_used(s)
        match s:
            case Bind():
                self.emit(f"{self.name(s.var)}: T.{s.var.dtype} = {self.node(s.value)}")
            case Store():
                self.emit(f"{self.element(s.buffer, s.indices)} = {self.node(s.value)}")
            case Evaluate():
                self.emit(f"T.evaluate({self.node(s.call)})")
            case For():
                kind = LOOPS.get(s.kind)
                head = f"T.{kind}({self.node(s.extent)}" if kind else f"T.thread_binding({self.node(s.extent)}, " \
                    f'thread="{s.kind}"'
                if not (isinstance(s.start, Const) and s.start.value == 0 and s.start.dtype == s.var.dtype):
                    head += f", start={self.node(s.start)}"
                if s.var.dtype != "int32":
                    head += f', dtype="{s.var.dtype}"'
                self.emit(f"for {self.name(s.var)} in {head}{self.options(s.plan)}{self.attrs(s.attrs)}):")
                self.body(s.body)
            case Parallel():
                names = ", ".join(map(self.name, s.vars)) + ("," if len(s.vars) == 1 else "")
                ext = ", ".join(map(self.node, s.extents))
                self.emit(f"for {names} in T.Parallel({ext}{self.options(s.plan)}{self.attrs(s.attrs)}):")
                self.body(s.body)
            case While():
                self.emit(f"while {self.node(s.cond)}:")
                self.body(s.body)
            case If():
                self.emit(f"if {self.node(s.cond)}:")
                self.body(s.then)
                if s.orelse is not None:
                    self.emit("else:")
                    self.body(s.orelse)
            case Break():
                self.emit("break")
            case Continue():
                self.emit("continue")
            case Assert():
                self.emit(f"T.Assert({self.node(s.cond)}, {self.value(s.message)}, {self.value(s.kind)})")
            case Launch():
                grid = "".join(self.node(g) + ", " for g in s.grid)
                names = ", ".join(map(self.name, (*s.block_vars, *s.thread_vars)))
                self.emit(f"with T.Kernel({grid}threads={_tuple(map(str, s.threads))}{self.options(s.plan)}) as ({names}):")
                self.body(s.body)
            case TileOp():
                fields = [f"{f}={self.value(getattr(s, f))}" for f in fields_of(type(s)) if f not in ("attrs", "plan")]
                plan = self.options(s.plan) if s._options else ""  # type: ignore[attr-defined]
                self.emit(f"T.{s.op_name}({', '.join(fields)}{plan}{self.attrs(s.attrs)})")
            case _:
                self.backend_stmt(s)

    def backend_stmt(self, s: Any) -> None:
        """Print a statement that only one backend has, or a record in it: its name and values, then its statements.

        This text is for reading only: the parser accepts only the statements of ir/__init__.py.
        """
        values = {f.name: getattr(s, f.name) for f in fields(s) if f.name != "span"}
        shown = ", ".join(f"{k}={self.short(v)}" for k, v in values.items() if not _statements(v))
        self.emit(f"with {type(s).__name__}({shown}):")
        self.depth += 1
        for k, v in values.items():
            for x in _statements(v):
                self.emit(f"# {k}")
                (self.stmt if isinstance(x, Stmt) else self.backend_stmt)(x)
        self.depth -= 1

    def short(self, v: Any) -> str:
        """A value as text: records as Name(field=value, ...), sets of names sorted."""
        if isinstance(v, (Var, Buffer)):
            return self.name(v)
        if isinstance(v, Node):
            return self.value(v)
        if isinstance(v, tuple):
            return f"({', '.join(map(self.short, v))})"
        if isinstance(v, Set):
            return f"{{{', '.join(sorted(map(self.short, v)))}}}"
        if is_dataclass(v):
            return f"{type(v).__name__}({', '.join(f'{f.name}={self.short(getattr(v, f.name))}' for f in fields(v))})"
        return repr(v)

    def _symbols(self, f: Func) -> None:
        """Declarations of the symbols in shapes, strides and offsets of parameters."""
        for v in symbols_of(f):
            self.emit(f'{self.name(v)} = T.dynamic("{v.name}", "{v.dtype}")')

    def func(self, f: Func) -> None:
        params = ", ".join(f"{self.name(p)}: T.{p.dtype}" for p in f.params)
        self._symbols(f)
        self.emit("@T.prim_func")
        self.emit(f"def {f.name}({params}):")
        self.depth += 1
        before = len(self.lines)
        for p, b in f.buffers:
            self.declared.add(id(b))
            self.emit(f"{self.name(b)} = T.match_buffer({self.name(p)}, {self.buffer_args(b)})")
        attrs = self.options(f.facts) + self.attrs(f.attrs)
        if attrs:
            self.emit(f"T.func_attr({attrs[2:]})")
        self.inside(f.body, before)
        self.depth -= 1


def _own_buffers(n: Node) -> Iterator[Buffer]:
    """Buffers named in an expression, or in a statement's own expressions, without those of nested bodies."""
    return (b for c in children(n) if not isinstance(c, Stmt) for b in walk(c, Buffer))
