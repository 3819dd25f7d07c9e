"""Raw reductions over the threads of a block: T.comm_reducer and T.tvm_thread_allreduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import I32, Buffer, Const, Expr, Load, binary, call, convert, is_const, load, logical, select, PRIVATE

from .alloc import alloc_shared
from .tracing.builder import Builder, Emitted, need_builder
from .kernel import need_kernel, thread_index
from .tracing.scope import BodyFrame
from .tracing.state import describe, error
from .tile import EMITTED

WARP = 32


class CommReducer:
    """A commutative operation and its identity value.  combine: f(x, y); identity: scalar."""

    def __init__(self, combine: Callable[[Any, Any], Any], identity: list[Any]) -> None:
        if not callable(combine) or not isinstance(identity, (list, tuple)) or len(identity) != 1:
            raise error("reducer-type", "T.comm_reducer takes «a function of two values and a list of one identity value»",
                        found=f"{describe(combine)} and {identity!r}")
        self.combine, self.identity = combine, convert(identity[0])


def comm_reducer(combine: Callable[[Any, Any], Any], identity: list[Any]) -> CommReducer:
    """A commutative reducer for T.tvm_thread_allreduce: `T.comm_reducer(lambda x, y: x + y, [T.float32(0)])`.

    Example:
        add = T.comm_reducer(lambda x, y: x + y, [T.float32(0)])
        with T.attr(add, "reduce_scope", 0):
            T.tvm_thread_allreduce(T.uint32(1), X[i], True, v[0], tx)
    """
    return CommReducer(combine, identity)


class ReduceScope(BodyFrame):
    """`with T.attr(reducer, "reduce_scope", …):` names the reducer of the allreduce calls inside."""

    def __init__(self, reducer: Any) -> None:
        super().__init__()
        if not isinstance(reducer, CommReducer):
            raise error("reducer-type", f"the attribute reduce_scope belongs to «a T.comm_reducer», found {describe(reducer)}")
        self.reducer = reducer


def tvm_thread_allreduce(size: Any, value: Any, cond: Any, result: Any, *threads: Any, dtype: Any = None) -> Emitted:
    """result = the reduction of `value` over the given thread indices, in every participating thread.

    size: number of values, 1.  cond: threads where it is false contribute the identity.  result: an element of private
    memory.  threads: thread indices of the kernel (T.get_thread_binding); threads that differ only in these form a
    group.  All threads of the block must reach it.  Raises reducer-type, reducer-operand.

    Example:
        with T.attr(T.comm_reducer(lambda x, y: x + y, [T.float32(0)]), "reduce_scope", 0):
            T.tvm_thread_allreduce(T.uint32(1), X[i], True, v[0], tx)  # v = T.alloc_local((1,), "float32")
    """
    b, k = need_builder("T.tvm_thread_allreduce"), need_kernel("T.tvm_thread_allreduce")
    scope = next((f for f in reversed(b.frames) if isinstance(f, ReduceScope)), None)
    if scope is None:
        raise error("reducer-type", "T.tvm_thread_allreduce outside a reduce_scope", expected="a reduce_scope around it",
                    found="none", hint='put it under `with T.attr(T.comm_reducer(…), "reduce_scope", …):`')
    if not is_const(convert(size), 1):
        raise error("reducer-operand", f"T.tvm_thread_allreduce combines one value, found size ‹{size}›", expected="size 1")
    target = b.elements[id(result)][1] if id(result) in b.elements else result
    target = load(target, (Const(0, I32),) * len(target.shape)) if isinstance(target, Buffer) else target
    if not isinstance(target, Load) or target.buffer.scope_name not in PRIVATE:
        raise error("reducer-operand", "the result of T.tvm_thread_allreduce is «an element of private memory», found "
                    f"{describe(result)}")
    axes = [d for t in threads for d, v in enumerate(k.thread_vars) if v is t]
    if not axes or len(axes) != len(threads):
        raise error("reducer-operand", "T.tvm_thread_allreduce reduces over «thread indices of the kernel»",
                    found=f"{', '.join(map(describe, threads)) or 'none'}", hint="pass T.get_thread_binding(0) and its like")
    dt, red = target.buffer.dtype, scope.reducer
    v: Expr = b.let("mine", convert(value).astype(dt) if convert(value).dtype != dt else convert(value))
    if not is_const(convert(cond), True):
        v = b.let("taken", select(convert(cond).astype("bool"), v, red.identity.astype(dt)))
    extents = {d: k.threads[d] for d in dict.fromkeys(axes)}
    if list(extents) == [0] and k.threads[0] <= WARP and WARP % k.threads[0] == 0 and k.num_threads % WARP == 0:
        out = _by_shuffles(b, red, v, k.threads[0])
    else:
        out = _through_shared(b, red, v, extents)
    b.store(target.buffer, target.indices, out)
    return EMITTED


def _by_shuffles(b: Builder, red: CommReducer, v: Expr, n: int) -> Expr:
    step = n // 2
    while step:
        other = b.let("other", call("shfl_xor", (v, convert(step)), v.dtype, span=b.here(), width=n))
        v = b.let("sum", convert(red.combine(v, other)).astype(v.dtype))
        step //= 2
    return v


def _through_shared(b: Builder, red: CommReducer, v: Expr, extents: dict[int, int]) -> Expr:
    """Reduce by a tree in shared memory, one axis after another; barriers are inserted later where the accesses need them."""
    k = need_kernel("T.tvm_thread_allreduce")
    places = alloc_shared((k.num_threads,), v.dtype)
    b.unnamed.pop(id(places), None)
    linear = b.let("place", convert(thread_index()))
    b.store(places, (linear,), v)
    first: Expr = linear
    for d, n in extents.items():
        index, stride = k.thread_vars[d], (1, k.threads[0], k.threads[0] * k.threads[1])[d]
        first = binary("sub", first, binary("mul", index, convert(stride)))
        half = 1 << max(0, n - 1).bit_length() >> 1
        done = [binary("eq", k.thread_vars[e], convert(0)) for e in extents if list(extents).index(e) < list(extents).index(d)]
        while half:
            test: Expr = binary("lt", index, convert(min(half, n - half)))
            for c in done:  # the earlier axes have been reduced into their first thread
                test = logical("and", test, c)
            partner = b.let("partner", select(test, binary("add", linear, convert(half * stride)), linear))
            other = b.let("other", load(places, (partner,)))
            v = b.let("sum", select(test, convert(red.combine(v, other)).astype(v.dtype), v))
            b.store(places, (linear,), v)
            half //= 2
    return b.let("total", load(places, (first,)))
