"""Mutants of the synchronisation of kernels: does the verifier refute what the device simulator finds faulty?

    python tests/transform/sync_mutants.py                 a table of all kernels (minutes)
    python tests/transform/sync_mutants.py scatter gemm    those whose names contain one of these
    python tests/transform/sync_mutants.py --plain         the plain programs of benchmarks/suite at small sizes, on sm_90a (an
                                                           hour; --every 20: that part of each program's mutants)

A mutant is a lowered kernel in which one statement that orders threads is dropped or altered.  It is faulty where the
simulator reports an error, or another result than that of the kernel.  Faulty mutants that the verifier calls ordered are
listed; so are those that it refutes for certain and the simulator calls right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from programs import attention, gemm, row_reduce, softmax, transpose

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, Func, Launch, binary, const, dtype, replace, rewrite, seq, walk
from tilelang.ir.build import call
from tilelang.ir.dtype import numpy_dtype
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.verify_sync.launch import check_launch

DROPPED = ("sync_threads", "named_barrier", "named_barrier_arrive", "mbarrier_wait", "mbarrier_arrive",
           "mbarrier_arrive_expect_tx", "mbarrier_init", "fence_mbarrier_init", "fence_proxy_async", "wgmma_fence",
           "wgmma_commit", "wgmma_wait", "cp_async_commit", "cp_async_wait", "bulk_commit", "bulk_wait", "sync_warp")
COUNTED = ("cp_async_wait", "wgmma_wait", "bulk_wait")  # their options hold how many groups may stay in flight


def scatter():
    @T.prim_func
    def f(P: T.Tensor((256,), "int32"), A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"),
          C: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            U, V = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            T.copy(A, V)
            for i in T.Parallel(256):
                U[P[i * 5 % 256]] = V[i * 3 % 256]
            for i in T.Parallel(256):
                B[i] = U[255 - i]
                V[i] = U[i]
            for i in T.Parallel(256):
                U[P[i * 5 % 256]] = V[i * 3 % 256]
            for i in T.Parallel(256):
                C[i] = U[(i * 3) % 256]

    return f


def waits(blocks=5):
    """Copies of three stages that the program waits for by hand."""
    @T.prim_func
    def f(A: T.Tensor((blocks, 256), "float32"), O: T.Tensor((blocks, 256), "float32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((3, 256), "float32")
            T.async_copy(A[0, :], S[0, :])
            T.async_copy(A[1, :], S[1, :])
            for k in T.serial(blocks):
                if k + 1 < blocks:
                    T.ptx_wait_group(1)
                else:
                    T.ptx_wait_group(0)
                T.sync_threads()
                for i in T.Parallel(256):
                    O[k, i] = S[k % 3, 255 - i]
                if k + 2 < blocks:
                    T.async_copy(A[k + 2, :], S[(k + 2) % 3, :])

    return f


def handed_over():
    @T.prim_func
    def f(A: T.Tensor((4, 128), "int32"), O: T.Tensor((4, 128), "int32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((128,), "int32")
            with T.ws(1):
                for k in range(4):
                    T.sync_threads(4, 256)
                    T.copy(A[k, :], S)
                    T.named_barrier_arrive(3, 256)
            with T.ws(0):
                for k in range(4):
                    T.named_barrier_arrive(4, 256)
                    T.sync_threads(3, 256)
                    for i in T.Parallel(128):
                        O[k, i] = S[127 - i]

    return f


def ring(stages=2, k=256, bk=32):
    """A @ B.T of 64 x 64: warp group 1 loads, warp group 0 computes and stores by TMA."""
    @T.prim_func
    def f(A: T.Tensor((64, k), "float16"), B: T.Tensor((64, k), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((stages, 64, bk), "float16"), T.alloc_shared((stages, 64, bk), "float16")
            Cs, Cf = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([128] * stages)
            with T.ws(1):
                for s in T.serial(k // bk):
                    T.mbarrier_wait_parity(empty[s % stages], (s // stages + 1) % 2)
                    T.tma_copy(A[0:64, s * bk:(s + 1) * bk], As[s % stages, :, :], barrier=full[s % stages])
                    T.tma_copy(B[0:64, s * bk:(s + 1) * bk], Bs[s % stages, :, :], barrier=full[s % stages])
                    T.mbarrier_arrive(full[s % stages])
            with T.ws(0):
                T.clear(Cf)
                for s in T.serial(k // bk):
                    T.mbarrier_wait_parity(full[s % stages], s // stages % 2)
                    T.wgmma_gemm(As[s % stages, :, :], Bs[s % stages, :, :], Cf, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[s % stages])
                T.copy(Cf, Cs)
                T.fence_proxy_async()
                T.sync_threads(3, 128)
                T.tma_copy(Cs, C)
                T.tma_store_wait(0)

    return f


# name -> (architecture, program, pass configs)
KERNELS: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "gemm of one stage": ("sm_80", lambda: gemm(m=64, n=64, k=96, bm=64, bn=64, bk=32, stages=1), {}),
    "gemm of three stages": ("sm_80", lambda: gemm(m=64, n=64, k=224, bm=64, bn=64, bk=32, stages=3), {}),
    "softmax": ("sm_80", lambda: softmax(m=2, n=256, rows=1), {}),
    "row_reduce": ("sm_80", lambda: row_reduce(m=2, n=256, rows=1), {}),
    "transpose": ("sm_80", lambda: transpose(m=64, n=64), {}),
    "attention": ("sm_80", lambda: attention(1, 1, 128, 32, bm=64, bn=32), {}),
    "scatter": ("sm_80", scatter, {}),
    "waits by hand": ("sm_80", waits, {}),
    "hopper gemm": ("sm_90a", lambda: gemm(m=64, n=64, k=256, bm=64, bn=64, bk=32, stages=2, tb=True), {}),
    "hopper gemm without roles": ("sm_90a", lambda: gemm(m=64, n=64, k=256, bm=64, bn=64, bk=32, stages=2, tb=True),
                                  {"tl.disable_warp_specialized": True}),
    "hopper attention": ("sm_90a", lambda: attention(1, 1, 192, 64, bm=64, bn=64, stages=2), {}),
    "hopper causal attention": ("sm_90a", lambda: attention(1, 1, 256, 64, causal=True, bm=64, bn=64, stages=2), {}),
    "named barriers": ("sm_90a", handed_over, {}),
    "ring by hand": ("sm_90a", ring, {}),
}


def lowered(arch: str, program: Any, config: dict[str, Any]) -> Func:
    """A program as the verifier gets it."""
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p.__name__ != "verify_sync"]
    return run_passes(program.func, passes, PassContext(Target({"kind": "cuda", "arch": arch}), config))


def arguments(program: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    out = []
    for _, b in program.func.buffers:
        shape, kind = tuple(map(int, b.shape)), numpy_dtype(b.dtype)
        out.append(rng.permutation(shape[0]).astype(kind) if kind == np.int32 and len(shape) == 1
                   else rng.integers(-3, 4, shape).astype(kind))
    return out


def mutants(launch: Launch) -> Iterator[tuple[str, Any, Any]]:
    """(mutation, statement, what it becomes)."""
    for s in walk(launch, Evaluate):
        c, op = s.call, s.call.op
        if op in DROPPED:
            yield f"drop {op}", s, seq()
        if op in COUNTED:
            for more in (1, 2):
                yield f"{op} n+{more}", s, replace(s, call=call(op, (), "void", n=c.options.n + more))
        if op == "mbarrier_init":
            for more in (1, -1):
                yield f"{op} {more:+}", s, replace(s, call=replace(c, args=(c.args[0], binary("add", c.args[1], const(more)))))
        if op in ("mbarrier_arrive_expect_tx", "mbarrier_expect_tx"):
            for more in (128, -128):
                yield f"{op} {more:+}", s, replace(s, call=replace(c, args=(c.args[0], binary("add", c.args[1], const(more)))))
        if op == "mbarrier_wait":
            other = binary("bitxor", c.args[1], const(1, dtype(c.args[1].dtype)))
            yield "parity flipped", s, replace(s, call=replace(c, args=(c.args[0], other)))


def kernel(name: str) -> tuple[Func, list[np.ndarray]]:
    """A lowered kernel and arguments of a call: one of KERNELS, or a plain program."""
    if name in KERNELS:
        arch, program, config = KERNELS[name]
        made = program()
        return lowered(arch, made, config), arguments(made)
    plain = corpus()[name]
    made, tensors = plain.program(**plain.small), plain.make(plain.small, "cpu")
    return lowered("sm_90a", made, plain.config), [
        tensors[n].contiguous().flatten().view(_bytes()).numpy().view(numpy_dtype(b.dtype)).reshape(tensors[n].shape)
        for n, (_, b) in zip(plain.tensors(**plain.small), made.func.buffers)]


def corpus() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from suite.plain import CORPUS

    return CORPUS


def _bytes() -> Any:
    import torch

    return torch.uint8


def is_faulty(func: Func, args: list[np.ndarray], want: dict[str, np.ndarray] | None) -> bool:
    try:
        got = run_device(func, args).outputs
    except TileLangError as e:
        if not e.kind.startswith("sim-"):
            raise
        return True
    return want is not None and not all(np.array_equal(got[k], want[k], equal_nan=True) for k in want)


def judge(name: str, only: Callable[[int], bool] = lambda k: True) -> list[tuple[str, bool, bool, bool, Any]]:
    """(mutation, faulty on the simulator, refuted by the verifier, refuted for certain, place) of each mutant of a kernel."""
    func, args = kernel(name)
    (launch,) = walk(func.body, Launch)
    if not any(True for _ in mutants(launch)):
        return []
    verdict, faults = check_launch(launch)
    assert verdict.startswith("ordered") and not faults, (name, verdict)
    want = run_device(func, args).outputs
    out = []
    for k, (mutation, s, other) in enumerate(mutants(launch)):
        if only(k):
            mutant = rewrite(func, lambda n, s=s, other=other: other if n is s else None)
            (changed,) = walk(mutant.body, Launch)
            verdict, faults = check_launch(changed)
            out.append((mutation, is_faulty(mutant, args, want), not verdict.startswith("ordered"),
                        any(f.exact for f in faults), s.span))
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*")
    p.add_argument("--plain", action="store_true")
    p.add_argument("--every", type=int, default=1)
    o = p.parse_args()
    counts: dict[str, Counter[str]] = {}
    for turn, name in enumerate(corpus() if o.plain else KERNELS):
        if o.names and not any(w in name for w in o.names):
            continue
        start = time.perf_counter()
        rows = judge(name, lambda k, turn=turn: (k + turn) % o.every == 0)
        print(f"{name}: {len(rows)} mutants, {time.perf_counter() - start:.0f} s", flush=True)
        for mutation, faulty, refuted, certain, span in rows:
            row = counts.setdefault(mutation, Counter())
            row.update(all=1, faulty=faulty, refuted=refuted, missed=faulty and not refuted)
            if faulty and not refuted:
                print(f"    missed: {mutation} ({span})")
            if certain and not faulty:
                print(f"    refuted, but the simulator finds nothing: {mutation} ({span})")
    total = sum(counts.values(), Counter())
    for mutation, row in (*sorted(counts.items()), ("together", total)):
        print(f"{mutation:32} {row['all']:5} {row['refuted']:5} refuted {row['faulty']:5} faulty {row['missed']:5} missed")


if __name__ == "__main__":
    main()
