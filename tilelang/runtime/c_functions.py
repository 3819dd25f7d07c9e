"""Emits the plain C function of a kernel.

    int NAME(const float *A, float *B, int64_t m[, void *stream])       0, or an error code; NAME_error() gives the message

It makes the tensors that `prepare` of the host program checks (runtime/host_stub.py), with the shapes that its sizes give,
then runs `prepare` and `launch`.  The text of the host program is that of a program whose parameters are all inputs, because
callers pass the memory of the results too.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

from tilelang.ir import Var, dtype, int_range
from tilelang.ir.record import record

from .host_frame import BOOL, CPU, CUDA, DLTENSOR, FLOAT, INT, NONE, POINTER, Frame, dtype_bits
from .llvm_text import HostExpr, Writer, scalar_type
from .signature import PointerArg, Signature, TensorArg

OK, ARGUMENT, FAILED, DRIVER = 0, 1, 2, 3
MOST_SIZE = 1 << 47  # bytes that a process can address
CODES = {"OK": "done", "ARGUMENT": "an argument was rejected; nothing ran",
         "FAILED": "the kernel failed: an assertion, or no memory",
         "DRIVER": "the CUDA driver failed, is missing, or has no device that the library was compiled for"}
RESERVED = frozenset("""auto break case char const continue default do double else enum extern float for goto if inline int long
register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false
nullptr main errno NULL stream asm class new delete this template typename namespace operator public private protected virtual
friend using try catch throw""".split())

_C_TYPES = {"float32": "float", "tfloat32": "float", "float64": "double", "bool": "bool"}


@record
class CParameter:
    """One parameter of the C function.  kind: "tensor", "pointer", "scalar", "size" or "stream"."""

    name: str
    kind: str
    c_type: str
    ir_type: str
    arg: Any = None  # the TensorArg, PointerArg, ScalarArg, or the Var of a size


def c_type_of(dt: dtype) -> str:
    """The type of C that has a dtype's values; "void" for those that C has none for."""
    if dt.lanes == 1 and dt.is_int and dt.bits in (8, 16, 32, 64):
        return f"{'u' * dt.is_unsigned}int{dt.bits}_t"
    return _C_TYPES.get(str(dt), "void")


def c_parameters(sig: Signature, written: frozenset[str], stream: bool) -> tuple[CParameter, ...]:
    """The parameters of the C function: those of the program, its sizes (int64_t), and a stream for CUDA."""
    out: list[CParameter] = []
    taken: set[str] = set()

    def named(name: str) -> str:
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        name = f"{name}_" if name in RESERVED or keyword.iskeyword(name) else name
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    for a in sig.args:
        if isinstance(a, TensorArg):
            const = "" if a.name in written else "const "
            out.append(CParameter(named(a.name), "tensor", f"{const}{c_type_of(a.buffer.dtype)} *", "ptr", a))
        elif isinstance(a, PointerArg):
            out.append(CParameter(named(a.name), "pointer", "void *", "ptr", a))
        else:
            dt = a.var.dtype
            plain = dt.is_float and dt.bits < 32
            c = "float" if plain else c_type_of(dt)
            ir = "i8" if dt.is_bool else "float" if plain else scalar_type(dt)
            out.append(CParameter(named(a.name), "scalar", c, ir, a))
    out += [CParameter(named(v.name), "size", "int64_t", "i64", v) for v in sig.symbols]
    if stream:
        out.append(CParameter("stream", "stream", "void *", "ptr"))
    return tuple(out)


class FrameEnd:
    """The slots of a frame behind those of `prepare`: the message of an error, the stream, the driver's status."""

    def __init__(self, sig: Signature) -> None:
        self.message, self.stream, self.status = (8 * (Frame(sig).size + k) for k in range(3))
        self.words = Frame(sig).size + 3


