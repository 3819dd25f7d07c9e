"""Kernel launches: T.Kernel, block and thread indices, rasterisation (T.use_swizzle), options of a launch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np

from tilelang.ir import (I32, AddressOf, Call, Const, Evaluate, Expr, Launch, LaunchPlan, Stmt, StringConst, Var, as_dim,
                         binary, call, convert, dtype as DType, is_const, logical, replace, walk, with_options)
from tilelang.target.cluster import check_cluster
from tilelang.target.machine import MAX_GRID
from tilelang.target.thread_calls import COUNTS_THREADS, linear_thread

from .loops import IfThreadFrame, check_keys, loop_bound
from .math import ceildiv
from .tracing.builder import Builder, current_builder, need_builder, reads_memory
from .tracing.flags import flag
from .tracing.scope import BodyFrame, Frame
from .tracing.state import describe, error, example

MOST_RESIDENT = 32  # most resident blocks of an SM (CUDA C++ Programming Guide, "Compute capabilities")
MAX_THREADS = 1024  # most threads of a block (CUDA C++ Programming Guide, "Compute capabilities")


def thread_extents(threads: Any) -> tuple[int, int, int]:
    """(x, y, z) of a `threads` argument.  Raises kernel-threads."""
    items = (128,) if threads is None else tuple(threads) if isinstance(threads, (list, tuple)) else (threads,)
    if not 1 <= len(items) <= 3:
        raise error("kernel-threads", f"threads has «1 to 3 extents», got {len(items)}")
    out = []
    for t in items:
        if isinstance(t, np.integer) or isinstance(t, Const) and t.dtype.is_int:
            t = int(t)
        if isinstance(t, bool) or not isinstance(t, int):
            raise error("kernel-threads", f"threads must be «integers known while compiling», got {t!r}")
        if t <= 0:
            raise error("kernel-threads", f"threads must be positive, got {t}", expected="positive extents")
        out.append(t)
    x, y, z = (*out, 1, 1)[:3]
    if x * y * z > MAX_THREADS:
        raise error("kernel-threads", f"a block has «at most {MAX_THREADS} threads», got {x * y * z}")
    return x, y, z


def source_text(source: Any, what: str) -> str:
    """Device source code as text.  Raises import-source for anything but a string."""
    if not isinstance(source, str):
        raise error("import-source", f"{what} takes device source, found {describe(source)}")
    return source


class KernelLaunchFrame(Frame):
    """The body of a launch.  blocks: grid extents.  extents: (x, y, z) of a block's threads.  any_threads: they were not given,
    and the body has not asked for them or for thread indices."""

    def __init__(self, blocks: tuple[Any, ...], threads: Any, prelude: str | None) -> None:
        super().__init__()
        blocks = blocks or (1,)
        if len(blocks) > 3:
            raise error("kernel-grid", f"a grid has «at most 3 extents», got {len(blocks)}")
        self.blocks = [loop_bound(e, "a grid extent") for e in blocks]
        for d, e in enumerate(self.blocks):
            if reads_memory(e):
                raise error("kernel-grid", f"the grid extent ‹{e!r}› reads memory: it must be known before the launch",
                            expected="an extent that is known before the launch", hint="pass it as a scalar parameter")
            if isinstance(e, Const) and e.value < 0:
                raise error("kernel-grid", f"a grid extent must not be negative, got {e.value}",
                            expected="an extent of at least 0")
            if isinstance(e, Const) and e.value > MAX_GRID[d]:
                raise error("kernel-grid", f"a grid has «at most {MAX_GRID[d]} blocks along {'xyz'[d]}», got {e.value}",
                            hint="put the longest dimension first: along x a grid has up to 2147483647 blocks")
        self.extents = thread_extents(threads)
        self.any_threads = threads is None
        self.plan = LaunchPlan()
        self.layouts: list[tuple[Any, Any]] = []
        self.safe_values: list[tuple[Any, Any]] = []
        self.sources: list[str] = [source_text(prelude, "prelude of T.Kernel")] if prelude else []
        self.swizzle: tuple[int, str] | None = None
        names = ", ".join(("bx", "by", "bz")[:len(blocks)])
        self.opened_by = f"with T.Kernel(...) as {f'({names})' if len(blocks) > 1 else names}:"

    def set(self, **options: Any) -> None:
        """Set options of the launch."""
        self.plan = self.plan.having(**options)

    @property
    def threads(self) -> tuple[int, int, int]:
        """The extents.  A body that asks is written for this number of threads."""
        self.any_threads = False
        return self.extents

    @property
    def thread_vars(self) -> tuple[Var, Var, Var]:
        """The thread indices.  A body that asks is written for all of the block's threads."""
        self.any_threads = False
        return self.indices

    @property
    def num_threads(self) -> int:
        x, y, z = self.threads
        return x * y * z

    @staticmethod
    def Current() -> KernelLaunchFrame | None:
        b = current_builder()
        return b.kernel if b else None

    def open(self, b: Builder) -> Any:
        if b.kernel is not None:
            raise error("nested-kernel", "T.Kernel inside T.Kernel")
        b.before_kernel()
        b.kernel = self
        b.kernels += 1
        self.vars = self.block_vars = tuple(b.new_var(n, I32) for n in ("bx", "by", "bz")[:len(self.blocks)])
        self.indices: tuple[Any, ...] = tuple(Var(n, I32, span=self.span) for n in ("tx", "ty", "tz"))
        return self.block_vars[0] if len(self.block_vars) == 1 else BlockIndices(self.block_vars)

    def close(self, b: Builder) -> Stmt:
        b.kernel = None
        self.set(layouts=tuple(self.layouts), safe_values=tuple(self.safe_values), import_source=tuple(self.sources))
        if self.swizzle is not None and len(self.block_vars) > 1:
            self.set(swizzle=self.swizzle)  # the code generator permutes the blocks; bx and by keep their exact bounds
        body = self.body()
        if self.any_threads and not any(x.op in COUNTS_THREADS for x in walk(body, Call)):
            self.set(any_threads=True)
        return Launch(tuple(self.blocks), self.block_vars, self.extents, self.indices,  # type: ignore[arg-type]
                      body, self.plan, span=self.span)


