"""The host program of a kernel as LLVM IR, with the calling convention of TVM-FFI.

    int stub(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* ret)        (0: done, -1: error raised)

Every check of spec/runtime.md §4 is compiled code; a failing check raises through TVMFFIErrorSetRaisedFromCStr before
anything was launched or written.  One module holds

    prepare  checks the inputs, solves symbols, leaves addresses and values in a frame
    launch   runs the kernels on a frame (runtime/launchers.py)
    call     inputs -> prepare, outputs from the caller's framework (TVMFFIEnvTensorAlloc), launch, outputs returned
    full     inputs, then outputs in the order they are returned -> prepare, launch, None
    check    inputs, then the address of an int64 array that receives output dimensions and symbol values

Layout of the arguments: TVMFFIAny is {int32 type, int32 padding, 8 bytes of value}; a DLTensor is
{ptr data, {int32 type, int32 id} device, int32 ndim, {uint8 code, uint8 bits, uint16 lanes}, ptr shape, ptr strides,
uint64 byte_offset}, and stands 24 bytes into a Tensor object.  Sources: documentation of apache-tvm-ffi (ABI overview)
and of DLPack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tilelang.ir import Buffer, Expr, Var, dtype, free_vars, int_range

from .host_overlap import refuse_overlaps
from .llvm_text import HEADER, WEIGHTS, HostExpr, Writer, has_infinity, rounded_to, text_of
from .signature import PointerArg, ScalarArg, Signature, Solve, TensorArg

NONE, INT, BOOL, FLOAT, POINTER, DLTENSOR, TENSOR = 0, 1, 2, 3, 4, 7, 70
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_OBJECT_TO_DLTENSOR = 24

_FP8_FAMILY = {
    "float8_e4m3": ("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"),
    "float8_e5m2": ("float8_e5m2", "float8_e5m2fnuz"),
    "tfloat32": ("float32",),
}


class Frame:
    """The int64 slots prepare fills: device type and id, one slot a parameter (address or value), one a symbol."""

    def __init__(self, sig: Signature) -> None:
        self.sig = sig
        self.size = 2 + len(sig.args) + len(sig.symbols)

    def of_arg(self, index: int) -> int:
        """Byte offset of a parameter's slot."""
        return 8 * (2 + index)

    def of_symbol(self, k: int) -> int:
        return 8 * (2 + len(self.sig.args) + k)

    def values(self, w: Writer, frame: str) -> dict[Var, str]:
        """Scalars and symbols loaded from a frame: i64, or double for float scalars."""
        out = {a.var: w.at(frame, self.of_arg(a.index), "double" if a.var.dtype.is_float else "i64")
               for a in self.sig.args if isinstance(a, ScalarArg)}
        out.update({v: w.at(frame, self.of_symbol(k), "i64") for k, v in enumerate(self.sig.symbols)})
        return out

    def addresses(self, w: Writer, frame: str) -> dict[Var, str]:
        """Storage variable of each tensor, and each pointer parameter, to its address."""
        return {a.buffer.data if isinstance(a, TensorArg) else a.var: w.at(frame, self.of_arg(a.index), "ptr")
                for a in self.sig.args if not isinstance(a, ScalarArg)}


class Launcher(Protocol):
    """What runs the kernels once the arguments are good: one for the CPU entry, one for CUDA launches."""

    device: int  # CPU or CUDA

    def declarations(self) -> str:
        """Text of the external symbols used."""

    def alignment(self, arg: TensorArg) -> int:
        """Bytes the data pointer must be a multiple of."""

    def emit(self, w: Writer, frame: Frame, sig: Signature) -> None:
        """Body of `launch`: %frame holds the values; w.check raises."""


