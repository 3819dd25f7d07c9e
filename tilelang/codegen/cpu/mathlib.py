"""Scalar functions on the CPU: LLVM intrinsics, our own vectorisable float32 functions, and libm for the rest.

Our functions are branch-free IR that is inlined, so a loop over exp becomes SIMD code without a vector math
library.  exp and exp2: range reduction to |r| <= ln2/2 and a Taylor polynomial of degree 7, whose remainder
r^8/8! < 6e-9 is below half a unit of float32; log: the atanh series in s = (m-1)/(m+1), |s| <= 0.172, up to s^9.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.ir import Call, dtype
from tilelang.target import intrinsics
from tilelang.target.cpu import unsupported

from . import arithmetic
from .text import Fn, Module
from .types import (convert, float_literal, from_memory, intrinsic, memory_type, overloaded, per_lane, rounded, splat,
                    to_memory, value_type)

I32 = dtype("int32")
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
        return per_lane(f, dt.lanes, "float", "float", args, lambda *xs: _float_call(f, op, [*xs], dtype("float32"), e))
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
    ty = value_type(dt)
    return rounded(f, dt, f.let(f"fdiv {ty} {splat(float_literal(1.0), ty)}, {a[0]}"))


def _rsqrt(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    return _rcp(f, e, [intrinsic(f, "llvm.sqrt", value_type(dt), a[0])], dt)


def _sigmoid(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    """The sigmoid by exp(-|x|), which does not overflow, so that small results keep their bits."""
    ty, mask = value_type(dt), value_type(dtype("bool").with_lanes(dt.lanes))
    double = dt.bits == 64
    one, zero = (splat(float_literal(v, double), ty) for v in (1.0, 0.0))
    wide = dt if dt.bits >= 32 else dtype("float32").with_lanes(dt.lanes)
    t = _float_call(f, "exp", [f.let(f"fneg {ty} {intrinsic(f, 'llvm.fabs', ty, a[0])}")], wide, e)
    below = f.let(f"fcmp olt {ty} {a[0]}, {zero}")
    top = f.let(f"select {mask} {below}, {ty} {t}, {ty} {one}")
    return rounded(f, dt, f.let(f"fdiv {ty} {top}, {f.let(f'fadd {ty} {one}, {t}')}"))


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
    low = f.let(f"add {ty} {intrinsic(f, 'llvm.cttz', ty, a[0], arg_tail='i1 false')}, {splat('1', ty)}")
    none = f.let(f"icmp eq {ty} {a[0]}, {splat('0', ty)}")
    mask = value_type(dtype("bool").with_lanes(dt.lanes))
    return convert(f, f.let(f"select {mask} {none}, {ty} {splat('0', ty)}, {ty} {low}"), dt, e.dtype)


def _fns(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    """The position of the n-th set bit of a 32-bit mask counted from `base`, downwards for negative n; -1 when there is none.

    For n = 0 the result is -1 unless the bit at `base` is set.
    """
    ty, flag = value_type(I32.with_lanes(dt.lanes)), value_type(dtype("bool").with_lanes(dt.lanes))

    def op(text: str, x: str, y: str) -> str:
        return f.let(f"{text} {ty} {x}, {y}")

    def both(x: str, y: str) -> str:
        return f.let(f"and {flag} {x}, {y}")

    def pick(cond: str, x: str, y: str) -> str:
        return f.let(f"select {flag} {cond}, {ty} {x}, {ty} {y}")

    zero, one = splat("0", ty), splat("1", ty)
    mask, base, n = (convert(f, v, x.dtype, I32.with_lanes(dt.lanes)) for v, x in zip(a, e.args))
    down, none = op("icmp slt", n, zero), op("icmp eq", n, zero)
    step = pick(down, splat("-1", ty), one)
    wanted = pick(none, one, pick(down, op("sub", zero, n), n))
    out, seen, at = splat("-1", ty), zero, base
    for k in range(32):
        inside = op("icmp ult", at, splat("32", ty))
        bit = op("and", op("lshr", mask, op("and", at, splat("31", ty))), one)
        hit = both(inside, op("icmp ne", bit, zero))
        seen = op("add", seen, pick(hit, one, zero))
        found = both(hit, op("icmp eq", seen, wanted))
        if k:
            found = both(found, op("icmp ne", n, zero))
        out, at = pick(found, at, out), op("add", at, step)
    return convert(f, out, I32.with_lanes(dt.lanes), e.dtype)


def _reinterpret(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    v, src, dst = to_memory(f, dt, a[0]), memory_type(dt), memory_type(e.dtype)
    if src != dst:
        if "ptr" in (src, dst):
            v = f.let(f"{'ptrtoint' if src == 'ptr' else 'inttoptr'} {src} {v} to {dst}")
        else:
            v = f.let(f"bitcast {src} {v} to {dst}")
    return from_memory(f, e.dtype, v)


def _isnull(f: Fn, e: Call, a: list[str], dt: dtype) -> str:
    ty = value_type(dt)
    return f.let(f"icmp eq {ty} {a[0]}, {'null' if ty == 'ptr' else '0'}")


def _fused(f: Fn, dt: dtype, a: list[str]) -> str:
    """a[0] * a[1] + a[2] rounded once.

    Narrow floats are computed in float64, where a[0] * a[1] is exact and the addition rounds to odd: two roundings, to float32
    and to the type, could differ from one.
    """
    if dt.bits >= 32:
        return intrinsic(f, "llvm.fma", value_type(dt), *a)
    wide, bits = (value_type(dtype(n).with_lanes(dt.lanes)) for n in ("float64", "int64"))
    mask = value_type(dtype("bool").with_lanes(dt.lanes))
    x, y, z = (convert(f, v, dtype("float32").with_lanes(dt.lanes), dtype("float64").with_lanes(dt.lanes)) for v in a)
    p = f.let(f"fmul {wide} {x}, {y}")
    s = f.let(f"fadd {wide} {p}, {z}")
    t = f.let(f"fsub {wide} {s}, {p}")
    rest = f.let(f"fadd {wide} {f.let(f'fsub {wide} {p}, ' + f.let(f'fsub {wide} {s}, {t}'))}, "
                 f"{f.let(f'fsub {wide} {z}, {t}')}")
    zero, one = splat(float_literal(0.0), wide), splat("1", bits)
    code = f.let(f"bitcast {wide} {s} to {bits}")
    inexact = f.let(f"fcmp one {wide} {rest}, {zero}")  # false for NaN, the result of infinite sums
    even = f.let(f"icmp eq {bits} {f.let(f'and {bits} {code}, {one}')}, {splat('0', bits)}")
    signs = f.let(f"xor {bits} {f.let(f'bitcast {wide} {rest} to {bits}')}, {code}")
    outwards = f.let(f"icmp sge {bits} {signs}, {splat('0', bits)}")
    step = f.let(f"select {mask} {outwards}, {bits} {one}, {bits} {splat('-1', bits)}")
    moved = f.let(f"add {bits} {code}, {step}")
    odd = f.let(f"select {mask} {f.let(f'and {mask} {inexact}, {even}')}, {bits} {moved}, {bits} {code}")
    near = f.let(f"bitcast {bits} {odd} to {wide}")
    return convert(f, near, dtype("float64").with_lanes(dt.lanes), dt)


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
            name, a = "fdiv", [splat(float_literal(1.0), ty), *a]
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


def _function(module: Module, name: str, arity: int = 1) -> tuple[Fn, list[str]]:
    fn = Fn(module, name, "float", [("float", f"x{i}", "") for i in range(arity)], attrs=_HEAD)
    return fn, [f"%x{i}" for i in range(arity)]


def _text(fn: Fn, result: str) -> str:
    fn.end(f"ret float {result}")
    fn.finish()
    return fn.module.entries[fn.name]


def _lit(v: float) -> str:
    return float_literal(v)


def _fma(f: Fn, a: str, b: str, c: str, ty: str = "float") -> str:
    return intrinsic(f, "llvm.fma", ty, a, b, c)


def _horner(f: Fn, x: str, coefficients: list[float], ty: str = "float") -> str:
    """A polynomial by Horner's scheme. coefficients: from the highest power down."""
    p, *others = (float_literal(c, ty == "double") for c in coefficients)
    for c in others:
        p = _fma(f, p, x, c, ty)
    return p


