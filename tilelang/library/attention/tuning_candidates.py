"""The candidates that tuning times for attention: tiles of queries and keys, and for decode steps the number of splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import tuning
from ..agreement import attention_agrees
from ..arrays import type_name, zeros, zeros_laid
from ..place import Place
from ..tuning import Candidate, Task

MOST = 8  # choices of a call: each takes a second to compile


def rounded(sizes: tuple[int, ...]) -> list[int]:
    """The sizes rounded up to powers of two."""
    return [1 << (n - 1).bit_length() if n else 0 for n in sizes]


def tuned_choice(name: str, key: Any, call: tuple[Sequence[Any], float], seq_k: int, at: Place, results: tuple[Any, Any, Any],
                 choices: Sequence[Any], run: Callable[[Any], Callable[..., None]]) -> Any:
    """The fastest choice for a call of attention on the device at hand.

    call: arrays, q, k and v first, and scale. seq_k: most keys of a sequence. results: shape and strides of the result, and
    shape of the logarithms or None. choices: the model's first, each (tile,) or (tile, splits). run: choice -> f(arrays, scale,
    out, lse).
    """
    (q, k, v, *_), (shape, steps, of_logs) = call[0], results

    def outputs() -> tuple[Any, Any]:
        return zeros_laid(q, shape, steps, type_name(q)), None if of_logs is None else zeros(q, of_logs, "float32")

    def config(choice: Any) -> dict[str, Any]:
        tile, *more = choice
        return {**asdict(tile), **({"splits": more[0]} if more else {})}

    def make(choice: Any) -> Callable[..., None]:
        return partial(run(choice), *call)

    about = f"{name} {tuple(q.shape)} by {tuple(k.shape)} {type_name(q)}"
    return tuning.tuner.choose(Task(about, [name, key], q, at.target, at.backend,
                                    lambda: [Candidate(config(c), lambda c=c: make(c), c) for c in choices], outputs,
                                    attention_agrees(q, k, v, call[1], seq_k))).choice
