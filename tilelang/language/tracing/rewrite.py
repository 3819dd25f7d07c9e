"""Rewrites a kernel function's source into calls on the builder.

Before (user):                          After (run once, at trace time):
    x = A[i] + 1                            __tl.pos = 3
                                            x = __tl_names.bind("x", A[i] + 1, x)
    for i in T.serial(n):                   __tl.pos = 4
        body                                __l1 = __tl_flow.loop(T.serial(n), ("y",), (y,))
                                            i = __tl_names.bind_frame("i", __l1.value)
                                            body
                                            (y,) = __tl_flow.end_loop(__l1, (y,), carried)
    if c: a                                 __i2 = __tl_flow.if_(c, (), ())
    else: b                                 if __i2.then: a
                                            __tl_flow.mid(__i2, ())
                                            if __i2.orelse: b
                                            __tl_flow.end_if(__i2, ())

Every statement first stores its index in the function's table of spans, so that the builder knows its span.
The names that a body assigns are passed to the builder before and after the body; it decides which of them stay readable.

Finds the names that a piece of code assigns, and those that it may read before it assigns them.
"""

from __future__ import annotations

import __future__
import ast
import inspect
import logging
import types
from collections.abc import Callable, Iterable
from typing import Any

from tilelang import errors
from tilelang.ir import Span, deep
from tilelang.ir.record import record

from .source_text import lines_of

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
           ast.GeneratorExp)
_LEAVES = (*_SCOPES, ast.Constant, ast.expr_context, ast.operator)  # nothing is bound in them


def assigned_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Names bound by statements or targets, in order of first appearance (inner scopes excluded).

    The result is cached on each statement, because every enclosing level asks for it.  Call this before a body is rewritten.
    """
    out: dict[str, None] = {}
    for n in nodes:
        out.update(_bound_in(n))
    return list(out)


def _bound_in(root: ast.AST) -> dict[str, None]:
    known: dict[str, None] | None = root.__dict__.get("_bound")
    if known is not None:
        return known
    out: dict[str, None] = {}
    stack: list[Any] = [root]
    while stack:
        n = stack.pop()
        if isinstance(n, ast.Name):
            if isinstance(n.ctx, ast.Store):
                out[n.id] = None
            continue
        if not isinstance(n, ast.AST) or isinstance(n, _LEAVES):
            continue
        if isinstance(n, ast.stmt) and n is not root:
            out.update(_bound_in(n))
            continue
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names:
                out[(a.asname or a.name).split(".")[0]] = None
        elif isinstance(n, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and n.name:
            out[n.name] = None
        children: list[Any] = []
        for f in n._fields:
            v = getattr(n, f, None)
            if isinstance(v, list):
                children += v
            else:
                children.append(v)
        stack += reversed(children)
    if isinstance(root, ast.stmt):
        root._bound = out  # type: ignore[attr-defined]
    return out


def _reads(n: ast.AST, defined: set[str], out: set[str]) -> None:
    for x in ast.walk(n):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load) and x.id not in defined:
            out.add(x.id)


def read_before_assigned(stmts: list[ast.stmt]) -> set[str]:
    """Names that some path through the statements may read before it assigns them."""
    out: set[str] = set()

    def block(body: list[ast.stmt], defined: set[str]) -> set[str]:
        for s in body:
            defined = stmt(s, defined)
        return defined

    def stmt(s: ast.stmt, d: set[str]) -> set[str]:
        if isinstance(s, ast.If):
            _reads(s.test, d, out)
            return d | (block(s.body, set(d)) & block(s.orelse, set(d)))
        if isinstance(s, ast.While):
            _reads(s.test, d, out)
            block(s.body, set(d))
            return d
        if isinstance(s, ast.For):
            _reads(s.iter, d, out)
            block(s.body, d | set(assigned_names([s.target])))
            return d
        if isinstance(s, ast.With):
            for item in s.items:
                _reads(item.context_expr, d, out)
            names = [i.optional_vars for i in s.items if i.optional_vars is not None]
            return block(s.body, d | set(assigned_names(names)))
        _reads(s, d, out)
        if isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name) and s.target.id not in d:
            out.add(s.target.id)
        return d | set(assigned_names([s]))

    block(stmts, set())
    return out


log = logging.getLogger("tilelang.language")
BUILDER, UNDEFINED = "__tl", "__tl_undefined"
FIRST = (BUILDER, "__tl_names", "__tl_conditions", "__tl_flow", UNDEFINED)  # parameters of rewritten code
Place = tuple[int, int, int, int]

_AUG = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
        ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.MatMult: "@"}
_CMP = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
        ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}

_KEEPS = ("append", "appendleft", "insert", "add", "setdefault")  # methods of containers that keep their arguments


@record
class Rewritten:
    """A rewritten function.

    code: code object of the new function, whose first parameters are FIRST.  places: span table.
    annotated: parameter name -> annotation expression, for `name: annotation` statements of the body.
    params: parameter name -> its place in the signature.
    """

    code: types.CodeType
    file: str
    name: str
    line: int
    places: tuple[Place, ...]
    annotated: dict[str, ast.expr]
    params: dict[str, Place]

    def function(self, original: Callable[..., Any], extra: dict[str, Any] | None = None) -> Callable[..., Any]:
        """The function, with the original's globals and closure cells; `extra` fills names neither has."""
        cells = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
        closure = []
        for name in self.code.co_freevars:
            cell = cells.get(name)
            if cell is None:
                cell = types.CellType((extra or {})[name]) if name in (extra or {}) else types.CellType()
            closure.append(cell)
        return types.FunctionType(self.code, original.__globals__, self.name, None, tuple(closure))


