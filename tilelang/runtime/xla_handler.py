"""Emits a kernel's handler of XLA's foreign function interface, which jax.ffi.register_ffi_target takes.

    XLA_FFI_Error *NAME_xla(XLA_FFI_CallFrame *)

Arguments are the tensors that are no results, in the order of the program.  Results are given by `results_of`.  Attributes are
the scalars: int64, float64 for those of a float type, bool.  Types and shapes are checked by the host program.
The structs are written by their offsets, which are the same from version 0.1 of the interface on, and need no header.
Source: xla/ffi/api/c_api.h.
"""

from __future__ import annotations

from collections.abc import Callable

from tilelang.target.llvm_values import Value

from .c_functions import FrameEnd, first_device, store_tensor
from .host_frame import BOOL, CPU, CUDA, FLOAT, INT, dtype_bits
from .llvm_text import Writer
from .signature import Arg, PointerArg, ScalarArg, Signature, TensorArg

VERSION = (0, 1)  # of the interface: the least that has what is used here
_TYPES = {"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
              "float16": 10, "float32": 11, "tfloat32": 11, "float64": 12, "bfloat16": 16, "float8_e5m2": 19, "float8_e4m3": 20,
              "float8_e4m3fn": 20, "float8_e5m2fnuz": 24, "float8_e4m3fnuz": 25, "float8_e8m0fnu": 33}
_S64, _F64, _PRED = 5, 12, 1
_EXECUTE, _METADATA, _INVALID_ARGUMENT, _INTERNAL = 3, 1, 3, 13

# Offsets in bytes: of XLA_FFI_CallFrame, its records counted from their start, and of what they point to.
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGS, _RETS, _ATTRS = 8, 16, 24, 32, 40, 80, 120
_COUNT, _VALUES, _ATTR_VALUES = 16, 32, 40
_DTYPE, _DATA, _RANK, _DIMS = 16, 24, 32, 40
_ERROR_CREATE, _STREAM_GET = 48, 80


def results_of(sig: Signature, outputs: tuple[int, ...], written: frozenset[str]) -> tuple[int, ...]:
    """Positions of the parameters that are results: the program's outputs, then other tensors that it writes."""
    return (*outputs, *(a.index for a in sig.args if isinstance(a, TensorArg) and a.name in written and a.index not in outputs))


def has_type(a: Arg) -> bool:
    """Whether XLA has the type of a parameter: not of pointers, of values narrower than a byte, of vectors."""
    return not isinstance(a, PointerArg) and (isinstance(a, ScalarArg) or str(a.buffer.dtype) in _TYPES)


