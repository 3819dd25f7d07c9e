"""Annotations of parameters: T.Tensor, T.StridedTensor, T.Buffer, T.ptr, T.handle; tensors made from pointers."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from tilelang.ir import AddressOf, Bind, Buffer, Call, Cast, Const, Expr, Load, Var, as_dim, cast, convert, walk
from tilelang.ir import dtype as DType

from .regions import BufferSlice
from .state import current, describe, error, need_builder, place


def shape_of(shape: Any, what: str) -> tuple[Any, ...]:
    """A shape argument (number, expression, tuple or list) as a tuple of dimensions."""
    items = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    out = []
    for d in items:
        try:
            d = as_dim(d.__tilelang_expr__() if hasattr(d, "__tilelang_expr__") else d)
        except TypeError as e:
            raise error("tensor-shape", f"the shape of {what}: {e}",
                        found=getattr(e, "facts", ("", str(e)))[1]) from None
        if isinstance(d, int) and d < 0:
            raise error("tensor-shape", f"the shape of {what} has the negative dimension {d}",
                        found=str(d))
        if isinstance(d, int) and d >= 1 << 63:
            raise error("tensor-shape", f"the shape of {what} has the dimension {d}, which does not fit int64",
                        expected="a dimension below 2**63", found=str(d))
        if isinstance(d, Expr) and not (d.dtype.is_int and d.dtype.lanes == 1):
            raise error("tensor-shape", f"the shape of {what} has a dimension of type {d.dtype}, integers are needed",
                        expected="integers", found=str(d.dtype))
        out.append(d)
    return tuple(out)


def dtype_of(dt: Any, what: str) -> DType:
    """A dtype argument in any spelling; T.ptr means the 64-bit integer that holds an address."""
    if dt is ptr or dt is handle:
        return DType("int64")
    if isinstance(dt, (Expr, Buffer, tuple, list)) or dt in (float, int, bool) and not isinstance(dt, str):
        name = f"the Python type `{dt.__name__}`" if isinstance(dt, type) else f"a {type(dt).__name__}"
        raise error("tensor-dtype", f"{what} needs an element type, found {name}",
                    found=str(name), hint="write T.float32, T.int32, …")
    try:
        return DType(dt)
    except (TypeError, ValueError) as e:
        raise error("dtype-name", f"{what}: {e}",
                    found=repr(dt)) from None


class TensorSpec:
    """A tensor annotation: shape, element type, strides and scope, before it is a parameter of a function.

    strides None with compact True: row-major contiguous, checked at the call; with compact False: unspecified.
    """

    __slots__ = ("shape", "dtype", "strides", "scope_name", "compact", "name", "align", "elem_offset")

    def __init__(self, shape: Any, dt: Any, strides: Any = None, scope: str | None = None, compact: bool = True,
                 align: int = 0, elem_offset: Any = None) -> None:
        self.shape = shape_of(shape, "a tensor")
        self.dtype = dtype_of(dt, "a tensor")
        self.strides = None if strides is None else shape_of(strides, "a tensor's strides")
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise error("tensor-strides", f"Invalid shape/strides' dimensions: {len(self.shape)} and "
                                          f"{len(self.strides)}",
                        expected=f"{len(self.shape)} strides", found=str(len(self.strides)))
        self.scope_name, self.compact = scope or "global", compact
        self.align, self.elem_offset = align, elem_offset

    def scope(self) -> str:
        return self.scope_name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def buffer(self, name: str, data: Any = None, span: Any = None) -> Buffer:
        """The Buffer of a parameter of this type."""
        attrs: dict[str, Any] = {}
        if not self.compact:
            attrs["any_strides"] = True
        if self.align:
            attrs["align"] = self.align
        offset = 0 if self.elem_offset is None else self.elem_offset
        return Buffer(name, self.shape, self.dtype, self.scope_name, self.strides, offset, data,
                      tuple(sorted(attrs.items())), span=span)

    def __repr__(self) -> str:
        return f"T.Tensor({self.shape}, {str(self.dtype)!r})"


class TensorFactory:
    """T.Tensor and its kin: callable and subscriptable; bare, shape and dtype come from the argument of the call."""

    def __init__(self, name: str, scope: str, strided: bool = False, compact: bool = True) -> None:
        self.name, self.default_scope, self.strided, self.compact = name, scope, strided, compact

    def __call__(self, *args: Any, **kw: Any) -> TensorSpec:
        make = self._strided if self.strided else self._plain
        signature = inspect.signature(make)
        try:
            signature.bind(*args, **kw)
        except TypeError as e:
            raise error("tensor-arguments", f"T.{self.name} takes ({', '.join(signature.parameters)}), found {e}",
                        expected=f"({', '.join(signature.parameters)})", found=str(e)) from None
        return make(*args, **kw)

    def _plain(self, shape: Any, dtype: Any = "float32", data: Any = None, scope: str | None = None) -> TensorSpec:
        return TensorSpec(shape, dtype, None, scope or self.default_scope, self.compact)

    def _strided(self, shape: Any, strides: Any, dtype: Any = "float32", scope: str | None = None) -> TensorSpec:
        return TensorSpec(shape, dtype, strides, scope or self.default_scope)

    def __getitem__(self, key: Any) -> TensorSpec:
        if not isinstance(key, tuple):
            if isinstance(key, (int, Expr)):
                raise error("tensor-subscript", f"T.{self.name}[{key}] is ambiguous: write T.{self.name}(({key},), "
                                                "dtype)",
                            expected=f"T.{self.name}(({key},), dtype)", found=f"T.{self.name}[{key}]")
            key = (key,)
        if all(isinstance(k, int) for k in key):
            return self(key)
        return self(*key)

    def from_ptr(self, pointer: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Buffer:
        """The tensor at an incoming pointer parameter."""
        return make_tensor(pointer, shape, dtype, strides)

    def __repr__(self) -> str:
        return f"T.{self.name}"


class _BufferFactory(TensorFactory):
    """T.Buffer(shape, dtype, ...): a tensor parameter with unspecified strides (deprecated: use T.Tensor)."""

    def _plain(self, shape: Any, dtype: Any = "float32", data: Any = None,  # type: ignore[override]
               strides: Any = None, elem_offset: Any = None, scope: str = "global", align: int = 0,
               offset_factor: int = 0, buffer_type: str = "", axis_separators: Any = None) -> TensorSpec:
        warnings.warn("T.Buffer is deprecated, use T.Tensor or T.StridedTensor", DeprecationWarning, stacklevel=4)
        return TensorSpec(shape, dtype, strides, scope, compact=strides is not None, align=max(align, 0),
                          elem_offset=elem_offset)


Tensor = TensorFactory("Tensor", "global")
StridedTensor = TensorFactory("StridedTensor", "global", strided=True)
Buffer_ = _BufferFactory("Buffer", "global")
FragmentBuffer = TensorFactory("FragmentBuffer", "local.fragment")
SharedBuffer = TensorFactory("SharedBuffer", "shared.dyn")
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


def make_tensor(pointer: Any, shape: Any, dtype: Any = "float32", strides: Any = None) -> Buffer:
    """A tensor at a pointer parameter (T.ptr), at an integer address (an element of a T.Tensor of T.ptr) or at the address of
    an element of another buffer, row-major unless strides are given.

    A pointer parameter, and an address read from a tensor in global memory, is taken to be that of a whole tensor: a multiple
    of 16 bytes.  Other addresses are multiples of an element's size.  Raises pointer for anything else.
    """
    b, align = need_builder("T.make_tensor"), 0
    if isinstance(pointer, AddressOf) and pointer.buffer.dtype == dtype_of(dtype, "the tensor"):
        offset = _distance(pointer)
        if isinstance(offset, int):  # a view of the same storage
            src, spec = pointer.buffer, TensorSpec(shape, dtype, strides)
            buf = Buffer(b.fresh_name("tensor"), spec.shape, spec.dtype, src.scope_name, spec.strides, offset, src.data,
                         span=b.here())
            b.unnamed[id(buf)] = buf
            return buf
    if isinstance(pointer, Var) and pointer.dtype.is_handle:
        data = pointer
    elif isinstance(pointer, (Load, Expr)) and (pointer.dtype.is_int or pointer.dtype.is_handle):
        data = b.let("ptr", cast(pointer, "handle"))
        align = 0 if _whole_tensor(b, pointer) else TensorSpec(shape, dtype).dtype.bytes
    else:
        raise error("pointer", f"T.make_tensor needs a pointer parameter or an integer address, found "
                     f"{describe(pointer)}",
                    expected="a pointer parameter or an integer address", found=describe(pointer),
                    hint="declare the parameter as `p: T.ptr`")
    spec = TensorSpec(shape, dtype, strides, align=align)
    buf = spec.buffer(b.fresh_name("tensor"), data, b.here())
    b.unnamed[id(buf)] = buf
    return buf


def _whole_tensor(b: Any, address: Expr) -> bool:
    """Whether an address is one that the program only reads from a table."""
    bound = {id(s.var): s.value for f in b.frames for s in f.stmts if isinstance(s, Bind)}
    while isinstance(address, Cast) or id(address) in bound:
        address = address.value if isinstance(address, Cast) else bound[id(address)]
    return isinstance(address, Load) and address.buffer.scope_name == "global"


def _distance(at: AddressOf) -> Any:
    """Elements from the start of the storage to an address: an int, or an expression where that is not constant."""
    offset: Any = at.buffer.offset
    for i, s in zip(at.indices, at.buffer.strides):
        offset = offset + i * s
    return offset.value if isinstance(offset, Const) else offset


def make_tensor_from_addr(addr: Any, shape: Any, dtype: Any = "float32", strides: Any = None,
                          storage_scope: str = "global") -> Buffer:
    """A tensor at an integer address."""
    return make_tensor(addr, shape, dtype, strides)


def from_element(b: Any, what: str, spec: TensorSpec, data: Var, offset: Any, name: str) -> Buffer:
    """A buffer over existing storage that begins `offset` elements from its start.

    In global memory an offset that changes inside a launch becomes an address.  Raises pointer for one in shared memory.
    """
    offset = offset.value if isinstance(offset, Const) else offset
    if spec.scope_name == "local.fragment" and (spec.strides is not None or not isinstance(offset, int) or offset):
        raise error("pointer", f"{what} of a part of a fragment, whose elements are registers of several threads",
                    expected="a buffer in memory", found="a fragment",
                    hint="index the fragment itself, or copy it to shared memory")
    if isinstance(offset, Expr) and b.kernel is not None and _moves(b, offset):
        if spec.scope_name != "global":
            raise error("pointer", f"{what} of {spec.scope_name} memory begins at an element that changes while the kernel "
                        "runs", expected="an element that is the same throughout the launch", found=f"element {offset}",
                        hint="view the whole storage and index it")
        start = AddressOf(Buffer("storage", (1,), spec.dtype, "global", data=data), (convert(offset),))
        data, offset = b.let("ptr", start), 0
        spec.align = spec.align or spec.dtype.bytes
    spec.elem_offset = offset
    out = spec.buffer(b.fresh_name(name), data, b.here())
    b.unnamed[id(out)] = out
    return out


def _moves(b: Any, e: Expr) -> bool:
    """Whether a value may differ inside a launch: between threads or statements."""
    inner = b.frames[b.frames.index(b.kernel):]
    own = {id(s.var) for f in inner for s in f.stmts if isinstance(s, Bind)} | {id(v) for v in b.kernel.thread_vars}
    own |= {id(v) for f in inner[1:] for v in (*getattr(f, "vars", ()), getattr(f, "var", None))}
    return any(isinstance(n, (Load, Call)) or isinstance(n, Var) and id(n) in own for n in walk(e))


def match_buffer(param: Any, shape: Any, dtype: Any = "float32", data: Any = None, strides: Any = None,
                 elem_offset: Any = None, scope: str = "global", align: int = 0, offset_factor: int = 0,
                 buffer_type: str = "", axis_separators: Any = None) -> Buffer:
    """The tensor at a pointer parameter; or a view of a buffer's region."""
    if isinstance(param, BufferSlice):
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
        raise error("pointer", f"T.match_buffer needs a pointer parameter or a region, found {describe(param)}",
                    expected="a pointer parameter or a region", found=describe(param))
    return make_tensor(param, shape, dtype, strides)