def dtype_bits(dt: dtype) -> list[int]:
    """The DLPack type words (code | bits << 8 | lanes << 16) a buffer of this type accepts."""
    def word(code: int, bits: int, lanes: int = 1) -> int:
        return code | bits << 8 | lanes << 16

    if dt.base in _FP8_FAMILY:
        return [word(dtype(n).type_code, dtype(n).bits, dt.lanes) for n in _FP8_FAMILY[dt.base]]
    if dt.is_bool:
        return [word(6, 8, dt.lanes), word(0, 8, dt.lanes), word(1, 8, dt.lanes), word(1, 1, dt.lanes)]
    if dt.is_handle:
        return [word(0, 64), word(1, 64)]
    return [word(dt.type_code, dt.bits, dt.lanes)]


def is_packed(dt: dtype) -> bool:
    """Whether values are narrower than a byte and packed by the caller."""
    return dt.bits < 8


class Prepare:
    """Text of `prepare`: every check of the inputs, then the frame."""

    def __init__(self, sig: Signature, launcher: Launcher, needed: set[Var],
                 assumptions: tuple[Expr, ...] = (), apart: tuple[tuple[str, str], ...] = (),
                 made: Mapping[str, tuple[Buffer, ...]] | None = None) -> None:
        self.sig, self.launcher, self.needed, self.assumptions = sig, launcher, needed, assumptions
        self.apart, self.made = apart, made or {}
        self.data: dict[int, str] = {}  # parameter index -> address of its first element
        self.w = Writer()
        self.scalars: dict[Var, str] = {}
        self.expr = HostExpr(self.w, self.scalars, sig.name)
        self.frame = Frame(sig)
        self.device: str | None = None  # device id of the first tensor
        self.tensors: dict[int, str] = {}  # parameter index -> address of its DLTensor
        self.shapes: dict[int, str] = {}
        self.strides: dict[int, str] = {}
        self.null: dict[int, str] = {}  # parameter index -> i1 "None was passed" (tensors never touched)
        self.empty: dict[int, str] = {}
        self.maybe: dict[Var, tuple[str, str]] = {}  # symbol -> (value slot, flag slot)

    def build(self, name: str) -> str:
        w = self.w
        for k, a in enumerate(self.sig.inputs):
            slot = w.ins(f"getelementptr i8, ptr %args, i64 {16 * k}") if k else "%args"
            if isinstance(a, ScalarArg):
                self._scalar(a, slot)
            elif isinstance(a, PointerArg):
                self._pointer(a, slot)
            elif a.used:
                self._tensor(a, slot)
            else:
                self._optional_tensor(a, slot)
        self._solve()
        for a in self.sig.inputs:
            if isinstance(a, TensorArg):
                self._late_checks(a)
        refuse_overlaps(self)
        exact = HostExpr(w, self.scalars, self.sig.name, wrap=True)
        for e in self.assumptions:
            w.check(exact.boolean(e), "RuntimeError", f"{self.sig.name}: Assume: {text_of(e)}")
        for k, v in enumerate(self.sig.symbols):
            self._put(self.frame.of_symbol(k), "i64", self.scalars[v])
        w.do("ret i32 0")
        return w.function(name, "ptr %args, ptr %frame", "internal ")

    def _put(self, offset: int, ty: str, value: str) -> None:
        self.w.put("%frame", offset, ty, value)

    # ---- arguments ------------------------------------------------------------------------------------------------
    def _scalar(self, a: ScalarArg, slot: str) -> None:
        w, dt = self.w, a.var.dtype
        what = f"kernel {self.sig.name} scalar {a.name}"
        kind = w.at(slot, 0, "i32")
        raw = w.at(slot, 8, "i64")
        is_int = w.ins(f"icmp eq i32 {kind}, {INT}")
        is_bool = w.ins(f"icmp eq i32 {kind}, {BOOL}")
        whole = w.ins(f"or i1 {is_int}, {is_bool}")
        if dt.is_float:
            self._float_scalar(a, kind, raw, whole, what)
            return
        if dt.is_bool:
            small = w.ins(f"icmp ule i64 {raw}, 1")
            w.check(w.ins(f"and i1 {whole}, {small}"), "TypeError", f"{what} expected boolean")
        elif dt.bits == 64 and dt.is_unsigned:  # larger values than int64 arrive as a pointer-sized argument
            wide = w.ins(f"icmp eq i32 {kind}, {POINTER}")
            w.check(w.ins(f"or i1 {whole}, {wide}"), "TypeError", f"{what} expected integer")
            fits = w.ins(f"icmp sge i64 {raw}, 0")
            w.check(w.ins(f"or i1 {fits}, {wide}"), "ValueError", f"{what} expected integer of uint64, from 0")
        else:
            w.check(whole, "TypeError", f"{what} expected integer")
            low, high = int_range(dt)
            if dt.bits < 64:
                shifted = w.ins(f"sub i64 {raw}, {low}")
                inside = w.ins(f"icmp ule i64 {shifted}, {high - low}")
                w.check(inside, "ValueError", f"{what} expected integer of {dt}, from {low} to {high}")
        self.scalars[a.var] = raw
        self._put(self.frame.of_arg(a.index), "i64", raw)

    def _float_scalar(self, a: ScalarArg, kind: str, raw: str, whole: str, what: str) -> None:
        w, dt = self.w, a.var.dtype
        is_float = w.ins(f"icmp eq i32 {kind}, {FLOAT}")
        w.check(w.ins(f"or i1 {is_float}, {whole}"), "TypeError", f"{what} expected float")
        value = w.ins(f"select i1 {is_float}, double {w.ins(f'bitcast i64 {raw} to double')}, "
                      f"double {w.ins(f'sitofp i64 {raw} to double')}")
        if dt.bits < 64:
            back = rounded_to(w, dt, value)
            lost = w.ins(f"fcmp oeq double {w.ins(f'call double @llvm.fabs.f64(double {back})')}, 0x7FF0000000000000")
            was = w.ins(f"fcmp oeq double {w.ins(f'call double @llvm.fabs.f64(double {value})')}, 0x7FF0000000000000")
            kept = w.ins(f"xor i1 {lost}, true")
            good = w.ins(f"or i1 {was}, {kept}") if has_infinity(dt) else kept
            w.check(good, "ValueError", f"{what} expected float of {dt}, the value is too large")
            value = back  # what host expressions and every target see
        self.scalars[a.var] = value
        self._put(self.frame.of_arg(a.index), "double", value)

    def _pointer(self, a: PointerArg, slot: str) -> None:
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        is_tensor = self._is_tensor(kind)
        plain = w.ins(f"icmp ule i32 {kind}, {INT}")
        address = w.ins(f"or i1 {plain}, {w.ins(f'icmp eq i32 {kind}, {POINTER}')}")
        w.check(w.ins(f"or i1 {address}, {is_tensor}"), "RuntimeError",
                f"kernel {self.sig.name} input {a.name} expected pointer or tensor handle")
        tensor, join, before = w.name("tensor"), w.name("join"), w.block
        w.branch(is_tensor, tensor, join)
        w.begin(tensor)
        d = self._dltensor(kind, raw)
        p = self._data(d)
        w.jump(join)
        w.begin(join)
        address = w.ins(f"phi ptr [ {raw}, %{before} ], [ {p}, %{tensor} ]")
        self.data[a.index] = address
        self._put(self.frame.of_arg(a.index), "ptr", address)

    def _is_tensor(self, kind: str) -> str:
        w = self.w
        return w.ins(f"or i1 {w.ins(f'icmp eq i32 {kind}, {TENSOR}')}, {w.ins(f'icmp eq i32 {kind}, {DLTENSOR}')}")

    def _dltensor(self, kind: str, raw: str) -> str:
        w = self.w
        offset = w.ins(f"select i1 {w.ins(f'icmp eq i32 {kind}, {TENSOR}')}, i64 {_OBJECT_TO_DLTENSOR}, i64 0")
        return w.ins(f"getelementptr i8, ptr {raw}, i64 {offset}")

    def _data(self, d: str) -> str:
        w = self.w
        return w.ins(f"getelementptr i8, ptr {w.at(d, 0, 'ptr')}, i64 {w.at(d, 40, 'i64')}")

    def _tensor(self, a: TensorArg, slot: str) -> None:
        """Kind, None, rank, dtype, device of a tensor the program uses."""
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        w.check(w.ins(f"icmp ne i32 {kind}, {NONE}"), "RuntimeError",
                f"{self.sig.name}.{a.name} is expected to have non-NULL pointer")
        self._handle(a, kind, raw)

    def _handle(self, a: TensorArg, kind: str, raw: str) -> None:
        w, fn = self.w, self.sig.name
        w.check(self._is_tensor(kind), "RuntimeError", f"kernel {fn} input {a.name} expected pointer or tensor handle")
        d = self._dltensor(kind, raw)
        w.check(w.ins(f"icmp eq i32 {w.at(d, 16, 'i32')}, {len(a.buffer.shape)}"), "RuntimeError",
                f"kernel {fn} input {a.name} ndim mismatch, expected {len(a.buffer.shape)}")
        if not is_packed(a.buffer.dtype):
            word = w.at(d, 20, "i32")
            good = ""
            for accepted in dtype_bits(a.buffer.dtype):
                this = w.ins(f"icmp eq i32 {word}, {accepted}")
                good = w.ins(f"or i1 {good}, {this}") if good else this
            w.check(good, "RuntimeError", f"kernel {fn} input {a.name} dtype mismatch, expected {a.buffer.dtype}")
        self.tensors[a.index] = d
        self.shapes[a.index] = w.at(d, 24, "ptr")
        self.strides[a.index] = w.at(d, 32, "ptr")
        self._device(a, d)

    def _device(self, a: TensorArg, d: str) -> None:
        w, fn = self.w, self.sig.name
        kind = w.at(d, 8, "i32")
        families = (CUDA, CUDA_MANAGED) if self.launcher.device == CUDA else (CPU, CUDA_HOST)
        good = w.ins(f"or i1 {w.ins(f'icmp eq i32 {kind}, {families[0]}')}, "
                     f"{w.ins(f'icmp eq i32 {kind}, {families[1]}')}")
        w.check(good, "RuntimeError", f"kernel {fn} input {a.name} device_type mismatch, expected "
                f"{'cuda' if self.launcher.device == CUDA else 'cpu'}")
        if not a.used:
            return
        device = w.at(d, 12, "i32")
        if self.device is None:
            self.device = device
            self._put(0, "i32", kind)
            self._put(8, "i32", device)
        elif self.launcher.device == CUDA:
            w.check(w.ins(f"icmp eq i32 {device}, {self.device}"), "RuntimeError",
                    f"kernel {fn} input {a.name} device_id violates packed ABI constraint")

    def _optional_tensor(self, a: TensorArg, slot: str) -> None:
        """A tensor the program never touches: None, or a tensor that fits all the same."""
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        self.null[a.index] = w.ins(f"icmp eq i32 {kind}, {NONE}")
        given, join = w.name("given"), w.name("join")
        dummy, held = w.slot("i8", 64), w.slot("ptr")
        w.do(f"store ptr {dummy}, ptr {held}")
        w.branch(self.null[a.index], join, given)
        w.begin(given)
        self._handle(a, kind, raw)
        w.do(f"store ptr {self.tensors[a.index]}, ptr {held}")
        w.jump(join)
        w.begin(join)
        self.tensors[a.index] = w.ins(f"load ptr, ptr {held}")

    # ---- shapes, strides, symbols ---------------------------------------------------------------------------------
    def _extent(self, a: TensorArg, dim: int) -> str:
        """Logical extent of a dimension as i64 (packed types count values, not bytes)."""
        w, buffer = self.w, a.buffer
        v = w.at(self.shapes[a.index], 8 * dim, "i64")
        if is_packed(buffer.dtype) and dim == len(buffer.shape) - 1:
            word = w.ins(f"zext i32 {w.at(self.tensors[a.index], 20, 'i32')} to i64")
            bits = w.ins(f"and i64 {w.ins(f'lshr i64 {word}, 8')}, 255")
            lanes = w.ins(f"lshr i64 {word}, 16")
            total = w.ins(f"mul i64 {v}, {w.ins(f'mul i64 {bits}, {lanes}')}")
            return w.ins(f"udiv i64 {total}, {buffer.dtype.bits * buffer.dtype.lanes}")
        return v

    def _stride(self, a: TensorArg, dim: int) -> str:
        """Stride of a dimension in elements; a null stride array means compact."""
        w = self.w
        base = self.strides[a.index]
        null = w.ins(f"icmp eq ptr {base}, null")
        return self.expr._either(null, lambda: self._compact(a, dim), lambda: w.at(base, 8 * dim, "i64"), "i64")

    def _compact(self, a: TensorArg, dim: int) -> str:
        step = "1"
        for d in range(len(a.buffer.shape) - 1, dim, -1):
            step = self.w.ins(f"mul i64 {step}, {self.w.at(self.shapes[a.index], 8 * d, 'i64')}")
        return step

    def _solve(self) -> None:
        for a in self.sig.args:
            if a.index in self.tensors and a.index not in self.null:
                self._is_empty(a)
        for step in self.sig.steps:
            if isinstance(step, Solve):
                self.scalars[step.symbol] = self._solved(step)
            else:
                self._compare(step)
        if self.sig.optional:
            self._solve_optional()

    def _is_empty(self, a: TensorArg) -> None:
        w = self.w
        zero = "false"
        for d in range(len(a.buffer.shape)):
            v = w.at(self.shapes[a.index], 8 * d, "i64")
            zero = w.ins(f"or i1 {zero}, {w.ins(f'icmp eq i64 {v}, 0')}")
        self.empty[a.index] = zero

    def _actual(self, site: Any) -> str:
        return self._extent(site.arg, site.dim) if site.what == "shape" else self._stride(site.arg, site.dim)

    def _message(self, site: Any, why: str = "") -> str:
        text = f"kernel {self.sig.name} input {site.arg.name} {site.what}[{site.dim}] violates packed ABI constraint"
        return text + (f", {why}" if why else f", expected {site.value!r}")

    def _solved(self, step: Solve) -> str:
        w, site = self.w, step.site
        actual = self._actual(site)
        factor, offset = self.expr(step.factor), self.expr(step.offset)
        value = actual if offset == "0" else w.ins(f"sub i64 {actual}, {offset}")
        if factor != "1":
            message = self._message(site, f"{site.value!r} has no whole {step.symbol.name} for it")
            if not factor.lstrip("-").isdigit():
                w.check(w.ins(f"icmp ne i64 {factor}, 0"), "RuntimeError", message)
            rest = w.ins(f"srem i64 {value}, {factor}")
            w.check(w.ins(f"icmp eq i64 {rest}, 0"), "RuntimeError", message)
            value = w.ins(f"sdiv i64 {value}, {factor}")
        self._fits(value, step.symbol, site)
        return value

    def _fits(self, value: str, symbol: Var, site: Any) -> None:
        """The symbol's type must hold the value; an extent is never negative."""
        w, dt = self.w, symbol.dtype
        low, high = int_range(dt)
        low = 0 if site.what == "shape" or dt.is_unsigned else low
        why = f"{symbol.name} is {dt}, from {low} to {high}"
        if dt.bits >= 64:
            if low == 0:
                w.check(w.ins(f"icmp sge i64 {value}, 0"), "RuntimeError", self._message(site, why))
            return
        shifted = value if low == 0 else w.ins(f"sub i64 {value}, {low}")
        w.check(w.ins(f"icmp ule i64 {shifted}, {high - low}"), "RuntimeError", self._message(site, why))

    def _compare(self, site: Any) -> None:
        w = self.w
        actual = self._actual(site)
        same = w.ins(f"icmp eq i64 {actual}, {self.expr(site.value)}")
        if site.what == "strides":
            same = w.ins(f"or i1 {same}, {self._free_stride(site.arg, site.dim)}")
        w.check(same, "RuntimeError", self._message(site))

    def _free_stride(self, a: TensorArg, dim: int) -> str:
        """Strides of extent-1 dimensions and of tensors without elements mean nothing."""
        w = self.w
        one = w.ins(f"icmp eq i64 {w.at(self.shapes[a.index], 8 * dim, 'i64')}, 1")
        return w.ins(f"or i1 {one}, {self.empty[a.index]}")

    def _solve_optional(self) -> None:
        """Symbols that only tensors the program never touches can give: taken from whichever was passed."""
        w = self.w
        for step in self.sig.optional:
            site = step.site if isinstance(step, Solve) else step
            if isinstance(step, Solve) and step.symbol not in self.maybe:
                self.maybe[step.symbol] = (w.slot("i64"), w.slot("i1"))
                w.do(f"store i64 0, ptr {self.maybe[step.symbol][0]}")
                w.do(f"store i1 false, ptr {self.maybe[step.symbol][1]}")
            given, join = w.name("given"), w.name("join")
            if site.arg.index in self.null:
                w.branch(self.null[site.arg.index], join, given)
                w.begin(given)
            self._reload()
            if site.arg.index not in self.empty or site.arg.index in self.null:
                self._is_empty_here(site.arg)
            plain = site.value if isinstance(site.value, Var) and site.value in self.maybe else None
            if plain is not None:
                self._bind_or_compare(plain, site)
            elif isinstance(step, Solve):
                self._require(free_vars(step.factor) | free_vars(step.offset))
                self._set(step.symbol, self._solved(step))
            else:
                self._require(free_vars(site.value) if isinstance(site.value, Expr) else set())
                self._compare(site)
            if site.arg.index in self.null:
                w.jump(join)
                w.begin(join)
        self._reload()
        self._require(self.needed)

    def _is_empty_here(self, a: TensorArg) -> None:
        self.shapes[a.index] = self.w.at(self.tensors[a.index], 24, "ptr")
        self.strides[a.index] = self.w.at(self.tensors[a.index], 32, "ptr")
        self._is_empty(a)

    def _reload(self) -> None:
        for v, (value, _) in self.maybe.items():
            self.scalars[v] = self.w.ins(f"load i64, ptr {value}")

    def _set(self, v: Var, value: str) -> None:
        self.w.do(f"store i64 {value}, ptr {self.maybe[v][0]}")
        self.w.do(f"store i1 true, ptr {self.maybe[v][1]}")

    def _bind_or_compare(self, v: Var, site: Any) -> None:
        w = self.w
        old, new, join = w.name("old"), w.name("new"), w.name("join")
        w.branch(w.ins(f"load i1, ptr {self.maybe[v][1]}"), old, new)
        w.begin(old)
        self._compare(site)
        w.jump(join)
        w.begin(new)
        value = self._actual(site)
        self._fits(value, v, site)
        self._set(v, value)
        w.jump(join)
        w.begin(join)

    def _require(self, symbols: set[Var]) -> None:
        for v in sorted((s for s in symbols if s in self.maybe), key=lambda s: s.name):
            names = ", ".join(f"{self.sig.name}.{n}" for n in dict(self.sig.sources).get(v, ()))
            self.w.check(self.w.ins(f"load i1, ptr {self.maybe[v][1]}"), "RuntimeError",
                         f"Symbolic shape variable {v.name} requires at least one non-null buffer among: {names}")

    # ---- what needs the shape -------------------------------------------------------------------------------------
    def _late_checks(self, a: TensorArg) -> None:
        """Compact strides, null and misaligned data."""
        w, fn = self.w, self.sig.name
        if a.index in self.null:  # never touched: no pointer is taken from it
            self._put(self.frame.of_arg(a.index), "ptr", "null")
            return
        if a.buffer.strides_ is None and len(a.buffer.shape):
            self._compact_strides(a)
        data = self._data(self.tensors[a.index])
        there = w.ins(f"icmp ne ptr {data}, null")
        w.check(w.ins(f"or i1 {there}, {self.empty[a.index]}"), "RuntimeError",
                f"kernel {fn} input {a.name} data pointer is NULL")
        align = self.launcher.alignment(a)
        if align > 1:
            low = w.ins(f"and i64 {w.ins(f'ptrtoint ptr {data} to i64')}, {align - 1}")
            good = w.ins(f"icmp eq i64 {low}, 0")
            w.check(w.ins(f"or i1 {good}, {self.empty[a.index]}"), "RuntimeError",
                    f"kernel {fn} input {a.name} byte_offset violates packed ABI constraint: its data must be aligned "
                    f"to {align} bytes")
        self._put(self.frame.of_arg(a.index), "ptr", data)
        self.data[a.index] = data

    def _compact_strides(self, a: TensorArg) -> None:
        w, fn = self.w, self.sig.name
        base = self.strides[a.index]
        some, join = w.name("strided"), w.name("join")
        w.branch(w.ins(f"icmp eq ptr {base}, null"), join, some)
        w.begin(some)
        step = "1"
        for d in range(len(a.buffer.shape) - 1, -1, -1):
            same = w.ins(f"icmp eq i64 {w.at(base, 8 * d, 'i64')}, {step}")
            free = self._free_stride(a, d)
            w.check(w.ins(f"or i1 {same}, {free}"), "RuntimeError",
                    f"kernel {fn} input {a.name} strides[{d}] violates packed ABI constraint "
                    f"({fn}.{a.name}.strides: expected to be compact array, but got non-compact strides)")
            if d:
                step = w.ins(f"mul i64 {step}, {w.at(self.shapes[a.index], 8 * d, 'i64')}")
        w.jump(join)
        w.begin(join)


