"""How compile time grows with the program, and what cold compiles take: CPU seconds by pass, the device compiler's apart.

    python benchmarks/compile_growth.py                                # all programs and targets, n = 4, 16, 64 (some minutes)
    python benchmarks/compile_growth.py --only gemms --targets sm_90a --top 8
    python benchmarks/compile_growth.py --cold --targets sm_90a        # README GEMM, attention, MLA, attention backward
    python benchmarks/compile_growth.py --profile gemms:64:sm_90a      # the functions that take the time of one compile

Times are CPU seconds of one thread, the least of --repeat runs: other users of the machine hardly change them.  NVRTC and LLVM
run after the passes here, one at a time.  A compile overlaps them with the verifier.  "order" is the exponent p of n^p between
the two largest n, after the seconds at the smallest n are taken off as what any program costs.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
TARGETS = ("sm_90a", "sm_80", "cpu")


class Clock:
    """CPU seconds of this thread by name, in the order of first use.  `passes` are those of the compiler's own passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.passes: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start


def compile_by_parts(make: Callable[[], Any], target: str, device: bool = True) -> Clock:
    """The parts of one compilation, one after another: trace, lower (by pass), print, host, nvrtc or llvm.

    make: traces the program.  device: run NVRTC, or LLVM for the kernel on the CPU.
    """
    from tilelang.jit.artifact import Request
    from tilelang.jit.building import _config, device_options, host_text
    from tilelang.jit.collecting import rarely_collected
    from tilelang.runtime.signature import signature_of
    from tilelang.target import Target
    from tilelang.transform.framework.observe import PassEvent, PassEventObserver, observing

    clock = Clock()

    class Passes(PassEventObserver):
        start = 0.0

        def on_pass_start(self, name: str, func: Any) -> None:
            self.start = time.thread_time()

        def on_pass(self, event: PassEvent) -> None:
            clock.passes[event.name] = clock.passes.get(event.name, 0.0) + time.thread_time() - self.start

    with rarely_collected():
        with clock.span("trace"):
            func = make().func
        to = Target("llvm" if target == "cpu" else {"kind": "cuda", "arch": target})
        request = Request(func, None, to, "tvm_ffi")
        sig = signature_of(func, None)
        with observing(Passes()):
            if target == "cpu":
                _cpu_parts(clock, request, device)
                return clock
            from tilelang.codegen.cuda.printer import print_kernel
            from tilelang.runtime.launchers import GpuLauncher
            from tilelang.runtime.nvrtc import compile_cubin
            from tilelang.transform.pipeline import lower

            with clock.span("lower"):
                program = lower(func, to, _config(request))
        with clock.span("print"):
            sources = [print_kernel(k, fast_math=False) for k in program.kernels]
        with clock.span("host"):
            host_text(request, sig, GpuLauncher(program.host, program.kernels, to.max_shared_bytes))
        if device:
            with clock.span("nvrtc"):
                for s in sources:
                    compile_cubin(s, to.arch, device_options(request))
    return clock


def _cpu_parts(clock: Clock, request: Any, device: bool) -> None:
    from tilelang.codegen.cpu import compile_tile
    from tilelang.runtime.cpu_engine import compile_cpu_object
    from tilelang.transform.pipeline import lower_cpu

    with clock.span("lower"):
        func = lower_cpu(request.func, request.target, {})
    with clock.span("print"):
        program = compile_tile(func)
    if device:
        with clock.span("llvm"):
            compile_cpu_object(program.llvm_ir)


def least(make: Callable[[], Any], target: str, repeat: int, device: bool) -> dict[str, Any]:
    """The least seconds of each part over `repeat` compilations, and the sum of the parts that are this package's."""
    clocks = [compile_by_parts(make, target, device) for _ in range(repeat)]
    parts = {k: min(c.seconds[k] for c in clocks) for k in clocks[0].seconds}
    passes = {k: min(c.passes[k] for c in clocks) for k in clocks[0].passes}
    own = min(sum(v for k, v in c.seconds.items() if k not in ("nvrtc", "llvm")) for c in clocks)
    return {"own": round(own, 4), "parts": {k: round(v, 4) for k, v in parts.items()},
            "passes": {k: round(v, 4) for k, v in sorted(passes.items(), key=lambda x: -x[1]) if v >= 1e-3}}


def order(seconds: dict[int, float]) -> float | None:
    """The exponent of growth between the two largest n, without the seconds of the smallest."""
    *_, (n, b), (m, c) = sorted(seconds.items())
    base = min(seconds.values())
    first, last = b - base, c - base
    return round(math.log(last / first) / math.log(m / n), 2) if len(seconds) > 2 and first > 0 and last > 0 else None


def growth(names: list[str], targets: list[str], sizes: list[int], repeat: int, device: bool, top: int) -> list[dict[str, Any]]:
    from suite.growing import GROWING

    rows = []
    for target in targets:
        for name in names:
            least(partial(GROWING[name], min(sizes)), target, 1, device)  # loads modules
            by = {n: least(partial(GROWING[name], n), target, repeat if n < max(sizes) else max(1, repeat - 1), device)
                  for n in sizes}
            row = {"program": name, "target": target, "order": order({n: r["own"] for n, r in by.items()}),
                   "by_n": {str(n): r for n, r in by.items()}}
            rows.append(row)
            text = "  ".join(f"{n}: {r['own']:.3f}" + "".join(
                f" + {k} {r['parts'][k]:.2f}" for k in ("nvrtc", "llvm") if k in r["parts"]) for n, r in by.items())
            print(f"{target} {name}  {text}  order {row['order']}", flush=True)
            last = by[max(sizes)]
            for k, v in list({**last["passes"], **{k: v for k, v in last["parts"].items() if k in (
                    "trace", "print", "host")}}.items())[:top] if top else ():
                grown = order({n: r["passes"].get(k, r["parts"].get(k, 0.0)) for n, r in by.items()})
                print(f"    {k:28} {v:.3f} order {grown}")
    return rows


