"""Compiles the kernels of planned GEMMs, and makes the functions that call them with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import empty, left_of, maker
from ..place import Place
from .few_rows import FewRows, few_rows_gemm
from .gemv import gemv
from .kernels import gemm_grouped, gemm_split
from .kernels import Form, gemm, gemm_two_level
from .operands import Copied, Operand, as_it_lies
from .plan import MatmulPlan
from .problem import MatmulProblem
from .repack import Copies, Rows, pad_rows, repack

Run = Callable[..., Any]


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
    kernel = at.kernel(pad_rows, own) if own is not None else at.kernel(
        repack, (max(1, x.batch), x.rows, x.columns), (x.lead, x.down, x.right), c.strides, element, c.transposed)
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
    program = gemm_two_level if two_level else gemm_split if f.tile.splits > 1 else gemm
    return at.kernel(program, f, copies, enable_pdl=f.tile.pdl and not any(copies) or None, cluster=f.tile.cluster or None)


def matmul_run(p: MatmulProblem, plan: MatmulPlan, at: Place, like: Any, shape: tuple[int, ...]) -> Run:
    """A function f(a, b, bias, scale_a, scale_b, out) -> out, or a new tensor of this shape, of the kind of `like`."""
    f, thin, (copy_a, copy_b) = plan.form, plan.thin, plan.copied
    result = maker(like, shape, f.types[2])
    if isinstance(thin, FewRows):
        return _calls(at.kernel(few_rows_gemm, thin), f, (p.left.view, p.right.view), None, result)
    if thin is not None:
        return _calls(at.kernel(gemv, thin), f, (p.left.view, p.right.view), (
            (), maker(like, (thin.splits, thin.count), "float32")), result)
    copies = _rows(p.left, copy_a, f.types[0]), _rows(p.right, copy_b, f.types[1])
    kernel = compiled(f, p.two_level, at, copies)
    reads = (_reader(p.left, copy_a, f.types[0], at, copies[0]), _reader(p.right, copy_b, f.types[1], at, copies[1]))
    if not any(copies) and f.tile.splits == 1:
        return _calls(kernel, f, reads, None, result)
    room = [_no_tensor if r is None else maker(like, (r.batch, r.rows, r.padded)[not r.batch:], r.element) for r in copies]
    partials = maker(like, f.partials_shape, f.types[3]) if f.tile.splits > 1 else _no_tensor
    return _calls(kernel, f, reads, (room, partials), result)


def _no_tensor() -> None:
    """What a kernel takes for an argument that it does not use."""


def _calls(kernel: Run, f: Form, reads: tuple[Run, Run], workspace: tuple[Sequence[Run], Run] | None, result: Run) -> Run:
    """The function that `matmul_run` returns. workspace, result: allocate the copies and partial sums, and the result."""
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
        if workspace is None:
            kernel(read_a(a), read_b(b), bias, scale_a, scale_b, out)
        else:
            copies, partials = workspace
            kernel(read_a(a), read_b(b), *[make() for make in copies], bias, scale_a, scale_b, partials(), out)
        return out

    return run if workspace or f.scaling == "tensor" or read_a is not as_it_lies or read_b is not as_it_lies else plain


def grouped_run(p: MatmulProblem, plan: MatmulPlan, at: Place, like: Any, shape: tuple[int, ...]) -> Run:
    """A function f(a, b, bias, sizes, out) -> out, or a new tensor of this shape, all of which is written."""
    f, (copy_a, copy_b) = plan.form, plan.copied
    kernel = at.kernel(gemm_grouped, f, p.two_level)
    read_a, read_b = _reader(p.left, copy_a, f.types[0], at), _reader(p.right, copy_b, f.types[1], at)
    where, result = maker(like, (f.row_tiles(p.m), 3), "int32"), maker(like, shape, f.types[2])

    def run(a: Any, b: Any, bias: Any, sizes: Any, out: Any = None) -> Any:
        out = result() if out is None else out
        kernel(read_a(a), read_b(b), bias, sizes, where(), out)
        return out

    return run


def planned_run(p: MatmulProblem, *how: Any) -> Run:
    """The function of a planned call of matmul or grouped_matmul. how: as matmul_run takes it."""
    return (grouped_run if p.groups else matmul_run)(p, *how)
