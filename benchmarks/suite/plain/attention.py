"""Attention and its variants: scores, masks, operands through shared memory, thread counts, latent, backward."""

import math
from typing import Any

import tilelang.language as T

from .corpus import Plain, Sizes, Spec, Tensors, enter, unit_of

FULL, SMALL = dict(heads=16, seq=4096, dim=128), dict(heads=2, seq=256, dim=64)
LOG2E = math.log2(math.e)
CAP = 20.0


def flops(heads: int, seq: int, dim: int, **_: Any) -> float:
    return 4.0 * heads * seq * seq * dim


def attention(kind: str = "", bm: int = 128, bn: int = 128, stages: int = 2, threads: int = 256, dtype: str = "float16") -> Any:
    """Softmax attention.  kind: what differs from it ("causal", "p through shared", "store", "sink", a score function, ...)."""
    def program(heads: int, seq: int, dim: int, window: int = 0) -> Any:
        shape, scale = (heads, seq, dim), dim**-0.5
        wide = (heads, seq, seq) if kind in ("store", "bias") else (1, 1, 1)
        by = LOG2E * (1.0 if kind in ("softcap", "alibi", "bias") else scale)
        blocks = seq // bn if kind in ("block mask", "block list") else 1

        @T.prim_func
        def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype),
                   X: T.Tensor(wide, dtype), S: T.Tensor((heads,), "float32"), M: T.Tensor((seq // bm, blocks + 1), "int32"),
                   O: T.Tensor(shape, dtype)):
            with T.Kernel(T.ceildiv(seq, bm), heads, threads=threads) as (bx, h):
                q, k, v = [T.alloc_shared((n, dim), dtype) for n in (bm, bn, bn)]
                ps = T.alloc_shared((bm, bn), dtype)
                s, p = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), dtype)
                o = T.alloc_fragment((bm, dim), "float32")
                top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in range(5)]
                T.copy(Q[h, bx * bm:(bx + 1) * bm, :], q)
                T.clear(o)
                T.fill(top, S[h] * (1 / scale) if kind == "sink" else -1e4)  # fma may leave its rounding error as a difference
                T.fill(total, 1.0 if kind == "sink" else 0.0)
                first = T.max(bx * bm - window, 0) // bn if kind == "window" else 0
                last = T.ceildiv((bx + 1) * bm, bn) if kind in ("causal", "window") else \
                    M[bx, 0] if kind == "block list" else T.ceildiv(seq, bn)
                for step in T.Pipelined(last - first, num_stages=stages):
                    j0 = (M[bx, 1 + step] if kind == "block list" else first + step) * bn
                    if kind == "block mask":
                        if M[bx, 1 + step] != 0:
                            T.copy(K[h, j0:j0 + bn, :], k)
                            T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                            _softmax(s, p, ps, o, top, before, rescale, total, row, by, bm, bn, dim, False)
                            T.copy(V[h, j0:j0 + bn, :], v)
                            T.gemm(p, v, o)
                    else:
                        T.copy(K[h, j0:j0 + bn, :], k)
                        T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                        _score(kind, s, X, S, h, bx * bm, j0, scale, window, bm, bn)
                        if kind == "store":
                            T.copy(s, X[h, bx * bm:(bx + 1) * bm, j0:j0 + bn])
                        if kind == "sigmoid":
                            T.copy(s, p)
                        else:
                            _softmax(s, p, ps, o, top, before, rescale, total, row, by, bm, bn, dim, kind == "p through shared")
                        if kind == "dropout":
                            for i, j in T.Parallel(bm, bn):
                                bits = T.cast((bx * bm + i) * seq + j0 + j, "uint32") * T.uint32(2654435761)
                                p[i, j] = T.if_then_else((bits ^ (bits >> T.uint32(15))) % T.uint32(8) == T.uint32(0),
                                                         T.cast(0, dtype), p[i, j] * T.cast(8 / 7, dtype))
                        T.copy(V[h, j0:j0 + bn, :], v)
                        T.gemm(ps if kind == "p through shared" else p, v, o)
                if kind != "sigmoid":
                    for i, j in T.Parallel(bm, dim):
                        o[i, j] /= total[i]
                T.copy(o, O[h, bx * bm:(bx + 1) * bm, :])

        return attend

    return program


