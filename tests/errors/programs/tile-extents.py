"""A copy between regions whose run-time extents differ."""

import numpy as np

from tilelang.ir import Buffer, Func, Launch, Region, Span, Var, const, dtype
from tilelang.ops import Copy
from tilelang.simulator import run_tile

n, m, bx, tx, ty, tz = (Var(x, dtype("int32")) for x in ("n", "m", "bx", "tx", "ty", "tz"))
A, B = (Buffer(x, (64,), dtype("float32")) for x in "AB")
pa, pb = (Var(f"{b.name}_handle", dtype("handle")) for b in (A, B))
copy = Copy(Region(A, (const(0),), (n,)), Region(B, (const(0),), (m,)), span=Span(__file__, 12, 7, 12, 93))
func = Func("main", (pa, pb, n, m), ((pa, A), (pb, B)), Launch((const(1),), (bx,), (32, 1, 1), (tx, ty, tz), copy))

run_tile(func, [np.zeros(64, np.float32), np.zeros(64, np.float32), 8, 9])
