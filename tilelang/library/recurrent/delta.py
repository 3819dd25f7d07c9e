"""`gated_delta` and `kda`: linear attention that overwrites what its state holds for a key, in chunks, with gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

from tilelang.errors import error, register

from ..arrays import accumulator, by_sequences, contiguous, empty, padded, sum_into, type_name, zeros
from ..attention.inputs import check_double, check_like, fast_kernel, fitting_kernel, running_on
from ..autograd import Function, Results, Step, untraced
from ..place import Place, target_text
from .delta_backward import delta_backward
from .delta_kernels import CHUNKS, COLUMNS, DeltaForm, delta_chunks, delta_steps, workspace

register("delta-argument", ValueError, "tensors of a delta rule that do not go together",
         "see the shapes in the docstring of the function", expected="tensors of the shapes and types that the function names")

STEPS = 8  # at most as many are computed one after another
TILE = 64 * 128  # elements of q in a chunk of gradients


def gated_delta(q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, *, scale: float | None = None, initial: Any = None,
                target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, dim_v), of v's type, and the last state (batch, heads, dim_k, dim_v), float32, of

        state_t = alpha_t (state_(t-1) - beta_t k_t (k_t^T state_(t-1))) + beta_t k_t v_t^T,      o_t = scale state_t^T q_t.

    q, k: (batch, seq, key heads, dim_k); v: (batch, seq, heads, dim_v), float16 or bfloat16.  Rows of k must be normalised.
    heads is a multiple of the number of key heads; dim_k is at most 256; seq is any length: up to 8 steps, as in decoding, are
    computed one after another.  Kernels take dim_k and dim_v of whole 64: others are padded with zeros.
    log_alpha, beta: (batch, seq, heads), float32; log_alpha at most 0, where less than -20 counts as -20.
    scale: dim_k ** -0.5 by default.  initial: the state before the first step, zeros by default.  float64, for all tensors, on
    the CPU.

    Gradients of all tensors, of their types; the same inputs give the same bits.  Saved for them: the inputs; what chunks need
    is computed again.  Memory of backward beside the results: for each chunk of 64 steps and head 4 dim_k dim_v + 16,640
    bytes, of `kda` 384 dim_k more, and 2 bytes for each element of v.

    Raises delta-argument.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> out, state = gated_delta(q, k, v, -rng.random((1, 100, 2), np.float32), rng.random((1, 100, 2), np.float32))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    return _call(GATED_DELTA, (q, k, v, log_alpha, beta, initial), scale, target)


def kda(q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, *, scale: float | None = None, initial: Any = None,
        target: Any = None) -> tuple[Any, Any]:
    """Kimi delta attention: the outputs and the last state of gated_delta with a decay for every channel of the key.

        state_t = (I - beta_t k_t k_t^T) diag(alpha_t) state_(t-1) + beta_t k_t v_t^T,      o_t = scale state_t^T q_t

    log_alpha: (batch, seq, heads, dim_k), float32, at most 0; less than -20 counts as -20.  q, k, v: float16 or bfloat16,
    float64 on the CPU.  All else is as for gated_delta.

    Raises delta-argument.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> out, state = kda(q, k, v, -rng.random((1, 100, 2, 64), np.float32), rng.random((1, 100, 2), np.float32))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    return _call(KDA, (q, k, v, log_alpha, beta, initial), scale, target)


def _call(function: Function, given: tuple[Any, ...], scale: Any, target: Any) -> Any:
    """Zeros behind q, k, v and the state, for sizes that kernels do not have, change no result."""
    scale, where, (q, k, v, log_alpha, beta, initial) = None if scale is None else float(scale), target_text(target), given
    dim_k, dim_v = (getattr(x, "shape", None) or (0,) for x in (q, v))
    more_k, more_v = -dim_k[-1] % COLUMNS, -dim_v[-1] % COLUMNS
    if not more_k and not more_v:
        return function(*given, scale, where)
    if untraced(q):
        _check(function.name, *given)
    q, k, v = padded(q, more_k), padded(k, more_k), padded(v, more_v)
    log_alpha = padded(log_alpha, more_k) if function is KDA else log_alpha
    initial = None if initial is None else padded(initial, more_v, more_k)
    scale = dim_k[-1]**-0.5 if scale is None else scale
    out, last = function(q, k, v, log_alpha, beta, initial, scale, where)
    return out[..., :dim_v[-1]], last[..., :dim_k[-1], :dim_v[-1]]


def _results(name: str, *args: Any) -> Results:
    batch, seq, heads, dim_k, dim_v = _check(name, *args[:6])
    return ((batch, seq, heads, dim_v), type_name(args[0])), ((batch, heads, dim_k, dim_v), type_name(args[4]))


