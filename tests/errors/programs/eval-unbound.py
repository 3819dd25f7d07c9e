"""An expression is evaluated without a value for one of its variables."""

from tilelang.ir import Span, Var, dtype
from tilelang.ir.evaluate import evaluate

n, m = Var("n", dtype("int32")), Var("m", dtype("int32"), Span(__file__, 6, 44, 6, 68))

evaluate(n * 2 + m, {n: 3})
