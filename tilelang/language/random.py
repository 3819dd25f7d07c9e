"""Random numbers of a thread: T.rng_init, T.rng_rand, T.rng_rand_float.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11), counted as
cuRAND's device interface counts it: the key is the seed, the upper half of the counter the sequence, the lower half
the offset divided by four.  It is written in the language, so every execution draws the same numbers.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Alloc, Buffer, Expr, Span, Var, cast, const, convert
from tilelang.ir import dtype as DType

from .builder import Builder
from .kernel import get_thread_binding, need_kernel
from .loops import unroll
from .math import cos, log, sin, sqrt
from .scope import IfFrame
from .state import error, need_builder

_PHILOX = "curandStatePhilox4_32_10_t"
_GENERATORS = (_PHILOX, "curandStateMRG32k3a_t", "curandStateXORWOW_t")
_M0, _M1, _W0, _W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_U32, _U64 = DType("uint32"), DType("uint64")
_TWO_PI = 6.283185307179586


class _State:
    """Private arrays of a kernel's generator.  counter, key, words: Philox; at: next word; spare*: second normals."""

    def __init__(self, b: Builder, span: Span | None) -> None:
        def array(name: str, n: int, dt: str) -> Buffer:
            return Buffer(b.fresh_name(f"rng_{name}"), (n,), DType(dt), "local", span=span)

        self.counter, self.words = array("counter", 4, "uint32"), array("words", 4, "uint32")
        self.key = array("key", 2, "uint32")
        self.at, self.has = array("at", 1, "int32"), array("has", 2, "int32")
        self.spare32, self.spare64 = array("spare", 1, "float32"), array("spare64", 1, "float64")

    def buffers(self) -> list[Buffer]:
        return [self.counter, self.key, self.words, self.at, self.has, self.spare32, self.spare64]


def _put(b: Builder, buffer: Buffer, i: Any, value: Any) -> None:
    b.store(buffer, (convert(i),), value)


def _let(b: Builder, name: str, value: Any) -> Var:
    return b.let(name, convert(value))


def _generate(b: Builder, s: _State) -> None:
    """words = Philox4x32-10(counter, key)."""
    work = Buffer(b.fresh_name("rng_key_of_round"), (2,), _U32, "local", span=b.here())
    b.emit(Alloc(work, None, span=b.here()))
    for i in range(4):
        _put(b, s.words, i, s.counter[i])
    for i in range(2):
        _put(b, work, i, s.key[i])
    loop = unroll(10)
    b.enter(loop)
    w = [_let(b, f"w{i}", s.words[i]) for i in range(4)]
    k = [_let(b, f"k{i}", work[i]) for i in range(2)]
    p0, p1 = (_let(b, f"p{i}", cast(x, _U64) * const(m, _U64)) for i, (x, m) in enumerate(((w[0], _M0), (w[2], _M1))))
    _put(b, s.words, 0, cast(p1 >> const(32, _U64), _U32) ^ w[1] ^ k[0])
    _put(b, s.words, 1, cast(p1 & const(0xFFFFFFFF, _U64), _U32))
    _put(b, s.words, 2, cast(p0 >> const(32, _U64), _U32) ^ w[3] ^ k[1])
    _put(b, s.words, 3, cast(p0 & const(0xFFFFFFFF, _U64), _U32))
    _put(b, work, 0, k[0] + const(_W0, _U32))
    _put(b, work, 1, k[1] + const(_W1, _U32))
    b.exit(loop)


def _advance(b: Builder, s: _State, by: Expr) -> None:
    """counter += by (uint64), over its 128 bits."""
    low = _let(b, "low", cast(s.counter[0], _U64) | (cast(s.counter[1], _U64) << const(32, _U64)))
    high = _let(b, "high", cast(s.counter[2], _U64) | (cast(s.counter[3], _U64) << const(32, _U64)))
    now = _let(b, "now", low + by)
    carried = _let(b, "carried", high + cast(now < low, _U64))
    for i, v in enumerate((now, carried)):
        _put(b, s.counter, 2 * i, cast(v & const(0xFFFFFFFF, _U64), _U32))
        _put(b, s.counter, 2 * i + 1, cast(v >> const(32, _U64), _U32))


def _integer(what: str, v: Any) -> Expr:
    e = convert(v)
    if not e.dtype.is_int or e.dtype.lanes != 1:
        raise error("rng", f"T.rng_init: {what} must be an integer, found {e.dtype}",
                    expected="an integer", found=str(e.dtype))
    if isinstance(v, int) and not 0 <= v < 1 << 64:
        raise error("rng", f"T.rng_init: {what} must be in 0 .. 2**64 - 1, found {v}",
                    expected="0 to 2**64 - 1", found=str(v))
    return cast(e, _U64)


