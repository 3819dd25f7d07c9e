"""Parses the text of ir/printer.py back to IR, so that the IR after any pass can be saved, edited and compiled further."""

from __future__ import annotations

import ast
from typing import Any, TypeVar

from .dtype import dtype
from .buffer import AddressOf, Buffer, Load, Region
from .call_options import CALL_OPTIONS
from .expr import (BOOL, COMPARISONS, I32, LOGICAL, Binary, Broadcast, Call, Cast, Const, Expr, Ramp, Select, Shuffle,
                   StringConst, Unary, Var)
from .facts import BufferFacts, FuncFacts
from .nodes import fields_of
from .hook import LITERALS
from .options import Options
from .plans import LaunchPlan, LoopPlan, ParallelPlan
from .printer import LOOPS, SYMBOLS
from .stmt import (TILE_OPS, Alloc, Assert, Bind, Break, Continue, Evaluate, For, Func, If, Launch, Parallel, Seq,
                   Stmt, Store, While, seq)

_OPS: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv",
                         ast.Mod: "floormod", ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor",
                         ast.LShift: "shl", ast.RShift: "shr", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt",
                         ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.And: "and", ast.Or: "or"}
O = TypeVar("O", bound=Options)
_KINDS = {v: k for k, v in LOOPS.items()}


class ParseError(ValueError):
    """The text is not a printed program.  The message contains the line."""


def parse(text: str) -> Func:
    """The function a text describes.  Raises ParseError."""
    try:
        module = ast.parse(text)
    except SyntaxError as e:
        raise ParseError(f"line {e.lineno}: {e.msg}") from e
    return _Parser().module(module)


def parse_expr(text: str, env: dict[str, Any]) -> Expr:
    """The expression a text describes, over the variables in env by name.  Raises ParseError."""
    reader = _Parser()
    reader.env = dict(env)
    return reader.expr(ast.parse(text, mode="eval").body)


