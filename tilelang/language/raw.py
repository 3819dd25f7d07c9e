"""Raw statements in the style of IR scripts.  Those that are not supported are in unavailable.py."""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang.ir import (AddressOf, Assert as AssertStmt, Bind, Buffer, Expr, Var, as_bool, binary, call, cast, convert,
                         dtype as DType, is_const, options_of, substitute)
from tilelang.target import Target, is_pure, INTRINSICS

from .allreduce import ReduceScope
from .tracing.builder import Emitted, need_builder
from .kernel import import_source, thread_binding
from .tracing.scope import BodyFrame, Frame
from .tracing.state import describe, error, example
from .tensor import TensorSpec, dtype_of, flat_only, over_storage, owner_of, shape_of, view
from .thread import activemask, emit_call, shfl_down, shfl_sync, shfl_up, sync_grid, value_call
from .tile import EMITTED

_IMPORT, _ASYNC = "pragma_import_c", "async_scope"


@example('T.Assert(n > 0, "n must be positive")')
def Assert(c: Any, msg: str, error_kind: str = "RuntimeError") -> Emitted:
    """Check a condition: outside a launch on the host, inside a launch on the device.

    Raises not-available for another kind of error than RuntimeError.
    """
    b = need_builder("T.Assert")
    if error_kind != "RuntimeError":
        raise error("not-available", f"T.Assert that raises {error_kind} is not available", expected='"RuntimeError"',
                    found=repr(error_kind), hint="leave error_kind out: a failed check raises RuntimeError")
    b.emit(AssertStmt(as_bool(c), str(msg), span=b.here()))
    return EMITTED


def _attributes(attrs: dict[str, Any]) -> None:
    for key, value in attrs.items():
        if str(key) != _IMPORT:
            raise error("not-available", f"the raw attribute ‹{key!r}› is not available", expected="pragma_import_c, "
                        "reduce_scope or async_scope", hint="known: pragma_import_c, reduce_scope, async_scope")
        import_source(value)


def attr(node: Any, key: str, value: Any) -> Frame:
    """`with T.attr(node, "pragma_import_c", source):` inserts source before the kernel.  With key "reduce_scope", node is the
    T.comm_reducer of the T.tvm_thread_allreduce calls inside.  Key "async_scope" says nothing more than its body: a wait finds
    the stores inside done, whether they are copies by cp.async or not.

    Example:
        with T.attr(None, "pragma_import_c", "__device__ float twice(float x) { return 2 * x; }"):
            Y[i] = T.call_extern("float32", "twice", X[i])
    """
    if str(key) == "reduce_scope":
        return ReduceScope(node)
    if str(key) != _ASYNC:
        _attributes({key: value})
    return BodyFrame()


@example('T.sblock_attr({"pragma_import_c": "__device__ float twice(float x) { return 2 * x; }"})')
def sblock_attr(attrs: dict[str, Any]) -> Emitted:
    """Set attributes of the enclosing kernel: pragma_import_c."""
    _attributes(attrs)
    return EMITTED


@example('with T.sblock("root"):', "    Y[i] = X[i]")
def sblock(name: str = "", no_realize: bool = False) -> Frame:
    """A named block of statements."""
    return BodyFrame()


@example('with T.sblock("root"):', "    T.reads(X[i])", "    Y[i] = X[i]")
def reads(*regions: Any) -> Emitted:
    """The regions a block reads.  Ignored: they follow from its statements."""
    return EMITTED


@example('with T.sblock("root"):', "    T.writes(Y[i])", "    Y[i] = X[i]")
def writes(*regions: Any) -> Emitted:
    """The regions a block writes.  Ignored: they follow from its statements."""
    return EMITTED


@example("x = T.bind(X[i])")
def bind(value: Any, type_annotation: Any = None, *, var: Any = None) -> Var:
    """Bind a value to a fresh immutable variable, or to `var` (made by T.var, or by a dtype called without arguments).

    Raises store-target where `var` is no scalar variable or already has a value.
    """
    b = need_builder("T.bind")
    e = convert(value)
    if var is not None:
        _scalar("T.bind", var)
        if any(isinstance(s, Bind) and s.var is var for f in b.frames for s in f.stmts):
            raise error("store-target", f"T.bind of `{var.name}`, which has a value", expected="a variable without a value",
                        found=f"`{var.name}` with one", hint="T.alloc_var makes a variable that can be stored to")
        b.emit(Bind(var, cast(e, var.dtype), span=b.here()))
        return var
    return b.nameless(b.let("bound", e if type_annotation is None else cast(e, dtype_of(type_annotation, "T.bind"))))


