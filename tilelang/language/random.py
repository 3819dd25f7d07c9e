"""Random numbers: T.rng_init, T.rng_rand, T.rng_rand_float.

The generators (generators.py) are written in the language and produce the numbers of cuRAND's device interface, so that all
backends draw the same numbers.  Outside of T.Parallel a generator belongs to a thread; in T.Parallel each iteration has one.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Buffer, Call, Expr, Node, Span, Stmt, Var, cast, const, convert, rewrite, stmts_of, LOCAL)
from tilelang.ir import dtype as DType

from .tracing.builder import Builder, need_builder, reads_memory
from .generators import GENERATORS, U64, Philox, let, put
from .kernel import KernelLaunchFrame, get_thread_binding, need_kernel
from .loops import ParallelFrame
from .math import cos, log, sin, sqrt
from .tracing.scope import BodyFrame, Frame, IfFrame
from .tracing.state import error, example

_OF_THREADS = ("get_lane_idx", "get_warp_idx", "get_warp_idx_sync", "get_warp_group_idx")


class _State:
    """A generator.  Normal numbers come in pairs: the spare* fields hold the unused second one of a type, and
    `has` says whether there is one."""

    def __init__(self, b: Builder, span: Span | None, generator: str) -> None:
        def array(name: str, n: int, dt: str) -> Buffer:
            return Buffer(b.fresh_name(f"rng_{name}"), (n,), DType(dt), LOCAL, span=span)

        self.generator = GENERATORS[generator](b, span)
        self.has = array("has", 2, "int32")
        self.spare32, self.spare64 = array("spare", 1, "float32"), array("spare64", 1, "float64")

    def allocations(self) -> list[Stmt]:
        return [Alloc(x, None, span=x.span) for x in (*self.generator.state.values(), self.has, self.spare32, self.spare64)]

    def start(self, b: Builder, seed: Expr, seq: Expr, off: Expr) -> None:
        for i in range(2):
            put(b, self.has, i, 0)
        put(b, self.spare32, 0, 0.0)
        put(b, self.spare64, 0, 0.0)
        self.generator.start(b, seed, seq, off)


class _Random:
    """The generators of a kernel.  thread: each thread's, once it was started outside of T.Parallel.  of_block: seed, sequence
    and offset without thread indices; the offset counts the loops that drew numbers.  loops: the generator of each iteration
    of a T.Parallel."""

    def __init__(self, b: Builder, span: Span | None, name: str) -> None:
        self.name = name
        self.thread: _State | None = None
        self.of_block = Buffer(b.fresh_name("rng_of_block"), (3,), U64, LOCAL, span=span)
        self.loops: dict[Frame, _State] = {}


def _integer(what: str, v: Any) -> Expr:
    e = convert(v)
    if not e.dtype.is_int or e.dtype.lanes != 1:
        raise error("rng", f"T.rng_init: {what} must be «an integer», found {e.dtype}")
    if isinstance(v, int) and not 0 <= v < 1 << 64:
        raise error("rng", f"T.rng_init: {what} must be in 0 .. 2**64 - 1, found {v}", expected="0 to 2**64 - 1")
    return cast(e, U64)


@example("T.rng_init(seed=42)", "Y[i] = T.rng_rand_float()")
def rng_init(seed: Any, seq: Any = None, off: Any = 0, generator: str = "curandStatePhilox4_32_10_t") -> None:
    """Start this thread's generator; in T.Parallel, the iteration's.

    seed, seq (default: the thread's index in the grid along x), off: integers.  generator: curandStatePhilox4_32_10_t,
    curandStateXORWOW_t or curandStateMRG32k3a_t; a kernel uses only one.  Starting Philox takes constant time; the others take
    thousands of instructions for every bit of seq and off.  Raises rng for other generators.

    Iterations of a T.Parallel that draw without a T.rng_init of their own have a generator each, which depends on nothing
    but seed, seq and off with all thread indices 0 (default of seq: the block's index in the grid, x fastest), on how many
    such loops the block has run before (each run counts), and on the number of the iteration, the last loop variable fastest.
    Call that number l, and k the first two words (the low one first) of Philox4x32-10 with key `seed` and the counter whose
    lower half is off + the loops before, upper half seq.  The iteration draws from T.rng_init(k, l) of Philox; for the
    other generators from T.rng_init(h), h being those words of key k and the counter with upper half l, lower half 0.
    """
    b, k = need_builder("T.rng_init"), need_kernel("T.rng_init")
    if generator not in GENERATORS:
        raise error("rng", f"unknown generator ‹{generator!r}›, expected «one of {', '.join(GENERATORS)}»")
    random = getattr(k, "rng", None)
    if random is None:
        random = k.rng = _Random(b, b.here(), str(generator))  # type: ignore[attr-defined]
    if random.name != generator:
        raise error("rng", f"this kernel's generator is «{random.name}»: it cannot start ‹{generator}›",
                    hint="use one generator in a kernel, or two kernels")
    given = [_integer(what, v) for what, v in (("the seed", seed), ("seq", 0 if seq is None else seq), ("off", off))]
    loops = _loops(b)
    if loops:
        state = random.loops.get(loops[-1]) or _of_loop(b, random, loops[-1])
    elif random.thread is None:
        state = random.thread = _State(b, b.here(), random.name)
        k.stmts[:0] = [*state.allocations(), Alloc(random.of_block, None, span=b.here())]  # seen by the whole kernel
    else:
        state = random.thread
    if not loops:
        once = [given[0], _block_index(k) if seq is None else given[1], given[2]]
        for i, e in enumerate(_of_first_thread(b, k, e) for e in once):
            put(b, random.of_block, i, e)
    if seq is None:
        given[1] = cast(k.block_vars[0], U64) * const(k.threads[0], U64) + cast(get_thread_binding(0), U64)
    state.start(b, *(let(b, f"rng_{n}", v) for n, v in zip(("seed", "seq", "off"), given)))


def _block_index(k: KernelLaunchFrame) -> Expr:
    out: Expr = const(0, U64)
    for v, n in reversed(list(zip(k.block_vars, k.blocks))):
        out = out * cast(n, U64) + cast(v, U64)
    return out


def _of_first_thread(b: Builder, k: KernelLaunchFrame, e: Expr) -> Expr:
    """The value of e in the first thread of the block.  A value that was read from memory stays the thread's own."""
    threads = set(k.thread_vars)
    values = {s.var: s.value for f in b.frames for x in f.stmts for s in stmts_of(x) if isinstance(s, Bind)}

    def fn(x: Node) -> Node | None:
        if x in threads or isinstance(x, Call) and x.op in _OF_THREADS:
            return const(0, x.dtype)  # type: ignore[attr-defined]
        if isinstance(x, Var) and x in values and not reads_memory(values[x]):
            first = rewrite(values[x], fn)
            return None if first is values[x] else first
        return None

    return rewrite(e, fn)


def _loops(b: Builder) -> list[ParallelFrame]:
    """The T.Parallel loops around this place, outermost first."""
    return [f for f in b.frames if isinstance(f, ParallelFrame)]


def _of_loop(b: Builder, random: _Random, loop: ParallelFrame) -> _State:
    """A generator of each iteration, allocated at the start of the loop's body."""
    state = random.loops[loop] = _State(b, b.here(), random.name)
    loop.stmts[:0] = state.allocations()
    return state


def _start_iterations(b: Builder, random: _Random, loops: list[ParallelFrame]) -> _State:
    """Start a generator in each iteration: a key is computed before the loops, the rest at the start of their body."""
    first, inner = b.frames.index(loops[0]), loops[-1]
    before, of_block = BodyFrame(), random.of_block
    b.frames.append(before)
    philox = Philox(b, b.here())
    for x in philox.state.values():
        b.emit(Alloc(x, None, span=x.span))
    seed, low, high = (let(b, f"rng_{n}", of_block[i]) for n, i in (("seed", 0), ("low", 2), ("high", 1)))
    key = let(b, "rng_key", philox.block(b, seed, low, high))
    put(b, of_block, 2, of_block[2] + const(1, U64))
    number: Expr = const(0, U64)
    for f in loops:
        for v, n in zip(f.vars, f.extents):
            number = number * cast(let(b, "extent", n) if reads_memory(n) else n, U64) + cast(v, U64)
    b.frames.pop()
    b.frames[first - 1].stmts.extend(before.stmts)
    inside = BodyFrame()
    b.frames.append(inside)
    state, zero = _State(b, b.here(), random.name), const(0, U64)
    for s in state.allocations():
        b.emit(s)
    if isinstance(state.generator, Philox):
        state.start(b, key, let(b, "rng_seq", number), zero)
    else:
        for x in (own := Philox(b, b.here())).state.values():
            b.emit(Alloc(x, None, span=x.span))
        state.start(b, let(b, "rng_seed", own.block(b, key, zero, let(b, "rng_seq", number))), let(b, "rng_seq", zero),
                    let(b, "rng_off", zero))
    b.frames.pop()
    inner.stmts[:0] = inside.stmts
    random.loops[inner] = state
    return state


def _state(what: str) -> tuple[Builder, _State]:
    b = need_builder(what)
    random: _Random | None = getattr(need_kernel(what), "rng", None)
    if random is None:
        raise error("rng", f"{what} before T.rng_init", expected="T.rng_init before it", found="none in this kernel",
                    hint="call T.rng_init(seed) first, in the same kernel")
    loops = _loops(b)
    state = random.loops.get(loops[-1]) if loops else random.thread
    if state is None and random.thread is None:
        raise error("rng", f"{what} {'in another' if loops else 'after a'} T.Parallel, and the generator belongs to the "
                    "iterations of one that has ended", expected="T.rng_init and the draws in one T.Parallel, or T.rng_init "
                    "outside of it", found="T.rng_init inside of the loop", hint="call T.rng_init(seed) before the loops")
    return b, state or _start_iterations(b, random, loops)


@example("T.rng_init(42)", 'I[i] = T.cast(T.rng_rand(), "int32")')
def rng_rand() -> Var:
    """The next 32 random bits of this thread, in T.Parallel of this iteration (see T.rng_init): uint32."""
    b, s = _state("T.rng_rand")
    return b.nameless(s.generator.word(b))


@example("T.rng_init(42)", 'Y[i] = T.rng_rand_float(dist="normal")')
def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Var:
    """The next random number of this thread, in T.Parallel of this iteration (see T.rng_init).

    bit: 32 for float32, 64 for float64.  dist: "uniform" over (0, 1], or "normal" (mean 0, deviation 1, by Box and Muller; two
    numbers a draw).
    """
    b, s = _state("T.rng_rand_float")
    if bit not in (32, 64) or dist not in ("uniform", "normal"):
        raise error("rng", f"T.rng_rand_float takes bit 32 or 64 and dist 'uniform' or 'normal', found {bit!r}, {dist!r}",
                    expected="bit 32 or 64, dist 'uniform' or 'normal'")
    dt = DType(f"float{bit}")
    return b.nameless(let(b, "uniform", s.generator.uniform(b, dt)) if dist == "uniform" else _normal(b, s, dt))


def _normal(b: Builder, s: _State, dt: DType) -> Var:
    kind, spare = (0, s.spare32) if dt.bits == 32 else (1, s.spare64)
    out = Buffer(b.fresh_name("rng_normal"), (1,), dt, LOCAL, span=b.here())
    b.emit(Alloc(out, None, span=b.here()))
    put(b, out, 0, spare[0])
    had = let(b, "had", s.has[kind])
    with IfFrame(convert(had == 0)):
        u, angle = s.generator.polar(b, dt)
        radius = let(b, "radius", sqrt(const(-2.0, dt) * log(u)))
        turn = let(b, "turn", angle)
        put(b, out, 0, radius * sin(turn))
        put(b, spare, 0, radius * cos(turn))
    put(b, s.has, kind, 1 - had)
    return let(b, "normal", out[0])