@T.macro
def _softmax(s, p, ps, o, top, before, rescale, total, row, by, bm, bn, dim, through_shared):
    T.copy(top, before)
    T.reduce_max(s, top, dim=1, clear=False)
    for i in T.Parallel(bm):
        rescale[i] = T.exp2(before[i] * by - top[i] * by)
    for i, j in T.Parallel(bm, bn):
        s[i, j] = T.exp2(s[i, j] * by - top[i] * by)
    T.reduce_sum(s, row, dim=1)
    for i in T.Parallel(bm):
        total[i] = total[i] * rescale[i] + row[i]
    if through_shared:
        T.copy(s, ps)
    else:
        T.copy(s, p)
    for i, j in T.Parallel(bm, dim):
        o[i, j] *= rescale[i]


def _score(kind: str, s: Any, X: Any, S: Any, h: Any, i0: Any, j0: Any, scale: float, window: int, bm: int, bn: int) -> None:
    functions = {
        "softcap": lambda x, i, j: CAP * T.tanh(x * (scale / CAP)),
        "alibi": lambda x, i, j: x * scale + S[h] * T.cast(j0 + j - i0 - i, "float32"),
        "sigmoid": lambda x, i, j: T.sigmoid(x * scale - 5.0),
        "bias": lambda x, i, j: x * scale + T.cast(X[h, i0 + i, j0 + j], "float32"),
        "causal": lambda x, i, j: T.if_then_else(i0 + i >= j0 + j, x, -T.infinity("float32")),
        "window": lambda x, i, j: T.if_then_else(T.And(i0 + i >= j0 + j, i0 + i < j0 + j + window), x, -T.infinity("float32")),
    }
    if kind in functions:
        _map_scores(s, functions[kind], bm, bn)


@T.macro
def _map_scores(s, f, bm, bn):
    for i, j in T.Parallel(bm, bn):
        s[i, j] = f(s[i, j], i, j)


def scores(t: Tensors, s: Sizes, kind: str) -> tuple[Any, Any]:
    """(weights, row sums that they are divided by or None) in float64."""
    import torch

    q, k = t["Q"].double(), t["K"].double()
    seq = q.shape[1]
    x = q @ k.transpose(1, 2) * q.shape[2]**-0.5
    at = torch.arange(seq, device=q.device)
    apart = at[None, :] - at[:, None]
    slopes = t["S"].double()[:, None, None]
    if kind == "softcap":
        x = CAP * torch.tanh(x / CAP)
    elif kind == "alibi":
        x = x + slopes * apart
    elif kind == "bias":
        x = x + t["X"].double()
    elif kind == "sigmoid":
        return torch.sigmoid(x - 5.0), None
    if kind in ("causal", "window"):
        hidden = apart > 0
        x = x.masked_fill(hidden if kind == "causal" else hidden | (apart <= -s["window"]), -math.inf)
    if kind in ("block mask", "block list"):
        m = t["M"][:, 1:].bool() if kind == "block mask" else _listed(t["M"])
        n = seq // m.shape[0]
        x = x.masked_fill(~m.repeat_interleave(n, 0).repeat_interleave(n, 1), -math.inf)
    if kind == "sink":
        x = torch.cat([x, slopes.expand(-1, seq, 1)], 2)
        return torch.softmax(x, 2)[..., :-1], None
    p = torch.softmax(x, 2)
    if kind == "dropout":
        word = (at[:, None] * seq + at[None, :]) * 2654435761 % 2**32
        p = p * ((word ^ (word >> 15)) % 8 != 0) * (8 / 7)
    return p, None


