"""What a product of given operands runs: copies, tiles, the kernel; compiled once for each form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from tilelang.errors import register
from tilelang.ir import dtype
from tilelang.jit import compile as compile_program
from tilelang.language.state import error
from tilelang.target import Target

from .arrays import empty, maker, target_of, zeros
from .cut_kernels import gemm_cut
from .cut_tiles import choose_cut
from .matmul_kernels import Form, gemm, gemm_grouped, gemm_split, gemm_two_level, repack
from .operands import Copied, Operand, copy_of
from .tiles import Chip, Problem, Tile, chip_of, choose_tile, without_wgmma

register("matmul-target", ValueError, "element types that the target's products do not have",
         expected="element types that the target's products have")

_SLOW = 5e13  # operations/s with operands that neither TMA nor wide copies can load
Plan = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """Where kernels are compiled for."""

    target: Target
    backend: str | None

    @staticmethod
    def of(x: Any, target: Any, backend: str | None) -> Place:
        """The place a caller asked for, or that of a tensor."""
        if target is None:
            return Place(target_of(x), backend)
        return Place(target if isinstance(target, Target) else Target(target), backend)

    @property
    def chip(self) -> Chip:
        return chip_of(self.target)

    def compile(self, program: Any) -> Plan:
        configs = {"tl.enable_hopper": True} if self.target.has_wgmma else {}
        kernel: Plan = compile_program(program, target=self.target, execution_backend=self.backend, pass_configs=configs,
                                       verbose=False)
        return kernel


@dataclass(frozen=True)
class Request:
    """A product that has passed its checks.

    form: without tile, strides and orders of storage.  two_level: of accumulation.  open_rows: one kernel is to do for
    any number of rows, where it can.
    """

    form: Form
    kind: str
    left: Operand
    right: Operand
    two_level: bool
    place: Place
    open_rows: bool = False


def _prepared(r: Request) -> tuple[Request, Copied | None, Copied | None]:
    """Which operands are copied first, and the product of the copies.

    sm_90 multiplies 8- and 32-bit types with k contiguous only, and its loads want rows of whole 16 bytes.  A copy costs
    a pass over the operand; a small product rather loads element by element.
    """
    size, chip = dtype(r.form.types[0]).bytes, r.place.chip
    out: list[Copied | None] = []
    for x, k_inner in ((r.left, not r.left.transposed), (r.right, r.right.transposed)):
        turned = chip.kind == "wgmma" and r.kind in ("fp8", "int8", "tf32") and not k_inner
        wanted = not x.plain
        if chip.kind == "wgmma" and r.kind != "float" and (turned or not x.fits(size)):
            work = 2.0 * r.form.m * r.form.n * r.form.k * max(1, r.form.batch)
            moved = 2 * x.rows * x.columns * max(1, x.batch) * size
            wanted = wanted or work / _SLOW > chip.start + moved / chip.memory
        out.append(copy_of(x, size, turned) if wanted else None)
    a, b = out
    return replace(r, left=a.operand if a else r.left, right=b.operand if b else r.right), a, b


def _formed(r: Request, batch: int, rows: int) -> Form:
    """The form with its tile and the storage of its operands.  rows: of a group or a product, for the choice."""
    f, chip = r.form, r.place.chip
    size = dtype(f.types[0]).bytes
    native = r.kind == "half" or not r.left.transposed and r.right.transposed
    if chip.kind == "wgmma" and not (native and r.left.fits(size) and r.right.fits(size)):
        chip = without_wgmma(chip)
    problem = Problem(rows, f.n, f.k, batch, r.kind, size * 8, dtype(f.types[2]).bits, r.two_level, not r.left.transposed,
                      r.right.transposed, not (r.two_level or f.groups or f.open_rows),
                      128 if f.scaling == "block" else 0, r.left.row_start(size), r.right.row_start(size),
                      not f.groups and f.scaling != "block", not (r.two_level or f.groups or f.open_rows),
                      open_rows=bool(f.groups or f.open_rows))
    tile = choose_tile(chip, problem)
    tile, cut = choose_cut(chip, problem, tile) or (tile, None)
    return replace(f, tile=tile, cut=cut, ta=r.left.transposed, tb=r.right.transposed,
                   a_strides=r.left.strides, b_strides=r.right.strides)


def _copier(x: Operand, c: Copied, element: str, at: Place) -> Plan:
    """f(tensor) -> its copy, as the kernel reads it."""
    shape = (max(1, x.batch), x.rows, x.columns)
    kernel = at.compile(repack(shape, (x.lead, x.down, x.right), c.strides, element, c.turned))
    columns = c.operand.columns

    def run(t: Any) -> Any:
        t = x.view(t)
        out = empty(t, c.shape, element)[:, :, :columns]
        kernel(t if x.batch else t[None], out)
        return out if x.batch else out[0]

    return run


def _reader(x: Operand, c: Copied | None, element: str, at: Place) -> Plan:
    return x.view if c is None else _copier(x, c, element, at)


@lru_cache(maxsize=256)
def _kernel(f: Form, two_level: bool, at: Place) -> Plan:
    program = gemm_two_level if two_level else gemm_split if f.tile.parts > 1 else gemm_cut if f.cut else gemm
    return at.compile(program(f))


def product(r: Request, like: Any, shape: tuple[int, ...]) -> Plan:
    """f(a, b, bias, scale_a, scale_b, out) -> out, or a new tensor of this shape, of the kind of `like`."""
    check_target(r)
    ready, copy_a, copy_b = _prepared(r)
    opened = r.open_rows and copy_a is None and not r.left.transposed and not r.form.batch
    if opened:  # tiles for the next power of two
        ready = replace(ready, form=replace(r.form, m=1 << (r.form.m - 1).bit_length(), open_rows=True))
    f = _formed(ready, max(1, r.form.batch), ready.form.m)
    split = f.tile.parts > 1
    kernel = (_kernel if opened else _kernel.__wrapped__)(f, r.two_level, r.place)
    read_a = _reader(r.left, copy_a, f.types[0], r.place)
    read_b = _reader(r.right, copy_b, f.types[1], r.place)
    result = maker(like, shape, f.types[2])
    space = maker(like, (f.tile.parts * max(1, f.batch), f.m, f.n), f.types[3])
    one = zeros(like, (1,), "float32")  # for parameters that the form does not use

    def run(a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, out: Any) -> Any:
        c = result() if out is None else out
        if f.scaling == "tensor":
            scale_a, scale_b = scale_a.reshape(1), scale_b.reshape(1)
        kernel(read_a(a), read_b(b), one if bias is None else bias, one if scale_a is None else scale_a,
               one if scale_b is None else scale_b, *((space(),) if split else ()), c)
        return c

    return run


def grouped(r: Request, like: Any) -> Plan:
    """f(a, b, bias, sizes, out) -> out.  The tile is chosen for rows shared out evenly."""
    check_target(r)
    ready, copy_a, copy_b = _prepared(r)
    groups = r.form.groups
    f = _formed(ready, groups, max(1, ceil(r.form.m / groups)))
    kernel = r.place.compile(gemm_grouped(f))
    read_a = _reader(r.left, copy_a, f.types[0], r.place)
    read_b = _reader(r.right, copy_b, f.types[1], r.place)
    where = maker(like, (ceil(f.m / f.tile.bm) + groups, 3), "int32")
    one = zeros(like, (1,), "float32")

    def run(a: Any, b: Any, bias: Any, sizes: Any, out: Any) -> Any:
        kernel(read_a(a), read_b(b), one if bias is None else bias, sizes, where(), out)
        return out

    return run


def check_target(r: Request) -> None:
    """Raises matmul-target."""
    t = r.place.target
    if r.kind == "fp8" and t.is_cuda and not t.has_fp8_mma:
        raise error("matmul-target", f"there is no product of {r.form.types[0]} on {t.arch}",
                    expected="sm_89 or newer", found=str(t.arch),
                    hint="sm_89 and newer have it; convert the operands to float16")


__all__ = ["Place", "Request", "Tile", "check_target", "grouped", "product"]
