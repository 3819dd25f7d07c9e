"""Tensor-core code by hand (language 22): emitters and raw calls compute products on the simulator and assemble."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import cuda_text, everywhere, run

import tilelang.language as T
from tilelang.cuda.intrinsics import TensorCoreIntrinEmitter, mma_layout
from tilelang.cuda.intrinsics import INT4TensorCoreIntrinEmitter
from tilelang.errors import TileLangError
from tilelang.language.tensor_core import fragment_element, fragment_place
from tilelang.target.mma import MMA_ROWS

RNG = np.random.default_rng(22)
ON_WARPS = ("tile", "simulator", "cpu")
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "float32": np.float32}


@pytest.mark.spec("L22:layout-functions")
@pytest.mark.parametrize("k", (8, 16, 32))
def test_places_are_those_of_the_instructions(k):
    assert T.get_mma_micro_size({8: "float32", 16: "bfloat16", 32: "int8"}[k]) == (16, 16, k)
    a, b = (getattr(mma_layout, f"shared_16x{k}_to_mma_32x{k // 2}_layout_sr_{m}") for m in "ab")
    name = {8: "mma.m16n8k8.tf32.tf32.f32", 16: "mma.m16n8k16.f16.f16.f32", 32: "mma.m16n8k32.s8.s8.s32"}[k]
    row, size = MMA_ROWS[name], k // 2
    for i in range(16):
        for j in range(k):
            assert a(i, j) == (row.a.thread_of((i, j)), row.a.register_of((i, j))) == fragment_place("A", i, j, k)
            lane, register = b(i, j)
            assert (lane, register % (size // 2)) == (row.b.thread_of((j, i % 8)), row.b.register_of((j, i % 8)))
            assert register // (size // 2) == i // 8
            for m, place in (("A", a), ("B", b)):
                assert fragment_element(m, *place(i, j), k) == (i, j)
    for lane in range(32):
        for r in range(8):
            assert fragment_place("C", *T.mma_store_index_map(lane, r), k) == (lane, r)
            assert fragment_element("C", lane, r, k) == T.mma_store_index_map(lane, r)


def gemm(dtype, acc, ta=False, tb=True, m_first=False, M=64, N=32, K=64, chunk=32, store="global", swizzle=False,
         emitter=T.TensorCoreIntrinEmitter):
    e = emitter(a_dtype=dtype, b_dtype=dtype, accum_dtype=acc, a_transposed=ta, b_transposed=tb,
                block_row_warps=2, block_col_warps=2, warp_row_tiles=M // 2, warp_col_tiles=N // 2, chunk=chunk,
                is_m_first=m_first)
    a, b = ((K, M) if ta else (M, K)), ((N, K) if tb else (K, N))
    ab, bb = ((chunk, M) if ta else (M, chunk)), ((N, chunk) if tb else (chunk, N))

    @T.prim_func
    def main(A: T.Tensor(a, dtype), B: T.Tensor(b, dtype), C: T.Tensor((M, N), acc)):
        with T.Kernel(1, threads=e.threads):
            As = T.alloc_shared(ab, dtype)
            Bs = T.alloc_shared(bb, dtype)
            Cs = T.alloc_shared((M // 16, N // 16, 16, 16), acc)
            Al = T.alloc_local((e.warp_rows * e.local_size_a,), dtype)
            Bl = T.alloc_local((e.warp_cols * e.local_size_b,), dtype)
            Cl = T.alloc_local((e.warp_rows * e.warp_cols * e.local_size_out,), acc)
            if swizzle:
                T.annotate_layout({As: T.make_mma_swizzle_layout(As), Bs: T.make_mma_swizzle_layout(Bs)})
            T.clear(Cl)
            for ko in T.serial(K // chunk):
                T.copy(A[ko * chunk, 0] if ta else A[0, ko * chunk], As)
                T.copy(B[0, ko * chunk] if tb else B[ko * chunk, 0], Bs)
                for ki in T.serial(chunk // e.micro_size_k):
                    e.ldmatrix_a(Al, As, ki)
                    e.ldmatrix_b(Bl, Bs, ki)
                    e.mma(Al, Bl, Cl)
            if store == "global":
                e.stmatrix(Cl, C, pid_m=0, pid_n=0)
            else:
                e.stmatrix(Cl, Cs)
                for i, j in T.Parallel(M, N):
                    C[i, j] = Cs[i // 16, j // 16, i % 16, j % 16]

    return main, a, b


@pytest.mark.spec("T.TensorCoreIntrinEmitter", "T.TensorCoreIntrinEmitterWithLadderTransform", "L22:emitter",
                  "T.make_mma_swizzle_layout")
@pytest.mark.parametrize("dtype,acc,options", [
    ("float16", "float32", {}), ("float16", "float16", {"tb": False, "N": 64}),
    ("float16", "float32", {"ta": True, "tb": False}), ("float16", "float32", {"ta": True, "swizzle": True}),
    ("bfloat16", "float32", {"m_first": True, "swizzle": True}),
    ("int8", "int32", {"store": "shared"}), ("int8", "int32", {"ta": True, "tb": False}),
    ("float16", "float32", {"emitter": T.TensorCoreIntrinEmitterWithLadderTransform}),
    ("float32", "float32", {"chunk": 16})])
def test_products_by_an_emitter(dtype, acc, options):
    f, a, b = gemm(dtype, acc, **options)
    x, y = (RNG.integers(-3, 4, s) for s in (a, b))
    for on in ON_WARPS:
        got = run(f, x.astype(TYPES[dtype]), y.astype(TYPES[dtype]), on=on)[2]
        assert np.array_equal(got, (x.T if options.get("ta") else x) @ (y.T if options.get("tb", True) else y)), on
    text = cuda_text(f)
    assert "mma_m16n8" in text and ("ldmatrix_x4" in text) == (dtype in ("float16", "bfloat16"))


@pytest.mark.spec("L22:emitter", "L3.2:int4")
@pytest.mark.parametrize("atoms,stages", [(False, 1), (True, 2)])
def test_products_of_two_int4_values_a_byte(atoms, stages):
    M, N, K, chunk = 64, 32, 128, 32 * stages  # K and chunk in bytes
    e = INT4TensorCoreIntrinEmitter("int4", "int8", "int32", b_transposed=True, block_row_warps=2, block_col_warps=1,
                                    warp_row_tiles=32, warp_col_tiles=32, chunk=chunk)

    @T.prim_func
    def f(A: T.Tensor((M, K), "int8"), B: T.Tensor((N, K), "int8"), C: T.Tensor((M, N), "int32")):
        with T.Kernel(1, threads=64):
            As = T.alloc_shared((M, chunk), "int8")
            Bs = T.alloc_shared((N, chunk), "int8")
            Al = T.alloc_local(e.warp_rows * e.local_size_a, "int8")
            Bl = T.alloc_local(e.warp_cols * e.local_size_b, "int8")
            Cl = T.alloc_local(e.warp_rows * e.warp_cols * e.local_size_out, "int32")
            T.clear(Cl)
            for ko in T.serial(K // chunk):
                T.copy(A[0, ko * chunk], As)
                T.copy(B[0, ko * chunk], Bs)
                for ki in T.serial(stages):
                    e.ldmatrix_a(Al, As, ki)
                    e.ldmatrix_b(Bl, Bs, ki)
                    if atoms:
                        _ = [e.mma_atom(Al, Bl, Cl, i, j) for i in (0, 1) for j in (0, 1)]
                    else:
                        e.mma(Al, Bl, Cl)
            e.stmatrix(Cl, C, pid_m=0, pid_n=0)

    x, y = (RNG.integers(-8, 8, (n, 2 * K)) for n in (M, N))
    packed = [((v[:, 0::2] & 15) | (v[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8) for v in (x, y)]
    for on in ON_WARPS:
        assert np.array_equal(run(f, *packed, on=on)[2], x @ y.T), on
    assert "mma_m16n8k32" in cuda_text(f)
    with pytest.raises(TileLangError, match="int4 values"):
        INT4TensorCoreIntrinEmitter("float16")


@pytest.mark.spec("L22:emitter")
def test_layouts_of_an_emitter_are_those_of_its_registers():
    e = TensorCoreIntrinEmitter("float16", "float16", "float32", block_row_warps=2, block_col_warps=2, warp_row_tiles=32,
                                warp_col_tiles=16, chunk=16)

    class Shape:
        shape = (64, 16)

    c, a = e.make_mma_store_layout(Shape), e.make_mma_load_layout(Shape, "A")
    assert c.shape == (64, 32) and c.threads == 128 and c.registers == 2 * 8
    assert (c.thread_of((33, 17)), c.register_of((33, 17))) == ((1 * 2 + 1) * 32 + 4, 1)
    assert a.replicas == 2 and (a.thread_of((17, 9), 1), a.register_of((17, 9))) == (32 + 4, 8 + 5)
    assert e.get_store_index_map()(5, 6) == (9, 10) and e.get_store_index_map(True)(9, 10) == (5, 6)
    assert e.extract_thread_binding(97) == (1, 1, 1) and e.extract_thread_binding(33, True) == (1, 0, 1)


@pytest.mark.spec("T.TensorCoreIntrinEmitterWithLadderTransform", "L22:emitter")
def test_emitters_refuse_what_they_cannot_do():
    assert T.TensorCoreIntrinEmitterWithLadderTransform("int8", "int8", "int32", warp_row_tiles=16, warp_col_tiles=16,
                                                        chunk=32).micro_size_k == 32
    for build, kind in ((lambda: T.TensorCoreIntrinEmitterWithLadderTransform(warp_row_tiles=16, warp_col_tiles=16,
                                                                              transform_kind_b=2), "not-available"),
                        (lambda: TensorCoreIntrinEmitter("float16", "float16", "int32"), "gemm-types"),
                        (lambda: TensorCoreIntrinEmitter("float64", "float64", "float64"), "gemm-types"),
                        (lambda: TensorCoreIntrinEmitter(warp_row_tiles=24), "gemm-shape"),
                        (lambda: TensorCoreIntrinEmitter(num_elems_per_byte=2), "not-available")):
        with pytest.raises(TileLangError) as e:
            build()
        assert e.value.kind == kind


@pytest.mark.spec("T.get_swizzle_layout")
@pytest.mark.parametrize("dtype,row", [("float16", 64), ("float16", 32), ("float16", 16), ("int8", 256), ("float32", 32)])
def test_swizzled_places_are_a_permutation_free_of_conflicts(dtype, row):
    places = {(i, j): T.get_swizzle_layout(i, j, row, dtype) for i in range(16) for j in range(row)}
    assert len(set(places.values())) == len(places) and all(p[0] == i for (i, _), p in places.items())
    nbytes = T.dtype(dtype).bytes
    for j in range(0, row, 16 // nbytes):  # eight rows of 16 bytes at one column meet all 32 banks
        banks = [(places[i, j][0] * row + places[i, j][1]) * nbytes // 16 % 8 for i in range(8)]
        assert len(set(banks)) == 8
    with pytest.raises(TileLangError):
        T.get_swizzle_layout(0, 0, 24, "float16")


@pytest.mark.spec("T.access_ptr")
@pytest.mark.spec("L22:raw-ptx", "L16:cp-async", "T.ptx_cp_async", "T.ptx_commit_group", "T.ptx_wait_group")
@pytest.mark.parametrize("predicated", (False, True))
def test_one_instruction_by_its_raw_names(predicated):
    @T.prim_func
    def f(A: T.Tensor((16, 16), "float16"), B: T.Tensor((8, 16), "float16"), C: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            As = T.alloc_shared((256,), "float16")
            Bs = T.alloc_shared((8, 16), "float16")
            a = T.alloc_local((8,), "float16")
            b = T.alloc_local((4,), "float16")
            c = T.alloc_local((4,), "float32")
            where = T.access_ptr(As[t * 8], "w"), T.access_ptr(A[t // 2, t % 2 * 8], "r")
            if predicated:
                T.ptx_cp_async(where[0], where[1], 8, t < 16)
            else:
                T.ptx_cp_async(where[0], where[1], 8)
            T.ptx_commit_group()
            T.copy(B, Bs)
            T.ptx_wait_group(0)
            T.sync_threads()
            T.clear(c)
            T.ptx_ldmatrix(False, 4, T.access_ptr(As[t % 16 * 16 + t // 16 * 8], "r"), a.access_ptr("w"))
            T.ptx_ldmatrix(False, 2, T.access_ptr(Bs[t % 8, t // 8 % 2 * 8], "r"), b.access_ptr("w"))
            T.ptx_mma("float32", "m16n8k16", "row", "col", "float16", "float16", "float32", a.data, 0,
                      b.data, 0, c.data, 0, False)
            for r in T.serial(4):
                C[t // 4 + r // 2 * 8, t % 4 * 2 + r % 2] = c[r]

    x, y = (RNG.integers(-3, 4, s).astype(np.float16) for s in ((16, 16), (8, 16)))
    want = x.astype(np.float32) @ y.T.astype(np.float32)
    if predicated:
        want[8:] = 0
    for on in ON_WARPS:
        assert np.array_equal(run(f, x, y, on=on)[2], want), on
    assert "cp_async" in cuda_text(f)


@pytest.mark.spec("L22:raw-ptx")
def test_one_warp_of_a_block_multiplies():
    """Matrix instructions in a branch that whole warps take, in a loop of another length for each."""

    @T.prim_func
    def f(A: T.Tensor((16, 16), "float16"), B: T.Tensor((8, 16), "float16"), C: T.Tensor((2, 16, 8), "float32")):
        with T.Kernel(1, threads=96):
            t = T.get_thread_binding()
            lane = t % 32
            As, Bs = T.alloc_shared((256,), "float16"), T.alloc_shared((8, 16), "float16")
            a, b = T.alloc_local((8,), "float16"), T.alloc_local((4,), "float16")
            c = T.alloc_local((4,), "float32")
            for i in T.Parallel(256):
                As[i] = A[i // 16, i % 16]
            T.copy(B, Bs)
            T.clear(c)
            if t < 64:
                T.ptx_ldmatrix(False, 4, T.access_ptr(As[lane % 16 * 16 + lane // 16 * 8], "r"), a.access_ptr("w"))
                T.ptx_ldmatrix(False, 2, T.access_ptr(Bs[lane % 8, lane // 8 % 2 * 8], "r"), b.access_ptr("w"))
                for _ in T.serial(t // 32 + 1):
                    T.ptx_mma("float32", "m16n8k16", "row", "col", "float16", "float16", "float32", a.data, 0,
                              b.data, 0, c.data, 0, False)
                for r in T.serial(4):
                    C[t // 32, lane // 4 + r // 2 * 8, lane % 4 * 2 + r % 2] = c[r]

    x, y = (RNG.integers(-3, 4, s).astype(np.float16) for s in ((16, 16), (8, 16)))
    want = x.astype(np.float32) @ y.T.astype(np.float32)
    for on in ON_WARPS:
        assert np.array_equal(run(f, x, y, on=on)[2], np.stack([want, 2 * want])), on


@pytest.mark.spec("T.ptx_cp_async", "T.ptx_commit_group", "T.ptx_wait_group")
def test_copies_in_the_background_on_every_execution():
    @T.prim_func
    def f(A: T.Tensor((128,), "float16"), B: T.Tensor((128,), "float16")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            S = T.alloc_shared((128,), "float16")
            T.ptx_cp_async(T.access_ptr(S[t * 4], "w"), T.access_ptr(A[t * 4], "r"), 4, t < 20)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            for k in T.serial(4):
                B[t * 4 + k] = S[127 - t * 4 - k]

    a = np.arange(1, 129).astype(np.float16)
    assert np.array_equal(everywhere(f, a)[1], np.where(a <= 80, a, 0)[::-1])


@pytest.mark.spec("L22:raw-ptx")
@pytest.mark.parametrize("build,kind", [
    (lambda A, S, L: T.ptx_cp_async(S.access_ptr("w"), A.access_ptr("r"), 3), "lane-arguments"),
    (lambda A, S, L: T.ptx_cp_async(A.access_ptr("w"), S.access_ptr("r"), 8), "lane-arguments"),
    (lambda A, S, L: T.ptx_cp_async(S, A, 8), "extern-argument"),
    (lambda A, S, L: T.ptx_ldmatrix(False, 3, S.access_ptr("r"), L.access_ptr("w")), "lane-arguments"),
    (lambda A, S, L: T.ptx_mma("float32", "m16n8k7", "row", "col", "float16", "float16", "float32", L.data, 0, L.data, 0,
                               L.data, 0), "gemm-types"),
    (lambda A, S, L: T.ptx_mma("float32", "m16n8k16", "col", "col", "float16", "float16", "float32", L.data, 0, L.data, 0,
                               L.data, 0), "not-available")])
def test_raw_calls_refuse_bad_operands(build, kind):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(A: T.Tensor((256,), "float16")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((256,), "float16")
                L = T.alloc_local((8,), "float16")
                build(A, S, L)
    assert e.value.kind == kind


@pytest.mark.spec("T.TensorCoreIntrinEmitter", "L22:emitter")
@pytest.mark.spec("L22:layout-functions", "T.get_ldmatrix_offset")
@pytest.mark.parametrize("matrix,transposed,dtype", [
    ("A", False, "float16"), ("A", True, "float16"), ("B", False, "float16"), ("B", True, "bfloat16"),
    ("A", False, "int8"), ("B", True, "int8"), ("A", False, "float32"), ("B", True, "float32")])
def test_ldmatrix_gives_the_operand_where_its_offsets_say(matrix, transposed, dtype):
    k = T.get_mma_micro_size(dtype)[2]
    wide = (matrix == "A") != transposed  # k runs along a row as it is kept
    shape, size = ((16, k) if wide else (k, 16)), k // 2

    @T.prim_func
    def main(X: T.Tensor(shape, dtype), Y: T.Tensor((32, size), dtype)):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((shape[0], shape[1] + 16), dtype)
            R = T.alloc_local((size,), dtype)
            t = T.get_thread_binding()
            T.copy(X, S[0:shape[0], 0:shape[1]])
            flat = T.reshape(S, (shape[0] * (shape[1] + 16),))
            at = T.get_ldmatrix_offset(matrix, t, 0, shape[1] + 16, dtype, transposed)
            T.ptx_ldmatrix(not wide, 4, T.access_ptr(flat[at], "r"), R.access_ptr("w"))
            for r in T.serial(size):
                Y[t, r] = R[r]

    x = np.arange(shape[0] * shape[1]).reshape(shape).astype(TYPES[dtype])
    for on in ON_WARPS:
        y = run(main, x, on=on)[1]
        for lane in range(32):
            for r in range(size):
                i, j = fragment_element(matrix, lane, r, k)
                assert y[lane, r] == (x[i, j] if wide else x[j, i]), (on, lane, r)
    cuda_text(main)


def test_offsets_of_operands_that_ldmatrix_cannot_turn_are_refused():
    for args, words in ((("C", 0, 0, 16), '"A" or "B"'), (("A", 0, 0, 16, "int8", True), r"A of int8 kept \(k, m\)"),
                        (("B", 0, 0, 16, "float32"), r"B of float32 kept \(k, n\)")):
        with pytest.raises(ValueError, match=words):
            T.get_ldmatrix_offset(*args)
    assert T.get_ldmatrix_offset("A", 17, 3, 40) == 40 + 8 + 3
