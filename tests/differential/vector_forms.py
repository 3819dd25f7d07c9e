"""Programs whose accesses become vectors, in every combination of shape, place, element type and threads that matters to the
width of a vector; each is compared with NumPy, element by element.

    python tests/differential/vector_forms.py --forms 5000 --record benchmarks/results/DATE-vector-forms.json
    python tests/differential/vector_forms.py --on gpu --forms 400        # needs a CUDA device
    python tests/differential/vector_forms.py --show 17 [--seed 1]        # one form, on all executions here

A form says how a tile is filled (`fill`), how it leaves (`leave`), its size, the tensor it lies in and the threads.  All of
it is drawn independently of the others from the seed and the form's number.  Values are small integers, which every type
involved holds exactly.  Tensors are compared as a whole: what is written outside the tile counts as wrong too.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests" / "differential"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import numpy as np  # noqa: E402
from backends import AGREES, FAILED, NARROW, REFUSED, _execute, compare, judged, numpy_type  # noqa: E402

import tilelang.language as T  # noqa: E402

HERE = ("sm_90a", "sm_80", "cpu")
SMALL = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
TYPES = (*SMALL * 3, "float16", "bfloat16", "int16", "uint16", "float32", "int32", "float64", "int64", "int4", "uint4")
OPERANDS = ("float16", "bfloat16", "int8", "float8_e4m3fn", "float32")
ATOMIC = ("float32", "float16", "bfloat16", "int32")
# What may be refused, and why: a schedule or an instruction cannot be chosen for the tile.
MAY_BE_REFUSED = ("gemm-warps", "gemm-shape", "gemm-tile", "small-type", "shared-memory", "layout-conflict")


@dataclass(frozen=True)
class Form:
    """One program.

    fill: gemm (accumulators) | parallel (T.Parallel) | fragment, shared, staged (copied from global memory: to registers, to
    shared memory, to the stages of a pipeline).
    leave: copy | cast (through a fragment of the tensor's type) | shared (through a shared tile) | elements (T.Parallel) |
    atomic (T.atomic_add) | transposed | rows (the sums of the rows) | columns (of the columns).
    rows, columns: of the tile.  depth: K of the GEMM.  blocks: tiles side by side.  row, column: where the first tile starts.
    more_rows, more_columns: of the tensor behind the last tile; negative: the tensor cuts it.
    first: rows that are copied; 0: all.  counted: their number is known at run time only.
    source: columns in front of the tile and behind it in the tensor that is read.  rank: dimensions of the tensor.
    """

    fill: str
    leave: str
    rows: int
    columns: int
    threads: int
    operand: str
    inside: str
    dtype: str
    depth: int = 32
    stages: int = 1
    policy: str = "Square"
    blocks: int = 1
    row: int = 0
    column: int = 0
    more_rows: int = 0
    more_columns: int = 0
    first: int = 0
    counted: bool = False
    source: tuple[int, int] = (0, 0)
    rank: int = 2

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of what one block writes."""
        rows, columns = self.first or self.rows, self.columns
        return {"transposed": (columns, rows), "rows": (1, rows), "columns": (1, columns)}.get(self.leave, (rows, columns))

    @property
    def tensor(self) -> tuple[int, ...]:
        """Shape of the tensor that is written."""
        rows, columns = self.tile
        shape = self.row + rows + self.more_rows, self.column + columns * self.blocks + self.more_columns
        return shape if self.rank == 2 else (3, *shape)


def draw(seed: int, number: int) -> Form:
    """The form of a number; the same for the same seed."""
    r = random.Random(f"{seed}/{number}")
    fill = r.choice(("gemm",) * 4 + ("parallel", "parallel", "fragment", "shared", "staged"))
    leave = r.choice(("copy",) * 6 + ("cast", "shared", "elements", "atomic", "transposed", "rows", "columns"))
    threads = r.choice((32, 64, 96, 128, 128, 128, 256, 256, 256, 384, 512)) if fill != "gemm" else \
        r.choice((32, 64, 128, 128, 128, 256, 256, 256, 384, 512))
    operand = r.choice(OPERANDS)
    wide = "int32" if operand == "int8" else "float32"
    if fill == "gemm":
        warps = threads // 32
        rows = 16 * warps if r.random() < 0.4 else r.choice((16, 32, 48, 64, 64, 64, 80, 96, 128, 128, 192))
        columns = 8 * r.randint(1, 20) if r.random() < 0.85 else r.choice((16, 32, 64, 128, 136, 192, 256))
        while rows * columns > 64 * threads:
            rows, columns = (rows // 2, columns) if rows > 16 and r.random() < 0.5 else (rows, max(8, columns // 2 // 8 * 8))
        dtype, inside = r.choice(TYPES), wide
    else:
        rows = r.choice((1, 2, 3, 4, 7, 8, 12, 16, 17, 32, 33, 64, 96))
        columns = r.choice((r.randint(1, 160), 2 * r.randint(1, 80), 4 * r.randint(1, 40), 8 * r.randint(1, 24), 64, 128))
        dtype = r.choice(TYPES)
        same = r.random() < 0.6
        inside = dtype if same else r.choice(("int32", "float32", "float16", *SMALL))
        operand = inside if r.random() < 0.7 else r.choice((*SMALL, "float16", "int32", "float32", "int4"))
    if leave == "atomic":
        dtype = r.choice(ATOMIC)
    if leave in ("rows", "columns"):
        dtype = inside = "int32" if operand == "int8" and fill == "gemm" else "float32"
    if leave == "transposed":
        dtype = inside = dtype if fill != "gemm" else wide
    step = r.choice((1, 2, 4, 8, 16, 16))
    form = Form(fill, leave, rows, columns, threads, operand, inside, dtype,
                depth=r.choice((16, 32, 32, 64)), stages=r.choice((0, 1, 2, 3)),
                policy=r.choice(("Square", "FullRow", "FullCol")),
                blocks=r.choice((1, 1, 1, 2, 3)), row=r.choice((0, 0, 1, 3, 16)),
                column=r.choice((0, 0, step * r.randint(0, 5))),
                more_rows=r.choice((0, 0, 1, 5, 16)),
                more_columns=r.choice((0, 0, step * r.randint(0, 6))),
                source=r.choice(((0, 0), (step * r.randint(0, 4), 0), (0, step * r.randint(0, 4)),
                                 (step * r.randint(0, 4), step * r.randint(0, 4)))),
                rank=r.choice((2, 2, 2, 3)))
    if r.random() < 0.2 and leave in ("copy", "cast", "shared") and rows > 1:
        form = replace(form, first=r.randint(1, rows), counted=r.random() < 0.5)
    if r.random() < 0.15:
        form = replace(form, more_columns=-step * r.randint(0, 3), more_rows=-r.choice((0, 1, 7)))
    return _valid(form)


def _valid(f: Form) -> Form:
    """The form with what no program may have taken out of it."""
    if f.fill == "gemm" and f.operand in ("int8", "float8_e4m3fn"):
        f = replace(f, depth=max(32, f.depth))
    narrow = f.dtype in NARROW or f.operand in NARROW or f.inside in NARROW
    if narrow:  # whole bytes only
        even = {n: getattr(f, n) // 2 * 2 for n in ("column", "more_columns")}
        f = replace(f, **even, columns=-(-f.columns // 2) * 2, source=(f.source[0] // 2 * 2, f.source[1] // 2 * 2))
        if f.leave in ("elements", "transposed", "rows", "columns", "atomic") or f.inside in NARROW or f.first:
            wider = {"dtype": "int8" if f.dtype in NARROW else f.dtype, "inside": "int8" if f.inside in NARROW else f.inside}
            f = replace(f, leave="copy", first=0, counted=False, **wider)
    if f.fill != "gemm" and f.leave in ("rows", "columns") and f.rows * f.columns > 4096:
        f = replace(f, rows=8)
    if f.fill == "gemm" and f.leave == "shared" and f.rows * f.columns > 8192:
        f = replace(f, leave="copy")
    least_rows, least_columns = 1 - f.tile[0], 1 - min(f.tile[1], 24)
    even = 2 if narrow else 1
    return replace(f, more_rows=max(f.more_rows, least_rows),
                   more_columns=max(f.more_columns, -(-least_columns // even) * even))


# ---- the program ---------------------------------------------------------------------------------------------------------


def program(form: Form) -> Any:
    """The PrimFunc of a form; its tensors: what is read, the number of rows where counted, what is written."""
    m, n, k, policy = form.rows, form.columns, form.depth, getattr(T.GemmWarpPolicy, form.policy)
    before, behind = form.source
    many, (y0, x0), (_, step) = form.first or m, (form.row, form.column), form.tile
    lead = (1,) if form.rank == 3 else ()
    from_c0, leave, dtype, inside = form.blocks * n, form.leave, form.dtype, form.inside

    @T.macro
    def store(C, D, bx, count):
        x = bx * step + x0
        if leave == "copy":
            T.copy(C[0:count, :], D[(*lead, slice(y0, y0 + count), slice(x, x + n))])
        elif leave == "cast":
            E = T.alloc_fragment((m, n), dtype)
            T.copy(C, E)
            T.copy(E[0:count, :], D[(*lead, slice(y0, y0 + count), slice(x, x + n))])
        elif leave == "shared":
            S = T.alloc_shared((m, n), dtype)
            T.copy(C, S)
            T.copy(S[0:count, :], D[(*lead, slice(y0, y0 + count), slice(x, x + n))])
        elif leave == "elements":
            for i, j in T.Parallel(m, n):
                D[(*lead, y0 + i, x + j)] = T.cast(C[i, j], dtype)
        elif leave == "atomic":
            T.atomic_add(D[(*lead, slice(y0, y0 + m), slice(x, x + n))], C)
        elif leave == "transposed":
            E = T.alloc_fragment((n, m), dtype)
            T.transpose(C, E)
            T.copy(E, D[(*lead, slice(y0, y0 + n), slice(x, x + m))])
        elif leave == "rows":
            V = T.alloc_fragment((m,), dtype)
            T.reduce_sum(C, V, dim=1)
            T.copy(V, D[(*lead, y0, slice(x, x + m))])
        else:
            V = T.alloc_fragment((n,), dtype)
            T.reduce_sum(C, V, dim=0)
            T.copy(V, D[(*lead, y0, slice(x, x + n))])

    if form.fill == "gemm":
        steps = 2 if form.stages > 1 else 1

        @T.macro
        def gemm_tile(A, B, D, bx, count):
            SA = T.alloc_shared((m, k), form.operand)
            SB = T.alloc_shared((n, k), form.operand)
            C = T.alloc_fragment((m, n), inside)
            T.clear(C)
            for ko in T.Pipelined(steps, num_stages=form.stages):
                T.copy(A[0:m, before + ko * k:before + (ko + 1) * k], SA)
                T.copy(B[bx * n:(bx + 1) * n, before + ko * k:before + (ko + 1) * k], SB)
                T.gemm(SA, SB, C, transpose_B=True, policy=policy)
            store(C, D, bx, count)

        width = before + steps * k + behind
        if form.counted:
            @T.prim_func
            def counted_gemm(A: T.Tensor((m, width), form.operand), B: T.Tensor((n * form.blocks, width), form.operand),
                             P: T.Tensor((1,), "int32"), D: T.Tensor(form.tensor, dtype)):
                with T.Kernel(form.blocks, threads=form.threads) as bx:
                    gemm_tile(A, B, D, bx, P[0])

            return counted_gemm

        @T.prim_func
        def gemm(A: T.Tensor((m, width), form.operand), B: T.Tensor((n * form.blocks, width), form.operand),
                 D: T.Tensor(form.tensor, dtype)):
            with T.Kernel(form.blocks, threads=form.threads) as bx:
                gemm_tile(A, B, D, bx, many)

        return gemm

    width = before + from_c0 + behind
    rounds = 2 if form.fill == "staged" else 1

    @T.macro
    def tile(A, D, bx, count):
        C = T.alloc_fragment((m, n), inside)
        x = before + bx * n
        if form.fill == "parallel":
            for i, j in T.Parallel(m, n):
                C[i, j] = T.cast(A[i, x + j], inside)
        elif form.fill == "fragment":
            T.copy(A[0:m, x:x + n], C)
        elif form.fill == "shared":
            S = T.alloc_shared((m, n), form.operand)
            T.copy(A[0:m, x:x + n], S)
            T.copy(S, C)
        else:
            S = T.alloc_shared((m, n), form.operand)
            for ko in T.Pipelined(rounds, num_stages=form.stages):
                T.copy(A[ko * m:(ko + 1) * m, x:x + n], S)
                for i, j in T.Parallel(m, n):
                    C[i, j] = T.cast(S[i, j], inside)
        store(C, D, bx, count)

    if form.counted:
        @T.prim_func
        def counted_tile(A: T.Tensor((m * rounds, width), form.operand), P: T.Tensor((1,), "int32"),
                         D: T.Tensor(form.tensor, dtype)):
            with T.Kernel(form.blocks, threads=form.threads) as bx:
                tile(A, D, bx, P[0])

        return counted_tile

    @T.prim_func
    def plain_tile(A: T.Tensor((m * rounds, width), form.operand), D: T.Tensor(form.tensor, dtype)):
        with T.Kernel(form.blocks, threads=form.threads) as bx:
            tile(A, D, bx, many)

    return plain_tile


# ---- its meaning in NumPy ------------------------------------------------------------------------------------------------


def expected(form: Form, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(arguments of a call, what they hold after it), as integers of int64; types of four bits not yet packed."""
    r = np.random.default_rng([seed, *map(ord, f"{form.fill}{form.leave}"), form.rows, form.columns])
    unsigned = any(t.startswith("u") for t in (form.dtype, form.inside, form.operand))
    low, high = (0, 1) if unsigned else (-1, 1)
    m, n, (before, behind), many = form.rows, form.columns, form.source, form.first or form.rows
    args: list[np.ndarray]
    if form.fill == "gemm":
        steps = 2 if form.stages > 1 else 1
        width = before + steps * form.depth + behind
        a, b = (r.integers(low, high + 1, (rows, width)) for rows in (m, n * form.blocks))
        a[:, r.integers(0, width, width // 2)] = 0  # sums stay small enough for float8
        used = slice(before, before + steps * form.depth)
        full, args = a[:, used] @ b[:, used].T, [a, b]
    else:
        most = 7 if not form.dtype.startswith("u") else 8
        a = r.integers(low * 7, most, (m * (2 if form.fill == "staged" else 1), before + n * form.blocks + behind))
        full, args = a[-m:, before:before + n * form.blocks], [a]
    d = r.integers(0, 5, form.tensor)
    out = d.copy()
    plane = out if form.rank == 2 else out[1]
    if form.counted:
        args.append(np.array([many]))
    rows, columns = form.tile
    for bx in range(form.blocks):
        tile = full[:many, bx * n:(bx + 1) * n]
        if form.leave in ("transposed", "rows", "columns"):
            tile = tile.T if form.leave == "transposed" else tile.sum(axis=1 if form.leave == "rows" else 0)[None]
        y, x = form.row, form.column + bx * columns
        at = plane[y:y + rows, x:x + columns]
        tile = tile[:at.shape[0], :at.shape[1]]
        at[...] = at + tile if form.leave == "atomic" else tile
    return [*args, d], [*args, out]


def _arrays(form: Form, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    types = [form.operand] * (2 if form.fill == "gemm" else 1) + ["int32"] * form.counted + [form.dtype]
    return [_as(v, t) for v, t in zip(values, types)]


def _as(v: np.ndarray, name: str) -> np.ndarray:
    if name in NARROW:
        low = v.astype(np.uint8) & 15
        return (low[..., 0::2] | low[..., 1::2] << 4).view(np.int8)
    return v.astype(np.float64 if "float" in name else np.int64).astype(numpy_type(name))


# ---- running -------------------------------------------------------------------------------------------------------------


def outcomes(form: Form, executions: Sequence[str] = HERE, seed: int = 0) -> dict[str, tuple[str, str]]:
    """(status, text) of each execution; "trace": the program itself is rejected."""
    before, after = (_arrays(form, v) for v in expected(form, seed))
    try:
        prim = program(form)
    except Exception as e:
        return {"trace": _said(e, False)}
    tensors = [(b.name, b.shape, str(b.dtype)) for b in prim.buffer_map.values()]
    out = {}
    for name in executions:
        running = [False]
        try:
            got = compare(tensors, _execute(name, prim.func, prim, before, tensors, {}, running), after)
            out[name] = (got.status, got.text)
        except Exception as e:
            out[name] = _said(e, running[0])
    return out


def _said(e: BaseException, running: bool) -> tuple[str, str]:
    o = judged(e, running)
    return (FAILED if o.status == REFUSED and o.kind not in MAY_BE_REFUSED else o.status), f"{o.kind}: {o.text}"


def _one(job: tuple[int, int, tuple[str, ...]]) -> tuple[int, dict[str, tuple[str, str]]]:
    seed, number, executions = job
    return number, outcomes(draw(seed, number), executions, number)


def _compiled(job: tuple[int, int]) -> int:
    """Compile a form for the device into the disk cache.  What fails here fails again, and is reported, at the launch."""
    import tilelang

    try:
        tilelang.compile(program(draw(*job)), target="cuda")
    except Exception:
        pass
    return job[1]


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def run_here(seed: int, numbers: Iterable[int], executions: tuple[str, ...], workers: int) -> Iterable[Any]:
    """(number, outcomes) of each form, as they end."""
    jobs = [(seed, k, executions) for k in numbers]
    if workers == 1:
        yield from map(_one, jobs)
        return
    with _pool(workers) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_one, j) for j in jobs]):
            yield done.result()


def run_on_gpu(seed: int, numbers: Iterable[int], workers: int) -> Iterable[Any]:
    """Compile all forms in parallel, then launch one after another in a process that a fault of the device may end."""
    numbers = list(numbers)
    with _pool(workers) as pool:
        list(pool.map(_compiled, [(seed, k) for k in numbers], chunksize=4))
    launcher = _pool(1)
    for k in numbers:
        try:
            number, found = launcher.submit(_one, (seed, k, ("cuda",))).result()
        except concurrent.futures.process.BrokenProcessPool:
            number, found = k, {"cuda": (FAILED, "the process ended")}
        yield number, found
        if any(s == FAILED and "differ" not in text for s, text in found.values()):
            launcher.shutdown()  # after a fault on the device every later call of the process fails too
            launcher = _pool(1)
    launcher.shutdown()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--forms", type=int, default=300)
    p.add_argument("--first", type=int, default=0, help="number of the first form")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("-n", "--workers", type=int, default=os.cpu_count() or 1, help="processes")
    p.add_argument("--on", default="here", help="here (simulators of sm_90a and sm_80, CPU), gpu, or names separated by commas")
    p.add_argument("--record", type=pathlib.Path, help="write the counts to this file")
    p.add_argument("--log", type=pathlib.Path, help="add a line for each form that is wrong or refused to this file")
    p.add_argument("--show", type=int, help="run only the form of this number, and print it")
    a = p.parse_args()
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    executions = HERE if a.on == "here" else tuple(a.on.split(","))
    if a.show is not None:
        form = draw(a.seed, a.show)
        print(form, outcomes(form, ("cuda",) if a.on == "gpu" else executions, a.show), sep="\n")
        return 0
    began, counts, kinds = time.time(), collections.Counter[str](), collections.Counter[str]()
    numbers = range(a.first, a.first + a.forms)
    wrong: list[dict[str, Any]] = []
    for number, found in run_on_gpu(a.seed, numbers, a.workers) if a.on == "gpu" else run_here(a.seed, numbers, executions,
                                                                                              a.workers):
        form = draw(a.seed, number)
        for name, (status, text) in found.items():
            counts[f"{name} {status}"] += 1
            kinds[f"{form.fill} {form.leave}"] += 1
            if status != AGREES:
                row = {"number": number, "execution": name, "status": status, "text": text, "form": asdict(form)}
                if a.log:
                    with a.log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if status == FAILED:
                    wrong.append(row)
                    print(f"{number} {name}: {text}\n    {form}", flush=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    out = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": head,
           "command": " ".join(["python", *sys.argv]), "forms": a.forms, "seed": a.seed,
           "runs": dict(sorted(counts.items())), "wrong": len(wrong),
           "of_each_kind": dict(sorted(kinds.items())), "seconds": round(time.time() - began, 1)}
    if a.on == "gpu":
        import torch

        out["gpu"] = torch.cuda.get_device_name()
    if a.record:
        a.record.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps({k: v for k, v in out.items() if k != "of_each_kind"}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
