"""Compiled programs: the tile programs of an operator graph, compiled and called in order; sources kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

import numpy as np

from tilelang.env import env
from tilelang.errors import TileLangError, error, register
from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.printer import to_text
from tilelang.jit.collecting import rarely_collected
from tilelang.jit.compiling import as_here, compile, run_parallel
from tilelang.jit.requests import resolve_target
from tilelang.language.tracing.prim_func import PrimFunc
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest

from .graph import Graph, Node, arrays_among, size_at
from .recipe import Recipe

register("program-device", RuntimeError, "the arrays of a call of a program lie on different devices",
         "move them to one device", expected="arrays on one device")

_disk = DiskCache("programs")


def recipe_of(graph: Graph, sizes: Mapping[str, int] | None, target: Any, choices: Sequence[Any] = ()) -> Recipe:
    """The lowered program, from disk where it was lowered before.  choices: of a tuner (plan.Choice)."""
    chosen = resolve_target(target, None)[0]
    chosen_for = [sorted((sizes or {}).items()), str(chosen), *map(astuple, choices)]
    key = digest(["program", compiler_stamp(), graph.text(), *chosen_for])
    kept = _disk.load(key) if env.is_cache_enabled() else None
    if kept is not None:
        return Recipe(**kept.meta)
    from .lower import lower  # 30 ms, which programs found on disk do not need

    out = lower(graph, sizes, chosen, choices)
    out.kernels = [to_text(f.func) for f in out.functions()]  # no places of the source in warnings: users cannot change it
    if env.is_cache_enabled():
        _disk.store(key, Entry(vars(out)))
    return out


def target_of(arrays: Sequence[Any], asked: Any) -> Any:
    """The target of a call: the one asked for, else the environment's, else the device of the arrays."""
    if asked is not None:
        return asked
    default = env.get_default_target()
    if default != "auto":
        return default
    devices = {str(getattr(x, "device", "cpu")) for x in arrays_among(arrays)}
    if len(devices) > 1:
        raise error("program-device", f"arrays lie on {' and '.join(sorted(devices))}", found=", ".join(sorted(devices)))
    return "auto" if devices and not next(iter(devices)).startswith("cpu") else "c"


def tuned(graph: Graph, target: Any, configs: Mapping[Any, Any] | None, arrays: Sequence[Any]) -> Runner:
    """The program with the plans that are the fastest for a call, one group of kernels after another; kept on disk.

    Where the arrays lie on no GPU, or the call is captured in a CUDA graph, the cost models decide.
    """
    from tilelang.library.tuning import Candidate, Task, tuner  # 20 ms, for tuned programs

    from .plan import CHOICES, MODEL, Choice  # 30 ms, with all that lowers programs

    like, chosen = next(iter(arrays_among(arrays)), None), resolve_target(target, None)[0]
    able = like is not None and tuner.can(like, chosen, None)
    choices: list[Choice] = []
    for k in range(recipe_of(graph, None, target).groups if able else 0):
        others: dict[str, Choice] = {}
        for c in (MODEL, *CHOICES):
            text = recipe_of(graph, None, target, [*choices, c]).source
            others.setdefault("\n".join(x for x in text.splitlines() if not x.lstrip().startswith("#")), c)

        def run(c: Choice) -> Any:
            runner = Runner(graph, target, configs, [*choices, c])
            return lambda out: out.__setitem__(slice(None), [runner(arrays)] if graph.single else runner(arrays))

        candidates = [Candidate(asdict(c), partial(run, c), c) for c in others.values()]
        key = ["program", graph.text(), [list(getattr(x, "shape", ())) for x in arrays], list(map(astuple, choices))]
        task = Task(f"{graph.name}, kernel {k + 1}", key, like, chosen, None, lambda candidates=candidates: candidates,  # type: ignore[misc]
                    lambda: ([],), _agree)
        choices.append(tuner.choose(task).choice)
    out = Runner(graph, target, configs, choices)
    out.final = able is not None
    return out


def _agree(found: tuple[list[Any]], wanted: tuple[list[Any]]) -> bool:
    """Whether the results of two plans are as close as the order of their sums allows."""
    for x, y in zip(found[0], wanted[0]):
        kind, close = str(x.dtype), x == y
        if "float" in kind and 0 not in x.shape:
            size = abs(y[abs(y) < np.inf])
            close |= (x != x) & (y != y)
            bound = 2.0 ** (-6 if "16" in kind else -16) * (float(size.max()) if len(size) else 0.0)
            close |= (abs(x) < np.inf) & (abs(x - y) <= bound)
        if not bool(close.all()):
            return False
    return True


