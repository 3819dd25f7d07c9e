"""A CUDA driver made of Python functions, and NumPy arrays that say they are on a GPU."""

import ctypes

from tilelang.runtime import dlpack
from tilelang.runtime.launchers import MAX_DEVICES

P, I, U = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32


class OnGpu(dlpack.Exported):
    """A NumPy array that says it is on a CUDA device."""

    kind = 2  # DLPack's

    def __init__(self, array, device=0):
        super().__init__(array)
        self.device = device

    def __dlpack_device__(self):
        return self.kind, self.device

    def __dlpack__(self, **_):
        capsule = super().__dlpack__()
        for managed, array, *_ in dlpack._alive.values():
            if array is self.array:
                managed.tensor.device_type, managed.tensor.device_id = self.kind, self.device
        return capsule


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("number", I), ("pad", I), ("words", U * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", U * 3), ("block", U * 3), ("shared", U), ("stream", P), ("attributes", ctypes.POINTER(Attribute)),
                ("count", U)]


class Driver:
    """Counts what the host code asks of the driver; launches are (function, grid, block, shared, stream, arguments)."""

    def __init__(self, kernels, types):
        self.memory, self.memory_result = [], 0  # ("allocate", bytes), ("clear", address, bytes), ("free", address)
        self.extended = []  # (function, grid, block, shared, stream, attributes)
        self.window, self.most_set_aside, self.limits = 1 << 20, 1 << 18, {6: 4096}  # bytes of L2: of a window, set aside
        self.launches, self.loads, self.pushed, self.result, self.load_result = [], [], 0, 0, 0
        self.types, self.current = types, 0
        self.functions = (P * (len(kernels) * MAX_DEVICES))()
        self.contexts = (P * MAX_DEVICES)()
        self.status = I(0)
        self.count = len(kernels)
        self.callbacks = {
            "cuLaunchKernel": ctypes.CFUNCTYPE(I, P, U, U, U, U, U, U, U, P, ctypes.POINTER(P), P)(self._launch),
            "cuLaunchKernelEx": ctypes.CFUNCTYPE(I, ctypes.POINTER(Config), P, ctypes.POINTER(P), P)(self._launch_ex),
            "cuCtxGetCurrent": ctypes.CFUNCTYPE(I, ctypes.POINTER(P))(self._get),
            "cuCtxPushCurrent_v2": ctypes.CFUNCTYPE(I, P)(self._push),
            "cuCtxPopCurrent_v2": ctypes.CFUNCTYPE(I, ctypes.POINTER(P))(self._pop),
            "cuMemAllocAsync": ctypes.CFUNCTYPE(I, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, P)(self._allocate),
            "cuMemsetD8Async": ctypes.CFUNCTYPE(I, ctypes.c_int64, ctypes.c_int8, ctypes.c_int64, P)(self._clear),
            "cuMemFreeAsync": ctypes.CFUNCTYPE(I, ctypes.c_int64, P)(self._free),
            "cuCtxGetDevice": ctypes.CFUNCTYPE(I, ctypes.POINTER(I))(lambda out: 0),
            "cuDeviceGetAttribute": ctypes.CFUNCTYPE(I, ctypes.POINTER(I), I, I)(self._attribute),
            "cuCtxGetLimit": ctypes.CFUNCTYPE(I, ctypes.POINTER(ctypes.c_int64), I)(self._get_limit),
            "cuCtxSetLimit": ctypes.CFUNCTYPE(I, I, ctypes.c_int64)(self._set_limit),
            "tl_load": ctypes.CFUNCTYPE(I, I)(self._load)}

    def symbols(self):
        out = {n: ctypes.cast(f, P).value for n, f in self.callbacks.items()}
        out.update(tl_functions=ctypes.addressof(self.functions), tl_contexts=ctypes.addressof(self.contexts),
                   tl_status=ctypes.addressof(self.status))
        return out

    def _launch(self, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        k = (f - 1000) % 100
        values = [ctypes.cast(params[i], ctypes.POINTER(t)).contents.value for i, t in enumerate(self.types[k])]
        self.launches.append((f, (gx, gy, gz), (bx, by, bz), shared, stream, values, self.current))
        return self.result

    def _launch_ex(self, config, f, params, extra):
        c = config.contents
        attributes = [(a.number, tuple(a.words[:{1: 7, 4: 3}.get(a.number, 1)])) for a in c.attributes[:c.count]]
        attributes = [(n, words if n in (1, 4) else (words[0], 0, 0)) for n, words in attributes]
        self.extended.append((f, tuple(c.grid), tuple(c.block), c.shared, c.stream, attributes))
        return self.result

    def _allocate(self, out, nbytes, stream):
        self.memory.append(("allocate", nbytes))
        out[0] = 1 << 20
        return self.memory_result

    def _clear(self, address, value, nbytes, stream):
        self.memory.append(("clear", address, nbytes))
        return 0

    def _free(self, address, stream):
        self.memory.append(("free", address))
        return 0

    def _attribute(self, out, number, device):
        assert self.current == 7000
        out[0] = {108: self.most_set_aside, 109: self.window}[number]
        return 0

    def _get_limit(self, out, number):
        out[0] = self.limits[number]
        return 0

    def _set_limit(self, number, size):
        self.limits[number] = size
        return 0

    def _get(self, out):
        out[0] = self.current
        return 0

    def _push(self, context):
        self.stack, self.current, self.pushed = self.current, context, self.pushed + 1
        return 0

    def _pop(self, out):
        self.current = self.stack
        return 0

    def _load(self, device):
        self.loads.append(device)
        if self.load_result == 0:
            self.contexts[device] = 7000 + device
            for k in range(self.count):
                self.functions[k * MAX_DEVICES + device] = 1000 + 100 * device + k
        return self.load_result
