"""Loads whose addresses come from memory, whose rows are guarded, or that a list of lengths ends: experts, pages, images."""

import math
from typing import Any

import tilelang.language as T

from .attention import LOG2E, _softmax
from .corpus import Plain, Sizes, Spec, Tensors, enter
from .gemms import bounded

_PLAIN = "gemm 128x128x64, 3 stages, 256 threads"


def _indices(count: str, below: str, distinct: bool = False) -> Any:
    def fill(torch: Any, s: Sizes, g: Any, device: str) -> Any:
        if distinct:
            return torch.randperm(s[below], device=device, generator=g)[:s[count]].int()
        return torch.randint(0, s[below], (s[count],), device=device, generator=g, dtype=torch.int32)

    return fill


# ---- rows of A through an index ---------------------------------------------------------------------------------------


def gathered(where: str, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """C = A[index] B^T.  where: the index is read from global memory at each element, or first into a tile."""
    def program(tokens: int, rows: int, n: int, k: int) -> Any:
        @T.prim_func
        def matmul(A: T.Tensor((tokens, k), "float16"), B: T.Tensor((n, k), "float16"), I: T.Tensor((rows,), "int32"),
                   C: T.Tensor((rows, n), "float16")):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(rows, bm), threads=256) as (bx, by):
                a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
                at = T.alloc_shared((bm,), "int32")
                c = T.alloc_fragment((bm, bn), "float32")
                T.clear(c)
                if where == "tile":
                    T.copy(I[by * bm], at)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    for i, j in T.Parallel(bm, bk):
                        a[i, j] = A[at[i] if where == "tile" else I[by * bm + i], step * bk + j]
                    T.copy(B[bx * bn, step * bk], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[by * bm, bx * bn])

        return matmul

    return program


def _gathered_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    a, b = t["A"].double()[t["I"].long()], t["B"].double()
    want, size = a @ b.T, a.abs() @ b.abs().T
    return [("C", want, bounded(want, size, s["k"], "float16"))]


_ROWS = dict(tokens=8192, rows=4096, n=4096, k=4096)
_ROWS_SMALL = dict(tokens=300, rows=256, n=256, k=128)
for _where in ("global", "tile"):
    enter(Plain(f"rows gathered, index in {'a tile' if _where == 'tile' else 'global memory'}", "gathers", gathered(_where),
                lambda tokens, rows, n, k: {"A": Spec((tokens, k)), "B": Spec((n, k)),
                                            "I": Spec((rows,), "int32", _indices("rows", "tokens")), "C": Spec((rows, n),
                                                                                                               out=True)},
                _gathered_reference, _ROWS, _ROWS_SMALL, lambda tokens, rows, n, k: 2.0 * rows * n * k, best=("program",
                                                                                                              _PLAIN)))


