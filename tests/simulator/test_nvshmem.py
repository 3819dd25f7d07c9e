"""NVSHMEM's names: the simulators run them and the checks read them as statements of ranks; code for CUDA calls NVSHMEM."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import Call, walk
from tilelang.language.nvshmem import NVSHMEM
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.target.nvshmem import FUNCTIONS
from tilelang.transform.pipeline import lower

HOPPER, N = Target({"kind": "cuda", "arch": "sm_90a"}), 256


def both(program, args, seeds=(None, 1, 2)):
    """The outputs of each rank, the same on both simulators and under all schedules."""
    want, low = run_tile_ranks(program, args), lower(program.func, HOPPER)
    for seed in seeds:
        got = [r.outputs for r in run_device_ranks(low, args, seed=seed)]
        assert all((a[k] == b[k]).all() for a, b in zip(want, got) for k in a), seed
    return want


def ring(form="_block", nbi="", told=True, complete=True):
    """Each PE puts its vector to the next one.  told: with the put's own signal.  complete: T.quiet before another one."""
    signalled, put = getattr(T, f"putmem_signal{nbi}{form}"), getattr(T, f"putmem{nbi}{form}")

    @T.prim_func
    def main(X: T.Tensor((N,), "float32"), S: T.SymmTensor((N,), "float32"), F: T.SymmTensor((1,), "uint64"),
             Y: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=64):
            tx, right = T.get_thread_binding(), (T.get_pe() + 1) % T.get_pe_num()
            if form == "_block" or tx < (32 if form else 1):
                if told:
                    signalled(S[0], X[0], 4 * N, F[0], 1, "add", right)
                else:
                    put(S[0], X[0], 4 * N, right)
            if not told:
                T.sync_threads()
                if tx == 0:
                    if complete:
                        T.quiet()
                    T.signal_op(F[0], 1, "set", right)
            T.signal_wait_until(F[0], "ge", 1)
            T.copy(S, Y)

    return main


def ring_args(ranks):
    return [[np.full(N, r, np.float32), np.zeros(N, np.float32), np.zeros(1, np.uint64), np.zeros(N, np.float32)]
            for r in range(ranks)]


@pytest.mark.parametrize("form, nbi, told", [
    ("", "", True), ("_warp", "_nbi", True), ("_block", "", True), ("_block", "_nbi", False)])
def test_puts_come_with_their_signals(form, nbi, told):
    for r, out in enumerate(both(ring(form, nbi, told), ring_args(3))):
        assert (out["Y"] == (r - 1) % 3).all()


def test_an_asynchronous_put_is_seen_after_quiet():
    with pytest.raises(TileLangError, match="asynchronous put, which nothing has completed") as e:
        lower(ring("_block", "_nbi", False, complete=False).func, HOPPER)
    assert e.value.kind == "rank-order"


def test_a_signal_alone_tells_nothing_of_a_put():
    program = lower(ring("_block", "", False, complete=False).func, HOPPER, {"tl.disable_data_race_check": True})
    found = set()
    for seed in range(4):
        try:
            run_device_ranks(program, ring_args(2), seed=seed)
        except TileLangError as e:
            found.add(e.kind)
    assert found == {"sim-race"}


def test_gets_collectives_and_barriers():
    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), S: T.SymmTensor((8, N), "int32"), Y: T.Tensor((8, N), "int32")):
        with T.Kernel(1, threads=64):
            me, n, tx = T.get_pe(), T.get_pe_num(), T.get_thread_binding()
            T.copy(X, S[0, :])
            T.barrier_all_block()
            T.getmem_block(Y[0, 0], S[0, 0], 4 * N, (me + 1) % n)
            T.broadcast_block(S[1, 0], S[0, 0], 4 * N, n - 1)
            T.fcollect_block(S[2, 0], S[0, 0], 4 * N)
            if tx == 0:
                T.int_p(S[6, 0], me + 7, (me + 1) % n)
                T.barrier_all()
            T.sync_threads()
            T.copy(S[1:7, :], Y[1:7, :])
            T.sync_all_block()

    args = [[np.arange(N, dtype=np.int32) + 1000 * r, np.zeros((8, N), np.int32), np.zeros((8, N), np.int32)] for r in range(3)]
    for r, out in enumerate(both(main, args)):
        y = out["Y"]
        assert (y[0] == args[(r + 1) % 3][0]).all() and (y[1] == args[2][0]).all() and y[6, 0] == (r - 1) % 3 + 7
        assert all((y[2 + k] == args[k][0]).all() for k in range(3))


