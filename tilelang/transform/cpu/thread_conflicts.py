"""Where one thread may access what another thread writes, so that a thread's whole statement cannot run before the next one's.

Threads of a block go through a statement together.  Running one thread after another is the same where each element that
is written is accessed by one thread alone; that is what is proven here, from linear forms of the indices:

    if c: for j: s[tx, j] = s[tx, j - 1]     disjoint: the first index differs between threads
    for i in range(tx, n, 64): s[i] = 0      disjoint: steps of 64 threads keep the remainder of the thread
    if c: for d: s[(tx + d) % 16] = tx       conflict: the last one to write is another thread, run thread after thread

What is not proven counts as a conflict.  An element that is accessed once, in no loop, needs no proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from tilelang.ir import (AddressOf, Binary, Bind, Buffer, Call, Cast, Const, Evaluate, Expr, For, If, Launch, Load, Node, Ramp,
                         Seq, Stmt, Store, TileOp, Var, While, children, walk)
from tilelang.ir.record import record, state
from tilelang.target.cpu_launch import ThreadValues, is_private

from ..analysis.guards import conjuncts

_COMMUTE = frozenset(f"atomic_{k}" for k in ("add", "addx2", "addx4", "max", "min", "and", "or", "xor", "inc", "dec"))
Digit = tuple[int, int]  # number of the thread variable, number of its digit from the lowest


@record
class Access:
    """One access of memory in the program's text.  kind: read, write, or the name of an atomic update.

    sizes: elements from the index on, per dimension (None: not known).  at: the simple statement (or the control
    statement whose condition or bounds hold it).  looped: it stands in a loop of the analysed statement.  used: the result of
    an atomic update is read.
    """

    buffer: Buffer
    indices: tuple[Expr, ...]
    kind: str
    at: Stmt
    looped: bool
    sizes: tuple[int | None, ...] | None = None
    used: bool = True


@state
class Form:
    """An index: digits of the thread's number, values that are the same for all threads, and values that may change."""

    threads: dict[Digit, int] = field(default_factory=dict)
    stable: dict[Expr, int] = field(default_factory=dict)
    const: int = 0
    moving: list[tuple[int, int | None]] = field(default_factory=list)  # coefficient; its value is in 0..this (None: any)

    def plus(self, o: Form, k: int = 1) -> Form:
        threads, stable = dict(self.threads), dict(self.stable)
        for d, c in o.threads.items():
            threads[d] = threads.get(d, 0) + k * c
        for e, c in o.stable.items():
            stable[e] = stable.get(e, 0) + k * c
        return Form({d: c for d, c in threads.items() if c}, {e: c for e, c in stable.items() if c},
                    self.const + k * o.const, self.moving + [(k * c, n) for c, n in o.moving])

    @property
    def fixed(self) -> int | None:
        """Its value, when it is a constant."""
        return None if self.threads or self.stable or self.moving else self.const


class _Inside:
    """The variables that a statement binds, its loops, and the storage it may write."""

    def __init__(self, s: Stmt) -> None:
        self.loops = {n.var: n for n in walk(s) if isinstance(n, For)}
        self.bound = {n.var for n in walk(s) if isinstance(n, Bind)} | set(self.loops)
        self.written = {n.buffer.data for n in walk(s) if isinstance(n, (Store, AddressOf))}
        self.written |= {a.region.buffer.data for n in walk(s) if isinstance(n, TileOp)
                         for a in n.accesses() if a.writes}  # type: ignore[attr-defined]


