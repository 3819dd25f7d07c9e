"""Two simulators: `run_tile` executes tile programs (the oracle), `run_device` lowered ones, thread by thread."""

from .device.run import Report, run_device
from .reference.run import run_tile

__all__ = ["Report", "run_device", "run_tile"]