def view(src: Any, shape: Any = None, dtype: Any = None) -> Buffer:
    """The same storage with another shape or element type.  The number of bits must stay the same."""
    if not isinstance(src, Buffer):
        raise error("view-source", f"T.view and T.reshape take a whole buffer, found {describe(src)}",
                    found=describe(src))
    new_shape = src.shape if shape is None else shape_of(shape, "the view")
    dt = src.dtype if dtype is None else dtype_of(dtype, "the view")
    total_src: Any = src.dtype.bits * src.dtype.lanes
    total_dst: Any = dt.bits * dt.lanes
    for d in src.shape:
        total_src = total_src * d
    for d in new_shape:
        total_dst = total_dst * d
    total_src, total_dst = (x.value if isinstance(x, Const) else x for x in (total_src, total_dst))
    same = total_src.same(total_dst) if isinstance(total_src, Expr) and isinstance(total_dst, Expr) else (
        not isinstance(total_src, Expr) and not isinstance(total_dst, Expr) and total_src == total_dst)
    if not same:
        raise error("view-size", f"T.reshape/view shape check failed. `{src.name}` {src.shape} of {src.dtype} has "
                           f"another size than {new_shape} of {dt}",
                    expected=f"the size of {src.shape} of {src.dtype}", found=f"{new_shape} of {dt}")
    if src.strides_ is not None:
        raise error("view-source", f"T.view of `{src.name}`, which has explicit strides, is not available",
                    found=f"`{src.name}` with explicit strides")
    b = current()
    name = b.fresh_name(f"{src.name}_view") if b else f"{src.name}_view"
    out = Buffer(name, new_shape, dt, src.scope_name, None, src.offset, src.data, src.attrs, span=place())
    if b:
        b.unnamed[id(out)] = out
    return out


