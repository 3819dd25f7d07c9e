"""What is measured: matrix products and attention, by name and group.  Needs neither torch nor a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

HALF = ("float16", "bfloat16")
SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True)
class Gemm:
    """C (m, n) = A (m, k) @ B, B stored (n, k) ("nt") or (k, n) ("nn").

    dtype: of A and B; out: of C.  scaling: "" (16-bit operands), "tensor" (fp8, one float32 scale for A and one for B) or
    "block" (fp8, a float32 scale for every 1x128 of A and every 128x128 of B).
    """

    name: str
    groups: tuple[str, ...]
    m: int
    n: int
    k: int
    trans_b: bool = True
    dtype: str = "float16"
    out: str = "float16"
    scaling: str = ""

    kind = "gemm"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {'NT' if self.trans_b else 'NN'} {SHORT[self.dtype]}"


@dataclass(frozen=True)
class Attention:
    """softmax(q k^T / sqrt(dim)) v forward; q (batch, heads, seq, dim), k and v with kv_heads heads."""

    name: str
    groups: tuple[str, ...]
    batch: int
    heads: int
    seq: int
    dim: int = 128
    causal: bool = False
    kv_heads: int = 0
    dtype: str = "float16"

    kind = "attention"

    @property
    def flops(self) -> float:
        """Of both products; half for causal, as the papers count."""
        return 4.0 * self.batch * self.heads * self.seq**2 * self.dim * (0.5 if self.causal else 1.0)

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def shape(self) -> str:
        kv = f"/{self.kv}" if self.kv != self.heads else ""
        return (f"b{self.batch} h{self.heads}{kv} s{self.seq} d{self.dim} {SHORT[self.dtype]}"
                f"{' causal' if self.causal else ''}")


Workload = Gemm | Attention

M_SHAPES = ((4096, 1024, 8192), (4096, 8192, 8192), (4096, 28672, 8192), (4096, 8192, 28672),
            (8192, 1024, 8192), (8192, 8192, 8192), (8192, 28672, 8192), (8192, 8192, 28672))
SQUARES = (1024, 2048, 4096, 16384)
# not multiples of 8, 64 and 128 in m, n and k; rows of 16-byte multiples, and not
ODD_SHAPES = ((4095, 4097, 4099), (4088, 4104, 4120), (8191, 8184, 8200), (1000, 1048, 328), (4160, 4224, 4288),
              (3001, 2999, 8191))
FA_SHAPES = ((512, True), (512, False), (1024, True), (1024, False), (4096, True))


def _gemms() -> Iterable[Gemm]:
    for dtype in HALF:
        for trans_b in (True, False):
            end = f"-{'nt' if trans_b else 'nn'}-{SHORT[dtype]}"
            for i, s in enumerate(M_SHAPES):
                yield Gemm(f"M{i}{end}", ("M", f"M{end}"), *s, trans_b, dtype, dtype)
            for s in SQUARES:
                yield Gemm(f"SQ{s}{end}", ("squares", f"squares{end}"), s, s, s, trans_b, dtype, dtype)
    for trans_b in (True, False):
        for i, s in enumerate(ODD_SHAPES):
            yield Gemm(f"ODD{i}-{'nt' if trans_b else 'nn'}-f16", ("odd",), *s, trans_b)
    for s in (4096, 8192):
        for scaling in ("tensor", "block"):
            yield Gemm(f"FP8-{s}-{scaling}", ("fp8", f"fp8-{scaling}"), s, s, s, True, "float8_e4m3fn", "bfloat16", scaling)


def _attentions() -> Iterable[Attention]:
    for i, (seq, causal) in enumerate(FA_SHAPES):
        yield Attention(f"FA{i}", ("FA", "FA-short"), 1, 32, seq, causal=causal)
    for name, batch, seq in (("8k", 4, 8192), ("16k", 1, 16384)):
        for causal in (False, True):
            yield Attention(f"FA-{name}{'-c' if causal else ''}", ("FA", "FA-long"), batch, 16, seq, causal=causal)
            yield Attention(f"FA-{name}{'-c' if causal else ''}-bf16", ("FA-bf16",), batch, 16, seq, causal=causal,
                            dtype="bfloat16")


# In the order in which they are measured when time is short: what the bars name first.
WORKLOADS: dict[str, Workload] = {}
for _w in sorted(_gemms(), key=lambda w: (w.dtype == "bfloat16", not w.trans_b)):
    WORKLOADS[_w.name] = _w
for _a in _attentions():
    WORKLOADS[_a.name] = _a

# A few small ones: for trying the harness itself, also without a GPU.
TINY: dict[str, Workload] = {w.name: w for w in (
    Gemm("tiny-nt-f16", ("tiny",), 96, 80, 128), Gemm("tiny-nn-bf16", ("tiny",), 100, 72, 88, False, "bfloat16", "bfloat16"),
    Gemm("tiny-fp8-tensor", ("tiny",), 64, 128, 256, True, "float8_e4m3fn", "bfloat16", "tensor"),
    Gemm("tiny-fp8-block", ("tiny",), 64, 128, 256, True, "float8_e4m3fn", "bfloat16", "block"),
    Attention("tiny-fa", ("tiny",), 1, 2, 100, 64), Attention("tiny-fa-c", ("tiny",), 2, 4, 70, 32, True, kv_heads=2))}


_GEMM = re.compile(r"gemm:(\d+)x(\d+)x(\d+)(?::(nt|nn))?(?::(f16|bf16))?")
_ATTENTION = re.compile(r"attention:b(\d+)h(\d+)(?:/(\d+))?s(\d+)d(\d+)(:causal)?(?::(f16|bf16))?")
_DTYPE = {None: "float16", "f16": "float16", "bf16": "bfloat16"}


def of_shape(text: str) -> Workload | None:
    """The workload a shape describes: "gemm:MxNxK[:nt|:nn][:f16|:bf16]" or
    "attention:b2h32/8s4096d128[:causal][:f16|:bf16]"; None for any other text."""
    if m := _GEMM.fullmatch(text):
        sizes, dtype = [int(x) for x in m.groups()[:3]], _DTYPE[m[5]]
        return Gemm(text, (), sizes[0], sizes[1], sizes[2], m[4] != "nn", dtype, dtype)
    if m := _ATTENTION.fullmatch(text):
        return Attention(text, (), int(m[1]), int(m[2]), int(m[4]), int(m[5]), m[6] is not None, int(m[3] or 0), _DTYPE[m[7]])
    return None


def select(patterns: str, registry: dict[str, Any] | None = None) -> list[Workload]:
    """Workloads named by comma-separated patterns: names ("M*-nt-f16"), "@group" ("@fp8"), "!pattern" taken out again,
    or shapes (``of_shape``).

    Raises ValueError for a pattern that names nothing, with the groups there are.
    """
    known = {**WORKLOADS, **TINY} if registry is None else registry
    chosen: dict[str, Workload] = {}
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        out = pattern.startswith("!")
        word = pattern.removeprefix("!")
        if described := of_shape(word):
            chosen[word] = described
            continue
        if word.startswith("@"):
            found = [w for w in known.values() if any(fnmatchcase(g, word[1:]) for g in w.groups)]
        else:
            found = [w for w in known.values() if fnmatchcase(w.name, word)]
        if not found:
            groups = sorted({g for w in known.values() for g in w.groups})
            raise ValueError(f"no workload is called {pattern!r}; groups: {', '.join('@' + g for g in groups)}; "
                             "names: --list; shapes: gemm:MxNxK:nt:f16, attention:b2h32/8s4096d128:causal:bf16")
        for w in found:
            if out:
                chosen.pop(w.name, None)
            else:
                chosen[w.name] = w
    return list(chosen.values())
