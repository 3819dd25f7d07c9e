"""Runs printed kernels through the driver alone, without host code of a program; encodes their tensor maps."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from completed import completed

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import error
from tilelang.runtime import cuda_driver
from tilelang.runtime.nvrtc import compile_cubin
from tilelang.runtime.tensor_maps import ENCODE
from tilelang.target.tensor_map import ADDRESS_ALIGN, MAP_ALIGN, MAP_BYTES, STRIDE_ALIGN, TensorMap


def encode(lib: Any, tensor_map: TensorMap, address: int, shape: tuple[int, ...]) -> bytes:
    """The 128 bytes of a map for a compact tensor at a device address.  lib: the driver library."""
    rank, size = tensor_map.rank, tensor_map.buffer.dtype.bytes
    strides = [int(np.prod(shape[d + 1:])) for d in range(rank)]
    steps = [s * size for s in reversed(strides)][1:]
    if address % ADDRESS_ALIGN or any(s % STRIDE_ALIGN for s in steps):
        raise error("tensor-map", f"address {address:#x} and strides {steps} must be multiples of 16", found=str(steps))
    room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGN)
    place = -(-ctypes.addressof(room) // MAP_ALIGN) * MAP_ALIGN
    dims = (ctypes.c_uint64 * rank)(*reversed(shape))
    pitch = (ctypes.c_uint64 * max(1, rank - 1))(*steps)
    box, ones = (ctypes.c_uint32 * rank)(*tensor_map.box), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind, swizzle, l2, fill = tensor_map.codes
    assert getattr(lib, ENCODE)(ctypes.c_void_p(place), kind, rank, ctypes.c_void_p(address), dims, pitch, box, ones,
                                0, swizzle, l2, fill) == 0
    return ctypes.string_at(place, MAP_BYTES)


def run(k: Any, arch: str, arrays: dict[str, np.ndarray], grid: tuple[int, ...] = (1,),
        maps: tuple[TensorMap, ...] = ()) -> dict[str, np.ndarray]:
    """Compile and launch a kernel on device 0; tensors by name, all come back."""
    d = cuda_driver.driver()
    d.ensure_context()
    f = d.load(compile_cubin(print_kernel(k), arch).bytes).function(k.name, k.launch.plan.shared_bytes)
    places = {n: ctypes.c_uint64() for n in arrays}
    for n, a in arrays.items():
        d.call("cuMemAlloc_v2", ctypes.byref(places[n]), ctypes.c_size_t(max(1, a.nbytes)))
    try:
        for n, a in arrays.items():
            compact = np.ascontiguousarray(a)
            d.call("cuMemcpyHtoD_v2", places[n], ctypes.c_void_p(compact.ctypes.data), ctypes.c_size_t(a.nbytes))
        cells = [places[p.name] for p in k.params]
        cells += [ctypes.create_string_buffer(encode(d.lib, m, places[m.buffer.name].value, m.buffer.shape), MAP_BYTES)
                  for m in maps]
        params = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        shape = [*grid, 1, 1][:3] + [*k.launch.threads, 1, 1][:3]
        d.call("cuLaunchKernel", f.handle, *map(ctypes.c_uint, (*shape, f.dynamic_shared)), ctypes.c_void_p(0), params, None)
        d.call("cuCtxSynchronize")
        completed("gpu")
        out = {n: np.empty_like(a, order="C") for n, a in arrays.items()}
        for n, a in out.items():
            d.call("cuMemcpyDtoH_v2", ctypes.c_void_p(a.ctypes.data), places[n], ctypes.c_size_t(a.nbytes))
        return out
    finally:
        for p in places.values():
            d.call("cuMemFree_v2", p)
