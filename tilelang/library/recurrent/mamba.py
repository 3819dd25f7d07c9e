"""`mamba2` and `retention`: state space models in chunks, with gradients."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error

from ..arrays import contiguous, empty, filled, is_numpy, padded, sum_into, type_name, zeros
from ..attention.inputs import check_double, check_like, fast_kernel, fitting_kernel, running_on
from ..autograd import Function, Results, Step
from ..place import Place, target_text
from .mamba_kernels import STEPS, MambaForm, cumulate, gradients, scores, walk, walks
from .ssd import run_scan
from .ssd_kernels import SsdForm

CHUNK = 256  # steps of a chunk of forward


def mamba2(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any = None, *, initial: Any = None,
           target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, P), of x's type, and the last state (batch, heads, P, N), float32, of

        state_t = exp(a dt_t) state_(t-1) + dt_t x_t b_t^T,      y_t = state_t c_t + d x_t.

    x: (batch, seq, heads, P); b, c: (batch, seq, groups, N), float16 or bfloat16; heads of a group share b and c.  P and N are
    at most 256; kernels take multiples of 16, N of 64 above 64: others are copied with zeros behind.  seq is any length.  dt:
    (batch, seq, heads), float32, above 0; a: (heads,), float32, below 0; d: (heads,), float32, 0 by default.  initial: the
    state before the first step, zeros by default.  float64, for all tensors, on the CPU.

    Gradients of all tensors, of their types; the same inputs give the same bits.  Saved for them: the inputs; states of chunks
    are computed again.  Memory of backward beside the results: 4 bytes a state entry for each 64 steps, 8 bytes a step and
    head, and up to 64 bytes an entry of b.
    Kernels take any batch and length; sequences of less than 256 steps have one for each length in whole tiles of 64.
    target: as for tilelang.compile, instead of the device that x is on.

    Raises ssd-argument.

    >>> rng = np.random.default_rng(0)
    >>> x, b, c = (rng.standard_normal((1, 100, n, 64)).astype(np.float16) for n in (2, 1, 1))
    >>> y, state = mamba2(x, rng.random((1, 100, 2), np.float32), -np.ones(2, np.float32), b, c)
    >>> y.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    p, n = ((getattr(z, "shape", None) or (0,))[-1] for z in (x, b))
    more_p, more_n = -p % 16, -n % (64 if n > 64 else 16)
    if not more_p and not more_n:
        return MAMBA2(x, dt, a, b, c, d, initial, target_text(target))
    _results(x, dt, a, b, c, d, initial, None)  # checks what the caller gave
    x, b, c = padded(x, more_p), padded(b, more_n), padded(c, more_n)
    initial = None if initial is None else padded(initial, more_n, more_p)
    y, last = MAMBA2(x, dt, a, b, c, d, initial, target_text(target))
    return y[..., :p], last[..., :p, :n]


def retention(q: Any, k: Any, v: Any, log_gamma: Any, *, scale: float | None = None, initial: Any = None,
              target: Any = None) -> tuple[Any, Any]:
    """The outputs (batch, seq, heads, dim_v), of v's type, and the last state (batch, heads, dim_v, dim_k), float32, of

        state_t = gamma state_(t-1) + v_t k_t^T,      o_t = scale state_t q_t.

    q, k: (batch, seq, heads, dim_k); v: (batch, seq, heads, dim_v), float16 or bfloat16; dimensions as P and N of mamba2, which
    computes it.  log_gamma: (heads,), float32, below 0.  scale: dim_k ** -0.5 by default, of a power of 2 without a rounding.
    float64, for all tensors, on the CPU.  The rest, and gradients, as for mamba2.

    Raises ssd-argument.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 2, 64)).astype(np.float16) for _ in range(3))
    >>> out, state = retention(q, k, v, np.log1p(-2.0 ** np.float32([-5, -6])))
    >>> out.shape, state.shape
    ((1, 100, 2, 64), (1, 2, 64, 64))
    """
    steps = filled(v, tuple(v.shape[:3]), 1, type_name(log_gamma))
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if is_numpy(q):
        scaled = scaled.astype(q.dtype)  # bfloat16 times a number is a float32
    return mamba2(v, steps, log_gamma, k, scaled, initial=initial, target=target)


def _form(x: Any, b: Any, d: Any, length: int, slices: int = 1) -> MambaForm:
    return MambaForm(x.shape[2], b.shape[2], x.shape[3], b.shape[3], length, type_name(x), slices, d is not None)


def _results(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, initial: Any, target: str | None) -> Results:
    found, kind = f"x {tuple(x.shape)}, b {tuple(b.shape)}", type_name(x)
    if x.ndim != 4 or b.ndim != 4 or x.shape[:2] != b.shape[:2] or b.shape[2] == 0 or x.shape[2] % b.shape[2]:
        raise error("ssd-argument", f"the shapes given to mamba2 do not go together: ‹{found}›",
                    expected="x (batch, seq, heads, P), b (batch, seq, groups, N), heads a multiple of groups")
    batch, seq, heads, p, n = *x.shape, b.shape[3]
    if any(not 0 < m <= 256 for m in (p, n)) or kind not in ("float16", "bfloat16", "float64"):
        raise error("ssd-argument", f"mamba2 has no kernel for {kind}, P {p} and N {n}", found=f"{kind}, P {p}, N {n}",
                    expected="float16 or bfloat16, float64 on the CPU; P and N of 1 to 256", hint="convert x, b and c")
    acc = "float64" if kind == "float64" else "float32"
    given = {"dt": (dt, (batch, seq, heads), acc), "a": (a, (heads,), acc), "b": (b, tuple(b.shape), kind),
             "c": (c, tuple(b.shape), kind)}
    for name, value, shape in (("d", d, (heads,)), ("initial", initial, (batch, heads, p, n))):
        if value is not None:
            given[name] = value, shape, acc
    check_like("ssd-argument", "mamba2", x, given, ", like x", differentiable=True)
    return ((batch, seq, heads, p), kind), ((batch, heads, p, n), acc)


def _cumulate(at: Place, x: Any, dt: Any, a: Any, f: MambaForm) -> tuple[Any, Any]:
    """dt and the running sum of a dt, by chunks: (batch, heads, chunks, length)."""
    rows = x.shape[0], f.heads, -(-x.shape[1] // f.length), f.length
    by_chunks, found = empty(x, rows, f.acc), empty(x, rows, f.acc)
    fast_kernel(at, cumulate, f)(contiguous(dt), contiguous(a), by_chunks, found)
    return by_chunks, found


def _run(*args: Any) -> None:
    x, dt, a, b, c, d, initial, target, y, last = args
    before = zeros(x, tuple(last.shape), type_name(last)) if initial is None else contiguous(initial)
    if 0 in x.shape:
        last[...] = before
        return
    at, x, b, c = running_on(x, target), contiguous(x), contiguous(b), contiguous(c)
    check_double("ssd-argument", "mamba2", x, at)
    f = _form(x, b, d, min(CHUNK, -(-x.shape[1] // STEPS) * STEPS))
    dt, along = _cumulate(at, x, dt, a, f)
    batch, _, chunks, length = dt.shape
    states = empty(x, (batch, chunks, *last.shape[1:]), f.dtype)
    fast_kernel(at, walk, f, min(f.n, 64))(x, b, dt, along, before, states, last)
    cb = empty(x, (batch, chunks, f.groups, length, length), f.dtype)
    fast_kernel(at, scores, f)(c, b, cb)
    scan = SsdForm(length, f.heads, f.groups, f.p, f.n, f.dtype, d is not None)
    run_scan(at, scan, cb, x, dt, along, c, states, dt if d is None else d, y)


def _gradient_results(*args: Any) -> Results:
    def like(v: Any) -> tuple[tuple[Any, ...], str]:
        return ((0,), type_name(args[1])) if v is None else (tuple(v.shape), type_name(v))

    return tuple(map(like, args[:7]))


def _gradient(*args: Any) -> None:
    (x, dt, a, b, c, d, initial, target, dy, dlast), made = args[:10], args[10:]
    dx, ddt, da, db, dc, dd, dinitial = made
    states = x.shape[0], x.shape[2], x.shape[3], b.shape[3]
    none = zeros(x, states, type_name(dt)) if initial is None or dlast is None else None
    first, final = (none if v is None else contiguous(v) for v in (initial, dlast))
    if 0 in x.shape:
        for v in (da, db, dc, dd):
            v[...] = 0
        if initial is not None:
            dinitial[...] = final
        return
    at, x, b, c = running_on(x, target), contiguous(x), contiguous(b), contiguous(c)
    dy = zeros(x, tuple(x.shape), type_name(x)) if dy is None else contiguous(dy)
    f = _form(x, b, d, STEPS)
    f = f._replace(slices=next(s for s in (8, 4, 2, 1) if f.each % s == 0))
    sizes = [(n, m) for m in dict.fromkeys((1, max(1, f.n // 64))) for n in (STEPS, STEPS // 2, STEPS // 4)]
    forms = [f._replace(length=n, pieces=m) for n, m in sizes]
    f, kernel = fitting_kernel(at, gradients, *forms)
    dt, along = _cumulate(at, x, dt, a, f)
    batch, chunks = x.shape[0], dt.shape[2]
    before, after = (empty(x, (batch, chunks, *states[1:]), f.dtype) for _ in (0, 1))
    last, dfirst = empty(x, states, f.acc), empty(x, states, f.acc) if initial is None else dinitial
    fast_kernel(at, walks, f, min(f.n, 64))(x, b, dt, along, first, before, dy, c, final, after, dfirst, last)
    of_heads = [empty(x, (batch, chunks, f.heads), f.acc) for _ in (0, 1)]
    slices = [empty(x, (f.slices, *b.shape), f.acc) for _ in (0, 1)]
    kernel(x, contiguous(a), b, c, contiguous(a if d is None else d), dt, along, before, after, dy, dx, ddt, *of_heads, *slices)
    for out, found in zip((db, dc), slices):
        sum_into(out, found, 0)
    for out, found in zip((da, dd)[:2 if d is not None else 1], of_heads):
        sum_into(out, found, (0, 1))


_GIVEN = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? initial, str? target"
MAMBA2 = Function("mamba2", Step(_GIVEN, _results, _run, 2),
                  Step(f"{_GIVEN}, Tensor? dy, Tensor? dlast", _gradient_results, _gradient, 7),
                  lambda needs, given, made: given, tuple(range(7)), visible=2)