class Wrapper:
    """Text of `call`, `full` and `check`."""

    def __init__(self, sig: Signature, mode: str) -> None:
        self.sig, self.mode, self.w, self.frame = sig, mode, Writer(), Frame(sig)

    def build(self, name: str, prepare: str, launch: str) -> str:
        w, sig = self.w, self.sig
        extra = {"call": 0, "full": len(sig.outputs), "check": 1}[self.mode]
        count = len(sig.inputs) + extra
        w.check(w.ins(f"icmp eq i32 %n, {count}"), "ValueError", f"{sig.name}: num_args should be {count}")
        frame = w.slot("i64", self.frame.size)
        if not any(isinstance(a, TensorArg) and a.used for a in sig.inputs):
            w.put(frame, 0, "i32", str(CPU))
            w.put(frame, 8, "i32", w.ins("load i32, ptr @tl_default_device"))
        self._forward(w.ins(f"call i32 @{prepare}(ptr %args, ptr {frame})"))
        end = 16 * len(sig.inputs)
        outs: list[str] = []
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
        """Leave with -1 when a callee raised."""
        w = self.w
        ok, bad = w.name("ok"), w.name("bad")
        w.branch(w.ins(f"icmp eq i32 {rc}, 0"), ok, bad, likely=True)
        w.begin(bad)
        w.release()
        w.do("ret i32 -1")
        w.begin(ok)

    def _given_output(self, a: TensorArg, frame: str, at: int) -> None:
        """"full": an output the runtime allocated; only that it is a tensor is looked at again."""
        w = self.w
        kind, raw = w.at("%args", at, "i32"), w.at("%args", at + 8, "ptr")
        is_object = w.ins(f"icmp eq i32 {kind}, {TENSOR}")
        good = w.ins(f"or i1 {is_object}, {w.ins(f'icmp eq i32 {kind}, {DLTENSOR}')}")
        w.check(good, "RuntimeError", f"kernel {self.sig.name} input {a.name} expected pointer or tensor handle")
        d = w.ins(f"getelementptr i8, ptr {raw}, i64 {w.ins(f'select i1 {is_object}, i64 24, i64 0')}")
        data = w.ins(f"getelementptr i8, ptr {w.at(d, 0, 'ptr')}, i64 {w.at(d, 40, 'i64')}")
        w.put(frame, self.frame.of_arg(a.index), "ptr", data)
        if not any(isinstance(x, TensorArg) and x.used for x in self.sig.inputs):
            w.put(frame, 0, "i32", w.at(d, 8, "i32"))
            w.put(frame, 8, "i32", w.at(d, 12, "i32"))

    def _dims(self, frame: str) -> list[list[str]]:
        expr = HostExpr(self.w, self.frame.values(self.w, frame), self.sig.name)
        return [[expr(d) for d in a.buffer.shape] for a in self.sig.outputs]

    def _report(self, frame: str, target: str) -> None:
        w = self.w
        values = [v for dims in self._dims(frame) for v in dims]
        values += [w.at(frame, self.frame.of_symbol(k), "i64") for k in range(len(self.sig.symbols))]
        for k, v in enumerate(values):
            w.put(target, 8 * k, "i64", v)

    def _allocate(self, frame: str) -> list[str]:
        """Outputs from the caller's framework, on the device of the first tensor input."""
        w, handles = self.w, []
        if not self.sig.outputs:
            return []
        device = w.at(frame, 0, "i32"), w.at(frame, 8, "i32")
        for a, dims in zip(self.sig.outputs, self._dims(frame)):
            n = len(dims)
            shape, proto, held = w.slot("i64", n), w.slot("i64", 6), w.slot("ptr")
            for k, v in enumerate(dims):
                if not v.isdigit():
                    w.check(w.ins(f"icmp sge i64 {v}, 0"), "RuntimeError",
                            f"kernel {self.sig.name} output {a.name} shape[{k}] is negative")
                w.put(shape, 8 * k, "i64", v)
            for offset, ty, value in ((0, "ptr", "null"), (8, "i32", device[0]), (12, "i32", device[1]),
                                      (16, "i32", str(n)), (20, "i32", str(dtype_bits(a.buffer.dtype)[0])),
                                      (24, "ptr", shape), (32, "ptr", "null"), (40, "i64", "0")):
                w.put(proto, offset, ty, value)
            self._forward(w.ins(f"call i32 @TVMFFIEnvTensorAlloc(ptr {proto}, ptr {held})"))
            handle = w.ins(f"load ptr, ptr {held}")
            w.owns_object(handle)
            handles.append(handle)
            data, skip = w.at(handle, 24, "ptr"), w.at(handle, 64, "i64")
            w.put(frame, self.frame.of_arg(a.index), "ptr", w.ins(f"getelementptr i8, ptr {data}, i64 {skip}"))
        return handles

    def _return(self, outs: list[str]) -> None:
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
    """The entry points a signature needs."""
    symbolic = any(isinstance(d, Expr) for a in sig.outputs for d in a.buffer.shape)
    return ("call", "full", "check") if symbolic else ("call", "full") if sig.outputs else ("call",)


