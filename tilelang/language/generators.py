"""Random number generators written in the language; they produce the numbers of cuRAND's device interface.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11.  xorwow: Marsaglia, "Xorshift
RNGs", 2003.  MRG32k3a: L'Ecuyer, "Good parameters and implementations for combined multiple recursive random number
generators", 1999.  The initialisation from a seed and the distance of sequences are those of cuRAND's documentation and
header.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tilelang.ir import Alloc, Buffer, Expr, Span, Var, binary, cast, const, convert, dtype as DType, logical, select, LOCAL

from .tracing.builder import Builder
from .loops import serial, unroll
from .tracing.scope import IfFrame, WhileFrame

U32, U64, F64 = DType("uint32"), DType("uint64"), DType("float64")
TWO_PI = 6.283185307179586


def put(b: Builder, buffer: Buffer, i: Any, value: Any) -> None:
    """buffer[i] = value."""
    b.store(buffer, (convert(i),), value)


def let(b: Builder, name: str, value: Any) -> Var:
    """A name for a value, computed once."""
    return b.let(name, convert(value))


class Generator:
    """A thread's generator: its state in private arrays, the initialisation, and the functions that draw numbers."""

    arrays: tuple[tuple[str, int, DType], ...]

    def __init__(self, b: Builder, span: Span | None) -> None:
        self.state = {name: Buffer(b.fresh_name(f"rng_{name}"), (n,), dt, LOCAL, span=span) for name, n, dt in self.arrays}

    def start(self, b: Builder, seed: Expr, seq: Expr, off: Expr) -> None:
        """Emit statements that set the state to element `off` of sequence `seq` (all uint64)."""
        raise NotImplementedError

    def word(self, b: Builder) -> Var:
        """The next 32 bits: uint32."""
        raise NotImplementedError

    def uniform(self, b: Builder, dt: DType) -> Expr:
        """A number over (0, 1]."""
        if dt.bits == 64:
            return self._long(b)
        return cast(self.word(b), dt) * const(2.0 ** -32, dt) + const(2.0 ** -33, dt)

    def polar(self, b: Builder, dt: DType) -> tuple[Expr, Expr]:
        """A number over (0, 1] and an angle over (0, 2 pi]."""
        if dt.bits == 64:
            u, v = self._long(b), self._long(b)
            return u, v * const(TWO_PI, dt)
        u = self.uniform(b, dt)
        return u, cast(self.word(b), dt) * const(2.0 ** -32 * TWO_PI, dt) + const(2.0 ** -33 * TWO_PI, dt)

    def _long(self, b: Builder) -> Expr:
        """A float64 over (0, 1) from 53 bits of two words."""
        x, y = cast(self.word(b), U64), cast(self.word(b), U64)
        return cast(x ^ (y << 21), F64) * const(2.0 ** -53, F64) + const(2.0 ** -54, F64)


def _zero_minus(bit: Expr) -> Expr:
    """All ones where the bit (0 or 1) is set."""
    return const(0, U32) - bit


# ---- Philox4x32-10 ------------------------------------------------------------------------------------------------------

