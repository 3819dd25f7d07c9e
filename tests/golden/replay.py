"""Digests of the source that the compiler generates for the library's kernels and for the examples.

    python tests/golden/replay.py                          digests of all cases, as JSON
    python tests/golden/replay.py --only "flash_decode"    cases whose names contain this
    python tests/golden/replay.py --texts DIR              the sources themselves, one file per kernel, to compare two trees

A refactor leaves the digests equal; tests/golden/test_replay.py compares them with code.json.  What is digested is the source
without comments, #line and file positions.  Each digest is followed by a second one of the source with its variables
renumbered, so that a change of names is told from a change of code.

Everything is reached by public names, so that a comparison of two trees survives a move of files: run this file with
PYTHONPATH set to the package's folder.  Nothing is compiled to machine code and nothing of the library is run; examples
are run in small sizes on the CPU, for the programs they compile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGETS: dict[str, Any] = {**{arch: {"kind": "cuda", "arch": arch} for arch in ("sm_80", "sm_90a")}, "cpu": "cpu"}
# Generated LLVM depends on the processor's vectors: all digests are of one processor.
PROCESSOR = "skylake-avx512"
FEATURES = ("avx", "avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "bmi", "bmi2", "f16c", "fma")
CORES = 8

Asked = tuple[Any, dict[str, Any]]  # a program and its pass configs
Case = Callable[[], dict[str, list[Asked]]]  # the programs by target
Digests = dict[str, dict[str, list[str]]]  # case -> target -> "kernel digest digest-without-names"


def settle_machine() -> None:
    """One processor and one number of cores, whatever this machine has."""
    import llvmlite.binding as llvm

    class Features(dict):
        def flatten(self) -> str:
            return ",".join(f"+{f}" for f in sorted(self))

    llvm.get_host_cpu_name = lambda: PROCESSOR
    llvm.get_host_cpu_features = lambda: Features.fromkeys(FEATURES, True)
    os.cpu_count = lambda: CORES  # type: ignore[assignment]
    if hasattr(os, "sched_getaffinity"):
        os.sched_getaffinity = lambda _: set(range(CORES))  # type: ignore[assignment]


# ---- digests -----------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\n]|\\.)*"'


def plain(code: str, language: str) -> str:
    """Source without comments, #line, blank lines and the places in files that messages name."""
    if language == "llvm":
        code = re.sub(rf"({_STRING})|;[^\n]*", lambda m: m[1] or "", code)
    else:
        code = re.sub(rf"({_STRING})|//[^\n]*|/\*.*?\*/", lambda m: m[1] or "", code, flags=re.S)
        code = re.sub(r"^\s*#line[^\n]*$", "", code, flags=re.M)
    code = re.sub(r"[\w./\\-]*\w\.py(?::\d+)+|[\w./\\-]*\w\.py\b", "FILE", code)
    return "\n".join(line.rstrip() for line in code.split("\n") if line.strip())


_NAME = re.compile(rf"{_STRING}|(::)?([%@]?[A-Za-z_][\w.]*)(\s*[(<])?")
_KEPT = set("""const int float double bool char short long unsigned signed void if else for while do return break continue
    struct template typename using namespace extern static inline constexpr volatile asm sizeof true false auto switch case
    half half_t bfloat16_t""".split())


def renumbered(code: str) -> str:
    """Source whose variables have numbers for names: called functions, types and keywords keep theirs."""
    numbers: dict[str, str] = {}

    def one(m: re.Match[str]) -> str:
        if m[2] is None or m[1] or m[3] or m[2] in _KEPT or m[2].endswith("_t") or m[2].startswith("__"):
            return m[0]
        return numbers.setdefault(m[2], f"v{len(numbers)}")

    return _NAME.sub(one, code)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- cases -------------------------------------------------------------------------------------------------------------


class Uncalled:
    """Stands for a compiled kernel: calls compute nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Programs:
    """tilelang.compile that, while a call of the library is looked at, only keeps what it is asked for."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.asked, self.recording = real, list[Asked](), False

    def compile(self, func: Any = None, *args: Any, **options: Any) -> Any:
        if not self.recording:
            return self.real(func, *args, **options)
        self.asked.append((func, dict(options.get("pass_configs") or {})))
        return Uncalled()


def library_cases() -> dict[str, Case]:
    """name -> target -> the programs with their pass configs that a call of the library compiles."""
    import tilelang
    import tilelang.jit

    programs = Programs(tilelang.compile)
    assert not any(m.startswith("tilelang.library.") for m in sys.modules), "the library took the real compile"
    tilelang.compile = tilelang.jit.compile = programs.compile

    def asked(call: Callable[[Any], Any], targets: tuple[str, ...]) -> dict[str, list[Asked]]:
        out, programs.recording = {}, True  # this is a process of its own: nobody sets it back
        for target in targets:
            programs.asked.clear()
            call(TARGETS[target])
            out[target] = list(programs.asked)
        return out

    from library_calls import CALLS

    return {name: partial(asked, call, targets) for name, (call, targets) in CALLS.items()}


