"""Walking and rewriting.  A rewrite that changes nothing returns the same object, so "did it change?" is `is`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .buffer import Buffer
from .expr import Expr, Var
from .nodes import Node, fields_of
from .stmt import Bind, For, Func, If, Launch, Parallel, Seq, Stmt, While, replace, seq

# Definition sites (Var in Bind/For/Parallel/Launch/Func, Buffer in Alloc/Func) are fields too: a rewriter sees them.


_PLAIN = {"str", "int", "bool", "dtype", "tuple[int, ...]", "tuple[int, int, int]"}
_NODE_FIELDS: dict[type, tuple[str, ...]] = {}
_WITH_STATEMENTS = (Seq, For, If, While, Parallel, Launch)


def node_fields(cls: type) -> tuple[str, ...]:
    """Names of the fields of a node class that may hold nodes (by their annotation), in order."""
    got = _NODE_FIELDS.get(cls)
    if got is None:
        types = cls.__dataclass_fields__  # type: ignore[attr-defined]
        got = _NODE_FIELDS[cls] = tuple(f for f in fields_of(cls) if types[f].type not in _PLAIN)
    return got


def _below(n: Node) -> tuple[Node, ...]:
    """Direct child nodes from the last to the first, kept on the node: nodes never change, and many passes walk them."""
    out: list[Node] = []
    for f in node_fields(type(n)):
        v = getattr(n, f)
        if isinstance(v, Node):
            out.append(v)
        elif type(v) is tuple and v:
            _nodes_in(v, out)
    out.reverse()
    below = tuple(out)
    object.__setattr__(n, "_below", below)
    return below


def children(n: Node) -> Iterator[Node]:
    """Direct child nodes, in field order; Buffers and Vars included, a Buffer's own fields not."""
    below = n.__dict__.get("_below")
    return reversed(_below(n) if below is None else below)


def _nodes_in(values: tuple[Any, ...], out: list[Node]) -> None:
    for v in values:
        if isinstance(v, Node):
            out.append(v)
        elif type(v) is tuple and v:
            _nodes_in(v, out)


def walk(n: Node) -> Iterator[Node]:
    """All nodes below n, n first (pre-order).  Does not descend into Buffers."""
    stack = [n]
    pop = stack.pop
    while stack:
        at = pop()
        yield at
        kind = type(at)
        if kind is Var or kind is Buffer:
            continue
        below = at.__dict__.get("_below")
        if below is None:
            below = _below(at)
        if below:
            stack += below


def rewrite(n: Any, fn: Callable[[Node], Node | None]) -> Any:
    """Bottom-up rewriting: children first, then fn(node) -> replacement, or None to keep it.

    fn is called on every Node except inside Buffers; a Seq whose child becomes a Seq is spliced.
    """
    memo: dict[int, tuple[Any, Any]] = {}

    def visit(v: Any) -> Any:
        if isinstance(v, Node):
            hit = memo.get(id(v))
            if hit is not None:
                return hit[1]
            kind = type(v)
            new = v if kind is Var or kind is Buffer or v.__dict__.get("_below") == () else rebuild(v, visit)
            got = fn(new)
            out = new if got is None else got
            memo[id(v)] = (v, out)
            return out
        if type(v) is tuple and v:
            values = [visit(x) for x in v]
            for a, b in zip(values, v):
                if a is not b:
                    return tuple(values)
        return v

    return visit(n)


def rewrite_stmts(n: Any, fn: Callable[[Stmt], Stmt | None]) -> Any:
    """Top-down rewriting of statements: fn(statement) -> what stands in its place, or None to look at those inside it.

    n: a Func or a statement.  Expressions are not visited; what fn gives is not looked into.
    """
    def visit(v: Any) -> Any:
        if isinstance(v, Stmt):
            got = fn(v)
            if got is not None:
                return got
            return rebuild(v, visit) if isinstance(v, _WITH_STATEMENTS) else v
        if type(v) is tuple and v:
            out = tuple(map(visit, v))
            return v if all(a is b for a, b in zip(out, v)) else out
        return v

    return replace(n, body=visit(n.body)) if isinstance(n, Func) else visit(n)


