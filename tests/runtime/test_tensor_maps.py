"""Tensor maps encoded by host code: what the driver is given, what is kept, what is refused."""

import ctypes

import numpy as np
import pytest
from by_driver import encode
from fake_driver import Driver, OnGpu
from hosts import HANDLE, tensor

from tilelang.ir import I32, I64, Func, If, Launch, Store, Var, const, load, seq, LaunchPlan, FuncFacts
from tilelang.runtime.host_engine import HostLibrary, compile_object
from tilelang.runtime.host_stub import stub_text
from tilelang.runtime.launchers import GpuLauncher
from tilelang.runtime.signature import signature_of
from tilelang.target.tensor_map import TensorMap, unsupported
from tilelang.transform.lower.device_program import split_host

P, I, U = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32


class Bytes(ctypes.Structure):
    """A map as the kernel gets it."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]

    @property
    def value(self):
        return tuple(self.words)


class MapDriver(Driver):
    """Writes down what is encoded; the map it makes holds the number of the call."""

    def __init__(self, kernels, types):
        super().__init__(kernels, types)
        self.encoded, self.refuse = [], 0
        self.callbacks["cuTensorMapEncodeTiled"] = ctypes.CFUNCTYPE(
            I, P, I, I, P, P, P, P, P, I, I, I, I)(self.encode)
        self.cuTensorMapEncodeTiled = self.callbacks["cuTensorMapEncodeTiled"]

    def encode(self, place, kind, rank, address, dims, strides, box, ones, interleave, swizzle, l2, fill):
        def numbers(p, ty, n):
            return list(ctypes.cast(p, ctypes.POINTER(ty))[:n])

        assert place % 64 == 0
        self.encoded.append({
            "kind": kind, "address": address, "dims": numbers(dims, ctypes.c_uint64, rank),
            "strides": numbers(strides, ctypes.c_uint64, rank - 1), "box": numbers(box, U, rank),
            "ones": numbers(ones, U, rank), "codes": (interleave, swizzle, l2, fill)})
        ctypes.cast(place, ctypes.POINTER(Bytes)).contents.words[:] = [len(self.encoded)] * 16
        return self.refuse or (0 if self.current else 201)  # CUDA_ERROR_INVALID_CONTEXT


def launch(grid, body, **plan):
    return Launch(grid, (Var("bx", I32),), (128, 1, 1), tuple(Var(f"t{n}", I32) for n in "xyz"), body,
                  LaunchPlan(**plan))


def built(func, types):
    lowered = split_host(func)
    sig = signature_of(func)
    text = stub_text(sig, GpuLauncher(lowered.host, lowered.kernels), set(sig.symbols), ("call",))
    driver = MapDriver(lowered.kernels, types)
    library = HostLibrary(compile_object(text), ("tl_call",), driver.symbols())
    return library.function("tl_call", driver, release_gil=False), driver


def function(tensors, body, scalars=()):
    handles = [Var(t.name + "_handle", HANDLE) for t in tensors]
    return Func("main", (*handles, *scalars), tuple(zip(handles, tensors)), body, facts=FuncFacts(phase="DEVICE"))


def touch(b):
    return Store(b, tuple(const(0) for _ in b.shape), load(b, tuple(const(0) for _ in b.shape)))


def array(shape, dt=np.float16):
    """An array whose data is a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dt).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dt).reshape(shape)


def test_a_map_is_encoded_from_the_call_and_passed_by_value_after_the_parameters():
    m, n = Var("m", I32), Var("n", I32)
    a, b = tensor("A", (m, n), "float16"), tensor("B", (4, m, n), "float32")
    maps = (TensorMap("A_map", a, (64, 128), 128, "zero", 256), TensorMap("B_map", b, (8, 16, 1), 32, "nan"))
    body = launch((const(3),), touch(a), tensor_maps=tuple(x.entry for x in maps))
    call, driver = built(function((a, b), body), [(P, I, I, Bytes, Bytes)])
    x, y = array((96, 200)), array((4, 96, 200), np.float32)
    assert call(OnGpu(x), OnGpu(y)) is None
    assert driver.encoded[0] == {"kind": 6, "address": x.ctypes.data, "dims": [200, 96], "strides": [400],
                                 "box": [64, 128], "ones": [1, 1], "codes": (0, 3, 3, 0)}
    assert driver.encoded[1] == {"kind": 7, "address": y.ctypes.data, "dims": [200, 96, 4], "strides": [800, 76800],
                                 "box": [8, 16, 1], "ones": [1, 1, 1], "codes": (0, 1, 0, 1)}
    assert driver.launches[0][5] == [x.ctypes.data, 96, 200, (1,) * 16, (2,) * 16]


def one_map(shape=None, strides=None, scalars=(), guard=None):
    m, n = Var("m", I32), Var("n", I32)
    a = tensor("A", shape or (m, n), "float16", strides and strides(m, n))
    body = launch((const(1),), seq(), tensor_maps=(TensorMap("A_map", a, (64, 64), 128).entry,))
    return built(function((a,), body if guard is None else If(guard, body), scalars), [(Bytes,)])


