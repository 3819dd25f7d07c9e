"""Parameter annotations T.Tensor, T.StridedTensor, T.Buffer, T.ptr, T.handle; tensors from pointers; views."""

from __future__ import annotations

import difflib
import inspect
import warnings
from math import prod
from typing import Any

from tilelang.ir import (DYNAMIC, FRAGMENT, GLOBAL, SHARED, AddressOf, Alloc, Bind, Buffer, BufferFacts, Call, Cast, Const,
                         Expr, Load, Var, as_dim, cast, convert, dtype as DType, walk)

from .tracing.polynomial import difference
from .tracing.regions import BufferSlice
from .tracing.builder import current_builder, need_builder
from .tracing.state import describe, error, example, place


def shape_of(shape: Any, what: str) -> tuple[Any, ...]:
    """A shape argument (number, expression, tuple or list) as a tuple of dimensions."""
    items = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    out = []
    for d in items:
        try:
            d = as_dim(d.__tilelang_expr__() if hasattr(d, "__tilelang_expr__") else d)
        except TypeError as e:
            raise error("tensor-shape", f"the shape of {what}: {e}", found=getattr(e, "facts", ("", str(e)))[1],
                        hint=_dimension_hint(d)) from None
        if isinstance(d, int) and d < 0:
            raise error("tensor-shape", f"the shape of {what} has the negative dimension ‹{d}›")
        if isinstance(d, int) and d >= 1 << 63:
            raise error("tensor-shape", f"the shape of {what} has the dimension ‹{d}›, which does not fit int64",
                        expected="a dimension below 2**63")
        if isinstance(d, Expr) and not (d.dtype.is_int and d.dtype.lanes == 1):
            raise error("tensor-shape", f"the shape of {what} has a dimension of type ‹{d.dtype}›, «integers» are needed")
        out.append(d)
    return tuple(out)


def _dimension_hint(d: Any) -> str:
    """What to write in place of something that is no dimension."""
    if isinstance(d, float):
        return "integer division is `//`"
    if isinstance(d, tuple):
        return 'T.const("M N") gives two symbols: M, N = T.const("M N")'
    if not isinstance(d, str):
        return ""
    try:
        DType(d)
    except (TypeError, ValueError):
        return f'a size that is known at the call is a symbol: T.dynamic("{d}"), or T.const("{d}") in a tilelang.jit function'
    return "the shape comes first: T.Tensor((m, n), dtype)"


_COMMON = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "int4", "float4_e2m1fn")
_SHORT = {"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32",
          "single": "float32", "fp64": "float64", "double": "float64", "long": "int64", "byte": "uint8", "fp8": "float8_e4m3fn",
          "i32": "int32", "i8": "int8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp4": "float4_e2m1fn"}


def dtype_of(dt: Any, what: str) -> DType:
    """A dtype argument in any spelling; T.ptr means the 64-bit integer that holds an address."""
    if dt is ptr or dt is handle:
        return DType("int64")
    if isinstance(dt, (Expr, Buffer, tuple, list)) or dt in (float, int, bool) and not isinstance(dt, str):
        name = f"the Python type `{dt.__name__}`" if isinstance(dt, type) else f"a {type(dt).__name__}"
        raise error("tensor-dtype", f"{what} needs an element type, found {name}")
    try:
        return DType(dt)
    except (TypeError, ValueError) as e:
        name = _SHORT.get(str(dt).removeprefix("torch.").removeprefix("np."), str(dt).rpartition(".")[2])
        near = difflib.get_close_matches(name, _COMMON, n=1)
        raise error("dtype-name", f"{what}: {e}", found=repr(dt), hint=f"did you mean '{near[0]}'?" if near else "") from None


