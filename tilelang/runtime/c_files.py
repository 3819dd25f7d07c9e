"""Writes what stands beside an exported kernel: its C header, a program that calls it, and a CMakeLists.txt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilelang.ir import Binary, Cast, Const, Expr, Var, int_range
from tilelang.version import __version__

from .c_functions import CODES, CParameter
from .c_library import CInterface
from .llvm_text import text_of

_SIZE = 1024  # of the sample's dimensions
_DRIVER = """
/* Calls a function of the driver by its name: the sample needs no header of CUDA, though your program may include one. */
#define CU(name, types, ...) check(((int (*) types)dlsym(driver, #name))(__VA_ARGS__))
static void *driver;
static void check(int code) { if (code) { fprintf(stderr, "CUDA: CUresult %d\\n", code); exit(1); } }
"""
_BEGIN = """driver = dlopen("libcuda.so.1", RTLD_NOW);
if (!driver) { fprintf(stderr, "CUDA: there is no driver (libcuda.so.1)\\n"); return 1; }
int device = 0;
void *context = NULL;
CU(cuInit, (unsigned), 0);
CU(cuDeviceGet, (int *, int), &device, 0);
CU(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
CU(cuCtxSetCurrent, (void *), context);""".split("\n")


def header_text(c: CInterface, target: str, alignment: Mapping[str, int]) -> str:
    """The C header.  target: for which processors.  alignment: of each tensor's address, in bytes."""
    upper = c.name.upper()
    codes = ",\n".join(f"    {upper}_{code} = {k}  /* {what} */" for k, (code, what) in enumerate(CODES.items()))
    lines = "\n".join(f"   {p.name}: {_about(p, alignment)}" for p in c.parameters)
    xla = ""
    if c.results is not None:
        xla = (f"\n/* {c.name} as a handler of XLA's foreign function interface: jax.ffi.register_ffi_target takes it. */\n"
               f"void *{c.name}_xla(void *call);\n")
    return f"""/* {c.name}: compiled by TileLang {__version__} for {target}. */
#ifndef {upper}_H
#define {upper}_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

enum {{
{codes.replace("  /*", ", /*").replace("*/,", "*/")}
}};

/* Returns one of the codes above.
{lines} */
int {c.name}({_declared(c.parameters)});

/* What was wrong in the last call of {c.name} by this thread that returned an error. */
const char *{c.name}_error(void);
{xla}
#ifdef __cplusplus
}}
#endif

#endif
"""


def _declared(parameters: Sequence[CParameter]) -> str:
    return ", ".join(f"{p.c_type}{'' if p.c_type.endswith('*') else ' '}{p.name}" for p in parameters) or "void"


def _about(p: CParameter, alignment: Mapping[str, int]) -> str:
    if p.kind == "tensor":
        b = p.arg.buffer
        strides = "row-major" if b.strides_ is None else f"strides {_tuple(b.strides_)} in elements"
        rest = "may be NULL" if not p.arg.used else f"aligned to {alignment.get(p.arg.name, 1)} bytes"
        return f"{b.dtype}, shape {_tuple(b.shape)}, {strides}, {rest}" + ("" if p.c_type.startswith("const") else ", written")
    if p.kind == "stream":
        return "a CUstream or cudaStream_t; NULL is the default stream.  The call returns before the kernel has run."
    if p.kind == "size":
        low, high = int_range(p.arg.dtype)
        return f"a size{'' if p.arg.dtype.bits == 64 else f', at most {high}'}"
    return f"{p.arg.var.dtype}" if p.kind == "scalar" else "an address"


def _tuple(values: Sequence[Any]) -> str:
    return f"({', '.join(text_of(v) if isinstance(v, Expr) else str(v) for v in values)}{',' * (len(values) == 1)})"


def c_expression(e: Any, names: Mapping[Var, str]) -> str:
    """A size as an expression of C over the parameters of the function."""
    if isinstance(e, Var):
        return names[e]
    if isinstance(e, Cast):
        return c_expression(e.value, names)
    if isinstance(e, Const) or not isinstance(e, Expr):
        return str(int(e.value if isinstance(e, Const) else e))
    signs = {"add": "+", "sub": "-", "mul": "*", "floordiv": "/", "truncdiv": "/", "floormod": "%", "truncmod": "%"}
    if isinstance(e, Binary):
        a, b = c_expression(e.a, names), c_expression(e.b, names)
        if e.op in signs:
            return f"({a} {signs[e.op]} {b})"
        if e.op in ("min", "max"):
            return f"({a} {'<' if e.op == 'min' else '>'} {b} ? {a} : {b})"
    return str(_SIZE)


def sample_text(c: CInterface, cuda: bool) -> str:
    """A C program that calls the kernel once."""
    names = {p.arg if p.kind == "size" else p.arg.var: p.name for p in c.parameters if p.kind in ("size", "scalar")}
    tensors = [p for p in c.parameters if p.kind == "tensor"]
    body = [*_BEGIN] if cuda else []
    body += [f"int64_t {p.name} = {_SIZE};" for p in c.parameters if p.kind == "size"]
    body += [f"{p.c_type} {p.name} = 1;" for p in c.parameters if p.kind == "scalar"]
    body += [f"void *{p.name} = NULL;" for p in c.parameters if p.kind == "pointer"]
    for p in tensors:
        plain = p.c_type.replace("const ", "").rstrip(" *")
        host = f"{p.name}_host" if cuda else p.name
        body += [f"size_t {p.name}_bytes = {_bytes(p, names)};",
                 f"{plain} *{host} = calloc({p.name}_bytes, 1);"]
        if plain != "void":
            body.append(f"for (size_t i = 0; i < {p.name}_bytes / sizeof({plain}); ++i) {host}[i] = ({plain})(i % 7);")
        if cuda:
            body += [f"{plain} *{p.name} = NULL;", f"CU(cuMemAlloc_v2, (void *, size_t), &{p.name}, {p.name}_bytes);",
                     f"CU(cuMemcpyHtoD_v2, (void *, void *, size_t), {p.name}, {host}, {p.name}_bytes);"]
    given = ", ".join("NULL" if p.kind == "stream" else p.name for p in c.parameters)
    body += [f"int code = {c.name}({given});",
             f'if (code != {c.name.upper()}_OK) {{ fprintf(stderr, "{c.name}: %s\\n", {c.name}_error()); return code; }}']
    if cuda:
        body.append("CU(cuCtxSynchronize, (void), );")
    for p in tensors:
        plain, host = p.c_type.rstrip(" *"), f"{p.name}_host" if cuda else p.name
        if plain.startswith("const"):
            continue
        if cuda:
            body.append(f"CU(cuMemcpyDtoH_v2, (void *, void *, size_t), {host}, {p.name}, {p.name}_bytes);")
        if plain == "void":
            body.append(f'printf("{p.name}: %zu bytes\\n", {p.name}_bytes);')
        else:
            body.append(f'if ({p.name}_bytes) printf("{p.name}[0] = %g\\n", (double){host}[0]);')
    lines = "\n".join(f"    {line}" for line in body)
    include = "#include <dlfcn.h>\n" if cuda else ""
    return f"""/* Calls {c.name} once, with sizes and values that are only examples. */
#include <stdio.h>
#include <stdlib.h>
{include}#include "{c.name}.h"
{_DRIVER * cuda}
int main(void) {{
{lines}
    return 0;
}}
"""


def _bytes(p: CParameter, names: Mapping[Var, str]) -> str:
    """The bytes of a tensor from its first element to its last one."""
    b = p.arg.buffer
    dims = [c_expression(d, names) for d in b.shape]
    count = " * ".join(["(size_t)1", *dims])
    if b.strides_ is not None:
        last = " + ".join(f"({d} - 1) * {c_expression(s, names)}" for d, s in zip(dims, b.strides_))
        count = f"(size_t)({last} + 1)"
    bits = b.dtype.bits * b.dtype.lanes
    return f"{count} * {bits // 8}" if bits >= 8 else f"{count} / {8 // bits}"


def cmake_text(c: CInterface, cuda: bool) -> str:
    """A CMakeLists.txt: the kernel as a library, and the sample."""
    finds = "" if cuda else "find_package(Threads REQUIRED)\n"
    needs = "${CMAKE_DL_LIBS}" if cuda else "m Threads::Threads"
    return f"""# cmake -B build && cmake --build build && build/{c.name}_sample
cmake_minimum_required(VERSION 3.17)
project({c.name}_sample C)
{finds}
# The kernel as a library of your project (static; shared with -DBUILD_SHARED_LIBS=ON): target_link_libraries(program {c.name})
add_library({c.name} ${{CMAKE_CURRENT_LIST_DIR}}/{c.name}.o)
set_target_properties({c.name} PROPERTIES LINKER_LANGUAGE C)
target_include_directories({c.name} PUBLIC ${{CMAKE_CURRENT_LIST_DIR}})
target_link_libraries({c.name} PUBLIC {needs})

add_executable({c.name}_sample main.c)
target_link_libraries({c.name}_sample {c.name})
"""
