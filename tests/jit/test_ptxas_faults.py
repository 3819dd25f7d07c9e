"""What ptxas says of a kernel decides which schedule is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tilelang.jit import building
from tilelang.jit.artifact import Artifact
from tilelang.jit.requests import make_request
from tilelang.runtime import cuda_cache
from tilelang.runtime.nvrtc import parse_resources
from tilelang.runtime.signature import signature_of

import tilelang
import tilelang.language as T

SM90 = {"kind": "cuda", "arch": "sm_90a"}
LOG = """ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions reading accumulator registers in the function 'second' in line 0
ptxas info    : Compiling entry function 'first' for 'sm_90a'
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 235 registers, used 9 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Used 90 registers, used 1 barriers
"""


def recurrent(stages: int = 2) -> Any:
    """O[c] = Q[c] state; state = state / 2 + K[c]^T V[c]: threads read an accumulator that the next iteration adds to."""
    @T.prim_func
    def main(Q: T.Tensor((256, 64), "float16"), K: T.Tensor((256, 64), "float16"), V: T.Tensor((256, 64), "float16"),
             O: T.Tensor((256, 64), "float16")):
        with T.Kernel(1, threads=128):
            q, k, v, s = [T.alloc_shared((64, 64), "float16") for _ in range(4)]
            state, o = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(state)
            for c in T.Pipelined(4, num_stages=stages):
                T.copy(Q[c * 64:(c + 1) * 64, :], q)
                T.copy(K[c * 64:(c + 1) * 64, :], k)
                T.copy(V[c * 64:(c + 1) * 64, :], v)
                T.copy(state, s)
                T.gemm(q, s, o, clear_accum=True)
                T.copy(o, O[c * 64:(c + 1) * 64, :])
                for i, j in T.Parallel(64, 64):
                    state[i, j] *= 0.5
                T.gemm(k, v, state, transpose_A=True)

    return main


def test_the_log_names_the_kernel_whose_wgmma_are_serialised():
    found = parse_resources(LOG)
    assert found["first"].serialised == "" and found["first"].spills == 12
    assert found["second"].serialised.startswith("C7514: non wgmma instructions reading accumulator registers")


def _artifact(serialised: str, spills: int, overlap: str = "wgmma in flight") -> Artifact:
    kernel = {"serialised": serialised, "spills": spills}
    return Artifact("cuda", "", "", {}, {"kernels": [kernel], "facts": [{"overlap": overlap, "declined": []}]})


@pytest.mark.parametrize("found, taken, compiled", [
    ({"": ("C7514: x", 0), "iteration": ("", 0)}, "iteration", 2),
    ({"": ("C7514: x", 0), "iteration": ("C7518: y", 0), "statement": ("", 0)}, "statement", 3),
    ({"": ("", 4000), "iteration": ("", 800), "statement": ("", 900)}, "iteration", 3),
    ({"": ("", 16)}, "", 1),  # a few bytes outside of the main loop
    ({"": ("C7514: x", 0), "iteration": ("C7514: x", 0), "statement": ("C7514: x", 0)}, "", 3),
])
def test_serialised_and_spilling_schedules_were_kept(found: dict[str, tuple[str, int]], taken: str, compiled: int,
                                                     monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def build(request: Any, sig: Any) -> Artifact:
        asked.append(request.config.get("tl.wgmma_in_flight", ""))
        out = _artifact(*found[asked[-1]])
        out.meta["flight"] = asked[-1]
        return out

    monkeypatch.setattr(building, "_build_cuda", build)
    request = make_request(recurrent(), None, None, SM90, None, None, None)
    best = building.build_cuda(request, signature_of(request.func, None))
    assert best.meta["flight"] == taken and len(asked) == compiled
    assert bool(best.meta["facts"][0]["declined"]) == bool(taken)


def test_what_the_user_asks_for_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "_build_cuda", lambda request, sig: _artifact("C7514: x", 0))
    request = make_request(recurrent(), None, None, SM90, None, {"tl.wgmma_in_flight": "iterations"}, None)
    assert building.build_cuda(request, signature_of(request.func, None)).meta["facts"][0]["declined"] == []


def test_a_cubin_of_a_release_with_other_facts_was_taken_from_the_cache(monkeypatch: pytest.MonkeyPatch):
    cache = cuda_cache.CUDABinaryCache()
    own = cache.key("void f() {}", "sm_90a")
    monkeypatch.setattr(cuda_cache, "fields", lambda _: [])
    assert own != cache.key("void f() {}", "sm_90a")


def test_a_recurrent_loop_had_serialised_wgmma():
    kernel = tilelang.compile(recurrent(), target=SM90)
    assert kernel.report_data["kernels"][0]["serialised"] == "", kernel.report()
    forced = make_request(recurrent(), None, None, SM90, None, {"tl.wgmma_in_flight": "iterations"}, None)
    sources = building.device_source(dataclasses.replace(forced))[1]
    if sources[0] != kernel.get_kernel_source():  # another schedule was taken: the report says why
        assert "ptxas" in kernel.report()


def soft_rows(n: int, threads: int) -> Any:
    @T.prim_func
    def main(X: T.Tensor((4, n), "float16"), Y: T.Tensor((4, n), "float16")):
        with T.Kernel(4, threads=threads) as r:
            x = T.alloc_fragment((1, n), "float32")
            top, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(X[r, 0], x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(1, n):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, n):
                x[i, j] /= total[i] + 1.0
            T.copy(x, Y[r, 0])

    return main


@pytest.mark.parametrize("n, blocks", [(16384, 2), (32768, 2), (4096, 1)])
def test_80_registers_of_512_threads_left_room_for_one_block(n, blocks):
    """16,384 elements fit in 64 registers too; 32,768 are kept in shared memory, and 4,096 need fewer."""
    text = tilelang.compile(soft_rows(n, 512), target=SM90).get_kernel_source()
    assert f"__launch_bounds__(512, {blocks})" in text


def test_48_registers_kept_blocks_away_whose_threads_meet_in_a_loop():
    @T.prim_func
    def main(X: T.Tensor((4, 32768), "float16"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=256) as r:
            x, top = T.alloc_fragment((1, 4096), "float32"), T.alloc_fragment((1,), "float32")
            part, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            T.fill(top, -1e4)
            T.clear(total)
            for k in T.serial(8):
                T.copy(X[r, k * 4096], x)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(1, 4096):
                    x[i, j] = T.exp(x[i, j] - top[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] + part[i]
            for i in T.Parallel(1):
                Y[r] = total[i]

    text = tilelang.compile(main, target=SM90).get_kernel_source()
    assert "__launch_bounds__(256, 1)" not in text


def test_registers_kept_a_second_block_of_a_gemm_away_whose_threads_wait_for_their_loads():
    """Rows of an odd length cannot be copied asynchronously."""
    @T.prim_func
    def f(A: T.Tensor((4096, 4001), "float16"), B: T.Tensor((4096, 4001), "float16"), C: T.Tensor((4096, 4096), "float16")):
        with T.Kernel(32, 32, threads=256) as (bx, by):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((128, 64), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(4001, 64), num_stages=3):
                T.copy(A[by * 128, k * 64], a)
                T.copy(B[bx * 128, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 128, bx * 128])

    assert "__launch_bounds__(256, 2)" in tilelang.compile(f, target=SM90).get_kernel_source()
