"""Comparisons within bounds that tests derive from types and lengths."""

from __future__ import annotations

from typing import Any

import torch

E16, EBF, E32 = 2.0**-11, 2.0**-8, 2.0**-24  # half a unit in the last place of 1, by type


def wide(x: Any) -> Any:
    """x in float64."""
    return x.double()


def within(got: Any, want: Any, bound: Any, what: str = "result") -> None:
    """Equal shapes, and |got - want| <= bound everywhere (a tensor or a number; NaN equals NaN)."""
    want = torch.as_tensor(want)
    assert tuple(got.shape) == tuple(want.shape), f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    g, w, b = got.double(), want.double(), torch.as_tensor(bound).double()
    bad = ~(((g - w).abs() <= b) | (g == w) | (g.isnan() & w.isnan()))
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} differ, first at {at}: got {g[at].item()}, expected "
            f"{w[at].item()} within {b.expand_as(g)[at].item():.3g}"
        )


def equal(got: Any, want: Any, what: str = "result") -> None:
    """Equal types, shapes and values."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    within(got, want, 0.0, what)


def mm_bound(a: Any, b: Any, eps: float, want: Any, k: int) -> Any:
    """The error of a product of length k whose exact terms are added in float32, rounded once to a type of half unit eps."""
    return (wide(a).abs() @ wide(b).abs()) * (k + 2) * E32 + wide(want).abs() * eps * 1.01 + 1e-7
