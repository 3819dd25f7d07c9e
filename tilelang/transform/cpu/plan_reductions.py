"""Width of the vector in which a reduction accumulates."""

from __future__ import annotations

from tilelang.arith import Analyzer
from tilelang.ir import Expr, Func, rewrite
from tilelang.ops import Reduce
from tilelang.target.cpu import HostCpu, host_cpu
from tilelang.target.cpu_launch import ReduceLoops, ThreadValues, rewrite_codes

from ..framework.pass_ import CPU, PassContext, pass_


@pass_(needs=CPU)
def plan_reductions(func: Func, cx: PassContext) -> Func:
    """Each Reduce as loops, with the number of elements that it accumulates side by side.

        reduce(c[0:32, 0:64], m, max, dim=1)   ->   16 partial maxima of each row of c, combined at its end
        reduce(c[0:32, 0:64], m, max, dim=0)   ->   64 columns of c, each accumulated in a lane of a vector

    Vectors need elements that are adjacent along the last dimension, and a constant number of them that fills one.
    """
    host = cx.host or host_cpu()
    return rewrite_codes(func, lambda code: code.having(rewrite(
        code.body, lambda op: ReduceLoops(op, lanes_of(op, code.values, host), span=op.span), Reduce)))


def lanes_of(op: Reduce, values: ThreadValues, host: HostCpu) -> int:
    """Number of elements of the last dimension that a reduction accumulates in one vector, 1 without vectors."""
    extents, dim, last = op.src.extents, op.dim % len(op.src.extents), len(op.src.extents) - 1
    lanes = host.lanes(max(op.dst.dtype.bits, 32))
    tiles = [op.src.buffer] if dim == last else [op.src.buffer, op.dst.buffer]
    adjacent = all(b.strides_ is None or constant(b.strides_[-1]) == 1 for b in tiles)
    single = values.count == 1 or all(b.data not in values.private for b in tiles)
    count = constant(extents[last])
    return lanes if count is not None and count >= lanes and adjacent and single and op.src.dtype.lanes == 1 else 1


def constant(e: Expr | int) -> int | None:
    """The value of a size or stride; None where it is known at run time only."""
    if isinstance(e, int):
        return e
    form = Analyzer().linear(e)
    return None if form.terms else int(form.const)
