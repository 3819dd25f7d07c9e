"""Tiles that are loaded ahead go straight into shared memory, where the lanes of a wave fill one run of bytes in their order.

    copy(A[k + 1], next)                  for r in unroll(2): cp_async(&S[v, chunk r * 256 + t], &A[k + 1, what lies there])
    gemm(S[k % 2], ...)            ->     gemm(S[k % 2], ...)
    copy(next, S[v])                      commit; wait(0)

Lane i writes chunk i of the tile's storage.  Where the layout moves chunks, the lane reads the chunk that belongs there, which
the layout itself tells: swizzles are their own inverses.  A tile goes this way if the target (`async_load_bytes`) copies as
many bytes a lane as a thread would load at once, or more: narrower copies would be more instructions than loads and stores.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tilelang.ir import (EMPTY, Alloc, Bind, Buffer, Expr, Launch, Seq, Stmt, convert, do, free_vars, fresh, is_const, replace,
                         rewrite_stmts, seq, statements, walk, with_options, GLOBAL)
from tilelang.ops import Copy
from tilelang.ops.pairing import iteration_space, matched_indices, unit

from ..analysis.statements import distinct_statements
from ..analysis.vectorize import MAX_BYTES, power_of_two_in

_WORD = 4


def direct_loads(lw: Any, launch: Launch) -> Launch:
    """The launch with such copies in place of loads to registers and stores from there."""
    whole, launch = launch, replace(launch, body=distinct_statements(launch.body))
    pairs: list[tuple[Copy, Copy]] = []
    first: dict[Buffer, Copy] = {}
    for s in statements(launch.body):
        if isinstance(s, Copy) and s.plan.second and s.src.buffer in first:
            pairs.append((first[s.src.buffer], s))
        elif isinstance(s, Copy):
            first[s.dst.buffer] = s
    widths: dict[Buffer, set[int]] = {}
    bound = {x.var for x in walk(launch.body, Bind)}  # perhaps behind the load
    for load, store in pairs:
        late = any(free_vars(m) & bound for m in store.dst.mins if isinstance(m, Expr))
        widths.setdefault(store.src.buffer, set()).add(0 if late else _bytes(lw, load, store))
    taken = {b: found.pop() for b, found in widths.items() if len(found) == 1 and 0 not in found}
    loads = {id(load): with_options(replace(load, dst=store.dst), lanes=taken[store.src.buffer])
             for load, store in pairs if store.src.buffer in taken}
    stores = {id(store) for _, store in pairs if store.src.buffer in taken}

    # one wait for those that follow each other
    joined = {id(a) for x in walk(launch.body, Seq) for a, b in zip(x.stmts, x.stmts[1:]) if {id(a), id(b)} <= stores}

    def changed(s: Stmt) -> Stmt | None:
        if id(s) in joined:
            return EMPTY
        if id(s) in stores:
            return seq(do("cp_async_commit", span=s.span), do("cp_async_wait", n=0, span=s.span))
        return EMPTY if isinstance(s, Alloc) and s.buffer in taken else loads.get(id(s))

    return replace(launch, body=rewrite_stmts(launch.body, changed)) if taken else whole


def _bytes(lw: Any, load: Copy, store: Copy) -> int:
    """The bytes that a lane may copy at once; 0 where the tile cannot be filled in the order of lanes, or it does not pay."""
    src, dst, size = load.src, store.dst, store.dst.dtype.bytes
    extents, of_dst, of_src = iteration_space(dst, src)
    b, last, walked = src.buffer, len(extents) - 1, [d for d, n in enumerate(dst.extents) if not unit(n)]
    if b.scope_name != GLOBAL or src.dtype != dst.dtype or b in lw.buffers.safe or load.plan.tf32 or store.plan.tf32 or \
            of_dst[-1] != last or of_src[-1] != last or b.strides_ and not is_const(b.strides_[-1], 1) or \
            not all(isinstance(n, int) for n in extents) or dst.dtype.bits % 8 or dst.dtype.lanes > 1 or \
            any(not is_const(dst.mins[d], 0) or dst.extents[d] != dst.buffer.shape[d] for d in walked):
        return 0
    width, whole = power_of_two_in(extents[last] * size, MAX_BYTES), prod(extents) * size
    while width > _WORD and whole // width < lw.num_threads:
        width //= 2
    width = min((n for n in lw.target.async_load_bytes if n >= width and extents[last] * size % n == 0), default=0)
    count = width // size
    at = matched_indices(src, of_src, tuple(fresh("i") * (count if d == last else 1) for d in range(len(extents))))
    known = lw.known
    rows = [n * s for n, s, d in zip(src.extents, b.strides, of_src) if d is not None]  # all lanes lie within 2^30 bytes
    if not all(isinstance(n, int) for n in rows) or sum(rows) * size > 1 << 30:
        return 0
    if not count or lw.vector_width(b, at, count) < count or \
            known.divisor(at[-1]) % count or known.divisor(convert(b.shape[-1])) % count:
        return 0
    tiles = lw.layout_of(dst.buffer).table().reshape(-1, prod(extents))
    place = tiles[0] - tiles[0].min()
    chunks, n = place.reshape(-1, count), np.arange(place.size)
    own = place.max() < place.size and (place[place] == n).all() and (chunks == chunks[:, :1] + n[:count]).all()
    # The copy begins while the tile of the iteration before is read.
    return width if own and len(tiles) > 1 and (tiles == place + place.size * np.arange(len(tiles))[:, None]).all() else 0