def run_text(host_ir: str, sig: Signature, name: str, cuda: bool) -> str:
    """The host program as a function i32 @name(ptr arguments, ptr frame) -> error code.  It needs nothing of TVM-FFI."""
    at = FrameEnd(sig)
    text = re.sub(r"^define i32 @tl_(?:call|full|check)\(.*?^}\n", "", host_ir, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:declare .*@TVMFFI\w+\(.*|@tl_(?:make_array|default_device) = .*)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"call void @TVMFFIErrorSetRaisedFromCStr\(ptr [^,]+, ptr ([^)]+)\)",
                  r"call void @tl_note(ptr %frame, ptr \1)", text)
    text = re.sub(r"call ptr @TVMFFIEnvGetStream\([^)]*\)", "call ptr @tl_stream_of(ptr %frame)", text)
    w = Writer()
    for slot in (at.message, at.status):
        w.put("%frame", slot, "i64", "0")
    with w.unless_0(w.ins("call i32 @tl_prepare(ptr %args, ptr %frame)")):
        w.do(f"ret i32 {ARGUMENT}")
    if cuda:
        w.do("store i32 0, ptr @tl_status")
    with w.unless_0(w.ins("call i32 @tl_launch(ptr %frame)")):
        code = str(FAILED)
        if cuda:
            status = w.at("@tl_status", 0, "i32")
            w.put("%frame", at.status, "i32", status)
            code = status.test("eq", 0).select(ARGUMENT, DRIVER, "i32")
        w.do(f"ret i32 {code}")
    w.do(f"ret i32 {OK}")
    notes = "\n".join([
        "define internal void @tl_note(ptr %frame, ptr %message) {", f"  %at = getelementptr i8, ptr %frame, i64 {at.message}",
        "  store ptr %message, ptr %at", "  ret void", "}", "define internal ptr @tl_stream_of(ptr %frame) {",
        f"  %at = getelementptr i8, ptr %frame, i64 {at.stream}", "  %stream = load ptr, ptr %at", "  ret ptr %stream", "}"])
    return "\n".join([text, notes, w.function(name, "ptr %args, ptr %frame")])


def store_tensor(w: Writer, slot: tuple[str, int], values: dict[int, tuple[str, str]], optional: bool) -> None:
    """Store a DLTensor argument.  slot: the arguments and the position.  values: offset -> (type, value).  optional: a null
    pointer is None."""
    d = w.slot("i64", 6)
    w.put_all(d, {**values, 40: ("i64", "0")})
    kind = w.of("ptr", values[0][1]).test("eq", "null").select(NONE, DLTENSOR, "i32") if optional else DLTENSOR
    args, k = slot
    w.put_all(args, {16 * k: ("i32", kind), 16 * k + 8: ("ptr", d)})


