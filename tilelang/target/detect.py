"""Registries of target detectors, which resolve the target "auto", and of normalizers, which add spellings of targets.

A detector returns a target if its kind of machine is available.  Detectors are called in order of priority, then of
registration.  A normalizer converts a spelling that the package does not know into a target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tilelang.errors import error, register
from tilelang.ir.record import record

register("target-not-found", ValueError, 'no target detector finds a machine for target="auto"',
         'name the target: target="cpu", or {"kind": "cuda", "arch": "sm_90a"} to compile for a GPU that is not here',
         expected="a detector that finds a target")
register("target-detector", ValueError, "a target detector or normalizer is registered under a name that is taken",
         "pass override=True to replace it", expected="a name that is free")

Detector = Callable[[], Any]
Normalizer = Callable[[Any], Any]


@record
class _Entry:
    name: str
    run: Callable[..., Any]
    priority: int


_detectors: dict[str, _Entry] = {}
_normalizers: dict[str, _Entry] = {}
_guard = threading.Lock()


def _add(table: dict[str, _Entry], what: str, name: str, fn: Any, priority: int, override: bool) -> Any:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a target {what} is a string, found {name!r}")
    if fn is None:
        return lambda f: _add(table, what, name, f, priority, override)
    if not callable(fn):
        raise TypeError(f"a target {what} is a function, found {type(fn).__name__}")
    with _guard:
        if name in table and not override:
            raise error("target-detector", f"a target {what} named {name!r} is registered already",
                        found=f"{name!r}, which is registered")
        table[name] = _Entry(name, fn, priority)
    return fn


def register_target_detector(name: str, detector: Detector | None = None, *, priority: int = 0,
                             override: bool = False) -> Any:
    """Register a detector for "auto": a function without arguments that returns a target (any form but "auto") or None.

    Also a decorator: `@register_target_detector("mine", priority=10)`.  The package registers "cuda" and "hip" (priority 0) and
    "cpu" (-100, always available).  Returns the detector.  Raises TypeError if it is not a function, ValueError if the name is
    taken and override is not set.
    """
    return _add(_detectors, "detector", name, detector, priority, override)


def register_target_normalizer(name: str, normalizer: Normalizer | None = None, *, priority: int = 0,
                               override: bool = False) -> Any:
    """Register a normalizer: a function of the user's spelling that returns a target in a known form, or None.

    It is called with strings and dicts that the package itself would reject, and returns None if it does not know the spelling.
    Also a decorator.  Returns the normalizer.  Raises as register_target_detector does.
    """
    return _add(_normalizers, "normalizer", name, normalizer, priority, override)


def unregister_target_detector(name: str) -> None:
    """Remove a detector; no effect if there is none of this name."""
    with _guard:
        _detectors.pop(name, None)


def unregister_target_normalizer(name: str) -> None:
    """Remove a normalizer; no effect if there is none of this name."""
    with _guard:
        _normalizers.pop(name, None)


def _ordered(table: dict[str, _Entry]) -> list[_Entry]:
    with _guard:
        return sorted(table.values(), key=lambda e: -e.priority)


def list_target_detectors() -> list[str]:
    """Names of the detectors, in the order in which "auto" calls them."""
    return [e.name for e in _ordered(_detectors)]


def list_target_normalizers() -> list[str]:
    """Names of the normalizers, in the order in which they are called."""
    return [e.name for e in _ordered(_normalizers)]


def detected() -> Any:
    """The target of the first detector that does not return None.  Raises target-not-found."""
    asked = _ordered(_detectors)
    for e in asked:
        found = e.run()
        if found is not None:
            if isinstance(found, str) and found == "auto":
                raise error("target-not-found", f'the target detector {e.name!r} answers "auto", which is the question',
                            expected="a target", found='"auto"')
            return found
    raise error("target-not-found", "No registered target detector found an available target; asked: "
                f"{', '.join(e.name for e in asked) or 'none'}",
                found=f"none of {', '.join(e.name for e in asked) or 'no detectors'}")


def normalized(spec: Any) -> Any:
    """The target that the first matching normalizer makes of an unknown spelling; None if no normalizer knows it."""
    for e in _ordered(_normalizers):
        found = e.run(spec)
        if found is not None:
            return found
    return None