def Kernel(*blocks: Any, threads: Any = None, prelude: str | None = None) -> KernelLaunchFrame:
    """`with T.Kernel(gx, gy, gz, threads=128) as (bx, by, bz):` launches a grid of blocks.

    blocks: up to 3 extents, integers or expressions; none: one block.  threads: integer or up to three; None: 128, but one on
    the CPU if the body has no thread indices, numbers of threads, lanes, votes, warp groups or barriers by itself.
    prelude: device source text.
    Raises kernel-grid, kernel-threads, nested-kernel; JITNoBuilderError outside a kernel function.

    Example:
        with T.Kernel(T.ceildiv(n, 128), 4, threads=128) as (bx, by):
            A_s = T.alloc_shared((128, 32), "float16")
    """
    b = need_builder("T.Kernel")
    b.unopened = frame = KernelLaunchFrame(blocks, threads, prelude)
    frame.span = b.here()
    return frame


def ClusterKernel(*blocks: Any, cluster_dims: Any, threads: Any = None, prelude: str | None = None) -> KernelLaunchFrame:
    """A launch whose blocks run in clusters (sm_90): they access each other's shared memory and use multicast TMA loads.

    cluster_dims: integer or up to three, which divide the grid; at most 16 blocks (8 are possible on every device).
    (1, 1, 1) means no cluster.  Other arguments and errors as for T.Kernel.  Raises cluster-dims.

    Example:
        with T.ClusterKernel(4, 4, cluster_dims=(2, 1, 1), threads=128) as (bx, by):
            rank = T.block_rank_in_cluster()
    """
    frame = Kernel(*blocks, threads=threads, prelude=prelude)
    items = tuple(cluster_dims) if isinstance(cluster_dims, (list, tuple)) else (cluster_dims,)
    dims = check_cluster(tuple(int(n) if isinstance(n, np.integer) else n for n in items), tuple(frame.blocks), frame.span)
    if dims != (1, 1, 1):
        frame.set(cluster=dims)
    return frame