class Runner:
    """A compiled program: called with the arrays of its inputs, it gives its results.

    recipe: the tile programs.  kernels: compiled, in order.  final: whether later calls run it too.
    """

    def __init__(self, graph: Graph, target: Any, configs: Mapping[Any, Any] | None = None,
                 choices: Sequence[Any] = ()) -> None:
        self.graph, self.final = graph, True
        with rarely_collected():
            self.recipe = r = recipe_of(graph, None, target, choices)
            found = iter(r.functions())

        def compiled(f: PrimFunc, reads: Sequence[str], writes: Sequence[str]) -> Any:
            results = [len(reads) + k for k in range(len(writes))] if self._returns(reads, writes) else None
            return compile(f, results, target=target, pass_configs=configs)

        jobs = dict[Any, Any]()
        keys = [(step[0], self._returns(*step[1:])) for step in r.steps]  # several steps may call one kernel
        for key, step in zip(keys, r.steps):
            f = None if step[0] in r.loops else next(found)
            jobs.setdefault(key, as_here(partial(compiled, f, *step[1:]) if f is not None else
                                         partial(_Walk, graph.nodes[r.loops[step[0]]], target, configs)))
        long = {name: len(text) for name, text in zip((s[0] for s in r.steps if s[0] not in r.loops), r.kernels or ())}
        order = sorted(jobs, key=lambda key: -long.get(key[0], 0))  # a long text takes long: it is not left for the end
        work = [jobs[key] for key in order]
        made = dict(zip(order, [job() for job in work] if len(work) < 2 else run_parallel(work, None, False)))
        self.kernels = [made[key] for key in keys]
        # the kernel that takes the inputs and gives the results as the program does, if it is one
        alone = len(r.steps) == 1 and not r.loops and list(r.steps[0][1:]) == [r.inputs, r.outputs]
        alone = alone and self._returns(r.inputs, r.outputs)
        self.direct = self.kernels[0] if alone and all(n.shape for n in graph.inputs) else None

    def _returns(self, reads: Sequence[str], writes: Sequence[str]) -> bool:
        """Whether a kernel makes the arrays of its results: not one without axes, nor beside arrays that it does not get."""
        return bool(reads or not self.graph.inputs) and all(self.recipe.buffers[n][0] for n in writes)

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
        like = next(iter(arrays_among(arrays)), None)
        held = {n: _as_array(x, node, like) for n, x, node in zip(self.recipe.inputs, arrays, self.graph.inputs)}
        captured = getattr(like, "is_cuda", False) and sys.modules["torch"].cuda.is_current_stream_capturing()
        with _Fork(branches(self.recipe.steps)) if captured else nullcontext() as fork:
            for k, (kernel, (_, reads, writes)) in enumerate(zip(self.kernels, self.recipe.steps)):
                given = [held[n] for n in reads]
                with fork.step(k) if fork is not None else nullcontext():
                    if isinstance(kernel, _Walk):
                        results = kernel(given, self._empty(writes, arrays, like))
                    elif self._returns(reads, writes):
                        made = kernel(*given)
                        results = made if isinstance(made, (list, tuple)) else [made]
                    else:
                        results = self._empty(writes, arrays, like)
                        kernel(*given, *results)
                held.update(zip(writes, results))
        none = [n for n in self.recipe.outputs if n not in held]  # results without an element: no kernel writes them
        held.update(zip(none, self._empty(none, arrays, like)))
        out = [held[n] for n in self.recipe.outputs]
        return out[0] if self.graph.single else tuple(out)

    def _empty(self, names: Sequence[str], arrays: Sequence[Any], like: Any) -> list[Any]:
        """Arrays for buffers of the recipe, beside the others."""
        sizes = self.graph.bound([getattr(x, "shape", ()) for x in arrays]) if names else {}
        return [_empty(*self.recipe.buffers[n], sizes, like) for n in names]


def branches(steps: Sequence[tuple[str, list[str], list[str]]]) -> list[tuple[int, list[int]]]:
    """(branch of each step, the steps of other branches that it waits for): a step follows one that it reads from."""
    out: list[tuple[int, list[int]]] = []
    made: dict[str, int] = {}
    last: list[int] = []  # steps of the branches
    for k, (_, reads, writes) in enumerate(steps):
        needs = sorted({made[n] for n in reads if n in made})
        branch = next((b for b, s in enumerate(last) if s in needs), len(last))
        last[branch:branch + 1] = [k]
        out.append((branch, [p for p in needs if out[p][0] != branch]))
        made.update(dict.fromkeys(writes, k))
    return out


class _Fork:
    """Streams for the branches of a call that goes into a CUDA graph: kernels that do not need each other run side by side.

    What they allocate is freed when all branches have joined the first stream again.
    """

    def __init__(self, order: Sequence[tuple[int, list[int]]]) -> None:
        self.cuda, self.order = sys.modules["torch"].cuda, order
        self.ends: list[Any] = []  # of steps

    def __enter__(self) -> _Fork:
        main = self.cuda.current_stream()
        self.streams = [main, *(self.cuda.Stream() for _ in range(max(b for b, _ in self.order)))]
        for s in self.streams[1:]:
            s.wait_stream(main)
        return self

    @contextmanager
    def step(self, k: int) -> Iterator[None]:
        branch, waits = self.order[k]
        for p in waits:
            self.streams[branch].wait_event(self.ends[p])
        with self.cuda.stream(self.streams[branch]):
            yield
        self.ends.append(self.streams[branch].record_event())

    def __exit__(self, *error: object) -> None:
        for s in self.streams[1:]:
            self.streams[0].wait_stream(s)


class _Walk:
    """A loop whose steps are kernels that the host starts, one step after another.  Called with the first states, sequences and
    other tensors, and arrays for the results."""

    def __init__(self, n: Node, target: Any, configs: Mapping[Any, Any] | None) -> None:
        self.attrs, self.step = n.attrs, Runner(n.attrs["body"], target, configs)
        self.sizes = Graph(n.inputs, ())  # whose shapes give the length

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
        carried, scanned = self.attrs["carried"], self.attrs["scanned"]
        states, many, rest = given[:carried], given[carried:carried + scanned], given[carried + scanned:]
        for t in range(size_at(self.attrs["length"], self.sizes.bound([x.shape for x in given]))):
            out = self.step([*states, *(x[t] for x in many), *rest])
            states = out[:carried]
            for whole, one in zip(results[carried:], out[carried:]):
                whole[t] = one
        for last, state in zip(results, states):  # without a step, the first states
            last[...] = state
        return results


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
