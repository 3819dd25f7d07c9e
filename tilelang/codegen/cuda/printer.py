"""CUDA C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function.

A kernel is an `extern "C" __global__` function, with the sections of prelude_*.cuh that it needs in front. Shared memory is one
dynamic array with the offsets planned by transform/memory/plan_shared_memory.py.

A section starts with a line "//@ name" with the names it defines, and uses only earlier sections. CUDA's headers of 16-bit
float types take a compiler longer than the rest of a small kernel's text. A kernel that only moves values of such a type, and
never computes one, gets a two-byte type in its place.

The printer is composed of these classes, on the left those of codegen/device. Each uses only those above it:

    Page            lines and names                  HopperCalls     TMA, mbarriers
    ValueFacts      ranges of values                 NamedRegisters  PTX registers with names
    Expressions     text of any expression           WgmmaCalls      wgmma and descriptors
    Values          operators, conversions           RegisterLoops   loops on named registers
    Memory          buffers, loads, stores           SharedAddresses bytes that select shared memory
    Calls           intrinsics
    Statements      statements
"""

from __future__ import annotations

import os
from functools import lru_cache

from tilelang.ir import AddressOf, Cast, LOCAL, Load, const
from tilelang.target.cluster import cluster_of
from tilelang.target.instructions import function_name
from tilelang.target.mma import MMA_ROWS, MmaRow
from tilelang.target.nvshmem import declaration

from ..device.memory import SHARED_SCOPES
from ..device.page import Expressions, Page
from ..device.prelude import FLOATS, THREADS, VALUES, needed, sections_of, words_of
from ..device.printer import BasePrinter, DeviceKernel
from ..device.text import PREFIX, Text
from ..device.types import HALVES, TYPES, type_name
from .hopper import HopperCalls, hopper_function
from .named_registers import NamedRegisters
from .register_loops import RegisterLoops
from .wgmma import WgmmaCalls


def print_kernel(kernel: DeviceKernel, *, fast_math: bool = False, line_directives: bool = False) -> str:
    """The CUDA C++ source of a kernel: header, user's injected source, kernel.

    fast_math: print the fast variants of float32 functions (`tl.enable_fast_math`). line_directives: print a #line directive
    with the line of the user's file for each statement, so that tools show it (`tl.emit_line_directives`). Raises
    NotImplementedError at the user's line for constructs that CUDA has no form for.
    """
    page, plan = Page(kernel.name, line_directives), kernel.launch.plan
    injected = "".join(t.rstrip() + "\n" for t in plan.import_source if t)
    if plan.cuda_source:  # the user's kernel (T.CUDASourceCodeKernel): types and functions that it may name, and its text
        own = injected + plan.cuda_source.rstrip() + "\n"
        return kernel_header(page, "", own, "") + own
    printer = KernelPrinter(kernel, page, fast_math)
    body = printer.text()
    return kernel_header(page, body, injected, "".join(printer.registers.functions.values())) + injected + body


class KernelPrinter(BasePrinter):
    """Prints the function of one kernel."""

    smem = "extern __shared__ __align__(1024) unsigned char smem[];"

    def __init__(self, kernel: DeviceKernel, page: Page, fast_math: bool) -> None:
        injected = "".join(t for t in kernel.launch.plan.import_source if t)
        super().__init__(kernel, page, fast_math, words_of(injected) | {*sections()})
        self._hopper = HopperCalls(self.calls, kernel.launch)
        self.registers = NamedRegisters(self.calls)
        self._statements.end_of_loop = WgmmaCalls(self.calls, self.registers, kernel.launch).keep_operands
        SharedAddresses(self.x)
        self._statements.register_loop = RegisterLoops(self._memory, self.registers, fast_math, self._statements.stmt).print

    def text(self) -> str:
        """The kernel's signature and body."""
        signature = self._signature()
        self.body()
        declared = self.registers.declaration()
        if declared:
            self.page.lines.insert(self._top, f"  {declared}")
        return "\n".join([signature + " {", *self.page.lines, "}"]) + "\n"

    def begin_statements(self) -> None:
        self._top = len(self.page.lines)

    def _signature(self) -> str:
        bounds = f"{self._launch.num_threads}, {self._launch.plan.min_blocks_per_sm}"
        params = ", ".join([*self.parameters(), *self._hopper.map_parameters(), *self.workspaces()])
        cluster = cluster_of(self._launch)
        dims = f"__cluster_dims__({', '.join(map(str, cluster))}) " if cluster is not None else ""
        return f'extern "C" __global__ void {dims}__launch_bounds__({bounds}) {self._kernel.name}({params})'


class SharedAddresses:
    """Addresses in shared memory that bytes of a thread's vector select, as those of a histogram's counts.

    Takes each byte out of its word by itself, in one instruction.  The compiler would shift and mask the word for the
    address: with the sum and the base these are four instructions at half rate for two.
    """

    def __init__(self, x: Expressions) -> None:
        self._x, self._inside = x, False
        self._address, self._cast = x.forms[AddressOf], x.forms[Cast]
        x.forms.update({AddressOf: self.address, Cast: self.cast})

    def address(self, e: AddressOf) -> Text:
        """Pointer to an element."""
        before, self._inside = self._inside, e.buffer.scope_name in SHARED_SCOPES
        try:
            return self._address(e)
        finally:
            self._inside = before

    def cast(self, e: Cast) -> Text:
        """A converted value."""
        v = e.value
        if not self._inside or not isinstance(v, Load) or v.dtype != "uint8" or v.buffer.scope_name != LOCAL or \
                len(v.indices) != 1 or v.buffer.size % 4 or not e.dtype.is_int or e.dtype.bits < 32:
            return self._cast(e)
        of = self._address(AddressOf(v.buffer, (const(0),)))[0]
        return f"({type_name(e.dtype)})tl::byte_of({of}, {self._x.top(v.indices[0])})", PREFIX


