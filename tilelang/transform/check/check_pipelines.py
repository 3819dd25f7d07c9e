"""Check the order and stage lists of T.Pipelined for every target, also for targets that do not pipeline."""

from __future__ import annotations

from tilelang.ir import For, Func, statements, stmts_of

from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.pipeline_loops import check_flow, is_pipelined, loop_items, scheduled_lists, wanted_stages


@pass_(needs=TILE)
def check_pipelines(func: Func, cx: PassContext) -> Func:
    """Reject order and stage lists that do not fit the loop body or would run a consumer before its producer.

    Changes nothing. plan_pipelines repeats the check for the body that it sees.
    Raises pipeline-arguments, pipeline-annotation, pipeline-order.
    """
    for s in statements(func.body):
        if not isinstance(s, For) or not is_pipelined(s):
            continue
        wanted = wanted_stages(s)
        if isinstance(wanted, tuple):
            parts = loop_items(stmts_of(s.body))
            stage, order = scheduled_lists(s, parts, *wanted)
            check_flow(s, parts.items, stage, order)
    return func
