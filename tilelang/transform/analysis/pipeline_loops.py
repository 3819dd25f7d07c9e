"""What a user's T.Pipelined asks for (stages, order and stage lists), and whether it fits the loop body."""

from __future__ import annotations

from typing import Any

from tilelang.errors import InternalError, error, register
from tilelang.ir import For

from .pipeline_schedule import Body, Item, violations

register("pipeline-annotation", InternalError, "order/stage lists of T.Pipelined do not fit the loop body",
         "give each scheduled statement an order of its own and a stage from 0",
         expected="one entry per scheduled statement")
register("pipeline-order", ValueError, "order/stage of T.Pipelined would run a consumer before its producer",
         expected="a consumer after its producer")
register("pipeline-arguments", ValueError, "T.Pipelined with a bad num_stages, order or stage",
         "give num_stages >= 0, or order and stage with one entry per scheduled statement",
         expected="num_stages from 0, or order and stage with one integer per statement")

def is_pipelined(s: For) -> bool:
    """Whether the user asked for a pipeline."""
    return s.kind == "pipelined" or s.plan.software_pipeline_stage is not None


def wanted_stages(s: For) -> int | tuple[Any, Any]:
    """num_stages, or the (order, stage) lists. Raises "pipeline-arguments"."""
    order = s.plan.order or s.plan.software_pipeline_order
    stage = s.plan.stage or s.plan.software_pipeline_stage
    if stage is not None:
        return order, stage
    if order is not None:
        return 0
    n = s.plan.num_stages
    if n < 0:
        raise error("pipeline-arguments", f"num_stages of T.Pipelined must be an integer >= 0, found {n}",
                    expected="an integer >= 0", found=str(n), span=s.span,
                    hint="0 is a plain loop, n keeps n versions of each shared buffer filled by copies")
    return n


def scheduled_lists(s: For, loop_body: Body, order: Any, stage: Any) -> tuple[list[int], list[int]]:
    """(stage, order) per item. Raises "pipeline-annotation" for lists that do not fit the body."""
    lists: dict[str, list[int]] = {}
    for name, given in (("order", order), ("stage", stage)):
        values = [int(v) for v in (given if given is not None else range(len(stage)))]
        if len(values) == len(loop_body.listed):  # the lists count pure bindings too: their entries are ignored
            values = [v for v, k in zip(values, loop_body.listed) if k is not None]
        if len(values) != len(loop_body.items):
            raise error("pipeline-annotation",
                        f"pipeline annotation size: `{name}` has {len(given if given is not None else stage)} entries, "
                        f"the loop body has {len(loop_body.items)} statements to schedule",
                        expected=f"{len(loop_body.items)} entries", found=f"{len(given if given is not None else stage)}",
                        span=s.span,
                        hint="list one entry per copy, fill, gemm, reduction or store of the body, in source order")
        lists[name] = values
    if len(set(lists["order"])) != len(lists["order"]):
        raise error("pipeline-annotation", f"two statements of the pipeline have the same order: {lists['order']}",
                    expected="an order of its own for each statement", found=f"{lists['order']}",
                    span=s.span, hint="`order` is a permutation of the statements")
    if any(v < 0 for v in lists["stage"]):
        raise error("pipeline-annotation", f"pipeline stages start at 0, found {lists['stage']}",
                    expected="stages from 0", found=f"{lists['stage']}", span=s.span)
    low = min(lists["stage"], default=0)
    return [v - low for v in lists["stage"]], lists["order"]


def check_flow(s: For, items: list[Item], stage: list[int], order: list[int]) -> None:
    """Raise "pipeline-order" when a consumer would run before its producer of the same iteration."""
    for v in violations(items, stage, order, {e.storage: 1 << 30 for x in items for e in x.effects}):
        if not v.flow:
            continue
        first, second = items[v.first].stmt, items[v.second].stmt
        if stage[v.second] < stage[v.first]:
            what = f"is in stage {stage[v.second]}, before stage {stage[v.first]} of its producer"
        elif stage[v.second] == stage[v.first] and order[v.second] < order[v.first]:
            what = "comes before its producer in `order`, in the same stage"
        else:
            continue
        raise error("pipeline-order", f"a consumer of `{v.what}` {what}",
                    found=f"`{v.what}` used before", span=second.span or s.span,
                    notes=((first.span, "the producer"),), hint="give the consumer a later stage or a later order")


__all__ = ["check_flow", "is_pipelined", "scheduled_lists", "wanted_stages"]
