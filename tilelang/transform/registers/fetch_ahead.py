"""Loads the first operands of the next iteration's MMAs under the last MMAs of this one.

    for k:  wait(k); barrier; copies; A0, B0 = step 0; …         wait(0); barrier; A0, B0 = step 0 of iteration 0
            A1, B1 = step 1; mma(A0, B0); mma(A1, B1)        ->  for k:  copies; A1, B1 = step 1; mma(A0, B0)
                                                                         wait(k + 1); barrier; A0, B0 = step 0 of k + 1
                                                                         mma(A1, B1)

Otherwise all warps of a block wait for shared memory after each barrier, and a block that is alone on its SM computes nothing.
"""

from __future__ import annotations

import re
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Call, Const, For, Func, If, Stmt, Store, binary, const, contains,
                         convert, replace, rewrite_launches, seq, stmts_of, substitute, walk, with_inner)

from ..analysis.statements import rename
from ..framework.pass_ import SYNCED, PassContext, pass_

_KINDS = {"cp_async_wait": "w", "sync_threads": "w", "ldmatrix": "f", "mma": "m", "cp_async": "c", "cp_async_commit": "c"}
_MOST = 232  # registers of accumulators and operands with which ptxas had no spills
_THREADS = 128  # with 128 threads and two steps, a second block of the SM hides the loads: 128 x 128 x 32 lost 3 %


@pass_(needs=SYNCED)
def fetch_ahead(func: Func, cx: PassContext) -> Func:
    """Rotate loops of asynchronous copies and of one GEMM by mma.sync whose operands come by ldmatrix.

    Keeps: every value. The last iteration loads once more what it has loaded, from a stage that nothing writes by then.
    """
    return rewrite_launches(func, lambda launch: _visited(launch, launch.num_threads))


def _visited(s: Any, threads: int) -> Any:
    out = _rotated(s, threads) if isinstance(s, For) and s.kind == "serial" else None
    return with_inner(s, lambda x: _visited(x, threads)) if out is None else out


def _kind(s: Stmt) -> str:
    """What a statement does: a letter of _KINDS, "a" for an allocation, "x" for anything else."""
    found = {_KINDS.get(x.op, "") for x in walk(s, Call)} - {""}
    return "a" if isinstance(s, Alloc) and s.init is None else "x" if len(found) != 1 or contains(s, Store) else found.pop()


def _rotated(s: For, threads: int) -> Stmt | None:
    """The loop with its first loads in front of it, and those of the next iteration at its end; None for other loops."""
    body = stmts_of(s.body)
    kinds = "".join(map(_kind, body))
    steps, loads = kinds.count("m"), [x for x, kind in zip(body, kinds) if kind == "f"]
    each = len(loads) // max(steps, 1)
    if steps % 2 or steps * threads <= 2 * _THREADS or not each or not re.fullmatch(
            f"wwc+a*f{{{2 * each}}}m(f{{{each}}}m){{{steps - 2}}}m", kinds):
        return None
    products = [x for x, kind in zip(body, kinds) if kind == "m"]
    held = {x.buffer.data: x.buffer for x in walk(products[0], AddressOf)}
    if sum(b.bits for b in held.values()) > 32 * _MOST:
        return None
    of_step = [loads[q * each:(q + 1) * each] for q in range(steps)]
    end = convert(s.start) + convert(s.extent) - 1
    following = substitute(seq(*of_step[0]), {s.var: binary("min", s.var + const(1, s.var.dtype), end)})
    first = substitute(seq(*of_step[0]), {s.var: convert(s.start)})
    out: list[Stmt] = [x for x, kind in zip(body, kinds) if kind == "c"]
    for q, product in enumerate(products):
        out += [*(of_step[q + 1] if q + 1 < steps else (*body[:2], following)), product]
    opening: Stmt = seq(*rename([*body[:2], first]))
    if not isinstance(s.extent, Const):
        opening = If(binary("gt", s.extent, const(0, s.extent.dtype)), opening)
    return seq(*(x for x in body if isinstance(x, Alloc)), opening, replace(s, body=seq(*out)))
