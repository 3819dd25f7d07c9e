"""`flex_attention` and `create_block_mask`: attention with functions of the scores and of the mask."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import Binary, Call, Cast, Const, Expr, Span, Var, const, dtype, substitute
from tilelang.jit.captured import Captured, Token

from ..arrays import SEQUENCES, compact_copy, contiguous, empty, is_numpy, maker, type_name, zeros
from ..autograd import Function, Numbered, Results, Step, direct
from ..caches import Cache, Prepared, enter, known
from ..place import Place, target_text
from .backward import OWN_QUERIES, prepared
from .build import any_sizes, boxed, symbolic, symbolic_functions
from .form import LOG2E, AttentionForm, ScoreFunctions, Tile
from .inputs import check_gradient, check_scale, check_tensors, device_of, running_on, with_whole_heads
from .kernels import absorb, finish, hide_keys, leading, reset, working_set
from .problem import AttentionProblem, Mask, attention_problem, opened
from .tile_cost import machine_of

ScoreMod = Callable[..., Any]
MOST_TENSORS = 2
_FUNCTIONS = Captured(None)
_MASKS = Numbered()  # masks without arrays


def state_of(function: ScoreMod | None) -> Token | None:
    """Stands for a function and the values that it reads now: globals and closures change between calls."""
    return None if function is None else _FUNCTIONS.argument(function)


@dataclass(frozen=True)
class FlexForm:
    """The parameters that a kernel of flex_attention is compiled for. plain: sizes, strides, tile and scale."""

    plain: AttentionForm
    functions: ScoreFunctions


def flex_program(form: FlexForm) -> Any:
    """The program of a form, whose sizes that are None are given by each call."""
    return flex_kernel(FlexForm(symbolic(form.plain), symbolic_functions(form.functions)))


def flex_kernel(form: FlexForm) -> Any:
    """The kernel with the parameters (Q, K, V, Blocks, X0, X1, O, LSE).

    Blocks[b, h, r]: as BlockMask.blocks. A block of keys is processed in `steps` tiles. Keys behind the last one are hidden.
    """
    f, g, (masks, mask_heads) = form.plain, form.functions, form.functions.rows[:2]
    batch, seq_q, seq_k, heads = f.sizes[:4]
    rows, keys = f.tile.rows, f.tile.keys
    across, along = g.block or (rows, keys)
    steps = along // keys
    grows = None if g.uses[0] else growing(g.score, f.scale)
    c = 1.0 if grows else LOG2E if g.score else f.exponent_scale(f.scale)  # changed scores carry the scale

    @T.macro
    def hide(S, row, key, partly, at, value):
        """Elements that a query does not see become a value."""
        b, h, masking = at
        if g.block is None:
            if isinstance(seq_k, int):
                if seq_k % keys:
                    hide_keys(S, lambda i, j: key + j < seq_k, value)
            else:
                if key + keys > seq_k:
                    hide_keys(S, lambda i, j: key + j < seq_k, value)
        else:
            if partly:
                hide_keys(S, lambda i, j: T.And(key + j < seq_k, g.mask(b, h, row + i, key + j, *masking)), value)

    @T.prim_func
    def flex_attention(Q: f.q, K: f.k, V: f.v, Blocks: T.Tensor(g.rows, "int32"), X0: T.Tensor(*g.tensors[0]),
                       X1: T.Tensor(*g.tensors[1]), O: f.o, LSE: f.lse):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=f.tile.threads) as (bx, h, b):
            Qs, Ks, Vs, S, P, acc, state = working_set(f)
            top, before, factor, total, more = state
            changing, masking = ([(X0, X1)[n] for n in numbers] for numbers in g.uses)
            row = bx * rows
            at = (b if masks > 1 else 0, h if mask_heads > 1 else 0, row // across)
            T.copy(f.rows(Q, b, h, row, rows, True), Qs)
            reset(acc, top, total, c)
            count = T.ceildiv(seq_k, keys) if g.block is None else Blocks[(*at, 0)] * steps
            whole = 0 if g.block is None else Blocks[(*at, 1)]
            for k in T.Pipelined(count, num_stages=f.tile.stages):
                key = k * keys if g.block is None else Blocks[(*at, k // steps + 2)] * along + k % steps * keys
                T.copy(f.rows(K, b, h // f.group, key, keys, True), Ks)
                T.gemm(leading(Qs, f.dim), leading(Ks, f.dim), S, transpose_B=True, clear_accum=True)
                if g.score is not None and grows is None:
                    for i, j in T.Parallel(rows, keys):
                        S[i, j] = checked_score(g.score, S[i, j] * f.scale, b, h, row + i, key + j, *changing)
                hide(S, row, key, k >= whole * steps, (b, h, masking), -math.inf)
                T.copy(f.rows(V, b, h // f.group, key, keys, True), Vs)
                absorb(S, P, acc, state, c, None, None if grows is None else (
                    grows, lambda W, key=key, k=k: hide(W, row, key, k >= whole * steps, (b, h, masking), 0.0)))
                T.gemm(P, leading(Vs, f.dim_v), acc)
            finish(acc, top, total, factor, c)
            T.copy(acc, f.rows(O, b, h, row, rows))
            if f.with_lse:
                T.copy(total, LSE[b, h, row:row + rows])

    return flex_attention


def checked_score(function: ScoreMod, *args: Any) -> Any:
    """A changed score.  Raises attention-option where it is a comparison: scores of 0 and 1 hide no key."""
    changed, code = function(*args), getattr(function, "__code__", None)
    if isinstance(changed, bool) or isinstance(changed, Expr) and str(changed.dtype) == "bool":
        raise error("attention-option", "score_mod returns a comparison, which hides no key", expected="a changed score",
                    found="a bool", span=code and Span(code.co_filename, code.co_firstlineno),
                    hint="a mask is block_mask=create_block_mask(mask_mod, seq_q, seq_k)")
    return changed


_RISING = {"tanh", "exp", "exp2", "sigmoid", "atan", "erf", "sinh", "asinh", "sqrt", "log", "log2", "log1p"}


def growing(score: ScoreMod | None, scale: Any) -> Callable[[Any], Any] | None:
    """The changed score, times log2(e), of an element of Q K^T, where it depends on the score alone and does not fall where the
    score grows; None for other functions."""
    if score is None:
        return None
    x = Var("score", dtype("float32"))
    changed = score(x, *(Var(n, dtype("int32")) for n in "bhqk"))
    if not isinstance(changed, Expr) or _direction(changed, x) != 1:
        return None
    times = scaled_by(T.cast(changed, "float32"), LOG2E)
    return lambda value: substitute(times, {x: value * scale})


def scaled_by(e: Any, c: float) -> Any:
    """e times c: a constant factor of e takes it."""
    if isinstance(e, Binary) and e.op == "mul":
        for a, b in ((e.a, e.b), (e.b, e.a)):
            if isinstance(a, Const):
                return b * const(float(a.value) * c, e.dtype)
    return e * const(c, e.dtype)


def _direction(e: Any, x: Any) -> int | None:
    """1 where e grows with x or stays, -1 where it falls, 0 for a constant, None where neither is known."""
    if isinstance(e, Const):
        return 0
    if e is x:
        return 1
    if isinstance(e, Cast) and e.dtype.is_float:
        return _direction(e.value, x)
    if isinstance(e, Call) and e.op in _RISING:
        return _direction(e.args[0], x)
    if not isinstance(e, Binary):
        return None
    a, b = _direction(e.a, x), _direction(e.b, x)
    if a is None or b is None:
        return None
    if e.op in ("mul", "div") and isinstance(e.b, Const):
        return a * (1 if e.b.value > 0 else -1)
    if e.op == "mul" and isinstance(e.a, Const):
        return b * (1 if e.a.value > 0 else -1)
    b = -b if e.op == "sub" else b
    return (a or b) if e.op in ("add", "sub", "min", "max") and a * b >= 0 else None


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask by blocks of queries and keys, made by create_block_mask.

    mask_mod: the function. sizes: (queries, keys). block: rows and keys of a block. blocks: int32 (batch or 1, heads or 1, rows
    of blocks, 2 + most blocks): for each row the number of blocks that it sees, how many of them are hidden nowhere, and their
    numbers, these ones first. columns: the same for each column of blocks, with numbers of rows. tensors: what mask_mod reads.
    state: of mask_mod when the blocks were made. key: the number of function, sizes and block, as a text, which torch.compile
    compares.
    """

    mask_mod: ScoreMod
    sizes: tuple[int, int]
    block: tuple[int, int]
    blocks: Any
    tensors: tuple[Any, ...] = ()
    state: Token | None = None
    columns: Any = None
    key: str = ""

    @staticmethod
    def made(mask_mod: ScoreMod, sizes: tuple[int, int], block: tuple[int, int], blocks: Any, tensors: tuple[Any, ...],
             columns: Any) -> BlockMask:
        """The mask with the present state of its function."""
        state = state_of(mask_mod)
        bare = BlockMask(mask_mod, sizes, block, None, state=state)
        key = str(_MASKS.number((state, sizes, block), bare))
        return BlockMask(mask_mod, sizes, block, blocks, tensors, state, columns, key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the state, which has code objects: a copy in another process has the function that is there."""
        return BlockMask.made, (self.mask_mod, self.sizes, self.block, self.blocks, self.tensors, self.columns)

    @property
    def density(self) -> float:
        """The part of all blocks that is computed."""
        count = self.blocks[..., 0]
        return float(count.sum()) / (math.prod(count.shape) * max(1, -(-self.sizes[1] // self.block[1])))


def create_block_mask(mask_mod: ScoreMod, seq_q: int, seq_k: int, *, batch: int = 1, heads: int = 1,
                      block: tuple[int, int] = (128, 128), device: Any = None, tensors: tuple[Any, ...] = ()) -> BlockMask:
    """The blocks of keys that each block of queries sees, for flex_attention.

    mask_mod(b, h, q, k, *tensors): whether query q sees key k, by comparisons joined with & and |. It is called here with whole
    arrays of indices, and in the kernel with expressions, where only blocks that are hidden in part need it. batch, heads: 1
    where the mask is the same for all of them. block: multiples of 64. device: of torch; None: NumPy arrays. tensors: arrays
    that mask_mod reads by index. Time and memory grow with seq_q * seq_k, so keep the result for other calls.
    Raises attention-option.

    >>> create_block_mask(lambda b, h, q, k: q >= k, 512, 512).density
    0.625
    """
    rows, keys = block
    if min(rows, keys) < 64 or rows % 64 or keys % 64:
        raise error("attention-option", f"a block of {rows} queries and {keys} keys", found=f"{rows}, {keys}",
                    expected="multiples of 64", hint="leave it out: 128 and 128")
    if min(seq_q, seq_k, batch - 1, heads - 1) < 0:
        found = f"{seq_q} queries, {seq_k} keys, {batch} sequences and {heads} heads"
        raise error("attention-option", f"a block mask of {found}", found=found,
                    expected="numbers of queries and keys, at least 1 sequence and head", hint="q.shape[1], k.shape[1]")
    xp: Any = np if device is None else sys.modules["torch"]
    place = {} if device is None else {"device": device}
    down, across = -(-seq_q // rows), -(-seq_k // keys)
    k = xp.arange(across * keys, **place)[None, :]
    codes = np.zeros((batch, heads, down, across), np.int32)  # 0: nothing to see, 1: all, 2: a part
    for b, h, r in np.ndindex(batch, heads, down):
        q = xp.arange(r * rows, min((r + 1) * rows, seq_q), **place)[:, None]
        inside = (k < seq_k) & (q >= 0)
        sees = inside & mask_mod(b, h, q, xp.where(k < seq_k, k, 0), *tensors)
        seen = sees.reshape(len(q), across, keys).sum((0, 2))
        seen = seen if device is None else seen.cpu().numpy()
        codes[b, h, r] = np.where(seen == 0, 0, np.where(seen == len(q) * keys, 1, 2))
    rows_of, columns_of = (_listed(x) if device is None else xp.from_numpy(_listed(x)).to(device)
                           for x in (codes, codes.swapaxes(2, 3)))
    return BlockMask.made(mask_mod, (seq_q, seq_k), (rows, keys), rows_of, tuple(tensors), columns_of)


def _listed(codes: np.ndarray) -> np.ndarray:
    """The list of each row of blocks."""
    blocks = np.zeros((*codes.shape[:3], 2 + int((codes > 0).sum(-1).max(initial=1))), np.int32)
    for at in np.ndindex(*codes.shape[:3]):
        whole, shown = np.flatnonzero(codes[at] == 1), np.flatnonzero(codes[at] == 2)
        blocks[at][:2 + len(whole) + len(shown)] = [len(whole) + len(shown), len(whole), *whole, *shown]
    return blocks


def flex_attention(q: Any, k: Any, v: Any, *, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
                   tensors: tuple[Any, ...] = (), scale: float | None = None, return_lse: bool = False, layout: str = "bshd",
                   target: Any = None) -> Any:
    """Attention whose scores any function changes, and whose mask any function gives.

    score_mod(score, b, h, q, k, *tensors): the changed score, an expression of the language (`30 * T.tanh(score / 30)`,
    `score + slopes[h] * (k - q)`). score: float32, scale * q k^T; b, h, q, k: numbers of the batch, the query head, the query
    and the key, from 0. block_mask: a mask of create_block_mask for seq_q and seq_k; blocks that are hidden take no time, and
    only those hidden in part call its function. tensors: arrays that score_mod reads by index; 2 with those of the mask.

    q, k, v, layout ("bshd" or "bhsd"), scale, return_lse, target: as flash_attention takes them (float16, bfloat16, float32).
    q, k and v have gradients, as those of flash_attention; the derivative of score_mod is made of expressions, and a function
    without a known one is an error. tensors have none. It is one operator for torch.compile, which reads the functions, and the
    values that they read, when it traces: functions of globals, or made outside of what is compiled. It compares masks and
    engines by content, and functions by identity (torch before 2.13: by code, so captured values must not differ).
    The bound of its error holds with the error of the changed scores added. Each pair of functions, with the values that they
    read, compiles a kernel for the first lengths, and one for all others (of sequences, masks and tensors), whose bits can
    differ. A query that sees no key gives 0 and the logarithm -inf.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> import tilelang.language as T
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 4, 64)).astype(np.float16)
    >>> flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: 30.0 * T.tanh(score / 30.0)).shape
    (1, 100, 4, 64)
    """
    whole = with_whole_heads(lambda q, k, v, scale: flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, tensors=tensors, scale=scale, return_lse=return_lse, layout=layout,
        target=target), q, k, v, scale)
    if whole is not None:
        return whole
    if len(q.shape) == 4 and q.shape[0] > SEQUENCES:
        return in_pieces(lambda q, k, v, first, mask: flex_attention(
            q, k, v, score_mod=counted_from(score_mod, first), block_mask=mask, tensors=tensors, scale=scale,
            return_lse=return_lse, layout=layout, target=target), q, k, v, block_mask)
    read, shown = tuple(tensors), () if block_mask is None else block_mask.tensors
    read += tuple(x for x in shown if not any(x is y for y in read))
    uses = tuple(range(len(tensors))), tuple(next(n for n, y in enumerate(read) if y is x) for x in shown)
    if direct((q, k, v, *read)):
        return attend((q, k, v), read, uses, score_mod, block_mask, target=target, layout=layout, with_lse=return_lse,
                      scale=scale)
    check_gradient("flex_attention for the tensors of a function", *(read or (q.detach(),)))
    lists, mask = (None, None), ""
    if block_mask is not None:
        lists, mask = (block_mask.blocks, block_mask.columns), block_mask.key
        if not sys.modules["torch"].compiler.is_compiling():
            check_state(block_mask)
    number = _number(watched(score_mod), uses, mask + "")
    found = _FUNCTION(q, k, v, *read, *[None] * (MOST_TENSORS - len(read)), *lists, number, scale, layout, target_text(target))
    return found if return_lse else found[0]


def in_pieces(call: Callable[..., Any], q: Any, k: Any, v: Any, mask: BlockMask | None) -> Any:
    """The result of more sequences than a launch takes: of call(q, k, v, number of the first sequence, mask) for pieces."""
    found = []
    if mask is not None:
        check_state(mask)
    for first in range(0, q.shape[0], SEQUENCES):
        cut, shown = slice(first, first + SEQUENCES), None
        if mask is not None:
            lists = [x if x is None or x.shape[0] == 1 else x[cut] for x in (mask.blocks, mask.columns)]
            shown = BlockMask.made(counted_from(mask.mask_mod, first, 0), mask.sizes, mask.block, lists[0], mask.tensors,
                                   lists[1])
        found.append(call(q[cut], k[cut], v[cut], first, shown))
    join = np.concatenate if is_numpy(q) else sys.modules["torch"].cat
    return tuple(map(join, zip(*found))) if isinstance(found[0], tuple) else join(found)


def counted_from(function: ScoreMod | None, first: int, place: int = 1) -> ScoreMod | None:
    """A function of scores or a mask whose argument `place`, the number of a sequence, counts from `first`."""
    if function is None or first == 0:
        return function
    return lambda *args: function(*args[:place], args[place] + first, *args[place + 1:])


def attend(qkv: tuple[Any, Any, Any], read: tuple[Any, ...], uses: tuple[tuple[int, ...], tuple[int, ...]],
           score_mod: ScoreMod | None, mask: BlockMask | None, results: tuple[Any, Any] | None = None, **options: Any) -> Any:
    """flex_attention without a gradient. read: the tensors that functions read; uses: which of them score_mod, and the mask.
    results: contiguous tensors that are written. options: target, layout, with_lse, scale."""
    lists, state = (None, None) if mask is None else (mask.blocks, (state_of(mask.mask_mod), mask.block, mask.sizes))
    arrays, key = (*qkv, *read, lists), (state_of(score_mod), uses, *[str(x) for x in options.values()], state)
    answer = known(_RUNS, arrays, key)
    if answer is None:
        answer = enter(_RUNS, arrays, key, _prepare(qkv, read, uses, score_mod, mask, **options))
    out, lse = results or (answer.result(), answer.logs())
    answer.run(qkv, lists, read, out, lse)
    return (out, lse) if options["with_lse"] else out


_RUNS: Cache[Prepared] = Cache(1024)


def _prepare(qkv: tuple[Any, Any, Any], read: tuple[Any, ...], uses: tuple[tuple[int, ...], tuple[int, ...]],
             score_mod: ScoreMod | None, mask: BlockMask | None, *, target: Any, scale: float | None,
             **options: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel. options: as attention_problem takes them."""
    q = qkv[0]
    at, p = flex_problem(qkv, read, mask, target, scale=scale, **options)
    # In place of the mask's lists, and of tensors that are not given.
    no_lists, *unused = empty(q, (1, 1, 1, 1), "int32"), *[empty(q, (1,), "float32")] * (MOST_TENSORS - len(read))
    block = None if mask is None else mask.block
    functions = functions_of(score_mod, mask, None if mask is None else (mask.blocks, no_lists), read, uses)
    p = opened(p, at, "flex", *functions.family)
    machine = machine_of(at.target, at.sms, p.dtype)
    tile = flex_tile(machine.kind, p, block)
    plain = AttentionForm(p.sizes, p.strides, p.layout, p.dtype, Mask(), tile, p.with_lse, p.scale)
    plain = replace(any_sizes(p, tile) if p.opened else plain, boxed=boxed(p, machine))
    form = FlexForm(plain, functions.opened if p.opened else functions)
    # No fast math: its tanh is too coarse for a softcap, and functions of scores have shorter forms of their own.
    kernel = None if p.empty else at.kernel(flex_program, form)

    def run(qkv: tuple[Any, ...], lists: Any, read: tuple[Any, ...], out: Any, lse: Any) -> None:
        if kernel is None:
            out[...], lse[...] = 0, -math.inf
        else:
            arrays = (compact_copy(x) if c else x for x, c in zip(qkv, p.copied))
            kernel(*arrays, no_lists if lists is None else lists, *map(contiguous, read), *unused, out, lse)

    return Prepared(run, maker(q, p.shapes[3], p.dtype), maker(q, p.lse_shape if p.with_lse else (1,), "float32"))