def _scalar(what: str, var: Any) -> None:
    if not isinstance(var, Var) or var.dtype.is_handle:
        raise error("store-target", f"{what} names «a scalar variable», found {describe(var)}",
                    hint='write v = T.var("v", "int32") before')


class _LetFrame(BodyFrame):
    """`with T.let(var, value):`."""

    def __init__(self, var: Var, value: Expr) -> None:
        super().__init__()
        self.var, self.value_of = var, value

    def open(self, builder: Any) -> Var:
        builder.emit(Bind(self.var, self.value_of, span=self.span))
        return self.var


@example("x = T.float32()", "with T.let(x, X[i] * 2):", "    Y[i] = x")
def let(var: Var, value: Any) -> Frame:
    """`with T.let(var, value):` gives a scalar variable (T.var, T.int32()) its value inside the block."""
    need_builder("T.let")
    _scalar("T.let", var)
    return _LetFrame(var, cast(convert(value), var.dtype))


@example('x = T.var("x", "float32")', "Y[i] = T.Let(x * x, where={x: X[i]})")
def Let(value: Any, where: dict[Var, Any] | None = None) -> Expr:
    """The expression `value` with the variables of `where` replaced by their values."""
    known = {v: cast(convert(e), v.dtype) for v, e in (where or {}).items()}
    return substitute(convert(value), known)


@example("x = T.undef()")
def undef() -> Expr:
    """An undefined value; it is zero here."""
    return convert(0)


@example('h100 = T.target({"kind": "cuda", "arch": "sm_90a"})')
def target(cfg: Any, host: Any = None) -> Target:
    """The target that a name or dict describes, as `tilelang.compile(…, target=…)` takes it."""
    return Target(cfg)


@example('T.call_extern("handle", "my_load", T.tvm_access_ptr(T.type_annotation("float32"), X.data, 64, 4, 1), tx)')
def type_annotation(dtype: Any) -> DType:
    """The element type argument of T.tvm_access_ptr."""
    return dtype_of(dtype, "T.type_annotation")


def buffer_at(data: Any) -> Buffer:
    """The buffer that owns a storage variable (`A.data`)."""
    found = owner_of(data)
    if found is None:
        raise error("pointer", f"T.tvm_access_ptr needs the storage of a buffer in scope (`A.data`), found {describe(data)}",
                    expected="the storage of a buffer in scope, A.data")
    return found