def example_cases() -> dict[str, Case]:
    """The same of every check of examples/, whose programs are the same for all targets."""
    sys.path.insert(0, str(ROOT / "examples"))
    import checks
    import harness

    from tilelang.instrumentation import PassEventObserver, compile_pass_instrumentation

    class Started(PassEventObserver):
        def __init__(self) -> None:
            self.programs: list[Any] = []

        def on_pipeline_start(self, func: Any, target: Any) -> None:
            self.programs.append(func)

    def asked(check: Any) -> dict[str, list[Asked]]:
        watch = Started()
        with compile_pass_instrumentation(watch):
            getattr(checks.load(check.file), check.function)(
                on=harness.Place("cpu", "tile" if check.hopper else None), **check.small)
        return {target: [(p, {}) for p in watch.programs] for target in (("sm_90a",) if check.hopper else TARGETS)}

    return {f"{c.file} {c.function} " + ",".join(f"{k}={v}" for k, v in c.small.items()): partial(asked, c)
            for c in checks.CHECKS}


def sources(program: Any, config: dict[str, Any], target: str) -> list[tuple[str, str, str]]:
    """(kernel, language, source) of a program lowered for a target; a refusal is its error's kind."""
    import tilelang
    from tilelang.errors import TileLangError
    from tilelang.instrumentation import PassEventObserver, compile_pass_instrumentation
    from tilelang.transform import PassContext

    class Printed(PassEventObserver):
        def __init__(self) -> None:
            self.found: list[tuple[str, str, str]] = []

        def on_codegen(self, event: Any) -> None:
            self.found.append((event.name, event.language, event.code))

    watch = Printed()
    try:
        with compile_pass_instrumentation(watch), PassContext(config=config):
            tilelang.lower(program, target=TARGETS[target])
    except TileLangError as e:
        return [("refused", "", e.kind)]
    return watch.found


def digests_of(name: str, case: Case, texts: Path | None) -> dict[str, list[str]]:
    """Digests of a case by target."""
    out: dict[str, list[str]] = {}
    for target, asked in case().items():
        assert asked, f"{name} compiles nothing for {target}"
        lines = out[target] = []
        for program, config in asked:
            for kernel, language, code in sources(program, config, target):
                if kernel == "refused":
                    lines.append(f"refused {code}")
                    continue
                code = plain(code, language)
                lines.append(f"{kernel} {digest(code)} {digest(renumbered(code))}")
                if texts is not None:
                    file = re.sub(r"[^\w.=-]+", "_", f"{name} {target} {len(lines)} {kernel}")
                    (texts / (file + (".ll" if language == "llvm" else ".cu"))).write_text(code + "\n", encoding="utf-8")
    return out


def apart(work: Callable[[], Any]) -> Any:
    """What `work` gives in a fork of this process: caches of one case hide nothing from the next."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(write, "w", encoding="utf-8") as f:
                f.write(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as f:
        text = f.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a case fails")
    return json.loads(text)


def replay(only: Callable[[str], bool] = lambda name: True, texts: Path | None = None) -> Digests:
    """Digests of the cases whose names `only` accepts.  texts: a folder for the sources."""
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
    library = library_cases()
    warm_up()
    out = {name: apart(partial(digests_of, name, case, texts)) for name, case in library.items() if only(name)}
    return out | {name: digests_of(name, case, texts) for name, case in example_cases().items() if only(name)}


def warm_up() -> None:
    """Load what every case needs, once."""
    import tilelang.language as T

    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((64, 128), "float16"), C: T.Tensor((128, 128), "float16")):
        with T.Kernel(1, threads=128) as _:
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c, C)

    import tilelang.library as library

    for name in library.__all__:
        getattr(library, name)
    for target in TARGETS:
        sources(main, {}, target)


def as_text(digests: Digests) -> str:
    """JSON with a line for each case and target."""
    def targets(case: dict[str, list[str]]) -> str:
        return ",\n".join(f"    {json.dumps(t)}: {json.dumps(found)}" for t, found in case.items())

    lines = [f"  {json.dumps(name)}: {{\n{targets(case)}}}" for name, case in sorted(digests.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="cases whose names contain one of these, separated by |")
    p.add_argument("--share", default="1/1", help="i/n: every n-th case, from the i-th")
    p.add_argument("--texts", type=Path, help="a folder for the sources")
    p.add_argument("--out", type=Path, help="a file for the digests (default: standard output)")
    options = p.parse_args()
    wanted = [w for w in options.only.split("|") if w]
    part, parts = map(int, options.share.split("/"))

    def only(name: str) -> bool:
        return int(digest(name), 16) % parts == part - 1 and (not wanted or any(w in name for w in wanted))

    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    settle_machine()
    text = as_text(replay(only, options.texts))
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