def functions_of(score_mod: ScoreMod | None, mask: BlockMask | None, lists: tuple[Any, Any] | None, read: tuple[Any, ...],
                 uses: tuple[tuple[int, ...], tuple[int, ...]]) -> ScoreFunctions:
    """The functions of a call. lists: rows and columns of the mask's blocks; None: none. read: the tensors."""
    types = (*((shape_of(x), type_name(x)) for x in read), *[((1,), "float32")] * (MOST_TENSORS - len(read)))
    return ScoreFunctions(score_mod, mask and mask.mask_mod, mask and mask.block,
                          *[(1, 1, 1, 1) if lists is None else shape_of(lists[n]) for n in (0, 1)], types, uses,
                          (state_of(score_mod), mask and state_of(mask.mask_mod)))


def flex_problem(qkv: tuple[Any, ...], read: tuple[Any, ...], mask: BlockMask | None, target: Any, *, scale: float | None,
             **options: Any) -> tuple[Place, AttentionProblem]:
    """Where a call runs, and its checked problem."""
    q, named = qkv[0], {f"tensors[{n}]": x for n, x in enumerate(read)}
    check_tensors("flex_attention", {**dict(zip("qkv", qkv)), **named}, ("q", "k", "v"))
    at = running_on(q, target)
    none = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "out"))
    p = attention_problem({**dict(zip("qkv", qkv)), **none}, at.target.is_gpu, causal=False, window=None,
                          scale=None if scale is None else check_scale(scale), **options)
    _check(p, mask, read, q)
    return at, p


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a tensor, in numbers."""
    return tuple(int(n) for n in x.shape)


def flex_tile(kind: str, p: AttentionProblem, block: tuple[int, int] | None) -> Tile:
    """The tile: it divides a block of the mask. A kernel for any lengths has that of many queries."""
    rows, keys = block or (128, 128)
    wide = max(p.sizes.dim, p.sizes.dim_v) > 128
    if kind == "wgmma" and rows % 128 == 0 and (p.opened or p.sizes.seq_q > 64):
        return Tile(128, 64 if wide or keys % 128 else 128, 2, 256)
    return Tile(64, 64, 1 if wide else 2, 128)


def _check(p: AttentionProblem, mask: BlockMask | None, tensors: tuple[Any, ...], q: Any) -> None:
    z = p.sizes
    if mask is not None:
        counts = tuple(int(n) for n in mask.blocks.shape[:2])
        if mask.sizes != (z.seq_q, z.seq_k) or counts[0] not in (1, z.batch) or counts[1] not in (1, z.heads) or \
                is_numpy(mask.blocks) != is_numpy(q) or device_of(mask.blocks) != device_of(q):
            raise error("attention-shape", f"the block mask is for {mask.sizes[0]} queries and {mask.sizes[1]} keys of "
                        f"{counts[0]} batches and {counts[1]} heads on {device_of(mask.blocks)}",
                        expected=f"{z.seq_q} queries, {z.seq_k} keys, 1 or {z.batch} batches, 1 or {z.heads} heads on "
                        f"{device_of(q)}", found=f"{mask.sizes}, {counts} on {device_of(mask.blocks)}",
                        hint="create_block_mask(mask_mod, seq_q, seq_k, device=q.device)")
        check_state(mask)
    if len(tensors) > MOST_TENSORS or any(device_of(x) != device_of(q) for x in tensors):
        raise error("attention-option", f"tensors must be at most {MOST_TENSORS}, on the device of q",
                    expected=f"up to {MOST_TENSORS} tensors on {device_of(q)}", found=f"{len(tensors)}", hint="join them")


def check_state(mask: BlockMask) -> None:
    """Check that the mask's function reads what it read when the block mask was made.  Raises attention-option."""
    if mask.state is not None and mask.state.value != _FUNCTIONS.argument(mask.mask_mod).value:
        raise error("attention-option", "the mask's function reads other values than when the block mask was made",
                    expected="the values of then", found="a global or closure variable that has changed",
                    hint="call create_block_mask again")


