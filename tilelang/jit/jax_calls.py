"""Kernels in JAX programs: jax.jit compiles a call of XLA's foreign function interface, which runs the kernel in place."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import numpy_dtype
from tilelang.runtime.c_library import CInterface, handler_text
from tilelang.runtime.cpu_engine import load_cpu_object
from tilelang.runtime.host_engine import HostLibrary, compile_object
from tilelang.runtime.signature import ScalarArg
from tilelang.runtime.xla_handler import has_type

from .decorator import JITImpl
from .exporting import c_interface, with_given_results
from .kernel import JITKernel
from .loading import GpuModules
from .torch_ops import passed, result_shapes

register("jax-call", ValueError, "a kernel that JAX cannot call, or a call of it with other arguments",
         expected="a compiled kernel, or an eager @tilelang.jit function of tensors and numbers")

_serial = itertools.count()
_registered: dict[int, tuple[CInterface, JITKernel, Any]] = {}  # by id; kept, because XLA calls them until the process ends


def jax_call(kernel: Any) -> Callable[..., Any]:
    """A function of JAX arrays that runs a kernel, also inside of jax.jit, without a copy to the host.

    kernel: a compiled kernel, or an eager @tilelang.jit function, which is compiled for the shapes it meets.  Numbers are
    compiled into the JAX program (static_argnums).  Arrays of JAX are values: tensors that the kernel writes come back as
    results behind its own, in the order of its parameters; XLA copies the argument where it is used again.  jax.vmap calls the
    kernel once for each element; a gradient is what jax.custom_vjp gives it.  Raises jax-call.

        relu = tilelang.jax_call(relu_kernel)
        y = jax.jit(lambda x: relu(x) + 1)(x)
    """
    if not isinstance(kernel, (JITKernel, JITImpl)):
        raise error("jax-call", f"a ‹{type(kernel).__name__}› is no kernel",
                    hint="pass a compiled kernel, or an eager @tilelang.jit function")

    def call(*args: Any) -> Any:
        if isinstance(kernel, JITKernel):
            return _call(kernel, args)
        compiled = kernel.compile(*(np.empty(x.shape, x.dtype) if hasattr(x, "shape") else x for x in args))
        return _call(compiled, passed(kernel, args))

    call.__doc__ = f"The kernel {kernel!r} for JAX."
    return call


def _call(kernel: JITKernel, args: Sequence[Any]) -> Any:
    sig = kernel.signature
    if len(args) != len(sig.inputs):
        raise error("jax-call", f"kernel {sig.name} is given ‹{len(args)}› arguments", expected=f"{len(sig.inputs)} arguments",
                    hint=f"it takes {', '.join(a.name for a in sig.inputs)}")
    c, jax = _registered_target(kernel), _jax()
    shapes = {a.name: s for a, s in zip(sig.outputs, result_shapes(kernel, args))}
    arrays: list[Any] = []
    numbers: dict[str, Any] = {}
    position: dict[str, int] = {}
    for a, x in zip(sig.inputs, args):
        if isinstance(a, ScalarArg):
            numbers[a.name] = _number(sig.name, a, x)
        else:
            position[a.name] = len(arrays)
            shapes.setdefault(a.name, x.shape)
            arrays.append(x)
    given = [sig.args[i] for i in c.results or ()]
    types = [jax.ShapeDtypeStruct(tuple(shapes[a.name]), numpy_dtype(a.buffer.dtype)) for a in given]
    out = jax.ffi.ffi_call(
        c.name, types, vmap_method="sequential",
        input_output_aliases={position[a.name]: k for k, a in enumerate(given) if a.name in position})(*arrays, **numbers)
    return out[0] if len(types) == 1 else tuple(out)


def _number(kernel: str, a: ScalarArg, x: Any) -> Any:
    """A scalar as an attribute of the call."""
    dt = a.var.dtype
    try:
        return (np.float64 if dt.is_float else np.bool_ if dt.is_bool else np.int64)(x)
    except Exception:  # JAX raises its own errors for values that are not known while it traces
        raise error("jax-call", f"`{a.name}` of kernel {kernel} is no number while JAX traces", expected="a number",
                    found=type(x).__name__, hint=f"make it static: jax.jit(..., static_argnames=({a.name!r},))") from None


def _registered_target(kernel: JITKernel) -> CInterface:
    """A kernel's handler, registered as a target of XLA under its name."""
    if id(kernel) in _registered:
        return _registered[id(kernel)][0]
    c = c_interface(kernel, f"tl_{next(_serial)}")
    if c.results is None:
        strange = next(a.name for a in c.sig.args if not has_type(a))
        raise error("jax-call", f"‹`{strange}`› of kernel {c.sig.name} has a type that XLA does not have",
                    expected="tensors of XLA's types and numbers", hint="pass its bytes as a tensor of uint8")
    jax, library = _jax(), _loaded(kernel, c)
    address = ctypes.c_void_p(library.addresses[f"{c.name}_xla"])
    jax.ffi.register_ffi_target(c.name, jax.ffi.pycapsule(address), platform="CUDA" if kernel.target.is_cuda else "cpu")
    _registered[id(kernel)] = c, kernel, library
    return c


def _jax() -> Any:
    try:
        import jax  # 400 ms
    except ImportError as e:
        raise error("runtime-missing", "JAX is needed to call kernels from JAX", expected="jax", found="none",
                    hint="pip install jax") from e
    return jax


def _loaded(kernel: JITKernel, c: CInterface) -> HostLibrary:
    artifact, cuda = with_given_results(kernel).artifact, kernel.target.is_cuda
    keep: Any
    if cuda:
        keep = GpuModules(artifact)
        symbols = keep.symbols() | {n: ctypes.cast(getattr(keep.driver.lib, n), ctypes.c_void_p).value or 0
                                    for n in ("cuPointerGetAttribute", "cuCtxGetDevice")}
    else:
        keep = load_cpu_object(artifact.files["kernel.o"], artifact.meta["entry"])
        symbols = {"tl_cpu_entry": keep.address}
    library = HostLibrary(compile_object(handler_text(c, artifact.host_source, cuda)), (f"{c.name}_xla",), symbols)
    library.keep = keep  # type: ignore[attr-defined]
    return library
