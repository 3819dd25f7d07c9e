"""A fragment with a run-time extent."""

from tilelang.ir import Alloc, Buffer, Func, Launch, Span, Var, const, dtype
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.framework.pass_ import PassContext

i32 = dtype("int32")
n = Var("n", i32)
S = Buffer("S", (n, 8), dtype("float16"), "local.fragment", span=Span(__file__, 9, 4, 9, 52))

threads = tuple(Var(v, i32) for v in ("tx", "ty", "tz"))
infer_layouts(Func("main", (n,), (), Launch((const(1),), (Var("bx", i32),), (32, 1, 1), threads, Alloc(S))), PassContext())