class CFunction:
    """The text of the C function.  run: emits the call of the host program, (writer, arguments, frame) -> error code."""

    def __init__(self, sig: Signature, parameters: Sequence[CParameter], cuda: bool) -> None:
        self.sig, self.parameters, self.cuda = sig, parameters, cuda
        self.w, self.at = Writer(), FrameEnd(sig)

    def build(self, name: str, run: Callable[[Writer, str, str], str]) -> str:
        w = self.w
        args, frame = w.slot("i64", max(1, 2 * len(self.sig.args))), w.slot("i64", self.at.words)
        self._fill(args, frame)
        rc = run(w, args, frame)
        with w.unless_0(rc):
            w.do(f"call void @tl_say(ptr {w.at(frame, self.at.message, 'ptr')}, i32 {w.at(frame, self.at.status, 'i32')})")
        w.do(f"ret i32 {rc}")
        given = ", ".join(f"{p.ir_type} %p_{p.name}" for p in self.parameters)
        return "\n".join([*w.globals, w.function(name, given)])

    def _sizes(self, frame: str) -> None:
        """Reject sizes beyond their type, and 64-bit ones beyond any memory: a dimension such as 4 * m must not wrap."""
        w = self.w
        plain = {d for a in self.sig.args if isinstance(a, TensorArg) for d in a.buffer.shape if isinstance(d, Var)}
        for p in self.parameters:
            if p.kind == "size":
                low, high = int_range(p.arg.dtype) if p.arg.dtype.bits < 64 else (-MOST_SIZE, MOST_SIZE)
                low = 0 if p.arg in plain else low
                inside = (w.of("i64", f"%p_{p.name}") - low).test("ule", high - low)
                self._fail(frame, inside, ARGUMENT, w.string(
                    f"kernel {self.sig.name} size {p.name} is not in the range from {low} to {high}"))

    def _fill(self, args: str, frame: str) -> None:
        w = self.w
        self._sizes(frame)
        w.put(frame, 0, "i32", str(CUDA if self.cuda else CPU))
        w.put(frame, self.at.stream, "ptr", "%p_stream" if self.cuda else "null")
        w.put(frame, self.at.status, "i64", "0")
        device = self._first_device(frame) if self.cuda else "0"
        w.put(frame, 8, "i32", device)
        values: dict[Var, str] = {p.arg: f"%p_{p.name}" for p in self.parameters if p.kind == "size"}
        for k, p in enumerate(self.parameters[:len(self.sig.args)]):
            if p.kind == "scalar":
                self._scalar(args, k, p, values)
        expr = HostExpr(w, values, self.sig.name)
        for k, p in enumerate(self.parameters[:len(self.sig.args)]):
            if p.kind == "pointer":
                w.put_all(args, {16 * k: ("i32", POINTER), 16 * k + 8: ("ptr", f"%p_{p.name}")})
            elif p.kind == "tensor":
                b = p.arg.buffer
                shape, strides = self._array(expr, b.shape), "null"
                if b.strides_ is not None:
                    strides = self._array(expr, b.strides_)
                where = self._device(p, device, frame) if self.cuda else "0"
                store_tensor(w, (args, k), {
                    0: ("ptr", f"%p_{p.name}"), 8: ("i32", str(CUDA if self.cuda else CPU)), 12: ("i32", where),
                    16: ("i32", str(len(b.shape))), 20: ("i32", str(dtype_bits(b.dtype)[0])), 24: ("ptr", shape),
                    32: ("ptr", strides)}, not p.arg.used)

    def _array(self, expr: HostExpr, values: Sequence[Any]) -> str:
        out = self.w.slot("i64", max(1, len(values)))
        for k, v in enumerate(values):
            self.w.put(out, 8 * k, "i64", expr(v))
        return out

    def _scalar(self, args: str, k: int, p: CParameter, values: dict[Var, str]) -> None:
        w, dt, value = self.w, p.arg.var.dtype, self.w.of(p.ir_type, f"%p_{p.name}")
        kind = INT
        if dt.is_float:
            kind, value = FLOAT, value if p.ir_type == "double" else value.to("fpext", "double")
        elif dt.is_bool:
            kind, value = BOOL, value.test("ne", 0).to("zext", "i64")
        elif p.ir_type != "i64":
            value = value.to("zext" if dt.is_unsigned else "sext", "i64")
        elif dt.is_unsigned:
            kind = POINTER  # how values beyond int64 arrive
        values[p.arg.var] = value
        w.put_all(args, {16 * k: ("i32", kind), 16 * k + 8: ("double" if dt.is_float else "i64", value)})

    # ---- devices --------------------------------------------------------------------------------------------------
    def _fail(self, frame: str, good: str, code: int, message: str, status: str = "0") -> None:
        """Return an error code with a message unless good."""
        with self.w.when(good, unless=True, likely=True):
            self.w.do(f"call void @tl_say(ptr {message}, i32 {status})")
            self.w.do(f"ret i32 {code}")

    def _first_device(self, frame: str) -> str:
        """The device of the first tensor that is given, else the current one."""
        w = self.w
        rc = w.ins("call i32 @cuInit(i32 0)", "i32")
        missing = rc.test("eq", NO_DRIVER)
        none, bad = (w.string(f"kernel {self.sig.name}: {t}") for t in (
            "there is no CUDA driver (libcuda.so.1)", "the CUDA driver cannot be used"))
        self._fail(frame, rc.test("eq", 0), DRIVER, missing.select(none, bad, "ptr"), missing.select(0, rc))
        return first_device(w, [f"%p_{p.name}" for p in self.parameters if p.kind == "tensor"])

    def _device(self, p: CParameter, device: str, frame: str) -> str:
        found = self.w.ins(f"call i32 @tl_device_of(ptr %p_{p.name}, i32 {device})", "i32")
        message = f"kernel {self.sig.name} input {p.arg.name} is no memory of a GPU"
        self._fail(frame, found.test("sge", 0), ARGUMENT, self.w.string(message))
        return found


def first_device(w: Writer, addresses: Sequence[str]) -> str:
    """The device that holds the first of these addresses that is not null, else the current one."""
    device = w.ins("call i32 @tl_current_device()", "i32")
    for p in reversed(addresses):
        found = w.ins(f"call i32 @tl_device_of(ptr {p}, i32 {device})", "i32")
        device = found.test("slt", 0).select(device, found)
    return device


NO_DRIVER = 500  # CUDA_ERROR_NOT_FOUND: the result of a driver function that is missing

# tl_say keeps a message for NAME_error, in the calling thread; a driver's status is added to it.
SAY = """
@tl_message = internal thread_local global [1024 x i8] zeroinitializer
@tl_plain = private unnamed_addr constant [3 x i8] c"%s\\00"
@tl_with_status = private unnamed_addr constant [17 x i8] c"%s (CUresult %d)\\00"
declare i32 @snprintf(ptr, i64, ptr, ...)
define internal void @tl_text(ptr %to, ptr %message, i32 %status) {
  %plain = icmp eq i32 %status, 0
  %format = select i1 %plain, ptr @tl_plain, ptr @tl_with_status
  %n = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %to, i64 1024, ptr %format, ptr %message, i32 %status)
  ret void
}
"""


def say_text(name: str) -> str:
    """The function that keeps an error's message in the calling thread, and the one of C that returns it."""
    return f"""
define internal void @tl_say(ptr %message, i32 %status) {{
  call void @tl_text(ptr @tl_message, ptr %message, i32 %status)
  ret void
}}
define ptr @{name}_error() {{
  ret ptr @tl_message
}}
"""
