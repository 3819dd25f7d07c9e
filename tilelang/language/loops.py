"""Loops of the language.  Each function returns a frame; a rewritten `for` opens the frame and binds its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import reduce
from math import prod
from typing import Any, TypeVar

from tilelang.ir import (Attrs, Bind, Buffer, Const, Expr, For, If, LoopPlan, Options, Parallel as ParallelStmt, ParallelPlan,
                         Stmt, Var, binary, cast, const, convert, is_const, promote, select, seq, walk, I32)
from tilelang.errors import register_warning, warn
from tilelang.layout import Fragment
from tilelang.ops.plans import AtomicPlan, CopyPlan, GemmSchedule, ReducePlan

from .tracing.builder import Builder, current_builder, log, loop_of_range, need_builder, reads_memory
from .tracing.control_flow import ControlFlow
from .tracing.flags import flag, whole_number
from .tracing.scope import Frame
from .tracing.state import describe, error, example

O = TypeVar("O", bound=Options)
MOST = 2**28  # most iterations of T.Parallel and T.vectorized in one block
MOST_STAGES = 1024  # most stages of a pipeline: more than fit in any block's memory


def freeze_attr(v: Any) -> Any:
    """An annotation value as an immutable attribute value."""
    if isinstance(v, (list, tuple)):
        return tuple(freeze_attr(x) for x in v)
    if isinstance(v, dict):
        return tuple(sorted((str(k), freeze_attr(x)) for k, x in v.items()))
    return v


# The annotation keys that have an effect, by record.  Other options of the records are decisions of passes.
_COPY_KEYS = ("coalesced_width", "disable_tma", "eviction_policy", "loop_layout", "prefer_instruction")
_PIPELINE_KEYS = ("num_stages", "order", "stage", "group", "software_pipeline_order", "software_pipeline_stage")
KEYS: dict[type[Options] | None, tuple[str, ...]] = {
    CopyPlan: _COPY_KEYS, AtomicPlan: ("disable_tma", "eviction_policy", "memory_order", "use_tma"),
    GemmSchedule: ("k_pack",), ReducePlan: ("batch",),
    LoopPlan: (*_PIPELINE_KEYS, "explicit", "factor"), ParallelPlan: ("coalesced_width", "loop_layout"), None: ()}
WSID = "ws_id"  # names an operation for a schedule (ws_schedule.py)
_OTHER_NAMES = {"parallel_loop_layout": "loop_layout", "pragma_unroll_explicit": "explicit", "pragma_unroll_factor": "factor"}
register_warning("empty-pipeline", "T.Pipelined with an end that leaves no iteration, where stages were probably meant")
register_warning("annotation-no-effect", "an annotation that has no effect in this compiler")


def check_keys(annotations: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Raise annotation-key for a misspelt key; warn of other keys without an effect, which the printed program keeps."""
    for key in map(str, annotations):
        if key in known or key == WSID or _OTHER_NAMES.get(key) in known:
            continue
        near = get_close_matches(key, [*known, *(k for k, meant in _OTHER_NAMES.items() if meant in known)], 1, 0.8)
        if near:
            raise error("annotation-key", f"no annotation is named ‹{key!r}›", f"did you mean {near[0]!r}?",
                        expected=f"one of {', '.join(known)}")
        b = current_builder()
        warn("annotation-no-effect", f"the annotation {key!r} has no effect",
             f"those that have one here: {', '.join(known)}" if known else "leave it out", span=b.span() if b else None)


def attrs_of(annotations: dict[str, Any] | None, known: Sequence[str] = (), **own: Any) -> Attrs:
    """Sorted attrs from keyword values (None left out) and a user's annotations, which win.  known: keys that have an effect.

    Raises option-type for annotations that are no dict, and for a coalesced width or loop layout that is none; annotation-key.
    """
    if annotations is not None and not isinstance(annotations, Mapping):
        raise error("option-type", f"annotations are «a dict of names and values», found {annotations!r}")
    check_keys(annotations or {}, known)
    annotations = {_OTHER_NAMES.get(str(k), str(k)): v for k, v in (annotations or {}).items()}
    for given in (own, annotations):
        width, layout = given.get("coalesced_width"), given.get("loop_layout")
        if width is not None and (not isinstance(width, int) or isinstance(width, bool) or width <= 0):
            raise error("option-type", f"coalesced_width is «a positive number of elements», found {width!r}")
        if layout is not None and not isinstance(layout, Fragment):
            raise error("option-type", f"loop_layout is «a T.Fragment over the loops», found {layout!r}")
    d = {k: freeze_attr(v) for k, v in own.items() if v is not None}
    d.update({k: freeze_attr(v) for k, v in annotations.items()})
    return tuple(sorted(d.items()))