def _listed(m: Any) -> Any:
    import torch

    out = torch.zeros(m.shape[0], m.shape[1] - 1, dtype=torch.bool, device=m.device)
    for row in range(m.shape[0]):
        out[row, m[row, 1:1 + int(m[row, 0])].long()] = True
    return out


def reference(kind: str, dtype: str) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        outs: list[Any] = []
        sizes: list[Any] = []
        for h in range(t["Q"].shape[0]):  # a head at a time: the scores of all would fill the memory
            one = {n: t[n][h:h + 1] if n != "M" and t[n].shape[0] > 1 else t[n] for n in ("Q", "K", "V", "X", "S", "M")}
            p, v = scores(one, s, kind)[0], one["V"].double()
            outs.append(p @ v)
            sizes.append(p @ v.abs())
        import torch

        want, size = torch.cat(outs), torch.cat(sizes)
        return [("O", want, (4.0 * unit_of(dtype) + s["seq"] * 2.0**-24) * size + 2 * unit_of(dtype) * want.abs() + 1e-5)]

    return compute


def _block_mask(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    n = s["seq"] // 128
    m = (torch.rand((n, n), device=device, generator=g) < 0.5).int()
    m.fill_diagonal_(1)
    return torch.cat([m.sum(1, keepdim=True).int(), m], 1).int()


def _block_list(torch: Any, s: Sizes, g: Any, device: str) -> Any:
    m = _block_mask(torch, s, g, device)
    out = torch.zeros_like(m)
    out[:, 0] = m[:, 0]
    for row in range(m.shape[0]):
        found = m[row, 1:].nonzero().flatten().int()
        out[row, 1:1 + len(found)] = found
    return out


def tensors(kind: str, dtype: str, bm: int = 128) -> Any:
    def specs(heads: int, seq: int, dim: int, **_: Any) -> dict[str, Spec]:
        shape = (heads, seq, dim)
        wide = (heads, seq, seq) if kind in ("store", "bias") else (1, 1, 1)
        lists = {"block mask": _block_mask, "block list": _block_list}.get(kind, "zeros")
        blocks = seq // 128 + 1 if kind in ("block mask", "block list") else 2
        return {"Q": Spec(shape, dtype), "K": Spec(shape, dtype), "V": Spec(shape, dtype), "X": Spec(wide, dtype,
                                                                                                     out=kind == "store"),
                "S": Spec((heads,), "float32", "uniform", scale=0.1), "M": Spec((seq // bm, blocks), "int32", lists,
                                                                                lists == "zeros"),
                "O": Spec(shape, dtype, out=True)}

    return specs


def library_attention(torch: Any, t: Tensors) -> Any:
    """The fastest attention of this package without a mask: (heads, seq, dim) as one batch."""
    from tilelang.library import flash_attention

    return flash_attention(*(t[x][None] for x in "QKV"), layout="bhsd")


def causal_attention(torch: Any, t: Tensors) -> Any:
    from tilelang.library import flash_attention

    return flash_attention(*(t[x][None] for x in "QKV"), layout="bhsd", causal=True)


def flash_attention_3(causal: bool = False) -> tuple[str, Any]:
    """FlashAttention-3's forward pass where a package of it is installed (`provider_fa3`), else the library's attention."""
    import importlib
    import importlib.util

    package = next((p for p in ("flash_attn_interface", "fa3_fwd_interface") if importlib.util.find_spec(p)), None)

    def call(torch: Any, t: Tensors) -> Any:
        q, k, v = (t[x][None].transpose(1, 2) for x in "QKV")
        return importlib.import_module(package).flash_attn_func(q, k, v, causal=causal)

    return (package, call) if package else ("torch", causal_attention if causal else library_attention)


def enter_attention(name: str, kind: str = "", best: Any = ("program", "attention"), full: Any = None, small: Any = None,
                    count: Any = flops, **form: Any) -> None:
    dtype, bm = form.get("dtype", "float16"), form.get("bm", 128)
    enter(Plain(name, "attention", attention(kind, **form), tensors(kind, dtype, bm), reference(kind, dtype), full or FULL,
                small or SMALL, count, best=best))


enter_attention("attention", best=("torch", library_attention))
enter_attention("attention bf16", dtype="bfloat16", best=("torch", library_attention))
enter_attention("attention 64x128, 128 threads", bm=64, threads=128)
enter_attention("attention 128x64", bn=64)
enter_attention("attention 128x128, 384 threads", threads=384)
enter_attention("attention 128x128, 512 threads", threads=512)
enter_attention("attention 192 rows, 384 threads", bm=192, threads=384, full=dict(heads=16, seq=3840, dim=128),
                small=dict(heads=1, seq=384, dim=64))
enter_attention("attention d 64", full=dict(heads=32, seq=4096, dim=64), best=("torch", library_attention))
enter_attention("attention d 256", bn=64, full=dict(heads=8, seq=4096, dim=256), best=("torch", library_attention))
enter_attention("attention 8k", full=dict(heads=16, seq=8192, dim=128), best=("torch", library_attention))
enter_attention("attention 8k, 64 heads", full=dict(heads=64, seq=8192, dim=128), dtype="bfloat16", best=flash_attention_3())
enter_attention("attention 8k causal, 64 heads", "causal", full=dict(heads=64, seq=8192, dim=128), dtype="bfloat16",
                best=flash_attention_3(True), count=lambda **s: flops(**s) / 2)
enter_attention("attention causal", "causal", best=("torch", causal_attention), count=lambda **s: flops(**s) / 2)
enter_attention("attention window", "window", full=dict(**FULL, window=1024), small=dict(**SMALL, window=100), count=lambda
                heads, seq, dim, window: 4.0 * heads * dim * (seq - window / 2) * window, best=("program", "attention causal"))
for _kind in ("store", "sink", "sigmoid", "alibi", "softcap", "dropout", "bias", "p through shared"):
    enter_attention(f"attention {_kind}", _kind)
enter_attention("attention block mask", "block mask", count=lambda **s: flops(**s) * 0.516)
enter_attention("attention block list", "block list", count=lambda **s: flops(**s) * 0.516)


# ---- two values -------------------------------------------------------------------------------------------------------


def two_values(heads: int, seq: int, dim: int, bm: int = 128, bn: int = 64) -> Any:
    """Two outputs of one softmax: O = P V, W = P U."""
    shape, by = (heads, seq, dim), LOG2E * dim**-0.5

    @T.prim_func
    def attend(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
               U: T.Tensor(shape, "float16"), O: T.Tensor(shape, "float16"), W: T.Tensor(shape, "float16")):
        with T.Kernel(T.ceildiv(seq, bm), heads, threads=256) as (bx, h):
            q, k, v, u = [T.alloc_shared((n, dim), "float16") for n in (bm, bn, bn, bn)]
            s, p = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float16")
            o, w = T.alloc_fragment((bm, dim), "float32"), T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in range(5)]
            T.copy(Q[h, bx * bm:(bx + 1) * bm, :], q)
            T.clear(o)
            T.clear(w)
            T.clear(total)
            T.fill(top, -1e4)
            for step in T.Pipelined(T.ceildiv(seq, bn), num_stages=2):
                T.copy(K[h, step * bn:(step + 1) * bn, :], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                _softmax(s, p, p, o, top, before, rescale, total, row, by, bm, bn, dim, False)
                for i, j in T.Parallel(bm, dim):
                    w[i, j] *= rescale[i]
                T.copy(V[h, step * bn:(step + 1) * bn, :], v)
                T.copy(U[h, step * bn:(step + 1) * bn, :], u)
                T.gemm(p, v, o)
                T.gemm(p, u, w)
            for i, j in T.Parallel(bm, dim):
                o[i, j] /= total[i]
                w[i, j] /= total[i]
            T.copy(o, O[h, bx * bm:(bx + 1) * bm, :])
            T.copy(w, W[h, bx * bm:(bx + 1) * bm, :])

    return attend


def _two_values_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    q, k = t["Q"].double(), t["K"].double()
    p = (q @ k.transpose(1, 2) * s["dim"]**-0.5).softmax(2)
    out = []
    for name, values in (("O", "V"), ("W", "U")):
        v = t[values].double()
        want, size = p @ v, p @ v.abs()
        out.append((name, want, (4 * 2.0**-11 + s["seq"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-5))
    return out


enter(Plain("attention with two values", "attention", two_values,
            lambda heads, seq, dim: {n: Spec((heads, seq, dim), out=n in "OW") for n in "QKVUOW"}, _two_values_reference, FULL,
            SMALL, lambda **s: 1.5 * flops(**s), best=("program", "attention")))


# ---- latent attention of one token ------------------------------------------------------------------------------------


def latent(batch: int, heads: int, keys: int, dim: int = 512, rope: int = 64, bm: int = 64, bn: int = 64) -> Any:
    """MLA decode as the paper writes it: one latent vector a key is key and value of all heads."""
    by = LOG2E * (dim + rope)**-0.5

    @T.prim_func
    def decode(Q: T.Tensor((batch, heads, dim), "float16"), R: T.Tensor((batch, heads, rope), "float16"),
               C: T.Tensor((batch, keys, dim), "float16"), P: T.Tensor((batch, keys, rope), "float16"),
               O: T.Tensor((batch, heads, dim), "float16")):
        with T.Kernel(heads // bm, batch, threads=256) as (bx, b):
            q, r = T.alloc_shared((bm, dim), "float16"), T.alloc_shared((bm, rope), "float16")
            c, kr = T.alloc_shared((bn, dim), "float16"), T.alloc_shared((bn, rope), "float16")
            ss = T.alloc_shared((bm, bn), "float16")
            s, o = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in range(5)]
            T.copy(Q[b, bx * bm:(bx + 1) * bm, :], q)
            T.copy(R[b, bx * bm:(bx + 1) * bm, :], r)
            T.clear(o)
            T.clear(total)
            T.fill(top, -1e4)
            for step in T.Pipelined(T.ceildiv(keys, bn), num_stages=2):
                T.copy(C[b, step * bn:(step + 1) * bn, :], c)
                T.copy(P[b, step * bn:(step + 1) * bn, :], kr)
                T.clear(s)
                T.gemm(q, c, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(r, kr, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(bm):
                    rescale[i] = T.exp2(before[i] * by - top[i] * by)
                for i, j in T.Parallel(bm, bn):
                    s[i, j] = T.exp2(s[i, j] * by - top[i] * by)
                T.reduce_sum(s, row, dim=1)
                T.copy(s, ss)
                for i in T.Parallel(bm):
                    total[i] = total[i] * rescale[i] + row[i]
                for i, j in T.Parallel(bm, dim):
                    o[i, j] *= rescale[i]
                T.gemm(ss, c, o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(bm, dim):
                o[i, j] /= total[i]
            T.copy(o, O[b, bx * bm:(bx + 1) * bm, :])

    return decode


def _latent_reference(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
    import torch

    q, c = torch.cat([t["Q"], t["R"]], 2).double(), torch.cat([t["C"], t["P"]], 2).double()
    p = (q @ c.transpose(1, 2) * q.shape[2]**-0.5).softmax(2)
    v = t["C"].double()
    want, size = p @ v, p @ v.abs()
    return [("O", want, (4 * 2.0**-11 + s["keys"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-5)]


def _library_mla(torch: Any, t: Tensors) -> Any:
    from tilelang.library import mla_decode, mla_plan

    if "_query" not in t:
        lengths = torch.full((t["C"].shape[0],), t["C"].shape[1], dtype=torch.int32, device=t["C"].device)
        t.update(_query=torch.cat([t["Q"], t["R"]], 2), _cache=torch.cat([t["C"], t["P"]], 2), _lengths=lengths,
                 _plan=mla_plan(lengths, t["Q"].shape[1]))
    return mla_decode(t["_query"], t["_cache"], t["_lengths"], plan=t["_plan"])


for _batch in (64, 128):
    enter(Plain(f"latent attention of {_batch} sequences", "attention", latent,
                lambda batch, heads, keys: {"Q": Spec((batch, heads, 512)), "R": Spec((batch, heads, 64)),
                                            "C": Spec((batch, keys, 512)), "P": Spec((batch, keys, 64)),
                                            "O": Spec((batch, heads, 512), out=True)},
                _latent_reference, dict(batch=_batch, heads=128, keys=4096), dict(batch=1, heads=64, keys=128),
                lambda batch, heads, keys: 2.0 * batch * heads * keys * (576 + 512), best=("torch", _library_mla)))


# ---- backward ---------------------------------------------------------------------------------------------------------


def backward(causal: bool, bm: int = 64, bn: int = 128) -> Any:
    """dQ, dK, dV of a block of keys over all blocks of queries; dQ is added by atomics."""
    def program(heads: int, seq: int, dim: int) -> Any:
        shape, scale = (heads, seq, dim), dim**-0.5

        @T.prim_func
        def gradients(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
                      G: T.Tensor(shape, "float16"), L: T.Tensor((heads, seq), "float32"), D: T.Tensor((heads, seq), "float32"),
                      dQ: T.Tensor(shape, "float32"), dK: T.Tensor(shape, "float16"), dV: T.Tensor(shape, "float16")):
            with T.Kernel(T.ceildiv(seq, bn), heads, threads=256) as (bx, h):
                k, v = T.alloc_shared((bn, dim), "float16"), T.alloc_shared((bn, dim), "float16")
                q, g = T.alloc_shared((bm, dim), "float16"), T.alloc_shared((bm, dim), "float16")
                lse, delta = T.alloc_shared((bm,), "float32"), T.alloc_shared((bm,), "float32")
                ss = T.alloc_shared((bn, bm), "float16")
                s, ds = T.alloc_fragment((bn, bm), "float32"), T.alloc_fragment((bn, bm), "float32")
                p, e = T.alloc_fragment((bn, bm), "float16"), T.alloc_fragment((bn, bm), "float16")
                dk, dv = T.alloc_fragment((bn, dim), "float32"), T.alloc_fragment((bn, dim), "float32")
                dq = T.alloc_fragment((bm, dim), "float32")
                T.copy(K[h, bx * bn:(bx + 1) * bn, :], k)
                T.copy(V[h, bx * bn:(bx + 1) * bn, :], v)
                T.clear(dk)
                T.clear(dv)
                first = bx * bn // bm if causal else 0
                for step in T.Pipelined(T.ceildiv(seq, bm) - first, num_stages=2):
                    i0 = (first + step) * bm
                    T.copy(Q[h, i0:i0 + bm, :], q)
                    T.copy(L[h, i0:i0 + bm], lse)
                    T.gemm(k, q, s, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(bn, bm):
                        s[i, j] = T.exp2(s[i, j] * (scale * LOG2E) - lse[j])
                    if causal:
                        for i, j in T.Parallel(bn, bm):
                            s[i, j] = T.if_then_else(bx * bn + i <= i0 + j, s[i, j], 0.0)
                    T.copy(G[h, i0:i0 + bm, :], g)
                    T.copy(D[h, i0:i0 + bm], delta)
                    T.gemm(v, g, ds, transpose_B=True, clear_accum=True)
                    T.copy(s, p)
                    T.gemm(p, g, dv)
                    for i, j in T.Parallel(bn, bm):
                        e[i, j] = s[i, j] * (ds[i, j] - delta[j]) * scale
                    T.gemm(e, q, dk)
                    T.copy(e, ss)
                    T.gemm(ss, k, dq, transpose_A=True, clear_accum=True)
                    T.atomic_add(dQ[h, i0:i0 + bm, :], dq)
                T.copy(dk, dK[h, bx * bn:(bx + 1) * bn, :])
                T.copy(dv, dV[h, bx * bn:(bx + 1) * bn, :])

        return gradients

    return program


def _backward_parts(t: Tensors, causal: bool) -> tuple[Any, Any, Any]:
    import torch

    q, k = t["Q"].double(), t["K"].double()
    x = q @ k.transpose(1, 2) * q.shape[2]**-0.5
    if causal:
        x = x.masked_fill(torch.ones(x.shape[1:], dtype=torch.bool, device=x.device).triu(1), -math.inf)
    p = x.softmax(2)
    o = p @ t["V"].double()
    return p, torch.logsumexp(x, 2) * LOG2E, (o * t["G"].double()).sum(2)


def _backward_reference(causal: bool) -> Any:
    def compute(t: Tensors, s: Sizes) -> list[tuple[str, Any, Any]]:
        import torch

        found: dict[str, list[Any]] = {"dQ": [], "dK": [], "dV": []}
        sizes: dict[str, list[Any]] = {"dQ": [], "dK": [], "dV": []}
        for h in range(t["Q"].shape[0]):
            one = {n: t[n][h:h + 1] for n in ("Q", "K", "V", "G")}
            p, lse, delta = _backward_parts(one, causal)
            t["L"][h], t["D"][h] = lse[0].float(), delta[0].float()  # inputs of the kernel that depend on the others
            q, k, v, g = (one[n].double()[0] for n in ("Q", "K", "V", "G"))
            scale, p = s["dim"]**-0.5, p[0]
            dp = g @ v.T
            ds = p * (dp - delta[0][:, None]) * scale
            rough = p * (dp.abs() + delta[0].abs()[:, None]) * scale
            for n, w, z in (("dV", p.T @ g, p.T @ g.abs()), ("dK", ds.T @ q, rough.T @ q.abs()), ("dQ", ds @ k,
                                                                                                  rough @ k.abs())):
                found[n].append(w[None])
                sizes[n].append(z[None])
        out = []
        for n, w in found.items():
            want, size = torch.cat(w), torch.cat(sizes[n])
            out.append((n, want, (8 * 2.0**-11 + s["seq"] * 2.0**-24) * size + 2.0**-10 * want.abs() + 1e-4))
        return out

    return compute


def _sdpa_backward(causal: bool) -> Any:
    """cuDNN's backward of torch, gradients only."""
    def call(torch: Any, t: Tensors) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if "_graph" not in t:
            leaves = [t[n][None].detach().clone().requires_grad_() for n in "QKV"]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                t["_graph"] = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal), leaves
        o, leaves = t["_graph"]
        return torch.autograd.grad(o, leaves, t["G"][None], retain_graph=True)

    return call


def _backward_tensors(heads: int, seq: int, dim: int) -> dict[str, Spec]:
    shape = (heads, seq, dim)
    rows = Spec((heads, seq), "float32", "zeros", True)
    return {**{n: Spec(shape) for n in "QKVG"}, "L": rows, "D": rows, "dQ": Spec(shape, "float32", "zeros", True),
            "dK": Spec(shape, out=True), "dV": Spec(shape, out=True)}


for _name, _causal, _full in (("attention backward", False, dict(heads=64, seq=4096, dim=128)),
                              ("attention backward causal", True, dict(heads=64, seq=4096, dim=128)),
                              ("attention backward d 64", False, dict(heads=64, seq=4096, dim=64))):
    enter(Plain(_name, "backward", backward(_causal), _backward_tensors, _backward_reference(_causal), _full,
                dict(heads=1, seq=256,
                     dim=64), lambda heads, seq, dim, by=2 if _causal else 1: 10.0 * heads * seq * seq * dim / by,
                best=("torch", _sdpa_backward(_causal))))
