"""Hopper's raw forms: descriptors, wgmma by hand, T.tma_load, cp.async on mbarriers: simulated, assembled, refused."""

import numpy as np
import pytest
from everywhere import device_of, on_gpu, run
from raw_hopper_programs import f16, f32, product, product_of_registers, signalled

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
rng = np.random.default_rng(21)


def numbers(*shape):
    return rng.integers(-4, 5, shape).astype(np.float16)


def simulated(f, *args):
    """The last tensor after the lowered program (with --device=gpu: on a GPU); its text is taken by NVRTC without
    serialised products or spills."""
    lowered = lower(f.func, SM90A)
    (k,) = lowered.kernels
    text = print_kernel(k)
    if nvrtc.available():
        cubin = nvrtc.compile_cubin(text, "sm_90a")
        assert "C75" not in cubin.log and cubin.spills == 0, cubin.log
    if device_of("simulator") == "gpu":
        return on_gpu(f, *args)[-1], text, k
    return run_device(lowered, [a.copy() for a in args]).outputs[f.func.buffers[-1][1].name], text, k


@pytest.mark.spec("T.alloc_wgmma_desc", "T.initialize_wgmma_descriptor", "T.ptx_wgmma_ss", "T.create_tma_descriptor",
                  "T.tma_load", "L16:tma")
