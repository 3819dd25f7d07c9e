"""Fast, IEEE-rounded and packed arithmetic: functions named after the device's instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import facts
from tilelang.ir import Expr, call, cast, promote

from .math import float_function, value_of
from .tracing.regions import BufferSlice
from .tracing.state import describe, error, example, named

_FAST = {f"__{n}": float_function(f"__{n}", True) for n in ("exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan")}
globals().update(_FAST)
fast_exp2, fast_rcp = (float_function(n) for n in ("fast_exp2", "fast_rcp"))


def _ieee(name: str, arity: int) -> Callable[..., Expr]:
    def fn(*args: Any, rounding_mode: str = "rn") -> Expr:
        if len(args) == arity + 1 and isinstance(args[-1], str):
            rounding_mode, args = args[-1], args[:-1]
        if len(args) != arity:
            raise facts(TypeError(f"T.ieee_{name} takes {arity} operands, found {len(args)}"),
                        f"{arity} operands", str(len(args)))
        if rounding_mode not in ("rn", "rz", "ru", "rd"):
            raise error("rounding-mode", f"Invalid rounding mode ‹{rounding_mode!r}›, expected «rn, rz, ru or rd»")
        dt = None
        vs = [value_of(a) for a in args]
        for v in vs:
            dt = v.dtype if dt is None else promote(dt, v.dtype)
        assert dt is not None  # arity is at least one
        if (dt.bits <= 16 or name == "frsqrt") and rounding_mode != "rn":
            raise error("rounding-mode", f"T.ieee_{name} of {dt} rounds to nearest only (rounding_mode='rn'), found "
                        f"{rounding_mode!r}", expected=f"'rn' for {dt}",
                        hint="cast the operands to float32" if name != "frsqrt" else "divide by T.ieee_fsqrt")
        if name == "frsqrt":
            return call("ieee_frsqrt", [cast(v, dt) for v in vs], dt)
        return call(f"ieee_{name}", [cast(v, dt) for v in vs], dt, rounding_mode=rounding_mode)

    operands = ", ".join(("X[i]", "Y[i]", "1.0")[:arity])
    return named(fn, f"ieee_{name}",
                 f"IEEE {name} with a given rounding mode (rn, rz, ru, rd).\n\nExample:\n    Y[i] = T.ieee_{name}({operands})")


ieee_add, ieee_sub, ieee_mul, ieee_fdiv = (_ieee(n, 2) for n in ("add", "sub", "mul", "fdiv"))
ieee_fmaf = _ieee("fmaf", 3)
ieee_frcp, ieee_fsqrt, ieee_frsqrt = (_ieee(n, 1) for n in ("frcp", "fsqrt", "frsqrt"))


def _single(name: str, *values: Any) -> Expr:
    """One IEEE operation rounded to nearest, of floats of one type."""
    vs = [value_of(v) for v in values]
    if not vs[0].dtype.is_float or any(v.dtype != vs[0].dtype for v in vs):
        raise error("math-type", f"T.{name} takes «floats of one type», found {', '.join(str(v.dtype) for v in vs)}",
                    hint=f"cast the operands; a literal is float32: T.{vs[0].dtype}(2.0)")
    return call({"fma": "ieee_fmaf", "fmul": "ieee_mul"}[name], vs, vs[0].dtype, rounding_mode="rn")


@example("Y[i] = T.fma(X[i], X[i], Y[i])")
def fma(x: Any, y: Any, z: Any) -> Expr:
    """x * y + z, rounded once to nearest: one fused multiply-add, on every backend.

    x, y, z: floats of one type, scalars or vectors.  Raises math-type.
    """
    return _single("fma", x, y, z)


@example("Y[i] = T.fmul(X[i], X[i]) + Y[i]")
def fmul(x: Any, y: Any) -> Expr:
    """x * y, rounded to nearest: it is not contracted with a neighbouring sum into a fused multiply-add.

    x, y: floats of one type, scalars or vectors.  Raises math-type.
    """
    return _single("fmul", x, y)


def _packed(name: str, arity: int) -> Callable[..., Expr]:
    def fn(*args: Any) -> Expr:
        if len(args) != arity:
            raise facts(TypeError(f"T.{name} takes {arity} operands, found {len(args)}"), f"{arity} operands", str(len(args)))
        vs = [a.vector() if isinstance(a, BufferSlice) else a for a in args]
        for v in vs:
            if not isinstance(v, Expr):
                raise error("math-type", f"T.{name} needs vector expressions, found {describe(v)}",
                            expected="a vector expression")
            if v.dtype not in ("float32x2", "bfloat16x2", "float16x2"):
                raise error("packed-type", f"Expected dtype in float32x2, bfloat16x2, float16x2, found {v.dtype}")
        if any(v.dtype != vs[0].dtype for v in vs):
            raise error("packed-type", f"T.{name}: operands must have the same dtype",
                        expected="operands of one type", found=f"{', '.join(str(v.dtype) for v in vs)}")
        return call(name, vs, vs[0].dtype)

    operands = ", ".join(("X[0:2]", "X[2:4]", "X[4:6]")[:arity])
    return named(fn, name, f"{name} on a pair of floats at once: float32x2, float16x2 or bfloat16x2.\n\nExample:\n"
                 f"    Y[0:2] = T.{name}({operands})")


add2, sub2, mul2, max2, min2 = (_packed(n, 2) for n in ("add2", "sub2", "mul2", "max2", "min2"))
fma2, abs2 = _packed("fma2", 3), _packed("abs2", 1)

__all__ = ["abs2", "add2", "fast_exp2", "fast_rcp", "fma", "fma2", "fmul", "ieee_add", "ieee_fdiv", "ieee_fmaf", "ieee_frcp",
           "ieee_frsqrt", "ieee_fsqrt", "ieee_mul", "ieee_sub", "max2", "min2", "mul2", "sub2", *_FAST]
