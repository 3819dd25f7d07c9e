"""Instructions per element of elementwise functions on sm_90a, by class, from the machine code.  Needs no GPU.

    python benchmarks/sass_per_element.py [--only tanh,softcap] [--out FILE.json] [--before FILE.json]

Each function is applied to a 128x128 float32 fragment by 256 threads (64 elements per thread) between a load and a store.  A
kernel that only loads and stores is subtracted.  mufu: MUFU.  fma: FADD, FMUL, FFMA and their packed forms.  branch: BRA, BSSY,
BSYNC, CALL, RET, WARPSYNC.  alu: everything else (selections, comparisons, integers, conversions).  What is called out of line
(slow paths of division and square root) is counted once per kernel, so the figures are those of the usual path.
cycles: the least per element and SM, from issue slots (128 lanes per cycle), FMA (128), ALU (64) and MUFU (16).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime.nvrtc import compile_cubin
from tilelang.runtime.sass import disassemble
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SIZE, THREADS = 128, 256
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", re.M)
FMA = {"FADD", "FMUL", "FFMA", "FFMA32I", "HADD2", "HMUL2", "HFMA2", "FADD32I", "FMUL32I"}
BRANCH = {"BRA", "BSSY", "BSYNC", "CALL", "RET", "WARPSYNC"}
SKIPPED = {"NOP", "EXIT"}

Function = Callable[[Any, Any], Any]
FUNCTIONS: dict[str, Function] = {
    "exp": lambda x, y: T.exp(x), "exp2": lambda x, y: T.exp2(x), "exp10": lambda x, y: T.exp10(x),
    "log": lambda x, y: T.log(x), "log2": lambda x, y: T.log2(x), "log1p": lambda x, y: T.log1p(x),
    "tanh": lambda x, y: T.tanh(x), "sigmoid": lambda x, y: T.sigmoid(x), "erf": lambda x, y: T.erf(x),
    "1/(1+exp(-x))": lambda x, y: 1.0 / (1.0 + T.exp(-x)),
    "1/(1+exp2(-x*log2e))": lambda x, y: 1.0 / (1.0 + T.exp2(-x * 1.4426950408889634)),
    "softcap 30": lambda x, y: 30.0 * T.tanh(x / 30.0),
    "softcap 30 (x*(1/30))": lambda x, y: 30.0 * T.tanh(x * (1 / 30.0)),
    "x/y": lambda x, y: x / y, "x/3": lambda x, y: x / 3.0, "x/4": lambda x, y: x / 4.0, "1/x": lambda x, y: 1.0 / x,
    "rsqrt": lambda x, y: T.rsqrt(x), "sqrt": lambda x, y: T.sqrt(x), "1/sqrt": lambda x, y: 1.0 / T.sqrt(x),
    "silu": lambda x, y: x * T.sigmoid(x), "silu x/(1+exp(-x))": lambda x, y: x / (1.0 + T.exp(-x)),
    "gelu (erf)": lambda x, y: 0.5 * x * (1.0 + T.erf(x * 0.7071067811865476)),
    "gelu (tanh)": lambda x, y: 0.5 * x * (1.0 + T.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
    "softplus": lambda x, y: T.log(1.0 + T.exp(x)), "softplus (log1p)": lambda x, y: T.log1p(T.exp(x)),
    "pow(x, 2)": lambda x, y: T.pow(x, 2.0), "pow(x, y)": lambda x, y: T.pow(x, y), "sin": lambda x, y: T.sin(x),
    "cos": lambda x, y: T.cos(x),
}


def program(fn: Function, second: bool, out: str) -> Any:
    @T.prim_func
    def apply(X: T.Tensor((SIZE, SIZE), "float32"), Y: T.Tensor((SIZE, SIZE), "float32"), Z: T.Tensor((SIZE, SIZE), out)):
        with T.Kernel(1, threads=THREADS):
            x = T.alloc_fragment((SIZE, SIZE), "float32")
            y = T.alloc_fragment((SIZE, SIZE), "float32")
            z = T.alloc_fragment((SIZE, SIZE), out)
            T.copy(X, x)
            if second:
                T.copy(Y, y)
            for i, j in T.Parallel(SIZE, SIZE):
                z[i, j] = T.cast(fn(x[i, j], y[i, j] if second else x[i, j]), out)
            T.copy(z, Z)

    return apply


def cubin_of(f: Any, config: dict[str, Any] | None = None, arch: str = "sm_90a") -> bytes:
    """The machine code of a program of one kernel."""
    config = config or {}
    (kernel,) = lower(f.func if hasattr(f, "func") else f, Target({"kind": "cuda", "arch": arch}), config).kernels
    fast = bool(config.get("tl.enable_fast_math"))
    return compile_cubin(print_kernel(kernel, fast_math=fast), arch, ["--use_fast_math"] if fast else []).bytes


def classes(fn: Function, second: bool = False, out: str = "float32", config: dict[str, Any] | None = None) -> dict[str, int]:
    """Instructions of a kernel by class."""
    found = {"mufu": 0, "fma": 0, "alu": 0, "branch": 0}
    for op in OPCODE.findall(disassemble(cubin_of(program(fn, second, out), config))):
        if op not in SKIPPED:
            found["mufu" if op == "MUFU" else "fma" if op in FMA else "branch" if op in BRANCH else "alu"] += 1
    return found


def per_element(name: str, out: str = "float32", config: dict[str, Any] | None = None) -> dict[str, float]:
    """Instructions per element of a function by class, and the cycles that they take at least."""
    second = name in ("x/y", "pow(x, y)")
    whole = classes(FUNCTIONS[name], second, out, config)
    bare = classes((lambda x, y: T.max(x, y)) if second else (lambda x, y: x), second, out, config)
    n = SIZE * SIZE / THREADS
    row = {k: (whole[k] - bare[k]) / n for k in whole}
    if second:
        row["alu"] += 1.0  # the maximum of the kernel that is subtracted
    row["all"] = sum(row.values())
    row["cycles"] = max(row["all"] / 128, row["mufu"] / 16, row["fma"] / 128, (row["alu"] + row["branch"]) / 64)
    return {k: round(v, 4) for k, v in row.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="functions whose names contain one of these parts")
    options.add_argument("--types", default="float32", help="types of the result: float32,float16,bfloat16")
    options.add_argument("--fast", action="store_true", help="with tl.enable_fast_math")
    options.add_argument("--out", help="write the table as JSON")
    options.add_argument("--before", help="a JSON file to print beside it")
    args = options.parse_args()
    config = {"tl.enable_fast_math": True} if args.fast else {}
    before = json.loads(Path(args.before).read_text())["rows"] if args.before else {}
    rows: dict[str, dict[str, float]] = {}
    print(f"{'function':32} {'mufu':>6} {'fma':>6} {'alu':>6} {'branch':>6} {'all':>6} {'cycles':>7}   before")
    for out in args.types.split(","):
        for name in FUNCTIONS:
            if args.only and not any(w in name for w in args.only.split(",")):
                continue
            full = name if out == "float32" else f"{name} -> {out}"
            row = rows[full] = per_element(name, out, config)
            old = before.get(full)
            was = f"{old['all']:6.2f} {old['cycles']:7.4f}" if old else ""
            print(f"{full:32} " + " ".join(f"{row[k]:6.2f}" for k in ("mufu", "fma", "alu", "branch", "all"))
                  + f" {row['cycles']:7.4f}   {was}", flush=True)
    if args.out:
        record = {"what": "SASS instructions per element, sm_90a, 128x128 float32 fragment, 256 threads",
                  "fast_math": args.fast, "rows": rows}
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