@pytest.mark.parametrize("n", [8, 64, 256])
def test_a_product_by_descriptors_of_tiles_loaded_by_hand(n):
    a, b = numbers(64, 64), numbers(n, 64)
    got, text, kernel = simulated(product(n), a, b, np.zeros((64, n), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)
    assert "tl::tma_load_2d(&As[0], &A_raw_map, &bar[0], 0, 0)" in text
    assert "a_desc = tl::wgmma_descriptor<16, 1024, 1>(&As[0])" in text
    assert kernel.launch.plan.sync_report.startswith("ordered:")
    offsets = dict((b.name, at) for b, at in kernel.launch.plan.shared_offsets)
    assert offsets["As"] % 1024 == offsets["Bs"] % 1024 == 0, "patterns of 128 bytes start at multiples of 1024"


@pytest.mark.spec("T.ptx_wgmma_rs", "T.increase_descriptor_offset", "T.alloc_descriptor")
def test_a_product_with_registers_and_a_descriptor_that_moves():
    a, b = numbers(64, 32), numbers(32, 64)
    got, text, _ = simulated(product_of_registers(), a, b, np.zeros((64, 32), np.float32))
    assert np.array_equal(got, a.astype(np.float32) @ b[:, :32].astype(np.float32).T)
    after = text.split("tl::wgmma_wait<0>();\n")[1]
    assert "tl::wgmma_m64n32k16_f32_f16_f16_rs_k" in text
    assert "tl::registers_out_c(&c[0])" in after.split("// for")[0], "nothing reads the accumulators before the wait"


@pytest.mark.spec("T.cp_async_barrier_noinc", "T.ptx_cp_async_barrier", "L16:mbarriers")
@pytest.mark.parametrize("counted", [True, False])
def test_copies_of_threads_signal_an_mbarrier(counted):
    x = rng.random((3, 512)).astype(np.float32)
    got, text, kernel = simulated(signalled(counted), x, np.zeros_like(x))
    assert np.array_equal(got, x[:, ::-1])
    assert f"tl::cp_async_mbarrier_arrive<{'true' if counted else 'false'}>(&bar[0])" in text
    assert kernel.launch.plan.sync_report.startswith("ordered:")


@pytest.mark.spec("T.alloc_wgmma_desc", "T.initialize_wgmma_descriptor", "T.ptx_wgmma_ss", "T.create_tma_descriptor",
                  "T.tma_load", "T.ptx_wgmma_rs", "T.increase_descriptor_offset", "T.alloc_descriptor", "L16:tma")
@pytest.mark.parametrize("on", ("cpu", "tile"))
def test_executions_without_the_instructions_compute_raw_products(on):
    a, b = numbers(64, 64), numbers(8, 64)
    assert np.array_equal(run(product(8), a, b, on=on)[-1], a.astype(np.float32) @ b.astype(np.float32).T)
    a, b = numbers(64, 32), numbers(32, 64)
    assert np.array_equal(run(product_of_registers(), a, b, on=on)[-1], a.astype(np.float32) @ b[:, :32].astype(np.float32).T)


@pytest.mark.spec("T.cp_async_barrier_noinc", "T.ptx_cp_async_barrier", "L16:mbarriers")
@pytest.mark.parametrize("counted", [True, False])
def test_copies_of_threads_that_signal_on_other_executions(counted):
    x = rng.random((3, 512)).astype(np.float32)
    for on in ("cpu", "tile"):
        assert np.array_equal(run(signalled(counted), x, np.zeros_like(x), on=on)[1], x[:, ::-1]), on


def test_a_read_before_the_barrier_is_found():
    x = np.zeros((1, 512), np.float32)
    programs = []
    with pytest.raises(TileLangError) as e:
        lower(signalled(rounds=1, wait=False).func, SM90A, early=programs.append)
    assert e.value.kind == "sync-unordered"
    with pytest.raises(TileLangError) as e:
        run_device(programs[0], [x, x.copy()])
    assert e.value.kind == "sim-async"


def test_a_descriptor_tells_its_scope():
    @T.prim_func
    def f():
        with T.Kernel(1, threads=128):
            d = T.alloc_wgmma_desc()
            assert d.scope() == "local.descriptor.wgmma" and d.dtype == "uint64"


@pytest.mark.parametrize("program", [product, product_of_registers, signalled])
def test_other_targets_refuse_by_name(program):
    f = program()
    for target in ({"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90"}):
        if target["arch"] == "sm_90" and program is signalled:
            lower(f.func, Target(target))
            continue
        with pytest.raises(TileLangError) as e:
            lower(f.func, Target(target))
        assert e.value.kind == "needs-arch" and "T." in str(e.value), str(e.value)


def refused(build):
    with pytest.raises(TileLangError) as e:
        build()
    return e.value.kind, str(e.value)


def traced(body):
    """A kernel whose statements `body(A, S, bar, desc, c)` makes."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), f16)):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), f16)
            bar = T.alloc_barrier(1)
            desc = T.alloc_wgmma_desc()
            c = T.alloc_local((32,), f32)
            body(A, S, bar, desc, c)

    return f


def a_map(A, shape=(64, 64), strides=(2, 128), box=(64, 64), kind="float16", steps=(1, 1), tail=(0, 3, 2, 0)):
    return T.create_tma_descriptor(kind, 2, A.data, *shape, *strides, *box, *steps, *tail)


SS = (f32, "m64n64k16", True, True, "fp16", "fp16", "fp32")
BAD = {
    "extents": (lambda A, S, bar, d, c: a_map(A, shape=(64, 32)), "tma-descriptor"),
    "strides": (lambda A, S, bar, d, c: a_map(A, strides=(2, 64)), "tma-descriptor"),
    "element type": (lambda A, S, bar, d, c: a_map(A, kind="float32"), "tma-descriptor"),
    "driver type": (lambda A, S, bar, d, c: a_map(A, kind=7), "tma-descriptor"),
    "element strides": (lambda A, S, bar, d, c: a_map(A, steps=(1, 2)), "tma-descriptor"),
    "interleave": (lambda A, S, bar, d, c: a_map(A, tail=(1, 3, 2, 0)), "tma-descriptor"),
    "box": (lambda A, S, bar, d, c: a_map(A, box=(4, 4)), "tensor-map"),
    "coordinates": (lambda A, S, bar, d, c: T.tma_load(a_map(A), bar[0], S, 0), "tma-descriptor"),
    "column": (lambda A, S, bar, d, c: T.tma_load(a_map(A), bar[0], S, 4, 0), "tma-descriptor"),
    "no descriptor": (lambda A, S, bar, d, c: T.tma_load(A, bar[0], S, 0, 0), "tma-descriptor"),
    "no barrier": (lambda A, S, bar, d, c: T.tma_load(a_map(A), S, S, 0, 0), "barrier-operand"),
    "place": (lambda A, S, bar, d, c: T.tma_load(a_map(A), bar[0], A, 0, 0), "extern-argument"),
    "swizzle": (lambda A, S, bar, d, c: T.initialize_wgmma_descriptor(d, S, 4, 1, 64), "descriptor-operand"),
    "field": (lambda A, S, bar, d, c: T.initialize_wgmma_descriptor(d, S, 1, 1, 1 << 14), "descriptor-operand"),
    "address": (lambda A, S, bar, d, c: T.initialize_wgmma_descriptor(d, A, 1, 1, 64), "extern-argument"),
    "variable": (lambda A, S, bar, d, c: T.initialize_wgmma_descriptor(c, S, 1, 1, 64), "descriptor-operand"),
    "odd move": (lambda A, S, bar, d, c: T.increase_descriptor_offset(d, 8), "descriptor-operand"),
    "shape": (lambda A, S, bar, d, c: T.ptx_wgmma_ss(f32, "m64n12k16", *SS[2:], d, 0, d, 0, c.data, 0, 1), "gemm-types"),
    "registers": (lambda A, S, bar, d, c: T.ptx_wgmma_ss(*SS, d, 0, d, 0, c.data, 8, 1), "descriptor-operand"),
    "accumulator": (lambda A, S, bar, d, c: T.ptx_wgmma_ss(*SS, d, 0, d, 0, S.data, 0, 1), "descriptor-operand"),
    "negated": (lambda A, S, bar, d, c: T.ptx_wgmma_ss(*SS, d, 0, d, 0, c.data, 0, 1, -1, 1), "not-available"),
    "order": (lambda A, S, bar, d, c: T.ptx_wgmma_ss(f32, "m64n64k32", True, False, "e4m3", "e4m3", "fp32", d, 0, d, 0,
                                                      c.data, 0, 1), "gemm-types"),
    "signal": (lambda A, S, bar, d, c: T.cp_async_barrier_noinc(S), "barrier-operand"),
    "kind": (lambda A, S, bar, d, c: T.alloc_descriptor("tcgen05_smem"), "not-available"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_operands_are_refused(what):
    body, kind = BAD[what]
    got, text = refused(lambda: traced(body))
    assert got == kind, text


def test_a_tensor_that_the_kernel_stores_is_not_loaded_by_tma():
    @T.prim_func
    def f(A: T.Tensor((64, 64), f16)):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), f16)
            bar = T.alloc_barrier(1)
            A[0, T.get_thread_binding() % 64] = 1
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(bar, 64 * 64 * 2)
                T.tma_load(a_map(A), bar, S, 0, 0)
                T.mbarrier_arrive(bar)
            T.mbarrier_wait_parity(bar, 0)

    kind, text = refused(lambda: lower(f.func, SM90A))
    assert kind == "tma-copy" and "TMA does not see" in text


@pytest.fixture
def hopper():
    if not Target("cuda").has_wgmma:
        pytest.skip("needs a Hopper GPU (sm_90a)")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 64, 256])
def test_raw_products_on_a_gpu(n, hopper):
    a, b = numbers(64, 64), numbers(n, 64)
    got = on_gpu(product(n), a, b)[-1]
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32).T)


@pytest.mark.gpu
def test_raw_registers_and_signalled_copies_on_a_gpu(hopper):
    a, b = numbers(64, 32), numbers(32, 64)
    assert np.array_equal(on_gpu(product_of_registers(), a, b)[-1], a.astype(np.float32) @ b[:, :32].astype(np.float32).T)
    x = rng.random((3, 512)).astype(np.float32)
    for counted in (True, False):
        assert np.array_equal(on_gpu(signalled(counted), x)[-1], x[:, ::-1])
