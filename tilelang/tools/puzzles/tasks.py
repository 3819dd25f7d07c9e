"""What each puzzle computes: its inputs, its result in NumPy, the error it may have, wrong results with known causes, rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilelang.ir import GLOBAL, Alloc, Func, Load, Parallel, walk
from tilelang.ir.record import record
from tilelang.ops import Gemm

Arrays = Mapping[str, np.ndarray]


@record
class Facts:
    """What a compiled kernel costs.  kernel: JSON facts of the lowered program.  run: the simulator's report."""

    kernel: Mapping[str, Any]
    run: Any


@record
class Task:
    """One puzzle's task.

    cases: values of its T.const.  inputs: makes the arguments, in the order of the parameters.  want: the result, in float64 or
    exact.  error: largest absolute error that an element may have.  traps: (what was done wrong, the result that this gives).
    rules: each returns what the program lacks, or "".  costs: the same for what was compiled.  arch: the simulated GPU.
    """

    cases: tuple[dict[str, int], ...]
    inputs: Callable[..., dict[str, np.ndarray]]
    want: Callable[[Arrays], np.ndarray]
    error: Callable[[Arrays], Any] = lambda a: 0
    traps: tuple[tuple[str, Callable[[Arrays], np.ndarray]], ...] = ()
    rules: tuple[Callable[[Func], str], ...] = ()
    costs: tuple[Callable[[Facts], str], ...] = ()
    arch: str = "sm_80"


