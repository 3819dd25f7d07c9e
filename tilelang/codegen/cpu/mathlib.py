"""Scalar functions on the CPU: LLVM intrinsics, our own vectorisable float32 functions, and libm for the rest.

Our functions are branch-free IR that is inlined, so a loop over exp becomes SIMD code without a vector math
library.  exp and exp2: range reduction to |r| <= ln2/2 and a Taylor polynomial of degree 7, whose remainder
r^8/8! < 6e-9 is below half a unit of float32; log: the atanh series in s = (m-1)/(m+1), |s| <= 0.172, up to s^9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilelang.ir import Call, dtype
from tilelang.target import intrinsics
from tilelang.target.cpu import unsupported
from tilelang.target.llvm_values import Value, float_literal, operand_text, splat

from . import arithmetic
from .text import Fn, Module
from .types import convert, from_memory, intrinsic, memory_type, overloaded, per_lane, rounded, to_memory, value_type

I32, F32, F64 = dtype("int32"), dtype("float32"), dtype("float64")
_FAST_ALIAS = {f"__{n}": n for n in ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan")}
# LLVM intrinsics that x86 code generation turns into instructions (the others of the table become libm calls).
_INLINE = {"llvm.sqrt", "llvm.floor", "llvm.ceil", "llvm.trunc", "llvm.nearbyint", "llvm.fabs", "llvm.copysign",
           "llvm.fma", "llvm.round"}


def call(f: Fn, e: Call, args: list[str]) -> str:
    """The value of a pure intrinsic. args: register values of e.args. Raises cpu-unsupported for unknown ones."""
    op = _FAST_ALIAS.get(e.op, e.op)
    dt = e.args[0].dtype if e.args else e.dtype
    special = _SPECIAL.get(op)
    if special is not None:
        return special(f, e, args, dt)
    row = intrinsics.INTRINSICS.get(op)
    if row is None or row.effect != intrinsics.PURE or row.reference is None and op != "to_tf32":
        raise unsupported(f"the intrinsic {e.op}", span=e.span)
    if dt.is_float:
        return rounded(f, dt, _float_call(f, op, args, dt, e))
    raise unsupported(f"{e.op} of {dt}", span=e.span)


def _float_call(f: Fn, op: str, args: list[str], dt: dtype, e: Call) -> str:
    ty = value_type(dt)
    double = dt.bits == 64
    row = intrinsics.INTRINSICS[op]
    names = row.llvm or {}
    symbol = names.get("*") or names.get("float64" if double else "float32")
    if symbol in _INLINE:
        return intrinsic(f, symbol, ty, *args)
    inlined = _INLINED.get(op)
    if inlined is not None and not double:
        if dt.lanes == 1:
            name = f.module.need(f"tl_{op}_f32", lambda: inlined(f.module))
            return f.let(f"call float @{name}({', '.join(f'float {a}' for a in args)})")
        return per_lane(f, dt.lanes, "float", "float", args, lambda *xs: _float_call(f, op, [*xs], F32, e))
    if symbol is None:
        raise unsupported(f"{op} of {dt}", span=e.span)
    if symbol.startswith("llvm."):
        symbol = symbol[5:] + ("" if double else "f")
    scalar = "double" if double else "float"
    kinds = ["i32" if op == "ldexp" and k else scalar for k in range(len(args))]

    def one(*xs: str) -> str:
        fn = f.module.declare(symbol, scalar, ", ".join(kinds))
        return f.let(f"call {scalar} {fn}({', '.join(f'{k} {x}' for k, x in zip(kinds, xs))})")

    if op == "ldexp":
        args = [args[0], convert(f, args[1], e.args[1].dtype, I32.with_lanes(dt.lanes))]
    return per_lane(f, dt.lanes, scalar, scalar, args, one)


# ---- intrinsics that are no single function --------------------------------------------------------------------------


def _rcp(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    return rounded(f, dt, 1.0 / f.of(value_type(dt), a[0]))


def _rsqrt(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    return _rcp(f, e, [intrinsic(f, "llvm.sqrt", value_type(dt), a[0])], dt)


def _sigmoid(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    """The sigmoid by exp(-|x|), which does not overflow, so that small results keep their bits."""
    ty, wide = value_type(dt), dt if dt.bits >= 32 else F32.with_lanes(dt.lanes)
    t = f.of(ty, _float_call(f, "exp", [-intrinsic(f, "llvm.fabs", ty, a[0])], wide, e))
    return rounded(f, dt, f.of(ty, a[0]).test("olt", 0.0).select(t, 1.0) / (1.0 + t))


def _classify(mask: int) -> Any:
    def emit(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
        ty = value_type(dt)
        out = value_type(dtype("bool").with_lanes(dt.lanes))
        if not dt.is_float:
            return splat("true" if e.op == "isfinite" else "false", out)
        fn = f.module.declare(overloaded("llvm.is.fpclass", ty), out, f"{ty}, i32 immarg")
        return f.let(f"call {out} {fn}({ty} {a[0]}, i32 {mask})")

    return emit


def _counted(name: str, tail: str = "") -> Any:
    """A count of bits by an LLVM intrinsic."""
    return lambda f, e, a, dt: convert(f, intrinsic(f, name, value_type(dt), a[0], arg_tail=tail), dt, e.dtype)


def _ffs(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    ty = value_type(dt)
    low = intrinsic(f, "llvm.cttz", ty, a[0], arg_tail="i1 false") + 1
    return convert(f, f.of(ty, a[0]).test("eq", 0).select(0, low), dt, e.dtype)


def _fns(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    """The position of the n-th set bit of a 32-bit mask counted from `base`, downwards for negative n; -1 when there is none.

    For n = 0 the result is -1 unless the bit at `base` is set.
    """
    ty = value_type(I32.with_lanes(dt.lanes))
    mask, base, n = (f.of(ty, convert(f, v, x.dtype, I32.with_lanes(dt.lanes))) for v, x in zip(a, e.args))
    down, none = n.test("slt", 0), n.test("eq", 0)
    step = down.select(-1, 1, ty)
    wanted = none.select(1, down.select(0 - n, n))
    out, seen, at = f.of(ty, splat("-1", ty)), f.of(ty, splat("0", ty)), base
    for k in range(32):
        inside = at.test("ult", 32)
        bit = mask >> (at & 31) & 1
        hit = inside & bit.test("ne", 0)
        seen = seen + hit.select(1, 0, ty)
        found = hit & seen.test("eq", wanted)
        if k:
            found = found & n.test("ne", 0)
        out, at = found.select(at, out), at + step
    return convert(f, out, I32.with_lanes(dt.lanes), e.dtype)


def _reinterpret(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    v, src, dst = to_memory(f, dt, a[0]), memory_type(dt), memory_type(e.dtype)
    if src != dst:
        v = f.of(src, v).to("ptrtoint" if src == "ptr" else "inttoptr" if dst == "ptr" else "bitcast", dst)
    return from_memory(f, e.dtype, v)


def _isnull(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    ty = value_type(dt)
    return f.of(ty, a[0]).test("eq", "null" if ty == "ptr" else "0")


def _fused(f: Fn, dt: dtype, a: list[str]) -> str:
    """a[0] * a[1] + a[2] rounded once.

    Narrow floats are computed in float64, where a[0] * a[1] is exact and the addition rounds to odd: two roundings, to float32
    and to the type, could differ from one.
    """
    if dt.bits >= 32:
        return intrinsic(f, "llvm.fma", value_type(dt), *a)
    f64, (wide, bits) = F64.with_lanes(dt.lanes), (value_type(dtype(n).with_lanes(dt.lanes)) for n in ("float64", "int64"))
    x, y, z = (f.of(wide, convert(f, v, F32.with_lanes(dt.lanes), f64)) for v in a)
    p = x * y
    s = p + z
    t = s - p
    rest = p - (s - t) + (z - t)
    code = s.to("bitcast", bits)
    inexact = rest.test("one", 0.0)  # false for NaN, the result of infinite sums
    even = (code & 1).test("eq", 0)
    outwards = (rest.to("bitcast", bits) ^ code).test("sge", 0)
    moved = code + outwards.select(1, -1, bits)
    return convert(f, (inexact & even).select(moved, code).to("bitcast", wide), f64, dt)


_DIRECTIONS = {"rz": 0, "ru": 2, "rd": 3}  # the numbers of llvm.set.rounding


def _directed(f: Fn, op: str, mode: str, ty: str, a: list[str]) -> str:
    """One operation with another rounding direction, by a function that sets the processor's direction and restores it.

    The function is strictfp and not inlined: ordinary operations, which assume one direction, cannot move into it.
    """
    name = f"tl.{overloaded(op, ty)}.{mode}"

    def text() -> str:
        m = f.module
        m.need("llvm.get.rounding", "declare i32 @llvm.get.rounding()")
        m.need("llvm.set.rounding", "declare void @llvm.set.rounding(i32)")
        core = overloaded(f"llvm.experimental.constrained.{op}", ty)
        m.need(core, f"declare {ty} @{core}({', '.join([ty] * len(a))}, metadata, metadata)")
        operands = ", ".join(f"{ty} %x{i}" for i in range(len(a)))
        return "\n".join([
            f"define internal {ty} @{name}({operands}) noinline nounwind strictfp {{",
            "  %before = call i32 @llvm.get.rounding() strictfp",
            f"  call void @llvm.set.rounding(i32 {_DIRECTIONS[mode]}) strictfp",
            f'  %out = call {ty} @{core}({operands}, metadata !"round.dynamic", metadata !"fpexcept.strict") strictfp',
            "  call void @llvm.set.rounding(i32 %before) strictfp",
            f"  ret {ty} %out",
            "}"])

    f.module.need(name, text)
    return f.let(f"call {ty} @{name}({', '.join(f'{ty} {x}' for x in a)})")


def _ieee(op: str) -> Any:
    """An IEEE operation with a rounding direction. Plain instructions round to nearest."""

    def emit(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
        ty, mode = value_type(dt), e.options.rounding_mode
        name = op
        if op == "rcp":
            name, a = "fdiv", [operand_text(1.0, ty), *a]
        if mode != "rn":
            return rounded(f, dt, _directed(f, name.removeprefix("llvm."), mode, ty, a))
        if name == "llvm.fma":
            return _fused(f, dt, a)
        return rounded(f, dt, intrinsic(f, name, ty, *a) if name.startswith("llvm.") else f.let(f"{name} {ty} {a[0]}, {a[1]}"))

    return emit


_SPECIAL: dict[str, Any] = {
    "rsqrt": _rsqrt, "fast_rcp": _rcp, "sigmoid": _sigmoid, "isnan": _classify(0x3), "isinf": _classify(0x204),
    "isfinite": _classify(0x1F8), **dict.fromkeys(("abs", "abs2"), lambda f, e, a, dt: arithmetic.absolute(f, a[0], dt)),
    "popcount": _counted("llvm.ctpop"), "clz": _counted("llvm.ctlz", "i1 false"), "__ffs": _ffs, "__fns": _fns,
    "reinterpret": _reinterpret, "isnullptr": _isnull, "to_tf32": lambda f, e, a, dt: a[0],
    "ieee_add": _ieee("fadd"), "ieee_sub": _ieee("fsub"), "ieee_mul": _ieee("fmul"), "ieee_fdiv": _ieee("fdiv"),
    "ieee_fmaf": _ieee("llvm.fma"), "ieee_frcp": _ieee("rcp"), "ieee_fsqrt": _ieee("llvm.sqrt"),
    "ieee_frsqrt": _rsqrt, "fma2": lambda f, e, a, dt: _fused(f, dt, a),
    **{f"{op}2": (lambda f, e, a, dt, op=op: arithmetic.binary(f, op, a[0], a[1], dt))
       for op in ("add", "sub", "mul", "max", "min")},
}

# ---- float32 functions in IR -----------------------------------------------------------------------------------------

_HEAD = "alwaysinline nounwind willreturn memory(none)"


def _function(module: Module, name: str, arity: int = 1) -> tuple[Fn, list[Value]]:
    fn = Fn(module, name, "float", [("float", f"x{i}", "") for i in range(arity)], attrs=_HEAD)
    return fn, [fn.of("float", f"%x{i}") for i in range(arity)]


def _text(fn: Fn, result: str) -> str:
    fn.end(f"ret float {result}")
    fn.finish()
    return fn.module.entries[fn.name]


def _fma(f: Fn, a: Any, b: Any, c: Any, ty: str = "float") -> Value:
    return intrinsic(f, "llvm.fma", ty, a, b, c)


def _horner(f: Fn, x: Value, coefficients: list[float]) -> Value:
    """A polynomial by Horner's scheme. coefficients: from the highest power down."""
    p: Any
    p, *others = coefficients
    for c in others:
        p = _fma(f, p, x, c, x.ty)
    return p


