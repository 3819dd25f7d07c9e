"""Argument handling around a compiled call: conversion of values that the host stub does not accept, and full error texts."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from tilelang.errors import TileLangError, called_in_kernel, error, register
from tilelang.ir import dtype
from tilelang.runtime.dlpack import Exported, exports_itself
from tilelang.runtime.signature import PointerArg, ScalarArg, Signature, TensorArg


class ScalarKindError(TypeError, RuntimeError):
    """A scalar argument of the wrong kind."""


class ScalarRangeError(OverflowError, ValueError, RuntimeError):
    """A scalar argument outside its type."""


register("kernel-arity", ValueError, "a kernel is called with the wrong number of inputs",
         "pass every input, in the order of the parameters", expected="one argument for each input")
register("kernel-argument", RuntimeError, "an argument of a kernel does not fit its parameter",
         expected="an argument that fits its parameter")
register("kernel-input", ValueError, "an argument of a kernel does not fit its parameter (cython backend)",
         expected="an argument that fits its parameter")
register("kernel-scalar", ScalarKindError, "a scalar argument is not a number of the parameter's kind",
         expected="a number of the parameter's kind")
register("kernel-scalar-range", ScalarRangeError, "a scalar argument does not fit the parameter's type",
         expected="a number in the range of the parameter's type")
register("kernel-size", ScalarRangeError, "a size, index or comparison of a kernel would overflow with the arguments of a call",
         'compute it in 64 bits: T.dynamic("…", dtype="int64"), T.int64 scalars, T.cast(n, "int64")',
         expected="sizes whose arithmetic fits its type")
register("kernel-read-only", ValueError, "a read-only array is passed for a tensor the kernel writes",
         expected="an array that can be written")
register("kernel-keyword", TypeError, "a keyword of a call is no input of the kernel, or one that is given by position too",
         expected="each input once, by position or by its name")
register("kernel-out", ValueError, "out= does not name the results of a kernel", expected="one tensor for each result")

# Texts of rejected calls.  The patterns are compiled at the first rejected call: most programs have none.
_ABOUT = r"^kernel (?P<fn>\S+) (?P<what>input|scalar) (?P<name>\S+) "
_NEGATIVE = r"kernel \S+ output (?P<name>\S+) shape\[\d+\] is negative"
_SIZE = r"^kernel (?P<fn>\S+) size `(?P<text>.*)` is not in the range from (?P<low>\S+) to (?P<high>\S+)$"
_NULL = r"^(?P<fn>\S+)\.(?P<name>\S+) is expected to have non-NULL pointer"


def was_rejected(e: Exception) -> bool:
    """Whether a call failed before anything ran, because of how an argument was given."""
    return not isinstance(e, TileLangError) and (
        isinstance(e, BufferError) or re.match(_ABOUT, str(e)) is not None or
        (isinstance(e, (TypeError, OverflowError)) and "kernel " not in str(e)))


# Calls that another kernel of the program takes: addresses or strides are not aligned for wide accesses, or tensors overlap
# that the kernel assumes to be disjoint.
UNALIGNED = (r"^kernel \S+ input \S+ (byte_offset violates packed ABI constraint: its data must be aligned"
             r"|strides\[\d+\] violates packed ABI constraint: it must be a multiple of 16 bytes)")
OVERLAPPING = r"^kernel \S+ input \S+ overlaps input "


def was(what: str, e: Exception) -> bool:
    """Whether a call was rejected, before anything ran, with such a text: UNALIGNED, OVERLAPPING."""
    return not isinstance(e, TileLangError) and re.match(what, str(e)) is not None


def describe(x: Any) -> str:
    """A short account of an argument: type, shape, strides, device, value."""
    if x is None:
        return "None"
    if isinstance(x, Exported):
        x = x.array
    shape = getattr(x, "shape", None)
    if shape is None:
        text = repr(x)
        return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(x).__name__})"
    parts = [str(getattr(x, "dtype", "?")).removeprefix("torch."), f"tensor of shape {tuple(shape)}"]
    stride = getattr(x, "stride", None)
    if callable(stride):
        parts.append(f"strides {tuple(stride())}")
    elif isinstance(x, np.ndarray) and x.itemsize:
        parts.append(f"strides {tuple(s // x.itemsize for s in x.strides)}")
    if hasattr(x, "device"):
        parts.append(f"on {x.device}")
    return " ".join(parts)


def by_position(sig: Signature, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All inputs in their order, where some are given by name.  Raises kernel-keyword."""
    names = [a.name for a in sig.inputs]
    for name in named:
        if name not in names[len(args):]:
            twice = name in names
            raise error("kernel-keyword", f"kernel {sig.name} got " + (f"multiple values for input {name!r}" if twice else
                        f"an unexpected keyword argument {name!r}"), found=f"the keyword {name}",
                        hint="give it by position or by name, not both" if twice else f"the inputs are: {', '.join(names)}")
    missing = [n for n in names[len(args):] if n not in named]
    if missing:
        raise error("kernel-arity", f"Kernel expected {len(names)} inputs, but {len(args) + len(named)} are provided: "
                    f"`{missing[0]}` is missing", expected=f"{len(names)} inputs: {', '.join(names)}", found=f"no {missing[0]}",
                    hint=f"the inputs are: {', '.join(names)}")
    return (*args, *(named[n] for n in names[len(args):]))