def options_from(record: type[O], annotations: dict[str, Any] | None, **own: Any) -> tuple[O, Attrs]:
    """(the record of keyword values and of annotations in KEYS, the other annotations).  Raises option-type, annotation-key."""
    d = dict(attrs_of(annotations, KEYS[record], **own))
    named = {*KEYS[record], *own}
    try:
        plan = record(**{k: v for k in record.names if k in named and (v := d.pop(k, None)) is not None})
    except TypeError as e:
        raise error("option-type", str(e), expected="a value of its type", found=str(e).rpartition("found ")[2]) from None
    return plan, tuple(d.items())


def loop_bound(v: Any, what: str) -> Expr:
    """A bound as an integer expression."""
    try:
        e = convert(v)
    except TypeError:
        e = None
    if e is None or isinstance(v, str):
        hint = (f"give each extent as a separate argument: {', '.join(map(str, v))}" if isinstance(v, (tuple, list)) else
                f"give its extent: {v.name}.shape[0]" if isinstance(v, Buffer) else "give an integer or an integer expression")
        raise error("loop-bounds", f"{what} is ‹a {type(v).__name__}›, an integer is needed", hint=hint)
    if not (e.dtype.is_int or e.dtype.is_bool) or e.dtype.lanes != 1:
        raise error("loop-bounds", f"{what} has type ‹{e.dtype}›, an integer is needed",
                    hint="integer division is `//`, or T.ceildiv to round up")
    return cast(e, I32) if e.dtype.is_bool else e


def fixed(b: Builder, e: Expr) -> Expr:
    """The value of e at the entry of the loop that has just been opened, for use in its body."""
    if not reads_memory(e):
        return e
    v = Var("bound", e.dtype, span=b.frames[-1].span)
    b.frames[-2].stmts.append(Bind(v, e, span=v.span))
    return v


def few_enough(what: str, *extents: Expr) -> None:
    """Reject loops of more than MOST iterations: they are distributed or unrolled by tables of their iterations."""
    n = prod(e.value for e in extents if isinstance(e, Const))
    if n > MOST:
        raise error("parallel-extents", f"{what} has ‹{n}› iterations, expected at most {MOST} in one block",
                    expected=f"at most {MOST} iterations", hint="give each block a part: T.Kernel(T.ceildiv(n, part))")


class LoopFrame(Frame):
    """The frame of one For.  start, stop, step: as Python's range.  A step other than 1 becomes a counter from 0."""

    once = False
    loop = True
    user: Var | None = None  # the user's variable of a stepped loop

    def __init__(self, start: Any, stop: Any, step: Any, kind: str,
                 options: tuple[LoopPlan, Attrs] = (LoopPlan(), ())) -> None:
        super().__init__()
        if stop is None:
            start, stop = 0, start
        self.start, self.stop = loop_bound(start, "the start of a loop"), loop_bound(stop, "the end of a loop")
        self.step = loop_bound(1 if step is None else step, "the step of a loop")
        self.kind, (self.plan, self.attrs) = kind, options
        if is_const(self.step, 0):
            raise error("loop-step", "the step of a loop must not be zero")

    def open(self, b: Builder) -> Var:
        dt = promote(self.start.dtype, self.stop.dtype)
        self.start, self.stop, self.step = (cast(e, dt) for e in (self.start, self.stop, self.step))
        if is_const(self.step, 1):
            self.extent = binary("sub", self.stop, self.start)
            if self.kind == "vectorized":
                few_enough("T.vectorized", self.extent)
            self.counter = b.new_var("i", dt)
            return self.counter
        # The bounds are now read in every iteration: fix the values that may change.
        self.start, self.stop, self.step = (fixed(b, e) for e in (self.start, self.stop, self.step))
        if not isinstance(self.step, Const):
            log.warning("%s: a loop with a run-time step", self.span)
        self.extent = _trip_count(self.start, self.stop, self.step)
        self.counter = Var("i", dt, span=self.span)
        self.user = b.new_var("i", dt)
        value = binary("add", self.start, binary("mul", self.counter, self.step))
        self.stmts.append(Bind(self.user, value, span=self.span))
        self.start = Const(0, dt)
        return self.user

    def close(self, b: Builder) -> Stmt:
        b.unnamed.pop(id(self.counter if self.user is None else self.user), None)
        if self.user is not None:
            object.__setattr__(self.counter, "name", f"{self.user.name}_step")
        return For(self.counter, self.start, self.extent, self.kind, self.body(), self.attrs, self.plan, span=self.span)