# type name in the text -> (header, typedef)
HEADERS = {"half_t": ("cuda_fp16.h", "typedef __half half_t;"),
            "bfloat16_t": ("cuda_bf16.h", "typedef __nv_bfloat16 bfloat16_t;"),
            "fp8_e4_t": ("cuda_fp8.h", "typedef __nv_fp8_e4m3 fp8_e4_t;"),
            "fp8_e5_t": ("cuda_fp8.h", "typedef __nv_fp8_e5m2 fp8_e5_t;"),
            # spellings that injected source uses
            "uchar": ("", "typedef unsigned char uchar;"),
            "CUtensorMap": ("", "namespace tl { struct tensor_map; }\ntypedef tl::tensor_map CUtensorMap;")}
_PLAIN = {TYPES[base]: base for base in HALVES}
# Prefixes of names that the headers define: functions and types of these elements.
_FROM_HEADER = ("__h", "__nv_", "__bfloat16", "nv_bfloat", "hrcp", "hsqrt", "hrsqrt", "hexp", "hlog", "hsin", "hcos", "htanh",
                "hfloor", "hceil", "hrint", "htrunc")


def _is_from_header(word: str) -> bool:
    return word.startswith(_FROM_HEADER) or word == "half2" or (
        word.startswith("__") and ("2half" in word or "2bfloat16" in word))


def _header_of(word: str) -> str:
    """The element type whose header defines a function."""
    return "fp8_e4_t" if "fp8" in word else "bfloat16_t" if "bf" in word else "half_t"


def kernel_header(page: Page, body: str, injected: str, functions: str) -> str:
    """The text in front of a kernel. injected: the user's source. functions: definitions made for this kernel."""
    named = words_of(body)
    words = named | words_of(injected) | page.sections
    defined = device_header(words | words_of(functions)) + functions
    named |= words_of(defined)
    called = {_header_of(w) for w in named if _is_from_header(w) and f"{w}(" in body}
    out = _element_types(words | named | called, injected, named, page.worked_with)
    out.append("#define TL_DEVICE __device__ __forceinline__")
    if defined:
        out += ["namespace tl {", defined.rstrip(), "}  // namespace tl"]
    return "\n".join(out) + "\n\n"


def _element_types(words: set[str], injected: str, named: set[str], worked_with: set[str]) -> list[str]:
    """The headers and names of the element types among the words of a text. named: words of the compiler's own text."""
    used = [(name, *HEADERS[name]) for name in HEADERS if name in words and "cuda.h>" not in injected * (name == "CUtensorMap")]
    if not injected and not any(h == "cuda_fp8.h" for _, h, _ in used) and not any(
            map(_is_from_header, named)):
        used = [(name, "", f"struct {name} {{ unsigned short bits; }};") if _PLAIN.get(name, "") not in ("", *worked_with)
                else (name, h, t) for name, h, t in used]
    return [f"#include <{h}>" for h in dict.fromkeys(h for _, h, _ in used) if h] + [t for *_, t in used]


# The sections that a section uses precede it.
_MEMORY, _RANKS = (os.path.join(os.path.dirname(__file__), f"prelude_{name}.cuh") for name in ("memory", "ranks"))
_FILES = (FLOATS, VALUES, _MEMORY, THREADS, _RANKS)


def sections() -> dict[str, str]:
    """The text of each section by name, in the order of the files: a section uses only earlier ones."""
    return sections_of(_FILES)


@lru_cache(maxsize=1)
def _rows_by_function() -> dict[str, MmaRow]:
    return {function_name(r): r for r in MMA_ROWS.values()}


def device_header(words: set[str]) -> str:
    """The definitions (inside namespace tl) of every prelude function among the words of a kernel's text."""
    made = [text for w in sorted(words) if (text := hopper_function(w) or declaration(w)) is not None]
    out = needed(_FILES, words.union(*map(words_of, made)))
    out += [mma_wrapper(r) for f, r in _rows_by_function().items() if f in words]
    out += made
    return "".join(out)


def mma_wrapper(row: MmaRow) -> str:
    """The device function of a row. It takes pointers to the first register of c, a and b, which stay in registers once
    inlined."""
    na, nb, nc = row.registers
    wide = row.register_bits == 64
    float_c = row.c_dtype == "float32"
    c_kind = "+d" if wide else "+f" if float_c else "+r"
    c_register = "double" if wide else "float" if float_c else "unsigned"
    in_kind, in_register = ("d", "double") if wide else ("r", "unsigned")
    slots = [f"%{i}" for i in range(nc + na + nb)]
    c, a, b = slots[:nc], slots[nc:nc + na], slots[nc + na:]
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (c, a, b, c))
    outputs = ", ".join(f'"{c_kind}"(C[{i}])' for i in range(nc))
    inputs = ", ".join([f'"{in_kind}"(A[{i}])' for i in range(na)] + [f'"{in_kind}"(B[{i}])' for i in range(nb)])
    ta, tb, tc = (TYPES[d.base] for d in (row.a_dtype, row.b_dtype, row.c_dtype))
    return (f"TL_DEVICE void {function_name(row)}({tc}* c, const {ta}* a, const {tb}* b) {{\n"
            f"  {c_register}* C = reinterpret_cast<{c_register}*>(c);\n"
            f"  const {in_register} *A = reinterpret_cast<const {in_register}*>(a), "
            f"*B = reinterpret_cast<const {in_register}*>(b);\n"
            f'  asm("{row.instruction}\\n"\n      " {operands};"\n      : {outputs}\n      : {inputs});\n}}\n')
