"""Takes pipeline stages off a program that does not fit in shared memory otherwise."""

from __future__ import annotations

from tilelang.ir import For, Func, replace, rewrite_stmts, walk, with_options, GLOBAL, SHARED
from tilelang.ops import Copy

from ..analysis.pipeline_loops import SERIAL, is_pipelined, ring_stages, wanted_stages


def fewer_stages(func: Func, excess: int) -> Func | None:
    """The program with as many stages less as free `excess` bytes; None where each loop has one stage.

    The loop with the largest tiles loses a stage first; no loop goes below two stages, which still overlap, before all have
    two.  A loop whose statements have an order and stages of their own becomes sequential.
    """
    loops = {id(s): s for s in walk(func.body, For) if is_pipelined(s)}
    asked = {k: ring_stages(s) or max(wanted_stages(s)[1]) + 1 for k, s in loops.items()}  # type: ignore[index]
    stages = dict(asked)
    tiles = {k: sum(b.size * b.dtype.bits // 8 for b in {c.dst.buffer for c in walk(s.body, Copy)
                                                        if c.src.buffer.scope_name == GLOBAL}
                    if b.scope_name in SHARED and b.is_static) for k, s in loops.items()}
    while excess > 0 and any(n > 1 for n in stages.values()):
        some = [k for k, n in stages.items() if n > 2] or [k for k, n in stages.items() if n > 1]
        k = max(some, key=lambda k: tiles[k])
        by = stages[k] - 1 if ring_stages(loops[k]) is None else 1
        stages[k], excess = stages[k] - by, excess - by * tiles[k]

    def fewer(s: object) -> For | None:
        if not isinstance(s, For) or stages.get(id(s)) == asked.get(id(s)):
            return None
        plain = {} if ring_stages(s) is not None else SERIAL
        return with_options(replace(s, body=rewrite_stmts(s.body, fewer)), **{**plain, "num_stages": stages[id(s)]})

    return None if stages == asked else rewrite_stmts(func, fewer)