# ---- gradients -------------------------------------------------------------------------------------------------------------

_CALLS = Numbered()  # (score_mod, uses, mask without arrays)
_GRADIENTS: Cache[Prepared] = Cache(1024)


def watched(function: Any) -> Any:
    """A function, whose identity torch.compile compares from now on: of functions it compares the code alone, and of texts
    what an operation has read."""
    return None if function is None else id(function) and function


def without_arrays(key: str) -> BlockMask | None:
    """The mask of BlockMask.key, without arrays; None for no mask."""
    return _MASKS[int(key)] if key else None


def _number(score_mod: Any, uses: Any, mask: str) -> int:
    """The number of a call's functions. torch.compile executes it while it traces, without looking into it."""
    return _CALLS.number((state_of(score_mod), uses, mask), (score_mod, uses, without_arrays(mask)))


_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without torch


def _called(number: int, rows: Any, columns: Any, read: Any) -> tuple[Any, Any, BlockMask | None]:
    """(score_mod, uses, mask) of a call by its number among the operator's arguments."""
    score_mod, uses, mask = _CALLS[number]
    mask = mask and replace(mask, blocks=rows, columns=columns, tensors=tuple(read[n] for n in uses[1]))
    return score_mod, uses, mask


def _forward(q: Any, k: Any, v: Any, first: Any, second: Any, rows: Any, columns: Any, *rest: Any) -> None:
    number, scale, layout, target, *results = rest
    read = tuple(x for x in (first, second) if x is not None)
    score_mod, uses, mask = _called(number, rows, columns, read)
    attend((q, k, v), read, uses, score_mod, mask, tuple(results), target=target, layout=layout, with_lse=True, scale=scale)