def _power_of_two(f: Fn, p: str, n: str) -> str:
    """p * 2**n (n: i32 in [-300, 300]) in two exact steps, so that subnormal results are rounded once."""
    half = f.let(f"ashr i32 {n}, 1")
    rest = f.let(f"sub i32 {n}, {half}")
    for k in (half, rest):
        bits = f.let(f"shl i32 {f.let(f'add i32 {k}, 127')}, 23")
        p = f.let(f"fmul float {p}, {f.let(f'bitcast i32 {bits} to float')}")
    return p


def _clamp(f: Fn, x: str, low: float, high: float) -> str:
    """x into [low, high]; NaN stays NaN."""
    over = f.let(f"fcmp ogt float {x}, {_lit(high)}")
    x = f.let(f"select i1 {over}, float {_lit(high)}, float {x}")
    under = f.let(f"fcmp olt float {x}, {_lit(low)}")
    return f.let(f"select i1 {under}, float {_lit(low)}, float {x}")


def _to_int(f: Fn, x: str) -> str:
    return f.let(f"freeze i32 {f.let(f'fptosi float {x} to i32')}")  # NaN gives any integer: the product is NaN anyway


def _exp(module: Module) -> str:
    f, (x,) = _function(module, "tl_exp_f32")
    x = _clamp(f, x, -104.0, 89.0)
    n = intrinsic(f, "llvm.rint", "float", f.let(f"fmul float {x}, {_lit(1 / math.log(2))}"))
    high = 0.693359375  # ln 2 to 9 bits: n * high is exact
    r = _fma(f, n, _lit(-high), x)
    r = _fma(f, n, _lit(high - math.log(2)), r)
    tail = _horner(f, r, [1 / math.factorial(k) for k in range(7, -1, -1)])
    return _text(f, _power_of_two(f, tail, _to_int(f, n)))


