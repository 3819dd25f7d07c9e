"""`chunk_state` and `chunk_scan`: the two kernels of a state space model in chunks (Mamba-2) that take nearly all of its time.

With a the running sum of A dt within a chunk, x of P channels, and B, C of N state entries, for each head:
    states = sum over s of exp(a_last - a_s) dt_s x_s B_s^T                                            (P, N) for each chunk
    out_t  = exp(a_t) C_t before^T + sum over s <= t of (C_t . B_s) exp(a_t - a_s) dt_s x_s + D x_t
`before` is the state before the chunk.  Both need a <= 0 that falls, as A < 0 and dt > 0 make it: no exponential exceeds 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tilelang.errors import error, register

from ..arrays import contiguous, empty, is_numpy, type_name
from ..attention.inputs import check_like, fitting_kernel, running_on
from ..place import Place
from .ssd_kernels import MOST, SsdForm, scan_kernel, scan_pairs, state_kernel

ENTRIES = 64 * 256  # of a state in a block of chunk_scan, beside two stages of loads

register("ssd-argument", ValueError, "tensors of a state space model that do not go together",
         "see the shapes in the docstring of the function", expected="tensors of the shapes and types that the function names")


def chunk_state(x: Any, b: Any, dt: Any, da_cumsum: Any, *, target: Any = None) -> Any:
    """What each chunk adds to the state: (batch, chunks, heads, P, N), of x's type.

    x: (batch, seq, heads, P); b: (batch, seq, groups, N), float16 or bfloat16; heads of a group share b.
    dt, da_cumsum: (batch, heads, chunks, length), float32.  The length of a chunk is a multiple of 64, P and N of 16, at most
    256.

    Raises ssd-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> x, b = (rng.standard_normal((1, 128, n, 64)).astype(np.float16) for n in (2, 1))
    >>> dt = rng.random((1, 2, 2, 64), np.float32)
    >>> chunk_state(x, b, dt, -np.cumsum(dt, -1)).shape
    (1, 2, 2, 64, 64)
    """
    sizes = _check("chunk_state", x, b, dt, {"da_cumsum": (da_cumsum, tuple(dt.shape), "float32")})
    batch, chunks, _, heads, _, p, n = sizes
    out = empty(x, (batch, chunks, heads, p, n), type_name(x))
    flat = contiguous(x).reshape(batch, x.shape[1], heads * p)
    run_states(running_on(x, target), flat, _form(sizes, x), b, dt, da_cumsum, out.reshape(batch, chunks, heads * p, n))
    return out


def chunk_scan(cb: Any, x: Any, dt: Any, da_cumsum: Any, c: Any, before: Any, d: Any = None, *, target: Any = None) -> Any:
    """The output (batch, seq, heads, P) of each chunk, of x's type.

    cb: (batch, chunks, groups, length, length), c b^T of each chunk, of which entries [t, s] with s <= t are used; x: (batch,
    seq, heads, P); c: (batch, seq, groups, N); before: the states before the chunks, (batch, chunks, heads, P, N): all float16
    or bfloat16.  dt, da_cumsum: (batch, heads, chunks, length), float32.  d: (heads,), float32, or None for 0.  Sizes as for
    chunk_state.

    Raises ssd-argument, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> x, c = (rng.standard_normal((1, 128, n, 64)).astype(np.float16) for n in (2, 1))
    >>> cb, before = np.zeros((1, 2, 1, 64, 64), np.float16), np.zeros((1, 2, 2, 64, 64), np.float16)
    >>> chunk_scan(cb, x, np.ones((1, 2, 2, 64), np.float32), np.zeros((1, 2, 2, 64), np.float32), c, before).shape
    (1, 128, 2, 64)
    """
    kind = type_name(x)
    batch, chunks, length, heads, groups, p, n = _sizes("chunk_scan", x, c, dt)
    others = {"cb": (cb, (batch, chunks, groups, length, length), kind), "da_cumsum": (da_cumsum, tuple(dt.shape), "float32"),
              "before": (before, (batch, chunks, heads, p, n), kind)}
    if d is not None:
        others["d"] = d, (heads,), "float32"
    sizes = _check("chunk_scan", x, c, dt, others)
    out = empty(x, (batch, chunks * length, heads, p), kind)
    run_scan(running_on(x, target), _form(sizes, x)._replace(skip=d is not None), cb, x, dt, da_cumsum, c, before,
             dt if d is None else d, out)
    return out


def _form(sizes: tuple[int, ...], x: Any) -> SsdForm:
    _, _, length, *others = sizes
    return SsdForm(length, *others, type_name(x))


def _sizes(name: str, x: Any, b: Any, dt: Any) -> tuple[int, ...]:
    """(batch, chunks, length, heads, groups, P, N).  Raises ssd-argument."""
    found = f"x {tuple(x.shape)}, b or c {tuple(b.shape)}, dt {tuple(dt.shape)}"
    if (x.ndim, b.ndim, dt.ndim) != (4, 4, 4) or x.shape[:2] != b.shape[:2] or dt.shape[:2] != x.shape[::2] or \
            dt.shape[2] * dt.shape[3] != x.shape[1] or b.shape[2] == 0 or x.shape[2] % b.shape[2]:
        raise error("ssd-argument", f"the shapes given to {name} do not go together: ‹{found}›",
                    expected="x (batch, seq, heads, P), b or c (batch, seq, groups, N), dt (batch, heads, chunks, length)",
                    hint="pad the sequence to whole chunks")
    p, n, length = x.shape[3], b.shape[3], dt.shape[3]
    if length % 64 or any(m % 16 or not 0 < m <= 256 for m in (p, n)):
        raise error("ssd-argument", f"{name} has no kernel for chunks of {length}, P {p} and N {n}",
                    expected="chunks of a multiple of 64, P and N multiples of 16 up to 256",
                    found=f"chunks of {length}, P {p}, N {n}", hint="pad with zeros")
    return x.shape[0], dt.shape[2], length, x.shape[2], b.shape[2], p, n


def _check(name: str, x: Any, b: Any, dt: Any, others: dict[str, tuple[Any, tuple[int, ...], str]]) -> tuple[int, ...]:
    """The sizes.  others: name -> (tensor, its shape, its type).  Raises ssd-argument, attention-gradient."""
    sizes, kind = _sizes(name, x, b, dt), type_name(x)
    if kind not in ("float16", "bfloat16"):
        raise error("ssd-argument", f"x is ‹{kind}›", expected="float16 or bfloat16")
    given = {"b or c": (b, tuple(b.shape), kind), "dt": (dt, tuple(dt.shape), "float32"), **others}
    check_like("ssd-argument", name, x, given, ", like x")
    return sizes


@cache
def _state_forms(f: SsdForm) -> list[SsdForm]:
    """The forms of state_kernel whose accumulators fit in registers, with the fewest blocks first."""
    forms = [f._replace(splits=s) for s in (1, 2, 4) if f.p % (16 * s) == 0]
    return [g for g in forms if g.state_block[1] * g.n <= MOST * g.state_block[2]] or forms[:1]


def run_states(at: Place, x: Any, f: SsdForm, *arrays: Any) -> None:
    """Compute the last of the arrays that state_kernel names, for x (batch, seq, heads * P)."""
    run_fitting(at, state_kernel, _state_forms(f._replace(wide=at.target.has_wgmma)), x, *arrays)


def run_scan(at: Place, f: SsdForm, cb: Any, x: Any, *arrays: Any) -> None:
    """Compute the last of the arrays that scan_kernel names."""
    wide, forms = at.target.has_wgmma and f.acc == "float32", []
    if wide and f.n % 64 == 0:
        pairs = [f._replace(heads=f.heads * n, p=f.p // n, pieces=n) for n in range(1, 9)
                 if f.p % (32 * n) == 0 == f.each * n % 2]
        forms = [g._replace(blocks=at.sms or at.chip.sms, stages=n) for g in pairs for n in (4, 2)]
    fitting = [s for s in (1, 2, 4) if f.p % (16 * s) == 0]
    forms += [f._replace(splits=s, wide=wide) for s in fitting if f.p * f.n <= s * ENTRIES or s == fitting[-1]]
    run_fitting(at, _scan, forms, cb, x, *arrays)


def _scan(f: SsdForm) -> Any:
    return scan_pairs(f) if f.stages else scan_kernel(f)


def run_fitting(at: Place, make: Any, forms: Sequence[SsdForm], *arrays: Any) -> None:
    """Run the kernel of the first form for which a block has room."""
    if arrays[-1].size if is_numpy(arrays[-1]) else arrays[-1].numel():
        form, kernel = fitting_kernel(at, make, *forms)
        given = [*map(contiguous, arrays[:-1]), arrays[-1]]
        if form.pieces > 1:  # heads of scan_pairs: x, the states before and the result
            for n in (1, 5, 7):
                given[n] = given[n].reshape(*given[n].shape[:2], form.heads, form.p, *given[n].shape[4:])
        kernel(*given)
