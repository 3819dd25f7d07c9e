"""Looking at programs and layouts: plot_layout draws, Analyzer counts."""

from .analyzer import AnalysisResult, Analyzer
from .plot_layout import plot_layout

__all__ = ["AnalysisResult", "Analyzer", "plot_layout"]