class XlaHandler:
    """The text of the handler.  outputs: positions of tensors that are only results.  results: of all results, in order."""

    def __init__(self, sig: Signature, outputs: tuple[int, ...], results: tuple[int, ...], cuda: bool) -> None:
        self.sig, self.outputs, self.results, self.cuda = sig, outputs, results, cuda
        self.w, self.at = Writer(), FrameEnd(sig)

    def build(self, name: str, run: Callable[[Writer, str, str], str]) -> str:
        """run: emits the call of the host program, (writer, arguments, frame) -> error code."""
        w, sig = self.w, self.sig
        self._metadata()
        args, frame, text = w.slot("i64", max(1, 2 * len(sig.args))), w.slot("i64", self.at.words), w.slot("i8", 1024)
        self.text = text
        tensors = [a for a in sig.args if isinstance(a, TensorArg)]
        inputs = [a.index for a in tensors if a.index not in self.outputs]
        scalars = sorted((a for a in sig.args if isinstance(a, ScalarArg)), key=lambda a: a.name)
        for record, n, what in ((_ARGS, len(inputs), "tensors"), (_RETS, len(self.results), "results"),
                                (_ATTRS, len(scalars), "attributes")):
            self._check(w.at("%call", record + _COUNT, "i64").test("eq", n), f"kernel {sig.name} takes {n} {what}")
        buffers = {a: self._value(_ARGS, k) for k, a in enumerate(inputs)}
        buffers |= {a: self._value(_RETS, k) for k, a in enumerate(self.results)}  # those of XLA share the input's memory
        data = {k: w.at(b, _DATA, "ptr") for k, b in buffers.items()}
        device = first_device(w, list(data.values())) if self.cuda else "0"
        w.put(frame, 0, "i32", str(CUDA if self.cuda else CPU))
        w.put(frame, 8, "i32", device)
        w.put(frame, self.at.stream, "ptr", self._stream() if self.cuda else "null")
        for a in tensors:
            self._tensor(args, a, buffers[a.index], data[a.index], device)
        for k, number in enumerate(scalars):
            self._scalar(args, number, self._value(_ATTRS, k, _ATTR_VALUES))
        rc = run(w, args, frame)
        with w.unless_0(rc):
            message, status = w.at(frame, self.at.message, "ptr"), w.at(frame, self.at.status, "i32")
            w.do(f"call void @tl_text(ptr {text}, ptr {message}, i32 {status})")
            self._return_error(text, w.of("i32", rc).test("eq", 1).select(_INVALID_ARGUMENT, _INTERNAL, "i32"))
        w.do("ret ptr null")
        body = w.function(name, "ptr %call").replace("define i32", "define ptr", 1)
        return "\n".join([*(g.replace("@.s", "@.x") for g in w.globals), body.replace("@.s", "@.x")])

    def _metadata(self) -> None:
        """Answer the question for the version of the interface, and calls of other stages."""
        w = self.w
        extension = w.at("%call", _EXTENSION, "ptr")
        with w.when(extension.test("eq", "null"), unless=True):
            with w.when(w.at(extension, 8, "i32").test("eq", _METADATA)):
                w.put_all(w.at(extension, 24, "ptr"), {24: ("i32", VERSION[0]), 28: ("i32", VERSION[1]), 32: ("i32", 0)})
                w.do("ret ptr null")
        with w.when(w.at("%call", _STAGE, "i32").test("eq", _EXECUTE), unless=True):
            w.do("ret ptr null")

    def _value(self, record: int, k: int, values: int = _VALUES) -> Value:
        return self.w.at(self.w.at("%call", record + values, "ptr"), 8 * k, "ptr")

    def _check(self, good: str, message: str) -> None:
        with self.w.when(good, unless=True, likely=True):
            self._return_error(self.w.string(message), str(_INVALID_ARGUMENT))

    def _return_error(self, message: str, code: str) -> None:
        w = self.w
        given = w.slot("i64", 4)
        w.put_all(given, {0: ("i64", 28), 8: ("ptr", "null"), 16: ("ptr", message), 24: ("i32", code)})
        create = w.at(w.at("%call", _API, "ptr"), _ERROR_CREATE, "ptr")
        w.do(f"ret ptr {w.ins(f'call ptr {create}(ptr {given})')}")

    def _stream(self) -> str:
        w = self.w
        given = w.slot("i64", 4)
        context = w.at("%call", _CONTEXT, "ptr")
        w.put_all(given, {0: ("i64", 32), 8: ("ptr", "null"), 16: ("ptr", context), 24: ("ptr", "null")})
        error = w.ins(f"call ptr {w.at(w.at('%call', _API, 'ptr'), _STREAM_GET, 'ptr')}(ptr {given})", "ptr")
        with w.when(error.test("eq", "null"), unless=True, likely=True):
            w.do(f"ret ptr {error}")
        return w.at(given, 24, "ptr")

    def _tensor(self, args: str, a: TensorArg, buffer: str, data: str, device: str) -> None:
        w, dt = self.w, a.buffer.dtype
        same = w.at(buffer, _DTYPE, "i32").test("eq", _TYPES[str(dt)])
        word = same.select(dtype_bits(dt)[0], 0, "i32")  # 0: a type that no tensor has
        rank = w.at(buffer, _RANK, "i64").to("trunc", "i32")
        where = w.ins(f"call i32 @tl_device_of(ptr {data}, i32 {device})") if self.cuda else "0"
        store_tensor(w, (args, a.index), {
            0: ("ptr", data), 8: ("i32", str(CUDA if self.cuda else CPU)), 12: ("i32", where), 16: ("i32", rank),
            20: ("i32", word), 24: ("ptr", w.at(buffer, _DIMS, "ptr")), 32: ("ptr", "null")}, False)

    def _scalar(self, args: str, a: ScalarArg, attribute: str) -> None:
        w, dt = self.w, a.var.dtype
        kind, code, ty, name = ((FLOAT, _F64, "i64", "float64") if dt.is_float else (BOOL, _PRED, "i8", "bool") if dt.is_bool
                                else (INT, _S64, "i64", "int64"))
        self._check(w.at(attribute, 0, "i32").test("eq", code),
                    f"kernel {self.sig.name} scalar {a.name} expected an attribute of type {name}")
        value = w.at(w.at(attribute, 8, "ptr"), 0, ty)
        value = value.to("zext", "i64") if ty == "i8" else value
        w.put_all(args, {16 * a.index: ("i32", kind), 16 * a.index + 8: ("i64", value)})
