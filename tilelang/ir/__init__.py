"""The intermediate representation (IR) of all passes, from the user's tile program to the input of the code generators.

Grammar (dtype on every Expr, span on every node):

    Func    ::= name params buffers body facts attrs
    Stmt    ::= Seq(stmts) | Bind(var, value) | Alloc(buffer, init) | Store(buffer, indices, value)
              | Evaluate(call) | For(var, start, extent, kind, body) | Parallel(vars, extents, body)
              | While(cond, body) | If(cond, then, orelse) | Break | Continue | Assert(cond, message)
              | Launch(grid, block_vars, threads, thread_vars, body) | TileOp  (Copy, Gemm, Fill, Reduce, …: tilelang.ops)
    Expr    ::= Var | Const | StringConst | Cast | Binary | Unary | Select | Load | AddressOf | Call
              | Ramp | Broadcast | Shuffle
    Other   ::= Buffer | Region(buffer, mins, extents)

Options of a node are kept in one record (options.py): the plan of a For, Parallel, Launch or TileOp, the options of a Call,
the facts of a Buffer or Func.  The attrs of statements and functions are the user's annotations.

Phases are sets of invariants over the same nodes (ir/verify.py):
    TILE           tile ops and Parallel loops; no thread indices needed; buffers N-dimensional.
    THREADS_BOUND  no TileOp, Parallel or pipelined For; fragments are per-thread `local` arrays; tile-level
                   synchronisation not yet placed; shared buffers are 1-D with their physical (swizzled) index.
    SYNCED         THREADS_BOUND with barriers and async waits placed and verified.
    DEVICE         SYNCED, local and shared buffers one-dimensional, shared offsets planned, vector accesses are Ramps.
    CPU            as TILE, with the statements of the CPU backend (target/cpu_launch.py) instead of Launch.

Semantics, which every backend must follow:
  * A tile program executes its statements one after another on whole tiles; Parallel iterations are independent.
  * Integer arithmetic is two's complement and wraps at the width of its dtype.  floordiv/floormod round to minus
    infinity, truncdiv/truncmod to zero; a divisor of 0 counts as 1.  The amount of a shift
    is taken as unsigned; one of the width or more leaves no bit but copies of the sign of a signed value moved right.
  * Float arithmetic is IEEE in its dtype, one rounding per operation (fp16/bf16 as if computed in fp32 and rounded);
    contraction to fma is allowed.  min/max return the other operand when one is NaN.
  * Operands of Binary are evaluated left to right; `and`, `or` and a lazy Select evaluate only what they need.
  * Cast float->int truncates and saturates; NaN gives 0.  Cast to a narrower float rounds once, to nearest even; floats of 8
    bits and less saturate.  tfloat32 is stored as float32 and is rounded only when an MMA reads it.
  * Launch: blocks run in any order; threads of a block in any interleaving between barriers.
  * A load outside the shape of a global buffer gives the buffer's safe value (default 0); a store there is skipped.  This
    holds per dimension, and the lowering makes it explicit with guards.  Other scopes are not guarded.
  * A block barrier orders all shared and global accesses of the block's threads before and after it.
  * An async copy (cp.async) writes shared memory some time before the wait for its group returns in the issuing thread;
    other threads see it after a barrier that follows that wait.
"""

from typing import Any as _Any

from .dtype import dtype, int_range, numpy_dtype, promote
from .equal import alpha_equal
from .build import call, do, each_register, fresh, logical, ramp, select, unrolled
from .buffer import AddressOf, Buffer, Load, Region, load, region_of
from .call_options import CALL_OPTIONS, CallOptions, options_of
from .children import children, contains, extent, is_large
from .deep import deep
from .expr import (ARITHMETIC, BOOL, COMPARISONS, F32, FALSE, I32, I64, LOGICAL, TRUE, Binary, Broadcast, Call, Cast, Const,
                   Expr, Ramp, Select, Shuffle, StringConst, Unary, Var, as_bool, as_dim, binary, called, cast, const,
                   convert, int_literal, is_const, match, unary)
from .nodes import Node, fields_of, node
from .options import Options
from .hook import register_literal
from .places import (get_buffer_span, get_prim_func_span, get_stmt_span, make_span, set_buffer_span, set_stmt_span,
                     span_coverage, span_to_location)
from .facts import BufferFacts, FuncFacts
from .plans import LaunchPlan, LoopPlan, ParallelPlan
from .printer import to_text
from .scopes import (BARRIER, CLUSTER_BARRIER, DYNAMIC, FRAGMENT, GLOBAL, LOCAL, PRIVATE, REDUCER, SCOPES, SHARED, STATIC, TMEM,
                     VARIABLE)
from .span import Span
from .stmt import (EMPTY, TILE_OPS, Alloc, Assert, Attrs, Bind, Break, Continue, Evaluate, For, Func, If, Launch, Parallel,
                   Seq, Stmt, Store, TileOp, While, replace, seq, tile_op, with_options)
from .visitor import (controls, distinct, follows_addresses, free_vars, inner, jumps_of, leaves, rebuild, remember, rewrite,
                      rewrite_launches, rewrite_stmts, statements, stmts_of, substitute, symbols_of, used_vars, walk,
                      ways, with_inner)


def __getattr__(name: str) -> _Any:
    """`parse` and `ParseError`: few programs read the text of a program."""
    if name not in ("parse", "ParseError"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import parser  # 5 ms

    return getattr(parser, name)


__all__ = [*(n for n in dir() if not n.startswith("_")), "ParseError", "parse"]
