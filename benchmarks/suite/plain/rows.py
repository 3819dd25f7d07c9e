"""Kernels bound by memory: rows, columns, scans, transposes, elementwise trees, histograms.  They are compared with a copy."""

import math
from typing import Any

import tilelang.language as T

from .corpus import Plain, Sizes, Spec, Tensors, enter, unit_of

MATRIX, SMALL = dict(m=16384, n=4096), dict(m=6, n=512)
LONG, LONG_SMALL = dict(m=2048, n=32768), dict(m=3, n=4096)


def by_row(body: Any, rows: int = 1, threads: int = 256, dtype: str = "float16") -> Any:
    """Y[r] = f(X[r], V): whole rows in a fragment.  body(x, v, top, total, n): changes x in place."""
    def program(m: int, n: int) -> Any:
        @T.prim_func
        def kernel(X: T.Tensor((m, n), dtype), V: T.Tensor((n,), dtype), Y: T.Tensor((m, n), dtype)):
            with T.Kernel(T.ceildiv(m, rows), threads=threads) as r:
                x, v = T.alloc_fragment((rows, n), "float32"), T.alloc_fragment((n,), "float32")
                top, total = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
                T.copy(X[r * rows, 0], x)
                T.copy(V, v)
                body(x, v, top, total, rows, n)
                T.copy(x, Y[r * rows, 0])

        return kernel

    return program


@T.macro
def _softmax(x, v, top, total, rows, n):
    T.reduce_max(x, top, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] = T.exp(x[i, j] - top[i])
    T.reduce_sum(x, total, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] /= total[i]


@T.macro
def _rms_norm(x, v, top, total, rows, n):
    square = T.alloc_fragment((rows, n), "float32")
    for i, j in T.Parallel(rows, n):
        square[i, j] = x[i, j] * x[i, j]
    T.reduce_sum(square, total, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] = x[i, j] * T.rsqrt(total[i] / n + 1e-6) * v[j]


@T.macro
def _layer_norm(x, v, top, total, rows, n):
    square = T.alloc_fragment((rows, n), "float32")
    T.reduce_sum(x, top, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] -= top[i] / n
    for i, j in T.Parallel(rows, n):
        square[i, j] = x[i, j] * x[i, j]
    T.reduce_sum(square, total, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] = x[i, j] * T.rsqrt(total[i] / n + 1e-6) * v[j]


@T.macro
def _cumsum(x, v, top, total, rows, n):
    T.cumsum(x, dim=1)


@T.macro
def _scaled(x, v, top, total, rows, n):
    T.reduce_absmax(x, top, dim=1)
    for i, j in T.Parallel(rows, n):
        x[i, j] = x[i, j] * (127.0 / top[i])


def _reference(f: Any, dtype: str, length: float = 0.0) -> Any:
    """f(x, v) -> (want, size): the size that rounding errors in float32 are relative to."""
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        import torch

        parts = [f(x.double(), t["V"].double()) for x in t["X"].split(2048)]
        want, size = (torch.cat([p[k] for p in parts]) for k in range(2))
        return [("Y", want, 1.01 * unit_of(dtype) * want.abs() + (8 + length * s["n"]) * 2.0**-24 * size + 2.0**-24)]

    return compute


def _norm(x: Any, v: Any, centre: bool) -> tuple[Any, Any]:
    c = x - x.mean(1, keepdim=True) if centre else x
    y = c * (c.square().mean(1, keepdim=True) + 1e-6).rsqrt() * v
    return y, y.abs() + v.abs()


def _softmax_reference(x: Any, v: Any) -> tuple[Any, Any]:
    y = x.softmax(1)
    return y, y * (1 + x.abs())


def _matrix(dtype: str) -> Any:
    return lambda m, n: {"X": Spec((m, n), dtype), "V": Spec((n,), dtype), "Y": Spec((m, n), dtype, out=True)}


for _name, _body, _f, _length in (
        ("softmax", _softmax, _softmax_reference, 1.0), ("RMS norm", _rms_norm, lambda x, v: _norm(x, v, False), 1.0),
        ("layer norm", _layer_norm, lambda x, v: _norm(x, v, True), 1.0),
        ("scaled by the largest", _scaled, lambda x, v: (x * (127 / x.abs().amax(1, keepdim=True)),
                                                        (x * (127 / x.abs().amax(1, keepdim=True))).abs()), 0.0),
        ("cumsum", _cumsum, lambda x, v: (x.cumsum(1), x.abs().cumsum(1)), 0.1)):
    for _sizes, _small, _where in ((MATRIX, SMALL, "of 4k"), (LONG, LONG_SMALL, "of 32k")):
        if _name in ("layer norm", "scaled by the largest") and _sizes is LONG:
            continue
        enter(Plain(f"{_name}, rows {_where}", "rows", by_row(_body, threads=512 if _sizes is LONG else 256),
                    _matrix("float16"),
                    _reference(_f, "float16", _length), _sizes, _small))
