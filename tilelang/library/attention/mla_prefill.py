"""`mla_prefill`: multi-head latent attention over a prompt; keys are expanded, and all heads share their rotary elements."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang.errors import error

from ..arrays import accumulator, by_sequences, empty, is_numpy, type_name, zeros
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .backward import gradients
from .flash_attention import attend
from .form import LOG2E
from .inputs import UNIT, check_alike, check_scale, check_tensors, fitting_kernel, readable, running_on, strides_of
from .kernels import absorb, finish, reset
from .problem import whole

FEW = 8  # tokens of a block that joins keys, or their gradients


def mla_prefill(q: Any, k: Any, k_rope: Any, v: Any, *, causal: bool = True, scale: float | None = None,
                return_lse: bool = False, dynamic: bool = False, target: Any = None) -> Any:
    """softmax(scale * q [k, k_rope]^T) v: latent attention with expanded keys and values, (batch, seq_q, heads, dim_v).

    q: (batch, seq_q, heads, dim + rope); k: (batch, seq_k, heads, dim); k_rope: (batch, seq_k, rope), of all heads; v: (batch,
    seq_k, heads, dim_v). float16, bfloat16 or, on the CPU, float64. They may be slices, such as halves of one projection's
    result.
    causal: query i stands at key position i + seq_k - seq_q and sees the keys up to there. scale: None is (dim + rope) ** -0.5.
    return_lse: also the natural logarithms of the sums of exp(scores), (batch, heads, seq_q), float32. dynamic: one kernel for
    all batch sizes and lengths, instead of one for the first and one that others share, whose bits can differ.

    Gradients: where an input requires one, the inputs, the result and the logarithms are kept. Backward writes keys of all
    heads with their rotary elements (2 batch seq_k heads (dim + rope) bytes, as much again for their gradients) and calls
    flash_attention_backward; the gradient of k_rope is the sum over heads in float32.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, n)).astype(np.float16) for n in (96, 64, 64))
    >>> mla_prefill(q, k, rng.standard_normal((1, 100, 32)).astype(np.float16), v).shape
    (1, 100, 2, 64)
    """
    out, logs = _FUNCTION(q, k, k_rope, v, bool(causal), None if scale is None else check_scale(scale), bool(dynamic),
                          target_text(target))
    return (out, logs) if return_lse else out


def _results(q: Any, k: Any, k_rope: Any, v: Any, *options: Any) -> Results:
    """The shapes of the result and the logarithms, and the checks of the arguments."""
    tensors = {"q": q, "k": k, "k_rope": k_rope, "v": v}
    check_tensors("mla_prefill", tensors, ("q",), double=True)
    check_alike(q, tensors)
    shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
    if [x.ndim for x in tensors.values()] != [4, 4, 3, 4] or any(x.shape[:2] != k.shape[:2] for x in (k_rope, v)) or (
            q.shape[::2] != (k.shape[0], k.shape[2])) or v.shape[2] != k.shape[2] or q.shape[3] != k.shape[3] + k_rope.shape[2]:
        raise error("attention-shape", f"‹{shapes}› do not go together", expected="q (batch, seq_q, heads, dim + rope), k "
                    "(batch, seq_k, heads, dim), k_rope (batch, seq_k, rope), v (batch, seq_k, heads, dim_v)",
                    hint="k_rope has no dimension of heads")
    if type_name(q) == "float32" or any(n % UNIT or not 0 < n <= 256 for n in (k.shape[3], k_rope.shape[2], v.shape[3])):
        raise error("attention-argument", f"‹{shapes} of {type_name(q)}›",
                    expected=f"float16 or bfloat16, dimensions that are multiples of {UNIT} up to 256", hint="pad with zeros")
    batch, seq_q, heads, _ = q.shape
    return [((batch, seq_q, heads, v.shape[3]), type_name(q)), ((batch, heads, seq_q), accumulator(type_name(q)))]


def _forward(q: Any, k: Any, k_rope: Any, v: Any, causal: bool, scale: Any, dynamic: bool, target: Any, out: Any,
             logs: Any) -> None:
    if not (out.size if is_numpy(out) else out.numel()):
        return
    if type_name(q) == "float64":
        attend((q, _expanded(k, k_rope, running_on(q, target)), v, *[None] * 4), (out, logs), causal=causal, window=None,
               layout="bshd", drop=0, scale=scale, target=target)
        return
    at, tensors = running_on(q, target), (q, k, k_rope, v)
    arrays = [readable(x, at.target.is_gpu) for x in tensors]
    sizes, lengths = (q.shape[2], k.shape[3], k_rope.shape[2], v.shape[3]), (q.shape[0], q.shape[1], k.shape[1])
    own = not dynamic and at.comes_first(("mla_prefill", sizes, type_name(q), causal), lengths)
    exact = (lengths, tuple(map(strides_of, arrays))) if own else None
    tiles = ((128, 128, 2),) if at.target.has_wgmma else ((64, 32, 1), (32, 32, 1))
    _, kernel = fitting_kernel(at, prefill_attention, *((sizes, type_name(q), causal, tile, exact) for tile in tiles))
    kernel(*arrays, q.shape[3]**-0.5 if scale is None else scale, out, logs)


def _expanded(k: Any, k_rope: Any, at: Place) -> Any:
    """The keys of all heads with their rotary elements."""
    dim, rope = k.shape[3], k_rope.shape[2]
    keys = empty(k, (*k.shape[:3], dim + rope), type_name(k))
    k, k_rope = (readable(x, at.target.is_gpu) for x in (k, k_rope))
    at.kernel(expand_keys, (k.shape[2], dim, rope, type_name(k)))(k, k_rope, keys)
    return keys


def _backward(q: Any, k: Any, k_rope: Any, v: Any, out: Any, lse: Any, causal: bool, scale: Any, target: Any, grad: Any,
              grad_lse: Any, dq: Any, dk: Any, drope: Any, dv: Any) -> None:
    at = running_on(q, target)
    grad, keys = zeros(out, tuple(out.shape), type_name(out)) if grad is None else grad, _expanded(k, k_rope, at)
    dkeys = empty(k, tuple(keys.shape), type_name(k))
    gradients((q, keys, v, out, lse, grad, grad_lse, *[None] * 4), (dq, dkeys, dv), causal=causal, window=None, layout="bshd",
              drop=0, scale=scale, deterministic=None, target=target)
    at.kernel(collect_gradients, (k.shape[2], k.shape[3], k_rope.shape[2], type_name(k)))(dkeys, dk, drope)


def _strided(number: int, steps: Any, shape: tuple[Any, ...], dtype: str) -> Any:
    """A tensor whose rows are contiguous. steps: its strides; None: each call gives them."""
    given = (*(T.dynamic(f"step_{number}_{d}") * UNIT for d in range(len(shape) - 1)), 1)
    return T.StridedTensor(shape, given if steps is None else steps, dtype)


def expand_keys(form: tuple[int, int, int, str]) -> Any:
    """The kernel (K, Rope, Keys) that gives the keys of every head the rotary elements that all heads share. form: heads, dim,
    rope, type."""
    heads, dim, rope, dtype = form
    batch, seq = T.dynamic("batch, seq")

    @T.prim_func
    def mla_expand_keys(K: _strided(0, None, (batch, seq, heads, dim), dtype),
                        Rope: _strided(1, None, (batch, seq, rope), dtype),
                        Keys: T.Tensor((batch, seq, heads, dim + rope), dtype)):
        with T.Kernel(T.ceildiv(seq, FEW), batch, threads=256) as (n, b):
            for i, h, d in T.Parallel(FEW, heads, dim):
                if n * FEW + i < seq:
                    Keys[b, n * FEW + i, h, d] = K[b, n * FEW + i, h, d]
            for i, h, d in T.Parallel(FEW, heads, rope):
                if n * FEW + i < seq:
                    Keys[b, n * FEW + i, h, dim + d] = Rope[b, n * FEW + i, d]

    return mla_expand_keys


def collect_gradients(form: tuple[int, int, int, str]) -> Any:
    """The kernel (dKeys, dK, dRope): the gradients of what `expand_keys` has joined; that of the rotary elements is a sum over
    heads in float32. form: as of `expand_keys`."""
    heads, dim, rope, dtype = form
    batch, seq = T.dynamic("batch, seq")

    @T.prim_func
    def mla_collect_gradients(dKeys: T.Tensor((batch, seq, heads, dim + rope), dtype),
                              dK: T.Tensor((batch, seq, heads, dim), dtype), dRope: T.Tensor((batch, seq, rope), dtype)):
        with T.Kernel(T.ceildiv(seq, FEW), batch, threads=256) as (n, b):
            total = T.alloc_fragment((FEW, rope), accumulator(dtype))
            for i, h, d in T.Parallel(FEW, heads, dim):
                if n * FEW + i < seq:
                    dK[b, n * FEW + i, h, d] = dKeys[b, n * FEW + i, h, d]
            T.clear(total)
            for h in T.unroll(heads):
                for i, d in T.Parallel(FEW, rope):
                    if n * FEW + i < seq:
                        total[i, d] += T.cast(dKeys[b, n * FEW + i, h, dim + d], total.dtype)
            T.copy(total, dRope[b, n * FEW:(n + 1) * FEW, :])

    return mla_collect_gradients


def prefill_attention(form: tuple[tuple[int, ...], str, bool, tuple[int, int, int], Any]) -> Any:
    """The kernel (Q, K, Rope, V, scale, O, LSE). form: sizes (heads, dim, rope, dim_v); type; whether causal; (rows, keys,
    stages) of a tile; and ((batch, seq_q, seq_k), strides of Q, K, Rope and V), or None: given by each call."""
    (heads, dim, rope, dim_v), dtype, causal, (rows, keys, stages), exact = form
    batch, seq_q, seq_k = T.dynamic("batch, seq_q, seq_k") if exact is None else exact[0]
    wide = [whole(n) for n in (dim, rope, dim_v)]  # columns of tiles: behind those of the tensors there are zeros
    pieces = [(0, dim + wide[1], 0)] if dim == wide[0] else [(0, wide[0], 0), (dim, dim + wide[1], wide[0])]

    def strided(number: int, *shape: Any) -> Any:
        return _strided(number, None if exact is None else exact[1][number], shape, dtype)

    @T.prim_func
    def mla_prefill(Q: strided(0, batch, seq_q, heads, dim + rope), K: strided(1, batch, seq_k, heads, dim),
                    Rope: strided(2, batch, seq_k, rope), V: strided(3, batch, seq_k, heads, dim_v), scale: T.float32,
                    O: T.Tensor((batch, seq_q, heads, dim_v), dtype), LSE: T.Tensor((batch, heads, seq_q), "float32")):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=2 * rows) as (bx, h, b):
            Qs, Ks = T.alloc_shared((rows, wide[0] + wide[1]), dtype), T.alloc_shared((keys, wide[0]), dtype)
            Rs, Vs = T.alloc_shared((keys, wide[1]), dtype), T.alloc_shared((keys, wide[2]), dtype)
            S, P = T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, wide[2]), "float32")
            state = [T.alloc_fragment((rows,), "float32") for _ in (0, 1, 2, 3, 4)]
            c = scale * LOG2E
            row = bx * rows
            at = row + seq_k - seq_q
            # K has zeros where the first piece has rotary elements.
            _ = [T.copy(Q[b, row:row + rows, h, i:j], Qs[:, to:to + j - i]) for i, j, to in pieces]
            reset(acc, state[0], state[3], c)
            for k in T.Pipelined(T.ceildiv(T.max(0, T.min(seq_k, at + rows)) if causal else seq_k, keys), num_stages=stages):
                T.copy(K[b, k * keys:(k + 1) * keys, h, 0:wide[0]], Ks)
                T.copy(Rope[b, k * keys:(k + 1) * keys, 0:wide[1]], Rs)
                T.gemm(Qs[:, 0:wide[0]], Ks, S, transpose_B=True, clear_accum=True)
                T.gemm(Qs[:, wide[0]:wide[0] + wide[1]], Rs, S, transpose_B=True)
                for i, j in T.Parallel(rows, keys):
                    sees = k * keys + j <= at + i if causal else k * keys + j < seq_k
                    S[i, j] = T.if_then_else(sees, S[i, j], -T.infinity("float32"))
                T.copy(V[b, k * keys:(k + 1) * keys, h, 0:wide[2]], Vs)
                absorb(S, P, acc, state, c)
                T.gemm(P, Vs, acc)
            finish(acc, state[0], state[3], state[2], c)
            T.copy(acc, O[b, row:row + rows, h, 0:wide[2]])
            T.copy(state[3], LSE[b, h, row:row + rows])

    return mla_prefill


_INPUTS, _OPTIONS = "Tensor q, Tensor k, Tensor k_rope, Tensor v", "bool causal, float? scale"
_FUNCTION = Function(
    "mla_prefill", Step(f"{_INPUTS}, {_OPTIONS}, bool dynamic, str? target", _results, by_sequences(_forward, 2), 2),
    Step(f"{_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, str? target, Tensor? grad_out, Tensor? grad_lse",
         lambda *args: [(tuple(x.shape), type_name(x)) for x in args[:4]], by_sequences(_backward, 4), 4),
    lambda needs, args, made: (*args[:4], *made, *args[4:6], args[7]), (0, 1, 2, 3), visible=2)