def _normal(*shape: int, dtype: str = "float32", scale: float = 1.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + sum(shape))
    return (rng.standard_normal(shape) * scale).astype(dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _matmul(a: Arrays, b: str = "B") -> np.ndarray:
    return _wide(a["A"]) @ _wide(a[b])


def _matmul_error(a: Arrays) -> np.ndarray:
    """One rounding to float16, and float32 sums in any order."""
    return 2.0**-10 * np.abs(_matmul(a)) + 2.0**-20 * (np.abs(_wide(a["A"])) @ np.abs(_wide(a["B"]))) + 2.0**-24


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _attention(a: Arrays, scale: float = 0.125, padded: int = 0) -> np.ndarray:
    s = _wide(a["Q"]) @ _wide(a["K"]).T * scale
    p = _softmax(np.pad(s, ((0, 0), (0, padded))))
    return p[:, :s.shape[1]] @ _wide(a["V"])


def _weights(a: Arrays, low: int = 0, zero: int = 8) -> np.ndarray:
    p = a["P"]
    out = np.empty((p.shape[0], 2 * p.shape[1]))
    out[:, low::2], out[:, 1 - low::2] = p & 15, p >> 4
    return out - zero


def _quantised(a: Arrays, **wrong: int) -> np.ndarray:
    return _wide(a["A"]) @ (_weights(a, **wrong) * _wide(a["scales"])[:, None]).T


# ---- rules ----------------------------------------------------------------------------------------------------------
def tiles_are_small(most: int) -> Callable[[Func], str]:
    """No tile has more elements: a block must not hold a whole row."""
    def rule(func: Func) -> str:
        for n in walk(func.body, Alloc):
            elements = int(np.prod([int(d) for d in n.buffer.shape]))
            if elements > most:
                return f"the tile `{n.buffer.name}` has {elements} elements; a block must not hold more than {most} at any size"
        return ""
    return rule


def copied_once(*names: str) -> Callable[[Func], str]:
    """These tensors are read by tile operations and not element by element."""
    def rule(func: Func) -> str:
        for loop in walk(func.body, Parallel):
            for n in walk(loop.body, Load):
                if n.buffer.scope() == GLOBAL and n.buffer.name in names:
                    at = n.span.line if n.span else "?"
                    return f"`{n.buffer.name}` is read inside T.Parallel, at line {at}: copy a tile of it first"
        return ""
    return rule


def by_gemm(func: Func) -> str:
    """Tiles are multiplied by T.gemm, with an accumulator in float32."""
    gemms = list(walk(func.body, Gemm))
    if not gemms:
        return "no T.gemm: tensor cores multiply tiles"
    return next((f"T.gemm adds to `{g.c.buffer.name}`, which is {g.c.dtype}: an accumulator is float32" for g in gemms
                 if str(g.c.dtype) != "float32"), "")


def is_pipelined(f: Facts) -> str:
    """Asynchronous copies in at least three stages, within 48 KB of shared memory."""
    stages = f.kernel["stages"]
    if not any("cp.async" in name for name in f.kernel["instructions"].get("loads", {})):
        return "no copy is asynchronous: each step waits for its loads before it multiplies"
    if min(stages.values(), default=1) < 3:
        return f"tiles have {min(stages.values(), default=1)} stages, at least 3 are asked for"
    if f.kernel["shared_bytes"] > 48 * 1024:
        return f"{f.kernel['shared_bytes']} bytes of shared memory, at most {48 * 1024} are allowed"
    return ""


def no_bank_conflicts(f: Facts) -> str:
    """The simulator lost no pass through shared memory."""
    worst = [b for b in f.run.bank_conflicts if b.conflicts]
    places = "; ".join(f"{b.site.text} of `{b.site.name}`, line {b.site.span.line if b.site.span else '?'}: "
                       f"{b.wavefronts} passes, {b.ideal} without conflicts" for b in worst)
    return f"{f.run.conflicts} passes through shared memory are lost to bank conflicts ({places})" if worst else ""


def through_the_ring(f: Facts) -> str:
    """Loads are TMA copies of a warp group of its own."""
    if not any("tma" in name for name in f.kernel["instructions"].get("loads", {})):
        return "no T.tma_copy: the producer loads tiles by TMA into the ring"
    return ""


_SIZES = ({"M": 70, "N": 40, "K": 100}, {"M": 64, "N": 64, "K": 32})


def _matrices(M: int, N: int, K: int) -> dict[str, np.ndarray]:
    return {"A": _normal(M, K, dtype="float16"), "B": _normal(K, N, dtype="float16", seed=1)}


TASKS: dict[str, Task] = {
    "copy": Task(({"N": 256}, {"N": 300}), lambda N: {"A": _normal(N)}, lambda a: a["A"]),
    "add": Task(
        ({"M": 32, "N": 192}, {"M": 20, "N": 40}),
        lambda M, N: {"A": _normal(M, N, scale=2e4).clip(-6e4, 6e4).astype("float16"),
                      "B": _normal(M, N, scale=2e4, seed=1).clip(-6e4, 6e4).astype("float16")},
        lambda a: _wide(a["A"]) + _wide(a["B"]), lambda a: 2.0**-23 * np.abs(_wide(a["A"]) + _wide(a["B"])),
        traps=(("sums rounded to float16", lambda a: (_wide(a["A"]) + _wide(a["B"])).astype(np.float16)),
               ("A + A", lambda a: 2 * _wide(a["A"])), ("A - B", lambda a: _wide(a["A"]) - _wide(a["B"])))),
    "outer": Task(
        ({"M": 64, "N": 64}, {"M": 50, "N": 100}), lambda M, N: {"x": _normal(M), "y": _normal(N, seed=1)},
        lambda a: np.outer(_wide(a["x"]), _wide(a["y"])), lambda a: 2.0**-22 * np.abs(np.outer(a["x"], a["y"])),
        traps=(("x + y instead of x * y", lambda a: _wide(a["x"])[:, None] + a["y"]),), rules=(copied_once("x", "y"),)),
    "row_sums": Task(
        ({"M": 8, "N": 128}, {"M": 10, "N": 600}), lambda M, N: {"X": 1 + _normal(M, N, dtype="float16")},
        lambda a: _wide(a["X"]).sum(1), lambda a: 2.0**-20 * np.abs(_wide(a["X"])).sum(1),
        traps=(("the last tile of each row alone", lambda a: _wide(a["X"])[:, (a["X"].shape[1] - 1) // 64 * 64:].sum(1)),
               ("rows without their last, partial tile", lambda a: _wide(a["X"])[:, :a["X"].shape[1] // 64 * 64].sum(1)),
               ("the first tile of each row alone", lambda a: _wide(a["X"])[:, :64].sum(1))), rules=(tiles_are_small(256),)),
    "histogram": Task(
        ({"N": 256}, {"N": 300}), lambda N: {"X": np.random.default_rng(N).integers(0, 16, (N,)).astype(np.int32)},
        lambda a: np.bincount(a["X"], minlength=16),
        traps=(("elements behind the end counted as zeros",
                lambda a: np.bincount(np.pad(a["X"], (0, -len(a["X"]) % 128)), minlength=16)),)),
    "softmax": Task(
        ({"M": 4, "N": 128}, {"M": 3, "N": 100}),
        lambda M, N: {"X": _normal(M, N, scale=3) + np.arange(M)[:, None].astype("f4") * 200},
        lambda a: _softmax(_wide(a["X"])), lambda a: 1e-5 * _softmax(_wide(a["X"])) + 1e-7,
        traps=(("exponentials that are not divided by their sum",
                lambda a: np.exp(_wide(a["X"]) - a["X"].max(1, keepdims=True))),
               ("powers of 2 instead of exponentials", lambda a: _softmax(_wide(a["X"]) * np.log(2))))),
    "matmul": Task(_SIZES, _matrices, _matmul, _matmul_error, rules=(by_gemm,), traps=(
        ("the results of the last tile along K alone", lambda a: _wide(a["A"])[:, 96:] @ _wide(a["B"])[96:]),
        ("results without the last, partial tile along K", lambda a: _wide(a["A"])[:, :96] @ _wide(a["B"])[:96]))),
    "pipelined": Task(_SIZES[:1], _matrices, _matmul, _matmul_error, rules=(by_gemm,), costs=(is_pipelined,), traps=(
        ("the results of the last tile along K alone", lambda a: _wide(a["A"])[:, 96:] @ _wide(a["B"])[96:]),)),
    "transpose": Task(({},), lambda: {"X": _normal(64, 64)}, lambda a: a["X"].T, costs=(no_bank_conflicts,)),
    "attention": Task(
        ({"S": 100},), lambda S: {n: _normal(S, 64, dtype="float16", scale=x, seed=k)
                                            for k, (n, x) in enumerate({"Q": 2, "K": 1, "V": 1}.items())},
        _attention, lambda a: np.full(a["Q"].shape, 4e-3), rules=(by_gemm, tiles_are_small(4096)), traps=(
            ("scores without the factor 1/8", lambda a: _attention(a, 1.0)),
            ("rows behind the end of K with a score of 0", lambda a: _attention(a, padded=-len(a["Q"]) % 64)))),
    "quantised": Task(
        ({"M": 40, "N": 50, "K": 128},),
        lambda M, N, K: {"A": _normal(M, K, dtype="float16"),
                         "P": np.random.default_rng(K).integers(0, 256, (N, K // 2)).astype(np.uint8),
                         "scales": np.abs(_normal(N)) + np.float32(0.1)},
        _quantised, lambda a: 1e-4 * a["scales"] * np.abs(_wide(a["A"])).sum(1, keepdims=True), rules=(by_gemm,), traps=(
            ("the high four bits taken for the even columns", lambda a: _quantised(a, low=1)),
            ("q instead of q - 8", lambda a: _quantised(a, zero=0)),
            ("weights without their scales", lambda a: _wide(a["A"]) @ _weights(a).T))),
    "scan": Task(
        ({"M": 4, "N": 128}, {"M": 6, "N": 200}), lambda M, N: {"X": _normal(M, N)}, lambda a: np.cumsum(_wide(a["X"]), 1),
        lambda a: 1e-5 * np.cumsum(np.abs(_wide(a["X"])), 1), rules=(tiles_are_small(256),), traps=(
            ("sums without the element itself", lambda a: np.cumsum(_wide(a["X"]), 1) - a["X"]),
            ("each tile scanned by itself, without a carry", lambda a: np.concatenate(
                [np.cumsum(_wide(a["X"][:, k:k + 64]), 1) for k in range(0, a["X"].shape[1], 64)], 1)))),
    "stream": Task(({"N": 160}, {"N": 32}), lambda N: {"X": _normal(N, 64)}, lambda a: 2 * a["X"], costs=(through_the_ring,),
                   arch="sm_90a", traps=(("X itself, not doubled", lambda a: a["X"]),)),
}
