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
from tilelang.language.tracing.state import error
from tilelang.target import Target

from ..arrays import empty, left_of, maker, target_of, zeros
from .few_rows import MOST_ROWS, FewRows, few_rows_product
from .gemv import VectorForm, vector_product
from .grouped_kernels import gemm_grouped
from .kernels import Form, gemm, gemm_two_level
from .operands import Copied, Operand, as_it_lies, copy_of
from .padded_copies import Copies
from .repack import Rows, pad_rows, repack
from .split_k_kernels import gemm_split
from .tail_kernels import gemm_cut
from .tile import Cut
from .tile_cache import choose_cut, choose_tile
from .tile_cost import SOON_SAVES, Chip, Problem, Tile, chip_of, without_wgmma

register("matmul-target", ValueError, "element types that the target's products do not have",
         expected="element types that the target's products have")

_SLOW = 5e13  # operations/s with operands that wgmma does not multiply in their order
# Seconds that a launch of copies adds, and bytes/s that it reads and writes (H200: 22 MB of odd rows in 10 us, 67 MB in 35).
_COPY_START, _COPY_RATE = 1.3e-6, 4.2e12
# With loads of single elements: what the loop takes, of the time that the model has for whole ones, and the rest of such a
# launch; what a step takes at least, of 32 of k, with nothing to hide it (50 shapes, 2 to 78 us: within a fifth mostly).
_ELEMENTS, _LAUNCH, _STEP = 1.7, 0.3e-6, 0.49e-6
_WORDS = 1.05  # with loads of 8 bytes, for what is 1.7 with those of 2 (ten shapes: 0.63 to 1.05)
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

    def compile(self, program: Any, soon: bool = False, cluster: tuple[int, ...] = ()) -> Plan:
        """soon: the launch may be set up while the one before it on the stream ends.  cluster: Tile.cluster."""
        configs: dict[str, Any] = {"tl.enable_hopper": True} if self.target.has_wgmma else {}
        if soon:
            configs["tl.enable_pdl"] = True
        if cluster:
            configs["tl.cluster"] = cluster
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


@dataclass(frozen=True)
class Choice:
    """How a product is computed: `form` with its tiles and the storage of what they read; `copied`: operands that are copied
    first; `vector`: a vector or a few rows times a matrix that is not."""

    form: Form
    copied: tuple[Copied | None, Copied | None] = (None, None)
    vector: VectorForm | FewRows | None = None


Route = tuple[Request, Copied | None, Copied | None]


def routes(r: Request) -> list[Route]:
    """Which operands may be copied first, and the product of the copies; the better way first.

    sm_90 multiplies 8- and 32-bit types with k contiguous only, and its loads want rows of whole 16 bytes.  A copy costs
    a pass over the operand; a small product rather loads element by element.
    """
    wgmma = r.place.chip.kind == "wgmma"
    inner = not r.left.transposed, r.right.transposed  # where k is contiguous
    turned = [wgmma and r.kind in ("fp8", "int8", "tf32") and not x for x in inner]
    if any(turned) and r.kind == "tf32" and not r.form.groups:  # one of them may be read from registers: the larger
        larger = r.left.rows * r.left.columns < r.right.rows * r.right.columns
        fewer = [all(turned) and larger != bool(side) for side in (0, 1)]
        return _cheaper(r, _orders(r, fewer), _orders(r, turned))
    return _orders(r, turned)


def _cheaper(r: Request, *ways: list[Route]) -> list[Route]:
    """The routes that begin with the cheaper one."""
    return min(ways, key=lambda x: _formed(*sized(r, x[0])).tile.seconds if not any(x[0][1:]) else expected(r, x[0]))


def _orders(r: Request, turned: list[bool]) -> list[Route]:
    """routes, with these operands turned where they are copied."""
    size, wgmma = dtype(r.form.types[0]).bytes, r.place.chip.kind == "wgmma" and r.kind != "float"
    sides = r.left, r.right
    needed = [not x.plain for x in sides]
    unfit = [wgmma and (t or not x.fits(size)) for x, t in zip(sides, turned)]
    few = _copied(r, needed, turned)
    if not any(unfit):
        return [few]
    all_fit = _copied(r, [n or u for n, u in zip(needed, unfit)], turned)
    return [all_fit, few] if _copies_pay(r, few[0], all_fit, any(turned)) else [few, all_fit]


def _copied(r: Request, wanted: list[bool], turned: list[bool]) -> Route:
    """The product with copies of the operands that are to have one."""
    size = dtype(r.form.types[0]).bytes
    a, b = (copy_of(x, size, t) if w else None for x, w, t in zip((r.left, r.right), wanted, turned))
    return replace(r, left=a.operand if a else r.left, right=b.operand if b else r.right), a, b


def _copies_pay(r: Request, few: Request, copied: Route, turned: bool) -> bool:
    """Whether copies of all operands that TMA cannot load take less than a product by mma.sync that loads their elements."""
    if turned:
        f, chip = r.form, r.place.chip
        return 2.0 * f.m * f.n * f.k * max(1, f.batch) / _SLOW > chip.start + _copied_bytes(r, copied) / chip.memory
    return expected(r, copied) < expected(r, (few, None, None))