def launch_kernel(blocks: Any, *, threads: Any = None, prelude: str | None = None, cluster_dims: Any = None,
                  **annotations: Any) -> KernelLaunchFrame:
    """T.Kernel, or T.ClusterKernel where cluster_dims is given, of a list of extents or one.

    annotations: none has an effect here, which the warning annotation-no-effect says.  Raises as these do.

    Example:
        with T.launch_kernel([T.ceildiv(n, 128), 4], threads=128) as (bx, by):
            A_s = T.alloc_shared((128, 32), "float16")
    """
    grid = blocks if isinstance(blocks, (list, tuple)) else (blocks,)
    check_keys(annotations, ())
    return Kernel(*grid, threads=threads, prelude=prelude) if cluster_dims is None else ClusterKernel(
        *grid, cluster_dims=cluster_dims, threads=threads, prelude=prelude)


def need_kernel(what: str) -> KernelLaunchFrame:
    """The open launch.  Raises no-kernel."""
    b = current_builder()
    if b is None or b.kernel is None:
        raise error("no-kernel", f"{what} stands outside T.Kernel (KernelLaunchFrame is not initialized)",
                    found=f"{what} outside of it")
    return b.kernel


def _dim(items: Any, dim: int, what: str) -> Any:
    if not isinstance(dim, int) or not 0 <= dim < len(items):
        raise error("launch-dim", f"{what}: dimension ‹{dim!r}› does not exist, the launch has {len(items)}",
                    expected=f"a dimension from 0 to {len(items) - 1}")
    return items[dim]


@example("tx = T.get_thread_binding(0)")
def get_thread_binding(dim: int = 0) -> Var:
    """The thread index along x (dim 0), y (1) or z (2), int32.  Raises no-kernel outside of T.Kernel, and launch-dim."""
    return _dim(need_kernel("T.get_thread_binding").thread_vars, dim, "T.get_thread_binding")


@example("tx, ty, tz = T.get_thread_bindings()")
def get_thread_bindings() -> list[Var]:
    """The three thread indices, int32.  Raises no-kernel outside of T.Kernel."""
    return list(need_kernel("T.get_thread_bindings").thread_vars)


@example("bx = T.get_block_binding(0)")
def get_block_binding(dim: int = 0) -> Var:
    """The block index along grid dimension `dim`, int32.  Raises no-kernel outside of T.Kernel, and launch-dim."""
    return _dim(need_kernel("T.get_block_binding").block_vars, dim, "T.get_block_binding")


@example("bx, by = T.get_block_bindings()")
def get_block_bindings() -> list[Var]:
    """All block indices of the launch, int32.  Raises no-kernel outside of T.Kernel."""
    return list(need_kernel("T.get_block_bindings").block_vars)


@example("threads = T.get_thread_extent(0)")
def get_thread_extent(dim: int = 0) -> int:
    """Threads of a block along dimension `dim` (0 to 2).  Raises no-kernel outside of T.Kernel, and launch-dim."""
    return _dim(need_kernel("T.get_thread_extent").threads, dim, "T.get_thread_extent")


@example("x, y, z = T.get_thread_extents()")
def get_thread_extents() -> list[int]:
    """The numbers of threads of a block along x, y and z.  Raises no-kernel outside of T.Kernel."""
    return list(need_kernel("T.get_thread_extents").threads)


