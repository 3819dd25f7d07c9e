"""Command line: demo, compile, export, show, simulate, bench, doctor, library, puzzles."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import io
import os
import pathlib
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
import linecache

import numpy as np

from tilelang.errors import TileLangError, in_colours
import tilelang

DEMO = '''\
import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def matmul(M, N, K, BM=128, BN=128, BK=32, dtype="float16", stages=3):
    @T.prim_func
    def main(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK), dtype)
            Bs = T.alloc_shared((BK, BN), dtype)
            Cf = T.alloc_fragment((BM, BN), "float32")
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                T.copy(A[by * BM, k * BK], As)
                T.copy(B[k * BK, bx * BN], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * BM, bx * BN])

    return main
'''


def _console() -> Any:
    from rich.console import Console  # 18 ms

    return Console()


def load_source(path: pathlib.Path) -> dict[str, Any]:
    """The global names of a Python file, run as a module.

    Raises FileNotFoundError, and LookupError for a file that is not Python or that raises an error (with its line).
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or path.is_dir():
        raise LookupError(f"{path} is not a Python file (NAME.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` has it
    try:
        spec.loader.exec_module(module)
    except SyntaxError as e:
        line = (e.text or "").rstrip()
        caret = " " * max(0, (e.offset or 1) - 1) + "^"
        raise LookupError(f"{e.filename}:{e.lineno}: {e.msg}\n  {line}\n  {caret}") from None
    except TileLangError:
        raise
    except Exception as e:  # an error of the user's program: report the line there
        own = [f for f in traceback.extract_tb(e.__traceback__) if pathlib.Path(f.filename).resolve() == path.resolve()]
        raise LookupError(f"{path}:{own[-1].lineno if own else 1}: {type(e).__name__}: {e}") from e
    return vars(module)


def find_kernel(where: str) -> tuple[str, Any]:
    """(name, program or jit function) of FILE or FILE:NAME.  Raises LookupError, which lists the programs of the file."""
    file, _, name = where.partition(":")
    names = load_source(pathlib.Path(file))
    programs = {k: v for k, v in names.items() if not k.startswith("_") and _is_program(v)}
    if name:
        if name not in names:
            raise LookupError(f"{file} has no {name}; it has: {', '.join(programs) or 'no kernel'}")
        return name, names[name]
    if len(programs) == 1:
        return next(iter(programs.items()))
    if not programs:
        makers = [k for k, v in names.items() if inspect.isfunction(v) and v.__module__ == names["__name__"]]
        raise LookupError(f"{file} defines no kernel at module level (a @tilelang.jit function or a @T.prim_func); name a "
                          f"function that returns one, {file}:NAME --set ARGUMENT=VALUE, of: {', '.join(makers) or 'none'}")
    raise LookupError(f"{file} has {len(programs)} kernels ({', '.join(programs) or 'none'}): say {file}:NAME")


def find_program(where: str, settings: dict[str, Any]) -> Any:
    """The PrimFunc named by FILE or FILE:NAME; a jit factory is called with the settings (K=V).  Raises LookupError."""
    return program_of(where, find_kernel(where)[1], settings)


def program_of(where: str, found: Any, settings: dict[str, Any]) -> Any:
    """The PrimFunc of a program or a jit function, which is called with the settings."""
    known = getattr(found, "signature", None)
    takes = known.parameters if known is not None else {}
    eager = not hasattr(found, "is_lazy_mode") or not found.is_lazy_mode()  # then the settings may also be values of T.const
    unknown = [k for k in settings if k not in takes]
    if unknown and not eager:
        raise LookupError(f"{where} has no argument {', '.join(unknown)}; it has: {', '.join(takes)}")
    if hasattr(found, "get_tir"):
        try:
            return found.get_tir(**settings)
        except TileLangError as e:
            if e.kind == "jit-arguments":
                raise LookupError(f"{where}: {e.found}; give it: --set NAME=VALUE") from None
            if e.kind == "eager-const":
                e.hint = f"give the values of its T.const: {' '.join(f'--set {n}=…' for n in _consts(found))}"
            raise
    if callable(found) and not hasattr(found, "buffer_map"):
        try:
            inspect.signature(found).bind(**settings)
        except TypeError as e:
            raise LookupError(f"{where}: {e}; give it: --set NAME=VALUE") from None
        return found(**settings)
    return found


def _consts(function: Any) -> list[str]:
    """Names of the T.const dimensions of an eager function."""
    return sorted({n for k in function.eager.traces.values() for n in k.consts})


def _is_program(v: Any) -> bool:
    return hasattr(v, "get_tir") or hasattr(v, "buffer_map")


def _settings(pairs: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for p in pairs:
        key, eq, value = p.partition("=")
        if not eq:
            raise LookupError(f"--set {p}: write --set NAME=VALUE")
        try:
            out[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[key] = value
    return out


def _target(args: argparse.Namespace) -> Any:
    if getattr(args, "arch", None):
        from tilelang.target import of_arch  # 1 ms

        return of_arch(args.arch)
    return args.target


def _demo_factory() -> Any:
    """The jit function of DEMO."""
    linecache.cache["<demo>"] = (len(DEMO), None, DEMO.splitlines(keepends=True), "<demo>")
    names: dict[str, Any] = {"__name__": "demo"}
    exec(compile(DEMO, "<demo>", "exec"), names)
    return names["matmul"]


def demo(args: argparse.Namespace) -> int:
    """Compile a GEMM for this machine, check it against float64 and print its speed."""
    n = args.size
    target, on_gpu = _demo_target(args.target)
    start = time.perf_counter()
    dtype = args.dtype or ("float16" if on_gpu else "float32")
    program = _demo_factory().get_tir(n, n, n, dtype=dtype)
    kernel = tilelang.compile(program, out_idx=[-1], target=target)
    seconds = time.perf_counter() - start
    a, b, run = _demo_inputs(kernel, n, dtype, on_gpu)
    error, bound = _demo_check(run, a, b, dtype)
    times = _time(run, on_gpu)
    best, middle = min(times), statistics.median(times)
    print(f"GEMM {n} x {n} x {n} {dtype} on {kernel.target}: compiled in {seconds * 1e3:.0f} ms")
    print(f"largest error against float64: {error:.3g} (bound {bound:.3g}): {'ok' if error <= bound else 'FAIL'}")
    print(f"speed: {2 * n**3 / middle / 1e9:.1f} GFLOP/s median, {2 * n**3 / best / 1e9:.1f} best of {len(times)} runs")
    if args.source:
        _print_source(_kernel_only(kernel.get_kernel_source(), kernel.signature.name), kernel.target)
    else:
        print("the code of the kernel: python -m tilelang demo --source; a kernel of your own: python -m tilelang show FILE")
    return 0 if error <= bound else 1


def _kernel_only(source: str, name: str) -> str:
    """The function of a kernel without what stands in front: prelude, helpers, and the entry point of a CPU program."""
    start = re.search(rf"^(?:extern \"C\" __global__|define [^\n]*@{re.escape(name)}_kernel_block\()", source, re.MULTILINE)
    end = source.find("\n}", start.start()) if start else -1
    return source[start.start():end + 2] if start and end > 0 else source


def _print_source(source: str, target: Any) -> None:
    """Print generated code, in colours on a terminal."""
    if not sys.stdout.isatty():
        print(source)
        return
    from rich.syntax import Syntax  # 25 ms

    _console().print(Syntax(source, "cuda" if target.is_cuda else "llvm", background_color="default", word_wrap=True))


def _gpu_count(kind: str) -> int:
    from tilelang.runtime.hip_driver import driver_of  # 102 ms

    try:
        return driver_of(kind).device_count()
    except RuntimeError:
        return 0


def _demo_target(asked: str) -> tuple[str, bool]:
    """(target, whether it is a GPU of this machine).  Without a requested target: the GPU if it is usable, else the CPU."""
    from tilelang.runtime import nvrtc  # 105 ms

    kinds = ("cuda", "hip") if asked == "auto" else (asked,)
    kind = next((k for k in kinds if k in ("cuda", "hip") and _gpu_count(k)), "")
    if not kind:
        return asked, False
    if importlib.util.find_spec("torch") is None:
        lacks = "torch, whose tensors the demo takes there"
    elif kind == "cuda" and not nvrtc.available():
        lacks = "NVRTC: pip install 'tilelang-py[cuda]', or set CUDA_HOME to a CUDA toolkit"
    elif kind == "hip" and importlib.util.find_spec("ziglang") is None:
        lacks = "a compiler for HIP: pip install 'tilelang-py[hip]'"
    else:
        return asked, True
    if asked != "auto":
        raise LookupError(f"the GPU needs {lacks}")
    print(f"on the CPU: the GPU that is here needs {lacks}", file=sys.stderr)
    return "cpu", False


def _demo_inputs(kernel: Any, n: int, dtype: str, on_gpu: bool) -> tuple[Any, Any, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(dtype) for _ in range(2))
    if not on_gpu:
        return a, b, lambda: kernel(a, b)
    import torch

    ta, tb = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    return a, b, lambda: kernel(ta, tb)


def _demo_check(run: Callable[[], Any], a: Any, b: Any, dtype: str) -> tuple[float, float]:
    got = run()
    got = np.asarray(got.cpu() if hasattr(got, "cpu") else got).astype(np.float64)
    want = a.astype(np.float64) @ b.astype(np.float64)
    # The tolerance allows for float32 accumulation over K and one rounding to the output type.
    eps = {"float16": 2**-11, "float32": 2**-24, "bfloat16": 2**-8}[dtype]
    k = a.shape[1]
    bound = 4 * 2**-24 * k**0.5 * float(np.abs(a).max() * np.abs(b).max()) * 8 + eps * float(np.abs(want).max())
    return float(np.abs(got - want).max()), bound


def _time(run: Callable[[], Any], on_gpu: bool) -> list[float]:
    """Seconds of 3 to 50 runs, for 2 s."""
    from tilelang.jit.timing import clock_for  # 2 ms

    clock = clock_for("cuda" if on_gpu else "cpu", cache_size=0)
    run()
    (once,) = clock.measure(run, 1, False)
    return [ms / 1e3 for ms in clock.measure(run, max(3, min(50, int(2000 / max(once, 1e-3)))), False)]


def compile_(args: argparse.Namespace) -> int:
    """Compile a kernel and print its report: instructions, schedule, registers, shared memory."""
    program = find_program(args.file, _settings(args.set))
    start = time.perf_counter()
    kernel = tilelang.compile(program, target=_target(args))
    print(f"{program.name} for {kernel.target}: {(time.perf_counter() - start) * 1e3:.0f} ms")
    report = kernel.report()
    print(report)
    if args.output:
        pathlib.Path(args.output).write_text(kernel.get_kernel_source(), encoding="utf-8")
        print(f"source written to {args.output}")
    return 0


def export(args: argparse.Namespace) -> int:
    """Write a kernel for C programs: shared library, object, header, JSON of the launch, CMakeLists.txt and a sample."""
    label, found = find_kernel(args.file)
    program = program_of(args.file, found, _settings(args.set))
    options: dict[str, Any] = {"target": args.target}
    if hasattr(found, "is_lazy_mode"):  # what the decorator says; the command line says where to
        options |= {k: getattr(found, k) for k in ("pass_configs", "compile_flags")}
        options["out_idx"] = found.out_idx if found.is_lazy_mode() else None
        options["target"] = found.target if args.target == "auto" and found.target else args.target
    archs = args.arch.split(",") if args.arch else []
    if archs:
        options["target"] = {"kind": "cuda", "arch": archs[0]}
    name = args.name or label
    library = tilelang.compile(program, **options).export(args.output, name, archs, args.ptx)
    for file in (library.name, f"{name}.o", f"{name}.h", f"{name}.json", "CMakeLists.txt", "main.c"):
        print(library.with_name(file))
    return 0


def show(args: argparse.Namespace) -> int:
    """Print what a kernel is compiled to: its source, IR, layouts or report."""
    program = find_program(args.file, _settings(args.set))
    from tilelang.ir import to_text  # 59 ms
    from tilelang.jit.inspect import layouts_after, program_after, sources_of  # 931 ms

    if args.plot:
        args.what = "layout"
    if args.what == "report":
        print(tilelang.compile(program, target=_target(args)).report())
    elif args.what in ("source", "host"):
        from tilelang.target import Target  # 1 ms

        _print_source(sources_of(program, _target(args))[args.what == "host"],
                      Target("cpu" if args.what == "host" else _target(args)))
    elif args.what == "ir":
        print(to_text(program_after(program, _target(args), args.after)))
    else:
        layouts = list(layouts_after(program, _target(args)))
        if not layouts:
            print("no shared or fragment buffers")
        for name, layout in layouts:
            print(f"{name}: {layout!r}" + ("" if args.plot else f"\n{layout}\n"))
        for path in _plotted(layouts, args.plot) if args.plot else ():
            print(f"picture: {path}")
    return 0


def _plotted(layouts: list[tuple[str, Any]], file: str) -> Iterator[str]:
    """Draw each distinct layout into one .html page, or into files of another kind: FILE for one layout, else FILE-BUFFER.

    Yields the paths."""
    from tilelang.jit.display import distinct, layouts_html  # 1 ms
    from tilelang.layout.picture import draw_files, picture_of  # 2 ms

    path = pathlib.Path(file)
    kind = path.suffix[1:]
    if kind == "html":
        path.parent.mkdir(parents=True, exist_ok=True)
        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>{path.stem}</title>\n{layouts_html(layouts, None, 'open')}\n"
        path.write_text(page, encoding="utf-8")
        yield f"{path.resolve()} (open it in a browser)"
        return
    drawn = distinct(layouts)
    for name, layout in drawn.items():
        stem = path.stem if len(drawn) == 1 else f"{path.stem}-{name.replace(', ', '-')}"
        yield from draw_files(picture_of(layout, name, one_stage=True), str(path.parent), stem, (kind,))


def _picture_file(name: str) -> str:
    """A file name of a kind that --plot writes."""
    if not name.endswith((".html", ".svg", ".pdf", ".png")):
        raise argparse.ArgumentTypeError(f"{name}: pictures are .html, .svg, .pdf or .png files; a program comes first")
    return name


def simulate(args: argparse.Namespace) -> int:
    """Run a program on random inputs by the device simulator, and say whether the reference interpreter agrees."""
    from tilelang.jit.inspect import simulate_program  # 600 ms

    program = find_program(args.file, _settings(args.set))
    ok, report = simulate_program(program, args.arch or "sm_80", seed=args.seed)
    print(report)
    return 0 if ok else 1


def bench(args: argparse.Namespace) -> int:
    """Measure the time of each phase of a compilation."""
    from tilelang.jit.inspect import compile_times  # 848 ms

    print("the GEMM of `demo`, float16, 4096 x 4096 x 4096, tiles of 128 x 128 x 32 in 3 stages")
    for line in compile_times(lambda: _demo_factory().get_tir(4096, 4096, 4096), args.arch or "sm_90a", args.repeat):
        print(line)
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Report what this machine can do, and how to install what is missing."""
    from rich.markup import escape  # 11 ms
    from rich.table import Column, Table  # 12 ms

    from tilelang.jit.inspect import machine_facts  # 583 ms

    table = Table("part", "state", Column("what it gives, or how to get it", overflow="fold"))
    for part, state, hint in machine_facts():
        table.add_row(escape(part), escape(state), escape(hint))
    _console().print(table)
    return 0


def library(args: argparse.Namespace) -> int:
    """List what of the library runs where: element types and machines."""
    from rich.table import Table  # 12 ms

    from tilelang.library.support import MACHINES, support_rows  # 1 ms

    table = Table("function", "elements", *MACHINES)
    for row in support_rows():
        table.add_row(*row)
    _console().print(table)
    return 0


def puzzles(args: argparse.Namespace) -> int:
    """Learn the language: exercises that are checked on this machine, without a GPU."""
    from tilelang.tools.puzzles.command import run  # 15 ms

    return run(args.action, args.which, args.dir)


def _count(text: str) -> int:
    """An integer >= 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, found {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of `python -m tilelang` and of the command `tilelang`."""
    parser = argparse.ArgumentParser(
        prog="tilelang" if pathlib.Path(sys.argv[0]).stem == "tilelang" else "python -m tilelang",
        description="Compile, inspect, run and check tile kernels.",
        epilog="start with `%(prog)s demo`; `%(prog)s COMMAND --help` shows the arguments of a command")
    parser.add_argument("--version", action="version", version=f"tilelang {tilelang.__version__}")
    sub = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        about = (run.__doc__ or "").strip()
        p = sub.add_parser(name, help=about, description=about)
        p.set_defaults(run=run)
        return p

    p = command("demo", demo)
    p.add_argument("--size", type=_count, default=1024, help="M = N = K (default 1024)")
    p.add_argument("--target", default="auto", help="auto, cpu, cuda or hip (default auto: the GPU if there is one)")
    p.add_argument("--dtype", choices=["float16", "float32"], help="default float16 on a GPU, float32 on the CPU")
    p.add_argument("--source", action="store_true", help="print the code of the kernel behind the result")
    for name, run in (("compile", compile_), ("export", export), ("show", show), ("simulate", simulate)):
        p = command(name, run)
        p.add_argument("file", help="Python file with a @tilelang.jit function or a @T.prim_func; FILE:NAME if it has several")
        p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a value for an argument of the "
                       "function, or for one of its T.const dimensions: --set M=512 --set dtype=float16")
        if name != "simulate":
            p.add_argument("--target", default="auto", help="auto, cpu, cuda or hip (default auto: the GPU if there is one, "
                           "else the CPU)")
        p.add_argument("--arch", help={
            "simulate": "simulate this GPU: sm_80 (default), gfx942, sm_90a, …",
            "export": "for these GPUs, present or not: sm_80,sm_90a; a call takes the best that its device runs"}.get(
                name, "compile for this GPU, present or not: sm_80, gfx942, sm_90a, …"))
        if name == "export":
            p.add_argument("-o", "--output", required=True, metavar="DIR", help="folder, made if it is not there")
            p.add_argument("--name", help="of the C function (default: the kernel's name in the file)")
            p.add_argument("--ptx", action="store_true", help="add PTX, which GPUs later than these compile")
        if name == "compile":
            p.add_argument("--output", help="write the kernel source to this file")
        if name == "show":
            p.add_argument("--what", choices=["source", "host", "ir", "layout", "report"], default="source",
                           help="source: the generated code (default); host: the code that checks arguments and launches; "
                           "ir: the program after a pass; layout: where the elements of each buffer are; report: "
                           "instructions, schedule and resources")
            p.add_argument("--after", help="with --what ir: the pass after which to print (default: the last)")
            p.add_argument("--plot", metavar="FILE", type=_picture_file, nargs="?", const="layouts.html",
                           help="draw the layouts into this file (.html, .svg, .pdf or .png; default layouts.html); implies "
                           "--what layout")
        if name == "simulate":
            p.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default 0)")
    p = command("bench", bench)
    p.add_argument("what", choices=["compile"], help="the time of each phase of a compilation")
    p.add_argument("--arch", help="architecture (default sm_90a)")
    p.add_argument("--repeat", type=_count, default=5, help="repetitions (default 5)")
    command("doctor", doctor)
    command("library", library)
    p = command("puzzles", puzzles)
    p.add_argument("action", nargs="?", default="list", help="start writes the files, list (default) shows your progress",
                   choices=["list", "start", "show", "hint", "check", "picture", "solution", "notebook"])
    p.add_argument("which", nargs="?", default="", help="number or name of a puzzle (default: the first that is not solved)")
    p.add_argument("--dir", default="puzzles", help="the folder of your files and your progress (default: puzzles)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status.  User errors are printed without a trace: 2.  Interrupted: 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # prints unencodable characters as \\u2026
            stream.reconfigure(errors="backslashreplace")
    try:
        args = build_parser().parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` closed the pipe; flushing the rest at the end of the process must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (TileLangError, LookupError, OSError, MemoryError) as e:
        print(in_colours(str(e)), file=sys.stderr)
        return 2