def _backward(q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> None:
    first, second, rows, columns, number, scale, layout, target, grad, grad_lse, *results = rest
    read = tuple(x for x in (first, second) if x is not None)
    score_mod, uses, mask = _called(number, rows, columns, read)
    grad = zeros(out, tuple(out.shape), type_name(out)) if grad is None else grad
    arrays = q, k, v, out, lse, grad, grad_lse, *[None] * 4
    key = number, scale, layout, target
    answer = known(_GRADIENTS, (*arrays, *read, rows, columns), key)
    if answer is None:
        at, p = flex_problem((q, k, v), read, mask, target, scale=scale, layout=layout, with_lse=grad_lse is not None)
        tensors = dict(zip(("q", "k", "v", "out", "lse", "grad_out", "grad_lse"), arrays))
        functions = functions_of(score_mod, mask, None if rows is None else (rows, columns), read, uses)
        p = opened(p, at, "flex backward", *functions.family, most=OWN_QUERIES)
        answer = enter(_GRADIENTS, (*arrays, *read, rows, columns), key, prepared(p, tensors, at, None, functions))
    none = [empty(q, (1, 1, 1, 1), "int32")] * 2 if rows is None else [rows, columns]
    answer.run(arrays, answer.scale if scale is None else scale, tuple(results),
               (*none, *map(contiguous, read), *[empty(q, (1,), "float32")] * (MOST_TENSORS - len(read))))


def _results(q: Any, k: Any, v: Any, *rest: Any) -> Results:
    layout = rest[-2]
    shape = (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else q.shape[:3]
    return [((*q.shape[:-1], v.shape[-1]), type_name(q)), (tuple(shape), "float32")]


_OPTIONS = "Tensor? first, Tensor? second, Tensor? rows, Tensor? columns, int call, float? scale, str layout, str? target"
_FUNCTION = Function(
    "flex_attention", Step(f"Tensor q, Tensor k, Tensor v, {_OPTIONS}", _results, _forward, 2),
    Step(f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, Tensor? grad_out, Tensor? grad_lse",
         lambda *args: [(tuple(x.shape), type_name(x)) for x in args[:3]], _backward, 3),
    lambda needs, args, made: (*args[:3], *made, *args[3:]), (0, 1, 2), visible=2)
