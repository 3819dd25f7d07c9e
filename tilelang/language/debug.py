"""T.print and T.device_assert: printing and assertions in kernels."""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Assert, Buffer, Const, Evaluate, Expr, For, If, Load, Region, Stmt, StringConst, Var, call,
                         cast, convert, dtype as DType, load, logical, seq, I32, DYNAMIC, FRAGMENT)
from tilelang.ops import Copy

from .tracing.builder import Builder, Emitted, need_builder
from .tracing.flags import condition, flag, has_value, whole_number, words
from .kernel import need_kernel
from .tracing.regions import BufferSlice
from .tracing.state import describe, error, example
from .tile import EMITTED

_LABELS = {"int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned "
                                                                                        "short", "int32": "int",
           "uint32": "uint", "int64": "long", "uint64": "ulong", "float32": "float", "float64": "double",
           "float16": "half",
           "bfloat16": "bfloat16_t", "float8_e4m3": "fp8_e4_t", "float8_e4m3fn": "fp8_e4_t", "float8_e5m2": "fp8_e5_t",
           "bool": "bool", "handle": "pointer"}
_PLACE = "msg='{}' BlockIdx=(%d, %d, %d), ThreadIdx=(%d, %d, %d)"


def _format(dt: DType) -> str:
    if dt.is_float:
        return "%f"
    if dt.is_handle:
        return "%p"
    if dt.bits == 64:
        return "%llu" if dt.is_unsigned else "%lld"
    return "%u" if dt.is_unsigned else "%d"


def _argument(e: Expr) -> Expr:
    """A value converted as C does for variadic arguments."""
    if e.dtype.is_float:
        return cast(e, "float64")
    if e.dtype.is_int and e.dtype.bits < 32:
        return cast(e, I32)
    return e


def _place() -> list[Expr]:
    k = need_kernel("T.print")
    zero = Const(0, I32)
    return [*(list(k.block_vars) + [zero] * 3)[:3], *k.indices]


def _printf(b: Builder, text: str, *values: Expr) -> Evaluate:
    return Evaluate(call("printf", (StringConst(text + "\n"), *_place(), *values), I32, span=b.here()), span=b.here())


def _printed(b: Builder, line: str, value: Expr, *before: Expr) -> Stmt:
    """printf of `line` and the value; a bool as true or false."""
    if value.dtype.is_bool:
        yes, no = (_printf(b, f"{line} value={word}", *before) for word in ("true", "false"))
        return If(value, yes, no, span=b.here())
    return _printf(b, f"{line} value={_format(value.dtype)}", *before, _argument(value))


def _escape(msg: str) -> str:
    return _PLACE.format(msg.replace("%", "%%"))


@example('T.print(X[i], msg="x")', "T.print(acc)")
def print(obj: Any = None, msg: str = "", warp_group_id: int = 0, warp_id: int = 0) -> Emitted:
    """Print a scalar (each executing thread), a buffer (one line per element) or a message, from the device.

    obj: a scalar, or a buffer of static shape in any scope and of any dtype.  A global, shared or fragment buffer is printed by
    the thread with linear x = warp_group_id*128 + warp_id*32; a fragment is copied to shared memory first, so the whole block
    must reach the call.  Raises print-operand, print-message.
    """
    b = need_builder("T.print")
    if has_value(msg):
        raise error("option-type", f"T.print takes one value and a message, found {describe(obj)} and {describe(msg)}",
                    "write T.print(value, msg=\"text\"): the value is printed after the text", expected="a value and a string")
    msg = words(msg, "msg of T.print")
    thread = whole_number(warp_group_id, "warp_group_id", 0, 7) * 128 + whole_number(warp_id, "warp_id", 0, 31) * 32
    if obj is None:
        if not msg:
            raise error("print-message", "T.print needs a value or a message")
        b.emit(_printf(b, _escape(msg)))
        return EMITTED
    if isinstance(obj, Buffer):
        return _print_buffer(b, obj, msg or f"buffer<{obj.name}, {obj.dtype}>", thread)
    if isinstance(obj, (bool, int, float)):
        obj = convert(obj)
    if isinstance(obj, BufferSlice) or not isinstance(obj, Expr) or obj.dtype.lanes != 1:
        raise error("print-operand", f"T.print takes a scalar, a buffer or None, found {describe(obj)}")
    label = _LABELS.get(obj.dtype, f"{obj.dtype}")
    b.emit(_printed(b, f"{_escape(msg or f'expr<{_short(obj)}>')}: dtype={label}", obj))
    return EMITTED


def _short(e: Expr) -> str:
    return e.name if isinstance(e, Var) else f"{e.buffer.name}[…]" if isinstance(e, Load) else type(e).__name__.lower()


def _print_buffer(b: Builder, buffer: Buffer, msg: str, thread: int) -> Emitted:
    if not buffer.is_static:
        raise error("print-operand", f"T.print of `{buffer.name}`, whose shape is known only at run time",
                    expected="a buffer of static shape", found=f"`{buffer.name}` of shape {tuple(buffer.shape)}",
                           hint="print elements of it in a loop")
    k = need_kernel("T.print")
    zero = Const(0, I32)
    source = buffer
    if buffer.scope_name == FRAGMENT:
        source = Buffer(b.fresh_name(f"{buffer.name}_print"), buffer.shape, buffer.dtype, DYNAMIC, span=b.here())
        b.emit(Alloc(source, None, span=b.here()))
        zeros = (zero,) * len(buffer.shape)
        b.emit(Copy(Region(buffer, zeros, buffer.shape), Region(source, zeros, buffer.shape), span=b.here()))
    index = Var("index", I32, span=b.here())
    rest: Any = index
    coords: list[Any] = []
    for d in reversed(buffer.shape):
        coords.append(rest % d)
        rest = rest // d
    value = load(source, coords[::-1])
    line = f"{_escape(msg)}: buffer={buffer.name}, index=%d, dtype={_LABELS.get(buffer.dtype, buffer.dtype)}"
    loop = For(index, zero, Const(buffer.size, I32), "serial", _printed(b, line, value, index), span=b.here())
    if source.scope_name.startswith("shared"):
        tx, ty, tz = k.thread_vars if thread else k.indices
        only: Any = None
        for v, n, want in ((tx, k.extents[0], thread), (ty, k.extents[1], 0), (tz, k.extents[2], 0)):
            if n > 1:
                test = v == want
                only = test if only is None else logical("and", only, test)
        b.emit(seq(loop) if only is None else If(only, loop, None, span=b.here()))
    else:
        b.emit(loop)
    return EMITTED


@example('T.device_assert(X[i] >= 0, "negative")')
def device_assert(cond: Any, msg: str = "", no_stack_info: bool = False) -> Emitted:
    """Trap with a message when cond is false (CUDA; elsewhere a no-op)."""
    b = need_builder("T.device_assert")
    c = condition(b, cond, "T.device_assert")
    text = f"Device assert failed: {words(msg, 'msg of T.device_assert')}"
    alone = flag(no_stack_info, "no_stack_info")
    if c is True:
        return EMITTED
    span = b.here()
    if not alone and span is not None:
        for place in span.chain():
            text += f"\n  at {place.file}:{place.line} in {place.function}"
    b.emit(Assert(convert(c), text, "device_assert", span=span))
    return EMITTED