class TensorSpec:
    """A tensor annotation: shape, element type, strides and scope.

    strides None with compact True: row-major contiguous, checked at the call; with compact False: unspecified.
    """

    __slots__ = ("shape", "dtype", "strides", "scope_name", "compact", "name", "align", "elem_offset")
    symmetric = False  # every rank has one (distributed.py)

    def __init__(self, shape: Any, dt: Any, strides: Any = None, scope: str | None = None, compact: bool = True,
                 align: int = 0, elem_offset: Any = None) -> None:
        self.shape = shape_of(shape, "a tensor")
        self.dtype = dtype_of(dt, "a tensor")
        self.strides = None if strides is None else shape_of(strides, "a tensor's strides")
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise error("tensor-strides", f"Invalid shape/strides' dimensions: {len(self.shape)} and ‹{len(self.strides)}›",
                        expected=f"{len(self.shape)} strides")
        self.scope_name, self.compact = scope or "global", compact
        self.align, self.elem_offset = align, elem_offset

    def scope(self) -> str:
        return self.scope_name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def buffer(self, name: str, data: Any = None, span: Any = None) -> Buffer:
        """The Buffer of a parameter of this type."""
        offset = 0 if self.elem_offset is None else self.elem_offset
        return Buffer(name, self.shape, self.dtype, self.scope_name, self.strides, offset, data,
                      BufferFacts(align=self.align or 0, symmetric=self.symmetric), span=span)

    def __repr__(self) -> str:
        return f"T.Tensor({self.shape}, '{self.dtype}')"


