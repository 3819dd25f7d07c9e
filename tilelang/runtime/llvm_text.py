"""A writer of LLVM IR text for host code: values, checks that raise, host expressions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Expr, Var, dtype
from tilelang.ir.dtype import SCALE

register("host-expression", NotImplementedError, "host code (before T.Kernel) uses something only a kernel can do",
         "move it into the T.Kernel block", expected="an expression that the host can compute")

HEADER = """\
declare void @TVMFFIErrorSetRaisedFromCStr(ptr, ptr)
declare i32 @TVMFFIObjectDecRef(ptr)
declare i32 @TVMFFIEnvTensorAlloc(ptr, ptr)
declare i32 @TVMFFIFunctionCall(ptr, ptr, i32, ptr)
declare ptr @TVMFFIEnvGetStream(i32, i32)
declare double @llvm.fabs.f64(double)
declare double @llvm.copysign.f64(double, double)
@tl_make_array = external global ptr
@tl_default_device = external global i32
"""
WEIGHTS = '!0 = !{!"branch_weights", i32 2000, i32 1}\n'

_FLOATS = {"float16": "half", "bfloat16": "bfloat", "float32": "float", "float64": "double", "tfloat32": "float"}


# Float types that LLVM converts by library functions, or not at all: bits of the fraction, least normal exponent,
# greatest value, code of infinity (None: there is none), code of a NaN.
_SMALL: dict[str, tuple[int, int, float, int | None, int]] = {
    "bfloat16": (7, -126, float.fromhex("0x1.fep127"), 0x7F80, 0x7FC0),
    "float8_e4m3": (3, -6, 448.0, None, 0x7F), "float8_e4m3fn": (3, -6, 448.0, None, 0x7F),
    "float8_e5m2": (2, -14, 57344.0, 0x7C, 0x7F),
    "float8_e4m3fnuz": (3, -7, 240.0, None, 0x80), "float8_e5m2fnuz": (2, -15, 57344.0, None, 0x80)}


def rounded_to(w: Writer, dt: dtype, value: str) -> str:
    """A double rounded to nearest even to a value of the float type dt, as a double; beyond its range, infinity.

    The types of _SMALL are done in double arithmetic: adding and taking away 1.5 * 2**52 units of the last place rounds
    to whole units.
    """
    if dt.bits >= 64:
        return value
    if dt.base == SCALE:
        return _scale_of(w, value)
    if dt.base not in _SMALL:
        ty = scalar_type(dt)
        return w.ins(f"fpext {ty} {w.ins(f'fptrunc double {value} to {ty}')} to double")
    fraction, least_exponent, greatest, _, _ = _SMALL[dt.base]
    size = w.ins(f"call double @llvm.fabs.f64(double {value})")
    finite = w.ins(f"fcmp olt double {size}, 0x7FF0000000000000")
    exponent = w.ins(f"lshr i64 {w.ins(f'bitcast double {size} to i64')}, 52")
    least = w.ins(f"icmp ugt i64 {exponent}, {1023 + least_exponent}")  # below the least normal number the unit stays
    exponent = w.ins(f"select i1 {least}, i64 {exponent}, i64 {1023 + least_exponent}")
    shifted = w.ins(f"shl i64 {w.ins(f'add i64 {exponent}, {52 - fraction}')}, 52")
    big = w.ins(f"bitcast i64 {w.ins(f'or i64 {shifted}, {1 << 51}')} to double")
    near = w.ins(f"fsub double {w.ins(f'fadd double {value}, {big}')}, {big}")
    near = w.ins(f"call double @llvm.copysign.f64(double {near}, double {value})")  # -0.0 stays
    near_size = w.ins(f"call double @llvm.fabs.f64(double {near})")
    beyond = w.ins(f"fcmp ogt double {near_size}, {double_text(greatest)}")
    infinite = w.ins(f"call double @llvm.copysign.f64(double 0x7FF0000000000000, double {value})")
    near = w.ins(f"select i1 {beyond}, double {infinite}, double {near}")
    return w.ins(f"select i1 {finite}, double {near}, double {value}")


def _scale_of(w: Writer, value: str) -> str:
    """|value| rounded up to a power of two, at least 2**-127; beyond 2**127 infinity, NaN stays."""
    size = w.ins(f"call double @llvm.fabs.f64(double {value})")
    up = w.ins(f"add i64 {w.ins(f'bitcast double {size} to i64')}, {(1 << 52) - 1}")
    power = w.ins(f"bitcast i64 {w.ins(f'and i64 {up}, {-1 << 52}')} to double")
    least = w.ins(f"fcmp olt double {power}, {double_text(2.0 ** -127)}")
    power = w.ins(f"select i1 {least}, double {double_text(2.0 ** -127)}, double {power}")
    beyond = w.ins(f"fcmp ogt double {power}, {double_text(2.0 ** 127)}")
    power = w.ins(f"select i1 {beyond}, double 0x7FF0000000000000, double {power}")
    return w.ins(f"select i1 {w.ins(f'fcmp uno double {value}, {value}')}, double {value}, double {power}")


def has_infinity(dt: dtype) -> bool:
    """Whether a float type has infinities."""
    if dt.base == SCALE:
        return False
    return dt.base not in _SMALL or _SMALL[dt.base][3] is not None


def code_of(w: Writer, dt: dtype, value: str) -> tuple[str, str]:
    """(integer type, bits) of a value of a type of _SMALL, or a scale, that is held in a double."""
    if dt.base == SCALE:
        bits = w.ins(f"bitcast double {value} to i64")
        power = w.ins(f"sub i64 {w.ins(f'lshr i64 {bits}, 52')}, {1023 - 127}")
        code = w.ins(f"select i1 {w.ins(f'fcmp uno double {value}, {value}')}, i64 255, i64 {power}")
        return "i8", w.ins(f"trunc i64 {code} to i8")
    fraction, least_exponent, _, infinity, nan = _SMALL[dt.base]
    ty = f"i{dt.bits}"
    size = w.ins(f"call double @llvm.fabs.f64(double {value})")
    top = w.ins(f"lshr i64 {w.ins(f'bitcast double {size} to i64')}, {52 - fraction}")
    normal = w.ins(f"sub i64 {top}, {1022 + least_exponent << fraction}")
    units = w.ins(f"fmul double {size}, {double_text(2.0 ** (fraction - least_exponent))}")
    low = w.ins(f"fcmp olt double {size}, {double_text(2.0 ** least_exponent)}")
    small = w.ins(f"select i1 {low}, double {units}, double 0.0")
    code = w.ins(f"select i1 {low}, i64 {w.ins(f'fptoui double {small} to i64')}, i64 {normal}")
    if infinity is not None:
        is_infinite = w.ins(f"fcmp oeq double {size}, 0x7FF0000000000000")
        code = w.ins(f"select i1 {is_infinite}, i64 {infinity}, i64 {code}")
    negative = w.ins(f"icmp slt i64 {w.ins(f'bitcast double {value} to i64')}, 0")
    if nan == 0x80:  # these types have one zero
        negative = w.ins(f"and i1 {negative}, {w.ins(f'icmp ne i64 {code}, 0')}")
    sign = w.ins(f"select i1 {negative}, i64 {1 << dt.bits - 1}, i64 0")
    is_nan = w.ins(f"fcmp uno double {value}, {value}")
    code = w.ins(f"select i1 {is_nan}, i64 {nan}, i64 {w.ins(f'or i64 {code}, {sign}')}")
    return ty, w.ins(f"trunc i64 {code} to {ty}")


def double_text(value: float) -> str:
    """A double as LLVM writes it exactly."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def scalar_type(dt: dtype) -> str:
    """LLVM type of a scalar parameter or host value."""
    if dt.is_bool:
        return "i1"
    if dt.is_handle:
        return "ptr"
    if dt.is_int:
        return f"i{max(dt.bits, 8)}"
    if dt.base in _FLOATS:
        return _FLOATS[dt.base]
    raise error("host-expression", f"a host scalar of type ‹{dt}› is not available", expected="a type of the host")


