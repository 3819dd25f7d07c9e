"""Walks and rewrites the IR.  A rewrite that changes nothing returns the same object, so that `is` tests for a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .buffer import Buffer, Load
from .children import below, held, is_large, name_bit
from .expr import Call, Expr, Var, unary
from .nodes import Node, fields_of, kinds_of, node_fields
from .options import Options
from .stmt import Bind, Break, Continue, For, Func, If, Launch, Parallel, Seq, Stmt, While, replace, seq
from .scopes import GLOBAL

# A rewriter also visits definitions (Var in Bind/For/Parallel/Launch/Func, Buffer in Alloc/Func), because they are fields.

_FEW = 4  # names of which a mapping may have more than an expression
_WITH_STATEMENTS = (Seq, For, If, While, Parallel, Launch)
_WITH_BODY = (For, While, Parallel, Launch)


def walk(n: Node, *classes: type) -> Iterator[Any]:
    """All nodes at and below n, in pre-order.  Does not descend into Buffers.

    classes: if given, only instances of these classes.  Subtrees without such instances are skipped, which makes a search for
    the few launches, calls or allocations of a program fast.
    """
    return _found(n, kinds_of(classes)) if classes else _all(n)


def _all(n: Node) -> Iterator[Node]:
    stack = [n]
    pop = stack.pop
    while stack:
        at = pop()
        yield at
        if type(at) is not Buffer:
            stack += at._below or below(at)


def _found(n: Node, kinds: int) -> Iterator[Node]:
    stack = [n]
    pop = stack.pop
    while stack:
        at = pop()
        if (at._held or held(at)) & kinds:
            if at._kind & kinds:
                yield at
            if type(at) is not Buffer:
                stack += at._below  # type: ignore[arg-type] # held has found it


def distinct(n: Node, *classes: type) -> Iterator[Any]:
    """walk, with each node once however often it is used: for expressions that have not been cut into variables yet."""
    kinds, seen, stack = kinds_of(classes), set[int](), [n]
    while stack:
        at = stack.pop()
        if held(at) & kinds and id(at) not in seen:
            seen.add(id(at))
            if at._kind & kinds:
                yield at
            if type(at) is not Buffer:
                stack += below(at)


def mapped(fn: Callable[[Any], Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """fn of each value; `values` itself where nothing changes."""
    out = tuple(map(fn, values))
    return values if all(a is b for a, b in zip(out, values)) else out


def rewrite(n: Any, fn: Callable[[Any], Node | None], *classes: type) -> Any:
    """Bottom-up rewriting: children first, then fn(node) -> replacement, or None to keep it.

    fn is called on every Node except inside Buffers.  A Seq in a Seq is spliced.  classes: if given, fn is called only on
    instances of these classes, and subtrees without such instances are kept without a visit.
    """
    kinds = kinds_of(classes)
    return _rewritten(n, fn, kinds, kinds) if classes else _rewritten(n, fn, -1, -1)


def _rewritten(n: Any, fn: Callable[[Any], Node | None], holding: int, kinds: int) -> Any:
    """rewrite of subtrees that contain one of the bits `holding` (classes or names); fn is called for the classes of `kinds`.

    -1: all of them.
    """
    memo: dict[int, Any] = {}

    def visit(v: Any) -> Any:
        if isinstance(v, Node):
            if holding != -1 and not (v._held or held(v)) & holding:
                return v
            key = id(v)
            if key in memo:
                return memo[key]
            kind = type(v)
            out = v if kind is Var or kind is Buffer or v._below == () else rebuild(v, visit)
            if v._kind & kinds:
                got = fn(out)
                if got is not None:
                    out = got
            memo[key] = out
            return out
        if type(v) is tuple and v:
            values = [visit(x) for x in v]
            for a, b in zip(values, v):
                if a is not b:
                    return tuple(values)
        return v

    out = visit(n)
    visit = None  # type: ignore[assignment]  # it names itself: it and all that it remembers would live until the garbage collector runs
    return out


def rewrite_stmts(n: Any, fn: Callable[[Stmt], Stmt | None]) -> Any:
    """Top-down rewriting of statements: fn(statement) -> replacement, or None to visit the statements inside it.

    n: a Func or a statement.  Expressions and replacements are not visited.
    """
    def visit(v: Any) -> Any:
        if isinstance(v, Stmt):
            got = fn(v)
            if got is not None:
                return got
            return rebuild(v, visit) if isinstance(v, _WITH_STATEMENTS) else v
        if type(v) is tuple and v:
            return mapped(visit, v)
        return v

    out = replace(n, body=visit(n.body)) if isinstance(n, Func) else visit(n)
    visit = None  # type: ignore[assignment]  # as above
    return out


def rewrite_launches(n: Any, fn: Callable[[Launch], Stmt | None]) -> Any:
    """Rewrite the launches of a Func or a statement: fn(launch) -> replacement, or None to keep it.  Bodies are not visited."""
    def here(s: Stmt) -> Stmt | None:
        if not isinstance(s, Launch):
            return None
        got = fn(s)
        return s if got is None else got

    return rewrite_stmts(n, here)


def rebuild(n: Node, visit: Callable[[Any], Any]) -> Any:
    """n with visit applied to each field that may hold nodes; n itself when no field changed."""
    changed: dict[str, Any] | None = None
    for f in node_fields(type(n)):
        old = getattr(n, f)
        if isinstance(old, (Node, tuple, Options)):
            got = old.rebuilt(visit) if isinstance(old, Options) else visit(old)
            if got is not old:
                if changed is None:
                    changed = {}
                changed[f] = got
    if changed is None:
        return n
    if isinstance(n, Seq):
        return seq(*changed["stmts"], span=n.span)
    return type(n)(*[changed[f] if f in changed else getattr(n, f) for f in fields_of(type(n))], span=n.span)  # type: ignore[call-arg]


def with_inner(s: Any, visit: Callable[[Any], Any]) -> Any:
    """s with visit applied to each statement directly inside it; s itself when none changed."""
    def field(v: Any) -> Any:
        if type(v) is tuple and v and isinstance(v[0], Stmt):
            return mapped(visit, v)
        return visit(v) if isinstance(v, Stmt) else v

    return rebuild(s, field)


def substitute(n: Any, mapping: dict[Any, Any]) -> Any:
    """Replace Vars by Exprs and Buffers by Buffers.

    Mapped Buffers are replaced wherever they occur.  A tensor in global memory whose address, shape or strides contain a mapped
    Var is replaced by a tensor with the new address, shape and strides.
    """
    if not mapping:
        return n

    def fn(x: Node) -> Node | None:
        kind = type(x)
        if kind is Var:
            return mapping.get(x)
        if kind is Buffer:
            got = mapping.get(x)
            return _moved(x, mapping) if got is None else got  # type: ignore[arg-type]
        return None

    if len(mapping) > _FEW and isinstance(n, Expr) and not held(n) & kinds_of((Buffer,)):
        mapping = {v: mapping[v] for v in free_vars(n) if v in mapping}
    names = 0
    for x in mapping:
        names |= name_bit(x)
    return _rewritten(n, fn, names, kinds_of((Var, Buffer)))


def remember(values: dict[Any, Any], s: Bind) -> None:
    """values[s.var] = what s binds, with the variables in `values` replaced by theirs; for analyses, which do not emit it.

    Of a large value only what it depends on is kept, as a call of an unknown function: put into each other, such values
    explode.
    """
    value = substitute(s.value, values)
    if is_large(value):
        loads = {x.buffer: x for x in walk(value, Load)}
        made_of = (s.var, *sorted(free_vars(value), key=lambda v: v.name), *loads.values())
        value = Call("unknown", made_of, value.dtype, span=s.span)
    values[s.var] = value


def _moved(b: Buffer, mapping: dict[Any, Any]) -> Buffer | None:
    """A tensor in global memory with its address, shape and strides substituted; None if they contain no mapped Var."""
    if b.scope_name != GLOBAL:
        return None
    data = mapping.get(b.data, b.data)
    dims = (*b.shape, *(b.strides_ or ()), b.offset)
    new = tuple(substitute(d, mapping) if isinstance(d, Expr) else d for d in dims)
    if data is b.data and all(a is d for a, d in zip(new, dims)):
        return None
    rank = len(b.shape)
    return Buffer(b.name, new[:rank], b.dtype, b.scope_name, b.strides_ and new[rank:-1], new[-1], data, b.facts, span=b.span)


def free_vars(n: Any) -> set[Var]:
    """Vars used below n, including those in shapes and strides of used buffers, without the Vars bound below n."""
    if n._free is not None:
        return set(n._free)
    used: set[Var] = set()
    bound: set[Var] = set()
    for x in walk(n, Var, Buffer, Bind, For, Parallel, Launch):
        kind = type(x)
        if kind is Var:
            used.add(x)
        elif kind is Buffer:
            for d in x.exprs:
                used |= free_vars(d)
        elif kind is Bind or kind is For:
            bound.add(x.var)
        elif kind is Parallel:
            bound.update(x.vars)
        else:
            bound.update(x.block_vars)
            bound.update(x.thread_vars)
    object.__setattr__(n, "_free", found := used - bound)
    return set(found)


def symbols_of(func: Func) -> tuple[Var, ...]:
    """The variables in shapes, strides and offsets of tensor parameters that are no parameters themselves, in order."""
    params = set(func.params)
    return tuple(dict.fromkeys(v for _, b in func.buffers for d in b.exprs for v in walk(d, Var) if v not in params))


def used_vars(n: Any) -> set[Var]:
    """free_vars(n) and the data Vars of the buffers used below n."""
    return free_vars(n) | {x.data for x in walk(n, Buffer)}


def follows_addresses(n: Node) -> bool:
    """Whether a pointer is computed or read below n.  Such a pointer may point to any memory."""
    return any(x.var.dtype.is_handle for x in walk(n, Bind))


def stmts_of(s: Stmt) -> tuple[Stmt, ...]:
    """The statements of a body: those of a Seq, or the single statement."""
    return s.stmts if isinstance(s, Seq) else (s,)


def inner(s: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside a statement."""
    kind = type(s)
    if kind is Seq:
        return s.stmts  # type: ignore[attr-defined]
    if kind is If:
        return (s.then,) if s.orelse is None else (s.then, s.orelse)  # type: ignore[attr-defined]
    return (s.body,) if kind in _WITH_BODY else ()  # type: ignore[attr-defined]


def controls(s: Stmt) -> tuple[Any, ...]:
    """What decides which of the statements directly inside a branch or serial loop run, and how often."""
    return (s.start, s.extent) if isinstance(s, For) else (s.cond,) if isinstance(s, (If, While)) else ()


def ways(s: If) -> tuple[tuple[Expr, Stmt], ...]:
    """(condition, statement) of each way of a branch."""
    return tuple(zip((s.cond, unary("not", s.cond)), inner(s)))


def jumps_of(s: Stmt) -> Iterator[Stmt]:
    """The breaks and continues in a statement that belong to the loop around it."""
    if isinstance(s, (Break, Continue)):
        yield s
    elif isinstance(s, (Seq, If)):
        for x in inner(s):
            yield from jumps_of(x)


def leaves(s: Stmt) -> bool:
    """Whether a break or continue in a statement belongs to the loop around it."""
    return next(jumps_of(s), None) is not None


def statements(s: Stmt) -> Iterator[Stmt]:
    """s and every statement below it, pre-order."""
    stack = [s]
    while stack:
        at = stack.pop()
        yield at
        stack += reversed(inner(at))