def with_outputs(sig: Signature, args: tuple[Any, ...], out: Any) -> tuple[tuple[Any, ...], Any]:
    """(arguments of JITKernel.into, what the call returns) for a call with out=.  Raises kernel-out, kernel-arity."""
    several = isinstance(out, (tuple, list))
    given = list(out) if several else [out]
    names = [a.name for a in sig.outputs]
    if len(given) != len(names) or not names:
        raise error("kernel-out", f"kernel {sig.name} returns {len(names)} tensors, and out= gives {len(given)}",
                    expected=f"tensors for {', '.join(names)}" if names else "no out=", found=f"{len(given)} tensors",
                    hint="out=tensor for one result, out=(a, b) for several in the order in which they are returned" if names
                    else "the kernel writes into its arguments: pass the tensor as one of them")
    if len(args) != len(sig.inputs):
        raise explain(sig, args, ValueError("num_args"))
    places, rest = dict(zip(sig.out_idx, given)), iter(args)
    return tuple(places[a.index] if a.index in places else next(rest) for a in sig.args), given if len(names) > 1 else given[0]


def adapted(sig: Signature, args: tuple[Any, ...], written: Any) -> tuple[Any, ...] | None:
    """The arguments converted to forms that the compiled call accepts; None when nothing needs conversion.

    NumPy scalars and one-element tensors become Python numbers for scalar parameters, big integers of uint64
    parameters an address-sized value, NumPy arrays that NumPy does not export are exported here.
    written: () -> names of tensor parameters the program writes.
    """
    out: list[Any] = list(args)
    for k, (a, x) in enumerate(zip(sig.inputs, args)):
        if isinstance(a, ScalarArg):
            out[k] = _number(a, x)
        elif isinstance(x, np.ndarray) and not exports_itself(x):
            out[k] = _exported(a, x, written)
        elif isinstance(a, PointerArg) and isinstance(x, int) and not isinstance(x, bool) and 2**63 <= x < 2**64:
            out[k] = ctypes.c_void_p(x)
    return tuple(out) if any(x is not y for x, y in zip(out, args)) else None


def _number(a: ScalarArg, x: Any) -> Any:
    if isinstance(x, np.generic) or (hasattr(x, "item") and getattr(x, "shape", None) == ()):
        x = x.item()
    if (isinstance(x, int) and not isinstance(x, bool) and a.var.dtype.is_unsigned and a.var.dtype.bits == 64 and
            2**63 <= x < 2**64):
        return ctypes.c_void_p(x)
    return x


def _exported(a: Any, x: np.ndarray, written: Any) -> Any:
    try:
        dtype(x.dtype.name)
    except ValueError:
        return x
    if not x.dtype.isnative or any(s % x.itemsize for s in x.strides):
        return x
    if not x.flags.writeable and a.name in written():
        raise error("kernel-read-only", f"input {a.name} is a read-only array and the kernel writes it",
                    found=f"a read-only array for `{a.name}`", notes=_declared(a), hint="pass a copy: numpy.array(x)")
    return Exported(x)