_cache: dict[tuple[int, bool], tuple[types.CodeType, Rewritten]] = {}


@deep()
def rewrite_function(fn: Callable[..., Any], extra_names: Iterable[str] = (), postponing: bool = False) -> Rewritten:
    """The rewritten form of a Python function (made once for a code object).

    postponing: statements in front of the first `with` may be left to a second trace.  extra_names: names of enclosing
    functions that only annotations mention (they are not in the closure when annotations are strings).  Raises
    source-unavailable, source-changed, unsupported-syntax.
    """
    code = fn.__code__
    hit = _cache.get((id(code), postponing))
    if hit is not None:
        return hit[1]
    node = _function_ast(fn)
    out = _Rewriter(code.co_filename, node, postponing).run(fn, tuple(extra_names))
    _cache[id(code), postponing] = (code, out)
    return out


def _function_ast(fn: Callable[..., Any]) -> ast.FunctionDef:
    code = fn.__code__
    lines, first = lines_of(fn)
    block = inspect.getblock(lines[first - 1:])
    indented = block[0][:1] in (" ", "\t")
    text = "\n" * (first - 1 - indented) + "if 1:\n" * indented + "".join(block)
    try:
        tree: Any = ast.parse(text, filename=code.co_filename)
        body = tree.body[0].body[0] if indented else tree.body[0]
    except (SyntaxError, IndexError):
        body = None
    if not isinstance(body, ast.FunctionDef) or body.name != code.co_name:
        raise errors.error("source-unavailable", f"`{fn.__name__}` is not a plain function definition",
                           found=f"no def of `{code.co_name}` at line {first}", span=Span(code.co_filename, first))
    return body


def _place(n: Any) -> Place:
    return n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0


def _name(n: str, store: bool = False) -> ast.Name:
    return ast.Name(n, ast.Store() if store else ast.Load())


def _call(method: str, *args: ast.expr) -> ast.Call:
    """A call of a method of the builder, or of Names, Conditions or ControlFlow ("names.bind")."""
    owner, _, name = method.rpartition(".")
    return ast.Call(ast.Attribute(_name(f"{BUILDER}_{owner}" if owner else BUILDER), name, ast.Load()), list(args), [])


def _tuple(items: Iterable[ast.expr]) -> ast.Tuple:
    return ast.Tuple(list(items), ast.Load())


def _const(v: Any) -> ast.Constant:
    return ast.Constant(v)


def _thunk(e: ast.expr) -> ast.Lambda:
    return ast.copy_location(ast.Lambda(_arguments([]), e), e)


