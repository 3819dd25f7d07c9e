"""Random numbers of a thread: T.rng_init, T.rng_rand, T.rng_rand_float.

The generators (generators.py) are written in the language and produce the numbers of cuRAND's device interface, so that all
backends draw the same numbers.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Alloc, Buffer, Expr, Span, Var, cast, const, convert, LOCAL
from tilelang.ir import dtype as DType

from .tracing.builder import Builder, need_builder
from .generators import GENERATORS, U64, let, put
from .kernel import get_thread_binding, need_kernel
from .math import cos, log, sin, sqrt
from .tracing.scope import IfFrame
from .tracing.state import error


class _State:
    """A kernel's random generator.  Normal numbers come in pairs: the spare* fields hold the unused second one of a type, and
    `has` says whether there is one."""

    def __init__(self, b: Builder, span: Span | None, generator: str) -> None:
        def array(name: str, n: int, dt: str) -> Buffer:
            return Buffer(b.fresh_name(f"rng_{name}"), (n,), DType(dt), LOCAL, span=span)

        self.loop: Any = None  # the T.Parallel whose iterations start it; None: each thread does
        self.name, self.generator = generator, GENERATORS[generator](b, span)
        self.has = array("has", 2, "int32")
        self.spare32, self.spare64 = array("spare", 1, "float32"), array("spare64", 1, "float64")

    def buffers(self) -> list[Buffer]:
        return [*self.generator.state.values(), self.has, self.spare32, self.spare64]


def _integer(what: str, v: Any) -> Expr:
    e = convert(v)
    if not e.dtype.is_int or e.dtype.lanes != 1:
        raise error("rng", f"T.rng_init: {what} must be an integer, found {e.dtype}",
                    expected="an integer", found=str(e.dtype))
    if isinstance(v, int) and not 0 <= v < 1 << 64:
        raise error("rng", f"T.rng_init: {what} must be in 0 .. 2**64 - 1, found {v}",
                    expected="0 to 2**64 - 1", found=str(v))
    return cast(e, U64)


def rng_init(seed: Any, seq: Any = None, off: Any = 0, generator: str = "curandStatePhilox4_32_10_t") -> None:
    """Start this thread's generator.

    seed, seq (default: the thread's index in the grid along x), off: integers.  generator: curandStatePhilox4_32_10_t,
    curandStateXORWOW_t or curandStateMRG32k3a_t; a kernel uses only one.  Starting Philox takes constant time; the others take
    thousands of instructions for every bit of seq and off.  Raises rng for other generators.

    Example:
        T.rng_init(seed=42)
        Y[i] = T.rng_rand_float()
    """
    b, k = need_builder("T.rng_init"), need_kernel("T.rng_init")
    if generator not in GENERATORS:
        raise error("rng", f"unknown generator {generator!r}, expected one of {', '.join(GENERATORS)}",
                    expected=f"one of {', '.join(GENERATORS)}", found=repr(generator))
    state = getattr(k, "rng", None)
    if state is None:
        state = k.rng = _State(b, b.here(), str(generator))  # type: ignore[attr-defined]
        k.stmts[:0] = [Alloc(x, None, span=x.span) for x in state.buffers()]  # seen by the whole kernel
    if state.name != generator:
        raise error("rng", f"this kernel's generator is {state.name}: it cannot start {generator}",
                    expected=state.name, found=str(generator), hint="use one generator in a kernel, or two kernels")
    state.loop = _loop(b)
    if seq is None:
        seq = cast(k.block_vars[0], U64) * const(k.threads[0], U64) + cast(get_thread_binding(0), U64)
    start, sequence, offset = let(b, "rng_seed", _integer("the seed", seed)), _integer("seq", seq), _integer("off", off)
    sequence, offset = let(b, "rng_seq", sequence), let(b, "rng_off", offset)
    for i in range(2):
        put(b, state.has, i, 0)
    put(b, state.spare32, 0, 0.0)
    put(b, state.spare64, 0, 0.0)
    state.generator.start(b, start, sequence, offset)


def _loop(b: Builder) -> Any:
    """The T.Parallel around this place, or None."""
    return next((f for f in reversed(b.frames) if getattr(f, "parallel", False)), None)


def _state(what: str) -> tuple[Builder, _State]:
    b = need_builder(what)
    state = getattr(need_kernel(what), "rng", None)
    if state is None:
        raise error("rng", f"{what} before T.rng_init",
                    expected="T.rng_init before it", found="none in this kernel",
                    hint="call T.rng_init(seed) first, in the same kernel")
    if state.loop is not _loop(b):
        inside = state.loop is None
        raise error("rng", f"{what} {'in' if inside else 'after'} a T.Parallel, and the generator belongs to "
                    f"{'a thread' if inside else 'its iterations'}: which thread runs an iteration is not fixed",
                    expected="T.rng_init and the draws in one T.Parallel, or both outside of it",
                    found=f"T.rng_init {'outside' if inside else 'inside'} of the loop",
                    hint="start a generator in each iteration: T.rng_init(seed, i) with the loop's variable i" if inside
                    else "call T.rng_init(seed) after the loop")
    return b, state


def _drawn(b: Builder, v: Var) -> Var:
    """A drawn value, which the program may ignore or bind to a name."""
    b.unnamed[id(v)] = v
    return v


def rng_rand() -> Var:
    """The next 32 random bits of this thread: uint32.

    Example:
        T.rng_init(42)
        I[i] = T.cast(T.rng_rand(), "int32")
    """
    b, s = _state("T.rng_rand")
    return _drawn(b, s.generator.word(b))


def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Var:
    """The next random number of this thread, float32 (bit=32) or float64 (64).

    dist: "uniform" over (0, 1], or "normal" (mean 0, deviation 1, by Box and Muller; two numbers a draw).

    Example:
        T.rng_init(42)
        Y[i] = T.rng_rand_float(dist="normal")
    """
    b, s = _state("T.rng_rand_float")
    if bit not in (32, 64) or dist not in ("uniform", "normal"):
        raise error("rng", f"T.rng_rand_float takes bit 32 or 64 and dist 'uniform' or 'normal', found {bit!r}, {dist!r}",
                    expected="bit 32 or 64, dist 'uniform' or 'normal'", found=f"{bit!r}, {dist!r}")
    dt = DType(f"float{bit}")
    return _drawn(b, let(b, "uniform", s.generator.uniform(b, dt)) if dist == "uniform" else _normal(b, s, dt))


def _normal(b: Builder, s: _State, dt: DType) -> Var:
    kind, spare = (0, s.spare32) if dt.bits == 32 else (1, s.spare64)
    out = Buffer(b.fresh_name("rng_normal"), (1,), dt, LOCAL, span=b.here())
    b.emit(Alloc(out, None, span=b.here()))
    put(b, out, 0, spare[0])
    had = let(b, "had", s.has[kind])
    frame = IfFrame(convert(had == 0))
    b.enter(frame)
    u, angle = s.generator.polar(b, dt)
    radius = let(b, "radius", sqrt(const(-2.0, dt) * log(u)))
    turn = let(b, "turn", angle)
    put(b, out, 0, radius * sin(turn))
    put(b, spare, 0, radius * cos(turn))
    b.exit(frame)
    put(b, s.has, kind, 1 - had)
    return let(b, "normal", out[0])


__all__ = ["rng_init", "rng_rand", "rng_rand_float"]
