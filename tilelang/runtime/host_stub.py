"""Emits the host program of a kernel as LLVM IR, with the calling convention of TVM-FFI.

    int stub(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* ret)        (0: done, -1: error raised)

Every check of a call (reference, "Calling a kernel") is compiled code.  A failing check raises an error through
TVMFFIErrorSetRaisedFromCStr before anything is launched or written.  One module contains

    prepare  checks the inputs, solves symbols, stores addresses and values in a frame
    launch   runs the kernels on a frame (runtime/launchers.py)
    call     inputs -> prepare, allocation of outputs by the caller's framework (TVMFFIEnvTensorAlloc), launch, outputs returned
    full     inputs, then outputs in the order they are returned -> prepare, launch, None
    check    inputs, then the address of an int64 array that receives output dimensions and symbol values

Layout of the arguments: TVMFFIAny is {int32 type, int32 padding, 8 bytes of value}; a DLTensor is
{ptr data, {int32 type, int32 id} device, int32 ndim, {uint8 code, uint8 bits, uint16 lanes}, ptr shape, ptr strides,
uint64 byte_offset}, and starts at byte 24 of a Tensor object.  Sources: documentation of apache-tvm-ffi (ABI overview)
and of DLPack.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilelang.ir import Buffer, Expr, Var
from tilelang.target.llvm_values import Value

from .host_checks import Prepare
from .host_frame import CPU, NONE, TENSOR, Frame, Launcher, allocated_bits, data_of, dltensor_of, is_a_tensor
from .llvm_text import HEADER, WEIGHTS, HostExpr, Writer
from .size_checks import SizeCheck
from .signature import Signature, TensorArg


class Wrapper:
    """The text of the functions `call`, `full` and `check`."""

    def __init__(self, sig: Signature, mode: str) -> None:
        self.sig, self.mode, self.w, self.frame = sig, mode, Writer(), Frame(sig)

    def build(self, name: str, prepare: str, launch: str) -> str:
        w, sig = self.w, self.sig
        extra = {"call": 0, "full": len(sig.outputs), "check": 1}[self.mode]
        count = len(sig.inputs) + extra
        w.check(w.of("i32", "%n").test("eq", count), f"{sig.name}: num_args should be {count}", "ValueError")
        frame = w.slot("i64", self.frame.size)
        if not any(isinstance(a, TensorArg) and a.used for a in sig.inputs):
            w.put(frame, 0, "i32", str(CPU))
            w.put(frame, 8, "i32", w.ins("load i32, ptr @tl_default_device"))
        self._forward(w.ins(f"call i32 @{prepare}(ptr %args, ptr {frame})"))
        end = 16 * len(sig.inputs)
        outs: list[Value] = []
        if self.mode == "check":
            self._report(frame, w.at("%args", end + 8, "ptr"))
        elif self.mode == "full":
            for k, a in enumerate(sig.outputs):
                self._given_output(a, frame, end + 16 * k)
        else:
            outs = self._allocate(frame)
        if self.mode != "check":
            self._forward(w.ins(f"call i32 @{launch}(ptr {frame})"))
        self._return(outs)
        return w.function(name, "ptr %self, ptr %args, i32 %n, ptr %ret")

    def _forward(self, rc: str) -> None:
        """Return -1 if a callee raised an error."""
        with self.w.unless_0(rc):
            self.w.release()
            self.w.do("ret i32 -1")

    def _given_output(self, a: TensorArg, frame: str, at: int) -> None:
        """In "full": take an output that the runtime has allocated, and check only that it is a tensor."""
        w = self.w
        kind, raw = w.at("%args", at, "i32"), w.at("%args", at + 8, "ptr")
        w.check(is_a_tensor(kind), f"kernel {self.sig.name} input {a.name} expected pointer or tensor handle")
        d = dltensor_of(w, kind, raw)
        w.put(frame, self.frame.of_arg(a.index), "ptr", data_of(w, d))
        if not any(isinstance(x, TensorArg) and x.used for x in self.sig.inputs):
            w.put(frame, 0, "i32", w.at(d, 8, "i32"))
            w.put(frame, 8, "i32", w.at(d, 12, "i32"))

    def _dims(self, frame: str) -> list[list[Value]]:
        expr = HostExpr(self.w, self.frame.values(self.w, frame), self.sig.name)
        return [[expr(d) for d in a.buffer.shape] for a in self.sig.outputs]

    def _report(self, frame: str, target: str) -> None:
        w = self.w
        values = [v for dims in self._dims(frame) for v in dims]
        values += [w.at(frame, self.frame.of_symbol(k), "i64") for k in range(len(self.sig.symbols))]
        for k, v in enumerate(values):
            w.put(target, 8 * k, "i64", v)

    def _allocate(self, frame: str) -> list[Value]:
        """Allocate outputs through the caller's framework, on the device of the first tensor input."""
        w, handles = self.w, []
        if not self.sig.outputs:
            return []
        device = w.at(frame, 0, "i32"), w.at(frame, 8, "i32")
        for a, dims in zip(self.sig.outputs, self._dims(frame)):
            n = len(dims)
            shape, proto, held = w.slot("i64", n), w.slot("i64", 6), w.slot("ptr")
            for k, v in enumerate(dims):
                if not v.isdigit():
                    w.check(v.test("sge", 0), f"kernel {self.sig.name} output {a.name} shape[{k}] is negative")
                w.put(shape, 8 * k, "i64", v)
            bits = allocated_bits(a.buffer.dtype)
            w.put_all(proto, {0: ("ptr", "null"), 8: ("i32", device[0]), 12: ("i32", device[1]), 16: ("i32", n),
                              20: ("i32", bits), 24: ("ptr", shape), 32: ("ptr", "null"), 40: ("i64", 0)})
            self._forward(w.ins(f"call i32 @TVMFFIEnvTensorAlloc(ptr {proto}, ptr {held})"))
            handle = w.ins(f"load ptr, ptr {held}")
            w.owns_object(handle)
            handles.append(handle)
            data, skip = w.at(handle, 24, "ptr"), w.at(handle, 64, "i64")
            self._has_memory(a, data, dims)
            w.put(frame, self.frame.of_arg(a.index), "ptr", w.place(data, skip))
        return handles

    def _has_memory(self, a: TensorArg, data: Value, dims: list[Value]) -> None:
        """Reject an output without memory, which torch's FakeTensorMode allocates."""
        w = self.w
        good = data.test("ne", "null")
        for v in dims:
            if v == "0" or not v.isdigit():
                good = good | v.test("eq", 0)
        w.check(good, f"kernel {self.sig.name} output {a.name} data pointer is NULL: the framework allocated a "
                "tensor without memory (a fake or meta tensor)")

    def _return(self, outs: list[Value]) -> None:
        w = self.w
        if len(outs) > 1:
            anys = w.slot("i64", 2 * len(outs))
            for k, handle in enumerate(outs):
                w.put(anys, 16 * k, "i64", str(TENSOR))
                w.put(anys, 16 * k + 8, "ptr", handle)
            maker = w.ins("load ptr, ptr @tl_make_array")
            rc = w.ins(f"call i32 @TVMFFIFunctionCall(ptr {maker}, ptr {anys}, i32 {len(outs)}, ptr %ret)")
            w.release()
            w.do(f"ret i32 {rc}")
            return
        w.put("%ret", 0, "i64", str(TENSOR if outs else NONE))
        w.put("%ret", 8, "ptr", outs[0] if outs else "null")
        w.do("ret i32 0")