def _trip_count(start: Expr, stop: Expr, step: Expr) -> Expr:
    """len(range(start, stop, step)), not clamped at zero for constant steps (a negative extent runs no iteration)."""
    up = (stop - start + (step - 1)) // step
    if isinstance(step, Const) and step.value > 0:
        return up
    if isinstance(step, Const):
        size = -step.value
        return (start - stop + (size - 1)) // size
    positive = step > 0
    size = select(positive, step, binary("max", 0 - step, const(1, step.dtype)))
    span = select(positive, stop - start, start - stop)
    return binary("max", (span + (size - 1)) // size, const(0, start.dtype))


class ParallelFrame(Frame):
    """The frame of T.Parallel.  A Parallel that is the whole body of another one is fused with it."""

    opened_by = "for i in T.Parallel(n):"
    once = False
    loop = parallel = True

    def __init__(self, extents: tuple[Any, ...], options: tuple[ParallelPlan, Attrs], start: Expr | None = None) -> None:
        super().__init__()
        if not extents:
            raise error("parallel-extents", "T.Parallel needs «at least one extent»", found="none")
        self.extents = tuple(loop_bound(e, "an extent of a loop") for e in extents)
        for e in self.extents:
            if isinstance(e, Const) and e.value < 0:
                raise error("parallel-extents", f"an extent of T.Parallel must not be negative, got {e.value}",
                            expected="an extent of at least 0",
                            hint="an extent is a number of iterations: compare the terms of the difference that gives it")
        few_enough("T.Parallel", *self.extents)
        (self.plan, self.attrs), self.start = options, start

    def open(self, b: Builder) -> Any:
        names = "ijklmn"
        self.vars = tuple(b.new_var(names[k] if k < 6 else f"i{k}", e.dtype) for k, e in enumerate(self.extents))
        if self.start is not None:  # the IR counts iterations from 0
            return binary("add", self.vars[0], fixed(b, self.start))
        return self.vars[0] if len(self.vars) == 1 else self.vars

    def close(self, b: Builder) -> Stmt:
        body = self.body()
        if isinstance(body, ParallelStmt) and not body.attrs and not body.plan.given():
            return ParallelStmt(self.vars + body.vars, self.extents + body.extents, body.body, self.attrs,
                                self.plan, span=self.span)
        return ParallelStmt(self.vars, self.extents, body, self.attrs, self.plan, span=self.span)


class GridFrame(Frame):
    """The frame of T.grid: nested serial loops."""

    once = False
    loop = True

    def __init__(self, extents: tuple[Any, ...]) -> None:
        super().__init__()
        self.extents = tuple(loop_bound(e, "an extent of a loop") for e in extents)

    def open(self, b: Builder) -> Any:
        self.vars = tuple(b.new_var("ijklmn"[k % 6], e.dtype) for k, e in enumerate(self.extents))
        return self.vars[0] if len(self.vars) == 1 else self.vars

    def close(self, b: Builder) -> Stmt:
        out = self.body()
        for v, e in reversed(list(zip(self.vars, self.extents))):
            out = For(v, Const(0, v.dtype), e, "serial", out, (), span=self.span)
        return out


class PersistentFrame(Frame):
    """The frame of T.Persistent: waves over a tile domain.  In wave w, a block handles linear id w*wave_size + index."""

    once = False
    loop = True

    def __init__(self, domain: Sequence[Any], wave_size: Any, index: Any, group_size: Any,
                 options: tuple[LoopPlan, Attrs] = (LoopPlan(), ())) -> None:
        super().__init__()
        self.plan, self.attrs = options
        self.domain = [loop_bound(d, "a domain size") for d in domain]
        if not self.domain:
            raise error("parallel-extents", "T.Persistent needs a domain of «at least one dimension»", found="none",
                        hint="write T.Persistent([tiles_m, tiles_n], blocks, block)")
        self.wave_size, self.index = loop_bound(wave_size, "wave_size"), loop_bound(index, "the index")
        if isinstance(self.wave_size, Const) and self.wave_size.value <= 0:
            raise error("loop-step", f"a wave of T.Persistent has ‹{self.wave_size.value}› blocks, expected at least one",
                        expected="at least one block", hint="give the number of blocks of the launch")
        self.group = binary("min", binary("max", loop_bound(group_size, "group_size"), 1), self.domain[-1])
        self.dtype = reduce(promote, (e.dtype for e in (*self.domain, self.wave_size, self.index, self.group)))
        self.domain = [cast(d, self.dtype) for d in self.domain]
        self.wave_size, self.index, self.group = (cast(e, self.dtype) for e in (self.wave_size, self.index, self.group))

    def open(self, b: Builder) -> Any:
        self.domain = [fixed(b, d) for d in self.domain]
        self.wave_size, self.index, self.group = (fixed(b, e) for e in (self.wave_size, self.index, self.group))
        group, last = self.group, self.domain[-1]
        outer = (last + (group - 1)) // group
        sizes = [outer, *self.domain[:-1], group]
        total: Any = prod(sizes)
        self.wave = Var("wave", self.dtype, span=self.span)
        # The number of waves in which this index has a tile.  A loop of that length needs no conditional exit.
        self.waves = binary("max", (total - self.index + (self.wave_size - 1)) // self.wave_size, 0)
        linear = Var("tile_id", self.dtype, span=self.span)
        self.stmts.append(Bind(linear, binary("add", self.wave * self.wave_size, self.index), span=self.span))
        rest: Any = linear
        coords: list[Any] = []
        for s in reversed(sizes):
            coords.append(rest % s)
            rest = rest // s
        coords.reverse()
        values = [*coords[1:-1], coords[0] * group + coords[-1]]
        self.vars = tuple(b.new_var(f"p{k}", self.dtype) for k in range(len(self.domain)))
        self.head = [*self.stmts, *(Bind(v, convert(e), span=self.span) for v, e in zip(self.vars, values))]
        self.stmts = []
        return self.vars[0] if len(self.vars) == 1 else self.vars

    def close(self, b: Builder) -> Stmt:
        inside, own = self.body(), self.plan.num_stages
        if not own or not is_const(self.domain[-1] % self.group, 0):
            inside = If(binary("lt", self.vars[-1], self.domain[-1]), inside, None, span=self.span)
        if own and any(s.kind == "pipelined" for s in walk(inside, For)):  # the loops inside overlap the tiles
            own = 0
        return For(self.wave, Const(0, self.dtype), self.waves, "pipelined" if own else "serial", seq(*self.head, inside),
                   self.attrs, self.plan.having(num_stages=own or None), span=self.span)


class IfThreadFrame(Frame):
    """T.ws: the body runs on the threads of some 128-thread warp groups."""

    opened_by = "with T.ws(0):"

    def __init__(self, cond: Expr) -> None:
        super().__init__()
        if not isinstance(cond, Expr) or not cond.dtype.is_bool:
            raise error("condition", f"a branch of threads needs «a bool expression», found {describe(cond)}",
                        hint="write a comparison, or T.ws(0)")
        self.cond = cond

    def close(self, b: Builder) -> Stmt:
        return If(self.cond, self.body(), None, span=self.span)


# ---- the calls -----------------------------------------------------------------------------------------------------

@loop_of_range.provide
@example("for k in T.serial(8):", "    Y[i] = Y[i] + X[k]")
def serial(start: Any, stop: Any = None, step: Any = None, *, annotations: dict[str, Any] | None = None) -> LoopFrame:
    """Sequential loop, executed by every thread: `for i in T.serial(n)`; bounds as Python's range."""
    return LoopFrame(start, stop, step, "serial", options_from(LoopPlan, annotations))


@example("for k in T.unroll(8):", "    v[k] = X[k]")
def unroll(start: Any, stop: Any = None, step: Any = None, *, explicit: bool = False, unroll_factor: int | None = None,
           annotations: dict[str, Any] | None = None) -> LoopFrame:
    """Unrolled loop.  explicit: expanded in the IR; unroll_factor: partial.  Raises unroll-options for both."""
    explicit = flag(explicit, "explicit")
    if unroll_factor is not None:
        unroll_factor = whole_number(unroll_factor, "unroll_factor", 1, MOST)
    if explicit and unroll_factor is not None:
        raise error("unroll-options", "T.unroll takes explicit or unroll_factor, not both")
    bounds = [x for x in (start, stop, step) if isinstance(x, Expr) and not isinstance(x, Const)]
    if explicit and bounds:
        raise error("unroll-options", "explicit unrolling writes the iterations out: their number must be known before, found "
                    f"{describe(bounds[0])}", "leave explicit out", expected="bounds known while compiling")
    return LoopFrame(start, stop, step, "unroll",
                     options_from(LoopPlan, annotations, explicit=True if explicit else None, factor=unroll_factor))


@example("for k in T.vectorized(4):", "    Y[i * 4 + k] = X[i * 4 + k]")
def vectorized(start: Any, stop: Any = None, *, annotations: dict[str, Any] | None = None) -> LoopFrame:
    """SIMD loop of one thread; the extent should be a vector width."""
    return LoopFrame(start, stop, None, "vectorized", options_from(LoopPlan, annotations))


@example("for i, j in T.Parallel(128, 128):", "    C[by * 128 + i, bx * 128 + j] = acc[i, j] * 2")
def Parallel(*extents: Any, coalesced_width: int | None = None, loop_layout: Any = None,
             prefer_async: bool | None = None, annotations: dict[str, Any] | None = None) -> ParallelFrame:
    """A loop of independent iterations over all combinations of the extents, distributed over the block's threads.

    extents: ints or expressions.  loop_layout: a Fragment over the iteration space that says which thread runs which
    iteration.  coalesced_width: elements of one access.  prefer_async: accepted, no effect (only T.copy becomes asynchronous).

    Two iterations that store different values to one element of global or shared memory are a data race.  The compiler
    rejects the program where it can prove the race (parallel-overwrite).  It cannot where the values are read from memory:
    then a GPU keeps any of the values, the CPU keeps the last, the device simulator reports sim-race, and
    TILELANG_ENABLE_DATA_RACE_CHECK=1 warns.

    An iteration belongs to no particular thread, even with loop_layout, so the body must not use thread indices
    (parallel-thread).  Variables of T.alloc_local and T.alloc_var from outside the loop are temporaries of one iteration:
    the body must set them before it reads them (else parallel-carried), and the program must set them again before it reads
    them after the loop (else parallel-left).
    """
    return ParallelFrame(extents, options_from(
        ParallelPlan, annotations, coalesced_width=coalesced_width, loop_layout=loop_layout,
        prefer_async=None if prefer_async is None else flag(prefer_async, "prefer_async")))


def _check_stages(num_stages: Any) -> None:
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or not 0 <= num_stages <= MOST_STAGES:
        raise error("pipeline-arguments", f"num_stages must be a non-negative integer up to {MOST_STAGES}, got {num_stages!r}",
                    expected=f"an integer from 0 to {MOST_STAGES}")


def Pipelined(start: Any, stop: Any = None, num_stages: int = 0, order: Sequence[int] | None = None,
              stage: Sequence[int] | None = None, sync: Any = None, group: Any = None,
              annotations: dict[str, Any] | None = None) -> LoopFrame:
    """Software pipeline: a sequential loop whose copies run ahead, with num_stages stages of the shared buffers they fill.

    order, stage: one entry per scheduled statement of the body, or per list of `group`, which holds numbers of statements;
    -1 in both leaves copies to the producer, which runs num_stages ahead.  Raises pipeline-arguments, pipeline-annotation.

    Example:
        T.clear(acc)
        for k in T.Pipelined(512 // 64, num_stages=3):
            T.copy(A[by * 128, k * 64], A_s)
            T.copy(B[k * 64, bx * 128], B_s)
            T.gemm(A_s, B_s, acc)
    """
    _check_stages(num_stages)
    for name, v in (("order", order), ("stage", stage)):
        if v is not None and (not isinstance(v, (list, tuple)) or not all(isinstance(x, int) for x in v)):
            raise error("pipeline-arguments", f"`{name}` of T.Pipelined must be «a list of integers», got {v!r}")
    for name, legacy in (("sync", sync), ("group", group)):
        if legacy is not None and not isinstance(legacy, (list, tuple)):
            raise error("pipeline-arguments", f"`{name}` of T.Pipelined must be «a list», got {legacy!r}")
    if order is not None and len({x for x in order if x != -1}) != sum(x != -1 for x in order):
        raise error("pipeline-arguments", f"two statements have the same order in ‹{list(order)}›",
                    expected="a different order for each statement")
    if order is not None and stage is not None and len(order) != len(stage):
        raise error("pipeline-arguments", f"pipeline annotation size: order has {len(order)} entries, stage ‹{len(stage)}›",
                    expected=f"{len(order)} stages")
    if isinstance(start, int) and isinstance(stop, int) and 0 < stop <= start:
        warn("empty-pipeline", f"T.Pipelined({start}, {stop}) runs from {start} to {stop}: no iteration",
             f"T.Pipelined({start}, num_stages={num_stages or stop}) has {start} iterations",
             span=need_builder("T.Pipelined").here())
    if num_stages == 0 and stage is None:
        return LoopFrame(start, stop, None, "serial", options_from(LoopPlan, annotations))
    return LoopFrame(start, stop, None, "pipelined",
                     options_from(LoopPlan, annotations, num_stages=num_stages, order=order or None, stage=stage or None,
                                  group=group if stage else None))


def Persistent(domain: Sequence[Any], wave_size: Any, index: Any, group_size: Any = 8, num_stages: int = 0, *,
               annotations: dict[str, Any] | None = None) -> PersistentFrame:
    """Loop over tiles for a persistent launch: one variable per dimension of the domain.  Each wave runs `wave_size` tiles,
    one per block.

    num_stages: as of T.Pipelined, over the tiles, where the last dimension is a multiple of its group of group_size.
    Raises pipeline-arguments.

    Example:
        for m, n in T.Persistent([4, 4], 132, bx):   # the grid has 132 blocks
            T.copy(A[m * 128, n * 128], acc)
    """
    _check_stages(num_stages)
    return PersistentFrame(domain, wave_size, index, group_size,
                           options_from(LoopPlan, annotations, num_stages=num_stages or None))


@example("for r, c in T.grid(4, 8):", "    C[r, c] = 0")
def grid(*extents: Any) -> GridFrame:
    """Nested serial loops."""
    return GridFrame(extents)


@example("for j in T.parallel(128):", "    x_s[j] = X[bx * 128 + j]")
def parallel(start: Any, stop: Any = None, *, annotations: dict[str, Any] | None = None) -> ParallelFrame:
    """One-dimensional T.Parallel over start .. stop - 1, or 0 .. start - 1."""
    if stop is None or is_const(convert(start), 0):
        return ParallelFrame((start if stop is None else stop,), options_from(ParallelPlan, annotations))
    first, end = loop_bound(start, "the start of a loop"), loop_bound(stop, "the end of a loop")
    return ParallelFrame((binary("sub", end, first),), options_from(ParallelPlan, annotations), first)


@example("for k in T.serial(8):", "    if X[k] < 0:", "        T.loop_break()")
def loop_break() -> None:
    """Leave the innermost loop."""
    ControlFlow(need_builder("T.loop_break")).break_()


def continue_loop() -> None:
    """Next iteration of the innermost loop.

    Example:
        for k in T.serial(8):
            if X[k] < 0:
                T.continue_loop()
            Y[k] = X[k]
    """
    ControlFlow(need_builder("T.continue_loop")).continue_()


Serial, Unroll, Vectorized, break_loop = serial, unroll, vectorized, loop_break