def test_code_for_cuda_calls_nvshmem_and_nothing_else():
    source = print_kernel(lower(ring().func, HOPPER).kernels[0])
    assert "tl::nvshmemx_putmem_signal_block(&S[0], &X[0], 1024, &F[0], 1ULL, 10, right);" in source
    assert "tl::nvshmem_signal_wait_until(&F[0], 5, 1ULL);" in source and "const float* X" in source
    assert "remote_address" not in source and "wait_signal(" not in source.replace("signal_wait", "")


def test_each_name_calls_a_function_of_nvshmem():
    called = set()
    for fn in [*NVSHMEM.values(), T.barrier_all]:
        line = fn.__doc__.split("Example:\n")[1].strip().replace("P[bx, 0:16]", "")
        text = f"def f(X: T.Tensor((256,), 'float32'), S: T.SymmTensor((256,), 'float32'), F: T.SymmTensor((4,), 'int64'), " \
            f"words: T.SymmTensor((4,), 'int32')):\n    with T.Kernel(1, threads=64):\n        {line}\n"
        program = tilelang.from_source("import tilelang.language as T\n@T.prim_func\n" + text, "f")
        called |= {c.options.name for c in walk(program.func, Call) if c.op == "nvshmem"}
    assert called == FUNCTIONS.keys() - {"nvshmem_broadcastmem"}


@pytest.mark.parametrize("line, kind", [
    ("T.putmem_block(S[0], X[0], 6, 1)", "signal-operand"), ("T.putmem(X[0], S[0], 4, 1)", "not-symmetric"),
    ("T.signal_op(F[0], 1, 'or', 1)", "signal-order"), ("T.signal_wait_until(X[0], 'ge', 1)", "signal-operand"),
    ("T.int_p(S[0], 1, 1)", "signal-operand")])
def test_wrong_operands_are_errors_by_name(line, kind):
    text = "import tilelang.language as T\n@T.prim_func\ndef f(X: T.Tensor((256,), 'float32'), " \
        f"S: T.SymmTensor((256,), 'float32'), F: T.SymmTensor((4,), 'int64')):\n    with T.Kernel(1, threads=64):\n" \
        f"        {line}\n"
    with pytest.raises(TileLangError) as e:
        tilelang.from_source(text, "f")
    assert e.value.kind == kind


def test_without_nvshmem_the_error_says_what_to_install(monkeypatch):
    from tilelang.runtime import nvshmem

    monkeypatch.setattr(nvshmem.importlib.util, "find_spec", lambda name: None)
    nvshmem.folder.cache_clear()
    with pytest.raises(TileLangError, match="nvidia-nvshmem") as e:
        nvshmem.folder()
    assert e.value.kind == "nvshmem-missing" and "pip install" in e.value.hint
    with pytest.raises(TileLangError, match="has not started"):
        nvshmem.enter(None, b".." + nvshmem.STATE)


@pytest.mark.gpu
def test_a_kernel_is_linked_with_the_device_library():
    """Torch's wheels for CUDA bring NVSHMEM and nvJitLink."""
    from tilelang.runtime import nvrtc, nvshmem

    cubin = nvrtc.compile_cubin(print_kernel(lower(ring().func, HOPPER).kernels[0]), "sm_90a")
    assert nvshmem.STATE in cubin.bytes and cubin.spills == 0