def _other(f: Fn, name: str) -> Callable[[Value], Value]:
    """Another of these functions."""
    f.module.need(f"tl_{name}_f32", lambda: _INLINED[name](f.module))
    return lambda x: f.of("float", f.let(f"call float @tl_{name}_f32(float {x})"))


def _power_of_two(p: Value, n: Value) -> Value:
    """p * 2**n (n: i32 in [-300, 300]) in two exact steps, so that subnormal results are rounded once."""
    half = n.op("ashr", 1)
    for k in (half, n - half):
        p = p * (k + 127 << 23).to("bitcast", "float")
    return p


def _clamp(x: Value, low: float, high: float) -> Value:
    """x into [low, high]; NaN stays NaN."""
    x = x.test("ogt", high).select(high, x)
    return x.test("olt", low).select(low, x)


def _to_int(x: Value) -> Value:
    """NaN gives any integer: the result is NaN anyway."""
    return _frozen(x.to("fptosi", "i32"))


def _frozen(x: Value) -> Value:
    return Value.of(x.let(f"freeze {x.ty} {x}"), x.ty, x.let)


def _exp(module: Module) -> str:
    f, (x,) = _function(module, "tl_exp_f32")
    x = _clamp(x, -104.0, 89.0)
    n = intrinsic(f, "llvm.rint", "float", x * (1 / math.log(2)))
    high = 0.693359375  # ln 2 to 9 bits: n * high is exact
    r = _fma(f, n, high - math.log(2), _fma(f, n, -high, x))
    tail = _horner(f, r, [1 / math.factorial(k) for k in range(7, -1, -1)])
    return _text(f, _power_of_two(tail, _to_int(n)))


