"""Multiplies and adds in one instruction, where the device compiler does not: x * y + z becomes fma(x, y, z).

    s * c - t * c    ->    fma(s, c, -(t * c))

The text of such a target says which sums are fused, so that its simulator and its machine code leave the same bits.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Binary, Expr, Launch, call, rewrite, unary

from ..framework.pass_ import DEVICE, PassContext, pass_


@pass_(needs=DEVICE, of=Launch, when=lambda cx: getattr(cx.target, "fuses_in_text", False))
def fused_multiplies(launch: Launch, cx: PassContext) -> Any:
    """Fuse a float32 multiplication with the addition or subtraction of its result.

    Keeps: every value up to a rounding that the language leaves open.
    """
    return rewrite(launch, _fused, Binary)


def _fused(e: Any) -> Expr | None:
    if e.op not in ("add", "sub") or e.dtype != "float32":
        return None
    for x, other, first in ((e.a, e.b, True), (e.b, e.a, False)):
        if isinstance(x, Binary) and x.op == "mul":
            minus = e.op == "sub"
            a = unary("neg", x.a) if minus and not first else x.a
            return call("fma", (a, x.b, unary("neg", other) if minus and first else other), e.dtype, span=e.span)
    return None
