"""The two simulators: `run_tile` interprets tile programs (the reference), `run_device` runs lowered programs by thread."""

from .device.run import Report, run_device
from .reference.run import run_tile

__all__ = ["Report", "run_device", "run_tile"]
