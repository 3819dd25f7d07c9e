"""Layout constructors for other hardware or other compilers, which are unsupported: each raises an error with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import error

CUTE = """IntTuple E ScaledBasis ComposedLayout Swizzle make_layout make_identity_layout make_row_major_layout
    make_column_major_layout size rank cosize coshape coalesce composition complement left_inverse right_inverse
    logical_divide logical_product blocked_product tiled_product product filter flatten flatten_to_tuple congruent
    compatible restrict from_python to_python"""


def unsupported(name: str, reason: str) -> Callable[..., Any]:
    """A function that raises layout-not-available."""
    def unavailable(*args: Any, **kw: Any) -> Any:
        raise error("layout-not-available", f"‹{name}› {reason}")

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__doc__ = f"Not available: {reason}."
    return unavailable


make_tcgen05mma_swizzled_layout = unsupported("make_tcgen05mma_swizzled_layout",
                                          "is for Blackwell (sm_100), which is not available")