def _static_extent(e: Expr) -> int:
    if not isinstance(e, Const):
        raise error("launch-dim", f"the grid extent ‹{e!r}› is known only when the kernel is launched",
                    expected="an extent known while compiling")
    return int(e.value)


@example("blocks = T.get_block_extent(0)")
def get_block_extent(dim: int = 0) -> int:
    """The number of blocks of the grid along dimension `dim`.

    Raises no-kernel outside of T.Kernel, and launch-dim if the grid has no such dimension or its extent is known only when the
    kernel is launched.
    """
    return _static_extent(_dim(need_kernel("T.get_block_extent").blocks, dim, "T.get_block_extent"))


@example("gx, gy = T.get_block_extents()")
def get_block_extents() -> list[int]:
    """The numbers of blocks of the grid along its dimensions.  Raises no-kernel, and launch-dim as T.get_block_extent does."""
    return [_static_extent(e) for e in need_kernel("T.get_block_extents").blocks]


@example("x, y, z = T.get_cluster_dims()")
def get_cluster_dims() -> list[int]:
    """The blocks of a cluster of the launch along x, y and z; [1, 1, 1] without clusters.  Raises no-kernel."""
    return list(need_kernel("T.get_cluster_dims").plan.cluster or (1, 1, 1))


@example("peer = (T.block_rank_in_cluster() + 1) % T.get_cluster_size()")
def get_cluster_size() -> int:
    """The number of blocks of a cluster of the launch; 1 without clusters.  Raises no-kernel."""
    return prod(get_cluster_dims())


