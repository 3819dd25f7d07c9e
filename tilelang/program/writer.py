"""What the text of a kernel is written with: its statements, its tiles, and the expressions that lie in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

from tilelang.target import Target

from .expr import HEAVY, Axis, Scalar, Tensor, axis, bounds, const, linear, number, plus, rewrite, summed, times, walk
from .graph import Dim, Size, text_of
from .nest import REDUCTIONS, Contraction, Pass, base_of, contraction, passes, row_digits
from .plan import Plan
from .rescale import is_float, neutral, vanishes
from .text import Printer, in_steps, unused, wide

BRANCHING = ("div", "tanh", "erf", "sin", "cos", "tan", "pow", "atan2", "log1p", "expm1")  # functions whose code has branches
MANY = 16  # elements of a row that a thread holds, from which its loads stand in front of such functions
NO_SIZES: Mapping[Axis, int] = MappingProxyType({})


@dataclass
class Tile:
    """A buffer of a block, or what one holds for a while.

    axes: those that its dimensions count.  shape: its extents.  key: counts the values that lie in tiles, in their order.
    each: how many indices of an axis have one element, where more than one.
    """

    name: str
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    dtype: str
    scope: str = "fragment"
    key: int = 0
    each: Mapping[Axis, int] = field(default_factory=dict)


@dataclass
class Facts:
    """What earlier runs found: expressions that get tiles of their own, and the last statement that reads each tile."""

    shared: frozenset[Scalar] = frozenset()
    last: dict[int, int] = field(default_factory=dict)


class Writer:
    """The text of one kernel while it is written.

    make: writes what a stage needs.  facts: what earlier runs over the same statements found.
    """

    def __init__(self, plan: Plan, parameters: Sequence[tuple[str, Tensor]], target: Target, facts: Facts,
                 make: Callable[[Writer, Tensor], None]) -> None:
        self.plan, self.facts, self.target, self.make = plan, facts, target, make
        self.local: dict[Tensor, Callable[[Scalar, Printer], str]] = {}  # tensors that lie in buffers of the block
        self.bases: dict[Axis, str] = {}  # first indices of tiles, where they are not numbers of blocks of the axis itself
        self.names = {t: n for n, t in parameters}
        self.tiles: dict[Scalar, Tile] = {}  # expressions that lie in tiles
        self.shared: dict[object, Tile] = {}  # tiles of tensors in shared memory
        self.inverses: dict[Scalar, tuple[Scalar, Scalar]] = {}  # divisors -> the factors that stand for them
        self.scalars: dict[Scalar, str] = {}  # expressions that are one number in the block -> their names
        self.halves: dict[object, tuple[Tile, Tile]] = {}  # tiles that are written as sums of two
        self.allocations: list[Tile] = []
        self.used_names = {n for n, _ in parameters} | {p + a.name for a in plan.uses for p in ("", "b", "step_")} | {"T"}
        self.views = [self._view(t) for t in plan.nest.views()]
        self.row, self.step_name, self.rest_name, self.cut_name = (self.unused(n) for n in ("r", "step", "bz", "cut"))
        self.last: dict[int, int] = {}
        self.values = 0  # values that lie in tiles
        self.count = 0  # statements written
        self.roots: list[tuple[Scalar, object]] = []
        self.lines: list[str] = []
        self.depth = 2
        self.before: list[str] | None = None  # where statements go that the present loop does not change
        self.current: Pass | None = None
        self.done: set[Tensor] = set()
        self.bodies: dict[Tensor, Scalar] = {}
        self.masked: dict[Scalar, Scalar] = {}  # operands of extremes, as they stand for loops whose tiles hang over
        self.inside: set[str] = set()  # tiles that one iteration makes
        self.indices = {a: self._index_text(a) for a in plan.uses}
        self.passes = passes(plan.nest, plan.loops())
        self.stages = set(plan.nest.stages)
        self.dummy = any(not set(plan.tiled(t.axes)) - (plan.loops() if t.kind not in REDUCTIONS else set())
                         for t in plan.nest.stages)

    def _view(self, t: Tensor) -> str:
        """The line that makes a view of a parameter."""
        base = self.names[base_of(t)]
        if "image" not in t.attrs:
            self.names[t] = self.unused(f"{base}_joined")
            return f"        {self.names[t]} = T.view({base}, {text_of(t.shape)})"
        self.names[t] = self.unused(f"{base}_windows")
        image = base if t.attrs["image"] == base_of(t).shape else f"T.view({base}, {text_of(t.attrs['image'])})"
        return f"        {self.names[t]} = T.im2col_matrix({image}, {', '.join(map(str, t.attrs['steps']))})"

    def block_name(self, a: Axis) -> str:
        return a.name if self.plan.uses[a].kind == "grid" else f"b{a.name}"

    def _index_text(self, a: Axis) -> str:
        use = self.plan.uses[a]
        if use.kind == "grid":
            return "0" if a.extent == 1 else a.name
        if use.kind == "tile":
            return f"b{a.name} * {use.size} + {a.name}" if use.size > 1 else f"b{a.name}"
        if use.kind == "loop":
            return f"step_{a.name} * {use.size} + {a.name}"
        return a.name

    def base_text(self, a: Axis, each: int = 1) -> str:
        """The first index of the axis in the present tile, divided by a number."""
        if a in self.bases:
            return self.bases[a]
        use = self.plan.uses[a]
        name = {"tile": f"b{a.name}", "loop": f"step_{a.name}"}.get(use.kind, "")
        size = use.size // each
        return "0" if not name else name if size == 1 else f"{name} * {size}"

    def say(self, line: str, outside: bool = False) -> None:
        self.count += 1
        if outside and self.before is not None:
            self.before.append("    " * (self.depth - 1) + line)
        else:
            self.lines.append("    " * self.depth + line)

    def size(self, a: Axis) -> int:
        return self.plan.uses[a].size

    def new_tile(self, name: str, axes: tuple[Axis, ...], dtype: str, scope: str = "fragment") -> Tile:
        shape = tuple(self.plan.uses[a].size for a in axes)
        return self.new_buffer(name, (1, *shape) if self.dummy and scope == "fragment" else shape, axes, dtype, scope)

    def new_buffer(self, name: str, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: str, scope: str) -> Tile:
        name = self.unused(name)
        self.values += 1
        tile = Tile(name, axes, shape, dtype, scope, self.values)
        self.allocations.append(tile)
        return tile

    def unused(self, name: str) -> str:
        return unused(name, self.used_names)

    def element_of(self, tile: Tile) -> str:
        self.last[tile.key] = self.count
        places = [f"{a.name} // {tile.each[a]}" if a in tile.each else a.name if a.extent != 1 else "0" for a in tile.axes]
        if len(tile.shape) > len(places):  # a first dimension of one element, where some tile has no other
            places = [self.row, *places]
        return f"{tile.name}[{', '.join(places) or '0'}]"

    def printer(self, own: Scalar | None = None) -> Printer:
        """Prints expressions with tiles in place of what lies in them.  own: the expression that is being put into a tile."""
        def leaf(e: Scalar) -> str | None:
            if e != own and e in self.tiles:
                return self.element_of(self.tiles[e])
            if e in self.scalars:
                return self.scalars[e]
            if e.op == "div" and e.args[1] in self.inverses:
                text = self.printer().text
                return f"({text(e.args[0], 7)} * {' * '.join(map(text, self.inverses[e.args[1]]))})"
            if e.op == "axis":
                return self.indices[e.value]
            if e.op == "read":
                return self.read_text(e)
            return None

        return Printer(leaf)

    def read_text(self, e: Scalar) -> str:
        if e.value in self.local:
            return self.local[e.value](e, self.printer())
        one = self.place_text(e)
        return f'T.cast({one}, "float32")' if is_float(e.dtype) and wide(e.dtype) != e.dtype else one

    def place_text(self, e: Scalar) -> str:
        """An element of a tensor in its own type."""
        if e in self.shared:
            return self.element_of(self.shared[e])
        assert e.value in self.names, f"{e.value.name} lies in no tile"
        return f"{self.names[e.value]}[{', '.join(map(self.printer().text, e.args)) or '()'}]"

    def name_of(self, tile: Tile) -> str:
        """The name of a tile that the next statement uses as a whole."""
        self.last[tile.key] = self.count
        return tile.name

    def parallel(self, axes: tuple[Axis, ...], *body: str, outside: bool = False, sizes: Mapping[Axis, int] = NO_SIZES) -> None:
        """A loop of threads over the elements of tiles.  sizes: of axes of which it counts other indices than tiles have."""
        loops = [(a.name, sizes[a] if a in sizes else self.size(a)) for a in axes]
        loops = [(self.row, 1), *loops] if self.dummy or not loops else loops
        self.say(f"for {', '.join(n for n, _ in loops)} in T.Parallel({', '.join(str(s) for _, s in loops)}):", outside)
        for line in body:
            self.say(f"    {line}", outside)

    def order(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """The axes of a tile in order: lanes, then those of outputs, so that neighbours in memory are neighbours in tiles."""
        order = list(dict.fromkeys((*self.plan.lanes, *self.plan.nest.axes, *self.plan.uses)))
        return tuple(sorted(self.plan.tiled(tuple(frozenset(axes))), key=order.index))

    def ready(self, e: Scalar) -> None:
        """Writes what a statement needs that computes the expression."""
        self.ensure(e)
        self.roots.append((e, self.current))
        if e not in self.tiles:
            self.reuse(e)

    def root(self, e: Scalar, name: str, axes: tuple[Axis, ...] | None = None, dtype: str | None = None) -> Tile:
        """The tile that holds an expression; written where it does not exist yet."""
        self.ensure(e)
        axes = self.order(e.axes) if axes is None else axes
        dtype = dtype or (wide(e.dtype) if e.dtype != "bool" else "int32")
        if e in self.tiles and self.tiles[e].dtype == dtype and set(self.tiles[e].axes) == set(axes):
            return self.tiles[e]
        self.roots.append((e, self.current))
        self.reuse(e)
        outside = self.before is not None and not self.changes(e)
        source = e.args[0] if e.op == "cast" and e.dtype == dtype else e
        if source in self.tiles and self.tiles[source].axes == axes and self.tiles[source].dtype != dtype:
            tile = self.new_tile(name, axes, dtype)
            self.say(f"T.copy({self.name_of(self.tiles[source])}, {tile.name})", outside)
        elif (region := self.copyable(source, axes)) is not None and not self.dummy:
            tile = self.new_tile(name, axes, dtype)
            self.say(f"T.copy({region}, {tile.name})", outside)
        else:
            self.guarded(source)
            own = None if e in self.tiles else e  # a tile without axes of one index is read as any other is
            named, text = in_steps(self.printer(own), source, self.unused)
            tile = self.in_place(source, axes, dtype) or self.new_tile(name, axes, dtype)
            self.parallel(axes, *named, f"{self.element_of(tile)} = {text}", outside=outside)
        self.tiles[e] = tile
        return tile

    def reuse(self, e: Scalar) -> None:
        """Gives tiles to the pieces of an expression that other statements need too, and to what is read under conditions."""
        for x in e.args:
            if x in self.tiles:
                continue
            divides = x.op == "div" or e.op == "div" and x == e.args[1]
            if divides and is_float(x.dtype) and not self.plan.tiled(tuple(x.axes)) and x.reads and self.is_before(x):
                self.name_scalar(x, "quotient" if x.op == "div" else "divisor")
            elif x in self.facts.shared and self.order(x.axes):
                self.root(x, "x")
            else:
                self.reuse(x)

    def guarded(self, e: Scalar) -> None:
        """Gives tiles to elements that a selection by other elements reads: loads without conditions are wide.

        So are those of long rows in front of functions with branches: all are under way before the first one is used.
        """
        if e in self.tiles or not self.target.is_gpu:
            return
        long = prod(self.size(a) for a in self.plan.tiled(tuple(e.axes))) >= MANY * self.plan.threads
        chosen = e.op == "where" and e.args[0].reads
        if not self.dummy and (chosen or e.op in BRANCHING and long):
            found = (e.args[1].reads | e.args[2].reads) - e.args[0].reads if chosen else self.loaded(e)
            for r in sorted(found, key=repr):
                axes = self.order(r.axes)
                if r not in self.tiles and is_float(r.dtype) and self.copyable(r, axes) is not None:
                    self.root(r, f"{self.names[r.value]}2", axes)
        before = self.dummy and e.op == "div" and self.current is not None and not self.changes(e.args[1])
        if e.op == "div" and (before or long and not self.dummy) and is_float(e.dtype) and e.dtype != "float64":
            self.invert(e.args[1], e)
        for x in e.args:
            self.guarded(x)

    def invert(self, d: Scalar, e: Scalar) -> None:
        """Names the factors that stand for a divisor of many elements: 1 / (d * scale) and scale, a power of two with which the
        first is neither infinite nor too small.  The code of a quotient has branches, which numbers near 0 take."""
        tiled = self.plan.tiled(tuple(d.axes))
        beside = tiled or self.dummy and not self.is_before(d)  # in a tile, as what it is computed from
        if d.op == "const" or len(tiled) == len(self.plan.tiled(tuple(e.axes))) or not beside and not self.is_before(d):
            return
        near, far = (const(2.0**k, d.dtype) for k in (-64, 64))
        size = Scalar("abs", (d,), d.dtype)
        scale = Scalar("where", (Scalar("gt", (size, far), "bool"), near, const(1.0, d.dtype)), d.dtype)
        scale = Scalar("where", (Scalar("lt", (size, near), "bool"), far, scale), d.dtype)
        self.inverses[d] = Scalar("div", (const(1.0, d.dtype), Scalar("mul", (d, scale), d.dtype)), d.dtype), scale
        for x, name in ((scale, "scale"), (self.inverses[d][0], "inverse")):
            self.root(x, name) if beside else self.name_scalar(x, name)

    def loaded(self, e: Scalar) -> set[Scalar]:
        """The reads of an expression that lie in no tile."""
        return set() if e in self.tiles else {e} if e.op == "read" else set().union(*map(self.loaded, e.args))

    def is_before(self, e: Scalar) -> bool:
        """Whether an expression is known in front of the present loop, from memory alone."""
        return all(r.value in self.names for r in e.reads) and (self.current is None or not self.changes(e))

    def name_scalar(self, e: Scalar, name: str) -> None:
        """A name for an expression that is one number in the block, in front of the present loop."""
        if e not in self.scalars:
            name = self.unused(name)
            self.say(f'{name} = T.alloc_var("{wide(e.dtype)}", init={self.printer().text(e)})', self.current is not None)
            self.scalars[e] = name

    def in_place(self, e: Scalar, axes: tuple[Axis, ...], dtype: str) -> Tile | None:
        """A tile that the expression reads for the last time."""
        for x in walk(e):
            t = self.tiles.get(x)
            if t and t.axes == axes and t.dtype == dtype and t.scope == "fragment" and self.facts.last.get(t.key) == self.count:
                if not self.is_running(t):
                    for gone in [x for x, y in self.tiles.items() if y is t]:
                        del self.tiles[gone]
                    self.values += 1
                    return replace(t, key=self.values)
        return None

    def is_running(self, tile: Tile) -> bool:
        """Whether the tile is an accumulator of the present loop, or made in front of it."""
        return self.current is not None and not set(tile.axes) & set(self.current.axes) and tile.name not in self.inside

    def changes(self, e: Scalar) -> bool:
        """Whether the present loop changes the value of an expression."""
        if self.current is None:
            return True
        return bool(e.axes & frozenset(self.current.axes)) or any(
            r.value in self.current.stages or r.value in self.current.old.values() or
            r.value in self.stages and r.value.body is not None and self.changes(r.value.body) for r in e.reads)

    def copyable(self, e: Scalar, axes: tuple[Axis, ...], each: Mapping[Scalar, int] = MappingProxyType({})) -> str | None:
        """The region of a tensor that T.copy reads into a tile with these axes; None where the read is not a plain tile.

        each: indices that are quotients -> their divisors.
        """
        if e.op != "read" or e.value not in self.names or not axes:
            return None
        out, found = [], []
        for i in e.args if "image" not in e.value.attrs else place_in_matrix(e):
            n = each.get(i, 1)
            terms, c = linear(i.args[0] if n > 1 else i)
            mine = [a for a in terms if a.axes & frozenset(axes)]
            if not mine:
                out.append(self.printer().text(i))
                continue
            if len(mine) > 1 or mine[0].op != "axis" or terms[mine[0]] != 1 or mine[0].value in found:
                return None
            a = mine[0].value
            rest = {x: f for x, f in terms.items() if x != mine[0]}
            least = bounds(summed(rest, c))
            if isinstance(c, int) and c < 0 and (least is None or least[0] < 0):  # regions start inside of a tensor
                return None
            if n > 1 and (a in self.bases or any(not isinstance(f, int) or f % n for f in (*rest.values(), c, self.size(a)))):
                return None
            rest, c = ({x: f // n for x, f in rest.items()}, c // n) if n > 1 else (rest, c)  # type: ignore[operator]
            base = " + ".join(p for p in (self.printer().text(summed(rest, c)) if rest or c != 0 else "", self.base_text(a, n))
                              if p not in ("", "0")) or "0"
            found.append(a)
            size = self.plan.uses[a].size // n
            out.append(f"{base}:{size if base == '0' else f'{base} + {size}'}")
        return f"{self.names[e.value]}[{', '.join(out)}]" if tuple(found) == axes else None

    def copied(self, e: Scalar, axes: tuple[Axis, ...], outside: bool = False, divided: bool = False) -> Tile | None:
        """Shared memory that T.copy fills with a read; None where that is no plain tile.

        divided: an element may stand there once for several indices of an axis.
        """
        found = {i: number(i.args[1]) for i in e.args if divided and i.op == "floordiv"}
        quotients = {i: n for i, n in found.items() if isinstance(n, int) and n > 1}
        region = self.copyable(e, axes, quotients)
        if region is None:
            return None
        each = {a: n for i, n in quotients.items() for a in axes if a in i.axes}
        shape = tuple(self.size(a) // each.get(a, 1) for a in axes)
        tile = self.new_buffer(f"{self.names[e.value]}_s", shape, axes, e.dtype, "shared")
        tile.each = each
        self.say(f"T.copy({region}, {tile.name})", outside)
        return tile

    def ensure(self, e: Scalar) -> None:
        for r in sorted((r for r in e.reads if r.value in self.stages), key=lambda r: self.plan.nest.stages.index(r.value)):
            self.make(self, r.value)

    def body(self, t: Tensor) -> Scalar:
        """What a stage combines, neutral where a tile hangs over the end of a reduced axis.

        A masked extreme stands for its operand in later reductions, which may then need no mask: exp(-inf - top) is 0.
        """
        if t not in self.bodies:
            assert t.body is not None
            body = rewrite(t.body, self.masked.get) if self.masked else t.body
            condition = self.within(t.over)
            if condition is not None and not vanishes(t.kind, body, condition) and self.plan.gemm_of(t) is None:
                inner = body
                body = Scalar("where", (condition, inner, neutral(t.kind, wide(body.dtype))), body.dtype)
                if t.kind in ("max", "min"):
                    self.masked[inner] = body
            self.bodies[t] = body
        return self.bodies[t]

    def within(self, axes: Iterable[Axis]) -> Scalar | None:
        """The condition that tiles do not hang over the ends of these axes; None where they never do."""
        out: Scalar | None = None
        for a in axes:
            own = [Scalar("lt", (axis(a), const(a.extent)), "bool")] if self.ragged(a) else []
            for one in own + [c for x, c in self.plan.nest.limits.items() if x is a]:
                out = one if out is None else Scalar("and", (out, one), "bool")
        return out

    def factors_of(self, t: Tensor) -> Contraction | None:
        """The factors of a stage that T.gemm computes."""
        return None if self.plan.gemm_of(t) is None else contraction(replace(t, body=self.body(t)))

    def ragged(self, a: Axis) -> bool:
        use = self.plan.uses[a]
        return use.kind not in ("grid", "serial") and (isinstance(a.extent, Dim) or a.extent % use.size != 0)

    def ends_with(self, e: Scalar, a: Axis) -> bool:
        """Whether a tile of a read that hangs over the end of an axis finds no element there: the tensor ends with the axis."""
        if e.op != "read" or not self.ragged(a):
            return True
        places = [(linear(i), s) for i, s in zip(e.args, e.value.shape) if a in i.axes]
        return all(terms == {axis(a): 1} and a.extent + c == s for (terms, c), s in places)

    def found_shared(self) -> frozenset[Scalar]:
        """Expressions that several statements of one scope compute, the largest of them."""
        users: dict[Scalar, set[int]] = {}
        parents: dict[Scalar, set[Scalar]] = {}
        scopes = {}
        for k, (e, scope) in enumerate(self.roots):
            scopes[k] = id(scope)
            for x in walk(e):
                users.setdefault(x, set()).add(k)
                for a in x.args:
                    parents.setdefault(a, set()).add(x)
        out = set()
        for x, found in users.items():
            if len(found) < 2 or not self._worth(x) or len({scopes[k] for k in found}) > 1:
                continue
            if not any(users[y] >= found and (x.op != "read" or self._worth(y)) for y in parents.get(x, ())):
                out.add(x)
        return frozenset(out)

    def _worth(self, e: Scalar) -> bool:
        """Whether computing an expression again costs more than a tile."""
        if not self.plan.tiled(tuple(e.axes)) or not is_float(e.dtype) or e.op in ("axis", "const"):
            return False
        wanted = [x for x in walk(e) if x.op in HEAVY or x.op == "read" and x.value in self.names and
                  len(self.plan.tiled(tuple(x.axes))) >= 2 - self.dummy]
        return bool(wanted) and not (e.op == "read" and e.value in self.stages)


def in_three_runs(write: Callable[[Facts], Writer]) -> Writer:
    """The last of three runs over the same statements.

    The first finds the expressions that several statements need, the second the last use of each tile, and the third writes
    them, in place where a tile is not needed any more.
    """
    shared = write(Facts()).found_shared()
    return write(Facts(shared, write(Facts(shared)).last))


def place_in_matrix(e: Scalar) -> tuple[Scalar, ...]:
    """Row and column of a read of a matrix of windows, whose axes are their digits."""
    rows, places = len(row_digits(e)), []
    for k in (slice(0, rows), slice(rows, None)):
        place = const(0)
        for i, s in zip(e.args[k], e.value.shape[k]):
            place = plus(times(place, s), i)
        places.append(place)
    return tuple(places)


def tight(text: str) -> str:
    """The text in parentheses where it is an expression with operators."""
    return f"({text})" if " " in text and not text.startswith("T.") else text


def digits(number: str, pieces: Sequence[tuple[str, str]]) -> list[str]:
    """`name = digit` for pieces (name, how many there are) that a number counts, the last one the fastest."""
    out = []
    for k, (name, size) in enumerate(pieces):
        below = [tight(s) for _, s in pieces[k + 1:]]
        by = tight(" * ".join(below))
        out.append(f"{name} = {number}{f' // {by}' if by else ''}{f' % {tight(size)}' if k else ''}")
    return out


def ceildiv(extent: Size, size: int) -> str:
    """The number of tiles along an axis, as text."""
    if size == 1:
        return str(extent)
    return str(-(-extent // size)) if isinstance(extent, int) else f"T.ceildiv({extent}, {size})"