def stub_text(sig: Signature, launcher: Launcher, needed: set[Var], modes: tuple[str, ...] = (),
              assumptions: tuple[Expr, ...] = (), apart: tuple[tuple[str, str], ...] = (),
              made: Mapping[str, tuple[Buffer, ...]] | None = None) -> str:
    """LLVM IR of the host module; the entry point of a mode is named tl_<mode>.

    needed: symbols the program or its outputs cannot do without (they must get a value even if tensors are None).
    assumptions: conditions on scalars and symbols that every call must meet.  apart: names of tensors and pointers that
    must not overlap, (written, read) each.  made: what the program makes of pointers, by name.
    """
    prepare = Prepare(sig, launcher, needed, assumptions, apart, made)
    parts: list[tuple[Writer, str]] = [(prepare.w, prepare.build("tl_prepare")), _launch_text(sig, launcher)]
    for mode in modes or modes_of(sig):
        wrapper = Wrapper(sig, mode)
        parts.append((wrapper.w, wrapper.build(f"tl_{mode}", "tl_prepare", "tl_launch")))
    out = [HEADER, launcher.declarations()]
    for k, (w, body) in enumerate(parts):  # string constants are numbered per function
        out += [*(g.replace("@.s", f"@.f{k}s", 1) for g in w.globals), body.replace("@.s", f"@.f{k}s")]
    return "\n".join([*out, WEIGHTS])