def rewrite_launches(n: Any, fn: Callable[[Launch], Stmt | None]) -> Any:
    """A Func or a statement with fn(launch) in the place of each launch, None to keep it; launches are not looked into."""
    def here(s: Stmt) -> Stmt | None:
        if not isinstance(s, Launch):
            return None
        got = fn(s)
        return s if got is None else got

    return rewrite_stmts(n, here)


def rebuild(n: Node, visit: Callable[[Any], Any]) -> Any:
    """n with visit applied to each field that may hold nodes; n itself when no field changed."""
    held, changed = n.__dict__, None
    for f in node_fields(type(n)):
        old = held[f]
        if isinstance(old, (Node, tuple)):
            got = visit(old)
            if got is not old:
                if changed is None:
                    changed = {}
                changed[f] = got
    if changed is None:
        return n
    if isinstance(n, Seq):
        return seq(*changed["stmts"], span=n.span)
    return type(n)(*(changed[f] if f in changed else held[f] for f in fields_of(type(n))), span=n.span)  # type: ignore[call-arg]


def substitute(n: Any, mapping: dict[Any, Any]) -> Any:
    """Replace Vars (by Exprs) and Buffers (by Buffers).  Mapped Buffers are replaced wherever they occur; a tensor in global
    memory whose address or shape is a mapped Var becomes the tensor that its new value makes."""
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

    return rewrite(n, fn)


def _moved(b: Buffer, mapping: dict[Any, Any]) -> Buffer | None:
    """A tensor in global memory with its address, shape and strides substituted, None where nothing of them is mapped."""
    if b.scope_name != "global":
        return None
    data = mapping.get(b.data, b.data)
    dims = (*b.shape, *(b.strides_ or ()), b.offset)
    new = tuple(substitute(d, mapping) if isinstance(d, Expr) else d for d in dims)
    if data is b.data and all(a is d for a, d in zip(new, dims)):
        return None
    rank = len(b.shape)
    return Buffer(b.name, new[:rank], b.dtype, b.scope_name, b.strides_ and new[rank:-1], new[-1], data, b.attrs, span=b.span)


def free_vars(n: Any) -> set[Var]:
    """Vars used below n (shape and stride expressions of used buffers included), minus those bound below n."""
    used: set[Var] = set()
    bound: set[Var] = set()
    for x in walk(n):
        kind = type(x)
        if kind is Var:
            used.add(x)  # type: ignore[arg-type]
        elif kind is Buffer:
            for d in (*x.shape, *(x.strides_ or ()), x.offset):  # type: ignore[attr-defined]
                if isinstance(d, Expr):
                    used |= free_vars(d)
        elif isinstance(x, Stmt):
            t = kind.__name__
            if t in ("Bind", "For"):
                bound.add(x.var)  # type: ignore[attr-defined]
            elif t == "Parallel":
                bound.update(x.vars)  # type: ignore[attr-defined]
            elif t == "Launch":
                bound.update(x.block_vars)  # type: ignore[attr-defined]
                bound.update(x.thread_vars)  # type: ignore[attr-defined]
    return used - bound


def used_vars(n: Any) -> set[Var]:
    """free_vars, and the storages of the buffers used below n."""
    return free_vars(n) | {x.data for x in walk(n) if type(x) is Buffer}


def follows_addresses(n: Node) -> bool:
    """Whether a pointer is computed or read below n: what is made of it may be any memory."""
    return any(isinstance(x, Bind) and x.var.dtype.is_handle for x in walk(n))


def stmts_of(s: Stmt) -> tuple[Stmt, ...]:
    """The statements of a body: a Seq's, or the one."""
    return s.stmts if isinstance(s, Seq) else (s,)


def inner(s: Stmt) -> tuple[Stmt, ...]:
    """The statements directly inside a statement."""
    if isinstance(s, Seq):
        return s.stmts
    if isinstance(s, If):
        return (s.then,) if s.orelse is None else (s.then, s.orelse)
    return (s.body,) if isinstance(s, For | While | Parallel | Launch) else ()


def statements(s: Stmt) -> Iterator[Stmt]:
    """s and every statement below it, pre-order."""
    stack = [s]
    while stack:
        at = stack.pop()
        yield at
        stack += reversed(inner(at))
