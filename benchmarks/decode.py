"""Measures a decode step of Llama-like blocks in one launch, beside separate kernels in a CUDA graph and torch.compile.

    python benchmarks/decode.py [--batches 1,8] [--layers 1,32] [--out FILE] [--seconds 60] [--no-compile]

Results are compared with float64 first.  Times are medians of CUDA graphs, in microseconds; weights alternate between two
sets, so that none stay in L2.  Floor: bytes of weights and caches over the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch

import tilelang
import tilelang.language as T
from tilelang.library import decode_step as step, flash_decode, interleave, llama_decode, matmul
from tilelang.library.place import Place
from tilelang.target import Target

HIDDEN, HEADS, KV_HEADS, DIM, FFN, CONTEXT, EPS = 4096, 32, 8, 128, 14336, 4096, 1e-5
QKV = (HEADS + 2 * KV_HEADS) * DIM
PARTS = {"qkv": QKV * HIDDEN, "o": HIDDEN * HEADS * DIM, "gate, up": 2 * FFN * HIDDEN, "down": HIDDEN * FFN}


PHASES = ("start", "QKV", "attention", "o", "gate, up", "down", "QKV seen", "attention seen", "merge", "merge seen",
          "o seen", "gate, up seen", "own o", "o of ranks", "own down", "down of ranks", "queries", "attention too")


def make(layers: int, batch: int, seed: int = 0):
    """The arguments of llama_decode, of random numbers."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale, generator=g)

    angle = torch.rand(batch, DIM // 2, device="cuda", generator=g) * 6
    cache = layers, batch, CONTEXT, KV_HEADS, DIM
    return [normal(batch, HIDDEN), normal(layers, 2, HIDDEN, scale=0.1).add_(1),
            normal(layers, QKV, HIDDEN, scale=HIDDEN ** -0.5),
            normal(layers, HIDDEN, HEADS * DIM, scale=HIDDEN ** -0.5), normal(layers, 2 * FFN, HIDDEN, scale=HIDDEN ** -0.5),
            normal(layers, HIDDEN, FFN, scale=FFN ** -0.5), normal(*cache), normal(*cache),
            torch.full((batch,), CONTEXT - 1, dtype=torch.int32, device="cuda"), angle.cos(), angle.sin()]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def block(x, norms, qkv, o, gate_up, down, keys, values, cos, sin):
    """A layer by torch, in the type of x; the caches are full but for the last token, which is written."""
    def normed(h, w):
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * w

    batch = x.shape[0]
    q, k, v = (normed(x, norms[0]) @ qkv.T).view(batch, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    keys[:, -1] = rotated(k, cos, sin)
    values[:, -1] = v
    a = torch.nn.functional.scaled_dot_product_attention(
        rotated(q, cos, sin)[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True)
    x = x + a.reshape(batch, -1) @ o.T
    gate, up = (normed(x, norms[1]) @ gate_up.T).view(batch, FFN // 16, 2, 16).unbind(2)
    return x + (torch.nn.functional.silu(gate) * up).reshape(batch, FFN) @ down.T


def exact(args) -> torch.Tensor:
    x, norms, qkv, o, gate_up, down, keys, values, _, cos, sin = (a.double() for a in args)
    for n in range(norms.shape[0]):
        x = block(x, norms[n], qkv[n], o[n], gate_up[n], down[n], keys[n], values[n], cos, sin)
    return x


def share(args, ranks: int, rank: int):
    """The arguments of one of several ranks.  gate and up are in turns of 16 rows, which blocks of llama_decode regroup."""
    x, norms, qkv, o, gate_up, down, keys, values, *rest = args

    def part(a, dim):
        return a.chunk(ranks, dim)[rank]

    heads = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
    gate, up = (a.reshape(1, FFN, HIDDEN) for a in gate_up.view(1, FFN // 16, 2, 16, HIDDEN).unbind(2))
    return [x, norms, torch.cat([part(a, 1) for a in heads], 1), part(o, 2).contiguous(),
            interleave(part(gate, 1), part(up, 1), form(x.shape[0], 1, ranks).blocks), part(down, 2).contiguous(),
            part(keys, 3).contiguous(), part(values, 3).contiguous(), *rest]


def rows_normed(batch: int):
    @T.prim_func
    def norm(X: T.Tensor((batch, HIDDEN), "bfloat16"), W: T.Tensor((HIDDEN,), "bfloat16"),
             Y: T.Tensor((batch, HIDDEN), "bfloat16")):
        with T.Kernel(batch, threads=512) as b:
            x, s, t = (T.alloc_fragment((n,), "float32") for n in (HIDDEN, HIDDEN, 1))
            T.copy(X[b, :], x)
            for i in T.Parallel(HIDDEN):
                s[i] = x[i] * x[i]
            T.reduce_sum(s, t, dim=0)
            for i in T.Parallel(HIDDEN):
                Y[b, i] = x[i] * T.rsqrt(t[0] / HIDDEN + EPS) * T.cast(W[i], "float32")

    return norm


def rotations(batch: int):
    half = DIM // 2

    @T.prim_func
    def rotate(P: T.Tensor((batch, QKV), "bfloat16"), cos: T.Tensor((batch, half), "float32"),
               sin: T.Tensor((batch, half), "float32"), Q: T.Tensor((batch, HEADS, DIM), "bfloat16"),
               K: T.Tensor((batch, CONTEXT, KV_HEADS, DIM), "bfloat16"),
               V: T.Tensor((batch, CONTEXT, KV_HEADS, DIM), "bfloat16")):
        with T.Kernel(HEADS + 2 * KV_HEADS, batch, threads=128) as (h, b):
            for d in T.Parallel(DIM):
                x = T.cast(P[b, h * DIM + d], "float32")
                y = T.cast(P[b, h * DIM + (d + half) % DIM], "float32")
                z = x * cos[b, d % half] + T.if_then_else(d < half, -y, y) * sin[b, d % half]
                if h < HEADS:
                    Q[b, h, d] = z
                elif h < HEADS + KV_HEADS:
                    K[b, CONTEXT - 1, h - HEADS, d] = z
                else:
                    V[b, CONTEXT - 1, h - HEADS - KV_HEADS, d] = x

    return rotate


def gates(batch: int):
    @T.prim_func
    def gate(X: T.Tensor((batch, FFN // 16, 2, 16), "bfloat16"),
             Y: T.Tensor((batch, FFN // 16, 16), "bfloat16")):
        with T.Kernel(FFN // 256, batch, threads=128) as (n, b):
            for i, j in T.Parallel(16, 16):
                g = T.cast(X[b, n * 16 + i, 0, j], "float32")
                Y[b, n * 16 + i, j] = g / (1.0 + T.exp2(-g * 1.4426950408889634)) * T.cast(X[b, n * 16 + i, 1, j], "float32")

    return gate


def sums(batch: int):
    @T.prim_func
    def add(X: T.Tensor((batch * HIDDEN,), "bfloat16"), Y: T.Tensor((batch * HIDDEN,), "bfloat16")):
        with T.Kernel(batch * HIDDEN // 1024, threads=128) as b:
            for i in T.Parallel(1024):
                X[b * 1024 + i] += Y[b * 1024 + i]

    return add


def separate(batch: int):
    """A function that computes a layer by kernels of the library and four small ones."""
    norm, rotate, gate, add = (tilelang.compile(p(batch), target="cuda") for p in (rows_normed, rotations, gates, sums))
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x, y, q = torch.empty(batch, HIDDEN, **half), torch.empty(batch, HIDDEN, **half), torch.empty(batch, HEADS, DIM, **half)
    p, g, z = torch.empty(batch, QKV, **half), torch.empty(batch, 2 * FFN, **half), torch.empty(batch, FFN, **half)
    a = torch.empty(batch, HEADS, DIM, **half)

    def run(given, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin):
        x.copy_(given)
        norm(x, norms[0, 0], y)
        matmul(y, qkv[0], transpose_b=True, out=p)
        rotate(p, cos, sin, q, keys[0], values[0])
        flash_decode(q, keys[0], values[0], lengths + 0, out=a)
        matmul(a.view(batch, -1), o[0], transpose_b=True, out=y)
        add(x.view(-1), y.view(-1))
        norm(x, norms[0, 1], y)
        matmul(y, gate_up[0], transpose_b=True, out=g)
        gate(g.view(batch, FFN // 16, 2, 16), z.view(batch, FFN // 16, 16))
        matmul(z, down[0], transpose_b=True, out=y)
        add(x.view(-1), y.view(-1))
        return x

    return run


def timed(fns, inner: int = 10, repeats: int = 15) -> list[float]:
    """Median microseconds of a call of each function (a list of calls that take turns), measured in turns."""
    graphs = []
    for calls in fns:
        for _ in range(2):
            for call in calls:
                call()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for k in range(inner):
                calls[k % len(calls)]()
        graphs.append(g)
    times = [[] for _ in fns]
    for _ in range(repeats):
        for g, kept in zip(graphs, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay()
            start.record()
            g.replay()
            end.record()
            end.synchronize()
            kept.append(start.elapsed_time(end) * 1e3 / inner)
    return [statistics.median(t) for t in times]


def copy_bandwidth() -> float:
    """Bytes read and written by a microsecond of a large copy, by the faster of torch's copy and a kernel."""
    x = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    us = timed([[lambda: y.copy_(x)], [lambda: torch.neg(x, out=y)]], inner=2, repeats=5)
    return 2 * x.numel() * x.element_size() / min(us)


@T.macro
def _drain(f, ring, tiles):
    Ring, full, free = ring
    for n in T.serial(tiles):
        T.mbarrier_wait_parity(full[n % f.slots], n // f.slots % 2)
        T.mbarrier_arrive(free[n % f.slots])


def streams(f):
    """What a step reads, and nothing else: the floor of its way to read."""
    D, n_c = f.hidden, f.steps
    wq, wo, wg = f.widths(f.qkv), f.widths(D), f.widths(2 * f.ffn)
    sq, so, sd = D // f.chunk, f.heads * f.dim // f.chunk, f.ffn // f.chunk
    n_q, n_o, n_g, n_d = len(wq) * sq, len(wo) * so, len(wg) * sq, len(wo) * sd

    @T.prim_func
    def stream(Wqkv: T.Tensor((1, f.qkv, D), "bfloat16"), Wo: T.Tensor((1, D, f.heads * f.dim), "bfloat16"),
               Wgu: T.Tensor((1, 2 * f.ffn, D), "bfloat16"), Wd: T.Tensor((1, D, f.ffn), "bfloat16"),
               Kc: T.Tensor((1, f.batch, f.context, f.kv_heads, f.dim), "bfloat16"),
               Vc: T.Tensor((1, f.batch, f.context, f.kv_heads, f.dim), "bfloat16")):
        with T.Kernel(f.blocks, threads=256) as b:
            Ring = T.alloc_shared((f.slots, 32, f.chunk), "bfloat16")
            ring = Ring, T.alloc_barrier([128] * f.slots), T.alloc_barrier([128] * f.slots)
            place = b // (f.kv_heads * f.splits), b // f.splits % f.kv_heads, b % f.splits
            with T.ws(0):
                step._stream(f, Wqkv, 0, (wq, b * sum(wq)), sq, ring, 0)
                step._stream_context(f, Kc, Vc, 0, place, ring, n_q)
                step._stream(f, Wo, 0, (wo, b * sum(wo)), so, ring, n_q + n_c)
                step._stream(f, Wgu, 0, (wg, b * sum(wg)), sq, ring, n_q + n_c + n_o)
                step._stream(f, Wd, 0, (wo, b * sum(wo)), sd, ring, n_q + n_c + n_o + n_g)
            with T.ws(1):
                _drain(f, ring, n_q + n_c + n_o + n_g + n_d)

    return stream


def form(batch: int, layers: int = 1, ranks: int = 1):
    return step.with_blocks(132, batch=batch, hidden=HIDDEN, heads=HEADS // ranks, kv_heads=KV_HEADS // ranks, dim=DIM,
                            ffn=FFN // ranks, context=CONTEXT, layers=layers, ranks=ranks)


def compiled(f):
    return Place(Target("sm_90a"), None, 132).kernel(step.decode_program, f)


def variant(f, text: str):
    """The form with other values: "ahead=0,slots=8"."""
    return dataclasses.replace(f, **{k: int(v) if v.lstrip("-").isdigit() else v for k, v in (
        x.split("=") for x in text.split(",") if x)})


def warm(batches: list[int], layers: int, variants: list[str]) -> None:
    """Compile what is measured, into the cache."""
    forms = [f for batch in batches for f in (
        form(batch), dataclasses.replace(form(batch), timed=True), form(batch, ranks=2),
        *([form(batch, layers)] if layers else []),
        *(variant(form(batch), v) for v in variants),
        *(dataclasses.replace(variant(form(batch), v), timed=True) for v in variants[:1]))]
    with ProcessPoolExecutor(15) as pool:
        list(pool.map(_warm, dict.fromkeys(forms)))
        list(pool.map(_warm_stream, map(form, batches)))


def _warm(f) -> None:
    compiled(f)


def _warm_stream(f) -> None:
    tilelang.compile(streams(f), target="sm_90a")


def outputs(batch: int, sets):
    return [torch.empty_like(sets[0][0])] + [torch.empty(1, batch, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")] * 2


def memory(f):
    return [torch.zeros(shape, dtype=getattr(torch, kind), device="cuda") for shape, kind in (*f.between, *f.kept)]


def compare(batch: int, sets, want, variants: list[str]) -> list[dict]:
    """Times of variants of the form, in turns, and where the time of each goes."""
    calls, rows, out = [], [], outputs(batch, sets)
    for text in variants:
        f = variant(form(batch), text)
        kernel, kept = compiled(f), memory(f)
        kernel(*sets[0], *out, *kept)
        error = float((out[0].double() - want).abs().max() / want.abs().max())
        assert error < 2 ** -6, (text, error)
        calls.append([lambda s=s, kernel=kernel, kept=kept: kernel(*s, *out, *kept) for s in sets])
        rows.append({"batch": batch, "variant": text, "error": error})
    for row, us in zip(rows, timed(calls)):
        row["one launch us"] = us
        print(row, flush=True)
    for text in variants[:1]:
        print(text)
        explain(batch, sets, variant(form(batch), text))
    return rows


def explain(batch: int, sets, f) -> None:
    """Where the time goes: the microseconds at which phases end."""
    out, g = outputs(batch, sets), dataclasses.replace(f, timed=True)
    kernel, kept = compiled(g), memory(g)
    seen = []
    for k in range(9):
        kernel(*sets[k % 2], *out, *kept)
        torch.cuda.synchronize()
        t = kept[-3].view(torch.int64).double()
        seen.append((t - t[:, 0].min()).cpu())
    t = torch.stack(seen[1:]).median(0).values / 1e3
    for name, ends in (("first", t.min(0).values), ("last", t.max(0).values)):
        print(name, dict(zip(PHASES, ends.tolist())), flush=True)


def measure(batch: int, bandwidth: float, until: float, with_compile: bool, variants: list[str]) -> dict:
    sets = [make(1, batch, seed) for seed in range(2)]
    y, _, _ = llama_decode(*sets[0])
    want = exact(sets[0])
    error = float((y.double() - want).abs().max() / want.abs().max())
    assert error < 2 ** -6, error
    nbytes = sum(a.numel() * a.element_size() for a in sets[0][2:8])
    row = {"batch": batch, "layers": 1, "error": error, "MB": nbytes / 1e6, "floor us": nbytes / bandwidth,
           "bar us": 1.12 * nbytes / bandwidth}
    row["one launch us"], = timed([[lambda s=s: llama_decode(*s) for s in sets]])
    row["over the floor"] = row["one launch us"] / row["floor us"]
    stream = tilelang.compile(streams(form(batch)), target="sm_90a")
    row["reads alone us"], = timed([[lambda s=s: stream(*s[2:8]) for s in sets]])
    print(row, flush=True)
    explain(batch, sets, form(batch))
    if variants:
        row["variants"] = compare(batch, sets, want, variants)
    if time.time() < until:
        run = separate(batch)
        lengths = [torch.full_like(s[8], CONTEXT) for s in sets]
        got = run(*sets[0][:8], lengths[0], *sets[0][9:])
        assert float((got.double() - want).abs().max() / want.abs().max()) < 2 ** -5
        fns = [[lambda s=s: llama_decode(*s) for s in sets],
               [lambda s=s, n=n: run(*s[:8], n, *s[9:]) for s, n in zip(sets, lengths)]]
        row["one launch us"], row["separate us"] = timed(fns)
        print(row, flush=True)
    if with_compile and time.time() < until:
        compiled = torch.compile(block, dynamic=False)
        fns.append([lambda s=s: compiled(s[0], *(a[0] for a in s[1:8]), *s[9:]) for s in sets])
        row["one launch us"], row["separate us"], row["torch.compile us"] = timed(fns)
        print(row, flush=True)
    return row


def deep(batch: int, layers: int, bandwidth: float) -> dict:
    args = make(layers, batch)
    y, _, _ = llama_decode(*args)
    want = args[0].float()
    for n in range(layers):
        want = block(want, *(a[n].float() for a in args[1:8]), *args[9:])
    error = float((y.float() - want).abs().max() / want.abs().max())
    assert error < 2 ** -4, error
    nbytes = sum(a.numel() * a.element_size() for a in args[2:8])
    us, = timed([[lambda: llama_decode(*args)]], inner=2, repeats=7)
    row = {"batch": batch, "layers": layers, "error": error, "MB": nbytes / 1e6, "floor us": nbytes / bandwidth,
           "one launch us": us, "over the floor": us / (nbytes / bandwidth)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--out", default="")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--variants", nargs="*", default=[], help="forms to compare, each as FIELD=VALUE,FIELD=VALUE")
    parser.add_argument("--warm", action="store_true", help="only compile, on any machine")
    args = parser.parse_args()
    if args.warm:
        return warm([int(n) for n in args.batches.split(",")], args.layers, args.variants)
    until, bandwidth = time.time() + args.seconds, copy_bandwidth()
    rows = [{"copy TB/s": bandwidth / 1e6}]
    print(rows[0], flush=True)
    for batch in map(int, args.batches.split(",")):
        rows.append(measure(batch, bandwidth, until, not args.no_compile, args.variants))
        if args.layers and time.time() < until:
            rows.append(deep(batch, args.layers, bandwidth))
        if args.out:
            with open(args.out, "w", encoding="utf-8") as f:
                json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