enter(Plain("softmax, rows of 4k, float32", "rows", by_row(_softmax, dtype="float32"), _matrix("float32"),
            _reference(_softmax_reference, "float32", 1.0), dict(m=8192, n=4096), SMALL),
      Plain("softmax, 8 rows of 512 a block", "rows", by_row(_softmax, rows=8), _matrix("float16"),
            _reference(_softmax_reference, "float16", 1.0), dict(m=131072, n=512), dict(m=16, n=512)))


# ---- elements ---------------------------------------------------------------------------------------------------------


def elements(f: Any, inputs: int, dtype: str = "float16", out: str = "", block: int = 2048, threads: int = 256) -> Any:
    out = out or dtype

    def program(n: int) -> Any:
        @T.prim_func
        def kernel(X: T.Tensor((n,), dtype), Z: T.Tensor((n if inputs > 1 else 1,), dtype), Y: T.Tensor((n,), out)):
            with T.Kernel(T.ceildiv(n, block), threads=threads) as b:
                for i in T.Parallel(block):
                    at = b * block + i
                    Y[at] = f(X[at], Z[at] if inputs > 1 else 0)

        return kernel

    return program


def _elements_tensors(inputs: int, dtype: str, out: str) -> Any:
    return lambda n: {"X": Spec((n,), dtype), "Z": Spec((n if inputs > 1 else 1,), dtype), "Y": Spec((n,), out, out=True)}


def _elements_reference(f: Any, out: str) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        want = f(t["X"].double(), t["Z"].double())
        unit, least = (unit_of(out), 0.0) if unit_of(out) else (2.0**-4, 2.0**-10)  # e4m3: half of its smallest number
        return [("Y", want, 1.02 * unit * want.abs() + least + 2.0**-20 * (1 + t["X"].double().abs()))]

    return compute


def _gelu(x: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x)


_COUNT, _FEW = dict(n=1 << 27), dict(n=5000)
for _name, _inputs, _dtype, _out, _f, _torch in (
        ("sum of two", 2, "float16", "", lambda x, z: x + z, lambda x, z: x + z),
        ("gelu", 1, "float16", "", lambda x, z: T.cast(0.5 * T.cast(x, "float32") * (1 + T.erf(T.cast(x,
                                                                                                      "float32") *
                                                                                                      math.sqrt(0.5))),
                                                       "float16"), lambda x, z: _gelu(x)),
        ("float32 to float16", 1, "float32", "float16", lambda x, z: T.cast(x, "float16"), lambda x, z: x),
        ("float16 to float8", 1, "float16", "float8_e4m3fn", lambda x, z: T.cast(x, "float8_e4m3fn"), lambda x, z: x),
        ("gate", 2, "bfloat16", "", lambda x, z: T.cast(T.cast(x, "float32") * T.sigmoid(T.cast(x, "float32")) * T.cast(z,
                                                                                                                        "float32"),
                                                        "bfloat16"), lambda x, z: x * x.sigmoid() * z)):
    enter(Plain(f"elements: {_name}", "rows", elements(_f, _inputs, _dtype, _out), _elements_tensors(_inputs, _dtype,
                                                                                                     _out or _dtype),
                _elements_reference(_torch, _out or _dtype), _COUNT, _FEW))
enter(Plain("elements: sum of two, 128 threads and 1000 a block", "rows", elements(lambda x, z: x + z, 2, block=1000,
                                                                                   threads=128),
            _elements_tensors(2, "float16", "float16"), _elements_reference(lambda x, z: x + z, "float16"), _COUNT, _FEW))


# ---- other shapes -----------------------------------------------------------------------------------------------------


def transpose(m: int, n: int, tile: int = 64) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float16"), Y: T.Tensor((n, m), "float16")):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=256) as (bx, by):
            s = T.alloc_shared((tile, tile), "float16")
            T.copy(X[by * tile, bx * tile], s)
            for i, j in T.Parallel(tile, tile):
                Y[bx * tile + i, by * tile + j] = s[j, i]

    return kernel


