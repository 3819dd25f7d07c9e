"""T.gemm_sp (SparseGemm) on sm_90a, by wgmma.mma_async.sp: simulator and reference against a dense product."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from covering import every_pair

import tilelang.language as T
from tilelang.ir import AddressOf, Call, Load, convert, walk
from tilelang.jit.building import _ptxas_faults
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.target.wgmma import WGMMA_ROWS, expand
from tilelang.transform.pipeline import lower

H200 = Target({"kind": "cuda", "arch": "sm_90a"})
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
COLUMNS = {"uint8": 8, "int16": 16, "int32": 32}  # that an element of metadata describes


def program(m, n, k, bm, bn, bk, dtype, meta, te, tb, stages=2, threads=128):
    f, acc = COLUMNS[meta], "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def sparse(A: T.Tensor((m, k // 2), dtype), E: T.Tensor((k // f, m) if te else (m, k // f), meta),
               B: T.Tensor((n, k) if tb else (k, n), dtype), C: T.Tensor((m, n), acc)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, bk // 2), dtype)
            Es = T.alloc_shared((bk // f, bm) if te else (bm, bk // f), meta)
            Bs = T.alloc_shared((bn, bk) if tb else (bk, bn), dtype)
            Cf = T.alloc_fragment((bm, bn), acc)
            T.clear(Cf)
            for ko in T.Pipelined(k // bk, num_stages=stages):
                T.copy(A[by * bm, ko * bk // 2], As)
                T.copy(E[ko * bk // f, by * bm] if te else E[by * bm, ko * bk // f], Es)
                T.copy(B[bx * bn, ko * bk] if tb else B[ko * bk, bx * bn], Bs)
                T.gemm_sp(As, Es, Bs, Cf, transpose_E=te, transpose_B=tb)
            T.copy(Cf, C[by * bm, bx * bn])

    return sparse


def operands(m, n, k, dtype, meta, te, tb):
    """(tensors by name, the dense product)"""
    rng = np.random.default_rng(5)
    kept = rng.integers(-3, 4, (m, k // 2)).astype(TYPES[dtype])
    codes = rng.choice([4, 8, 9, 12, 13, 14], (m, k // 4)).astype(np.uint32)
    b = rng.integers(-3, 4, (k, n)).astype(TYPES[dtype])
    per = COLUMNS[meta] // 4
    words = (codes.reshape(m, -1, per) << 4 * np.arange(per, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    e = words.astype(f"uint{4 * per}").view(meta)
    dense = expand(kept, codes).astype(np.float32) @ b.astype(np.float32)
    return {"A": kept, "E": np.ascontiguousarray(e.T if te else e), "B": np.ascontiguousarray(b.T if tb else b)}, dense


@pytest.mark.parametrize("dtype,meta,te,tb", every_pair(tuple(TYPES), tuple(COLUMNS), (False, True), (False, True)))
def test_products_of_kept_values(dtype, meta, te, tb):
    if not tb and np.dtype(TYPES[dtype]).itemsize == 1:
        tb = True
    f, (given, want) = program(128, 72, 256, 128, 64, 128, dtype, meta, te, tb), operands(128, 72, 256, dtype, meta, te, tb)
    lowered = lower(f.func, H200)
    assert "wgmma.sp.m64n64" in str(lowered)
    np.testing.assert_array_equal(run_device(lowered, given).outputs["C"], want)
    np.testing.assert_array_equal(run_tile(f, given)["C"], want)


@pytest.mark.parametrize("what,options", [
    ("a step of one instruction", {"bk": 32, "meta": "int16", "k": 64}), ("rows of half a warp group", {"bm": 32}),
    ("columns of a byte operand that do not lie together", {"dtype": "int8", "tb": False}),
    ("threads of no warp group", {"threads": 96})])
def test_other_tiles_are_expanded(what, options):
    o = {"m": 64, "n": 32, "k": 128, "bm": 64, "bn": 32, "bk": 64, "dtype": "float16", "meta": "int16", "te": False, "tb": True,
         **options}
    f, (given, want) = program(**o), operands(*(o[x] for x in ("m", "n", "k", "dtype", "meta", "te", "tb")))
    lowered = lower(f.func, H200)
    assert "wgmma.sp" not in str(lowered)
    np.testing.assert_array_equal(run_device(lowered, given).outputs["C"], want)


def test_registers_of_two_accumulators_and_warp_roles():
    """Two warp groups beside a producer; metadata are read in front of the arrival that frees their stage."""
    f, (given, want) = program(256, 64, 512, 256, 64, 128, "float16", "int16", True, True, 3, 256), operands(
        256, 64, 512, "float16", "int16", True, True)
    lowered = lower(f.func, H200)
    assert "mbarrier_arrive" in str(lowered)
    np.testing.assert_array_equal(run_device(lowered, given).outputs["C"], want)


def test_rows_say_which_lanes_have_the_metadata():
    """16-bit types: two lanes of four, by the selector, a half word for each of two rows; 8-bit types: a word for one row."""
    words = np.arange(32, dtype=np.uint32) * 0x01010101 | 0x44444444
    for name, selectors in (("wgmma.sp.m64n8k32.f32.f16.f16", (0, 1)), ("wgmma.sp.m64n8k64.s32.s8.s8", (0,))):
        row = WGMMA_ROWS[name]
        k = row.shape[2]
        assert row.sparse and row.b_bytes == 64 and row.ptx.startswith("wgmma.mma_async.sp.sync.aligned.m64n8")
        kept = np.arange(1, 16 * k // 2 + 1, dtype=np.int32).reshape(16, -1)
        for s in selectors:
            out = row.expanded(kept, words, s).reshape(16, k // 4, 4)
            for r, g in np.ndindex(16, k // 4):
                wide = k == 64
                lane = 4 * (r % 8) + (r // 8 + g // 8 * 2 if wide else 2 * s + g // 4)
                code = int(words[lane]) >> (4 * g % 32 if wide else 16 * (r // 8) + 4 * (g % 4)) & 15
                assert out[r, g, code & 3] == kept[r, 2 * g] or code & 3 == code >> 2
                assert out[r, g, code >> 2] == kept[r, 2 * g + 1]


@pytest.mark.parametrize("dtype,m,bm,bn,bk,threads", [("float16", 128, 128, 256, 64, 256), ("bfloat16", 256, 256, 128, 64, 256),
                                                      ("int8", 128, 128, 256, 128, 256)])
def test_metadata_stay_in_registers_while_their_gemm_runs(dtype, m, bm, bn, bk, threads):
    """ptxas does not know that wgmma reads metadata while it runs: each set of registers is used once more behind its wait."""
    k = 5 * bk
    f = program(m, bn, k, bm, bn, bk, dtype, "uint8", True, True, 4, threads)
    given, want = operands(m, bn, k, dtype, "uint8", True, True)
    lowered = lower(f.func, H200)
    calls = [c for c in walk(lowered.kernels[0].body, Call) if c.op in ("wgmma", "wgmma_commit", "wgmma_wait", "wgmma_used")]
    loop = calls[:next(n for n, c in enumerate(calls) if c.op == "wgmma_wait" and not c.options.n)]
    sets, read, flying = [], set(), []
    for c in loop:
        if c.op == "wgmma":
            read |= {x.buffer for x in walk(c.args[4], Load)}
        elif c.op == "wgmma_commit":
            read, flying = set(), [*flying, read]
        elif c.op == "wgmma_wait":
            flying = flying[-c.options.n:]
        else:
            sets.append(c.args[0].buffer)
            assert all(sets[-1] not in x for x in flying)
    assert len(set(sets)) == 2 and {c.options.n for c in loop if c.op == "wgmma_wait"} == {1}
    np.testing.assert_array_equal(run_device(lowered, given).outputs["C"], want)


def test_metadata_had_a_wait_and_a_release_of_their_own_and_five_stages():
    """A ring of their own takes a wait, a fence and an arrival between two GEMMs, and five stages take longer than four."""
    lowered = lower(program(128, 256, 4096, 128, 256, 64, "float16", "uint8", True, True, 3, 256).func, H200)
    waits = [c for c in walk(lowered.kernels[0].body, Call) if c.op == "mbarrier_wait"]
    barriers = {x.buffer.name: x.buffer.shape[0] for c in waits for x in walk(c.args[0], AddressOf)}
    assert {name: int(convert(n).value) for name, n in barriers.items()} == {"As_Es_Bs_full": 4, "As_Es_Bs_empty": 4}


@pytest.mark.parametrize("dtype,meta", [("float16", "uint8"), ("bfloat16", "int32"), ("int8", "int16")])
def test_metadata_in_words_are_expanded_where_another_use_of_the_kept_values_forbids_wgmma(dtype, meta):
    f, acc = COLUMNS[meta], "int32" if dtype == "int8" else "float32"

    @T.prim_func
    def sparse(A: T.Tensor((64, 64), dtype), E: T.Tensor((64, 128 // f), meta), B: T.Tensor((64, 128), dtype),
               C: T.Tensor((64, 64), acc), D: T.Tensor((4096,), dtype)):
        with T.Kernel(1, threads=128):
            As, Es = T.alloc_shared((64, 64), dtype), T.alloc_shared((64, 128 // f), meta)
            Bs, Cf = T.alloc_shared((64, 128), dtype), T.alloc_fragment((64, 64), acc)
            T.clear(Cf)
            T.copy(A, As)
            T.copy(E, Es)
            T.copy(B, Bs)
            flat = T.reshape(As, (4096,))
            for i in T.Parallel(4096):
                D[i] = flat[i]
            T.gemm_sp(As, Es, Bs, Cf, transpose_B=True)
            T.copy(Cf, C)

    given, want = operands(64, 64, 128, dtype, meta, False, True)
    lowered = lower(sparse.func, H200)
    assert "wgmma.sp" not in str(lowered)
    np.testing.assert_array_equal(run_device(lowered, given).outputs["C"], want)


def test_spilled_registers_do_not_stay_with_metadata_in_flight():
    """256 x 208 tiles of int8 in flight spilled 48 bytes, and ptxas moved the metadata of a GEMM that was running."""
    def faults(source, spills, serialised=""):
        kernels = [{"serialised": serialised, "spills": spills}]
        return _ptxas_faults(SimpleNamespace(meta={"kernels": kernels}, kernel_source=source))

    moved = faults("tl::wgmma_wait<1>(); tl::wgmma_used<4>(&words[0]);", 48)
    assert moved[0] and not any(faults("tl::wgmma_wait<0>(); tl::wgmma_used<4>(&words[0]);", 48))
    assert not any(faults("tl::wgmma_wait<1>(); tl::wgmma_used<4>(&words[0]);", 0))
    slow = faults("tl::wgmma_wait<0>(); tl::wgmma_used<4>(&words[0]);", 480, "C7514: a serialised one")
    assert slow < moved  # was kept out, as another fault counted as much
