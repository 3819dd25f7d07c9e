"""disjoint_tiles: output tiles that use the bytes of drained stages in each iteration of the program's own outer loop."""

import numpy as np
import pytest
from sync_mutants import arguments, is_faulty, lowered

import tilelang
import tilelang.language as T
from tilelang.ir import Evaluate, Launch, rewrite, seq, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.memory.disjoint_tiles import disjoint_tiles
from tilelang.transform.verify_sync.launch import check_launch

SM90, SM80 = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "cuda", "arch": "sm_80"}
LIMIT = {"sm_90a": 232448, "sm_80": 166912}
WIDE, NARROW = dict(bn=256, stages=4, threads=256), dict(bn=128, stages=5, threads=128)  # beyond a block of sm_90, of sm_80


def gemm(m=256, n=512, k=128, bn=256, stages=4, threads=256):
    """Tiles of a block in a loop."""
    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            A_s, B_s = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, bn), "float16")
            C_s, c = T.alloc_shared((128, bn), "float32"), T.alloc_fragment((128, bn), "float32")
            for t in T.serial((m // 128) * (n // bn)):
                y, x = t // (n // bn), t % (n // bn)
                T.clear(c)
                for i in T.Pipelined(k // 64, num_stages=stages):
                    T.copy(A[y * 128, i * 64], A_s)
                    T.copy(B[i * 64, x * bn], B_s)
                    T.gemm(A_s, B_s, c)
                T.copy(c, C_s)
                T.copy(C_s, C[y * 128, x * bn])

    return f


def persistent(m=256, n=512, k=128, bn=256, stages=4, threads=256):
    """The same by T.Persistent, with buffers of the iteration."""
    @T.prim_func
    def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(2, threads=threads) as b:
            A_s, B_s = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, bn), "float16")
            C_s, c = T.alloc_shared((128, bn), "float32"), T.alloc_fragment((128, bn), "float32")
            for y, x in T.Persistent([m // 128, n // bn], 2, b):
                T.clear(c)
                for i in T.Pipelined(k // 64, num_stages=stages):
                    T.copy(A[y * 128, i * 64], A_s)
                    T.copy(B[i * 64, x * bn], B_s)
                    T.gemm(A_s, B_s, c)
                T.copy(c, C_s)
                T.copy(C_s, C[y * 128, x * bn])

    return f


def grouped(bn=256, stages=4, threads=256):
    """A while loop over tiles of groups, whose lengths are data: some have no iteration."""
    @T.prim_func
    def f(A: T.Tensor((640, 192), "float16"), B: T.Tensor((2, 192, bn), "float16"), G: T.Tensor((5,), "int32"),
          L: T.Tensor((5,), "int32"), C: T.Tensor((640, bn), "float32")):
        with T.Kernel(1, threads=threads) as b:
            A_s, B_s = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, bn), "float16")
            C_s, c = T.alloc_shared((128, bn), "float32"), T.alloc_fragment((128, bn), "float32")
            t = T.alloc_var("int32", init=b)
            while t < 5:
                T.clear(c)
                for i in T.Pipelined(L[t], num_stages=stages):
                    T.copy(A[t * 128, i * 64], A_s)
                    T.copy(B[G[t], i * 64, 0], B_s)
                    T.gemm(A_s, B_s, c)
                T.copy(c, C_s)
                T.copy(C_s, C[t * 128, 0])
                t = t + 1

    return f


def attention(heads=128, keys=128, dim=512, rows=64, stages=2, threads=256):
    """Latent attention of many query heads: a block takes one tile of heads after another."""
    scale = dim ** -0.5 * 1.44269504

    @T.prim_func
    def f(Q: T.Tensor((heads, dim), "float16"), KV: T.Tensor((keys, dim), "float16"), Out: T.Tensor((heads, dim), "float16")):
        with T.Kernel(1, threads=threads):
            Q_s, KV_s = T.alloc_shared((rows, dim), "float16"), T.alloc_shared((64, dim), "float16")
            S_s, O_s = T.alloc_shared((rows, 64), "float16"), T.alloc_shared((rows, dim), "float16")
            s, o = T.alloc_fragment((rows, 64), "float32"), T.alloc_fragment((rows, dim), "float32")
            m, last, part, total = (T.alloc_fragment((rows,), "float32") for _ in range(4))
            for h in T.serial(heads // rows):
                T.copy(Q[h * rows, 0], Q_s)
                T.fill(o, 0)
                T.fill(total, 0)
                T.fill(m, -T.infinity("float32"))
                for k in T.Pipelined(keys // 64, num_stages=stages):
                    T.copy(KV[k * 64, 0], KV_s)
                    T.clear(s)
                    T.gemm(Q_s, KV_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    T.copy(m, last)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(rows):
                        last[i] = T.exp2(last[i] * scale - m[i] * scale)
                    for i, j in T.Parallel(rows, 64):
                        s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
                    T.reduce_sum(s, part, dim=1)
                    T.copy(s, S_s)
                    for i in T.Parallel(rows):
                        total[i] = total[i] * last[i] + part[i]
                    for i, j in T.Parallel(rows, dim):
                        o[i, j] *= last[i]
                    T.gemm(S_s, KV_s, o, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(rows, dim):
                    o[i, j] /= total[i]
                T.copy(o, O_s)
                T.copy(O_s, Out[h * rows, 0])

    return f


def carried(stages=4):
    """The output tile of an iteration is read by the next one: it keeps its bytes."""
    @T.prim_func
    def f(A: T.Tensor((512, 128), "float16"), B: T.Tensor((128, 256), "float16"), C: T.Tensor((512, 256), "float32")):
        with T.Kernel(1, threads=256):
            A_s, B_s = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 256), "float16")
            C_s, c = T.alloc_shared((128, 256), "float32"), T.alloc_fragment((128, 256), "float32")
            T.clear(C_s)
            for t in T.serial(4):
                T.clear(c)
                for i in T.Pipelined(2, num_stages=stages):
                    T.copy(A[t * 128, i * 64], A_s)
                    T.copy(B[i * 64, 0], B_s)
                    T.gemm(A_s, B_s, c)
                for i, j in T.Parallel(128, 256):
                    C_s[i, j] = C_s[i, j] + c[i, j]
                T.copy(C_s, C[t * 128, 0])

    return f


def expected(program, args):
    x = [np.asarray(a).astype(np.float32 if np.asarray(a).dtype.kind == "f" else np.int64) for a in args]
    if program is attention:
        s = x[0] @ x[1].T * 512 ** -0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ x[1]
    if program is not grouped:
        return x[0] @ x[1]
    return np.concatenate([x[0][t * 128:t * 128 + 128, :64 * n] @ x[1][g][:64 * n]
                           for t, (g, n) in enumerate(zip(x[2], x[3]))])


def inputs(program, func):
    args = arguments(func)
    if program is grouped:
        args[2][:], args[3][:] = [1, 0, 1, 1, 0], [2, 0, 1, 0, 3]
    return args


def launch_of(func):
    (launch,) = walk(func.body, Launch)
    return launch


CASES = [(program, arch, kw) for arch, kw in (("sm_90a", WIDE), ("sm_80", NARROW)) for program in (gemm, persistent, grouped)]


@pytest.mark.parametrize("program, arch, kw", [*CASES, (attention, "sm_90a", {})],
                         ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""))
def test_an_output_tile_in_a_loop_did_not_use_the_bytes_of_the_stages(program, arch, kw):
    """It was refused: "the kernel needs 327840 bytes of shared memory, a block has 232448"."""
    func = lowered(arch, program(**kw), {})
    launch = launch_of(func)
    assert launch.plan.reuse and launch.plan.shared_bytes <= LIMIT[arch]
    assert sum(b.size * b.dtype.bytes for b, _ in launch.plan.shared_offsets) > LIMIT[arch]
    text, faults = check_launch(launch)
    assert text.startswith("ordered") and faults == []
    assert bool(launch.num_threads > kw.get("threads", 256)) == (arch == "sm_90a")  # a producer warp group
    args = inputs(program, program(**kw))
    got = list(run_device(func, args).outputs.values())[-1]
    close = dict(atol=2e-2) if program is attention else dict(rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.astype(np.float32), expected(program, args), **close)


@pytest.mark.parametrize("program", [gemm, grouped, attention], ids=lambda f: f.__name__)
def test_programs_on_the_reference_interpreter_and_the_cpu(program):
    args = inputs(program, program())
    want, close = expected(program, args), dict(atol=2e-2) if program is attention else dict(rtol=1e-6, atol=1e-6)
    got = list(run_tile(program().func, args).values())[-1]
    np.testing.assert_allclose(got.astype(np.float32), want, **close)
    out = [np.array(a) for a in args]
    tilelang.compile(program(), target="cpu")(*out)
    np.testing.assert_allclose(out[-1].astype(np.float32), want, **close)


@pytest.mark.parametrize("program, arch, kw", [CASES[0], CASES[2], CASES[5], (attention, "sm_90a", {})],
                         ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""))
def test_cubins(program, arch, kw):
    assert tilelang.compile(program(**kw), target={"kind": "cuda", "arch": arch}).get_kernel_source()


def test_a_producer_waits_for_the_output_tile_only_where_the_stages_lend_their_bytes():
    func = lowered("sm_90a", gemm(**WIDE), {})
    assert "drained" in {b.name for b, _ in launch_of(func).plan.shared_offsets}
    for program in (gemm(bn=128), attention()):  # one fits; in the other, the output tile takes the place of the queries
        assert "drained" not in {b.name for b, _ in launch_of(lowered("sm_90a", program, {})).plan.shared_offsets}


def test_dropped_orders_between_iterations_are_refuted():
    """Without the wait for the consumers, the next tile's loads land in the output tile."""
    func, args = lowered("sm_90a", gemm(**WIDE), {}), inputs(gemm, gemm(**WIDE))
    want, wrong = run_device(func, args).outputs, 0
    for s in walk(launch_of(func), Evaluate):
        if s.call.op in ("mbarrier_wait", "bulk_wait", "named_barrier", "fence_proxy_async"):
            mutant = rewrite(func, lambda n, s=s: seq() if n is s else None)
            text = check_launch(launch_of(mutant))[0]
            assert not is_faulty(mutant, args, want) or not text.startswith("ordered"), s
            wrong += not text.startswith("ordered")
    assert wrong >= 5


def test_a_tile_that_an_iteration_reads_from_an_earlier_one_keeps_its_bytes():
    assert "compiled without some pipeline stages" in tilelang.compile(carried(), target=SM90).report()
    args = arguments(carried(2))
    got = run_device(lowered("sm_90a", carried(2), {}), args).outputs["C"]
    tiles = (args[0].astype(np.float32) @ args[1].astype(np.float32)).reshape(4, 128, 256)
    np.testing.assert_allclose(got.reshape(4, 128, 256), np.cumsum(tiles, 0), rtol=1e-6)


def test_pairs_are_those_whose_values_never_meet():
    def names(program):
        cx = PassContext(Target(SM90), {})
        func = run_passes(program.func, (*TILE_PASSES, *DEVICE_PASSES[:DEVICE_PASSES.index(disjoint_tiles) + 1]), cx)
        return [(a.name, b.name) for a, b in launch_of(func).plan.disjoint]

    own = [(x, x) for x in ("A_s", "B_s", "C_s")]  # no iteration reads what an earlier one left
    assert names(gemm()) == [("A_s", "C_s"), ("B_s", "C_s"), *own]
    assert names(carried()) == own[:2]
    assert ("Q_s", "O_s") in names(attention()) and ("Q_s", "KV_s") not in names(attention())