def scattered(tokens: int, rows: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """C[index] = A B^T: the rows of the result go through an index."""
    @T.prim_func
    def matmul(A: T.Tensor((rows, k), "float16"), B: T.Tensor((n, k), "float16"), I: T.Tensor((rows,), "int32"),
               C: T.Tensor((tokens, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(rows, bm), threads=256) as (bx, by):
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bn, bk), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                T.copy(A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk], b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                C[I[by * bm + i], bx * bn + j] = c[i, j]

    return matmul


def _scattered_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    a, b, at = t["A"].double(), t["B"].double(), t["I"].long()
    want = torch.zeros((s["tokens"], s["n"]), dtype=torch.float64, device=a.device)
    bound = torch.ones_like(want)
    rows, size = a @ b.T, a.abs() @ b.abs().T
    want[at], bound[at] = rows, bounded(rows, size, s["k"], "float16")
    return [("C", want, bound)]


enter(Plain("rows scattered", "gathers", scattered,
            lambda tokens, rows, n, k: {"A": Spec((rows, k)), "B": Spec((n, k)),
                                        "I": Spec((rows,), "int32", _indices("rows", "tokens", True)),
                                        "C": Spec((tokens, n), "float16", "zeros", True)},
            _scattered_reference, _ROWS, _ROWS_SMALL, lambda tokens, rows, n, k: 2.0 * rows * n * k, best=("program", _PLAIN)))


# ---- keys through an index --------------------------------------------------------------------------------------------


def chosen_keys(queries: int, heads: int, keys: int, top: int, dim: int, bn: int = 64) -> Any:
    """Each query attends to `top` keys that its row of indices names; heads share them."""
    by = LOG2E * dim**-0.5

    @T.prim_func
    def attend(Q: T.Tensor((queries, heads, dim), "float16"), K: T.Tensor((keys, dim), "float16"),
               V: T.Tensor((keys, dim), "float16"), I: T.Tensor((queries, top), "int32"), O: T.Tensor((queries, heads, dim),
                                                                                                      "float16")):
        with T.Kernel(queries, threads=128) as t:
            q, k, v = T.alloc_shared((heads, dim), "float16"), T.alloc_shared((bn, dim), "float16"), T.alloc_shared((bn, dim),
                                                                                                                    "float16")
            s, p = T.alloc_fragment((heads, bn), "float32"), T.alloc_fragment((heads, bn), "float16")
            o = T.alloc_fragment((heads, dim), "float32")
            best, before, rescale, total, row = [T.alloc_fragment((heads,), "float32") for _ in range(5)]
            T.copy(Q[t, :, :], q)
            T.clear(o)
            T.clear(total)
            T.fill(best, -1e4)
            for step in T.Pipelined(T.ceildiv(top, bn), num_stages=2):
                for i, j in T.Parallel(bn, dim):
                    k[i, j] = K[I[t, step * bn + i], j]
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                _softmax(s, p, p, o, best, before, rescale, total, row, by, heads, bn, dim, False)
                for i, j in T.Parallel(bn, dim):
                    v[i, j] = V[I[t, step * bn + i], j]
                T.gemm(p, v, o)
            for i, j in T.Parallel(heads, dim):
                o[i, j] /= total[i]
            T.copy(o, O[t, :, :])

    return attend


def _chosen_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    outs, sizes = [], []
    for q, at in zip(t["Q"].split(64), t["I"].long().split(64)):
        k, v = t["K"].double()[at], t["V"].double()[at]
        p = (q.double() @ k.transpose(1, 2) * s["dim"]**-0.5).softmax(2)
        outs.append(p @ v)
        sizes.append(p @ v.abs())
    want, size = torch.cat(outs), torch.cat(sizes)
    return [("O", want, (4 * 2.0**-11 + s["top"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-5)]


def _rows_of_indices(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    return torch.randint(0, s["keys"], (s["queries"], s["top"]), device=device, generator=g, dtype=torch.int32)


enter(Plain("attention to chosen keys", "gathers", chosen_keys,
            lambda queries, heads, keys, top, dim: {
                "Q": Spec((queries, heads, dim)), "K": Spec((keys, dim)), "V": Spec((keys, dim)),
                "I": Spec((queries, top), "int32", _rows_of_indices), "O": Spec((queries, heads, dim), out=True)},
            _chosen_reference, dict(queries=4096, heads=64, keys=16384, top=2048, dim=128),
            dict(queries=2, heads=64, keys=100, top=128, dim=64),
            lambda queries, heads, keys, top, dim: 4.0 * queries * heads * top * dim, best=("program",
                                                                                            "attention 64x128, 128 threads")))


# ---- pages ------------------------------------------------------------------------------------------------------------


def paged(batch: int, heads: int, group: int, keys: int, dim: int, page: int) -> Any:
    """Decode with a paged cache: `group` query heads share a head of keys, a tile is one page or 64 keys of one."""
    bn, rows, by = min(page, 64), 64, LOG2E * dim**-0.5
    pages = keys // page

    @T.prim_func
    def decode(Q: T.Tensor((batch, heads, group, dim), "float16"), K: T.Tensor((batch * pages, page, heads, dim), "float16"),
               V: T.Tensor((batch * pages, page, heads, dim), "float16"), table: T.Tensor((batch, pages), "int32"),
               O: T.Tensor((batch, heads, group, dim), "float16")):
        with T.Kernel(heads, batch, threads=128) as (h, b):
            q, k, v = T.alloc_shared((rows, dim), "float16"), T.alloc_shared((bn, dim), "float16"), T.alloc_shared((bn, dim),
                                                                                                                   "float16")
            s, p = T.alloc_fragment((rows, bn), "float32"), T.alloc_fragment((rows, bn), "float16")
            o = T.alloc_fragment((rows, dim), "float32")
            best, before, rescale, total, row = [T.alloc_fragment((rows,), "float32") for _ in range(5)]
            for i, j in T.Parallel(rows, dim):
                q[i, j] = T.if_then_else(i < group, Q[b, h, T.min(i, group - 1), j], T.float16(0))
            T.clear(o)
            T.clear(total)
            T.fill(best, -1e4)
            for step in T.Pipelined(keys // bn, num_stages=3):
                block = table[b, step * bn // page]
                T.copy(K[block, step * bn % page:step * bn % page + bn, h, :], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                _softmax(s, p, p, o, best, before, rescale, total, row, by, rows, bn, dim, False)
                T.copy(V[block, step * bn % page:step * bn % page + bn, h, :], v)
                T.gemm(p, v, o)
            for i, j in T.Parallel(rows, dim):
                if i < group:
                    O[b, h, i, j] = o[i, j] / total[i]

    return decode


def _paged_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    outs, sizes = [], []
    for b in range(s["batch"]):
        at = t["table"][b].long()
        k, v = (t[n][at].double().reshape(s["keys"], s["heads"], s["dim"]).transpose(0, 1) for n in "KV")
        p = (t["Q"][b].double() @ k.transpose(1, 2) * s["dim"]**-0.5).softmax(2)
        outs.append(p @ v)
        sizes.append(p @ v.abs())
    want, size = torch.stack(outs), torch.stack(sizes)
    return [("O", want, (4 * 2.0**-11 + s["keys"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-5)]


def _table(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    pages = s["keys"] // s["page"]
    return torch.randperm(s["batch"] * pages, device=device, generator=g).int().reshape(s["batch"], pages)


for _page in (16, 64, 256):
    enter(Plain(f"paged decode, pages of {_page}", "gathers", paged,
                lambda batch, heads, group, keys, dim, page: {
                    "Q": Spec((batch, heads, group, dim)), "K": Spec((batch * (keys // page), page, heads, dim)),
                    "V": Spec((batch * (keys // page), page, heads, dim)), "table": Spec((batch, keys // page), "int32",
                                                                                         _table),
                    "O": Spec((batch, heads, group, dim), out=True)},
                _paged_reference, dict(batch=64, heads=8, group=8, keys=4096, dim=128, page=_page),
                dict(batch=2, heads=2, group=4, keys=256, dim=64, page=_page)))


# ---- sequences of unequal length --------------------------------------------------------------------------------------


def packed(causal: bool, bm: int = 128, bn: int = 128) -> Any:
    """Attention over packed sequences; block (bx, h, b) has the rows bx * bm of sequence b, if there are such."""
    def program(sequences: int, longest: int, tokens: int, heads: int, dim: int) -> Any:
        shape, by = (tokens, heads, dim), LOG2E * dim**-0.5

        @T.prim_func
        def attend(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
                   ends: T.Tensor((sequences + 1,), "int32"), O: T.Tensor(shape, "float16")):
            with T.Kernel(T.ceildiv(longest, bm), heads, sequences, threads=256) as (bx, h, b):
                q, k, v = [T.alloc_shared((n, dim), "float16") for n in (bm, bn, bn)]
                s, p = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float16")
                o = T.alloc_fragment((bm, dim), "float32")
                top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in range(5)]
                first, length = ends[b], ends[b + 1] - ends[b]
                if bx * bm < length:
                    T.copy(Q[first + bx * bm:first + bx * bm + bm, h, :], q)
                    T.clear(o)
                    T.clear(total)
                    T.fill(top, -1e4)
                    last = T.min(T.ceildiv((bx + 1) * bm, bn), T.ceildiv(length, bn)) if causal else T.ceildiv(length, bn)
                    for step in T.Pipelined(last, num_stages=2):
                        T.copy(K[first + step * bn:first + step * bn + bn, h, :], k)
                        T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                        for i, j in T.Parallel(bm, bn):
                            seen = step * bn + j < length
                            if causal:
                                seen = T.And(seen, step * bn + j <= bx * bm + i)
                            s[i, j] = T.if_then_else(seen, s[i, j], -T.infinity("float32"))
                        _softmax(s, p, p, o, top, before, rescale, total, row, by, bm, bn, dim, False)
                        T.copy(V[first + step * bn:first + step * bn + bn, h, :], v)
                        T.gemm(p, v, o)
                    for i, j in T.Parallel(bm, dim):
                        if bx * bm + i < length:
                            O[first + bx * bm + i, h, j] = o[i, j] / total[i]

        return attend

    return program


def _ends(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    """Random lengths of at most `longest`, which sum up to `tokens`."""
    share = torch.rand(s["sequences"], device=device, generator=g, dtype=torch.float64) + 0.7
    ends = (share.cumsum(0) / share.sum() * s["tokens"]).round().int()
    out = torch.cat([torch.zeros(1, dtype=torch.int32, device=device), ends])
    assert int(out.diff().max()) <= s["longest"]
    return out


def _packed_reference(causal: bool) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        import torch

        want, size = (torch.zeros_like(t["O"], dtype=torch.float64) for _ in range(2))
        ends = t["ends"].tolist()
        for a, b in zip(ends, ends[1:]):
            q, k, v = (t[n][a:b].double().transpose(0, 1) for n in "QKV")
            x = q @ k.transpose(1, 2) * s["dim"]**-0.5
            if causal:
                x = x.masked_fill(torch.ones(x.shape[1:], dtype=torch.bool, device=x.device).triu(1), -math.inf)
            p = x.softmax(2)
            want[a:b], size[a:b] = (p @ v).transpose(0, 1), (p @ v.abs()).transpose(0, 1)
        return [("O", want, (4 * 2.0**-11 + s["longest"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-5)]

    return compute


for _causal in (False, True):
    enter(Plain(f"packed sequences{', causal' if _causal else ''}", "gathers", packed(_causal),
                lambda sequences, longest, tokens, heads, dim: {
                    **{n: Spec((tokens, heads, dim)) for n in "QKV"}, "ends": Spec((sequences + 1,), "int32", _ends),
                    "O": Spec((tokens, heads, dim), out=True)},
                _packed_reference(_causal), dict(sequences=8, longest=4096, tokens=16384, heads=16, dim=128),
                dict(sequences=2, longest=300, tokens=300, heads=1, dim=64),
                # Squares of the lengths: 1.03 to 1.1 times those of equal ones.
                lambda sequences, longest, tokens, heads, dim, by=2 if _causal else 1: 4.0 * heads * dim * tokens**2 /
                sequences * 1.05 / by,
                best=("program", "attention causal" if _causal else "attention")))


# ---- convolution ------------------------------------------------------------------------------------------------------


def convolution(how: str, bm: int = 128, bn: int = 128, bk: int = 64) -> Any:
    """NHWC, 3 x 3, padding 1, stride 1.  how: a guarded load for each element, or T.im2col."""
    def program(n: int, side: int, c: int, f: int) -> Any:
        rows, k = n * side * side, 9 * c

        @T.prim_func
        def conv(X: T.Tensor((n, side, side, c), "float16"), W: T.Tensor((3, 3, c, f), "float16"),
                 Y: T.Tensor((n, side, side, f), "float16")):
            with T.Kernel(T.ceildiv(f, bn), T.ceildiv(rows, bm), threads=256) as (bx, by):
                a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bk, bn), "float16")
                o = T.alloc_fragment((bm, bn), "float32")
                weights, flat = T.Tensor((k, f), "float16", W.data), T.Tensor((rows, f), "float16", Y.data)
                T.clear(o)
                for step in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                    if how == "im2col":
                        T.im2col(X, a, by, step, 3, 1, 1, 1)
                    else:
                        for i, j in T.Parallel(bm, bk):
                            at, m = step * bk + j, by * bm + i
                            y = m // side % side + at // c // 3 - 1
                            x = m % side + at // c % 3 - 1
                            inside = T.And(T.And(y >= 0, x >= 0), T.And(y < side, x < side))
                            a[i, j] = T.if_then_else(inside, X[m // (side * side), y, x, at % c], T.float16(0))
                    T.copy(weights[step * bk, bx * bn], b)
                    T.gemm(a, b, o)
                T.copy(o, flat[by * bm, bx * bn])

        return conv

    return program


def _convolution_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    x, w = t["X"].double().permute(0, 3, 1, 2), t["W"].double().permute(3, 2, 0, 1)
    want, size = (torch.nn.functional.conv2d(a, b, padding=1).permute(0, 2, 3, 1) for a, b in ((x, w), (x.abs(), w.abs())))
    return [("Y", want, bounded(want, size, 9 * s["c"], "float16"))]


def _cudnn(torch: Any, t: Tensors) -> Any:
    w = t.setdefault("_w", t["W"].permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last))
    return torch.nn.functional.conv2d(t["X"].permute(0, 3, 1, 2), w, padding=1)


for _how in ("guarded", "im2col"):
    enter(Plain(f"convolution 3x3, {_how}", "gathers", convolution(_how),
                lambda n, side, c, f: {"X": Spec((n, side, side, c)), "W": Spec((3, 3, c, f)), "Y": Spec((n, side, side, f),
                                                                                                         out=True)},
                _convolution_reference, dict(n=64, side=56, c=128, f=128), dict(n=2, side=8, c=64, f=128),
                lambda n, side, c, f: 18.0 * n * side * side * c * f, best=("torch", _cudnn)))
