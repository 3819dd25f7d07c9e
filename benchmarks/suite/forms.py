"""Products of other types and forms than peers.py has: what is computed, its tensors, its reference, who computes it.

A Form is one call of the library's `matmul` or `grouped_matmul`; beside it stand the calls of torch that do the same (or
the nearest that torch has).
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[[], Any]
Tensors = dict[str, Any]
_SHORT = {"float32": "tf32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_RESULT = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "int32"}
_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "int32": 0.0}
# Relative to the sum of |a||b|, beside k * 2**-24: what the library documents of an operand's type.
_TYPE_ERROR = {"float32": 2.0**-10, "float8_e4m3fn": 2.0**-11, "float8_e5m2": 2.0**-11}
_ROWS, _COLUMNS, _PRODUCTS = 96, 48, 4
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x, "relu": torch.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu}


@dataclass(frozen=True)
class Form:
    """a (m, k) by b (k, n); layout "nt": a as it is, b stored (n, k), and so on.

    dtype, dtype_b: of a and b; out: "" for the usual one.  batch: products, 0 for no such dimension.  groups: rows of a in so
    many groups of random sizes.  scaling: "", "tensor", "block".  fast: float8 sums in the matrix unit alone.  sparse: a is 2:4
    sparse.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "nt"
    dtype_b: str = ""
    out: str = ""
    batch: int = 0
    groups: int = 0
    bias: bool = False
    activation: str = ""
    scaling: str = ""
    fast: bool = False
    sparse: bool = False

    @property
    def result(self) -> str:
        return self.out or _RESULT.get(self.dtype, "bfloat16")

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * max(1, self.batch)

    @property
    def name(self) -> str:
        parts = [_SHORT[self.dtype] + (f"*{_SHORT[self.dtype_b]}" if self.dtype_b else ""), self.layout,
                 f"{self.batch}x" * bool(self.batch) + f"{self.m}x{self.n}x{self.k}", f"g{self.groups}" * bool(self.groups),
                 self.scaling, "fast" * self.fast, "2:4" * self.sparse, "bias" * self.bias, self.activation,
                 f"->{_SHORT.get(self.out, self.out)}" * bool(self.out)]
        return " ".join(filter(None, parts))


_SQUARES = tuple((s, s, s) for s in (1024, 2048, 4096, 8192))
_SHAPES = (*_SQUARES, (4096, 1024, 8192), (512, 4096, 4096), (64, 4096, 4096), (32, 7168, 2048))
_MODEL = ((4096, 7168, 2048), (4096, 4096, 7168), (4096, 24576, 1536), (128, 4096, 7168), (16, 7168, 2048), (64, 7168, 2048),
          (16, 24576, 1536))