def _arguments(names: Iterable[str]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], vararg=None, kwonlyargs=[], kw_defaults=[],
                         kwarg=None, defaults=[])


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str, node: ast.FunctionDef, postponing: bool) -> None:
        self.file, self.node, self.postponing = file, node, postponing
        self.places: list[Place] = []
        self.serial = 0
        self.annotated: dict[str, ast.expr] = {}
        a = node.args
        self.params = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        if a.vararg:
            self.params.append(a.vararg.arg)
        if a.kwarg:
            self.params.append(a.kwarg.arg)

    # -- frame of the new function -----------------------------------------------------------------------------------
    def run(self, fn: Callable[..., Any], extra: tuple[str, ...]) -> Rewritten:
        node, code = self.node, fn.__code__
        local = [n for n in assigned_names(node.body) if n not in self.params]
        if code.co_cellvars or not {*local} <= {*code.co_varnames}:  # some are not of this function alone
            outer = {n for s in ast.walk(node) if isinstance(s, (ast.Global, ast.Nonlocal)) for n in s.names}
            local = [n for n in local if n not in outer]
        self.local = set(local) | set(self.params)
        params = {a.arg: _place(a) for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        first = next((k for k, s in enumerate(node.body) if isinstance(s, ast.With)), len(node.body)) if self.postponing else 0
        body = [new for s in node.body[:first] for new in self.guarded(s)] + self.block(node.body[first:])
        head: list[ast.stmt] = [ast.Assign([_name(n, True)], _name(UNDEFINED)) for n in local]
        if node.args.posonlyargs:
            node.args.args = node.args.posonlyargs + node.args.args
        args = ast.arguments(posonlyargs=[ast.arg(n) for n in FIRST],
                             args=[ast.arg(a.arg) for a in node.args.args],
                             vararg=ast.arg(node.args.vararg.arg) if node.args.vararg else None,
                             kwonlyargs=[ast.arg(a.arg) for a in node.args.kwonlyargs],
                             kw_defaults=[None] * len(node.args.kwonlyargs),
                             kwarg=ast.arg(node.args.kwarg.arg) if node.args.kwarg else None, defaults=[])
        # Under its own name the function would hide the global (or enclosing) one that a recursive call means.
        new = ast.FunctionDef(name="__tl_" + node.name, args=args, body=head + (body or [ast.Pass()]), decorator_list=[],
                              returns=None, type_comment=None)
        free = list(dict.fromkeys((*code.co_freevars, *extra)))
        factory = ast.FunctionDef(name="__tl_factory", args=_arguments(free), body=[new], decorator_list=[], returns=None,
                                  type_comment=None)
        if hasattr(node, "type_params"):
            new.type_params = factory.type_params = []  # type: ignore[attr-defined]
        module = ast.Module([factory], [])
        ast.copy_location(new, node)
        ast.copy_location(factory, node)
        _fill_locations(module, node.lineno)
        # The user's file determines the __future__ features; those of this file must not apply.
        flags = code.co_flags & __future__.annotations.compiler_flag
        made = compile(module, self.file, "exec", flags=flags, dont_inherit=True)
        outer_code = next(c for c in made.co_consts if isinstance(c, types.CodeType))
        inner = next(c for c in outer_code.co_consts if isinstance(c, types.CodeType) and c.co_name == new.name)
        inner = inner.replace(co_name=node.name)
        return Rewritten(inner, self.file, node.name, node.lineno, tuple(self.places), self.annotated, params)

    def fresh(self, letter: str) -> str:
        self.serial += 1
        return f"__{letter}{self.serial}"

    def error(self, kind: str, message: str, at: ast.AST, hint: str = "", *, found: str) -> errors.TileLangError:
        span = Span(self.file, *_place(at), self.node.name)
        return errors.error(kind, message, found=found, span=span, hint=hint)

    def pos(self, at: ast.AST) -> ast.stmt:
        self.places.append(_place(at))
        out = ast.Assign([ast.Attribute(_name(BUILDER), "pos", ast.Store())], _const(len(self.places) - 1))
        return ast.copy_location(out, at)

    # -- statements --------------------------------------------------------------------------------------------------
    def block(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for k, s in enumerate(stmts):
            for new in self.statement(s):
                _copy_location_deep(new, s)
                out.append(new)
            if isinstance(s, (ast.Break, ast.Continue)) and k + 1 < len(stmts):
                word = "break" if isinstance(s, ast.Break) else "continue"
                log.warning("%s:%d: statements after `%s` are never executed and are ignored", self.file,
                            stmts[k + 1].lineno, word)
                break
        return out

    def guarded(self, s: ast.stmt) -> list[ast.stmt]:
        """A statement in front of the kernel, which the first trace may leave to the second (EagerFunction)."""
        names = [n for n in assigned_names([s]) if n in self.local]
        new = self.block([s])
        if not new or isinstance(s, ast.Return):
            return new
        caught = "__tl_caught"
        eager = ast.Attribute(_name(BUILDER), "eager", ast.Load())
        ask = ast.Call(ast.Attribute(eager, "postpones", ast.Load()),
                       [_name(BUILDER), _name(caught), _const(isinstance(s, ast.AnnAssign))], [])
        unknown: list[ast.stmt] = [ast.Assign([_name(n, True)], ast.Attribute(eager, "UNKNOWN", ast.Load())) for n in names]
        handler = ast.ExceptHandler(ast.Attribute(eager, "POSTPONED", ast.Load()), caught,
                                    [ast.If(ast.UnaryOp(ast.Not(), ask), [ast.Raise()], []), *unknown])
        return [ast.copy_location(ast.Try(new, [handler], [], []), s)]

    def statement(self, s: ast.stmt) -> list[ast.stmt]:
        handler = getattr(self, "do_" + type(s).__name__, None)
        if handler is not None:
            return handler(s)
        for field, value in ast.iter_fields(s):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(s, field, self.block(value))
            elif isinstance(value, list) and value and isinstance(value[0], (ast.ExceptHandler, ast.match_case)):
                for part in value:
                    part.body = self.block(part.body)
        return [self.pos(s), s]

    def expr(self, e: ast.expr) -> ast.expr:
        return self.visit(e)

    def do_Expr(self, s: ast.Expr) -> list[ast.stmt]:
        if isinstance(s.value, ast.Constant):
            return []
        return [self.pos(s.value), ast.Expr(_call("flow.expr", self.expr(s.value)))]

    def do_Assign(self, s: ast.Assign) -> list[ast.stmt]:
        out = [self.pos(s)]
        if len(s.targets) == 1:
            return out + self.assign(s.targets[0], self.expr(s.value))
        tmp = self.fresh("v")
        out.append(ast.Assign([_name(tmp, True)], _call("names.freeze", self.expr(s.value))))
        for t in s.targets:
            out += self.assign(t, _name(tmp))
        return out

    def assign(self, t: ast.expr, value: ast.expr, method: str = "names.bind") -> list[ast.stmt]:
        """Statements that assign the value of an expression to a target."""
        if isinstance(t, ast.Name):
            old = _name(t.id) if t.id in self.local else _const(None)
            return [ast.Assign([_name(t.id, True)], _call(method, _const(t.id), value, old))]
        if isinstance(t, ast.Subscript):
            if any(isinstance(n, ast.Call) for n in ast.walk(t)):  # Python computes the value first: both may have effects
                name = self.fresh("v")
                return [ast.Assign([_name(name, True)], value),
                        ast.Expr(_call("names.setitem", self.expr(t.value), self.key(t.slice), _name(name)))]
            return [ast.Expr(_call("names.setitem", self.expr(t.value), self.key(t.slice), value))]
        if isinstance(t, ast.Attribute):
            raise self.attribute_error(t)
        if isinstance(t, ast.Starred):
            return self.assign(t.value, value, method)
        if isinstance(t, (ast.Tuple, ast.List)):
            parts = [self.fresh("v") for _ in t.elts]
            star = next((k for k, e in enumerate(t.elts) if isinstance(e, ast.Starred)), None)
            frame = "names.frame_values" if method == "names.bind_frame" else "names.unpack"
            unpacked = ast.Assign([ast.Tuple([_name(p, True) for p in parts], ast.Store())],
                                  _call(frame, value, _const(len(parts)), _const(star)))
            out: list[ast.stmt] = [unpacked]
            for p, e in zip(parts, t.elts):
                out += self.assign(e, _name(p), method)
            return out
        raise self.error("unsupported-syntax", "this assignment target is not supported in a kernel function", t,
                         found=f"an assignment to a {type(t).__name__}")

    def do_AugAssign(self, s: ast.AugAssign) -> list[ast.stmt]:
        op = _const(_AUG[type(s.op)])
        t = s.target
        if isinstance(t, ast.Name):
            aug = _call("names.augment", _const(t.id), _name(t.id), op, self.expr(s.value))
            return [self.pos(s), ast.Assign([_name(t.id, True)], aug)]
        if isinstance(t, ast.Subscript):
            value = self.expr(s.value)
            return [self.pos(s), ast.Expr(_call("names.setitem", self.expr(t.value), self.key(t.slice), value, op))]
        raise self.attribute_error(t)

    def attribute_error(self, t: ast.AST) -> errors.TileLangError:
        return self.error("unsupported-syntax", "assignment to an attribute is not supported in a kernel function", t,
                          found="an assignment to an attribute",
                          hint="keep mutable state in T.alloc_var and store through its name")

    def do_AnnAssign(self, s: ast.AnnAssign) -> list[ast.stmt]:
        if s.value is not None:
            return [self.pos(s), *self.assign(s.target, self.expr(s.value))]
        if not isinstance(s.target, ast.Name):
            return []
        name = s.target.id
        if name in self.params:
            self.annotated.setdefault(name, s.annotation)
            declare = _call("annotate", _const(name), _name(name), self.expr(s.annotation))
            return [self.pos(s), ast.Assign([_name(name, True)], declare)]
        return []

    def do_If(self, s: ast.If) -> list[ast.stmt]:
        names = assigned_names([*s.body, *s.orelse])
        f = self.fresh("i")
        return [self.pos(s.test), self.enter(names, "flow.if_", f, self.expr(s.test), _const(bool(s.orelse))),
                self.branch(f, "then", s.body), *self.leave(names, "flow.mid", f),
                self.branch(f, "orelse", s.orelse), *self.leave(names, "flow.end_if", f)]

    def branch(self, frame: str, which: str, body: list[ast.stmt]) -> ast.stmt:
        return ast.If(ast.Attribute(_name(frame), which, ast.Load()), self.block(body) or [ast.Pass()], [])

    def enter(self, names: list[str], method: str, frame: str, what: ast.expr, *more: ast.expr) -> ast.stmt:
        """Open a frame: the names that its body assigns are passed with their values."""
        return ast.Assign([_name(frame, True)], self.opened(names, method, what, *more))

    def opened(self, names: list[str], method: str, what: ast.expr, *more: ast.expr) -> ast.expr:
        return _call(method, what, _const(tuple(names)), _tuple(_name(n) for n in names), *more)

    def leave(self, names: list[str], method: str, frame: str, *more: ast.expr) -> list[ast.stmt]:
        call = _call(method, _name(frame), _tuple(_name(n) for n in names), *more)
        if not names:
            return [ast.Expr(call)]
        return [ast.Assign([ast.Tuple([_name(n, True) for n in names], ast.Store())], call)]

    def do_For(self, s: ast.For) -> list[ast.stmt]:
        if s.orelse:
            raise self.error("unsupported-syntax", "`for … else` is not supported in a kernel function", s,
                             found="else of a for loop")
        names = assigned_names([s.target, *s.body])
        carried = read_before_assigned(s.body) & set(assigned_names(s.body))
        it = s.iter
        if isinstance(it, ast.Call) and isinstance(it.func, ast.Name) and it.func.id == "range":
            it.func = _call("flow.builtin", it.func)
        f = self.fresh("l")
        begin = self.enter(names, "flow.loop", f, self.expr(it))
        body = [*self.assign(s.target, ast.Attribute(_name(f), "value", ast.Load()), "names.bind_frame"), *self.block(s.body)]
        return [self.pos(it), begin, *body,
                *self.leave(names, "flow.end_loop", f, _const(frozenset(carried)))]

    def do_While(self, s: ast.While) -> list[ast.stmt]:
        if s.orelse:
            raise self.error("unsupported-syntax", "`while … else` is not supported in a kernel function", s,
                             found="else of a while loop")
        names = assigned_names(s.body)
        carried = read_before_assigned([s]) & set(names)
        f = self.fresh("w")
        return [self.pos(s.test), self.enter(names, "flow.while_", f, _thunk(self.expr(s.test))),
                self.branch(f, "then", s.body), *self.leave(names, "flow.end_loop", f, _const(frozenset(carried)))]

    def do_With(self, s: ast.With) -> list[ast.stmt]:
        body = None
        scoped = [i.optional_vars for i in s.items if i.optional_vars is not None]
        names = assigned_names([*scoped, *s.body])  # before the body is rewritten, which adds internal names
        for item in reversed(s.items):
            inner = self.block(s.body) if body is None else body
            f = self.fresh("s")
            begin = self.opened(names, "flow.scope", self.expr(item.context_expr))
            target: list[ast.stmt] = []
            if item.optional_vars is not None:
                target = self.assign(item.optional_vars, ast.Attribute(_name(f), "value", ast.Load()), "names.bind_frame")
            with_ = ast.With([ast.withitem(begin, _name(f, True))], (target + inner) or [ast.Pass()])
            body = [self.pos(item.context_expr), with_, *self.leave(names, "flow.end_scope", f)]
        assert body is not None  # a with statement has at least one item
        return body

    def do_Return(self, s: ast.Return) -> list[ast.stmt]:
        if s.value is None:  # the trace goes on behind a return of the thread, with what other threads execute
            return [self.pos(s), ast.If(_call("flow.leaves_function"), [ast.Return(_call("flow.return_", _const(None)))], [])]
        return [self.pos(s), ast.Return(_call("flow.return_", self.expr(s.value)))]

    def do_Delete(self, s: ast.Delete) -> list[ast.stmt]:
        names = [t for t in s.targets if isinstance(t, ast.Name)]
        s.targets = [t for t in s.targets if not isinstance(t, ast.Name)]
        out: list[ast.stmt] = [ast.Assign([_name(t.id, True)], _name(UNDEFINED)) for t in names]
        return [self.pos(s), *out, *([s] if s.targets else [])]

    def do_Assert(self, s: ast.Assert) -> list[ast.stmt]:
        msg = self.expr(s.msg) if s.msg is not None else _const("")
        return [self.pos(s), ast.Expr(_call("flow.assert_", self.expr(s.test), _thunk(msg), _const(ast.unparse(s.test))))]

    def do_Break(self, s: ast.Break) -> list[ast.stmt]:
        return [self.pos(s), ast.Expr(_call("flow.break_"))]

    def do_Continue(self, s: ast.Continue) -> list[ast.stmt]:
        return [self.pos(s), ast.Expr(_call("flow.continue_"))]

    def do_FunctionDef(self, s: ast.FunctionDef) -> list[ast.stmt]:
        raise self.error("nested-function", f"name '{s.name}' is not defined: a def nested in a kernel function is not "
                         "supported", s,
                         found=f"def {s.name}")

    def do_Global(self, s: ast.Global | ast.Nonlocal) -> list[ast.stmt]:
        word = type(s).__name__.lower()
        raise self.error("unsupported-syntax", f"`{word}` is not supported in a kernel function", s, found=ast.unparse(s),
                         hint="a kernel function reads names from outside and assigns its own; results go out in tensors")

    do_Nonlocal = do_Global  # type: ignore[assignment]
    do_AsyncFunctionDef = do_ClassDef = do_FunctionDef  # type: ignore[assignment]

    # -- expressions -------------------------------------------------------------------------------------------------
    def key(self, e: ast.expr) -> ast.expr:
        """A subscript as an ordinary expression: slices become slice(...) objects."""
        if isinstance(e, ast.Slice):
            parts = [self.expr(p) if p is not None else _const(None) for p in (e.lower, e.upper, e.step)]
            return ast.copy_location(_call("names.slice", *parts), e)
        if isinstance(e, ast.Tuple):
            return ast.copy_location(_tuple(self.key(x) for x in e.elts), e)
        return self.expr(e)

    def visit_Subscript(self, e: ast.Subscript) -> ast.expr:
        if isinstance(e.ctx, ast.Load) and isinstance(e.value, (ast.Attribute, ast.Subscript)):
            return ast.copy_location(_call("names.getitem", self.expr(e.value), self.key(e.slice)), e)
        return self.generic_visit(e)  # type: ignore[return-value]

    def visit_BoolOp(self, e: ast.BoolOp) -> ast.expr:
        method = "conditions.and_" if isinstance(e.op, ast.And) else "conditions.or_"
        first, *rest = [self.expr(v) for v in e.values]
        return ast.copy_location(_call(method, first, *map(_thunk, rest)), e)

    def visit_UnaryOp(self, e: ast.UnaryOp) -> ast.expr:
        if isinstance(e.op, ast.Not):
            return ast.copy_location(_call("conditions.not_", self.expr(e.operand)), e)
        return self.generic_visit(e)  # type: ignore[return-value]

    def visit_IfExp(self, e: ast.IfExp) -> ast.expr:
        return ast.copy_location(_call("conditions.ternary", self.expr(e.test), _thunk(self.expr(e.body)),
                                       _thunk(self.expr(e.orelse))), e)

    def visit_List(self, e: ast.List) -> ast.expr:
        new = self.generic_visit(e)
        if not isinstance(e.ctx, ast.Load) or all(isinstance(x, ast.Constant) for x in e.elts):
            return new  # type: ignore[return-value]
        return ast.copy_location(_call("names.collected", new), e)  # type: ignore[arg-type]

    def visit_ListComp(self, e: ast.expr) -> ast.expr:
        return ast.copy_location(_call("names.collected", self.generic_visit(e)), e)  # type: ignore[arg-type]

    visit_Dict = visit_DictComp = visit_ListComp  # type: ignore[assignment]

    def visit_Call(self, e: ast.Call) -> ast.expr:
        self.generic_visit(e)
        if isinstance(e.func, ast.Name) and e.func.id == "print":
            e.func = ast.copy_location(_call("flow.builtin", e.func), e.func)
        if isinstance(e.func, ast.Attribute) and e.func.attr in _KEEPS and not any(isinstance(a, ast.Starred) for a in e.args):
            e.args = [ast.copy_location(_call("names.as_it_is_now", a), a) for a in e.args]
        return e

    def visit_Yield(self, e: ast.expr) -> ast.expr:
        raise self.error("unsupported-syntax", "a kernel function cannot yield or await: its body would never run", e,
                         found=str(type(e).__name__.lower()),
                         hint="write to an output tensor; return T.empty tensors at the end")

    visit_YieldFrom = visit_Await = visit_Yield  # type: ignore[assignment]

    def visit_Compare(self, e: ast.Compare) -> ast.expr:
        if len(e.ops) == 1:
            if isinstance(e.ops[0], (ast.In, ast.NotIn)):
                return ast.copy_location(_call("conditions.contains", self.expr(e.left), self.expr(e.comparators[0]),
                                               _const(isinstance(e.ops[0], ast.NotIn))), e)
            if isinstance(e.ops[0], (ast.Eq, ast.NotEq)):
                return ast.copy_location(_call("conditions.equality", _const(_CMP[type(e.ops[0])]), self.expr(e.left),
                                               self.expr(e.comparators[0])), e)
            return self.generic_visit(e)  # type: ignore[return-value]
        rest = [_tuple((_const(_CMP[type(op)]), _thunk(self.expr(c)))) for op, c in zip(e.ops, e.comparators)]
        return ast.copy_location(_call("conditions.compare", self.expr(e.left), *rest), e)


def _copy_location_deep(new: ast.AST, old: ast.AST) -> None:
    if not hasattr(new, "lineno") and isinstance(new, (ast.stmt, ast.expr)):
        ast.copy_location(new, old)


def _fill_locations(n: ast.AST, line: int) -> None:
    """Give generated nodes the location of the enclosing node.  A stack, since recursion is too deep for long bodies."""
    stack: list[tuple[ast.AST, tuple[int, int, int, int]]] = [(n, (line, 0, line, 0))]
    while stack:
        at, loc = stack.pop()
        if "lineno" in at._attributes:
            if getattr(at, "lineno", None) is None:
                at.lineno, at.col_offset, at.end_lineno, at.end_col_offset = loc  # type: ignore[attr-defined]
            else:
                loc = (at.lineno, at.col_offset, at.end_lineno or at.lineno, at.end_col_offset or 0)  # type: ignore
        for c in ast.iter_child_nodes(at):
            stack.append((c, loc))
