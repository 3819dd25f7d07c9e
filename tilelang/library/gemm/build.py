"""Compiles the kernels of planned GEMMs, and makes the functions that call them with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang.jit import compile
from tilelang.target import Target

from ..arrays import empty, left_of, maker, target_of, zeros
from ..caches import Cache
from .few_rows import FewRows, few_rows_gemm
from .gemv import gemv
from .split_k_kernels import gemm_grouped, gemm_split, gemm_tail
from .kernels import Form, gemm, gemm_two_level
from .operands import Copied, Operand, as_it_lies
from .padded_copies import Copies
from .plan import MatmulPlan
from .problem import MatmulProblem
from .repack import Rows, pad_rows, repack
from .tile import Chip, chip_of

Run = Callable[..., Any]
KERNELS: Cache[Run] = Cache(256)


@dataclass(frozen=True)
class Place:
    """Where kernels are compiled for: target, execution backend and device."""

    target: Target
    backend: str | None

    @staticmethod
    def of(x: Any, target: Any, backend: str | None) -> Place:
        """The place that a caller asked for, or that of a tensor."""
        if target is None:
            return Place(target_of(x), backend)
        return Place(target if isinstance(target, Target) else Target(target), backend)

    @property
    def chip(self) -> Chip:
        return chip_of(self.target)

    def compile(self, program: Any, pdl: bool = False, cluster: tuple[int, ...] = ()) -> Run:
        """Compile a program. pdl: the launch uses PDL. cluster: Tile.cluster."""
        configs: dict[str, Any] = {"tl.enable_hopper": True} if self.target.has_wgmma else {}
        if pdl:
            configs["tl.enable_pdl"] = True
        if cluster:
            configs["tl.cluster"] = cluster
        kernel: Run = compile(program, target=self.target, execution_backend=self.backend, pass_configs=configs, verbose=False)
        return kernel


def _rows(x: Operand, c: Copied | None, element: str) -> Rows | None:
    """The copy of an operand that the GEMM's program makes itself; None for no copy, or for an operand that needs another copy.
    """
    if c is None or c.transposed or not x.plain:
        return None
    rows = Rows(x.batch, x.rows, x.columns, x.lead, x.down, c.shape[2], element)
    return rows if rows.fits else None


def _reader(x: Operand, c: Copied | None, element: str, at: Place, rows: Rows | None = None) -> Run:
    """A function from a tensor to the kernel's argument. rows: the copy that the kernel makes itself."""
    if c is None or rows is not None:
        return x.view
    own = _rows(x, c, element)
    kernel = at.compile(pad_rows(own) if own is not None else repack(
        (max(1, x.batch), x.rows, x.columns), (x.lead, x.down, x.right), c.strides, element, c.transposed))
    columns = c.operand.columns

    def run(t: Any) -> Any:
        t = x.view(t)
        if own is not None:
            out = empty(t, c.shape[not x.batch:], element)
            kernel(t, out)
            return left_of(out, columns)
        out = empty(t, c.shape, element)
        kernel(t if x.batch else t[None], out)
        return left_of(out if x.batch else out[0], columns)

    return run


def compiled(f: Form, two_level: bool, at: Place, copies: Copies = (None, None)) -> Run:
    """The compiled kernel of a form."""
    program = gemm_two_level if two_level else gemm_split if f.tile.splits > 1 else gemm_tail if f.tail else gemm
    return at.compile(program(f, copies), f.tile.pdl and not (f.tail or any(copies)), () if f.tail else f.tile.cluster)


def _copy_buffer(like: Any, rows: Rows | None, element: str) -> Callable[[], Any]:
    """A function that allocates the tensor of an operand's copy. Where nothing is copied, it returns one tensor of one element.
    """
    if rows is None:
        nothing = zeros(like, (1,), element)
        return lambda: nothing
    return maker(like, (rows.batch, rows.rows, rows.padded)[not rows.batch:], element)


def matmul_run(p: MatmulProblem, plan: MatmulPlan, at: Place, like: Any, shape: tuple[int, ...]) -> Run:
    """A function f(a, b, bias, scale_a, scale_b, out) -> out, or a new tensor of this shape, of the kind of `like`."""
    f, thin, (copy_a, copy_b) = plan.form, plan.thin, plan.copied
    views = p.left.view, p.right.view
    if isinstance(thin, FewRows):
        return _calls(at.compile(few_rows_gemm(thin)), thin.f, views, [], [], maker(like, shape, f.types[2]))
    if thin is not None:
        partials = maker(like, (thin.splits, thin.count), "float32")
        return _calls(at.compile(gemv(thin)), thin.f, views, [], [partials], maker(like, shape, f.types[2]))
    copies = _rows(p.left, copy_a, f.types[0]), _rows(p.right, copy_b, f.types[1])
    if f.open_rows:  # many calls share this kernel
        kernel = KERNELS.made((f, p.two_level, at, copies), lambda: compiled(f, p.two_level, at, copies))
    else:
        kernel = compiled(f, p.two_level, at, copies)
    reads = (_reader(p.left, copy_a, f.types[0], at, copies[0]), _reader(p.right, copy_b, f.types[1], at, copies[1]))
    padded = [_copy_buffer(like, rows, element) for rows, element in zip(copies, f.types)] if any(copies) else []
    space = [maker(like, f.partials_shape, f.types[3])] if f.tile.splits > 1 else []
    return _calls(kernel, f, reads, padded, space, maker(like, shape, f.types[2]))


def _calls(kernel: Run, f: Form, reads: tuple[Run, Run], padded: list[Callable[[], Any]], space: list[Callable[[], Any]],
           result: Callable[[], Any]) -> Run:
    """The function that `matmul_run` returns. padded, space, result: allocate the copies, the partial sums and the result."""
    read_a, read_b = reads

    # Parameters that the form does not use are None: passing a tensor costs the host 0.1 to 0.2 us, making a list as much.
    def plain(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        if out is None:
            out = result()
        kernel(a, b, bias, scale_a, scale_b, out)
        return out

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        if out is None:
            out = result()
        if f.scaling == "tensor":
            scale_a, scale_b = (x if x.ndim == 1 else x.reshape(1) for x in (scale_a, scale_b))
        kernel(read_a(a), read_b(b), *[make() for make in padded], bias, scale_a, scale_b, *[make() for make in space], out)
        return out

    return run if padded or space or f.scaling == "tensor" or read_a is not as_it_lies or read_b is not as_it_lies else plain


def grouped_run(p: MatmulProblem, plan: MatmulPlan, at: Place, like: Any) -> Run:
    """A function f(a, b, bias, sizes, out) -> out, which writes all of `out`."""
    f, (copy_a, copy_b) = plan.form, plan.copied
    kernel = at.compile(gemm_grouped(f, p.two_level))
    read_a = _reader(p.left, copy_a, f.types[0], at)
    read_b = _reader(p.right, copy_b, f.types[1], at)
    where = maker(like, (f.row_tiles, 3), "int32")

    def run(a: Any, b: Any, bias: Any, sizes: Any, out: Any) -> Any:
        kernel(read_a(a), read_b(b), bias, sizes, where(), out)
        return out

    return run
