"""`flex_attention` and `create_block_mask`: attention with functions of the scores and of the mask."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.errors import error
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..arrays import empty, is_numpy, type_name
from ..caches import Cache
from .flex_kernels import MOST_TENSORS, FlexForm, ScoreMod, flex_kernel
from .form import AttentionForm, Tile
from .inputs import check_gradient, check_scale, check_tensors, compact_copy, device_of, running_on
from .problem import AttentionProblem, Mask, attention_problem
from .tile_cost import machine_of

KERNELS: Cache[JITKernel] = Cache(256)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask by blocks of queries and keys, made by create_block_mask.

    mask_mod: the function. sizes: (queries, keys). block: rows and keys of a block. blocks: int32 (batch or 1, heads or 1, rows
    of blocks, most blocks + 1): for each row the number n of blocks that it sees, then for each of these twice its number, plus
    one where the mask hides part of it. tensors: what mask_mod reads.
    """

    mask_mod: ScoreMod
    sizes: tuple[int, int]
    block: tuple[int, int]
    blocks: Any
    tensors: tuple[Any, ...] = ()

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
    blocks = np.zeros((batch, heads, down, 1 + int((codes > 0).sum(-1).max(initial=0))), np.int32)
    for at in np.ndindex(batch, heads, down):
        shown = np.concatenate([np.flatnonzero(codes[at] == 1), np.flatnonzero(codes[at] == 2)])  # those in part come last
        blocks[at][0], blocks[at][1:len(shown) + 1] = len(shown), 2 * shown + (codes[at][shown] == 2)
    lists = blocks if device is None else xp.from_numpy(blocks).to(device)
    return BlockMask(mask_mod, (seq_q, seq_k), (rows, keys), lists, tuple(tensors))


def flex_attention(q: Any, k: Any, v: Any, *, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
                   tensors: tuple[Any, ...] = (), scale: float | None = None, return_lse: bool = False, layout: str = "bshd",
                   target: Any = None) -> Any:
    """Attention whose scores any function changes, and whose mask any function gives.

    score_mod(score, b, h, q, k, *tensors): the changed score, an expression of the language (`30 * T.tanh(score / 30)`,
    `score + slopes[h] * (k - q)`). score: float32, scale * q k^T; b, h, q, k: numbers of the batch, the query head, the query
    and the key, from 0. block_mask: a mask of create_block_mask for seq_q and seq_k; blocks that are hidden take no time, and
    only those hidden in part call its function. tensors: up to 2 arrays that the functions read by index; a block mask made
    with tensors brings its own, which must then be these.

    q, k, v, layout ("bshd" or "bhsd"), scale, return_lse, target: as flash_attention takes them. The bound of its error holds
    with the error of the changed scores added. Each pair of functions and shapes compiles a kernel, so pass the same function
    objects again. A query that sees no key gives 0 and the logarithm -inf.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> import tilelang.language as T
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 4, 64)).astype(np.float16)
    >>> flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: 30.0 * T.tanh(score / 30.0)).shape
    (1, 100, 4, 64)
    """
    tensors = tuple(tensors) or (block_mask.tensors if block_mask is not None else ())
    named = {f"tensors[{n}]": x for n, x in enumerate(tensors)}
    check_tensors("flex_attention", {"q": q, "k": k, "v": v, **named}, ("q", "k", "v"))
    if not is_numpy(q):
        check_gradient("flex_attention", q, k, v)
    where, backend, sms = running_on(q, target)
    none = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "out"))
    problem = attention_problem({"q": q, "k": k, "v": v, **none}, where.is_cuda, causal=False, window=None, layout=layout,
                                scale=None if scale is None else check_scale(scale), with_lse=return_lse)
    _check(problem, block_mask, tensors, q)
    out, lse = empty(q, problem.shapes[3], problem.dtype), empty(q, problem.lse_shape if return_lse else (1,), "float32")
    if problem.empty:
        out[...], lse[...] = 0, -math.inf
        return (out, lse) if return_lse else out
    lists = empty(q, (1, 1, 1, 1), "int32") if block_mask is None else block_mask.blocks
    block = None if block_mask is None else block_mask.block
    plain = AttentionForm(problem.sizes, problem.strides, problem.layout, problem.dtype, Mask(),
                          _tile(machine_of(where, sms, problem.dtype).kind, problem, block), return_lse, problem.scale)
    form = FlexForm(plain, score_mod, None if block_mask is None else block_mask.mask_mod, block,
                    tuple(int(n) for n in lists.shape),  # type: ignore[arg-type]
                    tuple((tuple(int(n) for n in x.shape), type_name(x)) for x in tensors))
    kernel = KERNELS.made((form, where, backend), lambda: compile(
        flex_kernel(form), target=where, execution_backend=backend, pass_configs=_configs(where)))
    arrays = (compact_copy(x) if c else x for x, c in zip((q, k, v), problem.copied))
    unused = [empty(q, (1,), "float32")] * (MOST_TENSORS - len(tensors))
    kernel(*arrays, lists, *tensors, *unused, out, lse)
    return (out, lse) if return_lse else out


def _configs(target: Target) -> dict[str, Any]:
    """No fast math: its tanh is too coarse for a softcap, and functions of scores have shorter forms of their own."""
    return {"tl.enable_hopper": True} if target.is_cuda and target.has_wgmma else {}


def _tile(kind: str, p: AttentionProblem, block: tuple[int, int] | None) -> Tile:
    """The tile: it divides a block of the mask."""
    rows, keys = block or (128, 128)
    wide = max(p.sizes.dim, p.sizes.dim_v) > 128
    if kind == "wgmma" and rows % 128 == 0 and p.sizes.seq_q > 64:
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
    if len(tensors) > MOST_TENSORS or any(device_of(x) != device_of(q) for x in tensors):
        raise error("attention-option", f"tensors must be at most {MOST_TENSORS}, on the device of q",
                    expected=f"up to {MOST_TENSORS} tensors on {device_of(q)}", found=f"{len(tensors)}", hint="join them")


__all__ = ["BlockMask", "create_block_mask", "flex_attention"]