def _form(name: str, q: Any, v: Any, at: Place) -> DeltaForm:
    heads, kind = v.shape[2], type_name(q)
    wgmma = at.target.has_wgmma and kind != "float64" and q.shape[3] <= 128
    return DeltaForm(heads, heads // q.shape[2], q.shape[3], v.shape[3], kind, name == "kda", wgmma)


def _run(name: str, *args: Any) -> None:
    q, k, v, log_alpha, beta, initial, scale, target, out, last = args
    before = zeros(q, tuple(last.shape), type_name(beta)) if initial is None else initial
    if 0 in out.shape:
        last[...] = before
        return
    at, (batch, seq, _, dim_k) = running_on(q, target), q.shape
    check_double("delta-argument", name, q, at)
    form = _form(name, q, v, at)
    if seq > STEPS:
        form, kernel = fitting_kernel(at, delta_chunks, *(form._replace(chunk=n) for n in CHUNKS))
        work = [empty(q, *x) for x in workspace(form, batch, -(-seq // form.chunk))]
    else:
        kernel, work = fast_kernel(at, delta_steps, form), []
    inputs = map(contiguous, (q, k, v, log_alpha, beta, before))
    kernel(*inputs, dim_k ** -0.5 if scale is None else scale, *work, out, last)


def _gradient_results(name: str, q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, initial: Any, *others: Any) -> Results:
    given = q, k, v, log_alpha, beta, initial
    return tuple(((0,), type_name(beta)) if x is None else (tuple(x.shape), type_name(x)) for x in given)


def _gradient(name: str, *args: Any) -> None:
    (q, k, v, log_alpha, beta, initial, scale, target, dout, dlast), made = args[:10], args[10:]
    dq, dk, dv, ddecay, dbeta, dinitial = made
    (batch, seq, key_heads, dim_k), (heads, dim_v) = q.shape, v.shape[2:]
    states, kind = (batch, heads, dim_k, dim_v), type_name(beta)
    none = zeros(q, states, kind) if initial is None or dlast is None else None
    before, final = (none if x is None else x for x in (initial, dlast))
    if 0 in v.shape:
        for x in (dq, dk):
            x[...] = 0
        if initial is not None:
            dinitial[...] = final
        return
    at, dout = running_on(q, target), zeros(v, tuple(v.shape), type_name(v)) if dout is None else dout
    form = _form(name, q, v, at)
    together = at.target.is_gpu and 2 * batch * heads * (dim_v // COLUMNS) <= (at.sms or at.chip.sms)
    form = form._replace(together=together and not form.channels)
    form, kernel = fitting_kernel(at, delta_backward, *(form._replace(chunk=n) for n in CHUNKS if n * form.dim_k <= TILE))
    chunks = -(-seq // form.chunk)
    work = [empty(q, *x) for x in workspace(form, batch, chunks)]
    work += [empty(q, (batch, heads, chunks, dim_v, dim_k), type_name(q)) for _ in (0, 1)]
    work.append(empty(q, tuple(v.shape), type_name(q)))
    parts = dim_k // form.width
    splits = empty(q, (parts, batch, seq, heads), kind) if parts > 1 else dbeta.reshape(1, batch, seq, heads)
    of_keys = [dq, dk] if form.each == 1 else [empty(q, (batch, seq, heads, dim_k), kind) for _ in (0, 1)]
    inputs = map(contiguous, (q, k, v, log_alpha, beta, before))
    kernel(*inputs, dim_k ** -0.5 if scale is None else scale, contiguous(dout), contiguous(final), *work, *of_keys, dv, ddecay,
           splits, empty(q, states, kind) if initial is None else dinitial)
    if parts > 1:
        sum_into(dbeta, splits, 0)
    if form.each > 1:
        for x, y in zip((dq, dk), of_keys):
            sum_into(x, y.reshape(batch, seq, key_heads, form.each, dim_k), 3)


def _check(name: str, q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, initial: Any) -> tuple[int, ...]:
    """(batch, seq, heads, dim_k, dim_v).  Raises delta-argument."""
    found = f"q {tuple(q.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or v.ndim != 4 or q.shape[:2] != v.shape[:2] or q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise error("delta-argument", f"the shapes given to {name} do not go together: ‹{found}›",
                    expected="q (batch, seq, key heads, dim_k), v (batch, seq, heads, dim_v), heads a multiple of key heads")
    (batch, seq, heads, dim_v), dim_k, kind = v.shape, q.shape[3], type_name(q)
    if not 0 < dim_k <= 256 or not dim_v or kind not in ("float16", "bfloat16", "float64"):
        raise error("delta-argument", f"{name} has no kernel for {kind}, dim_k {dim_k} and dim_v {dim_v}",
                    expected="float16 or bfloat16, float64 on the CPU; dim_k of 1 to 256",
                    found=f"{kind}, dim_k {dim_k}, dim_v {dim_v}", hint="convert q, k and v")
    row, acc = (batch, seq, heads), accumulator(kind)
    given = {"k": (k, tuple(q.shape), kind), "v": (v, tuple(v.shape), kind), "beta": (beta, row, acc),
             "log_alpha": (log_alpha, (*row, dim_k) if name == "kda" else row, acc)}
    if initial is not None:
        given["initial"] = initial, (batch, heads, dim_k, dim_v), acc
    check_like("delta-argument", name, q, given, ", like q", differentiable=True)
    return batch, seq, heads, dim_k, dim_v


def _function(name: str) -> Function:
    given = "Tensor q, Tensor k, Tensor v, Tensor log_alpha, Tensor beta, Tensor? initial, float? scale, str? target"
    forward = Step(given, partial(_results, name), by_sequences(partial(_run, name), 2), 2)
    backward = Step(f"{given}, Tensor? dout, Tensor? dlast", partial(_gradient_results, name),
                    by_sequences(partial(_gradient, name), 6), 6)
    return Function(name, forward, backward, lambda needs, given, made: given, tuple(range(6)), visible=2)


GATED_DELTA, KDA = _function("gated_delta"), _function("kda")
