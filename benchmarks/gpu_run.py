"""One command for a machine with an NVIDIA GPU: the GPU tests, then the benchmark, as a short table and JSON.

    python benchmarks/gpu_run.py [--out gpu_run.json] [--skip-tests] [--sanitize] [--only gemm,add] [--rounds 7]

Every result is compared with a computation in higher precision before it is timed.  Ours and its peer take turns
within one process; a figure is the median over the rounds, with the spread (max - min) / median beside it.  Where a
workload has several tile configurations, each is timed once and the fastest is measured; the report names it.
--sanitize runs small programs under compute-sanitizer's memcheck and racecheck, where it is installed.
Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import tilelang
import tilelang.language as T

# ---- programs --------------------------------------------------------------------------------------------------------

def gemm_program(M: int, N: int, K: int, bm: int = 128, bn: int = 128, bk: int = 32, threads: int = 128,
                 stages: int = 3, dtype: str = "float16") -> Any:
    @T.prim_func
    def gemm(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((bm, bk), dtype)
            B_shared = T.alloc_shared((bk, bn), dtype)
            C_local = T.alloc_fragment((bm, bn), "float32")
            T.use_swizzle(panel_size=10)
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                T.copy(A[by * bm, k * bk], A_shared)
                T.copy(B[k * bk, bx * bn], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * bm, bx * bn])

    return gemm


def add_program(n: int, block: int = 1024, threads: int = 128) -> Any:
    @T.prim_func
    def add(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
            for i in T.Parallel(block):
                C[bx * block + i] = A[bx * block + i] + B[bx * block + i]

    return add


def attention_program(batch: int, heads: int, length: int, dim: int, causal: bool, bm: int = 128, bn: int = 64,
                      threads: int = 128, stages: int = 2) -> Any:
    scale = dim**-0.5 * 1.44269504  # exp2 is cheaper than exp: log2(e) goes into the scale
    shape = (batch, length, heads, dim)

    @T.prim_func
    def attention(Q: T.Tensor(shape, "float16"), K: T.Tensor(shape, "float16"), V: T.Tensor(shape, "float16"),
                  O: T.Tensor(shape, "float16")):
        with T.Kernel(T.ceildiv(length, bm), heads, batch, threads=threads) as (bx, by, bz):
            Q_shared = T.alloc_shared([bm, dim], "float16")
            K_shared = T.alloc_shared([bn, dim], "float16")
            V_shared = T.alloc_shared([bn, dim], "float16")
            S = T.alloc_fragment([bm, bn], "float32")
            P = T.alloc_fragment([bm, bn], "float16")
            acc = T.alloc_fragment([bm, dim], "float32")
            top = T.alloc_fragment([bm], "float32")
            old_top = T.alloc_fragment([bm], "float32")
            factor = T.alloc_fragment([bm], "float32")
            row_sum = T.alloc_fragment([bm], "float32")
            total = T.alloc_fragment([bm], "float32")
            T.copy(Q[bz, bx * bm:(bx + 1) * bm, by, :], Q_shared)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            blocks = T.ceildiv((bx + 1) * bm, bn) if causal else T.ceildiv(length, bn)
            for k in T.Pipelined(blocks, num_stages=stages):
                T.copy(K[bz, k * bn:(k + 1) * bn, by, :], K_shared)
                if causal:
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = T.if_then_else(bx * bm + i >= k * bn + j, 0, -T.infinity("float32"))
                else:
                    T.clear(S)
                T.gemm(Q_shared, K_shared, S, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(V[bz, k * bn:(k + 1) * bn, by, :], V_shared)
                T.copy(top, old_top)
                T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(bm):
                    factor[i] = T.exp2(old_top[i] * scale - top[i] * scale)
                for i, j in T.Parallel(bm, dim):
                    acc[i, j] *= factor[i]
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.exp2(S[i, j] * scale - top[i] * scale)
                T.reduce_sum(S, row_sum, dim=1)
                for i in T.Parallel(bm):
                    total[i] = total[i] * factor[i] + row_sum[i]
                T.copy(S, P)
                T.gemm(P, V_shared, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(bm, dim):
                acc[i, j] /= total[i]
            T.copy(acc, O[bz, bx * bm:(bx + 1) * bm, by, :])

    return attention


# ---- measuring -------------------------------------------------------------------------------------------------------

@dataclass
class Row:
    """One comparison.  ours, peer: median milliseconds.  ratio: speed of ours over the peer's, median of rounds."""

    workload: str
    peer_name: str
    ours_ms: float
    ours_spread: float
    peer_ms: float
    peer_spread: float
    ratio: float
    figure: str
    max_error: float
    error_bound_used: float
    config: dict[str, int]


