"""Options of nvcc as users give them in `compile_flags`, in the form that NVRTC takes.

nvcc drives a host compiler, a device compiler and a linker; NVRTC is the device compiler alone.  Options for the others are
dropped here: nothing is compiled by a host compiler.  Source: nvcc's manual, "NVCC Command Options"; NVRTC's manual,
"Supported Compile Options".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilelang.errors import register_warning, warn

register_warning("compile-flag", "a compile flag is given that has no effect in this compiler")

# nvcc's -O is the level of the host compiler; ptxas optimises at level 3 unless -Xptxas=-O1 or the like says otherwise.
# Every function is a device function here (-default-device), so the two experimental relaxations change nothing.
_WITHOUT_LOSS = re.compile(
    r"-O(\d|fast|s)?|--optimize(=.*)?|-W.*|--?Werror(=.*)?|-g|--debug|-v|--verbose|-c|--compile|-dc|-shared|--shared|-cubin|"
    r"-f(PIC|pic|permissive|visibility=.*|diagnostics-color.*)|--?expt-relaxed-constexpr|--?expt-extended-lambda|"
    r"--?extended-lambda|-m64|--?m(achine)?=64|--?keep|-res-usage|--resource-usage|--?threads(=.*)?|-t=?\d+|-MD|-MMD|-MP|"
    r"-forward-unknown-.*|--forward-unknown-.*|--?Wno-.*|--compiler-options=.*|-Xcompiler=.*|-ccbin=.*|--compiler-bindir=.*|"
    r"-Xlinker=.*|--linker-options=.*|-Xnvlink=.*|--cudart=.*|-cudart=.*|--allow-unsupported-compiler|-allow-unsupported-compiler")
_WITH_A_VALUE = {"-Xcompiler", "--compiler-options", "-ccbin", "--compiler-bindir", "-Xlinker", "--linker-options", "-Xnvlink",
                 "-o", "--output-file", "-x", "-t", "--threads", "-O", "--optimize", "-MF", "-MT", "-cudart", "--cudart", "-m"}
_ARCH = re.compile(r"(?:-arch|--gpu-architecture|-gencode|--generate-code|-code|--gpu-code)(?:=(.*))?")
_LOST = re.compile(r"-l(?!ineinfo).+|-L.+|-lto|-dlto|--dlink-time-opt|--?default-stream(=.*)?|--library(=.*)?|"
                   r"--library-path(=.*)?")
_PTXAS = {"-Xptxas", "--ptxas-options"}


def nvrtc_options(options: Sequence[str], arch: str) -> list[str]:
    """The options for NVRTC that compiles for arch ("sm_90a").

    Lists of options for ptxas are separated, `-isystem` is `-I`, options of the host compiler, the linker and the
    architecture are dropped.  What is dropped and would have changed the result gives the warning compile-flag.  Options
    that are not known are kept: NVRTC decides.
    """
    out: list[str] = []
    rest = list(options)
    while rest:
        option = rest.pop(0)
        name, _, value = option.partition("=")
        if name in _PTXAS:
            if not value:
                value = rest.pop(0) if rest else ""
            out += [f"--ptxas-options={v}" for v in value.split(",") if v]
        elif option.startswith("-isystem"):
            folder = option[len("-isystem"):].lstrip("=") or (rest.pop(0) if rest else "")
            out.append(f"-I{folder}")
        elif m := _ARCH.fullmatch(option):
            wanted = m[1] if m[1] is not None else rest.pop(0) if rest else ""
            number = re.sub(r"\D", "", arch)
            if not re.search(rf"_{number}(?!\d)", wanted) and wanted not in ("native", "all", "all-major"):
                given = option if m[1] is not None else f"{option} {wanted}"
                warn("compile-flag", f"{given} has no effect: the target is {arch}",
                     'name the architecture in the target, {"kind": "cuda", "arch": "sm_80"}')
        elif option in _WITH_A_VALUE:
            if rest:
                rest.pop(0)
        elif _LOST.fullmatch(option):
            warn("compile-flag", f"{option} has no effect: a kernel is one cubin, nothing is linked to it and it is launched "
                 "on torch's current stream", "leave it out")
        elif not _WITHOUT_LOSS.fullmatch(option):
            out.append(option)
    return out