def refusing_negated(sig: Signature, run: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `run` that rejects torch tensors whose negative bit is set.

    The memory of such a view (x.conj().imag) holds the values with the opposite sign, and DLPack does not report it.
    A view of this kind of complex numbers has even strides only.  Where a parameter's declared strides exclude even
    strides, the call's stride check is enough; only the other parameters are tested here, at 0.1 us each.
    """
    asked = [k for k, a in enumerate(sig.inputs) if isinstance(a, TensorArg) and a.used and _may_be_negated(a)]
    if not asked:
        return run
    only = asked[0]
    picked: Callable[[Any], Any] = itemgetter(*asked) if len(asked) > 1 else lambda args: (args[only],)
    never: set[type] = set()  # types that have no views with a negative bit

    def call(*args: Any) -> Any:
        if len(args) > asked[-1]:
            for x in picked(args):
                if x.__class__ not in never:
                    try:
                        if x.is_neg():
                            break
                    except AttributeError:
                        never.add(x.__class__)
            else:
                return run(*args)
            a = next(sig.inputs[k] for k in asked if args[k] is x)
            raise error("kernel-argument", f"kernel {sig.name} input {a.name} is a view that negates what its memory holds, "
                        f"got {describe(x)}", expected="a tensor whose memory holds its values",
                        found=f"{describe(x)} with its negative bit set", notes=_declared(a), hint="pass x.resolve_neg()")
        return run(*args)

    return call


def _may_be_negated(a: TensorArg) -> bool:
    b = a.buffer
    if b.dtype.base not in ("float16", "float32", "float64"):
        return False
    if b.strides_ is None:  # strides of dimensions of one element are any
        return all(isinstance(n, int) and n == 1 for n in b.shape)
    return not any(isinstance(n, int) and n > 1 and isinstance(s, int) and s % 2 for n, s in zip(b.shape, b.strides_))


def explain(sig: Signature, args: tuple[Any, ...], e: Exception) -> Exception:
    """The error a user sees for a failed call: what was expected, what was found, what to do."""
    inputs = sig.inputs
    if (nested := called_in_kernel(sig.name, args)) is not None:
        return nested
    if len(args) != len(inputs):
        names = ", ".join(a.name for a in inputs)
        return error("kernel-arity", f"Kernel expected {len(inputs)} inputs, but ‹{len(args)}› are provided. ({sig.name}: "
                     f"num_args should be {len(inputs)})", expected=f"{len(inputs)} inputs: {names or 'none'}",
                     hint=f"the inputs are: {names or '(none)'}")
    if isinstance(e, TileLangError):
        return e
    text = str(e)
    m = re.match(_NEGATIVE, text)
    if m is not None:
        made = next(a for a in sig.outputs if a.name == m["name"])
        return error("kernel-argument", text, expected="extents from 0 on",
                     found=f"{m['name']} of shape ({', '.join(map(str, made.buffer.shape))})", notes=_declared(made),
                     hint="pass arguments for which the shapes of all outputs exist")
    m = re.match(_SIZE, text)
    if m is not None:
        values = [f"{a.name} = {x}" for a, x in zip(inputs, args) if isinstance(a, ScalarArg)]
        values += [f"{a.name}.shape = {tuple(x.shape)}" for a, x in zip(inputs, args) if hasattr(x, "shape")]
        return error("kernel-size", text, expected=f"a number from {m['low']} to {m['high']}", found=", ".join(values))
    m = re.match(_ABOUT, text) or re.match(_NULL, text)
    if m is None:
        return _unconvertible(sig, args, e)
    kind, found, notes, plain, hint = "kernel-argument", text, _declared(None), "", ""
    for a, x in zip(inputs, args):
        if a.name == m["name"]:
            notes = _declared(a)
            found = describe(x)
            plain, hint = _plain(a, x, text, sig, args), _converted(a, x, text)
            text += f", got {found}"
            if isinstance(a, ScalarArg):
                big = isinstance(x, int) and a.var.dtype.is_int  # beyond int64: tvm_ffi passes it as an object
                kind = "kernel-scalar-range" if big or isinstance(e, ValueError) else "kernel-scalar"
    return error(kind, f"{plain} ({text})" if plain else text, expected=_expected(str(e)), found=found, notes=notes,
                 hint=_packed_hint(inputs, m["name"]) or hint or _hint(text))


def _plain(a: Any, x: Any, text: str, sig: Signature, args: tuple[Any, ...]) -> str:
    """What is wrong with an argument, as one sentence; "" where the text of the compiled checks says it."""
    name, shape = f"`{a.name}`", tuple(getattr(x, "shape", ()))
    at = re.search(r" (shape|strides)\[(\d+)\] ", text)
    if "dtype mismatch" in text:
        given = str(getattr(x, "dtype", "?")).removeprefix("torch.")
        return f"{name} has elements of type {given}, the kernel takes {_wanted(a)}"
    if "ndim mismatch" in text:
        return f"{name} has {len(shape)} dimensions, the kernel takes {len(a.buffer.shape)}"
    if at and at[1] == "shape" and int(at[2]) < len(shape) and "expected " in text:
        want = text.rpartition("expected ")[2]
        bound = _bound_by(want, sig, args)
        return f"{name} has shape {shape}, the kernel takes {want} in dimension {at[2]}{bound}"
    if "non-compact" in text:
        return f"{name} is not contiguous"
    if "byte_offset" in text:
        return f"{name} starts at an address that the kernel's wide accesses cannot use"
    if at and at[1] == "strides":
        return f"{name} has other strides than the kernel takes in dimension {at[2]}"
    if "device_id" in text:
        return f"{name} is on {getattr(x, 'device', 'another GPU')}, another argument is on another GPU"
    if "device_type" in text:
        return f"{name} is on {getattr(x, 'device', 'another device')}, the kernel runs on {text.rpartition('expected ')[2]}"
    if "pointer" in text or "handle" in text:
        return f"{name} takes a tensor"
    return f"`{a.name}` takes a number of type {a.var.dtype}" if isinstance(a, ScalarArg) else ""


def _bound_by(extent: str, sig: Signature, args: tuple[Any, ...]) -> str:
    """Where the values of an extent's symbols come from: ", which is 8 by `X`", ", with m = 8 by `X`"; "" for a number."""
    found = {name: value for name in re.findall(r"[A-Za-z_]\w*", extent) if (value := _value_of(name, sig, args))}
    if extent in found:
        return f", which is {found[extent]}"
    return ", with " + " and ".join(f"{name} = {value}" for name, value in found.items()) if found else ""


def _value_of(symbol: str, sig: Signature, args: tuple[Any, ...]) -> str:
    """The value of a symbol: "8 by `X`", of the number with its name or the first tensor with this extent; "" for neither."""
    for a, x in zip(sig.inputs, args):
        if isinstance(a, ScalarArg) and a.name == symbol:
            return f"{x}, the argument `{a.name}`"
    for a, x in zip(sig.inputs, args):
        if isinstance(a, TensorArg) and hasattr(x, "shape") and len(x.shape) == len(a.buffer.shape):
            dt = a.buffer.dtype
            for k, (d, n) in enumerate(zip(a.buffer.shape, x.shape), 1):
                if not isinstance(d, int) and str(d) == symbol:
                    values = 8 // (dt.bits * dt.lanes) if dt.bits < 8 and k == len(x.shape) else 1  # of a packed byte
                    return f"{n * values} by `{a.name}`"
    return ""


def _converted(a: Any, x: Any, text: str) -> str:
    """The call that converts an argument; "" where no single one does."""
    if isinstance(a, ScalarArg) or not isinstance(a, TensorArg):
        return ""
    if "pointer" in text or "handle" in text:
        several = isinstance(x, (list, tuple))
        return f"pass a tensor of type {a.buffer.dtype}: np.asarray(x, np.{a.buffer.dtype})" if several else ""
    if "dtype mismatch" in text and a.buffer.dtype.bits >= 8:
        return f"x.astype(np.{a.buffer.dtype})" if isinstance(x, np.ndarray) else f"x.to(torch.{a.buffer.dtype})"
    if "ndim mismatch" in text:
        return f"reshape it: x.reshape({', '.join(map(str, a.buffer.shape))})"
    return ""


def _packed_hint(inputs: Any, name: str) -> str:
    """The hint that says what to pass for a tensor of values narrower than a byte."""
    a = next((a for a in inputs if a.name == name), None)
    if not isinstance(a, TensorArg) or a.buffer.dtype.bits >= 8:
        return ""
    per = 8 // a.buffer.dtype.bits
    last = a.buffer.shape[-1] if a.buffer.shape else 1
    last = last // per if isinstance(last, int) else f"{last} / {per}"
    return (f"{a.buffer.dtype} tensors are passed packed, {per} values a byte: `{name}` as int8 of shape "
            f"({', '.join(map(str, (*a.buffer.shape[:-1], last)))},)")


_WANTED = (r"(?:expected |is expected to )(?P<what>.+)$|: (?P<rule>(?:its data |it )?must be .+)$|"
           r"(?P<more>overlaps .+)$")


def _expected(text: str) -> str:
    """What the compiled checks expected of a rejected argument; "" where their text adds nothing to the error kind."""
    m = re.search(_WANTED, text)
    if m is None:
        return ""
    if m["more"]:
        return "tensors without common memory"
    if "non-compact strides" in text:
        return "a compact array: each stride the product of the extents after it"
    part = re.search(r" ((?:shape|strides)\[\d+\]) ", text)
    return f"{part[1]} = {m['what']}" if part and m["what"] else m["what"] or m["rule"]


def _declared(a: Any) -> tuple[tuple[Any, str], ...]:
    """A note with the place where a parameter is declared."""
    span = getattr(a.buffer if isinstance(a, TensorArg) else getattr(a, "var", None), "span", None)
    return () if span is None else ((span, f"`{a.name}` is declared here"),)


def _unconvertible(sig: Signature, args: tuple[Any, ...], e: Exception) -> Exception:
    """The error for an argument that tvm_ffi rejected before the host stub ran."""
    for a, x in zip(sig.inputs, args):
        if not str(getattr(x, "layout", "torch.strided")).endswith("strided"):
            return error("kernel-argument", f"`{a.name}` is no dense tensor (kernel {sig.name} input {a.name} layout mismatch, "
                         f"expected «a dense tensor», got {str(x.layout).removeprefix('torch.')} "
                         f"{str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)})", found="a tensor of layout "
                         f"{str(x.layout).removeprefix('torch.')}", notes=_declared(a), hint="pass x.to_dense()")
        if getattr(x, "is_quantized", False):
            return error("kernel-argument", f"`{a.name}` is quantised (kernel {sig.name} input {a.name} dtype mismatch, "
                         f"expected «a plain element type», got ‹{describe(x)}›)", notes=_declared(a),
                         hint="pass x.int_repr(), and its scale and zero point as separate arguments")
        if "doesn't have storage" in str(e) and _is_wrapped(x):
            return error("kernel-argument", f"`{a.name}` has no memory (kernel {sig.name} input {a.name} expected "
                         "pointer or tensor handle, got a tensor as vmap, grad and other transforms of torch.func pass)",
                         expected="a tensor with memory", found=f"a tensor of torch.func ({type(x).__name__})",
                         notes=_declared(a), hint="call the kernel inside a torch.autograd.Function or torch.library.custom_op")
        if getattr(x, "is_meta", False):
            return error("kernel-argument", f"`{a.name}` is on the meta device (kernel {sig.name} input {a.name} device_type "
                         f"mismatch, expected a device with memory, got ‹{describe(x)}›)", expected="a tensor with memory",
                         notes=_declared(a), hint="move the tensor to the kernel's device")
    if isinstance(e, (BufferError, TypeError)):
        for a, x in zip(sig.inputs, args):
            if isinstance(x, np.ndarray) and not exports_itself(x):
                plain = _plain(a, x, "dtype mismatch", sig, args)
                return error("kernel-argument", f"{plain} (kernel {sig.name} input {a.name} dtype mismatch, expected "
                             f"«{_wanted(a)}», got ‹{describe(x)}›)", notes=_declared(a),
                             hint=f"{_converted(a, x, 'dtype mismatch') or 'pass a dense array'} ({str(e).rstrip('.')})")
    return e


def _is_wrapped(x: Any) -> bool:
    torch = torch_if_loaded()
    return torch is not None and isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _wanted(a: Any) -> str:
    return f"{a.buffer.dtype}" if isinstance(a, TensorArg) else f"a scalar {getattr(a.var, 'dtype', '')}"


def _hint(text: str) -> str:
    if " is int32, from " in text:
        return 'give the symbol more bits: T.dynamic("…", dtype="int64")'
    if "strides[" in text:
        return "pass x.contiguous() (torch) or numpy.ascontiguousarray(x)"
    if "byte_offset" in text:
        return "pass a copy of the view: x.clone() (torch) or x.copy() (numpy)"
    if "device_type" in text:
        return "move the tensor to the kernel's device"
    if "dtype mismatch" in text:
        return "convert the tensor before the call"
    if " scalar " in text:
        return "pass a Python number of the parameter's type"
    if "non-NULL pointer, got None" in text:
        return "pass a tensor; one that an eager function can do without is annotated under `if x is not None:`"
    if "NULL pointer" in text or "handle" in text:
        return "pass a tensor: torch, NumPy, or any object with __dlpack__"
    return "pass a tensor of the shape the kernel was compiled for, or compile it with T.dynamic dimensions"


# ---- the wording of the cython backend ----------------------------------------------------------------------------

def explain_cython(sig: Signature, args: tuple[Any, ...], e: Exception) -> Exception:
    """The same failure in the words of the cython backend (ValueError)."""
    inputs = sig.inputs
    if len(args) != len(inputs):
        return error("kernel-arity", f"Expected «{len(inputs)} inputs», got ‹{len(args)}› with {len(sig.args)} inputs and "
                     f"{len(sig.outputs)} outputs")
    m = re.match(_ABOUT, str(e))
    if m is None:
        return explain(sig, args, e)
    for a, x in zip(inputs, args):
        if a.name == m["name"] and isinstance(a, TensorArg):
            text = _cython_text(a, x, str(e))
            if text:
                return error("kernel-input", text, expected=_expected(str(e)), found=describe(x), notes=_declared(a),
                             hint=_packed_hint(inputs, a.name) or _hint(str(e)))
    return explain(sig, args, e)


def _cython_text(a: TensorArg, x: Any, text: str) -> str:
    shape = tuple(getattr(x, "shape", ()))
    if "expected pointer or tensor" in text:
        return f"Unsupported tensor type: {type(x)}"
    if "dtype mismatch" in text:
        return f"Buffer dtype mismatch for parameter {a.name}: expected torch.{a.buffer.dtype}, got {x.dtype}"
    if "ndim mismatch" in text:
        return (f"Static shape mismatch for parameter {a.name}: expected {len(a.buffer.shape)} dimensions, got "
                f"{len(shape)}")
    at = re.search(r"(shape|strides)\[(\d+)\]", text)
    if at and at[1] == "shape":
        k, per = int(at[2]), max(1, 8 // a.buffer.dtype.bits) if int(at[2]) == len(shape) - 1 else 1
        return (f"Static shape mismatch for parameter {a.name}: expected {a.buffer.shape[k]} at index {k}, got {shape[k]}" +
                (f" bytes of {per} values" if per > 1 else ""))
    if at and a.buffer.strides_ is None:
        return f"Expected parameter {a.name} to be a contiguous tensor"
    if at:
        return (f"Static stride mismatch for parameter {a.name}: expected {a.buffer.strides[int(at[2])]} at index "
                f"{at[2]}")
    if "device_type" in text:
        return f"Buffer device type mismatch for parameter {a.name}: got {getattr(x, 'device', '?')}"
    return ""


def torch_if_loaded() -> Any:
    """The torch module when the program uses it, else None."""
    return sys.modules.get("torch")