def test_a_map_is_kept_until_the_tensor_changes():
    call, driver = one_map()
    x, y = array((64, 128)), array((64, 128))
    for tensor_ in (x, x, y, y, x, x[:32], x[:32], x[:32].reshape(16, 256)):
        call(OnGpu(tensor_))
    assert [e["dims"] for e in driver.encoded] == [[128, 64]] * 3 + [[128, 32], [256, 16]]
    assert [v[5][0][0] for v in driver.launches] == [1, 1, 2, 2, 3, 4, 4, 5]


def test_a_thread_without_a_context_gets_the_devices_for_its_maps():
    """PyTorch's threads for gradients may call a kernel before anything else: the driver encodes nothing for them then."""
    call, driver = one_map()
    call(OnGpu(array((64, 128))))
    assert len(driver.encoded) == 1 and driver.pushed == 2 and driver.current == 0  # for the map, and for the launch
    driver.current = driver.contexts[0]
    call(OnGpu(array((32, 128))))
    assert len(driver.encoded) == 2 and driver.pushed == 2 and driver.current == driver.contexts[0]


def test_what_tma_cannot_describe_is_refused_before_anything_runs():
    call, driver = one_map()
    with pytest.raises(RuntimeError, match=r"A strides\[0\] .* multiple of 16 bytes"):
        call(OnGpu(array((64, 100))))
    raw = array((64 * 128 + 8,))
    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        call(OnGpu(raw[4:4 + 64 * 128].reshape(64, 128)))
    driver.refuse = 1
    with pytest.raises(RuntimeError, match="the driver rejected"):
        call(OnGpu(array((64, 128))))
    assert len(driver.encoded) == 1 and driver.launches == []
    driver.refuse = 0
    call(OnGpu(array((64, 128))))  # a refused map is not kept
    assert len(driver.encoded) == 2 and len(driver.launches) == 1


def test_declared_strides_are_the_maps_strides():
    s = Var("s", I64)
    call, driver = one_map(strides=lambda m, n: (s, 1))
    wide = array((64, 256))
    call(OnGpu(wide[:, :128]))
    assert driver.encoded[0]["dims"] == [128, 64] and driver.encoded[0]["strides"] == [512]


def test_a_tensor_without_elements_has_a_map_of_zeros():
    call, driver = one_map()
    call(OnGpu(array((0, 128))))
    assert driver.encoded == [] and driver.launches[0][5] == [(0,) * 16]


def test_a_launch_that_does_not_happen_encodes_nothing():
    k = Var("k", I32)
    call, driver = one_map(scalars=(k,), guard=k > 0)
    call(OnGpu(array((64, 100))), 0)
    assert driver.encoded == []
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        call(OnGpu(array((64, 100))), 1)


def test_encoding_from_python_is_the_same():
    a = tensor("A", (4, 96, 200), "bfloat16")
    driver = MapDriver([None], [()])
    driver.current = 7000
    out = encode(driver, TensorMap("A_map", a, (64, 8, 1), 128), 4096, (4, 96, 200))
    assert out == np.full(16, 1, np.uint64).tobytes()
    assert driver.encoded[0]["strides"] == [400, 38400] and driver.encoded[0]["dims"] == [200, 96, 4]
    with pytest.raises(ValueError, match="multiples of 16"):
        encode(driver, TensorMap("A_map", a, (64, 8, 1), 128), 4100, (4, 96, 200))


@pytest.mark.parametrize("shape, dt, box, more, why", [
    ((64, 64), "float16", (64, 64), {"swizzle": 128}, None),
    ((64, 100), "float16", (64, 64), {}, "stride of 200"),
    ((64, 64), "float16", (64, 257), {}, "1 to 256"),
    ((64, 64), "float16", (4, 64), {}, "8 bytes"),
    ((64, 64), "float16", (64, 64), {"swizzle": 64}, "128 bytes, more than"),
    ((64, 64), "int32", (8, 8), {"fill": "nan"}, "no NaN"),
    ((64, 64), "float32", (8, 8), {"fill": "nan"}, None),
    ((2,) * 5 + (64,), "float16", (64,) + (1,) * 5, {}, "6 dimensions"),
    ((64, 64), "float16", (64,), {}, "1 extents for 2"),
    ((64, 64), "float8_e4m3", (64, 64), {"swizzle": 64}, None),
])
def test_static_rules(shape, dt, box, more, why):
    got = unsupported(tensor("A", shape, dt), box, **more)
    assert got is None if why is None else why in got


def test_a_map_that_cannot_be_is_refused_when_the_program_is_split():
    a = tensor("A", (64, 100), "float16")
    body = launch((const(1),), touch(a), tensor_maps=(TensorMap("A_map", a, (64, 64), 128).entry,))
    with pytest.raises(ValueError, match="TMA cannot move boxes"):
        split_host(function((a,), body))
