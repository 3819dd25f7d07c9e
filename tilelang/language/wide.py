"""Wide raw loads and stores of N consecutive bits as 32-bit words: T.ldg32 … T.ldg256, T.stg32 …, T.lds32 …, T.sts32 …"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import facts
from tilelang.ir import Buffer, Expr, Load, as_bool, cast, const, convert, dtype as DType, is_const, load, ramp, select, SHARED

from .tracing.builder import Builder, Emitted, need_builder
from .math import reinterpret
from .tracing.regions import BufferSlice
from .tracing.scope import IfFrame
from .tracing.state import describe, error, named
from .tile import EMITTED

_SCOPES = {"ldg": ("global",), "stg": ("global",), "lds": SHARED, "sts": SHARED}


def _first(name: str, x: Any) -> tuple[Buffer, tuple[Expr, ...]]:
    """The first element of an operand: of a buffer or region its first one, else the element itself."""
    if isinstance(x, Expr) and not isinstance(x, Load):
        elements = need_builder(f"T.{name}").elements  # a name bound by `x = A[i]` still stands for its element
        x = elements[id(x)][1] if id(x) in elements else x
    where: tuple[Expr, ...]
    if isinstance(x, Buffer):
        buffer, where = x, tuple(const(0) for _ in x.shape)
    elif isinstance(x, BufferSlice):
        buffer, where = x.buffer, x.region.mins
    elif isinstance(x, Load) and all(i.dtype.lanes == 1 for i in x.indices):
        buffer, where = x.buffer, x.indices
    else:
        raise error("wide-operand", f"T.{name} takes a buffer, a slice or an element, found {describe(x)}")
    if buffer.scope_name not in _SCOPES[name[:3]]:
        raise error("wide-operand", f"T.{name} accesses «{'global' if name[2] == 'g' else 'shared'} memory», `{buffer.name}` "
                    f"is in scope ‹{buffer.scope_name}›")
    return buffer, where


def _lanes(name: str, buffer: Buffer, bits: int) -> int:
    """Elements of the buffer in `bits` bits."""
    width = buffer.dtype.bits * buffer.dtype.lanes
    if buffer.dtype.lanes != 1 or width < 8 or bits % width:
        raise error("bit-size", f"T.{name} moves {bits} bits, which hold no whole number of elements of `{buffer.name}` "
                    f"(‹{buffer.dtype}›)", expected=f"elements that fill {bits} bits")
    if len(buffer.strides) == 0 or not is_const(convert(buffer.strides[-1]), 1):
        raise error("wide-operand", f"T.{name}: the elements of `{buffer.name}` do not lie side by side along its last "
                    "dimension",
                    expected="elements side by side along the last dimension", found=f"strides {tuple(buffer.strides)}")
    return bits // width


def _words(bits: int) -> DType:
    return DType("uint32").with_lanes(bits // 32)


def _indices(where: tuple[Expr, ...], lanes: int) -> tuple[Expr, ...]:
    if lanes == 1:
        return where
    return (*where[:-1], ramp(where[-1], lanes))


def _operand(prefix: str, bits: int) -> str:
    if bits != 32:
        return f"as T.{prefix}32."
    return f"a buffer, region or element in {'global' if prefix[2] == 'g' else 'shared'} memory; the bits start at its first " \
        "element, aligned to their number.  Raises wide-operand, bit-size."


def _loader(prefix: str, bits: int) -> Callable[..., Expr]:
    name = f"{prefix}{bits}"

    def fn(src: Any, pred: Any = None) -> Expr:
        b: Builder = need_builder(f"T.{name}")
        buffer, where = _first(name, src)
        lanes = _lanes(name, buffer, bits)
        value: Expr = load(buffer, _indices(where, lanes))
        if pred is not None:
            value = select(as_bool(pred), value, cast(const(0), value.dtype))
        return b.nameless(b.let(name, reinterpret(value, _words(bits))))

    return named(fn, name, f"{bits} bits from {'global' if prefix == 'ldg' else 'shared'} memory as {_words(bits)}"
                 + ("; zeros where pred is false." if prefix == "ldg" else ".")
                 + f"\n\nsrc: {_operand(prefix, bits)}\n\nExample:\n"
                 f"    words = T.{name}({'A[bx, tx * 16]' if prefix == 'ldg' else 'A_s[tx, 0]'})")


def _storer(prefix: str, bits: int) -> Callable[..., Emitted]:
    name = f"{prefix}{bits}"

    def fn(dst: Any, value: Any, pred: Any = None) -> Emitted:
        b: Builder = need_builder(f"T.{name}")
        buffer, where = _first(name, dst)
        lanes = _lanes(name, buffer, bits)
        v = value.vector() if isinstance(value, BufferSlice) else convert(value)
        if v.dtype.bits * v.dtype.lanes != bits:
            if v.dtype.lanes != 1 or bits != 32 or not v.dtype.is_int:
                raise error("bit-size", f"T.{name} stores «{bits} bits» ({_words(bits)}), the value is ‹{v.dtype}›")
            v = cast(v, "uint32")
        stored = reinterpret(v, buffer.dtype.with_lanes(lanes))
        if pred is None:
            b.store(buffer, _indices(where, lanes), stored)
            return EMITTED
        with IfFrame(as_bool(pred)):
            b.store(buffer, _indices(where, lanes), stored)
        return EMITTED

    return named(fn, name, f"Store {bits} bits ({_words(bits)}) to {'global' if prefix == 'stg' else 'shared'} memory"
                 + ("; nothing where pred is false." if prefix == "stg" else ".")
                 + f"\n\ndst: {_operand(prefix, bits)}\n\nExample:\n"
                 f"    T.{name}({'C[bx, tx * 8]' if prefix == 'stg' else 'A_s[tx, 0]'}, T.ldg{bits}(A[bx, tx * 16]))")


ldg32, ldg64, ldg128, ldg256 = (_loader("ldg", n) for n in (32, 64, 128, 256))
stg32, stg64, stg128, stg256 = (_storer("stg", n) for n in (32, 64, 128, 256))
_lds = tuple(_loader("lds", n) for n in (32, 64, 128))
_sts = tuple(_storer("sts", n) for n in (32, 64, 128))


def _without_predicate(fn: Callable[..., Any], operands: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if len(args) != operands:
            raise facts(TypeError(f"T.{fn.__name__} takes {operands} operand{'s' if operands > 1 else ''}, found {len(args)}"),
                        f"{operands} operands", str(len(args)))
        return fn(*args)

    return named(call, fn.__name__, fn.__doc__)


lds32, lds64, lds128 = (_without_predicate(f, 1) for f in _lds)
sts32, sts64, sts128 = (_without_predicate(f, 2) for f in _sts)
