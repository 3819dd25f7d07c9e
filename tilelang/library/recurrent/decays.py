"""`linear_attention`: a state that decays by a factor for each token and head, in chunks, with gradients.

With D_ts = exp(sum of log_decay over s < r <= t), o_t = scale sum over s <= t of D_ts (q_t . k_s) v_s.  The gradients are
three passes of the same kernel, two of them from the last token to the first:
    dq_t = scale sum over s <= t of D_ts (do_t . v_s) k_s        (do, v, k)
    dk_s = scale sum over t >= s of D_ts (v_s . do_t) q_t        (v, do, q)
    dv_s = scale sum over t >= s of D_ts (k_s . q_t) do_t        (k, q, do)
log_decay_r is a factor of each D_ts with s < r <= t.  Over all tokens, its gradient is the sum over t >= r of q_t . dq_t -
k_t . dk_t, which nearly cancel, and roundings of all later states add up.  So each chunk starts anew: with the state before it,
S, and the gradient of the state after it, G, it is the decay of the chunk times the sum of S * G, and what keys of the chunk
give to G, and within the chunk the sum over t >= r of q_t . dq_t - k_t . dk_t, formed before dq and dk are rounded.  The first
pass keeps S, and the second has G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import const

from ..arrays import (accumulator, by_sequences, compact, contiguous, empty, is_numpy, padded, strides, sum_into,
                      type_name)
from ..attention.form import LOG2E
from ..attention.inputs import UNIT, device_of, fast_kernel, readable, running_on
from ..autograd import Function, Results, Step, untraced
from ..place import Place, target_text
from .delta import STEPS  # noqa: F401 - its errors are those of this file

CHUNK, COLUMNS = 64, 64
_LEAST = {"float32": -100.0, "float64": -1000.0}  # logarithms of factors that are 0, with differences that are numbers


def linear_attention(q: Any, k: Any, v: Any, log_decay: Any = None, *, scale: float = 1.0, target: Any = None) -> Any:
    """o_t = scale state_t^T q_t with state_t = exp(log_decay_t) state_(t-1) + k_t v_t^T: (batch, seq, heads, dim_v), like q.

    q, k: (batch, seq, heads, dim), v: (batch, seq, heads, dim_v), float16, bfloat16 or, on the CPU, float64; dim and dim_v
    at most 256; others than multiples of 16 are copied with zeros behind.  log_decay: (batch, seq, heads), or (heads,) for all
    tokens, float32 (float64 of float64), at most 0; -inf (as less than -100, of float64 -1000) begins a new sequence; None: 0.
    The state is float32; scores, decayed keys and what queries read of the state are rounded to q's type.

    Gradients of all four, of their types; saved are the four inputs alone.  For that of log_decay, backward keeps the state
    before each 64 tokens in q's type.
    Results are the same bits for the same inputs, may be captured in a CUDA graph, and are one operator for torch.compile.
    Raises delta-argument.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 32)).astype(np.float16)
    >>> linear_attention(q, k, v, -np.ones(2, np.float32)).shape
    (1, 100, 2, 32)
    """
    dim, dim_v = ((getattr(x, "shape", None) or (0,))[-1] for x in (q, v))
    if not dim % 16 and not dim_v % 16:
        return _FUNCTION(q, k, v, log_decay, float(scale), target_text(target))
    if untraced(q):
        _results(q, k, v, log_decay)  # checks what the caller gave
    q, k, v = padded(q, -dim % 16), padded(k, -dim % 16), padded(v, -dim_v % 16)
    return _FUNCTION(q, k, v, log_decay, float(scale), target_text(target))[..., :dim_v]


@dataclass(frozen=True)
class PassForm:
    """Any batch and seq. sizes: (heads, dim, dim_v). strided: of Q, K and V, which calls give with strides. decays: whether
    there are decays. reverse: from the last token to the first. keeps: what is kept for the gradient of decays, of `rows` or
    `columns` of pairs of tokens, or ""."""

    sizes: tuple[int, int, int]
    strided: tuple[bool, bool, bool]
    dtype: str
    scale: float
    decays: bool
    reverse: bool
    keeps: str = ""

    accum = property(lambda self: accumulator(self.dtype))

    @property
    def stages(self) -> int:
        """Of loads: one where two do not fit in shared memory beside a state that is loaded."""
        return 1 if self.keeps == "columns" and self.sizes[1] > 192 else 2


@T.macro
def edge_of(f, Ss, Bs, last, Edge):
    """The rows of S * G times the decay of the chunk."""
    dim, columns = Ss.shape
    some, edge = T.alloc_fragment((dim, 16), f.accum), T.alloc_fragment((dim,), f.accum)
    T.clear(edge)
    for p in T.unroll(columns // 16):
        for i, j in T.Parallel(dim, 16):
            some[i, j] = T.cast(Ss[i, p * 16 + j], f.accum) * Bs[i, p * 16 + j]
        T.reduce_sum(some, edge, dim=1, clear=False)
    for i in T.Parallel(dim):
        edge[i] *= T.exp2(last) * const(f.scale, f.accum)
    T.copy(edge, Edge)


def linear_pass(f: PassForm) -> Any:
    """The kernel (Q, K, V, C, X, O, Dots, States, Edge).  C: (batch, heads, chunks, CHUNK), base-2 logarithms of decays, added
    up in each chunk; not read where there are none.  With f.keeps: X, like V; Dots, (columns of V / COLUMNS, batch, heads,
    seq), sums of X times the result over rows; States, (batch, heads, chunks, dim, dim_v), before each chunk, that `rows`
    writes and `columns` reads; Edge, (columns of V / COLUMNS, batch, heads, chunks, dim + CHUNK), whose sums `columns` gives to
    all decays of a chunk.  Blocks have a head and COLUMNS columns of V, and keep their state in registers."""
    (heads, dim, dim_v), (batch, seq) = f.sizes, T.dynamic("batch, seq")
    accum, chunks, columns = f.accum, T.ceildiv(seq, CHUNK), min(COLUMNS, dim_v)
    shapes, blocks = ((batch, seq, heads, dim),) * 2 + ((batch, seq, heads, dim_v),), T.ceildiv(dim_v, columns)
    q, k, v = (T.StridedTensor(s, (*(T.dynamic(f"step_{n}_{d}") * UNIT for d in (0, 1, 2)), 1), f.dtype) if strided else
               T.Tensor(s, f.dtype) for n, (s, strided) in enumerate(zip(shapes, f.strided)))

    def power(x: Any) -> Any:
        return T.exp2(x) if f.decays else const(1.0, accum)

    def sees(i: Any, j: Any) -> Any:
        return j >= i if f.reverse else j <= i

    @T.prim_func
    def linear_attention(Q: q, K: k, V: v, C: T.Tensor((batch, heads, chunks, CHUNK) if f.decays else (1, 1, 1, 1), accum),
                         X: T.Tensor(shapes[2], f.dtype), O: T.Tensor(shapes[2], f.dtype),
                         Dots: T.Tensor((blocks, batch, heads, seq), accum),
                         States: T.Tensor((batch, heads, chunks, dim, dim_v), f.dtype),
                         Edge: T.Tensor((blocks, batch, heads, chunks, dim + CHUNK), accum)):
        with T.Kernel(blocks, heads, batch, threads=128) as (bx, h, b):
            Qs, Ks = T.alloc_shared((CHUNK, dim), f.dtype), T.alloc_shared((CHUNK, dim), f.dtype)
            Vs, Kd = T.alloc_shared((CHUNK, columns), f.dtype), T.alloc_shared((CHUNK, dim), f.dtype)
            Cs, Ss = T.alloc_shared((CHUNK,), accum), T.alloc_shared((dim, columns), f.dtype)
            state, o = T.alloc_fragment((dim, columns), accum), T.alloc_fragment((CHUNK, columns), accum)
            S, P = T.alloc_fragment((CHUNK, CHUNK), accum), T.alloc_fragment((CHUNK, CHUNK), f.dtype)
            Xs, row = T.alloc_shared((CHUNK, columns), f.dtype), T.alloc_fragment((CHUNK,), accum)
            Bs, product = T.alloc_shared((dim, columns), f.dtype), T.alloc_fragment((CHUNK, columns), accum)
            T.clear(state)
            for step in T.Pipelined(chunks, num_stages=f.stages):
                c = chunks - 1 - step if f.reverse else step
                T.copy(Q[b, c * CHUNK:(c + 1) * CHUNK, h, :], Qs)
                T.copy(K[b, c * CHUNK:(c + 1) * CHUNK, h, :], Ks)
                T.copy(V[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns], Vs)
                if f.decays:
                    T.copy(C[b, h, c, :], Cs)
                if f.keeps != "":
                    T.copy(X[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns], Xs)
                if f.keeps == "columns":
                    T.copy(States[b, h, c, :, bx * columns:(bx + 1) * columns], Bs)
                T.copy(state, Ss)
                if f.keeps == "rows":
                    T.copy(Ss, States[b, h, c, :, bx * columns:(bx + 1) * columns])
                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(CHUNK, columns):
                    o[i, j] *= power(Cs[CHUNK - 1] - Cs[i] if f.reverse else Cs[i])
                if f.keeps == "columns":
                    for i, j in T.Parallel(CHUNK, columns):
                        product[i, j] = o[i, j] * (Xs[i, j] * const(f.scale, accum))
                    T.reduce_sum(product, row, dim=1)
                    T.copy(row, Edge[bx, b, h, c, dim:dim + CHUNK])
                    edge_of(f, Ss, Bs, Cs[CHUNK - 1], Edge[bx, b, h, c, 0:dim])
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    S[i, j] = T.if_then_else(sees(i, j), S[i, j] * power(Cs[j] - Cs[i] if f.reverse else Cs[i] - Cs[j]), 0.0)
                T.copy(S, P)
                T.gemm(P, Vs, o)
                for i, j in T.Parallel(CHUNK, columns):
                    o[i, j] *= const(f.scale, accum)
                T.copy(o, O[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns])
                if f.keeps != "":
                    for i, j in T.Parallel(CHUNK, columns):
                        o[i, j] *= Xs[i, j]
                    T.reduce_sum(o, row, dim=1)
                    T.copy(row, Dots[bx, b, h, c * CHUNK:(c + 1) * CHUNK])
                for i, j in T.Parallel(CHUNK, dim):
                    Kd[i, j] = Ks[i, j] * power(Cs[i] if f.reverse else Cs[CHUNK - 1] - Cs[i])
                for i, j in T.Parallel(dim, columns):
                    state[i, j] *= power(Cs[CHUNK - 1])
                T.gemm(Kd, Vs, state, transpose_A=True)

    return linear_attention


def added_up(heads: int, each: bool, accum: str) -> Any:
    """The kernel (Decay, C): the C of linear_pass.  Decay: (batch, seq, heads), or (heads,) unless each token has its own."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")

    @T.prim_func
    def decays_added_up(Decay: T.Tensor((batch, seq, heads) if each else (heads,), accum),
                        C: T.Tensor((batch, heads, chunks, CHUNK), accum), seq: T.int32):
        with T.Kernel(chunks, heads, batch, threads=CHUNK) as (c, h, b):
            s = T.alloc_shared((CHUNK,), accum)
            for i in T.Parallel(CHUNK):
                t = c * CHUNK + i
                decay = T.max(Decay[b, t, h] if each else Decay[h], const(_LEAST[accum], accum))
                s[i] = T.if_then_else(t < seq, decay, T.cast(0, accum)) * const(LOG2E, accum)
            T.cumsum(s, dim=0)
            T.copy(s, C[b, h, c, :])

    return decays_added_up


