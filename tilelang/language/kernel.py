"""Kernel launches: T.Kernel, block and thread indices, block order (T.use_swizzle), per-launch annotations."""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.ir import (I32, Alloc, Bind, Const, Expr, For, Launch, Stmt, Var, convert, logical)

from .builder import Builder
from .loops import IfThreadFrame, loop_bound
from .scope import Frame
from .state import current, need_builder

for _kind, _base, _about in (
    ("kernel-grid", ValueError, "a bad grid of T.Kernel"),
    ("kernel-threads", ValueError, "a bad thread extent of T.Kernel"),
    ("nested-kernel", ValueError, "T.Kernel inside T.Kernel"),
    ("no-kernel", AssertionError, "a launch index asked for outside T.Kernel"),
    ("launch-dim", ValueError, "a launch dimension that does not exist"),
    ("swizzle-order", ValueError, "T.use_swizzle with a bad order or panel size"),
    ("swizzle-place", ValueError, "T.use_swizzle after statements that do work"),
    ("min-blocks", AssertionError, "annotate_min_blocks_per_sm without a positive integer"),
):  # fmt: skip
    errors.register(_kind, _base, _about)

MAX_THREADS = 1024  # threads of a block (CUDA C++ Programming Guide, "Compute capabilities")


def _error(kind: str, message: str, hint: str = "") -> errors.TileLangError:
    b = current()
    return errors.error(kind, message, span=b.here() if b else None, hint=hint)


def thread_extents(threads: Any) -> tuple[int, int, int]:
    """(x, y, z) of a `threads` argument.  Raises kernel-threads."""
    items = (128,) if threads is None else tuple(threads) if isinstance(threads, (list, tuple)) else (threads,)
    if not 1 <= len(items) <= 3:
        raise _error("kernel-threads", f"threads has 1 to 3 extents, got {len(items)}")
    out = []
    for t in items:
        if isinstance(t, Const) and t.dtype.is_int:
            t = t.value
        if isinstance(t, bool) or not isinstance(t, int):
            raise _error("kernel-threads", f"threads must be integers known while compiling, got {t!r}")
        if t <= 0:
            raise _error("kernel-threads", f"threads must be positive, got {t}")
        out.append(t)
    x, y, z = (*out, 1, 1)[:3]
    if x * y * z > MAX_THREADS:
        raise _error("kernel-threads", f"a block has at most {MAX_THREADS} threads, got {x * y * z}")
    return x, y, z


class KernelLaunchFrame(Frame):
    """The body of a launch.  blocks: grid extents; threads: (x, y, z)."""

    def __init__(self, blocks: tuple[Any, ...], threads: Any, prelude: str | None) -> None:
        super().__init__()
        if not 1 <= len(blocks) <= 3:
            raise _error("kernel-grid", f"a grid has 1 to 3 extents, got {len(blocks)}")
        self.blocks = [loop_bound(e, "a grid extent") for e in blocks]
        for e in self.blocks:
            if isinstance(e, Const) and e.value < 0:
                raise _error("kernel-grid", f"a grid extent must not be negative, got {e.value}")
        self.threads = thread_extents(threads)
        self.attrs: dict[str, Any] = {}
        self.layouts: list[tuple[Any, Any]] = []
        self.safe_values: list[tuple[Any, Any]] = []
        self.sources: list[str] = [prelude] if prelude else []
        self.swizzle: tuple[int, str] | None = None

    @property
    def num_threads(self) -> int:
        x, y, z = self.threads
        return x * y * z

    @staticmethod
    def Current() -> KernelLaunchFrame | None:  # noqa: N802 - public spelling
        b = current()
        return b.kernel if b else None

    def open(self, b: Builder) -> Any:
        if b.kernel is not None:
            raise _error("nested-kernel", "T.Kernel inside T.Kernel", hint="close the first kernel's block before the second")
        b.before_kernel()
        b.kernel = self
        b.kernels += 1
        self.block_vars = tuple(b.new_var(n, I32) for n in ("bx", "by", "bz")[:len(self.blocks)])
        self.thread_vars = tuple(Var(n, I32, span=self.span) for n in ("tx", "ty", "tz"))
        return self.block_vars[0] if len(self.block_vars) == 1 else list(self.block_vars)

    def close(self, b: Builder) -> Stmt:
        b.kernel = None
        for v in self.block_vars:
            b.unnamed.pop(id(v), None)
        attrs = dict(self.attrs)
        if self.layouts:
            attrs["layouts"] = tuple(self.layouts)
        if self.safe_values:
            attrs["safe_values"] = tuple(self.safe_values)
        if self.sources:
            attrs["import_source"] = tuple(self.sources)
        block_vars, body = self.block_vars, self.body()
        if self.swizzle is not None and len(block_vars) > 1:
            attrs["swizzle"] = self.swizzle  # the code generator permutes: here bx and by keep their exact bounds
        return Launch(tuple(self.blocks), block_vars, self.threads, self.thread_vars, body,  # type: ignore[arg-type]
                      tuple(sorted(attrs.items())), span=self.span)


