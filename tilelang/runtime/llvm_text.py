"""A writer of LLVM IR text for host code: values, checks that raise, host expressions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Expr, Var, dtype
from tilelang.ir.dtype import SCALE
from tilelang.target.llvm_values import Value, float_literal

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


def size_of(x: Value) -> Value:
    """The absolute value of a double."""
    return Value.of(x.let(f"call double @llvm.fabs.f64(double {x})"), "double", x.let)


def _signed(size: Any, x: Value) -> Value:
    """A double with the sign of x."""
    return Value.of(x.let(f"call double @llvm.copysign.f64(double {size}, double {x})"), "double", x.let)


def rounded_to(w: Writer, dt: dtype, value: str) -> Value:
    """A double rounded to nearest even to a value of the float type dt, as a double; beyond its range, infinity.

    The types of _SMALL are done in double arithmetic: adding and taking away 1.5 * 2**52 units of the last place rounds
    to whole units.
    """
    x = w.of("double", value)
    if dt.bits >= 64:
        return x
    if dt.base == SCALE:
        return _scale_of(x)
    if dt.base not in _SMALL:
        return x.to("fptrunc", scalar_type(dt)).to("fpext", "double")
    fraction, least, greatest, _, _ = _SMALL[dt.base]
    size = size_of(x)
    finite = size.test("olt", math.inf)
    exponent = size.to("bitcast", "i64") >> 52
    exponent = exponent.test("ugt", 1023 + least).select(exponent, 1023 + least)  # below the least normal number the unit stays
    big = (exponent + (52 - fraction) << 52 | 1 << 51).to("bitcast", "double")
    near = _signed(x + big - big, x)  # -0.0 stays
    beyond = size_of(near).test("ogt", greatest)
    return finite.select(beyond.select(_signed(float_literal(math.inf), x), near), x)


def _scale_of(x: Value) -> Value:
    """|x| rounded up to a power of two, at least 2**-127; beyond 2**127 infinity, NaN stays."""
    up = size_of(x).to("bitcast", "i64") + ((1 << 52) - 1)
    power = (up & -1 << 52).to("bitcast", "double")
    power = power.test("olt", 2.0 ** -127).select(2.0 ** -127, power)
    power = power.test("ogt", 2.0 ** 127).select(math.inf, power)
    return x.is_nan().select(x, power)


def has_infinity(dt: dtype) -> bool:
    """Whether a float type has infinities."""
    if dt.base == SCALE:
        return False
    return dt.base not in _SMALL or _SMALL[dt.base][3] is not None


def code_of(w: Writer, dt: dtype, value: str) -> tuple[str, Value]:
    """(integer type, bits) of a value of a type of _SMALL, or a scale, that is held in a double."""
    x = w.of("double", value)
    if dt.base == SCALE:
        power = (x.to("bitcast", "i64") >> 52) - (1023 - 127)
        return "i8", x.is_nan().select(255, power).to("trunc", "i8")
    fraction, least, _, infinity, nan = _SMALL[dt.base]
    size = size_of(x)
    normal = (size.to("bitcast", "i64") >> 52 - fraction) - (1022 + least << fraction)
    units = size * 2.0 ** (fraction - least)
    low = size.test("olt", 2.0 ** least)
    code = low.select(low.select(units, "0.0").to("fptoui", "i64"), normal)
    if infinity is not None:
        code = size.test("oeq", math.inf).select(infinity, code)
    negative = x.to("bitcast", "i64").test("slt", 0)
    if nan == 0x80:  # these types have one zero
        negative = negative & code.test("ne", 0)
    sign = negative.select(1 << dt.bits - 1, 0, "i64")
    code = x.is_nan().select(nan, code | sign)
    return f"i{dt.bits}", code.to("trunc", f"i{dt.bits}")


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


def any_of(conditions: Iterable[Value]) -> Value:
    """Whether one of some conditions holds, all of which are computed."""
    return functools.reduce(operator.or_, conditions)


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

    def ins(self, text: str, ty: str = "") -> Value:
        """A new value of type ty, which operators need."""
        v = Value.of("%" + self.name(), ty, self.ins)
        self.lines.append(f"  {v} = {text}")
        return v

    def of(self, ty: str, text: str) -> Value:
        """An operand as a value with operators."""
        return Value.of(text, ty, self.ins)

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
        return self.when(self.of("i32", rc).test("eq", 0), unless=True, likely=True)

    def either(self, cond: str, then: Callable[[], str], other: Callable[[], str], ty: str) -> Value:
        """The value that `then` writes where cond holds, and that of `other` where it does not."""
        yes, no, join = self.name("yes"), self.name("no"), self.name("join")
        self.branch(cond, yes, no)
        found = []
        for label, value in ((yes, then), (no, other)):
            self.begin(label)
            found.append(f"[ {value()}, %{self.block} ]")
            self.jump(join)
        self.begin(join)
        return self.ins(f"phi {ty} {', '.join(found)}", ty) if ty else self.of(ty, "")

    def check(self, cond: str, message: str, kind: str = "RuntimeError") -> None:
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

    def place(self, base: str, offset: Any, element: str = "i8") -> Value:
        """The address of an element; of the one at base without an instruction, if `offset` is the number 0."""
        if offset == 0:
            return self.of("ptr", base)
        return self.ins(f"getelementptr {element}, ptr {base}, i64 {offset}", "ptr")

    def at(self, base: str, offset: int, ty: str) -> Value:
        """Load of `ty` at base + offset bytes."""
        return self.ins(f"load {ty}, ptr {self.place(base, offset)}", ty)

    def put(self, base: str, offset: int, ty: str, value: Any) -> None:
        self.do(f"store {ty} {value}, ptr {self.place(base, offset)}")

    def put_all(self, base: str, fields: Mapping[int, tuple[str, Any]]) -> None:
        """Store a record.  fields: offset -> (type, value)."""
        for offset, (ty, value) in fields.items():
            self.put(base, offset, ty, value)

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

    values: Var -> operand.  Integers are kept as i64, floats as double; with wrap, each integer operation is
    brought back to the width of its type, without it (shapes, grids) arithmetic is 64 bits wide.
    """

    def __init__(self, w: Writer, values: Mapping[Var, str], fn: str, wrap: bool = False) -> None:
        self.w, self.values, self.fn, self.wrap = w, values, fn, wrap

    def __call__(self, e: Any) -> Value:
        if isinstance(e, int):
            return self.w.of("i64", str(e))
        method = getattr(self, "_" + type(e).__name__.lower(), None)
        if method is None:
            raise error("host-expression", f"‹`{e!r}`› cannot be computed on the host", span=getattr(e, "span", None))
        return self.w.of("double" if e.dtype.is_float else "i64", method(e))

    def boolean(self, e: Expr) -> Value:
        """Value of a condition as i1."""
        return self._to_bit(self(e))

    def _to_bit(self, v: Value) -> Value:
        if v in ("0", "1"):
            return self.w.of("i1", "false" if v == "0" else "true")
        return v.test("une", "0.0") if v.ty == "double" else v.test("ne", 0)

    def _fit(self, v: Value, dt: dtype, force: bool = False) -> Value:
        """v modulo the width of an integer type."""
        if dt.is_bool or dt.bits >= 64 or not (self.wrap or force):
            return v
        return v.to("trunc", f"i{dt.bits}").to("zext" if dt.is_unsigned else "sext", "i64")

    def _var(self, e: Var) -> str:
        if e not in self.values:
            raise error("host-expression", f"`{e.name}` has no value on the host",
                        expected="a value on the host", found=f"none of `{e.name}`", span=e.span)
        return self.values[e]

    def _const(self, e: Any) -> str:
        return float_literal(float(e.value), True) if e.dtype.is_float else str(int(e.value))

    def _cast(self, e: Any) -> Value:
        v, a, b = self(e.value), e.value.dtype, e.dtype
        if b.is_bool:
            return self._to_bit(v).to("zext", "i64")
        if b.is_float:
            return rounded_to(self.w, b, v if a.is_float else v.to("uitofp" if a.is_unsigned else "sitofp", "double"))
        return self._fit(self._saturated(v, b) if a.is_float else v, b, force=b.bits < a.bits)

    def _saturated(self, v: Value, dt: dtype) -> Value:
        """A double cut to an integer of dt: beyond the range its nearest end, NaN zero."""
        name = f"i{dt.bits} @llvm.fpto{'u' if dt.is_unsigned else 's'}i.sat.i{dt.bits}.f64"
        if (line := f"declare {name}(double)") not in self.w.globals:
            self.w.globals.append(line)
        v = self.w.ins(f"call {name}(double {v})", f"i{dt.bits}")
        return v if dt.bits == 64 else v.to("zext" if dt.is_unsigned else "sext", "i64")

    def _unary(self, e: Any) -> Value:
        v = self(e.a)
        if e.op == "not":
            return v ^ 1
        if e.op == "bitnot":
            return self._fit(v ^ -1, e.dtype)
        return -v if e.dtype.is_float else self._fit(0 - v, e.dtype)

    def _select(self, e: Any) -> Value:
        cond = self.boolean(e.cond)
        return self.w.either(cond, lambda: self(e.a), lambda: self(e.b), "double" if e.dtype.is_float else "i64") if e.lazy \
            else cond.select(self(e.a), self(e.b))

    def _binary(self, e: Any) -> Value:
        if e.op in ("and", "or"):
            first = self.boolean(e.a)

            def second() -> Value:
                return self.boolean(e.b).to("zext", "i64")

            return (self.w.either(first, second, lambda: "0", "i64") if e.op == "and" else
                    self.w.either(first, lambda: "1", second, "i64"))
        a, b, dt = self(e.a), self(e.b), e.a.dtype
        return self._float(e.op, a, b, dt) if dt.is_float else self._int(e.op, a, b, dt, e)

    def _float(self, op: str, a: Value, b: Value, dt: dtype) -> Value:
        compare = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}.get(op)
        if compare:
            return a.test(compare, b).to("zext", "i64")
        if op in ("min", "max"):
            better = a.test("ult" if op == "min" else "ugt", b)
            usable = a.test("ord", "0.0")
            other_nan = b.test("uno", "0.0")
            return (better & usable | other_nan).select(a, b)
        return rounded_to(self.w, dt, a.op({"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}[op], b))

    def _int(self, op: str, a: Value, b: Value, dt: dtype, e: Any) -> Value:
        s = "u" if dt.is_unsigned else "s"
        if op in ("eq", "ne", "lt", "le", "gt", "ge"):
            return a.test(op if op in ("eq", "ne") else s + op, b).to("zext", "i64")
        if op in ("min", "max"):
            return a.test(f"{s}{'lt' if op == 'min' else 'gt'}", b).select(a, b)
        if op in ("floordiv", "floormod", "truncdiv", "truncmod", "div"):
            return self._fit(self._divide(op, a, b, s, e), dt)
        if op in ("shl", "shr"):
            return self._fit(self._shift(op, a, b, dt), dt)
        name = {"add": "add", "sub": "sub", "mul": "mul", "bitand": "and", "bitor": "or", "bitxor": "xor"}[op]
        return self._fit(a.op(name, b), dt)

    def _shift(self, op: str, a: Value, b: Value, dt: dtype) -> Value:
        """a << b or a >> b: the amount counts as unsigned, and all bits but a sign go where it is the width or more."""
        name = "shl" if op == "shl" else "lshr" if dt.is_unsigned else "ashr"
        if b.lstrip("-").isdigit():  # transform/check/check_operands.py rejects constants outside the type
            return a.op(name, b)
        inside = b.test("ult", dt.bits)
        moved = a.op(name, inside.select(b, 63))
        return moved if name == "ashr" else inside.select(moved, 0)

    def _divide(self, op: str, a: Value, b: Value, s: str, e: Any) -> Value:
        known = b.lstrip("-").isdigit()
        if not known:
            self.w.check(b.test("ne", 0), f"{self.fn}: division by zero in `{text_of(e)}`")
        elif b == "0":
            raise error("host-expression", f"division by zero in `{e!r}`",
                        expected="a divisor other than 0", found="0", span=e.span)
        if s == "u":
            return a.op("urem" if op.endswith("mod") else "udiv", b)
        safe, top = b, a
        if not known:  # the least integer divided by -1 traps: that quotient is a negation
            minus = b.test("eq", -1)
            safe = minus.select(1, b)
            top = minus.select(0 - a, a)
        q = top.op("sdiv", safe)
        if op in ("truncdiv", "div"):
            return q
        r = a - q * b
        if op == "truncmod":
            return r
        down = r.test("ne", 0) & (r ^ b).test("slt", 0)
        return q - down.to("zext", "i64") if op == "floordiv" else r + down.select(b, 0)
