"""Attention-like loops with one awkward statement, and what tests ask of each."""

import numpy as np
from sync_mutants import is_faulty, lowered

import tilelang
import tilelang.language as T
from tilelang.ir import Evaluate, Launch, rewrite, seq, walk
from tilelang.simulator import run_device
from tilelang.transform.verify_sync.launch import check_launch

SM90, SM80 = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "cuda", "arch": "sm_80"}


def scores(kind, rows=256, keys=256, dim=64):
    """O = (Q K^T changed) V, in tiles of 128 x 64.  kind: "store", "bias", "mask", "keys" (a mask by numbers of steps)."""
    steps = keys // 64

    @T.prim_func
    def f(Q: T.Tensor((rows, dim), "float16"), K: T.Tensor((keys, dim), "float16"), V: T.Tensor((keys, dim), "float16"),
          X: T.Tensor((rows, keys), "float16"), M: T.Tensor((rows // 128, steps), "int32"),
          O: T.Tensor((rows, dim), "float16")):
        with T.Kernel(rows // 128, threads=256) as b:
            q, k, v = [T.alloc_shared((n, dim), "float16") for n in (128, 64, 64)]
            s, p = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float16")
            o = T.alloc_fragment((128, dim), "float32")
            T.copy(Q[b * 128, 0], q)
            T.clear(o)
            for j in T.Pipelined(steps, num_stages=2):
                if kind in ("mask", "keys"):
                    if M[b, j] > 0:
                        T.copy(K[j * 64, 0], k)
                        T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                        if kind == "keys":
                            for x, y in T.Parallel(128, 64):
                                s[x, y] += T.cast(j * 64 + y, "float32")
                        T.copy(s, p)
                        T.copy(V[j * 64, 0], v)
                        T.gemm(p, v, o)
                else:
                    T.copy(K[j * 64, 0], k)
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    if kind == "store":
                        T.copy(s, X[b * 128:(b + 1) * 128, j * 64:(j + 1) * 64])
                    else:
                        for x, y in T.Parallel(128, 64):
                            s[x, y] += T.cast(X[b * 128 + x, j * 64 + y], "float32")
                    T.copy(s, p)
                    T.copy(V[j * 64, 0], v)
                    T.gemm(p, v, o)
            T.copy(o, O[b * 128, 0])

    return f


def inputs(mask, rows=256, keys=256, dim=64):
    rng = np.random.default_rng(7)
    q, k, v, x = (rng.integers(-1, 2, n).astype(np.float16) for n in ((rows, dim), (keys, dim), (keys, dim), (rows, keys)))
    return [q, k, v, x, np.asarray(mask, np.int32)[:rows // 128], np.zeros((rows, dim), np.float16)]


MASKS = {"none": np.zeros((2, 4)), "one": [[0, 0, 0, 1], [1, 0, 0, 0]], "some": [[1, 0, 1, 1], [0, 1, 1, 0]]}


def agrees(kind, target, mask="none"):
    """The simulator's results are those of the reference interpreter.  Stored scores: two tiles of one persistent block."""
    rows = 256 if kind == "store" and target is SM90 else 128
    want, got = inputs(MASKS[mask], rows), inputs(MASKS[mask], rows)
    tilelang.compile(scores(kind, rows), target="cpu", execution_backend="tile")(*want)
    tilelang.compile(scores(kind, rows), target=target, execution_backend="simulator", pass_configs={
        "tl.persistent": 1} if rows == 256 else None)(*got)
    for a, b in zip(want, got):
        np.testing.assert_array_equal(a, b)


def keeps_warp_roles(kind):
    """The launch of such a program, which has warp roles."""
    (launch,) = walk(lowered("sm_90a", scores(kind), {}).body, Launch)
    assert (launch.plan.pipeline_report or "").startswith("warp groups: 1 loads"), launch.plan.report
    return launch


def dropped_orders(kind):
    """(number of faulty mutants without one wait or barrier, those of them that the verifier calls ordered)."""
    func, args = lowered("sm_90a", scores(kind), {"tl.persistent": 1}), inputs(MASKS["some"])
    want, wrong, dropped = run_device(func, args).outputs, [], 0
    for s in walk(func.body, Evaluate):
        if s.call.op in ("named_barrier", "bulk_wait", "mbarrier_wait"):
            mutant = rewrite(func, lambda n, s=s: seq() if n is s else None)
            (launch,) = walk(mutant.body, Launch)
            faulty, text = is_faulty(mutant, args, want), check_launch(launch)[0]
            dropped += faulty
            wrong += [str(s)] if faulty and text.startswith("ordered") else []
    return dropped, wrong
