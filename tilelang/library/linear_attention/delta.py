"""`gated_delta` and `kda`: linear attention that overwrites what its state holds for a key, forward in chunks of steps."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register

from ..arrays import compact_copy, contiguous, empty, type_name, zeros
from ..attention.inputs import check_like, fast_kernel, fitting_kernel, running_on
from .delta_kernels import CHUNKS, COLUMNS, DeltaForm, delta_chunks, delta_steps, workspace

register("delta-argument", ValueError, "tensors of a delta rule that do not go together",
         "see the shapes in the docstring of the function", expected="tensors of the shapes and types that the function names")

STEPS = 8  # at most as many are computed one after another


def gated_delta(q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, *, scale: float | None = None, initial: Any = None,
                target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, dim_v), of v's type, and the last state (batch, heads, dim_k, dim_v), float32, of

        state_t = alpha_t (state_(t-1) - beta_t k_t (k_t^T state_(t-1))) + beta_t k_t v_t^T,      o_t = scale state_t^T q_t.

    q, k: (batch, seq, key heads, dim_k); v: (batch, seq, heads, dim_v), float16 or bfloat16.  Rows of k must be normalised.
    heads is a multiple of the number of key heads; dim_k is 64 or 128, dim_v a multiple of 64; seq is any length: up to
    8 steps, as in decoding, are computed one after another.
    log_alpha, beta: (batch, seq, heads), float32; log_alpha at most 0, where less than -20 counts as -20.
    scale: dim_k ** -0.5 by default.  initial: the state before the first step, zeros by default.

    Raises delta-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> out, state = gated_delta(q, k, v, -rng.random((1, 100, 2), np.float32), rng.random((1, 100, 2), np.float32))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    return _delta("gated_delta", (q, k, v, log_alpha, beta, initial), scale, target)


def kda(q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, *, scale: float | None = None, initial: Any = None,
        target: Any = None) -> tuple[Any, Any]:
    """Kimi delta attention: the outputs and the last state of gated_delta with a decay for every channel of the key.

        state_t = (I - beta_t k_t k_t^T) diag(alpha_t) state_(t-1) + beta_t k_t v_t^T,      o_t = scale state_t^T q_t

    log_alpha: (batch, seq, heads, dim_k), float32, at most 0; less than -20 counts as -20.  q, k, v: float16 or bfloat16.
    All else is as for gated_delta.

    Raises delta-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> out, state = kda(q, k, v, -rng.random((1, 100, 2, 64), np.float32), rng.random((1, 100, 2), np.float32))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    return _delta("kda", (q, k, v, log_alpha, beta, initial), scale, target)


def _delta(name: str, given: tuple[Any, ...], scale: float | None, target: Any) -> tuple[Any, Any]:
    batch, seq, heads, dim_k, dim_v = _check(name, *given)
    q, initial = given[0], given[-1]
    kind, states = type_name(q), (batch, heads, dim_k, dim_v)
    before = zeros(q, states, "float32") if initial is None else initial
    out = empty(q, (batch, seq, heads, dim_v), kind)
    if 0 in (batch, seq, heads, dim_v):
        return out, compact_copy(before)
    last = empty(q, states, "float32")
    at = running_on(q, target)
    form = DeltaForm(heads, heads // q.shape[2], dim_k, dim_v, kind, name == "kda", at.target.has_wgmma)
    if seq > STEPS:
        form, kernel = fitting_kernel(at, delta_chunks, *(form._replace(chunk=n) for n in CHUNKS))
        work = [empty(q, *x) for x in workspace(form, batch, -(-seq // form.chunk))]
    else:
        kernel, work = fast_kernel(at, delta_steps, form), []
    inputs = map(contiguous, (*given[:-1], before))
    kernel(*inputs, dim_k ** -0.5 if scale is None else float(scale), *work, out, last)
    return out, last


def _check(name: str, q: Any, k: Any, v: Any, log_alpha: Any, beta: Any, initial: Any) -> tuple[int, ...]:
    """(batch, seq, heads, dim_k, dim_v).  Raises delta-argument, attention-gradient."""
    found = f"q {tuple(q.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or v.ndim != 4 or q.shape[:2] != v.shape[:2] or q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise error("delta-argument", f"the shapes given to {name} do not go together: {found}", found=found,
                    expected="q (batch, seq, key heads, dim_k), v (batch, seq, heads, dim_v), heads a multiple of key heads")
    (batch, seq, heads, dim_v), dim_k, kind = v.shape, q.shape[3], type_name(q)
    if dim_k not in (64, 128) or dim_v % COLUMNS or kind not in ("float16", "bfloat16"):
        raise error("delta-argument", f"{name} has no kernel for {kind}, dim_k {dim_k} and dim_v {dim_v}",
                    expected="float16 or bfloat16, dim_k of 64 or 128, dim_v a multiple of 64",
                    found=f"{kind}, dim_k {dim_k}, dim_v {dim_v}",
                    hint="convert q, k and v, and pad dim_k and dim_v with zeros")
    row = (batch, seq, heads)
    given = {"k": (k, tuple(q.shape), kind), "v": (v, tuple(v.shape), kind), "beta": (beta, row, "float32"),
             "log_alpha": (log_alpha, (*row, dim_k) if name == "kda" else row, "float32")}
    if initial is not None:
        given["initial"] = initial, (batch, heads, dim_k, dim_v), "float32"
    check_like("delta-argument", name, q, given, ", like q")
    return batch, seq, heads, dim_k, dim_v