class TensorFactory:
    """T.Tensor and similar annotations, written as a call or a subscript.  Bare: the call's argument gives shape and dtype.

    With `data=A.data` inside a function the result is no annotation but a Buffer over the storage of A.
    """

    def __init__(self, name: str, scope: str, strided: bool = False, compact: bool = True) -> None:
        self.name, self.default_scope, self.strided, self.compact = name, scope, strided, compact

    def __call__(self, *args: Any, **kw: Any) -> Any:
        make = self._strided if self.strided else self._plain
        signature = inspect.signature(make)
        try:
            signature.bind(*args, **kw)
        except TypeError as e:
            raise error("tensor-arguments", f"T.{self.name} takes «({', '.join(signature.parameters)})», found {e}") from None
        return make(*args, **kw)

    def _plain(self, shape: Any, dtype: Any = "float32", data: Any = None, scope: str | None = None) -> Any:
        spec = TensorSpec(shape, dtype, None, scope or self.default_scope, self.compact)
        return spec if data is None else over_storage(f"T.{self.name}", spec, data)

    def _strided(self, shape: Any, strides: Any, dtype: Any = "float32", scope: str | None = None) -> TensorSpec:
        return TensorSpec(shape, dtype, strides, scope or self.default_scope)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            if isinstance(key, (int, Expr)):
                raise error("tensor-subscript", f"‹T.{self.name}[{key}]› is ambiguous: write «T.{self.name}(({key},), dtype)»")
            key = (key,)
        if all(isinstance(k, int) for k in key):
            return self(key)
        return self(*key)

    def from_ptr(self, pointer: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Buffer:
        """The tensor at a pointer parameter."""
        return make_tensor(pointer, shape, dtype, strides)

    def __repr__(self) -> str:
        return f"T.{self.name}"


class _BufferFactory(TensorFactory):
    """T.Buffer(shape, dtype, ...): a tensor parameter with unspecified strides (deprecated: use T.Tensor)."""

    def _plain(self, shape: Any, dtype: Any = "float32", data: Any = None,  # type: ignore[override]
               strides: Any = None, elem_offset: Any = None, scope: str = "global", align: int = 0,
               offset_factor: int = 0, buffer_type: str = "", axis_separators: Any = None) -> Any:
        flat_only(f"T.{self.name}", buffer_type, axis_separators)
        warnings.warn("T.Buffer is deprecated, use T.Tensor or T.StridedTensor", DeprecationWarning, stacklevel=4)
        compact = strides is not None or data is not None
        spec = TensorSpec(shape, dtype, strides, scope, compact=compact, align=max(align, 0), elem_offset=elem_offset)
        return spec if data is None else over_storage("T.Buffer", spec, data, elem_offset)


Tensor = TensorFactory("Tensor", "global")
StridedTensor = TensorFactory("StridedTensor", "global", strided=True)
Buffer_ = _BufferFactory("Buffer", "global")
FragmentBuffer = TensorFactory("FragmentBuffer", FRAGMENT)
SharedBuffer = TensorFactory("SharedBuffer", DYNAMIC)
LocalBuffer = TensorFactory("LocalBuffer", "local")


class PointerFactory:
    """T.ptr and T.handle: an untyped device pointer parameter; as a dtype, the integer that holds an address."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, dtype: Any = None, storage_scope: str = "global", *, is_size_var: bool = False) -> Var:
        return Var(self.name, DType("handle"))

    def __repr__(self) -> str:
        return f"T.{self.name}"


ptr, handle = PointerFactory("ptr"), PointerFactory("handle")


@example('P = T.make_tensor(p, (64, 64), "float16")', "Y[i] = P[0, i % 64]")
def make_tensor(ptr: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Buffer:
    """A tensor at a pointer parameter (T.ptr), at an integer address (an element of a T.Tensor of T.ptr) or at the address of
    an element of another buffer.  It is row-major unless strides are given.

    A pointer parameter, or an address read from a tensor in global memory, must be aligned to 16 bytes.  Other addresses must
    be aligned to the element's size.  Raises pointer for any other argument.
    shape: elements; strides: elements.
    """
    b, align = need_builder("T.make_tensor"), 0
    if isinstance(ptr, AddressOf) and ptr.buffer.dtype == dtype_of(dtype, "the tensor"):
        offset = _distance(ptr)
        if isinstance(offset, int):  # a view of the same storage
            src, spec = ptr.buffer, TensorSpec(shape, dtype, strides)
            return b.nameless(Buffer(b.fresh_name("tensor"), spec.shape, spec.dtype, src.scope_name, spec.strides, offset,
                                     src.data, span=b.here()))
    if isinstance(ptr, Var) and ptr.dtype.is_handle:
        data = ptr
    elif isinstance(ptr, (Load, Expr)) and (ptr.dtype.is_int and ptr.dtype.bits == 64 or ptr.dtype.is_handle):
        data = b.let("ptr", cast(ptr, "handle"))
        align = 0 if _whole_tensor(b, ptr) else TensorSpec(shape, dtype).dtype.bytes
    else:
        narrow = isinstance(ptr, Expr) and ptr.dtype.is_int  # 32 bits cannot hold an address
        said = f"{describe(ptr)} of type {ptr.dtype}" if narrow else describe(ptr)
        raise error("pointer", f"T.make_tensor needs «a pointer parameter or an integer address» of 64 bits, found {said}")
    spec = TensorSpec(shape, dtype, strides, align=align)
    return b.nameless(spec.buffer(b.fresh_name("tensor"), data, b.here()))


def _whole_tensor(b: Any, address: Expr) -> bool:
    """Whether an address is a value that the program reads unchanged from a table."""
    bound = {id(s.var): s.value for f in b.frames for s in f.stmts if isinstance(s, Bind)}
    while isinstance(address, Cast) or id(address) in bound:
        address = address.value if isinstance(address, Cast) else bound[id(address)]
    return isinstance(address, Load) and address.buffer.scope_name == GLOBAL


def _distance(at: AddressOf) -> Any:
    """Elements from the start of the storage to an address: an int, or an expression if it is not constant."""
    offset: Any = at.buffer.offset
    for i, s in zip(at.indices, at.buffer.strides):
        offset = offset + i * s
    return offset.value if isinstance(offset, Const) else offset


@example('P = T.make_tensor_from_addr(address, (64, 64), "float16")')
def make_tensor_from_addr(addr: Any, shape: Any, dtype: Any = "float32", strides: Any = None,
                          storage_scope: str = "global") -> Buffer:
    """A tensor at an integer address, in global memory.  Raises pointer for another scope."""
    if storage_scope != GLOBAL:
        raise error("pointer", f"T.make_tensor_from_addr of {storage_scope} memory", expected="an address in global memory",
                    found=f"scope {storage_scope!r}",
                    hint="name the buffer itself, or a view of it by T.decl_buffer(data=S.data)")
    return make_tensor(addr, shape, dtype, strides)


def from_element(b: Any, what: str, spec: TensorSpec, data: Var, offset: Any, name: str) -> Buffer:
    """A buffer over existing storage that begins `offset` elements from its start.

    In global memory an offset that changes inside a launch becomes an address.  Raises pointer for one in shared memory.
    """
    offset = offset.value if isinstance(offset, Const) else offset
    if spec.scope_name == FRAGMENT and (spec.strides is not None or not isinstance(offset, int) or offset):
        raise error("pointer", f"{what} of a part of ‹a fragment›, whose elements are registers of several threads",
                    expected="a buffer in memory", hint="index the fragment itself, or copy it to shared memory")
    if isinstance(offset, Expr) and b.kernel is not None and _moves(b, offset):
        if spec.scope_name != GLOBAL:
            raise error("pointer", f"{what} of {spec.scope_name} memory begins at an element that changes while the kernel "
                        "runs", expected="an element that is the same throughout the launch", found=f"element {offset}",
                        hint="view the whole storage and index it")
        start = AddressOf(Buffer("storage", (1,), spec.dtype, GLOBAL, data=data), (convert(offset),))
        data, offset = b.let("ptr", start), 0
        spec.align = spec.align or spec.dtype.bytes
    spec.elem_offset = offset
    return b.nameless(spec.buffer(b.fresh_name(name), data, b.here()))


def over_storage(what: str, spec: TensorSpec, data: Any, elem_offset: Any = None) -> Buffer:
    """A buffer of this type over the storage of another (`A.data`, or A itself) or at a pointer parameter.

    Raises pointer where `data` is neither, or lies in another scope; view-size where a tensor is provably too small (views of
    shared memory and of registers are checked when the program is lowered).
    """
    b = need_builder(what)
    owner = data if isinstance(data, Buffer) else owner_of(data)
    data = data.data if isinstance(data, Buffer) else data
    if not isinstance(data, Var):
        raise error("pointer", f"{what} needs the storage of a buffer (`data=A.data`), found {describe(data)}",
                    expected="the storage of a buffer, A.data", hint="use T.alloc_buffer for new storage")
    start = 0 if elem_offset is None else elem_offset
    if owner is not None:
        if _kind(owner.scope_name) != _kind(spec.scope_name):
            raise error("pointer", f"{what} of scope {spec.scope_name} over the storage of `{owner.name}`, which is "
                        f"{owner.scope_name}", expected=f'scope="{owner.scope_name}"', found=f'scope="{spec.scope_name}"',
                        hint="give the scope of the storage")
        spec.scope_name = owner.scope_name
        room, need = _bits(owner.dtype, owner.shape), _bits(spec.dtype, spec.shape)
        compact = owner.scope_name == GLOBAL and owner.strides_ is None and owner.offset == 0 and spec.strides is None
        if compact and None not in (room, need) and isinstance(start, int) and need + start * _bits(spec.dtype, ()) > room:
            raise error("view-size", f"{what} of {spec.shape} {spec.dtype} from element {start} of the storage of "
                        f"`{owner.name}`, which ends before", expected=f"at most {room // 8} bytes",
                        found=f"{(need + start * _bits(spec.dtype, ())) // 8} bytes", hint="make the tensor smaller")
    return from_element(b, what, spec, data, start, "view")


def owner_of(data: Any) -> Buffer | None:
    """The buffer in scope that owns a storage variable (`A.data`); None for a pointer."""
    b = need_builder("the storage of a buffer")
    known = [x for _, x in b.params.values() if x is not None]
    known += [s.buffer for f in b.frames for s in f.stmts if isinstance(s, Alloc)] + list(b.outputs)
    return next((x for x in known if x.data is data), None)


def _kind(scope_name: str) -> str:
    return "shared" if scope_name in SHARED else scope_name


def _bits(dt: DType, shape: tuple[Any, ...]) -> Any:
    """Size of a tensor in bits; None where its shape is not constant."""
    return prod(shape, start=dt.bits * dt.lanes) if all(isinstance(d, int) for d in shape) else None


def flat_only(what: str, buffer_type: str, axis_separators: Any) -> None:
    """Reject options for the layout of a tensor that are not supported.  Raises not-available."""
    if buffer_type not in ("", "default") or axis_separators:
        raise error("not-available", f"{what} with buffer_type or axis_separators is not available", expected="neither of them",
                    found=f"buffer_type={buffer_type!r}, axis_separators={axis_separators!r}", hint="leave them out")


def _moves(b: Any, e: Expr) -> bool:
    """Whether a value may vary inside a launch, between threads or between statements."""
    inner = b.frames[b.frames.index(b.kernel):]
    own = {id(s.var) for f in inner for s in f.stmts if isinstance(s, Bind)} | {id(v) for v in b.kernel.indices}
    own |= {id(v) for f in inner[1:] for v in f.vars}
    return any(isinstance(n, (Load, Call)) or isinstance(n, Var) and id(n) in own for n in walk(e))


@example('P = T.match_buffer(p, (64, 64), "float16")')
def match_buffer(param: Any, shape: Any, dtype: Any = "float32", data: Any = None, strides: Any = None,
                 elem_offset: Any = None, scope: str = "global", align: int = 0, offset_factor: int = 0,
                 buffer_type: str = "", axis_separators: Any = None) -> Buffer:
    """The tensor at a pointer parameter; or a view of a buffer's region.

    data, elem_offset, scope: if given, they must agree with the parameter or the region.  Raises pointer otherwise.
    """
    flat_only("T.match_buffer", buffer_type, axis_separators)
    if isinstance(param, BufferSlice):
        own = param.region.buffer
        _agrees(data, own.data, elem_offset, scope, own.scope_name)
        r = param.region
        if r.buffer.strides_ is not None or not all(isinstance(s, (int, Expr)) for s in r.buffer.strides):
            raise error("pointer", "T.match_buffer of a region of a strided buffer is not available",
                        expected="a region of a compact buffer", found="one of a strided buffer")
        offset: Any = r.buffer.offset
        for m, s in zip(r.mins, r.buffer.strides):
            offset = offset + m * s
        dims = [s for s, e in zip(r.buffer.strides, r.extents) if not (isinstance(e, int) and e == 1)]
        want = shape_of(shape, "the view")
        if len(want) != len(dims):
            dims = list(r.buffer.strides)
        name, scope_name = f"{r.buffer.name}_view", r.buffer.scope_name
        spec = TensorSpec(want, dtype, tuple(dims), scope_name)
        return from_element(need_builder("T.match_buffer"), "T.match_buffer", spec, r.buffer.data, offset, name)
    if not isinstance(param, Var):
        raise error("pointer", f"T.match_buffer needs «a pointer parameter or a region», found {describe(param)}")
    _agrees(data, param, elem_offset, scope, "global")
    return make_tensor(param, shape, dtype, strides)


def _agrees(data: Any, own: Any, elem_offset: Any, scope: str, own_scope: str) -> None:
    """Reject arguments of T.match_buffer that disagree with the storage of the parameter or region."""
    given = [(f"elem_offset={elem_offset}", elem_offset is None or isinstance(elem_offset, (int, Const)) and
              int(getattr(elem_offset, "value", elem_offset)) == 0),
             ("data", data is None or data is own), (f"scope={scope!r}", scope == GLOBAL or _kind(scope) == _kind(own_scope))]
    for what, right in given:
        if not right:
            raise error("pointer", f"T.match_buffer with ‹{what}›, which is not the parameter's or the region's own",
                        expected="what the parameter or the region has",
                        hint="T.decl_buffer(data=A.data, elem_offset=n, scope=…) starts elsewhere in the storage of A")


@example('bits = T.view(A_s, dtype="uint16")', "columns = T.view(A_s, (64, 128), strides=(1, 64))   # A_s: (128, 64)")
def view(src: Any, shape: Any = None, dtype: Any = None, strides: Any = None) -> Buffer:
    """A view of a buffer's storage with another shape, element type or strides; no data moves.

    src: a whole buffer of any shape, dtype and scope; the view has its scope.  shape: elements, default src's.
    dtype: default src's.  The number of bits must stay the same.  strides: of the view, in its elements, row-major by default;
    a buffer that is not dense needs them, and fragments have none.  Raises view-source, view-size, tensor-strides.
    """
    if not isinstance(src, Buffer):
        raise error("view-source", f"T.view and T.reshape take a whole buffer, found {describe(src)}")
    new_shape = src.shape if shape is None else shape_of(shape, "the view")
    dt = src.dtype if dtype is None else dtype_of(dtype, "the view")
    left = difference(*(prod(shape, start=t.bits * t.lanes) for t, shape in ((src.dtype, src.shape), (dt, new_shape))))
    if not isinstance(left, int) or left:
        raise error("view-size", f"T.reshape/view shape check failed. `{src.name}` {src.shape} of {src.dtype} has another size "
                    f"than ‹{new_shape} of {dt}›", expected=f"the size of {src.shape} of {src.dtype}")
    given = None if strides is None else TensorSpec(new_shape, dt, strides).strides
    if given is not None:
        _check_strides(src, new_shape, dt, given)
    elif src.strides_ is not None and any(difference(s, d) != 0 for s, d in zip(
            src.strides_, Buffer("", src.shape, src.dtype).strides)):
        raise error("view-source", f"T.view of `{src.name}`, which is not dense", found=f"strides {src.strides_}",
                    expected="the strides of the view", hint="T.view(A, shape, strides=…)")
    offset, (wide, bits) = src.offset, (t.bits * t.lanes for t in (src.dtype, dt))
    if wide != bits:
        if isinstance(offset, int) and offset * wide % bits:
            raise error("view-size", f"`{src.name}` begins inside an element of {dt}", found=f"a start at bit {offset * wide}")
        offset = offset * wide // bits
    b = current_builder()
    name = b.fresh_name(f"{src.name}_view") if b else f"{src.name}_view"
    out = Buffer(name, new_shape, dt, src.scope_name, given, offset, src.data, src.facts, span=place())
    return b.nameless(out) if b else out


def _check_strides(src: Buffer, shape: tuple[Any, ...], dt: DType, strides: tuple[Any, ...]) -> None:
    """Reject strides of a view of registers, of elements that overlap, and, where all are constant, of a view beyond src."""
    if src.scope_name == FRAGMENT:
        raise error("view-source", f"T.view of ‹the fragment `{src.name}`› with strides: its elements are registers of several "
                    "threads", hint="leave strides out, or copy it to shared memory")
    room, far = ([(n - 1) * s for n, s in zip(dims, steps)] for dims, steps in ((src.shape, src.strides), (shape, strides)))
    below = 0
    known = [(s, n) for s, n, d in zip(strides, far, shape) if isinstance(s, int) and isinstance(d, int) and d > 1]
    for stride, length in sorted(known):
        if stride <= below:
            raise error("tensor-strides", f"elements of a view with strides ‹{strides}› and shape {shape} overlap",
                        expected="strides that give each element a place of its own")
        below += length
    if all(isinstance(n, int) for n in (*room, *far)) and (below + 1) * dt.bits * dt.lanes > (
            sum(room) + 1) * src.dtype.bits * src.dtype.lanes:
        raise error("view-size", f"a view with strides {strides} and shape {shape} goes beyond `{src.name}`",
                    found=f"an element at {below}")


@example("flat = T.reshape(A_s, (128 * 64,))")
def reshape(src: Any, shape: Any) -> Buffer:
    """A view of a buffer's storage with another shape; row-major in both, no data moves.

    src: a whole compact buffer of any shape, dtype and scope.  shape: as many elements as src has.  Raises view-source,
    view-size.
    """
    return view(src, shape)
