"""Tensors whose addresses or strides wide accesses do not suit: the same program as another kernel, chosen at the call."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import AddressOf, Call, If, Launch, Load, Ramp, Store, seq, walk
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_driver import OnGpu
from test_cuda_loading import FakeDriver

P, I = ctypes.c_void_p, ctypes.c_int32
HOPPER, ON = Target({"kind": "cuda", "arch": "sm_90a"}), {"tl.enable_hopper": True}
OFF = {"tl.enable_hopper": False}
compiled = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


def gemm(m, n, k, stages=2, dt="float16"):
    @T.prim_func
    def main(A: T.Tensor((m, k), dt), B: T.Tensor((n, k), dt), C: T.Tensor((m, n), dt)):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 64), dt), T.alloc_shared((64, 64), dt)
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=stages):
                T.copy(A[by * 64, i * 64], a)
                T.copy(B[bx * 64, i * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    return main


def open_gemm():
    m, n, k = T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    return gemm(m, n, k)


def widest(program):
    """Bytes of the widest access of global memory, and the operations that touch it by address."""
    wide, ops = 0, set()
    for kernel in program.kernels:
        for x in walk(kernel.launch):
            if isinstance(x, (Load, Store)) and x.buffer.scope_name == "global":
                lanes = x.indices[-1].lanes if isinstance(x.indices[-1], Ramp) else 1
                wide = max(wide, x.buffer.dtype.bytes * int(lanes))
            elif isinstance(x, Call):
                ops |= {x.op for a in x.args if isinstance(a, AddressOf) and a.buffer.scope_name == "global"}
                ops |= {x.op} & {"tma_load", "tma_store", "wgmma"}
    return wide, ops


@pytest.mark.parametrize("target, config", [(Target({"kind": "cuda", "arch": "sm_80"}), {}), (HOPPER, ON)])
@pytest.mark.parametrize("make", [lambda: gemm(100, 72, 200), open_gemm])
def test_tensors_at_any_address_are_accessed_by_elements(make, target, config):
    func = make().func
    wide, ops = widest(lower(func, target, {**config, "tl.global_alignment": 1}))
    assert wide == 2 and ops <= {"wgmma"}
    wide, ops = widest(lower(func, target, config))
    assert wide > 2 or ops & {"cp_async", "tma_load"} or make is open_gemm


@pytest.mark.parametrize("k", [192, 0, 1, 77])
def test_both_kernels_compute_the_program(k):
    func = gemm(70, 72, 192).func if k == 192 else open_gemm().func
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-3, 4, (r, k)).astype(np.float16) for r in (70, 72))
    args = {"A": a, "B": b, "C": np.full((70, 72), 5, np.float16)}
    want = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float16)
    for config in (ON, {**ON, "tl.global_alignment": 1}):
        assert np.array_equal(run_device(lower(func, HOPPER, config), args).outputs["C"], want)


@pytest.mark.parametrize("m, n, k", [(70, 72, 256), (0, 72, 64), (70, 0, 64), (70, 72, 0), (1, 8, 8)])
def test_run_time_strides_that_suit_tma_are_loaded_by_it(m, n, k):
    program = lower(open_gemm().func, HOPPER, {**ON, "tl.assume_aligned_strides": True})
    assert {"tma_load", "wgmma"} <= widest(program)[1]
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((m, k), (n, k)))
    got = run_device(program, {"A": a, "B": b, "C": np.full((m, n), 5, np.float16)}).outputs["C"]
    assert np.array_equal(got, (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float16))


def counted(stages=2):
    """A loop with roles whose extent is an argument."""

    @T.prim_func
    def main(A: T.Tensor((128, 512), "float16"), B: T.Tensor((64, 512), "float16"), C: T.Tensor((128, 64), "float32"),
             n: T.int32):
        with T.Kernel(2, threads=128) as by:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for i in T.Pipelined(n, num_stages=stages):
                T.copy(A[by * 64, i * 64], a)
                T.copy(B[0, i * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, 0])

    return main


def counted_case(n):
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-3, 4, (r, 512)).astype(np.float16) for r in (128, 64))
    return a, b, a[:, :64 * n].astype(np.float64) @ b[:, :64 * n].astype(np.float64).T


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7, 8])
def test_a_loop_with_roles_runs_any_number_of_times(n, stages):
    program = lower(counted(stages).func, HOPPER, ON)
    assert {"tma_load", "wgmma"} <= widest(program)[1] and "model of" in program.kernels[0].plan.sync_report
    a, b, want = counted_case(n)
    got = run_device(program, {"A": a, "B": b, "C": np.full((128, 64), 5, np.float32), "n": n}).outputs["C"]
    assert np.array_equal(got, want)


@pytest.mark.gpu
def test_a_loop_with_roles_runs_any_number_of_times_on_a_gpu():
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(counted(3), target="cuda", pass_configs=ON)
    for n in (0, 1, 2, 3, 4, 7, 8):
        a, b, want = counted_case(n)
        c = torch.full((128, 64), 5.0, device="cuda")
        kernel(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda(), c, n)
        assert np.array_equal(c.cpu().numpy(), want)


def off_by(shape, elements, dt=np.float16):
    """A tensor of zeros whose data is `elements` elements past a multiple of 64 bytes."""
    count = int(np.prod(shape))
    room = np.zeros(count + 128, dt)
    first = -room.ctypes.data % 64 // room.itemsize + elements
    return OnGpu(room[first:first + count].reshape(shape))


class MapsDriver(FakeDriver):
    """Also encodes tensor maps, and notes which kernels were loaded."""

    def __init__(self, types):
        super().__init__(types)
        self.maps = 0
        self.callbacks["cuTensorMapEncodeTiled"] = ctypes.CFUNCTYPE(I, P, I, I, P, P, P, P, P, I, I, I, I)(self._encode)
        self.lib.cuTensorMapEncodeTiled = self.callbacks["cuTensorMapEncodeTiled"]

    def _encode(self, *_):
        self.maps += 1
        return 0


@pytest.fixture
def driver(monkeypatch):
    from tilelang.runtime import cuda_driver

    made = MapsDriver([(P, P, P)])
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    return made


def kernels(func, config):
    with tilelang.env.using(TILELANG_DISABLE_CACHE="1"):
        return tilelang.compile(func, target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=config)


@compiled
@pytest.mark.parametrize("config", [OFF, ON])
def test_a_view_that_is_not_aligned_is_given_to_the_other_kernel(driver, config):
    kernel = kernels(gemm(128, 64, 128), config)
    aligned = [off_by(s, 0) for s in ((128, 128), (64, 128), (128, 64))]
    kernel(*aligned)
    assert len(driver.launches) == 1 and "unaligned" not in kernel._variants
    maps = driver.maps
    assert bool(maps) == (config is ON)
    for at in range(3):
        args = list(aligned)
        args[at] = off_by(args[at].array.shape, 1)
        kernel(*args)
    assert len(driver.launches) == 4 and driver.maps == maps
    assert [x[5][at] for at, x in enumerate(driver.launches[1:])][0] % 16 == 2
    other = kernel.unaligned
    assert other.pass_configs["tl.global_alignment"] == 1 and other.unaligned is not kernel
    kernel(*aligned)
    assert len(driver.launches) == 5
    assert "tensors at any address" in kernel.report()


@compiled
def test_run_time_strides_choose_the_kernel(monkeypatch):
    from tilelang.runtime import cuda_driver

    made = MapsDriver([()])
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    kernel = kernels(open_gemm(), ON)
    for k, maps in ((128, True), (100, False), (0, True)):
        before = made.maps
        kernel(*(off_by(s, 0) for s in ((128, k), (64, k), (128, 64))))
        assert (made.maps > before) == (maps and k > 0) or k == 0
    assert len(made.launches) == 3 and "unaligned" in kernel._variants


@compiled
def test_launches_under_a_condition_assume_nothing_of_strides():
    func = open_gemm().func
    (launch,) = [x for x in walk(func.body) if isinstance(x, Launch)]
    from tilelang.ir import replace
    from tilelang.jit.building import device_source
    from tilelang.jit.requests import make_request

    k = func.buffers[0][1].shape[1]
    later = replace(func, body=seq(If(k > 0, launch)))
    assert "tma_load" in widest(device_source(make_request(func, target=HOPPER, pass_configs=ON))[0])[1]
    assert "tma_load" not in widest(device_source(make_request(later, target=HOPPER, pass_configs=ON))[0])[1]


@compiled
def test_other_mistakes_stay_errors(driver):
    kernel = kernels(gemm(128, 64, 128), ON)
    good = [off_by(s, 0) for s in ((128, 128), (64, 128), (128, 64))]
    with pytest.raises(RuntimeError, match=r"input B shape\[0\]"):
        kernel(good[0], off_by((65, 128), 1), good[2])
    assert driver.launches == [] and "unaligned" not in kernel._variants


@pytest.mark.gpu
@pytest.mark.parametrize("config", [OFF, ON])
def test_views_on_a_gpu(config):
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(gemm(200, 136, 328), out_idx=[-1], target="cuda", pass_configs=config)
    a, b = (torch.randint(-3, 4, s, device="cuda").half() for s in ((200, 328), (136, 328)))
    want = (a.double() @ b.double().T).half()
    assert torch.equal(kernel(a, b), want)
    for at in (1, 3, 4):
        va = torch.empty(a.numel() + 8, device="cuda", dtype=a.dtype)[at:at + a.numel()].view(a.shape).copy_(a)
        assert torch.equal(kernel(va, b), want) and torch.equal(kernel(a, b), want)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(200, 136, 328), (200, 136, 331), (200, 131, 64), (0, 8, 8), (8, 0, 8), (64, 64, 0)])
def test_run_time_sizes_on_a_gpu(m, n, k):
    torch = pytest.importorskip("torch")
    kernel = tilelang.compile(open_gemm(), out_idx=[-1], target="cuda", pass_configs=ON)
    a, b = (torch.randint(-3, 4, s, device="cuda").half() for s in ((m, k), (n, k)))
    assert torch.equal(kernel(a, b), (a.double() @ b.double().T).half())
