"""`flash_attention_backward`: the gradients of flash_attention, for torch tensors and NumPy arrays."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from math import ceil
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error
from tilelang.target.machine import MAX_GRID, MOST_REGISTERS, consumer_registers

from ..arrays import compact, compact_copy, contiguous, empty, in_chunks, is_numpy, maker, sum_into, type_name, zeros
from ..caches import Cache, Prepared, enter, known
from ..place import Place, dynamic_shapes
from .backward_kernels import dense_backward, packed_backward
from .build import any_sizes, boxed, symbolic, symbolic_functions, symbolic_strides
from .dropout import check_dropout, seed_of_piece
from .form import DROPPING, FACTS, LOG2E, PLAIN, AttentionForm, BackwardForm, ScoreFunctions, Tile
from .inputs import UNIT, check_alike, check_scale, check_tensors, fast_kernel, running_on, strides_of
from .problem import AttentionProblem, Mask, Sizes, attention_problem, boxes, opened
from .tile_cost import GROUP, Machine, machine_of

_MASKED = 96  # columns up to which whole boxes gain nothing where a mask leaves blocks few steps
STORED = 2 << 30  # bytes of the gradients of scores that a call stores at most
STORED_COLUMNS = 192  # of q and v, from which on two more GEMMs take longer than that
OWN_QUERIES = 16384  # the most of a kernel of one length: verify_sync does not follow the loops of twice as many
FEW_STEPS = 6400  # queries of all heads of a kv head up to which a block of keys takes less time than copies of the keys
WIDE = 2048  # keys of a window with which blocks of 256 queries cost less than what they store besides (0.83 ms for 0.75)
LONG = 2048  # tokens of a mean packed sequence from which on blocks of 256 queries are taken
STAGED = 160 * 1024  # bytes of stages of a block that reads them
ROUGHLY_TWO = 1.9  # blocks for each SM with which long and short ones make up for each other
_BESIDE = 16  # registers beside accumulated and scores, as measured by compiling: addresses, loop state
_NAMES = "q", "k", "v", "out", "lse", "grad_out", "grad_lse", "cu_seqlens_q", "cu_seqlens_k", "sinks", "seed"
_RUNS: Cache[Prepared] = Cache(1024)


def flash_attention_backward(q: Any, k: Any, v: Any, out: Any, lse: Any, grad_out: Any, *, grad_lse: Any = None,
                             causal: bool = False, scale: float | None = None,
                             window: int | tuple[int | None, int | None] | None = None, cu_seqlens_q: Any = None,
                             cu_seqlens_k: Any = None, layout: str = "bshd", deterministic: bool | None = None,
                             target: Any = None, sinks: Any = None, dropout: float = 0.0, seed: Any = None) -> tuple[Any, ...]:
    """The gradients of q, k and v, in their shapes and types, contiguous; with sinks also theirs.

    out, lse: what flash_attention has returned for the same arguments with return_lse=True; lse is float32, of float64 float64.
    grad_out: like out. grad_lse: of lse, or None. q, k, v (float16, bfloat16, float32; float64 on the CPU), causal, scale,
    window, cu_seqlens_q, cu_seqlens_k, layout, target, sinks, dropout: as flash_attention takes them; seed: the one that it
    took. Autograd calls this function.

    deterministic: True: blocks of queries compute dQ, and the results are the same bits for the same inputs. False: dQ is added
    up by atomics in float32, in any order. None: True on a GPU with wgmma, where that takes less time, and where
    torch.use_deterministic_algorithms is on.

    Memory beside the results: 8 bytes for each query and head; with atomics 8 + 4 dim. On a GPU with wgmma, in 16 bits with 192
    columns of q and v together, up to 2 GiB more while the call runs: the gradients of the scores of as many heads as fit there
    (2 seq_q seq_k bytes for each query head of a kv head: 32768 queries and keys of one), in a launch for so many. Packed
    sequences, whose lengths the host does not know, need 2 tokens_q tokens_k bytes and a little more for each head, of 2.25
    GiB, for up to 16384 tokens. Elsewhere they are computed twice. Nothing is read on the host, so that calls can be captured
    in a CUDA graph. Packed sequences: tokens of no sequence have the gradient 0.
    Error: weights, and the gradients of scores, are rounded to the type of q before the GEMMs, which accumulate in float32; in
    tests it is below 1.5 times that of torch's formulas in the same type. float32 on a GPU: GEMMs in tf32.
    The first lengths, up to 16384 queries, have a kernel of their own, others share one, as in flash_attention, with wgmma one
    that stores these gradients and one that does not; their bits can differ.
    Raises attention-argument, attention-shape, attention-option.

    >>> import numpy as np
    >>> from tilelang.library import flash_attention
    >>> q, k, v, g = np.random.default_rng(0).standard_normal((4, 1, 100, 4, 64)).astype(np.float16)
    >>> out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    >>> [x.shape for x in flash_attention_backward(q, k, v, out, lse, g, causal=True)]
    [(1, 100, 4, 64), (1, 100, 4, 64), (1, 100, 4, 64)]
    """
    scale = None if scale is None else check_scale(scale)
    drop, seed = check_dropout(dropout, seed, q) if dropout else (0, None)
    found = gradients((q, k, v, out, lse, grad_out, grad_lse, cu_seqlens_q, cu_seqlens_k, sinks, seed), causal=causal,
                      window=window, layout=layout, drop=drop, scale=scale, deterministic=deterministic, target=target)
    return found if sinks is not None else found[:3]


def gradients(arrays: tuple[Any, ...], results: tuple[Any, ...] | None = None, *, scale: float | None,
              deterministic: bool | None, target: Any, **masks: Any) -> tuple[Any, ...]:
    """flash_attention_backward of `arrays`, as _NAMES names them. results: contiguous tensors for the gradients, and for those
    of sinks where there are some; None: new ones. masks: causal, window, layout, drop."""
    torch = sys.modules.get("torch")
    if deterministic is None and torch is not None and torch.are_deterministic_algorithms_enabled():
        deterministic = True
    options = *masks.values(), scale, deterministic, str(target)
    answer = known(_RUNS, arrays, options)
    if answer is None:
        answer = enter(_RUNS, arrays, options, _prepare(dict(zip(_NAMES, arrays)), target, deterministic, scale=scale, **masks))
    made: tuple[Any, ...] = answer.result() if results is None else results
    answer.run(arrays, answer.scale if scale is None else scale, made)
    return made


def _prepare(tensors: dict[str, Any], target: Any, deterministic: bool | None, **options: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel."""
    check_tensors("flash_attention_backward", tensors, ("q", "k", "v", "out", "grad_out"), _NAMES[6:], double=True)
    q = tensors["q"]
    at = running_on(q, target)
    given = {**{n: tensors.get(n) for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks")}, "out": None}
    p = opened(attention_problem(given, at.target.is_gpu, with_lse=tensors["grad_lse"] is not None, dynamic=dynamic_shapes(),
                                 unit=UNIT, **options), at, "backward", deterministic, most=OWN_QUERIES)
    if not p.packed and p.sizes.batch > MAX_GRID[2]:
        make = [maker(q, s, p.dtype) for s in p.shapes[:3]] + [maker(q, (p.sizes.heads,), p.accum)] * p.sinks
        return Prepared(_by_chunks(target, deterministic, options), lambda: tuple(m() for m in make), scale=p.default_scale)
    return prepared(p, tensors, at, deterministic, PLAIN if p.packed or not p.drop else DROPPING)


def _by_chunks(target: Any, deterministic: bool | None, options: dict[str, Any]) -> Callable[..., None]:
    """A function as `prepared` gives it, for more sequences than a grid has blocks along z."""
    def run(arrays: tuple[Any, ...], scale: float, made: tuple[Any, ...], extra: Any = None) -> None:
        number = count()

        def some(*cut: Any) -> None:
            found = gradients((*cut[:7], *arrays[7:10], seed_of_piece(arrays[10], next(number))), target=target,
                              deterministic=deterministic, **{**options, "scale": scale})
            for x, g in zip(cut[7:], found):
                x[...] = g
            for x, g in zip(made[3:], found[3:]):  # of sinks
                x += g

        for x in made[3:]:
            x[...] = 0
        in_chunks(some, MAX_GRID[2], *arrays[:7], *made[:3])

    return run


def prepared(p: AttentionProblem, tensors: dict[str, Any], at: Place, deterministic: bool | None,
             functions: ScoreFunctions = PLAIN) -> Prepared:
    """The answer to calls with a checked problem: run(arrays, scale, gradients, lists and tensors of functions or None)."""
    check_results(p, tensors)
    q = tensors["q"]
    subgroups = subgroups_of(p, machine_of(at.target, at.sms, p.dtype), at.target.limits.sm_count, deterministic)
    if subgroups > 1:
        return _in_subgroups(p, tensors, at, deterministic, functions, subgroups)
    form, copied = backward_form(p, machine_of(at.target, at.sms, p.dtype), tensors, at, deterministic, functions)
    compiled = form if form is None or not (p.packed or p.dynamic) else any_lengths(form, p)
    make = [maker(q, s, p.dtype) for s in p.shapes[:3]] + [maker(q, (p.sizes.heads,), p.accum)] * p.sinks
    if form is None:
        return Prepared(_nothing, lambda: tuple(m() for m in make), scale=p.default_scale)
    sms = at.target.limits.sm_count if at.target.has_wgmma else 1
    # Behind blocks that store gradients of scores, blocks that wait on their SMs took 0.7 % of a call, elsewhere they save 1 %.
    kernel = (fast_kernel if functions in (PLAIN, DROPPING) else Place.kernel)(
        at, _program, compiled, sms, enable_pdl=at.target.has_wgmma and not form.stored or None)
    *shapes, total = _workspace(form, p)
    unused, workspace = empty(q, (1,), form.accum), [maker(q, *x) for x in shapes]
    never = empty(q, *total) if total[0] == (1, 1, 1) else None  # the sum of dQ, where blocks of queries compute it
    workspace.append(maker(q, *total) if never is None else lambda: never)
    none = [zeros(q, (1, 1, 1, 1), "int32")] * 2 + [zeros(q, (1,), "float32")] * 2
    no_seed = zeros(q, (1,), "int64")
    pairs = (1 if p.packed else p.sizes.batch) * p.sizes.kv_heads

    def run(arrays: tuple[Any, ...], scale: float, gradients: tuple[Any, ...], extra: Any = None) -> None:
        *inputs, lse, grad_out, grad_lse, cu_q, cu_k, sinks, seed = arrays
        read = (*inputs, grad_out)
        if any(copied):
            read = tuple(compact_copy(x) if c else x for x, c in zip(read, copied))
        if cu_q is not None:
            extra = cu_q, cu_q if cu_k is None else cu_k, no_seed if seed is None else seed
        elif seed is not None:
            extra = *none[:2], seed, none[3]
        made = [m() for m in workspace]
        if sinks is not None:  # slots of packed sequences that stay unused
            made[-3][...], made[-2][...] = math.inf, 0
        of_rows = contiguous(lse), unused if grad_lse is None else contiguous(grad_lse)
        for first in range(0, pairs, form.stored or pairs):
            kernel(*read, *of_rows, scale, first, *(extra or none), *made, *gradients[:3])
        if sinks is not None:
            gradients[3][...] = _of_sinks(sinks, *made[-3:-1])

    return Prepared(run, lambda: tuple(m() for m in make), scale=p.default_scale)


def subgroups_of(p: AttentionProblem, machine: Machine, sms: int, deterministic: bool | None) -> int:
    """In how many subgroups the query heads of a kv head are taken, so that there are blocks of keys for all SMs, and long ones
    and short ones make up for each other."""
    z = p.sizes
    if machine.kind != "wgmma" or p.packed or p.empty or deterministic is False or z.heads * z.seq_q < FEW_STEPS * z.kv_heads:
        return 1
    group, blocks = z.heads // z.kv_heads, ceil(z.seq_k / 128) * z.batch * z.kv_heads
    return min((n for n in range(1, group + 1) if group % n == 0 and n * blocks >= ROUGHLY_TWO * sms), default=group)


def _in_subgroups(p: AttentionProblem, tensors: dict[str, Any], at: Place, deterministic: bool | None,
                  functions: ScoreFunctions, subgroups: int) -> Prepared:
    """`prepared` with copies of each kv head for subgroups of its query heads, whose gradients are added up."""
    axis, z = 2 if p.layout == "bshd" else 1, p.sizes
    shapes = [(*s[:axis], s[axis] * subgroups, *s[axis + 1:]) for s in p.shapes[1:3]]
    wide = replace(p, sizes=z._replace(kv_heads=z.kv_heads * subgroups), shapes=(p.shapes[0], *shapes, p.shapes[3]),
                   strides=(p.strides[0], *map(compact, shapes), p.strides[3]), copied=(p.copied[0], False, False))
    q = tensors["q"]
    inner = prepared(wide, tensors, at, deterministic, functions)
    make = [maker(q, s, p.dtype) for s in p.shapes[:3]] + [maker(q, (z.heads,), p.accum)] * p.sinks
    wider = [maker(q, s, p.dtype) for s in shapes]

    def run(arrays: tuple[Any, ...], scale: float, gradients: tuple[Any, ...], extra: Any = None) -> None:
        kv = [np.repeat(x, subgroups, axis) if is_numpy(x) else x.repeat_interleave(subgroups, axis) for x in arrays[1:3]]
        found = [m() for m in wider]
        inner.run((arrays[0], *kv, *arrays[3:]), scale, (gradients[0], *found, *gradients[3:]), extra)
        for x, to in zip(found, gradients[1:3]):
            sum_into(to, x.reshape(*x.shape[:axis], z.kv_heads, subgroups, *x.shape[axis + 1:]), axis + 1)

    return Prepared(run, lambda: tuple(m() for m in make), scale=p.default_scale)


def _of_sinks(sinks: Any, logs: Any, delta: Any) -> Any:
    """The gradients of sinks. logs, delta: (batch * heads, rows): facts of rows, in the order of batches."""
    exp2 = np.exp2 if is_numpy(logs) else sys.modules["torch"].exp2
    weights = exp2(sinks[None, :, None] * LOG2E - logs.reshape(-1, sinks.shape[0], logs.shape[1]))
    return -(weights * delta.reshape(weights.shape)).sum(2).sum(0)


def _nothing(arrays: Any, scale: float, gradients: Any, extra: Any = None) -> None:
    """The answer where there are no queries or no keys: logarithms are sinks then."""
    for x in gradients:
        x[...] = 0
    if len(gradients) > 3 and arrays[6] is not None:
        gradients[3][...] = arrays[6].sum((0, 2) if arrays[6].ndim == 3 else 1)


def check_results(p: AttentionProblem, tensors: dict[str, Any]) -> None:
    """Raises attention-shape unless out, lse and their gradients are those of a problem."""
    q, accum = tensors["q"], p.accum
    check_alike(q, {n: tensors[n] for n in ("out", "grad_out")})
    for name, shape, element in (("out", p.shapes[3], p.dtype), ("grad_out", p.shapes[3], p.dtype), ("lse", p.lse_shape, accum),
                                 ("grad_lse", p.lse_shape, accum)):
        x = tensors[name]
        if x is not None and (tuple(x.shape) != tuple(shape) or type_name(x) != element):
            raise error("attention-shape", f"{name} is {type_name(x)} of shape {tuple(x.shape)}, expected «{element} "
                        f"{tuple(shape)}»", found=f"{type_name(x)} {tuple(x.shape)}",
                        hint="pass what flash_attention has returned with return_lse=True, and gradients like it")


def backward_form(p: AttentionProblem, machine: Machine, tensors: dict[str, Any], at: Place, deterministic: bool | None,
                  functions: ScoreFunctions) -> tuple[BackwardForm | None, list[bool]]:
    """(the form of a checked problem, None where there is nothing to compute; which of q, k, v, out, grad_out are copied)."""
    if p.empty:
        return None, []
    found = [strides_of(tensors[n], at.target.is_gpu and not is_numpy(tensors["q"])) for n in ("out", "grad_out")]
    out, gradient = (s or compact(p.shapes[3]) for s in found)
    fixed = replace(p, strides=(*p.strides[:3], out))
    if deterministic is None:
        deterministic = machine.kind == "wgmma"
    keys, queries = backward_tiles(machine, p, deterministic, functions.block)
    plain = AttentionForm(p.sizes, fixed.strides, p.layout, p.dtype, p.mask, keys, p.with_lse, p.scale, drop=p.drop,
                          columns=p.columns, boxed=boxed(p, machine) and (p.mask == Mask() or max(p.sizes[5:]) > _MASKED))
    copied = [*p.copied, *(s is None for s in found)]
    return fitted(BackwardForm(plain, gradient, queries if deterministic else None, functions), machine, at, p.dynamic), copied


def any_lengths(f: BackwardForm, p: AttentionProblem) -> BackwardForm:
    """The form for any sizes that a problem's kernel may have."""
    plain, steps = (any_sizes(replace(p, strides=(*p.strides[:3], s)), f.plain.tile) for s in (f.plain.strides[3], f.steps))
    plain = replace(plain, boxed=f.plain.boxed)
    return replace(f, plain=plain, steps=steps.strides[3], stored=-1 if f.stored else 0, functions=f.functions.opened,
                   rows_held=False)


def fitted(f: BackwardForm, machine: Machine, at: Place, opened: bool = False) -> BackwardForm:
    """The form with what fits the registers of a machine in registers, and the gradients of scores in memory where that takes
    less time. opened: as stored_form takes it."""
    if machine.kind != "wgmma" or f.dtype == "float32":
        return f
    # Functions, descriptions and dropout take registers too. Where these did not suffice, ptxas of CUDA 13.0 wrote over the K
    # that the next iteration reads: dK and dV of 64 columns were wrong from the second tile of queries on.
    plain = f.rule is None and f.functions == PLAIN and not f.plain.drop
    f = replace(f, held=plain and _held(f.plain.tile, f.sizes.dim + f.sizes.dim_v))
    if f.held and f.query is not None and not opened and not f.packed:  # steps modulo 4 take fewer instructions than modulo 3
        f = replace(f, plain=replace(f.plain, tile=replace(f.plain.tile, stages=4)), query=replace(f.query, stages=4))
    if f.query is None or not all(isinstance(n, int) for n in f.sizes):
        return f
    sms, tile = at.target.limits.sm_count, f.plain.tile
    if tile.keys < 128 and not f.packed:
        across, along = f.functions.block or (128, 128)
        found = _tile(machine, f.sizes, f.dtype, (along, across), f.sizes.dim_v)
        tile = Tile(min(64, found.keys), found.rows, found.stages, found.threads)
        lean = stored_form(replace(f, plain=replace(f.plain, tile=tile), lean=True), sms, opened)
        if (tile.keys, tile.rows) == (128, 64) and lean.stored:
            return lean
    f = stored_form(f, sms, opened)
    return f if f.stores or f.packed or f.plain.drop or f.rule is not None else _finding(f, machine)


def _held(tile: Tile, columns: int) -> bool:
    """Whether K and V of a block of keys, in 16 bits, fit the registers beside what `backward_tiles` counts."""
    used = ceil(tile.keys * (columns + 3 * tile.rows + columns / 2) / tile.threads) + _BESIDE
    return used <= consumer_registers(tile.threads // GROUP)


def _finding(f: BackwardForm, machine: Machine) -> BackwardForm:
    """The form whose blocks of queries compute the facts of their rows where a tile of O fits too, and keep Q and dO where
    they fit the registers beside dQ, scores, their gradients and those in 16 bits."""
    z, tile = f.sizes, f.query
    assert tile is not None
    shared = 2 * ((tile.rows + tile.stages * tile.keys) * sum(f.plain.stored) + tile.rows * z.dim_v) + 2048
    used = ceil(tile.rows * (z.dim + 2.5 * tile.keys + (z.dim + z.dim_v) / 2) / tile.threads) + _BESIDE
    plain = f.functions == PLAIN and f.all_seen  # masks and functions take registers too
    return replace(f, finds=shared <= machine.shared,
                   rows_held=plain and used <= consumer_registers(tile.threads // GROUP))


def stored_form(f: BackwardForm, sms: int, opened: bool = False) -> BackwardForm:
    """The form in which blocks of keys store the gradients of scores, or `f` where there is no room for them, or where scores
    of few columns take less time than these gradients in memory. opened: for a kernel of any lengths, which is the same with
    few blocks and with many.

    A call takes as many pairs of a batch and a kv head as fit STORED bytes, of the numbers that divide all pairs, but fewer
    where that leaves fewer SMs without a block at the end. Packed sequences, of any lengths, need the memory of one of all
    tokens.
    """
    z, tile = f.sizes, f.plain.tile
    pairs, blocks = z.batch * z.kv_heads, ceil(z.seq_k / tile.keys)
    if f.packed:
        pairs, blocks = z.kv_heads, z.seq_k // tile.keys + z.batch
    each = 2 * f.plain.group * blocks * tile.keys * ceil(z.seq_q / 256) * 256
    most = STORED + f.packed * STORED // 8  # tiles of sequences that end inside them
    fits = [(pairs // n * ceil(n * blocks / sms), -n) for n in range(1, pairs + 1) if pairs % n == 0 and n * each <= most]
    waves, n = min(fits, default=(0, 0))
    one_wave = (not opened and f.plain.mask != Mask() and -n < pairs
                and -n * blocks < ROUGHLY_TWO * sms)  # as long as its longest block
    hidden = f.packed and f.plain.mask != Mask()  # measured to take longer, 2,459 for 1,768 us of 16 causal sequences
    many = z.seq_q > OWN_QUERIES and (f.packed or not opened)
    if z.dim + z.dim_v < STORED_COLUMNS or many or one_wave or hidden or not fits or waves > 1.2 * pairs * blocks / sms + 1:
        return f
    mask = f.plain.mask
    narrow = mask.left is not None and mask.right is not None and mask.left + mask.right < WIDE  # stored for whole blocks
    tall = (z.dim <= 192 and f.functions.block is None and not narrow
            and (opened and (z.seq_q <= OWN_QUERIES or mask == Mask())
                 or -n * f.plain.group * z.seq_q >= 256 * ROUGHLY_TWO * sms)
            and (not f.packed or z.seq_q >= LONG * z.batch))
    across = f.functions.block[0] if f.functions.block else 128
    rows = 256 if tall else 128 if across % 128 == 0 else 64  # rows that one list of a mask is for
    return replace(f, query=Tile(rows, 64, min(4, STAGED // (128 * (rows + z.dim))), 256 if rows > 64 else 128), stored=-n)


def backward_tiles(m: Machine, p: AttentionProblem, deterministic: bool,
                   block: tuple[int, int] | None = None) -> tuple[Tile, Tile]:
    """The tiles of a block of keys and of a block of queries. Of those that fit the machine, first those of 64 rows and more
    in a step, then those of two stages, then the tallest.

    deterministic: whether blocks of queries compute dQ. block: rows and keys of a block of a mask, which tiles divide.
    """
    z = p.sizes
    if m.kind == "cpu":
        return Tile(64, 64, 1, 128), Tile(64, 64, 1, 128)
    across, along = block or (128, 128)
    keys = _tile(m, z, p.dtype, (along, across), z.dim + z.dim_v, not deterministic)
    tall = m.kind == "wgmma" and block is None and p.dtype != "float32" and z.dim >= 64  # measured there
    return (Tile(min(64, keys.keys), keys.rows, keys.stages, keys.threads),
            _tile(m, z, p.dtype, (across, along), z.dim, tall=tall))


def _tile(m: Machine, z: Sizes, dtype: str, divided: tuple[int, int], accumulated: int, adds: bool = False,
          tall: bool = False) -> Tile:
    """The tile of a block with `rows` rows, which it keeps, and `keys` of the other side in a step. divided: what they divide.
    accumulated: columns of its results. adds: whether it adds dQ up. tall: three warp groups may have 192 rows, which divide
    nothing."""
    item = 8 if dtype == "float64" else 2  # a machine for float32 counts its elements as two bytes
    both = sum(map(boxes, z[5:])) if m.kind == "wgmma" else z.dim + z.dim_v
    staged = 3 if dtype == "float32" else 0  # scores that reach the next GEMM through shared memory
    found = []
    sizes = product((128, 64, 32, 16), (128, 64, 32, 16), (2, 1), (256, 128))
    for rows, keys, stages, n in (*((192, 64, s, 384) for s in (2, 1) if tall), *sizes):
        # Registers: results, scores, their gradients, weights. Shared memory: own tiles, stages, what leaves registers.
        used = ceil(rows * (accumulated + 3 * keys) / n) + _BESIDE
        left = staged * rows * keys + (rows * keys + 2 * keys * z.dim if adds else 0)
        shared = item * ((rows + stages * keys) * both + left) + 2048
        most = consumer_registers(n // GROUP) if m.kind == "wgmma" else MOST_REGISTERS
        divides = (tall or divided[0] % rows == 0) and divided[1] % keys == 0
        if divides and used <= most and shared <= m.shared and rows * keys >= 4 * n:
            found.append((keys < 64, stages == 1, -rows, abs(n - 2 * rows), -keys, Tile(rows, keys, stages, n)))
    return min(found, key=lambda x: x[:-1])[-1] if found else Tile(16, 16, 1, 128)


def _workspace(f: BackwardForm, p: AttentionProblem) -> list[tuple[tuple[int, ...], str]]:
    """(shape, element type) of each workspace tensor of a kernel for a problem."""
    z, unit = p.sizes, f.unit
    if p.packed:
        slots = z.seq_q // unit + z.batch
        rows, padded = z.heads, slots * unit
        called = f.stored or z.kv_heads
        tiles = [((n * called, FACTS), "int32") for n in (z.seq_k // f.plain.tile.keys + z.batch, slots * f.plain.group)]
    else:
        rows, padded, tiles = z.batch * z.heads, ceil(z.seq_q / unit) * unit, []
    total = (f.dq_workspace[1], f.dtype) if f.stored else ((rows, padded, z.dim) if f.query is None else (1, 1, 1), f.accum)
    return [*tiles, *(((rows, padded), f.accum),) * 2, total]


def _program(f: BackwardForm, sms: int) -> Any:
    """The program of a form, whose sizes and strides that are None are given by each call."""
    f = symbolic_backward(f)
    return packed_backward(f, sms) if f.packed else dense_backward(f)


def symbolic_backward(f: BackwardForm) -> BackwardForm:
    """The form with symbols in place of what each call gives."""
    return replace(f, plain=symbolic(f.plain), steps=symbolic_strides("g", f.steps), functions=symbolic_functions(f.functions),
                   stored=T.dynamic("pairs") if f.stored == -1 else f.stored)