def transpose_plain(m: int, n: int, tile: int = 64) -> Any:
    """Without a tile in shared memory: the compiler has to see that one side is strided."""
    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float16"), Y: T.Tensor((n, m), "float16")):
        with T.Kernel(T.ceildiv(n, tile), T.ceildiv(m, tile), threads=256) as (bx, by):
            for i, j in T.Parallel(tile, tile):
                Y[bx * tile + i, by * tile + j] = X[by * tile + j, bx * tile + i]

    return kernel


def column_sum(m: int, n: int, rows: int = 256, columns: int = 128) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float16"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, columns), T.ceildiv(m, rows), threads=256) as (bx, by):
            x, s = T.alloc_fragment((rows, columns), "float32"), T.alloc_fragment((columns,), "float32")
            T.copy(X[by * rows, bx * columns], x)
            T.reduce_sum(x, s, dim=0)
            T.atomic_add(Y[bx * columns], s)

    return kernel


def histogram(n: int, bins: int = 256, block: int = 8192) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((n,), "uint8"), Y: T.Tensor((bins,), "int32")):
        with T.Kernel(T.ceildiv(n, block), threads=256) as b:
            counts = T.alloc_shared((bins,), "int32")
            T.clear(counts)
            for i in T.Parallel(block):
                T.atomic_add(counts[X[b * block + i]], 1)
            T.atomic_add(Y, counts)

    return kernel


