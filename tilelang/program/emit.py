"""The text of one kernel: a readable `@T.prim_func`, whose comments say what was chosen.

The text is written in three runs over the same statements.  The first finds the expressions that several statements need,
the second the last use of each tile, and the third writes them, in place where a tile is not needed any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilelang.target import Target

from .expr import Axis, Scalar, Tensor, axis, bounds, const, linear, read, rewrite, summed, walk
from .graph import Dim, Size
from .nest import REDUCTIONS, Contraction, Pass, Unfit, contraction, passes
from .plan import Plan, bits_of
from .rescale import NEUTRAL, conditions, is_float, vanishes
from .sorts import selected, sorted_by_network
from .text import Printer, wide
from .tiles import Tile

SCANS = {"scan sum": "cumsum", "scan max": "cummax", "scan min": "cummin", "scan prod": "cumprod"}
FEW = 32  # the best elements up to this number are selected one after another
FINITE = 1e30  # stands for infinity in running extremes: the difference of two of them is a number
REDUCE = {"sum": "reduce_sum", "max": "reduce_max", "min": "reduce_min", "prod": "reduce_prod", "argmax": "reduce_argmax",
          "argmin": "reduce_argmin"}
NAMES = {"sum": "total", "max": "top", "min": "least", "prod": "product", "argmax": "place", "argmin": "place"}
HEAVY = ("exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "erf", "sigmoid", "pow",
         "div", "atan2")


@dataclass
class Facts:
    """What earlier runs found: expressions that get tiles of their own, and the last statement that reads each tile."""

    shared: frozenset[Scalar] = frozenset()
    last: dict[int, int] = field(default_factory=dict)


def kernel_text(plan: Plan, name: str, parameters: Sequence[tuple[str, Tensor]], target: Target) -> str:
    """The prim_func of a plan.  parameters: names and tensors, inputs first, then the outputs."""
    first = KernelWriter(plan, name, parameters, target, Facts())
    first.write()
    shared = first.found_shared()
    second = KernelWriter(plan, name, parameters, target, Facts(shared))
    second.write()
    return KernelWriter(plan, name, parameters, target, Facts(shared, second.last)).write()


class KernelWriter:
    def __init__(self, plan: Plan, name: str, parameters: Sequence[tuple[str, Tensor]], target: Target, facts: Facts) -> None:
        self.plan, self.name, self.parameters, self.facts, self.target = plan, name, parameters, facts, target
        self.names = {t: n for n, t in parameters}
        self.tiles: dict[Scalar, Tile] = {}  # expressions that lie in tiles
        self.shared: dict[object, Tile] = {}  # tiles of tensors in shared memory
        self.allocations: list[Tile] = []
        self.used_names = {n for n, _ in parameters} | {p + a.name for a in plan.roles for p in ("", "b", "step_")} | {"T"}
        self.row, self.step_name, self.rest_name = (self.unused(n) for n in ("r", "step", "bz"))
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
        self.indices = {a: self._index_text(a) for a in plan.roles}
        self.passes = passes(plan.nest, plan.loops())
        self.stages = set(plan.nest.stages)
        self.dummy = any(not plan.tiled(t.axes) for t in plan.nest.stages)

    # ---- the whole kernel ---------------------------------------------------------------------------------------------

    def write(self) -> str:
        for t, e in self.plan.nest.outputs:
            if not e.axes & self.plan.loops():
                self.store(t, e)
        self.store_loops()
        head = [*(f"# {n}" for n in self.plan.notes), "@T.prim_func"]
        sizes = {n: ", ".join(map(str, t.shape)) + ("," if len(t.shape) == 1 else "") for n, t in self.parameters}
        parts = [f'{n}: T.Tensor(({sizes[n]}), "{t.dtype}")' for n, t in self.parameters]
        head += _wrapped(f"def {self.name}(", parts, "):")
        return "\n".join([*head, *self.grid(), *self.allocation_lines(), *self.lines]) + "\n"

    def grid(self) -> list[str]:
        """The line of T.Kernel: column tiles first, then rows, then all other axes as one number."""
        roles, nest = self.plan.roles, self.plan.nest
        tiles = [a for a in reversed(nest.axes) if roles[a].kind == "tile"]
        single = [a for a in nest.axes if roles[a].kind == "grid" and a.extent != 1]
        names, sizes, after = [], [], []
        for a in tiles[:2]:
            names.append(self.block_name(a))
            sizes.append(_ceildiv(a.extent, roles[a].size))
        rest = [(self.block_name(a), _ceildiv(a.extent, roles[a].size)) for a in reversed(tiles[2:])]
        rest = [*((self.block_name(a), str(a.extent)) for a in single), *rest]
        if len(rest) == 1 or rest and len(rest) + len(names) <= 3:
            names += [n for n, _ in reversed(rest)]
            sizes += [s for _, s in reversed(rest)]
        elif rest:
            names.append(self.rest_name)
            sizes.append(" * ".join(f"({s})" if " " in s else s for _, s in rest))
            left = self.rest_name
            for k, (n, _) in enumerate(rest):
                below = [s for _, s in rest[k + 1:]]
                by = " * ".join(f"({s})" if " " in s else s for s in below)
                value = left if not below else f"{left} // ({by})" if len(below) > 1 else f"{left} // {by}"
                after.append(f"        {n} = {value} % ({rest[k][1]})" if k else f"        {n} = {value}")
        if not names:
            names, sizes = [self.rest_name], ["1"]
        shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
        out = [f"    with T.Kernel({', '.join(sizes)}, threads={self.plan.threads}) as {shown}:", *after]
        return out + ([f"        T.use_swizzle({self.plan.panel})"] if self.plan.panel else [])

    def allocation_lines(self) -> list[str]:
        return [f"        {t.name} = T.alloc_{t.scope}(({', '.join(map(str, t.shape))}{',' if len(t.shape) == 1 else ''}), "
                f'"{t.dtype}")' for t in self.allocations]

    def block_name(self, a: Axis) -> str:
        return a.name if self.plan.roles[a].kind == "grid" else f"b{a.name}"

    def _index_text(self, a: Axis) -> str:
        role = self.plan.roles[a]
        if role.kind == "grid":
            return "0" if a.extent == 1 else a.name
        if role.kind == "tile":
            return f"b{a.name} * {role.size} + {a.name}" if role.size > 1 else f"b{a.name}"
        if role.kind == "loop":
            return f"step_{a.name} * {role.size} + {a.name}"
        return a.name

    def base_text(self, a: Axis) -> str:
        """The first index of the axis in the present tile."""
        role = self.plan.roles[a]
        name = {"tile": f"b{a.name}", "loop": f"step_{a.name}"}.get(role.kind, "")
        return "0" if not name else name if role.size == 1 else f"{name} * {role.size}"

    # ---- statements ---------------------------------------------------------------------------------------------------

    def say(self, line: str, outside: bool = False) -> None:
        self.count += 1
        if outside and self.before is not None:
            self.before.append("    " * (self.depth - 1) + line)
        else:
            self.lines.append("    " * self.depth + line)

    def size(self, a: Axis) -> int:
        return self.plan.roles[a].size

    def new_tile(self, name: str, axes: tuple[Axis, ...], dtype: str, scope: str = "fragment") -> Tile:
        shape = tuple(self.plan.roles[a].size for a in axes)
        return self.new_buffer(name, (1, *shape) if self.dummy and scope == "fragment" else shape, axes, dtype, scope)

    def new_buffer(self, name: str, shape: tuple[int, ...], axes: tuple[Axis, ...], dtype: str, scope: str) -> Tile:
        name = self.unused(name)
        self.values += 1
        tile = Tile(name, axes, shape, dtype, scope, self.values)
        self.allocations.append(tile)
        return tile

    def unused(self, name: str) -> str:
        while name in self.used_names:
            stem = name.rstrip("0123456789")
            name = f"{stem}{int(name[len(stem):] or 1) + 1}"
        self.used_names.add(name)
        return name

    def element_of(self, tile: Tile) -> str:
        self.last[tile.key] = self.count
        places = [a.name for a in tile.axes]
        if len(tile.shape) > len(places):  # a first dimension of one element, where some tile has no other
            places = [self.row, *places]
        return f"{tile.name}[{', '.join(places) or '0'}]"

    def printer(self, own: Scalar | None = None) -> Printer:
        """Prints expressions with tiles in place of what lies in them.  own: the expression that is being put into a tile."""
        def leaf(e: Scalar) -> str | None:
            if e != own and e in self.tiles:
                return self.element_of(self.tiles[e])
            if e.op == "axis":
                return self.indices[e.value]
            if e.op == "read":
                return self.read_text(e)
            return None

        return Printer(leaf)

    def read_text(self, e: Scalar) -> str:
        if e in self.shared:
            one = self.element_of(self.shared[e])
        else:
            assert e.value in self.names, f"{e.value.name} lies in no tile"
            one = f"{self.names[e.value]}[{', '.join(map(self.printer().text, e.args)) or '()'}]"
        return f'T.cast({one}, "float32")' if is_float(e.dtype) and wide(e.dtype) != e.dtype else one

    def parallel(self, axes: tuple[Axis, ...], body: str, outside: bool = False) -> None:
        names, sizes = [a.name for a in axes], [str(self.plan.roles[a].size) for a in axes]
        if self.dummy:
            names, sizes = [self.row, *names], ["1", *sizes]
        if not names:
            names, sizes = [self.row], ["1"]
        self.say(f"for {', '.join(names)} in T.Parallel({', '.join(sizes)}):", outside)
        self.say(f"    {body}", outside)

    # ---- tiles of expressions -----------------------------------------------------------------------------------------

    def order(self, axes: Iterable[Axis], e: Scalar) -> tuple[Axis, ...]:
        """Tile axes in the order of the widest read of the expression, so that neighbours in memory are neighbours in tiles."""
        axes = frozenset(axes)
        tiled = self.plan.tiled(tuple(axes))
        default = {a: k for k, a in enumerate(dict.fromkeys((*self.plan.nest.axes, *self.plan.roles)))}
        return tuple(sorted(tiled, key=lambda a: default[a]))

    def root(self, e: Scalar, name: str, axes: tuple[Axis, ...] | None = None, dtype: str | None = None) -> Tile:
        """The tile that holds an expression; written where it does not exist yet."""
        self.ensure(e)
        axes = self.order(e.axes, e) if axes is None else axes
        dtype = dtype or (wide(e.dtype) if e.dtype != "bool" else "int32")
        if e in self.tiles and self.tiles[e].dtype == dtype and set(self.tiles[e].axes) == set(axes):
            return self.tiles[e]
        self.roots.append((e, self.current))
        self.share(e)
        outside = self.before is not None and not self.changes(e)
        source = e.args[0] if e.op == "cast" and e.dtype == dtype else e
        if source in self.tiles and self.tiles[source].axes == axes and self.tiles[source].dtype != dtype:
            tile = self.new_tile(name, axes, dtype)
            self.last[self.tiles[source].key] = self.count
            self.say(f"T.copy({self.tiles[source].name}, {tile.name})", outside)
        elif (region := self.copyable(source, axes)) is not None and not self.dummy:
            tile = self.new_tile(name, axes, dtype)
            self.say(f"T.copy({region}, {tile.name})", outside)
        else:
            text = self.printer(e).text(source)
            tile = self.in_place(source, axes, dtype) or self.new_tile(name, axes, dtype)
            self.parallel(axes, f"{self.element_of(tile)} = {text}", outside)
        self.tiles[e] = tile
        return tile

    def share(self, e: Scalar) -> None:
        """Gives tiles to the parts of an expression that other statements need too."""
        for x in e.args:
            if x in self.tiles:
                continue
            if x in self.facts.shared and self.order(x.axes, x):
                self.root(x, "x")
            else:
                self.share(x)

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

    def copyable(self, e: Scalar, axes: tuple[Axis, ...]) -> str | None:
        """The region of a tensor that T.copy reads into a tile with these axes; None where the read is not a plain tile."""
        if e.op != "read" or e.value not in self.names or not axes:
            return None
        out, found = [], []
        for i in e.args:
            terms, c = linear(i)
            mine = [a for a in terms if a.axes & frozenset(axes)]
            if not mine:
                out.append(self.printer().text(i))
                continue
            if len(mine) > 1 or mine[0].op != "axis" or terms[mine[0]] != 1 or mine[0].value in found:
                return None
            a = mine[0].value
            rest = {x: f for x, f in terms.items() if x != mine[0]}
            base = " + ".join(p for p in (self.printer().text(summed(rest, c)) if rest or c != 0 else "", self.base_text(a))
                              if p not in ("", "0")) or "0"
            found.append(a)
            size = self.plan.roles[a].size
            out.append(f"{base}:{size if base == '0' else f'{base} + {size}'}")
        return f"{self.names[e.value]}[{', '.join(out)}]" if tuple(found) == axes else None

    # ---- stages -------------------------------------------------------------------------------------------------------

    def ensure(self, e: Scalar) -> None:
        for r in sorted((r for r in e.reads if r.value in self.stages), key=lambda r: self.plan.nest.stages.index(r.value)):
            self.ensure_stage(r.value)

    def ensure_stage(self, t: Tensor) -> None:
        if t in self.done or self.current is not None and t in self.current.stages:
            return
        p = next((p for p in self.passes if t in p.stages), None)
        if p is not None:
            if self.current is not None:
                raise Unfit("a loop inside of a loop")
            self.write_pass(p)
            return
        assert t.body is not None
        self.ensure(t.body)
        self.whole_stage(t)
        self.done.add(t)

    def whole_stage(self, t: Tensor) -> None:
        """A stage whose reduced axes lie in tiles."""
        c = self.product_of(t)
        axes = self.order(t.axes, read(t))
        if c is not None:
            acc = self.new_tile("acc", axes, t.dtype)
            self.gemm(t, c, acc, clear=True)
        elif t.kind in REDUCTIONS:
            acc = self.reduce(t, axes)
        else:
            acc = self.special(t, axes)
        self.tiles[read(t)] = acc
        self.inside = self.inside | {acc.name}

    def reduce(self, t: Tensor, axes: tuple[Axis, ...], into: Tile | None = None) -> Tile:
        """T.reduce_* of the tile of a body, along one axis after another."""
        over = [a for a in t.over if self.plan.roles[a].kind in ("whole", "loop")]
        body = self.body(t)
        dims = self.with_reduced(axes, over, body)
        source = self.root(body, "x", dims)
        fresh = into is None or into.name.startswith("part")
        outside = self.before is not None and into is None and not self.changes(body)
        for k, a in enumerate(reversed(over)):
            left = tuple(x for x in dims if x is not a)
            last = k == len(over) - 1
            acc = into if into is not None and last else self.new_tile(NAMES[t.kind], left, t.dtype)
            self.last[source.key] = self.last[acc.key] = self.count
            dim = dims.index(a) + self.dummy
            clear = "" if fresh or not last else ", clear=False"
            self.say(f"T.{REDUCE[t.kind]}({source.name}, {acc.name}, dim={dim}{clear})", outside)
            source, dims = acc, left
        return source

    def with_reduced(self, axes: tuple[Axis, ...], over: Sequence[Axis], body: Scalar) -> tuple[Axis, ...]:
        """The axes of the tile that is reduced: a single reduced axis stands where the widest read has it, else last."""
        if len(over) == 1:
            wide_read = max((r for r in body.reads if over[0] in r.axes), key=lambda r: len(r.axes), default=None)
            if wide_read is not None and wide_read.value not in self.stages:
                order = [a for i in wide_read.args for a in sorted(i.axes, key=lambda a: a.name)]
                later = [k for k, a in enumerate(axes) if a in order and order.index(a) > order.index(over[0])]
                if later:
                    return (*axes[:later[0]], over[0], *axes[later[0]:])
        return (*axes, *over)

    def body(self, t: Tensor) -> Scalar:
        """What a stage combines, neutral where a tile hangs over the end of a reduced axis.

        A masked extreme stands for its operand in later reductions, which may then need no mask: exp(-inf - top) is 0.
        """
        if t not in self.bodies:
            assert t.body is not None
            body = rewrite(t.body, self.masked.get) if self.masked else t.body
            condition = self.within(t.over)
            if condition is not None and not vanishes(t.kind, body, condition) and self.plan.product(t) is None:
                inner = body
                neutral = NEUTRAL.get(t.kind.removeprefix("scan "), -inf if t.kind == "argmax" else inf)
                body = Scalar("where", (condition, inner, self.number(neutral, body.dtype)), body.dtype)
                if t.kind in ("max", "min"):
                    self.masked[inner] = body
            self.bodies[t] = body
        return self.bodies[t]

    def within(self, axes: Iterable[Axis]) -> Scalar | None:
        """The condition that tiles do not hang over the ends of these axes; None where they never do."""
        out: Scalar | None = None
        for a in axes:
            if self.ragged(a):
                one = Scalar("lt", (axis(a), const(a.extent)), "bool")
                out = one if out is None else Scalar("and", (out, one), "bool")
        return out

    def product_of(self, t: Tensor) -> Contraction | None:
        """The factors of a stage that T.gemm computes."""
        return None if self.plan.product(t) is None else contraction(replace(t, body=self.body(t)))

    @staticmethod
    def number(x: float, dtype: str) -> Scalar:
        if is_float(dtype):
            return const(x, wide(dtype))
        most = (1 << bits_of(dtype) - (not dtype.startswith("u"))) - 1
        least = 0 if dtype.startswith("u") else -most - 1
        return const(int(x) if abs(x) != inf else most if x > 0 else least, dtype)

    def ragged(self, a: Axis) -> bool:
        role = self.plan.roles[a]
        return role.kind not in ("grid", "serial") and (isinstance(a.extent, Dim) or a.extent % role.size != 0)

    # ---- contractions -------------------------------------------------------------------------------------------------

    def gemm(self, t: Tensor, c: Contraction, acc: Tile, clear: bool = False) -> None:
        (over,), (m,), (n,) = self.plan.tiled(t.over), self.plan.tiled(c.m), self.plan.tiled(c.n)
        kind = self.operand_type(c.a, c.b)
        a, flip_a = self.operand(c.a, m, over, kind, True)
        b, flip_b = self.operand(c.b, over, n, kind, False)
        flags = ", transpose_A=True" * flip_a + ", transpose_B=True" * flip_b + ", clear_accum=True" * clear
        self.last[a.key] = self.last[b.key] = self.last[acc.key] = self.count
        self.say(f"T.gemm({a.name}, {b.name}, {acc.name}{flags})")

    @staticmethod
    def operand_type(a: Scalar, b: Scalar) -> str:
        if a.dtype == b.dtype:
            return a.dtype
        return max((a.dtype, b.dtype), key=bits_of)

    def operand(self, e: Scalar, first: Axis, second: Axis, dtype: str, left: bool) -> tuple[Tile, bool]:
        """(tile, whether it lies transposed): an operand of T.gemm, copied to shared memory or computed in registers."""
        source = e.args[0] if e.op == "cast" and e.args[0].dtype == e.dtype else e
        for axes in ((first, second), (second, first)):
            key = (source, axes, dtype)
            if key in self.shared:
                return self.shared[key], axes[0] is second
            region = self.copyable(source, axes) if source.dtype == dtype else None
            if region is not None:
                tile = self.new_tile(f"{self.names[source.value]}_s", axes, dtype, "shared")
                self.say(f"T.copy({region}, {tile.name})", not self.changes(source))
                self.shared[key] = tile
                return tile, axes[0] is second
        axes = (first, second)
        key = (source, axes, dtype)
        if key not in self.shared:
            self.shared[key] = self.computed_operand(source, axes, dtype, left)
        return self.shared[key], False

    def computed_operand(self, e: Scalar, axes: tuple[Axis, ...], dtype: str, left: bool) -> Tile:
        condition = self.within(a for a in axes if self.plan.roles[a].kind in ("loop", "whole"))
        body = e
        if condition is not None and not vanishes("sum", e, condition):
            inner = e.args[0] if e.op == "cast" else e
            body = Scalar("where", (condition, inner, self.number(0, wide(e.dtype))), wide(e.dtype))
        if body.dtype != dtype or body.op != "cast" and is_float(dtype) and wide(dtype) != dtype:
            body = Scalar("cast", (body,), dtype)
        for r in sorted(e.reads, key=repr):  # what the loop loads comes through shared memory, so that it is pipelined
            if self.current is not None and r.value in self.names and r not in self.shared and len(self.order(r.axes, r)) == 2:
                for order in (axes, axes[::-1]):
                    region = self.copyable(r, order)
                    if region is not None and not self.dummy:
                        tile = self.new_tile(f"{self.names[r.value]}_s", order, r.dtype, "shared")
                        self.say(f"T.copy({region}, {tile.name})", not self.changes(r))
                        self.shared[r] = tile
                        break
        if left and not self.dummy:
            return self.root(body, "left", axes, dtype)
        self.ensure(body)
        self.roots.append((body, self.current))
        self.share(body)
        tile = self.new_tile("right" if not left else "left", axes, dtype, "shared")
        self.parallel_plain(axes, f"{self.element_of(tile)} = {self.printer().text(body)}", not self.changes(e))
        return tile

    def parallel_plain(self, axes: tuple[Axis, ...], body: str, outside: bool) -> None:
        sizes = ", ".join(str(self.size(a)) for a in axes)
        self.say(f"for {', '.join(a.name for a in axes)} in T.Parallel({sizes}):", outside)
        self.say(f"    {body}", outside)

    # ---- loops --------------------------------------------------------------------------------------------------------

    def write_pass(self, p: Pass) -> None:
        """A loop and what stands in front of it."""
        for t in p.stages:
            assert t.body is not None
            self.ensure_outer(t.body, p)
        running: dict[Tensor, Tile] = {}
        for t in p.stages:
            axes = self.order(t.axes, read(t))
            acc = self.new_tile("acc" if self.plan.product(t) is not None else NAMES[t.kind], axes, t.dtype)
            running[t] = self.tiles[read(t)] = acc
            start = NEUTRAL[t.kind]
            if start == 0:
                self.say(f"T.clear({acc.name})")
            else:
                moved = t in p.old and abs(start) == inf
                value = const(FINITE * (1 if start > 0 else -1), t.dtype) if moved else self.number(start, t.dtype)
                self.say(f"T.fill({acc.name}, {Printer(lambda e: None).text(value)})")
        self.current, self.before = p, []
        place = len(self.lines)
        kept, shared, tiles_inside = dict(self.tiles), dict(self.shared), self.inside
        self.inside = set()
        self.depth += 1
        for t in p.stages:
            self.step(t, running[t], p)
        self.depth -= 1
        head, after = self.loop_head(p)
        self.lines[place:place] = [*self.before, *head]
        outer = {e: x for e, x in self.tiles.items() if e not in kept and not self.changes(e)}
        self.tiles = {**{e: x for e, x in kept.items() if e in self.tiles}, **outer}
        self.shared = {**shared, **{k: x for k, x in self.shared.items() if not set(x.axes) & set(p.axes)}}
        self.current, self.before, self.inside = None, None, tiles_inside
        self.done = {t for t in self.done if not set(t.axes) & set(p.axes)} | set(p.stages)

    def ensure_outer(self, e: Scalar, p: Pass) -> None:
        """Computes the stages that a loop reads and does not change."""
        for t in self.plan.nest.stages:
            if any(r.value is t for r in e.reads) and t not in p.stages:
                assert t.body is not None
                if set(t.axes) & set(p.axes) or any(r.value in p.stages for r in t.body.reads):
                    self.ensure_outer(t.body, p)
                else:
                    self.ensure_stage(t)

    def step(self, t: Tensor, acc: Tile, p: Pass) -> None:
        """One iteration of a reduction."""
        assert t.body is not None
        self.ensure(t.body)
        product = self.product_of(t)
        if product is None:
            body = self.body(t)
            over = [a for a in t.over if self.plan.roles[a].kind in ("whole", "loop")]
            self.root(body, "x", self.with_reduced(acc.axes, over, body))
        if t in p.old:
            before = self.new_tile(f"{acc.name}_before", acc.axes, acc.dtype)
            self.tiles[read(p.old[t])] = before
            self.say(f"T.copy({acc.name}, {before.name})")
        if t not in p.factors:
            if product is not None:
                self.gemm(t, product, acc)
            else:
                self.reduce(t, acc.axes, acc)
            return
        factor = self.root(p.factors[t], "rescale")
        self.inside.add(factor.name)
        if product is not None:
            self.last[factor.key] = self.count
            self.parallel(acc.axes, f"{self.element_of(acc)} *= {self.element_of(factor)}")
            self.gemm(t, product, acc)
        else:
            part = self.new_tile(f"part_{acc.name}", acc.axes, acc.dtype)
            self.reduce(t, acc.axes, part)
            one, by = self.element_of(acc), self.element_of(factor)
            self.parallel(acc.axes, f"{one} = {one} * {by} + {self.element_of(part)}")

    def loop_head(self, p: Pass) -> tuple[list[str], str]:
        """The `for` line of a loop: over serial axes index by index and over tiles of the last one."""
        pad = "    " * self.depth
        tiled = [a for a in p.axes if self.plan.roles[a].kind == "loop"]
        serial = [a for a in p.axes if self.plan.roles[a].kind == "serial"]
        out = []
        stages = f", num_stages={self.plan.stages}" if self.plan.stages else ""
        if not serial:
            (a,) = tiled
            first, last = self.loop_bounds(p, a)
            if first == "0":
                return [f"{pad}for step_{a.name} in T.Pipelined({last}{stages}):"], ""
            return [f"{pad}for {self.step_name} in T.Pipelined({last} - {_tight(first)}{stages}):",
                    f"{pad}    step_{a.name} = {first} + {self.step_name}"], ""
        parts = [(a.name, str(a.extent)) for a in serial]
        parts += [(f"step_{a.name}", _ceildiv(a.extent, self.plan.roles[a].size)) for a in tiled]
        total = " * ".join(_tight(s) for _, s in parts)
        out.append(f"{pad}for {self.step_name} in T.Pipelined({total}{stages}):")
        below: list[str] = []
        for k, (n, s) in reversed(list(enumerate(parts))):
            step = self.step_name
            value = step if not below else f"{step} // ({' * '.join(below)})" if len(below) > 1 else f"{step} // {below[0]}"
            out.append(f"{pad}    {n} = {value}{f' % {_tight(s)}' if k else ''}")
            below.insert(0, _tight(s))
        return out, ""

    def loop_bounds(self, p: Pass, a: Axis) -> tuple[str, str]:
        """First and last step: tiles whose elements a condition leaves out of every reduction are skipped."""
        size = self.plan.roles[a].size
        lows, highs = [], [_ceildiv(a.extent, size)]
        bodies = [(t.kind, t.body) for t in p.stages if t.body is not None]
        common = set.intersection(*(conditions(b) for _, b in bodies)) if bodies else set()
        for c in sorted(common, key=repr):
            if not all(vanishes(kind, b, c) for kind, b in bodies):
                continue
            bound = self.condition_bound(c, a)
            if bound is not None:
                text = self.printer().text(bound[1])
                known = bounds(bound[1])
                if known is None or known[0] < 0:
                    text = f"T.max({text}, {0 if bound[0] == 'least' else -1})"
                if bound[0] == "most":
                    highs.append(f"{_tight(text)} // {size} + 1")
                else:
                    lows.append(f"{_tight(text)} // {size}")
        return _nested("T.max", lows or ["0"]), _nested("T.min", highs)

    def condition_bound(self, c: Scalar, a: Axis) -> tuple[str, Scalar] | None:
        """("most" | "least", index): for some element of the block the condition may hold up to, or from, this index of `a`."""
        signs = {"lt": (1, -1), "le": (1, 0), "gt": (-1, -1), "ge": (-1, 0)}
        if c.op not in signs or c.args[0].dtype != "int32":
            return None
        sign, slack = signs[c.op]
        x, y = linear(c.args[0]), linear(c.args[1])  # sign * (x - y) <= slack
        parts: dict[Scalar, Size] = {}
        for (found, _), s in ((x, sign), (y, -sign)):
            for e, f in found.items():
                parts[e] = parts.get(e, 0) + f * s
        constant = (x[1] - y[1]) * sign - slack
        me = parts.pop(axis(a), 0)
        if me not in (1, -1):
            return None
        least: dict[Scalar, Size] = {}  # the least value of what stands beside +-a over the elements of a block
        for e, f in parts.items():
            if f == 0:
                continue
            if e.op != "axis" or not isinstance(f, int) or self.plan.roles[e.value].kind in ("loop", "serial"):
                return None
            role = self.plan.roles[e.value]
            if role.kind == "tile" and role.size > 1:
                block = Scalar("axis", (), "int32", self.first_of(e.value))
                least[block] = f * role.size
                constant = constant + (f * (role.size - 1) if f < 0 else 0)
            elif role.kind == "whole":
                constant = constant + (f * (role.size - 1) if f < 0 else 0)
            else:
                least[e] = f
        rest = summed({e: f * -me for e, f in least.items()}, constant * -me)  # me * a + rest' <= 0
        return ("most" if me == 1 else "least"), rest

    def first_of(self, a: Axis) -> Axis:
        """An axis that prints as the number of the block."""
        key = Axis(f"b{a.name}", a.extent)
        self.indices[key] = f"b{a.name}"
        return key

    # ---- outputs ------------------------------------------------------------------------------------------------------

    def store(self, t: Tensor, e: Scalar) -> None:
        """Writes an output: by T.copy of a tile where the kernel has tiles, else element by element."""
        self.ensure(e)
        axes = self.order(self.output_axes(t), e)
        wanted = "int32" if t.dtype == "bool" else wide(t.dtype)
        place = self.copyable(read(t, tuple(map(axis, self.output_axes(t)))), axes)
        if self.stages and place is not None and not self.dummy and t.dtype != "bool" and (
                e in self.tiles and self.tiles[e].axes == axes or self.has_product()):
            source = e.args[0] if e.op == "cast" and e.dtype == t.dtype and e not in self.tiles and is_float(e.dtype) else e
            tile = self.root(source, "out", axes, wanted)
            self.last[tile.key] = self.count
            self.say(f"T.copy({tile.name}, {place})")
            return
        self.roots.append((e, self.current))
        self.share(e)
        indices = ", ".join(self.indices[a] for a in self.output_axes(t)) or "()"
        source = e.args[0] if e.op == "cast" and e.dtype == t.dtype and e not in self.tiles and is_float(e.dtype) else e
        text = self.printer().text(source)
        if t.dtype != wide(t.dtype):
            text = f'T.cast({text}, "{t.dtype}")'
        self.parallel(axes, f"{self.names[t]}[{indices}] = {text}")

    def has_product(self) -> bool:
        return any(self.plan.product(t) is not None for t in self.plan.nest.stages)

    def output_axes(self, t: Tensor) -> tuple[Axis, ...]:
        out, left = [], list(self.plan.nest.axes)
        for a in t.axes:
            while left[0].extent != a.extent:
                left.pop(0)
            out.append(left.pop(0))
        return tuple(out)

    def store_loops(self) -> None:
        """Outputs along a looped axis: another walk over it."""
        loops = self.plan.loops()
        found = [(t, e) for t, e in self.plan.nest.outputs if set(self.output_axes(t)) & loops]
        if not found:
            return
        (a,) = {a for t, _ in found for a in self.output_axes(t) if a in loops}
        for _, e in found:
            self.ensure_outer(e, Pass((a,), (), {}, {}))
        self.current, self.before, place = Pass((a,), (), {}, {}), [], len(self.lines)
        self.depth += 1
        for t, e in found:
            self.store(t, e)
        self.depth -= 1
        self.lines[place:place] = [*self.before, *self.loop_head(self.current)[0]]
        self.current, self.before = None, None

    def special(self, t: Tensor, axes: tuple[Axis, ...]) -> Tile:
        """A scan or a sort along an axis that lies in the tile as a whole."""
        assert t.body is not None
        (along,) = t.over
        if t.kind.startswith("scan"):
            source = self.root(self.body(t), "x", axes)
            out = self.new_tile("scan", axes, t.dtype)
            self.last[source.key] = self.count
            dim, reverse = axes.index(along) + self.dummy, ", reverse=True" * t.attrs["reverse"]
            self.say(f"T.{SCANS[t.kind]}({source.name}, {out.name}, dim={dim}{reverse})")
            return out
        (place,) = [a for a in axes if a not in t.body.axes]
        kept = tuple(a for a in axes if a is not place)
        key, inside = self.sort_key(t), self.within(t.over)
        key = key if inside is None else Scalar("where", (inside, key, const(-2**31)))
        body = self.root(key, "key", (*kept, along), "int32")
        write = selected if t.kind == "argtopk" and self.plan.roles[place].size <= FEW else sorted_by_network
        return write(self, t, body, kept, along, place)

    @staticmethod
    def sort_key(t: Tensor) -> Scalar:
        """An integer that orders the elements, the greatest first; NaN has the least."""
        assert t.body is not None
        x = t.body
        if x.dtype in ("float64", "int64", "uint64", "uint32"):
            raise Unfit(f"sorting {x.dtype}")
        if is_float(x.dtype):
            bits = Scalar("bits", (Scalar("add", (x, const(0.0, "float32")), "float32"),))  # -0.0 + 0.0 is 0.0
            low = Scalar("and", (Scalar("shr", (bits, const(31))), const(2**31 - 1)))
            key = Scalar("xor", (bits, low))
        else:
            key = x if x.dtype == "int32" else Scalar("cast", (x,), "int32")
        if not t.attrs["largest"]:
            key = Scalar("not", (key,))
        nan = Scalar("isnan", (x,), "bool")
        return Scalar("where", (nan, const(-2**31), key)) if is_float(x.dtype) else key

    # ---- what runs tell each other ------------------------------------------------------------------------------------

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
            if not any(users[y] >= found for y in parents.get(x, ())):
                out.add(x)
        return frozenset(out)

    def _worth(self, e: Scalar) -> bool:
        """Whether computing an expression again costs more than a tile."""
        if not self.plan.tiled(tuple(e.axes)) or not is_float(e.dtype) or e.op in ("axis", "const"):
            return False
        wanted = [x for x in walk(e) if x.op in HEAVY or x.op == "read" and x.value in self.names and
                  len(self.plan.tiled(tuple(x.axes))) >= 2 - self.dummy]
        return bool(wanted) and not (e.op == "read" and e.value in self.stages)


def _nested(call: str, parts: list[str]) -> str:
    out = parts[0]
    for p in parts[1:]:
        out = f"{call}({out}, {p})"
    return out


def _tight(text: str) -> str:
    return f"({text})" if " " in text and not text.startswith("T.") else text


def _ceildiv(extent: Size, size: int) -> str:
    if size == 1:
        return str(extent)
    return str(-(-extent // size)) if isinstance(extent, int) else f"T.ceildiv({extent}, {size})"


def _wrapped(head: str, parts: Sequence[str], tail: str, width: int = 118) -> list[str]:
    lines, line = [], head
    for k, p in enumerate(parts):
        piece = p + (", " if k + 1 < len(parts) else tail)
        if len(line) + len(piece.rstrip()) > width and line.strip():
            lines.append(line.rstrip())
            line = " " * (len(head)) + piece
        else:
            line += piece
    return [*lines, line.rstrip()]