def library_attention() -> Any:
    """The library's forward attention at 4096, in the tile it chooses for long sequences on an H200."""
    from tilelang.library.attention.form import AttentionForm, Tile
    from tilelang.library.attention.kernels import dense_attention
    from tilelang.library.attention.problem import Mask, Sizes

    sizes, steps = Sizes(1, 4096, 4096, 16, 16, 128, 128), ((4096 * 2048, 2048, 128, 1),) * 4
    return dense_attention(AttentionForm(sizes, steps, "bshd", "float16", Mask(), Tile(128, 128, 2, 256), False))


def cold_programs() -> dict[str, Callable[[], Any]]:
    """The kernels whose cold compiles have a budget, by name."""
    sys.path[:0] = [str(HERE.parent / "examples"), str(HERE.parent / "examples/attention")]
    from flash_backward import flash_backward
    from flash_forward import flash_forward
    from mla_decode import mla_decode
    from suite.growing import readme_gemm

    return {"gemm": readme_gemm, "attention": library_attention, "mla": lambda: mla_decode(16, 128, 4096),
            "plain attention": lambda: flash_forward(1, 16, 16, 4096, 4096, 128),
            "backward": lambda: flash_backward(1, 16, 4, 2048, 128)}


def cold_one(name: str, target: str) -> dict[str, Any]:
    """The first compilation of this process, by parts."""
    return least(cold_programs()[name], target, 1, True)


def whole_one(name: str, target: str) -> dict[str, float]:
    """The first compilation of this process as a user makes it, without a disk cache: wall and CPU seconds."""
    import tilelang

    make = cold_programs()[name]
    wall, cpu = time.perf_counter(), time.process_time()
    tilelang.compile(make(), target="cpu" if target == "cpu" else {"kind": "cuda", "arch": target})
    return {"wall": round(time.perf_counter() - wall, 4), "cpu": round(time.process_time() - cpu, 4)}


def cold(names: list[str], targets: list[str], repeat: int, top: int) -> list[dict[str, Any]]:
    """Each compile in a process of its own, the bytecode of all modules written before."""
    from suite.cold import write_bytecode

    write_bytecode()
    rows = []
    for target in targets:
        for name in names:
            parts, whole = ([_in_process(how, name, target) for _ in range(repeat)] for how in ("--one", "--whole"))
            row = {"kernel": name, "target": target, **min(parts, key=lambda r: r["own"]),
                   **{k: min(w[k] for w in whole) for k in ("wall", "cpu")}}
            rows.append(row)
            print(f"{target} {name}  own {row['own']:.3f}  {row['parts']}  wall {row['wall']} cpu {row['cpu']}", flush=True)
            for k, v in list(row["passes"].items())[:top]:
                print(f"    {k:28} {v:.3f}")
    return rows


def _in_process(how: str, name: str, target: str) -> dict[str, Any]:
    from suite.compiling import private_caches

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, __file__, how, f"{name}:{target}"], capture_output=True, text=True, check=True,
                              env={**os.environ, **private_caches(Path(folder))})
    return json.loads(done.stdout.splitlines()[-1])


def profile(text: str, top: int) -> None:
    """The functions of one compile (PROGRAM:N:TARGET, or KERNEL:TARGET), by their own seconds and by those below them."""
    from suite.growing import GROWING

    name, *size, target = text.split(":")
    make = partial(GROWING[name], int(size[0])) if size else cold_programs()[name]
    compile_by_parts(make, target, False)
    p = cProfile.Profile()
    p.runcall(compile_by_parts, make, target, False)
    for key in ("tottime", "cumulative"):
        pstats.Stats(p).sort_stats(key).print_stats(top or 40)


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--only", default="", help="programs (names or parts of names), separated by commas")
    p.add_argument("--targets", default=",".join(TARGETS))
    p.add_argument("--sizes", default="4,16,64")
    p.add_argument("--repeat", type=int, default=2)
    p.add_argument("--top", type=int, default=4, help="passes to print for each program")
    p.add_argument("--no-device", action="store_true", help="without NVRTC and LLVM")
    p.add_argument("--cold", action="store_true", help="the cold compiles instead of the growing programs")
    p.add_argument("--json", type=Path, help="merge the results into this file, under --label")
    p.add_argument("--label", default="now")
    for one in ("--profile", "--one", "--whole"):
        p.add_argument(one, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.profile:
        profile(a.profile, a.top if a.top != 4 else 0)
        return 0
    if a.one or a.whole:
        name, target = (a.one or a.whole).split(":")
        print(json.dumps((cold_one if a.one else whole_one)(name, target)))
        return 0
    from suite.growing import GROWING

    words = [w for w in a.only.split(",") if w]
    names = [n for n in (cold_programs() if a.cold else GROWING) if not words or any(w in n for w in words)]
    targets = a.targets.split(",")
    rows = cold(names, targets, a.repeat, a.top) if a.cold else growth(
        names, targets, sorted(map(int, a.sizes.split(","))), a.repeat, not a.no_device, a.top)
    if a.json:
        data = json.loads(a.json.read_text()) if a.json.exists() else {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
        data.setdefault("cold" if a.cold else "growth", {}).setdefault(a.label, []).extend(rows)
        a.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
