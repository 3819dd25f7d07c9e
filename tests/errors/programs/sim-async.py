"""Shared memory is read while the asynchronous copy that fills it may still be under way."""

import numpy as np

from tilelang.ir import AddressOf, Alloc, Buffer, Evaluate, Func, Launch, Span, Store, Var, call, const, dtype, load, seq
from tilelang.simulator import run_device

A, B = (Buffer(n, (32,), dtype("float32")) for n in "AB")
S = Buffer("S", (32,), dtype("float32"), "shared.dyn")
params = tuple(Var(f"{b.name}_handle", dtype("handle")) for b in (A, B))
bx, tx, ty, tz = (Var(n, dtype("int32")) for n in ("bx", "tx", "ty", "tz"))
body = seq(
    Alloc(S),
    Evaluate(call("cp_async", [AddressOf(S, (tx,)), AddressOf(A, (tx,))], "void", bytes=4),
             span=Span(__file__, 14, 4, 15, 0)),
    Evaluate(call("cp_async_commit", [], "void")),
    # The wait allows one group to stay pending: the one that is needed.
    Evaluate(call("cp_async_wait", [], "void", n=1)),
    Store(B, (tx,), load(S, (tx,)), span=Span(__file__, 19, 4, 19, 34)),
)
func = Func("main", params, tuple(zip(params, (A, B))),
            Launch((const(1),), (bx,), (32, 1, 1), (tx, ty, tz), body))

run_device(func, [np.zeros(32, np.float32)] * 2)