def _exp2(module: Module) -> str:
    f, (x,) = _function(module, "tl_exp2_f32")
    x = _clamp(f, x, -151.0, 129.0)
    n = intrinsic(f, "llvm.rint", "float", x)
    r = f.let(f"fsub float {x}, {n}")
    p = _horner(f, r, [math.log(2) ** k / math.factorial(k) for k in range(7, -1, -1)])
    return _text(f, _power_of_two(f, p, _to_int(f, n)))


def _exponent_and_log(f: Fn, x: str) -> tuple[str, str]:
    """(e, log m) with x = m * 2**e, m in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included."""
    tiny = f.let(f"fcmp olt float {x}, {_lit(2.0 ** -126)}")
    scaled = f.let(f"fmul float {x}, {_lit(2.0 ** 24)}")
    x = f.let(f"select i1 {tiny}, float {scaled}, float {x}")
    bias = f.let(f"select i1 {tiny}, i32 24, i32 0")
    bits = f.let(f"bitcast float {x} to i32")
    shifted = f.let(f"sub i32 {bits}, {0x3F3504F3}")  # bits of sqrt(1/2): moves the cut between exponents there
    e = f.let(f"ashr i32 {shifted}, 23")
    mbits = f.let(f"sub i32 {bits}, {f.let(f'shl i32 {e}, 23')}")
    m = f.let(f"bitcast i32 {mbits} to float")
    ef = f.let(f"sitofp i32 {f.let(f'sub i32 {e}, {bias}')} to float")
    d = f.let(f"fsub float {m}, {_lit(1.0)}")  # exact
    s = f.let(f"fdiv float {d}, {f.let(f'fadd float {m}, ' + _lit(1.0))}")
    z = f.let(f"fmul float {s}, {s}")
    # log m = d - s*(d - z*(2/3 + 2/5 z + …)): the leading term d is exact, so log is accurate next to 1.
    tail = f.let(f"fmul float {z}, {_horner(f, z, [2 / 9, 2 / 7, 2 / 5, 2 / 3])}")
    inner = f.let(f"fsub float {d}, {tail}")
    return ef, f.let(f"fsub float {d}, {f.let(f'fmul float {s}, {inner}')}")


