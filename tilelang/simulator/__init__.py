"""The two simulators: `run_tile` interprets tile programs (the reference), `run_device` runs lowered programs by thread."""

from .device.run import Report, run_device, run_device_ranks
from .reference.run import run_tile, run_tile_ranks

__all__ = ["Report", "run_device", "run_device_ranks", "run_tile", "run_tile_ranks"]
