"""What a generated program is (plain data), and what the generator knows while it writes one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from gen_values import BITS, BOUNDS, EXACT, Value, integer, is_unsigned

Node = dict[str, Any]
"""A statement: "t" its text; with "b" (and "e") the lines of its body (and of else).  "f": features it counts for."""


def node(text: str, body: list[Node] | None = None, orelse: list[Node] | None = None, *features: str) -> Node:
    n: Node = {"t": text}
    if body is not None:
        n["b"] = body
    if orelse:
        n["e"] = orelse
    if features:
        n["f"] = list(features)
    return n


@dataclass(eq=False)
class Buf:
    """A live buffer.  low, high: integers its elements are always between.

    shape: numbers; dims: their texts.  root: the storage (views share it).  room: what sums may still add before the range is
    left; None: nothing may be added.  base: of an output, the text where the block's own part starts, per dimension; part:
    the extents of that part.  atomic: the operation all blocks may apply.
    """

    name: str
    scope: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    low: int
    high: int
    root: Any = None
    room: int | None = None
    base: tuple[str, ...] | None = None
    part: tuple[int, ...] | None = None
    atomic: str | None = None
    readable: bool = True
    writable: bool = True

    def __post_init__(self) -> None:
        self.root = self.root or self

    @property
    def bound(self) -> int:
        return max(-self.low, self.high)

    @property
    def tile(self) -> tuple[int, ...]:
        """Extents a statement of one block may touch."""
        return self.part or self.shape

    @property
    def size(self) -> int:
        n = 1
        for s in self.tile:
            n *= s
        return n

    def at(self, indices: list[str]) -> str:
        """The element's text; indices relative to the block's own part of an output."""
        if self.base:
            indices = [i if b == "0" else b if i == "0" else f"{b} + {i}" for b, i in zip(self.base, indices)]
        return f"{self.name}[{', '.join(indices)}]"

    def load(self, indices: list[str]) -> Value:
        return Value(self.at(indices), self.dtype, self.low, self.high)


@dataclass
class Scope:
    """What a statement may name.  loops: product of trip counts around it; tiles: block-wide work is allowed."""

    buffers: list[Buf]
    uniform: list[Value]
    vars: list[Value]
    times: int = 1
    depth: int = 0
    in_loop: bool = False
    pipelined: bool = False

    def inner(self, times: int = 1, **changes: Any) -> Scope:
        s = Scope(list(self.buffers), list(self.uniform), list(self.vars), self.times * times, self.depth + 1,
                  changes.pop("in_loop", self.in_loop), changes.pop("pipelined", self.pipelined))
        s.uniform += changes.pop("uniform", [])
        assert not changes
        return s


@dataclass
class Profile:
    """Sizes and weights a program is drawn from."""

    name: str
    extents: tuple[int, ...]
    threads: tuple[int, ...]
    dtypes: tuple[str, ...]
    statements: tuple[int, int]
    weights: dict[str, float] = field(default_factory=dict)


class State:
    """Names, dimensions, tensors and allocations of the program being written."""

    def __init__(self, seed: int, profile: Profile) -> None:
        self.rng = random.Random(seed)
        self.seed, self.profile = seed, profile
        self.counters: dict[str, int] = {}
        self.dims: dict[str, int] = {}
        self.symbols: dict[str, int] = {}
        self.steps: dict[str, str] = {}  # symbols of strides, and what they are
        self.tensors: list[dict[str, Any]] = []
        self.given: list[Value] = []  # whole numbers that the call is given
        self.allocs: list[Node] = []
        self.mutable: list[Value] = []
        self.inputs: list[Buf] = []
        self.outputs: list[Buf] = []
        self.top: list[Buf] = []
        self.grid_values: list[Value] = []
        self.prologue: list[Node] = []
        self.blocks = 1
        self.flat = "0"  # text of the block's number
        self.workspaces: list[Buf] = []
        self.top_outputs: list[Buf] = []
        self.shared_bytes = 0
        self.register_bits = 0
        self.threads = 128
        self.sides: list[int] | None = None  # threads in more dimensions than one

    # -- small choices

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, items: Any) -> Any:
        return self.rng.choice(list(items))

    def between(self, a: int, b: int) -> int:
        return self.rng.randint(a, b)

    def fresh(self, prefix: str) -> str:
        n = self.counters.get(prefix, 0)
        self.counters[prefix] = n + 1
        return f"{prefix}{n}"

    # -- extents

    def dim(self, n: int) -> str:
        """The name of an extent: one name a number, so that shrinking it shrinks everything that goes with it."""
        for name, value in self.dims.items():
            if value == n and name.startswith("D"):
                return name
        name = self.fresh("D")
        self.dims[name] = n
        return name

    def extent(self) -> int:
        return self.pick(self.profile.extents)

    # -- buffers

    def bound_for(self, dt: str) -> int:
        return self.pick(BOUNDS[dt])

    def limits(self, dt: str, bound: int | None = None) -> tuple[int, int]:
        b = bound if bound is not None else self.bound_for(dt)
        return (0 if is_unsigned(dt) else -b), b

    def tensor(self, shape: tuple[int, ...], dims: tuple[str, ...], dt: str, bound: int | None = None, prefix: str = "A",
               zero: bool = False, **more: Any) -> Buf:
        """A global tensor, a parameter of the program."""
        low, high = self.limits(dt, bound)
        name = self.fresh(prefix)
        t = {"name": name, "shape": list(dims), "dtype": dt, "low": 0 if zero else low, "high": 0 if zero else high}
        if self.chance(0.14) and not zero:
            t["strides"] = self.strides(dims)
        self.tensors.append(t)
        return Buf(name, "global", shape, dims, dt, low, high, **more)

    def parameter(self) -> Value:
        """A whole number of the call."""
        name, high = self.fresh("n"), self.between(1, 6)
        self.tensors.append({"name": name, "shape": [], "dtype": "int32", "low": 0, "high": high, "scalar": True})
        v = integer(name, 0, high)
        self.given.append(v)
        return v

    def strides(self, dims: tuple[str, ...]) -> list[str]:
        """Texts of strides with space between rows, tiles or elements: numbers, or symbols of run time."""
        inner = self.pick([1, 1, 1, 1, 2, 3])
        out, step = [str(inner)], str(inner)
        for d in reversed(dims[1:]):
            step = f"({d} * {step} + {self.pick([0, 0, 1, 3, 8, 16])})" if step != "1" else \
                f"({d} + {self.pick([0, 0, 1, 3, 4, 8, 16])})"
            text = step
            if any(m in step for m in self.symbols) or self.chance(0.4):
                text = self.fresh("X")
                self.steps[text] = step
            out.insert(0, text)
        return out

    def allocate(self, scope: str, shape: tuple[int, ...], dt: str, *, bound: int | None = None,
                 room: int | None = None) -> tuple[Buf, Node]:
        """A buffer of a block and the statement that allocates it."""
        n = 1
        for s in shape:
            n *= s
        if scope == "shared":
            self.shared_bytes += n * BITS[dt] // 8
        else:
            self.register_bits += n * max(BITS[dt], 8)
        name = self.fresh({"shared": "S", "fragment": "F", "local": "L"}[scope])
        dims = tuple(self.dim(s) for s in shape)
        if room is not None:
            top = min(EXACT[dt] // 4, 2**21)
            low, high = (0 if is_unsigned(dt) else -top), top
            room = top - 4096 if top > 8192 else top // 2
        else:
            low, high = self.limits(dt, bound)
        static = ", scope='shared'" if scope == "shared" and self.chance(0.06) else ""
        text = f"{name} = T.alloc_{scope}(({', '.join(dims)},), '{dt}'{static})"
        return Buf(name, scope, shape, dims, dt, low, high, room=room), node(
            text, None, None, f"alloc:{scope}:{dt}", *(["alloc:static"] if static else []))

    def fits(self, scope: str, shape: tuple[int, ...], dt: str) -> bool:
        n = 1
        for s in shape:
            n *= s
        if scope == "shared":
            return self.shared_bytes + n * BITS[dt] // 8 <= 36 * 1024
        return self.register_bits + n * max(BITS[dt], 8) <= self.threads * 32 * 120

    def scalar(self, s: Scope, high: int | None = None) -> Value:
        """A new scalar that the program may change, of every thread of the block alike."""
        name, n = self.fresh("v"), high + 1 if high else self.between(2, 9)
        self.allocs.append(node(f"{name} = T.alloc_var('int32', init={self.between(0, n - 1)})", None, None, "alloc:var"))
        v = integer(name, 0, n - 1)
        self.mutable.append(v)
        s.uniform.append(v)
        return v

    # -- block-uniform integers

    def uniform_index(self, s: Scope, n: int) -> str:
        """Text of a block-uniform integer in [0, n)."""
        if n <= 1:
            return "0"
        known = [v for v in s.uniform if v.low >= 0]
        if not known or self.chance(0.3):
            return str(self.between(0, n - 1))
        v = self.pick(known[-4:] if self.chance(0.6) else known)
        c = self.between(0, 3)
        if v.high < n:
            if v.high + c < n and c:
                return f"({v.text} + {c})"
            return v.text
        form = self.between(0, 2)
        if form == 0:
            return f"({v.text} % {n})"
        if form == 1:
            return f"(({v.text} * {self.between(2, 5)} + {c}) % {n})"
        return f"T.min({v.text}, {n - 1})"


def counter(text: str, n: int, start: int = 0) -> Value:
    """A loop variable over start .. start + n - 1."""
    return integer(text, start, max(start, start + n - 1))
