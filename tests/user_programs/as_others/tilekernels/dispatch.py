"""Tokens to experts and back."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide, zeros
from .common import BF16, F32, I32, NO_SPECIALISATION


@tilelang.jit(pass_configs=NO_SPECIALISATION)
def expand_to_fused(hidden, topk, block=64):
    """Copy each token's row to the places its experts gave it; -1 is no place."""
    tokens, places = T.dynamic("tokens, places")

    @T.prim_func
    def main(
        x: T.Tensor[(tokens, hidden), BF16],
        pos: T.Tensor[(tokens, topk), I32],
        out: T.Tensor[(places, hidden), BF16],
    ):
        with T.Kernel(tokens, threads=64) as pid:
            pos_local = T.alloc_local((topk,), I32)
            row = T.alloc_fragment((block,), BF16)
            T.copy(pos[pid, 0], pos_local)
            for b in T.serial(T.ceildiv(hidden, block)):
                T.copy(x[pid, b * block], row)
                for k in T.unroll(topk):
                    if pos_local[k] >= 0:
                        for i in T.Parallel(block):
                            out[pos_local[k], b * block + i] = row[i]

    return main


def expand_to_fused_reference(x, pos, out):
    (out,) = wide(out)
    for t, k in np.ndindex(pos.shape):
        if pos[t, k] >= 0:
            out[pos[t, k]] = x[t].astype(np.float64)
    return out


def places(tokens, topk, total):
    def draw(g):
        table = g.permutation(total)[: tokens * topk].reshape(tokens, topk).astype(np.int32)
        table[g.uniform(size=table.shape) < 0.25] = -1
        return table

    return draw


@tilelang.jit
def reduce_fused(x, pos, weight, sf, with_sf: bool = True):
    """y[t] = sum over k of weight[t, k] * sf[pos] * x[pos[t, k]], negative places left out."""
    tokens, rows = T.dynamic("tokens, rows")
    H, K = T.const("H, K")
    x: T.Tensor[(rows, H), BF16]
    pos: T.Tensor[(tokens, K), I32]
    weight: T.Tensor[(tokens, K), F32]
    sf: T.Tensor[(rows,), F32]
    y = T.empty((tokens, H), F32)
    with T.Kernel(tokens, threads=128) as t:
        acc = T.alloc_fragment((H,), F32)
        p = T.alloc_fragment((K,), I32)
        T.copy(pos[t, 0], p)
        T.clear(acc)
        for k in T.serial(K):
            if p[k] >= 0:
                s = weight[t, k] * sf[p[k]] if with_sf else weight[t, k]
                for j in T.Parallel(H):
                    acc[j] += x[p[k], j] * s
        T.copy(acc, y[t, 0])
    return y


def reduce_fused_reference(x, pos, weight, sf):
    x, weight, sf = wide(x, weight, sf)
    return (np.where(pos >= 0, weight * sf[pos], 0)[:, :, None] * x[pos]).sum(1)


@tilelang.jit(out_idx=[1, 2])
def fused_mapping(n, experts, threads=128):
    """Each choice's place among the choices of its expert, counted by the warp's matching lanes, in order."""
    assert n % threads == 0

    @T.prim_func
    def main(choice: T.Tensor[(n,), I32], place: T.Tensor[(n,), I32], count: T.Tensor[(experts,), I32]):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            lane = T.get_lane_idx()
            warp = T.get_warp_idx()
            per_warp = T.alloc_shared((threads // 32, experts), I32)
            so_far = T.alloc_shared((experts,), I32)
            T.clear(so_far)
            for s in T.serial(n // threads):
                T.clear(per_warp)
                e = choice[s * threads + tx]
                peers = T.call_extern("uint32", "__match_any_sync", T.uint32(0xFFFFFFFF), e)
                before = T.popcount(peers & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
                if before == 0:
                    per_warp[warp, e] = T.cast(T.popcount(peers), "int32")
                T.sync_threads()
                start = T.alloc_var("int32", init=0)
                start = so_far[e]
                for w in T.serial(threads // 32):
                    if w < warp:
                        start += per_warp[w, e]
                place[s * threads + tx] = start + T.cast(before, "int32")
                T.sync_threads()
                if tx < experts:
                    for w in T.serial(threads // 32):
                        so_far[tx] += per_warp[w, tx]
                T.sync_threads()
            if tx < experts:
                count[tx] = so_far[tx]

    return main


def fused_mapping_reference(choice):
    seen, place = np.zeros(16, int), []
    for e in choice:
        place.append(seen[e])
        seen[e] += 1
    return np.array(place), seen


PROGRAMS = [
    Program(
        "expand_to_fused",
        expand_to_fused,
        dict(hidden=160, topk=3),
        drawn(uniform((7, 160), BF16), places(7, 3, 30), zeros((30, 160), BF16)),
        expand_to_fused_reference,
        EXACT,
        changed=(2,),
    ),
    Program(
        "reduce_fused",
        reduce_fused,
        dict(H=192, K=3),
        drawn(uniform((30, 192), BF16), places(7, 3, 30), uniform((7, 3)), uniform((30,))),
        reduce_fused_reference,
        Bound(F32, 8, 3.0),
    ),
    Program(
        "fused_mapping",
        fused_mapping,
        dict(n=256, experts=16),
        drawn(integers((256,), 0, 16)),
        fused_mapping_reference,
        EXACT,
    ),
]