def reshape(src: Any, shape: Any) -> Buffer:
    """The same storage with another shape."""
    return view(src, shape)


def address_of(x: Any) -> AddressOf:
    """Address of an element `A[i, j]` (of a buffer: its first element)."""
    if isinstance(x, Load):
        return AddressOf(x.buffer, x.indices)
    if isinstance(x, BufferSlice):
        return AddressOf(x.buffer, x.region.mins)
    if isinstance(x, Buffer):
        return AddressOf(x, tuple(Const(0, DType("int32")) for _ in x.shape))
    raise error("pointer", f"an address is taken of a buffer, a region or an element, found {describe(x)}",
                expected="a buffer, a region or an element", found=describe(x))


_ACCESS = {"r": 1, "w": 2, "rw": 3, "wr": 3}


def access_ptr(base: Any, access_type: Any = "r", *extents: Any, offset: Any = 0, extent: Any = None,
               ignore_last_ndim: int = 0) -> AddressOf:
    """Pointer to a buffer, region (its first element) or element, for extern calls and intrinsics.

    Raises access-type for a bad access string.
    """
    if isinstance(access_type, str) and (not access_type or set(access_type) - {"r", "w"}):
        raise error("access-type", f"Invalid access_type={access_type!r}, expected 'r', 'w' or 'rw'",
                    found=repr(access_type))
    at = address_of(base)
    if isinstance(offset, int) and offset == 0:
        return at
    if len(at.indices) != 1:
        raise error("access-type", "access_ptr with an offset needs a 1-dimensional buffer",
                    expected="a 1-dimensional buffer", found=f"{len(at.indices)} dimensions",
                           hint="give the element's indices instead")
    return AddressOf(at.buffer, (at.indices[0] + offset,))


def _method_access_ptr(self: Buffer, access_mask: Any = "r", offset: Any = 0, extent: Any = None,
                       **_: Any) -> AddressOf:
    """`buf.access_ptr("r")`: pointer to the buffer's first element, or `offset` elements on (1-D buffers)."""
    return access_ptr(self, access_mask, offset=offset, extent=extent)


setattr(Buffer, "access_ptr", _method_access_ptr)  # noqa: B010 - like Buffer.subscript, known once the language is

__all__ = ["FragmentBuffer", "LocalBuffer", "SharedBuffer", "StridedTensor", "Tensor", "TensorFactory", "TensorSpec",
           "access_ptr", "address_of", "dtype_of", "handle", "make_tensor", "make_tensor_from_addr", "match_buffer",
           "ptr", "reshape", "shape_of", "view"]
