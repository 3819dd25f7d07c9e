"""Checks and pictures of programs as passes: each is called with options and returns a function of a program.

    tilelang.analysis.NestedLoopChecker()(program)      # raises where the program breaks the rule
    lower_trace(program, [tilelang.analysis.ASTPrinter(), "legalize"])

The function takes a PrimFunc, its Func, or a module with one program, and returns its argument.  Compiling a program makes
the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.layout.picture import draw_files, picture_of, wanted_formats
from tilelang.tools.lower_trace import only_program, target_of
from tilelang.tools.pass_visualizer import outline_text
from tilelang.transform.legalize.legalize import check_parallel
from tilelang.jit.inspect import layouts_after

Analysis = Callable[[Any], Any]


def _analysis(name: str, run: Callable[[Any], None]) -> Analysis:
    def analyse(func_or_mod: Any) -> Any:
        run(only_program(func_or_mod))
        return func_or_mod

    analyse.__name__ = analyse.__qualname__ = name
    return analyse


def ASTPrinter() -> Analysis:
    """Prints the outline of a program: parameters, buffers, and its statements, nested, with their lines."""
    return _analysis("ASTPrinter", lambda func: print(outline_text(func)))


def _checker(name: str, about: str, *kinds: str) -> Callable[[], Analysis]:
    def make() -> Analysis:
        return _analysis(name, lambda func: check_parallel(func, kinds))

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"Rejects {about}: ValueError ({', '.join(kinds)}), at the user's line."
    return make


NestedLoopChecker = _checker(
    "NestedLoopChecker", "parallel loops that hold another one beside other statements, a pipelined loop, or a tile operation",
    "parallel-nested", "parallel-pipelined", "parallel-tile-op")
FragmentLoopChecker = _checker(
    "FragmentLoopChecker", "fragments indexed by a parallel loop of run-time extent", "parallel-symbolic")
ParallelLocalIndexChecker = _checker(
    "ParallelLocalIndexChecker", "per-thread arrays indexed by a variable of T.Parallel", "parallel-local")


def LayoutVisual(formats: str = "txt", save_directory: str = "./tmp", target: Any = None) -> Analysis:
    """Shows the layout of every shared and fragment buffer, as compiled for a CUDA target.

    formats: comma-separated txt (printed), pdf, png, svg (files <save_directory>/<program>_<buffer>.<format>), or all.
    Raises ValueError for an unknown format.
    """
    words = ["txt", "pdf", "png", "svg"] if formats == "all" else [f.strip() for f in formats.split(",")]
    files = wanted_formats(",".join(w for w in words if w != "txt")) if words != ["txt"] else ()

    def show(func: Any) -> None:
        for name, layout in layouts_after(func, target_of(target)):
            if "txt" in words:
                print(f"{name}: {layout!r}\n{layout}\n")
            if files:
                for path in draw_files(picture_of(layout, name), save_directory, f"{func.name}_{name}", files):
                    print(f"layout of {name}: {path}")

    return _analysis("LayoutVisual", show)


__all__ = ["ASTPrinter", "FragmentLoopChecker", "LayoutVisual", "NestedLoopChecker", "ParallelLocalIndexChecker"]
