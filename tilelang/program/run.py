"""Compiled programs: the tile programs of an operator graph, compiled and called in order; sources kept on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilelang.env import env
from tilelang.errors import TileLangError, error, register
from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.parser import parse
from tilelang.ir.printer import to_text
from tilelang.jit.compiling import as_here, compile, run_parallel
from tilelang.language.tracing.prim_func import PrimFunc
from tilelang.language.tracing.source_text import from_source
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest
from tilelang.target import Target

from .graph import Graph, Node
from .sizes import bound

register("program-device", RuntimeError, "the arrays of a call of a program lie on different devices",
         "move them to one device", expected="arrays on one device")

_disk = DiskCache("programs")


class Recipe:
    """A lowered program.

    source: the text of a module of tile programs.  steps: (kernel, inputs, outputs), names of buffers.  inputs, outputs: of the
    program.  buffers: what kernels write -> (sizes as text, element type).  kernels: their IR as text, read faster than the
    source is traced; None before it is known.
    """

    def __init__(self, source: str, steps: Sequence[Sequence[Any]], inputs: Sequence[str], outputs: Sequence[str],
                 buffers: Mapping[str, tuple[Sequence[str], str]], kernels: Sequence[str] | None = None) -> None:
        self.source, self.steps = source, [(k, tuple(i), tuple(o)) for k, i, o in steps]
        self.inputs, self.outputs, self.buffers, self.kernels = tuple(inputs), tuple(outputs), dict(buffers), kernels

    def as_meta(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        return {"source": self.source, "steps": self.steps, "inputs": self.inputs, "outputs": self.outputs,
                "buffers": self.buffers, "kernels": [to_text(f.func) for f in self.functions()]}

    def functions(self) -> tuple[PrimFunc, ...]:
        """The tile programs, in the order of the steps."""
        if self.kernels is not None:
            return tuple(PrimFunc(parse(text)) for text in self.kernels)
        names = ", ".join(k for k, _, _ in self.steps)
        return tuple(from_source(f"{self.source}\n\nsteps_in_order = ({names},)\n", "steps_in_order"))


def recipe_of(graph: Graph, sizes: Mapping[str, int] | None, target: Target) -> Recipe:
    """The lowered program, from disk where it was lowered before."""
    key = digest(["program", compiler_stamp(), graph.text(), sorted((sizes or {}).items()), str(target)])
    kept = _disk.load(key) if env.is_cache_enabled() else None
    if kept is not None:
        return Recipe(**kept.meta)
    from .lower import lower  # 30 ms, which programs found on disk do not need

    made = lower(graph, sizes, target)
    steps = [(s.kernel, s.inputs, s.outputs) for s in made.steps]
    buffers = {name: ([str(s) for s in shape], str(dt)) for name, (shape, dt) in made.buffers.items()}
    out = Recipe(made.source, steps, made.inputs, made.outputs, buffers)
    if env.is_cache_enabled():
        _disk.store(key, Entry(out.as_meta()))
    return out


def target_of(arrays: Sequence[Any], asked: Any) -> Any:
    """The target of a call: the one asked for, else the environment's, else the device of the arrays."""
    if asked is not None:
        return asked
    default = env.get_default_target()
    if default != "auto":
        return default
    devices = {str(getattr(x, "device", "cpu")) for x in arrays if hasattr(x, "shape")}
    if len(devices) > 1:
        raise error("program-device", f"arrays lie on {' and '.join(sorted(devices))}", found=", ".join(sorted(devices)))
    return "auto" if devices and not next(iter(devices)).startswith("cpu") else "c"


class Runner:
    """A compiled program: called with the arrays of its inputs, it gives its results.

    recipe: the tile programs.  kernels: compiled, in order.
    """

    def __init__(self, graph: Graph, recipe: Recipe, target: Any, configs: Mapping[Any, Any] | None) -> None:
        self.graph, self.recipe = graph, recipe
        functions = recipe.functions()

        def compiled(f: Any, results: list[int] | None) -> Any:
            return compile(f, results, target=target, pass_configs=configs)

        jobs = [as_here(partial(compiled, f, self._results(s))) for f, s in zip(functions, recipe.steps)]
        self.kernels = [jobs[0]()] if len(jobs) == 1 else run_parallel(jobs, None, False)
        self.direct = self._direct()

    def _results(self, step: tuple[str, tuple[str, ...], tuple[str, ...]]) -> list[int] | None:
        """The parameters that a kernel returns; None where it is given them, because one has no axes."""
        count = len(step[1])
        return list(range(count, count + len(step[2]))) if all(self.recipe.buffers[n][0] for n in step[2]) else None

    def _direct(self) -> Any:
        """The kernel that takes the inputs and gives the results as the program does, if it is one."""
        r = self.recipe
        alike = len(r.steps) == 1 and r.steps[0][1:] == (r.inputs, r.outputs) and all(n.shape for n in self.graph.inputs)
        alike = alike and self._results(r.steps[0]) is not None
        return self.kernels[0] if alike else None

    def __call__(self, arrays: Sequence[Any]) -> Any:
        try:
            return self._called(arrays)
        except TileLangError as e:  # kernels take dense arrays: others are copied
            dense = [_dense(x) for x in arrays]
            if e.kind != "kernel-argument" or all(x is y for x, y in zip(arrays, dense)):
                raise
            return self._called(dense)

    def _called(self, arrays: Sequence[Any]) -> Any:
        if self.direct is not None:
            out = self.direct(*arrays)
            return out if self.graph.single else tuple(out) if isinstance(out, (list, tuple)) else (out,)
        like = next((x for x in arrays if hasattr(x, "shape")), None)
        held = {n: _as_array(x, node, like) for n, x, node in zip(self.recipe.inputs, arrays, self.graph.inputs)}
        for kernel, step in zip(self.kernels, self.recipe.steps):
            given = [held[n] for n in step[1]]
            if self._results(step) is not None:
                made = kernel(*given)
                held.update(zip(step[2], made if isinstance(made, (list, tuple)) else [made]))
                continue
            sizes = bound(self.graph, [getattr(x, "shape", ()) for x in arrays])
            results = [_empty(*self.recipe.buffers[n], sizes, like) for n in step[2]]
            kernel(*given, *results)
            held.update(zip(step[2], results))
        out = [held[n] for n in self.recipe.outputs]
        return out[0] if self.graph.single else tuple(out)


def _empty(shape: Sequence[str], dt: str, sizes: Mapping[str, int], like: Any) -> Any:
    """An array for a kernel to write, beside the others."""
    extents = [int(eval(s, {"__builtins__": {}}, dict(sizes))) for s in shape]
    if like is None or isinstance(like, np.ndarray):
        return np.empty(extents, numpy_dtype(dt))
    return like.new_empty(extents, dtype=dtype(dt).as_torch())


def _dense(x: Any) -> Any:
    """The array itself where it is row-major without gaps, else a copy."""
    if isinstance(x, np.ndarray):
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)
    return x if not hasattr(x, "is_contiguous") or x.is_contiguous() else x.contiguous()


def _as_array(x: Any, n: Node, like: Any) -> Any:
    """A number of a call as an array beside the others."""
    if hasattr(x, "shape") and not isinstance(x, np.generic):
        return x
    value = np.asarray(x, numpy_dtype(n.dtype))
    if like is None or isinstance(like, np.ndarray):
        return value
    return like.new_tensor(x, dtype=n.dtype.as_torch())
