"""Where each module of transform/schedule/ and transform/registers/ changes something: the folders of the programs.

    python tests/golden/acting_modules.py                  all cases of replay.py and the plain programs (minutes)
    python tests/golden/acting_modules.py --only attention cases whose names contain this
    python tests/golden/acting_modules.py --every 4        a quarter of the cases

Every public function of a module is watched while programs are lowered for sm_80 and sm_90a.  A pass acts where the program
behind it differs.  Another function acts where it returns something that is not one of its arguments, not empty and not None;
a class acts where it is made.  A module that acts in one folder only is marked: it is gone, or a decision gives its gain.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
PACKAGES = "tilelang.transform.schedule", "tilelang.transform.registers"
ARCHITECTURES = "sm_80", "sm_90a"


class Watch:
    """acted: module -> folder -> number of programs.  folder: of the program that is being lowered."""

    def __init__(self) -> None:
        self.folder, self.programs = "", 0
        self.acted: dict[str, dict[str, set[int]]] = {}
        for package in PACKAGES:
            for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
                module = importlib.import_module(f"{package}.{found.name}")
                self.acted[module.__name__] = defaultdict(set)
                for name, what in list(vars(module).items()):
                    if not name.startswith("_") and getattr(what, "__module__", "") == module.__name__:
                        self.watch(module, what)

    def note(self, module: Any) -> None:
        if self.folder:  # some objects are made when a module is loaded
            self.acted[module.__name__][self.folder].add(self.programs)

    def watch(self, module: Any, what: Any) -> None:
        """Replace a public function wherever it is used; of a class, how it is made."""
        if isinstance(what, type):
            make = what.__init__

            def made(this: Any, *args: Any, **options: Any) -> None:
                self.note(module)
                make(this, *args, **options)

            what.__init__ = made  # type: ignore[misc]
            return
        if not callable(what):
            return

        @functools.wraps(what)
        def called(*args: Any, **options: Any) -> Any:
            out = what(*args, **options)
            if changed(what, args, out):
                self.note(module)
            return out

        for user in [m for name, m in sys.modules.items() if name.startswith("tilelang.transform")]:
            for name, value in list(vars(user).items()):
                if value is what:
                    setattr(user, name, called)
                elif isinstance(value, tuple) and any(x is what for x in value):
                    setattr(user, name, tuple(called if x is what else x for x in value))


def changed(what: Callable[..., Any], args: tuple[Any, ...], out: Any) -> bool:
    if hasattr(what, "needs"):
        return out.body is not args[0].body
    return out is not None and out is not False and out != () and out != [] and not any(out is a for a in args)


def cases(only: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what gives its (program, pass configs, architecture)) of the replayed programs and the corpus."""
    import replay
    from suite.plain import CORPUS

    def of(case: Callable[[], Any]) -> Any:
        return [(p, config, target) for target, asked in case().items() if target in ARCHITECTURES for p, config in asked]

    library = replay.library_cases()
    yield from ((n, functools.partial(of, case)) for n, case in library.items() if only in n)
    yield from ((n, functools.partial(of, case)) for n, case in replay.example_cases().items() if only in n)
    yield from ((n, lambda p=p: [(p.program(**p.full), p.config, "sm_90a")])  # type: ignore[misc]
                for n, p in CORPUS.items() if only in n)


def lowered(watch: Watch, name: str, case: Callable[[], Any], first: int) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """Programs of a case, and where the modules acted."""
    import tilelang.transform.pipeline as pipeline
    from tilelang.errors import TileLangError
    from tilelang.target import Target

    watch.programs = first
    for program, config, arch in case():
        func = getattr(program, "func", program)
        watch.folder, watch.programs = folder_of(func), watch.programs + 1
        try:
            pipeline.lower(func, Target({"kind": "cuda", "arch": arch}), config)
        except TileLangError as e:
            print(f"{name} for {arch} is refused: {e.kind}", file=sys.stderr)
    return watch.programs - first, {m: {f: sorted(n) for f, n in x.items()} for m, x in watch.acted.items()}


def folder_of(func: Any) -> str:
    """The folder of the file that a program was written in."""
    from tilelang.ir import Launch, walk

    span = func.span or next((x.span for x in walk(func.body, Launch) if x.span is not None), None)
    path = Path(span.file) if span is not None else Path("?")
    root = HERE.parents[1]
    path = path.resolve().relative_to(root) if path.resolve().is_relative_to(root) else path
    return str(path if path.parts[0] == "benchmarks" else path.parent)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="")
    p.add_argument("--every", type=int, default=1)
    o = p.parse_args()
    from replay import apart

    watch, count = Watch(), 0
    total: dict[str, dict[str, set[int]]] = {m: defaultdict(set) for m in watch.acted}
    for turn, (name, case) in enumerate(cases(o.only)):
        if turn % o.every:
            continue
        try:
            n, acted = apart(functools.partial(lowered, watch, name, case, count))
        except RuntimeError:
            print(f"{name} fails", file=sys.stderr)
            continue
        count += n
        for module, folders in acted.items():
            for folder, found in folders.items():
                total[module][folder] |= set(found)
    print(f"{count} programs")
    for module, places in sorted(total.items()):
        alone = "" if len(places) > 1 else "  <- in one folder" if places else "  <- nowhere"
        print(f"{module.removeprefix('tilelang.transform.')}: {len(set().union(*places.values()))} programs{alone}")
        print("    " + ", ".join(f"{f} {len(x)}" for f, x in sorted(places.items())))


if __name__ == "__main__":
    main()