def _forms() -> Iterable[tuple[str, Form]]:
    """(group, form)"""
    for dtype in ("float32", "int8"):
        group = _SHORT[dtype]
        for s in (*_SHAPES, (1000, 1048, 328)):
            yield group, Form(*s, dtype)
        for layout, s in (("nn", (4096,) * 3), ("nn", (1024,) * 3), ("nn", (64, 4096, 4096)), ("tn", (4096,) * 3),
                          ("tt", (2048,) * 3)):
            yield group, Form(*s, dtype, layout)
    yield "tf32", Form(4095, 4097, 4099, "float32")
    yield "tf32", Form(1, 4096, 4096, "float32")
    for s in (*_SHAPES, (8192, 1024, 8192), (16, 4096, 4096), (1008, 1040, 336)):
        for fast in (False, True):
            yield "fp8", Form(*s, "float8_e4m3fn", scaling="tensor", fast=fast)
    yield "fp8", Form(4096, 4096, 4096, "float8_e5m2", dtype_b="float8_e4m3fn", scaling="tensor", fast=True)
    yield "fp8", Form(4096, 4096, 4096, "float8_e4m3fn", "nn", scaling="tensor", fast=True)
    yield "fp8", Form(4096, 4096, 4096, "float8_e4m3fn", scaling="tensor", fast=True, bias=True, activation="gelu")
    for s in (*_SQUARES[2:], *_MODEL):
        yield "fp8-block", Form(*s, "float8_e4m3fn", scaling="block")
    for batch, s in ((512, (128, 128, 64)), (128, (512, 512, 64)), (32, (1024, 1024, 128)), (8, (2048, 2048, 2048)),
                     (1024, (64, 64, 64)), (64, (1, 4096, 128)), (2048, (16, 16, 16)), (32, (128, 512, 4096)),
                     (48, (100, 200, 300))):
        yield "batched", Form(*s, "float16", "nn", batch=batch)
        if batch in (512, 64, 8, 48):
            yield "batched", Form(*s, "bfloat16", "nt", batch=batch)
    yield "batched", Form(512, 512, 512, "float32", "nn", batch=32)
    for groups, s in ((8, (4096, 4096, 4096)), (64, (4096, 2048, 7168)), (64, (256, 2048, 7168)), (8, (16, 14336, 4096)),
                      (32, (32768, 1408, 2048)), (128, (8192, 1536, 2048))):
        for layout in ("nn", "nt"):
            if layout == "nt" or groups in (8, 32):
                yield "grouped", Form(*s, "bfloat16", layout, groups=groups)
    for s, act, layout in (((4096, 4096, 4096), "gelu", "nt"), ((4096, 16384, 4096), "gelu_tanh", "nt"),
                           ((8192, 2048, 512), "gelu_tanh", "nn"), ((4096, 4096, 4096), "gelu_tanh", "nt"),
                           ((1024, 4096, 1024), "gelu_tanh", "nt"),
                           ((4096, 4096, 1024), "relu", "nt"), ((1024, 4096, 1024), "gelu", "nt"),
                           ((64, 4096, 4096), "silu", "nt"), ((8192, 2048, 512), "gelu", "nn"), ((4096, 4096, 4096), "", "nn"),
                           ((512, 3072, 768), "gelu", "nt")):
        yield "epilogue", Form(*s, "float16", layout, bias=True, activation=act)
    for s in ((4096, 4096, 4096), (2048, 8192, 512), (4096, 1024, 8192), (1024,) * 3):
        yield "wide-out", Form(*s, "bfloat16", out="float32")
    # tiles that do not fill their last wave of 132 SMs
    for s in ((2304, 2304, 4096), (1920, 2560, 8192), (3072, 3072, 4096), (2560, 3328, 4096), (4352, 2304, 2048),
              (1536, 4864, 8192), (3840, 3840, 3840), (2816, 5120, 1024), (5120, 5120, 5120)):
        yield "waves", Form(*s, "bfloat16")
    for s in ((256, 256, 16384), (512, 512, 32768), (128, 1024, 16384), (1024, 1024, 16384), (768, 1536, 8192),
              (64, 512, 65536), (384, 384, 24576)):  # few tiles with a long inner dimension
        yield "split-k", Form(*s, "bfloat16")
    r = random.Random(2026)
    for k in range(40):  # of no particular sizes: multiples of 1, 8 and 16
        unit = (8, 16, 1, 8)[k % 4]
        size = tuple(max(unit, round(2**r.uniform(6, 13) / unit) * unit) for _ in range(3))
        yield "drawn", Form(*size, "bfloat16", ("nt", "nn", "tn", "nt", "tt")[k % 5])
    for s in (*_SQUARES[1:], (4096, 1024, 8192), (14336, 2048, 4096), (4096, 2048, 14336), (4096, 128, 4096)):
        for dtype in ("float16", "bfloat16"):
            yield "2:4", Form(*s, dtype, sparse=True)
    for s in _SQUARES[2:]:
        yield "2:4", Form(*s, "float16", "nn", sparse=True)
        yield "2:4", Form(*s, "int8", sparse=True)
        yield "2:4", Form(*s, "float8_e4m3fn", sparse=True, fast=True)


FORMS = {f.name: (group, f) for group, f in _forms()}