def _exp2(module: Module) -> str:
    f, (x,) = _function(module, "tl_exp2_f32")
    x = _clamp(x, -151.0, 129.0)
    n = intrinsic(f, "llvm.rint", "float", x)
    p = _horner(f, x - n, [math.log(2) ** k / math.factorial(k) for k in range(7, -1, -1)])
    return _text(f, _power_of_two(p, _to_int(n)))


def _exponent_and_log(f: Fn, x: Value) -> tuple[Value, Value]:
    """(e, log m) with x = m * 2**e, m in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included."""
    tiny = x.test("olt", 2.0 ** -126)
    x = tiny.select(x * 2.0 ** 24, x)
    bias = tiny.select(24, 0, "i32")
    bits = x.to("bitcast", "i32")
    e = (bits - 0x3F3504F3).op("ashr", 23)  # bits of sqrt(1/2): moves the cut between exponents there
    m = (bits - (e << 23)).to("bitcast", "float")
    ef = (e - bias).to("sitofp", "float")
    d = m - 1.0  # exact
    s = d / (m + 1.0)
    z = s * s
    # log m = d - s*(d - z*(2/3 + 2/5 z + …)): the leading term d is exact, so log is accurate next to 1.
    tail = z * _horner(f, z, [2 / 9, 2 / 7, 2 / 5, 2 / 3])
    return ef, d - s * (d - tail)


