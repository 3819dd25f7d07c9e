"""Allocation functions: shared, fragment, local and global buffers, variables; outputs by T.empty."""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang.ir import SCOPES, Buffer, Const, Expr, cast, convert, load, DYNAMIC, FRAGMENT, GLOBAL, LOCAL, VARIABLE
from tilelang.ir import dtype as DType
from tilelang.target.machine import MOST_BYTES

from .tracing.builder import Builder, check_constant, current_builder
from .tracing.state import error, example
from .tensor import dtype_of, shape_of

MOST_ON_CHIP = 1 << 24  # most elements of a buffer in registers or shared memory: far more than any device has


def _builder(what: str) -> Builder:
    b = current_builder()
    if b is None:
        raise error("alloc-no-builder", f"{what} stands outside a kernel function", found=f"{what} outside of one")
    return b


def _allocate(what: str, shape: Any, dt: DType, scope: str, prefix: str) -> Buffer:
    b = _builder(what)
    if not isinstance(scope, str) or scope not in SCOPES:
        raise error("alloc-scope", f"{what}: unknown memory scope ‹{scope!r}›", expected=f"one of {', '.join(SCOPES)}",
                    hint="known scopes: " + ", ".join(SCOPES))
    if b.kernel is None and scope != GLOBAL:
        raise error("alloc-outside-kernel", f"{what} allocates {scope} memory outside T.Kernel",
                    found=f"{scope} memory outside of it")
    dims = shape_of(shape, what)
    elements = prod(d for d in dims if isinstance(d, int))
    if scope != GLOBAL and elements > MOST_ON_CHIP:
        raise error("tensor-shape", f"{what}: a buffer of shape {dims} has ‹{elements}› elements: no block holds them",
                    expected=f"at most {MOST_ON_CHIP} elements", hint="use T.alloc_global, or smaller tiles")
    if scope == GLOBAL and elements * dt.bytes > MOST_BYTES:
        raise error("tensor-shape", f"{what}: a buffer of shape {dims} has ‹{elements}› elements: no device holds them",
                    expected=f"at most {MOST_BYTES} bytes")
    if scope == LOCAL and not dims:
        raise error("tensor-shape", f"{what}: a buffer needs «a dimension»", found="()",
                    hint="write (1,), or T.alloc_var for a scalar")
    if scope != GLOBAL and 0 in [d for d in dims if isinstance(d, int)]:
        raise error("tensor-shape", f"{what}: a buffer of shape ‹{dims}› has no elements", expected="extents of at least 1",
                    hint="leave the buffer out")
    buf = Buffer(b.fresh_name(prefix), dims, dt, scope, span=b.here())
    return b.allocate(buf)


def _shape_and_dtype(what: str, args: tuple[Any, ...], dtype: Any, scope: str | None) -> tuple[Any, Any, str | None]:
    """Parse (shape, dtype[, scope]) or separate dimensions: alloc_shared(128, 32) is a float32 buffer of shape (128, 32)."""
    items = list(args)
    if scope is None and items and isinstance(items[-1], str) and items[-1] in SCOPES:
        scope = items.pop()
    dims: list[Any] = []
    while items and (isinstance(items[0], (int, tuple, list)) or isinstance(items[0], Expr)):
        if dims and isinstance(items[0], (tuple, list)):
            break
        dims.append(items.pop(0))
    if len(items) > 1 or not dims or items and dtype is not None:
        raise error("alloc-arguments", f"{what} takes (shape, dtype, scope), found {args!r}")
    if items:
        dtype = items[0]
    shape = dims[0] if len(dims) == 1 else tuple(dims)
    return shape, "float32" if dtype is None else dtype, scope


@example('A_s = T.alloc_shared((128, 32), "float16")  # 8192 bytes')
def alloc_shared(*args: Any, dtype: Any = None, shape: Any = None, scope: str | None = None) -> Buffer:
    """Block-shared buffer.  (shape, dtype, scope="shared.dyn"); bool is kept in static shared memory.

    shape: elements.
    """
    shape, dtype, scope = _shape_and_dtype("T.alloc_shared", args if shape is None else (shape, *args), dtype, scope)
    dt = dtype_of(dtype, "T.alloc_shared")
    scope = "shared" if dt.is_bool else DYNAMIC if scope is None else scope
    return _allocate("T.alloc_shared", shape, dt, scope, "shared")


@example('acc = T.alloc_fragment((128, 128), "float32")')
def alloc_fragment(*args: Any, dtype: Any = None, shape: Any = None, scope: str | None = None) -> Buffer:
    """Tile in registers, distributed over the block's threads; its layout is inferred.  (shape, dtype).

    shape: elements, one tile of the whole block.
    """
    shape, dtype, scope = _shape_and_dtype("T.alloc_fragment", args if shape is None else (shape, *args), dtype, scope)
    dt = dtype_of(dtype, "T.alloc_fragment")
    return _allocate("T.alloc_fragment", shape, dt, FRAGMENT if scope is None else scope, "fragment")