def window(fn: Callable[[], Any], at_least_ms: float = 20.0) -> float:
    """Milliseconds a call over one window of calls, by CUDA events, after a pause that lets the clock recover."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    time.sleep(0.2)
    for _ in range(2):
        fn()
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    calls = max(3, int(at_least_ms / max(1e-3, start.elapsed_time(end))))
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def compare(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Times of both, taking turns; the order alternates so that neither always comes after the other's heat."""
    a: list[float] = []
    b: list[float] = []
    for r in range(rounds):
        for mine in ((True, False) if r % 2 == 0 else (False, True)):
            (a if mine else b).append(window(ours if mine else peer))
    return a, b


def spread(x: list[float]) -> float:
    return (max(x) - min(x)) / statistics.median(x)


def check(name: str, got: Any, want: Any, bound: Any) -> tuple[float, float]:
    """Raise unless |got - want| <= bound everywhere (a NaN fails).  (largest error, largest share of its bound)."""
    error = (got.float() - want).abs()
    bad = ~(error <= bound)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise SystemExit(f"{name}: {int(bad.sum())} of {bad.numel()} elements are wrong; first at {where}: "
                         f"{got[where].item()} instead of {want[where].item()}")
    return float(error.max()), float((error / bound).max())


def fastest(make: Callable[..., Any], configs: list[dict[str, int]], args: list[Any],
            **compile_options: Any) -> tuple[Any, dict[str, int]]:
    """The kernel of the fastest configuration, and that configuration.  One that fails to compile is reported."""
    timed = []
    for config in configs:
        try:
            kernel = tilelang.compile(make(**config), **compile_options)
            timed.append((window(lambda kernel=kernel: kernel(*args)), len(timed), kernel, config))
            print(f"  {config}: {timed[-1][0]:.4f} ms")
        except Exception as e:
            print(f"  {config}: {type(e).__name__}: {str(e).splitlines()[0]}")
    if not timed:
        raise RuntimeError("no configuration compiled and ran")
    _, _, kernel, config = min(timed)
    return kernel, config


def row(workload: str, peer_name: str, ours: list[float], peer: list[float], ratio_scale: float, figure: str,
        errors: tuple[float, float], config: dict[str, int]) -> Row:
    ratio = statistics.median(p / o for o, p in zip(ours, peer)) * ratio_scale
    return Row(workload, peer_name, statistics.median(ours), spread(ours), statistics.median(peer), spread(peer), ratio,
               figure, *errors, config)


def bench_gemm(rounds: int, size: int = 8192) -> Row:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    c, d = torch.empty_like(a), torch.empty_like(a)
    kernel, config = fastest(lambda **o: gemm_program(size, size, size, **o), GEMM_CONFIGS, [a, b, c])
    c.zero_()
    kernel(a, b, c)
    want = a.float() @ b.float()
    # one rounding to half (2**-11 relative, 2**-25 near zero), and K roundings of the float32 sum
    bound = want.abs() * 2**-11 + 2**-25 + (a.float().abs() @ b.float().abs()) * (size * 2**-24)
    errors = check("gemm", c, want, bound)
    del want, bound
    ours, peer = compare(lambda: kernel(a, b, c), lambda: torch.matmul(a, b, out=d), rounds)
    tflops = 2 * size**3 / statistics.median(ours) * 1e-9
    return row(f"gemm fp16 {size}^3", "torch.matmul (cuBLAS)", ours, peer, 1.0, f"{tflops:.0f} TFLOP/s", errors,
               config)


