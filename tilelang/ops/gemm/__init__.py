"""T.gemm: matrix multiplication of tiles.  Each lowering (mma, wgmma, simt) is a file beside this one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tilelang import errors
from tilelang.ir import (Attrs, Buffer, Expr, Region, Span, Stmt, TileOp, is_const, numpy_dtype, register_literal, replace,
                         seq, tile_op, with_options, DYNAMIC, LOCAL, SHARED, STATIC, FRAGMENT)
from tilelang.target.mma import row as row_of
from tilelang.target.wgmma import WGMMA_ROWS

from ..base import Access, LowerContext
from ..layouts import carried, widest_mma
from .mma import lower_mma
from .select import ACCUMULATORS, GemmWarpPolicy, multiplies, operand_fragments, simt_fragment
from .simt import lower_simt
from .wgmma import GROUP_ROWS, drained, lower_wgmma, wgmma_fragments
from ..plans import GemmSchedule

errors.register("gemm-shape", AssertionError, "operands of a gemm whose shapes do not fit together", "C[M, N] += op(A)[M, K] @ "
                "op(B)[K, N]")
errors.register("gemm-rank", AssertionError, "an operand of a gemm that is not a matrix", "pass (M, K), (K, N) and (M, N) "
                "tiles; slice leading dimensions to one")
errors.register("gemm-scope", ValueError, "an operand of a gemm in a memory scope it cannot be read from",
                "copy the tile to shared memory first", expected="a shared buffer or a fragment")
errors.register("gemm-types", ValueError, "element types no gemm exists for",
                "cast the operands, or choose another accumulator type", expected="element types that have an MMA")


_EXCHANGED = {GemmWarpPolicy.FullRow: GemmWarpPolicy.FullCol, GemmWarpPolicy.FullCol: GemmWarpPolicy.FullRow}


@tile_op("gemm")
class Gemm(TileOp):
    """c[M, N] += op(a) @ op(b), or c = op(a) @ op(b) when clear_accum.

    a: (M, K), or (K, M) if transpose_a.  b: (K, N), or (N, K) if transpose_b.  c: (M, N).  Leading extents are 1.
    a, b: shared or fragment; c: a whole fragment (CPU and SIMT: any of shared, fragment, local).
    clear_accum: bool Expr (run-time allowed).  Accumulates in c's dtype; synchronous.
    """

    a: Region
    b: Region
    c: Region
    transpose_a: bool
    transpose_b: bool
    policy: GemmWarpPolicy
    clear_accum: Expr
    attrs: Attrs = ()
    plan: GemmSchedule = GemmSchedule()
    span: Span | None = None
    sparsity: ClassVar[int] = 1  # columns of op(a) that one stored column stands for

    def check(self) -> None:
        """Check ranks, shapes, scopes and element types."""
        for name, r in (("A", self.a), ("B", self.b), ("C", self.c)):
            self._check_operand(name, r)
        a, b, c = self.a.extents[-2:], self.b.extents[-2:], (self.m, self.n)
        k_a, m_a = a if self.transpose_a else reversed(a)
        k_a *= self.sparsity
        n_b, k_b = b if self.transpose_b else reversed(b)
        if self.repeats:
            m_a = c[0]
        for letter, left, right, x, y in (("M", "M_A", "M_C", m_a, c[0]), ("K", "K_A", "K_B", k_a, k_b),
                                          ("N", "N_B", "N_C", n_b, c[1])):
            if not is_const(x, y):
                raise errors.error(
                    "gemm-shape", f"T.gemm {letter} shape check failed: {left} = {x}, {right} = {y}",
                    expected=f"{left} = {right}", found=f"{x} and {y}", span=self.span,
                    hint=f"A is {tuple(self.a.extents)}{' transposed' if self.transpose_a else ''}, B is "
                    f"{tuple(self.b.extents)}{' transposed' if self.transpose_b else ''}, C is {tuple(self.c.extents)}: they "
                    "are (M, K), (K, N), (M, N); transpose_A=True takes A as (K, M), transpose_B=True takes B as (N, K)")
        da, db, dc = self.a.dtype, self.b.dtype, self.c.dtype
        if not multiplies(da, db, dc):
            if da != db:
                hint = "A and B need one element type"
            elif da in ACCUMULATORS:
                hint = f"accumulators for {da}: {', '.join(ACCUMULATORS[da])}"
            else:
                hint = f"element types of MMAs: {', '.join(ACCUMULATORS)}"
            raise errors.error("gemm-types", f"T.gemm of {da} and {db} into {dc} is not supported",
                               found=f"{da} by {db} into {dc}", span=self.span, hint=hint)

    def _check_operand(self, name: str, r: Region) -> None:
        if len(r.extents) < 2:
            raise errors.error("gemm-rank", f"T.gemm: operand {name} `{r.buffer.name}` has one dimension, a matrix has two",
                               expected="at least two dimensions", found=str(len(r.extents)), span=self.span)
        if not all(is_const(e, 1) for e in r.extents[:-2]):
            raise errors.error("gemm-rank", f"T.gemm: operand {name} `{r.buffer.name}` has extents ‹{tuple(r.extents)}›, all "
                               "but the last two must be 1", expected="1 in all dimensions but the last two", span=self.span)
        if not all(isinstance(e, int) for e in r.extents):
            raise errors.error("gemm-shape", f"T.gemm: the extents ‹{tuple(r.extents)}› of operand {name} `{r.buffer.name}` "
                               "must be known while compiling", expected="extents known while compiling", span=self.span)
        if r.buffer.scope_name not in (STATIC, DYNAMIC, FRAGMENT, LOCAL):
            raise errors.error("gemm-scope", f"T.gemm: operand {name} `{r.buffer.name}` is in {r.buffer.scope_name} memory, a "
                               "shared buffer or fragment is needed",
                               found=f"`{r.buffer.name}` in {r.buffer.scope_name} memory", span=self.span)

    def accesses(self) -> tuple[Access, ...]:
        """a and b are read; c is read and written, or only written when clear_accum is the constant true."""
        mode = "write" if is_const(self.clear_accum, True) else "readwrite"
        return Access(self.a, "read"), Access(self.b, "read"), Access(self.c, mode)

    @property
    def m(self) -> int:
        return self.c.extents[-1 if self.plan.exchanged else -2]

    @property
    def n(self) -> int:
        return self.c.extents[-2 if self.plan.exchanged else -1]

    @property
    def k(self) -> int:
        return self.sparsity * self.a.extents[-2 if self.transpose_a else -1]

    @property
    def by_wgmma(self) -> bool:
        return self.plan.instruction in WGMMA_ROWS

    @property
    def repeats(self) -> bool:
        """Whether a has the rows of one group, in shared memory, which T.wgmma_gemm repeats for all groups of rows of c."""
        return (self.plan.wait == -1 and not self.transpose_a and self.a.buffer.scope_name in SHARED
                and is_const(self.a.extents[-2], GROUP_ROWS) and self.m % 64 == 0)

    def transposed(self) -> Gemm:
        """The same GEMM of the transposed matrices: c holds the transpose of what the operands multiply to."""
        out = replace(self, a=self.b, b=self.a, transpose_a=not self.transpose_b, transpose_b=not self.transpose_a,
                      policy=_EXCHANGED.get(self.policy, self.policy))
        return with_options(out, exchanged=True)

    def reference(self, env: Any) -> None:
        """Computes a @ b in float32 (or wider, or exact integers), adds it to c and rounds once to c's dtype."""
        acc, a, b = self.c.dtype, self.left(env), env.read(self.b)
        b = b.reshape(b.shape[-2:])
        product = widest_mma(a, b.T if self.transpose_b else b, acc)
        product = product.T if self.plan.exchanged else product
        if not bool(env.eval(self.clear_accum)):
            old = env.read(self.c)
            product = product.reshape(old.shape) + old.astype(product.dtype)
        env.write(self.c, product.astype(numpy_dtype(acc)).reshape(env.shape(self.c)))

    def left(self, env: Any) -> Any:
        """op(a)."""
        a = env.read(self.a)
        a = a.reshape(a.shape[-2:])
        if self.repeats:
            return np.tile(a, (self.m // len(a), 1))
        return a.T if self.transpose_a else a

    def infer_layout(self, known: Any) -> dict[Buffer, Any]:
        """Layouts that the chosen instruction requires for the fragments among a, b and c; the plan names it and the warps.

        A fragment of which the op uses only a sub-tile gets no layout here.  The lowering copies that sub-tile first.
        """
        name = self.plan.instruction
        row, warps = row_of(name), self.plan.warps or (1, 1)
        if name in WGMMA_ROWS:
            lays: tuple[Any, ...] = wgmma_fragments(self, WGMMA_ROWS[name], warps, known.threads)
        elif row is None:
            lays = (None, None, simt_fragment(self.m, self.n, known.threads))
        else:
            lays = operand_fragments(self, row, warps, known.threads)
        out: dict[Buffer, Any] = {}
        for region, lay in zip((self.c, self.a, self.b), (lays[2], lays[0], lays[1])):
            if lay is not None and region.buffer.scope_name == FRAGMENT and region.is_full:
                got = carried(lay, region.buffer.shape)
                if got is not None:
                    out.setdefault(region.buffer, got)
        return out

    def lower(self, cx: LowerContext) -> Stmt:
        """Lower by the instruction that infer_layouts chose: attr `instruction`, the name of an MMA row or "simt"."""
        name = self.plan.instruction or "simt"
        if name in WGMMA_ROWS:
            return lower_wgmma(self, cx, WGMMA_ROWS[name])
        out = lower_simt(self, cx) if name == "simt" else lower_mma(self, cx, row_of(name))
        # An asynchronous wgmma that the user started may still be adding to the same registers.
        return seq(drained(cx.local_of(self.c.buffer)), out) if self.plan.behind else out


register_literal("policy", GemmWarpPolicy)