class Philox(Generator):
    """Philox4x32-10.  Key: the seed.  Counter: the sequence in the upper half, the offset divided by four in the lower half."""

    arrays = (("counter", 4, U32), ("key", 2, U32), ("words", 4, U32), ("at", 1, DType("int32")))
    M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85

    def start(self, b: Builder, seed: Expr, seq: Expr, off: Expr) -> None:
        put(b, self.state["at"], 0, cast(off & 3, "int32"))
        self.block(b, seed, off >> 2, seq)

    def block(self, b: Builder, key: Expr, low: Expr, high: Expr) -> Expr:
        """Set the key and the halves of the counter, and compute its four words.  Returns the first two (uint64)."""
        for name, at, value in (("key", 0, key), ("counter", 0, low), ("counter", 2, high)):
            for i in range(2):
                put(b, self.state[name], at + i, cast((value >> 32 * i) & 0xFFFFFFFF, U32))
        self._generate(b)
        words = self.state["words"]
        return cast(words[0], U64) | (cast(words[1], U64) << 32)

    def word(self, b: Builder) -> Var:
        at = self.state["at"]
        out = let(b, "rng", self.state["words"][at[0]])
        put(b, at, 0, at[0] + 1)
        with IfFrame(convert(at[0] == 4)):
            put(b, at, 0, 0)
            self._advance(b, const(1, U64))
            self._generate(b)
        return out

    def uniform(self, b: Builder, dt: DType) -> Expr:
        unit = const(2.0 ** -32, dt)  # of 32 bits in float64 too
        return cast(self.word(b), dt) * unit + (const(2.0 ** -33, dt) if dt.bits == 32 else unit)

    def _generate(self, b: Builder) -> None:
        """words = Philox4x32-10(counter, key)."""
        words, key = self.state["words"], self.state["key"]
        work = Buffer(b.fresh_name("rng_key_of_round"), (2,), U32, LOCAL, span=b.here())
        b.emit(Alloc(work, None, span=b.here()))
        for i in range(4):
            put(b, words, i, self.state["counter"][i])
        for i in range(2):
            put(b, work, i, key[i])
        with unroll(10):
            w = [let(b, f"w{i}", words[i]) for i in range(4)]
            k = [let(b, f"k{i}", work[i]) for i in range(2)]
            p = [let(b, f"p{i}", cast(w[2 * i], U64) * m) for i, m in enumerate((self.M0, self.M1))]
            for i in range(2):
                high, low = (cast(x, U32) for x in (p[1 - i] >> 32, p[1 - i] & 0xFFFFFFFF))
                put(b, words, 2 * i, high ^ w[2 * i + 1] ^ k[i])
                put(b, words, 2 * i + 1, low)
            for i, weyl in enumerate((self.W0, self.W1)):
                put(b, work, i, k[i] + const(weyl, U32))

    def _advance(self, b: Builder, by: Expr) -> None:
        """counter += by (uint64), over its 128 bits."""
        counter = self.state["counter"]
        low = let(b, "low", cast(counter[0], U64) | (cast(counter[1], U64) << 32))
        high = let(b, "high", cast(counter[2], U64) | (cast(counter[3], U64) << 32))
        now = let(b, "now", low + by)
        carried = let(b, "carried", high + cast(now < low, U64))
        for i, v in enumerate((now, carried)):
            put(b, counter, 2 * i, cast(v & 0xFFFFFFFF, U32))
            put(b, counter, 2 * i + 1, cast(v >> 32, U32))


