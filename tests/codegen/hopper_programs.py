"""Hopper kernels in phase DEVICE, written by hand: TMA copies, and a gemm with a producer warp group and wgmma.

The gemm is what warp specialisation and the lowering are to come to.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from handmade import at, evaluate, local, ramp, serial, tensor, thread_vars, unrolled

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Func, If, Launch, Store, Var, call, cast, const, dtype, fresh, load,
                         logical, seq, LaunchPlan, BufferFacts, FuncFacts)
from tilelang.layout import SwizzledBoxes, swizzled_box_layout, boxes_of
from tilelang.target.tensor_map import TensorMap
from tilelang.transform.lower.device_program import split_host
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.registers.pack_conversions import pack_conversions


def shared(name: str, elements: int, dt: str) -> Buffer:
    return Buffer(name, (elements,), dtype(dt), "shared.dyn", facts=BufferFacts(align=1024))


def barriers(name: str, counts: tuple[int, ...]) -> Buffer:
    return Buffer(name, (len(counts),), dtype("uint64"), "shared.barrier", facts=BufferFacts(arrive=tuple(counts)))


def u32(e):
    return cast(e, "uint32")


def program(name: str, tensors, grid, block_vars, threads: int, tvars, body, scalars=(), **plan) -> Func:
    """A Func of one launch; tensors are its parameters."""
    launch = Launch(tuple(const(g) if isinstance(g, int) else g for g in grid), block_vars, (threads, 1, 1), tvars, body,
                    LaunchPlan(**plan))
    handles = tuple(Var(t.name + "_handle", dtype("handle")) for t in tensors)
    return Func(name, (*handles, *scalars), tuple(zip(handles, tensors)), launch, facts=FuncFacts(phase="DEVICE"))


def kernel_of(func: Func):
    """The one kernel of a program."""
    (kernel,) = split_host(pack_conversions(func, PassContext())).kernels
    return kernel


def in_groups(first: int, count: int):
    return call("in_warp_groups", (), "bool", first=first, count=count)


def elected():
    return call("elect_one", (), "bool")


def setup(tx, *rings: Buffer):
    """Barriers initialised by one thread, seen by all."""
    inits = [evaluate("mbarrier_init", at(ring, i), const(n, "uint32"))
             for ring in rings for i, n in enumerate(ring.facts.arrive)]
    return seq(If(tx < 1, seq(*inits, evaluate("fence_mbarrier_init"))), evaluate("sync_threads"))


def copy(m, n, rows=64, columns=128, dt="float16", width=128, out="tma", hint=None) -> Func:
    """B = A by tiles of rows x columns through shared memory; out: "tma", or "plain" stores from the panels."""
    A, B = tensor("A", (m, n), dt), tensor("B", (m, n), dt)
    tx, ty, tz = thread_vars()
    bx, by = fresh("bx"), fresh("by")
    layout = swizzled_box_layout((rows, columns), dt, width)
    p = boxes_of(layout, dt)
    tile, bar = shared("tile", layout.size, dt), barriers("ready", (1,))
    maps = [TensorMap(f"{t.name}_map", t, (p.boxes()[0].columns, p.boxes()[0].rows), p.swizzle) for t in (A, B)]
    size = dtype(dt).bytes
    more = {} if hint is None else {"cache_hint": hint}

    def boxes(op, extra):
        return [evaluate(op, at(tile, b.offset // size), *extra, bx * columns + b.column, by * rows + b.row,
                         map=maps[op != "tma_load"].name, **(more if op == "tma_load" else {})) for b in p.boxes()]

    bring = seq(evaluate("mbarrier_arrive_expect_tx", at(bar, 0), const(p.transaction_bytes, "uint32")),
                *boxes("tma_load", (at(bar, 0),)))
    if out == "tma":
        leave = seq(evaluate("sync_threads"), If(tx < 32, If(elected(), seq(
            *boxes("tma_store", ()), evaluate("bulk_commit"), evaluate("bulk_wait", n=0, read=True)))))
    else:
        i = fresh("i")
        r, c = i // columns, i % columns
        row, column = by * rows + r, bx * columns + c
        leave = serial(rows * columns // 128, lambda k: seq(Bind(i, k * 128 + tx), If(
            logical("and", row < A.shape[0], column < A.shape[1]),
            Store(B, (row, column), load(tile, (layout.offset((r, c)),))))), "k")
    body = seq(Alloc(tile), Alloc(bar), setup(tx, bar), If(tx < 32, If(elected(), bring)),
               evaluate("mbarrier_wait", at(bar, 0), const(0, "uint32")), leave)
    used = maps if out == "tma" else maps[:1]
    return program("copy", (A, B), ((n + columns - 1) // columns, (m + rows - 1) // rows), (bx, by), 128, (tx, ty, tz),
                   body, tensor_maps=tuple(x.entry for x in used), shared_offsets=((tile, 0), (bar, p.bytes)),
                   shared_bytes=p.bytes + 128)


STAGES, BM, BN, BK = 4, 128, 128, 64


def gemm(m, n, k, dt="float16", trans_b=True, acc="float32", out="float16") -> Func:
    """C = A @ B (B is N x K with trans_b): tiles of 128 x 128 x 64, a ring of 4 stages, one producer and two consumers.

    Threads 0..255 are the consumers, 64 rows each; 256..383 the producer.  Every extent may be ragged.
    """
    A = tensor("A", (m, k), dt)
    B, C = tensor("B", (n, k) if trans_b else (k, n), dt), tensor("C", (m, n), out)
    size = dtype(dt).bytes
    BK = 128 // size  # one panel of K
    tx, ty, tz = thread_vars()
    bx, by = fresh("bx"), fresh("by")
    a_layout = swizzled_box_layout((STAGES, BM, BK), dt, 128)
    b_layout = swizzled_box_layout((STAGES, BN, BK) if trans_b else (STAGES, BK, BN), dt, 128)
    c_layout = swizzled_box_layout((BM, BN), out, 128)
    pa, pb, pc = boxes_of(a_layout, dt), boxes_of(b_layout, dt), boxes_of(c_layout, out)
    As, Bs, Cs = shared("A_shared", a_layout.size, dt), shared("B_shared", b_layout.size, dt), shared(
        "C_shared", c_layout.size, out)
    full, empty = barriers("full", (1,) * STAGES), barriers("empty", (8,) * STAGES)
    c_box = SwizzledBoxes(64, BN, 16, 128)  # what one consumer stores: its rows of a panel
    A_map = TensorMap("A_map", A, (BK, BM), 128, "zero", 128)
    B_map = TensorMap("B_map", B, (pb.boxes()[0].columns, pb.boxes()[0].rows), 128, "zero", 128)
    C_map = TensorMap("C_map", C, (c_box.box_columns, 64), 128)
    steps = (k + BK - 1) // BK

    def producer_step(it):
        s = fresh("s")
        bar = at(full, s)
        a_boxes = [evaluate("tma_load", at(As, s * (pa.bytes // size) + b.offset // size), bar, it * BK + b.column,
                            by * BM + b.row, map="A_map") for b in pa.boxes()]

        def b_place(b):
            return (it * BK + b.column, bx * BN + b.row) if trans_b else (bx * BN + b.column, it * BK + b.row)

        b_boxes = [evaluate("tma_load", at(Bs, s * (pb.bytes // size) + b.offset // size), bar, *b_place(b), map="B_map")
                   for b in pb.boxes()]
        bytes_ = pa.transaction_bytes + pb.transaction_bytes
        return seq(Bind(s, it % STAGES), evaluate("mbarrier_wait", at(empty, s), u32(it // STAGES % 2 ^ 1)),
                   evaluate("mbarrier_arrive_expect_tx", bar, const(bytes_, "uint32")), *a_boxes, *b_boxes)

    producer = seq(evaluate("set_max_nreg", n=40, inc=False),
                   If(tx < 288, If(elected(), seq(evaluate("tma_prefetch", map="A_map"),
                                                  evaluate("tma_prefetch", map="B_map"),
                                                  serial(steps, producer_step, "it")))))

    ptx = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3": "e4m3", "float32": "f32"}
    row = f"wgmma.m64n{BN}k{32 // size}.{ptx[acc]}.{ptx[dt]}.{ptx[dt]}"
    b_major = "k" if trans_b else "mn"
    da, db = pa.descriptor("k"), pb.descriptor(b_major)
    acc_regs, pieces = local("C_local", BN // 2, acc), local("C_out", 8, out)
    a_desc, b_desc, g = fresh("a_desc", "uint64"), fresh("b_desc", "uint64"), fresh("group")

    def consumer_step(it):
        s = fresh("s")

        def step(ks):
            kk = ks * (32 // size)
            a = a_desc + cast(s * (pa.bytes >> 4) + (pa.offset("k", 0, kk) >> 4), "uint64")
            b = b_desc + cast(s * (pb.bytes >> 4) + (pb.offset(b_major, 0, kk) >> 4), "uint64")
            return evaluate("wgmma", at(acc_regs, 0), a, b, logical("or", it > 0, ks > 0) if ks == 0 else const(True),
                            row=row, a_major="k", b_major=b_major)

        release = If(logical("and", it > 0, (tx % 32) < 1), evaluate("mbarrier_arrive", at(empty, (it - 1) % STAGES)))
        return seq(Bind(s, it % STAGES), evaluate("mbarrier_wait", at(full, s), u32(it // STAGES % 2)),
                   evaluate("wgmma_fence"), *(step(ks) for ks in range(BK * size // 32)), evaluate("wgmma_commit"),
                   evaluate("wgmma_wait", n=1), release)

    def piece(j):
        """16 columns of the accumulator to the panels of C."""
        r = g * 64 + tx // 32 % 4 * 16 + tx % 16
        column = j * 16 + tx % 32 // 16 * 8
        values = load(acc_regs, (ramp(j * 8, 8),))
        return seq(Store(pieces, (ramp(0, 8),), cast(values, dtype(out).with_lanes(8))),
                   evaluate("stmatrix", at(Cs, c_layout.offset((r, column))), at(pieces, 0), num=4, trans=False))

    stores = [evaluate("tma_store", at(Cs, p * (pc.box_row_bytes // 2) + g * (64 * pc.box_columns)),
                       bx * BN + p * pc.box_columns, by * BM + g * 64, map="C_map") for p in range(pc.count)]
    consumer = seq(
        evaluate("set_max_nreg", n=232, inc=True), Alloc(acc_regs), Alloc(pieces),
        Bind(g, tx // 128),
        Bind(a_desc, call("wgmma_descriptor", (at(As, 0), u32(g * pa.offset("k", 64, 0))), "uint64", lbo=da.lbo,
                          sbo=da.sbo, swizzle=da.swizzle)),
        Bind(b_desc, call("wgmma_descriptor", (at(Bs, 0),), "uint64", lbo=db.lbo, sbo=db.sbo, swizzle=db.swizzle)),
        serial(steps, consumer_step, "it"),
        evaluate("wgmma_wait", n=0), evaluate("wgmma_pin", at(acc_regs, 0), count=BN // 2),
        unrolled(BN // 16, piece, "j"), evaluate("fence_proxy_async"),
        evaluate("named_barrier", g + 1, const(128)),
        If(tx % 128 < 32, If(elected(), seq(*stores, evaluate("bulk_commit"), evaluate("bulk_wait", n=0, read=True)))))

    body = seq(Alloc(As), Alloc(Bs), Alloc(Cs), Alloc(full), Alloc(empty), setup(tx, full, empty),
               If(in_groups(2, 1), producer, consumer))
    sizes, offset, offsets = (STAGES * pa.bytes, STAGES * pb.bytes, pc.bytes, 128, 128), 0, []
    for b, nbytes in zip((As, Bs, Cs, full, empty), sizes):
        offsets.append((b, offset))
        offset += nbytes
    return program("gemm", (A, B, C), ((n + BN - 1) // BN, (m + BM - 1) // BM), (bx, by), 384, (tx, ty, tz), body,
                   tensor_maps=(A_map.entry, B_map.entry, C_map.entry), shared_offsets=tuple(offsets),
                   shared_bytes=offset)


__all__ = ["AddressOf", "copy", "elected", "gemm", "in_groups", "kernel_of", "program"]
