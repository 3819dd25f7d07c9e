"""Makes objects and shared libraries of kernels that plain C programs call; at run time they need no Python.

An object is one LLVM module: the kernel or the device code, the host program, the C function, the handler for XLA.  A CPU
object has a thread pool of its own.  A CUDA object has host and device code for each architecture; a call takes those of the
best architecture that runs on the device of its tensors.  It finds the driver when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tilelang.ir.record import record

from .c_functions import DRIVER, SAY, CFunction, CParameter, run_text, say_text
from .cpu_engine import cpu_engine
from .cpu_pool import pool_ir
from .cuda_driver import ATTRIBUTES
from .cuda_library import current_device, driver_text, with_device_code
from .llvm_text import HEADER, WEIGHTS, Writer
from .shared_library import pool_start
from .signature import Signature
from .xla_handler import XlaHandler

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MATH = "\n".join(x for x in HEADER.splitlines() if "@llvm." in x)


@record
class CInterface:
    """What callers see.  outputs, results: positions of the parameters that are only results, and of all results; None for
    no handler for XLA."""

    name: str
    sig: Signature
    parameters: tuple[CParameter, ...]
    outputs: tuple[int, ...] = ()
    results: tuple[int, ...] | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names that a library exports."""
        return self.name, f"{self.name}_error", *((f"{self.name}_xla",) if self.results is not None else ())


@record
class Variant:
    """Device code for one architecture ("sm_90a"; "compute_80" for PTX), with the host program that launches it."""

    arch: str
    host_ir: str
    kernels: list[dict[str, Any]]
    images: dict[str, bytes]


def cpu_object(c: CInterface, kernel_ir: str, host_ir: str, entry: str) -> bytes:
    """The object of a CPU kernel, for CPUs like this one."""
    engine = cpu_engine()
    host = re.sub(r"@tl_cpu_entry\b", f"@{entry}", run_text(host_ir, c.sig, "tl_run", False))
    calls = _callers(c, False, lambda w, args, frame: w.ins(f"call i32 @tl_run(ptr {args}, ptr {frame})"))
    return engine.emit_linked([kernel_ir, host, "\n".join(["declare i32 @tl_run(ptr, ptr)", *calls]), pool_start(),
                               pool_ir("x86_64" in engine.triple)], c.symbols)


def cuda_object(c: CInterface, variants: Sequence[Variant]) -> bytes:
    """The object of a kernel for several architectures, for any CPU of this kind.  variants: the preferred ones first."""
    modules, declared = [], []
    for k, v in enumerate(variants):
        text, called = with_device_code(run_text(v.host_ir, c.sig, f"tl_run_{k}", True), v.kernels, v.images)
        modules.append("\n".join([text, driver_text(called)]))
        declared.append(f"declare i32 @tl_run_{k}(ptr, ptr)")
    called = {"cuInit": "i32", "cuCtxGetDevice": "ptr", "cuPointerGetAttribute": "ptr, i32, ptr", "cuDeviceGet": "ptr, i32",
              "cuDeviceGetAttribute": "ptr, i32, i32"}
    calls = _callers(c, True, lambda w, args, frame: w.ins(f"call i32 @tl_choose(ptr {args}, ptr {frame})"))
    choice = [current_device(), _device_of(), _capability(), _choice(c, variants)]
    modules.append("\n".join([*declared, driver_text(called), *choice, *calls]))
    return cpu_engine().emit_linked(modules, c.symbols, any_cpu=True)


def _callers(c: CInterface, cuda: bool, run: Callable[[Writer, str, str], str]) -> list[str]:
    """The C function and the handler."""
    out = [_MATH, SAY, say_text(c.name), CFunction(c.sig, c.parameters, cuda).build(c.name, run), WEIGHTS]
    if c.results is not None:
        out.insert(-1, XlaHandler(c.sig, c.outputs, c.results, cuda).build(f"{c.name}_xla", run))
    return out


