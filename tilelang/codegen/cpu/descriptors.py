"""Matrix descriptors of wgmma as values. Their misuse ends the call with an error that names the line.

Source: PTX ISA, "Matrix Descriptor Format"; target/wgmma.py.
"""

from __future__ import annotations

import os
from typing import Any

from tilelang.ir import AddressOf, Call, Expr, SHARED
from tilelang.target.cpu import unsupported
from tilelang.target.shared_space import UNIT, Placed
from tilelang.target.wgmma import encode_descriptor

from .barriers import warp_role_of
from .coroutine import FAULT, FIRST_MISUSE, word
from .shared_addresses import AddressTable
from .state import CallPrinter, Code


def misuse(cx: Code, text: str, span: Any) -> None:
    """Fail the call with this text, at the user's line."""
    warp_role = warp_role_of(cx, "a matrix descriptor outside a kernel", span)
    where = "" if span is None else f" ({os.path.basename(span.file)}:{span.line})"
    code = warp_role.misuses.setdefault(text + where, len(warp_role.misuses))
    cx.f.do(f"store i64 {FIRST_MISUSE + code}, ptr {word(cx.f, '%group', FAULT)}")


def address_table(cx: Code, e: Call) -> AddressTable:
    """The addresses of the launch. Raises cpu-unsupported in a launch that names none."""
    table = warp_role_of(cx, f"{e.op} outside a kernel", e.span).addresses
    if table is None:
        raise unsupported(f"a {e.op} in a kernel that initialises no descriptor", span=e.span or cx.span,
                          hint="T.initialize_wgmma_descriptor(desc, S[0, 0], ...) first")
    return table


def shared_address(cx: Code, a: Expr, e: Call) -> tuple[Placed, str]:
    """The buffer that an operand names, and its address (i64)."""
    if not isinstance(a, AddressOf) or a.buffer.scope_name not in SHARED:
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    p = address_table(cx, e).space.of(a.buffer.data)
    return p, cx.index(p.address(a.buffer, a.indices))


def _descriptor(cx: Code, e: Call) -> str:
    """wgmma_descriptor(address [, bytes])."""
    f, (_, at) = cx.f, shared_address(cx, e.args[0], e)
    at = f.add(at, str(e.options.offset))
    if len(e.args) > 1:
        at = f.add(at, cx.index(e.args[1]))
    odd = f.let(f"icmp ne i64 {f.let(f'and i64 {at}, {UNIT - 1}')}, 0")
    f.branch(odd, lambda: misuse(cx, "a wgmma operand does not start at a multiple of 16 bytes", e.span or cx.span))
    rest = encode_descriptor(0, e.options.lbo, e.options.sbo, e.options.swizzle)
    units = f.let(f"and i64 {f.let(f'lshr i64 {at}, 4')}, {0x3FFF}")
    return f.let(f"or i64 {units}, {rest - (1 << 64) if rest >> 63 else rest}")


DESCRIPTOR_CALLS: dict[str, CallPrinter] = {"wgmma_descriptor": _descriptor}