class _Parser:
    def __init__(self) -> None:
        self.env: dict[str, Any] = {}
        self.storage: dict[str, Var] = {}

    def fail(self, n: ast.AST, what: str) -> ParseError:
        return ParseError(f"line {getattr(n, 'lineno', 0)}: {what}: {ast.unparse(n)}")

    # ---- expressions ----
    def value(self, n: ast.AST) -> Any:
        """An attribute value: Python literals are IR nodes unless wrapped in T.py()."""
        match n:
            case ast.Constant(value=v) if v is None or isinstance(v, (str, bool)):
                return v
            case ast.Tuple(elts=elts):
                return tuple(self.value(e) for e in elts)
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=v)]):
                return float(v)  # type: ignore[arg-type]
            case ast.Call(func=ast.Attribute(attr="py"), args=[v]):
                return _literal(v)
            case ast.Call(func=ast.Attribute(attr="dtype"), args=[ast.Constant(value=v)]):
                return dtype(v)
            case ast.Call(func=ast.Attribute(attr=name)) if name in LITERALS:
                return LITERALS[name](*(self.literal(a) for a in n.args),
                                      **{k.arg: self.literal(k.value) for k in n.keywords if k.arg})
        return self.expr(n)

    def literal(self, n: ast.AST) -> Any:
        try:
            return _literal(n)
        except ValueError:
            if isinstance(n, ast.Tuple):
                return tuple(self.literal(e) for e in n.elts)
            return self.value(n)

    def number(self, n: ast.AST) -> Any:
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "expr":
            return self.expr(n.args[0])
        return _literal(n)

    def numbers(self, n: ast.AST) -> tuple[Any, ...]:
        if not isinstance(n, ast.Tuple):
            raise self.fail(n, "a tuple is needed")
        return tuple(self.number(e) for e in n.elts)

    def attrs(self, call: ast.Call) -> tuple[tuple[str, Any], ...]:
        got = self.keyword(call, "attrs")
        return () if got is None else self.value(got)

    def options(self, record: type[O], call: ast.Call) -> O:
        """A record made from those keywords of the call that are its options."""
        return record(**{k.arg: _literal(k.value) if k.arg in record.literal else self.value(k.value)
                         for k in call.keywords if k.arg in record.names})  # type: ignore[misc]

    def keyword(self, call: ast.Call, name: str) -> ast.AST | None:
        return next((k.value for k in call.keywords if k.arg == name), None)

    def expr(self, n: ast.AST) -> Any:
        match n:
            case ast.Name(id=name):
                if name not in self.env:
                    raise self.fail(n, "unknown name")
                return self.env[name]
            case ast.Constant(value=bool(v)):
                return Const(v, BOOL)
            case ast.Constant(value=int(v)):
                return Const(v, I32)
            case ast.Constant(value=float(v)):
                return Const(v, dtype("float32"))
            case ast.Constant(value=str(v)):
                return StringConst(v)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=v)):
                return Const(-v, I32 if isinstance(v, int) else dtype("float32"))  # type: ignore[operator]
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=a):
                return self.unary("not" if isinstance(n.op, ast.Not) else "bitnot", a)
            case (ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b])
                  | ast.BoolOp(op=op, values=[a, b])):
                return self.binary(_OPS[type(op)], self.expr(a), self.expr(b))
            case ast.Subscript():
                buffer, indices = self.element(n)
                return Load(buffer, indices, buffer.dtype_at(indices))
            case ast.Call(func=ast.Attribute(attr=name)):
                return self.call(name, n)
        raise self.fail(n, "not an expression of the IR")

    def unary(self, op: str, a: ast.AST) -> Expr:
        e = self.expr(a)
        return Unary(op, e, e.dtype)

    def binary(self, op: str, a: Expr, b: Expr) -> Expr:
        dt = BOOL.with_lanes(a.dtype.lanes) if op in COMPARISONS or op in LOGICAL else a.dtype
        return Binary(op, a, b, dt)

    def element(self, n: ast.AST) -> tuple[Buffer, tuple[Expr, ...]]:
        if not isinstance(n, ast.Subscript):
            raise self.fail(n, "an element is needed")
        s = n.slice
        elts = s.elts if isinstance(s, ast.Tuple) else [s]
        return self.expr(n.value), tuple(self.expr(e) for e in elts)

    def call(self, name: str, n: ast.Call) -> Any:
        a = n.args
        match name:
            case "cast":
                return Cast(self.expr(a[0]), dtype(_literal(a[1])))
            case "neg":
                return self.unary("neg", a[0])
            case "if_then_else" | "Select":
                c, x, y = map(self.expr, a)
                return Select(c, x, y, x.dtype, name == "if_then_else")
            case "load":
                buffer, indices = self.element(a[0])
                return Load(buffer, indices, dtype(_literal(a[1])))
            case "address_of":
                return AddressOf(*self.element(a[0]))
            case "call":
                op = _literal(a[0])
                given = self.options(CALL_OPTIONS[op], n) if op in CALL_OPTIONS else None
                return Call(op, tuple(map(self.expr, a[2:])), dtype(_literal(a[1])), given)  # type: ignore[arg-type]
            case "Ramp":
                base, lanes = self.expr(a[0]), _literal(a[2])
                return Ramp(base, self.expr(a[1]), lanes, base.dtype.with_lanes(lanes))
            case "Broadcast":
                v, lanes = self.expr(a[0]), _literal(a[1])
                return Broadcast(v, lanes, v.dtype.with_lanes(lanes))
            case "Shuffle":
                vs = tuple(map(self.expr, a[0].elts))  # type: ignore[attr-defined]
                return Shuffle(vs, _literal(a[1]), dtype(_literal(a[2])))
            case "region":
                buffer, mins = self.element(a[0])
                return Region(buffer, mins, tuple(map(self.number, a[1:])))
        if len(a) == 2 and name in ("min", "max", "truncdiv", "truncmod"):
            return self.binary(name, self.expr(a[0]), self.expr(a[1]))
        if len(a) == 1 and isinstance(a[0], (ast.Constant, ast.UnaryOp)):
            dt, v = dtype(name), _literal(a[0])
            return Const(float(v) if dt.is_float else v, dt)
        raise self.fail(n, "unknown construct")

    # ---- statements ----
    def buffer(self, call: ast.Call, args: list[ast.expr]) -> Buffer:
        strides, offset = self.keyword(call, "strides"), self.keyword(call, "offset")
        key = _literal(self.keyword(call, "data"))  # type: ignore[arg-type]
        data = self.storage.setdefault(key, Var(key, dtype("handle")))
        return Buffer(_literal(args[0]), self.numbers(args[1]), dtype(_literal(args[2])),
                      _literal(self.keyword(call, "scope")),  # type: ignore[arg-type]
                      None if strides is None else self.numbers(strides),
                      0 if offset is None else self.number(offset), data, self.options(BufferFacts, call))

    def define(self, name: str, dt: dtype) -> Var:
        self.env[name] = v = Var(name, dt)
        if dt.is_handle:
            self.storage[name] = v  # of tensors at this address
        return v

    def block(self, body: list[ast.stmt]) -> Stmt:
        return seq(*(self.stmt(s) for s in body))

    def stmt(self, n: ast.stmt) -> Stmt | None:
        match n:
            case ast.Pass():
                return Seq(())
            case ast.Break():
                return Break()
            case ast.Continue():
                return Continue()
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Attribute(attr=dt), value=v) if v is not None:
                value = self.expr(v)
                return Bind(self.define(name, dtype(dt)), value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr=f)) as c):
                return self.declaration(name, f, c)
            case ast.Assign(targets=[ast.Subscript() as target], value=v):
                buffer, indices = self.element(target)
                return Store(buffer, indices, self.expr(v))
            case ast.For(target=target, iter=ast.Call(func=ast.Attribute(attr=f)) as c):
                return self.loop(target, f, c, n.body)
            case ast.While(test=t):
                return While(self.expr(t), self.block(n.body))
            case ast.If(test=t):
                cond, then = self.expr(t), self.block(n.body)
                return If(cond, then, self.block(n.orelse) if n.orelse else None)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as c, optional_vars=ast.Tuple(elts=names))]):
                return self.launch(c, [x.id for x in names], n.body)  # type: ignore[attr-defined]
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=f)) as c):
                return self.effect(f, c)
        raise self.fail(n, "not a statement of the IR")

    def declaration(self, name: str, f: str, c: ast.Call) -> Stmt | None:
        if f == "match_buffer":
            self.env[name] = self.buffer(c, c.args[1:])
            return None
        self.env[name] = b = self.buffer(c, c.args)
        if f == "decl_buffer":
            return None
        init = self.keyword(c, "init")
        return Alloc(b, None if init is None else self.expr(init))

    def loop(self, target: ast.AST, f: str, c: ast.Call, body: list[ast.stmt]) -> Stmt:
        if f == "Parallel":
            extents = tuple(map(self.expr, c.args))
            attrs, parallel = self.attrs(c), self.options(ParallelPlan, c)
            names = target.elts  # type: ignore[attr-defined]
            vs = tuple(self.define(x.id, e.dtype) for x, e in zip(names, extents))
            return Parallel(vs, extents, self.block(body), attrs, parallel)
        dt_node = self.keyword(c, "dtype")
        dt = I32 if dt_node is None else dtype(_literal(dt_node))
        start = self.keyword(c, "start")
        extent, begin = self.expr(c.args[0]), Const(0, dt) if start is None else self.expr(start)
        kind = _literal(self.keyword(c, "thread")) if f == "thread_binding" else _KINDS[f]  # type: ignore[arg-type]
        attrs, plan = self.attrs(c), self.options(LoopPlan, c)
        v = self.define(target.id, dt)  # type: ignore[attr-defined]
        return For(v, begin, extent, kind, self.block(body), attrs, plan)

    def launch(self, c: ast.Call, names: list[str], body: list[ast.stmt]) -> Stmt:
        grid = tuple(map(self.expr, c.args))
        threads = _literal(self.keyword(c, "threads"))  # type: ignore[arg-type]
        vs = [self.define(x, I32) for x in names]
        inner = self.block(body)  # the plan may name buffers and vars of the body
        return Launch(grid, tuple(vs[:-3]), threads, tuple(vs[-3:]), inner,  # type: ignore[arg-type]
                      self.options(LaunchPlan, c))

    def effect(self, f: str, c: ast.Call) -> Stmt | None:
        if f == "evaluate":
            return Evaluate(self.expr(c.args[0]))
        if f == "Assert":
            return Assert(self.expr(c.args[0]), _literal(c.args[1]), _literal(c.args[2]))
        if f in TILE_OPS:
            cls = TILE_OPS[f]
            fields = {k.arg: self.value(k.value) for k in c.keywords if k.arg in fields_of(cls) and k.arg != "attrs"}
            if cls._options:
                fields["plan"] = self.options(type(cls.plan), c)  # type: ignore[attr-defined]
            if "policy" in fields and "policy" in LITERALS:
                fields["policy"] = LITERALS["policy"](fields["policy"])
            return cls(**fields, attrs=self.attrs(c))  # type: ignore[call-arg]
        raise self.fail(c, "unknown statement")

    def module(self, m: ast.Module) -> Func:
        for n in m.body:
            match n:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="dynamic")) as c):
                    self.env[name] = Var(_literal(c.args[0]), dtype(_literal(c.args[1])))
                case ast.FunctionDef():
                    return self.function(n)
                case _:
                    raise self.fail(n, "a function is expected")
        raise ParseError("the text holds no function")

    def function(self, n: ast.FunctionDef) -> Func:
        params = tuple(self.define(a.arg, dtype(a.annotation.attr)) for a in n.args.args)  # type: ignore[union-attr]
        buffers: list[tuple[Var, Buffer]] = []
        rest: list[Any] = list(n.body)
        while rest and _called(rest[0]) == "match_buffer":
            s = rest.pop(0)
            self.declaration(s.targets[0].id, "match_buffer", s.value)
            buffers.append((self.expr(s.value.args[0]), self.env[s.targets[0].id]))
        notes = rest.pop(0).value if rest and _called(rest[0]) == "func_attr" else None
        body = self.block(rest)  # the attributes may name its buffers
        attrs, facts = ((), FuncFacts()) if notes is None else (self.attrs(notes), self.options(FuncFacts, notes))
        return Func(n.name, params, tuple(buffers), body, attrs, facts)


def _literal(n: Any) -> Any:
    """The value of a Python literal."""
    return n.value if isinstance(n, ast.Constant) else ast.literal_eval(n)


def _called(s: Any) -> str:
    """The name of the call `T.name(...)` of an assignment or a statement of its own; "" for others."""
    call = getattr(s, "value", None)
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


assert set(SYMBOLS) <= set(_OPS.values()), "an operator the printer writes has no reader"