def _copied_bytes(r: Request, route: Route) -> int:
    """Read and written by the copies."""
    return 2 * sum(x.rows * x.columns * max(1, x.batch) * dtype(r.form.types[0]).bytes
                   for x, c in zip((r.left, r.right), route[1:]) if c)


def expected(r: Request, route: Route) -> float:
    """Seconds of a route, of operands that TMA cannot load or could not before they were copied."""
    f, chip, size = r.form, r.place.chip, dtype(r.form.types[0]).bytes
    ready, batch, rows = route[0], max(1, f.batch or f.groups), max(1, ceil(f.m / f.groups)) if f.groups else f.m
    tile = _formed(ready, batch, rows).tile
    if any(route[1:]):
        late = SOON_SAVES if tile.soon else 0.0  # behind a copy no launch starts soon
        return tile.seconds + late + _COPY_START + _copied_bytes(r, route) / _COPY_RATE
    start = without_wgmma(chip).start
    steps = ceil(ceil(f.k / 32) / tile.parts)
    words = all(x.row_start(size) % 8 == 0 for x in (r.left, r.right))
    return max(_LAUNCH + (_WORDS if words else _ELEMENTS) * (tile.seconds - start),
               start + steps * _STEP + (tile.parts > 1) * chip.start)


def problem_of(r: Request, batch: int, rows: int) -> tuple[Chip, Problem]:
    """What tiles are priced for.  rows: of a group or a product, for the choice."""
    f, chip = r.form, r.place.chip
    size = dtype(f.types[0]).bytes
    inner = not r.left.transposed, r.right.transposed  # where k is contiguous
    native = r.kind == "half" or all(inner) or r.kind == "tf32" and any(inner) and not f.groups
    if chip.kind == "wgmma" and not (native and r.left.fits(size) and r.right.fits(size)):
        chip = without_wgmma(chip)
    return chip, Problem(rows, f.n, f.k, batch, r.kind, size * 8, dtype(f.types[2]).bits, r.two_level, not r.left.transposed,
                         r.right.transposed, not (r.two_level or f.groups or f.open_rows),
                         128 if f.scaling == "block" else 0, 0, r.left.row_start(size), r.right.row_start(size),
                         not f.groups, not (r.two_level or f.groups or f.open_rows), open_rows=bool(f.groups or f.open_rows),
                         ragged=f.groups > 1)


def tiled(r: Request, tile: Tile, cut: Cut | None = None) -> Form:
    """The form with these tiles and the storage of its operands."""
    return replace(r.form, tile=tile, cut=cut, ta=r.left.transposed, tb=r.right.transposed,
                   a_strides=r.left.strides, b_strides=r.right.strides)


def _formed(r: Request, batch: int, rows: int) -> Form:
    """The form with the model's tiles."""
    chip, problem = problem_of(r, batch, rows)
    tile = choose_tile(chip, problem)
    tile, cut = choose_cut(chip, problem, tile) or (tile, None)
    return tiled(r, tile, cut)


def sized(r: Request, route: Route) -> tuple[Request, int, int]:
    """(the route's request, batch, rows) for which tiles are chosen: the mean of groups' rows; for any number of rows
    those of the next power of two."""
    ready, f = route[0], r.form
    if f.groups:
        return ready, f.groups, max(1, ceil(f.m / f.groups))
    if r.open_rows and route[1] is None and not r.left.transposed and not f.batch:
        ready = replace(ready, form=replace(ready.form, m=1 << (f.m - 1).bit_length(), open_rows=True))
    return ready, max(1, f.batch), ready.form.m


def chosen(r: Request) -> Choice:
    """The model's choice."""
    vector = vectors(r)
    if vector is not None and not vector[1]:
        return Choice(vector[0].f, vector=vector[0])
    route = routes(r)[0]
    found = Choice(_formed(*sized(r, route)), route[1:])
    if vector is not None and vector[1] < expected(r, route):
        return Choice(vector[0].f, vector=vector[0])
    return found


def _rows(x: Operand, c: Copied | None, element: str) -> Rows | None:
    """What the product's program copies itself; None: nothing, or an operand that needs another copy."""
    if c is None or c.turned or not x.plain:
        return None
    rows = Rows(x.batch, x.rows, x.columns, x.lead, x.down, c.shape[2], element)
    return rows if rows.fits else None


def _reader(x: Operand, c: Copied | None, element: str, at: Place, rows: Rows | None = None) -> Plan:
    """f(tensor) -> what a kernel takes for it.  rows: what the kernel copies itself."""
    if c is None or rows is not None:
        return x.view
    own = _rows(x, c, element)
    kernel = at.compile(pad_rows(own) if own is not None else repack(
        (max(1, x.batch), x.rows, x.columns), (x.lead, x.down, x.right), c.strides, element, c.turned))
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


