"""MlaPlan: how the keys of all sequences of a decode step are divided among blocks.

Blocks take pairs of tiles (128 keys) in order, each up to the same cost; a sequence that does not fit into the rest
of it is divided. A sequence, or a split of one, costs _START pairs beside its own, and blocks may take that much more than
the mean. So sequences of equal length stay whole where dividing them would save less than it costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import tilelang.language as T
from tilelang.jit import JITKernel

from ..arrays import empty
from ..place import Place
from .inputs import fitting_kernel
from .mla_kernels import KEYS, PAIR, ROWS, TILES, MlaForm, plain_attention

_START = 5  # pairs of tiles that take the time in which a block starts a sequence and stores its result


class MlaPlan(NamedTuple):
    """begins (n + 1, 2): the sequence and the pair of tiles where each split begins. spans (batch, 2): the first and the last
    split of each sequence. divided: whether sequences may be. Arrays of int32 on the device of the lengths."""

    begins: Any
    spans: Any
    divided: bool


def planned(f: MlaForm, at: Place) -> bool:
    """Whether mla_attention computes a form, from a plan."""
    return at.target.has_wgmma and f.rope == KEYS and f.dim_v % 128 == 0 and f.dim_v <= 512


def plain_kernel(at: Place, f: MlaForm) -> JITKernel:
    """The kernel of a form without a plan, with the first tile for which a block has room."""
    return fitting_kernel(at, plain_attention, *(f._replace(tile=t) for t in TILES))[1]


def splits_of(at: Place, heads: int) -> int:
    """The number of splits of the work: with the blocks of 64 heads each, one block per SM."""
    return max(1, (at.sms or at.target.limits.sm_count) // -(-heads // ROWS))


def divide(lengths: Any, splits: int) -> MlaPlan:
    """The plan for lengths that are known on the host (a sequence of ints)."""
    pairs = [max(1, -(-int(n) // PAIR)) for n in lengths]
    most = -(-(sum(pairs) + _START * len(pairs)) // splits) + _START
    begin, spans = [(0, 0)], np.zeros((len(pairs), 2), np.int32)
    s = t = 0
    for p in range(splits):
        left = most
        while s < len(pairs) and left > _START:
            spans[s, 0 if t == 0 else 1], spans[s, 1] = p, p
            take = min(pairs[s] - t, left - _START)
            left, t = left - _START - take, t + take
            if t == pairs[s]:
                s, t = s + 1, 0
        begin.append((s, t))
    return MlaPlan(np.array(begin, np.int32), spans, bool((spans[:, 0] != spans[:, 1]).any()))


def divide_on_device(lengths: Any, splits: int, at: Place) -> MlaPlan:
    """The same for a tensor of lengths, without reading it on the host."""
    plan = MlaPlan(empty(lengths, (splits + 1, 2), "int32"), empty(lengths, (int(lengths.shape[0]), 2), "int32"), True)
    at.kernel(_program, splits)(lengths, plan.begins, plan.spans)
    return plan


def _program(splits: int) -> Any:
    batch = T.dynamic("batch")

    @T.prim_func
    def mla_plan(Lengths: T.Tensor((batch,), "int32"), Begins: T.Tensor((splits + 1, 2), "int32"),
                 Spans: T.Tensor((batch, 2), "int32")):
        with T.Kernel(1, threads=1) as _:
            total = T.alloc_var("int32", init=0)
            s, t, left = [T.alloc_var("int32", init=0) for _ in (0, 1, 2)]
            for i in T.serial(batch):
                total = total + T.max(1, T.ceildiv(Lengths[i], PAIR)) + _START
            for p in T.serial(splits):
                Begins[p, 0], Begins[p, 1] = s, t
                left = T.ceildiv(total, splits) + _START
                while T.And(s < batch, left > _START):
                    if t == 0:
                        Spans[s, 0] = p
                    Spans[s, 1] = p
                    pairs = T.max(1, T.ceildiv(Lengths[s], PAIR))
                    take = T.min(pairs - t, left - _START)
                    left = left - _START - take
                    t = t + take
                    if t == pairs:
                        s = s + 1
                        t = 0
            Begins[splits, 0], Begins[splits, 1] = s, t

    return mla_plan