def make(f: Form, device: str = "cuda") -> Tensors:
    """Random normal operands (integers: all of int8), scales, bias, sizes of groups; stored as the layout says."""
    g = torch.Generator(device=device).manual_seed(zlib.crc32(f.name.encode()))

    def draw(dtype: str, *shape: int) -> torch.Tensor:
        if dtype == "int8":
            return torch.randint(-128, 128, shape, device=device, dtype=torch.int8, generator=g)
        return torch.randn(shape, device=device, generator=g).to(getattr(torch, dtype))

    lead, lead_b = ((f.batch,) if f.batch else ()), ((f.groups or f.batch,) if f.groups or f.batch else ())
    t: Tensors = {"a": draw(f.dtype, *lead, *((f.k, f.m) if f.layout[0] == "t" else (f.m, f.k)))}
    t["b"] = draw(f.dtype_b or f.dtype, *lead_b, *((f.n, f.k) if f.layout[1] == "t" else (f.k, f.n)))
    t["bias"] = draw(f.dtype if f.dtype in ("float16", "bfloat16") else "bfloat16", f.n) if f.bias else None
    if f.scaling:
        shapes = ((f.m, -(-f.k // 128)), (-(-f.n // 128), -(-f.k // 128))) if f.scaling == "block" else ((1,), (1,))
        for x, shape in zip("ab", shapes):
            t[f"scale_{x}"] = torch.rand(shape, device=device, generator=g) + 0.5
    if f.sparse:  # the two largest of each four stay
        groups = t["a"].view(f.m, -1, 4)
        small = groups.float().abs().argsort(-1)[..., :2]
        t["a"] = groups.float().scatter(-1, small, 0.0).view(f.m, f.k).to(t["a"].dtype)
        from tilelang.library import sparse_compress

        t["kept"], t["metadata"] = sparse_compress(t["a"])
    if f.groups:
        share = torch.rand(f.groups, generator=torch.Generator().manual_seed(f.groups), dtype=torch.float64) + 0.5
        ends = (share.cumsum(0) / share.sum() * f.m).round().int()
        t["sizes"] = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int32)).int().to(device)
        t["ends"] = ends.to(device)
    return t


def _b_of(f: Form, t: Tensors) -> torch.Tensor:
    """b as (..., k, n)."""
    b: torch.Tensor = t["b"]
    return b.transpose(-1, -2) if f.layout[1] == "t" else b


def _a_of(f: Form, t: Tensors) -> torch.Tensor:
    a: torch.Tensor = t["a"].transpose(-1, -2) if f.layout[0] == "t" else t["a"]
    return a


# ---- who computes it --------------------------------------------------------------------------------------------------


def ours(f: Form, t: Tensors) -> Call:
    """The library's call."""
    from tilelang.library import grouped_matmul, matmul, sparse_matmul

    out = getattr(torch, f.result)
    if f.sparse:
        return partial(sparse_matmul, t["kept"], t["metadata"], t["b"], transpose_b=f.layout[1] == "t", out_dtype=out)
    more = dict(transpose_b=f.layout[1] == "t", bias=t["bias"], activation=f.activation or None, out_dtype=out)
    if f.groups:
        return partial(grouped_matmul, t["a"], t["b"], t["sizes"], **more)
    scales = {x: t[x] for x in ("scale_a", "scale_b") if x in t}
    shape = (*((f.batch,) if f.batch else ()), f.m, f.n)
    return partial(matmul, t["a"], t["b"], transpose_a=f.layout[0] == "t", fast_accum=f.fast,
                   out=torch.empty(shape, device=t["a"].device, dtype=out), **scales, **more)


def peers(f: Form, t: Tensors) -> dict[str, Call]:
    """Calls of torch, and for scales of blocks the library's with one scale an operand; one that raises is left out."""
    a, b, out = _a_of(f, t), _b_of(f, t), getattr(torch, f.result)
    if f.sparse:
        return _peers_of_sparse(f, t, a, b, out)
    if f.groups:
        return {"grouped_mm": lambda: torch._grouped_mm(a, b, offs=t["ends"], out_dtype=out)}
    if f.scaling:
        sa, sb = t["scale_a"], t["scale_b"]
        if f.scaling == "block":
            sa, sb = sa.T.contiguous().T, sb.T
        columns = b if f.layout[1] == "t" else b.T.contiguous().T  # it takes no other order: the copy is not timed
        scaled = partial(torch._scaled_mm, a, columns, scale_a=sa, scale_b=sb, out_dtype=out, use_fast_accum=f.fast,
                         bias=t["bias"])
        found: dict[str, Call] = {"_scaled_mm": lambda: _ACTIVATIONS[f.activation](scaled())}
        if f.scaling == "block":  # what the scales of blocks cost: the same product with one scale an operand, of our own
            found["one scale"] = ours(replace(f, scaling="tensor"), {**t, "scale_a": t["scale_a"][:1, :1].reshape(1),
                                                                     "scale_b": t["scale_b"][:1, :1].reshape(1)})
        return found
    if f.dtype == "int8":
        return {"_int_mm": lambda: torch._int_mm(a, b)}
    if f.bias:
        bias, act = t["bias"], _ACTIVATIONS[f.activation]
        found = {"addmm": lambda: act(torch.addmm(bias, a, b))}
        if f.activation in ("relu", "gelu", "gelu_tanh"):  # its gelu is the approximate one: less to compute than by erf
            found["_addmm_activation"] = lambda: torch._addmm_activation(bias, a, b, use_gelu=f.activation != "relu")
        return found
    if f.out and f.out != f.dtype:
        return {"mm": lambda: torch.mm(a, b, out_dtype=out)}
    c = torch.empty((*a.shape[:-1], f.n), device=a.device, dtype=out)
    return {"matmul": lambda: torch.matmul(a, b, out=c)}


def _peers_of_sparse(f: Form, t: Tensors, a: torch.Tensor, b: torch.Tensor, out: torch.dtype) -> dict[str, Call]:
    """The dense products, of torch and of the library, and cuSPARSELt's with the algorithm that its search finds."""
    dense = replace(f, sparse=False, scaling="tensor" if f.fast else "")
    one = torch.ones(1, device=a.device)
    given = {**t, "scale_a": one, "scale_b": one} if f.fast else t
    found = {"dense": next(iter(peers(dense, given).values())), "our dense": ours(dense, given)}
    columns = b if f.layout[1] == "t" or f.dtype in ("float16", "bfloat16") else b.T.contiguous().T
    try:
        packed = torch._cslt_compress(a)
        # cuSPARSELt refuses a result type that is named, even if it is that of 16-bit operands.
        wanted = {} if a.dtype == out else {"out_dtype": out}
        best = torch._cslt_sparse_mm_search(packed, columns, **wanted)
        found["cusparselt"] = lambda: torch._cslt_sparse_mm(packed, columns, alg_id=best, **wanted)
    except (RuntimeError, AttributeError) as e:
        print(f"{f.dtype} without cuSPARSELt: {type(e).__name__}: {str(e).splitlines()[0][:160]}", file=sys.stderr)
    return found


# ---- reference --------------------------------------------------------------------------------------------------------


def _some(count: int, of: int, device: Any) -> torch.Tensor:
    return torch.linspace(0, of - 1, min(count, of), device=device).round().long().unique()


def _scaled(f: Form, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b as they are multiplied, b (..., k, n), in the types they have; by block in float32."""
    a, b = _a_of(f, t), _b_of(f, t)
    if f.scaling == "block":
        a = a.float() * t["scale_a"].repeat_interleave(128, 1)[:, :f.k]
        b = b.float() * t["scale_b"].repeat_interleave(128, 0)[:f.n].repeat_interleave(128, 1)[:, :f.k].T
    return a, b


def reference(f: Form, t: Tensors) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(index into the result, float64 values, bound of each element) of whole rows and whole columns."""
    a, b = _scaled(f, t)
    device, parts = a.device, []
    rows, columns = _some(_ROWS, f.m, device), _some(_COLUMNS, f.n, device)
    for where in (_some(_PRODUCTS, f.batch, device).tolist() if f.batch else [None]):
        x, y = (a, b) if where is None else (a[where], b[where])
        at: tuple[Any, ...] = () if where is None else (where,)
        if f.groups:  # a row of each piece of the rows, by the matrix of its group
            for r in rows.tolist():
                g = int(torch.searchsorted(t["ends"], r, right=True))
                parts.append((r, *_one(f, t, x[r:r + 1], y[g], None)))
            continue
        parts += [((*at, rows), *_one(f, t, x[rows], y, None)),
                  ((*at, slice(None), columns), *_one(f, t, x, y[:, columns], columns))]
    return parts


def _one(f: Form, t: Tensors, x: torch.Tensor, y: torch.Tensor, columns: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference and bound of x @ y, `columns` of the result."""
    x, y = x.double(), y.double()
    want, size = x @ y, x.abs() @ y.abs()
    error = _TYPE_ERROR.get(f.dtype, 0.0)
    if f.fast and f.k > 128:
        error += f.k / 32 * 2.0**-13
    slack = (f.k * 2.0**-24 + error) * size if f.dtype != "int8" else torch.zeros_like(size)
    if f.scaling == "tensor":
        by = (t["scale_a"] * t["scale_b"]).double()
        want, slack = want * by, slack * by
    if f.bias:
        want = want + (t["bias"] if columns is None else t["bias"][columns]).double()
    slack = 1.15 * slack + 2.0**-20 * want.abs() if f.activation else slack
    want = _ACTIVATIONS[f.activation](want)
    return want, slack + 1.01 * _UNIT[f.result] * (want.abs() + slack) + (2.0**-24 if f.result != "int32" else 0.5)


def accuracy(parts: list[tuple[Any, torch.Tensor, torch.Tensor]], out: torch.Tensor) -> tuple[float, float]:
    """(largest error over its bound, relative error by Frobenius norm); infinite where something is not finite."""
    worst = error = size = 0.0
    for index, want, bound in parts:
        off = (out[index].double().reshape(want.shape) - want).abs()
        worst = max(worst, float(torch.nan_to_num(off / bound, nan=float("inf")).max()))
        error, size = error + float((off**2).sum()), size + float((want**2).sum())
    return worst, (error / max(size, 1e-300)) ** 0.5


__all__ = ["FORMS", "Form", "accuracy", "make", "ours", "peers", "reference"]