def _log_edges(x: Value, y: Value) -> Value:
    """log of 0, infinity, negatives and NaN."""
    y = x.test("oeq", math.inf).select(math.inf, y)
    y = x.test("oeq", 0.0).select(-math.inf, y)
    return x.test("oge", 0.0).select(y, math.nan)


def _log(module: Module) -> str:
    f, (x,) = _function(module, "tl_log_f32")
    e, m = _exponent_and_log(f, x)
    high = 0.693359375
    return _text(f, _log_edges(x, _fma(f, e, high, _fma(f, e, math.log(2) - high, m))))


def _log2(module: Module) -> str:
    f, (x,) = _function(module, "tl_log2_f32")
    e, m = _exponent_and_log(f, x)
    high = float(round(1 / math.log(2) * 2 ** 9) / 2 ** 9)
    y = m * (1 / math.log(2) - high)
    return _text(f, _log_edges(x, _fma(f, m, high, y) + e))


def _tanh(module: Module) -> str:
    """tanh by exp(2|x|) away from 0, by its odd series (to x^13, |x| < 0.35) near it."""
    f, (x,) = _function(module, "tl_tanh_f32")
    a = intrinsic(f, "llvm.fabs", "float", x)
    far = 1.0 - 2.0 / (_other(f, "exp")(a + a) + 1.0)
    z = x * x
    near = _fma(f, z * _horner(f, z, [21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3]), x, x)
    return _text(f, intrinsic(f, "llvm.copysign", "float", a.test("olt", 0.35).select(near, far), x))


