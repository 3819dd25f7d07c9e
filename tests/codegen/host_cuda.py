"""Printed CUDA on the host: compiled by g++ against host_cuda.h.  Checks text and addressing, not PTX."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tilelang.codegen.cuda.printer import print_kernel
from tilelang.codegen.cuda.printer import sections
from tilelang.codegen.device.types import type_name
from tilelang.ir import Buffer
from tilelang.target.instructions import function_name
from tilelang.target.mma import MMA_ROWS
from tilelang.target.tensor_map import tensor_maps_of
from tilelang.target.wgmma import WGMMA_ROWS

HEADER = Path(__file__).with_name("host_cuda.h")
COMPILE = ("g++", "-O1", "-std=c++17", "-mf16c", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-fPIC")
_C_TYPES = {"int32": "int", "int64": "long long", "uint32": "unsigned", "float32": "float", "float64": "double",
            "bool": "bool"}
_WORD = re.compile(r"\w+")


def available() -> bool:
    return shutil.which("g++") is not None and "f16c" in _cpu_flags()


def _cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _host_sections(text: str) -> dict[str, str]:
    parts = re.split(r"^//@ (\w+)\n", text, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def _parts() -> list[str]:
    """host_cuda.h: the machine that every kernel runs on, and what stands for sections of the prelude."""
    return HEADER.read_text().split("// ==== sections", 1)


@functools.cache
def _machine() -> tempfile.TemporaryDirectory[str]:
    """A folder with machine.h, compiled once a process: its headers take longer than a kernel."""
    folder = tempfile.TemporaryDirectory(prefix="host_cuda")
    file = Path(folder.name) / "machine.h"
    file.write_text(_parts()[0])
    subprocess.run([*COMPILE, "-x", "c++-header", str(file)], check=True)
    return folder


def host_source(kernel: Any) -> str:
    """A C++ file with the kernel's printed text and an entry `run`."""
    device = print_kernel(kernel)
    replaced = _parts()[1]
    table = sections() | _host_sections(replaced)
    text = device[device.index('extern "C" __global__'):].replace("extern __shared__ ", "extern ", 1)
    wanted, todo = set(), set(_WORD.findall(device.split("namespace tl {")[0] + text)) | set(_used_operators(device))
    while todo:
        name = todo.pop()
        if name in table and name not in wanted:
            wanted.add(name)
            todo |= set(_WORD.findall(table[name])) - {name}
    order = list(dict.fromkeys([*sections(), *table]))
    rows = "".join(_row(r) for r in MMA_ROWS.values() if function_name(r) in text)
    words = set(_WORD.findall(text))
    words |= {re.sub(r"_x\d+$", "", w) for w in words if w.startswith("wgmma_")}  # a run of products calls the single one
    rows += "".join(map(_hopper, sorted(words)))
    if tensor_maps_of(kernel.launch):
        wanted.add("tensor_map")
    args = ", ".join([_argument(p, i) for i, p in enumerate(kernel.params)] + [
        f"*(tl::tensor_map*)a[{len(kernel.params) + i}]" for i in range(len(tensor_maps_of(kernel.launch)))])
    return "\n".join([
        '#include "machine.h"', "typedef __half half_t; typedef __nv_bfloat16 bfloat16_t;", "#define TL_DEVICE static inline",
        "namespace tl {", *(table[n] for n in order if n in wanted), rows, "}", text,
        f"static void call(void** a) {{ {kernel.name}({args}); }}",
        'extern "C" int run(void** a, const int* grid, const int* block) { return launch(call, a, grid, block); }', ""])


def _used_operators(device: str) -> list[str]:
    return [n for n in sections() if n.startswith(("vec_", "infinity")) and sections()[n] in device]


def _row(row: Any) -> str:
    m, _, k = row.shape
    if m != 16:
        return ""
    c = {"tfloat32": "float", "float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float", "int8": "signed char",
         "uint8": "unsigned char", "int32": "int"}
    types = [c.get(f"{d}") for d in (row.a_dtype, row.b_dtype, row.c_dtype)]
    wide = "int" if row.c_dtype.is_int else "float"
    return (f"TL_DEVICE void {function_name(row)}({types[2]}* c, const {types[0]}* a, const {types[1]}* b) {{ "
            f"matrix_multiply<{k}, {row.a.registers}, {row.b.registers}, {row.c.registers}, {wide}>(c, a, b); }}\n")


_WGMMA_TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float", "int8": "signed char",
                "uint8": "unsigned char", "int32": "int", "tfloat32": "float"}