@lru_cache(maxsize=256)
def _kernel(f: Form, two_level: bool, at: Place, copies: Copies = (None, None)) -> Plan:
    program = gemm_two_level if two_level else gemm_split if f.tile.parts > 1 else gemm_cut if f.cut else gemm
    return at.compile(program(f, copies), f.tile.soon and not (f.cut or any(copies)), () if f.cut else f.tile.cluster)


def _room(like: Any, rows: Rows | None, element: str) -> Callable[[], Any]:
    """Makes the tensor that a program copies to; where it copies nothing, the same of one element each time."""
    if rows is None:
        nothing = zeros(like, (1,), element)
        return lambda: nothing
    return maker(like, (rows.batch, rows.rows, rows.padded)[not rows.batch:], element)


def vectors(r: Request) -> tuple[VectorForm | FewRows, float] | None:
    """A product of one row or few, or columns, whose other operand TMA cannot load, in one pass over that; and its seconds, 0
    where a copy of it costs more than all the rest."""
    f, chip = r.form, r.place.chip
    of_b = f.m <= f.n
    matrix, other = (r.right, r.left) if of_b else (r.left, r.right)
    few = min(f.m, f.n)
    if chip.kind != "wgmma" or r.kind != "half" or few > MOST_ROWS or f.batch or f.groups or f.scaling:
        return None
    rows = Rows(0, matrix.rows, matrix.columns, 0, matrix.down, matrix.columns, f.types[of_b])
    if not (matrix.plain and other.plain) or matrix.fits(rows.size) or not 0 < rows.words < 1 << 28:
        return None
    form = replace(f, ta=r.left.transposed, tb=r.right.transposed, a_strides=r.left.strides, b_strides=r.right.strides)
    if few == 1:
        return VectorForm(form, rows).shared_out(chip.units), 0.0
    found = FewRows(form, rows).shared_out(chip.units)
    return found, found.seconds(chip.units)


def product(r: Request, choice: Choice, like: Any, shape: tuple[int, ...]) -> Plan:
    """f(a, b, bias, scale_a, scale_b, out) -> out, or a new tensor of this shape, of the kind of `like`."""
    f, vector, (copy_a, copy_b) = choice.form, choice.vector, choice.copied
    views = r.left.view, r.right.view
    if isinstance(vector, FewRows):
        return _calls(r.place.compile(few_rows_product(vector)), vector.f, views, [], [], like, shape)
    if vector is not None:
        sums = maker(like, (vector.parts, vector.count), "float32")
        return _calls(r.place.compile(vector_product(vector)), vector.f, views, [], [sums], like, shape)
    copies = _rows(r.left, copy_a, f.types[0]), _rows(r.right, copy_b, f.types[1])
    kernel = (_kernel if f.open_rows else _kernel.__wrapped__)(f, r.two_level, r.place, copies)
    reads = (_reader(r.left, copy_a, f.types[0], r.place, copies[0]), _reader(r.right, copy_b, f.types[1], r.place, copies[1]))
    padded = [_room(like, rows, element) for rows, element in zip(copies, f.types)] if any(copies) else []
    space = [maker(like, f.sums_shape, f.types[3])] if f.tile.parts > 1 else []
    return _calls(kernel, f, reads, padded, space, like, shape)


def _calls(kernel: Plan, f: Form, reads: tuple[Plan, Plan], padded: list[Callable[[], Any]], space: list[Callable[[], Any]],
           like: Any, shape: tuple[int, ...]) -> Plan:
    """What `product` returns.  padded, space: make the tensors that the kernel takes for copies and sums."""
    read_a, read_b = reads
    result = maker(like, shape, f.types[2])

    # Parameters that the form does not use are None: a tensor costs the host 0.1 to 0.2 us to pass, a list as much to make.
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


def grouped(r: Request, choice: Choice, like: Any) -> Plan:
    """f(a, b, bias, sizes, out) -> out, all of which is written."""
    f, (copy_a, copy_b) = choice.form, choice.copied
    kernel = r.place.compile(gemm_grouped(f, r.two_level))
    read_a = _reader(r.left, copy_a, f.types[0], r.place)
    read_b = _reader(r.right, copy_b, f.types[1], r.place)
    where = maker(like, (f.row_tiles, 3), "int32")

    def run(a: Any, b: Any, bias: Any, sizes: Any, out: Any) -> Any:
        kernel(read_a(a), read_b(b), bias, sizes, where(), out)
        return out

    return run


def check_target(r: Request) -> None:
    """Raises matmul-target."""
    t = r.place.target
    if r.kind == "fp8" and t.is_cuda and not t.has_fp8_mma:
        raise error("matmul-target", f"there is no product of {r.form.types[0]} on {t.arch}",
                    expected="sm_89 or newer", found=str(t.arch),
                    hint="sm_89 and newer have it; convert the operands to float16")


__all__ = ["Choice", "Place", "Request", "Route", "check_target", "chosen", "expected", "grouped", "problem_of", "product",
           "routes", "sized", "tiled", "vectors"]