def handler_text(c: CInterface, host_ir: str, cuda: bool) -> str:
    """LLVM IR of the handler and the host program alone, to be loaded into this process beside the kernel."""
    assert c.results is not None
    driver = "declare i32 @cuPointerGetAttribute(ptr, i32, ptr)\ndeclare i32 @cuCtxGetDevice(ptr)\n"
    current = "\n".join([driver, current_device(), _device_of()]) if cuda else ""
    text = run_text(host_ir, c.sig, "tl_run", cuda).replace(WEIGHTS, "")
    run = XlaHandler(c.sig, c.outputs, c.results, cuda).build(
        f"{c.name}_xla", lambda w, args, frame: w.ins(f"call i32 @tl_run(ptr {args}, ptr {frame})"))
    return "\n".join([text, SAY.replace("@tl_message = internal thread_local global [1024 x i8] zeroinitializer\n", ""),
                      current, run, WEIGHTS])


def _device_of() -> str:
    """tl_device_of: the number of the device of an address, -1 for no memory of a GPU, `other` for null."""
    w = Writer()
    device = w.slot("i32")
    with w.when(w.ins("icmp eq ptr %p, null")):
        w.do("ret i32 %other")
    good = w.ins(f"icmp eq i32 {w.ins(f'call i32 @cuPointerGetAttribute(ptr {device}, i32 {_DEVICE_ORDINAL}, ptr %p)')}, 0")
    found = w.at(device, 0, "i32")
    w.do(f"ret i32 {w.ins(f'select i1 {good}, i32 {found}, i32 -1')}")
    return w.function("tl_device_of", "ptr %p, i32 %other", "internal ")


def _capability() -> str:
    """tl_capability: 90 for a device of sm_90, -1 where the driver fails."""
    w = Writer()
    device, major, minor = (w.slot("i32") for _ in range(3))
    rc = w.ins(f"call i32 @cuDeviceGet(ptr {device}, i32 %index)")
    number = w.at(device, 0, "i32")
    for place, name in ((major, "cc_major"), (minor, "cc_minor")):
        again = w.ins(f"call i32 @cuDeviceGetAttribute(ptr {place}, i32 {ATTRIBUTES[name]}, i32 {number})")
        rc = w.ins(f"or i32 {rc}, {again}")
    tens = w.ins(f"mul i32 {w.at(major, 0, 'i32')}, 10")
    found = w.ins(f"add i32 {tens}, {w.at(minor, 0, 'i32')}")
    good = w.ins(f"icmp eq i32 {rc}, 0")
    w.do(f"ret i32 {w.ins(f'select i1 {good}, i32 {found}, i32 -1')}")
    return w.function("tl_capability", "i32 %index", "internal ")


def number_and_suffix(arch: str) -> tuple[int, str]:
    """(90, "a") of "sm_90a"."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)([af]?)", arch)
    assert found is not None, arch
    return int(found[1]), found[2]


def preference(arch: str) -> tuple[bool, int, int]:
    """A key that sorts architectures: machine code before PTX, later ones first, specific ones first."""
    number, suffix = number_and_suffix(arch)
    return arch.startswith("compute"), -number, ("a", "f", "").index(suffix)


def _choice(c: CInterface, variants: Sequence[Variant]) -> str:
    """tl_choose: runs the first variant that the device of the call can run.

    Machine code runs on devices of the same major number whose minor number is not lower ("a": on that one alone), PTX on all
    later devices.  Source: CUDA C++ Programming Guide, "Binary Compatibility".
    """
    w, at = Writer(), CFunction(c.sig, c.parameters, True).at
    found = w.ins(f"call i32 @tl_capability(i32 {w.at('%frame', 8, 'i32')})")
    for k, v in enumerate(variants):
        number, suffix = number_and_suffix(v.arch)
        fits = w.ins(f"icmp {'eq' if suffix == 'a' else 'sge'} i32 {found}, {number}")
        if suffix != "a" and not v.arch.startswith("compute"):
            fits = w.ins(f"and i1 {fits}, {w.ins(f'icmp slt i32 {found}, {number // 10 * 10 + 10}')}")
        with w.when(fits):
            w.do(f"ret i32 {w.ins(f'call i32 @tl_run_{k}(ptr %args, ptr %frame)')}")
    archs = ", ".join(v.arch for v in variants)
    none = w.string(f"kernel {c.sig.name}: the library has no code for this device, only for {archs}")
    w.put("%frame", at.message, "ptr", none)
    w.put("%frame", at.status, "i64", "0")
    w.do(f"ret i32 {DRIVER}")
    return "\n".join([*(g.replace("@.s", "@.c") for g in w.globals),
                      w.function("tl_choose", "ptr %args, ptr %frame", "internal ").replace("@.s", "@.c")])