@example('T.call_extern("handle", "my_load", T.tvm_access_ptr(T.type_annotation("float32"), X.data, 64, 4, 1), tx)')
def tvm_access_ptr(ptype: Any, data: Any, offset: Any, extent: Any, rw_mask: Any = 1) -> AddressOf:
    """Pointer to element `offset` of a storage that is viewed as elements of type `ptype`, for extern calls and intrinsics.

    data: `A.data` of a buffer of any shape and scope.  extent: elements that are accessed.  rw_mask: 1 read, 2 write,
    3 both.
    """
    buffer = data if isinstance(data, Buffer) else buffer_at(data)
    dt = dtype_of(ptype, "T.tvm_access_ptr")
    bits: Any = prod(buffer.shape, start=buffer.dtype.bits * buffer.dtype.lanes)
    flat = view(buffer, (bits // (dt.bits * dt.lanes),), dt)
    b = need_builder("T.tvm_access_ptr")
    b.unnamed.pop(id(flat), None)
    return AddressOf(flat, (convert(offset),))


@example('T.call_extern("handle", "my_load", T.handle_add_byte_offset(X.data, 64), tx)')
def handle_add_byte_offset(h: Any, n: Any) -> Expr:
    """An address plus `n` bytes."""
    if not isinstance(h, Expr) or not (h.dtype.is_handle or h.dtype.is_int):
        raise error("pointer", f"T.handle_add_byte_offset needs «a pointer or an address», found {describe(h)}")
    return cast(binary("add", cast(h, "int64"), cast(convert(n), "int64")), "handle")


@example('flat = T.decl_buffer((4096,), "float16", data=A_s.data, scope="shared.dyn")')
def decl_buffer(shape: Any, dtype: Any = "float32", data: Any = None, strides: Any = None, elem_offset: Any = None,
                scope: str = "global", align: int = 0, offset_factor: int = 0, buffer_type: str = "",
                axis_separators: Any = None) -> Buffer:
    """A buffer over existing storage (the `data` of another buffer or a pointer).  Raises pointer, view-size."""
    flat_only("T.decl_buffer", buffer_type, axis_separators)
    spec = TensorSpec(shape_of(shape, "T.decl_buffer"), dtype, strides, scope, align=align)
    return over_storage("T.decl_buffer", spec, data, elem_offset)


def launch_thread(tag_or_itervar: str, extent: Any) -> Frame:
    """`with T.launch_thread("blockIdx.x", 4) as bx:` binds a launch index in its body.

    `bx = T.launch_thread("blockIdx.x", 4)` binds it up to the end of the enclosing block of statements.

    Example:
        with T.launch_thread("blockIdx.x", 16) as b:
            with T.launch_thread("threadIdx.x", 128) as t:
                Y[b * 128 + t] = X[b * 128 + t]
    """
    return thread_binding(extent, thread=tag_or_itervar)


@example("x = T.meta_var(X[i])")
def meta_var(v: Any) -> Any:
    """The value itself."""
    return v


@example('Y[i] = T.call_intrin("float32", "exp", X[i])')
def call_intrin(dtype: Any, op_or_name: str, *args: Any, annotations: Any = None, **options: Any) -> Any:
    """An intrinsic by name: a value, or with dtype "handle" or "void" a statement.  Raises extern-argument.

    options: its compile-time parameters (ir/call_options.py).
    """
    name = str(op_or_name).removeprefix("tl.").removeprefix("tirx.")
    row = INTRINSICS.get(name)
    if row is None:
        raise error("extern-argument", f"no intrinsic is named ‹{op_or_name!r}›", expected="the name of an intrinsic",
                    hint="call device functions by T.call_extern")
    if row.arity >= 0 and row.arity != len(args):
        raise error("extern-argument", f"intrinsic {name} takes «{row.arity} arguments», found {len(args)}",
                    hint="see target/intrinsics.py and target/instructions.py")
    try:
        options_of(name, options)
    except TypeError as e:
        raise error("extern-argument", f"options of intrinsic {name}: {e}", expected="options that it has",
                    found=", ".join(f"{k}={v!r}" for k, v in options.items()) or "none",
                    hint="see ir/call_options.py") from None
    if str(dtype) in ("handle", "void"):
        return emit_call(name, args, "void", **options)
    if is_pure(name):
        return call(name, args, DType(dtype), **options)
    return value_call(name, args, DType(dtype), **options)


def _warp_of(warp_size: Any) -> None:
    if not is_const(convert(warp_size), 32):
        raise error("lane-arguments", f"a warp has 32 lanes, found warp_size ‹{warp_size}›", expected="32", hint="pass 32")


@example("Y[i] = T.tvm_warp_shuffle(0xFFFFFFFF, X[i], 0, 32, 32)")
def tvm_warp_shuffle(mask: Any, v: Any, lane: Any, width: int, warp_size: int) -> Var:
    """The value of a lane of the warp.  Raises lane-arguments."""
    _warp_of(warp_size)
    return shfl_sync(v, lane, width, mask)


@example("Y[i] = T.tvm_warp_shuffle_up(0xFFFFFFFF, X[i], 1, 32, 32)")
def tvm_warp_shuffle_up(mask: Any, value: Any, delta: Any, width: int, warp_size: int) -> Var:
    """The value of the lane `delta` below."""
    _warp_of(warp_size)
    return shfl_up(value, delta, width, mask)


@example("Y[i] = T.tvm_warp_shuffle_down(0xFFFFFFFF, X[i], 1, 32, 32)")
def tvm_warp_shuffle_down(mask: Any, value: Any, delta: Any, width: int, warp_size: int) -> Var:
    """The value of the lane `delta` above."""
    _warp_of(warp_size)
    return shfl_down(value, delta, width, mask)


@example("mask = T.tvm_warp_activemask()")
def tvm_warp_activemask() -> Var:
    """Bit mask of the active lanes."""
    return activemask()


@example("if T.tvm_thread_invariant(I[0] > 0):", "    T.clear(acc)")
def tvm_thread_invariant(c: Any) -> Expr:
    """Mark a condition as uniform over the block; returns the condition."""
    return convert(c)


@example("T.sync_global()")
def sync_global() -> Emitted:
    """Older spelling of T.sync_grid."""
    return sync_grid()


__all__ = ["Assert", "Let", "attr", "bind", "call_intrin", "decl_buffer", "handle_add_byte_offset", "launch_thread", "let",
           "meta_var", "reads", "sblock", "sblock_attr", "sync_global", "target", "tvm_access_ptr", "tvm_thread_invariant",
           "tvm_warp_activemask", "tvm_warp_shuffle", "tvm_warp_shuffle_down", "tvm_warp_shuffle_up", "type_annotation",
           "undef", "writes"]
