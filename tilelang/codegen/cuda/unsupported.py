"""The error for constructs that CUDA has no form for."""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Node, Span

register("codegen-unsupported", NotImplementedError, "the target's code generator has no form for this construct yet",
         expected="a construct that the target's code generator has a form for")

_OWN_FUNCTION = "write it another way, or call a function of your own through T.import_source and T.call_extern"


def unsupported(what: str, n: Node | None, hint: str = "", span: Span | None = None) -> Exception:
    """The error for a construct that CUDA has no form for, at the node's place or the span."""
    return error("codegen-unsupported", f"{what} is not supported by this target's code generator", found=what,
                 span=span or getattr(n, "span", None), hint=hint or _OWN_FUNCTION)
