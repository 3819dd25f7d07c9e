"""Prebuilt kernels out of a folder: hand-written ones to compare with, that are no part of this project.

The folder ($TILELANG_BENCH_CUBINS, option --cubins) holds cubins and an index.json:

    {"kernels": [{"label": "...", "workload": "M5-nt-f16", "file": "gemm.cubin", "function": "gemm", "threads": 384,
                  "shared_bytes": 229440, "cluster": 2, "grid": 1024,
                  "arguments": [{"map": "a", "type": "float16", "dims": [8192, 8192], "strides": [16384],
                                 "box": [64, 128], "swizzle": 128, "l2": 256}, {"int32": 8192}, {"float32": 0.08}]}]}

One entry is one way to run one workload.  grid: blocks, at most as many as the device has sm_count.  A map is a
tensor map of a tensor of the problem ("out" is the result), dims and box innermost first, strides in bytes without the
innermost; {"tensor": "a"} passes an address.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .problems import Problem
from .providers import Candidate, Provider, Skip
from .workloads import Workload

FOLDER = "TILELANG_BENCH_CUBINS"
_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE, _L2 = {0: 0, 32: 1, 64: 2, 128: 3}, {0: 0, 64: 1, 128: 2, 256: 3}
_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)]


class Launch:
    """A kernel with its arguments packed; calling it launches on torch's current stream."""

    def __init__(self, function: Any, entry: dict[str, Any], arguments: list[Any], sms: int) -> None:
        driver, cluster = function.module.driver, entry.get("cluster", 1)
        self.function, self.check, self.cells = function, driver.check, arguments
        self.parameters = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        blocks = min(sms, entry["grid"]) // cluster * cluster
        self.attributes = (_Attribute * 1)()
        self.attributes[0].id = _CLUSTER_DIMENSION
        self.attributes[0].value[0:3] = [cluster, 1, 1]
        self.config = _Config((ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(entry["threads"], 1, 1),
                              entry["shared_bytes"], None, self.attributes, int(cluster > 1))
        self.run = driver.lib.cuLaunchKernelEx

    def __call__(self) -> None:
        self.config.stream = torch.cuda.current_stream().cuda_stream
        self.check(self.run(ctypes.byref(self.config), self.function.handle, self.parameters, None), "cuLaunchKernelEx")


def tensor_map(lib: Any, address: int, a: dict[str, Any]) -> Any:
    """The 128 bytes of a map, 64-byte aligned, as a ctypes array."""
    rank, room = len(a["dims"]), (ctypes.c_uint8 * 192)()
    place = -(-ctypes.addressof(room) // 64) * 64
    at = (ctypes.c_uint8 * 128).from_buffer(room, place - ctypes.addressof(room))
    rc = lib.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _TYPES[a["type"]], rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*a["dims"]),
        (ctypes.c_uint64 * max(1, rank - 1))(*a["strides"]), (ctypes.c_uint32 * rank)(*a["box"]),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, _SWIZZLE[a.get("swizzle", 0)], _L2[a.get("l2", 0)], 0)
    if rc:
        raise RuntimeError(f"cuTensorMapEncodeTiled of {a['map']} gave CUresult {rc}")
    return at


def argument(lib: Any, tensors: dict[str, Any], a: dict[str, Any]) -> Any:
    """One argument of index.json as a ctypes object."""
    if "map" in a:
        return tensor_map(lib, tensors[a["map"]].data_ptr(), a)
    if "tensor" in a:
        return ctypes.c_uint64(tensors[a["tensor"]].data_ptr())
    return ctypes.c_int32(a["int32"]) if "int32" in a else ctypes.c_float(a["float32"])


@cache
def index() -> tuple[dict[str, Any], ...]:
    """The entries of the folder's index; () without one."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        return ()
    return tuple(json.loads((Path(folder) / "index.json").read_text(encoding="utf-8"))["kernels"])


@cache
def _module(file: str) -> Any:
    from tilelang.runtime import cuda_driver

    torch.cuda.current_stream()  # torch's context is the one to load into
    driver = cuda_driver.driver()
    driver.ensure_context(torch.cuda.current_device())
    return driver.load((Path(os.environ[FOLDER]) / file).read_bytes())


class Cubins(Provider):
    name, text, is_peer = "cubin", "prebuilt kernels of the folder --cubins", False

    def unavailable(self) -> str:
        try:
            if not index():
                return "no folder of kernels is given (--cubins)"
        except (OSError, ValueError, KeyError) as e:
            return f"the folder of kernels cannot be read: {e}"
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def labels(self, workload: Workload) -> Sequence[str]:
        found = [e["label"] for e in index() if e["workload"] == workload.name]
        if not found:
            raise Skip("the folder has no kernel for it")
        return found

    def candidate(self, problem: Problem, label: str) -> Candidate:
        entry = next(e for e in index() if e["workload"] == problem.workload.name and e["label"] == label)
        function, out = _module(entry["file"]).function(entry["function"], entry["shared_bytes"]), problem.new_out()
        tensors = {**problem.tensors, "out": out}
        arguments = [argument(function.module.driver.lib, tensors, a) for a in entry["arguments"]]
        launch = Launch(function, entry, arguments, torch.cuda.get_device_properties(0).multi_processor_count)

        def call() -> torch.Tensor:
            launch()
            return out

        return Candidate(label, call, {"file": entry["file"]})


def provider() -> Provider:
    return Cubins()