def _log_edges(f: Fn, x: str, y: str) -> str:
    """log of 0, infinity, negatives and NaN."""
    inf = _lit(math.inf)
    y = f.let(f"select i1 {f.let(f'fcmp oeq float {x}, {inf}')}, float {inf}, float {y}")
    y = f.let(f"select i1 {f.let(f'fcmp oeq float {x}, ' + _lit(0.0))}, float {_lit(-math.inf)}, float {y}")
    good = f.let(f"fcmp oge float {x}, {_lit(0.0)}")
    return f.let(f"select i1 {good}, float {y}, float 0x7FF8000000000000")


def _log(module: Module) -> str:
    f, (x,) = _function(module, "tl_log_f32")
    e, m = _exponent_and_log(f, x)
    high = 0.693359375
    low = _fma(f, e, _lit(math.log(2) - high), m)
    return _text(f, _log_edges(f, x, _fma(f, e, _lit(high), low)))


def _log2(module: Module) -> str:
    f, (x,) = _function(module, "tl_log2_f32")
    e, m = _exponent_and_log(f, x)
    high = float(round(1 / math.log(2) * 2 ** 9) / 2 ** 9)
    y = f.let(f"fmul float {m}, {_lit(1 / math.log(2) - high)}")
    return _text(f, _log_edges(f, x, f.let(f"fadd float {_fma(f, m, _lit(high), y)}, {e}")))


def _tanh(module: Module) -> str:
    """tanh by exp(2|x|) away from 0, by its odd series (to x^13, |x| < 0.35) near it."""
    f, (x,) = _function(module, "tl_tanh_f32")
    a = intrinsic(f, "llvm.fabs", "float", x)
    module.need("tl_exp_f32", lambda: _exp(module))
    g = f.let(f"call float @tl_exp_f32(float {f.let(f'fadd float {a}, {a}')})")
    down = f.let(f"fdiv float {_lit(2.0)}, {f.let(f'fadd float {g}, ' + _lit(1.0))}")
    far = f.let(f"fsub float {_lit(1.0)}, {down}")
    z = f.let(f"fmul float {x}, {x}")
    series = [21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3]
    near = _fma(f, f.let(f"fmul float {z}, {_horner(f, z, series)}"), x, x)
    small = f.let(f"fcmp olt float {a}, {_lit(0.35)}")
    size = f.let(f"select i1 {small}, float {near}, float {far}")
    return _text(f, intrinsic(f, "llvm.copysign", "float", size, x))


def _erf(module: Module) -> str:
    """erf by its odd polynomial below 1, by 1 - exp2(|x| Q(|x|)) from there to 4; both minimax, within 2e-9."""
    f, (x,) = _function(module, "tl_erf_f32")
    a = intrinsic(f, "llvm.fabs", "float", x)
    module.need("tl_exp2_f32", lambda: _exp2(module))
    z = f.let(f"fmul float {x}, {x}")
    near = _fma(f, a, _horner(f, z, _ERF_NEAR), a)
    t = _clamp(f, a, 0.0, 4.0)
    g = f.let(f"call float @tl_exp2_f32(float {f.let(f'fmul float {t}, {_horner(f, t, _ERFC_EXPONENT)}')})")
    far = f.let(f"fsub float {_lit(1.0)}, {g}")
    small = f.let(f"fcmp olt float {a}, {_lit(1.0)}")
    return _text(f, intrinsic(f, "llvm.copysign", "float", f.let(f"select i1 {small}, float {near}, float {far}"), x))


