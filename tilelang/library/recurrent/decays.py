"""`linear_attention`: a state that decays by a factor for each token and head, in chunks, with gradients.

With D_ts = exp(sum of log_decay over s < r <= t), o_t = scale sum over s <= t of D_ts (q_t . k_s) v_s.  The gradients are
three passes of the same kernel, two of them from the last token to the first:
    dq_t = scale sum over s <= t of D_ts (do_t . v_s) k_s        (do, v, k)
    dk_s = scale sum over t >= s of D_ts (v_s . do_t) q_t        (v, do, q)
    dv_s = scale sum over t >= s of D_ts (k_s . q_t) do_t        (k, q, do)
log_decay_r is a factor of each D_ts with s < r <= t, so that its gradient is the sum over t >= r of q_t . dq_t - k_t . dk_t.
These nearly cancel: the first two passes form them from what they add up, before dq and dk are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import const

from ..arrays import compact, compact_copy, contiguous, empty, is_numpy, strides, sum_into, type_name, zeros
from ..attention.form import LOG2E
from ..attention.inputs import UNIT, device_of, fast_kernel, running_on, strides_of
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .delta import STEPS  # noqa: F401 - its errors are those of this file

CHUNK, COLUMNS = 64, 64


def linear_attention(q: Any, k: Any, v: Any, log_decay: Any = None, *, scale: float = 1.0, target: Any = None) -> Any:
    """o_t = scale state_t^T q_t with state_t = exp(log_decay_t) state_(t-1) + k_t v_t^T: (batch, seq, heads, dim_v), like q.

    q, k: (batch, seq, heads, dim), v: (batch, seq, heads, dim_v), float16, bfloat16 or, on the CPU, float64; dim and dim_v
    multiples of 16 up to 256.  log_decay: (batch, seq, heads), or (heads,) for all tokens, float32 (float64 of float64), at
    most 0; None: 0.  The state is float32; scores, decayed keys and what queries read of the state are rounded to q's type.

    Gradients of all four, of their types; saved are the four inputs alone.  That of log_decay is formed from those of q and k.
    Results are the same bits for the same inputs, may be captured in a CUDA graph, and are one operator for torch.compile.
    Raises delta-argument.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 32)).astype(np.float16)
    >>> linear_attention(q, k, v, -np.ones(2, np.float32)).shape
    (1, 100, 2, 32)
    """
    return _FUNCTION(q, k, v, log_decay, float(scale), target_text(target))


def _accum(x: Any) -> str:
    return "float64" if type_name(x) == "float64" else "float32"


@dataclass(frozen=True)
class PassForm:
    """Any batch and seq. sizes: (heads, dim, dim_v). strided: of Q, K and V, which calls give with strides. decays: whether
    there are decays. reverse: from the last token to the first. dots: sums of X times the result over rows are kept."""

    sizes: tuple[int, int, int]
    strided: tuple[bool, bool, bool]
    dtype: str
    scale: float
    decays: bool
    reverse: bool
    dots: bool = False


def linear_pass(f: PassForm) -> Any:
    """The kernel (Q, K, V, C, X, O, Dots). X and Dots (columns of V / COLUMNS, batch, heads, seq): used where f.dots.
    C: (batch, heads, chunks, CHUNK), base-2 logarithms of decays, added up in each chunk; not read where there are none. Blocks
    have a head and COLUMNS columns of V, and keep their state in registers."""
    (heads, dim, dim_v), (batch, seq) = f.sizes, T.dynamic("batch, seq")
    accum, chunks, columns = "float64" if f.dtype == "float64" else "float32", T.ceildiv(seq, CHUNK), min(COLUMNS, dim_v)
    shapes = ((batch, seq, heads, dim),) * 2 + ((batch, seq, heads, dim_v),)
    q, k, v = (T.StridedTensor(s, (*(T.dynamic(f"step_{n}_{d}") * UNIT for d in (0, 1, 2)), 1), f.dtype) if strided else
               T.Tensor(s, f.dtype) for n, (s, strided) in enumerate(zip(shapes, f.strided)))

    def power(x: Any) -> Any:
        return T.exp2(x) if f.decays else const(1.0, accum)

    def sees(i: Any, j: Any) -> Any:
        return j >= i if f.reverse else j <= i

    @T.prim_func
    def linear_attention(Q: q, K: k, V: v, C: T.Tensor((batch, heads, chunks, CHUNK) if f.decays else (1, 1, 1, 1), accum),
                         X: T.Tensor(shapes[2], f.dtype), O: T.Tensor(shapes[2], f.dtype),
                         Dots: T.Tensor((T.ceildiv(dim_v, columns), batch, heads, seq), accum)):
        with T.Kernel(T.ceildiv(dim_v, columns), heads, batch, threads=128) as (bx, h, b):
            Qs, Ks = T.alloc_shared((CHUNK, dim), f.dtype), T.alloc_shared((CHUNK, dim), f.dtype)
            Vs, Kd = T.alloc_shared((CHUNK, columns), f.dtype), T.alloc_shared((CHUNK, dim), f.dtype)
            Cs, Ss = T.alloc_shared((CHUNK,), accum), T.alloc_shared((dim, columns), f.dtype)
            state, o = T.alloc_fragment((dim, columns), accum), T.alloc_fragment((CHUNK, columns), accum)
            S, P = T.alloc_fragment((CHUNK, CHUNK), accum), T.alloc_fragment((CHUNK, CHUNK), f.dtype)
            Xs, row = T.alloc_shared((CHUNK, columns), f.dtype), T.alloc_fragment((CHUNK,), accum)
            T.clear(state)
            for step in T.Pipelined(chunks, num_stages=2):
                c = chunks - 1 - step if f.reverse else step
                T.copy(Q[b, c * CHUNK:(c + 1) * CHUNK, h, :], Qs)
                T.copy(K[b, c * CHUNK:(c + 1) * CHUNK, h, :], Ks)
                T.copy(V[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns], Vs)
                if f.decays:
                    T.copy(C[b, h, c, :], Cs)
                T.copy(state, Ss)
                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(CHUNK, columns):
                    o[i, j] *= power(Cs[CHUNK - 1] - Cs[i] if f.reverse else Cs[i])
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    S[i, j] = T.if_then_else(sees(i, j), S[i, j] * power(Cs[j] - Cs[i] if f.reverse else Cs[i] - Cs[j]), 0.0)
                T.copy(S, P)
                T.gemm(P, Vs, o)
                for i, j in T.Parallel(CHUNK, columns):
                    o[i, j] *= const(f.scale, accum)
                T.copy(o, O[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns])
                if f.dots:
                    T.copy(X[b, c * CHUNK:(c + 1) * CHUNK, h, bx * columns:(bx + 1) * columns], Xs)
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


def _results(q: Any, k: Any, v: Any, log_decay: Any, *options: Any) -> Results:
    """The shape of the result, and the checks of the arguments."""
    kind, accum = type_name(q), _accum(q)
    given = {"q": q, "k": k, "v": v}
    shapes = ", ".join(f"{n} {type_name(x)} {tuple(x.shape)}" for n, x in given.items())
    decays = None if log_decay is None else tuple(log_decay.shape)
    if any(x.ndim != 4 or is_numpy(x) != is_numpy(q) or type_name(x) != kind or device_of(x) != device_of(q)
           for x in given.values()) or q.shape != k.shape or v.shape[:3] != q.shape[:3] or any(
               n % 16 or not 0 < n <= 256 for n in (q.shape[3], v.shape[3])) or kind not in ("float16", "bfloat16", "float64"):
        raise error("delta-argument", f"{shapes} do not go together", found=shapes, hint="pad the last dimension with zeros",
                    expected="q, k (batch, seq, heads, dim), v (batch, seq, heads, dim_v) of float16, bfloat16 or float64, "
                             "dimensions that are multiples of 16 up to 256")
    if decays is not None and (decays not in (tuple(q.shape[:3]), (q.shape[2],)) or type_name(log_decay) != accum or device_of(
            log_decay) != device_of(q)):
        raise error("delta-argument", f"log_decay is {type_name(log_decay)} {decays}", found=f"{type_name(log_decay)} {decays}",
                    expected=f"{accum} {tuple(q.shape[:3])} or ({q.shape[2]},) on {device_of(q)}", hint="logarithms, at most 0")
    return [(tuple(v.shape), kind)]


def _added_up(log_decay: Any, q: Any) -> Any:
    """What linear_pass takes as C."""
    batch, seq, heads = (int(n) for n in q.shape[:3])
    out = zeros(q, (batch, heads, -(-seq // CHUNK) * CHUNK), _accum(q))
    out[..., :seq] = log_decay[:, None] if log_decay.ndim == 1 else log_decay.swapaxes(1, 2)
    return out.reshape(batch, heads, -1, CHUNK).cumsum(-1) * LOG2E


def _pass(at: Place, q: Any, k: Any, v: Any, c: Any, scale: float, out: Any, x: Any = None, reverse: bool = False) -> Any:
    """out = linear_pass of q, k and v; returns the row sums of x times out before it is rounded, where there is an x."""
    if 0 in q.shape:
        out[...] = 0
        return
    arrays = [x if strides_of(x, at.target.is_gpu) else compact_copy(x) for x in (q, k, v)]
    strided = [strides(x) != compact(x.shape) for x in arrays]
    form = PassForm((*q.shape[2:], v.shape[3]), tuple(strided), type_name(q), scale, c is not None, reverse, x is not None)
    blocks = -(-v.shape[3] // COLUMNS)
    dots = None if x is None else empty(q, (blocks, q.shape[0], q.shape[2], q.shape[1]), _accum(q))
    kernel = fast_kernel(at, linear_pass, form)
    kernel(*arrays, c, None if x is None else contiguous(x), out, dots)
    return dots


def _forward(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, out: Any) -> None:
    at = running_on(q, target)
    if type_name(q) == "float64" and at.target.is_gpu:
        raise error("delta-argument", "float64 runs on the CPU only", found="float64 on a GPU", expected="16 bits on a GPU",
                    hint="convert them, or move them to the CPU")
    _pass(at, q, k, v, None if log_decay is None else _added_up(log_decay, q), scale, out)


def _backward(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, wanted: bool, grad: Any, dq: Any, dk: Any,
              dv: Any, ddecay: Any) -> None:
    at, c = running_on(q, target), None if log_decay is None else _added_up(log_decay, q)
    of_q = _pass(at, grad, v, k, c, scale, dq, q if wanted else None)
    of_k = _pass(at, v, grad, q, c, scale, dk, k if wanted else None, True)
    _pass(at, k, q, grad, c, scale, dv, None, True)
    if wanted and 0 not in q.shape:
        change = (of_q - of_k).sum(0)
        later = change.sum(2)[..., None] - change.cumsum(2) + change
        if log_decay.ndim == 3:
            ddecay[...] = later.swapaxes(1, 2)
        else:
            sum_into(ddecay, later, (0, 2))


def _shapes(q: Any, k: Any, v: Any, log_decay: Any, scale: float, target: Any, wanted: bool, grad: Any) -> Results:
    decays = tuple(log_decay.shape) if wanted else (0,)
    return [*((tuple(x.shape), type_name(x)) for x in (q, k, v)), (decays, _accum(q))]


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, float scale, str? target"
_FUNCTION = Function("linear_attention", Step(_ARGUMENTS, _results, _forward),
                     Step(f"{_ARGUMENTS}, bool wanted, Tensor? grad", _shapes, _backward, 4),
                     lambda needs, args, made: (*args, bool(needs[3])), (0, 1, 2, 3))