def Kernel(*blocks: Any, threads: Any = None, prelude: str | None = None) -> KernelLaunchFrame:  # noqa: N802
    """`with T.Kernel(gx, gy, gz, threads=128) as (bx, by, bz):` launches a grid of blocks.

    blocks: 1 to 3 extents, integers or expressions.  threads: integer or up to three.  prelude: device source text.
    Raises kernel-grid, kernel-threads, nested-kernel; JITNoBuilderError outside a kernel function.
    """
    need_builder("T.Kernel")
    return KernelLaunchFrame(blocks, threads, prelude)


def _kernel(what: str) -> KernelLaunchFrame:
    b = current()
    if b is None or b.kernel is None:
        raise _error("no-kernel", f"KernelLaunchFrame is not initialized: {what} is valid inside T.Kernel only")
    return b.kernel


def _dim(items: Any, dim: int, what: str) -> Any:
    if not isinstance(dim, int) or not 0 <= dim < len(items):
        raise _error("launch-dim", f"{what}: dimension {dim!r} does not exist, the launch has {len(items)}")
    return items[dim]


def get_thread_binding(dim: int = 0) -> Var:
    """Thread index along x (0), y (1) or z (2), int32."""
    return _dim(_kernel("T.get_thread_binding").thread_vars, dim, "T.get_thread_binding")


def get_thread_bindings() -> list[Var]:
    """The three thread indices."""
    return list(_kernel("T.get_thread_bindings").thread_vars)


def get_block_binding(dim: int = 0) -> Var:
    """Block index along a grid dimension, int32."""
    return _dim(_kernel("T.get_block_binding").block_vars, dim, "T.get_block_binding")


def get_block_bindings() -> list[Var]:
    """All block indices of the launch."""
    return list(_kernel("T.get_block_bindings").block_vars)


def get_thread_extent(dim: int = 0) -> int:
    """Threads of a block along a dimension."""
    return _dim(_kernel("T.get_thread_extent").threads, dim, "T.get_thread_extent")


def get_thread_extents() -> list[int]:
    """(x, y, z) threads of a block."""
    return list(_kernel("T.get_thread_extents").threads)


def _static_extent(e: Expr) -> int:
    if not isinstance(e, Const):
        raise _error("launch-dim", f"the grid extent {e!r} is known only when the kernel is launched")
    return int(e.value)


def get_block_extent(dim: int = 0) -> int:
    """Static grid extent along a dimension."""
    return _static_extent(_dim(_kernel("T.get_block_extent").blocks, dim, "T.get_block_extent"))


def get_block_extents() -> list[int]:
    """Static grid extents."""
    return [_static_extent(e) for e in _kernel("T.get_block_extents").blocks]


def thread_index() -> Expr:
    """Linear thread index in the block: tx + ty*X + tz*X*Y over the dimensions that have more than one thread."""
    k = _kernel("the thread index")
    x, y, z = k.threads
    tx, ty, tz = k.thread_vars
    out: Any = tx
    if y > 1:
        out = out + ty * x
    if z > 1:
        out = out + tz * (x * y)
    return out


