"""The device simulator: runs the lowered program thread by thread."""

from .run import Report, run_device

__all__ = ["Report", "run_device"]