def bench_add(rounds: int, nbytes: int = 2**30) -> Row:
    import torch

    n = nbytes // 4
    kernel = tilelang.compile(add_program(n))
    a, b = (torch.randn(n, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    kernel(a, b, c)
    errors = check("add", c, a + b, (a + b).abs() * 2**-24 + 1e-45)
    ours, peer = compare(lambda: kernel(a, b, c), lambda: c.copy_(a), rounds)
    rate = 3 * nbytes / statistics.median(ours) * 1e-6
    return row("add fp32 1 GiB", "device copy, per byte", ours, peer, 1.5, f"{rate:.0f} GB/s", errors, {})


def bench_attention(rounds: int, causal: bool, batch: int = 4, heads: int = 16, length: int = 4096,
                    dim: int = 128) -> Row:
    import torch
    import torch.nn.functional as F

    q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.float16) for _ in range(3))
    o = torch.empty_like(q)
    kernel, config = fastest(lambda **c: attention_program(batch, heads, length, dim, causal, **c), ATTENTION_CONFIGS,
                             [q, k, v, o], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
    o.zero_()
    kernel(q, k, v, o)
    name = "attention causal" if causal else "attention"
    worst = (0.0, 0.0)
    for z in range(batch):  # one batch entry at a time: the scores are large in float32
        qf, kf, vf = (x[z].float().transpose(0, 1) for x in (q, k, v))
        s = qf @ kf.transpose(1, 2) * dim**-0.5
        if causal:
            s.masked_fill_(torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
        p = s.softmax(-1)
        want, size = p @ vf, p @ vf.abs()
        # P is rounded to half before the second product, O at the end; exp2 and the running rescale add a few ulp
        bound = size * 2**-10 + want.abs() * 2**-11 + 2**-24
        got = check(name, o[z].transpose(0, 1), want, bound)
        worst = max(worst[0], got[0]), max(worst[1], got[1])
        del s, p, want, size, bound
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ours, peer = compare(lambda: kernel(q, k, v, o),
                         lambda: F.scaled_dot_product_attention(*heads_first, is_causal=causal), rounds)
    tflops = 4 * batch * heads * length**2 * dim * (0.5 if causal else 1) / statistics.median(ours) * 1e-9
    return row(f"{name} b{batch} h{heads} s{length} d{dim}", "torch sdpa", ours, peer, 1.0, f"{tflops:.0f} TFLOP/s",
               worst, config)


GEMM_CONFIGS = [dict(zip(("bm", "bn", "bk", "threads", "stages"), c)) for c in (
    (128, 128, 32, 128, 3), (128, 128, 32, 128, 4), (128, 128, 64, 128, 3), (128, 256, 32, 256, 3),
    (256, 128, 32, 256, 3), (128, 256, 64, 256, 3), (256, 128, 64, 256, 3))]
ATTENTION_CONFIGS = [dict(zip(("bm", "bn", "threads", "stages"), c)) for c in (
    (128, 64, 128, 2), (128, 32, 128, 2), (64, 64, 128, 2), (128, 64, 256, 2), (128, 128, 256, 1))]


BENCHMARKS: dict[str, Callable[[int], Row]] = {
    "gemm": bench_gemm, "add": bench_add, "attention": lambda r: bench_attention(r, False),
    "attention_causal": lambda r: bench_attention(r, True)}


# ---- report ----------------------------------------------------------------------------------------------------------

def run_tests() -> dict[str, Any]:
    """`pytest -m gpu` in the repository, in a process of its own."""
    root = Path(__file__).resolve().parent.parent
    start = time.perf_counter()
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    done = subprocess.run([sys.executable, "-m", "pytest", f"-n{workers}", "-m", "gpu", "-q", "--no-header", "--durations=8",
                           "tests"], cwd=root, capture_output=True, text=True, check=False)
    tail = done.stdout.strip().splitlines()[-60:]
    print("\n".join(tail))
    return {"exit_status": done.returncode, "summary": tail[-1] if tail else done.stderr.strip()[-300:],
            "seconds": round(time.perf_counter() - start, 1)}


def small_programs() -> None:
    """What --sanitize runs under compute-sanitizer: ragged and dividing GEMMs and attention, a few blocks each."""
    import torch

    for m, n, k in ((256, 256, 128), (200, 136, 104)):
        a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
        c = torch.empty(m, n, device="cuda", dtype=torch.float16)
        tilelang.compile(gemm_program(m, n, k))(a, b, c)
    for causal in (False, True):
        q, k_, v = (torch.randn(1, 200, 2, 64, device="cuda").half() for _ in range(3))
        tilelang.compile(attention_program(1, 2, 200, 64, causal, 64, 64))(q, k_, v, torch.empty_like(q))
    torch.cuda.synchronize()


def sanitize() -> dict[str, Any]:
    """Exit status and last line of compute-sanitizer's memcheck and racecheck over small_programs."""
    tool = shutil.which("compute-sanitizer") or next(
        (str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if tool is None:
        return {"skipped": "compute-sanitizer is not installed"}
    out: dict[str, Any] = {}
    for check_name in ("memcheck", "racecheck"):
        done = subprocess.run([tool, "--tool", check_name, "--error-exitcode", "9", sys.executable, __file__,
                               "--small-programs"], capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        out[check_name] = {"exit_status": done.returncode, "last_line": lines[-1] if lines else done.stderr[-300:]}
        print(f"compute-sanitizer {check_name}: {out[check_name]}")
    return out


def machine() -> dict[str, Any]:
    import torch

    from tilelang.runtime import cuda_driver, nvrtc
    from tilelang.target import Target

    props = cuda_driver.driver().properties()
    arch = Target("cuda").arch
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "gpu": props.name,
            "arch": arch, "sm_count": props.sm_count, "driver_cuda": "{}.{}".format(*cuda_driver.driver().version()),
            "compiler": nvrtc.toolchain_version(arch), "python": platform.python_version(), "torch": torch.__version__,
            "torch_cuda": torch.version.cuda, "tilelang": tilelang.__version__}


def print_table(rows: list[Row]) -> None:
    print(f"\n{'workload':38s} {'ours':>11s} {'spread':>7s} {'peer':>11s} {'spread':>7s} {'ratio':>6s}  figure")
    for r in rows:
        print(f"{r.workload:38s} {r.ours_ms:8.4f} ms {r.ours_spread:6.1%} {r.peer_ms:8.4f} ms {r.peer_spread:6.1%} "
              f"{r.ratio:6.3f}  {r.figure}; peer {r.peer_name}; error {r.error_bound_used:.0%} of its bound"
              + (f"; {r.config}" if r.config else ""))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="gpu_run.json")
    p.add_argument("--skip-tests", action="store_true")
    p.add_argument("--only", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--sanitize", action="store_true")
    p.add_argument("--small-programs", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.small_programs:
        small_programs()
        return 0
    report: dict[str, Any] = {"machine": machine()}
    print(json.dumps(report["machine"], indent=1))
    if not args.skip_tests:
        report["tests"] = run_tests()
    if args.sanitize:
        report["sanitizer"] = sanitize()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in filter(None, args.only.split(",")):
        try:
            rows.append(BENCHMARKS[name](args.rounds))
        except (Exception, SystemExit) as e:  # one broken workload must not cost the others their run
            failures[name] = f"{type(e).__name__}: {e}"
            print(f"{name} failed: {failures[name]}", file=sys.stderr)
    print_table(rows)
    report["benchmarks"], report["failures"] = [asdict(r) for r in rows], failures
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.out}")
    return 1 if failures or report.get("tests", {}).get("exit_status") else 0


if __name__ == "__main__":
    sys.exit(main())