def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
    """Permute (bx, by) for L2 locality: panels of `panel_size` block rows (row, mlx) or columns (column).

    Never changes results.  Raises swizzle-order, swizzle-place.
    """
    k = _kernel("T.use_swizzle")
    if order not in ("row", "column", "mlx"):
        raise _error("swizzle-order", f"Unsupported swizzle order: {order!r}, expected 'row', 'column' or 'mlx'")
    if not isinstance(panel_size, int) or panel_size <= 0:
        raise _error("swizzle-order", f"the panel size of T.use_swizzle must be a positive integer, got {panel_size!r}")
    if not enable:
        return
    b = need_builder("T.use_swizzle")
    if b.frames[-1] is not k or not all(isinstance(s, (Alloc, Bind)) for s in k.stmts):
        raise _error("swizzle-place", "T.use_swizzle must come before the first statement of the kernel that does work",
                     hint="move it to the top of the kernel body")
    k.swizzle = (panel_size, order)


def annotate_min_blocks_per_sm(n: int) -> None:
    """Blocks that should be resident on one multiprocessor (second launch bound)."""
    if isinstance(n, bool) or not isinstance(n, int) or n <= 0:
        raise _error("min-blocks", f"annotate_min_blocks_per_sm needs a positive integer, got {n!r}")
    _kernel("T.annotate_min_blocks_per_sm").attrs["min_blocks_per_sm"] = n


def import_source(source: str | None = None) -> None:
    """Put C/CUDA source ahead of the kernel."""
    if source is not None:
        _kernel("T.import_source").sources.append(source)


def ws(*groups: int) -> IfThreadFrame:
    """`with T.ws(0, 1):` runs the body on the threads of these 128-thread warp groups."""
    if not groups:
        raise _error("warp-groups", "T.ws needs at least one warp group")
    t = thread_index()
    ranges: list[list[int]] = []
    for g in sorted(set(groups)):
        if ranges and ranges[-1][1] == g:
            ranges[-1][1] = g + 1
        else:
            ranges.append([g, g + 1])
    cond: Any = None
    for lo, hi in ranges:
        test = logical("and", t >= lo * 128, t < hi * 128) if lo else t < hi * 128
        cond = test if cond is None else logical("or", cond, test)
    return IfThreadFrame(cond)


class ThreadBindingFrame(Frame):
    """`for tx in T.thread_binding(128, thread="threadIdx.x")` of hand-written loops."""

    once = True
    loop = True

    def __init__(self, start: Any, stop: Any, tag: str) -> None:
        super().__init__()
        self.start, self.extent = (0, start) if stop is None else (start, stop - start)
        self.tag = tag

    def open(self, b: Builder) -> Var:
        self.var = b.new_var(self.tag.replace("Idx.", "_"), I32)
        return self.var

    def close(self, b: Builder) -> Stmt:
        b.unnamed.pop(id(self.var), None)
        return For(self.var, convert(self.start), convert(self.extent), self.tag, self.body(), (), span=self.span)


def thread_binding(start: Any, stop: Any = None, thread: str = "threadIdx.x") -> ThreadBindingFrame:
    """A loop bound to a launch index.  thread: blockIdx.x/y/z or threadIdx.x/y/z."""
    if thread not in {f"{a}Idx.{d}" for a in ("block", "thread") for d in "xyz"}:
        raise _error("thread-tag", f"unknown thread tag {thread!r}, expected blockIdx.x/y/z or threadIdx.x/y/z")
    return ThreadBindingFrame(start, stop, thread)


WarpSpecialize = ws
WarpSpecializeFrame = IfThreadFrame
__all__ = ["Kernel", "KernelLaunchFrame", "WarpSpecialize", "WarpSpecializeFrame", "annotate_min_blocks_per_sm",
           "get_block_binding", "get_block_bindings", "get_block_extent", "get_block_extents", "get_thread_binding",
           "get_thread_bindings", "get_thread_extent", "get_thread_extents", "import_source", "thread_binding",
           "thread_index", "use_swizzle", "ws"]