def _hopper(name: str) -> str:
    """Host form of a function that codegen/cuda/hopper.py writes out; "" for other names."""
    m = re.fullmatch(r"tma_(load|store)_(\d)d", name)
    if m is not None:
        load, c = m.group(1) == "load", [f"c{i}" for i in range(int(m.group(2)))]
        return (f"TL_DEVICE void {name}({'' if load else 'const '}void* tile, const tensor_map* map, "
                f"{'void* bar, ' if load else ''}{', '.join(f'int {x}' for x in c)}) {{ const int c[] = "
                f"{{{', '.join(c)}}}; ::tma_{m.group(1)}(tile, map, {'bar, ' if load else ''}c); }}\n")
    m = re.fullmatch(r"wgmma_(m64n(\d+)k\d+_\w+_\w+_\w+)_ss_([km]+?)(?:_x(\d+))?", name)
    if m is None:
        return ""
    if m.group(4) is not None:
        one, count = name.rsplit("_x", 1)[0], range(int(m.group(4)))
        c_type = _WGMMA_TYPES[str(WGMMA_ROWS["wgmma." + m.group(1).replace("_", ".")].c_dtype)]
        return (f"TL_DEVICE void {name}({c_type}* c, bool keep, "
            f"{', '.join(f'unsigned long long a{i}, unsigned long long b{i}' for i in count)}) {{ "
            + " ".join(f"{one}(c, a{i}, b{i}, {'true' if i else 'keep'});" for i in count) + " }\n")
    row = WGMMA_ROWS["wgmma." + m.group(1).replace("_", ".")]
    ta, tb, tc = (_WGMMA_TYPES[f"{d}"] for d in (row.a_dtype, row.b_dtype, row.c_dtype))
    orders = m.group(3)
    place = f"operand_place(a, {int(orders[0] == 'm')}, row, k, sizeof({ta}))"
    element = f"[=](int row, int k) {{ return shared_at<{ta}>({place}); }}"
    wide = "int" if row.c_dtype.is_int else "float"
    return (f"TL_DEVICE void {name}({tc}* c, unsigned long long a, unsigned long long b, bool keep) {{ "
            f"now->open_products.push_back([=] {{ group_multiply<{m.group(2)}, {wide}, {ta}, {tb}>(c, {element}, b, "
            f"{int(orders[-1] == 'm')}, keep); }}); }}\n")


def _map(m: Any, array: np.ndarray) -> bytes:
    """A tensor map as host_cuda.h reads it."""
    dims, strides = [*reversed(array.shape)], [*reversed(array.strides)]
    fill = [0] * (5 - m.rank)
    return struct.pack("<Q5q5q5i3i", array.ctypes.data, *dims, *fill, *strides, *fill, *m.box, *fill, m.rank,
                       array.itemsize, m.swizzle)


def _argument(p: Any, i: int) -> str:
    if isinstance(p, Buffer):
        return f"({type_name(p.dtype)}*)a[{i}]"
    return f"*({_C_TYPES[str(p.dtype)]}*)a[{i}]"


def run_on_host(kernel: Any, values: dict[str, Any], grid: tuple[int, ...], folder: Path, *flags: str) -> None:
    """Compile and run a kernel.  values: NumPy array (changed in place) or number for each parameter, by name.  flags: of g++.

    Raises RuntimeError when a thread ends with asynchronous copies that nothing waited for.
    """
    file = folder / f"{kernel.name}.cpp"
    file.write_text(host_source(kernel))
    library = file.with_suffix(".so")
    subprocess.run([*COMPILE, *flags, "-shared", "-I", _machine().name, "-o", str(library), str(file)], check=True)
    cells = [values[p.name].ctypes.data if isinstance(p, Buffer)
             else ctypes.addressof(_keep(np.array([values[p.name]], str(p.dtype)), values, p.name))
             for p in kernel.params]
    maps = [ctypes.create_string_buffer(_map(m, values[m.buffer.name]), 128) for m in tensor_maps_of(kernel.launch)]
    cells += [ctypes.addressof(m) for m in maps]
    argv = (ctypes.c_void_p * len(cells))(*cells)
    dims = [(ctypes.c_int * 3)(*[*d, 1, 1][:3]) for d in (grid, kernel.launch.threads)]
    if ctypes.CDLL(str(library)).run(argv, *dims):
        raise RuntimeError("a thread ended with asynchronous copies pending")


def _keep(cell: np.ndarray, values: dict[str, Any], name: str) -> Any:
    values[f"{name}'s cell"] = cell  # must live until the launch has ended
    return (ctypes.c_char * cell.nbytes).from_buffer(cell)