def text_of(e: Expr) -> str:
    """An expression as text, without parentheses around the whole."""
    text = repr(e)
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and k < len(text) - 1:
            return text
    return text[1:-1]


class Writer:
    """Text of one function.  Values are names ("%v3") or literals."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.entry: list[str] = []  # allocas, at the head of the function
        self.block = "entry"
        self.failures: list[tuple[str, str, str]] = []
        self.cleanup: list[Callable[[], object]] = []  # writes what gives back objects and memory when something fails
        self._strings: dict[str, str] = {}
        self._count = 0

    def name(self, stem: str = "v") -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def ins(self, text: str) -> str:
        """A new value."""
        v = "%" + self.name()
        self.lines.append(f"  {v} = {text}")
        return v

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def slot(self, ty: str, count: int = 1) -> str:
        """Stack storage, allocated once."""
        v = "%" + self.name("s")
        self.entry.append(f"  {v} = alloca {ty}" if count == 1 else f"  {v} = alloca [{count} x {ty}], align 8")
        return v

    def string(self, text: str) -> str:
        """Address of a zero-terminated string."""
        if text not in self._strings:
            data = text.encode() + b"\0"
            g = f"@.s{len(self._strings)}"
            body = "".join(chr(c) if 32 <= c < 127 and c not in (34, 92) else f"\\{c:02x}" for c in data)
            self.globals.append(f'{g} = private unnamed_addr constant [{len(data)} x i8] c"{body}"')
            self._strings[text] = g
        return self._strings[text]

    def begin(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, cond: str, then: str, other: str, likely: bool | None = None) -> None:
        hint = "" if likely is None else ", !prof !0"
        self.do(f"br i1 {cond}, label %{then}, label %{other}{hint}")

    @contextmanager
    def when(self, cond: str, unless: bool = False, likely: bool | None = None) -> Iterator[None]:
        """What is written inside runs where cond holds; unless: where it does not.  likely: that cond holds is."""
        inside, after = self.name("inside"), self.name("after")
        self.branch(cond, *((after, inside) if unless else (inside, after)), likely)
        self.begin(inside)
        yield
        if not self.lines[-1].startswith("  ret "):
            self.jump(after)
        self.begin(after)

    @contextmanager
    def loop(self) -> Iterator[Callable[[str], None]]:
        """What is written inside runs again and again.  Gives a function that ends the loop where a condition holds."""
        again, after = self.name("again"), self.name("after")
        self.jump(again)
        self.begin(again)

        def leave(cond: str) -> None:
            stay = self.name("stay")
            self.branch(cond, after, stay)
            self.begin(stay)

        yield leave
        self.jump(again)
        self.begin(after)

    def unless_0(self, rc: str) -> AbstractContextManager[None]:
        """What is written inside runs where an i32 is not 0, which is unlikely."""
        return self.when(self.ins(f"icmp eq i32 {rc}, 0"), unless=True, likely=True)

    def either(self, cond: str, then: Callable[[], str], other: Callable[[], str], ty: str) -> str:
        """The value that `then` writes where cond holds, and that of `other` where it does not."""
        yes, no, join = self.name("yes"), self.name("no"), self.name("join")
        self.branch(cond, yes, no)
        found = []
        for label, value in ((yes, then), (no, other)):
            self.begin(label)
            found.append(f"[ {value()}, %{self.block} ]")
            self.jump(join)
        self.begin(join)
        return self.ins(f"phi {ty} {', '.join(found)}") if ty else ""

    def check(self, cond: str, kind: str, message: str) -> None:
        """Raise kind(message) in the caller unless cond."""
        if self.cleanup:
            with self.when(cond, unless=True, likely=True):
                self.do(f"call void @TVMFFIErrorSetRaisedFromCStr(ptr {self.string(kind)}, ptr {self.string(message)})")
                self.release()
                self.do("ret i32 -1")
            return
        ok = self.name("ok")
        self.failures.append((self.block, self.string(kind), self.string(message)))
        self.branch(cond, ok, "raise", likely=True)
        self.begin(ok)

    def release(self) -> None:
        """Give back what is owned (failure after allocation)."""
        for give_back in self.cleanup:
            give_back()

    def owns_object(self, handle: str) -> None:
        """From here on a failure drops the object."""
        self.cleanup.append(lambda: self.do(f"call i32 @TVMFFIObjectDecRef(ptr {handle})"))

    def at(self, base: str, offset: int, ty: str) -> str:
        """Load of `ty` at base + offset bytes."""
        p = base if offset == 0 else self.ins(f"getelementptr i8, ptr {base}, i64 {offset}")
        return self.ins(f"load {ty}, ptr {p}")

    def put(self, base: str, offset: int, ty: str, value: str) -> None:
        p = base if offset == 0 else self.ins(f"getelementptr i8, ptr {base}, i64 {offset}")
        self.do(f"store {ty} {value}, ptr {p}")

    def function(self, name: str, parameters: str, linkage: str = "", result: str = "i32") -> str:
        """The finished text of `result name(parameters)`."""
        out = [f"define {linkage}{result} @{name}({parameters}) {{", "entry:", *self.entry, *self.lines]
        if self.failures:
            out.append("raise:")
            for v, at in (("kind", 1), ("message", 2)):
                out.append(f"  %{v} = phi ptr " + ", ".join(f"[ {f[at]}, %{f[0]} ]" for f in self.failures))
            out += ["  call void @TVMFFIErrorSetRaisedFromCStr(ptr %kind, ptr %message)", "  ret i32 -1"]
        return "\n".join([*out, "}"])


class HostExpr:
    """Host expressions to LLVM values.

    values: Var -> (type, value).  Integers are kept as i64, floats as double; with wrap, each integer operation is
    brought back to the width of its type, without it (shapes, grids) arithmetic is 64 bits wide.
    """

    def __init__(self, w: Writer, values: dict[Var, str], fn: str, wrap: bool = False) -> None:
        self.w, self.values, self.fn, self.wrap = w, values, fn, wrap

    def __call__(self, e: Any) -> str:
        if isinstance(e, int):
            return str(e)
        method = getattr(self, "_" + type(e).__name__.lower(), None)
        if method is None:
            raise error("host-expression", f"‹`{e!r}`› cannot be computed on the host", span=getattr(e, "span", None))
        return method(e)

    def boolean(self, e: Expr) -> str:
        """Value of a condition as i1."""
        v = self(e)
        return self._to_bit(v, e.dtype)

    def _to_bit(self, v: str, dt: dtype) -> str:
        if v in ("0", "1"):
            return "false" if v == "0" else "true"
        return self.w.ins(f"fcmp une double {v}, 0.0") if dt.is_float else self.w.ins(f"icmp ne i64 {v}, 0")

    def _fit(self, v: str, dt: dtype, force: bool = False) -> str:
        """v modulo the width of an integer type."""
        if dt.is_bool or dt.bits >= 64 or not (self.wrap or force):
            return v
        narrow = self.w.ins(f"trunc i64 {v} to i{dt.bits}")
        return self.w.ins(f"{'zext' if dt.is_unsigned else 'sext'} i{dt.bits} {narrow} to i64")

    def _var(self, e: Var) -> str:
        if e not in self.values:
            raise error("host-expression", f"`{e.name}` has no value on the host",
                        expected="a value on the host", found=f"none of `{e.name}`", span=e.span)
        return self.values[e]

    def _const(self, e: Any) -> str:
        if e.dtype.is_float:
            return double_text(float(e.value))
        return str(int(e.value))

    def _cast(self, e: Any) -> str:
        v, a, b = self(e.value), e.value.dtype, e.dtype
        if b.is_bool:
            return self.w.ins(f"zext i1 {self._to_bit(v, a)} to i64")
        if b.is_float:
            if not a.is_float:
                v = self.w.ins(f"{'uitofp' if a.is_unsigned else 'sitofp'} i64 {v} to double")
            return rounded_to(self.w, b, v)
        if a.is_float:
            v = self._saturated(v, b)
        return self._fit(v, b, force=b.bits < a.bits)

    def _saturated(self, v: str, dt: dtype) -> str:
        """A double cut to an integer of dt: beyond the range its nearest end, NaN zero."""
        name = f"i{dt.bits} @llvm.fpto{'u' if dt.is_unsigned else 's'}i.sat.i{dt.bits}.f64"
        if (line := f"declare {name}(double)") not in self.w.globals:
            self.w.globals.append(line)
        v = self.w.ins(f"call {name}(double {v})")
        return v if dt.bits == 64 else self.w.ins(f"{'zext' if dt.is_unsigned else 'sext'} i{dt.bits} {v} to i64")

    def _unary(self, e: Any) -> str:
        v = self(e.a)
        if e.op == "not":
            return self.w.ins(f"xor i64 {v}, 1")
        if e.op == "bitnot":
            return self._fit(self.w.ins(f"xor i64 {v}, -1"), e.dtype)
        return self.w.ins(f"fneg double {v}") if e.dtype.is_float else self._fit(self.w.ins(f"sub i64 0, {v}"), e.dtype)

    def _select(self, e: Any) -> str:
        if not e.lazy:
            return self.w.ins(f"select i1 {self.boolean(e.cond)}, {self._ty(e.dtype)} {self(e.a)}, "
                              f"{self._ty(e.dtype)} {self(e.b)}")
        return self.w.either(self.boolean(e.cond), lambda: self(e.a), lambda: self(e.b), self._ty(e.dtype))

    def _ty(self, dt: dtype) -> str:
        return "double" if dt.is_float else "i64"

    def _binary(self, e: Any) -> str:
        if e.op in ("and", "or"):
            first = self.boolean(e.a)

            def second() -> str:
                return self.w.ins(f"zext i1 {self.boolean(e.b)} to i64")

            return (self.w.either(first, second, lambda: "0", "i64") if e.op == "and" else
                    self.w.either(first, lambda: "1", second, "i64"))
        a, b, dt = self(e.a), self(e.b), e.a.dtype
        return self._float(e.op, a, b, dt) if dt.is_float else self._int(e.op, a, b, dt, e)

    def _float(self, op: str, a: str, b: str, dt: dtype) -> str:
        compare = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}.get(op)
        if compare:
            return self.w.ins(f"zext i1 {self.w.ins(f'fcmp {compare} double {a}, {b}')} to i64")
        if op in ("min", "max"):
            better = self.w.ins(f"fcmp {'ult' if op == 'min' else 'ugt'} double {a}, {b}")
            usable = self.w.ins(f"fcmp ord double {a}, 0.0")
            other_nan = self.w.ins(f"fcmp uno double {b}, 0.0")
            take = self.w.ins(f"or i1 {self.w.ins(f'and i1 {better}, {usable}')}, {other_nan}")
            return self.w.ins(f"select i1 {take}, double {a}, double {b}")
        name = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}[op]
        return rounded_to(self.w, dt, self.w.ins(f"{name} double {a}, {b}"))

    def _int(self, op: str, a: str, b: str, dt: dtype, e: Any) -> str:
        w, s = self.w, "u" if dt.is_unsigned else "s"
        if op in ("eq", "ne", "lt", "le", "gt", "ge"):
            pred = op if op in ("eq", "ne") else s + op
            return w.ins(f"zext i1 {w.ins(f'icmp {pred} i64 {a}, {b}')} to i64")
        if op in ("min", "max"):
            take = w.ins(f"icmp {s}{'lt' if op == 'min' else 'gt'} i64 {a}, {b}")
            return w.ins(f"select i1 {take}, i64 {a}, i64 {b}")
        if op in ("floordiv", "floormod", "truncdiv", "truncmod", "div"):
            return self._fit(self._divide(op, a, b, s, e), dt)
        if op in ("shl", "shr"):
            return self._fit(self._shift(op, a, b, dt), dt)
        name = {"add": "add", "sub": "sub", "mul": "mul", "bitand": "and", "bitor": "or", "bitxor": "xor"}[op]
        return self._fit(w.ins(f"{name} i64 {a}, {b}"), dt)

    def _shift(self, op: str, a: str, b: str, dt: dtype) -> str:
        """a << b or a >> b: the amount counts as unsigned, and all bits but a sign go where it is the width or more."""
        name = "shl" if op == "shl" else "lshr" if dt.is_unsigned else "ashr"
        if b.lstrip("-").isdigit():  # transform/check/check_operands.py rejects constants outside the type
            return self.w.ins(f"{name} i64 {a}, {b}")
        inside = self.w.ins(f"icmp ult i64 {b}, {dt.bits}")
        moved = self.w.ins(f"{name} i64 {a}, {self.w.ins(f'select i1 {inside}, i64 {b}, i64 63')}")
        return moved if name == "ashr" else self.w.ins(f"select i1 {inside}, i64 {moved}, i64 0")

    def _divide(self, op: str, a: str, b: str, s: str, e: Any) -> str:
        w = self.w
        if not b.lstrip("-").isdigit():
            w.check(w.ins(f"icmp ne i64 {b}, 0"), "RuntimeError", f"{self.fn}: division by zero in `{text_of(e)}`")
        elif b == "0":
            raise error("host-expression", f"division by zero in `{e!r}`",
                        expected="a divisor other than 0", found="0", span=e.span)
        if s == "u":
            return w.ins(f"{'urem' if op.endswith('mod') else 'udiv'} i64 {a}, {b}")
        if not b.lstrip("-").isdigit():  # the least integer divided by -1 traps: that quotient is a negation
            minus = w.ins(f"icmp eq i64 {b}, -1")
            safe = w.ins(f"select i1 {minus}, i64 1, i64 {b}")
            negated = w.ins(f"sub i64 0, {a}")
            top = w.ins(f"select i1 {minus}, i64 {negated}, i64 {a}")
        else:
            safe, top = b, a
        q = w.ins(f"sdiv i64 {top}, {safe}")
        if op in ("truncdiv", "div"):
            return q
        r = w.ins(f"sub i64 {a}, {w.ins(f'mul i64 {q}, {b}')}")
        if op == "truncmod":
            return r
        odd = w.ins(f"icmp ne i64 {r}, 0")
        signs = w.ins(f"icmp slt i64 {w.ins(f'xor i64 {r}, {b}')}, 0")
        down = w.ins(f"and i1 {odd}, {signs}")
        if op == "floordiv":
            return w.ins(f"sub i64 {q}, {w.ins(f'zext i1 {down} to i64')}")
        return w.ins(f"add i64 {r}, {w.ins(f'select i1 {down}, i64 {b}, i64 0')}")
