"""Tools to inspect programs and layouts.

plot_layout, plot_fragment_tv: pictures of layouts.  Analyzer: FLOPs and bytes of a program.  lower_trace: the changes that
passes make.  pass_timing: the time of passes.  pass_visualizer: a page with both."""

from importlib import import_module as _import_module
from typing import Any as _Any

from .analyzer import AnalysisResult, Analyzer
from .plot_layout import plot_fragment_tv, plot_layout

_MODULES = ("cuda", "lower_trace", "pass_timing", "pass_visualizer")


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"{__name__}.{name}")


__all__ = ["AnalysisResult", "Analyzer", "plot_fragment_tv", "plot_layout"]
