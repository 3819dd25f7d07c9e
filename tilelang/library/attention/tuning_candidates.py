"""The candidates that tuning times for attention: tiles of queries and keys, and for decode steps the number of splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tilelang.target import Target

from ..arrays import type_name, zeros, zeros_laid
from ..tuning import Candidate, Task

MOST = 8  # choices of a call: each takes a second to compile


def rounded(sizes: tuple[int, ...]) -> list[int]:
    """The sizes rounded up to powers of two."""
    return [1 << (n - 1).bit_length() if n else 0 for n in sizes]


def attention_task(name: str, key: Any, arrays: tuple[Any, Any, Any], agree: Callable[[Any, Any], bool],
                   where: tuple[Target, str | None], results: tuple[Any, Any, Any], choices: Sequence[Any],
                   make: Callable[[Any], Callable[..., None]]) -> Task:
    """The tuning task of a call of attention.

    arrays: q, k, v. where: (target, execution backend). results: shape and strides of the result, and shape of the logarithms
    or None. choices: the model's first, each (tile,) or (tile, splits). make: choice -> run(out, lse).
    """
    q = arrays[0]
    shape, steps, of_logs = results

    def outputs() -> tuple[Any, Any]:
        return zeros_laid(q, shape, steps, type_name(q)), None if of_logs is None else zeros(q, of_logs, "float32")

    def config(choice: Any) -> dict[str, Any]:
        tile, *more = choice
        return {**asdict(tile), **({"splits": more[0]} if more else {})}

    about = f"{name} {tuple(q.shape)} by {tuple(arrays[1].shape)} {type_name(q)}"
    return Task(about, [name, key], q, *where, lambda: [Candidate(config(c), lambda c=c: make(c), c) for c in choices], outputs,
                agree)