@example("cx, cy = T.get_cluster_ids()")
def get_cluster_ids() -> list[Any]:
    """Of each dimension of the grid, the index of this block's cluster: block // blocks of a cluster, int32.  Raises no-kernel.
    """
    return [b // n if n > 1 else b for b, n in zip(get_block_bindings(), get_cluster_dims())]


@example("cx = T.get_cluster_id(0)")
def get_cluster_id(dim: int = 0) -> Any:
    """The index of this block's cluster along grid dimension `dim`, int32.  Raises no-kernel, launch-dim."""
    return _dim(get_cluster_ids(), dim, "T.get_cluster_id")


@example("gx, gy = T.get_cluster_extents()")
def get_cluster_extents() -> list[Any]:
    """The number of clusters along each dimension of the grid, an int where it is known while compiling.  Raises no-kernel."""
    return [ceildiv(as_dim(e), n) for e, n in zip(need_kernel("T.get_cluster_extents").blocks, get_cluster_dims())]


@example("clusters = T.get_cluster_extent(0)")
def get_cluster_extent(dim: int = 0) -> Any:
    """The number of clusters along grid dimension `dim`.  Raises no-kernel, launch-dim."""
    return _dim(get_cluster_extents(), dim, "T.get_cluster_extent")


def _of_this_launch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the open launch as a method of its frame."""
    def method(self: KernelLaunchFrame, *args: Any, **kw: Any) -> Any:
        if need_kernel(f"{fn.__name__} of a launch") is not self:
            raise error("no-kernel", f"{fn.__name__} of another launch than the open one", found="a closed launch")
        return fn(*args, **kw)

    return method


for _fn in (get_cluster_dims, get_cluster_size, get_cluster_ids, get_cluster_id, get_cluster_extents, get_cluster_extent):
    setattr(KernelLaunchFrame, _fn.__name__, _of_this_launch(_fn))


def thread_index() -> Expr:
    """Linear thread index in the block: tx + ty*X + tz*X*Y over the dimensions that have more than one thread."""
    index: Expr = linear_thread(need_kernel("the thread index"))
    return index


@example("T.use_swizzle(panel_size=10)")
def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
    """Permute (bx, by) for reuse in L2, in rasterisation panels of `panel_size` block rows (row, mlx) or columns (column).

    It may stand anywhere in the kernel, and holds for the whole of it.  Never changes results.  Raises swizzle-order.
    """
    k = need_kernel("T.use_swizzle")
    if order not in ("row", "column", "mlx"):
        raise error("swizzle-order", f"Unsupported swizzle order: ‹{order!r}›, expected «'row', 'column' or 'mlx'»")
    if isinstance(panel_size, bool) or not isinstance(panel_size, int) or panel_size <= 0:
        raise error("swizzle-order", "the rasterisation panel size of T.use_swizzle must be «a positive integer», got "
                    f"{panel_size!r}")
    if not flag(enable, "enable"):
        return
    k.swizzle = (panel_size, order)


@example("T.annotate_min_blocks_per_sm(2)")
def annotate_min_blocks_per_sm(n: int) -> None:
    """Set how many blocks should be resident on one SM (second argument of __launch_bounds__)."""
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MOST_RESIDENT:
        raise error("min-blocks", f"annotate_min_blocks_per_sm needs a positive integer up to {MOST_RESIDENT}, got {n!r}",
                    expected=f"an integer from 1 to {MOST_RESIDENT}")
    need_kernel("T.annotate_min_blocks_per_sm").set(min_blocks_per_sm=n)


def import_source(source: str | None = None) -> None:
    """Insert C/CUDA source (a string; None: nothing) before the kernel.  Raises import-source, no-kernel.

    Example:
        T.import_source("__device__ float twice(float x) { return 2 * x; }")
        Y[i] = T.call_extern("float32", "twice", X[i])
    """
    if source is not None:
        need_kernel("T.import_source").sources.append(source_text(source, "T.import_source"))


@example("with T.ws(0):", "    T.copy(A[by * 128, 0], A_s)")
def ws(*groups: int) -> IfThreadFrame:
    """`with T.ws(0, 1):` runs the body on the threads of these 128-thread warp groups.

    On sm_90 the body may hold tile operations.  Then the warp groups must be consecutive, only their threads run these
    operations, and block barriers inside synchronise only these threads.  Raises warp-groups.
    """
    if not groups:
        raise error("warp-groups", "T.ws needs «at least one warp group»", found="none")
    k = need_kernel("T.ws")
    if any(isinstance(g, bool) or not isinstance(g, int) or g < 0 for g in groups):
        raise error("warp-groups", f"T.ws takes numbers of warp groups, found {groups!r}")
    if max(groups) * 128 >= k.num_threads:
        raise error("warp-groups", f"T.ws({max(groups)}): a block of {k.num_threads} threads has no warp group ‹{max(groups)}› "
                    "(128 threads each)", expected=f"warp groups below {-(-k.num_threads // 128)}", hint="launch more threads")
    ranges: list[list[int]] = []
    for g in sorted(set(groups)):
        if ranges and ranges[-1][1] == g:
            ranges[-1][1] = g + 1
        else:
            ranges.append([g, g + 1])
    cond: Any = None
    for lo, hi in ranges:
        test = call("in_warp_groups", (), "bool", first=lo, count=hi - lo)
        cond = test if cond is None else logical("or", cond, test)
    return IfThreadFrame(cond)


class BindingLaunchFrame(KernelLaunchFrame):
    """A launch written as nested thread_binding loops: the outermost loop opens it, inner loops add their extents."""

    loop = opens_by_name = True

    def __init__(self, extent: Any, tag: str) -> None:
        super().__init__((1, 1, 1), 1, None)
        self.first = (extent, tag)
        self.bound: set[str] = set()

    def open(self, b: Builder) -> Var:
        super().open(b)
        return self.bind(b, *self.first)

    def bind(self, b: Builder, extent: Any, tag: str) -> Var:
        """Set the extent of a launch index and return its variable."""
        kind, dim = tag.split("Idx.")
        axis = "xyz".index(dim)
        self.bound.add(tag)
        if kind == "block":
            self.blocks[axis] = loop_bound(extent, "a grid extent")
        else:
            threads = list(self.threads)
            threads[axis] = extent
            self.extents = thread_extents(threads)
        return b.nameless((self.block_vars if kind == "block" else self.thread_vars)[axis])


class ThreadBindingFrame(BodyFrame):
    """A thread_binding loop inside a launch: gives a launch index a name.  In T.Kernel, the extents must agree."""

    loop = opens_by_name = True

    def __init__(self, launch: KernelLaunchFrame, extent: Any, tag: str) -> None:
        super().__init__()
        self.launch, self.extent, self.tag = launch, extent, tag

    def open(self, b: Builder) -> Var:
        launch, (kind, dim) = self.launch, self.tag.split("Idx.")
        axis = "xyz".index(dim)
        if isinstance(launch, BindingLaunchFrame) and self.tag not in launch.bound:
            return launch.bind(b, self.extent, self.tag)
        have: Any = None
        if kind == "thread" or axis < len(launch.blocks):
            have = launch.threads[axis] if kind == "thread" else launch.blocks[axis]
        if have is None or not is_const(binary("eq", convert(have), convert(self.extent)), True):
            raise error("launch-dim", f"{self.tag} runs over {have if have is not None else 'nothing'} in this launch, not "
                        f"over ‹{self.extent}›", expected=f"an extent of {have if have is not None else 'none'}")
        return launch.thread_vars[axis] if kind == "thread" else launch.block_vars[axis]


def thread_binding(start: Any, stop: Any = None, thread: str = "threadIdx.x") -> Frame:
    """A loop bound to a launch index.  thread: blockIdx.x/y/z or threadIdx.x/y/z.

    Outside T.Kernel, nested thread_binding loops make up a launch themselves.  `tx = T.thread_binding(...)` binds the index up
    to the end of the enclosing block of statements.

    Example:
        for b in T.thread_binding(16, thread="blockIdx.x"):
            for t in T.thread_binding(128, thread="threadIdx.x"):
                Y[b * 128 + t] = X[b * 128 + t]
    """
    if thread not in {f"{a}Idx.{d}" for a in ("block", "thread") for d in "xyz"}:
        raise error("thread-tag", f"unknown thread tag ‹{thread!r}›, expected blockIdx.x/y/z or threadIdx.x/y/z")
    if stop is not None and not is_const(start, 0):
        raise error("loop-bounds", "T.thread_binding starts at 0",
                    expected="start 0", found=str(start), hint="add the start in the body")
    b, extent = need_builder("T.thread_binding"), start if stop is None else stop
    return BindingLaunchFrame(extent, thread) if b.kernel is None else ThreadBindingFrame(b.kernel, extent, thread)


WarpSpecialize = ws
WarpSpecializeFrame = IfThreadFrame


# ---- the indices of a block in a grid of several dimensions, as `with T.Kernel(...) as ...` gives them ----------------

class BlockIndices(list[Any]):
    """A list of indices, to be unpacked.  Arithmetic on it is an error that says so."""

    def __tilelang_expr__(self) -> NoReturn:
        names = ", ".join(("bx", "by", "bz")[:len(self)])
        raise error("type", f"a block of this grid has {len(self)} indices, one is needed here", expected="one block index",
                    found=f"a list of {len(self)}", hint=f"name each of them: with T.Kernel(...) as ({names})")


def _one_is_needed(self: BlockIndices, *_: Any) -> NoReturn:
    self.__tilelang_expr__()


for _name in """add and floordiv ge gt le lshift lt mod mul or radd rfloordiv rmod rmul rshift rsub rtruediv sub truediv
        xor""".split():
    setattr(BlockIndices, f"__{_name}__", _one_is_needed)


# ---- kernels that the user wrote in CUDA ------------------------------------------------------------------------------

# `__global__ void [__launch_bounds__(…)] name(`, whether or not extern "C" stands in front
_ENTRY = re.compile(r"(extern\s+\"C\"\s+)?__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+"
                    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")


class SourceKernelFrame(KernelLaunchFrame):
    """The launch of a `__global__` function of user source.  Statements in its block are rejected."""

    source: str
    entry: str

    def close(self, b: Builder) -> Stmt:
        if self.stmts:
            raise error("source-kernel", "statements stand in the block of T.CUDASourceCodeKernel", expected="pass as the body",
                        found=f"{len(self.stmts)} statements", hint="its body is the CUDA source: write `pass`")
        zero = Const(0, DType("int32"))
        args = [AddressOf(buffer, (zero,) * len(buffer.shape)) if buffer is not None else var
                for var, buffer in b.params.values()]
        self.stmts.append(Evaluate(call("source_kernel", (StringConst(self.entry), *args), "void", span=self.span),
                                   span=self.span))
        out = super().close(b)
        assert isinstance(out, Launch)  # what a launch frame closes to
        return with_options(replace(out), cuda_source=self.source, cuda_entry=self.entry)


@example('with T.CUDASourceCodeKernel(32, threads=128, source_code_or_path=SOURCE, entry_name="scale"):', "    pass")
def CUDASourceCodeKernel(*blocks: Any, threads: Any = None, source_code_or_path: str, entry_name: str = "main_kernel",
                         cluster_dims: int | Sequence[int] | None = None, prelude: str | None = None) -> SourceKernelFrame:
    """`with T.CUDASourceCodeKernel(grid, threads=128, source_code_or_path=…): pass` launches a `__global__` function.

    source_code_or_path: CUDA source, or the path of a file with it.  entry_name: the function; its parameters are those of
    the prim_func, in order: tensors as pointers, scalars by value.  Runs on CUDA only.  Raises source-kernel,
    FileNotFoundError.
    """
    need_builder("T.CUDASourceCodeKernel")
    text = source_code_or_path
    if not isinstance(text, str) or not text.strip():
        raise error("source-kernel", "T.CUDASourceCodeKernel needs «CUDA source or the path of a file», found nothing",
                    found=f"{'nothing' if isinstance(text, str) else type(text).__name__}")
    if not isinstance(entry_name, str) or not entry_name:
        raise error("source-kernel", f"the entry of T.CUDASourceCodeKernel is «the name of a function», found {entry_name!r}")
    if "\n" not in text and "__global__" not in text:
        if not os.path.exists(text):
            raise FileNotFoundError(f"T.CUDASourceCodeKernel: no file {text!r}")
        with open(text, encoding="utf-8") as f:
            text = f.read()
    found = {m.group(2): m for m in _ENTRY.finditer(text)}
    if entry_name not in found:
        raise error("source-kernel", f"the source has no __global__ function `{entry_name}`. Available entries: "
                    f"{', '.join(found) or 'none'}", expected=f"one of {', '.join(found) or 'none'}", found=repr(entry_name))
    if not found[entry_name].group(1):  # add extern "C", so that the name is not mangled
        at = found[entry_name].start()
        text = f'{text[:at]}extern "C" {text[at:]}'
    frame = SourceKernelFrame(blocks, threads, prelude)
    if cluster_dims is not None:
        frame.plan = ClusterKernel(*blocks, cluster_dims=cluster_dims, threads=threads).plan
    frame.source, frame.entry = text, entry_name
    return frame

__all__ = ["CUDASourceCodeKernel", "KernelLaunchFrame", "WarpSpecialize", "annotate_min_blocks_per_sm", "get_block_binding",
           "get_block_bindings", "get_block_extent", "get_block_extents", "get_cluster_dims", "get_cluster_extent",
           "get_cluster_extents", "get_cluster_id", "get_cluster_ids", "get_cluster_size", "get_thread_binding",
           "get_thread_bindings", "get_thread_extent", "get_thread_extents", "import_source", "launch_kernel",
           "thread_binding", "use_swizzle", "ws"]
