"""Kernels of the library compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def kernels(call: Callable[[], Any], arch: str = "sm_90a", sms: int = 132) -> list[dict[str, Any]]:
    """What the compiler reports of each kernel that `call` launches for tensors of the CPU; nothing runs."""
    from tilelang.library import place

    target, found = {"kind": "cuda", "arch": arch}, []
    real, of = place.compile, place.Place.of

    def compiled(program: Any, **options: Any) -> Callable[..., None]:
        options.update(target=target, execution_backend=None)
        found.extend(real(program, **options).report_data["kernels"])
        return lambda *args: None

    place.KERNELS.clear()
    place.FITTING.clear()
    place.compile = compiled
    at = place.Place(place.Target(target), None, sms)
    place.Place.of = staticmethod(lambda *args: at)  # type: ignore[method-assign]
    try:
        call()
    finally:
        place.compile, place.Place.of = real, of  # type: ignore[method-assign]
        place.KERNELS.clear()
        place.FITTING.clear()
    return found