def rope(rows: int, heads: int, dim: int, block: int = 8) -> Any:
    """Y = X cos + rotated X sin, halves of a head as partners."""
    @T.prim_func
    def kernel(X: T.Tensor((rows, heads, dim), "float16"), C: T.Tensor((rows, dim), "float16"), S: T.Tensor((rows, dim),
                                                                                                            "float16"),
               Y: T.Tensor((rows, heads, dim), "float16")):
        with T.Kernel(T.ceildiv(rows, block), threads=256) as b:
            for r, h, d in T.Parallel(block, heads, dim):
                at = b * block + r
                partner = T.if_then_else(d < dim // 2, -X[at, h, (d + dim // 2) % dim], X[at, h, (d + dim // 2) % dim])
                Y[at, h, d] = X[at, h, d] * C[at, d] + partner * S[at, d]

    return kernel


@T.macro
def _butterfly(src, dst, k, n):
    for i in T.Parallel(n):
        other = src[i ^ (1 << k)]
        dst[i] = T.if_then_else((i >> k) % 2 == 0, src[i] + other, other - src[i])


def _butterflies(tiles: Any, steps: int, n: int) -> None:
    for k in range(steps):
        _butterfly(tiles[k % 2], tiles[1 - k % 2], k, n)


def hadamard(m: int, n: int) -> Any:
    """Rows of n transformed by log n steps of sums and differences through shared memory."""
    steps = n.bit_length() - 1

    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float16"), Y: T.Tensor((m, n), "float16")):
        with T.Kernel(m, threads=256) as r:
            a, b = T.alloc_shared((n,), "float32"), T.alloc_shared((n,), "float32")
            for i in T.Parallel(n):
                a[i] = T.cast(X[r, i], "float32")
            _butterflies((a, b), steps, n)
            for i in T.Parallel(n):
                Y[r, i] = T.cast((a, b)[steps % 2][i] * n**-0.5, "float16")

    return kernel


def _hadamard_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    x = t["X"].double()
    m, n = x.shape
    k = 1
    while k < n:
        pairs = x.reshape(m, n // (2 * k), 2, k)
        import torch

        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(m, n)
        k *= 2
    want = x * n**-0.5
    size = t["X"].double().abs().sum(1, keepdim=True) * n**-0.5
    return [("Y", want, 1.01 * 2.0**-11 * want.abs() + 20 * 2.0**-24 * size)]


def _rope_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    x, c, n = t["X"].double(), t["C"].double()[:, None], t["S"].double()[:, None]
    a, b = x.chunk(2, 2)
    partner = torch.cat([-b, a], 2)
    want = x * c + partner * n
    return [("Y", want, 2.0**-10 * ((x * c).abs() + (partner * n).abs()) + 1e-6)]


def embedding(rows: int, n: int, words: int) -> Any:
    @T.prim_func
    def kernel(W: T.Tensor((words, n), "float16"), I: T.Tensor((rows,), "int32"), Y: T.Tensor((rows, n), "float16")):
        with T.Kernel(rows, threads=128) as r:
            for j in T.Parallel(n):
                Y[r, j] = W[I[r], j]

    return kernel


def cross_entropy(m: int, n: int, block: int = 4096) -> Any:
    """Loss of each row with an online maximum over tiles of the vocabulary."""
    @T.prim_func
    def kernel(X: T.Tensor((m, n), "bfloat16"), L: T.Tensor((m,), "int32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(m, threads=256) as r:
            x = T.alloc_fragment((1, block), "float32")
            top, before, total, part = [T.alloc_fragment((1,), "float32") for _ in range(4)]
            T.fill(top, -1e4)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(n, block), num_stages=2):
                T.copy(X[r, k * block], x)
                for i, j in T.Parallel(1, block):
                    x[i, j] = T.if_then_else(k * block + j < n, x[i, j], -T.infinity("float32"))
                T.copy(top, before)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(1, block):
                    x[i, j] = T.exp(x[i, j] - top[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] * T.exp(before[i] - top[i]) + part[i]
            for i in T.Parallel(1):
                Y[r] = T.log(total[i]) + top[i] - T.cast(X[r, L[r]], "float32")

    return kernel


def _loss_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    parts = [torch.logsumexp(x.double(), 1) - x.double().gather(1, at[:, None].long())[:, 0]
             for x, at in zip(t["X"].split(512), t["L"].split(512))]
    want = torch.cat(parts)
    return [("Y", want, s["n"] * 2.0**-24 * (1 + want.abs()) + 1e-5)]


def _below(count: str, below: str) -> Any:
    return lambda torch, s, g, device: torch.randint(0, s[below], (s[count],), device=device, generator=g, dtype=torch.int32)


_PAIR = lambda m, n: {"X": Spec((m, n)), "Y": Spec((n, m), out=True)}  # noqa: E731
_TURNED = lambda t, s: [("Y", t["X"].double().T, 1e-9 + 0 * t["X"].double().T)]  # noqa: E731
enter(Plain("transpose through shared memory", "rows", transpose, _PAIR, _TURNED, dict(m=8192, n=8192), dict(m=100, n=130)),
      Plain("transpose by elements", "rows", transpose_plain, _PAIR, _TURNED, dict(m=8192, n=8192), dict(m=100, n=130)),
      Plain("column sum", "rows", column_sum, lambda m, n: {"X": Spec((m, n)), "Y": Spec((n,), "float32", "zeros", True)},
            lambda t, s: [("Y", t["X"].double().sum(0), s["m"] * 2.0**-24 * t["X"].double().abs().sum(0))],
            dict(m=32768, n=4096), dict(m=300, n=200)),
      Plain("histogram", "rows", histogram,
            lambda n: {"X": Spec((n,), "uint8", "bytes"), "Y": Spec((256,), "int32", "zeros", True)},
            lambda t, s: [("Y", t["X"].int().flatten().bincount(minlength=256).double(),
                           0.5 + 0 * t["X"].new_zeros(256).double())],
            dict(n=1 << 28), dict(n=1 << 14)),
      Plain("rotary embedding", "rows", rope,
            lambda rows, heads, dim: {"X": Spec((rows, heads, dim)), "C": Spec((rows, dim)), "S": Spec((rows, dim)),
                                      "Y": Spec((rows, heads, dim), out=True)},
            _rope_reference, dict(rows=16384, heads=32, dim=128), dict(rows=10, heads=2, dim=64)),
      Plain("Hadamard, rows of 4k", "rows", hadamard, lambda m, n: {"X": Spec((m, n)), "Y": Spec((m, n), out=True)},
            _hadamard_reference, MATRIX, SMALL),
      Plain("embedding", "rows", embedding,
            lambda rows, n, words: {"W": Spec((words, n)), "I": Spec((rows,), "int32", _below("rows", "words")),
                                    "Y": Spec((rows, n), out=True)},
            lambda t, s: [("Y", t["W"].double()[t["I"].long()], 1e-9 + 0 * t["Y"].double().nan_to_num(0))],
            dict(rows=32768, n=4096, words=32768), dict(rows=9, n=256, words=20),
            moved=lambda rows, n, words: 4.0 * rows * n),
      Plain("cross entropy", "rows", cross_entropy,
            lambda m, n: {"X": Spec((m, n), "bfloat16"), "L": Spec((m,), "int32", _below("m", "n")),
                          "Y": Spec((m,), "float32", out=True)},
            _loss_reference, dict(m=8192, n=50257), dict(m=3, n=5000)))