def _coefficient(words: Buffer, at: Expr) -> Expr:
    """Bit `at` of an array of words: 0 or 1."""
    return (words[at // 32] >> cast(at % 32, U32)) & 1


# ---- jumps ----------------------------------------------------------------------------------------------------------------

class Jumping(Generator):
    """A linear generator that jumps ahead by powers of x modulo the characteristic polynomial, without tables of matrices.

    n steps are x**n modulo that polynomial, applied as a combination of few steps.  power, base, left, product:
    polynomials; n: the remaining bits of an exponent.
    """

    def multiply(self, b: Builder, modulus: Any) -> None:
        """product = left * base modulo the polynomial."""
        raise NotImplementedError

    def jump(self, b: Builder, counts: tuple[tuple[Expr, tuple[int, ...]], ...], modulus: Any = None) -> None:
        """power = the product of polynomials ** counts (uint64), by squaring.  A loop contains the only multiplication."""
        power, base, left, product, n = (self.state[k] for k in ("power", "base", "left", "product", "n"))
        size, dt = int(power.shape[0]), power.dtype
        for i in range(size):
            put(b, power, i, const(int(i == 0), dt))
        with serial(len(counts)) as turn:
            count: Expr = counts[-1][0]
            start: list[Expr] = [const(c, dt) for c in counts[-1][1]]
            for k, (other, polynomial) in enumerate(counts[:-1]):
                here = binary("eq", turn, k)
                count = select(here, other, count)
                start = [select(here, const(c, dt), old) for c, old in zip(polynomial, start)]
            put(b, n, 0, count)
            for i in range(size):
                put(b, base, i, start[i])
            with WhileFrame(convert(n[0] != 0)):
                with serial(2) as step:  # step 0 multiplies power by base if the exponent is odd; step 1 squares base
                    squares = let(b, "squares", binary("eq", step, 1))
                    with IfFrame(logical("or", squares, binary("eq", n[0] & 1, const(1, U64)))):
                        for i in range(size):
                            put(b, left, i, select(squares, base[i], power[i]))
                        self.multiply(b, modulus)
                        for i in range(size):
                            put(b, power, i, select(squares, power[i], product[i]))
                            put(b, base, i, select(squares, product[i], base[i]))
                put(b, n, 0, n[0] >> 1)


class Xorwow(Jumping):
    """xorwow: five shifted words (160 bits, linear steps) and a counter.  The distance of sequences is 2**67 elements."""

    arrays = (("v", 5, U32), ("d", 1, U32), ("power", 5, U32), ("base", 5, U32), ("left", 5, U32), ("product", 5, U32),
              ("n", 1, U64))
    STEPS = 0x100000F0E0F3C0035000621210861003000060001  # the characteristic polynomial: bit i belongs to x**i
    WEYL = 362437

    @staticmethod
    @cache
    def sequence() -> tuple[int, ...]:
        """x**(2**67) modulo STEPS, in words."""
        x = 2
        for _ in range(67):
            square = 0
            for i in reversed(range(160)):
                square <<= 1
                square ^= (Xorwow.STEPS if square >> 160 else 0) ^ (x if x >> i & 1 else 0)
            x = square
        return tuple(x >> 32 * i & 0xFFFFFFFF for i in range(5))

    def start(self, b: Builder, seed: Expr, seq: Expr, off: Expr) -> None:
        v, d = self.state["v"], self.state["d"]
        halves = (cast((seed >> 32 * i) & 0xFFFFFFFF, U32) for i in range(2))
        low, high = (let(b, "mixed", (half ^ const(salt, U32)) * const(odd, U32)) for half, salt, odd in
                     zip(halves, (0xAAD26B49, 0xF7DCEFDD), (1099087573, 2591861531)))
        put(b, d, 0, const(6615241, U32) + high + low)
        for i, value in enumerate((const(123456789, U32) + low, const(362436069, U32) ^ low, const(521288629, U32) + high,
                                   const(88675123, U32) ^ high, const(5783321, U32) + low)):
            put(b, v, i, value)
        with IfFrame(convert((seq | off) != 0)):
            self.jump(b, ((seq, Xorwow.sequence()), (off, (2, 0, 0, 0, 0))))
            self._apply(b)
            put(b, d, 0, d[0] + self.WEYL * cast(off & 0xFFFFFFFF, U32))

    def word(self, b: Builder) -> Var:
        self._step(b)
        d = self.state["d"]
        put(b, d, 0, d[0] + self.WEYL)
        return let(b, "rng", self.state["v"][4] + d[0])

    def _step(self, b: Builder) -> None:
        v = self.state["v"]
        first = let(b, "first", v[0] ^ (v[0] >> 2))
        last = let(b, "last", v[4])
        for i in range(4):
            put(b, v, i, v[i + 1])
        put(b, v, 4, (last ^ (last << 4)) ^ (first ^ (first << 1)))

    def multiply(self, b: Builder, modulus: Any = None) -> None:
        left, base, product = (self.state[k] for k in ("left", "base", "product"))
        for i in range(5):
            put(b, product, i, const(0, U32))
        with serial(160) as at:  # Horner's rule: one coefficient of left per iteration, the highest first
            over = let(b, "over", _zero_minus(product[4] >> 31))
            taken = let(b, "taken", _zero_minus(_coefficient(left, 159 - at)))
            for i in reversed(range(5)):
                up: Any = product[i] << 1
                if i:
                    up = up | (product[i - 1] >> 31)
                fold = const(self.STEPS >> 32 * i & 0xFFFFFFFF, U32)
                put(b, product, i, up ^ (over & fold) ^ (taken & base[i]))

    def _apply(self, b: Builder) -> None:
        """v = the sum of the states after i steps, over the i whose coefficient in power is set."""
        v, total = self.state["v"], self.state["product"]
        for i in range(5):
            put(b, total, i, const(0, U32))
        with serial(160) as at:
            taken = let(b, "taken", _zero_minus(_coefficient(self.state["power"], at)))
            for i in range(5):
                put(b, total, i, total[i] ^ (taken & v[i]))
            self._step(b)
        for i in range(5):
            put(b, v, i, total[i])


# ---- MRG32k3a --------------------------------------------------------------------------------------------------------------

class Mrg32k3a(Jumping):
    """MRG32k3a: the difference of two recurrences of order three modulo primes.  The distance of sequences is 2**76 elements.

    The polynomial of a recurrence is x**3 - (c2 x**2 + c1 x + c0).
    """

    arrays = (("s1", 3, U64), ("s2", 3, U64), ("power", 3, U64), ("base", 3, U64), ("left", 3, U64), ("product", 3, U64),
              ("n", 1, U64))
    M1, M2 = 2**32 - 209, 2**32 - 22853
    RECURRENCES = (("s1", M1, (M1 - 810728, 1403580, 0)), ("s2", M2, (M2 - 1370589, 0, 527612)))  # (c0, c1, c2)
    NORM, WORD = 2.3283065498378288e-10, 1.000000048662  # to (0, 1] and to 32 bits: cuRAND's decimals

    @staticmethod
    @cache
    def sequence(modulus: int, c: tuple[int, int, int]) -> tuple[int, ...]:
        """x**(2**76) modulo the polynomial of the recurrence."""
        x: tuple[int, ...] = (0, 1, 0)
        for _ in range(76):
            square = [sum(x[i] * x[k - i] for i in range(3) if 0 <= k - i < 3) % modulus for k in range(5)]
            for k in (4, 3):
                for i in range(3):
                    square[k - 3 + i] = (square[k - 3 + i] + square[k] * c[i]) % modulus
            x = tuple(square[:3])
        return x

    def start(self, b: Builder, seed: Expr, seq: Expr, off: Expr) -> None:
        low, high = (let(b, f"seed{i}", ((seed >> 32 * i) & 0xFFFFFFFF) ^ salt)
                     for i, salt in enumerate((0x55555555, 0xAAAAAAAA)))
        for k, (name, modulus, _) in enumerate(self.RECURRENCES):
            for i in range(3):
                mixed = (high if (i + k) % 2 else low) * 12345 % modulus
                put(b, self.state[name], i, select(binary("eq", seed, const(0, U64)), const(12345, U64), mixed))
        with IfFrame(convert((seq | off) != 0)):
            for name, modulus, c in self.RECURRENCES:
                self.jump(b, ((seq, Mrg32k3a.sequence(modulus, c)), (off, (0, 1, 0))), (modulus, c))
                self._apply(b, self.state[name], modulus, c)

    def _draw(self, b: Builder) -> Var:
        """The next number of 1 .. M1: uint64."""
        for name, modulus, c in self.RECURRENCES:
            s = self.state[name]
            new = let(b, f"new_{name}", _combined(c, (s[0], s[1], s[2]), modulus))
            for i in range(2):
                put(b, s, i, s[i + 1])
            put(b, s, 2, new)
        p, q = self.state["s1"][2], self.state["s2"][2]
        return let(b, "rng_drawn", select(binary("gt", p, q), p - q, p + self.M1 - q))

    def word(self, b: Builder) -> Var:
        return let(b, "rng", cast(cast(self._draw(b), F64) * const(self.WORD, F64), U32))

    def uniform(self, b: Builder, dt: DType) -> Expr:
        return cast(cast(self._draw(b), F64) * const(self.NORM, F64), dt)

    def polar(self, b: Builder, dt: DType) -> tuple[Expr, Expr]:
        u = let(b, "u", self.uniform(b, dt))
        return u, self.uniform(b, dt) * const(TWO_PI, dt)

    def multiply(self, b: Builder, modulus: tuple[int, tuple[int, int, int]]) -> None:
        (m, c), x, y = modulus, self.state["left"], self.state["base"]
        terms: list[Expr] = []
        for k in range(5):
            parts = [x[i] * y[k - i] % m for i in range(3) if 0 <= k - i < 3]
            terms.append(let(b, f"term{k}", sum(parts[1:], parts[0]) % m))
        for k in (4, 3):
            for i in range(3):
                if c[i]:
                    terms[k - 3 + i] = let(b, f"term{k - 3 + i}", (terms[k - 3 + i] + terms[k] * c[i] % m) % m)
        for i in range(3):
            put(b, self.state["product"], i, terms[i])

    def _apply(self, b: Builder, s: Buffer, modulus: int, c: tuple[int, int, int]) -> None:
        """s[k] = the sum of power[i] * s[k + i], over the elements that follow s too."""
        follow: list[Expr] = [let(b, f"s{i}", s[i]) for i in range(3)]
        for i in range(2):
            follow.append(let(b, f"s{3 + i}", _combined(c, follow[i:i + 3], modulus)))
        for k in range(3):
            parts = [self.state["power"][i] * follow[k + i] % modulus for i in range(3)]
            put(b, s, k, sum(parts[1:], parts[0]) % modulus)


def _combined(c: tuple[int, int, int], s: Any, modulus: int) -> Expr:
    """The element that follows three of a recurrence; each product is below 2**64."""
    parts = [x * k % modulus for x, k in zip(s, c) if k]
    return sum(parts[1:], parts[0]) % modulus


GENERATORS: dict[str, type[Generator]] = {"curandStatePhilox4_32_10_t": Philox, "curandStateMRG32k3a_t": Mrg32k3a,
                                          "curandStateXORWOW_t": Xorwow}