def _log1p(module: Module) -> str:
    """log u + (what 1 + x lost in u) / u."""
    f, (x,) = _function(module, "tl_log1p_f32")
    module.need("tl_log_f32", lambda: _log(module))
    u = f.let(f"fadd float {x}, {_lit(1.0)}")
    above = f.let(f"fsub float {_lit(1.0)}, {f.let(f'fsub float {u}, {x}')}")
    below = f.let(f"fsub float {x}, {f.let(f'fsub float {u}, ' + _lit(1.0))}")
    large = f.let(f"fcmp oge float {x}, {_lit(1.0)}")
    lost = f.let(f"fdiv float {f.let(f'select i1 {large}, float {above}, float {below}')}, {u}")
    y = f.let(f"call float @tl_log_f32(float {u})")
    finite = f.let(f"fcmp oeq float {f.let(f'fmul float {y}, ' + _lit(0.0))}, {_lit(0.0)}")  # not at -1 and infinity
    y = f.let(f"select i1 {finite}, float {f.let(f'fadd float {y}, {lost}')}, float {y}")
    return _text(f, f.let(f"select i1 {f.let(f'fcmp oeq float {u}, ' + _lit(1.0))}, float {x}, float {y}"))


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
        d = f.let(f"fpext float {x} to double")
        n = r = "0x0000000000000000"
        for k, c in enumerate(_two_over_pi(7, 29)):
            p = f.let(f"fmul double {d}, {float_literal(c, True)}")
            if k < 5:  # the others are small
                whole = intrinsic(f, "llvm.rint", "double", f.let(f"fmul double {p}, {float_literal(0.25, True)}"))
                p = _fma(f, whole, float_literal(-4.0, True), p, "double")
            r = f.let(f"fadd double {r}, {p}")
            if k < 5:
                whole = intrinsic(f, "llvm.rint", "double", r)
                n, r = f.let(f"fadd double {n}, {whole}"), f.let(f"fsub double {r}, {whole}")
        r = f.let(f"fptrunc double {f.let(f'fmul double {r}, ' + float_literal(math.pi / 2, True))} to float")
        turns = f.let(f"add i32 {f.let('freeze i32 ' + f.let(f'fptosi double {n} to i32'))}, {int(which == 'cos')}")
        z = f.let(f"fmul float {r}, {r}")
        series = [(-1) ** (k // 2) / math.factorial(k) for k in range(11)]
        sine = _fma(f, f.let(f"fmul float {z}, {_horner(f, z, series[9:1:-2])}"), r, r)
        cosine = _fma(f, z, _horner(f, z, series[10:0:-2]), _lit(1.0))
        odd = f.let(f"trunc i32 {turns} to i1")
        first = f.let(f"select i1 {odd}, float {cosine}, float {sine}")
        if which == "tan":
            second = f.let(f"select i1 {odd}, float {f.let(f'fneg float {sine}')}, float {cosine}")
            y = f.let(f"fdiv float {first}, {second}")
        else:
            sign = f.let(f"shl i32 {f.let(f'and i32 {turns}, 2')}, 30")
            y = f.let(f"bitcast i32 {f.let(f'xor i32 {sign}, ' + f.let(f'bitcast float {first} to i32'))} to float")
        if which != "cos":  # -0.0 stays
            y = f.let(f"select i1 {f.let(f'fcmp oeq float {x}, ' + _lit(0.0))}, float {x}, float {y}")
        return _text(f, y)

    return emit


def _pow(module: Module) -> str:
    """exp2(y * log2|x|) in float64, where both are within 2**-37, rounded once: at most 0.51 ulp."""
    f, (x, y) = _function(module, "tl_pow_f32", 2)

    def op(name: str, *args: str) -> str:
        return f.let(f"{name} double {', '.join(args)}")

    def pick(kind: str, a: str, b: float, then: float, other: str) -> str:
        test = op(f"fcmp {kind}", a, float_literal(b, True))
        return f.let(f"select i1 {test}, double {float_literal(then, True)}, double {other}")

    d, w = (f.let(f"fpext float {v} to double") for v in (intrinsic(f, "llvm.fabs", "float", x), y))
    bits = f.let(f"bitcast double {d} to i64")
    e = f.let(f"ashr i64 {f.let(f'sub i64 {bits}, {0x3FE6A09E667F3BCD}')}, 52")  # m in [sqrt(1/2), sqrt(2))
    m = f.let(f"bitcast i64 {f.let(f'sub i64 {bits}, ' + f.let(f'shl i64 {e}, 52'))} to double")
    one = float_literal(1.0, True)
    s = op("fdiv", op("fsub", m, one), op("fadd", m, one))
    series = _horner(f, op("fmul", s, s), [2 / math.log(2) / (2 * k + 1) for k in range(8, -1, -1)], "double")
    power = f.let(f"sitofp i32 {f.let(f'trunc i64 {e} to i32')} to double")
    log = pick("oeq", d, 0.0, -math.inf, _fma(f, s, series, power, "double"))
    log = pick("uno", d, 0.0, math.nan, pick("oeq", d, math.inf, math.inf, log))
    t = pick("oeq", d, 1.0, 0.0, op("fmul", w, log))
    t = pick("ogt", t, 200.0, 200.0, pick("olt", t, -200.0, -200.0, t))
    n = intrinsic(f, "llvm.rint", "double", t)
    out = _horner(f, op("fsub", t, n), [math.log(2) ** k / math.factorial(k) for k in range(9, -1, -1)], "double")
    n = f.let("sext i32 " + f.let(f"freeze i32 {f.let(f'fptosi double {n} to i32')}") + " to i64")
    n = f.let(f"shl i64 {f.let(f'add i64 {n}, 1023')}, 52")
    out = f.let(f"fptrunc double {op('fmul', out, f.let(f'bitcast i64 {n} to double'))} to float")
    half = op("fmul", w, float_literal(0.5, True))
    whole, even = (op("fcmp oeq", v, intrinsic(f, "llvm.floor", "double", v)) for v in (w, half))
    signed = f.let(f"icmp slt i32 {f.let(f'bitcast float {x} to i32')}, 0")
    flips = f.let(f"and i1 {signed}, {f.let(f'and i1 {whole}, ' + f.let(f'xor i1 {even}, true'))}")
    out = f.let(f"select i1 {flips}, float {f.let(f'fneg float {out}')}, float {out}")
    below = f.let(f"and i1 {f.let(f'fcmp olt float {x}, ' + _lit(0.0))}, {op('fcmp one', d, float_literal(math.inf, True))}")
    none = f.let(f"and i1 {below}, {f.let(f'xor i1 {whole}, true')}")
    out = f.let(f"select i1 {none}, float 0x7FF8000000000000, float {out}")
    return _text(f, f.let(f"select i1 {f.let(f'fcmp oeq float {y}, ' + _lit(0.0))}, float {_lit(1.0)}, float {out}"))


_ERF_NEAR = [7.853857681794067e-05, -8.010192513770906e-04, 5.188327559331882e-03, -2.685381186887768e-02,
             1.1283585147031458e-01, -3.7612625824494503e-01, 1.283791657266897e-01]  # erf(x) / x - 1, by powers of x**2
_ERFC_EXPONENT = [-1.505180272103011e-05, 4.5424424157949265e-04, -5.208622440168033e-03, 3.418403281110033e-02,
                  -1.531551336808586e-01, -9.1639705412672e-01, -1.628279111261175]  # log2(erfc(t)) / t

_INLINED: dict[str, Any] = {"exp": _exp, "exp2": _exp2, "log": _log, "log2": _log2, "tanh": _tanh, "erf": _erf,
                            "log1p": _log1p, "pow": _pow, **{name: _circular(name) for name in ("sin", "cos", "tan")}}