def rng_init(seed: Any, seq: Any = None, off: Any = 0, generator: str = _PHILOX) -> None:
    """Start this thread's generator.

    seed, seq (default: the thread's index in the grid along x), off: integers.  Raises rng for unknown generators, and
    not-available for curandStateXORWOW_t and curandStateMRG32k3a_t.
    """
    b, k = need_builder("T.rng_init"), need_kernel("T.rng_init")
    if generator not in _GENERATORS:
        raise error("rng", f"unknown generator {generator!r}, expected one of {', '.join(_GENERATORS)}",
                    expected=f"one of {', '.join(_GENERATORS)}", found=repr(generator))
    if generator != _PHILOX:
        raise error("not-available", f"the generator {generator} is not available",
                    expected=str(_PHILOX), found=str(generator), hint=f"use {_PHILOX}, the default")
    state = getattr(k, "rng", None)
    if state is None:
        state = k.rng = _State(b, b.here())  # type: ignore[attr-defined]
        k.stmts[:0] = [Alloc(x, None, span=x.span) for x in state.buffers()]  # seen by the whole kernel
    if seq is None:
        seq = cast(k.block_vars[0], _U64) * const(k.threads[0], _U64) + cast(get_thread_binding(0), _U64)
    start, sequence, offset = _let(b, "rng_seed", _integer("the seed", seed)), _integer("seq", seq), _integer("off", off)
    sequence, offset = _let(b, "rng_seq", sequence), _let(b, "rng_off", offset)
    for i, (v, shift) in enumerate(((start, 0), (start, 32))):
        _put(b, state.key, i, cast((v >> const(shift, _U64)) & const(0xFFFFFFFF, _U64), _U32))
    for i in range(2):
        _put(b, state.counter, i, const(0, _U32))
        _put(b, state.counter, 2 + i, cast((sequence >> const(32 * i, _U64)) & const(0xFFFFFFFF, _U64), _U32))
        _put(b, state.has, i, 0)
    _put(b, state.spare32, 0, 0.0)
    _put(b, state.spare64, 0, 0.0)
    _advance(b, state, offset >> const(2, _U64))
    _put(b, state.at, 0, cast(offset & const(3, _U64), "int32"))
    _generate(b, state)


def _state(what: str) -> tuple[Builder, _State]:
    b = need_builder(what)
    state = getattr(need_kernel(what), "rng", None)
    if state is None:
        raise error("rng", f"{what} before T.rng_init",
                    expected="T.rng_init before it", found="none in this kernel",
                    hint="call T.rng_init(seed) first, in the same kernel")
    return b, state


def _draw(b: Builder, s: _State) -> Var:
    out = _let(b, "rng", s.words[s.at[0]])
    _put(b, s.at, 0, s.at[0] + 1)
    frame = IfFrame(convert(s.at[0] == 4))
    b.enter(frame)
    _put(b, s.at, 0, 0)
    _advance(b, s, const(1, _U64))
    _generate(b, s)
    b.exit(frame)
    b.unnamed[id(out)] = out
    return out


def rng_rand() -> Var:
    """The next 32 random bits of this thread: uint32."""
    b, s = _state("T.rng_rand")
    return _draw(b, s)


def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Var:
    """The next random number of this thread, float32 (bit=32) or float64 (64).

    dist: "uniform" over (0, 1], or "normal" (mean 0, deviation 1, by Box and Muller; two numbers a draw).
    """
    b, s = _state("T.rng_rand_float")
    if bit not in (32, 64) or dist not in ("uniform", "normal"):
        raise error("rng", f"T.rng_rand_float takes bit 32 or 64 and dist 'uniform' or 'normal', found {bit!r}, {dist!r}",
                    expected="bit 32 or 64, dist 'uniform' or 'normal'", found=f"{bit!r}, {dist!r}")
    dt = DType(f"float{bit}")
    if dist == "uniform":
        unit = const(2.0 ** -32, dt)
        x = cast(_draw(b, s), dt) * unit
        v = _let(b, "uniform", x + (const(2.0 ** -33, dt) if bit == 32 else unit))
        b.unnamed[id(v)] = v
        return v
    return _normal(b, s, dt)


def _normal(b: Builder, s: _State, dt: DType) -> Var:
    kind, spare = (0, s.spare32) if dt.bits == 32 else (1, s.spare64)
    out = Buffer(b.fresh_name("rng_normal"), (1,), dt, "local", span=b.here())
    b.emit(Alloc(out, None, span=b.here()))
    _put(b, out, 0, spare[0])
    had = _let(b, "had", s.has[kind])
    frame = IfFrame(convert(had == 0))
    b.enter(frame)
    if dt.bits == 32:
        u = cast(_draw(b, s), dt) * const(2.0 ** -32, dt) + const(2.0 ** -33, dt)
        angle = cast(_draw(b, s), dt) * const(2.0 ** -32 * _TWO_PI, dt) + const(2.0 ** -33 * _TWO_PI, dt)
    else:
        x0, x1, y0, y1 = (cast(_draw(b, s), _U64) for _ in range(4))
        unit = const(2.0 ** -53, dt)
        u, v = (cast(p ^ (q << const(21, _U64)), dt) * unit + const(2.0 ** -54, dt) for p, q in ((x0, x1), (y0, y1)))
        angle = v * const(_TWO_PI, dt)
    radius = _let(b, "radius", sqrt(const(-2.0, dt) * log(u)))
    turn = _let(b, "turn", angle)
    _put(b, out, 0, radius * sin(turn))
    _put(b, spare, 0, radius * cos(turn))
    b.exit(frame)
    _put(b, s.has, kind, 1 - had)
    normal = _let(b, "normal", out[0])
    b.unnamed[id(normal)] = normal
    return normal


__all__ = ["rng_init", "rng_rand", "rng_rand_float"]
