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
        reduce(c[0:32, 0:64], m, max, dim=0)   ->   rows of c accumulated into m one after another

    Partial results need elements that are adjacent along dim, and a constant number of them that fills a vector.
    """
    host = cx.host or host_cpu()
    return rewrite_codes(func, lambda code: code.having(rewrite(
        code.body, lambda op: ReduceLoops(op, lanes_of(op, code.values, host), span=op.span), Reduce)))


def lanes_of(op: Reduce, values: ThreadValues, host: HostCpu) -> int:
    """Number of partial results of a reduction, 1 without a vector."""
    extents, dim = op.src.extents, op.dim % len(op.src.extents)
    rest = len(extents) - 1
    if dim != rest:
        return 1  # dimensions after dim: the innermost loop walks these
    src = op.src.buffer
    lanes = host.lanes(max(op.dst.dtype.bits, 32))
    copies = values.count if src.data in values.private else 1
    count, stride = constant(extents[dim]), 1 if src.strides_ is None else constant(src.strides_[op.dim])
    fits = count is not None and count >= lanes and stride == 1
    return lanes if fits and copies == 1 and src.dtype.lanes == 1 else 1


def constant(e: Expr | int) -> int | None:
    """The value of a size or stride; None where it is known at run time only."""
    if isinstance(e, int):
        return e
    form = Analyzer().linear(e)
    return None if form.terms else int(form.const)
