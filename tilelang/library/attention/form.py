"""The parameters that attention kernels are compiled for: sizes, strides, mask, tile and work partition."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.ir import const

from ..arrays import accumulator
from .decode_problem import DecodeSizes
from .dropout import LEVELS
from .inputs import UNIT
from .problem import Mask, Sizes, boxes, whole

LOG2E = 1.4426950408889634
FACTS = 8  # integers of a tile of packed sequences: head, first row, the sequence's first query and length, first key and
# number of keys, in a backward pass the number of the sequence; 1 unused


@dataclass(frozen=True)
class Tile:
    """The tile of a block: rows of queries, keys, pipeline stages of K and V, and threads."""

    rows: int = 64
    keys: int = 64
    stages: int = 2
    threads: int = 128


class WorkPartition(NamedTuple):
    """How blocks divide tiles of queries by keys.

    whole: number of first tiles, each computed by one block. rest: number of tiles behind them, each of `steps` tiles of keys;
    every block takes `per_block` of these steps. sms: blocks that run at the same time. rest and steps of a kernel for any
    lengths are None until the kernel's symbols take their place; per_block is 1 then.
    """

    whole: int
    rest: Any
    steps: Any
    per_block: int
    sms: int

    @property
    def cross(self) -> bool:
        """Whether some blocks have splits of two tiles."""
        return self.per_block > 1 and self.rest > 1 and self.steps % self.per_block != 0

    @property
    def splits(self) -> Any:
        """Number of splits in the workspace: first the blocks' first splits, then their second ones. Some places stay unused.
        """
        if self.per_block == 1:
            return self.rest * self.steps
        taking = -(-self.rest * self.steps // self.per_block)
        return self.sms + taking if self.cross else taking

    def place(self, r: Any, j: Any) -> Any:
        """The place in that workspace of block j's split of the r-th divided tile."""
        return T.if_then_else(j * self.per_block // self.steps == r, j, j + self.sms) if self.cross else j


@dataclass(frozen=True)
class AttentionForm:
    """The parameters that a kernel of flash_attention is compiled for.

    sizes: ints, or symbols for sizes known at calls; heads and head dimensions are ints. strides: of Q, K, V and O in elements,
    the last one 1. layout: "bshd" (batch, sequence, head, dim), "bhsd", or "packed" (token, head, dim). scale: factor of the
    scores; None: a parameter of the kernel. partition: None where each tile of queries is computed by one block. sinks: whether
    heads have sinks. drop: bytes of 256 that dropout drops. columns: of the tensors, as in AttentionProblem.
    boxed: whether operands take whole boxes of TMA in shared memory, with columns that no GEMM reads.
    """

    sizes: Sizes
    strides: tuple[tuple[Any, ...], ...]
    layout: str
    dtype: str
    mask: Mask
    tile: Tile
    with_lse: bool
    scale: float | None = None
    partition: WorkPartition | None = None
    sinks: bool = False
    drop: int = 0
    columns: tuple[int, ...] = ()
    boxed: bool = False

    @property
    def extras(self) -> bool:
        """Whether the kernel takes sinks and a seed."""
        return self.sinks or self.drop > 0

    @property
    def sink_tensor(self) -> Any:
        """The parameter Sinks: one logit of each query head, or one element where it is not used."""
        return T.Tensor((self.sizes.heads if self.sinks else 1,), self.accum)

    @property
    def group(self) -> int:
        """Query heads that read one kv head."""
        return self.sizes.heads // self.sizes.kv_heads

    dim = property(lambda self: self.sizes.dim)  # columns of tiles of Q and K
    dim_v = property(lambda self: self.sizes.dim_v)  # columns of tiles of V and of the result
    stored = property(lambda self: tuple(boxes(n) if self.boxed else n for n in self.sizes[5:]))  # dim, dim_v of operands
    accum = property(lambda self: accumulator(self.dtype))  # the type of scores, sums and logarithms

    def exponent_scale(self, scale: Any) -> Any:
        """The factor of the scores in front of exp2. scale: the kernel's parameter."""
        factor = (scale if self.scale is None else self.scale) * LOG2E
        return const(factor, "float64") if self.accum == "float64" and self.scale is not None else factor

    math = property(lambda self: self.dtype)  # the type of the operands of GEMMs

    def _tensor(self, number: int, length: Any, heads: int, dim: int) -> Any:
        dim = self.columns[number > 1] if self.columns else dim
        batch, shape = self.sizes.batch, (length, heads, dim)
        if self.layout != "packed":
            shape = (batch, *shape) if self.layout == "bshd" else (batch, heads, length, dim)
        return T.StridedTensor(shape, self.strides[number], self.dtype)

    # The parameters Q, K, V and O.
    q = property(lambda self: self._tensor(0, self.sizes.seq_q, self.sizes.heads, self.sizes.dim))
    k = property(lambda self: self._tensor(1, self.sizes.seq_k, self.sizes.kv_heads, self.sizes.dim))
    v = property(lambda self: self._tensor(2, self.sizes.seq_k, self.sizes.kv_heads, self.sizes.dim_v))
    o = property(lambda self: self._tensor(3, self.sizes.seq_q, self.sizes.heads, self.sizes.dim_v))

    @property
    def lse(self) -> Any:
        """The parameter LSE: (batch, heads, seq_q), (heads, tokens_q) of packed sequences, or one element where it is not used.
        """
        shape = (self.sizes.heads, self.sizes.seq_q)
        return T.Tensor(((self.sizes.batch, *shape)[self.layout == "packed":]) if self.with_lse else (1,), self.accum)

    def rows(self, X: Any, b: Any, h: Any, start: Any, length: Any, operand: bool = False) -> Any:
        """The region of rows of one head of Q, K, V or O, with the columns of a tile: behind those of the tensor there are
        zeros, and nothing is written. operand: with the columns of shared memory."""
        columns = slice(0, whole(X.shape[-1])) if self.columns else slice(None)
        if operand and self.boxed:
            columns = slice(0, boxes(whole(X.shape[-1])))
        if self.layout == "packed":
            return X[start:start + length, h, columns]
        return X[b, start:start + length, h, columns] if self.layout == "bshd" else X[b, h, start:start + length, columns]


@dataclass(frozen=True)
class ScoreFunctions:
    """The functions of a call of flex_attention, in its backward pass.

    score, mask: the caller's functions, or None. block: rows and keys of a block of the mask; None without a mask. rows,
    columns: the shapes of the mask's lists. tensors: (shape, element type) of the tensors that the functions read. uses: which
    of them score reads, and which mask. states: of both functions, by which forms are compared.
    """

    score: Any = field(default=None, compare=False)
    mask: Any = field(default=None, compare=False)
    block: tuple[int, int] | None = None
    rows: tuple[Any, ...] = (1, 1, 1, 1)
    columns: tuple[Any, ...] = (1, 1, 1, 1)
    tensors: tuple[tuple[tuple[Any, ...], str], ...] = (((1,), "float32"), ((1,), "float32"))
    uses: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    states: tuple[Any, Any] = (None, None)

    @property
    def family(self) -> tuple[Any, ...]:
        """What calls have in common that one kernel may answer."""
        lists = [x[:2] for x in (self.rows, self.columns)]
        return self.block, *lists, tuple((len(shape), kind) for shape, kind in self.tensors), self.uses, self.states

    @property
    def opened(self) -> ScoreFunctions:
        """The functions for lists and tensors of any sizes, which each call gives: None."""
        rows, columns = ((*x[:2], *(None for _ in x[2:])) if self.block else x for x in (self.rows, self.columns))
        return replace(self, rows=rows, columns=columns, tensors=tuple(
            (tuple(n if n == 1 else None for n in shape), kind) for shape, kind in self.tensors))


PLAIN = ScoreFunctions()
DROPPING = ScoreFunctions(tensors=(((1,), "int64"), ((1,), "float32")))  # the first tensor is the seed of dropout


@dataclass(frozen=True)
class BackwardForm:
    """The parameters that a kernel of attention's backward pass is compiled for.

    plain: sizes, strides of Q, K, V and O, mask and scale; its tile is that of a block of keys: `keys` of the block, `rows` of
    queries in a step; with_lse: the logarithms have a gradient too. steps: strides of the gradient of O. query: the tile of a
    block of queries, which computes dQ; None: dQ is added up by atomics. stored: pairs of a batch and a kv head, of packed
    sequences kv heads, that a call computes, whose blocks of keys store the gradients of scores for the blocks of queries, -1
    where each call gives it; 0: a call computes all, and blocks of queries compute them once more. finds: whether these come
    first and compute the facts of their rows. lean: dK is computed of stored gradients too, because blocks of keys have
    registers for dV alone. held, rows_held: whether K and V of a block of keys, and Q and dO of a block of queries, stay in
    registers. rule: what weighs scores (online.Rule); None: a softmax. number: of the rule's description, by which forms are
    compared.
    """

    plain: AttentionForm
    steps: tuple[Any, ...]
    query: Tile | None = None
    functions: ScoreFunctions = PLAIN
    stored: Any = 0
    held: bool = False
    finds: bool = False
    rows_held: bool = False
    lean: bool = False
    rule: Any = field(default=None, compare=False)
    number: int = -1

    stores = property(lambda self: not isinstance(self.stored, int) or self.stored != 0)
    sizes = property(lambda self: self.plain.sizes)
    dtype = property(lambda self: self.plain.dtype)
    accum = property(lambda self: self.plain.accum)
    packed = property(lambda self: self.plain.layout == "packed")
    rest = property(lambda self: const(LEVELS / (LEVELS - self.plain.drop), self.accum))  # factor of what dropout keeps

    @property
    def facts(self) -> tuple[int, int]:
        """Facts of rows: the number of those that weights need, and of those that only gradients of scores need."""
        return (1, 1) if self.rule is None else (self.rule.first, len(self.rule.facts) - self.rule.first)

    def launched(self, each: int) -> tuple[Any, Any]:
        """Two dimensions of a grid that have blocks for the heads of a call, `each` for a kv head."""
        return (each, self.stored) if self.stores else (self.sizes.kv_heads * each, self.sizes.batch)

    def head(self, first: Any, y: Any, z: Any, each: int) -> tuple[Any, Any]:
        """(batch, head) of a block of such a grid. first: as dense_backward takes it."""
        kv_heads = self.sizes.kv_heads
        return ((first + z) // kv_heads, (first + z) % kv_heads * each + y) if self.stores else (z, y)

    @property
    def all_seen(self) -> bool:
        """Whether it is known here that every query sees every key of every tile, as far as positions say."""
        keys = [t.keys for t in (self.plain.tile, self.query) if t is not None]
        return self.plain.mask == Mask() and isinstance(self.sizes.seq_k, int) and all(self.sizes.seq_k % n == 0 for n in keys)

    # The parameters dO, and dQ, dK and dV, which are contiguous.
    gradient = property(lambda self: replace(self.plain, strides=(*self.plain.strides[:3], self.steps)).o)

    def result(self, number: int) -> Any:
        """The parameter dQ, dK or dV: like Q, K or V, contiguous."""
        return T.Tensor((self.plain.q, self.plain.k, self.plain.v)[number].shape, self.dtype)

    def factor(self, scale: Any) -> Any:
        """The factor of the scores, of type accum. scale: the kernel's parameter."""
        return T.cast(scale, self.accum) if self.plain.scale is None else const(self.plain.scale, self.accum)

    @property
    def dq_workspace(self) -> tuple[Any, tuple[Any, ...]]:
        """(element type, shape) of the workspace for what blocks of keys leave for dQ: sums, or the gradients of scores by
        pairs of a call, keys, and the queries of all heads (see stored_column)."""
        z, keys = self.sizes, self.plain.tile.keys
        padded = T.ceildiv(z.seq_q, self.unit) * self.unit
        if self.stores:
            blocks = z.seq_k // keys + z.batch if self.packed else T.ceildiv(z.seq_k, keys)
            return self.dtype, (self.stored, blocks * keys, self.plain.group * padded)
        return self.accum, (z.batch * z.heads, padded, z.dim) if self.query is None else (1, 1, 1)

    @property
    def unit(self) -> int:
        """Rows of a tile of the launches that compute facts of rows; a sequence's facts take a multiple of it."""
        return self.query.rows if self.query else 128


@dataclass(frozen=True)
class DecodeForm:
    """The parameters that a kernel of flash_decode is compiled for.

    strides: of the caches of K and V in elements, the last one 1. kv_dtype: the type of the caches. left: number of keys before
    its own that a query sees; None: all. split: whether several blocks divide the keys of a sequence. latent: whether V is the
    first columns of K. wide: whether GEMMs of narrow caches have a tile's rows as rows, and multiply K in float8.
    planned: whether a plan says what blocks compute. several: whether an SM has room for several blocks of a cache that is not
    narrow. unit: what strides are multiples of.
    """

    sizes: DecodeSizes
    strides: tuple[tuple[Any, ...], ...]
    dtype: str
    left: int | None
    tile: Tile
    split: bool
    with_lse: bool
    kv_dtype: str
    latent: bool = False
    wide: bool = False
    planned: bool = False
    several: bool = False
    unit: int = UNIT
    accum = "float32"
    dim = property(lambda self: self.sizes.columns[0])  # columns of tiles of Q and K
    dim_v = property(lambda self: self.sizes.columns[1])  # columns of tiles of V and of the result
    stored = property(lambda self: self.sizes.columns)  # the same in shared memory

    @property
    def group(self) -> int:
        """Query heads that read one kv head."""
        return self.sizes.heads // self.sizes.kv_heads

    @property
    def narrow(self) -> bool:
        """Whether caches have elements of 8 bits."""
        return self.kv_dtype != self.dtype

    @property
    def columns(self) -> bool:
        """Whether the rows of a tile are columns of accumulators."""
        return self.narrow and not self.wide

    @property
    def terms(self) -> int:
        """Numbers of float8 whose sum is a query."""
        return 3 if self.dtype == "float16" else 2

    @property
    def math(self) -> str:
        """The type of the operands of GEMMs: float16 holds each float8, and takes half the instructions of bfloat16."""
        return "float16" if self.narrow else self.dtype

    @property
    def used(self) -> int:
        """Number of rows, in all tiles of a kv head, that are queries."""
        return self.sizes.seq_q * self.group

    def place(self, table: Any, b: Any, k: Any, length: Any) -> Any:
        """What `rows` takes for tile k of a sequence's keys: its number, in a cache of pages among all of the cache's tiles.
        Where it has several pages, a list of them: behind the sequence's end the last one again."""
        keys, page = self.tile.keys, self.sizes.page_size
        if page is None:
            return k
        if page < keys:
            each, last = keys // page, T.max(length - 1, 0) // page
            return [T.bind(table[b, T.min(k * each + n, last)]) for n in range(each)]
        each = page // keys
        return table[b, k] if each == 1 else table[b, k // each] * each + k % each

    def rows(self, X: Any, b: Any, h: Any, place: Any, columns: slice) -> Any:
        """The region of a tile of keys in a cache, or those of its pages."""
        keys, page = self.tile.keys, self.sizes.page_size
        if page is None:
            return X[b, place * keys:(place + 1) * keys, h, columns]
        if page < keys:
            return [X[at, :, h, columns] for at in place]
        each = page // keys
        return X[place // each, place % each * keys:(place % each + 1) * keys, h, columns]
