"""Mark tiles of global memory that TMA must not move because of the column at which they start.

The innermost coordinate of a TMA box must be a multiple of 16 bytes. With any other coordinate loads and stores fault on an
H200 ("illegal instruction"), whatever the swizzle. Other coordinates are free. Copies and tile atomics whose first column is
not certainly such a multiple get the attr `unaligned_columns`. All code that chooses TMA tests this attr (ops/tma.py,
ops/tma_store.py, ops/tma_copy.py).
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import Expr, Func, Region, replace, rewrite, with_options, GLOBAL
from tilelang.ops import AtomicTile, Copy
from tilelang.target.tensor_map import STRIDE_ALIGN

from ..analysis.vectorize import bound_divisors
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def tma_columns(func: Func, cx: PassContext) -> Func:
    """Give copies and tile atomics whose first column may not be a multiple of 16 bytes the attr `unaligned_columns`.

    Keeps the values that the program computes.
    """
    facts = bound_divisors(func.body)

    def mark(x: Any) -> Any:
        if any(unaligned_columns(r, facts) for r in (x.dst, getattr(x, "src", None))):
            return with_options(x, unaligned_columns=True)
        return None

    return replace(func, body=rewrite(func.body, mark, Copy, AtomicTile))


def unaligned_columns(r: Any, facts: dict[Expr, int]) -> bool:
    """Whether a region of a global tensor may start at a column that is not a multiple of 16 bytes. facts: known divisors of
    variables."""
    if not isinstance(r, Region) or r.buffer.scope_name != GLOBAL:
        return False
    unit = STRIDE_ALIGN * 8 // math.gcd(r.dtype.bits, STRIDE_ALIGN * 8)
    return not divisible(r.mins[-1], unit, facts)
