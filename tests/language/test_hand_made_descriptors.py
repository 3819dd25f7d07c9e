"""Descriptors, TMA and wgmma by hand on every execution: the same values, and errors where a program misuses them."""

import numpy as np
import pytest
from everywhere import device_of, everywhere, run
from hand_made_programs import by_threads, f16, one_box, panels_gemm, ring_gemm

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import AddressOf, Buffer, Call, Launch, const, dtype, numpy_dtype, walk
from tilelang.layout import Layout, swizzled_box_layout, padded_layout, view_layout
from tilelang.runtime import nvrtc
from tilelang.simulator import run_tile
from tilelang.target import Target
from tilelang.target.shared_space import Placed, named_storage, shared_space
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
ALL = ("tile", "cpu", "sm_90a")
NAMES = ("T.alloc_wgmma_desc", "T.initialize_wgmma_descriptor", "T.ptx_wgmma_ss", "T.create_tma_descriptor", "T.tma_load")
rng = np.random.default_rng(33)


def numbers(shape, dt=f16):
    return rng.integers(-4, 5, shape).astype(numpy_dtype(dt))


def product(a, b):
    return a.astype(np.float32) @ b.astype(np.float32).T


def assembled(f):
    """NVRTC takes the text without serialised products or spills."""
    (k,) = lower(f.func, SM90A).kernels
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(print_kernel(k), "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log


# ---- values -----------------------------------------------------------------------------------------------------------


RINGS = {
    "fp16, 128 bytes": {"N": 16, "K": 128},
    "fp16, two blocks, three stages": {"M": 128, "N": 32, "K": 256, "stages": 3},
    "fp8, 128 bytes": {"N": 16, "K": 256, "dt": "float8_e4m3"},
    "int8, 64 bytes": {"N": 16, "K": 128, "dt": "int8", "acc": "int32", "width": 64},
}


@pytest.mark.spec(*NAMES, "T.ptx_arrive_barrier", "L16:tma", "L16:mbarriers")
@pytest.mark.parametrize("what", RINGS)
def test_a_product_wholly_by_hand(what):
    kw = RINGS[what]
    f = ring_gemm(**kw)
    a, b = numbers((kw.get("M", 64), kw["K"]), kw.get("dt", f16)), numbers((kw["N"], kw["K"]), kw.get("dt", f16))
    assert np.array_equal(everywhere(f, a, b, on=ALL)[-1], product(a, b))
    if what.endswith("128 bytes") and device_of("simulator") != "gpu":
        assembled(f)


PANELS = {
    "no swizzle": {},
    "no swizzle, rows along N": {"b_mn": True},
    "128 bytes, both turned, bfloat16": {"N": 64, "dt": "bfloat16", "width": 128, "a_mn": True, "b_mn": True},
    "32 bytes, half sums": {"steps": 1, "width": 32, "b_mn": True, "acc": f16},
    "64 bytes, tf32": {"dt": "float32", "width": 64},
    "no swizzle, fp8": {"dt": "float8_e4m3"},
}


@pytest.mark.spec(*NAMES, "T.increase_descriptor_offset")
@pytest.mark.parametrize("what", PANELS)
def test_operands_in_panels_of_either_order(what):
    kw = PANELS[what]
    f = panels_gemm(**kw)
    (_, A), (_, B), (_, C) = f.func.buffers
    a, b = (numbers(tuple(map(int, x.shape)), x.dtype) for x in (A, B))
    want = product(a.T if kw.get("a_mn") else a, b.T if kw.get("b_mn") else b)
    assert np.array_equal(everywhere(f, a, b, on=ALL)[-1], want.astype(numpy_dtype(C.dtype)))


def chunked(shape):
    """Columns of 8 elements one after another: core matrices without a swizzle."""
    return Layout(shape, lambda i, k: (k // 8, i, k % 8))


BY_THREADS = {
    "two warp groups with a descriptor each": {"groups": 2, "threads": 256},
    "one of two, chosen by a condition": {"threads": 160, "part": 128, "first": lambda s, t: s[0, 0]},
    "a view of the buffer": {"second": lambda s, t: T.reshape(s, (1024,))[0]},
}


@pytest.mark.spec("T.alloc_wgmma_desc", "T.initialize_wgmma_descriptor", "T.ptx_wgmma_ss")
@pytest.mark.parametrize("what", BY_THREADS)
def test_tiles_that_threads_copied_lie_as_their_layout_says(what):
    kw = BY_THREADS[what]
    a, b = numbers((64 * kw.get("groups", 1), 64)), numbers((16, 64))
    assert np.array_equal(everywhere(by_threads(**kw), a, b, on=ALL)[-1], product(a, b))


def test_descriptors_of_each_launch_name_its_own_buffers():
    """The second launch has another buffer at the addresses of the first one's operands."""
    @T.macro
    def multiply(A, B, C, rows):
        As = T.alloc_shared((64, 64), f16)
        Bs = T.alloc_shared((rows, 64), f16)
        T.annotate_layout({As: swizzled_box_layout((64, 64), f16, 128), Bs: swizzled_box_layout((rows, 64), f16, 128)})
        c = T.alloc_local((8,), "float32")
        a_desc = T.alloc_wgmma_desc()
        b_desc = T.alloc_wgmma_desc()
        T.copy(A, As)
        T.copy(B, Bs[0, 0])
        T.fence_proxy_async()
        T.sync_threads()
        if rows > 16:
            T.initialize_wgmma_descriptor(b_desc, Bs[0, 0], 1, 1, 64)
            T.initialize_wgmma_descriptor(a_desc, As[0, 0], 1, 1, 64)
        else:
            T.initialize_wgmma_descriptor(a_desc, As[0, 0], 1, 1, 64)
            T.initialize_wgmma_descriptor(b_desc, Bs[0, 0], 1, 1, 64)
        T.warpgroup_arrive()
        for k in T.unroll(4):
            T.ptx_wgmma_ss("float32", "m64n16k16", True, True, "fp16", "fp16", "fp32", a_desc, 2 * k, b_desc, 2 * k,
                           c.data, 0, T.if_then_else(k > 0, 1, 0))
        T.warpgroup_commit_batch()
        T.warpgroup_wait(0)
        t = T.get_thread_binding()
        for i in T.serial(8):
            C[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    @T.prim_func
    def main(A: T.Tensor((64, 64), f16), B: T.Tensor((16, 64), f16), C: T.Tensor((64, 16), "float32"),
             D: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128):
            multiply(A, B, C, 16)
        with T.Kernel(1, threads=128):
            multiply(A, B, D, 32)

    a, b = numbers((64, 64)), numbers((16, 64))
    assert all(np.array_equal(got, product(a, b)) for got in everywhere(main, a, b, on=ALL)[-2:])


@pytest.mark.spec("T.initialize_wgmma_descriptor", "T.ptx_wgmma_ss")
def test_a_layout_that_turns_single_elements():
    """B is stored as (K, N); its layout puts it into core matrices along K, element by element."""
    @T.prim_func
    def f(A: T.Tensor((64, 16), f16), B: T.Tensor((16, 16), f16), C: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128):
            As = T.alloc_shared((64, 16), f16)
            Bs = T.alloc_shared((16, 16), f16)
            T.annotate_layout({As: chunked((64, 16)), Bs: Layout((16, 16), lambda k, n: (k // 8, n, k % 8))})
            c = T.alloc_local((8,), "float32")
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            t = T.get_thread_binding()
            T.copy(A, As)
            T.copy(B, Bs)
            T.fence_proxy_async()
            T.sync_threads()
            T.initialize_wgmma_descriptor(a_desc, As[0, 0], 0, 64, 8)
            T.initialize_wgmma_descriptor(b_desc, Bs[0, 0], 0, 16, 8)
            T.warpgroup_arrive()
            T.ptx_wgmma_ss("float32", "m64n16k16", True, True, "fp16", "fp16", "fp32", a_desc, 0, b_desc, 0, c.data, 0, 0)
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            for i in T.serial(8):
                C[t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    a, b = numbers((64, 16)), numbers((16, 16))
    assert np.array_equal(everywhere(f, a, b, on=ALL)[-1], product(a, b.T))


@pytest.mark.spec("T.create_tma_descriptor", "T.tma_load")
@pytest.mark.parametrize("row, column", [(0, 0), (-3, 8), (40, 40), (0, -16)])
def test_a_box_is_filled_where_it_leaves_the_tensor(row, column):
    """Threads see the tile in the order of its layout; rows and columns outside the tensor are zeros."""
    a = numbers((50, 72))
    f = one_box(column, (0, 0), (64, 64), 128, (50, 72), row=row, layout=swizzled_box_layout((64, 64), f16, 128))
    want = np.zeros((64, 64), np.float16)
    rows, columns = (range(max(0, -s), max(0, min(64, n - s))) for s, n in ((row, 50), (column, 72)))
    for i in rows:
        for j in columns:
            want[i, j] = a[i + row, j + column]
    assert np.array_equal(everywhere(f, a, on=ALL)[-1], want)


@pytest.mark.spec("T.create_tma_descriptor", "T.tma_load")
def test_a_box_in_a_tile_without_a_layout_is_seen_swizzled():
    a = numbers((64, 64))
    chunks = np.arange(64)[:, None] % 8 ^ np.arange(8)
    want = np.take_along_axis(a.reshape(64, 8, 8), chunks[..., None], axis=1).reshape(64, 64)
    assert np.array_equal(everywhere(one_box(), a, on=ALL)[-1], want)


# ---- misuse -----------------------------------------------------------------------------------------------------------


def blank(f):
    return [np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)) for _, b in f.func.buffers]


# What is done wrong: (program, kind in the tile meaning, text on the CPU)
MISUSES = {
    "an offset past the end": (lambda: by_threads(offset=600), "sim-out-of-bounds", "outside the shared buffer"),
    "strides past the end": (lambda: by_threads(fields=(1, 1, 4096)), "sim-out-of-bounds", "outside the shared buffer"),
    "a part of a warp group": (lambda: by_threads(part=96), "sim-warp-divergence", "part of a warp group"),
    "a descriptor a thread": (lambda: by_threads(first=lambda s, t: s[t % 2 * 8, 0]), "sim-thread-dependent",
                              "different descriptors"),
    "an odd address": (lambda: by_threads(first=lambda s, t: s[0, 1], layouts=lambda s: Layout(s, lambda i, j: i * 64 + j)),
                       "sim-misaligned", "multiple of 16 bytes"),
    "a layout with gaps": (lambda: by_threads(layouts=lambda s: padded_layout(s, 8), fields=(0, 1, 64)),
                           "sim-out-of-bounds", "outside the shared buffer"),
    "a box past the end": (lambda: one_box(place=(16, 0)), "sim-out-of-bounds", "leaves the shared buffer S"),
    "a box at an odd place": (lambda: one_box(place=(0, 8), box=(64, 32)), "sim-tma", "no multiple of 128 bytes"),
    "a column TMA cannot start at": (lambda: one_box(column=4), "sim-tma", "no multiple of 16 bytes"),
}


@pytest.mark.parametrize("what", MISUSES)
def test_misuse_is_an_error_of_the_tile_meaning_and_of_the_call_on_the_cpu(what):
    program, kind, text = MISUSES[what]
    f = program()
    with pytest.raises(TileLangError) as e:
        run_tile(f, blank(f))
    assert e.value.kind == kind, str(e.value)
    with pytest.raises(RuntimeError, match=text) as cpu:
        run(f, *blank(f), on="cpu")
    assert "hand_made_programs.py:" in str(cpu.value), "the line is named"


def test_a_descriptor_that_nothing_initialised_names_nothing():
    @T.prim_func
    def f(A: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), f16)
            desc = T.alloc_wgmma_desc()
            other = T.alloc_wgmma_desc()
            c = T.alloc_local((4,), "float32")
            T.clear(S)
            T.initialize_wgmma_descriptor(other, S[0, 0], 1, 1, 64)
            T.ptx_wgmma_ss("float32", "m64n8k16", True, True, "fp16", "fp16", "fp32", desc, 0, other, 0, c.data, 0, 0)
            A[0, 0] = c[0]

    with pytest.raises(TileLangError) as e:
        run_tile(f, blank(f))
    assert e.value.kind == "sim-out-of-bounds" and "where no shared buffer lies" in str(e.value)
    with pytest.raises(RuntimeError, match="outside the shared buffer"):
        run(f, *blank(f), on="cpu")


def test_operands_that_nothing_wrote_are_found_by_the_tile_meaning():
    @T.prim_func
    def f(A: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), f16)
            desc = T.alloc_wgmma_desc()
            c = T.alloc_local((4,), "float32")
            T.initialize_wgmma_descriptor(desc, S[0, 0], 1, 1, 64)
            T.ptx_wgmma_ss("float32", "m64n8k16", True, True, "fp16", "fp16", "fp32", desc, 0, desc, 0, c.data, 0, 0)
            A[0, 0] = c[0]

    with pytest.raises(TileLangError) as e:
        run_tile(f, blank(f))
    assert e.value.kind == "sim-uninitialized"


def test_what_has_no_addresses_is_refused_by_name():
    @T.prim_func
    def of_run_time_size(A: T.Tensor((64, 8), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((n, 64), f16)
            desc = T.alloc_wgmma_desc()
            T.initialize_wgmma_descriptor(desc, S[0, 0], 1, 1, 64)

    @T.prim_func
    def layout_of_a_view(A: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), f16)
            V = T.reshape(S, (4096,))
            T.annotate_layout({V: Layout((4096,), lambda i: 4095 - i)})
            desc = T.alloc_wgmma_desc()
            T.initialize_wgmma_descriptor(desc, S[0, 0], 1, 1, 64)

    @T.prim_func
    def half_a_group(A: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64, 64), f16)
            desc = T.alloc_wgmma_desc()
            c = T.alloc_local((4,), "float32")
            T.clear(S)
            T.initialize_wgmma_descriptor(desc, S[0, 0], 1, 1, 64)
            T.ptx_wgmma_ss("float32", "m64n8k16", True, True, "fp16", "fp16", "fp32", desc, 0, desc, 0, c.data, 0, 0)

    @T.prim_func
    def no_descriptor(A: T.Tensor((64, 8), "float32")):
        with T.Kernel(1, threads=128):
            desc = T.alloc_wgmma_desc()
            c = T.alloc_local((4,), "float32")
            T.ptx_wgmma_ss("float32", "m64n8k16", True, True, "fp16", "fp16", "fp32", desc, 0, desc, 0, c.data, 0, 0)

    for f, args, kind in ((no_descriptor, [np.zeros((64, 8), np.float32)], "sim-out-of-bounds"),
                          (of_run_time_size, [np.zeros((64, 8), np.float32), 64], "sim-unsupported"),
                          (layout_of_a_view, [np.zeros((64, 8), np.float32)], "sim-unsupported"),
                          (half_a_group, [np.zeros((64, 8), np.float32)], "sim-warp-divergence")):
        with pytest.raises(TileLangError) as e:
            run_tile(f, args)
        assert e.value.kind == kind, str(e.value)
        with pytest.raises(TileLangError) as e:
            tilelang.compile(f, target="cpu")
        assert e.value.kind == "cpu-unsupported", str(e.value)


# ---- addresses --------------------------------------------------------------------------------------------------------


def launch_of(f):
    return next(n for n in walk(f.func) if isinstance(n, Launch))


def test_addresses_are_multiples_of_1024_in_the_order_of_their_naming():
    space = shared_space(launch_of(by_threads()), AssertionError)
    a, b = space.placed
    assert (a.buffer.name, a.start, a.nbytes) == ("As", 1024, 8192) and (b.buffer.name, b.start) == ("Bs", 9216)
    assert space.of(a.buffer.data) is a and space.holding(b.start + 5) is b and space.holding(0) is None
    assert {d.name for d in named_storage(launch_of(by_threads()))} == {a.buffer.data.name, b.buffer.data.name}


@pytest.mark.parametrize("layout, unit, period", [
    (swizzled_box_layout((4, 64, 64), f16, 128), 16, 64), (chunked((64, 16)), 16, 128), (padded_layout((8, 64), 8), 16, 72),
    (Layout((16, 16), lambda i, j: (j, i)), 2, 256)])
def test_the_table_of_a_layout_leads_back(layout, unit, period):
    """Every byte of the laid out tile leads to the element that the layout puts there; gaps lead nowhere."""
    b = Buffer("S", layout.shape, dtype(f16), "shared")
    p = Placed(b, 1024, 2 * layout.size, layout)
    back = p.rows(np.arange(p.nbytes))
    want = np.full(layout.size, -1)
    want[layout.table().ravel()] = np.arange(layout.table().size)
    want = np.where(want[:, None] < 0, -1, 2 * want[:, None] + np.arange(2)).ravel()
    assert np.array_equal(back, want)
    assert p.period[:2] == (unit, period)
    u, period, table = p.period
    n = np.arange(p.nbytes // u)
    if (want >= 0).all():
        assert np.array_equal(table[n % period] + n // period * period, p.inverse[1])


def test_a_view_has_the_layout_of_its_storage():
    layout = swizzled_box_layout((16, 64), f16, 128)
    root = Buffer("S", (16, 64), dtype(f16), "shared")
    view = Buffer("V", (16, 32), dtype("float32"), "shared", data=root.data)
    assert np.array_equal(2 * view_layout(layout, root, view).table(), layout.table()[:, ::2])
    at = Placed(root, 1024, 2048, layout).address(view, (const(3), const(4)))
    assert isinstance(AddressOf(view, (const(3), const(4))), AddressOf) and not any(isinstance(n, Call) for n in walk(at))