def _erf(module: Module) -> str:
    """erf by its odd polynomial below 1, by 1 - exp2(|x| Q(|x|)) from there to 4; both minimax, within 2e-9."""
    f, (x,) = _function(module, "tl_erf_f32")
    a, exp2 = intrinsic(f, "llvm.fabs", "float", x), _other(f, "exp2")
    near = _fma(f, a, _horner(f, x * x, _ERF_NEAR), a)
    t = _clamp(a, 0.0, 4.0)
    far = 1.0 - exp2(t * _horner(f, t, _ERFC_EXPONENT))
    return _text(f, intrinsic(f, "llvm.copysign", "float", a.test("olt", 1.0).select(near, far), x))


def _log1p(module: Module) -> str:
    """log u + (what 1 + x lost in u) / u."""
    f, (x,) = _function(module, "tl_log1p_f32")
    log, u = _other(f, "log"), x + 1.0
    above = 1.0 - (u - x)
    below = x - (u - 1.0)
    lost = x.test("oge", 1.0).select(above, below) / u
    y = log(u)
    y = (y * 0.0).test("oeq", 0.0).select(y + lost, y)  # not at -1 and infinity
    return _text(f, u.test("oeq", 1.0).select(x, y))


def _two_over_pi(chunks: int, bits: int) -> list[float]:
    """2 / pi as a sum of numbers of so many bits, the greatest first; pi by Machin's formula in integers."""
    one = 1 << chunks * bits + 32
    fourth = sum((-1) ** k * (4 * one // 5 ** (2 * k + 1) - one // 239 ** (2 * k + 1)) // (2 * k + 1) for k in range(120))
    digits = (one << chunks * bits) // (2 * fourth)
    return [(digits >> bits * (chunks - 1 - k) & (1 << bits) - 1) * 2.0 ** (-bits * (k + 1)) for k in range(chunks)]


def _circular(which: str) -> Any:
    """sin, cos, tan by polynomials of what x leaves beyond multiples of pi/2: at most 1.5, 1.5, 3 ulp, for all finite x.

    The products of x with 29 bits of 2/pi are exact in float64.  Of each only what is beyond multiples of 4 counts.
    """
    def emit(module: Module) -> str:
        f, (x,) = _function(module, f"tl_{which}_f32")
        d = x.to("fpext", "double")
        n = r = f.of("double", float_literal(0.0, True))
        for k, c in enumerate(_two_over_pi(7, 29)):
            p = d * c
            if k < 5:  # the others are small
                p = _fma(f, intrinsic(f, "llvm.rint", "double", p * 0.25), -4.0, p, "double")
            r = r + p
            if k < 5:
                whole = intrinsic(f, "llvm.rint", "double", r)
                n, r = n + whole, r - whole
        r = (r * (math.pi / 2)).to("fptrunc", "float")
        turns = _to_int(n) + int(which == "cos")
        z = r * r
        series = [(-1) ** (k // 2) / math.factorial(k) for k in range(11)]
        sine = _fma(f, z * _horner(f, z, series[9:1:-2]), r, r)
        cosine = _fma(f, z, _horner(f, z, series[10:0:-2]), 1.0)
        odd = turns.to("trunc", "i1")
        first = odd.select(cosine, sine)
        if which == "tan":
            y = first / odd.select(-sine, cosine)
        else:
            y = ((turns & 2) << 30 ^ first.to("bitcast", "i32")).to("bitcast", "float")
        if which != "cos":  # -0.0 stays
            y = x.test("oeq", 0.0).select(x, y)
        return _text(f, y)

    return emit


def _pow(module: Module) -> str:
    """exp2(y * log2|x|) in float64, where both are within 2**-37, rounded once: at most 0.51 ulp."""
    f, (x, y) = _function(module, "tl_pow_f32", 2)
    d, w = (v.to("fpext", "double") for v in (intrinsic(f, "llvm.fabs", "float", x), y))
    bits = d.to("bitcast", "i64")
    e = (bits - 0x3FE6A09E667F3BCD).op("ashr", 52)  # m in [sqrt(1/2), sqrt(2))
    m = (bits - (e << 52)).to("bitcast", "double")
    s = (m - 1.0) / (m + 1.0)
    series = _horner(f, s * s, [2 / math.log(2) / (2 * k + 1) for k in range(8, -1, -1)])
    power = e.to("trunc", "i32").to("sitofp", "double")
    log = _fma(f, s, series, power, "double")
    for test, at, value in (("oeq", 0.0, -math.inf), ("oeq", math.inf, math.inf), ("uno", 0.0, math.nan)):
        log = d.test(test, at).select(value, log)
    t = w * log
    t = d.test("oeq", 1.0).select(0.0, t)
    inside = t.test("olt", -200.0).select(-200.0, t)
    t = t.test("ogt", 200.0).select(200.0, inside)
    n = intrinsic(f, "llvm.rint", "double", t)
    out = _horner(f, t - n, [math.log(2) ** k / math.factorial(k) for k in range(9, -1, -1)])
    out = (out * (_to_int(n).to("sext", "i64") + 1023 << 52).to("bitcast", "double")).to("fptrunc", "float")
    half = w * 0.5
    whole, even = (v.test("oeq", intrinsic(f, "llvm.floor", "double", v)) for v in (w, half))
    signed = x.to("bitcast", "i32").test("slt", 0)
    out = (signed & (whole & (even ^ True))).select(-out, out)
    none = x.test("olt", 0.0) & d.test("one", math.inf) & (whole ^ True)
    out = none.select(math.nan, out)
    return _text(f, y.test("oeq", 0.0).select(1.0, out))


_ERF_NEAR = [7.853857681794067e-05, -8.010192513770906e-04, 5.188327559331882e-03, -2.685381186887768e-02,
             1.1283585147031458e-01, -3.7612625824494503e-01, 1.283791657266897e-01]  # erf(x) / x - 1, by powers of x**2
_ERFC_EXPONENT = [-1.505180272103011e-05, 4.5424424157949265e-04, -5.208622440168033e-03, 3.418403281110033e-02,
                  -1.531551336808586e-01, -9.1639705412672e-01, -1.628279111261175]  # log2(erfc(t)) / t

_INLINED: dict[str, Any] = {"exp": _exp, "exp2": _exp2, "log": _log, "log2": _log2, "tanh": _tanh, "erf": _erf,
                            "log1p": _log1p, "pow": _pow, **{name: _circular(name) for name in ("sin", "cos", "tan")}}