def _launch_text(sig: Signature, launcher: Launcher) -> tuple[Writer, str]:
    w = Writer()
    launcher.emit(w, Frame(sig), sig)
    w.do("ret i32 0")
    return w, w.function("tl_launch", "ptr %frame", "internal ")


def modes_of(sig: Signature) -> tuple[str, ...]:
    """The entry points that a signature needs."""
    symbolic = any(isinstance(d, Expr) for a in sig.outputs for d in a.buffer.shape)
    return ("call", "full", "check") if symbolic else ("call", "full") if sig.outputs else ("call",)


def stub_text(sig: Signature, launcher: Launcher, needed: set[Var], modes: tuple[str, ...] = (),
              assumptions: tuple[Expr, ...] = (), disjoint: tuple[tuple[str, str], ...] = (),
              made: Mapping[str, tuple[Buffer, ...]] | None = None, sizes: tuple[SizeCheck, ...] = ()) -> str:
    """LLVM IR of the host module; the entry point of a mode is named tl_<mode>.

    needed: symbols that the program or its outputs use; they must get a value even if tensors are None.
    assumptions: conditions on scalars and symbols that every call must satisfy.  disjoint: pairs (written, read) of names of
    tensors and pointers that must be disjoint.  made: the buffers that the program makes of pointers, by name.
    sizes: conditions under which sizes and indices do not overflow.
    """
    prepare = Prepare(sig, launcher, needed, assumptions, disjoint, made, sizes)
    parts: list[tuple[Writer, str]] = [(prepare.w, prepare.build("tl_prepare")), _launch_text(sig, launcher)]
    for mode in modes or modes_of(sig):
        wrapper = Wrapper(sig, mode)
        parts.append((wrapper.w, wrapper.build(f"tl_{mode}", "tl_prepare", "tl_launch")))
    out = [HEADER, launcher.declarations()]
    for k, (w, body) in enumerate(parts):  # string constants are numbered per function
        out += [*(g.replace("@.s", f"@.f{k}s", 1) for g in w.globals), body.replace("@.s", f"@.f{k}s")]
    return "\n".join([*out, WEIGHTS])