@example('v = T.alloc_local((8,), "float32")', "v[0] = X[i]")
def alloc_local(*args: Any, dtype: Any = None, shape: Any = None, scope: str | None = None) -> Buffer:
    """Private array of each thread.  (shape, dtype).

    shape: elements of each thread.
    """
    shape, dtype, scope = _shape_and_dtype("T.alloc_local", args if shape is None else (shape, *args), dtype, scope)
    return _allocate("T.alloc_local", shape, dtype_of(dtype, "T.alloc_local"), "local" if scope is None else scope, "local")


@example('W = T.alloc_global((512, 512), "float32")  # visible to all blocks')
def alloc_global(shape: Any, dtype: Any, scope: str = "global") -> Buffer:
    """Workspace in global memory that all blocks see, allocated by the runtime for each call.

    shape: elements, ints or expressions of the parameters.  dtype: of an element.  Raises alloc-scope for an unknown scope.
    """
    return _allocate("T.alloc_global", shape, dtype_of(dtype, "T.alloc_global"), scope, "workspace")


@example('S = T.alloc_buffer((128, 32), "float16", scope="shared")')
def allocate(shape: Any, dtype: Any = "float32", scope: str = "global", annotations: Any = None) -> Buffer:
    """Buffer in any scope.

    shape: elements.  scope: "global", "shared", "shared.dyn", "local" or "local.fragment".
    """
    return _allocate("T.allocate", shape, dtype_of(dtype, "T.allocate"), scope, "buffer")


alloc_buffer = sblock_alloc_buffer = allocate
_NOTHING = object()


@example('best = T.alloc_var("float32", init=0.0)', "best = T.max(best, X[i])")
def alloc_var(dtype: Any, *args: Any, init: Any = _NOTHING, scope: str = VARIABLE) -> Any:
    """Mutable scalar of each thread, read and assigned by its name.  Starts at init (default 0).

    Forms: (dt), (dt, 1), (dt, "local.var"), (dt, 1, "local.var"), (dt, init=1).  Raises alloc-var.
    """
    b = _builder("T.alloc_var")
    rest = list(args)
    if rest and rest[-1] == VARIABLE and isinstance(rest[-1], str):
        scope = rest.pop()
        if not rest and init is not _NOTHING:
            raise error("alloc-var", "T.alloc_var got ‹a positional scope and the keyword init›",
                        hint="write T.alloc_var(dtype, init=…)")
    if len(rest) > 1 or rest and init is not _NOTHING:
        raise error("alloc-var", f"T.alloc_var takes (dtype, init, scope), found {len(args) + 1} positional arguments"
                           + (" and init" if init is not _NOTHING else ""),
                    found=f"{len(args) + 1} positional arguments{'' if init is _NOTHING else ' and init'}")
    if rest:
        init = rest[0]
    if scope != VARIABLE:
        raise error("alloc-var", f"T.alloc_var lives in «scope 'local.var'», found {scope!r}")
    if isinstance(init, str):
        raise error("alloc-var", f"T.alloc_var: the initial value is ‹the string {init!r}›",
                    expected="a number or an expression")
    dt = dtype_of(dtype, "T.alloc_var")
    buf = Buffer(b.fresh_name("var"), (1,), dt, VARIABLE, span=b.here())
    first = convert(0 if init is _NOTHING or init is None else init)
    check_constant(first, dt)
    b.allocate(buf, cast(first, dt))
    handle = load(buf, (Const(0, DType("int32")),))
    b.handles[id(handle)] = handle
    return handle


def empty(*shape: Any, dtype: Any = None) -> Buffer:
    """An output tensor, before T.Kernel; it must be returned.  empty(m, n, dtype=…) or empty((m, n), dtype).

    Raises empty-after-kernel, empty-shape.

    Example:
        M, N = T.const("M N")
        A: T.Tensor((M, N), "float16")
        out = T.empty((M, N), "float16")
    """
    b = _builder("T.empty")
    items = list(shape)
    if len(items) > 1 and dtype is None and (isinstance(items[-1], (str, DType)) or isinstance(items[0], (tuple, list))):
        dtype = items.pop()  # also behind a bare dimension: (n) is no tuple
    if len(items) == 1 and isinstance(items[0], (tuple, list)):
        items = list(items[0])
    if not items or any(isinstance(d, (str, float, Buffer, type(None), tuple, list)) for d in items):
        raise error("empty-shape", f"T.empty takes dimensions and a dtype, found {shape!r}")
    if b.kernels:
        raise error("empty-after-kernel", "T.empty must come before the first T.Kernel")
    out = Buffer(b.fresh_name(f"out{len(b.outputs)}"), shape_of(items, "T.empty"),
                 dtype_of("float32" if dtype is None else dtype, "T.empty"), GLOBAL, span=b.here())
    b.outputs.append(out)
    return b.nameless(out)


__all__ = ["alloc_buffer", "alloc_fragment", "alloc_global", "alloc_local", "alloc_shared", "alloc_var", "allocate", "empty",
           "sblock_alloc_buffer"]
