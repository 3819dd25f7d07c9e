"""The list of whole-tensor programs: what is written, arguments for it, and what it computes, in NumPy and float64.

Each case has small arguments (odd extents; the simulator runs them) and large ones (for a GPU).  Programs without
annotations take their shapes from the call; those with T.dynamic symbols are called with several sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import tilelang
import tilelang.language as T
from tilelang.program import Program

F16, BF16, F32, I8, U8, I32, B = "float16", "bfloat16", "float32", "int8", "uint8", "int32", "bool"
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass
class Case:
    """A program.  small, large: parameter -> (shape, dtype, highest integer, "unit" or factor).  oracle: of float64 arrays.

    also: further small arguments, for dynamic sizes.  rounds: roundings to the narrowest type on the longest path.
    """

    name: str
    program: Any
    small: dict[str, tuple]
    large: dict[str, tuple]
    oracle: Callable[..., Any]
    rounds: float = 4
    also: list[dict[str, tuple]] = field(default_factory=list)
    kind: str = ""

    def arguments(self, spec: dict[str, tuple] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()) + seed)
        return {k: _array(rng, *v) for k, v in (spec or self.small).items()}

    def expected(self, args: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        wide = [a.astype(np.float64) if a.dtype.kind not in "iub" else a for a in args.values()]
        out = self.oracle(*wide)
        return out if isinstance(out, tuple) else (out,)

    def check(self, got: Any, args: dict[str, np.ndarray], scale: float = 1) -> None:
        """Every result within rounds * eps of its type, relative to the greatest value of the result."""
        got = got if isinstance(got, tuple) else (got,)
        want = self.expected(args)
        assert len(got) == len(want)
        for k, (g, w) in enumerate(zip(got, want)):
            g, w = np.asarray(g), np.asarray(w)
            assert g.shape == w.shape, (self.name, k, g.shape, w.shape)
            if g.dtype.kind in "iub":
                assert (g == w).all(), (self.name, k)
                continue
            eps = max(EPS[str(g.dtype)], *(EPS.get(str(a.dtype), 0) for a in args.values()), 0)
            size = np.abs(w[np.isfinite(w)]).max(initial=0) + 1e-30
            g = g.astype(np.float64)
            assert (np.isfinite(g) == np.isfinite(w)).all(), (self.name, k)
            error = np.abs(np.where(np.isfinite(w), g - w, 0)).max(initial=0) / size
            assert error <= self.rounds * scale * eps, (self.name, k, error / eps)


def _array(rng, shape, dt, high=0):
    if dt == B:
        return rng.random(shape) < 0.7
    if dt in (I32, I8, U8, "int64"):
        low = -128 if dt == I8 else 0
        return rng.integers(low, high or (128 if dt == I8 else 256 if dt == U8 else 1000), shape).astype(dt)
    values = rng.random(shape) if high == "unit" else rng.standard_normal(shape) * (high or 1.0)
    return values.astype(ml_dtypes.bfloat16 if dt == BF16 else dt)


CASES: list[Case] = []


def case(oracle, small, large=None, rounds=4, also=(), kind=""):
    """Decorator: the program and what it computes."""

    def add(fn):
        program = fn if isinstance(fn, Program) else tilelang.program(fn)
        CASES.append(Case(program.__name__, program, small, large or small, oracle, rounds, list(also), kind))
        return program

    return add


# ---- in float64 ------------------------------------------------------------------------------------------------------


def sig(x):
    return 1 / (1 + np.exp(-x))


def smax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def lse(x, axis=-1):
    m = x.max(axis, keepdims=True)
    return (np.log(np.exp(x - m).sum(axis, keepdims=True)) + m).squeeze(axis)


def erf64(x):
    from math import erf

    return np.vectorize(erf)(x)


def rms(x, w, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def lnorm(x, w, b, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * w + b


def ein(spec, *xs):
    return np.einsum(spec, *xs, optimize=True)


def scores(q, k):
    return ein("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])


def below(s, keep, value=-np.inf):
    return np.where(keep, s, value)


def positions(s):
    return np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])[None, :]


# ---- element-wise trees ----------------------------------------------------------------------------------------------


@case(
    lambda a, b: a * 2 + b,
    {"a": ((33, 70), F32), "b": ((33, 70), F32)},
    {"a": ((4096, 4096), F32), "b": ((4096, 4096), F32)},
    kind="elementwise",
)
def scaled_sum(a, b):
    return a * 2 + b


@case(
    lambda x, b: (x + b) * 0.5 * (1 + erf64((x + b) / np.sqrt(2))),
    {"x": ((17, 65), F32), "b": ((65,), F32)},
    {"x": ((8192, 4096), F32), "b": ((4096,), F32)},
    16,
    kind="elementwise",
)
def bias_gelu(x, b):
    return T.gelu(x + b)


@case(
    lambda a, b: a * sig(a) * b,
    {"a": ((31, 66), F16), "b": ((31, 66), F16)},
    {"a": ((8192, 8192), F16), "b": ((8192, 8192), F16)},
    kind="elementwise",
)
def silu_gate(a, b):
    return T.silu(a) * b


@case(lambda x: 1 + x * (0.5 + x * (0.25 - x * 0.125)), {"x": ((1001,), F32)}, {"x": ((1 << 24,), F32)}, kind="elementwise")
def horner(x):
    y = x * -0.125 + 0.25
    for c in (0.5, 1.0):
        y = y * x + c
    return y


@case(
    lambda x, lo: np.minimum(np.maximum(np.where(x > lo, np.sqrt(np.abs(x)), -x), -0.5), 1.5),
    {"x": ((13, 77), F32), "lo": ((77,), F32)},
    {"x": ((8192, 4096), F32), "lo": ((4096,), F32)},
    kind="elementwise",
)
def choose_and_clamp(x, lo):
    return T.clamp(T.where(x > lo, T.sqrt(T.abs(x)), -x), -0.5, 1.5)


@case(
    lambda a, b: ((a * 3 ^ b) >> 1) & 255,
    {"a": ((9, 41), I32), "b": ((9, 41), I32)},
    {"a": ((4096, 4096), I32), "b": ((4096, 4096), I32)},
    kind="elementwise",
)
def integer_bits(a, b):
    return ((a * 3 ^ b) >> 1) & 255


@case(
    lambda a, m, n: np.where(m & ~n, a, 0) + np.where(m | n, 1.0, 0.0),
    {"a": ((20, 35), F32), "m": ((20, 35), B), "n": ((20, 35), B)},
    {"a": ((4096, 4096), F32), "m": ((4096, 4096), B), "n": ((4096, 4096), B)},
    kind="elementwise",
)
def masks(a, m, n):
    return T.where(m & ~n, a, 0) + T.where(m | n, 1.0, 0.0)


@case(
    lambda a, b, c: np.tanh(a[:, None] * b[None, :] + c),
    {"a": ((19,), F32), "b": ((45,), F32), "c": ((), F32)},
    {"a": ((8192,), F32), "b": ((8192,), F32), "c": ((), F32)},
    kind="elementwise",
)
def outer_tanh(a, b, c):
    return T.tanh(a[:, None] * b[None, :] + c)


def rope64(x, cos, sin):
    h = x.shape[-1] // 2
    return np.concatenate([x[..., :h] * cos - x[..., h:] * sin, x[..., h:] * cos + x[..., :h] * sin], -1)


@case(
    rope64,
    {"x": ((2, 3, 11, 16), F16), "cos": ((11, 8), F32), "sin": ((11, 8), F32)},
    {"x": ((4, 32, 2048, 128), F16), "cos": ((2048, 64), F32), "sin": ((2048, 64), F32)},
    kind="elementwise",
)
def rotary(x, cos, sin):
    a, b = x.split(2)
    return T.concat([a * cos - b * sin, b * cos + a * sin], -1).astype("float16")


@case(
    lambda x, u: np.where(u < 0.9, x / 0.9, 0),
    {"x": ((23, 64), BF16), "u": ((23, 64), F32, "unit")},
    {"x": ((8192, 4096), BF16), "u": ((8192, 4096), F32, "unit")},
    kind="elementwise",
)
def dropout(x, u):
    return T.where(u < 0.9, x / 0.9, 0)


@case(
    lambda a, b: a * b + b,
    {"a": ((15, 31), F16), "b": ((31,), F32)},
    {"a": ((8192, 8192), F16), "b": ((8192,), F32)},
    kind="elementwise",
)
def mixed_types(a, b):
    return a * b + b


@case(
    lambda x, y: x.T * 3 - y,
    {"x": ((37, 22), F32), "y": ((22, 37), F32)},
    {"x": ((4096, 4096), F32), "y": ((4096, 4096), F32)},
    kind="elementwise",
)
def transposed_difference(x, y):
    return x.T * 3 - y


n_, m_, k_, o_ = T.dynamic("n m k o")


@case(
    lambda x, y: np.exp(-np.abs(x - y)),
    {"x": ((129,), F32), "y": ((129,), F32)},
    {"x": ((1 << 24,), F32), "y": ((1 << 24,), F32)},
    also=[{"x": ((1,), F32), "y": ((1,), F32)}, {"x": ((1000,), F32), "y": ((1000,), F32)}],
    kind="elementwise",
)
@tilelang.program
def dynamic_distance(x: T.Tensor((n_,), "float32"), y: T.Tensor((n_,), "float32")):
    return T.exp(-T.abs(x - y))


# ---- norms -----------------------------------------------------------------------------------------------------------


@case(rms, {"x": ((13, 96), F16), "w": ((96,), F16)}, {"x": ((8192, 4096), F16), "w": ((4096,), F16)}, kind="norm")
def rms_norm(x, w):
    return T.rms_norm(x, w)


@case(
    lnorm,
    {"x": ((11, 100), F32), "w": ((100,), F32), "b": ((100,), F32)},
    {"x": ((8192, 4096), F32), "w": ((4096,), F32), "b": ((4096,), F32)},
    32,
    kind="norm",
)
def layer_norm(x, w, b):
    return T.layer_norm(x, w, b)


@case(
    lambda x, r, w: (rms(x + r, w), x + r),
    {"x": ((7, 64), BF16), "r": ((7, 64), BF16), "w": ((64,), BF16)},
    {"x": ((8192, 4096), BF16), "r": ((8192, 4096), BF16), "w": ((4096,), BF16)},
    kind="norm",
)
def add_rms_norm(x, r, w):
    h = x + r
    return T.rms_norm(h, w), h


def gnorm(x, w, b):
    n, c = x.shape[:2]
    g = x.reshape(n, 4, -1)
    g = (g - g.mean(-1, keepdims=True)) / np.sqrt(g.var(-1, keepdims=True) + 1e-5)
    return g.reshape(x.shape) * w[:, None, None] + b[:, None, None]


@case(
    gnorm,
    {"x": ((2, 12, 5, 7), F32), "w": ((12,), F32), "b": ((12,), F32)},
    {"x": ((16, 128, 64, 64), F32), "w": ((128,), F32), "b": ((128,), F32)},
    32,
    kind="norm",
)
def group_norm(x, w, b):
    return T.group_norm(x, 4, w, b)


@case(
    lambda x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6),
    {"x": ((21, 50), F32)},
    {"x": ((16384, 1024), F32)},
    16,
    kind="norm",
)
def unit_rows(x):
    return x / T.maximum(x.norm(-1, True), 1e-6)


@case(lambda x: (x.mean(0), x.var(0)), {"x": ((45, 34), F32)}, {"x": ((16384, 1024), F32)}, 64, kind="norm")
def column_statistics(x):
    return x.mean(0), x.var(0)


@case(
    lambda x, w: rms(x, w),
    {"x": ((5, 48), F32), "w": ((48,), F32)},
    {"x": ((8192, 4096), F32), "w": ((4096,), F32)},
    16,
    [{"x": ((9, 48), F32), "w": ((48,), F32)}, {"x": ((1, 33), F32), "w": ((33,), F32)}],
    kind="norm",
)
@tilelang.program
def dynamic_rms_norm(x: T.Tensor((n_, m_), "float32"), w: T.Tensor((m_,), "float32")):
    return T.rms_norm(x, w)


# ---- softmax ---------------------------------------------------------------------------------------------------------


@case(smax, {"x": ((10, 77), F16)}, {"x": ((8192, 4096), F16)}, kind="softmax")
def softmax(x):
    return T.softmax(x)


@case(lambda x: x - lse(x)[:, None], {"x": ((10, 77), F32)}, {"x": ((8192, 4096), F32)}, 16, kind="softmax")
def log_softmax(x):
    return T.log_softmax(x)


@case(
    lambda x, m: smax(below(x * 0.125, m)),
    {"x": ((12, 50), F32), "m": ((12, 50), B)},
    {"x": ((8192, 4096), F32), "m": ((8192, 4096), B)},
    16,
    kind="softmax",
)
def masked_softmax(x, m):
    return T.softmax(T.where(m, x * 0.125, -float("inf")))


@case(lambda x: smax(x, 0), {"x": ((40, 26), F32)}, {"x": ((4096, 4096), F32)}, 16, kind="softmax")
def column_softmax(x):
    return T.softmax(x, axis=0)


@case(lambda x: lse(x), {"x": ((14, 131), F32)}, {"x": ((8192, 8192), F32)}, 16, kind="softmax")
def log_sum_exp(x):
    return T.logsumexp(x)


@case(
    lambda x, t: smax(30 * np.tanh(x / 30) / t),
    {"x": ((6, 90), F32), "t": ((), F32, "unit")},
    {"x": ((4096, 32000), F32), "t": ((), F32, "unit")},
    64,
    kind="softmax",
)
def capped_softmax(x, t):
    return T.softmax(T.tanh(x / 30) * 30 / t)


@case(
    smax, {"x": ((6, 90), F32)}, {"x": ((4096, 4096), F32)}, 16, [{"x": ((3, 1), F32)}, {"x": ((2, 257), F32)}], kind="softmax"
)
@tilelang.program
def dynamic_softmax(x: T.Tensor((T.dynamic("rows"), T.dynamic("columns")), "float32")):
    return T.softmax(x)


# ---- losses ----------------------------------------------------------------------------------------------------------


@case(
    lambda x, t: lse(x) - np.take_along_axis(x, t[:, None], -1)[:, 0],
    {"x": ((9, 100), F32), "t": ((9,), I32, 100)},
    {"x": ((8192, 32000), F32), "t": ((8192,), I32, 32000)},
    16,
    kind="loss",
)
def cross_entropy(x, t):
    return T.cross_entropy(x, t)


@case(
    lambda x, t: np.mean(0.9 * (lse(x) - np.take_along_axis(x, t[:, None], -1)[:, 0]) + 0.1 * (lse(x) - x.mean(-1))),
    {"x": ((9, 100), F32), "t": ((9,), I32, 100)},
    {"x": ((8192, 32000), F32), "t": ((8192,), I32, 32000)},
    16,
    kind="loss",
)
def smoothed_cross_entropy(x, t):
    logp = T.log_softmax(x)
    picked = T.take_along(logp, t[:, None]).squeeze(-1)
    return -(picked * 0.9 + logp.mean(-1) * 0.1).mean()


@case(
    lambda p, q: (smax(p) * (p - lse(p)[:, None] - q + lse(q)[:, None])).sum(-1),
    {"p": ((8, 60), F32), "q": ((8, 60), F32)},
    {"p": ((8192, 4096), F32), "q": ((8192, 4096), F32)},
    64,
    kind="loss",
)
def divergence(p, q):
    lp, lq = T.log_softmax(p), T.log_softmax(q)
    return T.sum(T.exp(lp) * (lp - lq), -1)


@case(
    lambda a, b: ((a - b) ** 2).mean(),
    {"a": ((30, 31), F32), "b": ((30, 31), F32)},
    {"a": ((4096, 4096), F32), "b": ((4096, 4096), F32)},
    16,
    kind="loss",
)
def squared_error(a, b):
    return T.mean((a - b) ** 2)


# ---- reductions, scans, orders ---------------------------------------------------------------------------------------


@case(lambda x: (x.argmax(-1), x.max(-1)), {"x": ((16, 83), F32)}, {"x": ((8192, 32000), F32)}, kind="reduction")
def best(x):
    return T.argmax(x), x.max(-1)


def top(x, k):
    order = np.argsort(-x, -1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, -1), order


@case(lambda x: top(x, 5), {"x": ((7, 64), F32)}, {"x": ((8192, 1024), F32)}, kind="reduction")
def top_five(x):
    return T.topk(x, 5)


@case(lambda x: np.cumsum(x, -1), {"x": ((5, 120), F32)}, {"x": ((4096, 8192), F32)}, 64, kind="scan")
def running_sum(x):
    return T.cumsum(x)


@case(lambda x: np.maximum.accumulate(x[::-1], 0)[::-1] - x, {"x": ((50, 9), F32)}, {"x": ((4096, 4096), F32)}, kind="scan")
def drawdown(x):
    return T.cummax(x, 0, reverse=True) - x


@case(lambda x: np.sort(x, -1), {"x": ((4, 64), F32)}, {"x": ((4096, 1024), F32)}, kind="reduction")
def sorted_rows(x):
    return T.sort(x)[0]


@case(
    lambda x: ((x > 1).any(0), (x > -3).all(1), (x > 0).sum()),
    {"x": ((25, 18), F32)},
    {"x": ((4096, 4096), F32)},
    kind="reduction",
)
def questions(x):
    return T.any(x > 1, 0), T.all(x > -3, 1), (x > 0).sum()


@case(
    lambda x: (x.min(1) + x.max(1)) * x.shape[1] + x.sum(1) / 2,
    {"x": ((6, 5, 33), F32)},
    {"x": ((256, 128, 1024), F32)},
    16,
    kind="reduction",
)
def middle_axis(x):
    return (x.min(1) + x.max(1)) * x.shape[1] + x.sum(1) / 2


# ---- attention -------------------------------------------------------------------------------------------------------

QKV = {n: ((1, 2, 37, 32), F16) for n in "qkv"}
LARGE = {n: ((4, 16, 4096, 128), F16) for n in "qkv"}


def attention(score=None, weights=None):
    """Attention whose scores a function changes: score(s, i, j), and whose weights are softmax, or weights(s)."""

    def run(q, k, v, *rest):
        s = T.einsum("bhqd,bhkd->bhqk", q, k, dtype="float32") * q.shape[-1] ** -0.5
        i, j = T.iota(q.shape[2]).unsqueeze(1), T.iota(k.shape[2])
        s = s if score is None else score(s, i, j, *rest)
        p = T.softmax(s) if weights is None else weights(s)
        return T.einsum("bhqk,bhkd->bhqd", p.astype(v.dtype), v)

    return run


plain, causal = attention(), attention(lambda s, i, j: T.where(j <= i, s, -float("inf")))


@case(lambda q, k, v: smax(scores(q, k)) @ v, QKV, LARGE, kind="attention")
def attention_plain(q, k, v):
    return plain(q, k, v)


@case(lambda q, k, v: smax(below(s := scores(q, k), (p := positions(s))[1] <= p[0])) @ v, QKV, LARGE, kind="attention")
def attention_causal(q, k, v):
    return causal(q, k, v)


@case(
    lambda q, k, v, a: smax((s := scores(q, k)) - a[:, None, None] * np.abs((p := positions(s))[0] - p[1])) @ v,
    QKV | {"a": ((2,), F32, "unit")},
    LARGE | {"a": ((16,), F32, "unit")},
    8,
    kind="attention",
)
def attention_alibi(q, k, v, a):
    return attention(lambda s, i, j: s - a[:, None, None] * T.abs(i - j))(q, k, v)


@case(
    lambda q, k, v: smax(below(s := scores(q, k), ((p := positions(s))[1] <= p[0]) & (p[1] > p[0] - 8))) @ v,
    QKV,
    LARGE,
    kind="attention",
)
def attention_window(q, k, v):
    return attention(lambda s, i, j: T.where((j <= i) & (j > i - 8), s, -float("inf")))(q, k, v)


@case(lambda q, k, v: smax(20 * np.tanh(scores(q, k) / 20)) @ v, QKV, LARGE, kind="attention")
def attention_soft_cap(q, k, v):
    return attention(lambda s, i, j: T.tanh(s / 20) * 20)(q, k, v)


@case(lambda q, k, v: sig(scores(q, k) - np.log(q.shape[2])) @ v, QKV, LARGE, kind="attention")
def attention_sigmoid(q, k, v):
    return attention(weights=lambda s: T.sigmoid(s - float(np.log(q.shape[2]))))(q, k, v)


@case(lambda q, k, v: np.maximum(scores(q, k), 0) ** 2 @ v, QKV, LARGE, 8, kind="attention")
def attention_squared_relu(q, k, v):
    return attention(weights=lambda s: T.relu(s) ** 2)(q, k, v)


@case(
    lambda q, k, v, n: smax(below(scores(q, k), np.arange(k.shape[2]) < np.maximum(n, 1)[:, None, None, None])) @ v,
    {x: ((3, 2, 20, 16), F16) for x in "qkv"} | {"n": ((3,), I32, 20)},
    {x: ((4, 16, 4096, 128), F16) for x in "qkv"} | {"n": ((4,), I32, 4096)},
    kind="attention",
)
def attention_padded(q, k, v, n):
    return attention(lambda s, i, j: T.where(j < T.maximum(n, 1)[:, None, None, None], s, -float("inf")))(q, k, v)


@case(
    lambda q, k, v: ein(
        "bgrqk,bgkd->bgrqd",
        smax(ein("bgrqd,bgkd->bgrqk", q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:]), k) / np.sqrt(q.shape[-1])),
        v,
    ).reshape(q.shape),
    {"q": ((1, 4, 19, 16), F16), "k": ((1, 2, 19, 16), F16), "v": ((1, 2, 19, 16), F16)},
    {"q": ((4, 32, 4096, 128), F16), "k": ((4, 8, 4096, 128), F16), "v": ((4, 8, 4096, 128), F16)},
    kind="attention",
)
def attention_grouped(q, k, v):
    b, h, n, d = q.shape
    g = k.shape[1]
    s = T.einsum("bgrqd,bgkd->bgrqk", q.reshape(b, g, h // g, n, d), k, dtype="float32") * d**-0.5
    return T.einsum("bgrqk,bgkd->bgrqd", T.softmax(s).astype(v.dtype), v).reshape(b, h, n, d)


@case(
    lambda q, k, v: smax(below(s := scores(q, k), (p := positions(s))[1] <= p[0])) @ v,
    {x: ((1, 2, 21, 16), F16) for x in "qkv"},
    LARGE,
    also=[{x: ((1, 2, 64, 16), F16) for x in "qkv"}],
    kind="attention",
)
@tilelang.program
def attention_dynamic(
    q: T.Tensor((1, 2, n_, 16), "float16"), k: T.Tensor((1, 2, n_, 16), "float16"), v: T.Tensor((1, 2, n_, 16), "float16")
):
    return causal(q, k, v)


CASES[-1].large = {x: ((1, 2, 4096, 16), F16) for x in "qkv"}


@case(
    lambda q, qr, c, kr: ein("bhqk,bkc->bhqc", smax((ein("bhqc,bkc->bhqk", q, c) + ein("bhqr,bkr->bhqk", qr, kr)) * 0.1), c),
    {"q": ((1, 3, 9, 32), F16), "qr": ((1, 3, 9, 8), F16), "c": ((1, 17, 32), F16), "kr": ((1, 17, 8), F16)},
    {"q": ((8, 128, 1, 512), F16), "qr": ((8, 128, 1, 64), F16), "c": ((8, 4096, 512), F16), "kr": ((8, 4096, 64), F16)},
    8,
    kind="attention",
)
def attention_latent(q, qr, c, kr):
    s = T.einsum("bhqc,bkc->bhqk", q, c, dtype="float32") + T.einsum("bhqr,bkr->bhqk", qr, kr, dtype="float32")
    return T.einsum("bhqk,bkc->bhqc", T.softmax(s * 0.1).astype("float16"), c)


# ---- matmuls ---------------------------------------------------------------------------------------------------------


@case(
    lambda x, w, b: np.maximum(x @ w + b, 0),
    {"x": ((33, 40), F16), "w": ((40, 50), F16), "b": ((50,), F16)},
    {"x": ((4096, 4096), F16), "w": ((4096, 4096), F16), "b": ((4096,), F16)},
    kind="matmul",
)
def linear_relu(x, w, b):
    return T.relu(x @ w + b)


@case(
    lambda x, w1, w2: np.maximum(x @ w1, 0) @ w2,
    {"x": ((20, 32), F16), "w1": ((32, 48), F16), "w2": ((48, 24), F16)},
    {"x": ((4096, 4096), F16), "w1": ((4096, 11008), F16), "w2": ((11008, 4096), F16)},
    8,
    kind="matmul",
)
def mlp(x, w1, w2):
    return T.relu(x @ w1) @ w2


@case(
    lambda x, g, u, d: ((h := x @ g) * sig(h) * (x @ u)) @ d,
    {"x": ((18, 32), BF16), "g": ((32, 40), BF16), "u": ((32, 40), BF16), "d": ((40, 24), BF16)},
    {"x": ((4096, 4096), BF16), "g": ((4096, 11008), BF16), "u": ((4096, 11008), BF16), "d": ((11008, 4096), BF16)},
    8,
    kind="matmul",
)
def swiglu_mlp(x, g, u, d):
    return (T.silu(x @ g) * (x @ u)) @ d


@case(
    lambda x, n, g, u: (h := rms(x, n) @ g) * sig(h) * (rms(x, n) @ u),
    {"x": ((18, 64), F16), "n": ((64,), F16), "g": ((64, 40), F16), "u": ((64, 40), F16)},
    {"x": ((8192, 4096), F16), "n": ((4096,), F16), "g": ((4096, 11008), F16), "u": ((4096, 11008), F16)},
    8,
    kind="matmul",
)
def norm_matmul_swiglu(x, n, g, u):
    h = T.rms_norm(x, n)
    return T.silu(h @ g) * (h @ u)


@case(
    lambda x, w, a, b: x @ w + (x @ a) @ b * 2,
    {"x": ((25, 48), F16), "w": ((48, 56), F16), "a": ((48, 8), F16), "b": ((8, 56), F16)},
    {"x": ((4096, 4096), F16), "w": ((4096, 4096), F16), "a": ((4096, 16), F16), "b": ((16, 4096), F16)},
    8,
    kind="matmul",
)
def lora(x, w, a, b):
    return x @ w + (x @ a) @ b * 2


@case(
    lambda a, b: ein("bmk,bkn->mbn", a, b),
    {"a": ((3, 17, 24), F32), "b": ((3, 24, 19), F32)},
    {"a": ((16, 1024, 1024), F32), "b": ((16, 1024, 1024), F32)},
    32,
    kind="matmul",
)
def batched_to_rows(a, b):
    return T.einsum("bmk,bkn->mbn", a, b)


@case(
    lambda a, b: a.astype(np.int64) @ b.astype(np.int64),
    {"a": ((20, 32), I8), "b": ((32, 24), I8)},
    {"a": ((4096, 4096), I8), "b": ((4096, 4096), I8)},
    kind="matmul",
)
def integer_matmul(a, b):
    return a @ b


@case(
    lambda x, w, b: np.tanh(x @ w.T + b),
    {"x": ((7, 32), F32), "w": ((40, 32), F32), "b": ((40,), F32)},
    {"x": ((4096, 4096), F32), "w": ((4096, 4096), F32, 1 / 64), "b": ((4096,), F32)},
    32,
    [{"x": ((64, 32), F32), "w": ((40, 32), F32), "b": ((40,), F32)}],
    kind="matmul",
)
@tilelang.program
def dynamic_linear(x: T.Tensor((n_, k_), "float32"), w: T.Tensor((o_, k_), "float32"), b: T.Tensor((o_,), "float32")):
    return T.tanh(x @ w.T + b)


def int4(w):
    q = np.stack([w & 15, w >> 4], -1).reshape(*w.shape[:-1], -1).astype(np.int64)
    return (q ^ 8) - 8


@case(
    lambda x, w, s: x @ (int4(w) * np.repeat(s, 16, 0)),
    {"x": ((19, 64), F16), "w": ((64, 20), U8), "s": ((4, 40), F16, "unit")},
    {"x": ((16, 4096), F16), "w": ((4096, 2048), U8), "s": ((256, 4096), F16, "unit")},
    8,
    kind="matmul",
)
def quantised_matmul(x, w, s):
    return x @ T.quantised(w, s, "int4")


@case(
    lambda x, w, s: x @ (w * s),
    {"x": ((9, 32), BF16), "w": ((32, 24), I8), "s": ((1, 24), BF16, "unit")},
    {"x": ((4096, 4096), BF16), "w": ((4096, 4096), I8), "s": ((1, 4096), BF16, "unit")},
    8,
    kind="matmul",
)
def int8_weights(x, w, s):
    return x @ T.quantised(w, s, "int8")


# ---- mixture of experts, sampling, gathers ---------------------------------------------------------------------------


def experts64(x, r, w1, w2):
    v, e = top(x @ r, 2)
    p = smax(v)
    h = np.maximum(ein("nd,ndh->nh", x, w1[e[:, 0]]), 0), np.maximum(ein("nd,ndh->nh", x, w1[e[:, 1]]), 0)
    return sum(p[:, k, None] * ein("nh,nhd->nd", h[k], w2[e[:, k]]) for k in range(2))


@case(
    experts64,
    {"x": ((10, 16), F32), "r": ((16, 4), F32), "w1": ((4, 16, 24), F32), "w2": ((4, 24, 16), F32)},
    {"x": ((512, 256), F32), "r": ((256, 8), F32), "w1": ((8, 256, 512), F32), "w2": ((8, 512, 256), F32)},
    64,
    kind="moe",
)
def mixture_of_experts(x, r, w1, w2):
    weights, chosen = T.topk(x @ r, 2)
    gates = (T.one_hot(chosen, r.shape[1]) * T.softmax(weights)[:, :, None]).sum(1)
    h = T.relu(T.einsum("nd,edh->enh", x, w1))
    return T.einsum("end,ne->nd", T.einsum("enh,ehd->end", h, w2), gates)


def top_p64(x, u):
    order = np.argsort(-x, -1, kind="stable")
    p = smax(np.take_along_axis(x, order, -1))
    before = np.cumsum(p, -1) - p
    kept = np.where(before < 0.8, p, 0)
    c = np.cumsum(kept / kept.sum(-1, keepdims=True), -1)
    at = (c < u[:, None]).sum(-1)
    return np.take_along_axis(order, at[:, None], -1)[:, 0]


@case(
    top_p64,
    {"x": ((12, 64), F32), "u": ((12,), F32, "unit")},
    {"x": ((1024, 1024), F32), "u": ((1024,), F32, "unit")},
    kind="sampling",
)
def top_p_sampling(x, u):
    logits, order = T.sort(x, descending=True)
    p = T.softmax(logits)
    kept = T.where(T.cumsum(p) - p < 0.8, p, 0)
    c = T.cumsum(kept / kept.sum(-1, keepdims=True))
    at = (c < u[:, None]).sum(-1, keepdims=True)
    return T.take_along(order, T.minimum(at, x.shape[1] - 1)).squeeze(-1)


@case(
    lambda ids, w, p: w[ids] + p,
    {"ids": ((3, 14), I32, 50), "w": ((50, 24), F32), "p": ((14, 24), F32)},
    {"ids": ((8, 2048), I32, 32000), "w": ((32000, 1024), F32), "p": ((2048, 1024), F32)},
    kind="gather",
)
def embedding(ids, w, p):
    return T.gather(w, ids) + p


@case(
    lambda x, i: x[:, i] * 2,
    {"x": ((9, 30), F32), "i": ((11,), I32, 30)},
    {"x": ((4096, 4096), F32), "i": ((1024,), I32, 4096)},
    kind="gather",
)
def gathered_columns(x, i):
    return x[:, i] * 2


# ---- convolutions ----------------------------------------------------------------------------------------------------


def conv64(x, w, stride=1, pad=0):
    nd = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0)] + [(pad, pad)] * nd)
    v = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], tuple(range(2, x.ndim)))
    v = v[(slice(None), slice(None), *(slice(None, None, stride),) * nd)]
    return ein("ncxuv,ocuv->nox".replace("x", "xy") if nd == 2 else "ncxu,ocu->nox", v, w)


@case(
    lambda x, w: conv64(x, w, 1, 1),
    {"x": ((2, 6, 33), F32), "w": ((8, 6, 3), F32)},
    {"x": ((16, 256, 4096), F32), "w": ((256, 256, 3), F32)},
    32,
    kind="convolution",
)
def convolution_1d(x, w):
    return T.conv1d(x, w, padding=1)


@case(
    lambda x, w, b: np.maximum(conv64(x, w, 2, 1) + b[:, None, None], 0),
    {"x": ((1, 5, 13, 11), F16), "w": ((6, 5, 3, 3), F16), "b": ((6,), F16)},
    {"x": ((8, 64, 112, 112), F16), "w": ((128, 64, 3, 3), F16), "b": ((128,), F16)},
    8,
    kind="convolution",
)
def convolution_2d(x, w, b):
    return T.relu(T.conv2d(x, w, stride=2, padding=1) + b.reshape(-1, 1, 1))


@case(
    lambda x, w: ein("nctk,ck->nct", np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (0, 0), (3, 0)]), 4, 2), w),
    {"x": ((2, 9, 30), F32), "w": ((9, 4), F32)},
    {"x": ((8, 2048, 4096), F32), "w": ((2048, 4), F32)},
    16,
    kind="convolution",
)
def causal_depthwise(x, w):
    return T.einsum("nctk,ck->nct", T.windows(T.pad(x, (3, 0)), 4, 2), w)


# ---- states ----------------------------------------------------------------------------------------------------------


def linear64(q, k, v, decay=1.0):
    s, out = np.zeros((q.shape[1], v.shape[1])), []
    for i in range(len(q)):
        s = decay * s + np.outer(k[i], v[i])
        out.append(q[i] @ s)
    return np.stack(out), s


@case(
    linear64,
    {"q": ((23, 8), F32), "k": ((23, 8), F32), "v": ((23, 12), F32)},
    {"q": ((1024, 64), F32), "k": ((1024, 64), F32), "v": ((1024, 64), F32)},
    64,
    kind="state",
)
def linear_attention(q, k, v):
    def step(s, x):
        q, k, v = x
        s = s + k[:, None] * v
        return s, q @ s

    last, out = T.loop(step, T.zeros((q.shape[1], v.shape[1])), (q, k, v))
    return out, last


@case(
    lambda q, k, v: linear64(q, k, v, 0.9)[0],
    {"q": ((30, 16), F32), "k": ((30, 16), F32), "v": ((30, 16), F32)},
    {"q": ((4096, 64), F32), "k": ((4096, 64), F32), "v": ((4096, 64), F32)},
    64,
    kind="state",
)
def retention(q, k, v):
    n = q.shape[0]
    d = T.iota(n)[:, None] - T.iota(n)
    return (q @ k.T * T.where(d >= 0, T.exp(T.maximum(d, 0) * float(np.log(0.9))), 0)) @ v


def recurrence64(x, a, h):
    out = []
    for t in range(x.shape[1]):
        h = np.tanh(h @ a + x[:, t])
        out.append(h)
    return np.stack(out, 1)


@case(
    recurrence64,
    {"x": ((3, 17, 12), F32), "a": ((12, 12), F32, 0.2), "h": ((3, 12), F32)},
    {"x": ((64, 512, 64), F32), "a": ((64, 64), F32, 0.1), "h": ((64, 64), F32)},  # greater weights make chaos of roundings
    64,
    kind="state",
)
def recurrent(x, a, h):
    def step(h, x):
        h = T.tanh(h @ a + x)
        return h, h

    return T.loop(step, h, x, axis=1)[1]


# ---- a block of a model ----------------------------------------------------------------------------------------------


def llama64(x, n1, wq, wk, wv, wo, n2, wg, wu, wd):
    b, n, d = x.shape
    heads = lambda t: t.reshape(b, n, -1, 16).transpose(0, 2, 1, 3)  # noqa: E731
    h = rms(x, n1)
    q, k, v = heads(h @ wq), heads(h @ wk), heads(h @ wv)
    r = q.shape[1] // k.shape[1]
    s = scores(q, np.repeat(k, r, 1))
    i, j = positions(s)
    y = smax(below(s, j <= i)) @ np.repeat(v, r, 1)
    x = x + y.transpose(0, 2, 1, 3).reshape(b, n, -1) @ wo
    h = rms(x, n2)
    return x + ((g := h @ wg) * sig(g) * (h @ wu)) @ wd


@case(
    llama64,
    {"x": ((1, 21, 64), F32), "n1": ((64,), F32), "wq": ((64, 64), F32), "wk": ((64, 32), F32), "wv": ((64, 32), F32)}
    | {"wo": ((64, 64), F32), "n2": ((64,), F32), "wg": ((64, 96), F32), "wu": ((64, 96), F32), "wd": ((96, 64), F32)},
    {"x": ((4, 1024, 1024), F32), "n1": ((1024,), F32), "wq": ((1024, 1024), F32), "wk": ((1024, 256), F32)}
    | {"wv": ((1024, 256), F32), "wo": ((1024, 1024), F32), "n2": ((1024,), F32), "wg": ((1024, 2816), F32)}
    | {"wu": ((1024, 2816), F32), "wd": ((2816, 1024), F32)},
    rounds=1 << 10,
    kind="block",
)
def llama_block(x, n1, wq, wk, wv, wo, n2, wg, wu, wd):
    b, n, d = x.shape

    def heads(t):
        return t.reshape(b, n, -1, 16).transpose(0, 2, 1, 3)

    h = T.rms_norm(x, n1)
    q, k, v = heads(h @ wq), heads(h @ wk), heads(h @ wv)
    r = q.shape[1] // k.shape[1]
    q = q.reshape(b, k.shape[1], r, n, 16)
    s = T.einsum("bgrqd,bgkd->bgrqk", q, k) * 0.25
    s = T.where(T.iota(n) <= T.iota(n).unsqueeze(1), s, -float("inf"))
    y = T.einsum("bgrqk,bgkd->bgrqd", T.softmax(s), v).reshape(b, -1, n, 16)
    x = x + y.transpose(0, 2, 1, 3).reshape(b, n, d) @ wo
    h = T.rms_norm(x, n2)
    return x + (T.silu(h @ wg) * (h @ wu)) @ wd
