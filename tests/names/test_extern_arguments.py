"""What extern calls take: a keyword dtype beside positional arguments, the tensor map of a descriptor; regions by T.region."""

import numpy as np
import pytest
from everywhere import SM80, SM90A, WITH_HOPPER, everywhere, run

import tilelang
import tilelang.language as T

F16, F32 = "float16", "float32"
LOADER = """
__device__ void my_load(const CUtensorMap& map, void* bar, void* to, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(&map), "r"((unsigned)__cvta_generic_to_shared(bar)), "r"(x),
                  "r"(y) : "memory");
}
__device__ void my_prefetch(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
"""


def loaded(by):
    """A tile loaded by TMA: by the program's own function, or by the one of another device library."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), F16), B: T.Tensor((64, 64), F16)):
        with T.Kernel(1, threads=128):
            if by == "my_load":
                T.import_source(LOADER)
            s = T.alloc_shared((64, 64), F16)
            bar = T.alloc_barrier(1)
            desc = T.create_tma_descriptor(F16, 2, A.data, 64, 64, 2, 128, 64, 64, 1, 1, 0, 0, 2, 0)
            if T.get_thread_binding() == 0:
                if by == "my_load":
                    T.call_extern("my_prefetch", desc, dtype="handle")
                T.mbarrier_expect_tx(bar[0], 64 * 64 * 2)
                T.call_extern("handle", by, desc, *((bar[0], T.access_ptr(s, "w")) if by != "my_load" else
                                                    (T.address_of(bar[0]), T.access_ptr(s, "w"))), 0, 0)
                T.mbarrier_arrive(bar[0])
            T.mbarrier_wait_parity(bar[0], 0)
            T.copy(s, B)

    return main


@pytest.mark.spec("L19:extern")
def test_a_tensor_map_was_no_argument_of_an_extern_call():
    kernel = tilelang.compile(loaded("my_load"), target=SM90A)
    text = kernel.get_kernel_source()
    assert "my_load(tl::map_argument{A_raw_map}, &bar[0], &s[0], 0, 0);" in text
    assert "const __grid_constant__ tl::tensor_map A_raw_map" in text
    assert "not checked: a function of the program uses an mbarrier" in str(kernel.sync_report())
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    for on in ("tile", "sm_90a"):
        with pytest.raises(NotImplementedError, match="call_extern"):
            run(loaded("my_load"), a, on=on)
    with pytest.raises(NotImplementedError, match="CPU target does not support"):
        tilelang.compile(loaded("my_load"), target="cpu")
    with pytest.raises(ValueError, match="sm_90"):
        tilelang.compile(loaded("my_load"), target=SM80)


def test_a_tensor_map_loads_by_the_name_of_another_library():
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    for on in ("tile", "sm_90a"):
        np.testing.assert_array_equal(run(loaded("tl::tma_load"), a, on=on)[1], a)


@pytest.mark.spec("L19:extern")
def test_a_keyword_dtype_was_given_twice():
    @T.prim_func
    def main(A: T.Tensor((32,), F32), B: T.Tensor((32,), F32), C: T.Tensor((32,), F32)):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            B[t] = T.call_extern("fmaxf", A[t], 0.0, dtype=F32) + T.call_pure_extern("fabsf", A[t], dtype=F32)
            C[t] = T.call_intrin("exp2", A[t], dtype=F32)
            v = T.vectorcombine(T.float32x2(A[t], 1.0), T.float32x2(2.0, 3.0), dtype="float32x4")
            C[t] = C[t] + T.extract_lane(T.vectorhigh(v, dtype="float32x2"), 0)
            T.call_extern("__syncwarp", dtype="handle")

    a = np.arange(-16, 16, dtype=np.float32)
    _, b, c = everywhere(main, a, on=WITH_HOPPER)
    np.testing.assert_array_equal(b, np.maximum(a, 0) + np.abs(a))
    np.testing.assert_array_equal(c, np.exp2(a) + 2)


def test_a_dtype_given_twice_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        @T.prim_func
        def main(A: T.Tensor((32,), F32)):
            with T.Kernel(1, threads=32):
                A[0] = T.call_extern(F32, "fmaxf", A[0], 0.0, dtype=F32)


def test_a_region_was_no_operand():
    """The regions of a program's text: an element, an access, extents of the last dimensions."""
    ranges = []

    @T.prim_func
    def main(A: T.Tensor((8, 16, 32), F32), B: T.Tensor((16, 32), F32)):
        with T.Kernel(1, threads=32) as bx:
            s = T.alloc_shared((4, 32), F32)
            tile = T.region(A[3, 2, 0], "r", 4, 32)
            ranges.extend(r for r in tile)
            T.copy(tile, T.region(s[0, 0], 2, 4, 32))
            T.copy(T.region(s), T.region(B[bx * 4, 0], "w", 4, 32))
            T.fill(T.region(B[8, 0], "w", 1, 32), 5.0)
            B[15, 31] = T.cast(sum(r.extent for r in T.region(A[0, 0, 0:8])), F32)

    a = np.random.default_rng(0).standard_normal((8, 16, 32)).astype(np.float32)
    b = everywhere(main, a, on=WITH_HOPPER)[1]
    want = np.zeros((16, 32), np.float32)
    want[:4], want[8], want[15, 31] = a[3, 2:6], 5, 10
    np.testing.assert_array_equal(b, want)
    assert [(int(r.min), r.extent) for r in ranges] == [(3, 1), (2, 4), (0, 32)]


@pytest.mark.parametrize("wrong,words", [
    (lambda A: T.region(A[0, 0], "x", 4, 4), "Invalid access_type='x'"),
    (lambda A: T.region(A[0, 0], "r", 2, 4, 4), "Can't deduce region extents"),
    (lambda A: T.region(A, "r", 4, 4), "takes extents after an element only"),
    (lambda A: T.region(3, "r"), "must be a buffer, a region of it or an element"),
    (lambda A: T.region(A[0, 0], "r", 4.5), "an integer is needed"),
])
def test_wrong_regions(wrong, words):
    with pytest.raises((TypeError, ValueError, AssertionError), match=words):
        @T.prim_func
        def main(A: T.Tensor((8, 8), F32)):
            with T.Kernel(1, threads=32):
                wrong(A)