class Conflicts:
    """Finds conflicts in the statements of one launch."""

    def __init__(self, launch: Launch, values: ThreadValues) -> None:
        self.known = values
        self.vars = {v: k for k, v in enumerate(launch.thread_vars)}
        self.extents = [int(n) for n in launch.threads]
        self.values = {n.var: n.value for n in walk(launch.body, Bind)}
        self.cuts: list[list[int]] = []  # of the analysed accesses: where digits of each thread index begin

    def exist_in(self, s: Stmt) -> bool:
        """Whether threads that run s one after another may see other values than threads that run it together."""
        if isinstance(s, If) and s.orelse is None and self._selects_one(s.cond):
            return False
        by_data: dict[Var, list[Access]] = {}
        for a in self._accesses(s, False):
            by_data.setdefault(a.buffer.data, []).append(a)
        return any(self._conflict(found, s) for found in by_data.values())

    def overwrites(self, s: Stmt, data: Var) -> bool:
        """Whether the value of a store or an atomic update is read from where another thread stores in it."""
        found = [a for a in self._accesses(s, False) if a.buffer.data is data]
        return len(found) > 1 and not self._disjoint(found, s)

    # ---- accesses -------------------------------------------------------------------------------------------------------

    def _accesses(self, s: Stmt, looped: bool) -> Iterator[Access]:
        match s:
            case Seq():
                for x in s.stmts:
                    yield from self._accesses(x, looped)
            case If():
                yield from self._read(s.cond, s, looped)
                yield from self._accesses(s.then, looped)
                if s.orelse is not None:
                    yield from self._accesses(s.orelse, looped)
            case For():
                for e in (s.start, s.extent):
                    yield from self._read(e, s, looped)
                yield from self._accesses(s.body, True)
            case While():
                yield from self._read(s.cond, s, True)
                yield from self._accesses(s.body, True)
            case TileOp():
                for a in s.accesses():  # type: ignore[attr-defined]
                    r = a.region
                    if not is_private(r.buffer):
                        sizes = tuple(e if isinstance(e, int) else int(e.value) if isinstance(e, Const) else None
                                      for e in r.extents)
                        for kind in (*(("read",) if a.reads else ()), *(("write",) if a.writes else ())):
                            yield Access(r.buffer, r.mins, kind, s, looped, sizes)
            case _:
                if isinstance(s, Store) and not is_private(s.buffer):
                    yield Access(s.buffer, s.indices, "write", s, looped)
                unused = s.call if isinstance(s, Evaluate) else None
                yield from self._read(s, s, looped, unused)

    def _read(self, n: Node, at: Stmt, looped: bool, unused: Node | None = None) -> Iterator[Access]:
        """Loads and calls on addresses in an expression, or in a simple statement."""
        if isinstance(n, Load) and not is_private(n.buffer):
            yield Access(n.buffer, n.indices, "read", at, looped)
        if isinstance(n, Call):
            for k, a in enumerate(n.args):
                if isinstance(a, AddressOf) and not is_private(a.buffer) and "barrier" not in a.buffer.scope():
                    update = n.op.startswith("atomic_") and k == 0
                    kind = "read" if n.op in ("ldg", "atomic_load") or n.op.startswith("atomic_") and k else (
                        "write" if not update or n.op == "atomic_store" else n.op)
                    lanes = n.op[-1:] if n.op in ("atomic_addx2", "atomic_addx4") else "1"
                    known = n.op.startswith("atomic_") or n.op == "ldg"
                    sizes = (*(1,) * (len(a.indices) - 1), int(lanes)) if known else (None,) * len(a.indices)
                    yield Access(a.buffer, a.indices, kind, at, looped, sizes, n is not unused)
        for x in children(n):
            yield from self._read(x, at, looped, unused)

    # ---- conflicts ------------------------------------------------------------------------------------------------------

    def _conflict(self, found: list[Access], s: Stmt) -> bool:
        kinds = {a.kind for a in found}
        if kinds == {"read"}:
            return False
        if len(kinds) == 1 and kinds <= _COMMUTE and not any(a.used for a in found):
            return False
        if len(found) == 1 and not found[0].looped:
            return False
        return not self._disjoint(found, s)

    def _disjoint(self, found: list[Access], s: Stmt) -> bool:
        """Whether no two threads access one element in these accesses."""
        first = found[0].buffer
        if any(not _same_view(a.buffer, first) for a in found) or self.known.varies_place(first):
            return False
        inside = _Inside(s)
        by = self._divisors(found, inside)
        self.cuts = [_cuts(n, by) for n in self.extents]
        forms = [[self._form(i, inside).plus(Form(moving=[] if n == 1 else [(1, None if n is None else n - 1)]))
                  for i, n in zip(a.indices, a.sizes or (1,) * len(a.indices), strict=True)] for a in found]
        left = {(v, k): n for v, cuts in enumerate(self.cuts) for k, n in enumerate(_ranges(cuts)) if n > 1}
        ranges = dict(left)
        going = True
        while left and going:
            going = False
            for dim in zip(*forms, strict=True):
                for digit in list(left):
                    if _determines(digit, dim, left, ranges):
                        del left[digit]
                        going = True
        return not left

    # ---- linear forms ---------------------------------------------------------------------------------------------------

    def _form(self, e: Expr, inside: _Inside) -> Form:
        def visit(e: Expr) -> Form:
            match e:
                case Const():
                    return Form(const=int(e.value))
                case Cast() if e.dtype.is_int and e.value.dtype.is_int:
                    return visit(e.value)
                case Ramp() if isinstance(e.stride, Const):
                    return visit(e.base).plus(Form(moving=[(int(e.stride.value), e.lanes - 1)]))
                case Var() if e in self.vars:
                    k, cuts = self.vars[e], self.cuts[self.vars[e]]
                    return Form({(k, d): c for d, c in enumerate(cuts[:-1]) if cuts[d + 1] > c})
                case Var() if e in inside.loops:
                    start, extent = visit(inside.loops[e].start), visit(inside.loops[e].extent).fixed
                    return start.plus(Form(moving=[(1, None if extent is None else max(extent - 1, 0))]))
                case Var() if e in self.values and (e in inside.bound or self.known.varies(e)):
                    value = self.values[e]
                    if e in inside.bound or not any(isinstance(n, Load) for n in walk(value)):
                        return visit(value)  # what was read before s may have changed since
                case Binary(op=("add" | "sub") as op):
                    return visit(e.a).plus(visit(e.b), 1 if op == "add" else -1)
                case Binary(op="mul" | "shl"):
                    a, b = visit(e.a), visit(e.b)
                    if e.op == "shl":
                        b = Form() if b.fixed is None or not 0 <= b.fixed < 63 else Form(const=1 << b.fixed)
                        if not b.const:
                            return self._other(e, inside)
                    if a.fixed is not None:
                        a, b = b, a
                    if b.fixed is not None:
                        return Form().plus(a, b.fixed)
                case Binary(op="floordiv" | "truncdiv" | "floormod" | "truncmod" | "shr" | "bitand"):
                    if (quotient := _divided(e)) is not None and (
                            got := self._digits(visit(quotient[0]), quotient[1], quotient[2])):
                        return got
            return self._other(e, inside)

        return visit(e)

    def _other(self, e: Expr, inside: _Inside) -> Form:
        """A value that is the same for all threads during the statement, or one that may be anything."""
        steady = not self.known.varies(e) and not any(
            isinstance(n, Var) and n in inside.bound or isinstance(n, Call)
            or isinstance(n, Load) and (not is_private(n.buffer) or n.buffer.data in inside.written) for n in walk(e))
        if steady:
            return Form(stable={e: 1})
        rest = _divided(e) if isinstance(e, Binary) and e.op != "truncmod" else None
        return Form(moving=[(1, rest[1] - 1 if rest is not None and rest[2] else None)])

    def _digits(self, f: Form, by: int, rest: bool) -> Form | None:
        """f // by, or f % by, where f is digits of threads whose lower ones stay below `by`."""
        if f.stable or f.moving or f.const or any(c < 0 for c in f.threads.values()):
            return None
        low = {d: c for d, c in f.threads.items() if c % by}
        if sum(c * (_ranges(self.cuts[v])[k] - 1) for (v, k), c in low.items()) >= by:
            return None
        return Form(low) if rest else Form({d: c // by for d, c in f.threads.items() if d not in low})

    def _divisors(self, found: list[Access], inside: _Inside) -> list[int]:
        """The numbers that something in the indices is divided by, names followed."""
        todo: list[Expr] = [i for a in found for i in a.indices]
        seen: set[Var] = set()
        out: set[int] = set()
        while todo:
            for n in walk(todo.pop()):
                if isinstance(n, Binary) and (p := _divided(n)) is not None:
                    out.add(p[1])
                elif isinstance(n, Var) and n not in seen:
                    seen.add(n)
                    todo += [e for e in (self.values.get(n), inside.loops[n].start if n in inside.loops else None)
                             if e is not None]
        return sorted(out)

    def _selects_one(self, cond: Expr) -> bool:
        """Whether a condition holds for one thread at most."""
        pinned: set[Var] = set()
        for e, holds in conjuncts(cond):
            if isinstance(e, Binary) and e.op == ("eq" if holds else "ne"):
                for a, b in ((e.a, e.b), (e.b, e.a)):
                    if isinstance(a, Var) and not self.known.varies(b):
                        pinned.update([a] if a in self.vars else [x for x in [self.values.get(a)] if isinstance(x, Var)])
        return all(v in pinned for v, k in self.vars.items() if self.extents[k] > 1)


def _cuts(extent: int, by: list[int]) -> list[int]:
    """Where digits of a thread index begin: 1, the numbers that it is divided by, its extent."""
    cuts = [1]
    for c in by:
        if cuts[-1] < c < extent and c % cuts[-1] == 0:
            cuts.append(c)
    return [*cuts, max(extent, 1)]


def _ranges(cuts: list[int]) -> list[int]:
    """How many values each digit has."""
    return [-(-b // a) for a, b in zip(cuts, cuts[1:], strict=False)]


def _divided(e: Binary) -> tuple[Expr, int, bool] | None:
    """(x, n, whether it is the remainder) of x // n and x % n, n a positive number; thread indices are never negative."""
    if not isinstance(e.b, Const) or not e.dtype.is_int:
        return None
    n = int(e.b.value)
    match e.op:
        case "floordiv" | "truncdiv" | "floormod" | "truncmod" if n > 0:
            return e.a, n, e.op.endswith("mod")
        case "shr" if 0 <= n < 63:
            return e.a, 1 << n, False
        case "bitand" if n > 0 and n & (n + 1) == 0:
            return e.a, n + 1, True
    return None


def _same_view(a: Buffer, b: Buffer) -> bool:
    """Whether equal indices name equal elements in two views of one storage."""
    return a is b or (len(a.shape) == len(b.shape) and a.dtype == b.dtype and all(
        x is y or isinstance(x, int) and isinstance(y, int) and x == y
        for x, y in zip((*a.shape, a.offset, *(a.strides_ or ())), (*b.shape, b.offset, *(b.strides_ or ())), strict=False)
    ) and (a.strides_ is None) == (b.strides_ is None))


def _determines(digit: Digit, forms: tuple[Form, ...], left: dict[Digit, int], ranges: dict[Digit, int]) -> bool:
    """Whether an index of these forms is the same for two threads only where the digit is.

    The difference of two such indices is c * (difference of the digit) + multiples of c * (values of the digit) + what is
    less than c: zero only where the digit's difference is.
    """
    first = forms[0]
    c = abs(first.threads.get(digit, 0))
    if not c or any(f.threads.get(digit) != first.threads[digit] or f.stable != first.stable for f in forms):
        return False
    whole = c * ranges[digit]
    width = 0
    for d in {d for f in forms for d in f.threads} - {digit}:
        steps = [f.threads.get(d, 0) for f in forms]
        if d not in left:  # equal in the two threads
            step = max(steps) - min(steps)
        elif all(k % whole == 0 for k in steps):
            step = 0
        elif min(steps) < max(steps):
            step = max(map(abs, steps)) + max(map(abs, steps))
        else:
            step = abs(steps[0])
        width += step * (ranges[d] - 1)
    lows, highs = [], []
    for f in forms:
        shift = (f.const - first.const) % whole
        low = high = shift - whole if 2 * shift > whole else shift
        for k, n in f.moving:
            if k % whole == 0:
                continue
            if n is None:
                return False
            low, high = low + min(0, k * n), high + max(0, k * n)
        lows.append(low)
        highs.append(high)
    return width + max(highs) - min(lows) < c
