"""Raw statements of the IR-script flavour that have a plain meaning here; the others are in unavailable.py."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Assert as AssertStmt
from tilelang.ir import Buffer, Expr, Var, as_bool, call, cast, convert
from tilelang.ir import dtype as DType
from tilelang.target.intrinsics import INTRINSICS, is_pure

from .builder import Emitted
from .kernel import import_source, thread_binding
from .scope import BodyFrame, Frame
from .state import describe, error, need_builder
from .tensor import TensorSpec, dtype_of, shape_of
from .thread import activemask, emit_call, shfl_down, shfl_sync, shfl_up, sync_grid, value_call
from .tile import EMITTED

_IMPORT = "pragma_import_c"


def Assert(condition: Any, message: str, error_kind: str = "RuntimeError") -> Emitted:
    """Check a condition: on the host before the launch, in a kernel on the device."""
    b = need_builder("T.Assert")
    b.emit(AssertStmt(as_bool(condition), str(message), "device_assert" if b.kernel is not None else "assert",
                      span=b.here()))
    return EMITTED


def _attributes(attrs: dict[str, Any]) -> None:
    for key, value in attrs.items():
        if str(key) != _IMPORT:
            raise error("not-available", f"the raw attribute {key!r} is not available", hint="known: pragma_import_c")
        import_source(value)


def attr(node: Any, key: str, value: Any) -> Frame:
    """`with T.attr(node, "pragma_import_c", source):` puts source ahead of the kernel."""
    _attributes({key: value})
    return BodyFrame()


def sblock_attr(attrs: dict[str, Any]) -> Emitted:
    """Attributes of the enclosing kernel: pragma_import_c."""
    _attributes(attrs)
    return EMITTED


def sblock(name: str = "", no_realize: bool = False) -> Frame:
    """A named block of statements."""
    return BodyFrame()


def reads(*regions: Any) -> Emitted:
    """What a block reads; known from its statements, so it is ignored."""
    return EMITTED


def writes(*regions: Any) -> Emitted:
    """What a block writes; known from its statements, so it is ignored."""
    return EMITTED


def bind(value: Any, type_annotation: Any = None, *, var: Any = None) -> Var:
    """A fresh immutable variable with this value."""
    b = need_builder("T.bind")
    e = convert(value)
    v = b.let("bound", e if type_annotation is None else cast(e, dtype_of(type_annotation, "T.bind")))
    b.unnamed[id(v)] = v
    return v


def decl_buffer(shape: Any, dtype: Any = "float32", data: Any = None, strides: Any = None, elem_offset: Any = None,
                scope: str = "global", align: int = 0, offset_factor: int = 0, **_: Any) -> Buffer:
    """A buffer over existing storage (the `data` of another buffer or a pointer)."""
    b = need_builder("T.decl_buffer")
    if isinstance(data, Buffer):
        data = data.data
    if not isinstance(data, Var):
        raise error("pointer", f"T.decl_buffer needs the storage of a buffer (`data=A.data`), found {describe(data)}",
                    hint="use T.alloc_buffer for new storage")
    spec = TensorSpec(shape_of(shape, "T.decl_buffer"), dtype, strides, scope, align=align, elem_offset=elem_offset)
    out = spec.buffer(b.fresh_name("view"), data, b.here())
    b.unnamed[id(out)] = out
    return out


def launch_thread(tag: str, extent: Any) -> Frame:
    """`with T.launch_thread("blockIdx.x", 4) as bx:` binds a launch index."""
    return thread_binding(extent, thread=tag)


def meta_var(value: Any) -> Any:
    """The value itself."""
    return value


def call_intrin(dtype: Any, op: str, *args: Any, annotations: Any = None, **attrs: Any) -> Any:
    """An intrinsic by name: a value, or with dtype "handle" or "void" a statement.  Raises extern-argument."""
    name = str(op).removeprefix("tl.").removeprefix("tirx.")
    row = INTRINSICS.get(name)
    if row is None:
        raise error("extern-argument", f"no intrinsic is named {op!r}", hint="call device functions by T.call_extern")
    if row.arity >= 0 and row.arity != len(args):
        raise error("extern-argument", f"intrinsic {name} takes {row.arity} arguments, found {len(args)}",
                    hint="see target/intrinsics.py and target/instructions.py")
    if str(dtype) in ("handle", "void"):
        return emit_call(name, args, "void", **attrs)
    if is_pure(name):
        return call(name, args, DType(dtype), **attrs)
    return value_call(name, args, DType(dtype), **attrs)


def tvm_warp_shuffle(mask: Any, value: Any, lane: Any, width: int, warp_size: int) -> Var:
    """The value of a lane of the warp."""
    return shfl_sync(value, lane, width)


def tvm_warp_shuffle_up(mask: Any, value: Any, delta: Any, width: int, warp_size: int) -> Var:
    """The value of the lane `delta` below."""
    return shfl_up(value, delta, width)


def tvm_warp_shuffle_down(mask: Any, value: Any, delta: Any, width: int, warp_size: int) -> Var:
    """The value of the lane `delta` above."""
    return shfl_down(value, delta, width)


def tvm_warp_activemask() -> Var:
    """Bit mask of the active lanes."""
    return activemask()


def tvm_thread_invariant(condition: Any) -> Expr:
    """A condition equal for all threads of the block: the condition."""
    return convert(condition)


def sync_global() -> Emitted:
    """Older spelling of T.sync_grid."""
    return sync_grid()


__all__ = ["Assert", "attr", "bind", "call_intrin", "decl_buffer", "launch_thread", "meta_var",
           "reads", "sblock", "sblock_attr", "sync_global", "tvm_thread_invariant", "tvm_warp_activemask",
           "tvm_warp_shuffle", "tvm_warp_shuffle_down", "tvm_warp_shuffle_up", "writes"]