def decay_gradient(heads: int, blocks: int, wide: int, accum: str) -> Any:
    """The kernel (Rows, Columns, Edge, dDecay): the gradient of the decays, (batch, seq, heads), from what the first two passes
    keep.  wide: the last extent of Edge."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    dots = T.Tensor((blocks, batch, heads, seq), accum)

    @T.prim_func
    def gradient_of_decays(Rows: dots, Columns: dots, Edge: T.Tensor((blocks, batch, heads, chunks, wide), accum),
                           dDecay: T.Tensor((batch, seq, heads), accum)):
        with T.Kernel(chunks, heads, batch, threads=CHUNK) as (c, h, b):
            steps, found = T.alloc_shared((CHUNK,), accum), T.alloc_fragment((CHUNK,), accum)
            edges, total, later = T.alloc_fragment((wide,), accum), T.alloc_fragment((1,), accum), T.alloc_shared((1,), accum)
            T.clear(found)
            T.clear(edges)
            for n in T.serial(blocks):
                for i in T.Parallel(CHUNK):
                    t = c * CHUNK + i
                    if t < seq:
                        found[i] += Rows[n, b, h, t] - Columns[n, b, h, t]
                for i in T.Parallel(wide):
                    edges[i] += Edge[n, b, h, c, i]
            T.reduce_sum(edges, total)
            T.copy(total, later)
            T.copy(found, steps)
            T.cumsum(steps, dim=0, reverse=True)
            for i in T.Parallel(CHUNK):
                if c * CHUNK + i < seq:
                    dDecay[b, c * CHUNK + i, h] = steps[i] + later[0]

    return gradient_of_decays


def _results(q: Any, k: Any, v: Any, log_decay: Any, *options: Any) -> Results:
    """The shape of the result, and the checks of the arguments."""
    kind, accum = type_name(q), accumulator(type_name(q))
    given = {"q": q, "k": k, "v": v}
    shapes = ", ".join(f"{n} {type_name(x)} {tuple(x.shape)}" for n, x in given.items())
    decays = None if log_decay is None else tuple(log_decay.shape)
    if any(x.ndim != 4 or is_numpy(x) != is_numpy(q) or type_name(x) != kind or device_of(x) != device_of(q)
           for x in given.values()) or q.shape != k.shape or v.shape[:3] != q.shape[:3] or any(
               not 0 < n <= 256 for n in (q.shape[3], v.shape[3])) or kind not in ("float16", "bfloat16", "float64"):
        raise error("delta-argument", f"‹{shapes}› do not go together", expected="q, k (batch, seq, heads, dim), v (batch, "
                    "seq, heads, dim_v) of float16, bfloat16 or float64, dimensions of 1 to 256")
    if decays is not None and (decays not in (tuple(q.shape[:3]), (q.shape[2],)) or type_name(log_decay) != accum or device_of(
            log_decay) != device_of(q)):
        raise error("delta-argument", f"log_decay is ‹{type_name(log_decay)} {decays}›",
                    expected=f"{accum} {tuple(q.shape[:3])} or ({q.shape[2]},) on {device_of(q)}", hint="logarithms, at most 0")
    return [(tuple(v.shape), kind)]


def _added_up(at: Place, log_decay: Any, q: Any) -> Any:
    """What linear_pass takes as C."""
    batch, seq, heads = (int(n) for n in q.shape[:3])
    if log_decay is None or 0 in q.shape:
        return None
    out = empty(q, (batch, heads, -(-seq // CHUNK), CHUNK), accumulator(type_name(q)))
    fast_kernel(at, added_up, heads, log_decay.ndim == 3, accumulator(type_name(q)))(contiguous(log_decay), out, seq)
    return out


def _pass(at: Place, given: tuple[Any, ...], c: Any, scale: float, out: Any, reverse: bool = False, keeps: str = "",
          *kept: Any) -> None:
    """out = linear_pass of the q, k and v given.  kept: X, Dots, States and Edge."""
    arrays = [readable(x, at.target.is_gpu) for x in given]
    strided = [strides(x) != compact(x.shape) for x in arrays]
    q, _, v = arrays
    form = PassForm((*q.shape[2:], v.shape[3]), tuple(strided), type_name(q), scale, c is not None, reverse, keeps)
    x, *others = kept or (None,) * 4
    fast_kernel(at, linear_pass, form)(*arrays, c, x, out, *others)


def _forward(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, out: Any) -> None:
    at = running_on(q, target)
    if type_name(q) == "float64" and at.target.is_gpu:
        raise error("delta-argument", "float64 runs on the CPU only", found="float64 on a GPU", expected="16 bits on a GPU",
                    hint="convert them, or move them to the CPU")
    if 0 in q.shape:
        out[...] = 0
    else:
        _pass(at, (q, k, v), _added_up(at, log_decay, q), scale, out)


def _backward(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, wanted: bool, grad: Any, dq: Any, dk: Any,
              dv: Any, ddecay: Any) -> None:
    at = running_on(q, target)
    if 0 in q.shape:
        for x in (dq, dk, dv, ddecay):
            x[...] = 0
        return
    c, (batch, seq, heads, dim), blocks = _added_up(at, log_decay, q), q.shape, -(-q.shape[3] // COLUMNS)
    of_q, of_k = (), ()
    if wanted:
        chunks, accum, dots = c.shape[2], accumulator(type_name(q)), (blocks, batch, heads, seq)
        rows, columns, edge = (empty(q, x, accum) for x in (dots, dots, (blocks, batch, heads, chunks, v.shape[3] + CHUNK)))
        states = empty(q, (batch, heads, chunks, v.shape[3], dim), type_name(q))
        of_q, of_k = ("rows", contiguous(q), rows, states, None), ("columns", contiguous(k), columns, states, edge)
    _pass(at, (grad, v, k), c, scale, dq, False, *of_q)
    _pass(at, (v, grad, q), c, scale, dk, True, *of_k)
    _pass(at, (k, q, grad), c, scale, dv, True)
    if wanted:
        each = log_decay.ndim == 3
        found = ddecay if each else empty(q, (batch, seq, heads), accum)
        fast_kernel(at, decay_gradient, heads, blocks, edge.shape[4], accum)(rows, columns, edge, found)
        if not each:
            sum_into(ddecay, found, (0, 1))


def _shapes(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, wanted: bool, grad: Any) -> Results:
    decays = tuple(log_decay.shape) if wanted else (0,)
    return [*((tuple(x.shape), type_name(x)) for x in (q, k, v)), (decays, accumulator(type_name(q)))]


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, float scale, str? target"
_FUNCTION = Function("linear_attention", Step(_ARGUMENTS, _results, by_sequences(_forward, 1)),
                     Step(f"{_ARGUMENTS}, bool wanted, Tensor? grad", _shapes, by_sequences(_backward, 4), 4),
                     lambda needs, args, made: (*args, bool(needs[3])), (0, 1, 2, 3))
